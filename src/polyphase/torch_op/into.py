"""``out=``: a layer's output written to an existing tensor, for example a slice of a larger tensor's channels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyphase.problem.layouts import ALIGNMENT, Strides, dense_strides, five
from polyphase.torch_op.memory_format import output_channels_last
from polyphase.torch_op.validate import Layer, output_size


def check(name: str, out: Any, tensors: Sequence[Tensor | None], layer: Layer, batched: bool) -> None:
    """Raises TypeError or RuntimeError if a layer's output cannot be written to ``out``.

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
    """The call that writes the output to ``out`` itself, and to others of its shape and strides that are `is_free`.

    ``out`` and the input have a batch. None if kernels cannot write to ``out``.
    """
    from polyphase import runtime

    shape, last = tuple(out.shape), output_channels_last(*tensors[:2])
    strides = slice_strides(shape, out.stride(), last, out.dtype.itemsize)
    if strides is None or strides[0] < max(map(operator.mul, five(shape)[1:], strides[1:])):
        return None
    gaps = None if strides == dense_strides(shape, last) else strides
    return runtime.forward_call(*tensors, *layer[1:], epilogue=epilogue, out_strides=gaps)


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


def slice_strides(
    shape: Sequence[Any],
    strides: Sequence[Any],
    channels_last: bool,
    itemsize: int,
    equal: Callable[[Any, Any], bool] = operator.eq,
) -> Strides | None:
    """The strides of a tensor to which kernels can write a layer's output; None if they cannot.

    It must have a new output's layout, except for gaps between images, as a slice of channels has, or in channels_last
    between pixels, if vectors of channels stay aligned. Sizes may be symbolic; ``equal`` compares two.
    """
    images, channels, *spatial = shape
    pixel = channels
    if channels_last:
        along = (stride for size, stride in zip(reversed(spatial), reversed(strides)) if size != 1)
        pixel = next(along, channels)
        apart = (pixel,) if images == 1 else (pixel, strides[0])
        if not all(equal(each * itemsize % ALIGNMENT, 0) or equal(each % channels, 0) for each in apart):
            return None
    wanted = dense_strides((images, pixel, *spatial), channels_last)
    of_dims = (wanted[1], *wanted[5 - len(spatial) :])
    lies_so = all(size == 1 or equal(one, other) for size, one, other in zip(shape[1:], strides[1:], of_dims))
    return (wanted[0] if images == 1 else strides[0], *wanted[1:]) if lies_so else None


def is_writable(part: Tensor, channels_last: bool) -> bool:
    """Whether kernels can write to a slice of a new tensor, with outputs in channels_last or not."""
    itemsize = part.dtype.itemsize
    lies_so = slice_strides(part.shape, part.stride(), channels_last, itemsize) is not None
    return lies_so and part.storage_offset() * itemsize % ALIGNMENT == 0


_COPIED_AT_ONCE = 1 << 18  # most elements of a plain copy: for fewer, views take longer on the host than it on the GPU


def copy_to_slice(part: Tensor, out: Tensor) -> None:
    """Copies a tensor to a slice of channels, by elements of 16 bytes: PyTorch copies slices one element at a time."""
    if part.numel() > _COPIED_AT_ONCE:
        pair = [part, out] if part.is_contiguous() else [part.movedim(1, -1), out.movedim(1, -1)]
        if pair[0].is_contiguous() and pair[1][0].stride() == pair[0][0].stride():
            pair = [each.flatten(1) for each in pair]
        try:
            source, target = (each.view(torch.complex128) for each in pair)
            target.copy_(source)
            return
        except RuntimeError:  # not multiples of 16 bytes
            pass
    out.copy_(part)
