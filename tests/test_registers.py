"""Registers: what is compiled instead of a kernel that spills, and reports of the compiler about the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_harness import offers
from polyphase import ConvTransposeProblem
from polyphase.bench.layers import parse_layer
from polyphase.jit import compiler
from polyphase.jit.source import KernelSource
from polyphase.plan.planner import kernel_sources, programs
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import Product
from polyphase.schedules.implicit_gemm.families import Layer, legal_configs
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from test_jit import ARCH, SOURCE

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, but no GPU")
FENCE = 0x79C5.to_bytes(8, "little")  # the first word of `WARPGROUP.ARRIVE`


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "kernels"))
    yield
    compiler._caches.clear()


def test_fewer_blocks_rather_than_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def pretend(source: KernelSource, arch: str) -> tuple[bytes, str]:
        tried.append(source.min_blocks)
        spilled = 8 * max(0, source.min_blocks - 2)
        return b"binary", f"{spilled} bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads"

    monkeypatch.setattr(compiler, "_compile", pretend)
    source, _, log = compiler._compile_without_spills(SOURCE.with_constants(MIN_BLOCKS=5), ARCH)
    assert tried == [5, 4, 3, 2]
    assert source == SOURCE.with_constants(MIN_BLOCKS=2)
    assert "0 bytes spill stores" in log


def test_rolled_loops_rather_than_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block that is alone already."""
    tried = []

    def pretend(source: KernelSource, arch: str) -> tuple[bytes, str]:
        tried.append((source.min_blocks, dict(source.constants)["STRAIGHT"]))
        return b"", f"{8 if tried[-1][1] else 0} bytes stack frame, 0 bytes spill stores"

    monkeypatch.setattr(compiler, "_compile", pretend)
    straight = replace(SOURCE.with_constants(MIN_BLOCKS=2, STRAIGHT=True), fallbacks=((("STRAIGHT", False),),))
    source, _, _ = compiler._compile_without_spills(straight, ARCH)
    assert tried == [(2, True), (1, True), (1, False)]
    assert source == straight.with_constants(MIN_BLOCKS=1, STRAIGHT=False)
    compiler.settled.cache_clear()
    assert compiler.settled(straight.with_constants(MIN_BLOCKS=1), ARCH) == source


@pytest.mark.parametrize(
    ("spills", "chosen"),
    [
        ((8, 0), (-8, 2)),
        ((8, 24, 0), (16, 2)),
        ((32, 24, 12, 320, 0), (16, 1)),
        ((16, 24, 8, 32, 12), (16, 2)),
        ((8, 8, 8, 8, 8), (16, 1)),
    ],
)
def test_registers_change_hands_rather_than_spill(
    spills: tuple[int, ...], chosen: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between those who load and those who multiply; where all spill, those that spill least."""
    left = list(spills)
    monkeypatch.setattr(compiler, "_compile", lambda *_: (b"", f"{left.pop(0)} bytes spill stores"))
    shares = [(("GIVEN_REGISTERS", count),) for count in (-8, 16, 24)]
    fallbacks = (*shares, (("GIVEN_REGISTERS", 16), ("CHUNKS_AT_ONCE", 1)))
    source = replace(SOURCE.with_constants(MIN_BLOCKS=1, GIVEN_REGISTERS=0, CHUNKS_AT_ONCE=2), fallbacks=fallbacks)
    found, _, log = compiler._compile_without_spills(source, ARCH)
    assert found == source.with_constants(GIVEN_REGISTERS=chosen[0], CHUNKS_AT_ONCE=chosen[1])
    assert log == f"{min(spills)} bytes spill stores"
    assert not left
    assert list(replace(source, fallbacks=()).attempts()) == [replace(source, fallbacks=())]


def test_a_lone_block_may_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *_: (b"", "8 bytes spill stores"))
    source, _, _ = compiler._compile_without_spills(SOURCE.with_constants(MIN_BLOCKS=2), ARCH)
    assert source.min_blocks == 1


@pytest.mark.nvrtc
def test_the_compiler_does_spill() -> None:
    """A tile that asks for more resident blocks than its registers allow gets fewer, from the real compiler."""
    problem = ConvTransposeProblem.make((1, 4, 8, 8), 8, 3)
    offers = programs(problem, Pass.FORWARD, DeviceInfo.for_arch(ARCH))
    program = next(program for candidate, program in offers if candidate.schedule == "direct_tiled")
    source = program.main.source.with_constants(MIN_BLOCKS=2048 // program.main.block)  # 32 registers for each thread
    _, log = compiler._compile(source, ARCH)
    assert compiler._number(log, r"(\d+) bytes spill stores") > 0
    report = compiler.resources_of(source, ARCH)
    assert report.clean
    assert 1 <= report.source.min_blocks < source.min_blocks


@pytest.mark.slow
@pytest.mark.sampled(16, 2)
@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "problem",
    [
        ConvTransposeProblem.make(
            (16, 32, 128, 256), 64, (3, 5), (2, 3), (1, 2), 0, 4, False, (2, 1), dtype="bfloat16"
        ),
        ConvTransposeProblem.make((128, 256, 16, 16), 128, 4, 2, 1),
        ConvTransposeProblem.make((2, 320, 16, 16, 16), 256, 2, 2, bias=True),
    ],
    ids=["places kept", "weights apart", "long straight-line code"],
)
def test_no_direct_kernel_spills(problem: ConvTransposeProblem) -> None:
    """In channels_last, where the compiler takes more registers than the estimate says."""
    offers = programs(replace(problem, channels_last=True), Pass.FORWARD, DeviceInfo.for_arch(ARCH))
    direct = [program for candidate, program in offers if candidate.schedule == "direct_tiled"]
    reports = [compiler.resources_of(program.main.source, ARCH) for program in direct]
    assert len(reports) > 3
    assert [report for report in reports if not report.clean] == []


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "problem",
    [
        ConvTransposeProblem.make((1, 32, 24, 13), 64, 7, (4, 2), (2, 3), bias=True),
        ConvTransposeProblem.make((8, 194, 8, 64), 64, (4, 1), (3, 2), (1, 0), 0, 2, True),
        ConvTransposeProblem.make((8, 291, 8, 13), 384, (1, 16), 8, (0, 5), (0, 1), 3, False, (2, 1), tf32=True),
        ConvTransposeProblem.make((1, 32, 13, 8), 129, 3, (2, 1), (0, 1), bias=True, tf32=True),
    ],
    ids=["two parts", "elements without taps", "loaders of halves", "a partial block of lines"],
)
def test_no_product_of_odd_layers_spills(problem: ConvTransposeProblem) -> None:
    """Forward passes of `implicit_gemm`, of which some would if registers had the shares that most want."""
    offers = programs(problem, Pass.FORWARD, DeviceInfo.for_arch("sm_90a"))
    best = [program for candidate, program in offers if candidate.schedule == "implicit_gemm"][:3]
    sources = [source for each in best for source in (each.main.source, each.main.one_way) if source is not None]
    reports = [compiler.resources_of(source, "sm_90a") for source in sources]
    assert all(report.clean for report in reports), reports
    assert any(dict(report.source.constants)["GIVEN_REGISTERS"] for report in reports if report.source)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("channels", "out_channels", "size", "bias"),
    [(256, 256, 14, True), (250, 200, 60, False), (154, 200, 30, True), (217, 200, 30, False)],
    ids=["all registers", "channels that fill no operation", "wide chunks of such", "an odd number"],
)
def test_pixels_stay_in_registers(channels: int, out_channels: int, size: int, bias: bool) -> None:
    """Where the kernel is the stride, all channels of a thread's pixels."""
    problem = ConvTransposeProblem.make((512, channels, size, size), out_channels, 2, 2, bias=bias, dtype="bfloat16")
    offers = programs(problem, Pass.FORWARD, DeviceInfo.for_arch(ARCH))
    reports = [
        compiler.resources_of(program.main.source, ARCH)
        for found, program in offers
        if found.schedule == "phase_gemm_pixels"
    ]
    assert len(reports) > 1
    assert [report for report in reports if not report.clean] == []


@pytest.mark.nvrtc
def test_sums_at_wide_strides_stay_in_registers() -> None:
    """Taps in rows, channels last: a lane adds up neighbouring channels together, fewer of them at a wide stride."""
    problem = ConvTransposeProblem.make((8, 64, 64, 64), 4, 16, 8, dtype="bfloat16", channels_last=True)
    offers = programs(problem, Pass.FORWARD, DeviceInfo.for_arch(ARCH))
    program = next(program for candidate, program in offers if getattr(candidate.config, "taps_in_rows", False))
    report = compiler.resources_of(program.main.source, ARCH)
    assert report.clean, report


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("shape", "channels", "kernel"),
    [((4, 48, 32, 32), 24, (4, 2, 1)), ((16, 128, 256, 256), 64, (2, 2)), ((4, 512, 16, 16), 100, (4, 4))],
    ids=["channels that fill no block", "two lines", "a wide stride"],
)
def test_stores_leave_sums_in_registers(shape: tuple[int, ...], channels: int, kernel: tuple[int, ...]) -> None:
    """The more a store holds the fewer sums a thread may have (`config.held_by_stores`)."""
    problem = ConvTransposeProblem.make(shape, channels, *kernel, bias=True, dtype="bfloat16")
    offers = programs(problem, Pass.FORWARD, DeviceInfo.for_arch(ARCH))
    program = next(program for candidate, program in offers if candidate.schedule == "implicit_gemm")
    report = compiler.resources_of(program.main.source, ARCH)
    assert report.clean, report


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("shape", "channels", "kernel", "dilation"),
    [((4, 48, 61, 61), 64, ((3, 5), (2, 3)), 1), ((4, 48, 61, 61), 128, (3, (2, 5)), 2)],
    ids=["stride 3", "stride 5"],
)
def test_long_pieces_leave_sums_in_registers(
    shape: tuple[int, ...], channels: int, kernel: tuple[Any, ...], dilation: int
) -> None:
    """Of all configs that store longer pieces the one that holds most (`GemmConfig.with_longer_pieces`)."""
    problem = ConvTransposeProblem.make(shape, channels, *kernel, dilation=dilation, bias=True, dtype="bfloat16")
    gather = Gather.of(problem, Pass.FORWARD, Layouts.dense(problem))
    found = legal_configs(Layer(problem, False, tma=False), DeviceInfo.for_arch(ARCH))
    longer = [each for config in found if config.wgmma for each in config.with_longer_pieces(gather)]
    most = max(longer, key=lambda each: each.group_cells * Product(gather, each).row_blocks)
    program = ImplicitGemm().program(problem, Pass.FORWARD, DeviceInfo.for_arch(ARCH), Layouts.dense(problem), most)
    report = compiler.resources_of(program.main.source, ARCH)
    assert report.clean, (most, report)


@pytest.mark.slow
@pytest.mark.sampled(8, 2)
@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("layer", "dtype", "kinds"),
    [
        ("16x32x64x128 -> 64, k=3, s=5, p=1, d=2", "bfloat16", 1),
        ("8x256x64x64 -> 128, k=3, s=2, p=1, op=1, bias", "float32", 2),
        ("8x64x32x32 -> 64, k=9, s=2", "bfloat16", 2),
        ("8x64x16x16x16 -> 64, k=5, s=2", "bfloat16", 3),
    ],
    ids=["lines of one tap", "lines of one and two", "long lines", "planes"],
)
def test_no_fence_among_the_products_of_a_stage(layer: str, dtype: str, kinds: int) -> None:
    """Each kind of groups of lines begins with one; a branch behind it has the assembler put in others."""
    problem = replace(parse_layer(layer), dtype=dtype)
    _, program = offers(ImplicitGemm(), problem)[0]
    assert program.main.one_way is not None
    for source in (program.main.source, program.main.one_way):
        binary = compiler.compile_kernel(source, ARCH)
        words = [binary[i : i + 8] for i in range(0, len(binary), 8)]
        assert words.count(FENCE) == kinds, source.specialisation


@pytest.mark.slow
@pytest.mark.nvrtc
def test_reports() -> None:
    problem = ConvTransposeProblem.make((1, 2, 8, 8), 2, 3, 2, bias=True)
    for pass_ in Pass:
        device = DeviceInfo.for_arch(ARCH)
        reports = [compiler.resources_of(source, ARCH) for source in kernel_sources(problem, pass_, device)]
        offered = [program for _, program in programs(problem, pass_, device)]
        kernels = {report.source.kernel for report in reports}
        assert {program.main.source.kernel for program in offered} <= kernels
        sums = {"reduce_splits"} if pass_ is Pass.WEIGHT_GRAD else set()
        assert kernels - sums <= {source.kernel for program in offered for source in program.sources}
        assert sums <= kernels
        for report in reports:
            assert report.clean, report
            assert 0 < report.registers <= 255
            assert report.seconds > 0
