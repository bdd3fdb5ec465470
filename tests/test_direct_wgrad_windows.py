"""The weight gradient of few output channels by windows, executed by the emulator; test_gpu.py runs it on a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import H200, Emulator, assert_exact, formats, integers, offers, reference, run, strange_layouts
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.schedules.direct_wgrad import windows as direct_wgrad_windows
from polyphase.schedules.direct_wgrad.windows import DirectWgradWindows
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.window_gemm.window import as_one_channel

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
PASS = Pass.WEIGHT_GRAD

LAYERS = {
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
    "empty batch": make((0, 8, 4, 4), 3, 4, 2, 1),
}


def cases() -> Iterator[ParameterSet]:
    for name, layer in LAYERS.items():
        for problem in formats(layer):
            if refusal(DirectWgradWindows(), problem, PASS, H200):  # taps apart
                assert (name, problem.channels_last) == ("dilated", True)
                continue
            yield pytest.param(problem, id=f"{name}-{'last' if problem.channels_last else 'first'}")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("problem", list(cases()))
def test_layers(problem: ConvTransposeProblem) -> None:
    """Tensors of each kind, a config of each by turns; on a GPU it is all configs."""
    order, met = zlib.crc32(str(problem).encode()), 0
    for turn, layouts in enumerate(strange_layouts(problem)):
        found = offers(DirectWgradWindows(), problem, PASS, layouts)
        if found:
            candidate, program = found[(order + turn) % len(found)]
            assert_exact(problem, PASS, candidate, program, layouts, Emulator(order % 1000))
            met += 1
    assert met >= 3


def test_every_shape() -> None:
    """Blocks of every shape, in several orders of threads."""
    for problem in formats(make((2, 40, 5, 9), 3, 4, 2, 1)):
        layouts = Layouts.dense(problem)
        layer = direct_wgrad_windows._Layer.of(problem, layouts)
        assert layer is not None
        configs = list(dict.fromkeys(direct_wgrad_windows._configs(layer)))
        for number, config in enumerate(configs[zlib.crc32(str(problem).encode()) % 5 :: 5]):
            program = DirectWgradWindows().program(problem, PASS, H200, layouts, config)
            candidate = Candidate("direct_wgrad_windows", config, 0.0, "")
            assert_exact(problem, PASS, candidate, program, layouts, executor=Emulator(number))


@pytest.mark.parametrize("name", ["last of a generator", "odd rows"])
def test_no_races(name: str) -> None:
    for problem in formats(LAYERS[name]):
        candidate, program = offers(DirectWgradWindows(), problem, PASS)[0]
        assert_exact(problem, PASS, candidate, program, executor=Emulator(order=None))


def test_long_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chains of a part, of several stages, and a rest."""
    monkeypatch.setattr(direct_wgrad_windows, "_CHAIN", 16)
    monkeypatch.setattr(direct_wgrad_windows, "affordable_planes", lambda problem: 1)
    for problem in formats(make((5, 24, 7, 36), 3, 3, 2, 1)):
        for candidate, program in offers(DirectWgradWindows(), problem, PASS):
            assert program.splits == 1
            assert_exact(problem, PASS, candidate, program, executor=Emulator(1))


def test_float32_is_exact() -> None:
    generator = torch.Generator().manual_seed(5)
    for problem in formats(make((2, 32, 9, 24), 3, (3, 5), (2, 3), (1, 2))):
        shapes = problem.input_shape, problem.output_shape
        operands = tuple(torch.randn(shape, generator=generator) for shape in shapes)
        _, program = offers(DirectWgradWindows(), problem, PASS)[0]
        found = run(problem, PASS, program, Layouts.dense(problem), operands).double()
        exact = reference(problem, PASS, (operands[0].double(), operands[1].double()))
        assert (found - exact).norm() / exact.norm() < 2e-7


def test_one_channel_stands_for_all() -> None:
    """The layer that channels last make of another has its output's elements and its weight's gradient."""
    for problem in LAYERS.values():
        if problem.dims < 2 or problem.dilation[-1] > 1 or problem.batch == 0:
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


def test_refusals() -> None:
    layer = make((2, 32, 8, 8), 3, 4, 2, 1, tf32=True)
    schedule = DirectWgradWindows()
    assert refusal(schedule, layer, PASS, H200) is None
    wanted = {
        replace(layer, dtype="bfloat16"): "float32",
        replace(layer, out_channels=16): "tensor cores",
        replace(layer, out_channels=33, tf32=False): "528 pairs",
        replace(layer, out_channels=4, groups=2): "one group",
        replace(layer, channels_last=True, dilation=(1, 2)): "side by side",
        replace(layer, stride=(2, 20000)): "no tile",
    }
    for problem, reason in wanted.items():
        assert reason in (refusal(schedule, problem, PASS, H200) or "")
    assert "only" in (refusal(schedule, layer, Pass.FORWARD, H200) or "")


def test_every_size_has_the_layer_s_kernels() -> None:
    for layer in formats(make((2, 64, 8, 16), 3, 4, 2, 1)):
        found = set()
        for batch, size in ((1, (8, 16)), (7, (33, 40)), (300, (16, 16)), (2, (128, 256))):
            sized = replace(layer, batch=batch, input_size=size)
            offered = candidates(DirectWgradWindows(), sized, PASS, H200, Layouts.dense(sized))
            found.add(tuple(candidate.config for candidate in offered))
        assert len(found) == 1
