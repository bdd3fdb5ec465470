"""What ``window_wgrad_tma`` costs, and how many splits its sums have."""

from __future__ import annotations

import math
from functools import lru_cache

from polyphase.costs import Costs, costs
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import five
from polyphase.schedules.cost import norm, slower_of
from polyphase.schedules.tiles import affordable_planes, tiles_of
from polyphase.schedules.window_gemm.tma_config import TmaConfig, block_windows, stage_bytes, tile_lanes
from polyphase.schedules.window_gemm.window import FLUSH, channel_pitch


def weight_blocks(problem: ConvTransposeProblem, config: TmaConfig) -> tuple[int, int]:
    """M-tiles and N-tiles of a group."""
    columns = math.ceil(config.windows.count(problem) / block_windows(problem, config))
    return math.ceil(problem.in_channels_per_group / config.rows), columns


def estimate(problem: ConvTransposeProblem, config: TmaConfig, device: DeviceInfo) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("window_wgrad_tma", device)
    _, seconds, end = weight_splits(problem, config, _tiles(problem, config), device)
    moving = problem.bytes / (terms.bandwidth * device.copy_bytes_per_second)
    return norm(seconds, moving, terms.beside) + end, slower_of(seconds, moving)[1]


def weight_planes(problem: ConvTransposeProblem, config: TmaConfig, device: DeviceInfo) -> int:
    """Planes of partial sums; 0 where the kernel writes the result itself."""
    tiles = _tiles(problem, config)
    splits = weight_splits(problem, config, tiles, device)[0]
    flush = _flush(tile_lanes(problem, config))
    return 0 if splits == 1 and (DTYPE_BYTES[problem.dtype] == 4 or tiles <= flush) else splits


def _tiles(problem: ConvTransposeProblem, config: TmaConfig) -> int:
    return math.prod(tiles_of(problem.batch, five(problem.input_shape)[2:], tile_lanes(problem, config)))


def _flush(lanes: tuple[int, ...]) -> int:
    """Stages between flushes."""
    return max(1, FLUSH // math.prod(lanes))


def _stage_cycles(problem: ConvTransposeProblem, config: TmaConfig, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a stage of a CTA."""
    size = DTYPE_BYTES[problem.dtype]
    if size == 4:
        instructions, reads = _warp_work(problem, config)
        products = terms.threads_product * instructions + terms.threads_read * reads
        products *= 4 * config.groups * config.steps * (terms.third_group if config.groups > 2 else 1)
    else:
        operations = config.groups * config.row_tiles * config.lines * config.steps
        products = terms.product * operations * max(config.columns / 2, 16 + config.columns / 4)
    boxes = config.rows * size / channel_pitch(problem, problem.in_channels_per_group)
    brought = terms.box * (boxes + block_windows(problem, config))
    loading = max(terms.moved * stage_bytes(problem, config), brought)
    return norm(products, loading, terms.overlap) + terms.stage


def _warp_work(problem: ConvTransposeProblem, config: TmaConfig) -> tuple[float, float]:
    """Float32, one k-step of a warp: its mma.sync instructions, and words that each thread reads for them."""
    columns, strips = config.lines * config.columns, config.row_tiles  # of 16 rows
    if config.row_tiles == 1:  # mainloop/box_product.cuh: ABREAST
        abreast = 4 if config.columns % 32 == 0 else 2 if config.columns % 16 == 0 else 1
        columns //= abreast
        strips = min(4, math.ceil(problem.in_channels_per_group / 16)) if abreast == 4 else abreast
    return strips * columns / 8, 4 * strips + columns / 4


@lru_cache(maxsize=4096)
def weight_splits(
    problem: ConvTransposeProblem, config: TmaConfig, tiles: int, device: DeviceInfo
) -> tuple[int, float, float]:
    """Split-K count, and predicted seconds of the kernel and of the reduction."""
    blocks = math.prod(weight_blocks(problem, config)) * problem.groups
    terms = costs("window_wgrad_tma", device)
    stage = _stage_cycles(problem, config, terms)
    size, weights = DTYPE_BYTES[problem.dtype], problem.elements[1]
    flush = _flush(config.lanes)
    results, once = config.rows * config.block_columns, terms.item

    def seconds(splits: int) -> tuple[float, float]:
        stages = -(-tiles // splits)
        block = stages * stage + (-(-stages // flush) * results * terms.result + once)
        cycles = -(-blocks * splits // device.multiprocessors) * block
        alone = splits == 1 and (size == 4 or stages <= flush)
        moved = weights * (4 if alone else 8 * splits + size)
        end = 0.0 if alone else terms.launch / 2 / device.clock_hz
        return (cycles + terms.launch) / device.clock_hz, end + terms.planes * moved / device.copy_bytes_per_second

    most = max(1, min(affordable_planes(problem), tiles // 4, 4 * device.multiprocessors // blocks))
    found = min(range(1, most + 1), key=lambda splits: (sum(seconds(splits)), splits))
    return (found, *seconds(found))
