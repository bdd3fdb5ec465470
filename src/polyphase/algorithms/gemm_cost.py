"""How long a variant of `implicit_gemm` takes, predicted from what it counts of a layer (docs/performance.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyphase.algorithms.gather import Gather
from polyphase.algorithms.gemm_tile import Tile
from polyphase.algorithms.gemm_variant import CHUNK_BYTES, GemmVariant, Product
from polyphase.device import DeviceInfo
from polyphase.problem import DTYPE_BYTES


@dataclass(frozen=True)
class Costs:
    """Multiprocessor cycles of the parts of an item, fitted to the times of an H200 (docs/performance.md)."""

    issue: float = 6.5  # each matrix instruction, above what the cores and shared memory take
    stage: float = 770.0  # barriers and latencies of a stage, for the group that loads it
    copy_rows: float = 70.0  # a warp's copies, channels first
    copy_pixels: float = 200.0  # and channels last
    convert: float = 140.0  # a chunk of 32 pixels turned around, for each warp
    moved: float = 32.0  # bytes per cycle from the L2 cache
    store_rows: float = 29.0  # a thread's value, channels first
    odd_stride: float = 4.0  # times that and the bytes of a value, where a thread's elements are no vector
    store_pixels: float = 50.0  # and channels last
    overlap: float = 0.5  # of the shorter of loading and multiplying, what does not hide behind the longer
    launch: float = 29000.0
    few_stages: float = 0.1  # more time for every stage less than four


COSTS = Costs()


def estimate(
    gather: Gather, variant: GemmVariant, tile: Tile, device: DeviceInfo, bytes_moved: int, costs: Costs = COSTS
) -> tuple[float, str]:
    """Predicted seconds of a variant, and whether ``bytes_moved``, those of the layer, or instructions bound it."""
    product = Product.of(gather, variant)
    size = DTYPE_BYTES[gather.dtype]
    stages = product.steps // variant.k_steps
    chunks = 2 * variant.k_steps
    last = gather.src.channels_last

    width = max(variant.pixels / 2, 16 + variant.pixels / 4) * (1 if variant.wgmma else 2.2)
    instructions = product.steps * product.operations * variant.pixel_blocks * (3 if variant.parts == 2 else 1)
    multiply = instructions * (width + costs.issue) * variant.sharers

    vector = tile.copy_bytes // size
    pieces = 1 if tile.copy_bytes == 16 else 16 // size
    warps = variant.loader_threads // variant.loader_groups // 32
    rows = math.ceil(tile.halo / vector / 32) * chunks * 16 / size
    copies = (tile.halo * chunks / 32 * pieces if last else rows) / warps
    turned = 0 if (last and size == 2) or variant.innermost else math.ceil(math.ceil(tile.halo / 32) * chunks / warps)
    copy = costs.copy_pixels if last else costs.copy_rows
    load = stages * (costs.stage + copy * copies + costs.convert * turned * variant.parts) / variant.loader_groups
    weights = 0 if variant.resident else variant.row_parts * product.weight_bytes(variant)
    load = max(load, (weights + stages * tile.halo * chunks * CHUNK_BYTES) / costs.moved)

    owned = product.row_blocks // variant.channel_blocks * product.line_groups
    values = variant.group_cells / 2 * product.row_blocks * gather.phases / owned
    stride = gather.axes[2].stride
    rows = costs.store_rows * (1 if stride & (stride - 1) == 0 else costs.odd_stride * size)
    store = values * (costs.store_pixels if gather.dst.channels_last else rows)

    main = max(multiply, load) + costs.overlap * min(multiply, load)
    main *= 1 + costs.few_stages * max(0, 4 - variant.stages)
    total = max(main, (multiply + store) / 2) if variant.split == "turns" else main + store
    waves = tile.count * product.row_groups / variant.row_parts / device.multiprocessors
    if waves < 8:
        waves = math.ceil(waves)
    cycles = max(waves, 2 if variant.split == "turns" else 1) * total + costs.launch
    floor = bytes_moved / (0.8 * device.copy_bytes_per_second)
    busy = cycles / device.clock_hz
    return max(floor, busy), "bytes" if floor > busy else "instructions"
