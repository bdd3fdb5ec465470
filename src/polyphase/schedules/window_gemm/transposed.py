"""Both gradients by the TMA kernels from copies: transposed to channels_last before, and back.

An input gradient may be stored channels first by the kernel itself (``first``). Tensors in float32, those in
channels_last too, become float16 (kernels/operand/half_copies.cuh); where that is inexact, a kernel that multiplies
TF32 computes the gradient again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.problem.sizes import typical
from polyphase.program.program import Program, between_transposes, transpose_reduces, unless_exact
from polyphase.program.transpose import MOST_PIXELS
from polyphase.schedules.cost import halves_seconds, transpose_seconds
from polyphase.schedules.schedule import Cost
from polyphase.schedules.tensor_cores import pixel_pitch
from polyphase.schedules.window_gemm.mma import WindowDgradMma, WindowWgradMma
from polyphase.schedules.window_gemm.tma import WindowDgradTma, WindowWgradTma
from polyphase.schedules.window_gemm.tma_config import TmaConfig, with_stages
from polyphase.schedules.window_gemm.tma_cost import weight_planes
from polyphase.schedules.window_gemm.wgmma import WindowDgradWgmma, WindowWgradWgmma
from polyphase.schedules.window_gemm.window import Gradient

_FEW_STAGES = 3  # of a kernel that replaces inexact copies
_FEW_COLUMNS = 4  # column tiles of a warp


class _Transposed(Gradient):
    """What both share."""

    adapts = True
    _tma: WindowDgradTma | WindowWgradTma
    _in_place: tuple[Gradient, ...]  # kernels of NCHW that multiply TF32 where copies in float16 are inexact
    _reads: int  # tensors that are transposed before; the result is transposed back

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if problem.channels_last and problem.dtype != "float32":
            return "needs NCHW, or float32 that becomes float16"
        if problem.dtype == "float32":
            reasons = [each._limits(problem, device) for each in self._plain(problem)]
            if None not in reasons:
                return reasons[-1]
        if problem.dtype == "float32" and self.pass_ is Pass.INPUT_GRAD and problem.out_channels_per_group == 1:
            return "needs two output channels a group, as one number alone is often too small for a checked copy"
        return self._tma._limits(_last(problem, self.pass_), device)

    def _plain(self, problem: ConvTransposeProblem) -> tuple[Gradient, ...]:
        """The kernels that multiply TF32 where copies in float16 are inexact, the best first."""
        return (self._tma,) if problem.channels_last else self._in_place

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return self._tma.nothing_fits(problem, device)

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        """The layer that the TMA kernel computes, in the memory format of the call's tensors.

        None also for more pixels than a transpose counts.
        """
        pixels = problem.batch * max(math.prod(problem.input_size), math.prod(problem.output_size))
        if pixels >= MOST_PIXELS:
            return None
        if problem.channels_last:
            readable = self._tma.ranked_at(problem, pass_, layouts) is not None
        else:
            readable = pass_ is Pass.WEIGHT_GRAD or layouts.input == dense_strides(problem.input_shape, False)
        at = self._tma.ranked_at(_last(problem, pass_), pass_, self._layouts(problem, pass_, layouts))
        return replace(at, channels_last=problem.channels_last) if readable and at is not None else None

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TmaConfig]:
        found = self._tma.configs(at, pass_, device)
        if pass_ is Pass.WEIGHT_GRAD or at.channels_last:
            return found
        first = [one for each in found for one in with_stages(each._replace(first=True), at, pass_, device)]
        return [*first, *found]

    def seconds(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, config: TmaConfig) -> float:
        back = 0.0
        if pass_ is Pass.INPUT_GRAD and not config.first and not at.channels_last:
            back = transpose_seconds(_back_bytes(at), device)
        return self._tma.seconds(at, pass_, device, config) + back

    def arranged(self, order: list[TmaConfig]) -> list[TmaConfig]:
        """Input-gradient configs of both ways to store first: the image size decides which is better."""
        if self.pass_ is Pass.WEIGHT_GRAD:
            return self._tma.arranged(order)
        ways = ([config for config in order if config.first is first] for first in (False, True))
        fastest = [config for way in ways for config in way[:1]]
        return list(dict.fromkeys((*order[: self.offered - 2], *fastest, *order)))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Cost | None:
        """The cost of the TMA kernel and the transposes around it; None if nothing replaces inexact copies."""
        last = _last(problem, pass_)
        if problem.dtype == "float32" and self.replacement(problem, device, layouts) is None:
            return None
        transposes = self._copies(problem, last, device) + self._back(problem, last, device, config)
        lie = self._layouts(problem, pass_, layouts)
        if problem.dtype != last.dtype:  # the weight is copied
            lie = replace(lie, weight_channels_last=True)
        seconds, bound = self._tma.cost(last, pass_, device, lie, config)
        return seconds + transposes, bound

    def _copies(self, problem: ConvTransposeProblem, last: ConvTransposeProblem, device: DeviceInfo) -> float:
        """Seconds of the copies before the TMA kernel."""
        moved = self._read_bytes(problem) + self._read_bytes(last)
        if problem.dtype == last.dtype:
            return transpose_seconds(moved, device, self._reads)
        if self.pass_ is Pass.INPUT_GRAD:
            moved += DTYPE_BYTES["float32"] * problem.elements[1] + DTYPE_BYTES["float16"] * last.elements[1]
        return halves_seconds(moved, device, problem.channels_last, self._reads)

    def _back(
        self, problem: ConvTransposeProblem, last: ConvTransposeProblem, device: DeviceInfo, config: TmaConfig
    ) -> float:
        """Seconds of the result's transpose; of halves an input gradient has twice the bytes that `_tma` assumes."""
        size, halves = DTYPE_BYTES[problem.dtype], problem.dtype != last.dtype
        if self.pass_ is Pass.INPUT_GRAD:
            wider = 2 * problem.elements[0] / device.copy_bytes_per_second if halves else 0.0
            stored_at_once = config.first or problem.channels_last
            return wider + (0.0 if stored_at_once else transpose_seconds(_back_bytes(problem), device))
        if last.weight_shape == problem.weight_shape:
            planes = weight_planes(last, config, device)
            if problem.channels_last or (planes > halves and transpose_reduces(problem, planes)):
                return 0.0  # the reduction, if there is one, also transposes
        return transpose_seconds(size * (problem.elements[1] + last.elements[1]), device)

    def _read_bytes(self, problem: ConvTransposeProblem) -> int:
        x, _, y = problem.elements
        return DTYPE_BYTES[problem.dtype] * (y + (x if self.pass_ is Pass.WEIGHT_GRAD else 0))

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Program:
        last = _last(problem, pass_)
        lie = self._layouts(problem, pass_, layouts)
        if config.first:
            lie = replace(lie, input=layouts.input)
        inner = self._tma.program(last, pass_, device, lie, config, problem)
        back = not config.first and not problem.channels_last
        program = between_transposes(inner, problem, pass_, layouts, last, back=back)
        if problem.dtype != "float32":
            return program
        return self.computed_again(program, problem, device, layouts)

    def computed_again(
        self, program: Program, problem: ConvTransposeProblem, device: DeviceInfo, layouts: Layouts
    ) -> Program:
        """A program that multiplies copies in float16, followed by the kernel for inexact ones, which must exist."""
        replacement = self.replacement(problem, device, layouts)
        assert replacement is not None
        schedule, config = replacement
        return unless_exact(program, schedule.program(problem, self.pass_, device, layouts, config))

    def replacement(
        self, problem: ConvTransposeProblem, device: DeviceInfo, layouts: Layouts
    ) -> tuple[Gradient, Any] | None:
        """The kernel for inexact copies, and its config; None if there is none for these layouts."""
        for schedule in self._plain(problem):
            if schedule._limits(problem, device) is not None:
                continue
            config = _config_of(schedule, problem, self.pass_, device, layouts)
            if config is not None:
                return schedule, config
        return None

    def _layouts(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Layouts:
        """Layouts that the TMA kernel sees: transposed copies are dense and aligned, the weight is not copied."""
        aligned = layouts.aligned or pass_ is Pass.WEIGHT_GRAD
        dense = Layouts.dense(_last(problem, pass_))
        if pass_ is Pass.INPUT_GRAD and problem.channels_last:
            dense = replace(dense, input=layouts.input)
        return replace(dense, weight_channels_last=layouts.weight_channels_last, aligned=aligned)


class WindowDgradTransposed(_Transposed):
    """The input gradient: of the transposed gradient of the output."""

    name = "window_dgrad_transposed"
    passes = (Pass.INPUT_GRAD,)
    _tma = WindowDgradTma()
    _in_place = (WindowDgradWgmma(), WindowDgradMma())
    _reads = 1


class WindowWgradTransposed(_Transposed):
    """The weight gradient: of the transposed input and the transposed gradient of the output."""

    name = "window_wgrad_transposed"
    passes = (Pass.WEIGHT_GRAD,)
    _tma = WindowWgradTma()
    _in_place = (WindowWgradWgmma(), WindowWgradMma())
    _reads = 2


@lru_cache(maxsize=1024)
def _config_of(
    schedule: Gradient, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
) -> Any:
    """The fastest config, or None; of the windows' wgmma the fastest with few stages, which are found fast.

    Of mma.sync the one with the largest tile that has few columns: it compiles fast.
    """
    at = typical(problem)  # so that all sizes have the same kernel
    if schedule.ranked_at(problem, pass_, layouts) is None:
        return None
    configs: list[Any] = list(schedule.configs(at, pass_, device))
    if isinstance(schedule, (WindowDgradMma, WindowWgradMma)):
        configs.sort(key=lambda each: (each.column_tiles > _FEW_COLUMNS, -each.rows * each.columns, -each.buffers))
    else:
        if isinstance(schedule, (WindowDgradWgmma, WindowWgradWgmma)):
            configs = [each for each in configs if each.buffers == _FEW_STAGES]
        configs.sort(key=lambda each: schedule.seconds(at, pass_, device, each))
    return next((each for each in configs if schedule.cost(problem, pass_, device, layouts, each) is not None), None)


def _back_bytes(problem: ConvTransposeProblem) -> int:
    """Bytes that the transpose of an input gradient's result reads and writes."""
    return 2 * DTYPE_BYTES[problem.dtype] * problem.elements[0]


def _last(problem: ConvTransposeProblem, pass_: Pass) -> ConvTransposeProblem:
    """The layer in channels_last, with the channels of a group padded to whole pieces of 16 bytes, as TMA needs.

    Output channels of an input gradient are padded so that its boxes span few cache lines. Float32 becomes float16.
    """
    problem = replace(problem, dtype="float16") if problem.dtype == "float32" else problem
    size = DTYPE_BYTES[problem.dtype]
    if pass_ is Pass.INPUT_GRAD:
        channels = pixel_pitch(problem.out_channels_per_group * size) // size
        return replace(problem, channels_last=True, out_channels=problem.groups * channels)
    per_group = problem.in_channels_per_group, problem.out_channels_per_group
    inputs, outputs = (problem.groups * round_up(channels, 16 // size) for channels in per_group)
    return replace(problem, channels_last=True, in_channels=inputs, out_channels=outputs)
