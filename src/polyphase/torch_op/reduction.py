"""Poolings, reductions and norms after a layer in PyTorch's terms: by kernels, by tensor operations, as an operator.

``polyphase::reduce_groups`` is a `Reduction` for graphs of `torch.compile` without derivatives; it is a string there
(`polyphase.problem.reduction.encoded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import ALIGNMENT
from polyphase.problem.reduction import REDUCTIONS, Reduction, decoded
from polyphase.program.reduction import program_of
from polyphase.torch_op.epilogue import by_tensor_operations
from polyphase.torch_op.operators import LIBRARY
from polyphase.torch_op.portable import compute_dtype

_CALLS: dict[Any, Callable[..., Tensor]] = {}
_MOST_CALLS = 1024


def has_kernels(value: Tensor) -> bool:
    """Whether kernels compute reductions of a tensor."""
    return value.is_cuda and torch.version.cuda is not None and value.is_contiguous()


def run(reduction: Reduction, value: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """The reduction of a tensor of its shape; ``operands``: of operations after it, then of operations before it."""
    return (_by_kernels if has_kernels(value) else _by_functions)(reduction, value, operands)


def _by_kernels(reduction: Reduction, value: Tensor, operands: Sequence[Tensor]) -> Tensor:
    index, aligned = value.get_device(), value.data_ptr() % ALIGNMENT == 0
    key = (reduction, value.dtype, index, aligned)
    call = _CALLS.get(key)
    if call is None:
        if len(_CALLS) >= _MOST_CALLS:
            _CALLS.clear()
        from polyphase.prepared import Call, empty_on_cuda

        program = program_of(reduction, str(value.dtype).removeprefix("torch."), aligned)
        shape = reduction.output_shape
        strides = torch.empty(shape, device="meta").stride()
        arch = DeviceInfo.of(value.device).arch
        call = _CALLS[key] = Call(program, arch, index, shape, strides, False, empty_on_cuda, reduction.named_operands)
    return call(value, value, None, operands)


def _by_functions(reduction: Reduction, value: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """`_by_kernels` by PyTorch's functions, half types in float32."""
    count = len(reduction.after.named_operands)
    wide = value.to(compute_dtype(value.dtype))
    if reduction.pool:
        wide = getattr(F, f"{reduction.pool}_pool{len(reduction.window)}d")(wide, reduction.window)
    wide = by_tensor_operations(reduction.before, operands[count:], wide)
    if reduction.over in REDUCTIONS:
        dims = tuple(range(reduction.first, reduction.last + 1))
        wide = getattr(torch, reduction.over)(wide, dims, keepdim=True)
    elif reduction.over:
        rows = wide.reshape(reduction.sizes)
        if reduction.over == "softmax":
            rows = rows.softmax(1)
        else:
            variance, mean = torch.var_mean(rows, 1, correction=0, keepdim=True)
            rows = (rows - mean) / (variance + reduction.epsilon).sqrt()
        wide = rows.reshape(wide.shape)
    of = wide.reshape(reduction.sizes[:2]) if reduction.by_position else wide
    return by_tensor_operations(reduction.after, operands[:count], of).reshape(wide.shape).to(value.dtype)


def _of_text(value: Tensor, operands: Sequence[Tensor], text: str) -> Tensor:
    with torch.autocast(value.device.type, enabled=False):
        return run(decoded(text), value, operands).contiguous()


def _fake(value: Tensor, operands: Sequence[Tensor], text: str) -> Tensor:
    return value.new_empty(decoded(text).output_shape)


LIBRARY.define("reduce_groups(Tensor value, Tensor[] operands, str reduction) -> Tensor")
LIBRARY.impl("reduce_groups", _of_text, "CompositeExplicitAutograd")
torch.library.register_fake("polyphase::reduce_groups", _fake, lib=LIBRARY)
reduce_groups: Callable[..., Tensor] = torch.ops.polyphase.reduce_groups.default
