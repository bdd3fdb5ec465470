"""Layers with few output channels on tensor cores, ``kernels/overlap_gemm.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import is_tiny, typical
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import MAX_PHASES, Gather, forward_gather
from polyphase.schedules.cost import slower_of, waves_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tensor_cores import parts_of, steps_of
from polyphase.schedules.tiles import Four, constants_of, extents_along, layer_constants, out_blocks, tiles_of
from polyphase.schedules.window_gemm.stages import row_piece, widest_piece

_SHARES, _SIZES = (*range(1, 9), *(1 << i for i in range(4, 16))), (4, 8, 12, 16, 24, 32, 48, 64)  # of tiles
_TILES = 24  # tilings compared for a config
# Batch and sides of images in one, two and three dimensions, besides those of `standard`, by whether images are tiny.
_OTHER_SIZES = {True: ((128, (4, 2, 1)),), False: ((128, (1024, 32, 16)), (8, (16384, 256, 64)))}
_MAX_COLUMNS = 128
_MAX_OUT_CHANNELS = 16  # most output channels of a group: more fill the rows of `implicit_gemm`


class OverlapConfig(NamedTuple):
    """The compile-time shape of a kernel; ``overlap_gemm.cu`` says what the names mean."""

    warps: int
    row_tiles: int
    out_chunk: int
    steps_held: int
    ahead: int
    pitch: int
    wgmma: bool
    min_blocks: int

    @property
    def rows(self) -> int:
        """Most pixels of a band."""
        return 16 * self.row_tiles * self.warps

    @property
    def unit(self) -> int:
        """Neighbouring pixels that a thread loads together."""
        return 4 if self.row_tiles % 2 == 0 else 2


@dataclass(frozen=True)
class _Tiling:
    """The tiles into which a config cuts the cells; ``first``: the window's first pixel, from the tile's first cell.

    The window is multiplied in bands of ``band`` rows; shared memory keeps the product of ``ring`` rows.
    """

    tile_extent: Four
    tiles: Four
    window: Four
    first: Four
    band: int
    ring: int
    whole: bool

    @cached_property
    def total(self) -> int:
        return math.prod(self.tiles)

    @property
    def bands(self) -> int:
        return math.ceil(self.window[2] / self.band)

    @property
    def row(self) -> int:
        """Pixels of a row of the window."""
        images, slabs, _, columns = self.window
        return images * slabs * columns


class OverlapGemm(Schedule):
    """One product of all pixels with all taps, whose columns are then added up where outputs overlap."""

    name = "overlap_gemm"
    passes = (Pass.FORWARD,)
    on_tensor_cores = True
    kept = True
    compared = 24

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if problem.taps > _MAX_COLUMNS:
            return f"{problem.taps} taps are too many columns (at most {_MAX_COLUMNS})"
        if problem.out_channels_per_group > _MAX_OUT_CHANNELS:
            return f"{problem.out_channels_per_group} output channels are many (here at most {_MAX_OUT_CHANNELS})"
        if (phases := math.prod(problem.stride)) > MAX_PHASES:
            return f"{phases} elements of a cell are too many for straight-line code (at most {MAX_PHASES})"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return f"no tile fits a thread's registers and {device.shared_bytes_per_block} bytes of shared memory"

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> Iterator[OverlapConfig]:
        return legal_configs(at, device)

    def others(self, at: ConvTransposeProblem) -> list[ConvTransposeProblem]:
        return [replace(typical(at, sides), batch=batch) for batch, sides in _OTHER_SIZES[is_tiny(at)]]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: OverlapConfig
    ) -> Cost | None:
        tiling = _tiling(problem, layouts, config, device)
        return None if tiling is None else _Work(problem, config, device).seconds(tiling)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: OverlapConfig
    ) -> Program:
        tiling = _tiling(problem, layouts, config, device)
        assert tiling is not None
        gather = forward_gather(problem, layouts)
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_, layouts.weight_channels_last),
            ("HAS_BIAS", problem.bias),
            ("X_CHANNELS_LAST", gather.src.channels_last),
            *constants_of(config, "warps row_tiles out_chunk steps_held pitch wgmma min_blocks"),
            ("ALONG_CHANNELS", _along_channels(problem, config.out_chunk)),
            ("COLUMN_TILES", _column_tiles(problem, config.out_chunk)),
            ("PREFETCH", config.ahead),
            ("PARTS", parts_of(problem)),
        )
        columns = 8 * _column_tiles(problem, config.out_chunk)
        forms = (WgmmaForm(columns, problem.dtype, a_in_registers=True),) if config.wgmma else ()
        source = KernelSource(self.name, problem.dtype, True, constants, forms)
        run = problem.axes3[2].stride
        params = {
            "x": gather.src,
            "y": gather.dst,
            "batch": problem.batch,
            "tile_extent": tiling.tile_extent,
            "tiles": tiling.tiles,
            "extent": tiling.window,
            "first": tiling.first,
            "band": tiling.band,
            "ring": tiling.ring,
            "whole": tiling.whole,
            "vectors": run in (2, 4, 8) and row_piece(gather.dst, 16 // run, True, 0) == run,
        }
        blocks = tiling.total * out_blocks(problem, config.out_chunk)
        main = main_step(source, blocks, 32 * config.warps, _shared_bytes(problem, config), params)
        return assemble(problem, pass_, main)


def _along_channels(problem: ConvTransposeProblem, out_chunk: int) -> bool:
    """Whether neighbouring threads store neighbouring channels: if channels are contiguous and not few."""
    return problem.channels_last and out_chunk > 4


def _column_tiles(problem: ConvTransposeProblem, out_chunk: int) -> int:
    return math.ceil(out_chunk * problem.taps / 8)


def _step_bytes(problem: ConvTransposeProblem, out_chunk: int) -> int:
    """Bytes of the weights of one operation."""
    return 256 * parts_of(problem) * _column_tiles(problem, out_chunk)


def _shared_bytes(problem: ConvTransposeProblem, config: OverlapConfig) -> int:
    held = min(config.steps_held, steps_of(problem))
    return held * _step_bytes(problem, config.out_chunk) + 4 * config.out_chunk * problem.taps * config.pitch


@lru_cache(maxsize=8192)
def _tiling(
    problem: ConvTransposeProblem, layouts: Layouts, config: OverlapConfig, device: DeviceInfo
) -> _Tiling | None:
    """The tiling of least predicted time among the first that fit."""
    gather, work = forward_gather(problem, layouts), _Work(problem, config, device)
    if gather.src.shape[4] * gather.src.strides[4] >= 2**31:  # the kernel counts elements of a row in 32 bits
        return None
    extents = _tile_extents(problem, config.rows, config.unit, device)
    fitting = filter(None, (_tiles(gather, layouts.aligned, config, tile) for tile in extents))
    return min(itertools.islice(fitting, _TILES), key=lambda each: work.seconds(each)[0], default=None)


@lru_cache(maxsize=4096)
def _window(gather: Gather, dimension: int, cells: int) -> tuple[int, int]:
    """The first pixel of a window of ``cells`` along a dimension, relative to the first cell, and its pixel count.

    The window of all cells is the image, unless they read less.
    """
    along, image = gather.cell_axes[dimension], gather.src.shape[2 + dimension]
    extent = along.window(cells)
    whole = cells >= gather.cells[dimension] and image <= extent
    return (0, image) if whole else (along.first_offset, extent)


@lru_cache(maxsize=256)
def _tile_extents(problem: ConvTransposeProblem, room: int, unit: int, device: DeviceInfo) -> list[Four]:
    """Extents of tiles along n, d, h and w, in rising order of the rows of all products.

    Few tiles are counted in whole waves of the multiprocessors. A band has at most ``room`` pixels, and whole units of
    a row. A tile of one cell is among them.
    """
    gather = forward_gather(problem, Layouts.dense(problem))
    cells = gather.cells
    found: dict[Four, float] = {(1, 1, 1, 1): math.inf}
    for w in extents_along(cells[2], room, _SHARES, _SIZES):
        for d in extents_along(cells[0], 8, _SHARES, _SIZES):
            line = round_up(_window(gather, 2, w)[1], unit) * _window(gather, 0, d)[1]
            for h in extents_along(cells[1], cells[1], _SHARES, _SIZES):
                rows = _window(gather, 1, h)[1]
                images = max(1, min(problem.batch, room // max(1, line * rows)))
                bands = math.ceil(images * line * rows / room)
                tile = images, d, h, w
                tiles = math.prod(tiles_of(problem.batch, cells, tile))
                if tiles < 4 * device.multiprocessors:
                    tiles = round_up(tiles, device.multiprocessors)
                found[tile] = tiles * (bands * room + 64)
    return sorted(found, key=found.__getitem__)


def _tiles(gather: Gather, aligned: bool, config: OverlapConfig, tile: Four) -> _Tiling | None:
    """The tiling by tiles with extents ``tile``, or None if they do not fit.

    A load reads a whole unit if alignment allows, unless the window only fits pixel by pixel.
    """
    src, size = gather.src, DTYPE_BYTES[gather.dtype]
    if src.channels_last:  # a unit is 8 bytes of neighbouring channels
        batch, _, *others = src.strides
        whole = aligned and widest_piece(size, gather.src_channels, batch, *others) * size >= 8
        return _bands(gather, config, tile, whole, 0)
    step = 0 if tile[3] >= gather.cells[2] else tile[3]
    if row_piece(src, size, aligned, step) >= config.unit:
        skew = _window(gather, 2, tile[3])[0] % config.unit
        if (found := _bands(gather, config, tile, True, skew)) is not None:
            return found
    return _bands(gather, config, tile, False, 0)


def _bands(gather: Gather, config: OverlapConfig, tile: Four, whole: bool, skew: int) -> _Tiling | None:
    """The tiling that reads ``whole`` units or single pixels; rows of the window begin ``skew`` pixels earlier."""
    images = tile[0]
    (depth, slabs), (height, rows), (width, columns) = (_window(gather, i, tile[1 + i]) for i in range(3))
    window = (images, slabs, rows, round_up(columns + skew, config.unit))
    row = images * slabs * window[3]
    band = min(rows, config.rows // row) if row else rows
    shared = gather.cell_axes[1].window(1) - 1  # rows of the window that a band shares with the next
    ring = rows if band == rows else band + shared
    if (band == 0 and rows > 0) or row * ring > config.pitch - 4:
        return None
    tiles = tiles_of(gather.src.shape[0], gather.cells, tile)
    return _Tiling(tile, tiles, window, (0, depth, height, width - skew), max(1, band), max(1, ring), whole)


class _Work:
    """The work of a config's blocks; what is the same for all tiles is counted once."""

    def __init__(self, problem: ConvTransposeProblem, config: OverlapConfig, device: DeviceInfo) -> None:
        self._terms = terms = costs("overlap_gemm", device)
        parts, rows = parts_of(problem), config.row_tiles
        columns = _column_tiles(problem, config.out_chunk)
        self._problem, self._config, self._device = problem, config, device
        self._steps, self._columns = steps_of(problem), columns
        self._blocks = out_blocks(problem, config.out_chunk)
        self._products = rows * columns * (3 if parts == 2 else 1)
        splits = 16 * parts * rows if problem.dtype == "float32" else 4 * rows
        slots = (4 * rows * columns if parts == 2 else 0) + splits
        beside = 0 if config.wgmma else self._products + 2 * columns * parts
        self._slots = {
            whole: slots + 5 * (8 * rows // config.unit if whole else 16 * rows) + beside for whole in (False, True)
        }
        places = 15 * config.out_chunk if _along_channels(problem, config.out_chunk) else 60
        self._read = config.out_chunk * (problem.taps + 2 * math.prod(problem.stride)) + places  # per cell
        self._factor = (terms.one_part if parts == 1 else 1.0) * (terms.shared if config.min_blocks > 1 else 1.0)
        self._size, self._channels = DTYPE_BYTES[problem.dtype], problem.groups * problem.in_channels_per_group
        self._bytes, self._input_bytes = problem.bytes, self._size * math.prod(problem.input_shape)

    def seconds(self, tiling: _Tiling) -> tuple[float, str]:
        """Predicted time, and what bounds it."""
        device = self._device
        resident, waves = waves_of(tiling.total * self._blocks, self._config.min_blocks, device)
        work = waves * self._tile_cycles(tiling, resident) / device.clock_hz
        work *= self._factor
        images, slabs, rows, width = tiling.window
        halo = images * slabs * rows * round_up(width * self._size, 32) * tiling.total * self._channels
        return slower_of(work, (self._bytes + max(0, halo - self._input_bytes)) / device.copy_bytes_per_second)

    def _step_cycles(self, tiling: _Tiling) -> float:
        """Predicted cycles of a multiprocessor for one operation of the warps of a block that own pixels."""
        config, terms = self._config, self._terms
        together = 64 if config.wgmma else 16
        warps = together // 16 * math.ceil(tiling.row * tiling.band / (together * config.row_tiles))
        operation = terms.wgmma if config.wgmma else terms.mma
        return warps * max(self._products * operation, self._slots[tiling.whole] * terms.slot)

    def _step_bytes(self, tiling: _Tiling) -> int:
        """Bytes of the sectors that hold the pixels of one operation."""
        if self._problem.channels_last:
            return 32 * tiling.row * tiling.band
        images, slabs, _, width = tiling.window
        return 32 // self._size * images * slabs * tiling.band * round_up(width * self._size, 32)

    def _tile_cycles(self, tiling: _Tiling, resident: int) -> float:
        """Predicted cycles of a wave of ``resident`` blocks per multiprocessor."""
        config, columns, steps, bands = self._config, self._columns, self._steps, tiling.bands
        terms = self._terms
        moved = resident * self._step_bytes(tiling) * terms.moved
        step = max(resident * self._step_cycles(tiling), moved, terms.latency / config.ahead)
        loads = 1 if config.steps_held >= steps else bands * math.ceil(steps / config.steps_held)
        weights = loads * (terms.load + resident * min(steps, config.steps_held) * columns * terms.weights)
        written = bands * config.rows * 8 * columns / config.unit
        read = math.prod(tiling.tile_extent) * self._read
        ends = bands * terms.end + resident * (written + read) / 32 * terms.word
        return terms.block + weights + bands * steps * step + ends


def legal_configs(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[OverlapConfig]:
    """Configs worth trying: their registers and shared memory suffice for ``min_blocks`` blocks and any image."""
    out, taps = problem.out_channels_per_group, problem.taps
    steps, parts = steps_of(problem), parts_of(problem)
    gather = forward_gather(problem, Layouts.dense(problem))
    chunks = {math.ceil(out / parts) for parts in range(1, out + 1) if math.ceil(out / parts) * taps <= _MAX_COLUMNS}
    instructions = (True, False) if device.has_wgmma else (False,)
    shapes = itertools.product(
        sorted(chunks, reverse=True)[:2], instructions, (16, 12, 8, 4), (1, 2, 4), (4, 2), (1, 2, 3, 4)
    )
    for chunk, wgmma, warps, row_tiles, ahead, min_blocks in shapes:
        if row_tiles > (2 if parts == 2 else 8 // ahead) or ahead > steps > 1 or warps * min_blocks < 8:
            continue
        shared, step_bytes = device.shared_bytes_of(min_blocks), _step_bytes(problem, chunk)
        held = round_up(steps, ahead)
        if steps * step_bytes > shared // 2:
            held = shared // 3 // step_bytes // ahead * ahead
        pitch = (shared - min(held, steps) * step_bytes) // (4 * chunk * taps)
        pitch = (pitch - 4) // 32 * 32 + 4
        config = OverlapConfig(warps, row_tiles, chunk, held, ahead, pitch, wgmma, min_blocks)
        few_registers = _registers(problem, config) <= device.registers_of(32 * warps * min_blocks)
        if few_registers and held > 0 and _tiles(gather, True, config, (1, 1, 1, 1)) is not None:
            yield config


def _registers(problem: ConvTransposeProblem, config: OverlapConfig) -> int:
    """Registers of a thread: sums, also of an operation in flight; pixels in flight and in use; and the rest.

    The rest is larger if weights are loaded in several turns, if threads run along channels, or if the last operations
    are fewer than the prefetched ones.
    """
    steps, parts, tiles, ahead = steps_of(problem), parts_of(problem), config.row_tiles, config.ahead
    sums = tiles * _column_tiles(problem, config.out_chunk) * (8 if parts == 2 else 5)
    words = 4 * tiles * ((1 if config.wgmma or parts == 1 else 2) * ahead + 2)
    places = (tiles - 1) * (20 if problem.channels_last else 8) + (4 * tiles if steps % ahead else 0)
    in_turns = config.steps_held < steps or _along_channels(problem, config.out_chunk)
    if config.wgmma and parts == 2 and in_turns:
        places = max(places, 12)
    return sums + words + (52 if config.wgmma else 90) + places
