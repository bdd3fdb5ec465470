"""Registers polyphase's operators with flop counters that look operators up by name, whichever is imported first.

It imports none of them: from PyTorch 2.14 on PyTorch's counter imports Triton, which takes longer than polyphase.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from polyphase.once_imported import once_imported
from polyphase.torch_op import epilogue, operators  # noqa: F401  # they define the counted operators

_FORWARD = ("conv_transpose", "conv_transpose_epilogue")


def _tell_pytorch(counter: Any) -> None:
    """Registers formulas in the counter's table: in PyTorch 2.4 its decorator does not work for custom operators."""
    formulas: dict[str, Callable[..., int]] = dict.fromkeys(_FORWARD, _of_shapes)
    formulas |= {"conv_transpose_input_grad": _of_output_shape, "conv_transpose_weight_grad": _of_weight_shape}
    for name, formula in formulas.items():
        counter.flop_registry[getattr(torch.ops.polyphase, name)] = counter.shape_wrapper(formula)


def _of_shapes(input: Sequence[int], weight: Sequence[int], *rest: Any, **result: Any) -> int:
    """Flops of a layer, the same for all three passes: see `ConvTransposeProblem.flops`."""
    return 2 * math.prod(input) * math.prod(weight[1:])


def _of_output_shape(
    grad_output: Sequence[int], weight: Sequence[int], *rest: Any, out_shape: Sequence[int], **more: Any
) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight[1:])


def _of_weight_shape(input: Sequence[int], *rest: Any, out_shape: Sequence[int], **more: Any) -> int:
    return 2 * math.prod(input) * math.prod(out_shape[1:])


def _tell_fvcore(counter: Any) -> None:
    for name in _FORWARD:
        counter._DEFAULT_SUPPORTED_OPS.setdefault(f"polyphase::{name}", _of_values)


def _of_values(inputs: Sequence[Any], outputs: Sequence[Any]) -> Counter[str]:
    """Multiplications, from values of a traced graph."""
    input, weight = (value.type().sizes() for value in inputs[:2])
    return Counter({"conv": math.prod(input) * math.prod(weight[1:])})


def _tell_ptflops(counter: Any) -> None:
    for name in _FORWARD:
        counter.ATEN_OPS_MAPPING.setdefault(getattr(torch.ops.polyphase, name), _of_tensors)


def _of_tensors(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Multiplications and the additions of a bias, from tensors."""
    input, weight, bias = inputs[:3]
    additions = 0 if bias is None else math.prod(outputs[0].shape)
    return int(math.prod(input.shape) * math.prod(weight.shape[1:]) + additions)


once_imported("torch.utils.flop_counter", _tell_pytorch)
once_imported("fvcore.nn.flop_count", _tell_fvcore)
once_imported("ptflops.aten_ops", _tell_ptflops)
