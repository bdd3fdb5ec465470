"""Configs of ``kernels/tap_gemm_wgrad_tma.cu``: how the taps and channels of both sides are cut into tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.problem.integers import equal_part, round_up
from polyphase.schedules.tap_gemm.flat import FlatProduct
from polyphase.schedules.tap_gemm.k_major import CONSUMER_GROUPS
from polyphase.schedules.tensor_cores import MOST_COLUMNS, wgmma_cycles

_MOST_SUMS = 128  # accumulators of a thread; twice as many registers if promoted
_LEAST_CHUNK = 32  # channels of an item, if the layer has as many: small boxes cost as much as large ones
_MOST_BOX = 256  # channels that a box spans
_SHAPES = 3  # shapes of columns offered with each shape of rows


class WgradTmaConfig(NamedTuple):
    """The compile-time shape of ``tap_gemm_wgrad_tma.cu``: items of rows and columns, and channels of each.

    ``mirrored``: GEMM rows come from the base operand (else the phased one). ``swapped``: the base is the output
    gradient (else the input). ``window_d``, ``window_h``: base items are numbered by taps along depth or height, too,
    not only along the width. ``batched``: images are the innermost dimension of positions. ``spread``: every tap along
    the width has its own copy of the phased operand. ``in_place``: the base tensor is read without a copy.
    """

    row_tiles: int
    row_items: int
    row_chunk: int
    column_items: int
    column_chunk: int
    mirrored: bool = False
    swapped: bool = False
    window_d: bool = False
    window_h: bool = False
    batched: bool = False
    spread: bool = False
    in_place: bool = False

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 64 * CONSUMER_GROUPS * self.row_tiles

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.column_items * self.column_chunk

    @property
    def window(self) -> tuple[bool, bool]:
        """Whether the base has taps along depth, and along height."""
        return self.window_d, self.window_h

    @property
    def base(self) -> tuple[int, int]:
        """Channels of an item of the base, and its items in a block."""
        return (self.row_chunk, self.row_items) if self.mirrored else (self.column_chunk, self.column_items)

    @property
    def phased(self) -> tuple[int, int]:
        """The same of the phased operand."""
        return (self.column_chunk, self.column_items) if self.mirrored else (self.row_chunk, self.row_items)


def legal_configs(flat: FlatProduct) -> Iterator[WgradTmaConfig]:
    """Configs whose accumulators fit the registers; for each shape of rows the best shapes of columns."""
    most = _MOST_SUMS // flat.product.parts
    for window, mirrored, row_tiles in itertools.product(flat.windows, (False, True), (1, 2)):
        (rows, row_taps), (columns, column_taps) = _sides(flat, mirrored, window)
        all_rows = 64 * CONSUMER_GROUPS * row_tiles
        row_chunk, row_items = _row_shape(rows, row_taps, all_rows)
        if row_tiles > 1 and row_items * row_chunk <= all_rows // 2:
            continue
        shapes = _column_shapes(columns, column_taps, min(MOST_COLUMNS, 2 * most // row_tiles), all_rows)
        for column_chunk, column_items in shapes[:_SHAPES]:
            shape = row_tiles, row_items, row_chunk, column_items, column_chunk
            yield WgradTmaConfig(*shape, mirrored, flat.swapped, *window, flat.batched, flat.spread, flat.in_place)


def _sides(flat: FlatProduct, mirrored: bool, window: tuple[bool, bool]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Channels and taps of the rows' side, and of the columns'."""
    (base, phased), width = flat.channels, flat.along[2]
    found = (phased, width.residues * flat.phased_taps(window)), (base, width.taps * flat.base_taps(window))
    return (found[1], found[0]) if mirrored else found


def _chunks(channels: int, most: int) -> Iterator[tuple[int, int]]:
    """Choices of the channels of an item, at most ``most``, and the items of all channels."""
    for pieces in range(1, -(-channels // min(channels, _LEAST_CHUNK)) + 1):
        chunk = round_up(-(-channels // pieces), 8)
        if chunk <= most:
            yield chunk, pieces


def _row_shape(channels: int, taps: int, rows: int) -> tuple[int, int]:
    """Channels of an item and items of a block, so that few of the block's rows are empty, in few boxes."""
    best, found = 0.0, (8, 1)
    for chunk, pieces in _chunks(channels, min(rows, _MOST_BOX)):
        items = min(rows // chunk, taps * pieces)
        blocks = -(-taps * pieces // items)
        share = channels * taps / (blocks * rows) - 0.002 * items
        if share > best or best == 0.0:
            best, found = share, (chunk, items)
    return found


def _column_shapes(channels: int, taps: int, most: int, rows: int) -> list[tuple[int, int]]:
    """Channels of an item and items of a block, the best first: few columns are empty, and many share the rows."""
    found: dict[tuple[int, int], float] = {}
    for chunk, pieces in _chunks(channels, most):
        total, fit = taps * pieces, most // chunk
        for items in {min(fit, total), equal_part(total, min(fit, total)), max(1, fit // 2)}:
            if items > total:
                continue
            columns, blocks = items * chunk, -(-total // items)
            # Cycles of 32 bytes of k: products, or bytes from the L2 cache.
            cycles = max(rows / 64 * wgmma_cycles(columns), 0.8 * (rows + columns)) + items
            found[chunk, items] = blocks * cycles
    return sorted(found, key=lambda each: found[each])
