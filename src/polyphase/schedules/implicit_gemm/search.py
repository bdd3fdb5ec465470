"""The configs of `implicit_gemm` that are fastest at a size, found without a look at most of the others.

Of every config a bound is known that no tile's prediction falls below, from constants that are the same at all sizes.
Configs are looked at in the order of their bounds, until the next bound is beyond what is asked for.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache

from polyphase.problem import ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import GemmConfig
from polyphase.schedules.implicit_gemm.cost import Work, measure, sectors
from polyphase.schedules.implicit_gemm.cuts import box_strides
from polyphase.schedules.implicit_gemm.families import families
from polyphase.schedules.implicit_gemm.tile import Room, needs_wide_offsets

_MAX_OPERATIONS = 512
_ROUNDING = 1 - 1e-9  # a bound is summed up in another order than a prediction

#: Bytes of shared memory that are left where configs are compared, so that they fit at other sizes, too.
RESERVE = 2 << 10


class _Bound:
    """Seconds that no tiles of a config fall below, whatever the size of images.

    What items take for all cells together grows with the number of tiles, and that is least where all are full.
    """

    def __init__(self, work: Work, stages: int, tma: bool, device: DeviceInfo) -> None:
        config, product, self._work, self._tma = work.config, work.product, work, tma
        full, full_turn = work.least(config.cells, stages, tma)
        self._alone, self._alone_turn = work.least(0, stages, tma)
        self._cells, self._cluster = config.cells, config.cluster
        self._rounds = product.row_groups / config.row_parts / device.multiprocessors  # of a tile
        self._each, self._each_turn = (cycles * self._rounds / config.cells for cycles in (full, full_turn))
        self._in_turns, self._always = config.split == "turns", config.whole_images
        self._once, self._clock = work.once, device.clock_hz / _ROUNDING

    def _waves(self, tiles: int) -> float:
        waves = -(-tiles // self._cluster) * self._cluster * self._rounds
        return waves if waves >= 8 else math.ceil(waves)

    def seconds_of(self, tiles: int, cells: int, stages: int) -> float:
        """The same with at least so many ``tiles``, and at most so many ``stages``.

        As many tiles as fill the waves that these come to have the fewest cells.
        """

        def least(waves: float) -> tuple[float, float]:
            """Of items, and of those in turns."""
            item, item_in_turns = self._work.least(cells * self._rounds / max(1, waves), stages, self._tma)
            return waves * item, waves * item_in_turns

        waves = self._waves(tiles)
        if not self._in_turns:
            cycles, _ = least(waves)
        elif waves > 1 or self._always:
            _, cycles = least(max(waves, 2))
        else:
            cycles = min(least(1)[0], least(2)[1])
        return (cycles + self._once) / self._clock

    def seconds(self, cells: int) -> float:
        """For images of so many cells in all."""
        waves = self._waves(-(-cells // self._cells))
        if not self._in_turns:
            cycles = max(cells * self._each, waves * self._alone)
        elif waves > 1 or self._always:
            cycles = max(cells * self._each_turn, max(waves, 2) * self._alone_turn)
        else:
            cycles = min(self._alone, 2 * self._alone_turn)
        return (cycles + self._once) / self._clock


class Member:
    """A config with each of the stages that it may have."""

    def __init__(self, gather: Gather, config: GemmConfig, stages: tuple[int, ...], device: DeviceInfo) -> None:
        self.config, self._stages, self._device = config, stages, device
        self.work = Work(gather, config, device)
        self._rooms: dict[bool, Room] = {}
        self._bounds: dict[bool, _Bound] = {}

    def bound(self, tma: bool) -> _Bound:
        """``tma``: whether TMA may bring pixels that are then transposed."""
        if tma not in self._bounds:
            self._bounds[tma] = _Bound(self.work, self._stages[-1], tma, self._device)
        return self._bounds[tma]

    def _room(self, gather: Gather) -> Room:
        wide = needs_wide_offsets(gather)
        if wide not in self._rooms:
            self._rooms[wide] = Room(gather, self.config, self._stages, self._device, RESERVE)
        return self._rooms[wide]

    def seconds(self, gather: Gather, stages: int) -> float:
        """The prediction, whatever the bytes, with so many stages; infinite where no tile fits."""
        tile = self._room(gather).tile(gather, gather.src.shape[0], self._stages.index(stages))
        return math.inf if tile is None else self.work.estimate(gather, stages, tile, self._device, 0)[0]

    def may_fall_below(self, gather: Gather, cells: int, seconds: float, tma: bool) -> bool:
        """Whether a second bound, by the tiles that there are, leaves a chance of that; ``cells`` are those in all."""
        room = self._room(gather)
        offered = room.offered(gather, gather.src.shape[0])
        if not offered.found:
            return False
        return self.bound(tma).seconds_of(offered.fewest, cells, room.most_stages) <= seconds

    def fastest(self, gather: Gather) -> tuple[float, GemmConfig] | None:
        """The prediction, whatever the bytes, with the best number of stages; None where no tile fits."""
        fastest, before = None, None
        tiles = self._room(gather).tiles(gather, gather.src.shape[0])
        for count, tile in zip(reversed(self._stages), reversed(tiles)):
            if tile is None:
                continue
            if tile is before:
                break  # fewer stages only pay for a better tile
            before = tile
            seconds = self.work.estimate(gather, count, tile, self._device, 0)[0]
            if fastest is not None and seconds >= fastest[0]:
                break
            fastest = seconds, count
        return None if fastest is None else (fastest[0], self.config._replace(stages=fastest[1]))


class Members:
    """All configs of a layer, whatever its sizes, which those of ``problem`` stand for.

    ``channels_last`` is the source's memory format, ``tma`` and ``may_scale`` are those of `families`.
    """

    def __init__(
        self, problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, tma: bool, may_scale: bool
    ) -> None:
        self._families = list(families(problem, device, channels_last, tma, may_scale))
        self._device = device
        self._found: dict[tuple[bool, bool], dict[GemmConfig, Member]] = {}

    @classmethod
    @lru_cache(maxsize=64)
    def of(
        cls, problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, tma: bool, may_scale: bool
    ) -> Members:
        """Those of a layer, made once."""
        return cls(problem, device, channels_last, tma, may_scale)

    def at(self, gather: Gather) -> dict[GemmConfig, Member]:
        """Those of images of a size by config without stages: single pixels have every memory format at once."""
        formats = gather.src.channels_last, gather.dst.channels_last
        if formats not in self._found:
            every = (Member(gather, config, stages, self._device) for config, stages in self._families)
            few = (member for member in every if member.work.product.operations <= _MAX_OPERATIONS)
            self._found[formats] = {member.config: member for member in few}
        return self._found[formats]

    def fastest(self, gather: Gather, most: int | None, below: float) -> dict[GemmConfig, float]:
        """The ``most`` configs of the least predicted seconds, and some others, in the order of `families`.

        Slower ones than ``below`` may be missing.
        """
        among = list(self.at(gather).values())
        tma = not gather.src.channels_last and box_strides(gather, one_row=True) is not None
        images = gather.src.shape[0]
        cells, pixels = (images * math.prod(sizes) for sizes in (gather.cells, gather.src.shape[2:]))
        stored, measured = sectors(gather, self._device), measure(gather, self._device)
        bounds = []
        for index, member in enumerate(among):
            beside = (stored if member.work.in_sectors else 0.0) + (measured if member.config.scaled else 0.0)
            of_member = pixels if member.config.whole_images else cells
            bounds.append((member.bound(tma).seconds(of_member) + beside, index, of_member, beside))
        bounds.sort()
        found: list[tuple[int, float, GemmConfig]] = []
        best: list[float] = []  # the most negative of the best first
        for bound, index, of_member, beside in bounds:
            if bound * _ROUNDING > below:
                break
            if not among[index].may_fall_below(gather, of_member, (below - beside) / _ROUNDING, tma):
                continue
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
        return {config: seconds for _, seconds, config in sorted(found, key=lambda each: each[0])}
