"""``out=``: a layer's output written to a tensor that is there, a slice of channels of a larger one say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from polyphase.problem.layouts import ALIGNMENT, dense_strides
from polyphase.torch_op import operators
from polyphase.torch_op.memory_format import output_channels_last
from polyphase.torch_op.validate import FLOATING, Layer, output_size


def write(
    name: str,
    out: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    operands: Sequence[Tensor],
    epilogue: str,
    layer: Layer,
    otherwise: Callable[[], Tensor],
    batched: bool,
) -> Tensor:
    """``out``, with the layer's output behind an epilogue, "" for none, in it.

    ``tensors``: input, with a batch, weight and bias. ``otherwise`` gives the output as a new tensor, without a batch
    where ``batched`` is false.

    Raises:
        TypeError, RuntimeError: ``out`` is no tensor, of another shape, dtype or device, or derivatives are recorded.
    """
    input, weight, bias = tensors
    _check(name, out, tensors, operands, layer, batched)
    batch = out if batched else out.unsqueeze(0)
    if _by_kernels((input, weight, *(() if bias is None else (bias,)), *operands, batch)):
        _write_by_kernels(batch, tensors, tuple(operands), epilogue, layer)
        return out
    with torch.no_grad():
        return out.copy_(otherwise())


def _check(
    name: str,
    out: Any,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    operands: Sequence[Tensor],
    layer: Layer,
    batched: bool,
) -> None:
    input, weight, bias = tensors
    if not isinstance(out, Tensor):
        raise TypeError(f"{name}: out must be a Tensor, not {type(out).__name__}")
    channels = weight.shape[1] * layer.groups
    batch = (input.shape[0],) if batched else ()
    shape = (*batch, channels, *output_size(input.shape[2:], layer))
    if tuple(out.shape) != shape:
        raise RuntimeError(f"{name}: out must have the output's shape {shape}, got {tuple(out.shape)}")
    if out.dtype != input.dtype or out.device != input.device:
        raise RuntimeError(
            f"{name}: out must have {input.dtype} on {input.device} as the output has, got {out.dtype} on {out.device}"
        )
    if torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (input, weight, bias, out, *operands)
    ):
        raise RuntimeError(
            f"{name}: functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )


def _by_kernels(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels are called past PyTorch's dispatcher, which has no operator for this."""
    input = tensors[0]
    if not input.is_cuda or torch.version.cuda is None or input.numel() == 0 or input.dtype not in FLOATING:
        return False
    if torch.compiler.is_compiling() or torch._C._is_tracing() or forward_ad._current_level >= 0:
        return False
    return not operators.is_heard() and all(map(operators.is_plain, tensors))


def _write_by_kernels(
    out: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    operands: tuple[Tensor, ...],
    epilogue: str,
    layer: Layer,
) -> None:
    """Kernels write to ``out`` itself, or to a new tensor that is copied."""
    from polyphase import runtime

    images = image_stride(out, tensors[0], tensors[1])
    storage = out.untyped_storage().data_ptr()
    read = (*tensors, *operands)
    if images is None or any(each is not None and each.untyped_storage().data_ptr() == storage for each in read):
        call = runtime.epilogue_call(*tensors, epilogue, *layer[1:])
        out.copy_(call(*tensors, operands))
        return
    gaps = None if images == dense_strides(tuple(out.shape), False)[0] else images
    runtime.epilogue_call(*tensors, epilogue, *layer[1:], image_stride=gaps)(*tensors, operands, out)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def image_stride(out: Tensor, input: Tensor, weight: Tensor) -> int | None:
    """Elements from one image to the next in ``out``, where kernels can write to it: it lies as a new output would.

    But for gaps between images, as between those of a slice of channels. None where it lies otherwise, or starts at an
    address that is less aligned than a new tensor's.
    """
    shape, strides = tuple(out.shape), out.stride()
    of_five = dense_strides(shape, False)
    dense = of_five[:2] + of_five[7 - len(shape) :]
    lies_so = all(one == other or size == 1 for one, other, size in zip(strides[1:], dense[1:], shape[1:]))
    if not lies_so or out.data_ptr() % ALIGNMENT or output_channels_last(input, weight):
        return None
    if shape[0] == 1:
        return dense[0]
    return strides[0] if strides[0] >= dense[0] else None
