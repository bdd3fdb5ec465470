"""A forward pass's product of few positions with all columns, by ``kernels/direct_wgrad_gemm.cu``.

    product[position, column]  =  Σ over ci of   x[ci, position] · w[ci, column]

is a weight gradient: input channels are its summed dimension, positions its rows, and the weight, in its own layout,
its output gradient. So the weight is read once, in whole lines, and is neither packed nor rounded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import next_power_of_two
from polyphase.problem.problem import accumulator_bytes
from polyphase.program.step import Step, main_step
from polyphase.schedules.cells import Side
from polyphase.schedules.direct_wgrad.gemm import (
    THREADS,
    GemmConfig,
    GemmProduct,
    items_of,
    shared_values,
    source_of,
    stage_cycles,
)

_LEAST_STAGES = 4  # least stages of a split
_PLANES_SHARE = 1 / 8  # most bytes of partial planes, relative to the weight's


class FewRows(NamedTuple):
    """A product of ``positions`` rows and ``columns``, with ``depth`` input channels as its K."""

    positions: int
    columns: int
    depth: int
    dtype: str

    @property
    def product(self) -> GemmProduct:
        """The product for which configs are ranked: positions are rounded up to a power of two."""
        words = accumulator_bytes(self.dtype) // 4
        return GemmProduct(next_power_of_two(self.positions), self.columns, words, 1, along_channels=True)

    def splits(self, config: GemmConfig, device: DeviceInfo) -> int:
        """Split-K count: all multiprocessors have blocks, and partial planes stay small beside the weight."""
        tiles, stages = self._tiles(config), max(1, math.ceil(self.depth / config.depth))
        affordable = (
            self.depth * DTYPE_BYTES[self.dtype] * _PLANES_SHARE / (self.positions * accumulator_bytes(self.dtype))
        )
        most = max(1, min(stages // _LEAST_STAGES, int(affordable)))
        wanted = min(most, math.ceil(2 * device.multiprocessors * config.min_blocks / tiles))
        return math.ceil(stages / math.ceil(stages / wanted))

    def seconds(self, config: GemmConfig, device: DeviceInfo) -> float:
        """Predicted time by instructions, or by bytes of the weight, with one stage per resident block in flight."""
        terms, splits = costs("direct_wgrad_gemm", device), self.splits(config, device)
        blocks, stages = self._tiles(config) * splits, math.ceil(math.ceil(self.depth / config.depth) / splits)
        slots = device.multiprocessors * config.min_blocks
        waves = max(1.0, blocks / slots) if blocks > 4 * slots else math.ceil(blocks / slots)
        work = config.min_blocks * stage_cycles(config, self.product, terms)
        rate = device.copy_bytes_per_second / (device.multiprocessors * device.clock_hz)  # bytes in a cycle
        moved = config.min_blocks * config.depth * config.columns * DTYPE_BYTES[self.dtype] / rate
        return (waves * (stages * max(work, moved, terms.latency / 2) + terms.latency)) / device.clock_hz

    def step(self, config: GemmConfig, device: DeviceInfo, strides: tuple[int, int]) -> Step:
        """The launch; ``strides``: of x along positions and channels. Splits write partial planes."""
        splits = self.splits(config, device)
        rows = next_power_of_two(self.positions)
        layer = ConvTransposeProblem.make((1, rows, self.depth), self.columns, 1, dtype=self.dtype)
        x = Side((1, rows, 1, 1, self.depth), (0, strides[0], 0, 0, strides[1]))
        weight = Side((1, self.columns, 1, 1, self.depth), (0, 1, 0, 0, self.columns))
        row_blocks = math.ceil(rows / config.rows)
        params = {
            "x": x,
            "g": weight,
            "batch": 1,
            "groups": 1,
            "rows": self.positions,
            "row_shares": row_blocks,
            "splits": splits,
            "split_length": math.ceil(math.ceil(self.depth / config.depth) / splits) * config.depth,
            "positions": self.depth,
            "plane": self.positions * self.columns,
            "narrowed": False,
        }
        shared_bytes = shared_values(config) * accumulator_bytes(self.dtype)
        return main_step(source_of(layer, config, True), self._tiles(config) * splits, THREADS, shared_bytes, params)

    def fits(self, config: GemmConfig) -> bool:
        """Whether a block's loads for a stage are whole lines, or all columns."""
        return config.columns >= min(64, self.columns) and items_of(config.columns, config.depth) >= 2

    def _tiles(self, config: GemmConfig) -> int:
        return math.ceil(self.product.rows / config.rows) * math.ceil(self.columns / config.columns)
