"""``out=``: a layer's output written to a tensor that is there, a slice of channels of a larger one say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyphase.problem.layouts import ALIGNMENT, dense_strides
from polyphase.torch_op.memory_format import output_channels_last
from polyphase.torch_op.validate import Layer, output_size


def check(name: str, out: Any, tensors: Sequence[Tensor | None], layer: Layer, batched: bool) -> None:
    """Raise TypeError or RuntimeError where ``out`` is not what a layer's output can be written to.

    ``tensors``: input, weight, bias and the operands of an epilogue; the input as the user gave it.
    """
    input, weight = tensors[:2]
    assert input is not None
    assert weight is not None
    if not isinstance(out, Tensor):
        raise TypeError(f"{name}: out must be a Tensor, not {type(out).__name__}")
    batch = input.shape[:1] if batched else ()
    spatial = output_size(input.shape[2 if batched else 1 :], layer)
    shape = (*batch, weight.shape[1] * layer.groups, *spatial)
    if tuple(out.shape) != shape:
        raise RuntimeError(f"{name}: out must have the output's shape {shape}, got {tuple(out.shape)}")
    if out.dtype != input.dtype or out.device != input.device:
        raise RuntimeError(
            f"{name}: out must have {input.dtype} on {input.device} as the output has, got {out.dtype} on {out.device}"
        )
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (out, *tensors)):
        raise RuntimeError(
            f"{name}: functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )


def call_for(
    out: Tensor, tensors: tuple[Tensor, Tensor, Tensor | None], epilogue: str, layer: Layer
) -> Callable[..., Tensor] | None:
    """What computes the output in ``out`` itself, and in others of its shape and strides that `is_free` allows.

    ``out`` and the input have a batch. None where kernels cannot write to it.
    """
    from polyphase import runtime

    images = image_stride(out, tensors[0], tensors[1])
    if images is None:
        return None
    gaps = None if images == dense_strides(tuple(out.shape), False)[0] else images
    return runtime.epilogue_call(*tensors, epilogue, *layer[1:], image_stride=gaps)


def is_free(out: Tensor, read: Sequence[Tensor | None]) -> bool:
    """Whether kernels may write to ``out`` now: it is aligned, and no tensor that they read shares its memory."""
    if out.data_ptr() % ALIGNMENT:
        return False
    storage = out.untyped_storage().data_ptr()
    return storage not in [each.untyped_storage().data_ptr() for each in read if each is not None]


def written(
    call: Callable[..., Tensor],
    out: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    operands: Sequence[Tensor],
) -> Tensor:
    """``out``, written by a call from `call_for`; ``tensors``: input, with a batch, weight and bias."""
    call(*tensors, operands, out if out.dim() == tensors[0].dim() else out.unsqueeze(0))
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def image_stride(out: Tensor, input: Tensor, weight: Tensor) -> int | None:
    """Elements from one image to the next in ``out``, where kernels can write to it: it lies as a new output would.

    But for gaps between images, as between those of a slice of channels. None where it lies otherwise.
    """
    shape, strides = tuple(out.shape), out.stride()
    of_five = dense_strides(shape, False)
    dense = of_five[:2] + of_five[7 - len(shape) :]
    lies_so = all(one == other or size == 1 for one, other, size in zip(strides[1:], dense[1:], shape[1:]))
    if not lies_so or output_channels_last(input, weight):
        return None
    if shape[0] == 1:
        return dense[0]
    return strides[0] if strides[0] >= dense[0] else None


def starts_aligned(channels: Sequence[Any], shape: Sequence[Any], dtype: torch.dtype) -> Any:
    """Whether a slice of a larger tensor starts where kernels may write to it: at a multiple of 32 bytes.

    ``channels``: of the slices before it; ``shape``: its own. Sizes may be symbolic, and so is then what is returned.
    """
    return sum(channels) * math.prod(shape[2:]) * dtype.itemsize % ALIGNMENT == 0


_COPIED_AT_ONCE = 1 << 18  # elements: the host takes longer for views than the GPU for fewer


def copy_to_slice(part: Tensor, out: Tensor) -> None:
    """Copy a tensor to a slice of channels, by elements of 16 bytes: PyTorch copies slices one element at a time."""
    if part.numel() > _COPIED_AT_ONCE and part.is_contiguous() and out[0].is_contiguous():
        try:
            out.flatten(1).view(torch.complex128).copy_(part.flatten(1).view(torch.complex128))
            return
        except RuntimeError:  # no multiples of 16 bytes
            pass
    out.copy_(part)
