"""Long kernels with large strides: a stride-1 layer whose output channels are all outputs of a cell, then col2im.

Outputs are counted from the first element that any tap writes, padding included. Output o is element o % stride of cell
o / stride. All elements of a cell read the same pixels: cell - reach, where 0 ≤ reach < kernel / stride.

    product[n, (co, element), cell]  =  Σ over reach, ci of   x[n, ci, cell - reach] · w[ci, co, element + reach·stride]

So the product has one value for each output, not for each tap, and col2im, for a layer whose kernel is the stride,
stores each value at its output. (In channels_last columns are pairs (element, co).) A step transposes the weight, which
is small beside the output, to this order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program, reading_channels_last
from polyphase.program.step import WEIGHT, Step
from polyphase.program.transpose import Transposed
from polyphase.schedules.col2im.schedule import Col2im, with_kernel
from polyphase.schedules.cost import transpose_seconds
from polyphase.schedules.implicit_gemm.config import GemmConfig
from polyphase.schedules.implicit_gemm.families import Layer
from polyphase.schedules.schedule import Cost

_LEAST_ELEMENTS = 16  # least elements of a cell; `implicit_gemm` has straight-line code for fewer


class Col2imCells(Col2im):
    """The GEMM is ``implicit_gemm``, a cell's elements innermost: neighbours along w are neighbours in the output."""

    name = "col2im_cells"

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if (elements := math.prod(problem.stride)) < _LEAST_ELEMENTS:
            return f"a stride volume of {elements} is too small (at least {_LEAST_ELEMENTS})"
        if any(axis.kernel % axis.stride or axis.dilation > 1 for axis in problem.axes):
            return "needs a kernel size that is a multiple of the stride, and no dilation"
        if problem.dims > 2:
            return "only for 1-D and 2-D"
        return self._gemm.supports(self._of_one_tap(problem), pass_, device)

    def own(self, at: Layer) -> list[Layer]:
        return []  # one list serves all sizes: it is cheap to make

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> object:
        """None also if the output's channels are innermost, but the weight's are not."""
        differs = problem.channels_last and problem.out_channels_per_group > 1 and not layouts.weight_channels_last
        return None if differs else super().ranked_at(problem, pass_, layouts)

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost | None:
        cost = super().cost(problem, pass_, device, layouts, config)
        if cost is None:
            return None
        return cost[0] + transpose_seconds(2 * problem.elements[1] * DTYPE_BYTES[problem.dtype], device), cost[1]

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Program:
        program = super().program(problem, pass_, device, layouts, config)
        return reading_channels_last(program, problem.dtype, {WEIGHT: _by_cells(problem, layouts)})

    def _of_one_tap(self, problem: ConvTransposeProblem) -> ConvTransposeProblem:
        """The layer whose output channels are the elements of a cell, with one tap for each stride of the kernel."""
        outputs = problem.out_channels * math.prod(problem.stride)
        return replace(with_kernel(problem, outputs, _reach(problem), problem.input_size), channels_last=True)

    def _gemm_of(self, problem: ConvTransposeProblem, layouts: Layouts) -> tuple[ConvTransposeProblem, Layouts]:
        inner = self._of_one_tap(problem)
        output = Layouts.dense(inner).output
        return inner, replace(layouts, output=output, in_sums=True)

    def _step(self, problem: ConvTransposeProblem, layouts: Layouts, inner: ConvTransposeProblem, splits: int) -> Step:
        of_cells = replace(problem, input_size=inner.output_size, kernel_size=problem.stride)
        return super()._step(of_cells, layouts, inner, splits)


def _reach(problem: ConvTransposeProblem) -> tuple[int, ...]:
    """Pixels that a cell reads along each dimension."""
    return tuple(axis.kernel // axis.stride for axis in problem.axes)


def _by_cells(problem: ConvTransposeProblem, layouts: Layouts) -> Transposed:
    """The weight of `_of_one_tap`, in the same format: taps a stride apart stay taps, within a stride are channels."""
    _, height, width = problem.axes3
    *_, reach_h, reach_w = (1, *_reach(problem))
    inputs, outputs = problem.in_channels, problem.out_channels_per_group
    if layouts.weight_channels_last:
        row = width.kernel * outputs
        shape = (inputs, width.stride * outputs, reach_h, reach_w, height.stride)
        return Transposed(
            shape, (height.kernel * row, 1, height.stride * row, width.stride * outputs, row), 1, shape[1]
        )
    shape = (inputs * outputs, reach_w, height.stride, width.stride, reach_h)
    return Transposed(shape, (problem.taps, width.stride, width.kernel, 1, height.stride * width.kernel), 1, reach_w)
