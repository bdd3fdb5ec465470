"""Prologues: every function of the input against float64, in every schedule of the forward pass.

Inputs and weights are small integers, and functions are exact where they may be, so that sums are. Where functions are
approximated, what is multiplied is their value rounded once to the tensors' type: the same in every kernel. Outputs and
what lies around operands are poisoned (`kernel_harness`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet
from torch import Tensor

from emulator import available
from kernel_harness import (
    DTYPES,
    H200,
    Emulator,
    Executor,
    formats,
    in_formats,
    integers,
    reference,
    run,
    strange_layouts,
)
from polyphase.jit.epilogue import prologue_text
from polyphase.jit.source import KERNELS, PROLOGUE
from polyphase.plan.planner import plan, programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, ONE, SAMPLE, Epilogue, Operand, Operation, decoded, encoded, of_input
from polyphase.problem.layouts import Layouts
from polyphase.program.kept import kept_program
from polyphase.program.program import Program
from polyphase.program.prologue import in_a_step, is_transposed, within_kernels
from polyphase.program.step import SRC
from polyphase.schedules import SCHEDULES
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.schedule import Candidate

make = ConvTransposeProblem.make
emulated = pytest.mark.skipif(not available(), reason="needs Linux and g++")


def alone(kind: str, *constants: float, operands: tuple[Operand, ...] = ()) -> Epilogue:
    return Epilogue((Operation(kind, constants, operands),))


ALPHA, BETA = Operand("alpha", CHANNEL), Operand("beta", CHANNEL)

PROLOGUES = {
    "relu": alone("relu"),
    "leaky_relu": alone("leaky_relu", 0.25),
    "prelu": alone("prelu", operands=(Operand("slope", CHANNEL),)),
    "prelu, one slope": alone("prelu", operands=(Operand("slope", ONE),)),
    "elu": alone("elu", 0.5),
    "snake": alone("snake", 1e-9, 0.0, operands=(ALPHA,)),
    "snake, wide": alone("snake", 1e-9, 0.0, operands=(Operand("alpha", CHANNEL, True),)),
    "snake beta": alone("snake", 1e-9, 1.0, operands=(ALPHA, BETA)),
    "snake, one": alone("snake", 0.5, 0.0, operands=(Operand("alpha", ONE), Operand("beta", ONE))),
    "norm and relu": Epilogue((Operation("scale_shift", (), (Operand("scale", CHANNEL), Operand("shift", CHANNEL))),
                               Operation("relu"))),
    "sigmoid": alone("sigmoid"),
}  # fmt: skip
_EXACT = {"relu", "leaky_relu", "prelu", "scale_shift"}
KEEP_ZERO = [name for name in PROLOGUES if name not in ("norm and relu", "sigmoid")]

#: Layers that each schedule takes, or that kernels meet in a way of their own.
LAYERS = {
    "stride 2": make((2, 12, 5, 9), 10, 4, 2, 1, bias=True),
    "padding is read": make((2, 9, 3, 4), 7, 5, 2, 0, 1, bias=True),
    "grouped": make((2, 16, 5, 9), 12, 4, 2, 1, groups=2, bias=True),
    "depthwise": make((2, 6, 6, 7), 6, 4, 2, 1, groups=6, bias=True),
    "few outputs": make((2, 24, 6, 10), 3, 4, 2, 1, bias=True),
    "one output": make((1, 16, 6, 10), 1, 9, 4, 4, 3, bias=True),
    "kernel = stride": make((2, 32, 4, 16), 16, 2, 2, bias=True),
    "kernel = stride, by pixels": make((3, 24, 6, 8), 20, 2, 2, bias=True, tf32=True),
    "by four": make((2, 20, 5, 6), 16, 4, 4, bias=True, tf32=True),
    "one pixel": make((5, 20, 1, 1), 9, 4),
    "many small images": make((9, 16, 2, 3), 6, 4, 2, 1),
    "split sums": make((1, 700, 2, 2), 20, 3, 1, 1, bias=True),
    "1-D": make((2, 16, 19), 12, 16, 8, 4, bias=True),
    "1-D, deep": make((1, 72, 24), 24, 4, 2, 1, bias=True, tf32=True),
    "1-D, rows": make((2, 48, 45), 24, 4, 2, 1, bias=True),
    "3-D": make((1, 16, 3, 3, 4), 8, 2, 2, bias=True),
}


def operands_of(problem: ConvTransposeProblem) -> dict[str, Tensor]:
    """What the prologue reads, in float64: powers of two, and small integers to add."""
    found = {}
    for number, (name, operand) in enumerate(problem.prologue.named_operands.items()):
        shape = (1 if operand.per == ONE else problem.in_channels,)
        values = integers(shape, zlib.crc32(f"{problem.input_shape} {number}".encode()))
        found[of_input(name)] = values if operand.role == "shift" else 2.0 ** (values % 3 - 1)
    return found


def behind(problem: ConvTransposeProblem, x: Tensor, of: dict[str, Tensor]) -> Tensor:
    """The input behind the prologue, in float64, by PyTorch's functions."""
    ones = (1,) * problem.dims
    for place, (kind, constants, operands) in enumerate(
        (each.kind, each.constants, each.operands) for each in problem.prologue.operations
    ):
        read = {each.role: of[of_input(f"{each.role}_{place}")].view(1, -1, *ones) for each in operands}
        if kind == "scale_shift":
            x = x * read["scale"] + read["shift"]
        elif kind == "prelu":
            x = torch.where(x > 0, x, x * read["slope"])
        elif kind == "snake":
            alpha, beta = read["alpha"], read.get("beta", read["alpha"])
            alpha, beta = (alpha.exp(), beta.exp()) if constants[1] else (alpha, beta)
            x = x + torch.sin(alpha * x) ** 2 / (beta + constants[0])
        else:
            function: Callable[..., Tensor] = {
                "relu": F.relu, "leaky_relu": F.leaky_relu, "elu": F.elu, "sigmoid": torch.sigmoid,
            }[kind]  # fmt: skip
            x = function(x, *constants)
    return x


def computed(
    problem: ConvTransposeProblem, program: Program, layouts: Layouts | None = None, executor: Executor | None = None
) -> Tensor:
    """What a program gives of small integers."""
    operands, bias, of = given(problem)
    layouts = layouts or Layouts.of_call(problem, Pass.FORWARD)
    return run(problem, Pass.FORWARD, program, layouts, operands, bias, executor, operands_of=of)


def given(problem: ConvTransposeProblem) -> tuple[tuple[Tensor, Tensor], Tensor | None, dict[str, Tensor]]:
    seed = zlib.crc32(f"{problem.input_shape} {problem.weight_shape}".encode())
    bias = integers((problem.out_channels,), seed + 2) if problem.bias else None
    return (integers(problem.input_shape, seed), integers(problem.weight_shape, seed + 1)), bias, operands_of(problem)


def check(problem: ConvTransposeProblem, described: str, out: Tensor) -> None:
    """Against float64: exact where the function is; else off by what rounding the function's values may do."""
    (x, weight), bias, of = given(problem)
    dtype = DTYPES[problem.dtype]
    value = behind(problem, x, of)
    wide = reference(problem, Pass.FORWARD, (value, weight), bias)
    if {operation.kind for operation in problem.prologue.operations} <= _EXACT:
        assert torch.equal(out, wide.to(dtype)), described
        return
    unit = {"float64": 2.0**-48, "float32": 2.0**-10.9 if problem.tf32 else 2.0**-20}.get(
        problem.dtype, 0.502 * torch.finfo(dtype).eps
    )
    # Of a value as it is rounded, of all products, and of the result where that is rounded again.
    most = reference(problem, Pass.FORWARD, (value.abs() * unit + 2.0**-21, weight.abs()))
    most = most + wide.abs() * unit + 2.0**-22
    assert bool(((out.double() - wide).abs() <= most).all()), (
        f"{described}: off by {float(((out.double() - wide).abs() / most).max())} of what is allowed"
    )


def cases(*devices: DeviceInfo) -> Iterator[ParameterSet]:
    """All layers, as `in_formats` has them."""
    for _, problem, device, number, name in in_formats(LAYERS, devices):
        yield pytest.param(problem, device, number, id=name)


@emulated
@pytest.mark.sampled(60, 10)
@pytest.mark.parametrize(("bare", "device", "number"), list(cases()))
def test_in_every_schedule(bare: ConvTransposeProblem, device: DeviceInfo, number: int) -> None:
    """A config of each, in a dtype, behind one of the functions by turns; in its kernels where they can."""
    names, seen = list(PROLOGUES), {"direct_general"}
    for candidate, _ in programs(bare, Pass.FORWARD, device):
        if candidate.schedule in seen:
            continue
        seen.add(candidate.schedule)
        number += 1
        dtype = ("float32", "bfloat16", "float32", "float16")[number % 4]
        problem = replace(bare, dtype=dtype, prologue=PROLOGUES[names[number % len(names)]])
        found = [each for each in programs(problem, Pass.FORWARD, device) if each[0].schedule == candidate.schedule]
        assert found, f"{candidate.schedule} refuses {problem}"
        one, program = found[number // 5 % len(found)]
        check(problem, f"{one.describe()} of {problem}", computed(problem, program, None, Emulator(number % 100)))


def ways(problem: ConvTransposeProblem) -> Iterator[tuple[Candidate, Program, Program]]:
    """Configs whose kernels compute the prologue: so, and behind a step."""
    bare = replace(problem, prologue=Epilogue())
    layouts = Layouts.of_call(problem, Pass.FORWARD)
    schedules = {schedule.name: schedule for schedule in SCHEDULES}
    for candidate, program in programs(bare, Pass.FORWARD, H200):
        schedule = schedules[candidate.schedule]
        within = schedule.prologue_seconds(bare, problem.prologue, H200, layouts, candidate.config) is not None
        if within or is_transposed(program):
            yield candidate, within_kernels(program, problem.prologue), in_a_step(program, problem, layouts)


@emulated
@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", KEEP_ZERO)
def test_within_kernels_is_what_a_step_gives(name: str, dtype: str) -> None:
    """Bit by bit: several configs of `implicit_gemm`, of all ways to multiply and to load."""
    layers = [layer for layer in LAYERS.values() if layer.groups < 3 and min(layer.input_size) > 1]
    turn = zlib.crc32(f"{name} {dtype}".encode())
    for bare in (layers[turn % len(layers)], LAYERS["1-D, deep"]):
        problem = replace(bare, dtype="float32" if dtype == "tf32" else dtype, tf32=dtype == "tf32")
        problem = replace(problem, prologue=PROLOGUES[name])
        found = list(ways(problem))
        assert {each[0].schedule for each in found} >= {ImplicitGemm.name}
        kinds = {(each[0].config.scaled, each[0].config.parts, each[0].config.split): each for each in found
                 if each[0].schedule == ImplicitGemm.name}  # fmt: skip
        for candidate, within, step in list(kinds.values())[:3]:
            out, other = computed(problem, within), computed(problem, step)
            check(problem, f"{candidate.describe()} of {problem}", out)
            assert torch.equal(out, other), candidate.describe()


@emulated
def test_snakes_of_large_angles_stay_in_bounds() -> None:
    """Of an angle that float32 has no fractions of, sin² is anything from 0 to 1; of an infinite one it is NaN."""
    problem = replace(make((1, 1, 8, 5), 1, 1), prologue=alone("snake", 0.0, 0.0, operands=(ALPHA, BETA)))
    x = 10.0 ** torch.arange(40, dtype=torch.float32).view(1, 1, 8, 5).double()
    x[0, 0, 7, 4], weight = torch.inf, torch.ones(problem.weight_shape, dtype=torch.float64)
    of = dict.fromkeys(problem.named_operands, torch.ones(1, dtype=torch.float64))
    program, layouts = plan(problem, Pass.FORWARD, H200).program, Layouts.of_call(problem, Pass.FORWARD)
    assert program is not None
    out = run(problem, Pass.FORWARD, program, layouts, (x, weight), operands_of=of).flatten()
    assert bool(((out[:-1] >= x.flatten()[:-1].float()) & (out[:-1] <= x.flatten()[:-1].float() + 1.001)).all())
    assert bool(out[-1].isnan())


@emulated
@pytest.mark.parametrize("name", ["snake beta", "prelu", "sigmoid"])
def test_inputs_that_lie_otherwise(name: str) -> None:
    bare = make((2, 6, 3, 5), 5, 3, 2, 1, bias=True)
    for formatted in formats(bare):
        for layouts in strange_layouts(formatted):
            problem = replace(formatted, prologue=PROLOGUES[name], dtype="bfloat16")
            of_call = replace(layouts, output=Layouts.of_call(problem, Pass.FORWARD).output)
            program = plan(problem, Pass.FORWARD, H200, of_call).program
            assert program is not None
            check(problem, f"{layouts}", computed(problem, program, of_call))


@emulated
@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("name", ["snake beta", "sigmoid", "norm and relu", "prelu"])
@pytest.mark.parametrize("layer", ["1-D, rows", "grouped", "stride 2", "split sums"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transposes_compute_it_of_what_exists(name: str, layer: str, dtype: str) -> None:
    """Padded channels stay zero, whatever the function makes of zero."""
    problem = replace(LAYERS[layer], dtype=dtype, prologue=PROLOGUES[name])
    found = {
        tuple(step.source for step in within.steps if SRC in step.operands): (candidate, within, step)
        for candidate, within, step in ways(problem)
        if within.steps[0].source.kernel == "transpose"
    }
    assert found
    for candidate, within, step in found.values():
        out = computed(problem, within)
        check(problem, f"{candidate.describe()} of {problem}", out)
        assert torch.equal(out, computed(problem, step)), candidate.describe()


def test_a_step_runs_beside_packing_and_without_it() -> None:
    """Of a frozen weight nothing is packed: then the step waits for what is before the call."""
    problem = replace(LAYERS["1-D, deep"], dtype="bfloat16", prologue=PROLOGUES["sigmoid"])
    program = plan(problem, Pass.FORWARD, H200).programs[0]
    assert [(step.source.kernel, step.overlaps) for step in program.steps] == [
        (program.steps[0].source.kernel, False), ("apply_prologue", True), ("implicit_gemm", False)
    ]  # fmt: skip
    assert program.main.source.kernel == "implicit_gemm"
    kept = kept_program(program)
    assert kept is not None
    assert [(step.source.kernel, step.overlaps) for step in kept.program.steps] == [
        ("apply_prologue", False), ("implicit_gemm", False)
    ]  # fmt: skip
    assert kept.program.main.source.kernel == "implicit_gemm"


def test_the_text_of_none_is_the_example() -> None:
    example = (KERNELS / PROLOGUE).read_text(encoding="utf-8")
    assert example.endswith(prologue_text(Epilogue()))


def test_text_of_operations_is_read_back() -> None:
    for prologue in PROLOGUES.values():
        for epilogue in (Epilogue(), alone("relu")):
            assert decoded(encoded(epilogue, prologue)) == (epilogue, prologue)


def test_a_prologue_has_no_say_in_plans_but_in_seconds() -> None:
    bare = make((8, 64, 128, 128), 64, 4, 2, 1, bias=True, dtype="bfloat16")
    problem = replace(bare, prologue=PROLOGUES["leaky_relu"])
    one, other = (plan(each, Pass.FORWARD, H200) for each in (bare, problem))
    assert one.candidate is not None
    assert other.candidate is not None
    assert other.candidate.config == one.candidate.config
    assert other.candidate.seconds > one.candidate.seconds
    assert "of leaky_relu(0.25)" in str(problem)
    assert [step.source.kernel for step in other.programs[0].steps] == ["pack_weights", "implicit_gemm"]
    moves_zero = plan(replace(bare, prologue=PROLOGUES["sigmoid"]), Pass.FORWARD, H200)
    assert [step.source.kernel for step in moves_zero.programs[0].steps][1] == "apply_prologue"


@pytest.mark.parametrize(
    "prologue", [alone("layer_norm", 1e-5), alone("scale_shift", operands=(Operand("scale", SAMPLE),))]
)
def test_errors(prologue: Epilogue) -> None:
    with pytest.raises(ValueError, match="elements and their channels alone"):
        replace(LAYERS["1-D"], prologue=prologue)
