"""Gradients on tensor cores, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import (
    DTYPES,
    H200,
    Emulator,
    assert_exact,
    assert_no_races,
    assert_rounds_to_nearest,
    offers,
    strange_layouts,
)
from polyphase.plan import shortlist
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules import tiles
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.window_gemm import mma as gradient_gemm
from polyphase.schedules.window_gemm.mma import WindowDgradMma, WindowWgradMma

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
SCHEDULES = {Pass.INPUT_GRAD: WindowDgradMma(), Pass.WEIGHT_GRAD: WindowWgradMma()}
GRADIENTS = list(SCHEDULES)

# Rows of the output gradient that are multiples of 16, 8, 4 and 2 bytes.
LAYERS = {
    "stride 1": make((2, 20, 9, 10), 24, 3, tf32=True),
    "stride 1, rows of 4 bytes": make((2, 20, 9, 11), 40, (3, 2), 1, 1, dtype="bfloat16"),
    "stride 1, dilated": make((1, 32, 7, 9), 70, 3, 1, (1, 2), dilation=(1, 2), dtype="float16"),
    "stride 2": make((3, 40, 8, 8), 24, 4, 2, 1, dtype="bfloat16"),
    "stride 2, grouped": make((2, 24, 6, 8), 16, 4, 2, 1, groups=2, dtype="bfloat16"),
    "kernel = stride": make((3, 40, 8, 8), 72, 2, 2, tf32=True),
    "kernel < stride": make((2, 16, 4, 5), 18, 2, (3, 4), 0, 1, tf32=True),
    "cropped": make((1, 16, 6, 7), 20, 5, 2, 6, dtype="bfloat16"),
    "output padding": make((2, 17, 9, 10), 24, 5, 2, 2, 1, dilation=2, tf32=True),
    "tiny images": make((35, 40, 4, 4), 24, 4, 2, 1, dtype="bfloat16"),
    "one pixel": make((70, 18, 1, 1), 16, 4, dtype="float16"),
    "many input channels": make((2, 130, 6, 16), 6, 4, 2, 1, dtype="bfloat16"),
    "one output channel": make((2, 20, 6, 10), 1, 9, 4, 4, 3, dtype="bfloat16"),
    "1-D": make((3, 18, 25), 20, 5, 3, 2, dtype="bfloat16"),
    "1-D, long kernel": make((2, 16, 300), 16, 16, 8, 4, tf32=True),
    "3-D": make((2, 16, 4, 5, 6), 24, (2, 3, 3), (1, 2, 2), (0, 1, 1), tf32=True),
    "few input channels, float32": make((2, 3, 9, 12), 24, 3, 2, 1, tf32=True),
    "narrow groups, float32": make((2, 36, 8, 8), 24, 4, 2, 1, groups=3, tf32=True),
    "volumes of few channels, float32": make((2, 18, 4, 6, 8), 3, 3, 2, 1, tf32=True),
    "empty batch": make((0, 16, 4, 4), 16, 3, dtype="bfloat16"),
}


def cases() -> Iterator[ParameterSet]:
    for name, problem in LAYERS.items():
        for channels_last in (False, True) if problem.dims > 1 else (False,):
            for pass_ in GRADIENTS:
                order = "last" if channels_last else "first"
                formatted = replace(problem, channels_last=channels_last)
                yield pytest.param(formatted, pass_, id=f"{name}-{order}-{pass_.value}")


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize(("problem", "pass_"), list(cases()))
def test_gradients(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """On tensors of one kind, every third of them dense; on a GPU it is all configs and kinds."""
    all_layouts, seed = list(strange_layouts(problem)), zlib.crc32(f"{problem} {pass_}".encode())
    layouts = all_layouts[max(0, seed % 6 - 1)]
    found = offers(SCHEDULES[pass_], problem, pass_, layouts)
    candidate, program = found[seed // 6 % len(found)]
    assert_exact(problem, pass_, candidate, program, layouts, Emulator(seed % 1000))


@pytest.mark.sampled(32, 2)
@pytest.mark.parametrize("shape", gradient_gemm._SHAPES, ids=str)
@pytest.mark.parametrize("pass_", GRADIENTS)
def test_every_shape(pass_: Pass, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of every shape, with rows and columns that do not exist, and with 2, 3 or 4 buffers."""
    monkeypatch.setattr(gradient_gemm, "_SHAPES", (shape,))
    shortlist.forget()
    rows = 16 * shape[0] * shape[2]
    problem = make((2, rows // 2 + 7, 5, 24), 13, 4, 2, 1, dtype="bfloat16")
    found = offers(SCHEDULES[pass_], problem, pass_)
    shortlist.forget()
    first = zlib.crc32(f"{pass_} {shape}".encode())
    for buffers in (2 + (first + more) % 3 for more in range(3)):
        candidate, _ = found[0 if buffers < 4 else -1]
        config = candidate.config._replace(buffers=buffers)
        layouts = Layouts.dense(problem)
        if gradient_gemm._tiling(problem, pass_, layouts, config, H200) is not None:
            program = SCHEDULES[pass_].program(problem, pass_, H200, layouts, config)
            assert_exact(problem, pass_, candidate, program, executor=Emulator(buffers))
            break
    else:
        pytest.fail("no number of buffers fits")


def test_windows_that_16_bits_cannot_address() -> None:
    problem = make((1, 16, 300), 2, 512, 256, 128, dtype="bfloat16")
    candidate, program = offers(SCHEDULES[Pass.INPUT_GRAD], problem, Pass.INPUT_GRAD)[0]
    assert candidate.config.positions * 256 > 2**15
    assert_exact(problem, Pass.INPUT_GRAD, candidate, program, executor=Emulator(2))


def test_configs_fit_images_of_any_alignment() -> None:
    """Rows that are moved in pieces have room for whole ones: where that is too much they are moved by element."""
    a10 = DeviceInfo.for_arch("sm_86")
    problem = make((100, 3, 1, 33, 5), 3, (7, 8, 1), (4, 1, 4), (5, 4, 0), (0, 9, 3), dilation=(7, 15, 1))
    problem = replace(problem, dtype="bfloat16")
    schedule = WindowDgradMma()
    first = {
        next(candidates(schedule, sized, Pass.INPUT_GRAD, a10, Layouts.dense(sized))).config
        for size in ((1, 33, 5), (9, 9, 9), (3, 40, 64))
        for sized in (replace(problem, input_size=size),)
    }
    assert len(first) == 1


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("pass_", GRADIENTS)
@pytest.mark.parametrize("name", ["stride 1", "tiny images"])
def test_no_races(name: str, pass_: Pass) -> None:
    for problem in (LAYERS[name], replace(LAYERS[name], channels_last=True)):
        assert_no_races(SCHEDULES[pass_], problem, pass_)


def test_long_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts longer than what the cores sum in one go."""
    problem = make((3, 16, 67, 61), 16, 2, 2, dtype="bfloat16")
    monkeypatch.setattr(tiles, "_MAX_PLANES_BYTES", 2 * 4 * problem.elements[1])
    for candidate, program in offers(SCHEDULES[Pass.WEIGHT_GRAD], problem, Pass.WEIGHT_GRAD)[:2]:
        assert program.splits == 2
        assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("pass_", GRADIENTS)
def test_float32_is_rounded_to_nearest(pass_: Pass, channels_last: bool) -> None:
    problem = make((2, 32, 8, 12), 24, 3, 1, 1, tf32=True, channels_last=channels_last)
    _, program = offers(SCHEDULES[pass_], problem, pass_)[0]
    assert_rounds_to_nearest(problem, pass_, program)


def test_where_it_refuses() -> None:
    """Exact arithmetic stays exact: float64, float32 without TF32, and layers that PyTorch does not round either."""
    layer = make((2, 32, 8, 8), 32, 3)
    wanted = {
        layer: "PyTorch would not use TF32",
        replace(layer, tf32=True, groups=8): "PyTorch would not use TF32",
        replace(layer, tf32=True, out_channels=8): "PyTorch would not use TF32",
        replace(layer, dtype="float64"): "tensor cores for float64",
        replace(layer, dtype="bfloat16", kernel_size=(25, 25)): "too many",
    }
    for pass_, schedule in SCHEDULES.items():
        for problem, reason in wanted.items():
            assert reason in (refusal(schedule, problem.of_pass(pass_), pass_, H200) or "")
        assert "only" in (refusal(schedule, layer, Pass.FORWARD, H200) or "")
    turing = DeviceInfo.for_arch("sm_75")
    assert "lacks" in (refusal(WindowDgradMma(), replace(layer, dtype="float16"), Pass.INPUT_GRAD, turing) or "")


def test_dtypes_are_those_of_the_cores() -> None:
    taken = {
        dtype
        for dtype in DTYPES
        if refusal(WindowWgradMma(), make((2, 32, 8, 8), 32, 3, dtype=dtype, tf32=True), Pass.WEIGHT_GRAD, H200) is None
    }
    assert taken == {"float32", "float16", "bfloat16"}


# Layers of stride 1, whose input gradient is the forward pass of another.
MIRRORED = {
    "float32": make((2, 20, 9, 10), 24, 3, tf32=True),
    "float32, exact": make((2, 20, 9, 10), 24, 3),
    "padded": make((2, 20, 9, 10), 40, (3, 2), 1, 1, dtype="bfloat16"),
    "output padding": make((2, 20, 7, 9), 24, 3, 1, 1, 2, dilation=3, dtype="bfloat16"),
    "dilated": make((1, 32, 7, 9), 70, 3, 1, (1, 2), dilation=(1, 2), dtype="float16"),
    "grouped": make((2, 24, 6, 8), 16, 3, 1, 1, groups=2, dtype="bfloat16"),
    "tiny images": make((5, 40, 4, 4), 24, 3, 1, 1, dtype="bfloat16"),
    "few channels": make((2, 3, 9, 10), 24, 5, 1, 2, dtype="bfloat16"),
    "1-D": make((3, 18, 25), 20, 5, 1, 2, dtype="bfloat16"),
    "3-D": make((2, 16, 4, 5, 6), 24, (2, 3, 3), 1, (0, 1, 1), tf32=True),
}


@pytest.mark.sampled(32, 8)
@pytest.mark.parametrize("name", MIRRORED)
@pytest.mark.parametrize("channels_last", [False, True])
def test_mirrored_layers(name: str, channels_last: bool) -> None:
    if channels_last and MIRRORED[name].dims == 1:
        pytest.skip("PyTorch has no such format")
    problem, schedule = replace(MIRRORED[name], channels_last=channels_last), ImplicitGemm()
    dense = Layouts.dense(problem)
    ways = ((0, dense), (-1, replace(dense, weight_channels_last=not channels_last)))
    for index, layouts in ways[zlib.crc32(f"{name} {channels_last}".encode()) % 2 :][:1]:
        candidate = list(candidates(schedule, problem, Pass.INPUT_GRAD, H200, layouts))[index]
        program = schedule.program(problem, Pass.INPUT_GRAD, H200, layouts, candidate.config)
        assert_exact(problem, Pass.INPUT_GRAD, candidate, program, layouts, Emulator(1))


def test_what_has_no_mirror() -> None:
    layer = make((2, 32, 8, 8), 32, 3, 1, 1)
    assert layer.mirrored() is not None
    assert replace(layer, stride=(1, 2)).mirrored() is None
    assert replace(layer, padding=(1, 3)).mirrored() is None
    assert "stride 1" in (refusal(ImplicitGemm(), replace(layer, stride=(2, 2)), Pass.INPUT_GRAD, H200) or "")
