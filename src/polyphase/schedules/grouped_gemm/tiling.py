"""Tiles of cells in `grouped_gemm`, and the sizes of its products."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import SECTOR_BYTES, Layouts
from polyphase.schedules.cells import forward_gather
from polyphase.schedules.tensor_cores import parts_of, steps_of
from polyphase.schedules.tiles import Four, extents_of_tiles, tiles_of
from polyphase.schedules.window_gemm.stages import MAX_SIDE, MOVING_BYTES, StageBox, row_piece

_SIZES = tuple(1 << i for i in range(10))  # of tiles along a dimension, besides equal shares
_MAX_THREE_PARTS = 32 << 10  # most bytes of weights for three parts of float32; beyond, it has two, less accurate ones


@dataclass(frozen=True)
class Tiling:
    """The tiles into which a config cuts the cells, and their shared memory.

    ``first`` is the window's first pixel, relative to the tile's first cell, and ``skew`` the pixels from there to the
    first one that taps read. ``pitch`` and ``shift`` are members of the kernel's ``Params``.
    """

    tile_extent: Four
    tiles: Four
    first: Four
    skew: int
    window: StageBox
    pitch: Four
    shift: tuple[int, ...]
    joined: int
    staged_bytes: int
    bare_bytes: int
    table_bytes: int
    step_bytes: int

    @cached_property
    def total(self) -> int:
        return math.prod(self.tiles)

    @cached_property
    def cells(self) -> int:
        """Cells of a tile."""
        return math.prod(self.tile_extent)

    @property
    def whole_sectors(self) -> bool:
        """Whether rows begin and end with a sector of memory."""
        return not any(self.shift)


class _Product(NamedTuple):
    """Sizes of the kernel's ``Entries`` and weights, for a block's output channels."""

    row_blocks: int
    pixels: int
    entries: int
    parts: int
    steps: int
    weight_bytes: int


@lru_cache(maxsize=1024)
def product_of(problem: ConvTransposeProblem, out_chunk: int) -> _Product:
    """The product of a block with ``out_chunk`` output channels."""
    # For each dimension: the pixels that each phase with taps reads.
    taps = [
        [{-axis.shift(tap) for tap in of_phase} for of_phase in axis.taps_by_phase.values()] for axis in problem.axes3
    ]
    reads = [set(itertools.product(*pixels)) for pixels in itertools.product(*taps)]
    row_blocks = math.ceil(len(reads) * out_chunk / 16)
    entries = 0
    for block in range(row_blocks):
        first, last = 16 * block // out_chunk, (16 * block + 15) // out_chunk
        entries += len(set().union(*reads[first : last + 1]))
    pixels = math.prod(len(set().union(*phases)) for phases in taps)
    parts, steps = parts_of(problem), steps_of(problem)
    weight_bytes = 512 * steps * entries * (2 if parts > 1 else 1)
    if parts > 1:
        parts = 3 if weight_bytes <= _MAX_THREE_PARTS else 2
    return _Product(row_blocks, pixels, entries, parts, steps, weight_bytes)


def tile_extents(problem: ConvTransposeProblem, columns: int) -> list[Four]:
    """Extents of tiles of at most ``columns`` cells; two neighbours along w are among them."""
    cells = forward_gather(problem, Layouts.dense(problem)).cells
    return extents_of_tiles(problem.batch, cells, columns, range(1, 9), _SIZES, multiple=2)


def tiling_of(problem: ConvTransposeProblem, layouts: Layouts, out_chunk: int, tile: Four) -> Tiling | None:
    """The tiling by tiles with extents ``tile`` along n, d, h and w, or None if the kernel does not support it."""
    size, gather = DTYPE_BYTES[problem.dtype], forward_gather(problem, layouts)
    if gather.src.channels_last or gather.dst.channels_last:
        return None
    tiles = tiles_of(problem.batch, gather.cells, tile)
    depth, height, width = gather.cell_axes
    piece = row_piece(gather.src, size, layouts.aligned, 0 if tiles[3] <= 1 else tile[3])
    skew = width.first_offset % piece
    window = (tile[0], depth.window(tile[1]), height.window(tile[2]), round_up(width.window(tile[3]) + skew, piece))
    if max(window) >= MAX_SIDE:
        return None
    places = math.prod(window) // piece
    # Four neighbouring channels, or pairs of channels, begin in different banks.
    pitch = math.prod(window) * size
    pitch += (32 - pitch) % 128 if size == 4 else (16 - pitch) % 64
    part = StageBox(window, piece, pitch, places)

    sector = SECTOR_BYTES // size
    columns = gather.dst.shape[4]
    batch_stride, channel_stride, depth_stride, height_stride, _ = gather.dst.strides
    bare = any(along.owned < along.dst for along in (depth, height))
    lines, run = tile[2] * height.dst, tile[3] * width.dst
    whole = tile[3] >= gather.cells[2] and gather.dst.strides[3:] == (columns, 1) and lines > 1 and not bare
    row = columns if whole else round_up(run, sector) + sector
    slab = round_up(lines * row, sector) + sector if whole else tile[2] * height.owned * row
    image = tile[1] * depth.owned * slab
    channel = tile[0] * image
    channel += _padding(channel % (128 // size), channel_stride % sector, width.dst, size)
    bare_rows = (out_chunk if problem.bias else 1) if bare else 0
    strides = channel_stride, batch_stride, depth_stride, 0 if whole else height_stride
    staged = round_up(out_chunk * channel * size, 16)
    if out_chunk * channel >= 1 << 23:
        return None
    return Tiling(
        tile,
        tiles,
        (0, depth.first_offset, height.first_offset, width.first_offset - skew),
        skew,
        part,
        (channel, image, slab, row),
        tuple(stride % sector for stride in strides),
        lines if whole else 1,
        staged,
        bare_rows * round_up(run + sector, sector) * size,
        places * MOVING_BYTES,
        32 // size * pitch,
    )


@lru_cache(maxsize=1024)
def _padding(pitch: int, shift: int, stride: int, size: int) -> int:
    """Padding of a channel's pitch, in elements (whole vectors), with the fewest bank conflicts of a warp's store.

    Lanes are 8 channels by 4 pairs of cells; each channel begins ``shift`` elements further into a sector.
    """
    sector = SECTOR_BYTES // size

    def rounds(padding: int) -> int:
        words: dict[int, set[tuple[int, int]]] = {}
        for channel, cells in itertools.product(range(8), range(4)):
            element = channel * (pitch + padding) + channel * shift % sector + 2 * cells * stride
            words.setdefault(element * size // 4 % 32, set()).add((channel, element * size // 4))
        return max(map(len, words.values()))

    return min(range(0, 128 // size, 16 // size), key=lambda padding: (rounds(padding), padding))
