"""Any layer on tensor cores by gathered operands, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import H200, Emulator, assert_exact, assert_rounds_to_nearest, offers, params, run, strange_layouts
from polyphase.plan.planner import programs
from polyphase.plan.shortlist import refusal
from polyphase.problem import Axis, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.flatten import GRAD_PLANES, X_PLANES
from polyphase.program.step import GRAD, WORKSPACE, X
from polyphase.schedules.schedule import Candidate, Schedule
from polyphase.schedules.tap_gemm import wgrad_tma
from polyphase.schedules.tap_gemm.flat import flat_product
from polyphase.schedules.tap_gemm.mma import _SHAPES, TapGemm, TapGemmWgrad
from polyphase.schedules.tap_gemm.product import taps_met
from polyphase.schedules.tap_gemm.tma import TapGemmTma
from polyphase.schedules.tap_gemm.wgrad_tma import TapGemmWgradTma, _flats
from polyphase.schedules.tap_gemm.wgrad_tma_config import WgradTmaConfig, legal_configs

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
A100 = DeviceInfo.for_arch("sm_80")
SCHEDULES: dict[Pass, Schedule] = {
    Pass.FORWARD: TapGemm(),
    Pass.INPUT_GRAD: TapGemm(),
    Pass.WEIGHT_GRAD: TapGemmWgrad(),
}
TMA, WGRAD_TMA = TapGemmTma(), TapGemmWgradTma()
BY_TMA: dict[Pass, Schedule] = {Pass.FORWARD: TMA, Pass.INPUT_GRAD: TMA, Pass.WEIGHT_GRAD: WGRAD_TMA}

LAYERS = {
    "stride 1": make((2, 20, 9, 10), 24, 3, bias=True, tf32=True),
    "exact": make((2, 20, 9, 10), 24, 3, bias=True),
    "exact, grouped": make((2, 24, 9, 7), 16, (3, 4), 2, 1, groups=4),
    "stride 1, dilated": make((1, 32, 7, 9), 70, 3, 1, (1, 2), dilation=(1, 2), dtype="float16"),
    "stride 2": make((3, 40, 8, 8), 24, 4, 2, 1, bias=True, dtype="bfloat16"),
    "stride 2, grouped": make((2, 24, 6, 8), 16, 4, 2, 1, groups=2, dtype="bfloat16"),
    "dilation and stride": make((2, 12, 6, 7), 16, 3, 4, 1, 2, dilation=2, tf32=True),
    "kernel < stride": make((2, 16, 4, 5), 18, 2, (3, 4), 0, 1, bias=True, tf32=True),
    "cropped": make((1, 16, 6, 7), 20, 5, 2, 6, dtype="bfloat16"),
    "output padding": make((2, 17, 9, 10), 24, 5, 2, 2, 1, dilation=2, tf32=True),
    "one pixel": make((70, 18, 1, 1), 16, 4, dtype="float16"),
    "many channels": make((2, 130, 3, 5), 300, 2, 2, tf32=True),
    "three input channels": make((2, 3, 9, 10), 40, 3, 1, 1, dtype="bfloat16"),
    "one output channel": make((2, 20, 6, 10), 1, 9, 4, 4, 3, bias=True, dtype="bfloat16"),
    "1-D, long kernel": make((2, 16, 60), 3, 64, 16, 4, tf32=True),
    "inverse Fourier transform": make((2, 20, 9), 1, 64, 16, 24, tf32=True),
    "inverse Fourier transform, odd width": make((2, 20, 9), 1, 64, 16, 24, 3, tf32=True),
    "one output channel, folded": make((2, 16, 5, 6), 1, (3, 8), (2, 4), (1, 2), bias=True, dtype="bfloat16"),
    "3-D": make((2, 16, 4, 5, 6), 24, (2, 3, 3), (1, 2, 2), (0, 1, 1), bias=True, tf32=True),
    "3-D, many taps": make((1, 12, 4, 4, 5), 6, (3, 5, 7), (2, 1, 2), dtype="bfloat16"),
    "few positions": make((1, 300, 2, 3), 20, 3, 1, 1, bias=True, dtype="bfloat16"),
    "empty batch": make((0, 16, 4, 4), 16, 3, dtype="bfloat16"),
}


def cases() -> Iterator[ParameterSet]:
    for name, problem in LAYERS.items():
        for channels_last in (False, True) if problem.dims > 1 else (False,):
            for pass_ in Pass:
                order = "last" if channels_last else "first"
                formatted = replace(problem, channels_last=channels_last)
                yield pytest.param(formatted, pass_, id=f"{name}-{order}-{pass_.value}")


@pytest.mark.sampled(64, 8)
@pytest.mark.parametrize(("problem", "pass_"), list(cases()))
def test_every_pass(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """On tensors of one kind, every third of them dense; on a GPU it is all configs and kinds."""
    all_layouts, seed = list(strange_layouts(problem)), zlib.crc32(f"{problem} {pass_}".encode())
    layouts = all_layouts[max(0, seed % 6 - 1)]
    found = offers(SCHEDULES[pass_], problem, pass_, layouts, A100)
    candidate, program = found[seed // 6 % len(found)]
    assert_exact(problem, pass_, candidate, program, layouts, Emulator(seed % 1000))


@pytest.mark.sampled(64, 8)
@pytest.mark.parametrize(("problem", "pass_"), [case for case in cases() if case.values[1] is not Pass.WEIGHT_GRAD])
def test_every_pass_by_tma(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """The same by TMA and wgmma, but for strides that it does not take."""
    all_layouts, seed = list(strange_layouts(problem)), zlib.crc32(f"{problem} {pass_}".encode())
    layouts = all_layouts[max(0, seed % 6 - 1)]
    if TMA.ranked_at(problem, pass_, layouts) is None or refusal(TMA, problem, pass_, H200) is not None:
        assert pass_ is Pass.INPUT_GRAD
        assert problem.stride[-1] > 8
        return
    found = offers(TMA, problem, pass_, layouts)
    candidate, program = found[seed // 6 % len(found)]
    assert_exact(problem, pass_, candidate, program, layouts, Emulator(seed % 1000))


#: Layers whose taps along the width lie side by side: strides above 8, phases of fewer taps, groups, parts, borders.
RUNS = (
    make((2, 24, 3, 4, 4), 3, (3, 4, 7), 2, (1, 0, 2), tf32=True),
    make((3, 18, 33), 5, 20, 12, 3, dtype="float16"),
    make((1, 16, 5, 6), 10, (2, 5), (3, 2), (1, 3), (1, 1), dilation=(2, 1), dtype="bfloat16"),
    make((2, 24, 9, 7), 16, (3, 4), 2, 1, groups=4, bias=True),
    make((2, 75, 5, 12), 66, (1, 5), padding=(0, 6), bias=True, dtype="bfloat16"),
    make((70, 18, 1, 1), 16, 4, tf32=True),
    make((1, 24, 40), 70, 12, 9, 2, tf32=True),
    make((1, 20, 4, 9), 36, (4, 3), (2, 3), dilation=(3, 3), groups=2, dtype="bfloat16"),
    make((1, 16, 6, 10), 5, 9, 4, 4, 3, bias=True, dtype="bfloat16"),  # whole tap groups, phases of fewer taps
    make((1, 5, 3, 4), 8, (2, 3), (9, 4), (0, 1), (7, 2), dtype="bfloat16"),  # whole tap groups of several residues
)


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.INPUT_GRAD])
@pytest.mark.parametrize("problem", RUNS, ids=str)
def test_runs(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """Every config that has the source written as runs; on tensors of one kind."""
    found = [config for config in TMA.configs(problem, pass_, H200) if config.runs]
    assert found or problem.dilation[-1] > 1 or pass_ is Pass.FORWARD
    all_layouts, seed = list(strange_layouts(problem)), zlib.crc32(f"{problem} {pass_}".encode())
    for config in found[seed % 2 :: 2]:
        layouts = all_layouts[0 if config.back else seed % 5]
        program = TMA.program(problem, pass_, H200, layouts, config)
        candidate = Candidate(TMA.name, config, 0.0, "bytes")
        assert_exact(problem, pass_, candidate, program, layouts, Emulator(seed % 1000))


@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.INPUT_GRAD])
def test_runs_read_no_more_than_their_taps(pass_: Pass) -> None:
    """A NaN is in no result but those that it belongs to: there is no weight of zero for what lies behind a run."""
    problem = make((2, 6, 5, 9), 5, (3, 5), (1, 2), 1, dtype="float32")
    shapes = [problem.input_shape, problem.output_shape]
    if pass_ is Pass.INPUT_GRAD:
        shapes.reverse()
    source, weight = torch.ones(shapes[0]), torch.ones(problem.weight_shape)
    source[1, 3, 2, 4] = math.nan
    config = next(config for config in TMA.configs(problem, pass_, H200) if config.runs)
    program = TMA.program(problem, pass_, H200, Layouts.dense(problem), config)
    found = run(problem, pass_, program, Layouts.dense(problem), (source, weight))
    marked = torch.zeros(1, 1, *shapes[0][2:])
    marked[0, 0, 2, 4] = 1
    how = {"stride": problem.stride, "padding": problem.padding}
    reached = (F.conv_transpose2d if pass_ is Pass.FORWARD else F.conv2d)(marked, torch.ones(1, 1, 3, 5), **how)
    assert torch.equal(found[1].isnan().all(0), reached[0, 0] > 0)
    assert torch.equal(found.isnan().any(1)[1], reached[0, 0] > 0)
    assert not found[0].isnan().any()


#: The configs of a layer are shared out among this many cases: g++ takes seconds for each.
SHARES = 3
#: Images of which most taps of a tile meet nothing: tiny ones, dilation beyond the image, cropped to the border.
BORDERS = (
    make((40, 16, 2, 3), 12, (5, 7), 2, 1, bias=True, dtype="bfloat16"),
    make((9, 20, 3, 3, 2), 24, 4, groups=2, tf32=True),
    make((5, 24, 3, 2, 3), 10, (5, 4, 6), 2, 1, bias=True),
    make((2, 16, 5, 5), 12, (3, 4), dilation=(6, 5), dtype="float16"),
    make((3, 70, 4), 20, 9, 3, 8, dtype="bfloat16"),
    make((2, 16, 3, 4), 18, 2, (5, 4), output_padding=(4, 2), bias=True, tf32=True),
    make((1, 600, 2, 2), 24, 7, padding=3, tf32=True),  # several splits
)


@pytest.mark.sampled(36, 6)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.INPUT_GRAD])
@pytest.mark.parametrize("problem", BORDERS, ids=str)
def test_taps_that_meet_nothing(problem: ConvTransposeProblem, pass_: Pass, channels_last: bool, share: int) -> None:
    """Every config of layers whose work tiles differ in taps; some have none at all."""
    problem = replace(problem, channels_last=channels_last and problem.dims > 1)
    layouts, seed = Layouts.dense(problem), zlib.crc32(f"{problem} {pass_}".encode())
    for config in [*TMA.configs(problem, pass_, H200)][share::SHARES]:
        program = TMA.program(problem, pass_, H200, layouts, config)
        candidate = Candidate(TMA.name, config, 0.0, "bytes")
        assert_exact(problem, pass_, candidate, program, layouts, Emulator(seed % 1000))


def test_taps_that_are_met() -> None:
    """As many as the kernel loads, of tiles of all extents."""
    random = Random(1)
    for _ in range(300):
        axis = Axis(*(random.randint(least, most) for least, most in ((1, 9), (1, 5), (0, 5), (1, 4))))
        size, extent, forward = random.randint(1, 12), random.randint(1, 6), random.random() < 0.5
        cells = -(-axis.output_size(size) // axis.stride) if forward else axis.input_size(size)
        step, found = 1 if forward else axis.stride, []
        for first in range(0, max(0, cells), extent):
            offsets = [
                -axis.shift(tap) if forward else tap * axis.dilation - axis.padding for tap in range(axis.kernel)
            ]
            read = [(first * step + offset, (first + extent - 1) * step + offset) for offset in offsets]
            found.append(sum(least < size and most >= 0 for least, most in read))
        if found:
            assert taps_met(axis, forward, size, cells, extent) == (sum(found), found[len(found) // 2])


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize("problem", [case.values[0] for case in cases() if case.values[1] is Pass.WEIGHT_GRAD], ids=str)
def test_weight_gradient_by_tma(problem: ConvTransposeProblem) -> None:
    """The weight gradient of planes whose positions are innermost."""
    all_layouts, seed = list(strange_layouts(problem)), zlib.crc32(f"{problem}".encode())
    layouts = all_layouts[max(0, seed % 6 - 1)]
    found = offers(WGRAD_TMA, problem, Pass.WEIGHT_GRAD, layouts)
    candidate, program = found[seed // 6 % len(found)]
    assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, layouts, Emulator(seed % 1000))


@pytest.mark.sampled(16, 4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32", "float32"])
@pytest.mark.parametrize(
    "layer",
    [
        make((8, 20, 5, 4), 36, (3, 2)),  # operands may be swapped
        make((1, 12, 50), 10, 21, dilation=2),  # more taps along the width than copies
        make((7, 40, 3, 4), 72, (3, 5), (2, 3), 1),  # residues with fewer taps than others; images that are padded
        make((8, 18, 2, 3, 4), 30, (2, 3, 4), (1, 2, 2), 1, groups=3),
    ],
    ids=str,
)
def test_every_config_of_a_weight_gradient_by_tma(layer: ConvTransposeProblem, dtype: str) -> None:
    problem = replace(layer, dtype=dtype.replace("tf32", "float32"), tf32=dtype == "tf32")
    configs = WGRAD_TMA.configs(problem, Pass.WEIGHT_GRAD, H200)
    assert {config.batched for config in configs} == ({False, True} if problem.batch > 2 else {False})
    assert {config.mirrored for config in configs} == {False, True}
    assert {config.swapped for config in configs} == ({False, True} if max(problem.stride) == 1 else {False})
    layouts = Layouts.dense(problem)
    for config in configs[zlib.crc32(f"{problem}".encode()) % 3 :: 3]:
        program = WGRAD_TMA.program(problem, Pass.WEIGHT_GRAD, H200, layouts, config)
        candidate = Candidate(WGRAD_TMA.name, config, 0.0, "bytes")
        assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, layouts, Emulator(3))


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("pass_", list(Pass))
def test_every_shape(pass_: Pass, shape: tuple[int, int, int]) -> None:
    """Blocks of every shape, with rows and columns that do not exist."""
    schedule, rows = SCHEDULES[pass_], 16 * shape[0] * shape[2]
    for dtype, tf32 in (("bfloat16", False), ("float32", True), ("float32", False)):
        problem = make((2, rows // 2 + 7, 5, 9), rows // 2 + 5, 4, 2, 1, dtype=dtype, tf32=tf32)
        found = [config for config in schedule.configs(problem, pass_, A100) if config[:3] == shape]
        for config in found[zlib.crc32(f"{pass_}{shape}".encode()) % 2 :: 2]:
            program = schedule.program(problem, pass_, A100, Layouts.dense(problem), config)
            candidate = Candidate(schedule.name, config, 0.0, "bytes")
            assert_exact(problem, pass_, candidate, program, executor=Emulator(3))


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("name", ["exact", "3-D, many taps", "few positions"])
def test_no_races(name: str, pass_: Pass) -> None:
    candidate, program = offers(SCHEDULES[pass_], LAYERS[name], pass_, device=A100)[0]
    assert_exact(LAYERS[name], pass_, candidate, program, executor=Emulator(order=None))


@pytest.mark.parametrize("name", ["exact", "stride 2, grouped"])
def test_no_races_by_tma(name: str) -> None:
    candidate, program = offers(WGRAD_TMA, LAYERS[name], Pass.WEIGHT_GRAD)[0]
    assert_exact(LAYERS[name], Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(order=None))


def test_sums_are_split_and_promoted() -> None:
    """Few positions and long sums: several splits, whose stages are more than what the cores sum in one go."""
    problem = make((1, 900, 2, 3), 8, 3, 1, 1, bias=True, dtype="bfloat16")
    candidate, program = offers(SCHEDULES[Pass.FORWARD], problem, Pass.FORWARD, device=A100)[0]
    assert program.splits > 1
    assert dict(program.main.source.constants)["PROMOTE"] > 0
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(3))


def test_long_sums_of_a_weight_gradient() -> None:
    """On a device of one multiprocessor, so that parts are few: sums leave the cores before a part ends."""
    problem = make((4, 16, 67, 61), 16, 2, 2, dtype="bfloat16")
    candidate, program = offers(
        SCHEDULES[Pass.WEIGHT_GRAD], problem, Pass.WEIGHT_GRAD, device=replace(H200, multiprocessors=1)
    )[0]
    constants = dict(program.main.source.constants)
    stages = 4 * 67 * 61 / program.splits / (2 * int(constants["STAGE_WORDS"]))
    assert 0 < int(constants["FLUSH"]) < stages
    assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.parametrize("mirrored", [False, True])
def test_long_sums_of_a_weight_gradient_by_tma(mirrored: bool) -> None:
    """What the cores have summed is added to memory, and the sums of several splits in the end."""
    problem = make((5, 16, 67, 61), 16, 2, 2, dtype="bfloat16")
    device = replace(H200, multiprocessors=2)
    config = next(each for each in WGRAD_TMA.configs(problem, Pass.WEIGHT_GRAD, device) if each.mirrored is mirrored)
    program = WGRAD_TMA.program(problem, Pass.WEIGHT_GRAD, device, Layouts.dense(problem), config)
    values = params(program)
    assert values["splits"] == program.splits > 1
    assert 0 < values["flush"] < values["stages"] // values["splits"]
    candidate = Candidate(WGRAD_TMA.name, config, 0.0, "bytes")
    assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_residues(dtype: str) -> None:
    """Planes of many residues share reads; one split's sums are narrowed at once."""
    problem = make((1, 12, 70), 10, 40, 40, 3, dtype=dtype, tf32=True)
    candidate, program = offers(WGRAD_TMA, problem, Pass.WEIGHT_GRAD)[0]
    assert dict(program.steps[0].source.constants)["GRAD_WAY"] == 3
    assert [step.source.kernel for step in program.steps] == ["flatten_positions", WGRAD_TMA.name, "transpose"]
    assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images_in_shares(dtype: str, batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes of some images at a time, the last of them fewer, and sums that are added to those before."""
    problem = make((23, 12, 5, 6), 10, 3, 1, 1, dtype=dtype)
    monkeypatch.setattr(wgrad_tma, "_MOST_BYTES", 30 << 10)
    wgrad_tma._slices.cache_clear()
    configs = WGRAD_TMA.configs(problem, Pass.WEIGHT_GRAD, H200)
    configs = [each for each in configs if each.batched is batched and not each.in_place]
    for config in configs[:: len(configs) // 3]:
        program = WGRAD_TMA.program(problem, Pass.WEIGHT_GRAD, H200, Layouts.dense(problem), config)
        assert [step.source.kernel for step in program.steps[:4]] == ["flatten_positions", WGRAD_TMA.name] * 2
        assert max(each.bytes for each in program.buffers) < 60 << 10
        candidate = Candidate(WGRAD_TMA.name, config, 0.0, "bytes")
        assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))
    wgrad_tma._slices.cache_clear()


#: Layers whose input lies as planes do, with slabs, rows and taps of all kinds; groups, and partial stages.
IN_PLACE = (
    make((3, 20, 3, 4, 10), 24, 1, bias=True, tf32=True),
    make((2, 24, 5, 8), 20, 1, groups=2, dtype="bfloat16"),
    make((2, 20, 9, 16), 12, 3, 2, 1, dtype="bfloat16"),
    make((3, 18, 9, 12), 12, 5, 2, 2, 1, tf32=True),
    make((2, 40, 104), 24, 4, 2, 1, dtype="float16"),
    make((2, 12, 6, 7, 8), 24, (4, 3, 3), (2, 1, 2), (1, 0, 1), dtype="bfloat16"),
    make((1, 12, 6, 7, 12), 10, (3, 4, 2), (1, 2, 2), (1, 0, 0), dilation=(2, 1, 1), tf32=True),
    make((2, 20, 6, 4, 24), 16, (3, 1, 2), (2, 1, 2), dtype="bfloat16"),
    make((2, 16, 6, 24), 70, 3, 1, 1, dtype="bfloat16"),
    make((2, 24, 12, 12), 40, 3, 1, 1, dilation=2, groups=2, tf32=True),
    make((5, 16, 26, 28), 12, (3, 8), (3, 8), tf32=True),
)


def configs_in_place(problem: ConvTransposeProblem, count: int) -> list[WgradTmaConfig]:
    """Some of those that read an operand in place."""
    found = [config for each in _flats(problem) if each.in_place for config in legal_configs(each)]
    assert found
    return found[zlib.crc32(str(problem).encode()) % 4 % len(found) :: max(1, len(found) // count)]


@pytest.mark.sampled(16, 2)
@pytest.mark.parametrize("problem", IN_PLACE, ids=str)
def test_operands_in_place(problem: ConvTransposeProblem) -> None:
    """The input, or with stride 1 the gradient, is read as it lies; of single taps both are, without a step before."""
    for config in configs_in_place(problem, 3):
        program = WGRAD_TMA.program(problem, Pass.WEIGHT_GRAD, H200, Layouts.dense(problem), config)
        kernels = [step.source.kernel for step in program.steps]
        assert ("flatten_positions" in kernels) is (problem.taps > 1)
        read = {name for step in program.steps if step.source.kernel == WGRAD_TMA.name for name in step.operands}
        assert {X, GRAD} & read >= {GRAD if config.swapped else X}
        candidate = Candidate(WGRAD_TMA.name, config, 0.0, "bytes")
        assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.parametrize(("size", "padding"), [((8, 7), (0, 1)), ((8, 8), (1, 0))])
def test_a_padded_output_has_other_pixels(size: tuple[int, int], padding: tuple[int, int]) -> None:
    """Of one tap without stride, too: its dilation allows output padding."""
    problem = make((2, 40, *size), 24, 1, 1, 0, padding, dilation=2, dtype="bfloat16")
    for candidate, program in programs(problem, Pass.WEIGHT_GRAD, H200):
        if candidate.schedule == WGRAD_TMA.name:
            assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.parametrize("index", range(5))
def test_operands_that_lie_otherwise_are_written(index: int) -> None:
    """Strange tensors of layers whose own would be read in place; all give the same."""
    for problem in (IN_PLACE[1], IN_PLACE[2]):
        layouts = list(strange_layouts(problem))[index]
        config = configs_in_place(problem, 1)[0]
        program = WGRAD_TMA.program(problem, Pass.WEIGHT_GRAD, H200, layouts, config)
        written = {X_PLANES, GRAD_PLANES} & set(program.main.operands)
        assert (len(written) == 2) is (index >= 2)
        candidate = Candidate(WGRAD_TMA.name, config, 0.0, "bytes")
        assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, layouts, Emulator(3))


@pytest.mark.parametrize("problem", [IN_PLACE[3], IN_PLACE[5]], ids=str)
def test_images_in_shares_in_place(problem: ConvTransposeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes of the gradient of some images at a time, beside the whole input."""
    problem = replace(problem, batch=5)
    monkeypatch.setattr(wgrad_tma, "_MOST_BYTES", 60 << 10)
    wgrad_tma._slices.cache_clear()
    for config in configs_in_place(problem, 2):
        program = WGRAD_TMA.program(problem, Pass.WEIGHT_GRAD, H200, Layouts.dense(problem), config)
        assert [step.source.kernel for step in program.steps[:4]] == ["flatten_positions", WGRAD_TMA.name] * 2
        candidate = Candidate(WGRAD_TMA.name, config, 0.0, "bytes")
        assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))
    wgrad_tma._slices.cache_clear()


@pytest.mark.parametrize(
    ("size", "stride", "shares"), [((8, 32), 2, (0.0, 0.0)), ((7, 28), 3, (0.875, 0.875)), ((16, 24), 2, (0.0, 0.75))]
)
def test_rows_that_straddle_lines(size: tuple[int, int], stride: int, shares: tuple[float, float]) -> None:
    """Images and rows of whole lines of 128 bytes; images of others; rows of others, which taps are shifted by."""
    problem = make((4, 16, *size), 16, (3, 1), (stride, 1), tf32=True)
    found = flat_product(problem, Layouts.dense(problem), in_place=True)
    assert found.in_place
    assert tuple(found.straddling(side, (False, False)) for side in (0, 1)) == shares


@pytest.mark.parametrize(("width", "row"), [(61, 64), (50, 56)])
def test_rows_of_planes_are_whole_lines_where_those_are_near(width: int, row: int) -> None:
    problem = make((2, 20, 5, width), 12, 3, 2, 1, dtype="bfloat16")
    found = flat_product(problem, Layouts.dense(problem))
    assert found.padded == (1, 6, row)
    assert [planes.pitch % 64 for planes in found.planes] == [0, 0]
    config = next(legal_configs(found))
    program = WGRAD_TMA.program(problem, Pass.WEIGHT_GRAD, H200, Layouts.dense(problem), config)
    candidate = Candidate(WGRAD_TMA.name, config, 0.0, "bytes")
    assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.parametrize(("kernel", "dilation", "share"), [(3, 2, 0.5), (3, 1, 1.0), (1, 1, 0.5)])
def test_rows_that_no_tap_meets_are_not_read(kernel: int, dilation: int, share: float) -> None:
    """Taps an even number of rows apart, or a single one, meet every other row of the output gradient."""
    problem = make((2, 8, 8, 16), 8, (kernel, 3), (2, 1), dilation=(dilation, 1), dtype="bfloat16")
    flat = flat_product(problem, Layouts.dense(problem))
    x, _, gradient = problem.elements
    assert flat.moved - flat.written_bytes // 2 == x + share * gradient


def test_where_images_straddle_lines_planes_are_written() -> None:
    """The prediction decides."""
    for row, in_place in ((26, False), (32, True)):
        problem = make((16, 320, row, row), 320, (3, 8), (3, 8), tf32=True)
        best = min((each for each, _ in offers(WGRAD_TMA, problem, Pass.WEIGHT_GRAD)), key=lambda each: each.seconds)
        assert best.config.in_place is in_place


def test_float32_is_rounded_to_nearest_by_tma() -> None:
    problem = make((2, 32, 8, 12), 24, 3, 1, 1, tf32=True)
    _, program = offers(WGRAD_TMA, problem, Pass.WEIGHT_GRAD)[0]
    assert_rounds_to_nearest(problem, Pass.WEIGHT_GRAD, program)


@pytest.mark.parametrize("pass_", list(Pass))
def test_float32_is_rounded_to_nearest(pass_: Pass) -> None:
    problem = make((2, 32, 8, 12), 24, 3, 1, 1, tf32=True)
    _, program = offers(SCHEDULES[pass_], problem, pass_, device=A100)[0]
    assert_rounds_to_nearest(problem, pass_, program)


@pytest.mark.parametrize("pass_", list(Pass))
def test_a_layer_of_one_output_channel_has_two_kernels(pass_: Pass) -> None:
    """Whatever its output padding: one where its output is seen as several channels, and one where it cannot be."""
    layer = make((2, 20, 9), 1, 64, 16, 24, tf32=True)
    schedule, found = SCHEDULES[pass_], set()
    for padding in range(16):
        padded = replace(layer, output_padding=(padding,))
        program = schedule.program(padded, pass_, A100, Layouts.dense(padded), schedule.configs(layer, pass_, A100)[0])
        constants = dict(program.main.source.constants)
        found.add((program.main.source, padding % 8 == 0))
        assert 8 in (constants["SRC_CHANNELS"], constants["DST_CHANNELS"]) or padding % 8
    assert len(found) == 2
    assert schedule.any_size(layer, pass_, A100)
    assert TMA.any_size(layer, pass_, H200) is (pass_ is not Pass.INPUT_GRAD)


def test_where_it_refuses() -> None:
    layer = make((2, 32, 8, 8), 32, 3)
    assert "tensor cores for float64" in (refusal(TMA, replace(layer, dtype="float64"), Pass.FORWARD, H200) or "")
    assert "superseded here by tap_gemm_tma" in (refusal(TapGemm(), layer, Pass.FORWARD, H200) or "")
    assert "too many" in (refusal(TapGemmWgrad(), replace(layer, kernel_size=(512, 512)), Pass.WEIGHT_GRAD, H200) or "")
    assert "only" in (refusal(TMA, layer, Pass.WEIGHT_GRAD, H200) or "")
    assert "has no wgmma" in (refusal(WGRAD_TMA, layer, Pass.WEIGHT_GRAD, A100) or "")
    wide = make((2, 512, 2048, 2048), 512, 9, padding=4, dtype="bfloat16")
    assert "planes of one image" in (refusal(WGRAD_TMA, wide, Pass.WEIGHT_GRAD, H200) or "")
    assert refusal(WGRAD_TMA, replace(wide, in_channels=64, out_channels=64), Pass.WEIGHT_GRAD, H200) is None


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_pixels(dtype: str, channels_last: bool) -> None:
    """They are one GEMM of one tap, whose result lies as the weight of the layer with all taps does."""
    problem = make((5, 20, 1, 1), 9, 4, dtype=dtype, channels_last=channels_last)
    found = [each for each in programs(problem, Pass.WEIGHT_GRAD, H200) if each[0].schedule == WGRAD_TMA.name]
    assert found
    for candidate, program in found[:3]:
        assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


#: Input gradients whose weights come as boxes: one tap, windows of taps, groups, channels that fill no row.
WEIGHT_BOXES = (
    make((2, 24, 5, 6), 16, (3, 4), 2, 1, dtype="bfloat16", channels_last=True),
    make((2, 40, 5, 6), 24, 3, 2, 1, 1, tf32=True, channels_last=True),
    make((1, 21, 9), 16, 1, 2, dtype="bfloat16"),
    make((2, 18, 9, 10), 24, (2, 3), 1, 1, dtype="float16", channels_last=True),
    make((2, 136, 5, 6), 128, (2, 3), 2, groups=2, dtype="bfloat16", channels_last=True),
    make((20, 140, 2, 2), 24, 5, 2, 1, dtype="bfloat16", channels_last=True),
    make((2, 27, 7, 9), 37, 3, 2, 1, dtype="bfloat16"),
    make((2, 30, 5, 6), 18, (2, 3), 2, groups=2, tf32=True),
)


@pytest.mark.sampled(36, 6)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("problem", WEIGHT_BOXES, ids=str)
def test_boxes_of_weights(problem: ConvTransposeProblem, share: int) -> None:
    """Every config, and tensors that lie otherwise: the weight is transposed before, and padded."""
    pass_, number = Pass.INPUT_GRAD, 0
    found = [config for config in TMA.configs(problem, pass_, H200) if config.boxes][share::SHARES]
    lies = problem.out_channels // problem.groups * (4 if problem.tf32 else 2) % 16 == 0
    lies = lies and (problem.channels_last or problem.taps == 1)
    for layouts in strange_layouts(problem):
        for config in found if number == 0 else found[number % len(found) : number % len(found) + 1]:
            program = TMA.program(problem, pass_, H200, layouts, config)
            packed = WORKSPACE in program.main.operands
            assert packed is not (lies and layouts.aligned and (layouts.weight_channels_last or problem.taps == 1))
            assert_exact(problem, pass_, Candidate(TMA.name, config, 0.0, ""), program, layouts, Emulator(number))
            number += 1


def test_configs_are_ranked_whatever_memory_runs_take_at_the_ranking_size() -> None:
    """FCN-32s' planes have more positions at the typical batch and image than are counted, not at its own."""
    assert offers(TMA, make((8, 21, 16, 16), 21, 64, 32, 16, tf32=True), Pass.INPUT_GRAD)


def test_pixels_that_are_written_touch_few_lines() -> None:
    """Of 37 channels they have 128 bytes, not 80."""
    problem = make((4, 256, 40, 160), 37, 7, 2, 0, 1, dtype="bfloat16")
    for _, program in offers(TMA, problem, Pass.INPUT_GRAD):
        if not dict(program.main.source.constants)["RUNS"]:
            assert program.main.tensor_maps[0].strides[0] % 128 == 0


#: Strides of one or several dimensions, kernels that are no multiple of them or shorter, crops within a cell, groups.
MERGED = (
    make((2, 24, 3, 4, 5), 3, (3, 4, 7), 2, (1, 0, 2), 1, bias=True, tf32=True),
    make((2, 20, 5, 6, 4), 5, 4, 2, 1, dtype="bfloat16"),
    make((1, 40, 6, 9), 12, (5, 2), (3, 4), (2, 0), (2, 3), bias=True, dtype="float16"),
    make((3, 18, 33), 5, 20, 9, 3, dtype="float16"),
    make((2, 24, 9, 7), 16, 4, (1, 2), 1, groups=4, bias=True),
    make((2, 16, 4, 5, 6), 24, (2, 3, 3), (1, 2, 2), (0, 1, 1), dilation=(3, 1, 1), bias=True, tf32=True),
    make((1, 16, 5, 6), 1, (3, 8), (2, 4), (1, 2), bias=True, dtype="bfloat16"),  # one output channel, folded
    make((2, 150, 4, 6), 2, 6, 4, (5, 4), dtype="bfloat16"),
)


@pytest.mark.sampled(16, 4)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("problem", MERGED, ids=str)
def test_merged_phases(problem: ConvTransposeProblem, channels_last: bool) -> None:
    """Every config whose columns are also outputs of a cell; on tensors of one kind."""
    problem = replace(problem, channels_last=channels_last and problem.dims > 1)
    found = [config for config in TMA.configs(problem, Pass.FORWARD, H200) if config.merged]
    assert 1 in {config.merged for config in found}
    all_layouts, seed = list(strange_layouts(problem)), zlib.crc32(f"{problem}".encode())
    for i, config in enumerate(found[seed % 4 :: 4]):
        layouts = all_layouts[(seed + i) % 5]
        program = TMA.program(problem, Pass.FORWARD, H200, layouts, config)
        candidate = Candidate(TMA.name, config, 0.0, "bytes")
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator((seed + i) % 1000))


def test_one_kernel_for_all_sizes() -> None:
    """Phases may be merged: outputs of a single position have the strides of both memory formats."""
    texts = set()
    for size in (1, 2, 7):
        problem = make((2, 64, size, size), 4, 3, 2, 1)
        config = next(each for each in TMA.configs(problem, Pass.FORWARD, H200) if each.merged == 1)
        texts.add(TMA.program(problem, Pass.FORWARD, H200, Layouts.dense(problem), config).main.source.specialisation)
    assert len(texts) == 1
