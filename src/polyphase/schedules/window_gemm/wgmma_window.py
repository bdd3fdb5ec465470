"""The window of the output gradient in a stage of the gradients by wgmma, and how fragments read it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, five
from polyphase.program.tensor_map import TensorMap, tma_strides
from polyphase.schedules.tensor_cores import MAX_BOX_SIDE
from polyphase.schedules.tiles import Four
from polyphase.schedules.window_gemm.window import extent_of_window

PIECE_BYTES = 16  # bytes of a cp.async
_LEAST_STAGES, _MOST_SHARED = 3, 256 << 10  # least stages of a kernel; bytes of shared memory, more than any GPU has
FOUND = 32  # the first positions and taps, for which bank conflicts are counted
_PAIRED_BYTES = 8  # most bytes from a position to the next in the window, for paired rows: 16 positions span 32 banks
_Places = tuple[tuple[int, int], ...]  # a box's extent along each dimension, and its step


@dataclass(frozen=True)
class Window:
    """The output gradient in a stage, as the kernels' ``Window``: TMA boxes, or copied rows."""

    extent: Four
    steps: Four  # elements from one image, slab, row and channel to the next
    joined: int = 0  # elements from one row of the tensor to the next, if rows are copied as one

    def params(self) -> dict[str, Any]:
        """The kernels' ``Window``."""
        return {"extent": self.extent, "step": self.steps, "joined": self.joined}

    @property
    def rows(self) -> int:
        """Rows of a channel."""
        return math.prod(self.extent[:3])


def window_by_tma(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, chunk: int, tile: Four
) -> tuple[Window, TensorMap, int] | None:
    """The window as TMA loads it, or None if TMA cannot.

    The third result is the skew: elements by which rows begin early, so that a box begins at a multiple of 16 bytes.
    """
    if not may_use_tma(problem, pass_, layouts, chunk, tile):
        return None
    size = DTYPE_BYTES[problem.dtype]
    vector, strides = 16 // size, _box_strides(problem, layouts)
    assert strides is not None
    batch, channels, depth, height, width = five(problem.output_shape)
    images, slabs, rows, columns = extent_of_window(problem, tile)
    skew = -problem.axes3[2].padding % vector
    columns = round_up(skew + columns, vector)

    def steps(columns: int) -> Four:
        return slabs * rows * columns, rows * columns, columns, images * slabs * rows * columns

    widths = range(columns, min(columns + 128 // size, MAX_BOX_SIDE) + 1, vector)
    columns = _quietest(widths, lambda columns: conflicts_of(problem, pass_, tile, steps(columns)))
    sides = (width, height, depth, max(1, batch), channels)
    tensor = 1 if pass_ is Pass.WEIGHT_GRAD else 0
    tensor_map = TensorMap(problem.dtype, sides, strides, (columns, rows, slabs, images, chunk), 16, True, tensor)
    return Window((images, slabs, rows, columns), steps(columns)), tensor_map, skew


def may_use_tma(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, chunk: int, tile: Four) -> bool:
    """Whether TMA can load the window."""
    vector, axis = 16 // DTYPE_BYTES[problem.dtype], problem.axes3[2]
    if tile[3] < problem.input_size[-1] and tile[3] * axis.stride % vector:
        return False
    # A box must end with its group: channels of the next one would be multiplied by zero, but may be NaN.
    whole = problem.groups == 1 or pass_ is Pass.WEIGHT_GRAD or problem.out_channels_per_group % chunk == 0
    if not layouts.aligned or not whole or _box_strides(problem, layouts) is None:
        return False
    images, slabs, rows, columns = extent_of_window(problem, tile)
    columns = round_up(-axis.padding % vector + columns, vector)
    return max(images, slabs, rows, columns, chunk) <= MAX_BOX_SIDE


@lru_cache(maxsize=64)
def _box_strides(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[int, ...] | None:
    """Strides in bytes of the output gradient's tensor map; None if TMA cannot read it."""
    size = DTYPE_BYTES[problem.dtype]
    batch, channels, depth, height, _ = five(problem.output_shape)
    image, channel, slab, row, _ = (step * size for step in layouts.output)
    strides = tma_strides([(height, row), (depth, slab), (batch, image), (channels, channel)])
    return strides if channel % 16 == 0 else None


def as_rows(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, chunk: int, tile: Four) -> Window | None:
    """The window as producers copy it (`copied_window`); None also if pairs of taps would begin at odd elements."""
    image, channel, slab, row, _ = layouts.output
    batch, channels, *sides = five(problem.output_shape)
    extent = extent_of_window(problem, tile)
    steps, counts = (image, slab, row, channel), (*extent[:3], 1)
    odd = (step % 2 and max(count, size) > 1 for step, count, size in zip(steps, counts, (batch, *sides[:2], channels)))
    if in_pairs(problem) and any(odd):
        return None
    return copied_window(problem, layouts, chunk, tile, lambda steps: conflicts_of(problem, pass_, tile, steps))


def copied_window(
    problem: ConvTransposeProblem,
    layouts: Layouts,
    chunk: int,
    tile: Four,
    conflicts: Callable[[Four], float],
    masked: bool = False,
) -> Window | None:
    """The window of a tile that is copied row by row: its steps equal the tensor's modulo 16 bytes.

    Whole rows that need no zeros between them are contiguous, and copied as one. Other windows get the row width
    whose steps have the fewest ``conflicts``. ``masked``: the reader masks padding. None if the window is larger than
    any GPU's shared memory.
    """
    size, extent = DTYPE_BYTES[problem.dtype], extent_of_window(problem, tile)
    vector = PIECE_BYTES // size
    image, channel, slab, row, _ = layouts.output
    counts = (*extent[:3], problem.out_channels_per_group)
    of_image, of_slab, of_row, of_channel = [
        step if count > 1 else 0 for step, count in zip((image, slab, row, channel), counts)
    ]
    images, slabs, rows, columns = extent

    def above(least: int, stride: int) -> int:
        """The least step from ``least`` on that equals the tensor's ``stride`` modulo a piece."""
        return least + (stride - least) % vector

    def steps(row: int, of_slabs: int) -> Four:
        slab = above(of_slabs, of_slab)
        image = above(slabs * slab, of_image)
        return image, slab, row, above(images * image, of_channel)

    if _joins_rows(problem, tile, masked) and rows > 1 and row <= 2 * columns and (masked or columns <= row):
        joined = (rows - 1) * row + columns
        found = Window((images, slabs, 1, joined), steps(row, above(joined + vector - 1, 0)), row)
    else:
        narrow = above(columns + vector - 1, of_row)  # two rows share no 16-byte piece
        widths = range(narrow, narrow + 128 // size + 1, vector)
        if _LEAST_STAGES * chunk * steps(narrow, rows * narrow)[3] * size > _MOST_SHARED:
            return None
        row = _quietest(widths, lambda row: conflicts(steps(row, rows * row)))
        found = Window(extent, steps(row, rows * row))
    return None if _LEAST_STAGES * chunk * found.steps[3] * size > _MOST_SHARED else found


def least_extent(problem: ConvTransposeProblem, tile: Four, masked: bool = False) -> Four:
    """Least extents of a copied window: rows that need no zeros between them count as one row."""
    images, slabs, rows, columns = extent_of_window(problem, tile)
    return (images, slabs, 1, rows * columns) if _joins_rows(problem, tile, masked) else (images, slabs, rows, columns)


def _joins_rows(problem: ConvTransposeProblem, tile: Four, masked: bool) -> bool:
    whole = (masked or problem.padding[-1] == 0) and tile[3] >= problem.input_size[-1]
    return whole and math.prod(problem.output_size[-2:]) < 2**30


def _quietest(widths: Iterable[int], conflicts: Callable[[int], float]) -> int:
    """The first of ``widths`` with the fewest wavefronts (``conflicts``), which are at least 1."""
    best = math.inf, 0
    for width in widths:
        passes = conflicts(width)
        if passes < best[0]:
            best = passes, width
        if passes <= 1:
            break
    return best[1]


def in_pairs(problem: ConvTransposeProblem) -> bool:
    """Whether one load reads two taps: they are neighbours, and pairs and rows begin at even elements."""
    axis = problem.axes3[2]
    even = not any(each % 2 for each in (axis.kernel, axis.stride, axis.padding, problem.output_padding[-1]))
    return even and axis.dilation == 1


def rows_in_pairs(problem: ConvTransposeProblem, pass_: Pass) -> bool:
    """Whether a thread's rows are neighbours, so that a weight gradient loads and an input gradient stores two at once.

    Not for an input gradient whose positions are so far apart in the window that pairs have more bank conflicts.
    """
    if pass_ is Pass.WEIGHT_GRAD:
        return in_pairs(problem)
    return problem.axes3[2].stride * DTYPE_BYTES[problem.dtype] <= _PAIRED_BYTES


def conflicts_of(problem: ConvTransposeProblem, pass_: Pass, tile: Four, steps: Four) -> float:
    """Wavefronts of shared memory for one read of a warp's A fragment.

    ``steps`` are the elements from one image, slab, row and channel of the window to the next.
    """
    image, slab, row, channel = steps
    of_d, of_h, of_w = problem.axes3
    positions = first_places(tile, (image, of_d.stride * slab, of_h.stride * row, of_w.stride))
    kernel = FOUND, of_d.kernel, of_h.kernel, of_w.kernel
    taps = first_places(kernel, (channel, of_d.dilation * slab, of_h.dilation * row, of_w.dilation))
    size = DTYPE_BYTES[problem.dtype]
    if pass_ is Pass.WEIGHT_GRAD:
        return _passes(taps, positions, size, in_pairs(problem), size == 4)
    return _passes(positions, taps, size, rows_in_pairs(problem, pass_), False)


def first_places(counts: tuple[int, ...], steps: tuple[int, ...]) -> _Places:
    """The innermost dimensions of a box that its first `FOUND` elements span: (extent, step) of each."""
    found: list[tuple[int, int]] = []
    room = FOUND
    for count, step in zip(reversed(counts), reversed(steps)):
        if count > 1:
            found.append((min(count, room), step))
            room = -(-room // count)
            if room == 1:
                break
    return tuple(found)


@lru_cache(maxsize=16384)
def _passes(rows: _Places, k: _Places, size: int, paired: bool, at_once: bool) -> float:
    """Wavefronts of a read of ``rows`` at ``k``; ``paired``: a thread's rows are neighbours, ``at_once``: one load."""
    of_rows, of_k = _places(rows)[:: 2 if paired else 1], _places(k)[:: 4 // size]
    reads = 0
    for first, beyond in itertools.product((0, 8), (0, 8)):
        words = {(i + j) * size // 4 for i in of_rows[first : first + 8] for j in of_k[beyond : beyond + 4]}
        if paired and at_once:  # the second words of pairs
            words |= {word + 1 for word in words}
        reads += _most_in_a_bank(words)
    return reads / 4


@lru_cache(maxsize=4096)
def wavefronts(places: _Places, size: int) -> float:
    """Wavefronts of a warp's read of an element of ``size`` bytes at each place."""
    return float(_most_in_a_bank({place * size // 4 for place in _places(places)}))


def _most_in_a_bank(words: set[int]) -> int:
    banks = bytearray(32)
    for word in words:
        banks[word & 31] += 1
    return max(banks)


def _places(box: _Places) -> list[int]:
    """Offsets of the first `FOUND` elements of a box, in order."""
    found = [0]
    for count, step in box:
        found = [place + further * step for further in range(count) for place in found]
    return found[:FOUND]
