"""Configs of the gradients by wgmma: tiles of positions, layout of a stage, and cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from polyphase.costs import Costs, costs
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, five
from polyphase.program.tensor_map import TensorMap, tma_strides
from polyphase.schedules.cells import Side
from polyphase.schedules.tensor_cores import MAX_BOX_SIDE, OPERATION_BYTES, pixel_map, pixel_strides
from polyphase.schedules.tiles import Four, least
from polyphase.schedules.window_gemm.stages import MAX_SIDE, MOVING_BYTES, widest_piece
from polyphase.schedules.window_gemm.wgmma_window import (
    FOUND,
    PIECE_BYTES,
    Window,
    as_rows,
    conflicts_of,
    in_pairs,
    least_extent,
    may_use_tma,
    window_by_tma,
)
from polyphase.schedules.window_gemm.window import (
    Tiles,
    channel_pitch,
    extent_of_window,
    input_tiles,
    is_long_sum,
    sectors_of,
    tile_extents,
    widths,
)

CONSUMER_GROUPS = 2  # consumer warpgroups; ``mainloop/window_wgmma.cuh`` fixes their registers for this number
LOADERS = 128  # threads of the producer warpgroup
_STAGES = (6, 5, 4, 3)  # pipeline depths, deepest first
_MOST_SUMS = 256  # N x m64 tiles per warpgroup: 128 fp32 accumulators per thread
_LEAST_COPIED_ROW = 8  # positions along the width of a tile whose window is copied, where images are wider
_ROUNDING = 1 - 1e-9  # bounds are rounded differently from the costs that they bound


class WgmmaConfig(NamedTuple):
    """The compile-time shape of a kernel, as ``mainloop/window_wgmma.cuh`` has it.

    ``row_tiles``: m64 tiles of a warpgroup; ``columns``: N of a block, input channels; ``out_chunk``: output channels
    of a block (weight gradient) or of a K-tile (input gradient); ``positions`` of a tile; ``buffers``: stages of the
    pipeline.
    """

    row_tiles: int
    columns: int
    out_chunk: int
    positions: int
    buffers: int

    @property
    def rows(self) -> int:
        """M of a block: positions, or (output channel, tap) pairs."""
        return 64 * CONSUMER_GROUPS * self.row_tiles


@dataclass(frozen=True)
class Runs:
    """The operand in a stage, as the kernels' ``Runs``: TMA boxes, or copied pieces."""

    count: Four
    length: int
    span: int
    box_bytes: int  # or of the copy instead of a box
    tensor_map: TensorMap | None  # none where threads copy it
    piece_bytes: int = 0  # of one copy by threads
    joined: int = 0  # length of rows that are one (H and W as one dimension)

    def params(self) -> dict[str, Any]:
        """The kernels' ``Runs``."""
        return {"count": self.count, "length": self.length, "bytes": self.span, "box": self.box_bytes}

    @classmethod
    def of_boxes(cls, count: Four, tensor_map: TensorMap, joined: int = 0) -> Runs:
        """Runs that TMA loads."""
        size, span = DTYPE_BYTES[tensor_map.dtype], tensor_map.swizzle
        return cls(count, span // size, span, math.prod(tensor_map.box) * size, tensor_map, joined=joined)

    @property
    def bytes(self) -> int:
        """Bytes of a stage."""
        return math.prod(self.count) * self.box_bytes

    @property
    def rows(self) -> int:
        """Rows of a stage, each of ``span`` bytes."""
        return self.bytes // self.span


@dataclass(frozen=True)
class Tiling(Tiles):
    """The tiles of a config, and their shared memory in bytes."""

    window: Window
    skew: int
    runs: Runs
    window_map: TensorMap | None  # none where threads copy it
    steps: int
    stage: int
    table: int

    @property
    def box_bytes(self) -> int:
        """Bytes of the window's box; 0 where threads copy the window."""
        return 0 if self.window_map is None else math.prod(self.window_map.box) * DTYPE_BYTES[self.window_map.dtype]


def legal_configs(problem: ConvTransposeProblem, pass_: Pass) -> Iterator[WgmmaConfig]:
    """Every config of a layer; whether its stages fit shared memory depends on its tiles."""
    for shape, stages in itertools.product(_shapes(problem, pass_), _STAGES):
        yield shape._replace(buffers=stages)


def _shapes(problem: ConvTransposeProblem, pass_: Pass) -> Iterator[WgmmaConfig]:
    """Configs worth trying, without their pipeline depth."""
    out, taps, size = problem.out_channels_per_group, problem.taps, DTYPE_BYTES[problem.dtype]
    if problem.channels_last:  # C_out is folded into the taps along w
        out, taps = 1, out * taps
    operation = OPERATION_BYTES // size
    most = _MOST_SUMS // 2 if pass_ is Pass.INPUT_GRAD and is_long_sum(problem) else _MOST_SUMS
    multiple = channel_pitch(problem, problem.in_channels_per_group) // size if problem.channels_last else 8
    for columns, row_tiles in itertools.product(widths(problem.in_channels_per_group, multiple), (1, 2, 3, 4)):
        if columns * row_tiles > most:
            continue
        config = WgmmaConfig(row_tiles=row_tiles, columns=columns, out_chunk=1, positions=1, buffers=min(_STAGES))
        if pass_ is Pass.WEIGHT_GRAD:
            if taps > config.rows:
                continue
            chunk = math.ceil(out / math.ceil(out * taps / (config.rows // taps * taps)))
            for positions in (4 * operation, 8 * operation, 16 * operation):
                yield config._replace(out_chunk=chunk, positions=positions)
        else:
            for chunk in (1, 2, 4, 8, 16, 32, 64, 128):
                if chunk * taps % operation == 0 and 2 <= chunk * taps // operation <= 32 and chunk < 2 * out:
                    yield config._replace(out_chunk=chunk, positions=config.rows)


def shared_bytes_of(config: WgmmaConfig, tiling: Tiling) -> int:
    """Dynamic shared memory of a block."""
    places = MOVING_BYTES * tiling.window.rows if tiling.window_map is None else 0
    return config.buffers * tiling.stage + tiling.table + places


def tiling_of(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: WgmmaConfig, device: DeviceInfo
) -> Tiling | None:
    """The tiles of least work whose stages fit shared memory."""
    rows = config.rows if pass_ is Pass.INPUT_GRAD else 0  # rows with offsets in shared memory
    declared = round_up(12 * rows + 20 * config.buffers, 1024)  # static; dynamic shared memory begins aligned after it
    available = device.shared_bytes_per_block - declared
    terms = costs("window_wgmma", device)
    return _tilings(problem, pass_, layouts, config._replace(buffers=0), terms).best(config, available)


class _Tilings:
    """The tilings of a config, at any pipeline depth."""

    def __init__(
        self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: WgmmaConfig, terms: Costs
    ) -> None:
        self._layer, self._terms = (problem, pass_, layouts, config), terms
        self._tile_extents: list[Four] = []
        if layouts.output[4] == 1 and not (layouts.weight_channels_last and pass_ is Pass.INPUT_GRAD):
            found = {
                (images >> halved, depth, height, width)
                for images, depth, height, width in tile_extents(problem, config.positions)
                for halved in range(images.bit_length())
            }
            self._tile_extents = sorted(found)
        self._by_tma = [may_use_tma(problem, pass_, layouts, config.out_chunk, each) for each in self._tile_extents]
        self._works = list(self._least_works())
        self._stages = list(self._least_stages())
        self._least_row = min(_LEAST_COPIED_ROW, problem.input_size[-1])
        self._tilings: dict[int, Tiling | None] = {}

    def best(self, config: WgmmaConfig, available: int) -> Tiling | None:
        """The tiling of least work whose stages fit; copied windows of short rows only if there is no other."""
        place = self._best(config, available, short=False)
        if place is None and not any(self._is_short(each) is False for each in range(len(self._tile_extents))):
            place = self._best(config, available, short=True)
        return None if place is None else self._tiling(place)

    def _best(self, config: WgmmaConfig, available: int, short: bool) -> int | None:
        problem, pass_, _, alike = self._layer

        def work_of(place: int) -> float | None:
            if config.buffers * self._stages[place] > available:
                return None
            if not short and not self._by_tma[place] and self._tile_extents[place][3] < self._least_row:
                return None
            tiling = self._tiling(place)
            if tiling is None or self._is_short(place) is not short:
                return None
            if shared_bytes_of(config, tiling) > available:
                return None
            cycles = stage_cycles(problem, pass_, alike, tiling, self._terms)
            return tiling.total * (cycles + self._stored(tiling.tile_extent))

        return least(self._works, work_of)

    def _tiling(self, place: int) -> Tiling | None:
        if place not in self._tilings:
            tiling = _tiles(*self._layer, self._tile_extents[place])
            self._tilings[place] = None if tiling is None or max(tiling.window.extent) > MAX_SIDE else tiling
        return self._tilings[place]

    def _stored(self, tile: Four) -> float:
        """Predicted cycles to store a tile's results, divided by its stages; for a weight gradient 0."""
        problem, pass_, _, config = self._layer
        if pass_ is Pass.WEIGHT_GRAD:
            return 0.0
        stages = math.ceil(problem.out_channels_per_group / config.out_chunk)
        return stored_cycles(problem, config, tile, self._terms) / stages

    def _is_short(self, place: int) -> bool | None:
        """Whether threads copy short rows; None if these extents have no tiling."""
        tiling = self._tiling(place)
        return None if tiling is None else tiling.window_map is None and tiling.tile_extent[3] < self._least_row

    def _least_stages(self) -> Iterator[int]:
        """Lower bounds of the bytes of a stage."""
        problem, pass_, _, config = self._layer
        size = DTYPE_BYTES[problem.dtype]
        depth = config.out_chunk * problem.taps
        for each in self._tile_extents:
            length = math.prod(each) if pass_ is Pass.WEIGHT_GRAD else depth
            yield size * (length * config.columns + config.out_chunk * math.prod(extent_of_window(problem, each)))

    def _least_works(self) -> Iterator[float]:
        """Lower bounds of the work: no bank conflicts, and rows without padding."""
        problem, pass_, _, config = self._layer
        terms = self._terms
        size = DTYPE_BYTES[problem.dtype]
        weights = pass_ is Pass.WEIGHT_GRAD
        steps = config.out_chunk * problem.taps * size // OPERATION_BYTES
        reads, joined = 4 * _reads(problem, pass_), _joined(problem)
        for each, boxed in zip(self._tile_extents, self._by_tma):
            positions = math.prod(each)
            if weights:
                steps = positions * size // OPERATION_BYTES
            loads = 0.0 if boxed else _copied(pass_, config, least_extent(problem, each), terms)
            fewest = reads if positions >= FOUND else reads / 4  # some of four reads may have no row
            cycles = steps * _operation(config, fewest, joined, terms) + terms.stage + loads + self._stored(each)
            yield math.prod(input_tiles(problem, each)) * cycles * _ROUNDING


_tilings = lru_cache(maxsize=64)(_Tilings)  # each has up to hundreds of kilobytes


def _operation(config: WgmmaConfig, reads: float, joined: int, terms: Costs) -> float:
    """Predicted cycles of a k-step whose fragments take ``reads`` wavefronts of shared memory; words are ``joined``."""
    product = terms.product + terms.read * reads + terms.join * joined + terms.column * config.columns
    return CONSUMER_GROUPS * config.row_tiles * product + terms.operation


def _tiles(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: WgmmaConfig, tile: Four
) -> Tiling | None:
    size = DTYPE_BYTES[problem.dtype]
    if pass_ is Pass.WEIGHT_GRAD and Side(five(problem.input_shape), layouts.input).channels_last:
        runs = _pixel_runs(problem, layouts, config, tile)
    elif pass_ is Pass.WEIGHT_GRAD:
        runs = _input_runs(problem, layouts, config, tile)
    else:
        runs = _weight_runs(problem, layouts, config)
    if runs is None:
        return None
    window_map, chunk = None, config.out_chunk
    if runs.tensor_map is not None and (brought := window_by_tma(problem, pass_, layouts, chunk, tile)) is not None:
        window, window_map, skew = brought
    elif (copied := as_rows(problem, pass_, layouts, chunk, tile)) is not None:
        window, skew = copied, 0
    else:
        return None
    depth = math.prod(tile) if pass_ is Pass.WEIGHT_GRAD else config.out_chunk * problem.taps
    steps = math.ceil(depth * size / OPERATION_BYTES)
    shift = 0 if window_map is not None else PIECE_BYTES
    stage = round_up(runs.bytes + config.out_chunk * window.steps[3] * size + shift, 1024)
    table = round_up(4 * steps * OPERATION_BYTES // size, 16)
    return Tiling(tile, input_tiles(problem, tile), window, skew, runs, window_map, steps, stage, table)


def _input_runs(problem: ConvTransposeProblem, layouts: Layouts, config: WgmmaConfig, tile: Four) -> Runs | None:
    """The input's runs in NCHW, a row of positions each."""
    size = DTYPE_BYTES[problem.dtype]
    images, slabs, rows, columns = tile
    batch, channels, depth, height, width = five(problem.input_shape)
    image, channel, slab, row, _ = (step * size for step in layouts.input)
    joined = width if columns == width and (height == 1 or layouts.input[3] == width) else 0
    if joined:
        width, columns, height, rows = width * height, columns * rows, 1, 1
    length, sides = columns, (width, channels, height, depth, max(1, batch))
    strides = tma_strides(zip(sides[1:], (channel, row, slab, image)))
    if strides is None and images * slabs * rows == 1:
        length = round_up(length, OPERATION_BYTES // size)  # threads fill the rest of a run with zeros
    span = next((span for span in (128, 64, 32) if length * size % span == 0), None)
    if not layouts.aligned or layouts.input[4] != 1 or span is None:
        return None
    count = (images, slabs, rows, length * size // span)
    if strides is None:
        apart = [step for count, step in zip(sides[1:], (channel, row, slab, image)) if count > 1]
        pitch = columns * size if width > columns else 0  # bytes from one tile along the width to the next
        return _copied_runs(size, count, span, config, joined, pitch, *apart)
    box = (span // size, config.columns, 1, 1, 1)
    tensor_map = TensorMap(problem.dtype, sides, strides, box, span, tf32=True)
    return Runs.of_boxes(count, tensor_map, joined)


def _copied_runs(size: int, count: Four, span: int, config: WgmmaConfig, joined: int, *apart: int) -> Runs | None:
    """Runs of the input that threads copy, in half types: float32 would have to be rounded to TF32 on the way.

    ``apart``: bytes from one row, channel and so on to the next.
    """
    piece = min(8, widest_piece(1, *apart))
    if size != 2 or piece < 4 or not 0 < math.prod(count) * span // piece <= LOADERS:
        return None
    return Runs(count, span // size, span, config.columns * span, None, piece, joined)


def _pixel_runs(problem: ConvTransposeProblem, layouts: Layouts, config: WgmmaConfig, tile: Four) -> Runs | None:
    """The input's runs in NHWC: the pixels of a tile, some channels in each box."""
    size, channels = DTYPE_BYTES[problem.dtype], problem.in_channels_per_group
    x, pitch = Side(five(problem.input_shape), layouts.input), channel_pitch(problem, channels)
    whole = math.prod(tile) * size % OPERATION_BYTES == 0 and config.columns * size % pitch == 0
    if not layouts.aligned or not whole or max(tile) > MAX_BOX_SIDE or pixel_strides(problem.dtype, x) is None:
        return None
    return Runs.of_boxes((1, 1, 1, config.columns * size // pitch), pixel_map(problem.dtype, x, tile, pitch))


def _weight_runs(problem: ConvTransposeProblem, layouts: Layouts, config: WgmmaConfig) -> Runs | None:
    """The weight's runs, 128 bytes each."""
    size, columns = DTYPE_BYTES[problem.dtype], problem.out_channels_per_group * problem.taps
    if not layouts.aligned or columns * size % 16:
        return None
    depth = config.out_chunk * problem.taps * size
    span = 128
    sides = (columns, problem.in_channels, 1, 1, 1)
    tensor_map = TensorMap(
        problem.dtype, sides, (columns * size, 16, 16, 16), (span // size, config.columns, 1, 1, 1), span, True, 1
    )
    return Runs.of_boxes((1, 1, 1, math.ceil(depth / span)), tensor_map)


def stored_cycles(problem: ConvTransposeProblem, config: WgmmaConfig, tile: Four, terms: Costs) -> float:
    """Predicted cycles of the results of an input gradient's tile: by sectors over those that they would fill."""
    *_, rows, columns = tile
    return terms.stored * config.rows * config.columns * sectors_of(problem, rows, columns)


def stage_cycles(
    problem: ConvTransposeProblem, pass_: Pass, config: WgmmaConfig, tiling: Tiling, terms: Costs
) -> float:
    """Predicted cycles of a multiprocessor for a stage."""
    size, window = DTYPE_BYTES[problem.dtype], tiling.window
    reads = 4 * _reads(problem, pass_) * conflicts_of(problem, pass_, tiling.tile_extent, window.steps)
    rows = tiling.runs.rows if tiling.runs.tensor_map is not None else 0
    if tiling.window_map is None:
        copies = _copied(pass_, config, window.extent, terms)
        if pass_ is Pass.WEIGHT_GRAD and size == 2 and problem.padding[-1] > 0:
            copies += terms.words / tiling.tiles[3]  # producers wait where a row begins
        if tiling.runs.tensor_map is None:
            pieces = tiling.runs.bytes // config.columns // tiling.runs.piece_bytes
            copies += terms.run_piece * math.ceil(config.columns / (LOADERS // pieces))
    else:
        rows += config.out_chunk * window.rows * math.ceil(window.extent[3] * size / 128)
        copies = 0.0
    return tiling.steps * _operation(config, reads, _joined(problem), terms) + rows * terms.row + terms.stage + copies


def _copied(pass_: Pass, config: WgmmaConfig, extent: Four, terms: Costs) -> float:
    """Predicted cycles of a stage for a window that producers copy (``operand/window_rows.cuh``)."""
    *others, columns = extent
    rows = config.out_chunk * math.prod(others)
    stage, row, element = [terms[f"copy_{part}_{pass_.value}"] for part in ("stage", "row", "element")]
    return stage + math.ceil(rows / (LOADERS // 32)) * row + rows * columns * element


def _reads(problem: ConvTransposeProblem, pass_: Pass) -> int:
    """Reads of shared memory by a thread for its A fragment of a k-step."""
    single = DTYPE_BYTES[problem.dtype] == 4
    if in_pairs(problem):
        return 2 if single and pass_ is Pass.WEIGHT_GRAD else 4
    return 4 if single else 8


def _joined(problem: ConvTransposeProblem) -> int:
    """Words of a thread's A fragment that it joins from two elements of 16 bits."""
    return 0 if DTYPE_BYTES[problem.dtype] == 4 or in_pairs(problem) else 4
