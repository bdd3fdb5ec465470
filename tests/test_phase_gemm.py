"""Long kernels with large strides on tensor cores, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import pytest
import torch

import emulator
from kernel_harness import (
    H200,
    Emulator,
    Executor,
    assert_exact,
    cases,
    choices,
    offers,
    reference,
    run,
)
from polyphase.plan.shortlist import refusal
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.phase_gemm.long_kernels import _RUN, PhaseGemm, _column_tiles, _reach, _vector
from polyphase.schedules.tensor_cores import steps_of

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make

LAYERS = {
    "overlap-add": make((2, 20, 40), 1, 64, 16),
    "overlap-add, cropped": make((2, 10, 30), 1, 64, 32, 24, bias=True),
    "a kernel that ends amid a cell": make((1, 9, 21), 2, 41, 16, 3, 5, bias=True),
    "a stride of no whole runs": make((2, 18, 25), 3, 40, 20, 7),
    "gaps between kernels": make((1, 8, 9), 2, 5, 24, bias=True),
    "dilated": make((1, 8, 19), 2, 7, 16, 5, dilation=3, bias=True),
    "stride and dilation share a factor": make((1, 8, 9), 2, 7, 16, 2, dilation=6),
    "2-D": make((2, 21, 5, 6), 3, 16, 8, 4),
    "2-D, other strides": make((2, 5, 4, 7), 2, (3, 16), (2, 16), (1, 4), bias=True),
    "2-D, one channel": make((1, 1, 6, 9), 1, (3, 32), (1, 16), (1, 8)),
    "3-D": make((2, 9, 3, 2, 3), 3, (2, 4, 8), (2, 4, 8), bias=True),
    "grouped": make((1, 12, 4, 5), 6, 8, 4, 2, groups=3, bias=True),
    "cropped to a few outputs": make((3, 16, 9), 2, 33, 16, 70),
    "TF32": make((1, 16, 30), 16, 32, 16, tf32=True),
    "empty batch": make((0, 16, 4), 3, 32, 16),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("problem", list(cases(LAYERS)))
def test_layers(problem: ConvTransposeProblem) -> None:
    order = zlib.crc32(str(problem).encode())
    for layouts, candidate, program in choices(PhaseGemm(), problem):
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(order))


def test_layers_take_every_path() -> None:
    """Every branch that a config or a layer decides is taken by some of the layers."""
    taken = set()
    for parameters in cases(LAYERS):
        (problem,) = parameters.values
        for layouts, candidate, program in choices(PhaseGemm(), problem):
            config, vector = candidate.config, _vector(problem, layouts)
            columns = _column_tiles(problem, config)
            stage_channels = config.stage_steps * 32 // DTYPE_BYTES[problem.dtype]
            facts = {
                "neighbours of one row": problem.axes3[2].stride % _RUN == 0,
                "16 bytes stored together": vector * DTYPE_BYTES[problem.dtype] == 16,
                "8 bytes stored together": vector * DTYPE_BYTES[problem.dtype] == 8,
                "channels left over": problem.in_channels_per_group % stage_channels != 0,
                "several stages a reach": config.stage_steps < steps_of(problem),
                "several reaches": math.prod(map(_reach, problem.axes)) > 1,
                "tiles of columns": columns > 1,
                "tiles of cells": program.main.grid[0] > columns * problem.groups,
                "four row tiles": config.row_tiles == 4,
                "one row tile": config.row_tiles == 1,
                "a single column of warps": config.warp_columns == 1,
                "channels innermost": ("CHANNELS_INNERMOST", True) in program.main.source.constants,
            }
            taken |= set(facts.items())
    assert taken == {(fact, value) for fact in facts for value in (False, True)}


def assert_carries_inf_and_nan(executor: Executor) -> None:
    """Parts of TF32 of an infinite value are none, and columns have no weight for every reach."""
    problem = make((2, 20, 30), 3, 45, 16, 4, bias=True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(problem.input_shape, generator=generator)
    weight = torch.randn(problem.weight_shape, generator=generator) / 10  # nothing else overflows
    bias = torch.randn(3, generator=generator)
    for place, value in enumerate((math.inf, -math.inf, math.nan, 3.4028e38)):
        x[place % 2, place, 6 * place] = value
    weight[7, 1, 2], weight[9, 2, 0] = math.inf, math.nan
    for candidate, program in offers(PhaseGemm(), problem):
        found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight), bias, executor)
        exact = reference(problem, Pass.FORWARD, (x.double(), weight.double()), bias.double()).float()
        assert exact.isnan().any(), candidate
        assert exact.isinf().any(), candidate
        assert exact.isfinite().any(), candidate
        torch.testing.assert_close(found, exact, equal_nan=True)


def test_inf_and_nan() -> None:
    assert_carries_inf_and_nan(Emulator())


def test_float32_is_exact() -> None:
    """The accuracy of float32 sums, where TF32 alone would have errors of 3e-4."""
    problem = make((2, 64, 40), 2, 64, 16)
    generator = torch.Generator().manual_seed(5)
    operands = tuple(torch.randn(shape, generator=generator) for shape in (problem.input_shape, problem.weight_shape))
    _, program = offers(PhaseGemm(), problem)[0]
    found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), operands).double()
    exact = reference(problem, Pass.FORWARD, (operands[0].double(), operands[1].double()))
    assert (found - exact).norm() / exact.norm() < 2e-7


def test_no_races() -> None:
    problem = LAYERS["overlap-add"]
    candidate, program = offers(PhaseGemm(), problem)[0]
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(order=None))


def test_where_it_refuses() -> None:
    layer = make((2, 32, 80), 3, 64, 32)
    wanted = {
        replace(layer, stride=(4,)): "4 elements of a cell are few",
        replace(layer, stride=(1 << 15,), out_channels=96): "columns of a group are too many",
        replace(layer, stride=(1 << 20,)): "above 32768",
        replace(layer, dtype="float64"): "do not take float64",
    }
    for problem, reason in wanted.items():
        assert reason in (refusal(PhaseGemm(), problem, Pass.FORWARD, H200) or "")
    assert "only" in (refusal(PhaseGemm(), layer, Pass.WEIGHT_GRAD, H200) or "")
    assert "lacks" in (refusal(PhaseGemm(), layer, Pass.FORWARD, DeviceInfo.for_arch("sm_75")) or "")
