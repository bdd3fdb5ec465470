"""The cost of a config of ``direct_tiled.cu``: registers and cycles, from counts of a thread's operations.

The terms are in section ``direct_tiled`` of the costs, in issue slots, stalls included.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from polyphase.costs import Costs
from polyphase.problem import accumulator_bytes
from polyphase.schedules.cells import Gather


class TiledConfig(NamedTuple):
    """The compile-time shape of ``direct_tiled.cu``; its file says what the names mean."""

    lanes: int
    dst_per_thread: int
    cells_h: int
    cells_w: int
    dst_slices: int
    src_slices: int
    stage_channels: int
    loads: int
    buffers: int
    min_blocks: int
    dst_vector: int

    @property
    def cells(self) -> tuple[int, int]:
        """Cells of a lane, along height and width."""
        return self.cells_h, self.cells_w

    @property
    def asynchronous(self) -> bool:
        """Whether cp.async copies stages to shared memory."""
        return self.buffers > 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.dst_slices * self.src_slices

    def dst_blocks(self, gather: Gather) -> int:
        """Blocks that share the destination channels of a group."""
        return math.ceil(gather.dst_channels / (self.dst_per_thread * self.dst_slices))


# Terms, on average over the phases, after which a chain of float32 ends with its stage: its error grows with the root
# of their number (docs/numerics.md). Other types are exact enough, or are rounded much more at the end.
_CHAIN_TERMS = 50


class Patch(NamedTuple):
    """Counts of one thread per source channel, for its cells and channels; the same for all stages."""

    products: int
    weight_reads: int
    patch_reads: int
    accumulators: int  # phases without taps included
    owned: int  # accumulators that have taps
    elements: int  # source elements in registers at once
    run: int
    words: int  # registers of a value

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, gather: Gather, dst_per_thread: int, cells_h: int, cells_w: int) -> Patch:
        """The counts for this pass."""
        _, height, width = gather.cell_axes
        cells = cells_h * cells_w
        rows, columns = height.window_used(cells_h), width.window_used(cells_w)
        reads = columns  # reads of a row
        if gather.split == 1 and cells_w * width.src % 2 == 0:  # in pairs
            reads = math.ceil((width.first_offset % 2 + width.window(cells_w)) / 2)
        words = accumulator_bytes(gather.dtype) // 4
        return cls(
            products=gather.taps * dst_per_thread * cells * words,
            weight_reads=math.ceil(gather.taps * dst_per_thread / 4) * words,
            patch_reads=gather.axes[0].kernel * rows * reads * words,
            accumulators=cells * gather.phases * dst_per_thread,
            owned=cells * gather.owned * dst_per_thread,
            elements=rows * columns,
            run=cells_w * width.dst,
            words=words,
        )


class Counts(NamedTuple):
    """Counts of one thread: per source channel, per stage, and per work tile (direct_tiled.cu defines the names)."""

    stages: int
    chain: int  # stages whose products are summed in one chain
    channels: float  # channels of a stage that a thread computes
    weight_items: int
    scattered: bool  # whether each item needs its own address, which does not follow from the first one's
    patch: Patch

    @classmethod
    def of(cls, gather: Gather, config: TiledConfig) -> Counts:
        """The counts of a thread of ``config`` for this pass."""
        block_dst = config.dst_per_thread * config.dst_slices
        per_stage = config.stage_channels * block_dst * gather.taps
        chain = stages = -(-gather.src_channels // config.stage_channels)
        channels = config.stage_channels / config.src_slices
        if gather.dtype == "float32":
            chain = min(stages, math.ceil(_CHAIN_TERMS * gather.owned / (gather.taps * channels)))
        return cls(
            stages,
            max(chain, config.src_slices),
            channels,
            -(-per_stage // config.threads),
            gather.weight_channels_last and config.threads % block_dst > 0,
            Patch.of(gather, config.dst_per_thread, config.cells_h, config.cells_w),
        )


_STRAIGHT = 1024  # most products of one piece of straight-line code: more would overflow the instruction cache


def straight(counts: Counts) -> bool:
    """Whether all channels of a stage are one piece of straight-line code; otherwise the kernel loops over them."""
    return counts.patch.products * counts.channels <= _STRAIGHT


def thread_cycles(counts: Counts, config: TiledConfig, terms: Costs) -> float:
    """Issue slots of a thread for one work tile."""
    long = counts.patch.products * counts.channels / 700 - 1
    code = terms.long_code * max(0.0, long) if straight(counts) else terms.rolled_code
    reads = counts.patch.weight_reads * terms.weight_read + counts.patch.patch_reads * terms.patch_read
    compute = counts.channels * (counts.patch.products * (1 + code) + reads + terms.channel)
    quad = terms.copy if config.asynchronous else terms.load
    load = config.loads * quad + counts.weight_items * terms.weight_item + terms.stage
    flush = counts.patch.accumulators * terms.flush * (math.ceil(counts.stages / counts.chain) - 1)
    if counts.patch.run == 1:
        element = terms.element_alone
    else:
        element = terms.element_vector if counts.patch.run in (2, 4) else terms.element_transposed
    epilogue = counts.patch.accumulators * element / config.src_slices
    reduction = counts.patch.accumulators * terms.reduction * (config.src_slices - 1) / config.src_slices
    return counts.stages * (compute + load) + flush + epilogue + reduction


def _wavefronts(counts: Counts, config: TiledConfig) -> float:
    """Wavefronts of shared memory of a warp for one work tile; weights are broadcast, and nearly free."""
    loads = 8 * config.loads + 2 * counts.weight_items
    return (
        counts.stages * (counts.channels * counts.patch.patch_reads * config.cells_w + loads)
        + 3 * counts.patch.accumulators
    )


def registers(counts: Counts, config: TiledConfig) -> int:
    """Registers that a thread needs without spilling: fitted to the same configs, rather too many."""
    weights = (3.0 if counts.scattered else 1.7) * counts.weight_items
    always = counts.patch.owned + (2 if config.asynchronous else 7) * config.loads + weights
    stages = 0.2 * counts.patch.elements + 1.1 * min(4 * counts.patch.weight_reads // counts.patch.words, 24)
    epilogue = (7 if config.asynchronous and counts.patch.run in (2, 4) else 10.5) * counts.patch.run
    return round(counts.patch.words * (always + max(stages, epilogue))) + 25


def block_cycles(config: TiledConfig, counts: Counts, resident: int, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a work tile, with ``resident`` blocks on it."""
    warps = config.threads / 32
    cycles = max(thread_cycles(counts, config, terms) * warps / 4, _wavefronts(counts, config) * warps)
    # With few resident warps latencies are exposed, and a single block idles at every barrier.
    lone_block = terms.lone_block / resident if counts.stages > 1 else 0.0
    return cycles * (1 + terms.latency / math.pow(warps * resident, terms.hidden) + lone_block)


def cycles_per_result(gather: Gather, config: TiledConfig, counts: Counts, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor per cell and destination channel, if there are enough blocks."""
    cycles = block_cycles(config, counts, config.min_blocks, terms)
    return cycles * config.dst_blocks(gather) / (config.lanes * math.prod(config.cells) * gather.dst_channels)


def cycles_of_waves(config: TiledConfig, counts: Counts, work_tiles: int, multiprocessors: int, terms: Costs) -> float:
    """Predicted cycles of ``work_tiles``: full waves of resident blocks, and a last wave of the rest."""
    waves, left = divmod(work_tiles, multiprocessors * config.min_blocks)
    cycles = waves * config.min_blocks * block_cycles(config, counts, config.min_blocks, terms)
    if left:
        resident = math.ceil(left / multiprocessors)
        cycles += resident * block_cycles(config, counts, resident, terms)
    return cycles
