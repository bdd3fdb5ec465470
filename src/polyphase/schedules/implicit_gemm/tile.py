"""The tiles of `implicit_gemm`: which cells a thread block takes at once, and how they lie in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from polyphase.problem import DTYPE_BYTES
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import extent
from polyphase.program.tensor_map import Boxes, engine_strides
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import (
    BOX_PIXELS,
    CHUNK_BYTES,
    CONSUMERS,
    ROWS,
    SUMS_AT_ONCE,
    GemmVariant,
    Product,
    Taps,
    fills_stages,
)

_MAX_SIDE = 1023, 63, 63  # of a tile and its halo: pixels of a row, slabs, images (Pixel in the kernel packs them)
_MAX_STATIC_SHARED = 48 << 10
_MAX_BOX_SIDE = 256
_PER_PIXEL = {16: 0.3, 8: 0.4, 4: 0.6, 2: 4.0}  # of a copy's bytes: what it costs beside a cell


class Tile(NamedTuple):
    """The cells of a block and how their halo lies in shared memory, in pixels (see `Geometry` in the kernel)."""

    images: int
    cells: tuple[int, int, int]
    pitch: tuple[int, int, int]  # from one image, slab and row to the next
    halo: int
    allocated: int
    skew: int
    copy_bytes: int
    tiles: tuple[int, int, int, int]
    boxes: int = 0  # that the copy engine brings for a stage; none where threads copy
    box_pixels: int = 0
    run: int = 0  # cells of any rows, and images up to ``images``, one after the other

    @property
    def tile_cells(self) -> int:
        """Cells of a tile; of whole images their pixels."""
        return self.run or self.images * math.prod(self.cells)

    @property
    def total(self) -> int:
        """Tiles of the whole problem."""
        return math.prod(self.tiles)


def raw_pitch(halo: int, size: int) -> int:
    """Pixels of a channel in a copied stage, which is turned around 128 bytes at a time."""
    return math.ceil(halo * size / 128) * 128 // size


def shared_bytes(gather: Gather, variant: GemmVariant, tile: Tile) -> int:
    """Dynamic shared memory of a tile."""
    return _SharedBytes(gather, variant).of(tile, variant.stages, aligned=True)


class _SharedBytes:
    """Dynamic shared memory of the tiles of a variant, whatever its stages."""

    def __init__(self, gather: Gather, variant: GemmVariant) -> None:
        self.size = DTYPE_BYTES[gather.dtype]
        self.cells = variant.cells
        self.src_channels_last = gather.src.channels_last
        product = Product.of(gather, variant)
        weights = variant.row_parts * product.step_bytes(variant)
        self.fixed = _store_bytes(gather, variant) + 8 + (weights * product.steps if variant.resident else 0)
        self.weights = 0 if variant.resident else weights * variant.k_steps  # of a stage
        chunks = 2 * variant.k_steps
        self.allocated = variant.parts * chunks * CHUNK_BYTES
        self.in_boxes = variant.boxes
        raw = variant.raw_slots * chunks * CHUNK_BYTES * self.size // variant.operand_bytes(gather.dtype)
        self.raw = 0 if self.src_channels_last or variant.boxes else raw
        self.table = 4 + (8 if needs_wide_offsets(gather) else 4) * variant.loader_groups
        # Beside partial products little is left: a variant that fits must fit with any halo and wide offsets, too.
        self.worst_table = 4 + 8 * variant.loader_groups if variant.taps_in_rows else self.table
        self.worst_halo = variant.cells if variant.taps_in_rows else 0

    def least(self, stages: int) -> int:
        """Of any tile: all have pixels for each cell."""
        return self.fixed + stages * (self.weights + self.allocated * self.cells)

    def most_allocated(self, stages: int, limit: int, aligned: bool) -> int:
        """Pixels of a tile's run with which stages alone come to ``limit``."""
        return ((limit - self.fixed) // stages - self.weights) // self.allocated - (0 if aligned else 32)

    def of(self, tile: Tile, stages: int, aligned: bool) -> int:
        """Of one tile; not ``aligned``: of the worst like it, where every pixel is copied by itself."""
        copied = tile.copy_bytes // self.size if aligned and not self.src_channels_last else 1
        halo = tile.halo if aligned else max(tile.halo, self.worst_halo)
        total = self.fixed + stages * (self.weights + self.allocated * (tile.allocated + (0 if aligned else 32)))
        if tile.boxes and (aligned or self.in_boxes):
            return total + self.raw * tile.boxes * tile.box_pixels
        total += self.raw * raw_pitch(halo, self.size) if self.raw else 0
        return total + (self.table if aligned else self.worst_table) * -(-halo // copied)


def items_known(variant: GemmVariant, product: Product, stages: int) -> int:
    """The slots in which a block learns of its items (``QUEUE`` in the kernel)."""
    ahead = 2 * (stages + variant.loader_groups) + variant.raw_slots
    return math.ceil(ahead / product.stages(variant)) + 4


def _static_shared_bytes(variant: GemmVariant, product: Product, stages: int) -> int:
    """The kernel's ``Shared``: barriers, items that are known, distances of operations; what follows is aligned."""
    barriers = 8 * (2 * (stages + variant.raw_slots) + CONSUMERS + 1)
    barriers += round_up(12 * items_known(variant, product, stages), 8)
    alignment = 1024 if variant.boxes else 128  # of what follows
    numbers = (product.operations + product.row_blocks) * product.line_groups + 1
    return math.ceil((barriers + 4 * numbers) / alignment) * alignment


@lru_cache(maxsize=4096)
def needs_wide_offsets(gather: Gather) -> bool:
    """Whether offsets within an image need more than 32 bits."""
    return max(extent((1, 1, *side.shape[2:]), side.strides) for side in (gather.src, gather.dst)) >= 2**31


def _store_bytes(gather: Gather, variant: GemmVariant) -> int:
    """What results pass on their way to the destination (``STORE_BYTES`` in the kernel)."""
    size = DTYPE_BYTES[gather.dtype]
    if variant.taps_in_rows:
        sets, columns = variant.sets_at_once(gather), variant.round_pixels(gather)
        pitch = math.ceil((columns + (2 if sets > 1 else 0) - 8) / 32) * 32 + 8
        rows = sets * Taps.of(gather.axes).rows(variant.row_channels, variant.lines)
        return (1 if variant.split == "cells" else CONSUMERS) * rows * pitch * 4 + 4 * variant.cells
    places = CONSUMERS * variant.group_cells * (16 if needs_wide_offsets(gather) else 8)
    cells, columns = variant.piece(gather), variant.row_columns(gather)
    if gather.dst.channels_last:
        return places + CONSUMERS * cells * (ROWS * size + CHUNK_BYTES)
    vector = CHUNK_BYTES // size
    lanes = 32 if cells * columns > 16 * vector else 16
    own = gather.axes[2].stride // variant.width_parts  # a thread's of a cell
    staged = math.gcd(own if columns > own else 2 * own, vector)
    pitch = math.ceil(cells * columns / (lanes * vector)) * lanes * vector + 4 * staged
    return places + CONSUMERS * 4 * 8 * pitch * size


def pixels_join(gather: Gather) -> bool:
    """Whether the pixels of an image follow each other in memory."""
    sizes, strides = gather.src.shape[2:], gather.src.strides[2:]
    rows_join = sizes[1] == 1 or strides[1] == sizes[2] * strides[2]
    return rows_join and (sizes[0] == 1 or strides[0] == sizes[1] * sizes[2] * strides[2])


def copy_sizes(gather: Gather, row: int) -> list[int]:
    """Bytes that one copy from global memory may have, where ``row`` pixels and their whole rows are copied so."""
    size = DTYPE_BYTES[gather.dtype]
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


@lru_cache(maxsize=65536)
def best_tile(gather: Gather, variant: GemmVariant, batch: int, device: DeviceInfo, reserve: int = 0) -> Tile | None:
    """The tile that covers the problem with the least work; None where none fits shared memory less ``reserve``."""
    return best_tiles(gather, variant, (variant.stages,), batch, device, reserve)[0]


def best_tiles(
    gather: Gather, variant: GemmVariant, stages: Sequence[int], batch: int, device: DeviceInfo, reserve: int
) -> list[Tile | None]:
    """The `best_tile` of a variant with each of these ``stages`` in its own one's place; they rise."""
    return Room(gather, variant, stages, device, reserve).tiles(gather, batch)


class Room:
    """The shared memory that a variant leaves for tiles with each of some ``stages``.

    It is the same for images of all sizes, but for those within which offsets are wide.
    """

    def __init__(
        self, gather: Gather, variant: GemmVariant, stages: Sequence[int], device: DeviceInfo, reserve: int
    ) -> None:
        product, self._shared = Product.of(gather, variant), _SharedBytes(gather, variant)
        self._variant, self._stages, self._aligned = variant, stages, not reserve
        self._cells = variant.cells
        # Chunks of a pixel lie in different banks, where they are copied together.
        last = gather.src.channels_last
        self._banks = 8 // min(8, 2 * variant.k_steps) if last and not variant.boxes else 0
        self._transposed = variant.boxes and not last
        self._kind = variant.taps_in_rows, variant.round_pixels(gather) if variant.whole_images else 0
        self._limits = []
        for count in stages:
            static = _static_shared_bytes(variant, product, count)
            limit = device.shared_bytes_per_block - static - reserve
            if static > _MAX_STATIC_SHARED or self._shared.least(count) > limit:
                break  # nor do more stages fit
            self._limits.append((limit, self._shared.most_allocated(count, limit, self._aligned)))

    def tiles(self, gather: Gather, batch: int) -> list[Tile | None]:
        """The tile of least work that fits, with each of the stages."""
        found: list[Tile | None] = [None] * len(self._stages)
        if not self._limits or (self._transposed and not may_take_operands(gather)):
            return found
        boxes = self._variant.boxes
        engines = (True,) if boxes else (True, False) if may_take_boxes(gather, self._variant) else (False,)
        tiles = iter(_tiles(gather, self._cells, batch, self._banks, *self._kind, engines, self._transposed))
        tile = next(tiles, None)
        for index, (limit, most) in enumerate(self._limits):
            while tile is not None and (
                tile.allocated > most or self._shared.of(tile, self._stages[index], self._aligned) > limit
            ):
                tile = next(tiles, None)
            found[index] = tile
        return found


@lru_cache(maxsize=512)
def _tiles(
    gather: Gather,
    capacity: int,
    batch: int,
    banks: int,
    all_pixels: bool,
    most_pixels: int,
    engines: tuple[bool, ...],
    transposed: bool,
) -> list[Tile]:
    """Tiles of at most ``capacity`` cells, those in their halo included; least work first, then less memory.

    ``all_pixels``: of at most so many pixels, every one of which is a column of the product. ``engines``: whether the
    copy engine brings them; ``transposed``: as operands, `BOX_PIXELS` of every channel at a time. Where images are
    whole, they have at most ``most_pixels``, which is zero elsewhere.
    """
    if most_pixels:
        if math.prod(gather.src.shape[2:]) > most_pixels:
            return []
        return list(_whole_images(gather, capacity, batch, banks, engines, transposed))
    images = _addressable(gather)
    offered = [*_runs(gather, capacity, batch, banks, images, engines, transposed)]
    if not offered and not transposed:
        offered = [
            tile
            for engine in engines
            if not engine or box_strides(gather) is not None
            for tile in _boxes(gather, capacity, batch, banks, images, all_pixels, engine)
        ]
    works = [_work(tile, capacity) for tile in offered]
    found: list[Tile] = []
    for place in sorted(range(len(offered)), key=works.__getitem__):
        tile = offered[place]
        if not found or tile.allocated < found[-1].allocated or tile.halo < found[-1].halo:
            found.append(tile)
    return found


def _addressable(gather: Gather) -> int:
    """Images of a tile, of which several are taken only where offsets within it have 32 bits."""
    sides = [(side.strides[0], extent((1, 1, *side.shape[2:]), side.strides)) for side in (gather.src, gather.dst)]
    return min((2**31 - one) // max(1, stride) for stride, one in sides)


def _work(tile: Tile, capacity: int) -> float:
    """What tiles cost, up to a factor: their cells, and the copies of their halo. Two bytes pass registers."""
    images, slabs, rows, columns = tile.tiles
    per_pixel = 0.1 if tile.boxes else _PER_PIXEL[tile.copy_bytes]
    parts = 1 + 8 / tile.cells[2] if columns > 1 else 1.0  # short rows move parts of memory's lines
    return images * slabs * rows * columns * (capacity + per_pixel * tile.halo) * parts


def _runs(
    gather: Gather,
    capacity: int,
    batch: int,
    banks: int,
    addressable: int,
    engines: tuple[bool, ...],
    transposed: bool,
) -> Iterator[Tile]:
    """Cells in the order of memory, whatever rows they belong to; of several images, too, where that is possible."""
    depth, height, width = gather.cells
    pixels = depth * height * width
    alone = Taps.stay_in_cells(gather.axes) and gather.cells == gather.src.shape[2:]
    if not (alone and pixels_join(gather) and addressable > capacity // max(1, pixels) + 2):
        return
    if (batch + 1) * pixels >= 2**31 - capacity:
        return
    last, pitch = gather.src.channels_last, (pixels, height * width, width)
    for engine in engines:
        size = max(copy_sizes(gather, pixels))
        if engine and not _are_one_row(gather, batch):
            continue
        if last or not engine:
            run, images, tiles = capacity, 2**31 - 1, (1, 1, 1, math.ceil(batch * pixels / capacity))
        elif pixels:
            parts, even = math.ceil(pixels / capacity), CHUNK_BYTES // DTYPE_BYTES[gather.dtype]
            run, images, tiles = math.ceil(pixels / parts / even) * even, 1, (batch, 1, 1, parts)
        else:
            continue
        boxes = _operands(run) if transposed else _pieces_of_row(run, gather) if engine else (0, 0)
        allocated = _allocated(capacity, capacity, banks, *boxes)
        yield Tile(images, gather.cells, pitch, run, allocated, 0, size, tiles, *boxes, run)


def _whole_images(
    gather: Gather, capacity: int, batch: int, banks: int, engines: tuple[bool, ...], transposed: bool
) -> Iterator[Tile]:
    """The pixels of whole images, one after the other."""
    depth, height, width = gather.src.shape[2:]
    pixels = depth * height * width
    images = min(capacity // max(1, pixels), _MAX_SIDE[2], max(1, batch), _addressable(gather))
    if images < 1 or not pixels_join(gather) or (batch + 1) * pixels >= 2**31 - capacity:
        return
    last, run, pitch = gather.src.channels_last, images * pixels, (pixels, height * width, width)
    for engine in engines:
        if engine and not _are_one_row(gather, batch):
            continue
        if engine and not last and pixels * DTYPE_BYTES[gather.dtype] % CHUNK_BYTES:
            continue
        pieces = _operands(run) if transposed else _pieces_of_row(run, gather) if last else (1, run)
        boxes = pieces if engine else (0, 0)
        allocated = _allocated(run, capacity, banks, *boxes)
        size, tiles = max(copy_sizes(gather, pixels)), (math.ceil(batch / images), 1, 1, 1)
        yield Tile(images, gather.cells, pitch, run, allocated, 0, size, tiles, *boxes, run)


def _are_one_row(gather: Gather, batch: int) -> bool:
    """Whether boxes can take pixels that join as one row: those of an image, or with channels last of the tensor."""
    pixels, (image, *_, pixel) = math.prod(gather.src.shape[2:]), gather.src.strides
    if gather.src.channels_last:
        return batch == 1 or image == pixels * pixel
    return pixel == 1 or pixels == 1


def _is_box(row: int, rows: int, slabs: int, images: int) -> bool:
    """Whether the copy engine brings so many pixels at once, or a single row in several pieces."""
    return max(rows, slabs, images) <= _MAX_BOX_SIDE and (row <= _MAX_BOX_SIDE or rows * slabs * images == 1)


def _pieces_of_row(row: int, gather: Gather) -> tuple[int, int]:
    """Boxes that a row of pixels is brought in, and the pixels of each; one of several is turned around as a whole."""
    count, turned = math.ceil(row / _MAX_BOX_SIDE), 128 // DTYPE_BYTES[gather.dtype]
    return count, row if count == 1 else math.ceil(row / count / turned) * turned


def _operands(pixels: int) -> tuple[int, int]:
    """Boxes that are operands for so many pixels, and the pixels of each."""
    return math.ceil(pixels / BOX_PIXELS), BOX_PIXELS


@lru_cache(maxsize=4096)
def box_strides(gather: Gather, one_row: bool = False) -> tuple[int, ...] | None:
    """Bytes between neighbours in all dimensions but the innermost, as `boxes` lists them; None where the copy engine
    cannot take the source apart. ``one_row``: the pixels of an image, which follow each other, channels first."""
    size = DTYPE_BYTES[gather.dtype]
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
    return engine_strides((count, step * size) for count, step in dimensions)


def may_take_boxes(gather: Gather, variant: GemmVariant) -> bool:
    """Whether the copy engine can bring pixels that are then turned around, channels first."""
    fills = fills_stages(gather.groups, gather.src_channels, variant.stage_channels(gather.dtype))
    return variant.wgmma and fills and not gather.src.channels_last and box_strides(gather, one_row=True) is not None


def may_take_operands(gather: Gather) -> bool:
    """Whether the copy engine can bring pixels as the cores take them: with channels last, or in half precision rows of
    pixels that no tap reads beside. (Rows of 32 bytes, as of 16 pixels, are not swizzled as rows of 128 bytes are.)"""
    if gather.src.channels_last:
        return box_strides(gather) is not None
    if DTYPE_BYTES[gather.dtype] != 2 or not pixels_join(gather) or box_strides(gather, one_row=True) is None:
        return False
    return Taps.stay_in_cells(gather.axes) or math.prod(gather.src.shape[2:]) == BOX_PIXELS


def boxes(gather: Gather, variant: GemmVariant, tile: Tile) -> Boxes:
    """What the copy engine brings for a stage of the tile, ``tile.boxes`` times."""
    size, last = DTYPE_BYTES[gather.dtype], gather.src.channels_last
    strides = box_strides(gather, one_row=bool(tile.run) and not last)
    assert strides is not None
    batch, channels, *spatial = gather.src.shape
    sizes, (image, slab, row) = [*spatial[::-1], batch], tile.pitch
    columns = tile.box_pixels if tile.run or tile.boxes > 1 else row
    box = [columns, slab // row, image // slab, tile.images]
    if tile.run:  # pixels are one row: of an image, or of the tensor
        box = [columns, 1, 1, 1] if variant.boxes or not variant.whole_images else [image, 1, 1, tile.images]
        pixel = CHUNK_BYTES if math.prod(sizes) == 1 else gather.src.strides[4] * size
        if last:
            sizes, strides = [math.prod(sizes), 1, 1, 1], (pixel, *(CHUNK_BYTES,) * 3)
        else:
            sizes = [math.prod(spatial), 1, 1, batch]
    stage_bytes, stage_channels = 2 * CHUNK_BYTES * variant.k_steps, variant.stage_channels(gather.dtype)
    rounded = variant.parts == 1 and not variant.scaled
    if last:
        return Boxes(gather.dtype, (channels, *sizes), strides, (stage_channels, *box), stage_bytes, rounded)
    swizzle = BOX_PIXELS * size if variant.boxes else CHUNK_BYTES
    return Boxes(gather.dtype, (*sizes, channels), strides, (*box, stage_channels), swizzle, rounded)


def _allocated(halo: int, read: int, banks: int, boxes: int, box_pixels: int) -> int:
    """Pixels of a run in shared memory, of which taps read some beyond the halo.

    Chunks of 32 are turned around, and chunks of channels lie in other banks. Boxes are swizzled in rows of eight, and
    stages of them are whole kilobytes.
    """
    whole = max(-(-halo // 32) * 32, read)
    if boxes:
        return -(-max(whole, boxes * box_pixels) // 32) * 32
    return whole + (banks - whole) % 8 if banks else whole


def _boxes(
    gather: Gather, capacity: int, batch: int, banks: int, addressable: int, all_pixels: bool, engine: bool
) -> Iterator[Tile]:
    """Boxes of cells, which lie in a run of pixels with the halo between them.

    A row of the run is followed by the next row's halo on the left, which is its own on the right where a tile is as
    wide as the image: all of it is padding then. So it is with rows, between images.
    """
    size = DTYPE_BYTES[gather.dtype]
    depth, height, width = gather.cells
    ahead = [max(0, -axis.shifts[0]) for axis in gather.axes]  # pixels that any tap needs behind a cell
    back = [axis.shifts[1] for axis in gather.axes]  # and before it; negative where all are behind
    reach = [axis.shifts[1] - axis.shifts[0] for axis in gather.axes]
    heights: dict[int, set[int]] = {}
    whole_rows = math.gcd(gather.src.shape[4], math.gcd(gather.src.strides[2], gather.src.strides[3]))
    for copy_bytes in [max(copy_sizes(gather, whole_rows))] if engine else copy_sizes(gather, whole_rows):
        even = 1 if gather.src.channels_last else (CHUNK_BYTES if engine else copy_bytes) // size
        skew = -back[2] % even
        lead = back[2] + skew
        widest = min(width, capacity, _MAX_SIDE[0])
        least = math.ceil(width / widest)
        parts = range(least, min(math.ceil(width / 8), least + 128) + 1)
        widths = (-(-width // n // even) * even if n > 1 else width for n in parts)
        for columns in dict.fromkeys(widths):
            if columns > min(capacity, _MAX_SIDE[0]):
                continue
            shared = columns == width and lead >= ahead[2] and width >= gather.src.shape[4]
            row = -(-(lead + columns if shared else skew + columns + reach[2]) // even) * even
            if row > _MAX_SIDE[0]:
                continue
            most = max(0, min(height, capacity // row - reach[1] if all_pixels else (capacity - columns) // row + 1))
            if most not in heights:
                heights[most] = {-(-height // -(-height // max(1, most * n // 8))) for n in (8, 6, 4, 3, 2, 1)}
            tiles_w = -(-width // columns)
            for rows in heights[most]:
                whole = rows == height and back[1] >= ahead[1] and height >= gather.src.shape[3] and depth == 1
                slab = (back[1] + rows if whole else rows + reach[1]) * row
                flat = (rows - 1) * row + columns
                fitting = capacity // slab - reach[0] if all_pixels else (capacity - flat) // slab + 1
                most_slabs = min(depth, _MAX_SIDE[1] - reach[0], fitting)
                if rows + reach[1] > _MAX_SIDE[0] or most_slabs < 1:
                    continue
                tail = -(-((ahead[1] * row if whole else 0) + ahead[2]) // even) * even
                for slabs in {1, -(-depth // -(-depth // most_slabs))}:
                    used = flat + (slabs - 1) * slab
                    image = (slabs + reach[0]) * slab
                    images = 1
                    if (slabs, rows, columns) == (depth, height, width):
                        fitting = (capacity - tail) // image if all_pixels else (capacity - used) // image + 1
                        images = max(1, min(batch, _MAX_SIDE[2], fitting, addressable))
                    span = reach[0] * slab + reach[1] * row + reach[2] + skew
                    halo = images * image + tail
                    if all_pixels and halo > capacity:
                        continue
                    if engine and not _is_box(row, slab // row, image // slab, images):
                        continue
                    boxes = (1, images * image) if engine else (0, 0)
                    if engine and row > _MAX_BOX_SIDE:
                        boxes = _pieces_of_row(row, gather)
                    allocated = _allocated(halo, capacity + (0 if all_pixels else span), banks, *boxes)
                    tiles = -(-batch // images), -(-depth // slabs), -(-height // rows), tiles_w
                    pitch = image, slab, row
                    cells = slabs, rows, columns
                    yield Tile(images, cells, pitch, halo, allocated, skew, copy_bytes, tiles, *boxes)


def store_vector(gather: Gather, variant: GemmVariant, tile: Tile) -> int:
    """Elements of a store, the most that every row of the tile allows: each exists as a whole or not at all."""
    size = DTYPE_BYTES[gather.dtype]
    batch, channel, depth, height, width = gather.dst.strides
    if variant.taps_in_rows and not gather.dst.channels_last:
        wide = math.gcd(gather.axes[2].stride, 16 // size)
        return wide if width == 1 and all(s % wide == 0 for s in (batch, channel, depth, height)) else 1
    if gather.dst.channels_last:
        channels = variant.sets_at_once(gather) * variant.row_channels if variant.taps_in_rows else gather.dst_channels
        wide = math.gcd(channels, 16 // size)
        while variant.taps_in_rows and wide > 1 and wide * gather.axes[2].stride > SUMS_AT_ONCE:
            wide //= 2
        return wide if all(s % wide == 0 for s in (gather.dst_channels, batch, depth, height, width)) else 1
    stride = gather.axes[2].stride
    for count in (16 // size, 8 // size, 2):
        if variant.row_columns(gather) < stride and variant.row_columns(gather) % count:
            continue  # the neighbours of a part of a line are not its own
        rows = tile.pitch[2] * stride % count == 0 and (tile.cells[2] * stride % count == 0 or tile.tiles[3] == 1)
        whole = width == 1 and gather.dst.shape[4] % count == 0
        if whole and rows and all(s % count == 0 for s in (batch, channel, depth, height)):
            return count
    return 1
