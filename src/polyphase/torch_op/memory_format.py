"""The memory format of a result: PyTorch's rule, decided from sizes and strides alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# If PyTorch computes outside the libraries that support channels_last, results stay contiguous: double precision on
# CUDA, and three dimensions of all types but these on the CPU. There PyTorch's choice also depends on the processor
# (oneDNN computes bfloat16 with AVX-512, and float16 with AVX-512 FP16), the number of threads and the size of the
# problem. This rule depends on none of them, so that a model exported on one machine has the same formats on another:
# float32 and bfloat16 are channels_last_3d everywhere, float16 nowhere.
_DOUBLE = (torch.float64, torch.complex128)
_CPU_CHANNELS_LAST_3D = (torch.float32, torch.bfloat16, torch.complex64)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether PyTorch considers ``tensor`` channels_last (4-D; 3-D is one row of 4-D) or channels_last_3d (5-D).

    The rule is that of C++'s ``Tensor::suggest_memory_format``, which has no public Python form: strides must ascend in
    the order channel, last spatial dimension, ..., first spatial dimension, batch. Sizes of 1 leave the strides
    ambiguous; ties fall to contiguous. (``Tensor.is_contiguous(memory_format=...)`` answers another question: there,
    both formats can be true of one tensor.)
    """
    dims = tensor.dim()
    if not 3 <= dims <= 5:
        return False
    sizes, strides = tensor.shape, tensor.stride()
    if strides[-1] < strides[1]:  # the common contiguous case, without the loop
        return False
    if strides[1] == 0:
        return False
    least = 0
    for dim in (1, *range(dims - 1, 1, -1), 0):
        if sizes[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * sizes[dim]
    return True


def output_channels_last(first: Tensor, second: Tensor) -> bool:
    """Whether the result of ``first`` and ``second``, the two operands of any of the three passes, is channels_last.

    In one dimension only ``second`` decides: PyTorch makes a signal contiguous first, but not the weight.
    (A signal of one element may be contiguous already, and yet have the strides of channels_last.)
    """
    dims = first.dim()
    if not (is_channels_last(second) or (is_channels_last(first) and (dims != 3 or first.is_contiguous()))):
        return False
    if first.is_cuda:
        return first.dtype not in _DOUBLE
    return dims != 5 or not first.is_cpu or first.dtype in _CPU_CHANNELS_LAST_3D


def empty_output(shape: Sequence[int], first: Tensor, second: Tensor) -> Tensor:
    """An uninitialised result of the operands ``first`` and ``second``, in PyTorch's memory format for it."""
    if not output_channels_last(first, second):
        return first.new_empty(shape)
    row = len(shape) == 3
    size = (*shape[:2], 1, shape[2]) if row else shape
    memory_format = torch.channels_last_3d if len(size) == 5 else torch.channels_last
    result = torch.empty(size, dtype=first.dtype, device=first.device, memory_format=memory_format)
    return result.squeeze(2) if row else result
