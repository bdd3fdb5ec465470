"""Layers with few channels in a group on tensor cores, ``kernels/grouped_gemm.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.jit.source import Constant, KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import FEW_CHANNELS, with_large_images
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step, main_step, plain_step
from polyphase.schedules.cells import forward_gather
from polyphase.schedules.cost import Sharing, slower_of
from polyphase.schedules.grouped_gemm.tiling import Tiling, product_of, tile_extents, tiling_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tensor_cores import counter_bytes
from polyphase.schedules.tiles import constants_of, layer_constants, least, out_blocks
from polyphase.schedules.window_gemm.stages import row_bytes

_MAX_IN_CHANNELS = 64  # most input channels of a group
_MAX_PRODUCTS = 320  # most entries × column tiles, which are straight-line code
_MAX_WEIGHT_BYTES = 96 << 10
_BARRIER_BYTES = 384  # bytes of the barriers and of the kernel's ``Note``s of tiles
_BUFFERS = 3  # stages of the pipeline
_OTHER_WARPS = ((1, 3), (2, 2))  # warps that load, warps that store; registers are allocated to four warps at a time
_MAX_PHASES = 64  # most elements of a cell
_COPY_THREADS = 256


class GroupedConfig(NamedTuple):
    """The compile-time shape of a kernel; ``grouped_gemm.cu`` says what the names mean."""

    warps: int
    pixel_tiles: int
    out_chunk: int
    stage_steps: int
    buffers: int
    load_warps: int
    store_warps: int
    min_blocks: int

    @property
    def all_warps(self) -> int:
        """Warps of a block."""
        return self.warps + self.load_warps + self.store_warps

    @property
    def columns(self) -> int:
        """Cells of a tile, at most."""
        return 8 * self.pixel_tiles * self.warps


class GroupedGemm(Schedule):
    """All phases of a tile as one product of few rows, written as whole rows."""

    name = "grouped_gemm"
    passes = (Pass.FORWARD,)
    on_tensor_cores = True
    kept = True
    compared = 1 << 30  # all configs

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if problem.channels_last:
            return "needs NCHW"
        if (channels := problem.in_channels_per_group) > _MAX_IN_CHANNELS:
            return f"{channels} input channels in a group are many (here at most {_MAX_IN_CHANNELS})"
        if (channels := problem.out_channels_per_group) not in FEW_CHANNELS:
            # `overlap_gemm` wastes no products on fewer channels, and more channels fill the rows of `implicit_gemm`.
            many = "few" if channels < FEW_CHANNELS.start else "many"
            allowed = f"{FEW_CHANNELS.start} to {FEW_CHANNELS.stop - 1}"
            return f"{channels} output channels in a group are {many} (here {allowed})"
        if (phases := math.prod(problem.stride)) > _MAX_PHASES:
            return f"{phases} elements of a cell are too many for straight-line code (at most {_MAX_PHASES})"
        if problem.taps > _MAX_PRODUCTS:
            return f"{problem.taps} taps are too many for straight-line code (at most {_MAX_PRODUCTS})"
        return None

    def epilogue_limits(self, problem: ConvTransposeProblem) -> str | None:
        if (reason := super().epilogue_limits(problem)) is not None:
            return reason
        if all(len(axis.taps_by_phase) == axis.stride for axis in problem.axes3[:2]):
            return None
        return "rows without taps are copies of one, and an epilogue may make them differ"

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return f"no tile fits a thread's registers and {device.shared_bytes_per_block} bytes of shared memory"

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> Iterator[GroupedConfig]:
        return legal_configs(at, device)

    def others(self, at: ConvTransposeProblem) -> list[ConvTransposeProblem]:
        """Wide images, with long rows."""
        wide = with_large_images(at)
        return [] if wide == at else [wide]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GroupedConfig
    ) -> Cost | None:
        tiling = _tiling(problem, layouts, config, device)
        return None if tiling is None else _estimate(problem, config, tiling, device)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GroupedConfig
    ) -> Program:
        tiling = _tiling(problem, layouts, config, device)
        assert tiling is not None
        gather = forward_gather(problem, layouts)
        blocks = out_blocks(problem, config.out_chunk)
        at_once = _at_once(problem, config, tiling, device)
        outputs = _outputs(problem, config, tiling, device)
        counters, weight_bytes = 0, math.prod(problem.weight_shape) * DTYPE_BYTES[problem.dtype]
        if _shares(problem, config, tiling, device):
            counters = counter_bytes(blocks)
        source = KernelSource(self.name, problem.dtype, True, _constants(problem, layouts, config, device))
        params = {
            "x": gather.src,
            "y": gather.dst,
            "window": tiling.window,
            "batch": problem.batch,
            "groups": problem.groups,
            "tile_extent": tiling.tile_extent,
            "tiles": tiling.tiles,
            "first": tiling.first,
            "skew": tiling.skew,
            "pitch": tiling.pitch,
            "shift": tiling.shift,
            "joined": tiling.joined,
            "outputs": outputs,
            "at_once": at_once,
            "counters": counters,
            "staged_bytes": tiling.staged_bytes,
            "bare_bytes": tiling.bare_bytes,
            "table_bytes": tiling.table_bytes,
            "stage_bytes": config.stage_steps * tiling.step_bytes,
        }
        packs = (_copy_weights(problem, counters),) if counters else ()
        shared_bytes = _shared_bytes(problem, config, tiling, outputs)
        main = main_step(source, at_once * blocks if tiling.total else 0, 32 * config.all_warps, shared_bytes, params)
        return assemble(problem, pass_, main, packs=packs, workspace_bytes=counters + weight_bytes if counters else 0)


def _constants(
    problem: ConvTransposeProblem, layouts: Layouts, config: GroupedConfig, device: DeviceInfo
) -> tuple[tuple[str, Constant], ...]:
    """The kernel's compile-time constants."""
    return (
        *layer_constants(problem, Pass.FORWARD, layouts.weight_channels_last),
        ("HAS_BIAS", problem.bias),
        *constants_of(config, "warps load_warps store_warps pixel_tiles out_chunk stage_steps buffers min_blocks"),
        ("FIRST_LOAD_WARP", config.warps),
        ("WGMMA", False),
        ("PARTS", product_of(problem, config.out_chunk).parts),
        ("BULK_STORES", device.has_tma),
    )


def _copy_weights(problem: ConvTransposeProblem, counters: int) -> Step:
    """The step that copies the weights, with ``counters`` bytes of counters before them."""
    elements = math.prod(problem.weight_shape)
    constants: tuple[tuple[str, Constant], ...] = (
        *layer_constants(problem, Pass.FORWARD, False),
        ("COUNTER_BYTES", counters),
        ("GROUPS", problem.groups),
        ("THREADS", _COPY_THREADS),
        ("MIN_BLOCKS", 1),
    )
    source = KernelSource("copy_weights", problem.dtype, False, constants, folder="steps")
    return plain_step(source, math.ceil(elements / _COPY_THREADS), _COPY_THREADS)


def _shared_bytes(problem: ConvTransposeProblem, config: GroupedConfig, tiling: Tiling, outputs: int) -> int:
    return _shared_bytes_beside(problem, config) + _tile_bytes(config, tiling, outputs)


def _shared_bytes_beside(problem: ConvTransposeProblem, config: GroupedConfig) -> int:
    """Shared memory of a block without its tiles."""
    return _BARRIER_BYTES + round_up(8 * config.columns, 128) + product_of(problem, config.out_chunk).weight_bytes


def _tile_bytes(config: GroupedConfig, tiling: Tiling, outputs: int) -> int:
    """Shared memory of a block's tiles, with room for the outputs of ``outputs`` tiles."""
    stages = config.buffers * config.stage_steps * tiling.step_bytes
    return tiling.bare_bytes + tiling.table_bytes + outputs * tiling.staged_bytes + stages


def _outputs(problem: ConvTransposeProblem, config: GroupedConfig, tiling: Tiling, device: DeviceInfo) -> int:
    """Tiles of staged outputs that fit, 1 or 2: with two, one is written to memory while the other is staged."""
    return 2 if _shared_bytes(problem, config, tiling, 2) <= device.shared_bytes_of(config.min_blocks) else 1


@lru_cache(maxsize=8192)
def _tiling(
    problem: ConvTransposeProblem, layouts: Layouts, config: GroupedConfig, device: DeviceInfo
) -> Tiling | None:
    """The tiling of least predicted time."""
    room = device.shared_bytes_of(config.min_blocks)
    tilings = _tilings(problem, layouts, config.out_chunk, config.columns, device)
    other = _shared_bytes_beside(problem, config)
    fitting = [each for each in tilings if other + _tile_bytes(config, each[0], 1) <= room]
    most = max((each.cells for each, _ in fitting), default=0)
    large = [each for each in fitting if 2 * each[0].cells >= most]
    work = _Work(problem, config, device)
    # Lower bounds: by bytes, and by products alone.
    bounds = (max(floor, work.seconds(tiling, multiplying_alone=True)) for tiling, floor in large)
    place = least(bounds, lambda place: max(large[place][1], work.seconds(large[place][0])))
    return None if place is None else large[place][0]


@lru_cache(maxsize=256)
def _tilings(
    problem: ConvTransposeProblem, layouts: Layouts, out_chunk: int, columns: int, device: DeviceInfo
) -> list[tuple[Tiling, float]]:
    """Tilings by tiles of at most ``columns`` cells, for all configs, and the seconds that their bytes take."""
    tilings = (tiling_of(problem, layouts, out_chunk, tile) for tile in tile_extents(problem, columns))
    return [(each, _floor(problem, out_chunk, each, device)) for each in tilings if each is not None]


_ROUNDING = 1 - 1e-9  # a rounded norm may be less than its largest part


class _Work:
    """The work of a config's blocks; what is the same for all tiles is counted once."""

    def __init__(self, problem: ConvTransposeProblem, config: GroupedConfig, device: DeviceInfo) -> None:
        self._terms = terms = costs("grouped_gemm", device)
        size, product, tiles = DTYPE_BYTES[problem.dtype], product_of(problem, config.out_chunk), config.pixel_tiles
        parts, steps = product.parts, product.steps
        taken = product.pixels * tiles * ((10 if parts > 1 else 4) if size == 4 else 6)
        multiplied = product.entries * (2 * parts + tiles * (7 if parts > 1 else 1))
        self._slots = steps * (taken + multiplied) + product.row_blocks * tiles * 20 + 100
        self._waits = steps * product.pixels * terms.pixel
        self._stages = math.ceil(steps / config.stage_steps)
        self._channels, self._size = config.stage_steps * 32 // size, size
        depth, height, width = problem.axes3
        self._rows = depth.stride * height.stride * config.out_chunk  # rows of outputs of a row of cells
        self._cell_bytes = width.stride * size
        self._blocks = out_blocks(problem, config.out_chunk)
        self._config, self._device = config, device

    def seconds(self, tiling: Tiling, multiplying_alone: bool = False) -> float:
        """Predicted seconds of all instructions, or of the products alone."""
        config, multiprocessors, terms = self._config, self._device.multiprocessors, self._terms
        at_once = multiprocessors * config.min_blocks
        resident = max(1, min(config.min_blocks, math.ceil(tiling.total * self._blocks / multiprocessors)))
        waves = math.ceil(tiling.total / max(1, at_once // self._blocks)) * max(1.0, self._blocks / at_once)
        warps = min(config.warps, math.ceil(tiling.cells / (8 * config.pixel_tiles)))
        tile = resident * warps * self._slots * terms.slot + self._waits
        if not multiplying_alone:
            parts = tile, self._load_cycles(tiling), self._store_cycles(tiling, resident)
            tile = sum(part**terms.together for part in parts) ** (1 / terms.together)
        return (waves * tile + terms.launch) / self._device.clock_hz * (_ROUNDING if multiplying_alone else 1)

    def _load_cycles(self, tiling: Tiling) -> float:
        """Predicted cycles to load a tile's windows."""
        channels = self._channels * (4 if tiling.window.piece * self._size < 4 else 1)
        finds = math.ceil(tiling.window.places / (32 * self._config.load_warps))
        terms = self._terms
        return self._stages * (finds * (terms.find + channels * terms.copy) + terms.stage)

    def _store_cycles(self, tiling: Tiling, resident: int) -> float:
        """Predicted cycles to store a tile's outputs, in each of ``resident`` blocks."""
        images, slabs, lines, columns = tiling.tile_extent
        rows = images * slabs * lines * self._rows
        written = rows / (tiling.joined * self._config.store_warps)
        whole = tiling.whole_sectors or tiling.joined > 1
        terms = self._terms
        row = terms.row_whole if whole else terms.row
        return written * row + resident * rows * (columns * self._cell_bytes) * terms.byte + terms.outputs


def _floor(problem: ConvTransposeProblem, out_chunk: int, tiling: Tiling, device: DeviceInfo) -> float:
    """Predicted seconds that bytes take."""
    size, terms = DTYPE_BYTES[problem.dtype], costs("grouped_gemm", device)
    channels = product_of(problem, out_chunk).steps * 32 // size
    halo = tiling.total * out_blocks(problem, out_chunk) * channels * row_bytes(tiling.window, size)
    moved = problem.bytes + max(0.0, halo - size * math.prod(problem.input_shape)) * terms.halo
    return moved / (device.copy_bytes_per_second * terms.bandwidth)


def _estimate(
    problem: ConvTransposeProblem, config: GroupedConfig, tiling: Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    work = _Work(problem, config, device).seconds(tiling)
    return slower_of(work, _floor(problem, config.out_chunk, tiling, device))


def _shares(problem: ConvTransposeProblem, config: GroupedConfig, tiling: Tiling, device: DeviceInfo) -> bool:
    """Whether blocks share tiles: otherwise blocks that get less bandwidth fall behind."""
    waves = tiling.total / _at_once(problem, config, tiling, device)
    return _sharing(device).pays(waves, lambda: _estimate(problem, config, tiling, device), problem.bytes, device)


def _sharing(device: DeviceInfo) -> Sharing:
    terms = costs("grouped_gemm", device)
    return Sharing(terms.sharing_rounds, terms.sharing_cycles, terms.sharing_most)


def _at_once(problem: ConvTransposeProblem, config: GroupedConfig, tiling: Tiling, device: DeviceInfo) -> int:
    """Tiles computed at once: one for each block with the same output channels."""
    blocks = device.multiprocessors * config.min_blocks // out_blocks(problem, config.out_chunk)
    return max(1, min(tiling.total, blocks))


def legal_configs(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[GroupedConfig]:
    """Configs whose registers and shared memory suffice for ``min_blocks`` blocks and any image."""
    out = problem.out_channels_per_group
    chunks = sorted({min(out, chunk) for chunk in (32, 16, 8, 4)}, reverse=True)
    shapes = itertools.product(chunks, (8, 4), (8, 4, 2, 1), (4, 2, 1), _OTHER_WARPS, (1, 2))
    for chunk, warps, tiles, stage_steps, (load, store), min_blocks in shapes:
        product = product_of(problem, chunk)
        if warps * min_blocks < 8 or stage_steps > product.steps:
            continue
        if product.entries * tiles > _MAX_PRODUCTS or product.weight_bytes > _MAX_WEIGHT_BYTES:
            continue
        registers = device.registers_of(32 * (warps + load + store) * min_blocks)
        # Sums, also of an operation in flight; an operation's operands; and registers to stage outputs.
        sums = 4 * tiles * (product.row_blocks + (1 if product.parts > 1 else 0))
        if sums + 4 * tiles + 4 * product.parts + 12 * product.row_blocks + 32 > registers:
            continue
        config = GroupedConfig(warps, tiles, chunk, stage_steps, _BUFFERS, load, store, min_blocks)
        cell = tiling_of(problem, Layouts.dense(problem), chunk, (1, 1, 1, 2))
        if cell is not None and _shared_bytes(problem, config, cell, 1) <= device.shared_bytes_of(config.min_blocks):
            yield config
