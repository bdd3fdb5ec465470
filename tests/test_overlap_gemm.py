"""Layers with few output channels on tensor cores, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

import emulator
from kernel_harness import (
    H200,
    Emulator,
    Executor,
    assert_carries_inf_and_nan,
    assert_exact,
    assert_float32_exact,
    assert_no_races,
    cases,
    choices,
    formats,
    offers,
)
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.overlap_gemm.schedule import OverlapGemm, _tiling
from polyphase.schedules.tensor_cores import steps_of

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make

LAYERS = {
    "three channels": make((2, 20, 9, 12), 3, 4, 2, 1, bias=True),
    "one channel": make((2, 12, 30, 41), 1, 9, 4, 4, 3, bias=True),
    "more channels than a block": make((1, 24, 9, 10), 13, 4, 2, 1, bias=True),
    "stride 1": make((2, 20, 9, 10), 2, 3, bias=True),
    "stride 1, dilated": make((1, 32, 7, 9), 4, 3, 1, (1, 2), dilation=(1, 2)),
    "stride 3": make((1, 16, 7, 50), 2, 5, 3, 1, 1),
    "kernel = stride": make((3, 40, 8, 8), 5, 2, 2, bias=True),
    "kernel < stride": make((2, 16, 4, 5), 3, 2, (3, 4), 0, 1, bias=True),
    "cropped": make((1, 16, 6, 7), 2, 5, 2, 6),
    "output padding": make((2, 17, 9, 10), 3, 5, 2, 2, 1, dilation=2),
    "grouped": make((2, 24, 6, 32), 12, (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=3, bias=True),
    "depthwise": make((2, 5, 6, 8), 5, 4, 2, 1, groups=5),
    "tiny images": make((35, 40, 4, 4), 3, 4, 2, 1),
    "a stride beyond vectors": make((2, 16, 40), 1, 32, 32),
    "cropped to a few outputs": make((3, 16, 19, 19), 2, 4, 2, 19),
    "one pixel": make((70, 18, 1, 1), 2, 4),
    "TF32": make((1, 16, 12, 9), 16, 2, 2, tf32=True),
    "1-D": make((3, 18, 700), 1, 16, 8, 4, bias=True),
    "1-D, rows of 4 bytes": make((3, 18, 25), 2, 5, 3, 2),
    "3-D": make((2, 16, 4, 5, 6), 2, (2, 3, 3), (1, 2, 2), (0, 1, 1), bias=True),
    "weights in parts": make((1, 320, 3, 9), 1, 9, 4, 4, 3, bias=True),
    "empty batch": make((0, 16, 4, 4), 3, 3),
    "bands": make((1, 16, 300, 18), 1, 9, padding=4),
    "bands, each dtype in the other format": make((1, 16, 300, 18), 1, 9, padding=4),
}


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize("problem", list(cases(LAYERS)))
def test_layers(problem: ConvTransposeProblem) -> None:
    order = zlib.crc32(str(problem).encode())
    for layouts, candidate, program in choices(OverlapGemm(), problem):
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(order))


def test_layers_take_every_path() -> None:
    """Every branch that a config or a tiling decides is taken by some of the layers."""
    taken = set()
    for parameters in cases(LAYERS):
        (problem,) = parameters.values
        for layouts, candidate, _ in choices(OverlapGemm(), problem):
            config, tiling = candidate.config, _tiling(problem, layouts, candidate.config, H200)
            assert tiling is not None
            facts = {
                "wgmma": config.wgmma,
                "units of four": config.unit == 4,
                "whole": tiling.whole,
                "bands": tiling.bands > 1,
                "a ring": tiling.ring < tiling.window[2],
                "tiles along the height": tiling.tiles[2] > 1,
                "weights in parts": config.steps_held < steps_of(problem),
                "an operation of AHEAD left over": steps_of(problem) % config.ahead != 0,
            }
            taken |= set(facts.items())
    assert taken == {(fact, value) for fact in facts for value in (False, True)}


def check_inf_and_nan(channels_last: bool, executor: Executor) -> None:
    problem = make((2, 20, 9, 12), 3, 4, 2, 1, bias=True, channels_last=channels_last)
    assert_carries_inf_and_nan(problem, Pass.FORWARD, [offers(OverlapGemm(), problem)[0][1]], executor)


@pytest.mark.parametrize("channels_last", [False, True])
def test_inf_and_nan(channels_last: bool) -> None:
    check_inf_and_nan(channels_last, Emulator())


def test_float32_is_exact() -> None:
    """The accuracy of float32 sums, where TF32 alone would have errors of 3e-4."""
    problem = make((2, 64, 9, 12), 3, 4, 2, 1)
    assert_float32_exact(offers(OverlapGemm(), problem)[0][1], problem, Pass.FORWARD, 2e-7)


def test_no_races() -> None:
    for problem in formats(LAYERS["three channels"]):
        assert_no_races(OverlapGemm(), problem, Pass.FORWARD)


def test_where_it_refuses() -> None:
    layer = make((2, 32, 8, 8), 3, 4, 2, 1)
    wanted = {
        replace(layer, out_channels=40): "are many",
        replace(layer, kernel_size=(12, 12)): "too many columns",
        replace(layer, stride=(32, 32)): "too many for straight-line code",
        replace(layer, dtype="float64"): "tensor cores for float64",
    }
    for problem, reason in wanted.items():
        assert reason in (refusal(OverlapGemm(), problem, Pass.FORWARD, H200) or "")
    assert "only" in (refusal(OverlapGemm(), layer, Pass.WEIGHT_GRAD, H200) or "")
    assert "lacks" in (refusal(OverlapGemm(), layer, Pass.FORWARD, DeviceInfo.for_arch("sm_75")) or "")


def test_tiles_fit_whatever_the_image() -> None:
    """Images that padding crops, and such whose best tiles would not fit shared memory."""
    for layer, sides in ((make((4, 256, 80, 80), 3, 4, 2, 39, dtype="bfloat16"), (80, 39)),):
        for side in sides:
            problem = replace(layer, input_size=(side, side))
            (first, _), *_ = offers(OverlapGemm(), problem)
            assert first.config == offers(OverlapGemm(), layer)[0][0].config
    narrow = make((1, 512, 4000, 64), 1, (6, 1), (6, 5), (2, 0), (1, 0))
    for arch in ("sm_80", "sm_90a"):
        device, dense = DeviceInfo.for_arch(arch), Layouts.dense(narrow)
        candidate = next(candidates(OverlapGemm(), narrow, Pass.FORWARD, device, dense))
        assert OverlapGemm().program(narrow, Pass.FORWARD, device, dense, candidate.config).main.grid[0] < 20_000
    for cropped in (
        make((4, 64, 2052), 1, 2, 1, 1280, dilation=509),  # whose window is as wide as a config has room for
        make((4, 64, 2052), 1, 2, 2, 2561, 1, dilation=1019, dtype="bfloat16"),
    ):
        assert (
            offers(OverlapGemm(), cropped)[0][0].config
            == offers(OverlapGemm(), replace(cropped, input_size=(4096,)))[0][0].config
        )
