"""Terms of predicted times that schedules share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from polyphase.costs import costs
from polyphase.problem.epilogue import Epilogue, Operation
from polyphase.problem.problem import ConvTransposeProblem

if TYPE_CHECKING:
    from polyphase.problem.device import DeviceInfo
    from polyphase.program.planes import Planes


def waves_of(blocks: int, min_blocks: int, device: DeviceInfo) -> tuple[int, float]:
    """Resident blocks of a multiprocessor, at most ``min_blocks``, and the number of waves."""
    resident = max(1, min(min_blocks, math.ceil(blocks / device.multiprocessors)))
    waves = blocks / (device.multiprocessors * resident)
    return resident, whole_waves(waves, 4)


def whole_waves(waves: float, few: int = 8) -> float:
    """The number of waves; if there are fewer than ``few``, they are counted as whole ones."""
    return math.ceil(waves) if waves < few else waves + 0.5


def cost_seconds(problem: ConvTransposeProblem, device: DeviceInfo, multiprocessor_cycles: float) -> tuple[float, str]:
    """Predicted time from the cycles summed over all multiprocessors, and whether bytes or instructions bound it."""
    work = multiprocessor_cycles / (device.multiprocessors * device.clock_hz)
    return slower_of(work, problem.bytes / device.copy_bytes_per_second)


def slower_of(work: float, moving: float) -> tuple[float, str]:
    """Predicted time from the seconds that instructions and bytes take, and which of them bound it."""
    return max(work, moving), "bytes" if moving > work else "instructions"


def overlapped_time(work: float, moving: float, exponent: float) -> float:
    """Time of both when they overlap in part: a p-norm, the sum for an exponent of 1, the longer for a large one."""
    found: float = (work**exponent + moving**exponent) ** (1 / exponent)
    return found


def transpose_seconds(moved: float, device: DeviceInfo, tensors: int = 1) -> float:
    """Predicted time of the layout transposes of ``tensors`` that read and write ``moved`` bytes in all."""
    terms = costs("transpose", device)
    return tensors * terms.launch + moved / (terms.bandwidth * device.copy_bytes_per_second)


def planes_seconds(how: Planes, element: int, device: DeviceInfo) -> float:
    """Predicted time of the step that writes planes of elements of ``element`` bytes: of its bytes, or of its work."""
    terms, work = costs("planes", device), 0.0
    if how.directly(element):
        work = how.positions * terms.position
    elif element == 2 and how.group % 8:
        work = how.positions * (terms.position + math.ceil(how.channels / 8) * terms.piece)
    moved = (how.elements + math.prod(how.shape)) * element
    return transpose_seconds(0, device) + max(transpose_seconds(moved, device, 0), work)


def halves_seconds(moved: float, device: DeviceInfo, channels_last: bool, tensors: int = 1) -> float:
    """Predicted time of checked copies in float16 that read and write ``moved`` bytes in all, and of steps around."""
    terms = costs("half_copies", device)
    bandwidth = terms.bandwidth_last if channels_last else terms.bandwidth
    return terms.around + tensors * terms.launch + moved / (bandwidth * device.copy_bytes_per_second)


_PLAIN = ("relu", "leaky_relu", "clamp", "affine", "add_value", "multiply_value")


def prologue_cycles(prologue: Epilogue, device: DeviceInfo) -> float:
    """Cycles of a warp that transposes pixels, for each element of its threads."""
    terms = costs("prologue", device)

    def cycles(operation: Operation) -> float:
        if operation.kind in _PLAIN:
            return terms.plain
        return terms.snake if operation.kind == "snake" else terms.operand if operation.operands else terms.function

    return sum(map(cycles, prologue.operations))


def prologue_seconds(input_bytes: int, device: DeviceInfo) -> float:
    """Predicted time of a prologue in a step of its own: a read and a write of the input."""
    terms = costs("prologue", device)
    return terms.launch + 2 * input_bytes / (terms.bandwidth * device.copy_bytes_per_second)


class Sharing(NamedTuple):
    """When work tiles are scheduled dynamically, so that a block takes the next free one instead of every n-th.

    A block must have at least ``waves`` work tiles, of at least ``cycles``, and take at most ``most`` times as long as
    the layer's bytes: blocks must compete for bandwidth.
    """

    waves: float
    cycles: float
    most: float

    def pays(
        self, waves: float, predict: Callable[[], tuple[float, str]], layer_bytes: float, device: DeviceInfo
    ) -> bool:
        """Whether dynamic scheduling pays for ``waves``; ``predict`` gives their seconds, and what bounds them."""
        if waves < self.waves:
            return False
        seconds, _ = predict()
        long_enough = seconds * device.clock_hz >= waves * self.cycles
        return long_enough and seconds <= self.most * layer_bytes / device.copy_bytes_per_second
