"""Ways to cut cells into tiles for `implicit_gemm`, and the layout of their halo in shared memory, for any config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from polyphase.problem.integers import round_up
from polyphase.problem.layouts import extent
from polyphase.program.tensor_map import tma_strides
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import BOX_PIXELS, CHUNK_BYTES, Taps
from polyphase.schedules.tensor_cores import MAX_BOX_SIDE

_MAX_SIDE = 1023, 63, 63  # pixels of a row, slabs, images of a tile and its halo (`Pixel` in the kernel packs them)
_PER_PIXEL = {16: 0.3, 8: 0.4, 4: 0.6, 2: 4.0}  # by bytes per copy: cost of a halo pixel relative to a cell


class Tile(NamedTuple):
    """The cells of a block and the layout of their halo in shared memory, in pixels (`Geometry` in the kernel)."""

    images: int
    cells: tuple[int, int, int]
    pitch: tuple[int, int, int]  # pixels from one image, slab and row to the next
    halo: int
    allocated: int
    skew: int
    copy_bytes: int
    tiles: tuple[int, int, int, int]
    boxes: int = 0  # boxes that TMA loads for a stage; 0 if threads copy
    box_pixels: int = 0
    run: int = 0  # consecutive cells, across rows and up to ``images`` images

    @property
    def tile_cells(self) -> int:
        """Cells of a tile; with whole images their pixels."""
        return self.run or self.images * math.prod(self.cells)

    @property
    def total(self) -> int:
        """Tiles of the whole problem."""
        return math.prod(self.tiles)

    def work(self, capacity: int) -> float:
        """Cost of all tiles up to a factor: cells and copies of the halo. Two-byte copies go through registers."""
        n, slabs, rows, columns = self.tiles
        per_pixel = 0.1 if self.boxes else _PER_PIXEL[self.copy_bytes]
        parts = 1 + 8 / self.cells[2] if columns > 1 else 1.0  # short rows move parts of cache lines
        return n * slabs * rows * columns * (capacity + per_pixel * self.halo) * parts


def pixels_join(gather: Gather) -> bool:
    """Whether the pixels of an image are contiguous."""
    sizes, strides = gather.src.shape[2:], gather.src.strides[2:]
    rows_join = sizes[1] == 1 or strides[1] == sizes[2] * strides[2]
    return rows_join and (sizes[0] == 1 or strides[0] == sizes[1] * sizes[2] * strides[2])


def copy_sizes(gather: Gather, row: int) -> list[int]:
    """Bytes of one copy from global memory, if rows of ``row`` pixels are copied."""
    size = gather.src_bytes
    batch, channel, depth, height, width = gather.src.strides
    if gather.src.channels_last:
        chunk = CHUNK_BYTES // size
        whole = gather.src_channels % chunk == 0 and all(s % chunk == 0 for s in (batch, depth, height, width))
        return [CHUNK_BYTES] if whole and gather.aligned else [size]
    sizes = [size]
    if width == 1 and gather.aligned:
        counts = [copied // size for copied in (4, 8, 16) if copied > size]
        sizes += [count * size for count in counts if all(s % count == 0 for s in (row, batch, channel))]
    return sizes


class Cuts(NamedTuple):
    """The tiles of at most ``capacity`` cells, halo included, that a config may have.

    ``banks``: pixels to which chunks of channels are padded to avoid bank conflicts. ``all_pixels``:
    every pixel of a tile is a column of the product. ``by_tma``: whether TMA loads them, or either; ``transposed``:
    as operands, `BOX_PIXELS` of every channel at a time. With whole images, they have at most ``most_pixels``,
    which is zero elsewhere.
    """

    gather: Gather
    capacity: int
    banks: int
    all_pixels: bool
    most_pixels: int
    by_tma: tuple[bool, ...]
    transposed: bool

    def addressable(self) -> int:
        """Images of a tile; several only if offsets within it have 32 bits."""
        sides = (self.gather.src, self.gather.dst)
        spans = [(side.strides[0], extent((1, 1, *side.shape[2:]), side.strides)) for side in sides]
        return min((2**31 - one) // max(1, stride) for stride, one in spans)

    def allocated(self, halo: int, read: int, boxes: int, box_pixels: int) -> int:
        """Pixels of a run in shared memory, with those that taps read beyond the halo.

        32 pixels of a chunk are transposed at a time, and chunks of channels use different banks. Boxes are swizzled in
        rows of eight, and stages of them are whole kilobytes.
        """
        whole = max(-(-halo // 32) * 32, read)
        if boxes:
            return -(-max(whole, boxes * box_pixels) // 32) * 32
        return whole + (self.banks - whole) % 8 if self.banks else whole

    def joined(
        self, images: int, run: int, read: int, tiles: tuple[int, int, int, int], boxes: tuple[int, int]
    ) -> Tile:
        """A tile of pixels in memory order."""
        depth, height, width = self.gather.src.shape[2:]
        pitch = depth * height * width, height * width, width
        size = max(copy_sizes(self.gather, pitch[0]))
        allocated = self.allocated(read, self.capacity, *boxes)
        return Tile(images, self.gather.cells, pitch, run, allocated, 0, size, tiles, *boxes, run)

    def runs(self) -> Iterator[Tile]:
        """Cells in memory order, across rows and, if possible, images."""
        gather, capacity, batch = self.gather, self.capacity, self.gather.src.shape[0]
        pixels = math.prod(gather.cells)
        alone = Taps.stay_in_cells(gather.axes) and gather.cells == gather.src.shape[2:]
        if not (alone and pixels_join(gather) and self.addressable() > capacity // max(1, pixels) + 2):
            return
        if (batch + 1) * pixels >= 2**31 - capacity:
            return
        for tma in self.by_tma:
            if tma and not _are_one_row(gather):
                continue
            if gather.src.channels_last or not tma:
                run, images, tiles = capacity, 2**31 - 1, (1, 1, 1, math.ceil(batch * pixels / capacity))
            elif pixels:
                parts, even = math.ceil(pixels / capacity), CHUNK_BYTES // gather.src_bytes
                run, images, tiles = math.ceil(pixels / parts / even) * even, 1, (batch, 1, 1, parts)
            else:
                continue
            boxes = _operands(run) if self.transposed else _pieces_of_row(run, gather) if tma else (0, 0)
            yield self.joined(images, run, capacity, tiles, boxes)

    def whole_images(self) -> Iterator[Tile]:
        """The pixels of consecutive whole images."""
        gather, capacity, batch = self.gather, self.capacity, self.gather.src.shape[0]
        pixels, last = math.prod(gather.src.shape[2:]), gather.src.channels_last
        images = min(capacity // max(1, pixels), _MAX_SIDE[2], max(1, batch), self.addressable())
        if pixels > self.most_pixels or images < 1:
            return
        if not pixels_join(gather) or (batch + 1) * pixels >= 2**31 - capacity:
            return
        run = images * pixels
        for tma in self.by_tma:
            if tma and not _are_one_row(gather):
                continue
            if tma and not last and pixels * gather.src_bytes % CHUNK_BYTES:
                continue
            boxes = _operands(run) if self.transposed else _pieces_of_row(run, gather) if last else (1, run)
            tiles = math.ceil(batch / images), 1, 1, 1
            yield self.joined(images, run, run, tiles, boxes if tma else (0, 0))

    def rectangles(self) -> Iterator[Tile]:
        """Rectangles of cells, in a run of pixels with the halo between rows.

        A row of the run is followed by the next row's left halo, which is also its own right halo if a tile is
        as wide as the image: all of it is padding then. The same holds for rows between images.
        """
        gather = self.gather
        _, _, depth_step, height_step, _ = gather.src.strides
        sizes = copy_sizes(gather, math.gcd(gather.src.shape[4], math.gcd(depth_step, height_step)))
        for tma in self.by_tma:
            if tma and box_strides(gather) is None:
                continue
            for copy_bytes in [max(sizes)] if tma else sizes:
                rectangles = _Rectangles(self, tma, copy_bytes)
                for columns in rectangles.columns():
                    if (row := rectangles.row(columns)) <= _MAX_SIDE[0]:
                        for rows in rectangles.rows(columns, row):
                            yield from rectangles.tiles(columns, row, rows)


@lru_cache(maxsize=512)
def all_tiles(cuts: Cuts) -> tuple[list[Tile], int]:
    """These tiles, in rising order of work, then of memory; and the least number of tiles of one kind."""
    if cuts.most_pixels:
        found = list(cuts.whole_images())
        return found, min((tile.total for tile in found), default=0)
    offered = list(cuts.runs())
    if not offered and not cuts.transposed:
        offered = list(cuts.rectangles())
    found = []
    for tile in sorted(offered, key=lambda tile: tile.work(cuts.capacity)):
        if not found or tile.allocated < found[-1].allocated or tile.halo < found[-1].halo:
            found.append(tile)
    return found, min((tile.total for tile in found), default=0)


def _are_one_row(gather: Gather) -> bool:
    """Whether boxes can read contiguous pixels as one row: those of an image, or with channels last of the tensor."""
    pixels, (image, *_, pixel) = math.prod(gather.src.shape[2:]), gather.src.strides
    if gather.src.channels_last:
        return gather.src.shape[0] == 1 or image == pixels * pixel
    return pixel == 1 or pixels == 1


def _is_box(row: int, rows: int, slabs: int, images: int) -> bool:
    """Whether TMA loads these pixels in one box, or a single row in several pieces."""
    return max(rows, slabs, images) <= MAX_BOX_SIDE and (row <= MAX_BOX_SIDE or rows * slabs * images == 1)


def _pieces_of_row(row: int, gather: Gather) -> tuple[int, int]:
    """Boxes of a row of pixels, and the pixels of each; one of several is transposed as a whole."""
    count, line = math.ceil(row / MAX_BOX_SIDE), 128 // gather.src_bytes
    return count, row if count == 1 else round_up(math.ceil(row / count), line)


def _operands(pixels: int) -> tuple[int, int]:
    """Boxes that are operands for ``pixels``, and the pixels of each."""
    return math.ceil(pixels / BOX_PIXELS), BOX_PIXELS


@lru_cache(maxsize=4096)
def box_strides(gather: Gather, one_row: bool = False) -> tuple[int, ...] | None:
    """Strides in bytes of all dimensions but the innermost, as a tensor map lists them; None if TMA
    cannot read the source. ``one_row``: the contiguous pixels of an image are one dimension (channels first)."""
    size = gather.src_bytes
    batch, channels, *spatial = zip(gather.src.shape, gather.src.strides)
    if one_row:
        spatial = [(1, 0), (1, 0), spatial[2]]
    dimensions = [*spatial[::-1], batch]
    inner = channels if gather.src.channels_last else dimensions.pop(0)
    if not gather.src.channels_last:
        dimensions.append(channels)
    last_joins = not gather.src.channels_last or channels[0] * size % CHUNK_BYTES == 0  # whatever the image's size
    if not gather.aligned or not last_joins or (inner[0] > 1 and inner[1] != 1):
        return None
    return tma_strides((count, step * size) for count, step in dimensions)


class _Rectangles:
    """`Cuts.rectangles` whose rows are copied in pieces of ``copy_bytes``."""

    def __init__(self, cuts: Cuts, tma: bool, copy_bytes: int) -> None:
        self._cuts, self._tma, self._copy_bytes = cuts, tma, copy_bytes
        gather, self._capacity, self._all_pixels = cuts.gather, cuts.capacity, cuts.all_pixels
        self._addressable = cuts.addressable()
        depth, height, _ = self._cells = gather.cells
        *_, self._src_height, self._src_width = gather.src.shape
        # Pixels that taps need after a cell, and before it: negative if all are after it.
        _, self._ahead_h, self._ahead_w = (max(0, -axis.shifts[0]) for axis in gather.axes)
        _, self._back_h, self._back_w = (axis.shifts[1] for axis in gather.axes)
        self._reach = tuple(axis.shifts[1] - axis.shifts[0] for axis in gather.axes)
        self._whole_heights = self._back_h >= self._ahead_h and height >= self._src_height and depth == 1
        copied = CHUNK_BYTES if tma else copy_bytes
        self._even = 1 if gather.src.channels_last else copied // gather.src_bytes
        self._skew = -self._back_w % self._even

    def columns(self) -> Iterator[int]:
        """Columns of a tile worth trying."""
        return _widths(self._cells[2], min(self._capacity, _MAX_SIDE[0]), self._even)

    def row(self, columns: int) -> int:
        """Pixels from one row of the run to the next."""
        width, even, skew, lead = self._cells[2], self._even, self._skew, self._back_w + self._skew
        shared = columns == width and lead >= self._ahead_w and width >= self._src_width
        return -(-(lead + columns if shared else skew + columns + self._reach[2]) // even) * even

    def rows(self, columns: int, row: int) -> Iterator[int]:
        """Rows of a tile worth trying: they divide the height evenly, at most as many as fit, and shares of these."""
        height, reach, capacity = self._cells[1], self._reach[1], self._capacity
        most = min(height, capacity // row - reach if self._all_pixels else (capacity - columns) // row + 1)
        return (rows for rows in _heights(height, max(0, most)) if rows + reach <= _MAX_SIDE[0])

    def tiles(self, columns: int, row: int, rows: int) -> Iterator[Tile]:
        """Those of one slab, and of as many as fit."""
        capacity, all_pixels, even = self._capacity, self._all_pixels, self._even
        batch = self._cuts.gather.src.shape[0]
        (depth, height, width), (reach_d, reach_h, reach_w) = self._cells, self._reach
        whole = self._whole_heights and rows == height
        halo_rows = self._back_h + rows if whole else rows + reach_h
        slab, flat = halo_rows * row, (rows - 1) * row + columns
        fitting = capacity // slab - reach_d if all_pixels else (capacity - flat) // slab + 1
        most_slabs = min(depth, _MAX_SIDE[1] - reach_d, fitting)
        if most_slabs < 1:
            return
        tail = -(-((self._ahead_h * row if whole else 0) + self._ahead_w) // even) * even
        for slabs in {1, -(-depth // -(-depth // most_slabs))}:
            image, images = (slabs + reach_d) * slab, 1
            if (slabs, rows, columns) == (depth, height, width):
                used = flat + (slabs - 1) * slab
                fitting = (capacity - tail) // image if all_pixels else (capacity - used) // image + 1
                images = max(1, min(batch, _MAX_SIDE[2], fitting, self._addressable))
            halo = images * image + tail
            if all_pixels and halo > capacity:
                continue
            boxes = 0, 0
            if self._tma:
                if not _is_box(row, halo_rows, slabs + reach_d, images):
                    continue
                boxes = _pieces_of_row(row, self._cuts.gather) if row > MAX_BOX_SIDE else (1, images * image)
            read = capacity if all_pixels else capacity + reach_d * slab + reach_h * row + reach_w + self._skew
            allocated = self._cuts.allocated(halo, read, *boxes)
            tiles = -(-batch // images), -(-depth // slabs), -(-height // rows), -(-width // columns)
            pitch, cells = (image, slab, row), (slabs, rows, columns)
            yield Tile(images, cells, pitch, halo, allocated, self._skew, self._copy_bytes, tiles, *boxes)


@lru_cache(maxsize=4096)
def _heights(height: int, most: int) -> set[int]:
    """Rows of tiles that divide a height evenly: at most ``most``, and shares of these."""
    return {-(-height // -(-height // max(1, most * n // 8))) for n in (8, 6, 4, 3, 2, 1)}


def _widths(width: int, most: int, even: int) -> Iterator[int]:
    """Columns of a tile worth trying: equal parts of a row, at most ``most``, multiples of ``even``."""
    least = -(-width // min(width, most))
    parts = range(least, min(-(-width // 8), least + 128) + 1)
    widths = (-(-width // n // even) * even if n > 1 else width for n in parts)
    return (columns for columns in dict.fromkeys(widths) if columns <= most)
