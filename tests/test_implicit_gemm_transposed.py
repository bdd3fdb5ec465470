"""implicit_gemm on a transposed copy of its source, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import emulator
from kernel_harness import (
    H200,
    Emulator,
    assert_exact,
    assert_kinds_exact,
    offers,
    operand_shapes,
    reference,
    run,
    strange_layouts,
    unguarded,
)
from polyphase.plan import planner
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.epilogue import Epilogue, Operation
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.implicit_gemm.transposed import ImplicitGemmTransposed

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
SCHEDULE = ImplicitGemmTransposed()

LAYERS = {
    "rows of odd lengths": make((2, 32, 9, 13), 72, 3, 2, 1, bias=True),
    "padded channels": make((2, 21, 7, 11), 64, 4, 2, 1),
    "three channels": make((3, 3, 8, 10), 70, 3, 2, 1),
    "groups": make((2, 64, 9, 10), 96, 3, 2, 1, groups=2, bias=True),
    "groups of one stage and a half": make((2, 96, 7, 9), 64, 4, 2, 1, groups=2),
    "groups of half a stage more": make((1, 80, 7, 9), 48, 4, 2, 1, groups=2),
    "kernel is stride": make((2, 40, 5, 9), 33, 2, 2),
    "more stride than kernel": make((2, 24, 9, 8), 40, 2, 3),
    "stride 1": make((1, 48, 9, 13), 56, 3, 1, 1),
    "stride 1, padded channels": make((1, 18, 9, 13), 19, (3, 2), 1, 1),
    "1-D": make((3, 40, 70), 24, 8, 4, 2),
    "3-D": make((1, 24, 3, 5, 7), 70, 3, 2, 1, 1, bias=True),
    "single pixels": make((9, 40, 1, 1), 24, 4, 2, 1),
    "tiny images": make((9, 40, 3, 3), 24, 4, 2, 1),
    "dilation": make((2, 32, 7, 11), 48, (3, 4), (2, 3), 2, dilation=(2, 1), output_padding=(0, 1)),
    "channels_last": make((2, 40, 7, 11), 72, 3, 2, 1, bias=True, channels_last=True),
    "channels_last, stride 1": make((1, 48, 9, 13), 56, 3, 1, 1, channels_last=True),
    "channels_last, padded channels": make((2, 37, 7, 11), 33, 4, 2, 1, channels_last=True),
    "channels_last, groups": make((2, 64, 9, 10), 96, 3, 2, 1, groups=2, channels_last=True),
    "channels_last, 3-D": make((1, 40, 3, 5, 7), 70, 3, 2, 1, 1, bias=True, channels_last=True),
}


def cases() -> Iterator[tuple[str, ConvTransposeProblem, Pass]]:
    """The layers in dtypes and passes that the schedule takes."""
    for name, layer in LAYERS.items():
        for dtype in ("float32", "bfloat16", "float16"):
            problem = replace(layer, dtype=dtype, tf32=True)
            for pass_ in SCHEDULE.passes:
                if refusal(SCHEDULE, problem, pass_, H200) is None:
                    yield f"{name}, {dtype}, {pass_.value}", problem, pass_


def in_halves(program: Program) -> bool:
    """Whether the copy is float16, of float32."""
    return any(buffer.name == "src_halves" for buffer in program.buffers)


@needs_emulator
@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize(("problem", "pass_"), [pytest.param(*case, id=name) for name, *case in cases()])
def test_products(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """Two of the offered configs."""
    found = offers(SCHEDULE, problem, pass_)
    seed = zlib.crc32(f"{problem} {pass_}".encode())
    for candidate, program in {found[seed % len(found)], found[0]}:
        inputs, outputs = problem.in_channels_per_group, problem.out_channels_per_group
        channels = inputs if pass_ is Pass.FORWARD else outputs
        deep_enough = channels >= 32 and (problem.groups == 1 or channels % 16 == 0)
        assert in_halves(program) is (problem.dtype == "float32" and deep_enough)
        readers = [step.source.kernel for step in program.steps if "src" in step.operands]
        if in_halves(program):
            copy = "halve" if problem.channels_last else "transpose"
            assert readers[:3] == ["sample_magnitudes", copy, "implicit_gemm"]
            assert [name.startswith("window_dgrad") for name in readers[3:]] == [True] * (pass_ is Pass.INPUT_GRAD)
        else:
            assert readers == ["transpose"]
        assert_exact(problem, pass_, candidate, program, executor=Emulator(seed % 1000))


@needs_emulator
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_any_strides(dtype: str) -> None:
    problem = replace(LAYERS["padded channels"], dtype=dtype, tf32=True)
    kinds = list(strange_layouts(problem))
    assert not all(layouts.aligned for layouts in kinds)
    assert assert_kinds_exact(SCHEDULE, problem, Pass.FORWARD, kinds) == len(kinds)


def test_the_kernel_waits_for_the_copy() -> None:
    """It may start before that is written, which the emulator does not show."""
    for name, problem, pass_ in cases():
        for _, program in offers(SCHEDULE, problem, pass_):
            steps = [(step.source.kernel.partition("_")[0], step.overlaps) for step in program.steps]
            assert dict(program.main.source.constants)["SRC_WRITTEN"]
            if in_halves(program):
                copy_step = "halve" if problem.channels_last else "transpose"
                weights, copy = [("measure", False), ("pack", True)], [("sample", True), (copy_step, True)]
                assert steps[:5] == [*weights, *copy, ("implicit", True)], name
                assert not any(overlaps for _, overlaps in steps[5:])
                assert bool(steps[5:]) == (pass_ is Pass.INPUT_GRAD)
            else:
                assert steps == [("pack", False), ("transpose", True), ("implicit", True)], name
            assert program.main.source.kernel == "implicit_gemm"


@needs_emulator
def test_an_activation_of_the_input_is_computed_by_the_transpose() -> None:
    """And the epilogue by the kernel: the copy is not read again."""
    around = Epilogue((Operation("leaky_relu", (0.25,)),))
    problem = replace(LAYERS["3-D"], dtype="bfloat16", prologue=around, epilogue=around)
    programs = planner.programs(problem, Pass.FORWARD, H200)
    program = next(program for candidate, program in programs if candidate.schedule == SCHEDULE.name)
    _, first, last = program.steps
    assert first.source.kernel == "transpose"
    assert first.source.prologue
    assert last.source.kernel == "implicit_gemm"
    assert last.source.epilogue


def test_an_activation_of_the_input_precedes_float16_copies() -> None:
    """Pixels are sampled, copied, and gathered if the copy is inexact: all read its result."""
    prologue = Epilogue((Operation("leaky_relu", (0.25,)),))
    problem = replace(LAYERS["3-D"], in_channels=40, tf32=True, prologue=prologue)
    programs = planner.programs(problem, Pass.FORWARD, H200)
    program = next(program for candidate, program in programs if candidate.schedule == SCHEDULE.name)
    assert in_halves(program)
    *others, prologue_step = sorted(program.steps, key=lambda step: step.source.kernel == "apply_prologue")
    assert prologue_step.source.kernel == "apply_prologue"
    assert [step.source.kernel for step in others if "src_behind_prologue" in step.operands] == [
        *("sample_magnitudes", "transpose", "implicit_gemm")
    ]
    assert not any("src" in step.operands for step in others)


@needs_emulator
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.INPUT_GRAD])
def test_groups_are_checked_apart(pass_: Pass, channels_last: bool) -> None:
    """A group of small numbers is as accurate as the others."""
    problem = make((2, 64, 5, 6), 64, 3, 1, 1, groups=2, tf32=True, channels_last=channels_last)
    candidate, program = offers(SCHEDULE, problem, pass_)[0]
    assert in_halves(program)
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(shape, generator=generator) for shape in operand_shapes(problem, pass_))
    first[:, 32:] *= 1e-9
    found = run(problem, pass_, program, Layouts.dense(problem), (first, second)).double()
    exact = reference(problem, pass_, (first.double(), second.double()))
    for part, wide in zip(found.split(32, 1), exact.split(32, 1)):
        assert (part - wide).norm() < 4e-4 * wide.norm(), candidate.describe()


@needs_emulator
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("number", [1e-9, 1e9, torch.inf])
def test_inexact_gradients_are_computed_again(number: float, channels_last: bool) -> None:
    """The result is that of the kernel behind it, bit for bit."""
    problem = make((1, 32, 7, 8), 32, 3, 1, 1, tf32=True, channels_last=channels_last)
    _, program = offers(SCHEDULE, problem, Pass.INPUT_GRAD)[0]
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.randn(shape, generator=generator) for shape in operand_shapes(problem, Pass.INPUT_GRAD))
    first[0, :, 2, 3] *= number
    free = unguarded(program.steps[program.main_index + 1 :])
    dense = Layouts.dense(problem)
    found = run(problem, Pass.INPUT_GRAD, program, dense, (first, second))
    alone = run(problem, Pass.INPUT_GRAD, replace(program, steps=free, main_index=0), dense, (first, second))
    assert torch.equal(found.nan_to_num(12345.0), alone.nan_to_num(12345.0))


@needs_emulator
@pytest.mark.parametrize("channels_last", [False, True])
def test_finite_numbers_beside_infinities_stay_finite(channels_last: bool) -> None:
    """In float16, too, whose scale follows from finite numbers alone."""
    problem = make((1, 32, 5, 6), 32, 3, 1, 1, tf32=True, channels_last=channels_last)
    _, program = offers(SCHEDULE, problem, Pass.FORWARD)[0]
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.rand(shape, generator=generator) + 0.1 for shape in operand_shapes(problem, Pass.FORWARD))
    first[0, 0, 2, 3], first[0, 1, 2, 3] = torch.inf, -1e10
    found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (first, second))
    exact = reference(problem, Pass.FORWARD, (first.double(), second.double()))
    assert torch.equal(found.isinf(), exact.isinf())
    assert not found.isnan().any()


def test_refusals() -> None:
    """Half precision in channels_last needs no copy, and channels of several groups are not padded."""
    layer = LAYERS["groups"]
    for problem, reason in (
        (replace(layer, channels_last=True), "needs NCHW"),
        (make((2, 36, 9, 10), 48, 3, 2, groups=2, dtype="bfloat16"), "groups of whole pieces"),
        (make((2, 64, 9, 10), 48, 3, 2, dtype="float64"), "float64"),
    ):
        assert reason in str(SCHEDULE.supports(problem, Pass.FORWARD, H200))
    for batch, refused in ((2**23 - 1, False), (2**23, True)):  # the transpose counts pixels of the input
        problem = make((batch, 8, 16, 16), 72, 3, 2, dtype="bfloat16")
        assert ("size of these tensors" in str(refusal(SCHEDULE, problem, Pass.FORWARD, H200))) == refused
