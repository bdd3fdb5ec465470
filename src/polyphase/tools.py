"""Counters of flops that go by an operator's name: those that are imported are told of polyphase's."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


def tell_counters() -> None:
    """Adds what a forward pass comes to where fvcore, or ptflops, counts; they count multiplications alone."""
    fvcore = getattr(sys.modules.get("fvcore.nn.flop_count"), "_DEFAULT_SUPPORTED_OPS", None)
    if isinstance(fvcore, dict):
        for name in ("conv_transpose", "conv_transpose_epilogue"):
            fvcore.setdefault(f"polyphase::{name}", _of_values)
    ptflops = getattr(sys.modules.get("ptflops.aten_ops"), "ATEN_OPS_MAPPING", None)
    if isinstance(ptflops, dict):
        for operator in (torch.ops.polyphase.conv_transpose, torch.ops.polyphase.conv_transpose_epilogue):
            ptflops.setdefault(operator, _of_tensors)


def _of_values(inputs: Sequence[Any], outputs: Sequence[Any]) -> Counter[str]:
    """For fvcore: of values of a traced graph."""
    input, weight = (value.type().sizes() for value in inputs[:2])
    return Counter({"conv": math.prod(input) * math.prod(weight[1:])})


def _of_tensors(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """For ptflops, which counts the additions of a bias, too."""
    input, weight, bias = inputs[:3]
    additions = 0 if bias is None else math.prod(outputs[0].shape)
    return int(math.prod(input.shape) * math.prod(weight.shape[1:]) + additions)
