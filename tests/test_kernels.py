"""Kernel configs, executed by the emulator from the source that the compiler gets, against float64.

Operands are small integers, so that every sum is exact in any order and a single misplaced element shows. The same
bodies run every config on a GPU in ``test_gpu.py``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import DTYPES, Emulator, assert_exact, formats, params, reference, run, strange_layouts
from polyphase.plan.planner import programs
from polyphase.plan.shortlist import candidates
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules import tiles as tiling
from polyphase.schedules.cells import Gather
from polyphase.schedules.direct.general import DirectGeneral
from polyphase.schedules.direct.tiled import DirectTiled, legal_configs
from polyphase.schedules.schedule import Candidate
from test_implicit_gemm import tf32
from test_implicit_gemm import work_tiles_to_take as work_tiles_to_take  # a fixture, of these tests as well

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
H200 = DeviceInfo.for_arch("sm_90a")

PROBLEMS = {
    "stride 1": make((2, 5, 9, 11), 7, 3, bias=True),
    "stride 2": make((2, 4, 7, 6), 6, 4, 2, 1),
    "mixed, grouped, dilated": make((2, 8, 5, 9), 12, (3, 5), (2, 3), (1, 2), (1, 1), 4, True, (2, 1)),
    "stride 5, dilated": make((1, 3, 4, 6), 5, 3, 5, 1, dilation=2),
    "depthwise": make((3, 6, 6, 7), 6, 4, 2, 1, groups=6),
    "depth multiplier": make((1, 3, 5, 6), 9, 3, 2, 1, 1, 3, True),
    "one channel, long kernel": make((1, 3, 6, 10), 1, 9, 4, 4, 3, bias=True),
    "kernel = stride": make((2, 9, 3, 5), 10, 2, 2, bias=True),
    "kernel < stride": make((2, 2, 4, 5), 3, 2, (3, 4), 0, 1),
    "cropped": make((1, 3, 6, 7), 4, 5, 2, 6),
    "output padding ≥ stride": make((1, 2, 4, 5), 3, 2, 2, 1, (2, 3), dilation=(4, 5)),
    "1-D": make((2, 6, 19), 5, 16, 8, 4, bias=True),
    "1-D, stride 1": make((3, 17, 23), 4, 5, dilation=3),
    "3-D": make((1, 3, 4, 3, 5), 4, 2, 2, bias=True),
    "3-D, mixed": make((2, 4, 3, 4, 3), 6, (3, 1, 2), (1, 2, 3), (1, 0, 0), (0, 1, 0), 2),
    "one pixel": make((5, 20, 1, 1), 9, 4),
    "one pixel, grouped": make((70, 12, 1, 1, 1), 6, (2, 3, 2), 2, groups=2),
    "many source channels": make((1, 37, 3, 3), 2, 2, 2),
    "many pixels": make((300, 5, 1, 1), 4, 3, 2, 1, 1, bias=True),
    "many small images": make((37, 4, 2, 3), 6, 4, 2, 1),
    "many elements a position": make((2, 6, 5, 39), 6, 7, 6, 3, 4, groups=6),
    "empty batch": make((0, 3, 4, 4), 2, 3),
}

# Layers that meet images of several widths, most of them multiples of four. In channels_last 4, 8 and 12 channels are
# read as quads, 5 and 6 are not.
WIDE_LAYERS = {
    "stride 1": make((1, 12, 1, 1), 8, 3, 1, 1),
    "stride 1, grouped": make((1, 8, 1, 1), 8, (1, 4), 1, (0, 1), groups=2, bias=True),
    "stride 2": make((1, 8, 1, 1), 12, 4, 2, 1),
    "stride 3": make((1, 5, 1, 1), 6, 5, 3, 1, bias=True),
    "stride 3, dilated": make((1, 4, 1, 1), 4, 2, 3, 2, dilation=4),
    "stride 4": make((1, 4, 1, 1), 5, 7, 4, 2),
    "stride 8": make((1, 6, 1, 1), 4, (3, 9), (2, 8), (1, 4)),
}
WIDTHS = (8, 12, 16, 40, 132, 135)


def one_each(found: list[tuple[Candidate, Program]], seed: int) -> list[tuple[Candidate, Program]]:
    """Of every schedule the planner's best config or another; of implicit_gemm the best, see below."""
    by_schedule: dict[str, list[tuple[Candidate, Program]]] = {}
    for candidate, program in found:
        offers = by_schedule.setdefault(candidate.schedule, [])
        if candidate.schedule != "implicit_gemm" or not offers:
            offers.append((candidate, program))
    sampled = (offers[:: max(1, len(offers) // 2)] for offers in by_schedule.values())
    return [offers[seed % len(offers)] for offers in sampled]


def passes() -> Iterator[ParameterSet]:
    """Every pass of every layer, in one of the layer's memory formats."""
    for name, problem in PROBLEMS.items():
        for pass_ in Pass:
            both = formats(problem)
            formatted = both[zlib.crc32(f"{problem} {pass_}".encode()) % len(both)]
            order = "last" if formatted.channels_last else "first"
            yield pytest.param(formatted, pass_, id=f"{name}-{order}-{pass_.value}")


@pytest.mark.sampled(36, 6)
@pytest.mark.parametrize(("problem", "pass_"), list(passes()))
def test_configs_are_exact(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """One of every schedule."""
    found = one_each(programs(problem, pass_, H200), zlib.crc32(f"{problem} {pass_}".encode()))
    assert found
    for candidate, program in found:
        seed = zlib.crc32(f"{problem} {pass_} {candidate}".encode())
        assert_exact(problem, pass_, candidate, program, executor=Emulator(seed % 1000))


def best(
    schedule: str, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts | None = None
) -> tuple[Candidate, Program]:
    """A schedule's first config, whether the planner takes it or another's."""
    return next(each for each in programs(problem, pass_, H200, layouts) if each[0].schedule == schedule)


def wide(layer: ConvTransposeProblem, pass_: Pass, width: int) -> ConvTransposeProblem:
    """The layer with images of ``width`` columns on the side that the pass reads."""
    height = 17 if layer.stride[0] == 1 else 5
    if pass_ is Pass.FORWARD:
        return replace(layer, input_size=(height, width))
    axis = layer.axes[1]
    columns = axis.input_size(width)
    return replace(layer, input_size=(height, columns), output_padding=(0, width - axis.output_size(columns)))


def tiles(program: Program) -> tuple[list[int], bool, bool]:
    """Tiles along n, d, h, w of a program of direct_tiled, and whether source and destination rows are aligned."""
    found = params(program)
    return found["tiles"], bool(found["aligned_src"]), bool(found["aligned_rows"])


def wide_cases() -> Iterator[ParameterSet]:
    for i, (name, layer) in enumerate(WIDE_LAYERS.items()):
        for last in (False, True):
            for j, pass_ in enumerate((Pass.FORWARD, Pass.INPUT_GRAD)):
                other = ("float64", "bfloat16", "float16")[i % 3]
                for dtype in ("float32", other) if (i + j + last) % 2 else ("float32",):
                    problem = replace(layer, dtype=dtype, channels_last=last)
                    yield pytest.param(problem, pass_, id=f"{name}-{'last' if last else 'first'}-{pass_.value}-{dtype}")


@pytest.mark.sampled(32, 8)
@pytest.mark.parametrize(("layer", "pass_"), list(wide_cases()))
def test_wide_images(layer: ConvTransposeProblem, pass_: Pass) -> None:
    """Quad loads and vector stores, where images allow them and where not; the kernels are those of every width."""
    full = layer.dtype == "float32"
    sources = set()
    for width in WIDTHS if full else (8, 40):
        problem = wide(layer, pass_, width)
        for aligned in (True, False):
            layouts = replace(Layouts.dense(problem), aligned=aligned)
            candidate, program = best("direct_tiled", problem, pass_, layouts)
            sources.add(program.main.source)
            seed = zlib.crc32(f"{problem} {pass_} {aligned}".encode())
            assert_exact(problem, pass_, candidate, program, layouts, Emulator(seed % 1000))
    assert len(sources) == 1


@pytest.mark.slow
def test_wide_images_meet_every_path() -> None:
    """The sample above is worth its time: several tiles along h and w, aligned and not, on both sides."""
    met = set()
    for layer in WIDE_LAYERS.values():
        for formatted in formats(layer):
            for pass_ in (Pass.FORWARD, Pass.INPUT_GRAD):
                for width in WIDTHS:
                    candidate, program = best("direct_tiled", wide(formatted, pass_, width), pass_)
                    (_, _, along_h, along_w), source, rows = tiles(program)
                    met.add(("copied", candidate.config.asynchronous, source))
                    met.add(("along h", along_h > 1, formatted.channels_last, source))
                    met.add(("along w", along_w > 1, formatted.channels_last, source))
                    if not formatted.channels_last:
                        met.add(("rows", rows, pass_))
    for last in (False, True):
        for source in (False, True):
            assert {("along h", True, last, source), ("along w", True, last, source)} <= met
            assert ("copied", last, source) in met
    assert {("rows", rows, Pass.FORWARD) for rows in (False, True)} <= met


ORDERED = {
    "direct_tiled, source slices": (make((1, 20, 5, 9), 1, 3, 1, 1, bias=True), Pass.FORWARD),
    "direct_tiled, turned rows": (make((2, 3, 7, 9), 4, 3, 3, 1), Pass.FORWARD),
    "direct_tiled, quads": (make((1, 8, 6, 20), 8, 4, 2, 1, channels_last=True), Pass.FORWARD),
    "direct_tiled, input gradient": (make((1, 6, 6, 10), 20, 4, 2, 1), Pass.INPUT_GRAD),
    "direct_general": (make((1, 3, 4, 5), 5, 3, 2), Pass.FORWARD),
    "direct_wgrad_gemm": (make((3, 3, 9, 10), 4, 3, 2), Pass.WEIGHT_GRAD),
}


@pytest.mark.parametrize("name", ORDERED)
def test_no_races(name: str) -> None:
    """Threads and blocks in several orders give the same bits."""
    problem, pass_ = ORDERED[name]
    offers = [each for each in programs(problem, pass_, H200) if each[0].schedule == name.split(",")[0]]
    if "source slices" in name:  # not only the winner
        offers = [each for each in offers if each[0].config.src_slices > 1]
    for candidate, program in offers[:1]:
        assert_exact(problem, pass_, candidate, program, executor=Emulator(order=None))
    assert offers


def chained(problem: ConvTransposeProblem, buffers: int, slices: int) -> tuple[Candidate, Program]:
    """A config of direct_tiled with these buffers and source slices whose sums are cut into several chains."""
    layouts = Layouts.dense(problem)
    config = next(
        config
        for config, counts in legal_configs(Gather.of(problem, Pass.FORWARD, layouts), H200)
        if (config.buffers, config.src_slices) == (buffers, slices) and counts.chain < counts.stages
    )._replace(min_blocks=1)
    small = replace(H200, multiprocessors=1)  # so that blocks go on to further items
    program = DirectTiled().program(problem, Pass.FORWARD, small, layouts, config)
    return Candidate("direct_tiled", config, 0.0, ""), program


@pytest.mark.sampled(32, 2)
@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("width", [9, 12])
def test_chains(buffers: int, slices: int, width: int) -> None:
    """Sums of many channels in several chains, of several items a block, in several orders of threads."""
    problem = make((9, 53, 5, width), 12, (5, 4), 2, 1, bias=True)
    candidate, program = chained(problem, buffers, slices)
    assert params(program)["work_tiles_per_block"] > 1
    assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(order=None if width == 9 else 5))


ACCURATE = {
    "DCGAN's last": (make((2, 128, 4, 8), 3, 4, 2, 1), 1.8e-7),
    "FSRCNN's": (make((2, 56, 4, 6), 1, 9, 4, 4, 3, bias=True), 1.7e-7),
}


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("name", ACCURATE)
def test_sums_in_two_levels_are_accurate(name: str, slices: int) -> None:
    """Norms of the errors; in one chain they are 4.0e-7 and 3.1e-7."""
    problem, most = ACCURATE[name]
    _, program = chained(problem, 3, slices)
    torch.manual_seed(1)
    x, w = (torch.randn(shape).double() for shape in (problem.input_shape, problem.weight_shape))
    bias = torch.zeros(problem.out_channels).double() if problem.bias else None
    out = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, w), bias).double()
    expected = reference(problem, Pass.FORWARD, (x, w))
    error = float((out - expected).norm() / expected.norm())
    assert error < most


RUNS = {  # of `direct_general`: layers, and neighbours of a thread along the width
    "overlapping": (make((2, 6, 37), 16, 16, 8, 4, groups=2, bias=True), 4),
    "bfloat16": (make((1, 3, 3, 18), 5, (3, 24), (2, 8), (1, 8), dtype="bfloat16", bias=True), 8),
    "pairs": (make((1, 4, 9), 6, 10, 10, dtype="float16"), 2),
    "gaps": (make((2, 2, 2, 3, 5), 4, (1, 2, 4), (2, 2, 8), output_padding=(0, 0, 4)), 4),
    "one cell": (make((1, 3, 2, 1), 8, (2, 64), (1, 64)), 4),
}


@pytest.mark.sampled(6, 2)
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_direct_general(name: str) -> None:
    """Every config whose threads own neighbours along the width, and the cells that share weights."""
    problem, run = RUNS[name]
    layouts = Layouts.dense(problem)
    configs = [each.config for each in candidates(DirectGeneral(), problem, Pass.FORWARD, H200, layouts)]
    assert {config.run for config in configs} == {1, run}
    for number, config in enumerate(configs):
        program = DirectGeneral().program(problem, Pass.FORWARD, H200, layouts, config)
        candidate = Candidate("direct_general", config, 0.0, "")
        assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(number))


def test_runs_need_aligned_rows() -> None:
    """No neighbours where a vector of them, or of their weights, could lie across 16 bytes, or where sums are long."""

    def runs(problem: ConvTransposeProblem, **changes: bool) -> set[int]:
        layouts = replace(Layouts.dense(problem), **changes)
        found = candidates(DirectGeneral(), problem, Pass.FORWARD, H200, layouts)
        programs = (DirectGeneral().program(problem, Pass.FORWARD, H200, layouts, each.config) for each in found)
        return {dict(program.main.source.constants)["RUN"] for program in programs}

    aligned = make((1, 2, 9), 4, 8, 8)
    assert runs(aligned) == {1, 4}
    assert runs(aligned, aligned=False) == runs(aligned, weight_channels_last=True) == {1}
    for problem in (
        make((1, 2, 9), 4, 9, 8),
        make((1, 2, 9), 4, 8, 8, output_padding=1),
        make((1, 2, 9), 4, 8, 8, 1),
        make((1, 2, 9), 4, 8, 8, dilation=3),
        make((1, 2, 3, 9), 4, (8, 8), 8, channels_last=True),
        make((1, 2, 9), 4, 8, 8, dtype="float64"),
        make((1, 33, 9), 4, 8, 8),
    ):
        assert runs(problem) == {1}
    assert runs(make((1, 2, 9), 4, 8, 8, output_padding=2)) == {1, 2}


def test_a_weight_of_a_forward_pass_need_not_be_aligned() -> None:
    problem = make((2, 3, 9), 4, 8, 8)
    layouts = Layouts.dense(problem)
    x, weight = torch.randn(problem.input_shape), torch.randn(problem.weight_shape)
    beside = torch.empty(weight.numel() + 1)[1:].view(weight.shape).copy_(weight)
    for candidate in candidates(DirectGeneral(), problem, Pass.FORWARD, H200, layouts):
        program = DirectGeneral().program(problem, Pass.FORWARD, H200, layouts, candidate.config)
        found = [run(problem, Pass.FORWARD, program, layouts, (x, each)) for each in (weight, beside)]
        assert torch.equal(*found)


def test_a_missing_source_element_does_not_meet_a_weight() -> None:
    """Of several cells of a thread: zero times infinity would be no number."""
    problem = make((1, 1, 5), 4, 16, 8, 4)
    layouts = Layouts.dense(problem)
    x, weight = torch.ones(problem.input_shape), torch.ones(problem.weight_shape)
    weight[0, 0, 3] = torch.inf
    expected = torch.conv_transpose1d(x, weight, None, 8, 4)
    for candidate in candidates(DirectGeneral(), problem, Pass.FORWARD, H200, layouts):
        program = DirectGeneral().program(problem, Pass.FORWARD, H200, layouts, candidate.config)
        assert torch.equal(run(problem, Pass.FORWARD, program, layouts, (x, weight)), expected), candidate.config


def test_short_rows() -> None:
    """Where a row of all lanes has too wide a halo tiles have rows of few, of small images too."""
    for size in ((9, 70), (1, 300), (3, 2)):
        problem = make((2, 3, *size), 3, 8, 4, 2, groups=3)
        found = list(candidates(DirectTiled(), problem, Pass.INPUT_GRAD, H200, Layouts.dense(problem)))
        assert found
        for number, candidate in enumerate(found[:3]):
            program = DirectTiled().program(problem, Pass.INPUT_GRAD, H200, Layouts.dense(problem), candidate.config)
            assert math.prod(params(program)["lanes"]) <= candidate.config.lanes
            assert_exact(problem, Pass.INPUT_GRAD, candidate, program, executor=Emulator(number))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_few_output_channels_are_columns(dtype: str) -> None:
    """Of an input gradient in channels_last, where weights lie likewise."""
    problem = make((2, 10, 5, 6), 3, 4, 2, 1, 1, dtype=dtype, channels_last=True)
    read = set()
    for number, layouts in enumerate(strange_layouts(problem)):
        candidate, *_ = candidates(DirectTiled(), problem, Pass.INPUT_GRAD, H200, layouts)
        program = DirectTiled().program(problem, Pass.INPUT_GRAD, H200, layouts, candidate.config)
        channels = dict(program.main.source.constants)["SRC_CHANNELS"]
        assert layouts.weight_channels_last or channels == 3
        read.add(channels)
        assert_exact(problem, Pass.INPUT_GRAD, candidate, program, layouts, executor=Emulator(number))
    assert read == {1, 3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_long_sums(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients over more positions than are summed in one chain, in parts that end with a partial stage."""
    problem = make((3, 2, 67, 61), 3, 2, 2, dtype=dtype)
    _, usual = best("direct_wgrad_gemm", problem, Pass.WEIGHT_GRAD)
    monkeypatch.setattr(tiling, "_MAX_PLANES_BYTES", 2 * 8 * problem.elements[1])  # few parts, long ones
    found = [each for each in programs(problem, Pass.WEIGHT_GRAD, H200) if each[0].schedule == "direct_wgrad_gemm"]
    assert found[0][1].main.source == usual.main.source
    for candidate, program in found[::4]:
        assert 1 < program.splits < usual.splits
        assert params(program)["split_length"] > 2048
        assert params(program)["positions"] % candidate.config.depth
        assert_exact(problem, Pass.WEIGHT_GRAD, candidate, program, executor=Emulator(3))


@pytest.mark.sampled(32, 2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pass_", Pass)
def test_wide_offsets(dtype: str, pass_: Pass) -> None:
    """The config for tensors beyond 4 GiB, on a small one: its offsets have 64 bits everywhere."""
    problem = make((2, 3, 5, 7), 4, 3, 2, 1, dtype=dtype, bias=True)
    schedule = "direct_wgrad_gemm" if pass_ is Pass.WEIGHT_GRAD else "direct_tiled"
    candidate, program = best(schedule, problem, pass_)
    beyond = replace(problem, batch=1, input_size=(2**16, 2**15))
    _, huge = best(schedule, beyond, pass_)
    assert huge.main.source.wide_offsets
    if huge.main.source == program.main.source:  # of kernels that know no other
        return
    assert replace(huge.main.source, wide_offsets=False) == program.main.source
    # Where each element of a row goes is twice as long.
    extra = program.main.block * candidate.config.cells_w * problem.stride[-1] * 8
    wide_main = replace(program.main, source=huge.main.source, shared_bytes=program.main.shared_bytes + extra)
    wide_launch = program.with_main(wide_main)
    assert_exact(problem, pass_, candidate, wide_launch, executor=Emulator(7))


def test_offsets_widen_at_4_gib() -> None:
    """A 3-D image of one channel beyond 4 GiB needs 64 bits for offsets within a tile; one just below does not."""
    sizes = (1024, 1024, 1023), (1024, 1024, 1024)
    sources = [best("direct_tiled", make((1, 1, *size), 1, 1), Pass.FORWARD)[1].main.source for size in sizes]
    assert [source.wide_offsets for source in sources] == [False, True]
    for below, beyond in pairwise(sources):
        assert replace(beyond, wide_offsets=False) == below


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize(("channels_last", "width"), [(False, 5), (False, 8), (True, 5)])
@pytest.mark.parametrize("schedule", ["direct_tiled", "direct_general"])
@pytest.mark.parametrize("as_pytorch", [False, True])
def test_direct_kernels_round_where_they_are_told_to(
    schedule: str, as_pytorch: bool, channels_last: bool, width: int
) -> None:
    """They are exact in float32, also where TF32 is allowed, unless the result is to be PyTorch's."""
    problem = make((1, 20, 4, width), 16, 4, 2, 1, bias=True, tf32=True, channels_last=channels_last)
    problem = replace(problem, tf32_as_pytorch=as_pytorch)
    _, program = best(schedule, problem, Pass.FORWARD)
    torch.manual_seed(3)
    x, w = (torch.randn(shape).double() for shape in (problem.input_shape, problem.weight_shape))
    bias = torch.randn(16).double()
    out = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, w), bias).double()
    expected = reference(problem, Pass.FORWARD, (tf32(x), tf32(w)) if as_pytorch else (x, w), bias)
    scale = reference(problem, Pass.FORWARD, (x.abs(), w.abs()), bias.abs())
    assert bool(((out - expected).abs() <= 2**-20 * scale).all())
    for pass_ in (Pass.FORWARD, Pass.INPUT_GRAD):
        rounded = dict(best(schedule, problem, pass_)[1].main.source.constants)["ROUNDED"]
        assert rounded is (as_pytorch and pass_ is Pass.FORWARD)
