"""The weight gradient of channels-first tensors by ``window_wgrad_tma``: transposed to channels_last, and back."""

from __future__ import annotations

from dataclasses import replace

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program, between_transposes, transpose_reduces
from polyphase.schedules.cost import transpose_seconds
from polyphase.schedules.schedule import Cost
from polyphase.schedules.window_gemm.tma import WindowWgradTma
from polyphase.schedules.window_gemm.tma_config import TmaConfig
from polyphase.schedules.window_gemm.tma_cost import weight_planes
from polyphase.schedules.window_gemm.window import Gradient

_MOST_BYTES = 512 << 20  # of the transposed copies


class WindowWgradTransposed(Gradient):
    """Of the transposed input and the transposed gradient of the output."""

    name = "window_wgrad_transposed"
    passes = (Pass.WEIGHT_GRAD,)
    adapts = True
    _tma = WindowWgradTma()

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return False

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if problem.channels_last:
            return "transposes tensors that are channels first"
        return self._tma.supports(_last(problem), self.pass_, device)

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return self._tma.nothing_fits(problem, device)

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        """None, too, where the transposed copies would take too much memory."""
        last = _last(problem)
        return None if _bytes(last) > _MOST_BYTES else self._tma.ranked_at(last, pass_, Layouts.dense(last))

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TmaConfig]:
        return self._tma.configs(at, pass_, device)

    def arranged(self, order: list[TmaConfig]) -> list[TmaConfig]:
        return self._tma.arranged(order)

    def seconds(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, config: TmaConfig) -> float:
        return self._tma.seconds(at, pass_, device, config)

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Cost:
        """What the TMA kernel costs, and the transposes around it."""
        last = _last(problem)
        moved, tensors = _bytes(problem) + _bytes(last), 3
        if last.weight_shape == problem.weight_shape:
            planes = weight_planes(last, config, device)
            if planes and transpose_reduces(problem, planes):  # the reduction transposes
                moved -= 2 * problem.elements[1] * DTYPE_BYTES[problem.dtype]
                tensors -= 1
        seconds, bound = self._tma.cost(last, pass_, device, Layouts.dense(last), config)
        return seconds + transpose_seconds(moved, device, tensors), bound

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Program:
        last = _last(problem)
        inner = self._tma.program(last, pass_, device, Layouts.dense(last), config)
        return between_transposes(inner, problem, layouts, last)


def _bytes(problem: ConvTransposeProblem) -> int:
    """Bytes of the layer's tensors, each of which is transposed."""
    return DTYPE_BYTES[problem.dtype] * sum(problem.elements)


def _last(problem: ConvTransposeProblem) -> ConvTransposeProblem:
    """The layer in channels_last, with the channels of a group padded to whole pieces of 16 bytes, as TMA needs."""
    piece = 16 // DTYPE_BYTES[problem.dtype]
    inputs, outputs = (
        problem.groups * round_up(channels // problem.groups, piece)
        for channels in (problem.in_channels, problem.out_channels)
    )
    return replace(problem, channels_last=True, in_channels=inputs, out_channels=outputs)
