"""Pooling, reductions and norms behind a layer: the step that computes them against float64, in the emulator.

What is read is small integers, what is written lies amid guards of NaN. Sizes are odd, so that vectors, windows and
threads are partly used; each case runs in one block of threads for a group, and split over several.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from emulator import available
from kernel_harness import DTYPES, Buffer, Emulator, Executor, integers
from polyphase.jit.compiler import resources_of
from polyphase.problem.epilogue import CHANNEL, ELEMENT, SAMPLE, Epilogue, Operand, Operation, of_input
from polyphase.problem.layouts import dense_strides
from polyphase.problem.reduction import NORMS, REDUCTIONS, Reduction
from polyphase.program import reduction as module
from polyphase.program.program import Program
from polyphase.program.reduction import program_of
from polyphase.program.step import DST, SRC

pytestmark = pytest.mark.skipif(not available(), reason="needs Linux and g++")

SCALE = Operation("scale_shift", (), (Operand("scale", CHANNEL), Operand("shift", CHANNEL)))
BEHIND = Epilogue((Operation("scale_shift", (), (Operand("shift", SAMPLE),)), Operation("relu"),
                   Operation("add", (), (Operand("residual", ELEMENT),))))  # fmt: skip

SCALED = Epilogue((SCALE,))


def over(shape: tuple[int, ...], kind: str, first: int, last: int, **more: Any) -> Reduction:
    return Reduction(shape, over=kind, first=first, last=last, **more)


CASES = {
    "pool": Reduction((2, 3, 5, 6, 7), "max", (2, 2, 2), after=BEHIND),
    "pool, two dimensions": Reduction((2, 3, 5, 9), "avg", (2, 3), after=SCALED),
    "pool, one dimension": Reduction((3, 2, 1101), "max", (4,)),
    "operations alone": Reduction((2, 3, 4, 5), after=BEHIND),
    "pool, operations, mean": over((2, 3, 5, 6, 7), "mean", 2, 4, pool="max", window=(2, 2, 2),
                                   before=Epilogue((Operation("clamp", (-1.0, 2.0)), SCALE)), after=BEHIND),
    "mean of one dimension": over((2, 3, 5, 3, 4), "mean", 2, 2),
    "sum over channels of pools": over((2, 5, 6, 12, 9), "sum", 1, 1, pool="max", window=(6, 6, 3)),
    "lines": over((2, 3, 4, 5), "sum", 2, 2),
    "long columns": over((1, 40, 3), "amin", 1, 1, after=Epilogue((Operation("gelu"),))),
    **{f"{kind} over channels": over((2, 6, 5, 7), kind, 1, 1) for kind in (*REDUCTIONS, *NORMS)},
    **{f"{kind} over 16 channels": over((3, 16, 5, 7), kind, 1, 1, after=SCALED) for kind in NORMS},
    "all channels, whole rounds": over((2, 32, 9, 31), "logsumexp", 1, 1, after=Epilogue((Operation("gelu"),))),
    **{f"{kind} over space": over((2, 3, 7, 9), kind, 2, 3, after=SCALED) for kind in (*REDUCTIONS, *NORMS)},
    **{f"{kind}, long": over((1, 2, 160, 130), kind, 2, 3) for kind in (*REDUCTIONS, *NORMS)},
    "groups": over((2, 6, 5, 7), "norm", 1, 3, groups=3, epsilon=1e-3, after=SCALED),
    "groups of pools": over((2, 6, 5, 7), "norm", 1, 3, groups=2, pool="avg", window=(2, 2), after=SCALED),
    "a large block": over((1, 2, 100, 90), "norm", 2, 3, after=SCALED),
    "positions": over((2, 3, 4, 24), "norm", 3, 3, after=SCALED, by_position=True),
    "positions of two": over((2, 3, 4, 5), "norm", 2, 3, after=Epilogue((SCALE, Operation("tanh"))), by_position=True),
    "softmax of pools": over((2, 5, 4, 6, 2), "softmax", 1, 1, pool="max", window=(2, 2, 2), after=Epilogue((
        Operation("scale_shift", (), (Operand("less", CHANNEL),)), Operation("sigmoid"),
        Operation("multiply_value", (), (), 1)))),
}  # fmt: skip


def operands_of(reduction: Reduction) -> dict[str, Tensor]:
    """What operations read, in float64, in the shapes that PyTorch's functions take."""
    pooled, shape = reduction.pooled, reduction.output_shape
    found = {}
    for names, of, size in (
        ({of_input(name): each for name, each in reduction.before.named_operands.items()}, pooled, pooled[1]),
        (reduction.after.named_operands, shape, shape[1]),
    ):
        for place, (name, operand) in enumerate(names.items()):
            dims: tuple[int, ...] = {
                CHANNEL: (1, size, *[1] * (len(of) - 2)), SAMPLE: (*of[:2], *[1] * (len(of) - 2)), ELEMENT: of
            }[operand.per]  # fmt: skip
            if reduction.by_position and operand.per == CHANNEL:
                dims = pooled[reduction.first :]
            values = integers(dims, place)
            found[name] = 2.0 ** (values % 3 - 1) if operand.role == "scale" else values
    return found


def operated(epilogue: Epilogue, v: Tensor, of: dict[str, Tensor], name: Any) -> Tensor:
    values = [v]
    for place, operation in enumerate(epilogue.operations):
        read = {each.role: of[name(f"{each.role}_{place}")] for each in operation.operands}
        if operation.kind == "scale_shift":
            v = v * read.get("scale", 1) + read.get("shift", 0) - read.get("less", 0)
        elif operation.kind == "add":
            v = v + read["residual"]
        elif operation.kind == "multiply_value":
            v = v * values[operation.of]
        else:
            function = {
                "relu": F.relu,
                "clamp": torch.clamp,
                "gelu": F.gelu,
                "sigmoid": torch.sigmoid,
                "tanh": torch.tanh,
            }
            v = function[operation.kind](v, *operation.constants)  # type: ignore[operator]
        values.append(v)
    return v


def wanted(reduction: Reduction, x: Tensor, of: dict[str, Tensor]) -> Tensor:
    """By PyTorch's functions, in float64."""
    dims = tuple(range(reduction.first, reduction.last + 1))
    if reduction.pool:
        functions: Any = {"max": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
                          "avg": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)}  # fmt: skip
        x = functions[reduction.pool][len(reduction.window) - 1](x, reduction.window)
    x = operated(reduction.before, x, of, of_input)
    kind = reduction.over
    if kind in ("norm", "softmax"):
        grouped = x.reshape(*reduction.sizes)
        if kind == "norm":
            variance = grouped.var(1, correction=0, keepdim=True)
            grouped = (grouped - grouped.mean(1, keepdim=True)) / (variance + reduction.epsilon).sqrt()
        else:
            grouped = grouped.softmax(1)
        x = grouped.reshape(x.shape)
    elif kind:
        x = getattr(torch, kind)(x, dims, keepdim=True)
    return operated(reduction.after, x, of, str)


def computed(
    reduction: Reduction,
    program: Program,
    dtype: str,
    x: Tensor,
    of: dict[str, Tensor],
    executor: Executor | None = None,
) -> Tensor:
    """By the emulator, if there is no other executor."""
    kind, executor = DTYPES[dtype], executor or Emulator(None)

    def buffer(shape: tuple[int, ...], values: Tensor | None = None, kind: torch.dtype = kind) -> Buffer:
        return Buffer(shape, dense_strides(shape, False), kind, executor.device, values)

    buffers = {SRC: buffer(reduction.shape, x), DST: buffer(reduction.output_shape)}
    for name, values in of.items():
        shape = values.shape if values.dim() > 2 else (1, *values.shape)
        buffers[name] = buffer((1, *shape)[-max(3, len(shape)) :], values)
    for each in program.buffers:
        buffers[each.name] = buffer((1, 1, each.elements), None, DTYPES[each.dtype])
    for step in program.steps:
        executor(step, [buffers[name].tensor for name in step.operands])
    return buffers[DST].read()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_reduction(name: str, dtype: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reduction = CASES[name]
    monkeypatch.setattr(module, "_ROUNDS", 1 if split else 1 << 20)
    program = program_of(reduction, dtype)
    if split and not name.endswith(", long"):
        pytest.skip("no group is split")
    assert len(program.steps) == 1 + split
    check(reduction, program, dtype)


def check(reduction: Reduction, program: Program, dtype: str, executor: Executor | None = None) -> None:
    """Small integers against float64."""
    x, of = integers(reduction.shape, 7), operands_of(reduction)
    found, expected = computed(reduction, program, dtype, x, of, executor), wanted(reduction, x, of)
    torch.testing.assert_close(
        found.double(), expected, rtol={"bfloat16": 2**-7, "float16": 2**-10}.get(dtype, 1e-5), atol=1e-5
    )


@pytest.mark.parametrize("kind", [*REDUCTIONS, *NORMS])
def test_infinities(kind: str) -> None:
    """Infinities and NaN go where PyTorch has them go."""
    x = torch.tensor([1.0, 2.0, float("nan"), float("inf"), -float("inf")], dtype=torch.float64)
    rows = torch.stack([x[list(each)] for each in itertools.product(range(5), repeat=3)] + [x[[4, 4, 4]]])
    for shape, first in (((1, len(rows), 3), 2), ((len(rows), 3, 2), 1)):
        values = rows.view(1, -1, 3) if first == 2 else rows[:, :, None].expand(-1, -1, 2)
        reduction = Reduction(shape, over=kind, first=first, last=first)
        found = computed(reduction, program_of(reduction, "float32"), "float32", values, {})
        torch.testing.assert_close(found.double(), wanted(reduction, values, {}), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_infinite_bounds() -> None:
    """Of clamps, which leave infinities, and NaN of NaN."""
    x, inf = torch.tensor([[[1.0, -2.0, float("nan"), float("inf")]]], dtype=torch.float64), float("inf")
    for bounds in ((inf, inf), (-inf, -inf), (2.0, -inf), (-inf, inf)):
        reduction = Reduction((1, 1, 4), after=Epilogue((Operation("clamp", bounds),)))
        found = computed(reduction, program_of(reduction, "float32"), "float32", x, {})
        torch.testing.assert_close(found.double(), x.clamp(*bounds), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_types(dtype: str) -> None:
    for name in ("pool, operations, mean", "groups", "logsumexp over channels", "softmax over space"):
        check(CASES[name], program_of(CASES[name], dtype, aligned=False), dtype)


def test_what_a_group_needs() -> None:
    """Registers where it fits, one launch or two, and as many threads as it has values."""
    rows = [
        program_of(over((1024, 4, length), "norm", 2, 2), "float32").steps[0] for length in (8, 64, 4096, 6000, 6400)
    ]
    assert [dict(each.source.constants)["TEAM"] for each in rows] == [1, 4, 256, 256, 256]
    assert [dict(each.source.constants)["KEPT"] for each in rows] == [True, True, True, True, False]
    few_rows = program_of(over((2, 4, 6400), "norm", 2, 2), "float32").steps[0]
    assert few_rows.block == dict(few_rows.source.constants)["TEAM"] == 512
    few = program_of(over((1, 4, 1 << 20), "mean", 2, 2), "bfloat16")
    assert [step.grid[0] for step in few.steps][1] == 1
    assert few.steps[0].grid[0] > 100
    assert program_of(over((1, 4, 1 << 20), "mean", 2, 2), "bfloat16") == few


@pytest.mark.nvrtc
@pytest.mark.sampled(32, 4)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
@pytest.mark.parametrize("name", CASES)
def test_registers_suffice(name: str, arch: str) -> None:
    for dtype in ("float32", "float16"):
        for step in program_of(CASES[name], dtype).steps:
            found = resources_of(step.source, arch)
            assert found.clean, found
