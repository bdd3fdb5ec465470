"""Gradients in channels_last by TMA boxes, executed by the emulator; test_gpu.py runs them on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import emulator
from kernel_harness import (
    DTYPES,
    H200,
    Buffer,
    Emulator,
    Executor,
    assert_exact,
    assert_no_races,
    assert_one_config_exact,
    assert_rounds_to_nearest,
    gradient_cases,
    integers,
    lists_of_sizes,
    offers,
    params,
    strange_layouts,
)
from polyphase.plan.planner import plan
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.program.split_k import reduce_splits
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.window_gemm import tma, tma_config, tma_cost, window
from polyphase.schedules.window_gemm.tma import WindowDgradTma, WindowWgradTma
from polyphase.schedules.window_gemm.tma_config import ALONE, TmaConfig

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
SCHEDULES = {Pass.INPUT_GRAD: WindowDgradTma(), Pass.WEIGHT_GRAD: WindowWgradTma()}


make = partial(ConvTransposeProblem.make, channels_last=True)


LAYERS = {
    "stride 2": make((3, 40, 8, 8), 24, 4, 2, 1, tf32=True),
    "stride 2, half": make((2, 24, 7, 9), 40, 4, 2, 1, dtype="bfloat16"),
    "kernel = stride": make((2, 40, 9, 5), 72, 2, 2, dtype="float16"),
    "stride 1": make((2, 20, 9, 12), 16, 3, 1, 1, tf32=True),
    "one tap": make((2, 24, 9, 12), 72, 1, dtype="bfloat16"),
    "odd strides": make((2, 24, 8, 6), 24, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1), dtype="bfloat16"),
    "grouped": make((2, 48, 8, 8), 64, 4, 2, 1, groups=2, dtype="float16"),
    "grouped, odd": make((2, 18, 5, 8), 48, 4, 2, 1, groups=3, dtype="bfloat16"),
    "kernel < stride": make((2, 18, 4, 8), 20, 2, (3, 4), 0, 2, tf32=True),
    "cropped": make((1, 16, 8, 8), 20, 5, 2, 6, 1, tf32=True),
    "output padding": make((2, 17, 8, 12), 24, 5, 2, 2, 1, dilation=2, tf32=True),
    "long rows": make((1, 16, 3, 150), 16, 3, 2, 1, 1, dtype="bfloat16"),
    "wide strides": make((1, 16, 5, 40), 16, 8, 8, dtype="bfloat16"),
    "whole boxes": make((5, 64, 9, 14), 64, 3, 2, 1, dtype="bfloat16"),
    "whole boxes, float32": make((1, 32, 9, 9), 32, 3, 2, 1, tf32=True),
    "tiny images": make((35, 40, 4, 4), 24, 4, 2, 1, dtype="bfloat16"),
    "single pixels": make((150, 16, 1, 1), 16, 4, dtype="bfloat16"),
    "many input channels": make((2, 264, 4, 16), 16, 4, 2, 1, dtype="bfloat16"),
    "three-dimensional": make((2, 16, 4, 6, 8), 24, (2, 3, 4), (1, 2, 2), (0, 1, 1), (0, 1, 0), tf32=True),
    "dilated windows": make((2, 16, 5, 20), 40, (3, 5), (1, 2), (2, 1), (0, 1), dilation=(2, 3), dtype="bfloat16"),
    "dilated windows, float32": make((1, 24, 4, 24), 40, (5, 3), (3, 2), 1, 0, dilation=(1, 2), tf32=True),
    "seven taps": make((1, 48, 9, 18), 64, (1, 7), 1, (0, 3), tf32=True),
    "windows of slabs": make((2, 24, 4, 3, 16), 16, 3, 1, 1, dtype="float16"),
    "windows of slabs, float32": make((1, 56, 3, 4, 8), 24, (3, 3, 1), 1, tf32=True),
    "few input channels, float32": make((2, 4, 9, 12), 24, 3, 2, 1, tf32=True),
    "narrow groups, float32": make((2, 36, 8, 8), 24, 4, 2, 1, groups=3, tf32=True),
    "volumes of few channels, float32": make((2, 20, 4, 6, 8), 4, 3, 2, 1, tf32=True),
    "empty batch": make((0, 16, 4, 8), 16, 4, 2, 1, dtype="bfloat16"),
}


# Whose input channels are no whole pieces of 16 bytes.
WITHOUT_WEIGHT = {"grouped, odd", "kernel < stride", "output padding"}


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize(("problem", "pass_"), list(gradient_cases(LAYERS, WITHOUT_WEIGHT)))
def test_gradients(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """One config; on a GPU it is all of them."""
    assert_one_config_exact(SCHEDULES[pass_], problem, pass_)


def is_narrowed(program: Program) -> bool:
    """Whether the kernel of a weight gradient narrows its sums itself."""
    return bool(params(program).get("narrowed"))


def test_layers_take_every_way() -> None:
    """TensorMap of every width, groups side by side in rows and in columns, one part of positions and several."""
    ways = set()
    for problem in LAYERS.values():
        for pass_, schedule in SCHEDULES.items():
            if refusal(schedule, problem, pass_, H200) is None:
                for candidate, program in offers(schedule, problem, pass_):
                    ways |= {(pass_, "swizzle", boxes.swizzle) for boxes in program.main.tensor_maps}
                    ways |= {(pass_, "row groups", candidate.config.row_groups), (pass_, program.splits > 1)}
                    ways |= {(pass_, "packed", program.main_index > 0), (pass_, "narrowed", is_narrowed(program))}
    for pass_ in SCHEDULES:
        assert {way[2] for way in ways if way[:2] == (pass_, "swizzle")} == {32, 64, 128}
    assert {(Pass.WEIGHT_GRAD, "row groups", 1), (Pass.WEIGHT_GRAD, "row groups", 2)} <= ways
    assert {(pass_, several) for pass_ in SCHEDULES for several in (True, False)} <= ways
    assert {(Pass.WEIGHT_GRAD, "narrowed", True), (Pass.WEIGHT_GRAD, "narrowed", False)} <= ways


def _shape(config: TmaConfig) -> tuple[object, ...]:
    """A config but for what is like another's; of those whose taps share windows there are too many."""
    if config.taps == ALONE:
        return (config,)
    return config.taps, config.row_groups, config.column_groups, config.lines > 1


@pytest.mark.sampled(48, 4)
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pass_", SCHEDULES)
def test_every_shape(pass_: Pass, dtype: str, third: int) -> None:
    """Blocks of every shape, with rows and columns that do not exist; by default another third in each dtype."""
    problem = make((1, 264, 2, 7), 136, 3, 2, 1, dtype=dtype, tf32=True)
    configs = [*tma_config.legal_configs(problem, pass_, H200)]
    configs += tma_config.legal_configs(replace(problem, in_channels=40, out_channels=40), pass_, H200)
    shapes = {_shape(config): config for config in configs}
    first = (third + (dtype == "float32")) % 3
    for number, config in [*enumerate(shapes.values())][first::3]:
        layouts = replace(Layouts.dense(problem), weight_channels_last=number % 2 == 0)
        program = SCHEDULES[pass_].program(problem, pass_, H200, layouts, config)
        candidate = Candidate(SCHEDULES[pass_].name, config, 0.0, "")
        assert_exact(problem, pass_, candidate, program, layouts, executor=Emulator(number))


@pytest.mark.parametrize("pass_", SCHEDULES)
@pytest.mark.parametrize("name", ["stride 2", "stride 2, half"])
def test_no_races(name: str, pass_: Pass) -> None:
    assert_no_races(SCHEDULES[pass_], LAYERS[name], pass_)


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pass_", SCHEDULES)
def test_long_sums(pass_: Pass, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums longer than what the cores sum in one go, of several stages and a rest."""
    for module in (tma, tma_cost, window):
        monkeypatch.setattr(module, "FLUSH", 64)
    monkeypatch.setattr(tma_cost, "affordable_planes", lambda *_: 1)
    tma_cost.weight_splits.cache_clear()
    tma_cost.input_splits.cache_clear()
    problem = make((3, 24, 7, 9), 40, 3, 2, 1, dtype=dtype, tf32=True)
    for candidate, program in offers(SCHEDULES[pass_], problem, pass_):
        assert not is_narrowed(program)
        assert dict(program.main.source.constants).get("FLUSH", 1) < 9 * 2
        assert_exact(problem, pass_, candidate, program, executor=Emulator(1))
    tma_cost.weight_splits.cache_clear()
    tma_cost.input_splits.cache_clear()


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("in_channels", [264, 27])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_splits_of_an_input_gradient(dtype: str, in_channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts end within a tap, and the last is shorter. Where the result has gaps there is one."""
    monkeypatch.setattr(tma, "input_splits", lambda *_: (4, 0.0, 0.0))
    schedule, pass_ = SCHEDULES[Pass.INPUT_GRAD], Pass.INPUT_GRAD
    problem = make((3, in_channels, 2, 7), 136, 3, 2, 1, dtype=dtype, tf32=True)
    candidate, program = offers(schedule, problem, pass_)[0]
    assert program.splits == 4
    assert_exact(problem, pass_, candidate, program, executor=Emulator(order=None))
    dense = Layouts.dense(problem)
    batch, *others = dense.input
    apart = replace(dense, input=(batch + 8, *others))
    program = schedule.program(problem, pass_, H200, apart, candidate.config)
    assert program.splits == 1
    assert_exact(problem, pass_, candidate, program, apart, executor=Emulator(3))


@pytest.mark.parametrize("pass_", SCHEDULES)
def test_float32_is_rounded_to_nearest(pass_: Pass) -> None:
    problem = make((2, 32, 8, 12), 24, 3, 1, 1, tf32=True)
    _, program = offers(SCHEDULES[pass_], problem, pass_)[0]
    assert_rounds_to_nearest(problem, pass_, program)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("planes", "elements"), [(1, 200), (2, 513), (9, 130), (40, 4), (3, 128), (64, 513)])
def test_planes_are_added_up(planes: int, elements: int, dtype: str) -> None:
    assert_planes_are_added_up(planes, elements, dtype, Emulator())


def assert_planes_are_added_up(planes: int, elements: int, dtype: str, executor: Executor) -> None:
    values = integers((planes, elements), planes)
    accumulator = torch.float64 if dtype == "float64" else torch.float32
    partial = Buffer((planes, elements), (elements, 1, 0, 0, 0), accumulator, executor.device, values)
    found = Buffer((1, elements), (elements, 1, 0, 0, 0), DTYPES[dtype], executor.device)
    executor(reduce_splits(dtype, elements, planes), [partial.tensor, found.tensor])
    assert torch.equal(found.read()[0].double(), values.sum(0))


def test_where_it_refuses() -> None:
    layer = make((2, 32, 8, 8), 32, 4, 2, 1, dtype="bfloat16")
    wanted = {
        replace(layer, dtype="float32"): "PyTorch would not use TF32",
        replace(layer, dtype="float64"): "tensor cores for float64",
        replace(layer, channels_last=False): "needs NHWC",
        replace(layer, out_channels=20): "output channels, 40 bytes",
        replace(layer, stride=(9, 2), kernel_size=(9, 4)): "element stride of 9 is too large for TMA",
    }
    for pass_, schedule in SCHEDULES.items():
        for problem, reason in wanted.items():
            assert reason in (refusal(schedule, problem, pass_, H200) or "")
        assert "only" in (refusal(schedule, layer, Pass.FORWARD, H200) or "")
        assert refusal(schedule, layer, pass_, H200) is None
        for arch in ("sm_80", "sm_100a", "sm_120"):
            assert "has no wgmma" in (refusal(schedule, layer, pass_, DeviceInfo.for_arch(arch)) or "")
    odd = replace(layer, in_channels=36)
    assert "input channels, 72 bytes" in (refusal(SCHEDULES[Pass.WEIGHT_GRAD], odd, Pass.WEIGHT_GRAD, H200) or "")
    assert refusal(SCHEDULES[Pass.INPUT_GRAD], odd, Pass.INPUT_GRAD, H200) is None
    split = replace(layer, out_channels=48, groups=2)
    assert refusal(SCHEDULES[Pass.INPUT_GRAD], replace(split, out_channels=16), Pass.INPUT_GRAD, H200) is not None


def test_tensors_that_tma_does_not_take_are_left_to_others() -> None:
    """No box begins or ends amid 16 bytes: there is no candidate where tensors lie otherwise."""
    layer = make((2, 32, 8, 8), 32, 4, 2, 1, dtype="bfloat16")
    for pass_, schedule in SCHEDULES.items():
        dense, weight_first, unaligned, wider, apart = strange_layouts(layer)
        for layouts in (dense, weight_first, wider, apart):
            assert list(candidates(schedule, layer, pass_, H200, layouts))
        assert not list(candidates(schedule, layer, pass_, H200, unaligned))
        first = Layouts.dense(replace(layer, channels_last=False))
        assert not list(candidates(schedule, layer, pass_, H200, first))
        odd = replace(dense, output=(*dense.output[:3], dense.output[3] + 4, dense.output[4]))
        assert not list(candidates(schedule, layer, pass_, H200, odd))


def test_every_size_has_the_layer_s_kernels() -> None:
    """As other passes of few kernels: configs are those of the typical size."""
    layer = make((2, 64, 8, 16), 32, 4, 2, 1, dtype="bfloat16")
    for pass_, schedule in SCHEDULES.items():
        assert len(lists_of_sizes(schedule, layer, pass_)) == 1


def test_which_taps_share_a_window() -> None:
    """All along some dimensions that meet the same residue; taps alone are always offered, for small images."""
    wanted = {
        make((8, 64, 64, 64), 64, 3, dtype="bfloat16"): {(1, 1, 1), (1, 1, 3), (1, 3, 1), (1, 3, 3)},
        make((8, 64, 64, 64), 64, (4, 5), (2, 3), 1, dtype="bfloat16"): {(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2)},
        make((8, 64, 64, 64), 64, (1, 3), 2, 0, 0, dilation=2, tf32=True): {(1, 1, 1), (1, 1, 3)},
        make((8, 64, 64, 64), 64, 2, 2, dtype="bfloat16"): {(1, 1, 1)},
        make((8, 128, 64, 64), 64, 3, tf32=True): {(1, 1, 1)},
    }
    schedule = SCHEDULES[Pass.WEIGHT_GRAD]
    for problem, taps in wanted.items():
        assert {config.taps for config in tma_config.legal_configs(problem, Pass.WEIGHT_GRAD, H200)} == taps
        offered = [candidate.config.taps for candidate, _ in offers(schedule, problem, Pass.WEIGHT_GRAD)]
        assert ALONE in offered
        assert (offered[0] == ALONE) == (taps == {ALONE})


def test_lone_pixels() -> None:
    """As a product they are channels last, yet the gradient of their weight is contiguous; many are several tiles."""
    for batch in (1, 255, 256, 257, 5000):
        for dims in (1, 2, 3):
            lone = ConvTransposeProblem.make((batch, 128, *(1,) * dims), 64, 4, dtype="bfloat16")
            last = plan(lone, Pass.WEIGHT_GRAD, H200).program
            assert last is not None
            assert not last.dst_channels_last
            for pass_, schedule in SCHEDULES.items():
                problem = replace(lone, channels_last=True)
                for _, program in offers(schedule, problem, pass_):
                    assert all(1 <= span <= 256 for boxes in program.main.tensor_maps for span in boxes.spans)
    problem = make((300, 24, 1, 1), 16, 2, dtype="bfloat16")
    for pass_, schedule in SCHEDULES.items():
        for candidate, program in offers(schedule, problem, pass_):
            assert_exact(problem, pass_, candidate, program, executor=Emulator(1))
