"""What a pass should give, in float64, for as much of its result as a flop budget allows.

Where the whole is too much, the forward pass and the input gradient are computed for some images (the first, the last
and others evenly between) and the weight gradient for some channels or groups, over the whole batch. What was compared
is said, and it is a part of the very result that is timed. The float64 results come from PyTorch, by another route and
in another precision than anything compared with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from polyphase.bench.accuracy import Comparison, compare, spread, tf32_rounding
from polyphase.bench.contestants import torch_call
from polyphase.bench.operands import Operands
from polyphase.problem import ConvTransposeProblem, Pass

FLOP_BUDGET = 20e9
"""Flops of float64 work per check: well below a second on a data-centre GPU."""
CHUNK_ELEMENTS = 1 << 26
"""Elements that are turned into float64 at a time where a result is summed over the batch."""


@dataclass(frozen=True)
class Sample:
    """A part of a result: how to take it out of the whole, its float64 values, and what it is in words.

    ``rounding`` is what TF32 may cost each element, None where the problem does not allow it.
    """

    index: tuple[torch.Tensor, ...]
    reference: torch.Tensor
    compared: str
    rounding: torch.Tensor | None = None

    def of(self, result: torch.Tensor) -> torch.Tensor:
        """The same part of a ``result``."""
        for dim, index in enumerate(self.index):
            result = result.index_select(dim, index)
        return result

    def compare(self, out: torch.Tensor, torch_out: torch.Tensor) -> Comparison:
        """Hold this part of ``out`` against float64, with the same part of ``torch_out`` as the yardstick."""
        return compare(self.of(out), self.of(torch_out), self.reference, self.rounding)


def sample(problem: ConvTransposeProblem, pass_: Pass, operands: Operands, flop_budget: float = FLOP_BUDGET) -> Sample:
    """The float64 result of a pass, or as much of it as costs about ``flop_budget``."""
    if pass_ is Pass.WEIGHT_GRAD:
        return _weight_grad_sample(problem, operands, flop_budget)
    images = spread(problem.batch, int(flop_budget * problem.batch / max(problem.flops, 1)))
    index = torch.tensor(images, device=operands.input.device)
    double = Operands(
        input=operands.input.index_select(0, index).double(),
        weight=operands.weight.double(),
        bias=None if operands.bias is None else operands.bias.double(),
        grad_output=operands.grad_output.index_select(0, index).double(),
    )
    part = replace(problem, batch=len(images))
    reference = torch_call(part, pass_, double)()
    rounding = tf32_rounding(torch_call(part, pass_, _squared(double))()) if problem.tf32 else None
    return Sample((index,), reference, _share(len(images), problem.batch, "images"), rounding)


def _weight_grad_sample(problem: ConvTransposeProblem, operands: Operands, flop_budget: float) -> Sample:
    share = min(1.0, flop_budget / max(problem.flops, 1))
    per_group_in, per_group_out = problem.in_channels_per_group, problem.out_channels_per_group
    groups = spread(problem.groups, int(share * problem.groups))
    share = min(1.0, share * problem.groups / len(groups))
    rows = spread(per_group_in, int(math.sqrt(share) * per_group_in))
    columns = spread(per_group_out, int(math.sqrt(share) * per_group_out))

    device = operands.input.device
    inputs = torch.tensor([group * per_group_in + row for group in groups for row in rows], device=device)
    outputs = torch.tensor([group * per_group_out + column for group in groups for column in columns], device=device)
    part = replace(problem, in_channels=len(inputs), out_channels=len(outputs), groups=len(groups), bias=False)
    shape = part.weight_shape
    weight = torch.zeros(shape, dtype=torch.float64, device=device)
    reference = torch.zeros_like(weight)
    squares = torch.zeros_like(weight) if problem.tf32 else None

    elements = max(1, (part.elements[0] + part.elements[2]) // max(part.batch, 1))
    images = max(1, CHUNK_ELEMENTS // elements)
    for x, grad in zip(operands.input.split(images), operands.grad_output.split(images)):
        double = Operands(x.index_select(1, inputs).double(), weight, None, grad.index_select(1, outputs).double())
        some = replace(part, batch=len(x))
        reference += torch_call(some, Pass.WEIGHT_GRAD, double)()
        if squares is not None:
            squares += torch_call(some, Pass.WEIGHT_GRAD, _squared(double))()

    whole = math.prod(problem.weight_shape[:2])
    compared = _share(math.prod(shape[:2]), whole, "pairs of channels")
    rounding = None if squares is None else tf32_rounding(squares)
    return Sample((inputs, torch.tensor(columns, device=device)), reference, compared, rounding)


def _squared(operands: Operands) -> Operands:
    """Operands whose products are the squares of theirs; the bias, which is no product, is left out."""
    return Operands(operands.input.square(), operands.weight.square(), None, operands.grad_output.square())


def _share(part: int, whole: int, things: str) -> str:
    return "all" if part == whole else f"{part} of {whole} {things}"
