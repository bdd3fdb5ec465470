"""Gradients of transposed and of float16 copies, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import emulator
from kernel_harness import (
    DTYPES,
    H200,
    Buffer,
    Emulator,
    Executor,
    assert_exact,
    assert_one_config_exact,
    gradient_cases,
    integers,
    offers,
    operand_shapes,
    reference,
    run,
    strange_layouts,
    unguarded,
)
from polyphase.plan import planner as plan
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts, Strides, dense_strides
from polyphase.program.step import Step
from polyphase.program.transpose import HALF_COPIES_BYTES, Transposed, to_channels_last, to_contiguous, to_halves
from polyphase.schedules.implicit_gemm.transposed import ImplicitGemmTransposed
from polyphase.schedules.window_gemm.transposed import WindowDgradTransposed, WindowWgradTransposed
from test_window_tma import LAYERS as BOX_LAYERS
from test_window_tma import WITHOUT_WEIGHT

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
SCHEDULES = {Pass.INPUT_GRAD: WindowDgradTransposed(), Pass.WEIGHT_GRAD: WindowWgradTransposed()}

# Those of the boxes, channels first, and what channels_last has no tensors of.
LAYERS = {
    **{name: replace(problem, channels_last=False) for name, problem in BOX_LAYERS.items()},
    "one-dimensional": make((3, 24, 37), 16, 5, 3, 2, 1, tf32=True),
    "one-dimensional, half": make((3, 24, 37), 16, 5, 3, 2, 1, dtype="bfloat16"),
    "odd images": make((3, 72, 5, 7), 24, 3, 2, 1, dtype="bfloat16"),
    "channels that are padded": make((2, 50, 5, 7), 21, 3, 2, 1, dtype="bfloat16"),
    "channels that are padded, float32": make((2, 18, 6, 9), 17, (2, 3), 1, 1, tf32=True),
    "channels of groups that are padded": make((2, 18, 6, 9), 30, 4, 2, 1, groups=2, dtype="float16"),
    "channels that are padded, one tap": make((2, 21, 9), 50, 1, dtype="bfloat16"),
    "channels_last": make((2, 24, 5, 6), 16, 3, 2, 1, tf32=True, channels_last=True),
    "channels_last, padded": make((3, 20, 5, 7), 12, 4, 2, 1, tf32=True, channels_last=True),
    "channels_last, padded groups": make((2, 40, 5, 6), 32, 3, 1, 1, groups=2, tf32=True, channels_last=True),
    "channels_last, three-dimensional": make((1, 16, 3, 4, 5), 24, 2, 2, tf32=True, channels_last=True),
}


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize(("problem", "pass_"), list(gradient_cases(LAYERS, WITHOUT_WEIGHT)))
def test_gradients(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """One config; on a GPU it is all of them."""
    assert_one_config_exact(SCHEDULES[pass_], problem, pass_)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pass_", SCHEDULES)
def test_tensors_of_any_strides(pass_: Pass, dtype: str) -> None:
    problem = make((2, 24, 5, 6), 16, 3, 2, 1, dtype=dtype, tf32=True)
    for number, layouts in enumerate(strange_layouts(problem)):
        found = list(candidates(SCHEDULES[pass_], problem, pass_, H200, layouts))
        written_dense = layouts.input == dense_strides(problem.input_shape, channels_last=False)
        assert bool(found) == (pass_ is Pass.WEIGHT_GRAD or (layouts.aligned and written_dense)), layouts
        for candidate in found[:1]:
            program = SCHEDULES[pass_].program(problem, pass_, H200, layouts, candidate.config)
            assert_exact(problem, pass_, candidate, program, layouts, executor=Emulator(number))


@pytest.mark.parametrize("pass_", SCHEDULES)
def test_channels_last_tensors_of_any_strides(pass_: Pass) -> None:
    """Those that the kernel reads that multiplies TF32."""
    problem = make((2, 24, 5, 6), 16, 3, 2, 1, tf32=True, channels_last=True)
    for number, layouts in enumerate(strange_layouts(problem)):
        found = list(candidates(SCHEDULES[pass_], problem, pass_, H200, layouts))
        assert bool(found) == layouts.aligned, layouts
        for candidate in found[:1]:
            program = SCHEDULES[pass_].program(problem, pass_, H200, layouts, candidate.config)
            assert_exact(problem, pass_, candidate, program, layouts, executor=Emulator(number))


@pytest.mark.parametrize("by_channels", [None, (1, 1, 1), (1, 2, 3)])
@pytest.mark.parametrize("how", ["dense", "rows of wider images", "channels of more", "unaligned", "groups"])
@pytest.mark.parametrize("shape", [(2, 24, 1, 5, 7), (3, 64, 2, 3, 9), (70, 8, 1, 1, 2), (1, 16, 1, 1, 150)])
def test_halves_of_channels_last(shape: tuple[int, ...], how: str, by_channels: tuple[int, int, int] | None) -> None:
    """Every number is copied once, and the check finds exactly what breaks a unit."""
    batch, channels, depth, height, width = shape
    groups, padded = (2, -(-channels // 16) * 8) if how == "groups" else (1, channels)
    pitch = {"channels of more": channels + 12, "unaligned": channels + 3}.get(how, channels)
    row = pitch * (width + 3 * (how == "rows of wider images"))
    strides: Strides = (depth * height * row, 1, height * row, row, pitch)
    step = to_halves(Transposed(shape, strides, groups, padded), 1, by_channels, grouped=groups > 1)
    assert step.source.kernel == "halve"
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    for broken in (None, "unit", "nan"):
        changed = values.clone()
        if broken == "unit":
            unit = changed[:, 1] if by_channels else changed[0, :8, 0, 0, 0]
            unit *= 1e-9
            if not by_channels and groups == 1:
                changed[0, :, 0, 0, 0] *= 1e-9
        elif broken == "nan":
            changed[-1, -1, -1, -1, -1] = float("nan")
        src = Buffer(shape, strides, torch.float32, torch.device("cpu"), changed)
        dst = torch.full((batch, depth, height, width, groups, padded), float("nan"), dtype=torch.float16)
        copies = torch.zeros(HALF_COPIES_BYTES, dtype=torch.uint8)
        copies.view(torch.float32)[8 + 128 + 5] = 3.0  # the largest of the second tensor's samples
        Emulator()(step, [src.tensor, copies, dst])
        scale = copies.view(torch.float32)[2]
        assert scale == 2.0**10
        expected = (changed * scale).half().movedim(1, -1).unflatten(-1, (groups, -1))
        assert torch.equal(dst[..., : channels // groups].nan_to_num(7), expected.nan_to_num(7))
        assert not dst[..., channels // groups :].any()
        assert bool(copies.view(torch.int32)[0]) == (broken is not None), broken


@pytest.mark.parametrize("channels_last", [False, True])
def test_inputs_of_forward_passes_may_have_outliers(channels_last: bool) -> None:
    """A hundred times as large as all samples."""
    shape = (1, 64, 5, 7)
    strides = dense_strides(shape, channels_last)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    values[0, 40, 3, 3] = 300.0
    for forward in (False, True):
        step = to_halves(Transposed(shape, strides), measures=forward)
        assert step.source.kernel == ("halve" if channels_last else "transpose")
        src = Buffer(shape, strides, torch.float32, torch.device("cpu"), values)
        dst = torch.empty((1, 5, 7, 64), dtype=torch.float16)
        copies = torch.zeros(HALF_COPIES_BYTES, dtype=torch.uint8)
        copies.view(torch.float32)[8 + 5] = 3.0  # the largest of the samples
        Emulator()(step, [src.tensor, copies, dst])
        assert bool(copies.view(torch.int32)[0]) is not forward
        if forward:
            assert torch.equal(dst, (values * 2.0**6).half().movedim(1, -1))


@pytest.mark.parametrize("channels", [65, 129, 257, 513])
def test_small_numbers_of_a_last_channel(channels: int) -> None:
    """A tile's channels of a pixel are a unit. The last one has several, so that a small number is no reason."""
    shape = (1, channels, 5, 7)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(channels))
    values[:, -1] *= 1e-8
    padded = -(-channels // 8) * 8
    step = to_halves(Transposed(shape, dense_strides(shape, False), 1, padded), measures=True)
    dst = torch.empty((1, 5, 7, padded), dtype=torch.float16)
    copies = torch.zeros(HALF_COPIES_BYTES, dtype=torch.uint8)
    copies.view(torch.float32)[8 + 5] = 3.0  # the largest of the samples
    Emulator()(step, [values, copies, dst])
    assert not copies.view(torch.int32)[0]
    assert torch.equal(dst[..., :channels], (values * 2.0**6).half().movedim(1, -1))
    layer = make((1, channels, 64, 64), 64, 4, 2, 1, tf32=True, channels_last=True)  # its copy would have such units
    assert "needs NCHW" in (ImplicitGemmTransposed().supports(layer, Pass.FORWARD, H200) or "")


# Layers in float32, whose copies are float16.
HALVES = {
    "two-dimensional": make((2, 24, 9, 10), 16, 3, 2, 1, tf32=True),
    "few pixels": make((3, 40, 3, 5), 21, 4, 2, 1, tf32=True),
    "groups": make((2, 32, 7, 9), 32, 3, 1, 1, groups=2, tf32=True),
    "many channels": make((1, 136, 5, 7), 200, 2, 1, tf32=True),
    "three-dimensional": make((1, 16, 3, 4, 6), 24, (2, 3, 3), (1, 2, 2), tf32=True),
    "channels_last": make((2, 24, 9, 10), 16, 3, 2, 1, tf32=True, channels_last=True),
    "channels_last, padded": make((3, 20, 3, 5), 12, 4, 2, 1, tf32=True, channels_last=True),
    "channels_last, groups": make((2, 32, 7, 9), 32, 3, 1, 1, groups=2, tf32=True, channels_last=True),
    "channels_last, many channels": make((1, 136, 5, 7), 200, 2, 1, tf32=True, channels_last=True),
    "channels_last, three-dimensional": make((1, 16, 3, 4, 6), 24, (2, 3, 3), (1, 2, 2), tf32=True, channels_last=True),
}


def _operands(problem: ConvTransposeProblem, pass_: Pass) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    first, second = (torch.randn(shape, generator=generator) for shape in operand_shapes(problem, pass_))
    return first, second


def _is_guarded(step: Step) -> bool:
    return bool(dict(step.source.constants).get("GUARDED"))


def _change(values: torch.Tensor, how: str, of_pixels: bool) -> None:
    """Makes copies inexact: ``of_pixels`` tells by which units a copy is checked."""
    if how == "small pixels of a tap":
        unit = values[0, :, 1, 2:3] if of_pixels else values[:, :, :, ::2]
        unit *= 1e-8
    elif how == "a small unit":
        unit = values[0, :, 1, 2:3] if of_pixels else values[:, 5]
        unit *= 1e-8
    elif how == "a unit that vanishes":
        unit = values[0, :, 1, 2:3] if of_pixels else values[:, 5]
        unit *= 1e-25
    elif how == "a large number":
        values[0, 3, 1, 1] = 1e9
    else:
        values[0, 3, 1, 1] = float(how)


INEXACT = ("a small unit", "small pixels of a tap", "a unit that vanishes", "a large number", "inf", "nan")


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("how", INEXACT)
@pytest.mark.parametrize("name", ["two-dimensional", "channels_last"])
@pytest.mark.parametrize("pass_", SCHEDULES)
def test_inexact_copies_are_not_used(pass_: Pass, name: str, how: str, second: bool) -> None:
    assert_inexact_copies_are_not_used(pass_, name, how, second, Emulator())


def assert_inexact_copies_are_not_used(pass_: Pass, name: str, how: str, second: bool, executor: Executor) -> None:
    """The result is that of the kernel that multiplies TF32, bit for bit."""
    problem = HALVES[name]
    operands = _operands(problem, pass_)
    if pass_ is Pass.WEIGHT_GRAD and not second and how == "small pixels of a tap":
        how = "a small unit"  # all of a channel's pixels of the input are added up
    _change(operands[second], how, of_pixels=pass_ is Pass.INPUT_GRAD)
    candidate, program = offers(SCHEDULES[pass_], problem, pass_)[0]
    guarded = [step for step in program.steps if _is_guarded(step)]
    free = unguarded(guarded)
    dense = Layouts.dense(problem)
    found = run(problem, pass_, program, dense, operands, executor=executor)
    alone = run(problem, pass_, replace(program, steps=free, main_index=0), dense, operands, executor=executor)
    if (
        how == "nan" and pass_ is Pass.INPUT_GRAD and not problem.channels_last
    ):  # which is no reason for a pixel's channels to be inexact
        assert torch.equal(found.isnan(), alone.isnan())
        assert (found - alone).nan_to_num().abs().max() < 0.05
        return
    assert torch.equal(found.nan_to_num(12345.0), alone.nan_to_num(12345.0)), candidate.describe()
    if how not in ("inf", "nan"):
        wide = reference(problem, pass_, (operands[0].double(), operands[1].double()))
        per_unit = wide.flatten(1) if pass_ is Pass.WEIGHT_GRAD else wide
        assert ((found - wide).abs() <= 2e-3 * per_unit.abs().max()).all()


@pytest.mark.parametrize("name", ["groups", "channels_last, groups"])
@pytest.mark.parametrize("pass_", SCHEDULES)
def test_groups_are_checked_apart(pass_: Pass, name: str) -> None:
    """A group of small numbers is as accurate as the others."""
    problem = HALVES[name]
    operands = _operands(problem, pass_)
    for values, name in zip(operands, ("first", "second")):
        if name == "first" or pass_ is Pass.WEIGHT_GRAD:
            values[:, values.shape[1] // 2 :] *= 1e-9
    _, program = offers(SCHEDULES[pass_], problem, pass_)[0]
    found = run(problem, pass_, program, Layouts.dense(problem), operands)
    wide = reference(problem, pass_, (operands[0].double(), operands[1].double()))
    split = (problem.in_channels // 2, 1 if pass_ is Pass.INPUT_GRAD else 0)
    for part, exact in zip(found.split(*split), wide.split(*split)):
        assert (part - exact).norm() <= 4e-4 * exact.norm()


@pytest.mark.parametrize("name", ["two-dimensional", "channels_last"])
def test_an_empty_batch_gives_zeros(name: str) -> None:
    """Nothing copies its tensors; emitted files launch it."""
    problem = HALVES[name]
    candidate, _ = offers(SCHEDULES[Pass.WEIGHT_GRAD], problem, Pass.WEIGHT_GRAD)[0]
    empty = replace(problem, batch=0)
    dense = Layouts.dense(empty)
    program = SCHEDULES[Pass.WEIGHT_GRAD].program(empty, Pass.WEIGHT_GRAD, H200, dense, candidate.config)
    operands = torch.zeros(empty.input_shape), torch.zeros(empty.output_shape)
    assert not run(empty, Pass.WEIGHT_GRAD, program, dense, operands).any()


@pytest.mark.parametrize("scales", [(1.0, 1.0), (3e-20, 5e-16), (2e12, 7e9), (1e-30, 1e30)])
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("pass_", SCHEDULES)
def test_exact_copies_round_like_tf32(pass_: Pass, name: str, scales: tuple[float, float]) -> None:
    assert_exact_copies_round_like_tf32(HALVES[name], pass_, scales, Emulator())


def assert_exact_copies_round_like_tf32(
    problem: ConvTransposeProblem, pass_: Pass, scales: tuple[float, float], executor: Executor
) -> None:
    """Tensors of any scale, with zeros and a few small numbers; the guarded steps change nothing."""
    first, second = _operands(problem, pass_)
    first[first.abs() < 0.1] *= 1e-6
    second[second < -1] = 0
    first, second = first * scales[0], second * scales[1]
    _, program = offers(SCHEDULES[pass_], problem, pass_)[0]
    steps = tuple(step for step in program.steps if not _is_guarded(step))
    assert len(steps) < len(program.steps)
    dense = Layouts.dense(problem)
    found = run(problem, pass_, program, dense, (first, second), executor=executor)
    alone = run(problem, pass_, replace(program, steps=steps), dense, (first, second), executor=executor)
    assert torch.equal(found, alone)
    wide = reference(problem, pass_, (first.double(), second.double()))
    assert (found - wide).norm() <= 4e-4 * wide.norm()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 72, 5, 13),
        (3, 9, 1, 1),
        (1, 133, 3, 4, 11),
        (5, 16, 70),
        (2, 3, 8, 8),
        (0, 16, 4, 4),
        (40, 24, 3),  # a weight of few taps
        (1, 165, 67),  # rows of more pieces than a tile has, not all of them whole
        (2, 1, 7, 90),
        (2, 72, 5, 37),  # rows that are copied as they lie: many, of every length, beginning and ending anywhere
        (1, 264, 101),
        (1, 261, 67),
        (1, 48, 3, 4, 11),
        (1, 33, 16, 10),
    ],
)
def test_transposes(shape: tuple[int, ...], dtype: str) -> None:
    assert_turns(shape, dtype, Emulator())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", [(3, 20, 9), (2, 7, 16), (2, 33, 165)])
def test_sums_are_transposed(shape: tuple[int, ...], splits: int, dtype: str) -> None:
    """Planes of partial sums in float32 are added up, narrowed, and written in the other order."""
    parts = [integers(shape, seed) for seed in range(splits)]
    planes = torch.stack([part.movedim(1, -1).flatten() for part in parts]).float()
    src = Buffer(planes.shape, (planes.shape[1], 1, 0, 0, 0), torch.float32, torch.device("cpu"), planes)
    dst = Buffer(shape, dense_strides(shape, channels_last=False), DTYPES[dtype], torch.device("cpu"))
    Emulator()(to_contiguous(dtype, shape, splits), [src.tensor, dst.tensor])
    assert torch.equal(dst.read(), sum(parts).to(DTYPES[dtype]))


def test_images_of_many_pixels_are_turned() -> None:
    """To the way back they are channels, of which a grid's second and third dimension would not take as many."""
    how = Transposed((1, 16, 2048, 4096), (1, 1, 1, 1, 1))
    assert to_channels_last("float32", how).grid == (2048 * 4096 // 256, 1, 1)
    assert to_contiguous("float32", (1, 16, 2048, 4096)).grid == (2048 * 4096 // 64, 1, 1)


def assert_turns(shape: tuple[int, ...], dtype: str, executor: Executor) -> None:
    """A dense tensor, one with gaps, and one whose images lie within channels, and back."""
    values = integers(shape, 3).to(DTYPES[dtype])
    dense = dense_strides(shape, channels_last=False)
    gaps: Strides = tuple(2 * stride for stride in dense)  # type: ignore[assignment]
    swapped = (*dense_strides((shape[1], shape[0], *shape[2:]), channels_last=False)[1::-1], *dense[2:])
    for strides in (dense, gaps, swapped):
        src = Buffer(shape, strides, DTYPES[dtype], executor.device, values)
        dst = Buffer(shape, dense_strides(shape, channels_last=True), DTYPES[dtype], executor.device)
        executor(to_channels_last(dtype, Transposed(shape, strides)), [src.tensor, dst.tensor])
        assert torch.equal(dst.read(), values)
    again = Buffer(shape, dense, DTYPES[dtype], executor.device)
    executor(to_contiguous(dtype, shape), [dst.tensor, again.tensor])
    assert torch.equal(again.read(), values)


def test_where_it_refuses() -> None:
    layer = make((2, 32, 8, 8), 32, 4, 2, 1, dtype="bfloat16")
    for pass_, schedule in SCHEDULES.items():
        assert refusal(schedule, layer, pass_, H200) is None
        last = replace(layer, channels_last=True)
        assert "needs NCHW, or float32" in str(refusal(schedule, last, pass_, H200))
        assert refusal(schedule, replace(last, dtype="float32", tf32=True), pass_, H200) is None
        assert refusal(schedule, replace(layer, out_channels=20), pass_, H200) is None
        exact = make((2, 30, 8, 8), 11, 3, 2, 1, tf32=True)  # narrow: it has 12 channels when it is padded
        assert "PyTorch would not use TF32" in str(refusal(schedule, exact.of_pass(pass_), pass_, H200))
        assert refusal(schedule, layer, Pass.FORWARD, H200) is not None


def test_pixels_are_counted() -> None:
    """Of the output, which has more of them here."""
    for batch, refused in ((2**21 - 1, False), (2**21, True)):
        layer = make((batch, 8, 16, 16), 8, 2, 2, dtype="bfloat16")
        for pass_, schedule in SCHEDULES.items():
            assert ("size of these tensors" in str(refusal(schedule, layer, pass_, H200))) == refused


@pytest.mark.parametrize(
    ("pass_", "layer"),
    [
        (Pass.INPUT_GRAD, make((8, 512, 5, 5), 256, 5, 2, 1, dtype="bfloat16")),
        (Pass.WEIGHT_GRAD, make((12, 64, 32, 32), 768, 3, dtype="bfloat16")),
    ],
)
def test_planner_takes_it(pass_: Pass, layer: ConvTransposeProblem) -> None:
    """Small images with many channels on a side."""
    chosen = plan.plan(layer, pass_, H200)
    assert chosen.schedule == SCHEDULES[pass_].name
    assert {source.kernel for source in plan.kernel_sources(chosen.problem, pass_, H200)} >= {"transpose"}
