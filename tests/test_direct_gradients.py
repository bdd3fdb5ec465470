"""The direct weight gradients and the input gradient as dot products, in the emulator; test_gpu.py has a GPU's turn."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import (
    H200,
    Emulator,
    assert_exact,
    assert_float32_exact,
    assert_kinds_exact,
    assert_no_races,
    formats,
    integers,
    lists_of_sizes,
    offers,
    params,
    reference,
    run,
    strange_layouts,
)
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.direct_wgrad import channels, gemm, long, windows
from polyphase.schedules.direct_wgrad.channels import DirectWgradChannels
from polyphase.schedules.direct_wgrad.gemm import DirectWgradGemm
from polyphase.schedules.direct_wgrad.long import DirectWgradLong
from polyphase.schedules.direct_wgrad.windows import DirectWgradWindows
from polyphase.schedules.dot_dgrad import schedule as dot_dgrad
from polyphase.schedules.dot_dgrad.schedule import DotDgrad
from polyphase.schedules.schedule import Candidate, Schedule
from polyphase.schedules.window_gemm.window import as_one_channel

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
PASS = Pass.WEIGHT_GRAD

LONG = {
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

CHANNELS = {
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
    "rows of whole runs": make((2, 6, 5, 9), 6, (3, 8), (2, 4), (1, 2), groups=6, channels_last=True),
    "runs begin before": make((1, 8, 3, 30), 16, (2, 24), (1, 8), (0, 5), (0, 2), groups=8, channels_last=True),
    "runs of dilated taps": make((1, 8, 4, 12), 8, (3, 5), 4, (1, 8), 3, dilation=(1, 4), groups=4, channels_last=True),
    "empty batch": make((0, 8, 4, 4), 8, 3, groups=8, channels_last=True),
}

WINDOWS = {
    "last of a generator": make((3, 40, 8, 12), 3, 4, 2, 1),
    "super resolution": make((2, 28, 9, 16), 1, 9, 4, 4, 3),
    "stride 1": make((2, 16, 9, 20), 3, 7, 1, 3),
    "odd rows": make((2, 17, 7, 11), 1, 5, 2, 2),
    "odd channels and rows": make((2, 9, 6, 13), 2, 3, 2, 1, 1),
    "kernel = stride": make((3, 24, 8, 12), 1, 2, 2),
    "kernel < stride": make((2, 18, 4, 8), 2, 2, (3, 4), 0, 2),
    "one tap": make((2, 12, 5, 9), 4, 1),
    "many output channels": make((1, 20, 6, 12), 21, 4, 2, 1),
    "many input channels": make((1, 200, 4, 8), 3, 4, 2, 1),
    "odd strides": make((2, 12, 8, 6), 3, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1)),
    "dilated": make((2, 8, 7, 10), 2, 3, 1, 2, dilation=(2, 3)),
    "cropped": make((1, 16, 8, 8), 2, 5, 2, 6, 1),
    "wide": make((1, 8, 3, 300), 1, 3, 2, 1, 1),
    "long kernel": make((1, 8, 2, 20), 1, (1, 40), (1, 8), (0, 3)),
    "tiny images": make((35, 12, 3, 3), 3, 4, 2, 1),
    "1-D": make((3, 24, 70), 1, 16, 8, 4),
    "3-D": make((2, 8, 4, 5, 6), 2, (2, 3, 4), (1, 2, 2), (0, 1, 1), (0, 1, 0)),
    "3-D, dilated": make((1, 8, 4, 3, 6), 1, 3, (1, 2, 1), 2, dilation=(2, 1, 2)),
    "groups": make((2, 40, 9, 14), 6, (3, 5), (2, 1), 1, groups=2),
    "groups of odd channels": make((2, 57, 5, 11), 9, 3, 2, 1, groups=3),
    "empty batch": make((0, 8, 4, 4), 3, 4, 2, 1),
}

FEW = {
    "volume": make((1, 270, 2, 2, 2), 6, 4, 2, 1),
    "one position": make((1, 33, 1, 1), 9, 4, 2, 1),
    "odd rows of columns": make((1, 37, 3, 3), 5, 3, 2),
    "pairs of columns": make((2, 20, 5), 7, 6, 3, 1),
    "groups": make((1, 26, 4, 4), 12, 4, 2, 1, groups=2),
    "frames": make((1, 40, 25), 5, 16, 8, 4),
    "all that are few": make((4, 19, 4, 4), 6, (2, 5), (1, 3), (1, 2), dilation=(2, 1)),
    "cropped": make((1, 12, 3, 3), 8, 5, 2, 4, channels_last=True),
    "empty batch": make((0, 8, 2, 2), 3, 4, 2, 1),
}

DOTS = {
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

LAYERS = {
    DirectWgradLong(): LONG,
    DirectWgradChannels(): CHANNELS,
    DirectWgradWindows(): WINDOWS,
    DotDgrad(): DOTS,
    DirectWgradGemm(): FEW,
}
LONG_WGRAD, CHANNELS_WGRAD, WINDOWS_WGRAD, DOT_DGRAD, GEMM_WGRAD = LAYERS


def versions(schedule: Schedule, layer: ConvTransposeProblem) -> list[ConvTransposeProblem]:
    """A layer in the dtypes and memory formats that it is tested in."""
    if schedule is WINDOWS_WGRAD:  # which is not asked here what it refuses: that ranks every layer at collection
        return formats(layer)[: 1 if layer is WINDOWS["dilated"] or layer.groups > 1 else None]
    if schedule is CHANNELS_WGRAD:
        ways = [("float32", True), ("bfloat16", True), ("bfloat16", False), ("float64", False)]
        ways += [("float32", False)] if layer.output_size[-1] % 4 == 0 else []
        return [replace(layer, dtype=dtype, channels_last=last) for dtype, last in ways]
    return [replace(layer, dtype=dtype) for dtype in ("float32", "bfloat16", "float64")]


def label(given: object) -> str:
    """A parameter in a test's name."""
    return given.name if isinstance(given, Schedule) else "" if isinstance(given, dict) else str(given)


def cases() -> Iterator[ParameterSet]:
    for schedule, layers in LAYERS.items():
        for name, layer in layers.items():
            for problem in versions(schedule, layer):
                order = "last" if problem.channels_last else "first"
                yield pytest.param(schedule, problem, id=f"{schedule.name}-{name}-{order}-{problem.dtype}")


def kinds(schedule: Schedule, problem: ConvTransposeProblem) -> list[Layouts]:
    """Tensors of each kind that a schedule may take; few channels of float64 in dense ones alone."""
    found = list(strange_layouts(problem))
    if schedule is CHANNELS_WGRAD and problem.dtype == "float64":
        return found[:1]
    return found if schedule is not LONG_WGRAD else [layouts for layouts in found if layouts.output[4] == 1]


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize(("schedule", "problem"), list(cases()))
def test_layers(schedule: Schedule, problem: ConvTransposeProblem) -> None:
    """Tensors of each kind, a config of each by turns; on a GPU it is all configs."""
    given = kinds(schedule, problem)
    met = assert_kinds_exact(schedule, problem, schedule.passes[0], given)
    if schedule is WINDOWS_WGRAD:
        assert met >= 3
    else:  # in channels_last taps, or columns, may lie apart
        assert met == len(given) or (schedule is DOT_DGRAD and problem.channels_last)


def test_layers_of_windows_in_both_formats() -> None:
    every = [(name, problem) for name, layer in WINDOWS.items() for problem in formats(layer)]
    refused = [(name, problem) for name, problem in every if refusal(WINDOWS_WGRAD, problem, PASS, H200)]
    apart = "dilated", "groups", "groups of odd channels"  # taps of a channel in channels_last
    assert refused == [(name, formats(WINDOWS[name])[1]) for name in apart]


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (LONG_WGRAD, LONG["overlapping in groups"]),
        (DOT_DGRAD, DOTS["upsampling of classes"]),
        (DOT_DGRAD, DOTS["frames"]),
        *(
            (WINDOWS_WGRAD, problem)
            for name in ("last of a generator", "odd rows")
            for problem in formats(WINDOWS[name])
        ),
    ],
    ids=label,
)
def test_no_races(schedule: Schedule, problem: ConvTransposeProblem) -> None:
    candidate = assert_no_races(schedule, problem, schedule.passes[0])
    assert schedule is not LONG_WGRAD or candidate.config.walkers > 1


@pytest.mark.parametrize(
    ("schedule", "problem", "most"),
    [
        (LONG_WGRAD, make((2, 4, 300), 2, 32, 8, 8), 3e-7),
        (CHANNELS_WGRAD, make((2, 32, 64, 48), 32, 3, 2, 1, groups=8, channels_last=True), 3e-7),
        *((WINDOWS_WGRAD, each, 2e-7) for each in formats(make((2, 32, 9, 24), 3, (3, 5), (2, 3), (1, 2)))),
        # Sums of 40 x 256 products, all of them offered; in one chain of each lane the error is 3.0e-7.
        *((DOT_DGRAD, make((1, 4, 5, 5), 40, 16, 8, 4, channels_last=last), 2e-7) for last in (False, True)),
    ],
    ids=label,
)
def test_float32_is_exact(
    schedule: Schedule, problem: ConvTransposeProblem, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dot_dgrad, "affordable_planes", lambda *_: 1)
    found = offers(schedule, problem, schedule.passes[0])
    for _, program in found if schedule is DOT_DGRAD else found[:1]:
        assert schedule is not DOT_DGRAD or program.splits == 1
        assert_float32_exact(program, problem, schedule.passes[0], most)


@pytest.mark.parametrize(
    ("schedule", "problem", "first"),
    [
        (LONG_WGRAD, make((1, 2, 3), 2, 20, 8, 0, 3), 1),
        (CHANNELS_WGRAD, make((1, 4, 3, 5), 4, 3, 2, 0, 1, groups=4, channels_last=True), 0),
    ],
    ids=label,
)
def test_an_output_gradient_that_is_infinite_beside_the_image(
    schedule: Schedule, problem: ConvTransposeProblem, first: int
) -> None:
    """Positions beside a row of the input are left out, and are no zeros."""
    x, grad = (torch.ones(shape, dtype=torch.float64) for shape in (problem.input_shape, problem.output_shape))
    grad[..., :first] = torch.inf  # meets the first position at the first tap alone
    grad[..., -problem.output_padding[-1] :] = torch.inf  # meet no position at all
    for candidate, program in offers(schedule, problem, PASS)[: 2 if schedule is LONG_WGRAD else None]:
        found = run(problem, PASS, program, Layouts.dense(problem), (x, grad)).double()
        assert torch.equal(found, reference(problem, PASS, (x, grad))), candidate.describe()
        assert found[..., first:].isfinite().all()


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_few_positions(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that compute several tiles of rows, with the same columns; sums that are stored as the result."""
    monkeypatch.setattr(gemm, "_LARGE", 1)
    met = set()
    for number, layer in enumerate(FEW.values()):
        problem, device = replace(layer, dtype=dtype), replace(H200, multiprocessors=1)
        layouts = Layouts.dense(problem)
        kinds: dict[tuple[bool, ...], list[tuple[Candidate, Program]]] = {}
        for config in GEMM_WGRAD.configs(GEMM_WGRAD.ranked_at(problem, PASS, layouts), PASS, H200):
            program = GEMM_WGRAD.program(problem, PASS, device, layouts, config)
            cost = GEMM_WGRAD.cost(problem, PASS, device, layouts, config)
            assert cost is not None
            assert len(program.steps) == 1
            shares, row_blocks = params(program)["row_shares"], -(-problem.in_channels_per_group // config.rows)
            assert shares == row_blocks or config.whole
            kind = config.whole, shares < row_blocks, config.k_slices > 1
            kinds.setdefault(kind, []).append((Candidate(GEMM_WGRAD.name, config, *cost), program))
        several = sorted(kinds, reverse=True)
        for kind in several if number == 0 else [several[number % len(several)]]:
            candidate, program = kinds[kind][41 * number % len(kinds[kind])]
            assert_exact(problem, PASS, candidate, program, layouts, executor=Emulator(number or None))
        met |= {*several}
    assert len(met) == 6
    assert {whole for whole, *_ in met} == {True, False}


def test_few_positions_have_kernels_of_their_own() -> None:
    """A list for each power of two of positions, and one for all others, and for layers of few weights."""
    layer = make((1, 512, 2, 2, 2), 32, 4, 2, 1)
    sizes = {(1, 2): 8, (1, 1): 8, (2, 2): 16, (8, 2): 64, (9, 2): 128, (1, 16): 0, (64, 16): 0}
    for (batch, side), few in sizes.items():
        problem = replace(layer, batch=batch, input_size=(side,) * 3)
        assert GEMM_WGRAD.ranked_at(problem, PASS, Layouts.dense(problem)).few == few
        candidate, program = offers(GEMM_WGRAD, problem, PASS)[0]
        assert candidate.config.whole or few != 8
        assert (len(program.steps) == 1) is (program.splits == 1)
    assert GEMM_WGRAD.ranked_at(replace(layer, in_channels=511), PASS, Layouts.dense(layer)).few == 0


def test_every_size_has_the_layer_s_kernels() -> None:
    for layer in formats(make((2, 64, 8, 16), 3, 4, 2, 1)):
        assert len(lists_of_sizes(WINDOWS_WGRAD, layer, PASS)) == 1


LONG_LAYER = make((2, 4, 30), 4, 32, 8)
GROUPED = make((2, 64, 9, 11), 64, 3, groups=64)
NARROW = make((2, 32, 8, 8), 3, 4, 2, 1, tf32=True)
MANY_TAPS = make((8, 21, 16, 16), 21, 64, 32, 16)


@pytest.mark.parametrize(
    ("schedule", "taken", "refused"),
    [
        (
            LONG_WGRAD,
            LONG_LAYER,
            {
                make((2, 4, 30), 4, 32, 8, dilation=2): "without dilation",
                make((2, 4, 30), 4, 32, 4): "at least 8 along the width",
            },
        ),
        (CHANNELS_WGRAD, GROUPED, {make((2, 64, 9, 11), 64, 3): "not few"}),
        (
            WINDOWS_WGRAD,
            NARROW,
            {
                replace(NARROW, dtype="bfloat16"): "float32",
                replace(NARROW, out_channels=16): "tensor cores",
                replace(NARROW, out_channels=33, tf32=False): "528 pairs",
                replace(NARROW, in_channels=64, out_channels=4, groups=2, channels_last=True): "in channels_last needs",
                replace(NARROW, out_channels=4, groups=4): "at most 16 input channels",
                replace(NARROW, channels_last=True, dilation=(1, 2)): "in channels_last needs",
                replace(NARROW, stride=(2, 20000)): "no tile",
            },
        ),
        (
            DOT_DGRAD,
            MANY_TAPS,
            {
                make((8, 21, 16, 16), 21, 4, 2, 1): "fewer taps than a warp has lanes",
                make((8, 21, 16, 16), 21, 8, 4, 2, dilation=3, channels_last=True): "in channels_last needs",
            },
        ),
    ],
    ids=label,
)
def test_refusals(schedule: Schedule, taken: ConvTransposeProblem, refused: dict[ConvTransposeProblem, str]) -> None:
    assert refusal(schedule, taken, schedule.passes[0], H200) is None
    for problem, reason in refused.items():
        assert reason in (refusal(schedule, problem, schedule.passes[0], H200) or "")
    title = "input gradient" if schedule is DOT_DGRAD else "weight gradient"
    assert f"{title} only" in (refusal(schedule, taken, Pass.FORWARD, H200) or "")


def test_every_shape_of_long_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of every shape: chains that end, splits, walkers, columns and rows of sums left over."""
    monkeypatch.setattr(long, "_CHAIN", 16)
    monkeypatch.setattr(long, "_LEAST_STEPS", 2)
    number, taken = 0, set()
    layers = (
        (1, make((2, 10, 41), 6, 55, 12, 7, 3, groups=2)),
        (132, make((4, 10, 91), 6, 55, 12, 7, 2, groups=2, dtype="bfloat16")),
        (1, make((2, 10, 71), 6, 72, 16, 4, groups=2, dtype="float16")),
    )
    for multiprocessors, problem in layers:
        layouts, device = Layouts.dense(problem), replace(H200, multiprocessors=multiprocessors)
        for config in LONG_WGRAD.configs(problem, PASS, H200):
            program = LONG_WGRAD.program(problem, PASS, device, layouts, config)
            found = params(program)
            facts = {
                "several chains": found["split_length"] > found["flush"],
                "several splits": program.splits > 1,
                "input channels left over": problem.in_channels_per_group % config.in_held > 0,
                "taps left over": 5 % config.taps_held > 0,
                "aligned": dict(program.main.source.constants)["PIECE"] > 1,
                "several walkers": config.walkers > 1,
            }
            number += 1
            if number % 30 == 0 or not set(facts.items()) <= taken:
                candidate = Candidate("direct_wgrad_long", config, 0.0, "")
                assert_exact(problem, PASS, candidate, program, layouts, executor=Emulator(number))
            taken |= set(facts.items())
    assert not {(fact, value) for fact in facts for value in (False, True)} - taken - {("several walkers", False)}


def _counts(program: Program) -> tuple[list[int], list[int], int, int]:
    """Walkers and tiles along n, d, h and w, tiles of a split, and of all."""
    found = params(program)
    n, d, w, h = found["tiles"]
    return found["walkers"], [n, d, h, w], found["split_length"], found["all_tiles"]


def test_layers_of_few_channels_take_every_path() -> None:
    """Every branch that a config or a tiling decides; `test_long_sums_of_few_channels` takes others."""
    taken = set()
    for problem in (each for layer in CHANNELS.values() for each in versions(CHANNELS_WGRAD, layer)):
        for layouts in kinds(CHANNELS_WGRAD, problem):
            for candidate, program in offers(CHANNELS_WGRAD, problem, PASS, layouts):
                config, constants = candidate.config, dict(program.main.source.constants)
                depth, height, width = (axis.kernel for axis in problem.axes3)
                walkers, tiles, length, total = _counts(program)
                facts = {
                    "several groups a vector": config.vector > problem.out_channels_per_group,
                    "several vectors a group": config.vector < problem.out_channels_per_group,
                    "a part of the input channels": config.in_held < problem.in_channels_per_group,
                    "input channels in vectors": constants["X_VECTOR"] > 1,
                    "output channels one by one": constants["GRAD_VECTOR"] < config.vector,
                    "runs along the width": constants["GRAD_RUN"] > 1,
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
                    "several splits": program.splits > 1,
                    "a shorter split": length > 0 and total % length > 0,
                    **{f"several walkers along {axis}": count > 1 for axis, count in zip("ndhw", walkers)},
                    **{f"several tiles along {axis}": count > 1 for axis, count in zip("ndhw", tiles)},
                }
                taken |= set(facts.items()) | {("vector", config.vector), ("run", constants["GRAD_RUN"])}
    missing = {(fact, value) for fact in facts for value in (False, True)} - taken
    assert not missing
    assert {value for fact, value in taken if fact == "vector"} == {1, 2, 4, 8}
    assert {value for fact, value in taken if fact == "run"} == {1, 2, 4, 8}


def test_long_sums_of_few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block that goes on along all dimensions, and adds its sums to earlier ones; in several orders of threads."""
    monkeypatch.setattr(channels, "_CHAIN", 16)
    problem = make((3, 32, 33, 70), 32, 3, 2, 1, groups=32, channels_last=True)
    few = replace(H200, multiprocessors=1)
    dense = Layouts.dense(problem)
    for candidate in candidates(CHANNELS_WGRAD, problem, PASS, few, dense):
        program = CHANNELS_WGRAD.program(problem, PASS, few, dense, candidate.config)
        _, _, length, _ = _counts(program)
        assert length > 16 // candidate.config.positions
        assert_exact(problem, PASS, candidate, program, executor=Emulator(order=None))


def test_pixels_far_apart() -> None:
    """Columns further apart than the kernel's constants have room for are not offered, and those just below are."""
    problem = make((2, 64, 9, 11), 64, 3, 2, 1, groups=64, channels_last=True)
    dense = Layouts.dense(problem)
    for apart, offered in ((2**25, True), (2**31, False)):
        layouts = replace(dense, output=(*dense.output[:4], apart))
        assert bool(offers(CHANNELS_WGRAD, problem, PASS, layouts)) == offered


def test_blocks_fill_rounds() -> None:
    """Where there are more blocks of channels than are resident, splits make the last round of them a full one."""
    layer = make((16, 600, 20, 20), 600, 3, 1, 1, groups=600)
    few = replace(H200, multiprocessors=100)
    for candidate in candidates(CHANNELS_WGRAD, layer, PASS, few, Layouts.dense(layer)):
        program = CHANNELS_WGRAD.program(layer, PASS, few, Layouts.dense(layer), candidate.config)
        rounds = program.main.grid[0] / (100 * candidate.config.min_blocks)
        assert program.main.grid[0] == 600 * program.splits
        assert rounds > 0.85 * math.ceil(rounds)


def test_every_shape_of_windows() -> None:
    """Blocks of every shape, in several orders of threads."""
    for problem in formats(make((2, 40, 5, 9), 3, 4, 2, 1)):
        layouts = Layouts.dense(problem)
        layer = windows._Layer.of(problem, layouts)
        assert layer is not None
        configs = list(dict.fromkeys(windows.legal_configs(layer)))
        for number, config in enumerate(configs[zlib.crc32(str(problem).encode()) % 5 :: 5]):
            program = WINDOWS_WGRAD.program(problem, PASS, H200, layouts, config)
            candidate = Candidate("direct_wgrad_windows", config, 0.0, "")
            assert_exact(problem, PASS, candidate, program, layouts, executor=Emulator(number))


def test_long_sums_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chains of a split, of several stages, and a rest."""
    monkeypatch.setattr(windows, "_CHAIN", 16)
    monkeypatch.setattr(windows, "affordable_planes", lambda problem: 1)
    for problem in formats(make((5, 24, 7, 36), 3, 3, 2, 1)):
        for candidate, program in offers(WINDOWS_WGRAD, problem, PASS):
            assert program.splits == 1
            assert_exact(problem, PASS, candidate, program, executor=Emulator(1))


def test_one_channel_stands_for_all() -> None:
    """The layer that channels last make of another has its output's elements and its weight's gradient."""
    for problem in WINDOWS.values():
        if problem.dims < 2 or problem.dilation[-1] > 1 or problem.batch == 0 or problem.groups > 1:
            continue
        last = replace(problem, channels_last=True)
        found = as_one_channel(last, Layouts.dense(last))
        assert found is not None
        narrow, layouts = found
        assert narrow.output_size == (*last.output_size[:-1], last.output_size[-1] * last.out_channels)
        assert layouts.output[4] == 1
        x, grad = integers(last.input_shape, 1), integers(last.output_shape, 2)
        rows = grad.movedim(1, -1).reshape(narrow.output_shape)
        wanted = reference(last, PASS, (x, grad)).movedim(1, -1).reshape(narrow.weight_shape)
        assert torch.equal(reference(narrow, PASS, (x, rows)), wanted)


def test_layers_of_dots_take_every_path() -> None:
    """Tiles of every shape, in one split and several, with channels and positions that do not exist."""
    taken = set()
    for problem in DOTS.values():
        for layouts in strange_layouts(problem):
            for candidate, program in offers(DOT_DGRAD, problem, Pass.INPUT_GRAD, layouts):
                taken |= {("in_tile", candidate.config.in_tile), ("splits", program.splits > 1)}
                taken.add(("rest", problem.in_channels_per_group % candidate.config.in_tile > 0))
    assert {value for fact, value in taken if fact == "in_tile"} == {1, 2, 4, 8, 16}
    assert {(fact, value) for fact in ("splits", "rest") for value in (False, True)} <= taken


def test_order_of_dots_does_not_depend_on_the_size() -> None:
    for problem in (make((8, 21, 16, 16), 21, 64, 32, 16), make((2, 18, 11), 1, 64, 16)):
        orders = set()
        for batch, side in ((1, 2), (8, 4), (64, 8)):
            other = replace(problem, batch=batch, input_size=(side,) * problem.dims)
            orders.add(tuple(candidate.config for candidate, _ in offers(DOT_DGRAD, other, Pass.INPUT_GRAD)))
        assert len(orders) == 1


def test_columns_beyond_32_bits_are_not_offered() -> None:
    assert offers(DOT_DGRAD, make((1, 1, 6_000), 1, 33, 1 << 15), Pass.INPUT_GRAD)
    assert "above 32768" in (refusal(DOT_DGRAD, make((1, 1, 33), 1, 33, 60_000_000), Pass.INPUT_GRAD, H200) or "")
    assert offers(DOT_DGRAD, make((2**26, 1, 32), 1, 33, 2), Pass.INPUT_GRAD)
    assert not offers(DOT_DGRAD, make((2**31, 1, 32), 1, 33, 2), Pass.INPUT_GRAD)
    wide = make((1, 8, 1, 180_000_000), 3, (1, 40), (1, 4), channels_last=True)
    assert "in channels_last needs" in (refusal(DOT_DGRAD, wide, Pass.INPUT_GRAD, H200) or "")


def test_tiles_narrower_than_a_step_read_no_further_channel() -> None:
    """Threads whose rows lie beyond the tile's columns: the emulator refuses reads behind the tensor."""
    problem = make((1, 64, 8, 64), 1, 2, 2, dtype="float64")
    narrow = [
        offer
        for offer in offers(DirectWgradGemm(), problem, Pass.WEIGHT_GRAD)
        if offer[0].config.columns * offer[0].config.depth < 256
    ]
    assert narrow
    candidate, program = narrow[0]
    assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(1))
