"""Layers with few output channels on tensor cores, ``kernels/scatter_gemm.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import is_tiny, standard, typical
from polyphase.program.params import params_of
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step
from polyphase.schedules.cells import MAX_PHASES, Gather, Side, forward_gather
from polyphase.schedules.cost import rounds_of, slower_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tensor_cores import lacks_cores, parts_of, steps_of
from polyphase.schedules.tiles import layer_constants, out_blocks, tiles_of
from polyphase.schedules.window_gemm.stages import row_piece, widest_piece

_TILES = 24  # that are compared for a variant
# Batch and sides of images in one, two and three dimensions, besides those of `standard`, by whether images are tiny.
_OTHER_SIZES = {True: ((128, (4, 2, 1)),), False: ((128, (1024, 32, 16)), (8, (16384, 256, 64)))}
_MAX_COLUMNS = 128
_MAX_OUT_CHANNELS = 16  # of a group; where there are more, `implicit_gemm` fills its rows with them


class ScatterVariant(NamedTuple):
    """The compile-time shape of a kernel; ``scatter_gemm.cu`` says what the names mean."""

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
        """Pixels of a band that a block has room for."""
        return 16 * self.row_tiles * self.warps

    @property
    def unit(self) -> int:
        """Neighbouring pixels that a thread loads together."""
        return 4 if self.row_tiles % 2 == 0 else 2


@dataclass(frozen=True)
class _Tiling:
    """How a variant cuts the cells into tiles; ``first`` is the window's first pixel, from the tile's first cell.

    The window comes in bands of ``band`` rows, and the product of ``ring`` rows is kept.
    """

    lanes: tuple[int, int, int, int]
    tiles: tuple[int, int, int, int]
    window: tuple[int, int, int, int]
    first: tuple[int, int, int, int]
    band: int
    ring: int
    whole: bool

    @property
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


class ScatterGemm(Schedule):
    """One product of all pixels with all taps, whose columns are then added up where outputs overlap."""

    name = "scatter_gemm"
    kept = True
    compared = 24

    def supports(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if pass_ is not Pass.FORWARD:
            return "computes the forward pass only"
        if (reason := lacks_cores(problem, device)) is not None:
            return reason
        if problem.taps > _MAX_COLUMNS:
            return f"{problem.taps} taps are too many columns (at most {_MAX_COLUMNS})"
        if problem.out_channels_per_group > _MAX_OUT_CHANNELS:
            return f"{problem.out_channels_per_group} output channels are many (here at most {_MAX_OUT_CHANNELS})"
        if (phases := math.prod(problem.stride)) > MAX_PHASES:
            return f"{phases} elements of a cell are too many for straight-line code (at most {MAX_PHASES})"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return f"no tile fits a thread's registers and {device.shared_bytes_per_block} bytes of shared memory"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem:
        return standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> Iterator[ScatterVariant]:
        return _variants(at, device)

    def seconds(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, config: ScatterVariant) -> float:
        cost = self.cost(at, pass_, device, Layouts.dense(at), config)
        return math.inf if cost is None else cost[0]

    def others(self, at: ConvTransposeProblem) -> list[ConvTransposeProblem]:
        return [replace(typical(at, sides), batch=batch) for batch, sides in _OTHER_SIZES[is_tiny(at)]]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: ScatterVariant
    ) -> Cost | None:
        tiling = _tiling(problem, layouts, config, device)
        return None if tiling is None else _estimate(problem, config, tiling, device)

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: ScatterVariant
    ) -> Program:
        tiling = _tiling(problem, layouts, variant, device)
        assert tiling is not None
        gather = forward_gather(problem, layouts)
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_, layouts.weight_channels_last),
            ("HAS_BIAS", problem.bias),
            ("X_CHANNELS_LAST", gather.src.channels_last),
            ("WARPS", variant.warps),
            ("ROW_TILES", variant.row_tiles),
            ("OUT_CHUNK", variant.out_chunk),
            ("ALONG_CHANNELS", _along_channels(problem, variant.out_chunk)),
            ("COLUMN_TILES", _column_tiles(problem, variant.out_chunk)),
            ("STEPS_HELD", variant.steps_held),
            ("AHEAD", variant.ahead),
            ("PITCH", variant.pitch),
            ("WGMMA", variant.wgmma),
            ("PARTS", parts_of(problem)),
            ("MIN_BLOCKS", variant.min_blocks),
        )
        columns = 8 * _column_tiles(problem, variant.out_chunk)
        forms = (WgmmaForm(columns, problem.dtype, a_in_registers=True),) if variant.wgmma else ()
        source = KernelSource(self.name, problem.dtype, True, constants, forms)
        run = problem.axes3[2].stride
        geometry = params_of(source).pack(
            x=gather.src,
            y=gather.dst,
            batch=problem.batch,
            lanes=tiling.lanes,
            tiles=tiling.tiles,
            extent=tiling.window,
            first=tiling.first,
            band=tiling.band,
            ring=tiling.ring,
            whole=tiling.whole,
            vectors=run in (2, 4, 8) and row_piece(gather.dst, 16 // run, True, 0) == run,
        )
        main = Step(
            source=source,
            grid=(tiling.total * out_blocks(problem, variant.out_chunk), 1, 1),
            block=32 * variant.warps,
            shared_bytes=_shared_bytes(problem, variant),
            geometry=geometry,
        )
        return assemble(problem, pass_, main)


def _along_channels(problem: ConvTransposeProblem, out_chunk: int) -> bool:
    """Whether neighbouring threads store neighbouring channels: where those are neighbours in memory and not few."""
    return problem.channels_last and out_chunk > 4


def _column_tiles(problem: ConvTransposeProblem, out_chunk: int) -> int:
    return math.ceil(out_chunk * problem.taps / 8)


def _step_bytes(problem: ConvTransposeProblem, out_chunk: int) -> int:
    """Of the weights of one operation."""
    return 256 * parts_of(problem) * _column_tiles(problem, out_chunk)


def _shared_bytes(problem: ConvTransposeProblem, variant: ScatterVariant) -> int:
    held = min(variant.steps_held, steps_of(problem))
    return held * _step_bytes(problem, variant.out_chunk) + 4 * variant.out_chunk * problem.taps * variant.pitch


@lru_cache(maxsize=8192)
def _tiling(
    problem: ConvTransposeProblem, layouts: Layouts, variant: ScatterVariant, device: DeviceInfo
) -> _Tiling | None:
    """The tiles of least time."""
    tilings = (
        _tiles(problem, layouts, variant, lanes) for lanes in _lanes(problem, variant.rows, variant.unit, device)
    )
    fitting = itertools.islice((each for each in tilings if each is not None), _TILES)
    return min(fitting, key=lambda each: _estimate(problem, variant, each, device)[0], default=None)


def _window(gather: Gather, dimension: int, cells: int) -> tuple[int, int]:
    """Where the window of so many cells along a dimension begins, counted from the first, and its pixels.

    Of all cells it is the image, unless they read less.
    """
    along, image = gather.cell_axes[dimension], gather.src.shape[2 + dimension]
    extent = along.window(cells)
    whole = cells >= gather.cells[dimension] and image <= extent
    return (0, image) if whole else (along.first_offset, extent)


@lru_cache(maxsize=256)
def _lanes(problem: ConvTransposeProblem, room: int, unit: int, device: DeviceInfo) -> list[tuple[int, int, int, int]]:
    """Extents of tiles along n, d, h and w, those first that come to the fewest rows of products in all.

    Few tiles are counted in whole rounds of the multiprocessors. A band has ``room`` for so many pixels, and whole
    units of a row. A tile of one cell is among them.
    """
    gather = forward_gather(problem, Layouts.dense(problem))
    cells = gather.cells
    found: dict[tuple[int, int, int, int], float] = {(1, 1, 1, 1): math.inf}
    for w in _extents(cells[2], room):
        for d in _extents(cells[0], 8):
            line = round_up(_window(gather, 2, w)[1], unit) * _window(gather, 0, d)[1]
            for h in _extents(cells[1], cells[1]):
                rows = _window(gather, 1, h)[1]
                images = max(1, min(problem.batch, room // max(1, line * rows)))
                bands = math.ceil(images * line * rows / room)
                lanes = images, d, h, w
                tiles = math.prod(tiles_of(problem.batch, cells, lanes))
                if tiles < 4 * device.multiprocessors:
                    tiles = round_up(tiles, device.multiprocessors)
                found[lanes] = tiles * (bands * room + 64)
    return sorted(found, key=found.__getitem__)


def _extents(cells: int, most: int) -> list[int]:
    """Extents worth trying along one dimension: even shares of it, and multiples of what is moved at once."""
    shares = {math.ceil(cells / parts) for parts in (*range(1, 9), *(1 << i for i in range(4, 16)))}
    return sorted(extent for extent in shares | {4, 8, 12, 16, 24, 32, 48, 64} if 1 <= extent <= min(cells, most))


def _tiles(
    problem: ConvTransposeProblem, layouts: Layouts, variant: ScatterVariant, lanes: tuple[int, int, int, int]
) -> _Tiling | None:
    """The tiling by tiles of so many cells along n, d, h and w, or None where those do not fit."""
    size = DTYPE_BYTES[problem.dtype]
    gather = forward_gather(problem, layouts)
    (depth, slabs), (height, rows), (width, columns) = (_window(gather, i, lanes[1 + i]) for i in range(3))
    tiles = tiles_of(problem.batch, gather.cells, lanes)
    *_, width_stride = gather.src.strides
    if gather.src.shape[4] * width_stride >= 2**31:
        return None  # the kernel counts elements of a row in 32 bits

    def windows(whole: bool, skew: int) -> _Tiling | None:
        window = (lanes[0], slabs, rows, round_up(columns + skew, variant.unit))
        row = lanes[0] * slabs * window[3]
        band = min(rows, variant.rows // row) if row else rows
        ring = rows if band == rows else band + gather.cell_axes[1].window(1) - 1
        if (band == 0 and rows > 0) or row * ring > variant.pitch - 4:
            return None
        first, (n, d, h, w) = (0, depth, height, width - skew), tiles
        return _Tiling(lanes, (n, d, h, w), window, first, max(1, band), max(1, ring), whole)

    if gather.src.channels_last:
        at_once = _reads_channels_at_once(gather.src, problem.in_channels_per_group, size, layouts.aligned)
        return windows(at_once, 0)
    step = 0 if lanes[3] >= gather.cells[2] else lanes[3]
    whole = row_piece(gather.src, size, layouts.aligned, step) >= variant.unit
    return windows(whole, width % variant.unit if whole else 0) or windows(False, 0)


def _reads_channels_at_once(side: Side, channels: int, size: int, aligned: bool) -> bool:
    """Whether 8 bytes of neighbouring channels can be read at once anywhere."""
    batch, _, *others = side.strides
    return aligned and widest_piece(size, channels, batch, *others) * size >= 8


def _step_cycles(problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for one operation of the warps of a block that own pixels."""
    parts, columns, rows = parts_of(problem), _column_tiles(problem, variant.out_chunk), variant.row_tiles
    together = 64 if variant.wgmma else 16
    warps = together // 16 * math.ceil(tiling.row * tiling.band / (together * rows))
    products = rows * columns * (3 if parts == 2 else 1)
    splits = 16 * parts * rows if problem.dtype == "float32" else 4 * rows
    loads = 8 * rows // variant.unit if tiling.whole else 16 * rows
    slots = (4 * rows * columns if parts == 2 else 0) + splits + 5 * loads
    if not variant.wgmma:
        slots += products + 2 * columns * parts
    return warps * max(products * (terms.wgmma if variant.wgmma else terms.mma), slots * terms.slot)


def _tile_cycles(
    problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling, resident: int, terms: Costs
) -> float:
    """Predicted cycles for a round of so many resident blocks."""
    columns, steps = _column_tiles(problem, variant.out_chunk), steps_of(problem)
    step = max(resident * _step_cycles(problem, variant, tiling, terms), terms.latency / variant.ahead)
    loads = 1 if variant.steps_held >= steps else tiling.bands * math.ceil(steps / variant.steps_held)
    weights = loads * (terms.load + resident * min(steps, variant.steps_held) * columns * terms.weights)
    written = tiling.bands * variant.rows * 8 * columns / variant.unit
    places = 15 * variant.out_chunk if _along_channels(problem, variant.out_chunk) else 60
    read = math.prod(tiling.lanes) * (variant.out_chunk * (problem.taps + 2 * math.prod(problem.stride)) + places)
    ends = tiling.bands * terms.end + resident * (written + read) / 32 * terms.word
    return terms.block + weights + tiling.bands * steps * step + ends


def _estimate(
    problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("overlap_gemm", device)
    resident, rounds = rounds_of(tiling.total * out_blocks(problem, variant.out_chunk), variant.min_blocks, device)
    work = rounds * _tile_cycles(problem, variant, tiling, resident, terms) / device.clock_hz
    work *= (terms.one_part if parts_of(problem) == 1 else 1.0) * (terms.shared if variant.min_blocks > 1 else 1.0)
    size, channels = DTYPE_BYTES[problem.dtype], problem.groups * problem.in_channels_per_group
    images, slabs, rows, width = tiling.window
    halo = images * slabs * rows * round_up(width * size, 32) * tiling.total * channels
    floor = (problem.bytes + max(0, halo - size * math.prod(problem.input_shape))) / device.copy_bytes_per_second
    return slower_of(work, floor)


def _variants(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[ScatterVariant]:
    """Variants worth a thought: those whose registers and shared memory do for so many blocks, and for any image."""
    out, taps = problem.out_channels_per_group, problem.taps
    steps, parts = steps_of(problem), parts_of(problem)
    chunks = {math.ceil(out / parts) for parts in range(1, out + 1) if math.ceil(out / parts) * taps <= _MAX_COLUMNS}
    instructions = (True, False) if device.has_wgmma else (False,)
    shapes = itertools.product(
        sorted(chunks, reverse=True)[:2], instructions, (16, 12, 8, 4), (1, 2, 4), (4, 3, 2), (1, 2, 3, 4)
    )
    for chunk, wgmma, warps, row_tiles, ahead, min_blocks in shapes:
        if row_tiles > (2 if parts == 2 else 8 // ahead) or ahead > steps > 1 or warps * min_blocks < 8:
            continue
        columns = _column_tiles(problem, chunk)
        registers = device.registers_of(32 * warps * min_blocks)
        shared = device.shared_bytes_of(min_blocks)
        step_bytes = _step_bytes(problem, chunk)
        held = round_up(steps, ahead)
        if steps * step_bytes > shared // 2:
            held = shared // 3 // step_bytes // ahead * ahead
        # Sums, with those of an operation on their way; pixels on theirs, and of an operation; and what is besides. Of
        # that there is more where weights come in turns, or threads go along channels, or the last operations are fewer
        # than are loaded ahead.
        sums = row_tiles * columns * (8 if parts == 2 else 5)
        words = 4 * row_tiles * ((1 if wgmma or parts == 1 else 2) * ahead + 2)
        places = (row_tiles - 1) * (20 if problem.channels_last else 8) + (4 * row_tiles if steps % ahead else 0)
        if wgmma and parts == 2 and (held < steps or _along_channels(problem, chunk)):
            places = max(places, 12)
        if sums + words + (52 if wgmma else 90) + places > registers:
            continue
        pitch = (shared - min(held, steps) * step_bytes) // (4 * chunk * taps)
        variant = ScatterVariant(warps, row_tiles, chunk, held, ahead, (pitch - 4) // 32 * 32 + 4, wgmma, min_blocks)
        if held > 0 and _tiles(problem, Layouts.dense(problem), variant, (1, 1, 1, 1)) is not None:
            yield variant
