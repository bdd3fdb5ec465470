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
from polyphase.schedules.implicit_gemm.cost import Work, measure, sectors
from polyphase.schedules.implicit_gemm.tile import Room, Tile, box_strides, needs_wide_offsets

_MAX_OPERATIONS = 512
_ROUNDING = 1 - 1e-9  # a bound is summed up in another order than a prediction

#: Bytes of shared memory that are left where variants are compared, so that they fit at other sizes, too.
RESERVE = 2 << 10


class _Bound:
    """Seconds that no tiles of a variant fall below, whatever the size of images.

    What items take for all cells together grows with the number of tiles, and that is least where all are full.
    """

    def __init__(self, work: Work, stages: int, boxes: bool, device: DeviceInfo) -> None:
        variant, product = work.variant, work.product
        full, full_turn = work.least(variant.cells, stages, boxes)
        self._alone, self._alone_turn = work.least(0, stages, boxes)
        self._cells, self._cluster = variant.cells, variant.cluster
        self._rounds = product.row_groups / variant.row_parts / device.multiprocessors  # of a tile
        self._each, self._each_turn = (cycles * self._rounds / variant.cells for cycles in (full, full_turn))
        self._in_turns, self._always = variant.split == "turns", variant.whole_images
        self._once, self._clock = work.once, device.clock_hz / _ROUNDING

    def seconds(self, cells: int) -> float:
        """For images of so many cells in all."""
        tiles = -(-cells // self._cells)
        waves = -(-tiles // self._cluster) * self._cluster * self._rounds
        if waves < 8:
            waves = math.ceil(waves)
        if not self._in_turns:
            cycles = max(cells * self._each, waves * self._alone)
        elif waves > 1 or self._always:
            cycles = max(cells * self._each_turn, max(waves, 2) * self._alone_turn)
        else:
            cycles = min(self._alone, 2 * self._alone_turn)
        return (cycles + self._once) / self._clock


class Member:
    """A variant with each of the stages that it may have."""

    def __init__(self, gather: Gather, variant: GemmVariant, stages: tuple[int, ...], device: DeviceInfo) -> None:
        self.variant, self._stages, self._device = variant, stages, device
        self.work = Work(gather, variant, device)
        self._rooms: dict[bool, Room] = {}
        self._bounds: dict[bool, _Bound] = {}

    def bound(self, boxes: bool) -> _Bound:
        """``boxes``: whether TMA may bring pixels that are then transposed."""
        if boxes not in self._bounds:
            self._bounds[boxes] = _Bound(self.work, self._stages[-1], boxes, self._device)
        return self._bounds[boxes]

    def _tiles(self, gather: Gather) -> list[Tile | None]:
        """The best with each of the stages."""
        wide = needs_wide_offsets(gather)
        if wide not in self._rooms:
            self._rooms[wide] = Room(gather, self.variant, self._stages, self._device, RESERVE)
        return self._rooms[wide].tiles(gather, gather.src.shape[0])

    def seconds(self, gather: Gather, stages: int) -> float:
        """The prediction, whatever the bytes, with so many stages; infinite where no tile fits."""
        tile = self._tiles(gather)[self._stages.index(stages)]
        return math.inf if tile is None else self.work.estimate(gather, stages, tile, self._device, 0)[0]

    def fastest(self, gather: Gather) -> tuple[float, GemmVariant] | None:
        """The prediction, whatever the bytes, with the best number of stages; None where no tile fits."""
        fastest, before = None, None
        for count, tile in zip(reversed(self._stages), reversed(self._tiles(gather))):
            if tile is None:
                continue
            if tile is before:
                break  # fewer stages only pay for a better tile
            before = tile
            seconds = self.work.estimate(gather, count, tile, self._device, 0)[0]
            if fastest is not None and seconds >= fastest[0]:
                break
            fastest = seconds, count
        return None if fastest is None else (fastest[0], self.variant._replace(stages=fastest[1]))


class Members:
    """All variants of a layer, whatever its sizes, which those of ``problem`` stand for.

    ``channels_last`` is the source's memory format, ``boxes`` and ``may_scale`` are those of `families`.
    """

    def __init__(
        self, problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, boxes: bool, may_scale: bool
    ) -> None:
        self._families = list(families(problem, device, channels_last, boxes, may_scale))
        self._device = device
        self._found: dict[tuple[bool, bool], dict[GemmVariant, Member]] = {}

    @classmethod
    @lru_cache(maxsize=64)
    def of(
        cls, problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, boxes: bool, may_scale: bool
    ) -> Members:
        """Those of a layer, made once."""
        return cls(problem, device, channels_last, boxes, may_scale)

    def at(self, gather: Gather) -> dict[GemmVariant, Member]:
        """Those of images of a size by variant without stages: single pixels have every memory format at once."""
        formats = gather.src.channels_last, gather.dst.channels_last
        if formats not in self._found:
            every = (Member(gather, variant, stages, self._device) for variant, stages in self._families)
            few = (member for member in every if member.work.product.operations <= _MAX_OPERATIONS)
            self._found[formats] = {member.variant: member for member in few}
        return self._found[formats]

    def fastest(self, gather: Gather, most: int | None, below: float) -> dict[GemmVariant, float]:
        """The ``most`` variants of the least predicted seconds, and some others, in the order of `families`.

        Slower ones than ``below`` may be missing.
        """
        among = list(self.at(gather).values())
        boxes = not gather.src.channels_last and box_strides(gather, one_row=True) is not None
        images = gather.src.shape[0]
        cells, pixels = (images * math.prod(sizes) for sizes in (gather.cells, gather.src.shape[2:]))
        stored, measured = sectors(gather, self._device), measure(gather, self._device)
        bounds = []
        for index, member in enumerate(among):
            bound = member.bound(boxes).seconds(pixels if member.variant.whole_images else cells)
            bound += (stored if member.work.in_sectors else 0.0) + (measured if member.variant.scaled else 0.0)
            bounds.append((bound, index))
        bounds.sort()
        found: list[tuple[int, float, GemmVariant]] = []
        best: list[float] = []  # the most negative of the best first
        for bound, index in bounds:
            if bound * _ROUNDING > below:
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
