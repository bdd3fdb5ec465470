"""Few positions, large weights: an exact product that reads the weight once, in its own layout, then col2im."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from polyphase.costs import costs
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts, dense_strides, five
from polyphase.problem.problem import accumulator_bytes
from polyphase.program.program import Buffer, Program, reading_channels_last
from polyphase.program.step import SRC, WEIGHT
from polyphase.program.transpose import Transposed
from polyphase.schedules.col2im.schedule import MOST_BYTES, MOST_OUTPUTS, PRODUCT, as_row, col2im_step
from polyphase.schedules.cost import transpose_seconds
from polyphase.schedules.direct_wgrad.gemm import GemmConfig, legal_configs
from polyphase.schedules.direct_wgrad.transposed import FewRows
from polyphase.schedules.schedule import Cost, Schedule

_MOST_POSITIONS = 64  # most positions of all images


class Col2imDirect(Schedule):
    """The GEMM is ``direct_wgrad_gemm.cu``; the product's columns are innermost."""

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

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> FewRows | None:
        """None for many positions; others are rounded up to a power of two."""
        rows = _rows(problem)
        if not 0 < rows.positions <= _MOST_POSITIONS or problem.elements[2] > MOST_OUTPUTS:
            return None
        return rows._replace(positions=rows.product.rows)

    def configs(self, at: FewRows, pass_: Pass, device: DeviceInfo) -> Iterable[GemmConfig]:
        return filter(at.fits, legal_configs(at.product, device.shared_bytes_per_block))

    def seconds(self, at: FewRows, pass_: Pass, device: DeviceInfo, config: GemmConfig) -> float:
        return at.seconds(config, device)

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost | None:
        """The cost of the product, and of the step that reads its planes and writes the output."""
        rows, terms = _rows(problem), costs("col2im", device)
        planes = accumulator_bytes(problem.dtype) * rows.splits(config, device) * rows.positions * rows.columns
        if planes > MOST_BYTES:
            return None
        work, size = rows.seconds(config, device), DTYPE_BYTES[problem.dtype]
        moving = problem.bytes / device.copy_bytes_per_second
        before = 0.0
        if _position_strides(problem, layouts) is None:
            before = transpose_seconds(2 * problem.elements[0] * size, device)
        moved = planes + problem.elements[2] * size
        behind = terms.launch + moved / (terms.bandwidth * device.copy_bytes_per_second)
        return before + max(work, moving) + behind, "bytes" if moving > work else "instructions"

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Program:
        rows, strides = _rows(problem), _position_strides(problem, layouts)
        main = rows.step(config, device, strides or (problem.in_channels, 1))
        splits = rows.splits(config, device)
        lies = dense_strides((problem.batch, rows.columns, *problem.input_size), True)
        step = col2im_step(problem, layouts, rows.columns, lies, splits)
        sums = "float64" if problem.dtype == "float64" else "float32"
        product = Buffer(PRODUCT, sums, splits * rows.positions * rows.columns)
        program = Program((replace(main, operands=(SRC, WEIGHT, PRODUCT)), step), buffers=(product,))
        if strides is not None:
            return program
        transposed = Transposed(problem.input_shape, layouts.input, 1, problem.in_channels)
        return reading_channels_last(program, problem.dtype, {SRC: transposed})


def _rows(problem: ConvTransposeProblem) -> FewRows:
    positions = problem.batch * math.prod(problem.input_size)
    return FewRows(positions, problem.out_channels * problem.taps, problem.in_channels, problem.dtype)


def _position_strides(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[int, int] | None:
    """Strides of x between neighbouring positions and between channels; None if positions have no common stride."""
    row = as_row(five(problem.input_shape), layouts.input)
    if row is None:
        return None
    image, channel, _, _, position = row
    if math.prod(problem.input_size) == 1:
        return image, channel
    if problem.batch > 1 and image != math.prod(problem.input_size) * position:
        return None
    return position, channel
