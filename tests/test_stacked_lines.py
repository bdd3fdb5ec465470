"""Row blocks of implicit_gemm that several lines share, where output channels are few (kernels/core/row_blocks.cuh)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest

import emulator
from kernel_harness import Emulator, assert_exact
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.schedules.implicit_gemm.config import Taps
from test_implicit_gemm import H200, GemmCase, gemm_configs, gemm_problems
from test_implicit_gemm import work_tiles_to_take as work_tiles_to_take  # a fixture, of these tests as well

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make

LAYERS = {
    "two lines": make((2, 37, 9, 11), 32, 4, 2, 1, bias=True),
    "odd rows": make((2, 20, 7, 6), 23, 3, 2, 1, 0),
    "lines of other taps": make((2, 33, 6, 7), 16, 5, 2, 2, 1, bias=True),
    "four lines": make((1, 18, 5, 9), 12, 8, 4, 2),
    "three lines": make((2, 16, 5, 8), 9, (5, 4), 3, 1, bias=True),
    "grouped": make((2, 40, 6, 5), 40, 4, 2, 1, groups=2, bias=True),
    "kernel < stride": make((2, 16, 5, 8), 20, 2, (3, 4), 0, 1, bias=True),
    "dilated": make((2, 20, 8, 6), 24, (4, 3), 2, (2, 1), dilation=(3, 1)),
    "no tap reads beside its cell": make((3, 20, 8, 8), 32, 2, 2, bias=True),
    "along depth and height": make((2, 17, 3, 4, 5), 16, (3, 3, 2), 2, (1, 1, 0), 1, bias=True),
    "along depth": make((1, 20, 4, 5, 6), 30, (4, 3, 3), (2, 1, 2), 1),
}


def cases(problem: ConvTransposeProblem, most: int) -> Iterator[GemmCase]:
    """Some configs of a problem, with other splits, instructions and numbers of lines."""
    stacked = (case for case in gemm_configs(problem, rng=random.Random(str(problem))) if case.config.stacked > 1)
    met: set[object] = set()
    for _ in range(most):
        if (case := max(islice(stacked, 40), key=lambda case: len(case.kinds() - met), default=None)) is None:
            return
        met |= case.kinds()
        yield case


@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("problem", list(gemm_problems(LAYERS)))
def test_stacked_lines(problem: ConvTransposeProblem) -> None:
    """Whatever the instruction, the split and the way that operands are loaded."""
    for case in cases(problem, 2):
        ((candidate, program),) = case.offers(H200)
        assert_exact(problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(1))


@pytest.mark.parametrize(
    ("layer", "stacked", "alone", "together"),
    [
        (make((1, 16, 4, 4), 32, 8, 4, 2), 2, 64, 32),  # two by two lines read the same
        (make((1, 16, 4, 4), 16, 8, 4, 2), 4, 64, 24),
        (make((1, 16, 4, 4), 32, 4, 2, 1), 2, 16, 12),
        (make((1, 16, 4, 4, 4), 16, 3, 2, 1), 4, 27, 12),
        (make((1, 16, 4, 4), 32, 4, 2, 0, dilation=3), 2, 16, 16),  # they have nothing in common
    ],
)
def test_what_any_line_reads_counts_once(layer: ConvTransposeProblem, stacked: int, alone: int, together: int) -> None:
    """Operations of a layer."""
    taps = Taps.of(layer.axes3)
    assert sum(taps.groups(1)) * taps.along_w == alone
    assert sum(taps.groups(stacked, stacked)) * taps.along_w == together
