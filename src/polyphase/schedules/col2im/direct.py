"""Few positions, large weights: an exact product that reads the weight once, in its own layout, then col2im.

    product[position, column]  =  Σ over ci of   x[ci, position] · w[ci, column]

is a weight gradient, which ``kernels/direct_wgrad_gemm.cu`` computes: input channels are its summed dimension,
positions its rows, and the weight is its output gradient. So the weight is neither packed nor rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import next_power_of_two
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.problem.problem import accumulator_bytes
from polyphase.program.program import Buffer, Program, reading_channels_last
from polyphase.program.step import SRC, WEIGHT, Step
from polyphase.program.transpose import Transposed
from polyphase.schedules.cells import Side
from polyphase.schedules.col2im.schedule import MOST_BYTES, MOST_OUTPUTS, PRODUCT, as_row, col2im_step
from polyphase.schedules.cost import slower_of, transpose_seconds
from polyphase.schedules.direct_wgrad.gemm import (
    GemmConfig,
    GemmProduct,
    Launch,
    gemm_step,
    items_of,
    legal_configs,
    seconds_along_channels,
)
from polyphase.schedules.schedule import Cost, Schedule

_MOST_POSITIONS = 64  # most positions of all images
_LEAST_STAGES = 4  # least stages of a split
_PLANES_SHARE = 1 / 8  # most bytes of partial planes, relative to the weight's


class _FewRows(NamedTuple):
    """A product of ``positions`` rows and ``columns``, with ``depth`` input channels as its K."""

    positions: int
    columns: int
    depth: int
    dtype: str

    @classmethod
    def of(cls, problem: ConvTransposeProblem) -> _FewRows:
        """The product of all positions of a layer with all of its columns."""
        positions = problem.batch * math.prod(problem.input_size)
        return cls(positions, problem.out_channels * problem.taps, problem.in_channels, problem.dtype)

    @property
    def rows(self) -> int:
        """Positions, rounded up to a power of two, for which configs are ranked and kernels are compiled."""
        return next_power_of_two(self.positions)

    @property
    def product(self) -> GemmProduct:
        """The product of `rows`."""
        return GemmProduct(self.rows, self.columns, accumulator_bytes(self.dtype) // 4, 1, along_channels=True)

    def launch(self, config: GemmConfig, device: DeviceInfo) -> Launch:
        """The launch: all multiprocessors have blocks, and partial planes stay small beside the weight."""
        row_blocks, stages = math.ceil(self.rows / config.rows), max(1, math.ceil(self.depth / config.depth))
        tiles = row_blocks * math.ceil(self.columns / config.columns)
        affordable = (
            self.depth * DTYPE_BYTES[self.dtype] * _PLANES_SHARE / (self.positions * accumulator_bytes(self.dtype))
        )
        most = max(1, min(stages // _LEAST_STAGES, int(affordable)))
        wanted = min(most, math.ceil(2 * device.multiprocessors * config.min_blocks / tiles))
        splits = math.ceil(stages / math.ceil(stages / wanted))
        length = math.ceil(math.ceil(self.depth / config.depth) / splits) * config.depth
        return Launch(row_blocks, tiles, row_blocks, splits, length)

    def seconds(self, config: GemmConfig, device: DeviceInfo) -> float:
        """Predicted time of the product."""
        return seconds_along_channels(self.product, config, self.launch(config, device), self.dtype, device)

    def step(self, config: GemmConfig, launch: Launch, strides: tuple[int, int]) -> Step:
        """The launch's step; ``strides``: of x along positions and channels."""
        layer = ConvTransposeProblem.make((1, self.rows, self.depth), self.columns, 1, dtype=self.dtype)
        x = Side((1, self.rows, 1, 1, self.depth), (0, strides[0], 0, 0, strides[1]))
        weight = Side((1, self.columns, 1, 1, self.depth), (0, 1, 0, 0, self.columns))
        return gemm_step(layer, (x, weight), config, launch, self.positions, narrowed=False, along_channels=True)


class Col2imDirect(Schedule):
    """The product's columns are innermost; its splits write partial planes, which col2im adds up."""

    name = "col2im_direct"
    passes = (Pass.FORWARD,)
    kept = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if problem.taps == 1:
            return "needs several taps"
        if problem.groups > 1:
            return f"needs one group, not {problem.groups}"
        if problem.tf32_as_pytorch:
            return "does not round to TF32"
        return None

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return False

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> _FewRows | None:
        """None for many positions; others are rounded up to a power of two."""
        few = _FewRows.of(problem)
        if not 0 < few.positions <= _MOST_POSITIONS or problem.elements[2] > MOST_OUTPUTS:
            return None
        return few._replace(positions=few.rows)

    def configs(self, at: _FewRows, pass_: Pass, device: DeviceInfo) -> Iterable[GemmConfig]:
        """Those whose blocks load whole lines for a stage, or all columns."""
        legal = legal_configs(at.product, device.shared_bytes_per_block)
        least = min(64, at.columns)
        return (each for each in legal if each.columns >= least and items_of(each.columns, each.depth) >= 2)

    def seconds(self, at: _FewRows, pass_: Pass, device: DeviceInfo, config: GemmConfig) -> float:
        return at.seconds(config, device)

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost | None:
        """The cost of the product, and of the step that reads its planes and writes the output."""
        few, terms = _FewRows.of(problem), costs("col2im", device)
        splits = few.launch(config, device).splits
        planes = accumulator_bytes(problem.dtype) * splits * few.positions * few.columns
        if planes > MOST_BYTES:
            return None
        size, before = DTYPE_BYTES[problem.dtype], 0.0
        seconds, bound = slower_of(few.seconds(config, device), problem.bytes / device.copy_bytes_per_second)
        if _position_strides(problem, layouts) is None:
            before = transpose_seconds(2 * problem.elements[0] * size, device)
        moved = planes + problem.elements[2] * size
        behind = terms.launch + moved / (terms.bandwidth * device.copy_bytes_per_second)
        return before + seconds + behind, bound

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Program:
        few, strides = _FewRows.of(problem), _position_strides(problem, layouts)
        launch = few.launch(config, device)
        main = few.step(config, launch, strides or (problem.in_channels, 1))
        lies = dense_strides((problem.batch, few.columns, *problem.input_size), True)
        step = col2im_step(problem, layouts, few.columns, lies, launch.splits)
        sums = "float64" if problem.dtype == "float64" else "float32"
        product = Buffer(PRODUCT, sums, launch.splits * few.positions * few.columns)
        program = Program((replace(main, operands=(SRC, WEIGHT, PRODUCT)), step), buffers=(product,))
        if strides is not None:
            return program
        transposed = Transposed(problem.input_shape, layouts.input, 1, problem.in_channels)
        return reading_channels_last(program, problem.dtype, {SRC: transposed})


def _position_strides(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[int, int] | None:
    """Strides of x between neighbouring positions and between channels; None if positions have no common stride."""
    row = as_row(problem, layouts)
    if row is None:
        return None
    image, channel, _, _, position = row
    if math.prod(problem.input_size) == 1:
        return image, channel
    if problem.batch > 1 and image != math.prod(problem.input_size) * position:
        return None
    return position, channel
