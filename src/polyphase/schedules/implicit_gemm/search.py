"""The configs of `implicit_gemm` that are fastest at a size, found without evaluating most of the others.

Every config has a lower bound of its tiles' predictions, from constants that are the same at all sizes.
Configs are evaluated in the order of their bounds, until the next bound exceeds what is asked for.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import replace
from functools import lru_cache

from polyphase.problem.device import DeviceInfo
from polyphase.problem.sizes import standard
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import GemmConfig
from polyphase.schedules.implicit_gemm.cost import Bound, Work
from polyphase.schedules.implicit_gemm.families import Layer, families
from polyphase.schedules.implicit_gemm.tile import Room, needs_wide_offsets

_MAX_OPERATIONS = 512

#: Bytes of shared memory that are left where configs are compared, so that they fit at other sizes, too.
RESERVE = 2 << 10


class Member:
    """A config with each of the stages that it may have."""

    def __init__(self, gather: Gather, config: GemmConfig, stages: tuple[int, ...], device: DeviceInfo) -> None:
        self.config, self._stages = config, stages
        self.work = Work(gather, config, device)
        self.bound = Bound(self.work, stages[-1])
        self._rooms: dict[bool, Room] = {}

    def _room(self, gather: Gather) -> Room:
        wide = needs_wide_offsets(gather)
        if wide not in self._rooms:
            self._rooms[wide] = Room(gather, self.config, self._stages, self.work.device, RESERVE)
        return self._rooms[wide]

    def seconds(self, gather: Gather, stages: int) -> float:
        """The prediction with ``stages``, without the bound by bytes; infinite if no tile fits."""
        room = self._room(gather)
        tile = room.first_that_fits(room.tiles(gather)[0], stages)
        return math.inf if tile is None else self.work.estimate(gather, stages, tile)[0]

    def fastest(self, gather: Gather, cells: int, below: float = math.inf) -> tuple[float, GemmConfig] | None:
        """The prediction with the best number of stages for ``cells`` in all, without the bound by bytes.

        None if no tile fits, or if its bound is not ``below``.
        """
        fastest, before, room = None, None, self._room(gather)
        tiles, fewest = room.tiles(gather)
        if not tiles or self.bound.closer(gather, cells, fewest) > below:
            return None
        for count in reversed(self._stages):
            tile = room.first_that_fits(tiles, count)
            if tile is None:
                continue
            if tile is before:
                break  # fewer stages only pay for a better tile
            before = tile
            seconds = self.work.estimate(gather, count, tile)[0]
            if fastest is not None and seconds >= fastest[0]:
                break
            fastest = seconds, count
        return None if fastest is None else (fastest[0], self.config._replace(stages=fastest[1]))


class Members:
    """All configs of a layer at any size, enumerated for ``layer``."""

    def __init__(self, layer: Layer, device: DeviceInfo) -> None:
        self._families, self._device = list(families(layer, device)), device
        self._found: dict[tuple[bool, bool], dict[GemmConfig, Member]] = {}

    @classmethod
    def of(cls, layer: Layer, device: DeviceInfo) -> Members:
        """The configs of a layer, made once: its size matters only for whether images are tiny."""
        return _members(replace(layer, problem=standard(layer.problem)), device)

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
        cells, pixels = (gather.src.shape[0] * math.prod(sizes) for sizes in (gather.cells, gather.src.shape[2:]))
        columns = [pixels if member.config.whole_images else cells for member in among]
        bounds = (member.bound.seconds(gather, count) for member, count in zip(among, columns))
        found: list[tuple[int, float, GemmConfig]] = []
        seconds: list[float] = []  # in rising order
        for bound, index in sorted(zip(bounds, range(len(among)))):
            if bound > below:
                break
            if (one := among[index].fastest(gather, columns[index], below)) is None:
                continue
            found.append((index, *one))
            bisect.insort(seconds, one[0])
            if most is not None and len(seconds) >= most:
                below = min(below, seconds[most - 1])
        return {config: taken for _, taken, config in sorted(found)}


_members = lru_cache(maxsize=64)(Members)
