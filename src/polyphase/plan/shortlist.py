"""The configs of a schedule that a layer keeps, in order. Nothing else ranks configs.

A list is made at the schedule's ranking size and kept in memory, of some schedules on disk, too. Its first entries are
found at once; the rest only if the first do not fit the actual size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

from polyphase.plan.ranking_cache import kept
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.schedule import Candidate, Schedule

_AS_GOOD = 0.99  # of the prediction at another size: an offered config is as good there


def candidates(
    schedule: Schedule, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
) -> Iterator[Candidate]:
    """The candidates of a schedule for a layer that it supports, predicted at this size lazily."""
    configs = in_order(schedule, problem, pass_, device, layouts)
    predicted = ((config, schedule.cost(problem, pass_, device, layouts, config)) for config in configs)
    found = (Candidate(schedule.name, config, *cost) for config, cost in predicted if cost is not None)
    return itertools.islice(found, schedule.offered)


def in_order(
    schedule: Schedule, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
) -> Iterator[Any]:
    """All configs of a layer in ranked order; the first that fit the actual size are offered."""
    at = schedule.ranked_at(problem, pass_, layouts)
    if at is None:
        return iter(())
    # (mypy confuses the hash of a class with that of its instances.)
    ranked = _shortlist(type(schedule), at, pass_, device)  # type: ignore[arg-type]
    return (schedule.refined(at, device, config) for config in ranked)


def refusal(
    schedule: Schedule, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts | None = None
) -> str | None:
    """Why a schedule offers nothing for a layer, or None if it offers something."""
    if (reason := schedule.supports(problem, pass_, device)) is not None:
        return reason
    layouts = layouts or Layouts.dense(problem)
    if next(candidates(schedule, problem, pass_, device, layouts), None) is not None:
        return None
    if schedule.ranked_at(problem, pass_, layouts) is None:
        return "does not support the memory layout or the size of these tensors"
    return schedule.nothing_fits(problem, device)


class _Shortlist:
    """The configs of a layer in order; those after the first ones are found lazily."""

    def __init__(self, schedule: Schedule, at: Any, pass_: Pass, device: DeviceInfo) -> None:
        self._ranked = schedule, at, pass_, device
        if schedule.kept:
            about = f"{schedule.name}, {pass_.value} of {at!r}, on {device!r}"
            self._first = kept(about, lambda: list(schedule.configs(at, pass_, device)), lambda: _rank(*self._ranked))
        else:
            self._first = _rank(*self._ranked)

    def __iter__(self) -> Iterator[Any]:
        yield from self._first
        yield from self._rest

    @cached_property
    def _rest(self) -> list[Any]:
        """The configs after the first ones: none, unless the search skipped some."""
        schedule, at, pass_, device = self._ranked
        if not schedule.prunes or len(self._first) < schedule.compared:
            return []
        seconds, known = schedule.search(at, pass_, device), set(self._first)
        return [config for config in sorted(seconds, key=seconds.__getitem__) if config not in known]


@lru_cache(maxsize=4096)
def _shortlist(kind: type[Schedule], at: Any, pass_: Pass, device: DeviceInfo) -> _Shortlist:
    """The list of a layer."""
    return _Shortlist(kind(), at, pass_, device)


def forget() -> None:
    """Forgets the lists in memory, as a new process has none."""
    _shortlist.cache_clear()


def _rank(schedule: Schedule, at: Any, pass_: Pass, device: DeviceInfo) -> list[Any]:
    """The first configs: by their predictions at the ranking size, then by predictions at all compared sizes."""
    predicted = schedule.search(at, pass_, device, schedule.compared or None)
    order = sorted(predicted, key=predicted.__getitem__)
    if schedule.prunes:
        order = order[: schedule.compared]  # the rest is incomplete
    if sizes := schedule.others(at):
        compared, others = order[: schedule.compared], order[schedule.compared :]
        scores = {}
        for config in compared:
            elsewhere = (schedule.seconds(size, pass_, device, config) for size in sizes)
            scores[config] = schedule.score(at, [predicted[config], *elsewhere])
        order = sorted(compared, key=scores.__getitem__) + others
    chosen = order[: schedule.best]
    for size in schedule.own(at):
        before = min((schedule.seconds(size, pass_, device, config) for config in chosen), default=math.inf)
        found = schedule.search(size, pass_, device, 1, _AS_GOOD * before)
        fastest = min(found, key=found.__getitem__, default=None)
        if fastest is not None and found[fastest] < _AS_GOOD * before:
            chosen.append(fastest)
    return schedule.arranged([*chosen, *(config for config in order if config not in chosen)])
