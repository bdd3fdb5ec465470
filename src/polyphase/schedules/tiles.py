"""Shared by schedules: counts, extents and searches of tiles, grids, split-K planes, a layer's constants.

Each schedule has its own tile sizes: `legal_configs` in its folder.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from polyphase.problem.integers import round_up
from polyphase.problem.problem import ConvTransposeProblem, Pass, accumulator_bytes

if TYPE_CHECKING:
    from polyphase.jit.source import Constant

#: Extents along n, d, h and w.
Four = tuple[int, int, int, int]

# Partial planes take at most this many bytes, or as much as the weight itself.
_MAX_PLANES_BYTES = 64 << 20


def two_dimensions(blocks: int) -> tuple[int, int]:
    """``blocks`` as a grid's y and z, which take 65535 each; the last row may be longer than needed."""
    rows = max(1, math.ceil(blocks / 65535))
    return math.ceil(blocks / rows), rows if blocks else 0


def tiles_of(batch: int, sizes: Iterable[int], extent: Four) -> Four:
    """Number of tiles of ``extent`` along n, d, h and w, for images of three ``sizes``."""
    depth, height, width = sizes
    n, d, h, w = extent
    return -(-batch // n), -(-depth // d), -(-height // h), -(-width // w)


def least(bounds: Iterable[float], work_of: Callable[[int], float | None]) -> int | None:
    """The index of ``bounds`` with the least ``work_of``, of equal ones the first; None if there is none.

    ``work_of`` is never less than the bound, so that it is evaluated only in the order of bounds, as far as needed.
    Indices with a ``work_of`` of None, or with an infinite bound, are left out.
    """
    best = math.inf, -1
    for bound, place in sorted(zip(bounds, itertools.count())):
        if bound == math.inf or bound > best[0]:
            break
        if (work := work_of(place)) is not None:
            best = min(best, (work, place))
    return best[1] if best[1] >= 0 else None


def arranged(batch: int, sizes: tuple[int, int, int], threads: int) -> Four:
    """Extents of ``threads`` along n, d, h and w: along w first, in tiles of about the same size."""
    extents = []
    for size in (*sizes[::-1], batch):
        extents.append(math.ceil(size / math.ceil(size / threads)) if size else 1)
        threads //= extents[-1]
    w, h, d, n = extents
    return n, d, h, w


def extents_along(cells: int, most: int, shares: Iterable[int], sizes: Iterable[int]) -> list[int]:
    """Extents of at most ``most`` cells worth trying along one dimension: ``sizes``, and its equal ``shares``."""
    wanted = {math.ceil(cells / count) for count in shares}.union(sizes)
    return sorted(extent for extent in wanted if 1 <= extent <= min(cells, most))


@lru_cache(maxsize=1024)
def extents_of_tiles(
    batch: int, cells: tuple[int, int, int], most: int, shares: Sequence[int], sizes: Sequence[int], multiple: int = 1
) -> list[Four]:
    """Extents of tiles of at most ``most`` cells along n, d, h and w, in multiples of ``multiple`` along w.

    ``shares`` and ``sizes``: see `extents_along`. The smallest tile is among them; several images are whole ones.
    """

    def along(count: int, room: int) -> list[int]:
        return extents_along(count, room, shares, (*sizes, room))

    depth, height, width = cells
    found = {(1, 1, 1, multiple)}
    for w in {round_up(extent, multiple) for extent in along(width, most)}:
        for h in along(height, most // w):
            for d in along(depth, most // (w * h)):
                whole = (d, h) == (depth, height) and w >= width
                found.add((max(1, min(batch, most // (w * h * d))) if whole else 1, d, h, w))
    return sorted(found)


def constants_of(config: Any, names: str | None = None) -> tuple[tuple[str, Constant], ...]:
    """Fields of a config, as constants of its kernel: all, or those of ``names``, which are separated by spaces."""
    fields = config._fields if names is None else names.split()
    return tuple((name.upper(), getattr(config, name)) for name in fields)


def layer_constants(
    problem: ConvTransposeProblem, pass_: Pass, weight_channels_last: bool = False
) -> tuple[tuple[str, Constant], ...]:
    """Constants of a kernel that has input and output, not source and destination."""
    out, taps = problem.out_channels_per_group, problem.taps
    return (
        ("AXIS_D", problem.axes3[0]),
        ("AXIS_H", problem.axes3[1]),
        ("AXIS_W", problem.axes3[2]),
        ("INPUT_GRAD", pass_ is Pass.INPUT_GRAD),
        ("IN_CHANNELS", problem.in_channels_per_group),
        ("OUT_CHANNELS", out),
        ("WEIGHT_STRIDE_IN", out * taps),
        ("WEIGHT_STRIDE_OUT", 1 if weight_channels_last else taps),
        ("WEIGHT_STRIDE_TAP", out if weight_channels_last else 1),
    )


def out_blocks(problem: ConvTransposeProblem, out_chunk: int) -> int:
    """Blocks of ``out_chunk`` output channels each, in all groups."""
    return problem.groups * math.ceil(problem.out_channels_per_group / out_chunk)


def splits_in_few_waves(blocks: int, resident: int, steps: int, least: int, most: int, at_once: int = 1) -> int:
    """Split-K count, at most ``most``, of least work: blocks fill one wave of resident blocks, or a few.

    ``blocks``: of a split. ``steps``: of all splits; a block does ``at_once`` of them in the time of one. A split has
    at least ``least`` times as many, and its end takes as long as half of these.
    """
    most = max(1, min(most, steps // (least * at_once)))
    waves = range(-(-blocks // resident), -(-blocks // resident) + 4)
    counts = (min(most, max(1, count * resident // blocks)) for count in waves)

    def work(splits: int) -> int:
        return -(-blocks * splits // resident) * (-(-steps // (splits * at_once)) + least // 2)

    return min(counts, key=work)


def fastest_splits(most: int, seconds: Callable[[int], tuple[float, float]]) -> tuple[int, float, float]:
    """The fastest split-K count up to ``most``, and its ``seconds``: of the kernel and of the reduction."""
    found = min(range(1, max(1, most) + 1), key=lambda splits: (sum(seconds(splits)), splits))
    return (found, *seconds(found))


def affordable_planes(problem: ConvTransposeProblem, pass_: Pass = Pass.WEIGHT_GRAD) -> int:
    """Most partial planes of a pass, by memory."""
    elements = problem.elements[{Pass.FORWARD: 2, Pass.INPUT_GRAD: 0, Pass.WEIGHT_GRAD: 1}[pass_]]
    return max(1, _MAX_PLANES_BYTES // (max(1, elements) * accumulator_bytes(problem.dtype)))
