"""Predicted time of a config of `implicit_gemm`, from counts of its work (docs/notebook.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from polyphase.costs import Costs, costs
from polyphase.problem import DTYPE_BYTES
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import NONE, Epilogue
from polyphase.problem.layouts import SECTOR_BYTES
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import prologue_cycles, slower_of
from polyphase.schedules.implicit_gemm.config import CHUNK_BYTES, ROWS, GemmConfig, Product, Taps
from polyphase.schedules.implicit_gemm.cuts import Tile

_AT_ONCE = 256  # elements whose prologue a multiprocessor computes at once when measuring: eight warps
_ROUNDING = 1 - 1e-9  # a bound is summed in another order than a prediction


def estimate(
    gather: Gather, config: GemmConfig, tile: Tile, device: DeviceInfo, layer_bytes: int, prologue: Epilogue = NONE
) -> tuple[float, str]:
    """Predicted seconds of a config, and whether ``layer_bytes`` or instructions bound it."""
    return Work(gather, config, device, prologue).estimate(gather, config.stages, tile, layer_bytes)


def prologue_estimate(
    gather: Gather, config: GemmConfig, tile: Tile, device: DeviceInfo, layer_bytes: int, prologue: Epilogue
) -> float:
    """Time that a prologue adds when producers compute it."""
    behind, _ = estimate(gather, config, tile, device, layer_bytes, prologue)
    bare, _ = estimate(gather, config, tile, device, layer_bytes)
    if not config.scaled:
        return behind - bare
    measured = math.prod(gather.src.shape) * prologue_cycles(prologue, device)
    return behind - bare + measured / (_AT_ONCE * device.multiprocessors * device.clock_hz)


def shared_ends(gather: Gather, config: GemmConfig, tile: Tile) -> float:
    """Partly written sectors: pieces of rows begin and end in sectors that another piece completes later.

    Rows begin at multiples of gcd(bytes of a row, 32) in a sector, all equally often: a part of them not at its start.
    """
    if gather.dst.channels_last or config.taps_in_rows:
        return 0
    row_bytes = gather.dst.shape[4] * gather.dst_bytes
    partial = 1 - math.gcd(row_bytes, SECTOR_BYTES) / SECTOR_BYTES  # that part
    if not partial:
        return 0
    rows, columns, pitch = math.prod(tile.cells[:2]) * tile.images, tile.cells[2], tile.pitch[2]
    *lines, width = gather.dst.shape
    tiles, piece = math.ceil(width / (columns * gather.axes[2].stride)), config.piece(gather)
    if tile.run:
        pieces = 1 + columns / piece
    else:
        cuts = range(piece, (rows - 1) * pitch + columns, piece)
        pieces = 1 + sum(0 < cut % pitch < columns for cut in cuts) / rows
    return 2 * partial * math.prod(lines) * tiles * pieces


def _bandwidth(gather: Gather, terms: Costs) -> float:
    """The share of a copy's bandwidth that a layer reaches."""
    one_tap = all((axis.kernel, axis.padding, axis.dilation) == (axis.stride, 0, 1) for axis in gather.axes)
    share: float = terms.bandwidth_one_tap if one_tap and not gather.src.channels_last else terms.bandwidth
    return share


class Work:
    """The work of a config's blocks, which does not depend on its stages or the image size.

    A planner evaluates one for many tiles, so that their common counts are computed once.
    """

    def __init__(self, gather: Gather, config: GemmConfig, device: DeviceInfo, prologue: Epilogue = NONE) -> None:
        self._terms = terms = costs("implicit_gemm", device)
        self.config, self.device = config, device
        self.product = product = Product(gather, config)
        self._size = size = gather.src_bytes
        last = gather.src.channels_last
        self._raw = raw = size // config.operand_bytes(gather.dtype)  # raw bytes for each byte of an operand
        self._in_place = in_place = last or config.tma_operands
        self._stages, self._chunks = product.stages, 2 * config.k_steps
        self._pixel_bytes = self._stages * self._chunks * CHUNK_BYTES  # bytes of each pixel of a halo
        packed = config.row_parts * product.weight_bytes
        self._weight_bytes = 0 if config.resident else packed
        self.once = (packed * terms.moved if config.resident else 0) + terms.launch

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
        self._own_weights = self._weight_bytes / config.cluster
        slot = terms.slot_in_place if in_place else terms.slot
        self._slots = self._stages * (slot + (terms.slot_shared if config.cluster > 1 else 0))
        self._taken = config.loader_groups if in_place and not config.tma_operands else 0  # stages that producers hold
        self._stage_channels = config.stage_channels(gather.dtype)
        self._convert = terms.convert_scaled if config.scaled else terms.convert
        self._transpose = terms.transpose_scaled if config.scaled else terms.transpose
        if prologue:  # for each of 32 pixels, or of two, in all channels of a chunk
            values = CHUNK_BYTES // config.operand_bytes(gather.dtype) * (4 // size)
            more = values * prologue_cycles(prologue, device)
            self._convert, self._transpose = self._convert + more, self._transpose + more
        self._count_stores(gather)
        self._bandwidth = _bandwidth(gather, terms)
        self._in_sectors = config.row_columns(gather) < gather.axes[2].stride

    def estimate(self, gather: Gather, stages: int, tile: Tile, layer_bytes: int = 0) -> tuple[float, str]:
        """Predicted seconds with ``stages``, and whether ``layer_bytes`` or instructions bound it."""
        device = self.device
        waves, in_ping_pong = self.waves(tile.total)
        cycles = self._cycles(tile.halo, self._load(tile, stages), self._store(tile), stages)
        busy = (waves * cycles[in_ping_pong] + self.once) / device.clock_hz
        if self._in_sectors:
            busy += _sectors(gather, device)
        floor = layer_bytes / (self._bandwidth * device.copy_bytes_per_second)
        floor += shared_ends(gather, self.config, tile) * self._terms.shared_end / device.copy_bytes_per_second
        seconds, bound = slower_of(busy, floor)
        return seconds + (_measure(gather, device) if self.config.scaled else 0), bound

    def beside(self, gather: Gather) -> float:
        """Seconds in addition to those of work tiles."""
        stored = _sectors(gather, self.device) if self._in_sectors else 0.0
        return stored + _measure(gather, self.device) if self.config.scaled else stored

    def waves(self, tiles: int) -> tuple[float, bool]:
        """Work tiles that a multiprocessor computes one after the other, and whether by consumers in ping-pong."""
        config = self.config
        tiles = math.ceil(tiles / config.cluster) * config.cluster
        waves = tiles * self.product.tile_shares / self.device.multiprocessors
        if waves < 8:
            waves = math.ceil(waves)
        if config.split == "turns" and (waves > 1 or config.whole_images):
            return max(waves, 2), True
        return waves, False

    def least(self, halo: float, stages: int) -> tuple[float, float]:
        """Lower bound of `_cycles` of a tile of ``halo`` pixels, with at most ``stages``."""
        return self._cycles(halo, self._least_load(halo), self._stores(halo), stages)

    def _cycles(self, halo: float, load: float, store: float, stages: int) -> tuple[float, float]:
        """Cycles of a work tile by itself, and in ping-pong, when one consumer stores while the other multiplies."""
        terms, multiply = self._terms, self._multiply(halo)
        slots = (self._slots + terms.slot_use * multiply) / (stages - self._taken)
        main = _norm(terms.overlap, multiply, self._stages * load, self._moved(halo), slots)
        if self.config.split != "turns":
            return main + store, math.inf
        return main + store, _norm(terms.ping_pong, main, (multiply + store) / 2)

    def _multiply(self, halo: float) -> float:
        """Cycles of a work tile's products."""
        shared = self._operand_bytes + self._passes * (self._pixel_bytes * halo) + self._weight_bytes
        shared *= self._shared
        return max(self._products, shared) * self._instruction + self._issue + self._wait

    def _moved(self, halo: float) -> float:
        """Cycles of a work tile's bytes from the L2 cache."""
        return (self._raw * (self._pixel_bytes * halo) + self._own_weights) * self._terms.moved

    def _load(self, tile: Tile, stages: int) -> float:
        """Cycles to load a stage, divided by the stages that are loaded at a time."""
        if self.config.tma_operands:
            return self._load_operands(max(tile.halo, tile.boxes * tile.box_pixels))
        if tile.boxes:
            return self._load_boxes(tile.halo, self.config.transpose_groups(stages), math.ceil)
        return self._load_by_threads(tile.halo, tile.copy_bytes, math.ceil)

    def _least_load(self, halo: float) -> float:
        """A lower bound of that: the fastest way of loading, without rounding copies up."""
        config = self.config
        if config.tma_operands:
            return self._load_operands(halo)
        by_threads = self._load_by_threads(halo, CHUNK_BYTES, float)
        if self._in_place or not config.wgmma:
            return by_threads
        by_one, by_all = (self._load_boxes(halo, groups, float) for groups in (1, config.loader_threads // 128))
        return min(by_threads, by_one, by_all)

    def _load_operands(self, pixels: float) -> float:
        """By TMA, directly to the operands."""
        return self._terms.stage_boxes + self._terms.box_pixel * pixels

    def _load_boxes(self, halo: float, groups: int, whole: Callable[[float], float]) -> float:
        """By TMA, transposed by ``groups`` groups of warps; ``whole`` rounds pieces up."""
        warps = (self.config.loader_threads // 32 - 1) // groups
        pieces = whole(halo * self._size / 128) * self._chunks * self.config.parts
        return (self._terms.stage_transposed + self._transpose * whole(pieces / warps)) / groups

    def _load_by_threads(self, halo: float, copy_bytes: int, whole: Callable[[float], float]) -> float:
        """By copies of ``copy_bytes``, converted by the threads that copy; ``whole`` rounds pieces up."""
        config, size, chunks, terms = self.config, self._size, self._chunks, self._terms
        warps = config.loader_threads // 32 // config.loader_groups
        if self._in_place:
            copies = terms.copy_pixels * whole(halo * chunks / 32) * (CHUNK_BYTES // copy_bytes) / warps
        else:
            copies = terms.copy_rows * whole(halo / (copy_bytes // size) / 32) * self._stage_channels / warps
        lies = size == 2 and self._in_place
        converted = 0 if lies else whole(whole(halo / 32) * chunks / warps) * config.parts
        latency = terms.stage_in_place if self._in_place else terms.stage
        return (latency + copies + self._convert * converted) / config.loader_groups

    def _count_stores(self, gather: Gather) -> None:
        """The part of a work tile's store time that does not depend on its tile."""
        config, product, stride, terms = self.config, self.product, gather.axes[2].stride, self._terms
        size = DTYPE_BYTES[gather.dtype]
        self._edges, self._lanes = 0, 1
        if config.taps_in_rows:
            channels = min(gather.dst_channels, config.channel_blocks * config.row_channels) * config.row_parts
            rows = Taps.of(gather.axes).rows(channels, config.lines)
            self._fixed = terms.partial * rows * config.cells
            self._each = channels * gather.phases / product.line_groups
            if gather.dst.channels_last and gather.dst_channels > 1:
                self._each *= terms.scattered / config.sets_at_once(gather)
            elif config.whole_images:
                self._each *= terms.output
            else:  # a lane has one cell
                self._each *= terms.lane_output
                self._lanes = 128 * config.sharers // config.row_parts
            return
        owned = product.row_blocks // config.channel_blocks * product.line_groups * config.stacked
        self._each = 0.0
        self._fixed = config.group_cells / 2 * product.row_blocks * gather.phases / owned
        if gather.dst.channels_last:
            value = terms.value_pixels
        else:
            value = terms.value_rows
            if stride & (stride - 1):
                value *= terms.odd_stride * (2 + size / 2)
            self._edges = stride * size
        if product.line_groups > 1:
            value *= terms.partial_pixels if gather.dst.channels_last else terms.partial_lines
        self._fixed *= value * (1 + terms.crowding * (config.loader_threads / 128 - 1))

    def _store(self, tile: Tile) -> float:
        """Cycles of a work tile's stores."""
        stores = self._stores(math.ceil(tile.tile_cells / self._lanes) * self._lanes)
        if self._edges and tile.tiles[3] > 1:
            stores *= 1 + self._terms.edges / (tile.cells[2] * self._edges)
        return stores

    def _stores(self, cells: float) -> float:
        """A lower bound of that: no lane is idle and all rows are whole."""
        return self._fixed + self._each * cells


class Bound:
    """Lower bound of the seconds of a config's tiles, for images of any size, with at most ``stages``.

    The time of all work tiles grows with their number, which is least if all are full.
    """

    def __init__(self, work: Work, stages: int) -> None:
        config, self._work, self._cells, self._stages = work.config, work, work.config.cells, stages
        self._rounds = work.product.tile_shares / work.device.multiprocessors  # rounds of a tile
        self._alone = work.least(0, stages)
        self._each = [cycles * self._rounds / self._cells for cycles in work.least(self._cells, stages)]
        self._ping_pong = config.split == "turns"

    def seconds(self, gather: Gather, cells: int) -> float:
        """For images of ``cells`` in all."""
        waves, in_ping_pong = self._work.waves(-(-cells // self._cells))
        if self._ping_pong and not in_ping_pong:  # with smaller tiles it might be
            return self._seconds(gather, min(self._alone[False], 2 * self._alone[True]))
        return self._seconds(gather, max(cells * self._each[in_ping_pong], waves * self._alone[in_ping_pong]))

    def closer(self, gather: Gather, cells: int, tiles: int) -> float:
        """The same for at least ``tiles`` tiles."""
        waves, in_ping_pong = self._work.waves(tiles)
        kinds = [(1, False), (2, True)] if self._ping_pong and not in_ping_pong else [(max(1, waves), in_ping_pong)]
        least = [w * self._work.least(cells * self._rounds / w, self._stages)[ping_pong] for w, ping_pong in kinds]
        return self._seconds(gather, min(least))

    def _seconds(self, gather: Gather, cycles: float) -> float:
        work = self._work
        return ((cycles + work.once) / work.device.clock_hz + work.beside(gather)) * _ROUNDING


@lru_cache(maxsize=64)
def _sectors(gather: Gather, device: DeviceInfo) -> float:
    """Additional seconds if row groups share sectors of the output."""
    written, terms = math.prod(gather.dst.shape) * DTYPE_BYTES[gather.dtype], costs("implicit_gemm", device)
    return terms.parts_of_sectors * written / device.copy_bytes_per_second


@lru_cache(maxsize=64)
def _measure(gather: Gather, device: DeviceInfo) -> float:
    """Seconds to compute the scales of weights, and of pixels unless these are copied (`halves_seconds`)."""
    terms = costs("implicit_gemm", device)
    copied, weights = gather.original is not None, gather.src_channels * gather.dst_channels * gather.taps
    read = gather.groups * weights + (0 if copied else math.prod(gather.src.shape))
    moving = read * DTYPE_BYTES[gather.dtype] / (terms.measured * device.copy_bytes_per_second)
    return moving if copied else terms.measure + moving


def _norm(exponent: float, *parts: float) -> float:
    total = 0.0
    for part in parts:  # in a generator each part would be a call
        total += part**exponent
    return float(total ** (1 / exponent))
