"""Both gradients by Hopper's instruction, ``kernels/input_grad_wgmma.cu`` and ``kernels/weight_grad_wgmma.cu``."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from polyphase.algorithms.base import (
    TENSOR_MAP_BYTES,
    Boxes,
    Candidate,
    Four,
    Launch,
    Layouts,
    affordable_planes,
    engine_strides,
    first_candidates,
    layer_constants,
    padded,
    round_up,
    rounds_of,
    slower_of,
    standard,
    tiles_of,
)
from polyphase.algorithms.gather import Side, five
from polyphase.algorithms.gradient import Gradient, blocks_of, lanes_of, window_of
from polyphase.algorithms.rankings import kept
from polyphase.algorithms.stages import MAX_SIDE, MOVING_BYTES, STILL_BYTES, Part, copy_cycles
from polyphase.algorithms.tensor_cores import OPERATION_BYTES
from polyphase.device import DeviceInfo
from polyphase.jit.source import Constant, KernelSource
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass

_GROUPS = 2  # of 128 threads that multiply; one more loads
_LOADERS = 128
_OFFERED = 6
_BUFFERS = (6, 5, 4, 3)  # of stages; tried from the left
_MOST_COLUMNS = 256  # of an instruction
_MOST_SUMS = 256  # columns by row tiles of a group
_MAX_BOX_SIDE = 256  # elements that the copy engine brings at once along one dimension
_LEAST_COPIED_ROW = 8  # positions along the width of a tile whose window is copied, where images are wider
_FLUSH = 8192  # k that the cores sum
_STILL = 12 << 10  # bytes of shared memory for what does not depend on stages, at most


class WgmmaVariant(NamedTuple):
    """The compile-time shape of a kernel; ``window_wgmma.cuh`` says what the names mean. ``positions`` of a tile."""

    row_tiles: int
    columns: int
    out_chunk: int
    positions: int
    buffers: int

    @property
    def rows(self) -> int:
        """Positions, or pairs of output channel and tap, of a block."""
        return 64 * _GROUPS * self.row_tiles


@dataclass(frozen=True)
class _Runs:
    """What the copy engine brings for a stage, as the kernels' ``Runs``, and the boxes that it is made of."""

    count: Four
    length: int
    span: int
    boxes: Boxes

    def packed(self) -> bytes:
        return struct.pack("<6i", *self.count, self.length, self.span)

    @property
    def column_bytes(self) -> int:
        """Of a stage, for a column."""
        return math.prod(self.count) * self.span


@dataclass(frozen=True)
class _Tiling:
    """How a variant cuts the input positions into tiles, and what that takes of shared memory, in bytes."""

    lanes: Four
    tiles: Four
    window: Part
    skew: int
    runs: _Runs
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


class _GradientWgmma(Gradient):
    """What the two kernels share."""

    def _refusal(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} lacks Hopper's matrix instruction"
        if problem.channels_last:
            return "reads tensors whose pixels are innermost"
        row = problem.out_channels_per_group * problem.taps * DTYPE_BYTES[problem.dtype]
        if self.pass_ is Pass.INPUT_GRAD and row % 16:
            return f"an input channel's weights, {row} bytes, are no multiple of 16 bytes"
        if not _ranked(standard(problem), self.pass_, device):
            return f"no stage of {problem.taps} taps fits shared memory, or none whose rows the copy engine takes"
        return None

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> Iterator[Candidate]:
        """Ranked at a typical size, so that a layer keeps its kernel, and none where the first cannot be launched."""

        def predict(variant: WgmmaVariant) -> tuple[float, str] | None:
            tiling = _tiling(problem, pass_, layouts, variant, device)
            return None if tiling is None else _estimate(problem, pass_, variant, tiling, device)

        ranked = _ranked(standard(problem), pass_, device)
        found = first_candidates(self.name, ranked, predict, _OFFERED)
        first = next(found, None)
        if first is not None and first.variant == ranked[0]:
            yield first
            yield from found

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: WgmmaVariant
    ) -> Launch:
        tiling = _tiling(problem, pass_, layouts, variant, device)
        assert tiling is not None
        grad = Side(five(problem.output_shape), layouts.output)
        x = Side(five(problem.input_shape), layouts.input)
        blocks = blocks_of(problem, pass_, variant.columns, variant.out_chunk)
        shared = (tiling.table, tiling.stage, tiling.window_at)
        geometry = bytes(2 * TENSOR_MAP_BYTES) + grad.packed()
        planes = 1
        if pass_ is Pass.WEIGHT_GRAD:
            parts = _parts(problem, variant, tiling, device)
            length = max(1, math.ceil(tiling.total / parts))
            planes = max(1, math.ceil(tiling.total / length))
            flush = max(1, _FLUSH * DTYPE_BYTES[problem.dtype] // (OPERATION_BYTES * tiling.steps))
            geometry += tiling.window.packed() + tiling.runs.packed()
            geometry += struct.pack("<2i8i", problem.batch, problem.groups, *tiling.lanes, *tiling.tiles)
            geometry += struct.pack("<5i", tiling.joined, tiling.steps, flush, tiling.skew, tiling.box_bytes)
            geometry += struct.pack("<3i", *shared)
            geometry = padded(geometry)
            geometry += struct.pack("<3q", length, tiling.total, math.prod(problem.weight_shape))
            grid = blocks * planes
        else:
            geometry += x.packed() + tiling.window.packed() + tiling.runs.packed()
            geometry += struct.pack("<9i", problem.batch, *tiling.lanes, *tiling.tiles)
            geometry += struct.pack("<5i", tiling.skew, tiling.box_bytes, *shared)
            grid = blocks * tiling.total
        geometry = padded(geometry, TENSOR_MAP_BYTES // 2)
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_),
            ("WARPS", 4 * _GROUPS + _LOADERS // 32),
            ("LOAD_WARPS", _LOADERS // 32),
            ("FIRST_LOAD_WARP", 4 * _GROUPS),
            ("ROW_TILES", variant.row_tiles),
            ("COLUMN_TILES", variant.columns // 8),
            ("OUT_CHUNK", variant.out_chunk),
            ("PAIRS", _in_pairs(problem)),
            ("BUFFERS", variant.buffers),
            ("PARTS", 1),
            ("MIN_BLOCKS", 1),
            ("WGMMA", True),
        )
        return Launch(
            source=KernelSource(self.name, problem.dtype, True, constants),
            grid=(grid, 1, 1),
            block=128 * _GROUPS + _LOADERS,
            shared_bytes=_shared_bytes(variant, tiling),
            geometry=geometry,
            planes=planes,
            boxes=tuple(each for each in (tiling.runs.boxes, tiling.window_box) if each is not None),
        )


class InputGradWgmma(_GradientWgmma):
    """The input gradient: a tile of positions and all output channels, stage by stage."""

    pass_ = Pass.INPUT_GRAD
    name = "input_grad_wgmma"
    any_size = True


class WeightGradWgmma(_GradientWgmma):
    """The weight gradient: all taps of some channels, in parts of batch × positions that are added in a fixed order."""

    pass_ = Pass.WEIGHT_GRAD
    name = "weight_grad_wgmma"
    any_size = False


def _parts(problem: ConvTransposeProblem, variant: WgmmaVariant, tiling: _Tiling, device: DeviceInfo) -> int:
    """Parts of the positions: the most that leave no multiprocessor idle for long."""
    blocks = blocks_of(problem, Pass.WEIGHT_GRAD, variant.columns, variant.out_chunk)
    most = max(1, min(affordable_planes(problem), tiling.total // 8, 4 * device.multiprocessors // blocks))

    def rounds(parts: int) -> float:
        return math.ceil(blocks * parts / device.multiprocessors) * (math.ceil(tiling.total / parts) + 4)

    return min(range(1, most + 1), key=lambda parts: (rounds(parts), parts))


def _shared_bytes(variant: WgmmaVariant, tiling: _Tiling) -> int:
    return variant.buffers * tiling.stage + tiling.table + tiling.places


def _tiling(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, variant: WgmmaVariant, device: DeviceInfo
) -> _Tiling | None:
    """The tiles of least work whose stages fit shared memory."""
    available = device.shared_bytes_per_block - _STILL
    tilings = _tilings(problem, pass_, layouts, variant._replace(buffers=0))
    return next((tiling for tiling in tilings if _shared_bytes(variant, tiling) <= available), None)


@lru_cache(maxsize=64)  # a list has hundreds of kilobytes; variants of one call follow each other
def _tilings(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, variant: WgmmaVariant) -> list[_Tiling]:
    """All tiles, those of least work first."""
    if (layouts.weight_channels_last and pass_ is Pass.INPUT_GRAD) or layouts.output[4] != 1:
        return []
    lanes = {
        (images >> halved, depth, height, width)
        for images, depth, height, width in lanes_of(problem, variant.positions)
        for halved in range(images.bit_length())
    }
    tilings = (_tiles(problem, pass_, layouts, variant, each) for each in sorted(lanes))
    found = [each for each in tilings if each is not None and max(each.window.extent) <= MAX_SIDE]
    least = min(_LEAST_COPIED_ROW, problem.input_size[-1])
    long = [each for each in found if each.window_box is not None or each.lanes[3] >= least]
    return sorted(long or found, key=lambda tiling: tiling.total * _stage_cycles(problem, pass_, variant, tiling))


def _tiles(
    problem: ConvTransposeProblem,
    pass_: Pass,
    layouts: Layouts,
    variant: WgmmaVariant,
    lanes: Four,
) -> _Tiling | None:
    size = DTYPE_BYTES[problem.dtype]
    if pass_ is Pass.WEIGHT_GRAD:
        found = _input_runs(problem, layouts, variant, lanes)
        steps = math.prod(lanes) * size // OPERATION_BYTES
    else:
        found = _weight_runs(problem, layouts, variant), 0
        steps = variant.out_chunk * problem.taps * size // OPERATION_BYTES
    runs, joined = found
    if runs is None:
        return None
    window_box = None
    if (brought := _as_box(problem, pass_, layouts, variant, lanes)) is not None:
        window, window_box, skew = brought
    else:  # pairs begin at multiples of two in every row
        window, skew = window_of(problem, layouts, variant.out_chunk, lanes, 2 if _in_pairs(problem) else 1)
    window_at = runs.column_bytes * variant.columns
    stage = round_up(window_at + variant.out_chunk * window.pitch, 1024)
    tiles = tiles_of(problem.batch, five(problem.input_shape)[2:], lanes)
    table = round_up(4 * steps * OPERATION_BYTES // size, 16)
    places = window.places * (MOVING_BYTES if pass_ is Pass.WEIGHT_GRAD else STILL_BYTES)
    if window_box is not None:
        places = 0
    return _Tiling(lanes, tiles, window, skew, runs, window_box, joined, steps, window_at, stage, table, places)


def _as_box(
    problem: ConvTransposeProblem,
    pass_: Pass,
    layouts: Layouts,
    variant: WgmmaVariant,
    lanes: Four,
) -> tuple[Part, Boxes, int] | None:
    """The window as the copy engine brings it, where it can.

    Beside it the elements that its rows begin before the first that is met: a box begins at a multiple of 16 bytes.
    """
    size, chunk = DTYPE_BYTES[problem.dtype], variant.out_chunk
    vector = 16 // size
    # Channels behind a group's last meet no weight; what lies there must be none of the next group's.
    whole = problem.groups == 1 or pass_ is Pass.WEIGHT_GRAD or problem.out_channels_per_group % chunk == 0
    if not layouts.aligned or not whole:
        return None
    batch, channels, depth, height, width = five(problem.output_shape)
    image, channel, slab, row, _ = (step * size for step in layouts.output)
    strides = engine_strides([(height, row), (depth, slab), (batch, image), (channels, channel)])
    if strides is None or channel % 16:
        return None
    plain, _ = window_of(problem, replace(layouts, aligned=False), chunk, lanes)
    images, slabs, rows, columns = plain.extent
    axis = problem.axes3[2]
    skew = -axis.padding % vector
    columns = round_up(skew + columns, vector)
    if max(images, slabs, rows, columns, chunk) > _MAX_BOX_SIDE:
        return None
    if lanes[3] < problem.input_size[-1] and lanes[3] * axis.stride % vector:
        return None

    def extent(columns: int) -> Four:
        return images, slabs, rows, columns

    widths = range(columns, min(columns + 128 // size, _MAX_BOX_SIDE) + 1, vector)
    columns = min(widths, key=lambda columns: (_conflicts(problem, pass_, lanes, extent(columns)), columns))
    sides = (width, height, depth, max(1, batch), channels)
    tensor = 1 if pass_ is Pass.WEIGHT_GRAD else 0
    boxes = Boxes(problem.dtype, sides, strides, (columns, rows, slabs, images, chunk), 16, True, tensor)
    elements = math.prod(extent(columns))
    return Part(extent(columns), vector, elements * size, elements // vector), boxes, skew


def _in_pairs(problem: ConvTransposeProblem) -> bool:
    """Whether two taps are read at once: they are neighbours, and begin at multiples of two."""
    axis = problem.axes3[2]
    return axis.kernel % 2 == 0 and axis.dilation == 1 and axis.stride % 2 == 0 and axis.padding % 2 == 0


def _conflicts(problem: ConvTransposeProblem, pass_: Pass, lanes: Four, extent: Four) -> float:
    """Passes of a warp through shared memory for one read of its rows, where the window is of that extent."""
    rows_are_taps = pass_ is Pass.WEIGHT_GRAD
    paired = rows_are_taps and _in_pairs(problem)
    return _passes(problem.axes3, DTYPE_BYTES[problem.dtype], rows_are_taps, paired, lanes, extent)


@lru_cache(maxsize=16384)
def _passes(
    axes: tuple[Axis, Axis, Axis], size: int, rows_are_taps: bool, paired: bool, lanes: Four, extent: Four
) -> float:
    _, slabs, rows, columns = extent
    pitch = math.prod(extent)

    def offset(n: int, d: int, h: int, w: int) -> int:
        return ((n * slabs + d) * rows + h) * columns + w

    steps = [[axis.stride for axis in axes], [axis.dilation for axis in axes]]
    positions = [offset(n, d * steps[0][0], h * steps[0][1], w * steps[0][2]) for n, d, h, w in _indices(lanes)]
    taps = [
        channel * pitch + offset(0, d * steps[1][0], h * steps[1][1], w * steps[1][2])
        for channel, d, h, w in _indices((_SAMPLE, *(axis.kernel for axis in axes)))
    ]
    of_rows, of_k = (taps, positions) if rows_are_taps else (positions, taps)
    of_rows = of_rows[:: 2 if paired else 1]
    of_k = of_k[:: 4 // size]
    beside = (0, 1) if paired and size == 4 else (0,)  # words that are read together
    reads = 0
    for row, k in itertools.product((0, 8), (0, 8)):
        words = {(i + j) * size // 4 + word for i in of_rows[row : row + 8] for j in of_k[k : k + 4] for word in beside}
        banks = [0] * 32
        for each in words:
            banks[each % 32] += 1
        reads += max(banks)
    return reads / 4


_SAMPLE = 64  # positions, and taps, that stand for all


@lru_cache(maxsize=1024)
def _indices(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The first places of a box, in order."""
    return list(itertools.islice(itertools.product(*map(range, counts)), _SAMPLE))


def _input_runs(
    problem: ConvTransposeProblem, layouts: Layouts, variant: WgmmaVariant, lanes: Four
) -> tuple[_Runs | None, int]:
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
    span = next((span for span in (128, 64, 32) if length * size % span == 0), None)
    if not layouts.aligned or strides is None or layouts.input[4] != 1 or span is None:
        return None, 0
    count = (images, slabs, 1 if joined else rows, length * size // span)
    box = (span // size, variant.columns, 1, 1, 1)
    boxes = Boxes(problem.dtype, sides, strides, box, span, tf32=True)
    return _Runs(count, span // size, span, boxes), joined


def _weight_runs(problem: ConvTransposeProblem, layouts: Layouts, variant: WgmmaVariant) -> _Runs | None:
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
    return _Runs((1, 1, 1, math.ceil(depth / span)), span // size, span, boxes)


# Cycles, fitted to 790 measured variants on an H200 (docs/performance.md): for an instruction of the cores beside its
# operands, and to read shared memory once for those; for an operation; for what comes by the engine, a row of up to 128
# bytes, and by threads, times `copy_cycles`; for a stage; for a block, and each of its results.
_PRODUCT, _READ, _OPERATION = 19.2, 0.44, 90.0
_ROW, _COPIES, _STAGE = 1.36, 2.84, 548.0
_BLOCK, _RESULT = 2400.0, 0.32
_SEVERAL_TILES = 1.08  # all, where a group has several row tiles: predictions of those are too low


def _stage_cycles(problem: ConvTransposeProblem, pass_: Pass, variant: WgmmaVariant, tiling: _Tiling) -> float:
    """Predicted cycles of a multiprocessor for a stage."""
    size, window = DTYPE_BYTES[problem.dtype], tiling.window
    reads = 4 * _reads(problem, pass_) * _conflicts(problem, pass_, tiling.lanes, window.extent)
    rows = math.prod(tiling.runs.count) * variant.columns
    copies = 0.0
    if tiling.window_box is None:
        copies = copy_cycles(window, variant.out_chunk, _LOADERS // 32, size)
    else:
        rows += variant.out_chunk * math.prod(window.extent[:3]) * math.ceil(window.extent[3] * size / 128)
    product = _PRODUCT + _READ * reads + 0.06 * variant.columns / 2
    work = tiling.steps * (_GROUPS * variant.row_tiles * product + _OPERATION)
    cycles = work + rows * _ROW + copies * _COPIES + _STAGE
    return cycles * (_SEVERAL_TILES if variant.row_tiles > 1 else 1.0)


def _reads(problem: ConvTransposeProblem, pass_: Pass) -> int:
    """How often a thread reads shared memory for its rows of an operation."""
    single = DTYPE_BYTES[problem.dtype] == 4
    if _in_pairs(problem):
        return 2 if single and pass_ is Pass.WEIGHT_GRAD else 4
    return 4 if single else 8


def _estimate(
    problem: ConvTransposeProblem, pass_: Pass, variant: WgmmaVariant, tiling: _Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    stage = _stage_cycles(problem, pass_, variant, tiling)
    blocks = blocks_of(problem, pass_, variant.columns, variant.out_chunk)
    block = _BLOCK + _RESULT * variant.rows * variant.columns
    if pass_ is Pass.WEIGHT_GRAD:
        parts = _parts(problem, variant, tiling, device)
        stages = math.ceil(tiling.total / parts)
        blocks *= parts
        end = 6e-6 + 8 * parts * math.prod(problem.weight_shape) / device.copy_bytes_per_second
    else:
        stages = math.ceil(problem.out_channels_per_group / variant.out_chunk)
        blocks *= tiling.total
        end = 0.0
    _, rounds = rounds_of(blocks, 1, device)
    work = rounds * (stages * stage + block) / device.clock_hz + end
    floor = problem.bytes / device.copy_bytes_per_second
    return slower_of(work, floor)


@lru_cache(maxsize=1024)
def _ranked(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[WgmmaVariant]:
    """Variants of a layer at a typical size, the fastest prediction first."""
    variants = list(_variants(problem, pass_))
    members = [each._replace(buffers=count) for each in variants for count in _BUFFERS]
    about = f"{pass_.value} by wgmma of {problem!r}, on {device!r}"
    return kept(about, members, lambda: _rank(problem, pass_, device, variants))


def _rank(
    problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, variants: list[WgmmaVariant]
) -> list[WgmmaVariant]:
    layouts = Layouts.dense(problem)
    scored = []
    for variant in variants:
        for buffers in reversed(_BUFFERS):  # more of them may leave room for worse tiles alone
            deeper = variant._replace(buffers=buffers)
            tiling = _tiling(problem, pass_, layouts, deeper, device)
            if tiling is not None:
                scored.append((_estimate(problem, pass_, deeper, tiling, device)[0], -buffers, deeper))
    best: dict[WgmmaVariant, WgmmaVariant] = {}  # by all but its buffers
    for *_, variant in sorted(scored):
        best.setdefault(variant._replace(buffers=0), variant)
    return list(best.values())


def _variants(problem: ConvTransposeProblem, pass_: Pass) -> Iterator[WgmmaVariant]:
    """Variants worth a thought, their buffers left open."""
    out, taps, size = problem.out_channels_per_group, problem.taps, DTYPE_BYTES[problem.dtype]
    operation = OPERATION_BYTES // size
    widths = {
        round_up(math.ceil(problem.in_channels_per_group / math.ceil(problem.in_channels_per_group / most)), 8)
        for most in (_MOST_COLUMNS, 128, 64)
    }
    for columns, row_tiles in itertools.product(sorted(widths), (1, 2, 4)):
        if columns * row_tiles > _MOST_SUMS:
            continue
        variant = WgmmaVariant(row_tiles, columns, 1, 1, 3)
        if pass_ is Pass.WEIGHT_GRAD:
            if taps > variant.rows:
                continue
            chunk = math.ceil(out / math.ceil(out * taps / (variant.rows // taps * taps)))
            for positions in (4 * operation, 8 * operation, 16 * operation):
                yield variant._replace(out_chunk=chunk, positions=positions)
        else:
            for chunk in (1, 2, 4, 8, 16, 32, 64, 128):
                if chunk * taps % operation == 0 and 2 <= chunk * taps // operation <= 32 and chunk < 2 * out:
                    yield variant._replace(out_chunk=chunk, positions=variant.rows)
