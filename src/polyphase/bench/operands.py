"""The tensors that a pass of a layer works on, with values that make its error visible."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from polyphase.problem import ConvTransposeProblem

MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""PyTorch's channels_last by the rank of the tensor. It has none for one spatial dimension."""


@dataclass(frozen=True)
class Operands:
    """Input ``(N, C_in, *spatial)``, weight ``(C_in, C_out/g, *k)``, bias ``(C_out,)``, and the output's gradient."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_output: torch.Tensor

    def channels_last(self) -> Operands:
        """The same values in PyTorch's channels_last; the layer must have two or three spatial dimensions."""
        formats = MEMORY_FORMATS[self.input.dim()]
        return Operands(
            self.input.contiguous(memory_format=formats),
            self.weight.contiguous(memory_format=formats),
            self.bias,
            self.grad_output.contiguous(memory_format=formats),
        )


def make_operands(problem: ConvTransposeProblem, device: torch.device, seed: int = 0) -> Operands:
    """Normal numbers in the dtype and layout of ``problem``, scaled so that the output is of unit scale.

    The bias is small: a large one would hide the error of the products.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, device=device, dtype=dtype)
        return values.normal_(0.0, scale, generator=generator)

    terms = problem.in_channels_per_group * problem.taps / math.prod(problem.stride)
    operands = Operands(
        input=normal(problem.input_shape),
        weight=normal(problem.weight_shape, 1 / math.sqrt(max(terms, 1.0))),
        bias=normal((problem.out_channels,), 0.1) if problem.bias else None,
        grad_output=normal(problem.output_shape),
    )
    return operands.channels_last() if problem.channels_last else operands
