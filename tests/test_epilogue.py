"""Epilogues: every operation against float64, alone and combined, in every schedule of the forward pass.

Sums are of small integers, and so exact. What follows is exact, too, where operands are powers of two and small
integers; then outputs are compared bit by bit. Where functions are approximated a few units in the last place are
allowed. Outputs and what lies around operands are poisoned (`kernel_harness`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet
from torch import Tensor

from emulator import available
from kernel_harness import DTYPES, H200, Emulator, Executor, formats, in_formats, integers, reference, run
from polyphase.jit.epilogue import operations_text
from polyphase.jit.source import KERNELS, OPERATIONS
from polyphase.plan.planner import as_computed, epilogue_refusal, plan, programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, ELEMENT, ONE, SAMPLE, Epilogue, Operand, Operation, decoded, encoded
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.direct.general import DirectGeneral
from polyphase.schedules.grouped_gemm.schedule import GroupedGemm
from polyphase.schedules.schedule import Candidate

make = ConvTransposeProblem.make
emulated = pytest.mark.skipif(not available(), reason="needs Linux and g++")


def both(per: str, wide: bool = False) -> tuple[Operand, Operand]:
    return Operand("scale", per, wide), Operand("shift", per, wide)


RESIDUAL = Operation("add", (), (Operand("residual", ELEMENT),))
MOMENTS = tuple(Operand(role, CHANNEL, True) for role in ("mean", "variance", "weight", "offset"))

#: Every operation alone.
ALONE = {
    "relu": Operation("relu"),
    "leaky_relu": Operation("leaky_relu", (0.25,)),
    "elu": Operation("elu", (0.5,)),
    "gelu": Operation("gelu"),
    "gelu_tanh": Operation("gelu_tanh"),
    "silu": Operation("silu"),
    "tanh": Operation("tanh"),
    "sigmoid": Operation("sigmoid"),
    "clamp": Operation("clamp", (-3.0, 6.0)),
    "at least": Operation("clamp", (-3.0, float("inf"))),
    "hardswish": Operation("hardswish"),
    "softplus": Operation("softplus", (0.5, 20.0)),
    "mish": Operation("mish"),
    "divide": Operation("divide", (3.0,)),
    "affine": Operation("affine", (0.5, -3.0)),
    "scale and shift": Operation("scale_shift", (), both(CHANNEL)),
    "scale, wide": Operation("scale_shift", (), both(CHANNEL, True)[:1]),
    "shift per sample": Operation("scale_shift", (), both(SAMPLE)[1:]),
    "scale and shift per sample": Operation("scale_shift", (), both(SAMPLE)),
    "less": Operation("scale_shift", (), (Operand("less", CHANNEL),)),
    "scale, shift and less per sample": Operation("scale_shift", (), (*both(CHANNEL), Operand("less", SAMPLE))),
    "normalize": Operation("normalize", (0.5,), MOMENTS),
    "normalize, no weight": Operation("normalize", (0.5,), MOMENTS[:2]),
    "prelu": Operation("prelu", (), (Operand("slope", CHANNEL),)),
    "prelu, one slope": Operation("prelu", (), (Operand("slope", ONE),)),
    "add": RESIDUAL,
    "add_value": Operation("add_value", of=0),
    "multiply_value": Operation("multiply_value", of=0),
}
_EXACT = {"relu", "leaky_relu", "clamp", "affine", "scale_shift", "prelu", "add", "add_value", "multiply_value"}

#: Several of them, in the orders that models have: exact but for the last.
COMBINED = {
    "norm, residual, relu": Epilogue((Operation("scale_shift", (), both(CHANNEL, True)), RESIDUAL, Operation("relu"))),
    "prelu, residual": Epilogue((Operation("prelu", (), (Operand("slope", CHANNEL),)), RESIDUAL)),
    "per sample, leaky": Epilogue((Operation("scale_shift", (), both(SAMPLE)), Operation("leaky_relu", (0.5,)))),
    "KernelBench 20": Epilogue(
        (
            Operation("scale_shift", (), both(CHANNEL)[1:]),
            Operation("add_value", of=0),
            Operation("multiply_value", of=0),
            Operation("add_value", of=0),
            Operation("clamp", (-100.0, 1000.0)),
        )
    ),
    "batch norm, gelu": Epilogue((Operation("normalize", (0.5,), MOMENTS), Operation("gelu"))),
}

#: Layers that each schedule takes, or that kernels meet in a way of their own.
LAYERS = {
    "stride 2": make((2, 12, 5, 9), 10, 4, 2, 1, bias=True),
    "phases without taps": make((2, 8, 4, 5), 9, 2, (3, 4), 0, 1),
    "grouped": make((2, 16, 5, 9), 12, 4, 2, 1, groups=2, bias=True),
    "depthwise": make((2, 6, 6, 7), 6, 4, 2, 1, groups=6, bias=True),
    "few outputs": make((2, 24, 6, 10), 3, 4, 2, 1, bias=True),
    "one output": make((1, 16, 6, 10), 1, 9, 4, 4, 3, bias=True),
    "kernel = stride": make((2, 32, 4, 16), 16, 2, 2, bias=True),
    "kernel = stride, by pixels": make((3, 24, 6, 8), 20, 2, 2, bias=True, tf32=True),
    "kernel = stride, 3-D": make((2, 20, 3, 4, 6), 17, 2, 2, bias=True, tf32=True),
    "by four": make((2, 20, 5, 6), 16, 4, 4, bias=True, tf32=True),
    "one pixel": make((5, 20, 1, 1), 9, 4),
    "many small images": make((9, 16, 2, 3), 6, 4, 2, 1),
    "split sums": make((1, 700, 2, 2), 20, 3, 1, 1, bias=True),
    "1-D": make((2, 16, 19), 12, 16, 8, 4, bias=True),
    "3-D": make((1, 16, 3, 3, 4), 8, 2, 2, bias=True),
}


def operands_of(problem: ConvTransposeProblem) -> dict[str, Tensor]:
    """What the epilogue reads, in float64: powers of two to multiply by, small integers to add, a variance below."""
    found = {}
    sizes = {ONE: 1, CHANNEL: problem.out_channels, SAMPLE: problem.batch * problem.out_channels}
    for number, (name, operand) in enumerate(problem.epilogue.named_operands.items()):
        shape = problem.output_shape if operand.per == ELEMENT else (sizes[operand.per],)
        values = integers(shape, zlib.crc32(f"{problem.output_shape} {number}".encode()))
        if operand.role in ("scale", "slope", "weight"):
            values = 2.0 ** (values % 3 - 1)
        found[name] = values.abs() + 0.5 if operand.role == "variance" else values
    return found


def finished(problem: ConvTransposeProblem, sums: Tensor, of: dict[str, Tensor]) -> list[Tensor]:
    """The values before, between and behind the epilogue's operations, in float64, by PyTorch's functions."""
    functions = {
        "relu": F.relu, "leaky_relu": F.leaky_relu, "elu": F.elu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh,
        "sigmoid": torch.sigmoid, "clamp": torch.clamp, "hardswish": F.hardswish, "softplus": F.softplus,
        "mish": F.mish, "divide": torch.div, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    }  # fmt: skip
    values = [sums]
    for place, operation in enumerate(problem.epilogue.operations):
        ones = (1,) * problem.dims
        read = {
            operand.role: of[f"{operand.role}_{place}"].view(
                {
                    ONE: (1, 1, *ones),
                    CHANNEL: (1, -1, *ones),
                    SAMPLE: (problem.batch, problem.out_channels, *ones),
                    ELEMENT: problem.output_shape,
                }[operand.per]
            )
            for operand in operation.operands
        }
        v, kind, constants = values[-1], operation.kind, operation.constants
        if kind in functions:
            v = functions[kind](v, *constants)
        elif kind == "affine":
            v = v * constants[0] + constants[1]
        elif kind == "scale_shift":
            v = v * read.get("scale", 1) + read.get("shift", 0) - read.get("less", 0)
        elif kind == "normalize":
            v = (v - read["mean"]) / (read["variance"] + constants[0]).sqrt()
            v = v * read.get("weight", 1) + read.get("offset", 0)
        elif kind == "layer_norm":
            v = (v - v.mean(1, keepdim=True)) / (v.var(1, correction=0, keepdim=True) + constants[0]).sqrt()
            v = v * read.get("weight", 1) + read.get("offset", 0)
        elif kind == "softmax":
            v = torch.softmax(v, 1)
        elif kind == "prelu":
            v = torch.where(v > 0, v, v * read["slope"])
        elif kind == "add":
            v = v + read["residual"]
        else:
            other = values[operation.of]
            v = v + other if kind == "add_value" else v * other
        values.append(v)
    return values


def check(
    problem: ConvTransposeProblem, candidate: Candidate, program: Program, executor: Executor | None = None
) -> None:
    """One config with the problem's epilogue, in the emulator or on a GPU."""
    seed = zlib.crc32(str(replace(problem, epilogue=Epilogue(), dtype="float64", channels_last=False)).encode())
    operands = integers(problem.input_shape, seed), integers(problem.weight_shape, seed + 1)
    bias = integers((problem.out_channels,), seed + 2) if problem.bias else None
    of = operands_of(problem)
    layouts = Layouts.of_call(problem, Pass.FORWARD)
    out = run(problem, Pass.FORWARD, program, layouts, operands, bias, executor, operands_of=of)
    *between, wide = finished(problem, reference(problem, Pass.FORWARD, operands, bias), of)
    dtype = DTYPES[problem.dtype]
    described = f"{candidate.describe()} of {problem}"
    if {operation.kind for operation in problem.epilogue.operations} <= _EXACT:
        assert torch.equal(out, wide.to(dtype)), described
        return
    # An error of a value stays where the next function cancels.
    largest = torch.stack([value.abs() for value in between]).amax(0)
    units = {"float64": 2.0**-48, "float32": 2.0**-20}.get(problem.dtype, 0.0)
    error = (out.double() - wide).abs() / (wide.abs() + largest + 0.25)
    if not units:  # half types: what is left is the rounding
        units, error = 0.51 * torch.finfo(dtype).eps, (out.double() - wide).abs() / (wide.abs() + 2.0**-8)
    assert float(error.max()) <= units, f"{described}: off by {float(error.max())}"


@emulated
@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ALONE)
def test_every_operation_alone(name: str, dtype: str) -> None:
    problem = make((2, 2, 3, 2), 5, 3, 2, 1, bias=True, dtype=dtype)
    problem = replace(problem, epilogue=Epilogue((ALONE[name],)), channels_last=dtype in ("float32", "float16"))
    found = [each for each in programs(problem, Pass.FORWARD, H200) if each[0].schedule == "direct_general"]
    check(problem, *found[0])


@emulated
def test_gelu_of_fractions() -> None:
    """All of its curve: a polynomial and a power take the error function's place (kernels/epilogue/activations.cuh)."""
    for factor in (2.0**-2, 2.0**-5, 2.0**-9):
        operations = (Operation("affine", (factor, 0.0)), Operation("gelu"))
        problem = replace(make((1, 3, 9, 9), 4, 3, 1, 1, dtype="float32"), epilogue=Epilogue(operations))
        found = [each for each in programs(problem, Pass.FORWARD, H200) if each[0].schedule == "direct_general"]
        check(problem, *found[0])


@emulated
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ("spread", make((2, 36, 3, 5), 3, 2, (3, 5), 0, (0, 2), bias=True)),  # vectors of two rows, channels and images
        ("direct_general", make((2, 3, 5), 6, 16, 8, 4, bias=True)),  # neighbours and cells
    ],
    ids=["spread", "direct_general"],
)
def test_operands_of_neighbouring_outputs(last: str, problem: ConvTransposeProblem, dtype: str) -> None:
    """Residuals and values of samples, where a thread owns several outputs."""
    operations = Epilogue((ALONE["scale and shift per sample"], RESIDUAL))
    fused = replace(problem, dtype=dtype, epilogue=operations)
    found = [each for each in programs(fused, Pass.FORWARD, H200) if each[1].steps[-1].source.kernel == last]
    assert found
    for candidate, program in found:
        check(fused, candidate, program)


@dataclass(frozen=True)
class Case:
    """A layer in a memory format, planned for a device: every schedule with an epilogue, by turns."""

    layer: str
    problem: ConvTransposeProblem
    device: DeviceInfo

    def offers(self) -> Iterator[tuple[ConvTransposeProblem, Candidate, Program]]:
        """A config of each schedule with its epilogue, in a dtype; none where the schedule refuses it."""
        names, number = list(COMBINED), zlib.crc32(f"{self.layer} {self.problem.channels_last}".encode())
        seen = {DirectGeneral.name}
        for candidate, _ in programs(self.problem, Pass.FORWARD, self.device):
            if candidate.schedule in seen:
                continue
            seen.add(candidate.schedule)
            number += 1
            dtype = "bfloat16" if number % 3 == 1 else "float32"
            problem = replace(self.problem, dtype=dtype, epilogue=COMBINED[names[number % len(names)]])
            found = programs(problem, Pass.FORWARD, self.device)
            found = [each for each in found if each[0].schedule == candidate.schedule]
            # Single pixels are not one GEMM where an operand differs between samples.
            may_refuse = self.layer == "phases without taps" or (
                self.layer == "one pixel" and problem.epilogue.per_sample
            )
            assert found or may_refuse, f"{candidate.schedule} refuses {problem}"
            if found:
                yield (problem, *found[number // 5 % len(found)])


def cases(*devices: DeviceInfo) -> Iterator[ParameterSet]:
    """All layers, as `in_formats` has them."""
    for layer, problem, device, _, name in in_formats(LAYERS, devices):
        yield pytest.param(Case(layer, problem, device), id=name)


@emulated
@pytest.mark.sampled(60, 10)
@pytest.mark.parametrize("case", list(cases()))
def test_combined_in_every_schedule(case: Case) -> None:
    for number, offer in enumerate(case.offers()):
        check(*offer, Emulator(number * 31 % 100))


def test_the_text_of_none_is_the_example() -> None:
    example = (KERNELS / OPERATIONS).read_text(encoding="utf-8")
    assert example.endswith(operations_text(Epilogue()))


def test_residuals_are_bytes_and_seconds() -> None:
    bare = LAYERS["stride 2"]
    problem = replace(bare, epilogue=Epilogue((RESIDUAL,)))
    assert problem.bytes == bare.bytes + 4 * bare.elements[2]
    one, other = (plan(each, Pass.FORWARD, H200) for each in (bare, problem))
    assert one.candidate is not None
    assert other.candidate is not None
    assert other.candidate.config == one.candidate.config
    assert other.candidate.seconds > one.candidate.seconds
    assert "add(residual)" in str(problem)
    for pass_ in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        assert plan(problem, pass_, H200).describe() == plan(bare, pass_, H200).describe()


def test_single_pixels_are_one_gemm_but_with_operands_per_sample() -> None:
    bare = LAYERS["one pixel"]
    for name, whole in (("prelu, residual", True), ("per sample, leaky", False)):
        computed, _ = as_computed(replace(bare, epilogue=COMBINED[name]), Pass.FORWARD, None)
        assert (computed.out_channels == bare.out_channels * bare.taps) == whole


def test_rows_without_taps_are_refused_by_those_who_copy_them() -> None:
    problem = replace(make((2, 16, 8, 8), 8, 3, (4, 1), 1), epilogue=COMBINED["prelu, residual"])
    assert "rows without taps" in str(epilogue_refusal(GroupedGemm(), problem, Pass.FORWARD))
    assert epilogue_refusal(GroupedGemm(), problem, Pass.INPUT_GRAD) is None


def test_text_of_operations_is_read_back() -> None:
    for epilogue in [*COMBINED.values(), *(Epilogue((each,)) for each in ALONE.values() if each.of == 0)]:
        assert decoded(encoded(epilogue)) == (epilogue, Epilogue())


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: Operation("rely"), "no operation 'rely'"),
        (lambda: Operation("elu"), "elu takes 1 constants"),
        (lambda: Operation("elu", (float("nan"),)), "finite constants"),
        (lambda: Operation("prelu"), "takes the operands slope, given"),
        (lambda: Operation("add", (), (Operand("residual", CHANNEL),)), "cannot have operands"),
        (lambda: Epilogue((Operation("add_value", of=1),)), "cannot read value 1"),
    ],
)
def test_errors(make_it: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()


@emulated
def test_sums_in_parts_of_single_pixels() -> None:
    """Split-K, where a kernel's channel is one of the layer's at one tap; in both memory formats."""
    for formatted in formats(make((2, 1600, 1, 1), 5, 3)):
        problem = replace(formatted, dtype="bfloat16", epilogue=COMBINED["norm, residual, relu"])
        found = [each for each in programs(problem, Pass.FORWARD, H200) if each[1].splits > 1]
        assert found
        check(problem, *found[0])


@emulated
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["layer_norm", "relu"])
def test_kernels_that_replace_one_that_spills(kind: str, channels_last: bool, dtype: str) -> None:
    """All attempts of `KernelSource.attempts`, of which a compiler takes the first without spills."""
    epilogue = Epilogue((Operation(kind, (0.5,) if kind == "layer_norm" else ()),))
    layer = make((1, 24, 5, 40), 128, 2, 2, dtype=dtype, channels_last=channels_last, tf32=True)
    problem = replace(layer, epilogue=epilogue)
    found = (each for each in programs(problem, Pass.FORWARD, H200) if len(list(each[1].main.source.attempts())) > 2)
    candidate, program = next(found)
    main = program.main.source
    pieces = set()
    for source in main.attempts():
        pieces.add(dict(source.constants).get("PIECE"))
        steps = tuple(replace(step, source=source) if step.source == main else step for step in program.steps)
        check(problem, candidate, replace(program, steps=steps))
    assert len(pieces) == 1 + (not channels_last or dtype == "float32")


@emulated
def test_residuals_of_results_that_are_transposed() -> None:
    problem = replace(LAYERS["stride 2"], out_channels=136, epilogue=COMBINED["norm, residual, relu"])
    found = [each for each in programs(problem, Pass.FORWARD, H200) if getattr(each[0].config, "back", False)]
    assert found
    assert "residual_1_channels_last" in [buffer.name for buffer in found[0][1].buffers]
    check(problem, *found[0])


@emulated
@pytest.mark.parametrize("schedule", ["overlap_gemm", "grouped_gemm"])
def test_activations_hide_no_doubt(schedule: str) -> None:
    """An infinity becomes NaN where it is multiplied in parts, and is computed again; a sigmoid makes 1 of it."""
    problem = replace(LAYERS["grouped"], dtype="float32", epilogue=Epilogue((Operation("sigmoid"), RESIDUAL)))
    _, program = next(each for each in programs(problem, Pass.FORWARD, H200) if each[0].schedule == schedule)
    x = integers(problem.input_shape, 1)
    x[0, :, 2, 3] = float("inf")
    weight, bias = integers(problem.weight_shape, 2).abs() + 1, torch.zeros(problem.out_channels, dtype=torch.float64)
    of = operands_of(problem)
    layouts = Layouts.of_call(problem, Pass.FORWARD)
    out = run(problem, Pass.FORWARD, program, layouts, (x, weight), bias, operands_of=of)
    expected = torch.sigmoid(reference(problem, Pass.FORWARD, (x, weight), bias)) + of["residual_1"]
    assert bool(torch.isfinite(expected).all())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
