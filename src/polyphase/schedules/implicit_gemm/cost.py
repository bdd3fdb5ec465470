"""How long a variant of `implicit_gemm` takes, predicted from what it counts of a layer (docs/performance.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyphase.problem import DTYPE_BYTES
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import slower_of
from polyphase.schedules.implicit_gemm.config import CHUNK_BYTES, ROWS, STAGES, GemmVariant, Product, Taps
from polyphase.schedules.implicit_gemm.cuts import Tile


@dataclass(frozen=True)
class _Costs:
    """Multiprocessor cycles, fitted to times of variants on an H200 (docs/performance.md)."""

    shared: float = 1.055 / 128  # a byte through shared memory, beside the products
    shared_boxes: float = 0.82 / 128  # where the copy engine brings operands, channels last
    issue: float = 8.62  # each matrix instruction, above what the cores and shared memory take
    wait: float = 14.62  # for a stage, by those who multiply
    stage: float = 750.0  # barriers and latencies of a stage, for the group that loads it
    stage_in_place: float = 727.8
    stage_turned: float = 725.3  # where the copy engine brings boxes that are turned around
    turn: float = 114.6  # and 128 bytes of each channel of a chunk, for each warp
    stage_boxes: float = 314.5  # and where it brings operands
    box_pixel: float = 1.27  # of those, each pixel
    copy_rows: float = 99.0  # a warp's copies, channels first
    copy_pixels: float = 340.0  # and channels last
    convert: float = 178.0  # a chunk of 32 pixels turned around, for each warp
    moved: float = 1 / 46.75  # a byte from the L2 cache
    slot: float = 1128.0  # from a stage that is free to the same stage full, beside the products
    slot_in_place: float = 1695.0
    slot_shared: float = 146.2  # more, where it is to be free in all blocks of a cluster
    slot_use: float = 1.36  # of the products of a stage, what its slot is held for them
    value_rows: float = 16.68  # a thread's value stored, channels first
    value_pixels: float = 20.32  # and channels last
    partial_lines: float = 0.9119  # times that, where an item stores every other line, channels first
    partial_pixels: float = 2.45  # and channels last
    parts_of_sectors: float = 1.9  # times what a copy takes for the output, where row groups share its sectors
    crowding: float = 0.09875  # share of that more for every four warps that load, beyond the first four
    odd_stride: float = 1.56  # times that, 3 or 4 bytes by bytes of a value, where a thread's elements are no vector
    edges: float = 24.89  # bytes by which a row's parts of memory sectors make it longer, where tiles share a row
    partial: float = 0.04658  # with taps in rows: a partial product stored and added up
    output: float = 0.1027  # and a result of whole images stored
    lane_output: float = 0.5  # or one of others, by lanes, whether they have a cell or not
    scattered: float = 3.04  # or one where lanes' results lie apart
    launch: float = 13090.0
    turn_scaled: float = 259.0  # a chunk of pixels that become float16: brought by the copy engine, or by threads
    convert_scaled: float = 629.0
    measure: float = 10.0e-6  # seconds to find what they are multiplied by,
    measured: float = 0.54  # and of a copy's bandwidth, at which all is read for that
    bandwidth: float = 0.85  # of a copy's, which no layer exceeds
    bandwidth_one_tap: float = 0.81  # where the kernel is the stride, channels first
    overlap: float = 2.74  # exponents of the norms that add what goes on at the same time
    turns: float = 3.8
    other_instruction: float = 2.2  # mma.sync: each of four warps reads the pixels for itself


_COSTS = _Costs()


def estimate(
    gather: Gather, variant: GemmVariant, tile: Tile, device: DeviceInfo, layer_bytes: int
) -> tuple[float, str]:
    """Predicted seconds of a variant, and whether ``layer_bytes`` or instructions bound it."""
    return Work(gather, variant).estimate(gather, variant.stages, tile, device, layer_bytes)


class Work:
    """What blocks of a variant do, whatever its stages: the same for images of all sizes.

    A planner asks one of them for many tiles, so that what they have in common is counted once.
    """

    def __init__(self, gather: Gather, variant: GemmVariant) -> None:
        product, size = Product.of(gather, variant), DTYPE_BYTES[gather.dtype]
        last = gather.src.channels_last
        self.variant, self.product = variant, product
        raw = size // variant.operand_bytes(gather.dtype)  # bytes for each of an operand
        in_place = last or variant.boxes
        self._stages, chunks = product.stages(variant), 2 * variant.k_steps
        self._pixel_bytes = self._stages * chunks * CHUNK_BYTES  # of each pixel of a halo
        self._packed = variant.row_parts * product.weight_bytes(variant)
        self._weight_bytes = 0 if variant.resident else self._packed
        self.once = (self._packed * _COSTS.moved if variant.resident else 0) + _COSTS.launch

        instructions = product.steps * product.operations * variant.pixel_blocks * variant.sharers
        instructions *= 3 if variant.parts == 2 else 1
        self._operand_bytes = instructions * 2 * CHUNK_BYTES * (ROWS + variant.pixels)
        passes = 1 if variant.boxes or (size == 2 and in_place) else 1 + 2 * raw
        self._passes = passes * (1 if variant.parts == 1 else 4 / 3)
        self._shared = _COSTS.shared_boxes if variant.boxes and last else _COSTS.shared
        self._products = instructions * variant.pixels / 2
        self._instruction = 1 if variant.wgmma else _COSTS.other_instruction
        self._issue = _COSTS.issue * instructions
        self._wait = _COSTS.wait * self._stages * variant.sharers
        self._raw = raw
        self._own_weights = self._weight_bytes / variant.cluster
        slot = _COSTS.slot_in_place if in_place else _COSTS.slot
        self._slots = self._stages * (slot + (_COSTS.slot_shared if variant.cluster > 1 else 0))
        self._taken = variant.loader_groups if in_place and not variant.boxes else 0  # stages that are never free
        self._chunks, self._size, self._in_place = chunks, size, last
        self._stage_channels = variant.stage_channels(gather.dtype)
        self._count_stores(gather)
        one_tap = all((a.kernel, a.padding, a.dilation) == (a.stride, 0, 1) for a in gather.axes)
        self._bandwidth = _COSTS.bandwidth_one_tap if one_tap and not last else _COSTS.bandwidth
        self.in_sectors = variant.row_columns(gather) < gather.axes[2].stride

    def estimate(
        self, gather: Gather, stages: int, tile: Tile, device: DeviceInfo, layer_bytes: int
    ) -> tuple[float, str]:
        """Predicted seconds with so many stages, and whether ``layer_bytes`` or instructions bound it."""
        variant = self.variant
        multiply, moved = self._multiply(tile.halo), self._moved(tile.halo)
        load = self._stages * self._load(tile, stages)
        slots = (self._slots + _COSTS.slot_use * multiply) / (stages - self._taken)
        main = _norm(_COSTS.overlap, multiply, load, moved, slots)
        store = self._store(tile)
        item = main + store
        tiles = math.ceil(tile.total / variant.cluster) * variant.cluster
        waves = tiles * self.product.row_groups / variant.row_parts / device.multiprocessors
        if waves < 8:
            waves = math.ceil(waves)
        if variant.split == "turns" and (waves > 1 or variant.whole_images):
            item, waves = _norm(_COSTS.turns, main, (multiply + store) / 2), max(waves, 2)
        busy = (waves * item + self.once) / device.clock_hz
        if self.in_sectors:
            busy += sectors(gather, device)
        floor = layer_bytes / (self._bandwidth * device.copy_bytes_per_second)
        seconds, bound = slower_of(busy, floor)
        return seconds + (measure(gather, device) if variant.scaled else 0), bound

    def least(self, halo: float, stages: int, boxes: bool) -> tuple[float, float]:
        """Cycles of an item of so many pixels that no tile falls below, and of one whose stores others hide.

        ``stages`` are the most that there may be, ``boxes``: whether TMA may bring pixels that are then transposed.
        """
        multiply = self._multiply(halo)
        slots = (self._slots + _COSTS.slot_use * multiply) / (stages - self._taken)
        load = self._stages * self._least_load(halo, boxes)
        main = _norm(_COSTS.overlap, multiply, load, self._moved(halo), slots)
        store = self._least_store(halo)
        return main + store, _norm(_COSTS.turns, main, (multiply + store) / 2)

    def _multiply(self, halo: float) -> float:
        """Cycles of an item's products."""
        shared = self._operand_bytes + self._passes * (self._pixel_bytes * halo) + self._weight_bytes
        shared *= self._shared
        return max(self._products, shared) * self._instruction + self._issue + self._wait

    def _moved(self, halo: float) -> float:
        """Cycles of an item's bytes from the L2 cache."""
        return (self._raw * (self._pixel_bytes * halo) + self._own_weights) * _COSTS.moved

    def _load(self, tile: Tile, stages: int) -> float:
        """Cycles until a stage is loaded, of as many as are loaded at a time."""
        variant, size, chunks = self.variant, self._size, self._chunks
        if variant.boxes:
            return _COSTS.stage_boxes + _COSTS.box_pixel * max(tile.halo, tile.boxes * tile.box_pixels)
        warps = variant.loader_threads // 32
        if tile.boxes:
            pieces = math.ceil(tile.halo * size / 128) * chunks * variant.parts
            groups = variant.turning_groups_of(stages)
            turn = _COSTS.turn_scaled if variant.scaled else _COSTS.turn
            return (_COSTS.stage_turned + turn * math.ceil(pieces / ((warps - 1) // groups))) / groups
        warps //= variant.loader_groups
        vectors = tile.halo / (tile.copy_bytes // size)
        if self._in_place:
            pieces = CHUNK_BYTES // tile.copy_bytes
            copies = _COSTS.copy_pixels * math.ceil(tile.halo * chunks / 32) * pieces / warps
        else:
            copies = _COSTS.copy_rows * math.ceil(vectors / 32) * self._stage_channels / warps
        in_place = size == 2 and self._in_place
        turned = 0 if in_place else math.ceil(math.ceil(tile.halo / 32) * chunks / warps) * variant.parts
        latency = _COSTS.stage_in_place if self._in_place else _COSTS.stage
        convert = _COSTS.convert_scaled if variant.scaled else _COSTS.convert
        return (latency + copies + convert * turned) / variant.loader_groups

    def _least_load(self, halo: float, boxes: bool) -> float:
        """The same for so many pixels, if copies were of no whole pieces."""
        variant, size, chunks = self.variant, self._size, self._chunks
        if variant.boxes:
            return _COSTS.stage_boxes + _COSTS.box_pixel * halo
        all_warps = variant.loader_threads // 32
        warps = all_warps // variant.loader_groups
        if self._in_place:
            copies = _COSTS.copy_pixels * halo * chunks / 32 / warps
        else:
            copies = _COSTS.copy_rows * halo * size / CHUNK_BYTES / 32 * self._stage_channels / warps
        turned = 0.0 if size == 2 and self._in_place else halo / 32 * chunks / warps * variant.parts
        latency = _COSTS.stage_in_place if self._in_place else _COSTS.stage
        convert = _COSTS.convert_scaled if variant.scaled else _COSTS.convert
        by_threads = (latency + copies + convert * turned) / variant.loader_groups
        if not boxes or self._in_place or not variant.wgmma:
            return by_threads
        pieces = halo * size / 128 * chunks * variant.parts
        turn = _COSTS.turn_scaled if variant.scaled else _COSTS.turn
        by_groups = (
            (_COSTS.stage_turned + turn * pieces / ((all_warps - 1) // groups)) / groups
            for groups in {variant.turning_groups_of(count) for count in STAGES}
        )
        return min(by_threads, *by_groups)

    def _count_stores(self, gather: Gather) -> None:
        """What an item's stores take, but for what depends on its tile."""
        variant, product, stride = self.variant, self.product, gather.axes[2].stride
        self._scattered = self._edges = 0.0
        if variant.taps_in_rows:
            channels = min(gather.dst_channels, variant.channel_blocks * variant.row_channels) * variant.row_parts
            rows = Taps.of(gather.axes).rows(channels, variant.lines)
            self._outputs = channels * gather.phases / product.line_groups
            self._partial = _COSTS.partial * rows * variant.cells
            if gather.dst.channels_last and gather.dst_channels > 1:
                self._scattered = variant.sets_at_once(gather)
            return
        owned = product.row_blocks // variant.channel_blocks * product.line_groups
        self._values = variant.group_cells / 2 * product.row_blocks * gather.phases / owned
        if gather.dst.channels_last:
            self._value = _COSTS.value_pixels
        elif stride & (stride - 1):
            self._value = _COSTS.value_rows * _COSTS.odd_stride * (2 + self._size / 2)
        else:
            self._value = _COSTS.value_rows
        self._edges = 0 if gather.dst.channels_last else stride * self._size
        if product.line_groups > 1:
            self._partial = _COSTS.partial_pixels if gather.dst.channels_last else _COSTS.partial_lines
        else:
            self._partial = 1.0
        self._crowding = 1 + _COSTS.crowding * (variant.loader_threads / 128 - 1)

    def _store(self, tile: Tile) -> float:
        """Cycles of an item's stores."""
        variant = self.variant
        if variant.taps_in_rows:
            outputs = self._outputs
            if self._scattered:
                outputs *= tile.tile_cells * _COSTS.scattered / self._scattered
            elif variant.whole_images:
                outputs *= tile.tile_cells * _COSTS.output
            else:  # a lane has one cell of as many as there are lanes
                lanes = 128 * variant.sharers // variant.row_parts
                outputs *= math.ceil(tile.tile_cells / lanes) * lanes * _COSTS.lane_output
            return self._partial + outputs
        value = self._value
        if self._edges and tile.tiles[3] > 1:
            value *= 1 + _COSTS.edges / (tile.cells[2] * self._edges)
        return self._values * (value * self._partial) * self._crowding

    def _least_store(self, cells: float) -> float:
        """The same for so many cells, if no lane were idle."""
        if not self.variant.taps_in_rows:
            return self._values * (self._value * self._partial) * self._crowding
        output = _COSTS.output if self.variant.whole_images else _COSTS.lane_output
        if self._scattered:
            output = _COSTS.scattered / self._scattered
        return self._partial + self._outputs * cells * output


def sectors(gather: Gather, device: DeviceInfo) -> float:
    """Seconds beside a layer's, where row groups share sectors of its output."""
    written = math.prod(gather.dst.shape) * DTYPE_BYTES[gather.dtype]
    return _COSTS.parts_of_sectors * written / device.copy_bytes_per_second


def measure(gather: Gather, device: DeviceInfo) -> float:
    """Seconds to find what pixels and weights are multiplied by."""
    read = math.prod(gather.src.shape) + gather.groups * gather.src_channels * gather.dst_channels * gather.taps
    return _COSTS.measure + read * DTYPE_BYTES[gather.dtype] / (_COSTS.measured * device.copy_bytes_per_second)


def _norm(exponent: float, *parts: float) -> float:
    return float(sum(part**exponent for part in parts) ** (1 / exponent))
