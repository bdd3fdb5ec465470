"""The input gradient of long kernels as dot products, executed by the emulator; test_gpu.py runs it on a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import H200, Emulator, assert_exact, offers, reference, run, strange_layouts
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.schedules.dot_dgrad import schedule as dot_dgrad
from polyphase.schedules.dot_dgrad.schedule import DotDgrad

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
PASS = Pass.INPUT_GRAD

LAYERS = {
    "upsampling of classes": make((2, 5, 3, 5), 5, 16, 8, 4, bias=True),
    "many input channels": make((1, 37, 2, 3), 2, (4, 9), (2, 3), 1),
    "frames": make((2, 18, 11), 1, 64, 16),
    "depthwise": make((2, 6, 3, 4), 6, 8, 4, 2, groups=6),
    "groups": make((1, 6, 3, 9), 4, (5, 8), 2, 2, groups=2),
    "stride 1": make((1, 3, 5, 13), 2, 7, 1, 3),
    "dilated": make((1, 2, 6, 8), 3, (5, 7), (3, 2), 4, 1, dilation=(2, 3)),
    "cropped": make((1, 4, 6, 7), 2, 6, 2, 7),
    "output padding": make((3, 2, 1, 6), 2, (3, 11), (4, 5), (0, 3), (3, 4)),
    "3-D": make((2, 3, 2, 3, 4), 2, (3, 4, 5), (2, 1, 3), (1, 2, 0)),
    "many rows": make((40, 1, 3, 2), 1, 6, 3),
    "one channel, last": make((2, 3, 4, 5), 1, 7, 2, 3, channels_last=True),
    "several channels, last": make((2, 5, 4, 6), 3, (4, 5), (2, 3), (1, 2), 1, channels_last=True),
    "dilated rows, last": make((1, 2, 6, 8), 3, (5, 7), (3, 2), 4, 1, dilation=(2, 1), channels_last=True),
    "empty batch": make((0, 4, 3, 3), 2, 8, 4),
}


def cases() -> Iterator[ParameterSet]:
    for name, layer in LAYERS.items():
        for dtype in ("float32", "bfloat16", "float64"):
            yield pytest.param(replace(layer, dtype=dtype), id=f"{name}-{dtype}")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("problem", list(cases()))
def test_layers(problem: ConvTransposeProblem) -> None:
    """Tensors of each kind, a config of each by turns; on a GPU it is all configs."""
    order = zlib.crc32(str(problem).encode())
    for turn, layouts in enumerate(strange_layouts(problem)):
        found = offers(DotDgrad(), problem, PASS, layouts)
        if not found:  # taps, or columns, lie apart
            assert problem.channels_last
            continue
        candidate, program = found[(order + turn) % len(found)]
        assert_exact(problem, PASS, candidate, program, layouts, Emulator(order % 1000))


def test_layers_take_every_path() -> None:
    """Tiles of every shape, in one part and several, with channels and positions that do not exist."""
    taken = set()
    for problem in LAYERS.values():
        for layouts in strange_layouts(problem):
            for candidate, program in offers(DotDgrad(), problem, PASS, layouts):
                taken |= {("in_tile", candidate.config.in_tile), ("parts", program.splits > 1)}
                taken.add(("rest", problem.in_channels_per_group % candidate.config.in_tile > 0))
    assert {value for fact, value in taken if fact == "in_tile"} == {1, 2, 4, 8, 16}
    assert {(fact, value) for fact in ("parts", "rest") for value in (False, True)} <= taken


@pytest.mark.parametrize("name", ["upsampling of classes", "frames"])
def test_no_races(name: str) -> None:
    candidate, program = offers(DotDgrad(), LAYERS[name], PASS)[0]
    assert_exact(LAYERS[name], PASS, candidate, program, executor=Emulator(order=None))


@pytest.mark.parametrize("last", [False, True])
def test_float32_is_exact(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of 40 × 256 products, in channels_last of one channel; in one chain of each lane the error is 3.0e-7."""
    monkeypatch.setattr(dot_dgrad, "affordable_planes", lambda *_: 1)
    problem = make((1, 4, 5, 5), 40, 16, 8, 4, channels_last=last)
    generator = torch.Generator().manual_seed(5)
    shapes = problem.output_shape, problem.weight_shape
    operands = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    exact = reference(problem, PASS, (operands[0].double(), operands[1].double()))
    for _, program in offers(DotDgrad(), problem, PASS):
        assert program.splits == 1
        found = run(problem, PASS, program, Layouts.dense(problem), operands).double()
        assert (found - exact).norm() / exact.norm() < 2e-7


def test_order_does_not_depend_on_the_size() -> None:
    for problem in (make((8, 21, 16, 16), 21, 64, 32, 16), make((2, 18, 11), 1, 64, 16)):
        orders = set()
        for batch, side in ((1, 2), (8, 4), (64, 8)):
            other = replace(problem, batch=batch, input_size=(side,) * problem.dims)
            orders.add(tuple(candidate.config for candidate, _ in offers(DotDgrad(), other, PASS)))
        assert len(orders) == 1


def test_columns_beyond_32_bits_are_not_offered() -> None:
    assert offers(DotDgrad(), make((1, 1, 6_000), 1, 33, 1 << 15), PASS)
    assert "above 32768" in (refusal(DotDgrad(), make((1, 1, 33), 1, 33, 60_000_000), PASS, H200) or "")
    assert offers(DotDgrad(), make((2**26, 1, 32), 1, 33, 2), PASS)
    assert not offers(DotDgrad(), make((2**31, 1, 32), 1, 33, 2), PASS)
    wide = make((1, 8, 1, 180_000_000), 3, (1, 40), (1, 4), channels_last=True)
    assert "side by side" in (refusal(DotDgrad(), wide, PASS, H200) or "")


def test_refusals() -> None:
    schedule = DotDgrad()
    long = make((8, 21, 16, 16), 21, 64, 32, 16)
    assert refusal(schedule, long, PASS, H200) is None
    assert "input gradient only" in (refusal(schedule, long, Pass.FORWARD, H200) or "")
    assert "lanes of a warp" in (refusal(schedule, make((8, 21, 16, 16), 21, 4, 2, 1), PASS, H200) or "")
    apart = make((8, 21, 16, 16), 21, 8, 4, 2, dilation=3, channels_last=True)
    assert "side by side" in (refusal(schedule, apart, PASS, H200) or "")
