"""Gradients by Hopper's instruction, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

import emulator
from kernel_harness import (
    H200,
    Emulator,
    assert_exact,
    assert_no_races,
    assert_one_config_exact,
    assert_rounds_to_nearest,
    gradient_cases,
    lists_of_sizes,
    offers,
    strange_layouts,
)
from polyphase.plan import planner as plan
from polyphase.plan.shortlist import candidates, in_order, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.schedules import tiles
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.window_gemm import wgmma as gradient_wgmma
from polyphase.schedules.window_gemm import wgmma_tile as gradient_wgmma_tile
from polyphase.schedules.window_gemm import window
from polyphase.schedules.window_gemm.wgmma import WindowDgradWgmma, WindowWgradWgmma
from polyphase.schedules.window_gemm.wgmma_tile import WgmmaConfig

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
SCHEDULES = {Pass.INPUT_GRAD: WindowDgradWgmma(), Pass.WEIGHT_GRAD: WindowWgradWgmma()}
GRADIENTS = list(SCHEDULES)

# Rows of the input and slabs of it that are multiples of 16 bytes; of the output gradient, where nothing else is said.
LAYERS = {
    "stride 2": make((3, 40, 8, 8), 24, 4, 2, 1, tf32=True),
    "stride 2, half": make((2, 24, 8, 16), 20, 4, 2, 1, dtype="bfloat16"),
    "kernel = stride": make((3, 40, 8, 8), 72, 2, 2, tf32=True),
    "kernel = stride, half": make((3, 40, 16, 8), 40, 2, 2, dtype="float16"),
    "stride 1": make((2, 20, 9, 12), 24, 3, 1, 1, tf32=True),
    "rows of the gradient that are copied": make((2, 24, 8, 16), 24, 3, dtype="bfloat16"),
    "pairs that are copied": make((2, 24, 8, 12), 20, 4, 2, tf32=True),
    "pairs that are copied, half": make((2, 24, 8, 16), 20, 4, 2, dtype="bfloat16"),
    "no pairs in odd rows": make((2, 24, 8, 16), 20, 2, 2, 0, (0, 1), dtype="bfloat16"),
    "odd rows": make((2, 24, 8, 14), 16, 3, 2, 1, tf32=True),
    "odd rows, half": make((2, 24, 8, 16), 24, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1), dtype="bfloat16"),
    "odd rows of several images": make((5, 16, 3, 8), 24, 3, 2, 1, dtype="float16"),
    "odd slabs": make((2, 16, 4, 8, 16), 24, (2, 3, 3), 2, (0, 1, 1), dtype="bfloat16"),
    "grouped": make((2, 48, 8, 8), 40, 4, 2, 1, groups=2, dtype="float16"),
    "grouped, alike": make((2, 32, 8, 8), 32, 4, 2, 1, groups=2, dtype="bfloat16"),
    "kernel < stride": make((2, 16, 4, 8), 20, 2, (3, 4), 0, 2, tf32=True),
    "cropped": make((1, 16, 8, 8), 20, 5, 2, 6, 1, tf32=True),
    "cropped by pieces": make((1, 16, 8, 16), 24, (2, 12), (2, 3), (1, 9), dtype="bfloat16"),
    "dilated": make((2, 24, 8, 16), 24, (3, 4), (1, 2), (1, 1), dilation=(2, 1), dtype="bfloat16"),
    "output padding": make((2, 16, 8, 12), 24, 5, 2, 2, 1, dilation=2, tf32=True),
    "long rows": make((2, 16, 3, 72), 16, 3, 2, 1, 1, dtype="bfloat16"),
    "tiny images": make((35, 40, 4, 4), 24, 4, 2, 1, dtype="bfloat16"),
    "many input channels": make((2, 264, 4, 16), 8, 4, 2, 1, dtype="bfloat16"),
    "one-dimensional": make((3, 24, 64), 20, 5, 3, 2, 1, tf32=True),
    "one-dimensional, long rows": make((2, 16, 512), 16, 16, 8, 4, tf32=True),
    "three-dimensional": make((2, 16, 4, 6, 8), 24, (2, 3, 4), (1, 2, 2), (0, 1, 1), (0, 1, 0), tf32=True),
    "images of 4 elements too many": make((3, 24, 14, 14), 20, 2, 2, dtype="bfloat16"),
    "images of 2 elements too many": make((3, 40, 5, 6), 24, 3, 2, 1, dtype="float16"),
    "rows of 4 elements too many": make((2, 20, 3, 76), 16, 4, 2, 1, groups=2, dtype="bfloat16"),
    "slabs of 4 elements too many": make((2, 16, 3, 6, 6), 16, 2, 2, dtype="bfloat16"),
    "tiles that begin at 4 bytes": make((2, 24, 12, 98), 20, 2, 3, 1, dtype="bfloat16"),
    "tiles that begin at 4 bytes, joined": make((2, 24, 10, 46), 24, 3, dtype="bfloat16"),
    "cropped by more than a row's pitch": make((2, 24, 16, 48), 24, (3, 1), (1, 2), (1, 20), dtype="bfloat16"),
    "few input channels, float32": make((2, 3, 9, 12), 24, 3, 2, 1, tf32=True),
    "narrow groups, float32": make((2, 36, 8, 8), 24, 4, 2, 1, groups=3, tf32=True),
    "volumes of few channels, float32": make((2, 16, 2, 6, 8), 3, 4, 2, 1, tf32=True),
    "empty batch": make((0, 16, 4, 8), 16, 4, 2, 1, dtype="bfloat16"),
}

# Channels last, weight gradients alone: all output channels are one.
last = partial(make, channels_last=True, dtype="bfloat16")
LAST = {
    "last of a generator": last((3, 40, 8, 12), 3, 4, 2, 1),
    "super resolution": last((2, 24, 9, 16), 1, 9, 4, 4, 3),
    "stride 1": replace(last((2, 64, 9, 20), 3, 7, 1, 3), dtype="float16"),
    "odd images": last((2, 16, 7, 11), 1, 5, 2, 2),
    "boxes of 32 bytes": last((1, 136, 6, 12), 2, 3, 2, 1, 1),
    "several boxes": last((1, 200, 4, 8), 21, 4, 2, 1),
    "odd strides": last((2, 16, 8, 6), 6, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1)),
    "tiny images": last((35, 16, 3, 3), 3, 4, 2, 1),
    "three-dimensional": last((2, 16, 4, 5, 6), 2, (2, 3, 4), (1, 2, 2), (0, 1, 1), (0, 1, 0)),
}


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("name", LAST)
def test_channels_last(name: str) -> None:
    """Tensors of each kind that TMA takes, a config of each; on a GPU it is all of them."""
    problem, schedule, met = LAST[name], SCHEDULES[Pass.WEIGHT_GRAD], 0
    assert refusal(WindowDgradWgmma(), problem, Pass.INPUT_GRAD, H200)
    for number, layouts in enumerate(strange_layouts(problem)):
        if found := offers(schedule, problem, Pass.WEIGHT_GRAD, layouts):
            candidate, program = found[number % len(found)]
            assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, layouts, Emulator(number))
            met += 1
    assert met >= 3


def test_channels_last_take_every_way() -> None:
    """Windows come as boxes and by copies; the input comes in boxes of every width, one and several."""
    found = [
        program for problem in LAST.values() for _, program in offers(WindowWgradWgmma(), problem, Pass.WEIGHT_GRAD)
    ]
    assert {program.main.tensor_maps[0].swizzle for program in found} == {32, 64, 128}
    assert {len(program.main.tensor_maps) for program in found} == {1, 2}
    assert {dict(program.main.source.constants)["COLUMN_TILES"] for program in found} > {2, 8}


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize(("problem", "pass_"), list(gradient_cases(LAYERS)))
def test_gradients(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """One config; on a GPU it is all of them."""
    assert_one_config_exact(SCHEDULES[pass_], problem, pass_)


@pytest.mark.parametrize(
    "problem",
    [
        make((5, 24, 20, 24), 24, 4, 2, 1, dtype="bfloat16"),
        make((3, 40, 17, 19), 24, 3, 2, 1, tf32=True),  # windows that are copied, rows in which pairs do not fit
        make((2, 48, 16, 24), 48, 4, 2, 1, groups=3, dtype="float16"),
        make((5, 16, 16, 16), 160, 8, 2, 3, dtype="bfloat16"),  # long sums
    ],
    ids=str,
)
def test_blocks_go_on_to_further_tiles(problem: ConvTransposeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_wgmma, "_PERSISTENT", 1)
    device = replace(H200, multiprocessors=2)
    schedule, layouts = SCHEDULES[Pass.INPUT_GRAD], Layouts.dense(problem)
    for candidate in itertools.islice(candidates(schedule, problem, Pass.INPUT_GRAD, device, layouts), 2):
        program = schedule.program(problem, Pass.INPUT_GRAD, device, layouts, candidate.config)
        assert program.main.grid == (2, 1, 1)
        assert_exact(problem, Pass.INPUT_GRAD, candidate, program, layouts, Emulator(5))


@pytest.mark.slow
def test_layers_take_every_way() -> None:
    """Windows come as boxes and by copies; the input's runs are rows or join them, long or short."""
    ways = set()
    for problem in LAYERS.values():
        for pass_ in GRADIENTS:
            for config in in_order(SCHEDULES[pass_], problem, pass_, H200, Layouts.dense(problem)):
                tiling = gradient_wgmma.tiling_of(problem, pass_, Layouts.dense(problem), config, H200)
                if tiling is not None:
                    ways.add((pass_, "window", tiling.window_map is not None))
                    ways.add((pass_, "runs", tiling.runs.span))
                    ways.add((pass_, "pieces", tiling.runs.piece_bytes, tiling.runs.joined > 0))
                    ways.add((pass_, "joined", tiling.runs.joined > 0))
                    ways.add((pass_, "pairs", gradient_wgmma.in_pairs(problem), tiling.window_map is not None))
    for pass_ in GRADIENTS:
        assert {way[2] for way in ways if way[:2] == (pass_, "window")} == {False, True}
        assert {way[2:] for way in ways if way[:2] == (pass_, "pairs")} >= {(True, True), (True, False), (False, True)}
    assert {way[2] for way in ways if way[:2] == (Pass.WEIGHT_GRAD, "runs")} == {32, 64, 128}
    assert {way[2] for way in ways if way[:2] == (Pass.WEIGHT_GRAD, "joined")} == {False, True}
    pieces = {way[2:] for way in ways if way[:2] == (Pass.WEIGHT_GRAD, "pieces")}
    assert pieces == {(size, joined) for size in (0, 4, 8) for joined in (False, True)}


def mixed_formats(problem: ConvTransposeProblem) -> Iterator[Layouts]:
    """Tensors of which one or both lie in another memory format than the layer's."""
    inputs, outputs = (
        [dense_strides(shape, last) for last in (False, True)] for shape in (problem.input_shape, problem.output_shape)
    )
    for input, output in itertools.product(inputs, outputs):
        yield replace(Layouts.dense(problem), input=input, output=output, weight_channels_last=False)


@pytest.mark.sampled(16, 4)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "problem",
    [
        make((3, 40, 8, 16), 3, 4, 2, 1, dtype="bfloat16"),
        make((2, 24, 8, 16), 20, 4, 2, 1, dtype="float16"),
        make((2, 32, 64), 16, 4, 2, 1, tf32=True),
        make((2, 24, 64), 16, 8, 4, 2, dtype="bfloat16"),
        make((2, 1, 16, 16), 3, 5, 2, 2, dtype="float16"),
    ],
    ids=str,
)
def test_input_and_gradient_in_different_formats(problem: ConvTransposeProblem, channels_last: bool) -> None:
    """What the planner takes, and its own first, where it offers one."""
    problem = replace(problem, channels_last=channels_last and problem.dims > 1)
    schedule, pass_ = SCHEDULES[Pass.WEIGHT_GRAD], Pass.WEIGHT_GRAD
    for number, layouts in enumerate(mixed_formats(problem)):
        chosen = [(each.candidate, each.program) for each in plan.plan(problem, pass_, H200, layouts).selected]
        if refusal(schedule, problem, pass_, H200) is None:
            chosen += [
                (each, schedule.program(problem, pass_, H200, layouts, each.config))
                for each in itertools.islice(candidates(schedule, problem, pass_, H200, layouts), 1)
            ]
        for candidate, program in chosen:
            assert_exact(problem, pass_, candidate, program, layouts, executor=Emulator(number))


@pytest.mark.sampled(32, 2)
@pytest.mark.parametrize(
    "shape",
    [(row_tiles, columns) for row_tiles in (1, 2, 3, 4) for columns in (8, 64, 128, 256) if row_tiles * columns <= 256],
)
@pytest.mark.parametrize("pass_", GRADIENTS)
def test_every_shape(pass_: Pass, shape: tuple[int, int]) -> None:
    """Blocks of every shape, with rows and columns that do not exist, and with 3 to 6 buffers."""
    row_tiles, columns = shape
    problem = make((2, columns // 2 + 4, 4, 16), 26, 4, 2, 1, dtype="bfloat16")
    chunk = 4 if pass_ is Pass.INPUT_GRAD else 128 * row_tiles // 16
    seed = zlib.crc32(f"{pass_} {shape}".encode())
    for buffers in range(3 + seed % 4, 2, -1):
        positions = 64 if pass_ is Pass.WEIGHT_GRAD else 128 * row_tiles
        config = WgmmaConfig(row_tiles, columns, min(chunk, 26), positions, buffers)
        layouts = Layouts.dense(problem)
        if gradient_wgmma.tiling_of(problem, pass_, layouts, config, H200) is not None:
            break
    program = SCHEDULES[pass_].program(problem, pass_, H200, layouts, config)
    candidate, _ = offers(SCHEDULES[pass_], problem, pass_)[0]
    assert_exact(problem, pass_, replace(candidate, config=config), program, executor=Emulator(buffers))


@pytest.mark.parametrize("operations", range(1, 8))
def test_every_number_of_operations(operations: int) -> None:
    """Stages of whole batches and of what is left of one: so many taps, of as many channels as an operation takes."""
    dtype, chunk = ("float32", 8) if operations % 3 == 0 else ("bfloat16", 16)
    problem = make((2, 20, 40), 2 * chunk, operations, dtype=dtype, tf32=True)
    schedule = SCHEDULES[Pass.INPUT_GRAD]
    for row_tiles in (1, 2):
        config = WgmmaConfig(row_tiles, 24, chunk, 128 * row_tiles, 3)
        program = schedule.program(problem, Pass.INPUT_GRAD, H200, Layouts.dense(problem), config)
        candidate = Candidate(schedule.name, config, 0.0, "")
        assert_exact(problem, Pass.INPUT_GRAD, candidate, program, executor=Emulator(row_tiles))


@pytest.mark.parametrize("pass_", GRADIENTS)
@pytest.mark.parametrize("name", ["stride 2", "rows of the gradient that are copied", "odd rows, half"])
def test_no_races(name: str, pass_: Pass) -> None:
    assert_no_races(SCHEDULES[pass_], LAYERS[name], pass_)


def test_rows_of_a_window_beyond_32767_bytes() -> None:
    problem = make((1, 16, 64), 8, 32, dilation=600, dtype="bfloat16")
    candidate, program = offers(SCHEDULES[Pass.INPUT_GRAD], problem, Pass.INPUT_GRAD)[0]
    assert len(program.main.tensor_maps) == 1  # the window is copied
    assert_exact(problem, Pass.INPUT_GRAD, candidate, program, executor=Emulator(1))


def test_long_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums longer than what the cores sum in one go, of several stages and a rest."""
    problem = make((2, 40, 6, 8), 56, 4, 2, 1, dtype="bfloat16")
    schedule = SCHEDULES[Pass.INPUT_GRAD]
    for module in (gradient_wgmma, window):
        monkeypatch.setattr(module, "FLUSH", 4 * 8 * problem.taps)
    config = WgmmaConfig(2, 40, 8, 256, 3)
    program = schedule.program(problem, Pass.INPUT_GRAD, H200, Layouts.dense(problem), config)
    assert dict(program.main.source.constants)["FLUSH"] == 2
    candidate = Candidate(schedule.name, config, 0.0, "")
    assert_exact(problem, Pass.INPUT_GRAD, candidate, program, executor=Emulator(1))
    most = {config.columns * config.row_tiles for config in gradient_wgmma_tile.legal_configs(problem, Pass.INPUT_GRAD)}
    assert max(most) <= 128


@pytest.mark.parametrize("preloaded", [4, 1, 0])
def test_long_sums_of_positions(preloaded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits with several flushes, also as the kernel is compiled where registers would spill."""
    problem = make((3, 16, 16, 32), 16, 2, 2, dtype="bfloat16")
    monkeypatch.setattr(tiles, "_MAX_PLANES_BYTES", 2 * 4 * problem.elements[1])
    for module in (gradient_wgmma, window):
        monkeypatch.setattr(module, "FLUSH", 160)
    candidate, _ = offers(SCHEDULES[Pass.WEIGHT_GRAD], problem, Pass.WEIGHT_GRAD)[0]
    config = candidate.config._replace(positions=64)
    program = SCHEDULES[Pass.WEIGHT_GRAD].program(problem, Pass.WEIGHT_GRAD, H200, Layouts.dense(problem), config)
    assert program.splits == 2
    source = program.main.source.with_constants(PRELOADED=preloaded)
    program = program.with_main(replace(program.main, source=source))
    assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.parametrize("padding", [1, 0], ids=["boxes", "copies"])
@pytest.mark.parametrize("pass_", GRADIENTS)
def test_float32_is_rounded_to_nearest(pass_: Pass, padding: int) -> None:
    problem = make((2, 32, 8, 12), 24, 3, 1, padding, tf32=True)
    _, program = offers(SCHEDULES[pass_], problem, pass_)[0]
    assert len(program.main.tensor_maps) == 1 + padding
    assert_rounds_to_nearest(problem, pass_, program)


def test_where_it_refuses() -> None:
    layer = make((2, 32, 8, 8), 32, 4, 2, 1, dtype="bfloat16")
    wanted = {
        replace(layer, dtype="float32"): "PyTorch would not use TF32",
        replace(layer, dtype="float64"): "tensor cores for float64",
        replace(layer, dtype="float32", tf32=True, channels_last=True): "needs NCHW",
    }
    last = replace(layer, channels_last=True)
    assert "needs NCHW" in (refusal(WindowDgradWgmma(), last, Pass.INPUT_GRAD, H200) or "")
    assert "whole boxes" in (refusal(WindowWgradWgmma(), last, Pass.WEIGHT_GRAD, H200) or "")
    last = replace(last, out_channels=6)
    for apart in (replace(last, groups=2), replace(last, dilation=(1, 2))):
        assert "one group in NHWC" in (refusal(WindowWgradWgmma(), apart, Pass.WEIGHT_GRAD, H200) or "")
    narrow = replace(layer, out_channels=9, kernel_size=(3, 3))
    assert "162 bytes" in (refusal(WindowDgradWgmma(), narrow, Pass.INPUT_GRAD, H200) or "")
    for pass_, schedule in SCHEDULES.items():
        for problem, reason in wanted.items():
            assert reason in (refusal(schedule, problem, pass_, H200) or "")
        assert "only" in (refusal(schedule, layer, Pass.FORWARD, H200) or "")
        assert refusal(schedule, layer, pass_, H200) is None
        for arch in ("sm_80", "sm_100a", "sm_120"):
            assert "has no wgmma" in (refusal(schedule, layer, pass_, DeviceInfo.for_arch(arch)) or "")
    many = replace(layer, kernel_size=(25, 25), padding=(0, 0))
    assert "no stage of 625 taps" in (refusal(WindowWgradWgmma(), many, Pass.WEIGHT_GRAD, H200) or "")


def test_tensors_that_tma_does_not_take_are_left_to_others() -> None:
    """No box begins or ends amid 16 bytes: there is no candidate where tensors lie otherwise."""
    layer = make((2, 32, 8, 8), 32, 4, 2, 1, dtype="bfloat16")
    for pass_, schedule in SCHEDULES.items():
        dense, *others = strange_layouts(layer)
        assert list(candidates(schedule, layer, pass_, H200, dense))
        weight_last, unaligned, _, apart = others
        assert bool(list(candidates(schedule, layer, pass_, H200, weight_last))) is (pass_ is Pass.WEIGHT_GRAD)
        assert not list(candidates(schedule, layer, pass_, H200, unaligned))
        assert not list(candidates(schedule, layer, pass_, H200, apart))
    odd = replace(layer, input_size=(7, 7))
    assert not list(candidates(WindowWgradWgmma(), odd, Pass.WEIGHT_GRAD, H200, Layouts.dense(odd)))


def test_pairs_never_begin_at_odd_elements() -> None:
    """Which the emulator would not notice: where a view's strides are odd there is no candidate."""
    layer = make((4, 64, 32, 64), 64, (1, 4), (1, 2), dtype="bfloat16")
    assert gradient_wgmma_tile.in_pairs(layer)
    dense = Layouts.dense(layer)
    image, channel, slab, row, _ = dense.output
    for pass_, schedule in SCHEDULES.items():
        assert list(candidates(schedule, layer, pass_, H200, dense))
        for odd in ((image + 1, channel, slab, row), (image, channel + 1, slab, row), (image, channel, slab, row + 1)):
            layouts = replace(dense, output=(*odd, 1))
            assert not list(candidates(schedule, layer, pass_, H200, layouts))
        single = replace(layer, batch=1)  # whose images have no stride that counts
        assert list(candidates(schedule, single, pass_, H200, replace(dense, output=(image + 1, *dense.output[1:]))))


@pytest.mark.parametrize(
    "layer",
    [
        make((8, 32, 1, 1, 41), 32, (1, 1, 3), 1, (0, 0, 20), dtype="bfloat16"),  # tiny sides, none of them tiny images
        make((2, 24, 7000), 24, 3, padding=3000, tf32=True),  # smaller images would have no output
    ],
)
def test_strange_sizes_are_planned(layer: ConvTransposeProblem) -> None:
    for pass_, schedule in SCHEDULES.items():
        if refusal(schedule, layer, pass_, H200) is None:
            for candidate in candidates(schedule, layer, pass_, H200, Layouts.dense(layer)):
                schedule.program(layer, pass_, H200, Layouts.dense(layer), candidate.config)


def test_a_new_size_predicts_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One config, of three that could be had: planning is a part of the first call of every size."""
    layer = make((2, 64, 16, 16), 32, 4, 2, 1, dtype="bfloat16")
    asked = []
    estimate = gradient_wgmma._estimate
    monkeypatch.setattr(gradient_wgmma, "_estimate", lambda *given: asked.append(given) or estimate(*given))
    for pass_, schedule in SCHEDULES.items():
        assert len(list(candidates(schedule, layer, pass_, H200, Layouts.dense(layer)))) >= 3
        asked.clear()
        other = replace(layer, input_size=(33, 40))
        next(candidates(schedule, other, pass_, H200, Layouts.dense(other)))
        assert len(asked) == 1


def test_every_size_has_the_layer_s_kernel() -> None:
    layer = make((2, 64, 8, 8), 32, 4, 2, 1, dtype="bfloat16")
    for pass_, schedule in SCHEDULES.items():
        assert len({configs[0] for configs in lists_of_sizes(schedule, layer, pass_)}) == 1
