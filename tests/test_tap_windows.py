"""Stages of several taps along the width, whose boxes have a halo; executed by the emulator."""

from __future__ import annotations

import zlib

import pytest

import emulator
from kernel_harness import H200, Emulator, assert_exact, strange_layouts
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.tap_gemm.tma import TapGemmTma, product_of
from polyphase.schedules.tap_gemm.tma_config import window_taps

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
TMA = TapGemmTma()

#: Tiles of one line and of many, windows of one residue and of several, borders, dilation, phases of fewer taps.
LAYERS = (
    make((2, 40, 9, 33), 24, (2, 7), bias=True, tf32=True),
    make((9, 33, 70), 18, 9, 2, 3, dtype="bfloat16"),
    make((3, 16, 40, 20), 24, (3, 5), (1, 2), (1, 2), dtype="float16"),
    make((1, 24, 3, 12, 30), 10, (2, 1, 4), (1, 1, 2), (0, 0, 1), tf32=True),
    make((2, 20, 10, 25), 66, (1, 7), (1, 3), (0, 2), (0, 1), dilation=(1, 2), dtype="bfloat16"),
    make((1, 130, 300), 40, 5, 1, 9, dtype="bfloat16"),
    make((2, 24, 17, 26), 16, (3, 6), (1, 2), groups=2, bias=True, dtype="bfloat16"),
    make((1, 32, 8, 200), 24, (1, 7), (1, 5), (0, 3), dilation=(1, 3), tf32=True),
    make((20, 16, 3, 17), 12, (2, 3), bias=True, tf32=True),
)


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.INPUT_GRAD])
@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_windows(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """Every config that has stages of several taps; on tensors of one kind."""
    found = [config for config in TMA.configs(problem, pass_, H200) if config.window > 1]
    assert found or max(window_taps(product_of(problem, pass_, Layouts.dense(problem)))) == 1
    all_layouts, seed = list(strange_layouts(problem)), zlib.crc32(f"{problem} {pass_}".encode())
    for config in found[seed % 2 :: 2]:
        layouts = all_layouts[0 if config.back else seed % 5]
        if TMA.cost(problem, pass_, H200, layouts, config) is None:
            continue
        program = TMA.program(problem, pass_, H200, layouts, config)
        candidate = Candidate(TMA.name, config, 0.0, "bytes")
        assert_exact(problem, pass_, candidate, program, layouts, Emulator(seed % 1000))
