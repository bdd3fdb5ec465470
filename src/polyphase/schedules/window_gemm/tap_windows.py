"""Windows of the output gradient that taps share; ``kernels/operand/tap_windows.cuh`` says what they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import five
from polyphase.schedules.tiles import Four, tiles_of

Three = tuple[int, int, int]

_MAX_BOX_SIDE = 256  # elements of the tensor, from a box's first to its last
_MOST_COLUMNS = 256  # of an instruction
_TOGETHER = 8  # positions along w, at least, that an instruction takes together

#: Taps of a window that is just a tile.
ALONE: Three = (1, 1, 1)


class Windows(NamedTuple):
    """Taps along d, h and w that share a window, positions of a tile, and bytes of a row: channels of a position."""

    taps: Three
    lanes: Three
    pitch: int

    @property
    def along(self) -> int:
        """Taps of a line, those along the innermost dimension that has several."""
        return next((count for count in reversed(self.taps) if count > 1), 1)

    def extents(self, problem: ConvTransposeProblem) -> Three:
        """Positions along d, h and w, halo included."""
        d, h, w = (lanes + (taps - 1) * _shift(axis) for lanes, taps, axis in zip(self.lanes, self.taps, problem.axes3))
        return d, h, w

    def bytes(self, problem: ConvTransposeProblem) -> int:
        """Of a window, in shared memory."""
        return round_up(math.prod(self.extents(problem)) * self.pitch, 1024)

    def count(self, problem: ConvTransposeProblem) -> int:
        """Windows of a group."""
        channels = math.ceil(problem.out_channels_per_group * DTYPE_BYTES[problem.dtype] / self.pitch)
        return channels * math.prod(
            min(_period(axis), axis.kernel) if taps > 1 else axis.kernel for taps, axis in zip(self.taps, problem.axes3)
        )


def box_fits(extents: Iterable[int], problem: ConvTransposeProblem) -> bool:
    """Whether TMA brings so many elements along d, h and w at once."""
    return all((count - 1) * axis.stride < _MAX_BOX_SIDE for count, axis in zip(extents, problem.axes3))


def shared_windows(problem: ConvTransposeProblem, positions: int, pitch: int) -> Iterator[Windows]:
    """Windows of several taps, of tiles of so many positions; ``pitch`` is the most that a row may have."""
    size = DTYPE_BYTES[problem.dtype]
    sharing = (math.ceil(axis.kernel / _period(axis)) for axis in problem.axes3)
    for d, h, w in itertools.product(*({1, taps} for taps in sharing)):
        windows = Windows((d, h, w), ALONE, pitch)
        while windows.along * windows.pitch // size > _MOST_COLUMNS and windows.pitch > 32:
            windows = windows._replace(pitch=windows.pitch // 2)
        if windows.taps != ALONE and windows.along * windows.pitch // size <= _MOST_COLUMNS:
            shapes = [windows._replace(lanes=lanes) for lanes in _tiles(problem, positions)]
            shapes = [shape for shape in shapes if box_fits(shape.extents(problem), problem)]
            if shapes:
                yield min(shapes, key=lambda shape: _brought(problem, shape))


def exact_lanes(positions: int) -> Iterable[Four]:
    """Extents of so many positions, a power of two; long rows first."""
    powers = [1 << i for i in reversed(range(positions.bit_length()))]
    for w, h, d in itertools.product(powers, repeat=3):
        if w * h * d <= positions:
            yield positions // (w * h * d), d, h, w


def _tiles(problem: ConvTransposeProblem, positions: int) -> Iterator[Three]:
    """Of one image, whose rows instructions take whole, or two of them."""
    depth = 32 // DTYPE_BYTES[problem.dtype]
    for n, d, h, w in exact_lanes(positions):
        if n == 1 and w >= _TOGETHER and (w >= depth or h % 2 == 0):
            yield d, h, w


def _brought(problem: ConvTransposeProblem, windows: Windows) -> int:
    """Positions of the output gradient that are brought for all of its images' tiles."""
    tiles = tiles_of(problem.batch, five(problem.input_shape)[2:], (1, *windows.lanes))
    return math.prod(tiles) * (math.prod(windows.lanes) + math.prod(windows.extents(problem)))


def _period(axis: Axis) -> int:
    """Taps from one to the next that meets elements of the same residue of the stride."""
    return axis.stride // math.gcd(axis.stride, axis.dilation)


def _shift(axis: Axis) -> int:
    """Positions that these two are apart."""
    return axis.dilation // math.gcd(axis.stride, axis.dilation)
