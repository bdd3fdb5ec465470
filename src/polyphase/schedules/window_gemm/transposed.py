"""Both gradients of channels-first tensors by boxes (`gradient_boxes`): turned to channels_last, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.program.program import Program, between_transposes
from polyphase.program.transpose import missing
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.window_gemm.tma import BoxVariant, InputGradBoxes, WeightGradBoxes

_MOST_BYTES = 512 << 20  # of the tensors in channels_last
# What turning takes, from times on an H200 (docs/performance.md): seconds for each tensor, and the share of a copy's
# bandwidth; in half precision, how much of the time of a block of 64 channels those take that are not there.
_TURN, _BANDWIDTH, _MISSING = 3e-6, 0.7, 0.65


class _TurnedBoxes:
    """What the two have in common."""

    any_size = False
    adapts = True
    name: str
    _boxes: InputGradBoxes | WeightGradBoxes
    _reads: int  # tensors that are turned before; the result is turned after

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if pass_ is self._boxes.pass_ and problem.channels_last:
            return "turns tensors that are channels first"
        return self._boxes.refusal(_last(problem), pass_, device)

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> Iterator[Candidate]:
        """Those of the boxes, and the time that turning takes; none where it would take too much memory."""
        size, (x, weight, y) = DTYPE_BYTES[problem.dtype], problem.elements
        turned = size * (x + y + (weight if pass_ is Pass.WEIGHT_GRAD else 0))
        written_dense = pass_ is Pass.WEIGHT_GRAD or layouts.input == dense_strides(problem.input_shape, False)
        if turned > _MOST_BYTES or not written_dense:
            return
        absent = size * (x * missing(problem.in_channels) + y * missing(problem.out_channels)) if size == 2 else 0.0
        counted = 2 * (turned + _MISSING * absent)
        seconds = (self._reads + 1) * _TURN + counted / (_BANDWIDTH * device.copy_bytes_per_second)
        for each in self._boxes.candidates(_last(problem), pass_, device, self._layouts(problem, layouts)):
            yield replace(each, schedule=self.name, seconds=each.seconds + seconds)

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: BoxVariant
    ) -> Program:
        launch = self._boxes.launch(_last(problem), pass_, device, self._layouts(problem, layouts), variant)
        return between_transposes(launch, problem, pass_, layouts)

    def _layouts(self, problem: ConvTransposeProblem, layouts: Layouts) -> Layouts:
        """As the boxes' kernel gets them: what is turned has no gaps, and is aligned; the weight is as it is."""
        aligned = layouts.aligned or self._boxes.pass_ is Pass.WEIGHT_GRAD
        return replace(
            Layouts.dense(_last(problem)), weight_channels_last=layouts.weight_channels_last, aligned=aligned
        )


class InputGradTurned(_TurnedBoxes):
    """The input gradient: of the turned gradient of the output."""

    name = "input_grad_turned"
    _boxes = InputGradBoxes()
    _reads = 1


class WeightGradTurned(_TurnedBoxes):
    """The weight gradient: of the turned input and the turned gradient of the output."""

    name = "weight_grad_turned"
    _boxes = WeightGradBoxes()
    _reads = 2


def _last(problem: ConvTransposeProblem) -> ConvTransposeProblem:
    return replace(problem, channels_last=True)
