"""Measures every candidate of a layer's pass, and leaves the fastest to the planner (`polyphase.plan.measured`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.table import Table

from polyphase import functional
from polyphase.bench.records import OK, Record
from polyphase.bench.report import factor, milliseconds, table_of
from polyphase.bench.runner import Case
from polyphase.jit.source import KernelSource
from polyphase.plan import measured as tuning
from polyphase.plan import planner as plan
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.schedules.schedule import Candidate

CLOSE = 1.1
"""Times the fastest candidate's time up to which a choice is as good."""

HOPELESS = 4.0
"""Times the fastest prediction from which on a candidate is hardly ever the fastest."""


@dataclass(frozen=True)
class Tuned:
    """What was measured of a case: the candidate that the planner takes by itself, and all of them."""

    case: Case
    planned: Record
    records: tuple[Record, ...]

    @property
    def fastest(self) -> Record | None:
        """The fastest that is right, or None where none is."""
        return _fastest(self.records)

    @property
    def faults(self) -> tuple[Record, ...]:
        """Candidates that gave something else than float64, or failed."""
        return tuple(record for record in self.records if record.status != OK)


def sources(
    cases: Iterable[Case], device: DeviceInfo, kernels: frozenset[str] = frozenset(), within: float = HOPELESS
) -> Iterator[KernelSource]:
    """Every kernel that `tune` runs, some of them more than once."""
    for case in cases:
        for _, program in worth_measuring(case, device, kernels, within):
            yield from program.sources


def worth_measuring(
    case: Case, device: DeviceInfo, kernels: frozenset[str] = frozenset(), within: float = HOPELESS
) -> list[tuple[Candidate, Program]]:
    """The candidates that may be the fastest of a case: those predicted at up to ``within`` times the best's time.

    The planner's own choice is among them, whose schedule is chosen at another size. With ``kernels`` the others are
    candidates of those.
    """
    offers = plan.programs(case.problem, case.pass_, device)
    if not offers:
        return []
    own = plan.plan(case.problem, case.pass_, device, by_prediction=True).candidate
    most = within * min(candidate.seconds for candidate, _ in offers)
    return [
        (candidate, program)
        for candidate, program in offers
        if (candidate.seconds <= most and (not kernels or candidate.schedule in kernels)) or candidate == own
    ]


def tune(
    case: Case,
    run: Callable[[Case], Record],
    device: DeviceInfo,
    kernels: frozenset[str] = frozenset(),
    within: float = HOPELESS,
) -> Tuned:
    """Runs ``case`` with every candidate that may be the fastest and remembers which is.

    ``run`` checks and times it under the plan. Where none is right, an earlier choice is removed. Raises OSError where
    the disk does not let us.
    """
    own = plan.plan(case.problem, case.pass_, device, by_prediction=True).describe()
    candidates = worth_measuring(case, device, kernels, within)
    seconds = {candidate.describe(): candidate.seconds for candidate, _ in candidates}
    records = {}
    for name in dict.fromkeys([own, *seconds]):
        with _only(name):
            record = records[name] = run(case)
        record.predicted_ms, record.planned = seconds[name] * 1e3, name == own
    tuned = Tuned(case, records[own], tuple(records.values()))
    computed, _ = plan.as_computed(case.problem, case.pass_, None)
    if tuned.fastest is not None:
        tuning.remember(computed, case.pass_, device, tuned.fastest.config)
    else:
        tuning.discard(computed, case.pass_, device)
    return tuned


@contextmanager
def _only(candidate: str) -> Iterator[None]:
    _forget_plans()
    try:
        with tuning.trial(candidate):
            yield
    finally:
        _forget_plans()


def _forget_plans() -> None:
    plan.plan.cache_clear()
    functional.forget_calls()


@dataclass(frozen=True)
class Accuracy:
    """How good the planner's own choices are: ``close`` of ``cases`` take at most `CLOSE` times the fastest's time.

    ``over_fastest`` is the geometric mean of the choices' times over the fastest's, None where there are no times. A
    choice that is wrong or fails has no time, and is not close.
    """

    cases: int
    close: int
    over_fastest: float | None

    def __str__(self) -> str:
        return (
            f"of {self.cases} cases, the planner's own choice is within {CLOSE - 1:.0%} of the fastest candidate "
            f"in {self.close}; planned / fastest {factor(self.over_fastest)} by geometric mean"
        )


def accuracy(records: Iterable[Record]) -> Accuracy:
    """The planner's accuracy from the records of all candidates of some cases, as measured or as read from a CSV."""
    cases: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        case = record.layer, record.problem, record.pass_name, record.dtype, record.layout
        cases.setdefault(case, []).append(record)
    ratios = []
    for candidates in cases.values():
        planned, best = _fastest(record for record in candidates if record.planned), _fastest(candidates)
        if planned is not None and best is not None and planned.ms and best.ms:
            ratios.append(planned.ms / best.ms)
    close = sum(ratio <= CLOSE for ratio in ratios)
    return Accuracy(len(cases), close, statistics.geometric_mean(ratios) if ratios else None)


def _fastest(records: Iterable[Record]) -> Record | None:
    right = [record for record in records if record.status == OK and record.ms is not None]
    return min(right, key=lambda record: record.ms or 0.0, default=None)


def table(results: Iterable[Tuned]) -> Table:
    """One line for each case: the planner's own choice, the fastest, and which that is."""
    names, figures = ("layer", "pass", "dtype", "layout"), ("candidates", "planned", "fastest", "gain")
    lines = table_of("milliseconds, median, L2 flushed", names, figures)
    lines.add_column("which is", overflow="fold")
    for result in results:
        first, best = result.planned, result.fastest
        gain = first.ms / best.ms if first.ms and best is not None and best.ms else None
        lines.add_row(
            result.case.name,
            result.case.pass_.value,
            first.dtype,
            first.layout,
            str(len(result.records)),
            milliseconds(first.ms),
            milliseconds(None if best is None else best.ms),
            factor(gain),
            "no candidate is right" if best is None else best.config,
            style="bold red" if best is None or result.faults else None,
        )
    return lines
