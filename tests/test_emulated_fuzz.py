"""Small layers drawn at random, each by one config of any schedule, executed by the emulator.

Layers are drawn so that what schedules tell apart meets: phases of several counts of taps, residues, borders, odd
channels, groups. Sums are exact, so results are compared bit for bit with float64's.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from emulator import available
from kernel_harness import DTYPES, H200, Emulator, integers, reference, run
from polyphase.plan.planner import programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts


def draw(seed: int) -> tuple[ConvTransposeProblem, Pass, random.Random]:
    """A layer of a few thousand elements that has an output, and a pass of it."""
    draws = random.Random(seed)
    while True:
        dims, groups = draws.choice([1, 2, 2, 3]), draws.choice([1, 1, 1, 2, 3])
        channels = draws.choice([1, 2, 3, 5, 8, 12, 16, 20, 33, 40])
        out_channels = draws.choice([1, 2, 3, 4, 7, 8, 12, 16])
        kernels, strides = ([1, 2, 3, 4, 5, 7, 9, 12], [1, 2, 3, 4, 5, 9]) if dims < 3 else ([1, 2, 3, 4], [1, 2, 3])
        kernel = tuple(draws.choice(kernels) for _ in range(dims))
        stride = tuple(draws.choice(strides) for _ in range(dims))
        dilation = tuple(draws.choice([1, 1, 1, 2]) for _ in range(dims))
        reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
        padding = tuple(draws.randint(0, most // 2) for most in reach)
        extra = tuple(draws.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation))
        size = tuple(draws.randint(1, 9) for _ in range(dims))
        problem = ConvTransposeProblem(
            draws.choice([1, 2, 3]), channels * groups, out_channels * groups, size, kernel, stride, padding, extra,
            dilation, groups, bias=draws.random() < 0.5, dtype=draws.choice(["float32", "bfloat16", "float16"]),
            tf32=draws.random() < 0.5, channels_last=draws.random() < 0.4,
        )  # fmt: skip
        if min(problem.output_shape) > 0:
            return problem, draws.choice(list(Pass)), draws


@pytest.mark.skipif(not available(), reason="needs Linux and g++")
@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize("seed", range(120))
def test_a_layer_by_a_config(seed: int) -> None:
    problem, pass_, draws = draw(seed)
    offers = list(programs(problem, pass_, H200))
    schedule = draws.choice(sorted({candidate.schedule for candidate, _ in offers}))
    candidate, program = draws.choice([offer for offer in offers if offer[0].schedule == schedule])
    x, weight, grad = (
        integers(shape, seed + number)
        for number, shape in enumerate((problem.input_shape, problem.weight_shape, problem.output_shape))
    )
    bias = integers((problem.out_channels,), seed + 3) if problem.bias and pass_ is Pass.FORWARD else None
    operands = {Pass.FORWARD: (x, weight), Pass.INPUT_GRAD: (grad, weight), Pass.WEIGHT_GRAD: (x, grad)}[pass_]
    found = run(problem, pass_, program, Layouts.of_call(problem, pass_), operands, bias, Emulator(seed % 100))
    expected = reference(problem, pass_, operands, bias).to(DTYPES[problem.dtype])
    assert torch.equal(found, expected), f"{candidate.describe()} of {problem}, {pass_.value}"


@pytest.mark.skipif(not available(), reason="needs Linux and g++")
@pytest.mark.sampled(60, 6)
@pytest.mark.parametrize("seed", range(60))
def test_a_cropped_layer_by_a_config(seed: int) -> None:
    """`polyphase.fused.crop`: padding beyond the kernel's reach, and negative output padding."""
    given, _, draws = draw(seed)
    whole = replace(given, padding=(0,) * given.dims, output_padding=(0,) * given.dims)
    lefts, rights = [], []
    for size, axis in zip(whole.output_size, whole.axes):
        most = min(size - 1, axis.dilation * (axis.kernel - 1) + 1)
        lefts.append(draws.choice((0, draws.randint(0, most))))
        rights.append(draws.choice((lefts[-1], draws.randint(0, most), most)))
        if lefts[-1] + rights[-1] >= size:
            lefts[-1] = 0
    extra = tuple(left - right for left, right in zip(lefts, rights))
    problem = replace(whole, padding=tuple(lefts), output_padding=extra)
    offers = list(programs(problem, Pass.FORWARD, H200))
    schedule = draws.choice(sorted({candidate.schedule for candidate, _ in offers}))
    candidate, program = draws.choice([offer for offer in offers if offer[0].schedule == schedule])
    x, weight = integers(problem.input_shape, seed), integers(problem.weight_shape, seed + 1)
    bias = integers((problem.out_channels,), seed + 3) if problem.bias else None
    layouts = Layouts.of_call(problem, Pass.FORWARD)
    found = run(problem, Pass.FORWARD, program, layouts, (x, weight), bias, Emulator(seed % 100))
    ends = (slice(left, size - right) for left, right, size in zip(lefts, rights, whole.output_size))
    expected = reference(whole, Pass.FORWARD, (x, weight), bias)[(..., *ends)].to(DTYPES[problem.dtype])
    assert torch.equal(found, expected), f"{candidate.describe()} of {problem}"
