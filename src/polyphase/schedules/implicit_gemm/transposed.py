"""The forward pass of channels-first tensors from pixels in channels_last: the input is transposed before the kernel.

TMA then loads pixels as tensor cores read them. Without it, producer warps transpose each pixel in shared memory as
often as work tiles read it: for each group of rows, and in the halo of each tile.
"""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.program.program import Program, Transposed, reading_source_channels_last
from polyphase.program.transpose import MOST_PIXELS
from polyphase.schedules.cells import Gather, Side
from polyphase.schedules.cost import transpose_seconds
from polyphase.schedules.implicit_gemm.config import CHUNK_BYTES, GemmConfig
from polyphase.schedules.implicit_gemm.families import Layer
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.schedule import Cost


class ImplicitGemmTransposed(ImplicitGemm):
    """`ImplicitGemm` whose source is a transposed copy, with pixels of whole pieces of 16 bytes."""

    name = "implicit_gemm_transposed"

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        shape = problem.input_shape if pass_ is Pass.FORWARD else problem.output_shape
        if problem.channels_last:
            return "needs NCHW"
        if problem.groups > 1 and _padded(shape[1] // problem.groups, problem.dtype) * problem.groups != shape[1]:
            return "needs groups of whole pieces of 16 bytes"
        return super().limits(problem, pass_, device)

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Layer | None:
        """None also for more pixels than the transpose counts."""
        shape = _copy(problem, pass_, layouts).shape
        if shape[0] * math.prod(shape[2:]) >= MOST_PIXELS:
            return None
        at = super().ranked_at(problem, pass_, layouts)
        assert at is not None
        return replace(at, problem=replace(at.problem, in_channels=_padded(at.problem.in_channels, problem.dtype)))

    def own(self, at: Layer) -> list[Layer]:
        """None: each takes a search, and implicit_gemm's take most of a cold plan."""
        return []

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost | None:
        """The cost of the kernel and of the transpose before it."""
        found = super().cost(problem, pass_, device, layouts, config)
        if found is None:
            return None
        copy = _copy(problem, pass_, layouts)
        moved = (math.prod(copy.shape) + copy.elements) * DTYPE_BYTES[problem.dtype]
        return found[0] + transpose_seconds(moved, device), found[1]

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Program:
        inner = super().program(problem, pass_, device, layouts, config)
        return reading_source_channels_last(inner, problem.dtype, _copy(problem, pass_, layouts))

    def _as_forward(
        self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
    ) -> tuple[ConvTransposeProblem, Gather]:
        """Its source is the copy: aligned, with the padded channels of a pixel."""
        problem, gather = super()._as_forward(problem, pass_, layouts)
        batch, channels, depth, height, width = gather.src.shape
        shape = batch, _padded(channels, problem.dtype), depth, height, width
        return problem, replace(gather, src=Side(shape, dense_strides(shape, True)), aligned=True)


def _padded(channels: int, dtype: str) -> int:
    return round_up(channels, CHUNK_BYTES // DTYPE_BYTES[dtype])


def _copy(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Transposed:
    """The transposed source."""
    forward = pass_ is Pass.FORWARD
    shape, strides = (problem.input_shape, layouts.input) if forward else (problem.output_shape, layouts.output)
    return Transposed(shape, strides, 1, _padded(shape[1], problem.dtype))
