"""Layers with few output channels on tensor cores, ``kernels/scatter_gemm.cu``."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from polyphase.algorithms.base import Candidate, Launch, Layouts, is_tiny, layer_constants, round_up, standard, typical
from polyphase.algorithms.gather import MAX_PHASES, CellAxis, Side, five
from polyphase.algorithms.gemm_variant import lacks_cores, uses_tf32
from polyphase.algorithms.rankings import kept
from polyphase.algorithms.stages import (
    STILL_BYTES,
    Part,
    channel_piece,
    copy_cycles,
    packed_weight,
    row_bytes,
    row_piece,
    weight_part,
)
from polyphase.device import DeviceInfo
from polyphase.jit.source import Constant, KernelSource
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass

_OFFERED = 6
_BUFFERS = (4, 3, 2)
_COMPARED = 24  # variants that other sizes have a say in
_TILES = 24  # that are compared for a variant
# Sides of images in one, two and three dimensions, besides those of `standard`, by whether images are tiny.
_OTHER_SIDES = {True: ((4, 2, 1),), False: ((1024, 32, 16), (16384, 256, 64))}
_MAX_COLUMNS = 128
_MAX_OUT_CHANNELS = 16  # of a group; where there are more, `implicit_gemm` fills its rows with them


class ScatterVariant(NamedTuple):
    """The compile-time shape of a kernel; ``scatter_gemm.cu`` says what the names mean."""

    warps: int
    row_tiles: int
    out_chunk: int
    stage_channels: int
    buffers: int
    min_blocks: int

    @property
    def rows(self) -> int:
        """Pixels that a block has room for."""
        return 16 * self.row_tiles * self.warps


@dataclass(frozen=True)
class _Tiling:
    """How a variant cuts the cells into tiles; ``first`` is the window's first pixel, from the tile's first cell."""

    lanes: tuple[int, int, int, int]
    tiles: tuple[int, int, int, int]
    first: tuple[int, int, int, int]
    window: Part
    weight: Part
    table_bytes: int
    stage_bytes: int

    @property
    def total(self) -> int:
        return math.prod(self.tiles)

    @property
    def pixels(self) -> int:
        return math.prod(self.window.extent)


class ScatterGemm:
    """One product of all pixels with all taps, whose columns are then added up where outputs overlap."""

    name = "scatter_gemm"

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
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
        if not self.candidates(problem, pass_, device, Layouts.dense(problem)):
            return f"no tile fits a thread's registers and {device.shared_bytes_per_block} bytes of shared memory"
        return None

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> list[Candidate]:
        """Ranked at a typical size, so that a layer keeps its kernel."""
        result = []
        for variant in _ranked(standard(problem), device):
            if (tiling := _tiling(problem, layouts, variant, device)) is not None:
                seconds, bound = _estimate(problem, variant, tiling, device)
                result.append(Candidate(self.name, variant, seconds, bound))
                if len(result) == _OFFERED:
                    break
        return result

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: ScatterVariant
    ) -> Launch:
        tiling = _tiling(problem, layouts, variant, device)
        assert tiling is not None
        x, y = (Side(five(problem.input_shape), layouts.input), Side(five(problem.output_shape), layouts.output))
        run = problem.axes3[2].stride
        geometry = x.packed() + packed_weight(problem, layouts) + y.packed()
        geometry += tiling.weight.packed() + tiling.window.packed()
        geometry += struct.pack(
            "<16i",
            problem.batch,
            *tiling.lanes,
            *tiling.tiles,
            *tiling.first,
            tiling.table_bytes,
            tiling.stage_bytes,
            run in (2, 4, 8) and row_piece(y, 16 // run, True, 0) == run,
        )
        geometry += bytes(-len(geometry) % 8)
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_, layouts.weight_channels_last),
            ("HAS_BIAS", problem.bias),
            ("X_CHANNELS_LAST", x.channels_last),
            ("WARPS", variant.warps),
            ("ROW_TILES", variant.row_tiles),
            ("OUT_CHUNK", variant.out_chunk),
            ("STAGE_CHANNELS", variant.stage_channels),
            ("WEIGHT_PITCH", tiling.weight.pitch),
            ("BUFFERS", variant.buffers),
            ("PARTS", _parts(problem)),
            ("MIN_BLOCKS", variant.min_blocks),
        )
        return Launch(
            source=KernelSource(self.name, problem.dtype, True, constants),
            grid=(tiling.total * _blocks(problem, variant), 1, 1),
            block=32 * variant.warps,
            shared_bytes=_shared_bytes(problem, variant, tiling),
            geometry=geometry,
        )


def _parts(problem: ConvTransposeProblem) -> int:
    """Parts of a float32: two keep its accuracy."""
    return 2 if problem.dtype == "float32" and not uses_tf32(problem) else 1


def _blocks(problem: ConvTransposeProblem, variant: ScatterVariant) -> int:
    """Blocks of a tile."""
    return problem.groups * math.ceil(problem.out_channels_per_group / variant.out_chunk)


def _column_tiles(problem: ConvTransposeProblem, variant: ScatterVariant) -> int:
    return math.ceil(variant.out_chunk * problem.taps / 8)


def _shared_bytes(problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling) -> int:
    product = variant.out_chunk * problem.taps * (variant.rows + 4) * 4
    return tiling.table_bytes + max(variant.buffers * tiling.stage_bytes, product)


def _pitch(elements: int, size: int) -> int:
    """Bytes from one channel's row to the next, so that fragments find no two of their rows in the same banks."""
    step = 32 if size == 4 else 16
    steps = math.ceil(elements * size / step)
    return step * (steps | 1)


@lru_cache(maxsize=8192)
def _tiling(
    problem: ConvTransposeProblem, layouts: Layouts, variant: ScatterVariant, device: DeviceInfo
) -> _Tiling | None:
    """The tiles of least work whose stages fit shared memory."""
    for rows in (variant.rows, variant.rows // 2, variant.rows // 4, 1):  # fewer where so many take too much memory
        tilings = (_tiles(problem, layouts, variant, lanes) for lanes in _lanes(problem, rows))
        fitting = [*itertools.islice((each for each in tilings if _fits(problem, variant, each, device)), _TILES)]
        if fitting:
            return min(fitting, key=lambda each: each.total * _tile_cycles(problem, variant, each))
    return None


def _fits(problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling, device: DeviceInfo) -> bool:
    """Whether the window fits the product's rows, and all fits shared memory."""
    return tiling.pixels <= variant.rows and _shared_bytes(problem, variant, tiling) <= device.shared_bytes_per_block


@lru_cache(maxsize=1024)
def _cell_axis(axis: Axis) -> CellAxis:
    return CellAxis(axis, forward=True)


def _window(axis: Axis, cells: int, of: int, image: int) -> tuple[int, int]:
    """Where the window of so many ``of`` all cells begins, counted from the first, and its pixels.

    Of all cells it is the image, unless they read less.
    """
    along = _cell_axis(axis)
    extent = along.window(cells)
    return (0, image) if cells >= of and image <= extent else (along.first_offset, extent)


def _cells(problem: ConvTransposeProblem) -> tuple[int, int, int]:
    depth, height, width = (
        math.ceil(size / axis.stride) for size, axis in zip(five(problem.output_shape)[2:], problem.axes3)
    )
    return depth, height, width


@lru_cache(maxsize=256)
def _lanes(problem: ConvTransposeProblem, rows: int) -> list[tuple[int, int, int, int]]:
    """Extents of tiles along n, d, h and w whose windows are about as many pixels as there are rows, and fewer.

    Those come first that come to the fewest rows in all. For a single row there is the tile of one cell.
    """
    cells, image = _cells(problem), five(problem.input_shape)[2:]

    def window(dimension: int, extent: int) -> int:
        return _window(problem.axes3[dimension], extent, cells[dimension], image[dimension])[1]

    found: dict[tuple[int, int, int, int], float] = {}
    for w in _extents(cells[2], rows):
        for d in _extents(cells[0], 8):
            line = max(1, window(2, w) * window(0, d))
            fit = cells[1] if window(1, cells[1]) * line <= rows else rows // line - window(1, 1) + 1
            for most in range(max(1, fit - 2), fit + 1):
                h = math.ceil(cells[1] / math.ceil(cells[1] / most))
                images = max(1, min(problem.batch, rows // max(1, line * window(1, h))))
                lanes = images, d, h, w
                tiles = math.prod(math.ceil(n / m) for n, m in zip((problem.batch, *cells), lanes))
                found[lanes] = tiles * (images * line * window(1, h) + 64)
    return sorted(found, key=found.__getitem__) if rows > 1 else [(1, 1, 1, 1)]


def _extents(cells: int, most: int) -> list[int]:
    """Extents worth trying along one dimension: even shares of it, and multiples of what is moved at once."""
    shares = {math.ceil(cells / parts) for parts in (*range(1, 9), *(1 << i for i in range(4, 16)))}
    return sorted(extent for extent in shares | {4, 8, 12, 16, 24, 32, 48, 64} if 1 <= extent <= min(cells, most))


def _tiles(
    problem: ConvTransposeProblem, layouts: Layouts, variant: ScatterVariant, lanes: tuple[int, int, int, int]
) -> _Tiling:
    size = DTYPE_BYTES[problem.dtype]
    x = Side(five(problem.input_shape), layouts.input)
    cells = _cells(problem)
    firsts, extents = [], [lanes[0]]
    for lane, count, axis, image in zip(lanes[1:], cells, problem.axes3, x.shape[2:]):
        first, extent = _window(axis, lane, count, image)
        firsts.append(first)
        extents.append(extent)
    if x.channels_last:
        piece = channel_piece(x, problem.in_channels_per_group, variant.stage_channels, size, layouts.aligned)
        pitch = variant.stage_channels * size + 16
    else:
        piece = row_piece(x, size, layouts.aligned, 0 if lanes[3] >= cells[2] else lanes[3])
        skew = firsts[2] % piece
        firsts[2] -= skew
        extents[3] = round_up(extents[3] + skew, piece)
        pitch = _pitch(round_up(math.prod(extents), 16), size)
    batch, depth, height, width = extents
    pixels = math.prod(extents)
    window = Part((batch, depth, height, width), piece, pitch, pixels if x.channels_last else pixels // piece)
    columns = variant.out_chunk * problem.taps
    weight = weight_part(problem, layouts, variant.out_chunk, _pitch(round_up(columns, 16), size), columns)
    held = round_up(pixels, 16) if x.channels_last else variant.stage_channels
    stage = variant.stage_channels * weight.pitch + held * pitch
    tiles = [math.ceil(n / m) for n, m in zip((problem.batch, *cells), lanes)]
    return _Tiling(
        lanes,
        (tiles[0], tiles[1], tiles[2], tiles[3]),
        (0, firsts[0], firsts[1], firsts[2]),
        window,
        weight,
        round_up(STILL_BYTES * (window.places + weight.places), 128),
        round_up(stage, 128),
    )


# Cycles of a multiprocessor for an instruction of the tensor cores, and for one beside those; for a word of shared
# memory that a warp writes or reads at the end; of a stage from its copies' beginning to their end, and besides; of a
# block besides its stages.
_OPERATION, _SLOT, _WORD, _LATENCY, _STAGE, _BLOCK = 1.25, 0.43, 3.0, 1350.0, 170.0, 1800.0


def _stage_cycles(problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling) -> float:
    """Predicted cycles of a multiprocessor for what the warps of a block do in a stage."""
    size, parts = DTYPE_BYTES[problem.dtype], _parts(problem)
    columns = _column_tiles(problem, variant)
    rows = variant.warps * math.ceil(math.ceil(tiling.pixels / 16) / variant.warps)
    products = rows * columns * (3 if parts == 2 else 1)
    if parts == 2:
        slots = products + 4 * rows * columns + 10 * variant.warps * columns + 20 * rows
    else:
        slots = products + 2 * variant.warps * columns + 2 * rows
    copies = copy_cycles(tiling.window, variant.stage_channels, variant.warps, size)
    copies += copy_cycles(tiling.weight, variant.stage_channels, variant.warps, size)
    return variant.stage_channels * size // 32 * (products * _OPERATION + slots * _SLOT) + copies


def _end_cycles(problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling) -> float:
    """The same for the sums at the end."""
    written = variant.rows * 8 * _column_tiles(problem, variant)
    read = math.prod(tiling.lanes) * (variant.out_chunk * (problem.taps + 2 * math.prod(problem.stride)) + 60)
    return (written + read) / 32 * _WORD


def _tile_cycles(problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling, resident: int = 1) -> float:
    """Predicted cycles for a round of so many resident blocks."""
    stages = math.ceil(problem.in_channels_per_group / variant.stage_channels)
    work = resident * _stage_cycles(problem, variant, tiling)
    stage = max(work, _LATENCY / (variant.buffers - 1)) + _STAGE
    return stages * stage + _BLOCK + resident * _end_cycles(problem, variant, tiling)


def _estimate(
    problem: ConvTransposeProblem, variant: ScatterVariant, tiling: _Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    blocks = tiling.total * _blocks(problem, variant)
    resident = max(1, min(variant.min_blocks, math.ceil(blocks / device.multiprocessors)))
    rounds = blocks / (device.multiprocessors * resident)
    rounds = math.ceil(rounds) if rounds < 4 else rounds + 0.5
    work = rounds * _tile_cycles(problem, variant, tiling, resident) / device.clock_hz
    size = DTYPE_BYTES[problem.dtype]
    halo = row_bytes(tiling.window, size) * tiling.total * problem.groups * problem.in_channels_per_group
    floor = (problem.bytes + max(0.0, halo - size * math.prod(problem.input_shape))) / device.copy_bytes_per_second
    return max(work, floor), "bytes" if floor > work else "instructions"


@lru_cache(maxsize=1024)
def _ranked(problem: ConvTransposeProblem, device: DeviceInfo) -> list[ScatterVariant]:
    """Variants of a layer of typical size, the fastest prediction first. Other sizes have a say among the first."""
    offered = [variant._replace(buffers=count) for variant in _variants(problem) for count in _BUFFERS]
    about = f"scatter of {problem!r}, on {device!r}"
    return kept(about, offered, lambda: _rank(problem, device))


def _rank(problem: ConvTransposeProblem, device: DeviceInfo) -> list[ScatterVariant]:
    scores: dict[ScatterVariant, float] = {}
    for variant in _variants(problem):
        for buffers in _BUFFERS:
            deeper = variant._replace(buffers=buffers)
            if (seconds := _seconds(problem, deeper, device)) is not None:
                scores[deeper] = math.log(seconds)
                break
    first = sorted(scores, key=scores.__getitem__)
    compared, others = first[:_COMPARED], first[_COMPARED:]
    for sides in _OTHER_SIDES[is_tiny(problem)]:
        for variant in compared:
            scores[variant] += math.log(_seconds(typical(problem, sides), variant, device) or math.inf)
    return sorted(compared, key=scores.__getitem__) + others


def _seconds(problem: ConvTransposeProblem, variant: ScatterVariant, device: DeviceInfo) -> float | None:
    """The prediction for dense tensors; None where so many blocks as should be do not fit a multiprocessor.

    So it is where a tile of one cell does not fit, for then there would be images that the variant cannot compute.
    """
    layouts = Layouts.dense(problem)
    tiling = _tiling(problem, layouts, variant, device)
    if tiling is None or not _fits(problem, variant, _tiles(problem, layouts, variant, (1, 1, 1, 1)), device):
        return None
    shared = variant.min_blocks * (_shared_bytes(problem, variant, tiling) + 1024)
    fits = shared <= device.shared_bytes_per_multiprocessor
    return _estimate(problem, variant, tiling, device)[0] if fits else None


def _variants(problem: ConvTransposeProblem) -> Iterator[ScatterVariant]:
    """Variants worth a thought, their buffers left open."""
    out, taps = problem.out_channels_per_group, problem.taps
    operation = 32 // DTYPE_BYTES[problem.dtype]
    chunks = {math.ceil(out / parts) for parts in range(1, out + 1) if math.ceil(out / parts) * taps <= _MAX_COLUMNS}
    for chunk, warps, row_tiles in itertools.product(sorted(chunks, reverse=True)[:2], (8, 4), range(1, 9)):
        columns = math.ceil(chunk * taps / 8)
        for min_blocks in (1, 2, 3, 4):
            registers = min(255, 65536 // (32 * warps * min_blocks) // 8 * 8)
            besides = 80 + 8 * columns if _parts(problem) == 2 else 70
            if 4 * row_tiles * columns + besides > registers:
                continue
            for operations in (1, 2, 4):
                channels = operations * operation
                if channels < 2 * problem.in_channels_per_group or operations == 1:
                    yield ScatterVariant(warps, row_tiles, chunk, channels, 2, min_blocks)
