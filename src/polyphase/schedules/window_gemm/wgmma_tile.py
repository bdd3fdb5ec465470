"""How the gradients by Hopper's instruction cut input positions into tiles, what a stage holds, and what it costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, five
from polyphase.program.tensor_map import Boxes, engine_strides
from polyphase.schedules.cells import Side
from polyphase.schedules.tensor_cores import OPERATION_BYTES
from polyphase.schedules.tiles import Four, best_first, tiles_of
from polyphase.schedules.window_gemm.stages import MAX_SIDE, MOVING_BYTES, widest_piece
from polyphase.schedules.window_gemm.window import channel_pitch, extent_of_window, lanes_of

GROUPS = 2  # of 128 threads that multiply; one more loads
LOADERS = 128
_MAX_BOX_SIDE = 256  # elements that the copy engine brings at once along one dimension
_LEAST_COPIED_ROW = 8  # positions along the width of a tile whose window is copied, where images are wider
PIECE_BYTES = 16  # of rows that are copied
_ROUNDING = 1 - 1e-9  # a bound is summed up in another order than what it bounds
_LEAST_BUFFERS, _MOST_SHARED = 3, 256 << 10  # of a kernel's stages; bytes, more than any GPU has

# Cycles, fitted to 595 and, where threads copy windows, 92 measured variants on an H200 (docs/performance.md): for an
# instruction of the cores, to read shared memory once for it, and for a column of it; for an operation; for a row of up
# to 128 bytes that the engine brings; for a stage.
_PRODUCT, _READ, _COLUMN, _OPERATION, _ROW, _STAGE = 14.9, 0.83, 0.127, 32.0, 0.505, 390.0
# The same for copies: for one that a row begins in; for a thread's piece of the operand.
_WORDS, _RUN_PIECE = 141.0, 75.0
# The rest of copying, by the pass and the bytes of an element: of a stage; of a piece that a thread finds, which lies
# alike in several channels; of each copy of it. Those of half types were fitted later, to 49 layers (input gradient)
# and to 142 tiles of six layers.
_COPIED = {
    (Pass.INPUT_GRAD, 4): (1330.0, 355.0, 49.0),
    (Pass.INPUT_GRAD, 2): (2712.0, 440.0, 32.0),
    (Pass.WEIGHT_GRAD, 4): (0.0, 355.0, 49.0),
    (Pass.WEIGHT_GRAD, 2): (569.0, 647.0, 129.0),
}


class WgmmaVariant(NamedTuple):
    """The compile-time shape of a kernel, as ``mainloop/window_wgmma.cuh`` has it. ``positions`` of a tile."""

    row_tiles: int
    columns: int
    out_chunk: int
    positions: int
    buffers: int

    @property
    def rows(self) -> int:
        """Positions, or pairs of output channel and tap, of a block."""
        return 64 * GROUPS * self.row_tiles


@dataclass(frozen=True)
class Runs:
    """What a stage holds of the operand, as the kernels' ``Runs``: boxes of the copy engine's, or copied pieces."""

    count: Four
    length: int
    span: int
    box_bytes: int  # or what is copied in the place of a box
    boxes: Boxes | None  # none where threads copy it
    piece_bytes: int = 0  # then, at once

    def params(self) -> dict[str, Any]:
        """The kernels' ``Runs``."""
        return {"count": self.count, "length": self.length, "bytes": self.span, "box": self.box_bytes}

    @classmethod
    def of_boxes(cls, count: Four, boxes: Boxes) -> Runs:
        """Those that the engine brings."""
        size = DTYPE_BYTES[boxes.dtype]
        return cls(count, boxes.swizzle // size, boxes.swizzle, math.prod(boxes.box) * size, boxes)

    @property
    def bytes(self) -> int:
        """Of a stage."""
        return math.prod(self.count) * self.box_bytes

    @property
    def rows(self) -> int:
        """Of up to 128 bytes, of a stage."""
        return self.bytes // self.span


@dataclass(frozen=True)
class Window:
    """What a stage holds of the output gradient, as the kernels' ``Window``: boxes of the engine's, or copied rows."""

    extent: Four
    steps: Four  # elements from one image, slab, row and channel to the next
    pieces: int

    def params(self) -> dict[str, Any]:
        """The kernels' ``Window``."""
        return {"extent": self.extent, "step": self.steps, "pieces": self.pieces}

    @property
    def rows(self) -> int:
        """Of a channel."""
        return math.prod(self.extent[:3])


@dataclass(frozen=True)
class Tiling:
    """How a variant cuts the input positions into tiles, and what that takes of shared memory, in bytes."""

    lanes: Four
    tiles: Four
    window: Window
    skew: int
    runs: Runs
    window_box: Boxes | None  # none where threads copy it
    joined: int
    steps: int
    window_at: int
    stage: int
    table: int
    places: int

    @property
    def total(self) -> int:
        return math.prod(self.tiles)

    @property
    def box_bytes(self) -> int:
        """Of the window, if the engine brings it."""
        return 0 if self.window_box is None else math.prod(self.window_box.box) * DTYPE_BYTES[self.window_box.dtype]


def shared_bytes_of(variant: WgmmaVariant, tiling: Tiling) -> int:
    """Of a block, but for what the kernel declares itself."""
    return variant.buffers * tiling.stage + tiling.table + tiling.places


def tiling_of(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, variant: WgmmaVariant, device: DeviceInfo
) -> Tiling | None:
    """The tiles of least work whose stages fit shared memory."""
    rows = variant.rows if pass_ is Pass.INPUT_GRAD else 0  # whose place is remembered
    declared = round_up(12 * rows + 20 * variant.buffers, 1024)  # by the kernel itself, before what is aligned so
    available = device.shared_bytes_per_block - declared
    return _tilings(problem, pass_, layouts, variant._replace(buffers=0)).best(variant, available)


class _Tilings:
    """All tiles of a variant, whatever its buffers."""

    def __init__(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, variant: WgmmaVariant) -> None:
        self._layer = problem, pass_, layouts, variant
        self._lanes: list[Four] = []
        if layouts.output[4] == 1 and not (layouts.weight_channels_last and pass_ is Pass.INPUT_GRAD):
            found = {
                (images >> halved, depth, height, width)
                for images, depth, height, width in lanes_of(problem, variant.positions)
                for halved in range(images.bit_length())
            }
            self._lanes = sorted(found)
        self._boxed = [_can_be_box(problem, pass_, layouts, variant.out_chunk, each) for each in self._lanes]
        self._works = list(_least_works(problem, pass_, variant, self._lanes, self._boxed))
        self._stages = list(_least_stages(problem, pass_, variant, self._lanes))
        self._least_row = min(_LEAST_COPIED_ROW, problem.input_size[-1])
        self._tilings: dict[int, Tiling | None] = {}

    def best(self, variant: WgmmaVariant, available: int) -> Tiling | None:
        """Those of least work whose stages fit; with short rows that are copied only where there are no others."""
        places = [place for place, stage in enumerate(self._stages) if variant.buffers * stage <= available]
        best = self._best(places, variant, available, short=False)
        if best is None and not any(self._is_short(place) is False for place in range(len(self._lanes))):
            best = self._best(places, variant, available, short=True)
        return best

    def _best(self, places: list[int], variant: WgmmaVariant, available: int, short: bool) -> Tiling | None:
        problem, pass_, _, alike = self._layer

        def work_of(index: int) -> float | None:
            place = places[index]
            if not short and not self._boxed[place] and self._lanes[place][3] < self._least_row:
                return None
            tiling = self._tiling(place)
            if tiling is None or self._is_short(place) is not short:
                return None
            fits = shared_bytes_of(variant, tiling) <= available
            return tiling.total * stage_cycles(problem, pass_, alike, tiling) if fits else None

        index = next(best_first([self._works[place] for place in places], work_of), None)
        return None if index is None else self._tiling(places[index])

    def _tiling(self, place: int) -> Tiling | None:
        if place not in self._tilings:
            tiling = _tiles(*self._layer, self._lanes[place])
            self._tilings[place] = None if tiling is None or max(tiling.window.extent) > MAX_SIDE else tiling
        return self._tilings[place]

    def _is_short(self, place: int) -> bool | None:
        """Whether threads copy rows of few positions; None where there are no such tiles."""
        tiling = self._tiling(place)
        return None if tiling is None else tiling.window_box is None and tiling.lanes[3] < self._least_row


@lru_cache(maxsize=64)  # they may have hundreds of kilobytes; variants of one call follow each other
def _tilings(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, variant: WgmmaVariant) -> _Tilings:
    return _Tilings(problem, pass_, layouts, variant)


def _least_stages(
    problem: ConvTransposeProblem, pass_: Pass, variant: WgmmaVariant, lanes: Sequence[Four]
) -> Iterator[int]:
    """Bytes that a stage of such tiles has at least."""
    size = DTYPE_BYTES[problem.dtype]
    depth = variant.out_chunk * problem.taps
    for each in lanes:
        length = math.prod(each) if pass_ is Pass.WEIGHT_GRAD else depth
        yield size * (length * variant.columns + variant.out_chunk * math.prod(extent_of_window(problem, each)))


def _least_works(
    problem: ConvTransposeProblem,
    pass_: Pass,
    variant: WgmmaVariant,
    lanes: Sequence[Four],
    boxed: Sequence[bool],
) -> Iterator[float]:
    """What the work of such tiles is not less than: as if reads never met, and a window's rows ended with its columns.

    ``boxed``: whether TMA may bring the window.
    """
    size, sizes = DTYPE_BYTES[problem.dtype], five(problem.input_shape)[2:]
    weights, vector = pass_ is Pass.WEIGHT_GRAD, PIECE_BYTES // size
    steps = variant.out_chunk * problem.taps * size // OPERATION_BYTES
    reads = 4 * _reads(problem, pass_)
    stage, piece, copy = _COPIED[pass_, size]
    for each, by_box in zip(lanes, boxed):
        positions = math.prod(each)
        if weights:
            steps = positions * size // OPERATION_BYTES
        images, slabs, lines, columns = extent_of_window(problem, each)
        rows = variant.out_chunk * images * slabs * lines
        loads = stage + piece + rows * -(-(columns + vector - 1) // vector) / LOADERS * copy
        if by_box:
            loads = min(loads, rows * -(-columns * size // 128) * _ROW)
        fewest = reads if positions >= _FOUND else reads / 4  # of four reads, some of which may meet no row
        cycles = steps * _operation(variant, fewest) + loads + _STAGE
        yield math.prod(tiles_of(problem.batch, sizes, each)) * cycles * _ROUNDING


def _operation(variant: WgmmaVariant, reads: float) -> float:
    """Predicted cycles of an operation whose rows take so many passes through shared memory."""
    return GROUPS * variant.row_tiles * (_PRODUCT + _READ * reads + _COLUMN * variant.columns) + _OPERATION


def _tiles(
    problem: ConvTransposeProblem,
    pass_: Pass,
    layouts: Layouts,
    variant: WgmmaVariant,
    lanes: Four,
) -> Tiling | None:
    size = DTYPE_BYTES[problem.dtype]
    if pass_ is Pass.WEIGHT_GRAD and Side(five(problem.input_shape), layouts.input).channels_last:
        found = _pixel_runs(problem, layouts, variant, lanes), 0
        steps = math.prod(lanes) * size // OPERATION_BYTES
    elif pass_ is Pass.WEIGHT_GRAD:
        found = _input_runs(problem, layouts, variant, lanes)
        steps = math.ceil(math.prod(lanes) * size / OPERATION_BYTES)
    else:
        found = _weight_runs(problem, layouts, variant), 0
        steps = variant.out_chunk * problem.taps * size // OPERATION_BYTES
    runs, joined = found
    if runs is None:
        return None
    window_box, places = None, 0
    if runs.boxes is not None and (brought := _as_box(problem, pass_, layouts, variant, lanes)) is not None:
        window, window_box, skew = brought
    elif (copied := _as_rows(problem, pass_, layouts, variant.out_chunk, lanes)) is not None:
        window, skew = copied, 0
        places = MOVING_BYTES * window.rows * window.pieces
    else:
        return None
    window_at = runs.bytes
    shift = 0 if window_box is not None else PIECE_BYTES
    stage = round_up(window_at + variant.out_chunk * window.steps[3] * size + shift, 1024)
    tiles = tiles_of(problem.batch, five(problem.input_shape)[2:], lanes)
    table = round_up(4 * steps * OPERATION_BYTES // size, 16)
    return Tiling(lanes, tiles, window, skew, runs, window_box, joined, steps, window_at, stage, table, places)


def _as_box(
    problem: ConvTransposeProblem,
    pass_: Pass,
    layouts: Layouts,
    variant: WgmmaVariant,
    lanes: Four,
) -> tuple[Window, Boxes, int] | None:
    """The window as the copy engine brings it, where it can.

    Beside it the elements that its rows begin before the first that is met: a box begins at a multiple of 16 bytes.
    """
    if not _can_be_box(problem, pass_, layouts, variant.out_chunk, lanes):
        return None
    size, chunk = DTYPE_BYTES[problem.dtype], variant.out_chunk
    vector, strides = 16 // size, _box_strides(problem, layouts)
    assert strides is not None
    batch, channels, depth, height, width = five(problem.output_shape)
    images, slabs, rows, columns = extent_of_window(problem, lanes)
    skew = -problem.axes3[2].padding % vector
    columns = round_up(skew + columns, vector)

    def steps(columns: int) -> Four:
        return slabs * rows * columns, rows * columns, columns, images * slabs * rows * columns

    widths = range(columns, min(columns + 128 // size, _MAX_BOX_SIDE) + 1, vector)
    columns = _quietest(widths, lambda columns: _conflicts(problem, pass_, lanes, steps(columns)))
    sides = (width, height, depth, max(1, batch), channels)
    tensor = 1 if pass_ is Pass.WEIGHT_GRAD else 0
    boxes = Boxes(problem.dtype, sides, strides, (columns, rows, slabs, images, chunk), 16, True, tensor)
    return Window((images, slabs, rows, columns), steps(columns), 0), boxes, skew


def _can_be_box(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, chunk: int, lanes: Four) -> bool:
    """Whether TMA can bring the window."""
    vector, axis = 16 // DTYPE_BYTES[problem.dtype], problem.axes3[2]
    if lanes[3] < problem.input_size[-1] and lanes[3] * axis.stride % vector:
        return False
    # Channels behind a group's last meet no weight; what lies there must be none of the next group's.
    whole = problem.groups == 1 or pass_ is Pass.WEIGHT_GRAD or problem.out_channels_per_group % chunk == 0
    if not layouts.aligned or not whole or _box_strides(problem, layouts) is None:
        return False
    images, slabs, rows, columns = extent_of_window(problem, lanes)
    columns = round_up(-axis.padding % vector + columns, vector)
    return max(images, slabs, rows, columns, chunk) <= _MAX_BOX_SIDE


@lru_cache(maxsize=64)
def _box_strides(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[int, ...] | None:
    """Of boxes of the output gradient; None where TMA does not take it apart."""
    size = DTYPE_BYTES[problem.dtype]
    batch, channels, depth, height, _ = five(problem.output_shape)
    image, channel, slab, row, _ = (step * size for step in layouts.output)
    strides = engine_strides([(height, row), (depth, slab), (batch, image), (channels, channel)])
    return strides if channel % 16 == 0 else None


def _as_rows(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, chunk: int, lanes: Four) -> Window | None:
    """The window as threads copy it, in pieces of 16 bytes: steps are the tensor's, modulo those.

    None where pairs of taps would begin at odd elements, or where it is larger than any GPU's shared memory.
    """
    size = DTYPE_BYTES[problem.dtype]
    vector = PIECE_BYTES // size
    extent = extent_of_window(problem, lanes)
    image, channel, slab, row, _ = layouts.output
    strides = image, slab, row, channel
    batch, channels, *sides = five(problem.output_shape)
    if in_pairs(problem) and any(
        stride % 2 and max(count, size) > 1
        for stride, count, size in zip(strides, (*extent[:3], 1), (batch, *sides[:2], channels))
    ):
        return None
    counts = (*extent[:3], problem.out_channels_per_group)
    of_image, of_slab, of_row, of_channel = (stride if count > 1 else 0 for stride, count in zip(strides, counts))
    _, slabs, rows, columns = extent

    def above(least: int, stride: int) -> int:
        """The least step that is the tensor's, modulo a piece."""
        return least + (stride - least) % vector

    def steps(row: int) -> Four:
        slab = above(rows * row, of_slab)
        image = above(slabs * slab, of_image)
        return image, slab, row, above(extent[0] * image, of_channel)

    narrow = above(columns + vector - 1, of_row)  # a row ends, and the next begins, in pieces of their own
    if _LEAST_BUFFERS * chunk * steps(narrow)[3] * size > _MOST_SHARED:
        return None
    widths = range(narrow, narrow + 128 // size + 1, vector)
    row = _quietest(widths, lambda row: _conflicts(problem, pass_, lanes, steps(row)))
    return Window(extent, steps(row), math.ceil((columns + vector - 1) / vector))


def _quietest(widths: Iterable[int], conflicts: Callable[[int], float]) -> int:
    """The first of ``widths`` with the fewest passes through shared memory, of which one is the least there can be."""
    best = math.inf, 0
    for width in widths:
        passes = conflicts(width)
        if passes < best[0]:
            best = passes, width
        if passes <= 1:
            break
    return best[1]


def in_pairs(problem: ConvTransposeProblem) -> bool:
    """Whether two taps are read at once: they are neighbours, and begin at multiples of two, in rows that do."""
    axis = problem.axes3[2]
    even = not any(each % 2 for each in (axis.kernel, axis.stride, axis.padding, problem.output_padding[-1]))
    return even and axis.dilation == 1


def _conflicts(problem: ConvTransposeProblem, pass_: Pass, lanes: Four, steps: Four) -> float:
    """Passes of a warp through shared memory for one read of its rows.

    ``steps`` are the elements from one image, slab, row and channel of the window to the next.
    """
    image, slab, row, channel = steps
    of_d, of_h, of_w = problem.axes3
    positions = _first_places(lanes, (image, of_d.stride * slab, of_h.stride * row, of_w.stride))
    kernel = _FOUND, of_d.kernel, of_h.kernel, of_w.kernel
    taps = _first_places(kernel, (channel, of_d.dilation * slab, of_h.dilation * row, of_w.dilation))
    size = DTYPE_BYTES[problem.dtype]
    if pass_ is Pass.WEIGHT_GRAD:
        return _passes(taps, positions, size, in_pairs(problem))
    return _passes(positions, taps, size, False)


_FOUND = 32  # positions, and taps, that stand for all
_Places = tuple[tuple[int, int], ...]  # a box's extent along each dimension, and its step


def _first_places(counts: Four, steps: Four) -> _Places:
    """What decides where the first places of a box lie, in order: from the innermost dimension on, as many as do."""
    found: list[tuple[int, int]] = []
    room = _FOUND
    for count, step in zip(reversed(counts), reversed(steps)):
        if count > 1:
            found.append((min(count, room), step))
            room = -(-room // count)
            if room == 1:
                break
    return tuple(found)


@lru_cache(maxsize=16384)
def _passes(rows: _Places, k: _Places, size: int, paired: bool) -> float:
    """The same of rows, and of their elements, that lie at such places."""
    of_rows, of_k = _places(rows)[:: 2 if paired else 1], _places(k)[:: 4 // size]
    reads = 0
    for first, beyond in itertools.product((0, 8), (0, 8)):
        words = {(i + j) * size // 4 for i in of_rows[first : first + 8] for j in of_k[beyond : beyond + 4]}
        if paired and size == 4:  # words that are read together
            words |= {word + 1 for word in words}
        banks = bytearray(32)
        for word in words:
            banks[word & 31] += 1
        reads += max(banks)
    return reads / 4


def _places(box: _Places) -> list[int]:
    """The first of them, in order."""
    found = [0]
    for count, step in box:
        found = [place + further * step for further in range(count) for place in found]
    return found[:_FOUND]


def _input_runs(
    problem: ConvTransposeProblem, layouts: Layouts, variant: WgmmaVariant, lanes: Four
) -> tuple[Runs | None, int]:
    """The input's, of a tile of positions; beside them the elements of a row, where rows are one with those behind."""
    size = DTYPE_BYTES[problem.dtype]
    images, slabs, rows, columns = lanes
    batch, channels, depth, height, width = five(problem.input_shape)
    image, channel, slab, row, _ = (step * size for step in layouts.input)
    joined = width if columns == width and (height == 1 or layouts.input[3] == width) else 0
    length = columns * rows if joined else columns
    sides = (
        (width * height, channels, 1, depth, max(1, batch))
        if joined
        else (width, channels, height, depth, max(1, batch))
    )
    strides = engine_strides(zip(sides[1:], (channel, row, slab, image)))
    if strides is None and images * slabs * (1 if joined else rows) == 1:
        length = round_up(length, OPERATION_BYTES // size)  # threads can end a run with zeros
    span = next((span for span in (128, 64, 32) if length * size % span == 0), None)
    if not layouts.aligned or layouts.input[4] != 1 or span is None:
        return None, 0
    count = (images, slabs, 1 if joined else rows, length * size // span)
    if strides is None:
        # Float32 would have to be rounded to TF32 on its way.
        steps = zip(sides[1:], (channel, row, slab, image))
        begins = rows * width if joined else columns  # elements from a tile to the next, where there are several
        several = height > rows if joined else width > columns
        apart = (step for count, step in steps if count > 1)
        common = min(8, widest_piece(1, begins * size if several else 0, *apart))
        piece = common if size == 2 and common >= 4 else 0
        pieces = math.prod(count) * span // piece if piece else 0
        runs = Runs(count, span // size, span, variant.columns * span, None, piece)
        return (runs, joined) if 0 < pieces <= LOADERS else (None, 0)
    box = (span // size, variant.columns, 1, 1, 1)
    boxes = Boxes(problem.dtype, sides, strides, box, span, tf32=True)
    return Runs.of_boxes(count, boxes), joined


def _pixel_runs(problem: ConvTransposeProblem, layouts: Layouts, variant: WgmmaVariant, lanes: Four) -> Runs | None:
    """The input's where channels are innermost: a tile's pixels, some channels a box."""
    size, channels = DTYPE_BYTES[problem.dtype], problem.in_channels_per_group
    batch, _, depth, height, width = five(problem.input_shape)
    image, _, slab, row, column = (step * size for step in layouts.input)
    strides = engine_strides([(width, column), (height, row), (depth, slab), (batch, image)])
    pitch = channel_pitch(problem, channels)
    whole = math.prod(lanes) * size % OPERATION_BYTES == 0 and variant.columns * size % pitch == 0
    if not layouts.aligned or strides is None or not whole or max(lanes) > _MAX_BOX_SIDE:
        return None
    sides = (channels, width, height, depth, max(1, batch))
    boxes = Boxes(problem.dtype, sides, strides, (pitch // size, *lanes[::-1]), pitch, tf32=True)
    return Runs.of_boxes((1, 1, 1, variant.columns * size // pitch), boxes)


def _weight_runs(problem: ConvTransposeProblem, layouts: Layouts, variant: WgmmaVariant) -> Runs | None:
    """The weight's, of a stage."""
    size, columns = DTYPE_BYTES[problem.dtype], problem.out_channels_per_group * problem.taps
    if not layouts.aligned or columns * size % 16:
        return None
    depth = variant.out_chunk * problem.taps * size
    span = 128
    sides = (columns, problem.in_channels, 1, 1, 1)
    boxes = Boxes(
        problem.dtype, sides, (columns * size, 16, 16, 16), (span // size, variant.columns, 1, 1, 1), span, True, 1
    )
    return Runs.of_boxes((1, 1, 1, math.ceil(depth / span)), boxes)


def stage_cycles(problem: ConvTransposeProblem, pass_: Pass, variant: WgmmaVariant, tiling: Tiling) -> float:
    """Predicted cycles of a multiprocessor for a stage."""
    size, window = DTYPE_BYTES[problem.dtype], tiling.window
    reads = 4 * _reads(problem, pass_) * _conflicts(problem, pass_, tiling.lanes, window.steps)
    rows = tiling.runs.rows if tiling.runs.boxes is not None else 0
    if tiling.window_box is None:
        copies = _copy_cycles(problem, pass_, variant, tiling)
        if tiling.runs.boxes is None:
            pieces = tiling.runs.bytes // variant.columns // tiling.runs.piece_bytes
            copies += _RUN_PIECE * math.ceil(variant.columns / (LOADERS // pieces))
    else:
        rows += variant.out_chunk * window.rows * math.ceil(window.extent[3] * size / 128)
        copies = 0.0
    return tiling.steps * _operation(variant, reads) + rows * _ROW + copies + _STAGE


def _copy_cycles(problem: ConvTransposeProblem, pass_: Pass, variant: WgmmaVariant, tiling: Tiling) -> float:
    """The same for what loaders copy of a window (``operand/window_rows.cuh``)."""
    vector = PIECE_BYTES // DTYPE_BYTES[problem.dtype]
    pieces = tiling.window.rows * tiling.window.pieces
    apart = vector // math.gcd(vector, tiling.window.steps[3])  # channels that lie alike
    while apart < variant.out_chunk and apart * pieces < LOADERS:
        apart *= 2
    found = math.ceil(min(apart, variant.out_chunk) * pieces / LOADERS)
    copied = found * math.ceil(variant.out_chunk / apart)
    begun = 1 / tiling.tiles[3] if problem.padding[-1] > 0 else 0.0  # tiles that rows begin in
    stage, piece, copy = _COPIED[pass_, DTYPE_BYTES[problem.dtype]]
    return stage + found * piece + copied * (copy + begun * _WORDS)


def _reads(problem: ConvTransposeProblem, pass_: Pass) -> int:
    """How often a thread reads shared memory for its rows of an operation."""
    single = DTYPE_BYTES[problem.dtype] == 4
    if in_pairs(problem):
        return 2 if single and pass_ is Pass.WEIGHT_GRAD else 4
    return 4 if single else 8
