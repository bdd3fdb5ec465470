"""Narrow groups whose taps read a window in shared memory, in the emulator and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import (
    H200,
    Emulator,
    Executor,
    Gpu,
    assert_carries_inf_and_nan,
    assert_exact,
    assert_kinds_exact,
    assert_no_races,
    assert_one_config_exact,
    assert_rounds_to_nearest,
    formats,
    lists_of_sizes,
    offers,
    strange_layouts,
)
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.grouped_gemm.window import GroupedGemmWindow, _best, _in_pairs, _product

emulated = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
WINDOW = GroupedGemmWindow()
PASSES = Pass.FORWARD, Pass.INPUT_GRAD

LAYERS = {
    "stride 1": make((2, 8, 6, 9), 12, 3, 1, 1, groups=4),
    "every parameter": make((1, 40, 7, 9), 20, (3, 4), 2, 1, (0, 1), dilation=(2, 1), groups=4, bias=True),
    "3-D": make((2, 12, 3, 4, 6), 8, (2, 3, 3), (1, 2, 2), (0, 1, 1), groups=4, bias=True),
    "3-D, stride 1": make((1, 9, 5, 6, 7), 9, 3, 1, 1, groups=3),
    "3-D, one group": make((2, 18, 4, 5, 7), 11, (4, 3, 2), bias=True),
    "1-D": make((3, 16, 41), 6, 5, 3, 1, 1, dilation=2, groups=2, bias=True),
    "1-D, stride 1": make((2, 4, 300), 4, 9, 1, 4, groups=2),
    "outputs without taps": make((2, 24, 5, 7), 24, 2, 3, groups=3, bias=True),
    "wide": make((1, 48, 5, 20), 48, 3, 1, 1, groups=2),
    "tiny images": make((35, 6, 3, 2), 4, 3, 2, 1, groups=2),
    "one pixel": make((3, 6, 1, 1), 6, 4, groups=3),
    "cropped": make((1, 8, 6, 8), 4, 5, 2, 6, groups=2),
    "empty batch": make((0, 8, 4, 4), 4, 3, groups=2),
}


def layers() -> Iterator[tuple[str, ConvTransposeProblem, Pass]]:
    """Both half types and passes; float32 where it is rounded to TF32."""
    for name, problem in LAYERS.items():
        for dtype in ("bfloat16", "float16", "float32"):
            for pass_ in PASSES:
                layer = replace(problem, dtype=dtype, tf32=True)
                if dtype != "float32" or layer.uses_tf32(pass_):
                    yield f"{name}-{dtype}-{pass_.value}", layer, pass_


def cases() -> Iterator[ParameterSet]:
    """Where there are two memory formats, one by turns."""
    for number, (name, problem, pass_) in enumerate(layers()):
        both = formats(problem.of_pass(pass_))
        yield pytest.param(both[number // 3 % len(both)], pass_, id=name)


@emulated
@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize(("problem", "pass_"), list(cases()))
def test_layers(problem: ConvTransposeProblem, pass_: Pass) -> None:
    assert_one_config_exact(WINDOW, problem, pass_)


@emulated
@pytest.mark.sampled(16, 4)
@pytest.mark.parametrize("pass_", PASSES, ids=lambda each: each.value)
@pytest.mark.parametrize("name", ["stride 1", "every parameter", "wide"])
@pytest.mark.parametrize("last", [False, True])
def test_kinds_of_tensors(name: str, last: bool, pass_: Pass) -> None:
    problem = replace(LAYERS[name], dtype="float16", channels_last=last).of_pass(pass_)
    assert assert_kinds_exact(WINDOW, problem, pass_) == 5


@pytest.mark.slow
def test_layers_take_every_path() -> None:
    """Every branch that a config or a tiling decides is taken by some of the layers."""
    taken = set()
    for _, layer, pass_ in layers():
        for problem in formats(layer.of_pass(pass_)):
            layouts = Layouts.dense(problem)
            for candidate, program in offers(WINDOW, problem, pass_):
                config = candidate.config
                found = _best(problem, pass_, layouts, config, H200)
                assert found is not None
                tiling, product = found[0], _product(problem, pass_, layouts, config.folds, config.merged)
                facts = {
                    "folded": math.prod(config.folds) > 1,
                    "merged": config.merged,
                    "several sets": len(product.steps) > 1,
                    "several column blocks": product.blocks(config) > 1,
                    "several column tiles": config.column_tiles > 1,
                    "several row tiles": config.row_tiles > 1,
                    "several pieces": product.pieces > 1,
                    "a set without taps": 0 in product.steps,
                    "pixels of whole pieces": tiling.vector == 0,
                    "pairs of pixels": tiling.vector == 2,
                    "rows that begin early": tiling.skew > 0,
                    "results in pairs": _in_pairs(product, tiling),
                    "several images": tiling.tile_extent[0] > 1,
                    "several tiles": math.prod(tiling.tiles) > 1,
                }
                taken |= set(facts.items())
                assert program.main.shared_bytes <= H200.shared_bytes_of(config.min_blocks)
    missing = {(fact, value) for fact in facts for value in (False, True)} - taken
    assert missing <= {("several column blocks", True), ("several images", True)}  # those come below


@emulated
def test_more_columns_than_a_block() -> None:
    problem = make((1, 64, 3, 4), 64, 3, 2, 1, groups=2, dtype="bfloat16")
    found = [each for each in offers(WINDOW, problem) if each[0].config.merged]
    for candidate, program in found[:1]:
        product = _product(problem, Pass.FORWARD, Layouts.dense(problem), candidate.config.folds, True)
        assert product.blocks(candidate.config) > 1
        assert_exact(problem, Pass.FORWARD, candidate, program)
    if not found:
        config = next(each for each in WINDOW.configs(problem, Pass.FORWARD, H200) if each.merged)
        program = WINDOW.program(problem, Pass.FORWARD, H200, Layouts.dense(problem), config)
        candidate = replace(offers(WINDOW, problem)[0][0], config=config)
        assert_exact(problem, Pass.FORWARD, candidate, program)


@emulated
@pytest.mark.parametrize("pass_", PASSES, ids=lambda each: each.value)
@pytest.mark.parametrize("sizes", [(24, 19, 23), (900, 3, 2)], ids=["large", "tiny"])
def test_blocks_take_tile_after_tile(sizes: tuple[int, int, int], pass_: Pass) -> None:
    """On a device of one multiprocessor; of tiny images a tile has several."""
    device, (batch, *image) = replace(H200, multiprocessors=1), sizes
    problem = replace(LAYERS["stride 1"], batch=batch, input_size=tuple(image), dtype="bfloat16")
    for candidate, program in offers(WINDOW, problem, pass_, device=device):
        found = _best(problem, pass_, Layouts.dense(problem), candidate.config, device)
        assert found is not None
        several, items = found[0].tile_extent[0] > 1, math.prod(found[0].tiles) * problem.groups
        if several is (batch == 900) and items > program.main.grid[0]:
            break
    else:
        pytest.fail("no config has such tiles")
    assert_exact(problem, pass_, candidate, program, executor=Emulator(1))


def check_inf_and_nan(dtype: str, pass_: Pass, executor: Executor) -> None:
    for stride in (1, 2):
        problem = make((2, 12, 9, 12), 8, 3, stride, 1, groups=2, dtype=dtype)
        programs = [program for _, program in offers(WINDOW, problem, pass_)[:2]]
        assert_carries_inf_and_nan(problem, pass_, programs, executor)


@pytest.mark.sampled(8, 2)
@emulated
@pytest.mark.parametrize("pass_", PASSES, ids=lambda each: each.value)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inf_and_nan(dtype: str, pass_: Pass) -> None:
    check_inf_and_nan(dtype, pass_, Emulator())


@emulated
def test_tf32_is_rounded_to_nearest() -> None:
    problem = make((2, 32, 9, 12), 32, 3, 1, 1, groups=2, tf32=True)
    assert_rounds_to_nearest(problem, Pass.INPUT_GRAD, offers(WINDOW, problem, Pass.INPUT_GRAD)[0][1])


@emulated
def test_no_races() -> None:
    assert_no_races(WINDOW, replace(LAYERS["every parameter"], dtype="bfloat16"), Pass.FORWARD)
    assert_no_races(WINDOW, replace(LAYERS["stride 1"], dtype="float16"), Pass.INPUT_GRAD)


def test_configs_do_not_depend_on_the_size() -> None:
    assert len(lists_of_sizes(WINDOW, replace(LAYERS["stride 1"], dtype="bfloat16"), Pass.FORWARD)) == 1


def test_where_it_refuses() -> None:
    layer = make((2, 32, 8, 8), 32, 4, 2, 1, groups=4, dtype="bfloat16")
    wanted = {
        replace(layer, dtype="float32"): "left to direct_tiled",
        replace(layer, groups=1): "only for grouped layers and 3-D",
        replace(layer, groups=32): "are few",
        replace(layer, in_channels=160): "are many",
        replace(layer, kernel_size=(40, 40)): "too long",
        replace(layer, stride=(32, 32)): "too many",
        replace(layer, kernel_size=(1, 65)): "along a dimension",
        replace(layer, dtype="float64"): "tensor cores for float64",
    }
    for problem, reason in wanted.items():
        assert reason in (refusal(WINDOW, problem, Pass.FORWARD, H200) or "")
    assert "only" in (refusal(WINDOW, layer, Pass.WEIGHT_GRAD, H200) or "")
    assert "lacks" in (refusal(WINDOW, layer, Pass.FORWARD, DeviceInfo.for_arch("sm_75")) or "")


@emulated
def test_deep_volumes() -> None:
    """More slabs than the mark of a missing cell stands for."""
    problem = make((1, 6, 16700, 3, 3), 6, (1, 3, 3), 1, (0, 1, 1), groups=2, dtype="float16")
    candidate, program = offers(WINDOW, problem, Pass.FORWARD)[0]
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(1))


@pytest.mark.gpu
@pytest.mark.parametrize(("problem", "pass_"), list(cases()))
def test_layers_on_a_gpu(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """Every config, on tensors of each kind."""
    gpu = Gpu(0)
    for layouts in strange_layouts(problem):
        for candidate, program in offers(WINDOW, problem, pass_, layouts):
            assert_exact(problem, pass_, candidate, program, layouts, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", PASSES, ids=lambda each: each.value)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inf_and_nan_on_a_gpu(dtype: str, pass_: Pass) -> None:
    check_inf_and_nan(dtype, pass_, Gpu(0))
