"""How long a config of `implicit_gemm` takes, predicted from what it counts of a layer (docs/notebook.md)."""

from __future__ import annotations

import math

from polyphase.costs import costs
from polyphase.problem import DTYPE_BYTES
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import slower_of
from polyphase.schedules.implicit_gemm.config import CHUNK_BYTES, ROWS, STAGES, GemmConfig, Product, Taps
from polyphase.schedules.implicit_gemm.cuts import Tile


def estimate(gather: Gather, config: GemmConfig, tile: Tile, device: DeviceInfo, layer_bytes: int) -> tuple[float, str]:
    """Predicted seconds of a config, and whether ``layer_bytes`` or instructions bound it."""
    return Work(gather, config, device).estimate(gather, config.stages, tile, device, layer_bytes)


class Work:
    """What blocks of a config do, whatever its stages: the same for images of all sizes.

    A planner asks one of them for many tiles, so that what they have in common is counted once.
    """

    def __init__(self, gather: Gather, config: GemmConfig, device: DeviceInfo) -> None:
        self._terms = terms = costs("implicit_gemm", device)
        product, size = Product.of(gather, config), DTYPE_BYTES[gather.dtype]
        last = gather.src.channels_last
        self.config, self.product = config, product
        raw = size // config.operand_bytes(gather.dtype)  # bytes for each of an operand
        in_place = last or config.tma_operands
        self._stages, chunks = product.stages(config), 2 * config.k_steps
        self._pixel_bytes = self._stages * chunks * CHUNK_BYTES  # of each pixel of a halo
        self._packed = config.row_parts * product.weight_bytes(config)
        self._weight_bytes = 0 if config.resident else self._packed
        self.once = (self._packed * terms.moved if config.resident else 0) + terms.launch

        instructions = product.steps * product.operations * config.pixel_blocks * config.sharers
        instructions *= 3 if config.parts == 2 else 1
        self._operand_bytes = instructions * 2 * CHUNK_BYTES * (ROWS + config.pixels)
        passes = 1 if config.tma_operands or (size == 2 and in_place) else 1 + 2 * raw
        self._passes = passes * (1 if config.parts == 1 else 4 / 3)
        self._shared = terms.shared_boxes if config.tma_operands and last else terms.shared
        self._products = instructions * config.pixels / 2
        self._instruction = 1 if config.wgmma else terms.other_instruction
        self._issue = terms.issue * instructions
        self._wait = terms.wait * self._stages * config.sharers
        self._raw = raw
        self._own_weights = self._weight_bytes / config.cluster
        slot = terms.slot_in_place if in_place else terms.slot
        self._slots = self._stages * (slot + (terms.slot_shared if config.cluster > 1 else 0))
        self._taken = config.loader_groups if in_place and not config.tma_operands else 0  # stages that are never free
        self._chunks, self._size, self._in_place = chunks, size, last
        self._stage_channels = config.stage_channels(gather.dtype)
        self._count_stores(gather)
        one_tap = all((a.kernel, a.padding, a.dilation) == (a.stride, 0, 1) for a in gather.axes)
        self._bandwidth = terms.bandwidth_one_tap if one_tap and not last else terms.bandwidth
        self.in_sectors = config.row_columns(gather) < gather.axes[2].stride

    def estimate(
        self, gather: Gather, stages: int, tile: Tile, device: DeviceInfo, layer_bytes: int
    ) -> tuple[float, str]:
        """Predicted seconds with so many stages, and whether ``layer_bytes`` or instructions bound it."""
        config, terms = self.config, self._terms
        multiply, moved = self._multiply(tile.halo), self._moved(tile.halo)
        load = self._stages * self._load(tile, stages)
        slots = (self._slots + terms.slot_use * multiply) / (stages - self._taken)
        main = _norm(terms.overlap, multiply, load, moved, slots)
        store = self._store(tile)
        item = main + store
        tiles = math.ceil(tile.total / config.cluster) * config.cluster
        waves = tiles * self.product.row_groups / config.row_parts / device.multiprocessors
        if waves < 8:
            waves = math.ceil(waves)
        if config.split == "turns" and (waves > 1 or config.whole_images):
            item, waves = _norm(terms.turns, main, (multiply + store) / 2), max(waves, 2)
        busy = (waves * item + self.once) / device.clock_hz
        if self.in_sectors:
            busy += sectors(gather, device)
        floor = layer_bytes / (self._bandwidth * device.copy_bytes_per_second)
        seconds, bound = slower_of(busy, floor)
        return seconds + (measure(gather, device) if config.scaled else 0), bound

    def least(self, halo: float, stages: int, tma: bool) -> tuple[float, float]:
        """Cycles of an item of so many pixels that no tile falls below, and of one whose stores others hide.

        ``stages`` are the most that there may be, ``tma``: whether TMA may bring pixels that are then transposed.
        """
        multiply = self._multiply(halo)
        slots = (self._slots + self._terms.slot_use * multiply) / (stages - self._taken)
        load = self._stages * self._least_load(halo, tma)
        main = _norm(self._terms.overlap, multiply, load, self._moved(halo), slots)
        store = self._least_store(halo)
        return main + store, _norm(self._terms.turns, main, (multiply + store) / 2)

    def _multiply(self, halo: float) -> float:
        """Cycles of an item's products."""
        shared = self._operand_bytes + self._passes * (self._pixel_bytes * halo) + self._weight_bytes
        shared *= self._shared
        return max(self._products, shared) * self._instruction + self._issue + self._wait

    def _moved(self, halo: float) -> float:
        """Cycles of an item's bytes from the L2 cache."""
        return (self._raw * (self._pixel_bytes * halo) + self._own_weights) * self._terms.moved

    def _load(self, tile: Tile, stages: int) -> float:
        """Cycles until a stage is loaded, of as many as are loaded at a time."""
        config, size, chunks, terms = self.config, self._size, self._chunks, self._terms
        if config.tma_operands:
            return terms.stage_boxes + terms.box_pixel * max(tile.halo, tile.boxes * tile.box_pixels)
        warps = config.loader_threads // 32
        if tile.boxes:
            pieces = math.ceil(tile.halo * size / 128) * chunks * config.parts
            groups = config.turning_groups_of(stages)
            turn = terms.turn_scaled if config.scaled else terms.turn
            return (terms.stage_turned + turn * math.ceil(pieces / ((warps - 1) // groups))) / groups
        warps //= config.loader_groups
        vectors = tile.halo / (tile.copy_bytes // size)
        if self._in_place:
            pieces = CHUNK_BYTES // tile.copy_bytes
            copies = terms.copy_pixels * math.ceil(tile.halo * chunks / 32) * pieces / warps
        else:
            copies = terms.copy_rows * math.ceil(vectors / 32) * self._stage_channels / warps
        in_place = size == 2 and self._in_place
        turned = 0 if in_place else math.ceil(math.ceil(tile.halo / 32) * chunks / warps) * config.parts
        latency = terms.stage_in_place if self._in_place else terms.stage
        convert = terms.convert_scaled if config.scaled else terms.convert
        return (latency + copies + convert * turned) / config.loader_groups

    def _least_load(self, halo: float, tma: bool) -> float:
        """The same for so many pixels, if copies were of no whole pieces."""
        config, size, chunks, terms = self.config, self._size, self._chunks, self._terms
        if config.tma_operands:
            return terms.stage_boxes + terms.box_pixel * halo
        all_warps = config.loader_threads // 32
        warps = all_warps // config.loader_groups
        if self._in_place:
            copies = terms.copy_pixels * halo * chunks / 32 / warps
        else:
            copies = terms.copy_rows * halo * size / CHUNK_BYTES / 32 * self._stage_channels / warps
        turned = 0.0 if size == 2 and self._in_place else halo / 32 * chunks / warps * config.parts
        latency = terms.stage_in_place if self._in_place else terms.stage
        convert = terms.convert_scaled if config.scaled else terms.convert
        by_threads = (latency + copies + convert * turned) / config.loader_groups
        if not tma or self._in_place or not config.wgmma:
            return by_threads
        pieces = halo * size / 128 * chunks * config.parts
        turn = terms.turn_scaled if config.scaled else terms.turn
        by_groups = (
            (terms.stage_turned + turn * pieces / ((all_warps - 1) // groups)) / groups
            for groups in {config.turning_groups_of(count) for count in STAGES}
        )
        return min(by_threads, *by_groups)

    def _count_stores(self, gather: Gather) -> None:
        """What an item's stores take, but for what depends on its tile."""
        config, product, stride, terms = self.config, self.product, gather.axes[2].stride, self._terms
        self._scattered = self._edges = 0.0
        if config.taps_in_rows:
            channels = min(gather.dst_channels, config.channel_blocks * config.row_channels) * config.row_parts
            rows = Taps.of(gather.axes).rows(channels, config.lines)
            self._outputs = channels * gather.phases / product.line_groups
            self._partial = terms.partial * rows * config.cells
            if gather.dst.channels_last and gather.dst_channels > 1:
                self._scattered = config.sets_at_once(gather)
            return
        owned = product.row_blocks // config.channel_blocks * product.line_groups
        self._values = config.group_cells / 2 * product.row_blocks * gather.phases / owned
        if gather.dst.channels_last:
            self._value = terms.value_pixels
        elif stride & (stride - 1):
            self._value = terms.value_rows * terms.odd_stride * (2 + self._size / 2)
        else:
            self._value = terms.value_rows
        self._edges = 0 if gather.dst.channels_last else stride * self._size
        if product.line_groups > 1:
            self._partial = terms.partial_pixels if gather.dst.channels_last else terms.partial_lines
        else:
            self._partial = 1.0
        self._crowding = 1 + terms.crowding * (config.loader_threads / 128 - 1)

    def _store(self, tile: Tile) -> float:
        """Cycles of an item's stores."""
        config, terms = self.config, self._terms
        if config.taps_in_rows:
            outputs = self._outputs
            if self._scattered:
                outputs *= tile.tile_cells * terms.scattered / self._scattered
            elif config.whole_images:
                outputs *= tile.tile_cells * terms.output
            else:  # a lane has one cell of as many as there are lanes
                lanes = 128 * config.sharers // config.row_parts
                outputs *= math.ceil(tile.tile_cells / lanes) * lanes * terms.lane_output
            return self._partial + outputs
        value = self._value
        if self._edges and tile.tiles[3] > 1:
            value *= 1 + terms.edges / (tile.cells[2] * self._edges)
        return self._values * (value * self._partial) * self._crowding

    def _least_store(self, cells: float) -> float:
        """The same for so many cells, if no lane were idle."""
        if not self.config.taps_in_rows:
            return self._values * (self._value * self._partial) * self._crowding
        output = self._terms.output if self.config.whole_images else self._terms.lane_output
        if self._scattered:
            output = self._terms.scattered / self._scattered
        return self._partial + self._outputs * cells * output


def sectors(gather: Gather, device: DeviceInfo) -> float:
    """Seconds beside a layer's, where row groups share sectors of its output."""
    written, terms = math.prod(gather.dst.shape) * DTYPE_BYTES[gather.dtype], costs("implicit_gemm", device)
    return terms.parts_of_sectors * written / device.copy_bytes_per_second


def measure(gather: Gather, device: DeviceInfo) -> float:
    """Seconds to find what pixels and weights are multiplied by."""
    terms = costs("implicit_gemm", device)
    read = math.prod(gather.src.shape) + gather.groups * gather.src_channels * gather.dst_channels * gather.taps
    return terms.measure + read * DTYPE_BYTES[gather.dtype] / (terms.measured * device.copy_bytes_per_second)


def _norm(exponent: float, *parts: float) -> float:
    return float(sum(part**exponent for part in parts) ** (1 / exponent))
