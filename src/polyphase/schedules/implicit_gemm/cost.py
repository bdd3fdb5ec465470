"""How long a variant of `implicit_gemm` takes, predicted from what it counts of a layer (docs/performance.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyphase.problem import DTYPE_BYTES
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import slower_of
from polyphase.schedules.implicit_gemm.config import CHUNK_BYTES, ROWS, GemmVariant, Product, Taps
from polyphase.schedules.implicit_gemm.tile import Tile


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
    product = Product.of(gather, variant)
    multiply, load, moved, slots = _main_loop(gather, variant, tile, product)
    main = _norm(_COSTS.overlap, multiply, load, moved, slots)
    store = _store(gather, variant, tile, product)
    item = main + store
    tiles = math.ceil(tile.total / variant.cluster) * variant.cluster
    waves = tiles * product.row_groups / variant.row_parts / device.multiprocessors
    if waves < 8:
        waves = math.ceil(waves)
    if variant.split == "turns" and (waves > 1 or variant.whole_images):
        item, waves = _norm(_COSTS.turns, main, (multiply + store) / 2), max(waves, 2)
    resident = variant.row_parts * product.weight_bytes(variant) * _COSTS.moved if variant.resident else 0
    busy = (waves * item + resident + _COSTS.launch) / device.clock_hz
    if variant.row_columns(gather) < gather.axes[2].stride:
        written = math.prod(gather.dst.shape) * DTYPE_BYTES[gather.dtype]
        busy += _COSTS.parts_of_sectors * written / device.copy_bytes_per_second
    one_tap = all((a.kernel, a.padding, a.dilation) == (a.stride, 0, 1) for a in gather.axes)
    bandwidth = _COSTS.bandwidth_one_tap if one_tap and not gather.src.channels_last else _COSTS.bandwidth
    floor = layer_bytes / (bandwidth * device.copy_bytes_per_second)
    seconds, bound = slower_of(busy, floor)
    return seconds + (_measure(gather, device) if variant.scaled else 0), bound


def _measure(gather: Gather, device: DeviceInfo) -> float:
    """Seconds to find what pixels and weights are multiplied by."""
    read = math.prod(gather.src.shape) + gather.groups * gather.src_channels * gather.dst_channels * gather.taps
    return _COSTS.measure + read * DTYPE_BYTES[gather.dtype] / (_COSTS.measured * device.copy_bytes_per_second)


def _norm(exponent: float, *parts: float) -> float:
    return float(sum(part**exponent for part in parts) ** (1 / exponent))


def _main_loop(gather: Gather, variant: GemmVariant, tile: Tile, product: Product) -> tuple[float, float, float, float]:
    """Cycles of an item's products, of its loading, of its bytes from the L2 cache, and of waiting for free stages."""
    size = DTYPE_BYTES[gather.dtype]
    raw = size // variant.operand_bytes(gather.dtype)  # bytes for each of an operand
    in_place = gather.src.channels_last or variant.boxes
    stages = product.stages(variant)
    chunks = 2 * variant.k_steps
    weight_bytes = 0 if variant.resident else variant.row_parts * product.weight_bytes(variant)
    pixel_bytes = stages * tile.halo * chunks * CHUNK_BYTES

    instructions = product.steps * product.operations * variant.pixel_blocks * variant.sharers
    instructions *= 3 if variant.parts == 2 else 1
    operand_bytes = instructions * 2 * CHUNK_BYTES * (ROWS + variant.pixels)
    passes = (1 if variant.boxes or (size == 2 and in_place) else 1 + 2 * raw) * (1 if variant.parts == 1 else 4 / 3)
    shared = operand_bytes + passes * pixel_bytes + weight_bytes
    shared *= _COSTS.shared_boxes if variant.boxes and gather.src.channels_last else _COSTS.shared
    products = max(instructions * variant.pixels / 2, shared) * (1 if variant.wgmma else _COSTS.other_instruction)
    multiply = products + _COSTS.issue * instructions + _COSTS.wait * stages * variant.sharers

    load = stages * _load(gather, variant, tile)
    free = variant.stages - (variant.loader_groups if in_place and not variant.boxes else 0)
    slot = _COSTS.slot_in_place if in_place else _COSTS.slot
    slot += _COSTS.slot_shared if variant.cluster > 1 else 0
    slots = (stages * slot + _COSTS.slot_use * multiply) / free
    return multiply, load, (raw * pixel_bytes + weight_bytes / variant.cluster) * _COSTS.moved, slots


def _load(gather: Gather, variant: GemmVariant, tile: Tile) -> float:
    """Cycles until a stage is loaded, of as many as are loaded at a time."""
    size = DTYPE_BYTES[gather.dtype]
    in_place, chunks = gather.src.channels_last, 2 * variant.k_steps
    if variant.boxes:
        return _COSTS.stage_boxes + _COSTS.box_pixel * max(tile.halo, tile.boxes * tile.box_pixels)
    warps = variant.loader_threads // 32
    if tile.boxes:
        pieces = math.ceil(tile.halo * size / 128) * chunks * variant.parts
        turners = (warps - 1) // variant.turning_groups
        turn = _COSTS.turn_scaled if variant.scaled else _COSTS.turn
        return (_COSTS.stage_turned + turn * math.ceil(pieces / turners)) / variant.turning_groups
    warps //= variant.loader_groups
    vectors = tile.halo / (tile.copy_bytes // size)
    if in_place:
        pieces = CHUNK_BYTES // tile.copy_bytes
        copies = _COSTS.copy_pixels * math.ceil(tile.halo * chunks / 32) * pieces / warps
    else:
        copies = _COSTS.copy_rows * math.ceil(vectors / 32) * variant.stage_channels(gather.dtype) / warps
    turned = 0 if size == 2 and in_place else math.ceil(math.ceil(tile.halo / 32) * chunks / warps) * variant.parts
    latency = _COSTS.stage_in_place if in_place else _COSTS.stage
    convert = _COSTS.convert_scaled if variant.scaled else _COSTS.convert
    return (latency + copies + convert * turned) / variant.loader_groups


def _store(gather: Gather, variant: GemmVariant, tile: Tile, product: Product) -> float:
    """Cycles of an item's stores."""
    stride, size = gather.axes[2].stride, DTYPE_BYTES[gather.dtype]
    if variant.taps_in_rows:
        channels = min(gather.dst_channels, variant.channel_blocks * variant.row_channels) * variant.row_parts
        rows = Taps.of(gather.axes).rows(channels, variant.lines)
        outputs = channels * gather.phases / product.line_groups
        if gather.dst.channels_last and gather.dst_channels > 1:
            outputs *= tile.tile_cells * _COSTS.scattered / variant.sets_at_once(gather)
        elif variant.whole_images:
            outputs *= tile.tile_cells * _COSTS.output
        else:  # a lane has one cell of as many as there are lanes
            lanes = 128 * variant.sharers // variant.row_parts
            outputs *= math.ceil(tile.tile_cells / lanes) * lanes * _COSTS.lane_output
        return _COSTS.partial * rows * variant.cells + outputs
    owned = product.row_blocks // variant.channel_blocks * product.line_groups
    values = variant.group_cells / 2 * product.row_blocks * gather.phases / owned
    if gather.dst.channels_last:
        value = _COSTS.value_pixels
    elif stride & (stride - 1):
        value = _COSTS.value_rows * _COSTS.odd_stride * (2 + size / 2)
    else:
        value = _COSTS.value_rows
    if not gather.dst.channels_last and tile.tiles[3] > 1:
        value *= 1 + _COSTS.edges / (tile.cells[2] * stride * size)
    if product.line_groups > 1:
        value *= _COSTS.partial_pixels if gather.dst.channels_last else _COSTS.partial_lines
    return values * value * (1 + _COSTS.crowding * (variant.loader_threads / 128 - 1))
