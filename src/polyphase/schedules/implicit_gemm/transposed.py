"""The forward pass from a copy of the input in channels_last: transposed before the kernel, or float16.

TMA then loads pixels as tensor cores read them. Without it, producer warps transpose each pixel in shared memory as
often as work tiles read it: for each group of rows, and in the halo of each tile. Float32 in channels_last is copied
for the sake of float16 alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.program.program import Program, reading_source_channels_last, reading_source_halves
from polyphase.program.transpose import MOST_PIXELS, Transposed, has_lone_channels
from polyphase.schedules.cells import Gather, Side
from polyphase.schedules.cost import halves_seconds, transpose_seconds
from polyphase.schedules.implicit_gemm.config import CHUNK_BYTES, GemmConfig, fills_stages
from polyphase.schedules.implicit_gemm.families import SCALED_CHANNELS, Layer
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.schedule import Cost
from polyphase.schedules.tensor_cores import parts_of
from polyphase.schedules.window_gemm.transposed import WindowDgradTransposed

_GRADIENT = WindowDgradTransposed()  # knows what replaces an input gradient of inexact copies
_LEAST_STAGE = 16  # channels of float16 that an instruction multiplies


class ImplicitGemmTransposed(ImplicitGemm):
    """`ImplicitGemm` whose source is a transposed copy, with pixels of whole pieces of 16 bytes.

    Copies of float32 that would be multiplied as TF32 are float16 (kernels/operand/half_copies.cuh), which tensor cores
    multiply twice as fast.
    """

    name = "implicit_gemm_transposed"
    _reads_copies = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        shape = problem.input_shape if pass_ is Pass.FORWARD else problem.output_shape
        if problem.channels_last and not _in_halves(problem, pass_):
            return "needs NCHW, or float32 that becomes float16"
        if problem.groups > 1 and _padded(problem, pass_, shape[1] // problem.groups) * problem.groups != shape[1]:
            return "needs groups of whole pieces of 16 bytes"
        if _in_halves(problem, pass_) and not device.has_wgmma:
            return "float32 is multiplied as float16 by wgmma alone"
        return super().limits(problem, pass_, device)

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Layer | None:
        """None also for more pixels than the transpose counts."""
        shape, in_halves = _copy(problem, pass_, layouts).shape, _in_halves(problem, pass_)
        if shape[0] * math.prod(shape[2:]) >= MOST_PIXELS:
            return None
        at = super().ranked_at(problem, pass_, layouts)
        assert at is not None
        padded = _padded(problem, pass_, at.problem.in_channels)
        return replace(at, problem=replace(at.problem, in_channels=padded), in_halves=in_halves)

    def own(self, at: Layer) -> list[Layer]:
        """None: each takes a search, and implicit_gemm's take most of a cold plan."""
        return []

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost | None:
        """The cost of the kernel and of the transpose before it; None if nothing replaces an inexact gradient."""
        found = super().cost(problem, pass_, device, layouts, config)
        if found is None:
            return None
        copy = _copy(problem, pass_, layouts)
        moved = math.prod(copy.shape) * DTYPE_BYTES[problem.dtype] + copy.elements * config.operand_bytes(problem.dtype)
        if config.scaled:
            if pass_ is Pass.INPUT_GRAD and _GRADIENT.replacement(problem, device, layouts) is None:
                return None
            return found[0] + halves_seconds(moved, device, problem.channels_last), found[1]
        return found[0] + transpose_seconds(moved, device), found[1]

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Program:
        inner, copy = super().program(problem, pass_, device, layouts, config), _copy(problem, pass_, layouts)
        if not config.scaled:
            return reading_source_channels_last(inner, problem.dtype, copy)
        program = reading_source_halves(inner, copy, problem.groups > 1, pass_ is Pass.FORWARD)
        return program if pass_ is Pass.FORWARD else _GRADIENT.computed_again(program, problem, device, layouts)

    def _as_forward(
        self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
    ) -> tuple[ConvTransposeProblem, Gather]:
        """Its source is the copy: aligned, with the padded channels of a pixel."""
        in_halves = _in_halves(problem, pass_)
        forward, gather = super()._as_forward(problem, pass_, layouts)
        batch, channels, depth, height, width = gather.src.shape
        shape = batch, _padded(problem, pass_, channels), depth, height, width
        original = gather if in_halves else None
        src = Side(shape, dense_strides(shape, True))
        return forward, replace(gather, src=src, aligned=True, original=original)


def _in_halves(problem: ConvTransposeProblem, pass_: Pass) -> bool:
    """Whether the copy is float16. TMA alone loads such copies, so that groups have whole stages.

    Not if a channel would be checked alone: it is often too small, and the source is then read instead.
    """
    channels = problem.in_channels_per_group if pass_ is Pass.FORWARD else problem.out_channels_per_group
    scaled = problem.dtype == "float32" and parts_of(problem) == 1
    if problem.channels_last and has_lone_channels(channels):
        return False
    return scaled and channels >= SCALED_CHANNELS and fills_stages(problem.groups, channels, _LEAST_STAGE)


def _padded(problem: ConvTransposeProblem, pass_: Pass, channels: int) -> int:
    """Channels of the copy."""
    return round_up(channels, CHUNK_BYTES // (2 if _in_halves(problem, pass_) else DTYPE_BYTES[problem.dtype]))


def _copy(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Transposed:
    """The transposed source."""
    forward = pass_ is Pass.FORWARD
    shape, strides = (problem.input_shape, layouts.input) if forward else (problem.output_shape, layouts.output)
    return Transposed(shape, strides, 1, _padded(problem, pass_, shape[1]))
