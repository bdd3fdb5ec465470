"""Few channels in a group in channels_last, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import H200, Emulator, assert_exact, assert_float32_exact, offers, params, strange_layouts
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.direct.channels import DirectChannels
from polyphase.schedules.schedule import Candidate

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
Offers = list[tuple[Candidate, Program]]

LAYERS = {
    "depthwise": make((2, 64, 9, 11), 64, 4, 2, 1, groups=64, bias=True, channels_last=True),
    "depthwise, stride 1": make((1, 96, 7, 13), 96, 5, 1, 2, groups=96, channels_last=True),
    "depthwise, dilated": make((2, 20, 5, 9), 20, (3, 5), (2, 3), (1, 2), (1, 1), 20, True, (2, 1), channels_last=True),
    "lanes that idle": make((2, 34, 5, 6), 34, 3, 2, 1, 1, groups=34, channels_last=True),
    "an odd number of channels": make((3, 7, 6, 5), 7, 3, 2, 1, groups=7, bias=True, channels_last=True),
    "depth multiplier": make((2, 12, 7, 9), 24, 3, 2, 1, 1, groups=12, channels_last=True),
    "fewer outputs than inputs": make((2, 24, 7, 9), 12, 3, 2, 1, 1, groups=12, bias=True, channels_last=True),
    "groups of four": make((1, 32, 6, 10), 32, 3, 1, 1, groups=8, channels_last=True),
    "groups of eight and sixteen": make(
        (2, 32, 6, 32), 64, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1), groups=4, channels_last=True
    ),
    "groups of three": make((2, 9, 6, 7), 12, 3, 2, 1, groups=3, channels_last=True),
    "one group": make((2, 3, 9, 8), 4, 4, 2, 1, bias=True, channels_last=True),
    "kernel < stride": make((2, 8, 4, 5), 8, 2, (3, 4), 0, 1, groups=8, bias=True, channels_last=True),
    "cropped": make((1, 8, 6, 7), 8, 5, 2, 6, groups=8, channels_last=True),
    "wide": make((1, 64, 3, 150), 64, 3, 1, 1, groups=64, channels_last=True),
    "one column": make((2, 16, 9, 1), 16, 3, 1, 1, groups=16, channels_last=True),
    "many small images": make((37, 8, 2, 3), 8, 4, 2, 1, groups=8, channels_last=True),
    "3-D": make((2, 16, 3, 4, 5), 16, (3, 2, 3), (2, 1, 2), 1, groups=16, bias=True, channels_last=True),
    "3-D, dilated": make((1, 8, 4, 3, 6), 8, 3, (1, 2, 1), 2, dilation=(2, 1, 2), groups=4, channels_last=True),
    "empty batch": make((0, 8, 4, 4), 8, 3, groups=8, channels_last=True),
}
PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)


def cases() -> Iterator[ParameterSet]:
    for name, problem in LAYERS.items():
        for pass_ in PASSES:
            for dtype in ("float32", "bfloat16", "float64"):
                if refusal(DirectChannels(), replace(problem, dtype=dtype), pass_, H200):  # a long sum of float32
                    assert (name, pass_, dtype) == ("groups of eight and sixteen", Pass.INPUT_GRAD, "float32")
                    continue
                yield pytest.param(replace(problem, dtype=dtype), pass_, id=f"{name}-{pass_.value}-{dtype}")


def strange_offers(problem: ConvTransposeProblem, pass_: Pass) -> Iterator[tuple[Layouts, Offers]]:
    """What is offered for tensors of each kind; of float64 for dense ones alone."""
    for layouts in strange_layouts(problem) if problem.dtype != "float64" else [Layouts.dense(problem)]:
        yield layouts, offers(DirectChannels(), problem, pass_, layouts)


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize(("problem", "pass_"), list(cases()))
def test_layers(problem: ConvTransposeProblem, pass_: Pass) -> None:
    order = zlib.crc32(f"{problem} {pass_}".encode())
    met = 0
    for turn, (layouts, found) in enumerate(strange_offers(problem, pass_)):
        if found:
            candidate, program = found[(order + turn) % len(found)]
            assert_exact(problem, pass_, candidate, program, layouts, Emulator(order))
            met += 1
    assert met >= 1


def test_layers_take_every_path() -> None:
    """Every branch that a config or a tiling decides is taken by some layer; `test_blocks_go_on` takes another."""
    taken = set()
    for parameters in cases():
        problem, pass_ = parameters.values
        forward = pass_ is Pass.FORWARD
        groups = problem.groups
        channels = (problem.out_channels if forward else problem.in_channels) // groups
        for _, found in strange_offers(problem, pass_):
            for candidate, program in found:
                config, constants = candidate.config, dict(program.main.source.constants)
                n, d, h, w = params(program)["tiles"]
                facts = {
                    "several groups a vector": config.vector > channels,
                    "several vectors a group": config.vector < channels,
                    "source channels in vectors": constants["SRC_VECTOR"] > 1,
                    "lanes that idle": params(program)["vectors"] % config.lanes != 0,
                    "several blocks of channels": program.main.grid[0] > 1,
                    "tiles along n": n > 1,
                    "tiles along d": d > 1,
                    "tiles along h": h > 1,
                    "tiles along w": w > 1,
                    "layouts apart": constants["DST_PIXEL"] != groups * channels,
                }
                taken |= set(facts.items()) | {("vector", config.vector)}
    assert taken >= {(fact, value) for fact in facts for value in (False, True)}
    assert {value for fact, value in taken if fact == "vector"} == {1, 2, 4, 8}


def test_blocks_go_on() -> None:
    """Blocks of few multiprocessors take many rows, the last of them fewer; in several orders of threads."""
    problem = make((2, 64, 37, 40), 64, 3, 2, 1, groups=64, bias=True, channels_last=True)
    few = replace(H200, multiprocessors=1)
    layouts = Layouts.dense(problem)
    candidate = next(candidates(DirectChannels(), problem, Pass.FORWARD, few, layouts))
    program = DirectChannels().program(problem, Pass.FORWARD, few, layouts, candidate.config)
    assert params(program)["steps"] > 1
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(order=None))


def test_pixels_far_apart() -> None:
    """Columns further apart than the kernel's constants have room for are not offered, and those just below are."""
    problem = make((2, 64, 9, 11), 64, 3, 2, 1, groups=64, channels_last=True)
    dense = Layouts.dense(problem)
    for apart, offered in ((2**26, True), (2**31, False)):
        layouts = replace(dense, input=(*dense.input[:4], apart))
        assert bool(offers(DirectChannels(), problem, layouts=layouts)) == offered


def test_float32_is_exact() -> None:
    """Each row of taps is summed by itself where sums are long; in one chain the error is 1.2e-7."""
    problem = make((2, 32, 9, 12), 64, (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=4, channels_last=True)
    assert_float32_exact(offers(DirectChannels(), problem)[0][1], problem, Pass.FORWARD, 8e-8)


def test_refusals() -> None:
    depthwise = make((2, 64, 9, 11), 64, 3, groups=64)
    schedule = DirectChannels()
    assert refusal(schedule, replace(depthwise, channels_last=True), Pass.FORWARD, H200) is None
    assert "forward pass and the input gradient" in (refusal(schedule, depthwise, Pass.WEIGHT_GRAD, H200) or "")
    assert "needs channels_last" in (refusal(schedule, depthwise, Pass.FORWARD, H200) or "")
    dense = make((2, 64, 9, 11), 64, 3, channels_last=True)
    assert "one after the other" in (refusal(schedule, dense, Pass.FORWARD, H200) or "")
    long = make((2, 8, 200, 200), 8, 160, groups=8, dtype="bfloat16", channels_last=True)
    assert "exceed" in (refusal(schedule, long, Pass.FORWARD, H200) or "")
