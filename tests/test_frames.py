"""One channel of outputs in whole frames of a stride: layers without a stride compute them (`of_frames`)."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

import emulator
from kernel_harness import H200, Emulator, assert_exact
from polyphase.plan import planner
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make

LAYERS = {
    "overlap-add": make((2, 20, 30), 1, 96, 32),
    "padding of a frame": make((1, 36, 11), 1, 128, 32, 32),
    "kernel = stride": make((3, 9, 7), 1, 40, 40),
    "a long frame": make((1, 17, 5), 1, 128, 64, tf32=True),
}
OTHERS = {
    "few elements": make((2, 20, 30), 1, 48, 16),
    "two channels": make((2, 20, 30), 2, 96, 32),
    "amid a frame": make((2, 20, 30), 1, 96, 32, 16),
    "an output that ends amid a frame": make((2, 20, 30), 1, 96, 32, 0, 5),
    "a kernel that does": make((2, 20, 30), 1, 80, 32),
    "dilated": make((2, 20, 30), 1, 64, 32, dilation=2),
    "bias": make((2, 20, 30), 1, 96, 32, bias=True),
    "images": make((2, 20, 6, 5), 1, 32, 32),
}


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("pass_", [Pass.INPUT_GRAD, Pass.WEIGHT_GRAD])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: str, pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of each schedule."""
    monkeypatch.setattr(planner, "_LONG", 0)
    problem = replace(LAYERS[name], dtype=dtype)
    computed, _ = planner.as_computed(problem, pass_, None)
    assert computed.stride == (1,)
    order = zlib.crc32(f"{problem}, {pass_}".encode())
    found = {candidate.schedule: (candidate, program) for candidate, program in planner.programs(problem, pass_, H200)}
    assert len(found) > 2
    for candidate, program in found.values():
        assert_exact(problem, pass_, candidate, program, Layouts.of_call(problem, pass_), Emulator(order))


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_none(name: str) -> None:
    assert OTHERS[name].of_frames() is None


def test_a_cropped_output_is_fewer_frames() -> None:
    frames = replace(LAYERS["overlap-add"], output_padding=(-64,)).of_frames()
    assert frames is not None
    assert frames.output_size == (30,)
