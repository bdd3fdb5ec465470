"""Configs of `implicit_gemm`, and the product that a config makes of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from polyphase.problem import DTYPE_BYTES, Axis
from polyphase.problem.layouts import SECTOR_BYTES
from polyphase.problem.sizes import TINY
from polyphase.schedules.cells import Gather
from polyphase.schedules.tensor_cores import counter_bytes

ROWS = 64  # rows of a row block
BOX_PIXELS = 64  # pixels of an MN-major box
CHUNK_BYTES = 16  # neighbouring channels of a pixel or row; an instruction is two chunks deep
CONSUMERS = 2  # consumer warpgroups
STAGES = 2, 3, 4, 5, 6, 8  # choices of the number of stages, unless threads copy operands in place
_MAX_LONG_PIECE_STRIDE = 5  # output columns of a cell up to which registers suffice for longer pieces
_BIAS_REGISTERS = 12  # in addition, as stores of long pieces were seen to spill
_STORING_REGISTERS = 160  # for accumulators and a thread's share of a piece: results and their addresses
SUMS_AT_ONCE = 16  # outputs of a cell's row that a thread adds up, from taps in rows, and then stores
_MOST_NORMALS = 64  # outputs of a channel in a piece, if a thread holds the `Normal` of each
_PART_PHASES = 4  # most phases of a part of the width


class GemmConfig(NamedTuple):
    """One specialisation of the kernel.

    ``pixels · pixel_blocks`` cells and ``channel_blocks · lines · (phases along the width) / width_parts`` row blocks
    are a warpgroup's accumulators. ``split`` says what the consumer warpgroups share: the ``"cells"`` of a tile, its
    ``"rows"`` (row groups: cooperative), or whole work tiles in ``"turns"`` (ping-pong). ``parts`` is 2 if float32 is
    split into two TF32 numbers, ``k_steps`` the depth of a stage in instructions, ``resident`` whether a block keeps
    its weights, ``wgmma`` whether wgmma is used instead of ``mma.sync``. ``tma_operands``: TMA writes pixels as the
    tensor cores read them: channels last, or half precision without taps beside the pixel. With ``row_channels`` > 0
    each row is a tap of one of that many channels. The fewest row blocks that hold these rows form a set; a work tile
    has ``channel_blocks`` sets. With ``whole_images`` columns are the pixels of whole images, without a halo. With
    ``stacked`` lines in a row block each has 64 / ``stacked`` of its rows, in whole warps. ``raw_slots``: slots of all
    producer groups for copied stages that are not transposed yet. A ``cluster`` of blocks shares the weights it loads.
    ``piece_bytes``: most bytes of a row in one store. ``scaled``: float32 is multiplied as float16
    (kernels/operand/scales.cuh).
    """

    pixels: int
    pixel_blocks: int
    channel_blocks: int
    lines: int
    k_steps: int
    stages: int
    parts: int
    split: str
    resident: bool
    loader_groups: int
    wgmma: bool
    row_channels: int = 0
    tma_operands: bool = False
    whole_images: bool = False
    raw_slots: int = 4
    cluster: int = 1
    piece_bytes: int = 256
    width_parts: int = 1
    scaled: bool = False
    stacked: int = 1

    def operand_bytes(self, dtype: str) -> int:
        """Bytes of an element of the product's operands."""
        return 2 if self.scaled else DTYPE_BYTES[dtype]

    def stage_channels(self, dtype: str) -> int:
        """Input channels of a stage."""
        return self.k_steps * 2 * CHUNK_BYTES // self.operand_bytes(dtype)

    @property
    def taps_in_rows(self) -> bool:
        """Whether a row is a tap, not a channel of a phase."""
        return self.row_channels > 0

    @property
    def line_rows(self) -> int:
        """Rows of a line in a row block: the rows of whole warps."""
        return ROWS // 4 * (4 // self.stacked)

    @property
    def group_cells(self) -> int:
        """Cells of a warpgroup."""
        return self.pixels * self.pixel_blocks

    @property
    def cells(self) -> int:
        """Cells of a tile, halo included."""
        return self.group_cells * (CONSUMERS if self.split == "cells" else 1)

    def sets_at_once(self, gather: Gather) -> int:
        """Sets whose partial products are in shared memory at once, of some images; or a single one, of all images.

        With channels last as many as fill a sector of memory, or as a thread has sums for.
        """
        sets, channels = 1, self.row_channels
        if not (self.whole_images and gather.dst.channels_last) or channels & (channels - 1):
            return sets
        size, stride = DTYPE_BYTES[gather.dtype], gather.axes[2].stride
        most = min(SECTOR_BYTES // size, SUMS_AT_ONCE // stride) // channels
        while self.channel_blocks % (2 * sets) == 0 and 2 * sets <= most:
            sets *= 2
        return sets

    def round_pixels(self, gather: Gather) -> int:
        """Columns of these images; with a single set all columns of a tile."""
        sets = self.sets_at_once(gather)
        return self.cells if sets == 1 else max(self.cells // sets, TINY)

    def row_columns(self, gather: Gather) -> int:
        """Elements of a cell that are stored together: a line, or a part of one."""
        return gather.axes[2].stride // (1 if self.width_parts == self.row_parts else self.width_parts)

    def piece(self, gather: Gather) -> int:
        """Cells whose results are staged in shared memory at once."""
        if gather.dst.channels_last:
            return 32
        cell_bytes, cells = self.row_columns(gather) * gather.dst_bytes, 128
        while cells > 8 and (
            cells * cell_bytes > self.piece_bytes
            or cells >= 2 * self.group_cells
            or (gather.normalized and cells * gather.axes[2].stride > _MOST_NORMALS)
        ):
            cells //= 2
        return cells

    def with_longer_pieces(self, gather: Gather) -> Iterator[GemmConfig]:
        """The same with longer pieces of rows, the longest first, as far as registers allow."""
        stride = self.row_columns(gather)
        if (
            self.taps_in_rows
            or gather.dst.channels_last
            or stride > _MAX_LONG_PIECE_STRIDE
            or gather.dst_channels % ROWS
        ):
            return
        sums = self.parts * Product(gather, self).row_blocks * self.group_cells // 2
        held = held_by_stores(Taps.of(gather.axes).owned_w, self.lines, gather.dst_channels, gather.src.channels_last)
        held += _BIAS_REGISTERS * gather.bias
        cell_bytes = stride * gather.dst_bytes
        pieces = [self._replace(piece_bytes=size) for size in (1024, 512, 256)]
        for longer, shorter in pairwise(pieces):
            cells = longer.piece(gather)
            results = cells * cell_bytes // 16  # stores of eight channels by a warp
            places = 2 * math.ceil(cells * stride / 32)  # addresses of elements stored one by one
            if cells > shorter.piece(gather) and sums + held + results + places <= _STORING_REGISTERS:
                yield longer

    @property
    def row_parts(self) -> int:
        """Row groups of a work tile."""
        return CONSUMERS if self.split == "rows" else 1

    @property
    def sharers(self) -> int:
        """Warpgroups that multiply the same work tile."""
        return 1 if self.split == "turns" else CONSUMERS

    @property
    def loader_threads(self) -> int:
        """Producer threads: as many as the consumers' registers allow."""
        return 256 if self.wgmma and self.loader_groups > 1 else 128

    def transpose_groups(self, stages: int) -> int:
        """Groups of warps that transpose TMA's boxes, round-robin over stages."""
        return self.loader_threads // 128 if stages > 2 else 1


@dataclass(frozen=True)
class Taps:
    """The taps of the layer's phases (kernels/core/row_blocks.cuh)."""

    owned_w: int
    lines: tuple[int, ...]  # taps of each phase along depth and height that owns any
    along_w: int  # taps of all phases along the width
    reads: tuple[tuple[frozenset[int], ...], ...]  # shifts that each phase along depth, and along height, reads

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(axes: tuple[Axis, Axis, Axis]) -> Taps:
        """The taps of a layer."""
        depth, height, width = ([len(taps) for taps in axis.taps_by_phase.values()] for axis in axes)
        reads = (tuple(frozenset(map(axis.shift, taps)) for taps in axis.taps_by_phase.values()) for axis in axes[:2])
        return Taps(len(width), tuple(d * h for d in depth for h in height), sum(width), tuple(reads))

    @lru_cache(maxsize=4096)  # noqa: B019 (instances are few, and kept by `of`)
    def groups(self, lines: int, stacked: int = 1) -> tuple[int, ...]:
        """Taps along depth and height of each group of ``lines`` neighbouring phases.

        If ``stacked`` of these share row blocks, a tap that several read counts once.
        """
        counts = self.lines
        if stacked > 1:
            depth, height = self.reads
            slabs, rows = math.ceil(stacked / len(height)), min(stacked, len(height))
            counts = tuple(
                len(frozenset().union(*depth[d : d + slabs])) * len(frozenset().union(*height[h : h + rows]))
                for d in range(0, len(depth), slabs)
                for h in range(0, len(height), rows)
            )
        together = lines // stacked
        return tuple(sum(counts[i : i + together]) for i in range(0, len(counts), together))

    def may_stack(self, count: int) -> bool:
        """Whether lines form groups of ``count``: phases along the height, or all of these at several depths."""
        depth, height = map(len, self.reads)
        return height % count == 0 or (count % height == 0 and depth % (count // height) == 0)

    def rows(self, channels: int, lines: int) -> int:
        """Taps of ``channels`` in the group of ``lines`` that has most."""
        return channels * max(self.groups(lines)) * self.along_w

    def row_blocks(self, config: GemmConfig) -> int:
        """Row blocks of a row group."""
        if config.row_channels:
            return config.channel_blocks * math.ceil(self.rows(config.row_channels, config.lines) / ROWS)
        return config.channel_blocks * (config.lines // config.stacked) * self.owned_w // config.width_parts

    def are_alike(self, lines: int, stacked: int = 1) -> bool:
        """Whether all groups of ``lines`` neighbouring phases have the same taps."""
        counts, together = self.groups(stacked, stacked), lines // stacked
        return len({counts[i : i + together] for i in range(0, len(counts), together)}) == 1

    @staticmethod
    def width_parts(axes: tuple[Axis, Axis, Axis]) -> int:
        """Parts of the width, of four or two phases each; 1 if phases differ in their taps."""
        bare = any(len(axis.taps_by_phase) < axis.stride for axis in axes)
        if bare or len(set(map(len, axes[2].taps_by_phase.values()))) > 1 or axes[2].stride % _PART_PHASES:
            return 1
        return max(2, axes[2].stride // _PART_PHASES)

    @staticmethod
    def stay_in_cells(axes: tuple[Axis, Axis, Axis]) -> bool:
        """Whether every tap reads its own cell only."""
        return all(axis.shifts == (0, 0) for axis in axes)


class Product:
    """The product that a config makes of a pass, in row groups of ``channel_blocks`` and ``lines``."""

    def __init__(self, gather: Gather, config: GemmConfig) -> None:
        self.gather, self.config = gather, config
        taps, parts = Taps.of(gather.axes), config.width_parts
        groups = taps.groups(config.lines, config.stacked)
        channel_groups = math.ceil(gather.dst_channels / (config.channel_blocks * (config.row_channels or ROWS)))
        self.row_blocks = taps.row_blocks(config)  # of a row group
        self.row_groups = gather.groups * channel_groups * len(groups) * parts  # of the layer
        self.tile_shares = self.row_groups // config.row_parts  # work tiles of a tile
        self.line_groups = len(groups) * parts
        self.operations = self.row_blocks  # taps of the row group with most
        if not config.row_channels:
            self.operations = max(groups) * taps.along_w * config.channel_blocks // parts
        depth = gather.src_channels * config.operand_bytes(gather.dtype) / (2 * CHUNK_BYTES)
        self.stages = math.ceil(depth / config.k_steps)  # of a work tile
        self.steps = self.stages * config.k_steps  # depth in instructions
        # Packed weights of one step of a row group, of a row group, and of the layer.
        self.step_bytes = self.operations * config.parts * 2 * ROWS * CHUNK_BYTES
        self.weight_bytes = self.steps * self.step_bytes
        self.packed_bytes = self.row_groups * self.weight_bytes

    @property
    def counter_bytes(self) -> int:
        """Bytes before the packed weights: counters of the work tiles that blocks have taken.

        A cluster has one; the emulator, which runs blocks one by one, has one for each of its blocks.
        """
        return counter_bytes(self.tile_shares if self.config.resident else self.config.cluster)


def held_by_stores(owned_w: int, lines: int, channels: int, channels_last: bool) -> int:
    """Registers of stores beyond the simplest ones': addresses of pixels and lines, which channels exist."""
    if channels_last:
        return 16 if owned_w >= 3 else 0
    if channels % ROWS and owned_w > 1:
        return 32
    return 16 if lines > 1 else 0


def fills_stages(groups: int, channels: int, stage_channels: int) -> bool:
    """Whether the last stage of a group's ``channels`` does not reach into the next group."""
    return groups == 1 or channels % stage_channels == 0
