"""Layers with few channels in a group on tensor cores, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import (
    H200,
    Emulator,
    assert_carries_inf_and_nan,
    assert_exact,
    assert_float32_exact,
    assert_no_races,
    choices,
    offers,
    reference,
    run,
)
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.cost import Sharing
from polyphase.schedules.grouped_gemm import schedule as grouped_gemm
from polyphase.schedules.grouped_gemm.schedule import GroupedGemm, _outputs, _tiling
from polyphase.schedules.grouped_gemm.tiling import product_of
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.tensor_cores import steps_of

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make

LAYERS = {
    "grouped, every parameter": make(
        (2, 24, 6, 32), 48, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1), groups=3, bias=True
    ),
    "rows without taps": make((2, 8, 5, 30), 16, (3, 5), (2, 3), (1, 2), dilation=(2, 1)),
    "outputs without taps": make((2, 16, 5, 20), 12, 3, 5, 1, dilation=2, bias=True),
    "four channels": make((2, 12, 10, 42), 4, 9, 4, 4, 3, bias=True),
    "six channels": make((2, 20, 9, 12), 6, 4, 2, 1, bias=True),
    "more channels than a block": make((1, 9, 9, 10), 29, 4, 2, 1, bias=True),
    "stride 1": make((2, 20, 9, 10), 16, 3, bias=True),
    "stride 1, dilated": make((1, 32, 7, 10), 4, 3, 1, (1, 2), dilation=(1, 2)),
    "kernel = stride": make((3, 40, 8, 8), 5, 2, 2, bias=True),
    "cropped": make((1, 16, 6, 8), 4, 5, 2, 6),
    "output padding": make((2, 17, 9, 10), 5, 5, 2, 2, 1, dilation=2),
    "seven channels in a group": make((2, 6, 6, 8), 14, 4, 2, 1, groups=2),
    "tiny images": make((35, 40, 4, 4), 6, 4, 2, 1),
    "one pixel": make((35, 18, 1, 1), 4, 4),
    "TF32": make((1, 16, 12, 10), 16, 2, 2, tf32=True),
    "1-D": make((3, 18, 700), 7, 16, 8, 4, bias=True),
    "1-D, rows of 4 bytes": make((3, 18, 25), 4, 5, 3, 2),
    "3-D": make((2, 16, 4, 5, 6), 4, (2, 3, 3), (1, 2, 2), (0, 1, 1), bias=True),
    "3-D, slabs without taps": make((2, 8, 3, 4, 5), 4, 2, (3, 2, 2), bias=True),
    "rows that end amid a cell": make((2, 20, 9, 11), 8, 3, 2, 1, bias=True),
    "empty batch": make((0, 16, 4, 4), 4, 3),
}


def cases() -> Iterator[ParameterSet]:
    for name, problem in LAYERS.items():
        for dtype in ("float32", "bfloat16"):
            yield pytest.param(replace(problem, dtype=dtype), id=f"{name}-{dtype}")


@pytest.mark.sampled(32, 8)
@pytest.mark.parametrize("problem", list(cases()))
def test_layers(problem: ConvTransposeProblem) -> None:
    order = zlib.crc32(str(problem).encode())
    for layouts, candidate, program in choices(GroupedGemm(), problem):
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(order))


def test_layers_take_every_path() -> None:
    """Every branch that a config or a tiling decides is taken by some of the layers."""
    taken = set()
    for parameters in cases():
        (problem,) = parameters.values
        for layouts, candidate, program in choices(GroupedGemm(), problem):
            config, tiling = candidate.config, _tiling(problem, layouts, candidate.config, H200)
            assert tiling is not None
            width = problem.axes3[2]
            facts = {
                "rows joined": tiling.joined > 1,
                "rows without taps": tiling.bare_bytes > 0,
                "rows of whole sectors": tiling.whole_sectors,
                "several tiles a block": tiling.total > program.main.grid[0],
                "tiles along the width": tiling.tiles[3] > 1,
                "several images a tile": tiling.tile_extent[0] > 1,
                "all of a row's phases have taps": product_of(problem, config.out_chunk).row_blocks
                == math.ceil(math.prod(problem.stride) * config.out_chunk / 16),
                "several stages a tile": config.stage_steps < steps_of(problem),
                "operations left over in a stage": steps_of(problem) % config.stage_steps != 0,
                "channels left over": problem.out_channels_per_group % config.out_chunk != 0,
                "one phase in a fragment's rows": config.out_chunk % 8 == 0,
                "cells put together at once": problem.dtype != "float32"
                and config.out_chunk % 8 == 0
                and len(width.taps_by_phase) == width.stride,
                "two parts": product_of(problem, config.out_chunk).parts == 2,
                "three parts": product_of(problem, config.out_chunk).parts == 3,
            }
            taken |= set(facts.items())
    missing = {(fact, value) for fact in facts for value in (False, True)} - taken
    assert missing <= {("several tiles a block", True), ("several images a tile", True)}  # those come below


def share_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm, "_sharing", lambda device: Sharing(waves=0, cycles=0, most=math.inf))


@pytest.mark.sampled(16, 4)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("room", "outputs"), [(H200.shared_bytes_per_block, 2), (101376, 1)])
@pytest.mark.parametrize(
    "name", ["grouped, every parameter", "six channels", "tiny images", "more channels than a block"]
)
def test_blocks_take_tile_after_tile(
    name: str, room: int, outputs: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of few multiprocessors blocks take several tiles, and in turn the outputs that there is room for."""
    if shared:
        share_all_tiles(monkeypatch)
    count = 6 if shared else 1
    device = replace(
        H200, multiprocessors=count, shared_bytes_per_block=room, shared_bytes_per_multiprocessor=room + 1024
    )
    batch = 40 if name == "tiny images" else 5
    problem = replace(LAYERS[name], batch=4 * batch if shared else batch)
    dense = Layouts.dense(problem)
    candidate = next(candidates(GroupedGemm(), problem, Pass.FORWARD, device, dense))
    program = GroupedGemm().program(problem, Pass.FORWARD, device, dense, candidate.config)
    tiling = _tiling(problem, dense, candidate.config, device)
    assert tiling is not None
    assert tiling.total * problem.groups > program.main.grid[0]
    assert (len(program.steps) > 1) is shared
    if name == "tiny images":
        assert tiling.tile_extent[0] > 1
    elif name == "grouped, every parameter":
        assert _outputs(problem, candidate.config, tiling, device) == outputs
    elif name == "more channels than a block":
        assert problem.out_channels_per_group > candidate.config.out_chunk
    for order in ("forward", 1, 2) if shared else ("forward",):
        assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(order))


#: Dtype, input and output channels of layers whose outputs come from three parts, two parts, row by row, cell by cell.
INF_AND_NAN = [("float32", 20, 6), ("float32", 64, 16), ("bfloat16", 20, 6), ("bfloat16", 20, 16)]


#: Whether every config is tried, or one for each number of parts and of a block's channels.
EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


def some_offers(problem: ConvTransposeProblem, every: bool) -> list[tuple[Candidate, Program]]:
    found = offers(GroupedGemm(), problem)
    kinds = {
        (product_of(problem, each[0].config.out_chunk).parts, each[0].config.out_chunk): each for each in found[::-1]
    }
    return found if every else list(kinds.values())


def inf_and_nan_case(dtype: str, channels: int, out_channels: int, every: bool = True) -> tuple[Any, ...]:
    """What `assert_carries_inf_and_nan` takes."""
    problem = make((2, channels, 9, 12), out_channels, 3, 2, 1, bias=True, dtype=dtype)
    return problem, Pass.FORWARD, [program for _, program in some_offers(problem, every)]


@EVERY
@pytest.mark.parametrize(("dtype", "channels", "out_channels"), INF_AND_NAN)
def test_inf_and_nan(dtype: str, channels: int, out_channels: int, every: bool) -> None:
    problem, *case = inf_and_nan_case(dtype, channels, out_channels, every)
    configs = [candidate.config for candidate, _ in offers(GroupedGemm(), problem)]
    parts = {product_of(problem, config.out_chunk).parts for config in configs}
    assert (2 in parts, 3 in parts) == (channels == 64, dtype == "float32" and channels < 64)
    assert any(config.out_chunk % 8 == 0 for config in configs) == (out_channels == 16)
    assert_carries_inf_and_nan(problem, *case, Emulator())


@EVERY
def test_products_near_the_largest_number(every: bool) -> None:
    """Two parts that were rounded up have a product beyond it, where that of the numbers is not."""
    problem = make((1, 8, 4, 4), 8, 2, 2)
    largest = torch.finfo(torch.float32).max
    x, weight = torch.zeros(problem.input_shape), torch.zeros(problem.weight_shape)
    x[:, 0] = 1 + 2**-8 + 2**-20
    weight[0] = largest * 0.999 / float(x[0, 0, 0, 0])
    exact = reference(problem, Pass.FORWARD, (x.double(), weight.double())).float()
    assert exact.isfinite().all()
    for candidate, program in some_offers(problem, every):
        assert product_of(problem, candidate.config.out_chunk).parts == 3
        torch.testing.assert_close(run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight)), exact)


@pytest.mark.parametrize(("channels", "parts", "error"), [(8, 3, 9e-8), (64, 2, 2e-7)])
def test_float32_is_exact(channels: int, parts: int, error: float) -> None:
    """The accuracy of float32 sums, where TF32 alone would have 3e-4; of 8 channels two parts of it have 1.01e-7."""
    problem = make((2, channels, 9, 12), 8, 4, 2, 1)
    candidate, program = offers(GroupedGemm(), problem)[0]
    assert product_of(problem, candidate.config.out_chunk).parts == parts
    assert_float32_exact(program, problem, Pass.FORWARD, error)


def test_no_races() -> None:
    for name in ("six channels", "rows without taps"):
        assert_no_races(GroupedGemm(), LAYERS[name], Pass.FORWARD)


def test_without_tma() -> None:
    """Threads write rows where there is none."""
    device = DeviceInfo.for_arch("sm_80")
    for name, dtype in (("grouped, every parameter", "float32"), ("six channels", "float16"), ("3-D", "float32")):
        problem = replace(LAYERS[name], dtype=dtype)
        dense = Layouts.dense(problem)
        candidate = next(candidates(GroupedGemm(), problem, Pass.FORWARD, device, dense))
        program = GroupedGemm().program(problem, Pass.FORWARD, device, dense, candidate.config)
        assert_exact(problem, Pass.FORWARD, candidate, program)


def test_where_it_refuses() -> None:
    layer = make((2, 32, 8, 8), 8, 4, 2, 1)
    wanted = {
        replace(layer, out_channels=100): "are many",
        replace(layer, out_channels=3): "are few",
        replace(layer, kernel_size=(20, 20)): "too many for straight-line code",
        replace(layer, stride=(32, 32)): "too many for straight-line code",
        replace(layer, dtype="float64"): "tensor cores for float64",
        replace(layer, channels_last=True): "needs NCHW",
    }
    for problem, reason in wanted.items():
        assert reason in (refusal(GroupedGemm(), problem, Pass.FORWARD, H200) or "")
    assert "only" in (refusal(GroupedGemm(), layer, Pass.WEIGHT_GRAD, H200) or "")
    assert "lacks" in (refusal(GroupedGemm(), layer, Pass.FORWARD, DeviceInfo.for_arch("sm_75")) or "")
