"""The variants of `implicit_gemm` that are fastest at a size, found without a look at most of the others.

Of every variant a bound is known that no tile's prediction falls below, from constants that are the same at all sizes.
Variants are looked at in the order of their bounds, until the next bound is beyond what is asked for.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache

from polyphase.problem import ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import GemmVariant, families
from polyphase.schedules.implicit_gemm.cost import Work
from polyphase.schedules.implicit_gemm.tile import Room, box_strides, needs_wide_offsets

_MAX_OPERATIONS = 512
_ROUNDING = 1 - 1e-9  # a bound is summed up in another order than a prediction

#: Bytes of shared memory that are left where variants are compared, so that they fit at other sizes, too.
RESERVE = 2 << 10


class Member:
    """A variant with each of the stages that it may have."""

    def __init__(self, gather: Gather, variant: GemmVariant, stages: tuple[int, ...], device: DeviceInfo) -> None:
        self._variant, self._stages, self._device = variant, stages, device
        self._work = Work(gather, variant, device)
        self._rooms: dict[bool, Room] = {}
        self._bounds: dict[bool, tuple[float, float, float, float]] = {}

    @property
    def operations(self) -> int:
        """Of its product."""
        return self._work.product.operations

    def bound(self, gather: Gather, boxes: bool) -> float:
        """Seconds that it takes at least; ``boxes``: whether TMA may bring pixels that are then transposed."""
        if boxes not in self._bounds:
            self._bounds[boxes] = self._work.bound(self._stages[-1], boxes)
        sizes = gather.src.shape[2:] if self._variant.whole_images else gather.cells
        cells = gather.src.shape[0] * math.prod(sizes)
        return self._work.seconds_of(gather, cells, self._bounds[boxes], self._device) * _ROUNDING

    def fastest(self, gather: Gather) -> tuple[float, GemmVariant] | None:
        """The prediction, whatever the bytes, with the best number of stages; None where no tile fits."""
        wide = needs_wide_offsets(gather)
        if wide not in self._rooms:
            self._rooms[wide] = Room(gather, self._variant, self._stages, self._device, RESERVE)
        tiles = self._rooms[wide].tiles(gather, gather.src.shape[0])
        fastest, before = None, None
        for count, tile in zip(reversed(self._stages), reversed(tiles)):
            if tile is None:
                continue
            if tile is before:
                break  # fewer stages only pay for a better tile
            before = tile
            seconds = self._work.estimate(gather, count, tile, self._device, 0)[0]
            if fastest is not None and seconds >= fastest[0]:
                break
            fastest = seconds, count
        return None if fastest is None else (fastest[0], self._variant._replace(stages=fastest[1]))


class Members:
    """All variants of a layer, whatever its sizes, which those of ``problem`` stand for.

    ``channels_last`` is the source's memory format, ``boxes`` and ``may_scale`` are those of `families`.
    """

    def __init__(
        self, problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, boxes: bool, may_scale: bool
    ) -> None:
        self._families = list(families(problem, device, channels_last, boxes, may_scale))
        self._device = device
        self._found: dict[tuple[bool, bool], list[Member]] = {}

    @classmethod
    @lru_cache(maxsize=64)
    def of(
        cls, problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, boxes: bool, may_scale: bool
    ) -> Members:
        """Those of a layer, made once."""
        return cls(problem, device, channels_last, boxes, may_scale)

    def at(self, gather: Gather) -> list[Member]:
        """Those of images of a size: single pixels have every memory format at once."""
        formats = gather.src.channels_last, gather.dst.channels_last
        if formats not in self._found:
            every = (Member(gather, variant, stages, self._device) for variant, stages in self._families)
            self._found[formats] = [member for member in every if member.operations <= _MAX_OPERATIONS]
        return self._found[formats]


def fastest(among: list[Member], gather: Gather, most: int | None, below: float) -> dict[GemmVariant, float]:
    """The ``most`` variants of the least predicted seconds, and some others, in the order of ``among``.

    Slower ones than ``below`` may be missing.
    """
    boxes = not gather.src.channels_last and box_strides(gather, one_row=True) is not None
    bounds = sorted((member.bound(gather, boxes), index) for index, member in enumerate(among))
    found: list[tuple[int, float, GemmVariant]] = []
    best: list[float] = []  # the most negative of the best first
    for bound, index in bounds:
        if bound > below:
            break
        one = among[index].fastest(gather)
        if one is None:
            continue
        found.append((index, *one))
        if most is not None:
            heapq.heappush(best, -one[0])
            if len(best) > most:
                heapq.heappop(best)
            if len(best) == most:
                below = min(below, -best[0])
    return {variant: seconds for _, seconds, variant in sorted(found, key=lambda each: each[0])}
