"""Boxes of tensors that threads copy stage by stage (``mainloop/multistage.cuh``), and what the copies cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polyphase.costs import Costs
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.integers import next_power_of_two
from polyphase.problem.layouts import Layouts
from polyphase.schedules.cells import Side

#: Elements of a box along a dimension: the kernels' ``Place`` has 16 bits for each coordinate.
MAX_SIDE = 1 << 15

#: Bytes of shared memory for each piece of a channel: boxes with the same origin in all stages, and others.
STILL_BYTES, MOVING_BYTES = 8, 16


@dataclass(frozen=True)
class StageBox:
    """A tensor's part of a stage, as the kernels' ``StageBox``, and the pieces of a channel."""

    extent: tuple[int, int, int, int]
    piece: int
    pitch: int
    places: int

    def params(self) -> dict[str, Any]:
        """The kernels' ``StageBox``."""
        return {"extent": self.extent, "piece": self.piece, "pitch": self.pitch}


def weight_box(problem: ConvTransposeProblem, layouts: Layouts, out_chunk: int, pitch: int, length: int) -> StageBox:
    """All taps of ``out_chunk`` output channels in the weight's order, ``length`` in all."""
    size, out, taps = DTYPE_BYTES[problem.dtype], problem.out_channels_per_group, problem.taps
    extent, run = ((1, 1, taps, out_chunk), 1) if layouts.weight_channels_last else ((1, 1, 1, out_chunk * taps), taps)
    piece = widest_piece(size, out * run, out_chunk * run, 0 if layouts.aligned else 1)
    return StageBox(extent, piece, pitch, length // piece)


def weight_rows(problem: ConvTransposeProblem, layouts: Layouts) -> dict[str, Any]:
    """The weight as the kernels' ``Tensor5``: rows are channels, a row's elements are along h and w."""
    out, taps = problem.out_channels_per_group, problem.taps
    inner = (out, 1, 1, taps, out) if layouts.weight_channels_last else (0, 1, 1, 1, out * taps)
    height, width, *sizes = inner
    strides = (0, out * taps, 0, height, width)
    return {"stride": strides, "size": sizes, "channels": problem.in_channels_per_group}


def widest_piece(size: int, *multiples: int) -> int:
    """Elements of one copy: at most 16 bytes, a divisor of all ``multiples``."""
    piece = 16 // size
    while any(value % piece for value in multiples):
        piece //= 2
    return piece


def row_piece(side: Side, size: int, aligned: bool, step: int) -> int:
    """Neighbouring elements of a row that one copy moves; rows begin ``step`` elements apart."""
    *others, width = side.strides
    if not aligned or width != 1:
        return 1
    return widest_piece(size, side.shape[4], step, *others)


def channel_piece(side: Side, channels: int, stage_channels: int, size: int, aligned: bool) -> int:
    """Neighbouring channels that one copy moves: 16 bytes, or one."""
    batch, _, *others = side.strides
    vector = 16 // size
    whole = all(value % vector == 0 for value in (channels, stage_channels, batch, *others))
    return vector if aligned and whole else 1


def copy_cycles(box: StageBox, channels: int, warps: int, size: int, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor whose warps copy ``channels`` of a box."""
    lanes = min(32, next_power_of_two(box.places))
    rounds = math.ceil(box.places / lanes)
    copies = rounds * math.ceil(channels / (warps * 32 // lanes))
    each = terms.copy + (terms.through_registers if box.piece * size < 4 else 0.0)
    return warps / 4 * (rounds * terms.find + copies * each)


def row_bytes(box: StageBox, size: int) -> float:
    """Bytes that memory moves for a channel of a box: whole sectors of its rows."""
    *rows, width = box.extent
    return math.prod(rows) * 32 * (math.ceil(width * size / 32) + 0.5)
