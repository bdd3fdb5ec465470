"""The weight gradient of few channels in a group, in the emulator; test_gpu.py has the same layers on a GPU."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import H200, Emulator, assert_exact, offers, params, reference, run, strange_layouts
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.direct_wgrad import channels as direct_wgrad_channels
from polyphase.schedules.direct_wgrad.channels import DirectWgradChannels
from polyphase.schedules.schedule import Candidate

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
WEIGHT_GRAD = Pass.WEIGHT_GRAD

LAYERS = {
    "depthwise": make((2, 64, 9, 11), 64, 4, 2, 1, groups=64, channels_last=True),
    "depthwise, stride 1": make((1, 96, 7, 13), 96, 5, 1, 2, groups=96, channels_last=True),
    "depthwise, dilated": make(
        (2, 20, 5, 9), 20, (3, 5), (2, 3), (1, 2), (1, 1), 20, False, (2, 1), channels_last=True
    ),
    "lanes that idle": make((2, 34, 5, 6), 34, 3, 2, 1, 1, groups=34, channels_last=True),
    "an odd number of channels": make((3, 37, 6, 5), 37, 3, 2, 1, groups=37, channels_last=True),
    "depth multiplier": make((2, 12, 7, 9), 24, 3, 2, 1, 1, groups=12, channels_last=True),
    "fewer outputs than inputs": make((2, 24, 7, 9), 12, 3, 2, 1, 1, groups=12, channels_last=True),
    "groups of two": make((2, 16, 7, 9), 16, 3, 1, 1, groups=8, channels_last=True),
    "groups of four": make((1, 32, 6, 10), 32, 3, 1, 1, groups=8, channels_last=True),
    "groups of eight": make((1, 32, 6, 10), 32, 3, 2, 1, 1, groups=4, channels_last=True),
    "groups of eight and sixteen": make(
        (2, 32, 6, 19), 64, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1), groups=4, channels_last=True
    ),
    "groups of three": make((2, 9, 6, 7), 12, 3, 2, 1, groups=3, channels_last=True),
    "groups of twelve": make((1, 60, 5, 7), 60, 3, 2, 1, groups=5, channels_last=True),
    "one group": make((2, 3, 9, 8), 4, 4, 2, 1, channels_last=True),
    "kernel < stride": make((2, 8, 4, 5), 8, 2, (3, 4), 0, 1, groups=8, channels_last=True),
    "kernel = stride": make((2, 24, 8, 9), 24, 2, 2, groups=24, channels_last=True),
    "cropped": make((1, 8, 6, 7), 8, 5, 2, 6, groups=8, channels_last=True),
    "longer outputs": make((1, 8, 6, 7), 8, 3, 3, 0, 2, groups=8, channels_last=True),
    "large kernel": make((1, 16, 9, 11), 16, 7, 1, 3, groups=16, channels_last=True),
    "long rows of taps": make((1, 8, 3, 9), 8, (2, 61), 1, (0, 30), groups=8, channels_last=True),
    "many rows of taps": make((1, 8, 9, 3), 8, (41, 2), 1, (20, 0), groups=8, channels_last=True),
    "many shares": make((1, 16, 3, 5), 16, (91, 31), 1, (45, 15), groups=16, channels_last=True),
    "wide": make((1, 64, 3, 150), 64, 3, 1, 1, groups=64, channels_last=True),
    "one column": make((2, 16, 9, 1), 16, 3, 1, 1, groups=16, channels_last=True),
    "many small images": make((37, 8, 2, 3), 8, 4, 2, 1, groups=8, channels_last=True),
    "3-D": make((2, 16, 3, 4, 5), 16, (3, 2, 3), (2, 1, 2), 1, groups=16, channels_last=True),
    "3-D, dilated": make((1, 8, 4, 3, 6), 8, 3, (1, 2, 1), 2, dilation=(2, 1, 2), groups=4, channels_last=True),
    "empty batch": make((0, 8, 4, 4), 8, 3, groups=8, channels_last=True),
}


#: The dtypes that layers are tested in, in each memory format: channels last, and first.
DTYPES = {True: ("float32", "bfloat16"), False: ("bfloat16", "float64")}


def cases() -> Iterator[ParameterSet]:
    for name, problem in LAYERS.items():
        for last, dtypes in DTYPES.items():
            for dtype in dtypes:
                order = "last" if last else "first"
                yield pytest.param(replace(problem, dtype=dtype, channels_last=last), id=f"{name}-{order}-{dtype}")


def strange_offers(problem: ConvTransposeProblem) -> Iterator[tuple[Layouts, list[tuple[Candidate, Program]]]]:
    """What is offered for tensors of each kind; of float64 for dense ones alone."""
    for layouts in strange_layouts(problem) if problem.dtype != "float64" else [Layouts.dense(problem)]:
        yield layouts, offers(DirectWgradChannels(), problem, WEIGHT_GRAD, layouts)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("problem", list(cases()))
def test_layers(problem: ConvTransposeProblem) -> None:
    order = zlib.crc32(str(problem).encode())
    for turn, (layouts, found) in enumerate(strange_offers(problem)):
        candidate, program = found[(order + turn) % len(found)]
        assert_exact(problem, WEIGHT_GRAD, candidate, program, layouts, Emulator(order))


def _counts(program: Program) -> tuple[list[int], list[int], int, int]:
    """Walkers and tiles along n, d, h and w, tiles of a part, and of all."""
    found = params(program)
    n, d, w, h = found["tiles"]
    return found["walkers"], [n, d, h, w], found["part_length"], found["all_tiles"]


def test_layers_take_every_path() -> None:
    """Every branch that a config or a tiling decides is taken by some layer; `test_long_sums` takes others."""
    taken = set()
    for parameters in cases():
        (problem,) = parameters.values
        for _, found in strange_offers(problem):
            for candidate, program in found:
                config, constants = candidate.config, dict(program.main.source.constants)
                depth, height, width = (axis.kernel for axis in problem.axes3)
                walkers, tiles, length, total = _counts(program)
                facts = {
                    "several groups a vector": config.vector > problem.out_channels_per_group,
                    "several vectors a group": config.vector < problem.out_channels_per_group,
                    "a part of the input channels": config.in_held < problem.in_channels_per_group,
                    "input channels in vectors": constants["X_VECTOR"] > 1,
                    "output channels one by one": constants["GRAD_VECTOR"] < config.vector,
                    "several shares of rows": config.rows < depth * height,
                    "rows left over": depth * height % config.rows > 0,
                    "several shares of columns": config.columns < width,
                    "columns left over": width % config.columns > 0,
                    "several blocks of shares": config.shares(problem) > config.block_shares,
                    "lanes that idle": problem.out_channels // config.vector % config.lanes > 0,
                    "several lanes": config.lanes > 1,
                    "several rows added at once": constants["ROWS_AT_ONCE"] > 1,
                    "not all rows added at once": constants["ROWS_AT_ONCE"] < config.rows,
                    "threads that idle": program.main.block > config.lanes * config.block_shares * config.walkers,
                    "several parts": program.splits > 1,
                    "a shorter part": length > 0 and total % length > 0,
                    **{f"several walkers along {axis}": count > 1 for axis, count in zip("ndhw", walkers)},
                    **{f"several tiles along {axis}": count > 1 for axis, count in zip("ndhw", tiles)},
                }
                taken |= set(facts.items()) | {("vector", config.vector)}
    missing = {(fact, value) for fact in facts for value in (False, True)} - taken
    assert not missing
    assert {value for fact, value in taken if fact == "vector"} == {1, 2, 4, 8}


def test_long_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block that goes on along all dimensions, and adds its sums to earlier ones; in several orders of threads."""
    monkeypatch.setattr(direct_wgrad_channels, "_CHAIN", 16)
    problem = make((3, 32, 33, 70), 32, 3, 2, 1, groups=32, channels_last=True)
    few = replace(H200, multiprocessors=1)
    dense = Layouts.dense(problem)
    for candidate in candidates(DirectWgradChannels(), problem, WEIGHT_GRAD, few, dense):
        program = DirectWgradChannels().program(problem, WEIGHT_GRAD, few, dense, candidate.config)
        _, _, length, _ = _counts(program)
        assert length > 16 // candidate.config.positions
        assert_exact(problem, WEIGHT_GRAD, candidate, program, executor=Emulator(order=None))


def test_pixels_far_apart() -> None:
    """Columns further apart than the kernel's constants have room for are not offered, and those just below are."""
    problem = make((2, 64, 9, 11), 64, 3, 2, 1, groups=64, channels_last=True)
    dense = Layouts.dense(problem)
    for apart, offered in ((2**25, True), (2**31, False)):
        layouts = replace(dense, output=(*dense.output[:4], apart))
        assert bool(offers(DirectWgradChannels(), problem, WEIGHT_GRAD, layouts)) == offered


def test_float32_is_exact() -> None:
    """The error is that of a sum whose parts are short chains."""
    problem = make((2, 32, 64, 48), 32, 3, 2, 1, groups=8, channels_last=True)
    generator = torch.Generator().manual_seed(5)
    operands = tuple(torch.randn(shape, generator=generator) for shape in (problem.input_shape, problem.output_shape))
    _, program = offers(DirectWgradChannels(), problem, WEIGHT_GRAD)[0]
    found = run(problem, WEIGHT_GRAD, program, Layouts.dense(problem), operands).double()
    exact = reference(problem, WEIGHT_GRAD, (operands[0].double(), operands[1].double()))
    assert (found - exact).norm() / exact.norm() < 3e-7


def test_an_output_gradient_that_is_infinite_beside_the_image() -> None:
    """Positions behind a row's last are left out, and are no zeros: what they meet reaches no weight but its own."""
    problem = make((1, 4, 3, 5), 4, 3, 2, 0, 1, groups=4, channels_last=True)
    x, grad = (
        torch.ones(problem.input_shape, dtype=torch.float64),
        torch.ones(problem.output_shape, dtype=torch.float64),
    )
    grad[..., -1] = torch.inf  # meets no position at all
    for candidate, program in offers(DirectWgradChannels(), problem, WEIGHT_GRAD):
        found = run(problem, WEIGHT_GRAD, program, Layouts.dense(problem), (x, grad))
        assert torch.equal(found.double(), reference(problem, WEIGHT_GRAD, (x, grad))), candidate.describe()
        assert found.isfinite().all()


def test_blocks_fill_rounds() -> None:
    """Where there are more blocks of channels than are resident, parts make the last round of them a full one."""
    layer = make((16, 600, 20, 20), 600, 3, 1, 1, groups=600)
    few = replace(H200, multiprocessors=100)
    for candidate in candidates(DirectWgradChannels(), layer, WEIGHT_GRAD, few, Layouts.dense(layer)):
        program = DirectWgradChannels().program(layer, WEIGHT_GRAD, few, Layouts.dense(layer), candidate.config)
        rounds = program.main.grid[0] / (100 * candidate.config.min_blocks)
        assert program.main.grid[0] == 600 * program.splits
        assert rounds > 0.85 * math.ceil(rounds)


def test_refusals() -> None:
    depthwise = make((2, 64, 9, 11), 64, 3, groups=64)
    schedule = DirectWgradChannels()
    assert refusal(schedule, depthwise, WEIGHT_GRAD, H200) is None
    assert "weight gradient" in (refusal(schedule, depthwise, Pass.FORWARD, H200) or "")
    assert "not few" in (refusal(schedule, make((2, 64, 9, 11), 64, 3), WEIGHT_GRAD, H200) or "")
