"""Runs one kernel variant on the CPU through the emulator: the launch that the planner made, on poisoned outputs."""

from __future__ import annotations

import ctypes
import math

import torch

from emulator import EmulatedKernel
from polyphase.algorithms.base import Launch, Layouts, Strides
from polyphase.problem import ConvTransposeProblem, Pass

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def strided(shape: tuple[int, ...], strides: Strides, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN with the planner's strides."""
    picked = strides[:2] + strides[5 - (len(shape) - 2) :]
    return torch.full((math.prod(shape),), math.nan, dtype=dtype).as_strided(shape, picked)


def run(
    problem: ConvTransposeProblem,
    pass_: Pass,
    launch: Launch,
    layouts: Layouts,
    operands: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
    order: str | int = "forward",
) -> torch.Tensor:
    """The pass computed by ``launch``'s kernel; ``operands`` as the pass takes them, in their shapes."""
    dtype = DTYPES[problem.dtype]
    kernel = EmulatedKernel(launch.source.text, launch.source.kernel)
    geometry = (ctypes.c_ubyte * len(launch.geometry)).from_buffer_copy(launch.geometry)

    def place(tensor: torch.Tensor, strides: Strides) -> torch.Tensor:
        return strided(tuple(tensor.shape), strides, dtype).copy_(tensor)

    if pass_ is Pass.WEIGHT_GRAD:
        x, grad = place(operands[0], layouts.input), place(operands[1], layouts.output)
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        partial = torch.full((launch.planes, *problem.weight_shape), math.nan, dtype=accumulator)
        arguments = [x, grad, partial, geometry]
        if 0 not in launch.grid:
            kernel.launch(launch.grid, launch.block, launch.shared_bytes, arguments, order=order)
        return partial.sum(0).to(dtype)
    forward = pass_ is Pass.FORWARD
    src = place(operands[0], layouts.input if forward else layouts.output)
    weight = operands[1].to(dtype)
    if layouts.weight_channels_last:
        weight = weight.movedim(1, -1).contiguous().movedim(-1, 1)
    dst = (
        strided(problem.output_shape, layouts.output, dtype)
        if forward
        else strided(problem.input_shape, layouts.input, dtype)
    )
    bias = None if bias is None else bias.to(dtype)
    if 0 not in launch.grid:
        kernel.launch(launch.grid, launch.block, launch.shared_bytes, [src, weight, bias, dst, geometry], order=order)
    return dst


def reference(
    problem: ConvTransposeProblem, pass_: Pass, operands: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """The pass in float64 by PyTorch."""
    function = getattr(torch.nn.functional, f"conv_transpose{problem.dims}d")
    options = dict(
        stride=problem.stride,
        padding=problem.padding,
        output_padding=problem.output_padding,
        groups=problem.groups,
        dilation=problem.dilation,
    )
    first, second = (operand.double() for operand in operands)
    if pass_ is Pass.FORWARD:
        return function(first, second, None if bias is None else bias.double(), **options)
    if pass_ is Pass.INPUT_GRAD:
        x = torch.zeros(problem.input_shape, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(function(x, second, **options), x, first)[0]
    weight = torch.zeros(problem.weight_shape, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(function(first, weight, **options), weight, second)[0]


def operand_shapes(problem: ConvTransposeProblem, pass_: Pass) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a pass's two operands."""
    return {
        Pass.FORWARD: (problem.input_shape, problem.weight_shape),
        Pass.INPUT_GRAD: (problem.output_shape, problem.weight_shape),
        Pass.WEIGHT_GRAD: (problem.input_shape, problem.output_shape),
    }[pass_]
