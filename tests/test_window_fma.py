"""Input gradients of few channels in a group without tensor cores, in the emulator; test_gpu.py has a GPU's turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import (
    H200,
    assert_exact,
    assert_float32_exact,
    assert_kinds_exact,
    assert_no_races,
    lists_of_sizes,
    offers,
    strange_layouts,
)
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.window_gemm.fma import WindowDgradFma

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
FMA, PASS = WindowDgradFma(), Pass.INPUT_GRAD

LAYERS = {
    "depthwise": make((2, 5, 9, 11), 5, 4, 2, 1, groups=5),
    "depthwise, kernel = stride": make((3, 4, 6, 7), 4, 4, 4, groups=4),
    "depthwise, large stride": make((2, 3, 7, 9), 3, 7, 6, 3, 4, groups=3),
    "depthwise, dilated": make((1, 3, 11, 13), 3, 3, groups=3, dilation=3),
    "depthwise, dilated with a stride": make((2, 2, 9, 7), 2, (3, 5), (2, 3), (1, 2), 1, groups=2, dilation=(3, 2)),
    "depthwise volumes": make((2, 3, 4, 6, 7), 3, (2, 3, 5), (1, 2, 2), (0, 1, 2), groups=3),
    "depthwise, dilated volumes": make((1, 2, 8, 9, 10), 2, 3, groups=2, dilation=3),
    "depth multiplier": make((2, 3, 6, 9), 6, 3, 2, 1, groups=3),
    "groups": make((2, 12, 7, 10), 20, (3, 4), (2, 1), (1, 2), groups=4),
    "groups of volumes": make((1, 6, 5, 4, 7), 9, 4, 2, 1, groups=3),
    "groups of frames": make((3, 16, 37), 24, 7, 5, 3, groups=2),
    "seven inputs": make((2, 7, 9, 12), 19, 3, 2, 1),
    "five inputs of volumes": make((2, 5, 4, 5, 6), 2, 3, 3),
    "many inputs": make((1, 29, 5, 7), 6, 3, 2, 1, 1),
    "kernel < stride": make((2, 4, 6, 5), 4, 2, (3, 4), 0, 1, groups=4),
    "one tap": make((2, 6, 9, 7), 10, 1, 2, 0, 1),
    "cropped": make((1, 4, 12, 13), 4, 5, 2, 6, groups=4),
    "cropped by more than a tile": make((1, 2, 40, 41), 2, 3, 1, 30, groups=2, dilation=20),
    "long rows": make((1, 3, 2, 140), 3, (2, 9), (1, 2), (0, 4), groups=3),
    "tall images": make((1, 2, 70, 3), 2, 5, 2, 2, groups=2),
    "many tiny images": make((37, 3, 2, 3), 6, 3, 2, 1, groups=3),
    "many taps": make((1, 4, 3, 30), 8, (2, 40), (1, 8), (0, 3), groups=2),
    "empty batch": make((0, 4, 4, 4), 4, 3, groups=4),
}


def cases() -> Iterator[ParameterSet]:
    for name, layer in LAYERS.items():
        for dtype in ("float32", "bfloat16", "float64"):
            yield pytest.param(replace(layer, dtype=dtype), id=f"{name}-{dtype}")


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize("problem", list(cases()))
def test_layers(problem: ConvTransposeProblem) -> None:
    """Tensors of each kind whose rows have no gaps, a config of each by turns; on a GPU it is all configs."""
    given = [layouts for layouts in strange_layouts(problem) if layouts.output[4] == 1]
    assert assert_kinds_exact(FMA, problem, PASS, given) == len(given)


@pytest.mark.sampled(16, 2)
@pytest.mark.parametrize("name", LAYERS)
def test_every_config(name: str) -> None:
    """Those that the planner is not offered, too."""
    problem = replace(LAYERS[name], dtype="float16")
    layouts = Layouts.dense(problem)
    met = set()
    for config in FMA.configs(problem, PASS, H200):
        if (cost := FMA.cost(problem, PASS, H200, layouts, config)) is not None:
            program = FMA.program(problem, PASS, H200, layouts, config)
            assert_exact(problem, PASS, Candidate(FMA.name, config, *cost), program, layouts)
            met.add(config.by_rows)
    assert met == ({True, False} if problem.axes3[1].kernel > 1 and name != "many taps" else {False})


@pytest.mark.parametrize("name", ["depthwise", "groups of volumes", "seven inputs"])
def test_no_races(name: str) -> None:
    assert_no_races(FMA, LAYERS[name], PASS)


def test_float32_is_exact() -> None:
    """Sums of 40 x 49 products; in one chain the error is larger."""
    problem = make((1, 3, 9, 9), 40, 7, 2, 3)
    for _, program in offers(FMA, problem, PASS):
        assert_float32_exact(program, problem, PASS, 2e-7)


def test_every_size_has_the_layer_s_kernels() -> None:
    assert len(lists_of_sizes(FMA, make((2, 64, 8, 16), 64, 4, 2, 1, groups=64), PASS)) == 1


def test_limits() -> None:
    layer = make((2, 8, 9, 11), 8, 4, 2, 1, groups=8)
    assert refusal(FMA, layer, PASS, H200) is None
    refused = {
        "bulk copies": (layer, DeviceInfo.for_arch("sm_80")),
        "NCHW": (replace(layer, channels_last=True), H200),
        "input channels": (make((2, 65, 9, 11), 8, 4, 2, 1), H200),
        "tensor cores": (make((2, 9, 9, 11), 9, 4, 2, 1, tf32=True), H200),
    }
    for words, (problem, device) in refused.items():
        assert words in str(refusal(FMA, problem, PASS, device))
