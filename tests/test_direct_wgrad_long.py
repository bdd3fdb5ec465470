"""The weight gradient of long kernels with large strides, executed by the emulator; test_gpu.py runs it on a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import H200, Emulator, assert_exact, offers, params, reference, run, strange_layouts
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.schedules.direct_wgrad import long as direct_wgrad_long
from polyphase.schedules.direct_wgrad.long import DirectWgradLong
from polyphase.schedules.schedule import Candidate

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
PASS = Pass.WEIGHT_GRAD

LAYERS = {
    "frames": make((2, 6, 13), 2, 64, 16, 24),
    "overlapping in groups": make((3, 4, 21), 6, 40, 8, 12, groups=2),
    "many input channels": make((1, 37, 5), 1, 32, 16),
    "many outputs": make((1, 2, 9), 20, 40, 20, 10),
    "depthwise": make((2, 24, 7), 48, 32, 32, groups=24),
    "kernel < stride": make((2, 3, 6), 2, 11, 20, 3, 5),
    "not a multiple of the stride": make((2, 3, 11), 2, 45, 12, 5, 4),
    "odd stride": make((2, 3, 10), 3, 27, 9, 7),
    "long rows": make((1, 1, 150), 1, 24, 8, 8),
    "one column": make((3, 5, 1), 2, 48, 16, 4),
    "many taps a stride apart": make((1, 2, 9), 1, 164, 8, 80),
    "cropped": make((1, 4, 6), 2, 40, 8, 39),
    "upsampling of classes": make((2, 3, 3, 5), 3, 16, 8, 4),
    "2-D": make((1, 2, 4, 7), 4, (3, 24), (2, 8), (1, 6), (1, 4), dilation=(2, 1), groups=2),
    "3-D": make((2, 2, 2, 3, 4), 2, (3, 2, 16), (2, 1, 8), (1, 0, 4)),
    "one channel, last": make((2, 3, 4, 5), 1, (4, 16), (2, 8), (1, 4), channels_last=True),
    "empty batch": make((0, 4, 3), 2, 16, 8, 4),
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
        if layouts.output[4] == 1:
            found = offers(DirectWgradLong(), problem, PASS, layouts)
            candidate, program = found[(order + turn) % len(found)]
            assert_exact(problem, PASS, candidate, program, layouts, Emulator(order % 1000))


def test_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of every shape: chains that end, parts, walkers, columns and rows of sums left over."""
    monkeypatch.setattr(direct_wgrad_long, "_CHAIN", 16)
    monkeypatch.setattr(direct_wgrad_long, "_LEAST_STEPS", 2)
    number, taken = 0, set()
    layers = (
        (1, make((2, 10, 41), 6, 55, 12, 7, 3, groups=2)),
        (132, make((2, 10, 41), 6, 55, 12, 7, 2, groups=2, dtype="bfloat16")),
        (1, make((2, 10, 71), 6, 72, 16, 4, groups=2, dtype="float16")),
    )
    for multiprocessors, problem in layers:
        layouts, device = Layouts.dense(problem), replace(H200, multiprocessors=multiprocessors)
        for config in DirectWgradLong().configs(problem, PASS, H200):
            program = DirectWgradLong().program(problem, PASS, device, layouts, config)
            found = params(program)
            facts = {
                "several chains": found["part_length"] > found["flush"],
                "several parts": program.splits > 1,
                "input channels left over": problem.in_channels_per_group % config.in_held > 0,
                "taps left over": 5 % config.taps_held > 0,
                "aligned": dict(program.main.source.constants)["PIECE"] > 1,
                "several walkers": config.walkers > 1,
                "on tensor cores": config.row_tiles > 0,
            }
            number += 1
            if number % (9 if config.row_tiles else 30) == 0 or not set(facts.items()) <= taken:
                candidate = Candidate("direct_wgrad_long", config, 0.0, "")
                assert_exact(problem, PASS, candidate, program, layouts, executor=Emulator(number))
            taken |= set(facts.items())
    assert not {(fact, value) for fact in facts for value in (False, True)} - taken - {("several walkers", False)}


def test_no_races() -> None:
    problem = LAYERS["overlapping in groups"]
    candidate, program = offers(DirectWgradLong(), problem, PASS)[0]
    assert candidate.config.walkers > 1
    assert_exact(problem, PASS, candidate, program, executor=Emulator(order=None))


def test_float32_is_exact() -> None:
    problem = make((2, 4, 300), 2, 32, 8, 8)
    generator = torch.Generator().manual_seed(5)
    operands = tuple(torch.randn(shape, generator=generator) for shape in (problem.input_shape, problem.output_shape))
    _, program = offers(DirectWgradLong(), problem, PASS)[0]
    found = run(problem, PASS, program, Layouts.dense(problem), operands).double()
    exact = reference(problem, PASS, (operands[0].double(), operands[1].double()))
    assert (found - exact).norm() / exact.norm() < 3e-7


def test_an_output_gradient_that_is_infinite_beside_the_image() -> None:
    """Positions beside a row of the input are left out, and are no zeros."""
    problem = make((1, 2, 3), 2, 20, 8, 0, 3)
    x, grad = (torch.ones(shape, dtype=torch.float64) for shape in (problem.input_shape, problem.output_shape))
    grad[..., 0] = torch.inf  # meets the first position at the first tap alone
    grad[..., -3:] = torch.inf  # meet no position at all
    for candidate, program in offers(DirectWgradLong(), problem, PASS)[:2]:
        found = run(problem, PASS, program, Layouts.dense(problem), (x, grad)).double()
        assert torch.equal(found, reference(problem, PASS, (x, grad))), candidate.describe()
        assert found[..., 1:].isfinite().all()


def test_refusals() -> None:
    schedule, layer = DirectWgradLong(), make((2, 4, 30), 4, 32, 8)
    assert refusal(schedule, layer, PASS, H200) is None
    assert "lie apart" in (refusal(schedule, make((2, 4, 30), 4, 32, 8, dilation=2), PASS, H200) or "")
    assert "within a stride" in (refusal(schedule, make((2, 4, 30), 4, 32, 4), PASS, H200) or "")
    assert "weight gradient" in (refusal(schedule, layer, Pass.INPUT_GRAD, H200) or "")
