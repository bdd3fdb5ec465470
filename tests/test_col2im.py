"""GEMM + col2im, by both GEMMs, executed by the emulator."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

import emulator
from kernel_harness import H200, Emulator, assert_exact, cases, choices, offers, strange_layouts
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.col2im import schedule as col2im
from polyphase.schedules.col2im.cells import Col2imCells
from polyphase.schedules.col2im.direct import Col2imDirect
from polyphase.schedules.col2im.schedule import Col2im, Col2imTma
from polyphase.schedules.schedule import Schedule

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make

LAYERS = {
    "many taps, 3-D": make((2, 36, 3, 4, 5), 3, (7, 5, 7), 2, bias=True),
    "kernel = stride": make((2, 40, 5, 3, 6), 5, 3, 3, bias=True),
    "kernel < stride": make((2, 32, 4, 5), 3, 2, (3, 4), 0, 1, bias=True),
    "dilation and stride": make((2, 40, 6, 7), 4, 3, 4, 1, 2, dilation=2),
    "dilation only": make((1, 32, 7, 9), 4, 3, 1, (1, 2), dilation=(1, 2)),
    "cropped": make((1, 34, 6, 7), 2, 5, 2, 6),
    "grouped": make((2, 105, 6, 9), 12, (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=3, bias=True),
    "rounded": make((2, 64, 6, 9), 16, 4, 2, 1, tf32=True),
    "one channel": make((2, 37, 9, 11), 1, 9, 4, 4, 3, bias=True),
    "long kernel": make((2, 36, 23), 1, 96, 32, 40, bias=True),
    "long kernel, batch 1": make((1, 33, 40), 2, 64, 16, 4),
    "one pixel": make((70, 48, 1, 1), 2, 4, bias=True),
    "long sums, few positions": make((1, 400, 2, 3), 2, 5, 2, 2, bias=True),
    "tiny images": make((3, 68, 2, 2, 3), 66, (3, 4, 3), (2, 1, 2), tf32=True),
    "a large stride": make((1, 32, 2, 3), 3, 2, (300, 5)),
    "empty batch": make((0, 32, 4, 4), 3, 3),
}

# Of few positions, for the product in exact arithmetic.
FEW = {
    "volume": make((1, 70, 2, 2, 2), 5, 4, 2, 1, bias=True),
    "one position": make((1, 130, 1, 1), 33, 4, 2, 1),
    "images": make((3, 41, 3, 2), 7, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1), bias=True),
    "frames": make((1, 96, 17), 6, 16, 8, 4, tf32=True),
    "odd columns": make((2, 33, 4, 3), 3, 3, 1, 1),
    "pairs of columns": make((1, 20, 5, 5), 2, 3, 4, 0, 2),
    "cropped": make((1, 34, 3, 3), 9, 5, 2, 4),
}


# Of long kernels and large strides, whose cells have many outputs.
CELLS = {
    "overlap-add": make((2, 20, 40), 1, 64, 16),
    "overlap-add, cropped": make((2, 10, 30), 1, 64, 32, 24, bias=True),
    "kernel = stride": make((1, 9, 21), 3, 20, 20, 3, 5, bias=True),
    "2-D": make((2, 21, 5, 6), 3, 16, 8, 4),
    "2-D, other strides": make((2, 5, 4, 7), 2, (6, 16), (2, 16), (1, 4), 1, bias=True),
    "2-D, one channel": make((1, 1, 6, 9), 1, (3, 32), (1, 16), (1, 8)),
    "grouped": make((1, 12, 4, 5), 6, 8, 4, 2, groups=3, bias=True),
    "cropped to a few outputs": make((3, 16, 9), 2, 32, 16, 70),
    "rounded": make((1, 16, 30), 16, 32, 16, tf32=True),
    "empty batch": make((0, 16, 4), 3, 32, 16),
}

# Kernels that leave gaps between them, of any number of channels.
GAPS = {
    "2-D": make((2, 40, 5, 9), 37, 2, 4, 1, bias=True),
    "one tap": make((1, 20, 7, 11), 9, 1, 6, 2, 3, bias=True),
    "dilation": make((2, 33, 3, 4, 5), 5, 2, 5, 1, 2, dilation=4, bias=True),
    "dilation, prime": make((1, 24, 6, 7), 11, 3, (5, 7), (0, 3), dilation=(3, 5)),
    "dilation, common factor": make((1, 16, 6, 9), 3, 2, 6, dilation=4, bias=True),
    "grouped": make((2, 36, 33), 24, 3, 10, 4, 7, groups=3, bias=True),
    "gaps along one dimension": make((1, 30, 4, 9), 70, (3, 1), (3, 2), bias=True),
    "cropped": make((1, 17, 6, 7), 40, 2, 5, 7),
    "rows of a few vectors": make((3, 16, 5, 4), 3, 1, 7, tf32=True),
    "long rows": make((1, 16, 3, 301), 5, (1, 2), (2, 5), tf32=True),
    "short rows": make((1, 32, 9, 1), 6, (2, 1), 3, tf32=True),
    "empty batch": make((0, 32, 4, 8), 3, 2, 4),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", GAPS)
def test_gaps_between_kernels(name: str, dtype: str) -> None:
    problem = replace(GAPS[name], dtype=dtype)
    order = zlib.crc32(str(problem).encode())
    found = offers(Col2im(), problem)
    candidate, program = found[order % len(found)]
    assert program.steps[-1].source.kernel == ("col2im" if name == "short rows" else "spread")
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(order))


def test_gaps_between_sums_of_planes() -> None:
    """Vectors of two rows, of two channels and of two images, and a last one that is not whole."""
    problem = make((2, 2100, 1, 5), 3, 2, (3, 5), 0, 1, bias=True, dtype="bfloat16")
    planes = [each for each in offers(Col2im(), problem) if each[1].buffers[-1].elements > 2 * 12 * 3]
    assert problem.elements[2] % 8
    assert_exact(problem, Pass.FORWARD, *(planes or offers(Col2im(), problem))[0], executor=Emulator(order=None))


def test_outputs_with_gaps_that_are_not_contiguous() -> None:
    """They are written by col2im."""
    problem = GAPS["2-D"]
    written = set()
    for layouts in strange_layouts(problem):
        candidate, program = offers(Col2im(), problem, layouts=layouts)[0]
        written.add(program.steps[-1].source.kernel)
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(1))
    assert written == {"col2im", "spread"}


@pytest.mark.sampled(20, 5)
@pytest.mark.parametrize("problem", list(cases(CELLS)))
def test_layers_by_cells(problem: ConvTransposeProblem) -> None:
    order = zlib.crc32(str(problem).encode())
    for layouts, candidate, program in choices(Col2imCells(), problem):
        assert program.steps[-1].source.kernel == "col2im"
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(order))


@pytest.mark.sampled(20, 2)
@pytest.mark.parametrize("problem", [*cases(FEW), *(replace(each, dtype="float64") for each in FEW.values())])
def test_layers_of_few_positions(problem: ConvTransposeProblem) -> None:
    order = zlib.crc32(str(problem).encode())
    for layouts, candidate, program in choices(Col2imDirect(), problem):
        assert program.steps[-1].source.kernel == "col2im"
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(order))


def test_few_positions_with_long_sums() -> None:
    """Splits of the input channels leave planes, which the step adds."""
    problem = make((1, 900, 2, 2), 3, 4, 2, 1, bias=True)
    candidate, program = offers(Col2imDirect(), problem)[0]
    assert program.buffers[-1].elements > 4 * 48
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(order=None))


def test_sizes_of_few_positions_share_kernels() -> None:
    layer = make((1, 64, 4, 4), 24, 4, 2, 1)
    sources = {
        offers(Col2imDirect(), replace(layer, batch=batch, input_size=size))[0][1].main.source
        for batch, size in ((1, (3, 3)), (1, (4, 4)), (3, (5, 1)), (2, (2, 3)))
    }
    assert len(sources) == 1


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize("schedule", [Col2im(), Col2imTma()], ids=lambda each: each.name)
@pytest.mark.parametrize("problem", list(cases(LAYERS)))
def test_layers(problem: ConvTransposeProblem, schedule: Schedule) -> None:
    order = zlib.crc32(str(problem).encode())
    for layouts, candidate, program in choices(schedule, problem):
        assert program.steps[-1].source.kernel in ("col2im", "spread")
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(order))


def test_planes_are_added() -> None:
    """Few positions and long sums: the GEMM leaves several planes of partial sums."""
    problem = make((1, 2100, 2, 3), 2, 5, 2, 2, bias=True, dtype="bfloat16")
    found = [(candidate, program) for candidate, program in offers(Col2imTma(), problem)]
    candidate, program = max(found, key=lambda each: each[1].buffers[-1].elements)
    assert program.buffers[-1].elements > 6 * 50
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(3))


def test_no_races() -> None:
    problem = replace(LAYERS["grouped"], channels_last=True)
    candidate, program = offers(Col2imTma(), problem)[0]
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(order=None))


def test_where_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make((2, 32, 8, 8), 3, 4, 2, 1)
    for schedule in (Col2im(), Col2imTma()):
        wanted = {
            replace(layer, out_channels=80): "are many",
            replace(layer, out_channels=40): "at most 32",
            replace(layer, in_channels=24): "are few",
            replace(layer, kernel_size=(1, 1), stride=(1, 1)): "several taps",
            replace(layer, dtype="float64"): "tensor cores for float64",
        }
        for problem, reason in wanted.items():
            assert reason in (refusal(schedule, problem, Pass.FORWARD, H200) or "")
        assert "only" in (refusal(schedule, layer, Pass.WEIGHT_GRAD, H200) or "")
        assert refusal(schedule, layer, Pass.FORWARD, DeviceInfo.for_arch("sm_75")) is not None
    few = make((1, 64, 2, 2), 32, 4, 2, 1, tf32=True)
    for problem, reason in {
        replace(few, kernel_size=(1, 1)): "several taps",
        replace(few, groups=2): "one group, not 2",
        replace(few, tf32_as_pytorch=True): "round",
        replace(few, batch=17): "size of these tensors",
        replace(few, batch=0): "size of these tensors",
    }.items():
        assert reason in (refusal(Col2imDirect(), problem, Pass.FORWARD, H200) or "")
    assert refusal(Col2imDirect(), few, Pass.FORWARD, DeviceInfo.for_arch("sm_75")) is None
    monkeypatch.setattr(col2im, "MOST_BYTES", 4 * 2 * 64 * 3 * 16 - 1)
    assert "size of these tensors" in (refusal(Col2im(), layer, Pass.FORWARD, H200) or "")
