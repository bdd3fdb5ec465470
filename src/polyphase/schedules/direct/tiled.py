"""The direct gather kernel for layers that unroll, ``kernels/direct_tiled.cu``: configs, tiles and launch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass, accumulator_bytes
from polyphase.problem.device import REGISTERS, DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import MAX_PHASES, Gather
from polyphase.schedules.cost import slower_of
from polyphase.schedules.direct.tiled_cost import (
    Counts,
    TiledConfig,
    cycles_of_waves,
    cycles_per_result,
    registers,
    straight,
    thread_cycles,
)
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import Four, constants_of, tiles_of, two_dimensions
from polyphase.schedules.window_gemm.window import rows_as_one_channel

# Straight-line code stays short enough to compile in tenths of a second and to fit the instruction cache.
_MAX_UNROLLED = 1600
_MAX_ACCUMULATORS = 96
_ROW_LANES = 32  # row length if lanes form several rows
_MAX_OF_DOUBLES = 312  # highest register estimate at which doubles, channels last, still compile
_LOADS, _MAX_LOADS = 8, 24  # most loads per thread; the second if every tile needs more than the first
_TAPS_OF_MANY_LOADS = 256  # most taps for more loads: beyond, dot_dgrad is faster


@dataclass(frozen=True)
class _Layer:
    """A pass, and all of it on which configs may depend: not on batch or image size. Equal if that is equal."""

    gather: Gather = field(compare=False)
    key: tuple[object, ...]

    @classmethod
    def of(cls, g: Gather) -> _Layer:
        alignment = math.gcd(g.dst.apart(1), 16) if g.dst.channels_last else 1
        layout = (g.src.channels_last, g.dst.channels_last, alignment, g.weight_channels_last)
        key = (g.pass_, g.axes, g.src_channels, g.dst_channels, g.groups > 1, g.dtype, g.rounded, g.bias, layout)
        return cls(g, key)


class DirectTiled(Schedule):
    """A block computes all phases of a tile, with the kernel's taps unrolled."""

    name = "direct_tiled"
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)
    offered = 8

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        gather = Gather.of(*_as_read(problem, pass_, Layouts.dense(problem)))
        if gather.taps > _MAX_UNROLLED:
            return f"{gather.taps} taps do not unroll (at most {_MAX_UNROLLED})"
        if gather.owned > _MAX_ACCUMULATORS:
            return f"{gather.owned} phases do not fit a thread's registers (at most {_MAX_ACCUMULATORS})"
        if problem.channels_last and min(gather.src_channels, gather.dst_channels) < 4 and problem.groups > 4:
            return "channels_last groups of less than 4 channels would leave its lanes far apart in memory"
        if gather.phases > MAX_PHASES:
            return f"{gather.phases} elements of a cell are too many for straight-line code (at most {MAX_PHASES})"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        memory = f"{device.shared_bytes_per_block} bytes of shared memory"
        return f"the halo of a tile does not fit the registers in flight, or {memory}"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> _Layer:
        return _Layer.of(Gather.of(*_as_read(problem, pass_, layouts)))

    def configs(self, at: _Layer, pass_: Pass, device: DeviceInfo) -> Iterator[TiledConfig]:
        return (config for config, _ in legal_configs(at.gather, device))

    def search(
        self, at: _Layer, pass_: Pass, device: DeviceInfo, most: int | None = None, below: float = math.inf
    ) -> dict[TiledConfig, float]:
        """With cycles per cell and destination channel, the same for all image sizes."""
        legal, terms = legal_configs(at.gather, device), costs("direct_tiled", device)
        return {config: cycles_per_result(at.gather, config, counts, terms) for config, counts in legal}

    def arranged(self, order: list[TiledConfig]) -> list[TiledConfig]:
        return order[: self.offered]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TiledConfig
    ) -> Cost | None:
        problem, _, layouts = _as_read(problem, pass_, layouts)
        gather = Gather.of(problem, pass_, layouts)
        if not _fits(gather, config, _some_lanes(gather, config), device):
            return None
        work_tiles, counts = _work_tiles(problem, gather, config), Counts.of(gather, config)
        terms = costs("direct_tiled", device)
        cycles = cycles_of_waves(config, counts, work_tiles, device.multiprocessors, terms)
        cycles *= _measured(problem, gather, terms)
        if not gather.forward and not problem.channels_last:  # the factors of other layers include it
            cycles += _found(problem, gather, config, counts, work_tiles, device)
        work = (cycles + terms.launch) / device.clock_hz
        return slower_of(work, problem.bytes / device.copy_bytes_per_second)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TiledConfig
    ) -> Program:
        gather = Gather.of(*_as_read(problem, pass_, layouts))
        lanes, counts = _arrange(gather, config, device), Counts.of(gather, config)
        images, depth, height, width = lanes
        extent = images, depth, height * config.cells_h, width * config.cells_w
        tiles = tiles_of(problem.batch, gather.cells, extent)
        source = KernelSource(
            kernel=self.name,
            dtype=gather.dtype,
            wide_offsets=gather.wide_offsets(images, config.stage_channels),
            constants=gather.constants(
                ROUNDED=gather.rounded,
                SRC_CHANNELS_LAST=gather.src.channels_last,
                CHAIN=counts.chain,
                STRAIGHT=straight(counts),
                **dict(constants_of(config)),
            ),
            fallbacks=((("STRAIGHT", False),),) if straight(counts) else (),
        )
        work_tiles = config.dst_blocks(gather) * gather.groups
        per_block = _of_block(work_tiles, math.prod(tiles), config, device)
        params = {
            "src": gather.src,
            "dst": gather.dst,
            "batch": problem.batch,
            "lanes": lanes,
            "tiles": tiles,
            "work_tiles": work_tiles,
            "work_tiles_per_block": per_block,
            "aligned_src": gather.aligned_src,
            "aligned_rows": _aligned_rows(gather, config),
        }
        grid = math.ceil(work_tiles / per_block), *two_dimensions(math.prod(tiles))
        main = main_step(source, grid, config.threads, _shared_bytes(gather, config, lanes), params)
        return assemble(problem, pass_, main)


def _as_read(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
) -> tuple[ConvTransposeProblem, Pass, Layouts]:
    """The pass as the kernel reads it: two or three output channels do not fill quads, and become columns."""
    if pass_ is Pass.INPUT_GRAD and 1 < problem.out_channels < 4:
        problem, layouts = rows_as_one_channel(problem, layouts) or (problem, layouts)
    return problem, pass_, layouts


def _measured(problem: ConvTransposeProblem, gather: Gather, terms: Costs) -> float:
    """The factor from predicted to measured cycles."""
    last = problem.channels_last
    if gather.forward:
        if gather.dst_channels < 4 and problem.groups == 1:
            return terms.few_channels_last if last else terms.few_channels
        if gather.owned < gather.phases:
            return terms.bare_last if last else terms.bare
        return terms.forward_last if last else terms.forward
    if gather.dst.channels_last and not last:
        return terms.from_columns
    if last and problem.dtype == "float32" and max(problem.stride) > 1:
        return terms.strided_grad
    return terms.input_grad_last if last else terms.input_grad


def _elements(gather: Gather, cells: tuple[int, int], lanes: Four) -> int:
    """Elements of one channel of the source of a tile, halo included: whole quads along w."""
    depth, height, width = gather.cell_axes
    columns = round_up(width.first_offset % 4 + width.window(lanes[3] * cells[1]), max(4, gather.split))
    return lanes[0] * depth.window(lanes[1]) * height.window(lanes[2] * cells[0]) * columns


def _fits_loads(gather: Gather, config: TiledConfig, lanes: Four) -> bool:
    """Whether the threads of the compiled config load tiles of ``lanes``."""
    return _loads(_elements(gather, config.cells, lanes), config.stage_channels, config.threads) <= config.loads


def _loads(elements: int, channels: int, threads: int) -> int:
    """Quads of a stage that a thread loads."""
    return math.ceil(elements * channels / 4 / threads)


def _shared_bytes(gather: Gather, config: TiledConfig, lanes: Four, counts: Counts | None = None) -> int:
    """Shared memory of a block with ``lanes``; with ``counts``: for all image sizes, with 32-bit offsets."""
    accumulator = accumulator_bytes(gather.dtype)
    weights = config.stage_channels * config.dst_slices * round_up(gather.taps * config.dst_per_thread, 4)
    plane = config.loads * config.threads // config.stage_channels * 4 + (4 if gather.src.channels_last else 0)
    buffers = config.buffers * (weights + config.stage_channels * plane)
    slice_threads = config.lanes * config.dst_slices
    typical = counts is not None
    counts = counts or Counts.of(gather, config)
    rows = slice_threads * counts.patch.run
    summed = config.src_slices > 1 or counts.chain < counts.stages
    sums = slice_threads * round_up(counts.patch.accumulators, 4) if summed else 0
    wide = not typical and gather.wide_offsets(lanes[0], config.stage_channels)
    elements = config.lanes * counts.patch.run * (16 if wide else 8) if counts.patch.run > 1 else 0
    return (buffers + rows + sums) * accumulator + elements


def _fits(gather: Gather, config: TiledConfig, lanes: Four, device: DeviceInfo) -> bool:
    """Whether the compiled config supports tiles of ``lanes``: loads, shared memory, tiles that start at quads."""
    width = lanes[3] * config.cells_w
    return (
        _fits_loads(gather, config, lanes)
        and _shared_bytes(gather, config, lanes) <= device.shared_bytes_per_block
        and (width >= gather.cells[2] or width * gather.cell_axes[2].src % 4 == 0)
    )


def _some_lanes(gather: Gather, config: TiledConfig) -> Four:
    """Extents of lanes along n, d, h and w that fit the config's loads: one row, or short rows if the halo is wide."""
    row = 1, 1, 1, config.lanes
    return row if _fits_loads(gather, config, row) else (1, 1, 1, _ROW_LANES)


def _arrange(gather: Gather, config: TiledConfig, device: DeviceInfo) -> Four:
    """Extents of a tile's lanes along n, d, h and w: those of least work that fit the compiled config."""
    batch, depths = max(1, gather.src.shape[0]), gather.cells[0]
    heights, widths = (
        math.ceil(cells / lane) for cells, lane in zip(gather.cells[1:], (config.cells_h, config.cells_w))
    )
    compute = thread_cycles(Counts.of(gather, config), config, costs("direct_tiled", device)) * config.threads / 32
    most_elements = config.loads * config.threads * 4 // config.stage_channels
    best, best_cost = _some_lanes(gather, config), math.inf
    for width in _extents(widths, config.lanes):
        for height in _extents(heights, config.lanes // width):
            for depth in _extents(depths, config.lanes // (width * height)):
                one = _elements(gather, config.cells, (1, depth, height, width))
                images = min(batch, config.lanes // (width * height * depth), max(1, most_elements // one))
                images = math.ceil(batch / math.ceil(batch / images))
                lanes = (images, depth, height, width)
                if not _fits(gather, config, lanes, device):
                    continue
                tiles = math.prod(tiles_of(batch, (depths, heights, widths), lanes))
                shared = _shared_bytes(gather, config, lanes) + 1024
                crowding = max(1.0, min(config.min_blocks, 4) * shared / device.shared_bytes_per_multiprocessor)
                # Loads and stores of short rows leave memory transactions half empty.
                row = width * config.cells_w
                load = one * images * gather.src_channels * 5 / 32 * (1 + 4 / row)
                cost = tiles * (compute * crowding * (1 + 3 / (row * gather.cell_axes[2].dst)) + load)
                if cost < best_cost:
                    best, best_cost = lanes, cost
    return best


def _extents(cells: int, most: int) -> list[int]:
    """Extents worth trying along one dimension: powers of two, and equal shares, also rounded up to pairs and quads."""
    least = min(most, max(cells, 1))
    shares = {math.ceil(cells / parts) for parts in range(1, 7)}
    powers = {1 << i for i in range(least.bit_length())}
    quads = {round_up(share, multiple) for share in shares for multiple in (2, 4)}
    return sorted(extent for extent in shares | powers | quads | {least} if 1 <= extent <= least)


def _found(
    problem: ConvTransposeProblem, gather: Gather, config: TiledConfig, counts: Counts, count: int, device: DeviceInfo
) -> float:
    """Predicted cycles to compute load addresses, once per block, and to load unaligned rows by elements."""
    terms = costs("direct_tiled", device)
    of_tile = problem.groups * config.dst_blocks(gather)
    blocks = count / _of_block(of_tile, count // of_tile, config, device)
    slots = blocks * terms.begin_load + (0.0 if gather.aligned_src else count * counts.stages * terms.odd_load)
    return slots * config.loads * config.threads / 128 / device.multiprocessors


def _of_block(work_tiles: int, tiles: int, config: TiledConfig, device: DeviceInfo) -> int:
    """Work tiles of a block: several if the machine stays full, since addresses are computed once."""
    return max(1, min(work_tiles, work_tiles * tiles // (8 * device.multiprocessors * config.min_blocks)))


def _work_tiles(problem: ConvTransposeProblem, gather: Gather, config: TiledConfig) -> int:
    """Work tiles of all tiles."""
    tiles = math.ceil(problem.batch * math.prod(gather.cells) / (config.lanes * math.prod(config.cells)))
    return tiles * problem.groups * config.dst_blocks(gather)


def legal_configs(gather: Gather, device: DeviceInfo) -> list[tuple[TiledConfig, Counts]]:
    """Configs with long rows; if there are none, also with short rows; if still none, with more loads."""
    ways = [(False, _LOADS), (True, _LOADS)]
    if gather.taps <= _TAPS_OF_MANY_LOADS:
        ways.append((True, _MAX_LOADS))
    return next(filter(None, (list(_within(gather, device, *way)) for way in ways)), [])


def _within(gather: Gather, device: DeviceInfo, short_rows: bool, most: int) -> Iterator[tuple[TiledConfig, Counts]]:
    """Every config of a layer that by estimate compiles without spills, and its `Counts`.

    ``short_rows``: also configs whose rows have few lanes, because the halo is wide. ``most``: loads of a thread.
    """
    tall, last = gather.axes[1] != Axis(1), gather.src.channels_last
    stages = [channels for channels in ((4, 8) if last else (1, 2, 4, 8)) if channels < 2 * gather.src_channels or last]
    src_slices = [slices for slices in (1, 2, 4) if slices <= gather.src_channels // 16 + 1]
    buffers = (2, 3) if _copies_asynchronously(gather, device) else (2,)
    blocks = list(itertools.product((64, 128, 256), (1, 2, 4), src_slices, stages, buffers))
    for dst, cells in _of_threads(gather, tall):
        vector = _dst_vector(gather, dst)
        elements = {lanes: [_elements(gather, cells, each) for each in _rows(lanes, tall)] for lanes in (64, 128, 256)}
        for lanes, of_dst, of_src, channels, depth in blocks:
            threads = lanes * of_dst * of_src
            if threads > 512 or channels % of_src or (of_dst - 1) * dst >= gather.dst_channels:
                continue
            row, rows = (_loads(count, channels, threads) for count in elements[lanes])
            loads = rows if short_rows else max(row, rows)
            if loads > most:
                continue
            config = TiledConfig(lanes, dst, *cells, of_dst, of_src, channels, loads, depth, 1, vector)
            counts = Counts.of(gather, config)
            if (min_blocks := _resident(gather, config, counts, device)) > 0:
                yield config._replace(min_blocks=min_blocks), counts


def _of_threads(gather: Gather, tall: bool) -> Iterator[tuple[int, tuple[int, int]]]:
    """Destination channels and cells of a thread whose products and accumulators are within limits."""
    per_thread = {size for size in (1, 2, 3, 4, 6, 8, 16, gather.dst_channels) if size <= min(gather.dst_channels, 16)}
    for dst, cells in itertools.product(
        sorted(per_thread), ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)) if tall else ((1, 1), (1, 2))
    ):
        of_tap = dst * math.prod(cells)
        few = gather.owned * of_tap <= _MAX_ACCUMULATORS and gather.phases * of_tap <= MAX_PHASES
        if few and gather.taps * of_tap <= _MAX_UNROLLED:
            yield dst, cells


def _resident(gather: Gather, config: TiledConfig, counts: Counts, device: DeviceInfo) -> int:
    """Resident blocks of a multiprocessor, for which the compiler limits registers; 0 if these would spill.

    If the estimate is too low, the compiler settles for fewer resident blocks, or rolls up loops. For double precision
    the estimate is too high, for channels last by less.
    """
    needed = round_up(registers(counts, config), 8)
    shared = _shared_bytes(gather, config, (1, 1, 1, config.lanes), counts) + 1024
    by_registers = REGISTERS // (needed * config.threads)
    blocks = min(by_registers, 1536 // config.threads, device.shared_bytes_per_multiprocessor // shared)
    double = counts.patch.words == 2 and blocks > 1 and (needed <= _MAX_OF_DOUBLES or not gather.dst.channels_last)
    needed += 40 if counts.patch.owned == _MAX_ACCUMULATORS else 16
    return blocks if needed <= min(255, REGISTERS // config.threads) or double else 0


def _copies_asynchronously(gather: Gather, device: DeviceInfo) -> bool:
    """Whether the source goes to shared memory unconverted, in its order, and the device has cp.async."""
    kept = gather.dtype in ("float32", "float64") and not gather.rounded
    as_it_is = kept and not gather.src.channels_last and gather.split == 1
    return as_it_is and device.capability >= 80


def _rows(lanes: int, tall: bool) -> tuple[Four, Four]:
    """Extents of lanes that are one row, and of those in short rows in a ``tall`` layer."""
    row = 1, 1, 1, lanes
    return row, (1, 1, lanes // _ROW_LANES, _ROW_LANES) if tall else row


def _aligned_rows(gather: Gather, config: TiledConfig) -> bool:
    """Whether a lane's run of elements along w starts at a multiple of its length, in every row of a new tensor."""
    run = config.cells_w * gather.cell_axes[2].dst
    return gather.dst.strides[4] == 1 and math.gcd(gather.dst.shape[4], gather.dst.apart(4)) % run == 0


def _dst_vector(gather: Gather, dst_per_thread: int) -> int:
    """Channels of one store to a channels-last destination."""
    if not gather.dst.channels_last:
        return 1
    most = 16 // DTYPE_BYTES[gather.dtype]
    return reduce(math.gcd, (most, dst_per_thread, gather.dst_channels, gather.dst.apart(1)))
