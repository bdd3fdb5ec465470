"""The tiles of `implicit_gemm`: the cells of a block, and their layout in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import extent
from polyphase.program.tensor_map import TensorMap
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import (
    BOX_PIXELS,
    CHUNK_BYTES,
    CONSUMERS,
    ROWS,
    SUMS_AT_ONCE,
    GemmConfig,
    Product,
    Taps,
    fills_stages,
)
from polyphase.schedules.implicit_gemm.cuts import Cuts, Tile, all_tiles, box_strides, pixels_join

_MAX_STATIC_SHARED = 48 << 10


def raw_pitch(halo: int, size: int) -> int:
    """Pixels of a channel in a copied stage, which is transposed 128 bytes at a time."""
    return math.ceil(halo * size / 128) * 128 // size


def shared_bytes(gather: Gather, config: GemmConfig, tile: Tile) -> int:
    """Dynamic shared memory of a tile."""
    return _SharedBytes(gather, config, aligned=True).of(tile, config.stages)


class _SharedBytes:
    """Dynamic shared memory of the tiles of a config, whatever its stages.

    Not ``aligned``: of the worst such tile, with every pixel copied by itself.
    """

    def __init__(self, gather: Gather, config: GemmConfig, aligned: bool) -> None:
        self._size, self._copies_rows = gather.src_bytes, not gather.src.channels_last
        product = Product(gather, config)
        weights = config.row_parts * product.step_bytes
        self._fixed = _store_bytes(gather, config) + 8 + (weights * product.steps if config.resident else 0)
        self._weights = 0 if config.resident else weights * config.k_steps  # bytes of a stage
        chunks = 2 * config.k_steps
        self._pixel = config.parts * chunks * CHUNK_BYTES  # bytes of a pixel in a stage
        self._tma_operands, self._cells = config.tma_operands, config.cells
        raw = config.raw_slots * chunks * CHUNK_BYTES * self._size // config.operand_bytes(gather.dtype)
        self._raw = raw if self._copies_rows and not config.tma_operands else 0  # bytes of a pixel
        # Partial products leave little room: a config that fits must also fit with any halo and wide offsets.
        worst = config.taps_in_rows and not aligned
        self._table = 4 + (8 if worst or needs_wide_offsets(gather) else 4) * config.loader_groups
        self._least_halo = config.cells if worst else 0
        self._aligned, self._beside = aligned, 0 if aligned else 32  # pixels of a run in addition

    def least(self, stages: int) -> int:
        """Lower bound for any tile: each cell has a pixel."""
        return self._fixed + stages * (self._weights + self._pixel * self._cells)

    def most_allocated(self, stages: int, limit: int) -> int:
        """Pixels of a tile's run with which stages and fixed memory take ``limit`` bytes."""
        return ((limit - self._fixed) // stages - self._weights) // self._pixel - self._beside

    def of(self, tile: Tile, stages: int) -> int:
        """Bytes of one tile."""
        total = self._fixed + stages * (self._weights + self._pixel * (tile.allocated + self._beside))
        if tile.boxes and (self._aligned or self._tma_operands):
            return total + self._raw * tile.boxes * tile.box_pixels
        copied = tile.copy_bytes // self._size if self._aligned and self._copies_rows else 1
        halo = max(tile.halo, self._least_halo)
        total += self._raw * raw_pitch(halo, self._size) if self._raw else 0
        return total + self._table * -(-halo // copied)


def work_tiles_known(product: Product, stages: int) -> int:
    """The slots in which a block learns of its work tiles (``QUEUE`` in the kernel)."""
    config = product.config
    ahead = 2 * (stages + config.loader_groups) + config.raw_slots
    return math.ceil(ahead / product.stages) + 4


def _static_shared_bytes(product: Product, stages: int) -> int:
    """The kernel's ``Shared``: barriers, known work tiles, distances of operations; padded for the bytes after it."""
    config = product.config
    barriers = 8 * (2 * (stages + config.raw_slots) + CONSUMERS + 1)
    barriers += round_up(12 * work_tiles_known(product, stages), 8)
    alignment = 1024 if config.tma_operands else 128  # alignment of the bytes that follow
    numbers = (product.operations + product.row_blocks) * product.line_groups + 1
    return math.ceil((barriers + 4 * numbers) / alignment) * alignment


@lru_cache(maxsize=4096)
def needs_wide_offsets(gather: Gather) -> bool:
    """Whether offsets within an image need more than 32 bits."""
    return max(extent((1, 1, *side.shape[2:]), side.strides) for side in (gather.src, gather.dst)) >= 2**31


def _store_bytes(gather: Gather, config: GemmConfig) -> int:
    """Bytes of the epilogue's staging (``STORE_BYTES`` in the kernel)."""
    size = gather.dst_bytes
    if config.taps_in_rows:
        sets, columns = config.sets_at_once(gather), config.round_pixels(gather)
        pitch = math.ceil((columns + (2 if sets > 1 else 0) - 8) / 32) * 32 + 8
        rows = sets * Taps.of(gather.axes).rows(config.row_channels, config.lines)
        return (1 if config.split == "cells" else CONSUMERS) * rows * pitch * 4 + 4 * config.cells
    places = CONSUMERS * config.group_cells * (16 if needs_wide_offsets(gather) else 8)
    cells, columns = config.piece(gather), config.row_columns(gather)
    own = gather.axes[2].stride // config.width_parts  # elements of a cell that a thread has
    if gather.normalized:  # moments of a pixel: of four warps, and combined
        places += CONSUMERS * (4 + 1) * 8 * cells * own
    if gather.dst.channels_last:
        return places + CONSUMERS * cells * (ROWS * size + CHUNK_BYTES)
    vector = CHUNK_BYTES // size
    lanes = 32 if cells * columns > 16 * vector else 16
    staged = math.gcd(own if columns > own else 2 * own, vector)
    pitch = math.ceil(cells * columns / (lanes * vector)) * lanes * vector + 4 * staged
    return places + CONSUMERS * 4 * 8 * pitch * size


@lru_cache(maxsize=65536)
def best_tile(gather: Gather, config: GemmConfig, device: DeviceInfo, reserve: int = 0) -> Tile | None:
    """The tile of least work; None if none fits shared memory less ``reserve``."""
    room = Room(gather, config, (config.stages,), device, reserve)
    return room.first_that_fits(room.tiles(gather)[0], config.stages)


class Room:
    """The shared memory that a config leaves for tiles with each of some ``stages``, in rising order.

    It is the same for images of all sizes, except those with wide offsets.
    """

    def __init__(
        self, gather: Gather, config: GemmConfig, stages: Sequence[int], device: DeviceInfo, reserve: int
    ) -> None:
        product, self._shared = Product(gather, config), _SharedBytes(gather, config, aligned=not reserve)
        self._config = config
        # Chunks of a pixel that are copied together are in different banks.
        last = gather.src.channels_last
        self._banks = 8 // min(8, 2 * config.k_steps) if last and not config.tma_operands else 0
        self._transposed = config.tma_operands and not last
        self._most_pixels = config.round_pixels(gather) if config.whole_images else 0
        self._allowed = {}  # bytes and pixels, by stages
        for count in stages:
            static = _static_shared_bytes(product, count)
            limit = device.shared_bytes_per_block - static - reserve
            if static > _MAX_STATIC_SHARED or self._shared.least(count) > limit:
                break  # nor do more stages fit
            self._allowed[count] = limit, self._shared.most_allocated(count, limit)

    def tiles(self, gather: Gather) -> tuple[list[Tile], int]:
        """`all_tiles`, whether they fit or not; none if no number of stages leaves room."""
        config = self._config
        if not self._allowed or (self._transposed and not may_take_operands(gather)):
            return [], 0
        by_tma = (True,) if config.tma_operands else (True, False) if may_use_tma(gather, config) else (False,)
        taps_in_rows, most, transposed = config.taps_in_rows, self._most_pixels, self._transposed
        return all_tiles(Cuts(gather, config.cells, self._banks, taps_in_rows, most, by_tma, transposed))

    def first_that_fits(self, tiles: list[Tile], stages: int) -> Tile | None:
        """The first of ``tiles`` that fits with ``stages``."""
        if stages not in self._allowed:
            return None
        limit, most = self._allowed[stages]
        for tile in tiles:
            if tile.allocated <= most and self._shared.of(tile, stages) <= limit:
                return tile
        return None


def may_use_tma(gather: Gather, config: GemmConfig) -> bool:
    """Whether TMA can load pixels that are then transposed, channels first."""
    fills = fills_stages(gather.groups, gather.src_channels, config.stage_channels(gather.dtype))
    return config.wgmma and fills and not gather.src.channels_last and box_strides(gather, one_row=True) is not None


def may_take_operands(gather: Gather) -> bool:
    """Whether TMA can load pixels as tensor cores read them: with channels last, or in half precision rows of
    pixels if no tap shifts them. (Rows of 32 bytes, as of 16 pixels, are swizzled unlike rows of 128 bytes.)"""
    if gather.src.channels_last:
        return box_strides(gather) is not None
    if gather.src_bytes != 2 or not pixels_join(gather) or box_strides(gather, one_row=True) is None:
        return False
    return Taps.stay_in_cells(gather.axes) or math.prod(gather.src.shape[2:]) == BOX_PIXELS


def tensor_map(gather: Gather, config: GemmConfig, tile: Tile) -> TensorMap:
    """The tensor map of a stage's boxes; TMA loads ``tile.boxes`` of them."""
    size, last, dtype = gather.src_bytes, gather.src.channels_last, gather.src_dtype
    strides = box_strides(gather, one_row=bool(tile.run) and not last)
    assert strides is not None
    batch, channels, *spatial = gather.src.shape
    sizes, (image, slab, row) = [*spatial[::-1], batch], tile.pitch
    columns = tile.box_pixels if tile.run or tile.boxes > 1 else row
    box = [columns, slab // row, image // slab, tile.images]
    if tile.run:  # pixels are one row: of an image, or of the tensor
        box = [columns, 1, 1, 1] if config.tma_operands or not config.whole_images else [image, 1, 1, tile.images]
        pixel = CHUNK_BYTES if math.prod(sizes) == 1 else gather.src.strides[4] * size
        if last:
            sizes, strides = [math.prod(sizes), 1, 1, 1], (pixel, *(CHUNK_BYTES,) * 3)
        else:
            sizes = [math.prod(spatial), 1, 1, batch]
    stage_bytes, stage_channels = 2 * CHUNK_BYTES * config.k_steps, config.stage_channels(gather.dtype)
    rounded = config.parts == 1 and not config.scaled
    if last:
        tensor = 0 if gather.original is None else 1
        return TensorMap(dtype, (channels, *sizes), strides, (stage_channels, *box), stage_bytes, rounded, tensor)
    swizzle = BOX_PIXELS * size if config.tma_operands else CHUNK_BYTES
    return TensorMap(dtype, (*sizes, channels), strides, (*box, stage_channels), swizzle, rounded)


def store_vector(gather: Gather, config: GemmConfig, tile: Tile) -> int:
    """Elements of a store: the most of which, in every row of the tile, all exist or none."""
    widest = 16 // gather.dst_bytes
    batch, channel, depth, height, width = gather.dst.strides
    if gather.dst.channels_last:
        wide = _vector_of_channels(gather, config, widest)
        return wide if all(s % wide == 0 for s in (gather.dst_channels, batch, depth, height, width)) else 1
    apart = (batch, channel, depth, height)
    if config.taps_in_rows:
        counts = [math.gcd(gather.axes[2].stride, widest)]
    else:
        counts = [count for count in (widest, widest // 2, 2) if _rows_are_whole(gather, config, tile, count)]
    return next((count for count in counts if width == 1 and all(s % count == 0 for s in apart)), 1)


def _vector_of_channels(gather: Gather, config: GemmConfig, widest: int) -> int:
    """Neighbouring channels of a thread."""
    if not config.taps_in_rows:
        return math.gcd(gather.dst_channels, widest)
    wide = math.gcd(config.sets_at_once(gather) * config.row_channels, widest)
    while wide > 1 and wide * gather.axes[2].stride > SUMS_AT_ONCE:
        wide //= 2
    return wide


def _rows_are_whole(gather: Gather, config: GemmConfig, tile: Tile, count: int) -> bool:
    """Whether rows of tiles are whole groups of ``count`` neighbouring elements, channels first."""
    stride, columns = gather.axes[2].stride, config.row_columns(gather)
    if columns < stride and columns % count:
        return False  # elements next to a part of a line belong to another part
    rows = tile.pitch[2] * stride % count == 0 and (tile.cells[2] * stride % count == 0 or tile.tiles[3] == 1)
    return rows and gather.dst.shape[4] % count == 0
