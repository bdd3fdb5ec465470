"""Cost and split-K counts of the TMA kernels of both gradients."""

from __future__ import annotations

import math
from functools import lru_cache

from polyphase.costs import Costs, costs
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.cost import overlapped_time, slower_of, whole_waves
from polyphase.schedules.tensor_cores import wgmma_cycles
from polyphase.schedules.tiles import affordable_planes, fastest_splits
from polyphase.schedules.window_gemm.tma_config import TmaConfig, block_windows, stage_bytes, tile_extent
from polyphase.schedules.window_gemm.window import FLUSH, channel_pitch, input_tiles, sectors_of

_LEAST_STAGES = 4  # least stages of a split of an input gradient


def input_work_tiles(problem: ConvTransposeProblem, config: TmaConfig) -> int:
    """Work tiles of an input gradient, without split-K."""
    columns = math.ceil(problem.in_channels_per_group / config.columns)
    return _tiles(problem, Pass.INPUT_GRAD, config) * problem.groups * columns


def weight_blocks(problem: ConvTransposeProblem, config: TmaConfig) -> tuple[int, int]:
    """M-tiles and N-tiles of a group of a weight gradient."""
    columns = math.ceil(config.windows.count(problem) / block_windows(problem, config))
    return math.ceil(problem.in_channels_per_group / config.rows), columns


def depth_stages(problem: ConvTransposeProblem, config: TmaConfig) -> int:
    """Stages of an input gradient: as many for each tap as its channels fill."""
    pixel = problem.out_channels_per_group * DTYPE_BYTES[problem.dtype]
    return problem.taps * math.ceil(pixel / config.depth_bytes)


def _tiles(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig) -> int:
    return math.prod(input_tiles(problem, tile_extent(problem, pass_, config)))


def _terms(pass_: Pass, device: DeviceInfo) -> Costs:
    return costs("window_dgrad_tma" if pass_ is Pass.INPUT_GRAD else "window_wgrad_tma", device)


def estimate(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig, device: DeviceInfo) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = _terms(pass_, device)
    splits_of = weight_splits if pass_ is Pass.WEIGHT_GRAD else input_splits
    _, seconds, end = splits_of(problem, config, device)
    moving = problem.bytes / (terms.bandwidth * device.copy_bytes_per_second)
    _, bound = slower_of(seconds, moving)
    return overlapped_time(seconds, moving, terms.beside) + end, bound


def weight_planes(problem: ConvTransposeProblem, config: TmaConfig, device: DeviceInfo) -> int:
    """Partial planes of a weight gradient; 0 if the kernel writes the result itself."""
    splits = weight_splits(problem, config, device)[0]
    at_once = DTYPE_BYTES[problem.dtype] == 4 or _tiles(problem, Pass.WEIGHT_GRAD, config) <= flush_of(config.lanes)
    return 0 if splits == 1 and at_once else splits


def flush_of(tile: tuple[int, ...]) -> int:
    """Stages of a weight gradient between flushes."""
    return max(1, FLUSH // math.prod(tile))


def _stage_cycles(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a stage of a block."""
    size, weights = DTYPE_BYTES[problem.dtype], pass_ is Pass.WEIGHT_GRAD
    operations = config.groups * config.row_tiles * config.lines * config.steps
    if weights and size == 4:
        instructions, reads = _warp_work(problem, config)
        products = terms.threads_product * instructions + terms.threads_read * reads
        products *= 4 * config.groups * config.steps * (terms.third_group if config.groups > 2 else 1)
    else:
        products = terms.product * operations * wgmma_cycles(config.columns)
    if weights:
        boxes = config.rows * size / channel_pitch(problem, problem.in_channels_per_group)
        brought = terms.box * (boxes + block_windows(problem, config))
    else:
        brought = terms.box_row * (config.rows + config.block_columns)
    loading = max(terms.moved * stage_bytes(problem, pass_, config), brought)
    cycles: float = overlapped_time(products, loading, terms.overlap) + terms.stage
    return cycles


def _warp_work(problem: ConvTransposeProblem, config: TmaConfig) -> tuple[float, float]:
    """Float32, one k-step of a warp: its mma.sync instructions, and words that each thread reads for them."""
    columns, strips = config.lines * config.columns, config.row_tiles  # strips of 16 rows
    if config.row_tiles == 1:  # mainloop/box_product.cuh: ABREAST
        abreast = 4 if config.columns % 32 == 0 else 2 if config.columns % 16 == 0 else 1
        columns //= abreast
        strips = min(4, math.ceil(problem.in_channels_per_group / 16)) if abreast == 4 else abreast
    return strips * columns / 8, 4 * strips + columns / 4


def _result(problem: ConvTransposeProblem, config: TmaConfig, terms: Costs) -> float:
    """Predicted cycles of a result of an input gradient; channels first: by the sectors touched over those filled."""
    if not config.first:
        return terms.result
    size, (*_, rows, columns) = DTYPE_BYTES[problem.dtype], tile_extent(problem, Pass.INPUT_GRAD, config)
    sectors = sectors_of(problem, rows, columns)
    return sectors * (terms.first_halves if size == 2 else terms.first)


@lru_cache(maxsize=4096)
def input_splits(problem: ConvTransposeProblem, config: TmaConfig, device: DeviceInfo) -> tuple[int, float, float]:
    """Split-K count of an input gradient, and predicted seconds of the kernel and of the reduction."""
    terms, places = _terms(Pass.INPUT_GRAD, device), device.multiprocessors * config.resident
    stages, stage = depth_stages(problem, config), _stage_cycles(problem, Pass.INPUT_GRAD, config, terms)
    once = config.rows * config.block_columns * _result(problem, config, terms) + terms.item / config.resident
    work_tiles, moved = input_work_tiles(problem, config), problem.elements[0]

    def seconds(splits: int) -> tuple[float, float]:
        waves = whole_waves(work_tiles * splits / places)
        cycles = waves * (math.ceil(stages / splits) * stage + once) * config.resident
        end = terms.reduce + moved * (8 * splits + DTYPE_BYTES[problem.dtype]) / device.copy_bytes_per_second
        return (cycles + terms.launch) / device.clock_hz, end if splits > 1 else 0.0

    planes = affordable_planes(problem, Pass.INPUT_GRAD)
    return fastest_splits(min(planes, stages // _LEAST_STAGES, 2 * places // max(1, work_tiles)), seconds)


@lru_cache(maxsize=4096)
def weight_splits(problem: ConvTransposeProblem, config: TmaConfig, device: DeviceInfo) -> tuple[int, float, float]:
    """Split-K count of a weight gradient, and predicted seconds of the kernel and of the reduction."""
    blocks = math.prod(weight_blocks(problem, config)) * problem.groups
    places = device.multiprocessors * config.resident
    terms = _terms(Pass.WEIGHT_GRAD, device)
    stage = _stage_cycles(problem, Pass.WEIGHT_GRAD, config, terms)
    size, weights = DTYPE_BYTES[problem.dtype], problem.elements[1]
    tiles, flush = _tiles(problem, Pass.WEIGHT_GRAD, config), flush_of(config.lanes)
    results, once = config.rows * config.block_columns, terms.item / config.resident

    def seconds(splits: int) -> tuple[float, float]:
        stages = -(-tiles // splits)
        block = stages * stage + (-(-stages // flush) * results * terms.result + once)
        cycles = -(-blocks * splits // places) * block * config.resident
        alone = splits == 1 and (size == 4 or stages <= flush)
        moved = weights * (4 if alone else 8 * splits + size)
        end = 0.0 if alone else terms.launch / 2 / device.clock_hz
        return (cycles + terms.launch) / device.clock_hz, end + terms.planes * moved / device.copy_bytes_per_second

    return fastest_splits(min(affordable_planes(problem), tiles // 4, 4 * places // blocks), seconds)
