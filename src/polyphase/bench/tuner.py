"""Measures every candidate of a layer's pass, and leaves the fastest where the planner looks (`polyphase.tuning`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.table import Table

from polyphase import plan, runtime, tuning
from polyphase.bench.records import OK, Record
from polyphase.bench.report import factor, milliseconds
from polyphase.bench.runner import Case
from polyphase.device import DeviceInfo


@dataclass(frozen=True)
class Tuned:
    """What was measured of a case: the candidate that the planner takes by itself, and all of them."""

    case: Case
    planned: Record
    records: tuple[Record, ...]

    @property
    def fastest(self) -> Record | None:
        """The fastest that is right, or None where none is."""
        right = [record for record in self.records if record.status == OK and record.ms is not None]
        return min(right, key=lambda record: record.ms or 0.0, default=None)

    @property
    def faults(self) -> tuple[Record, ...]:
        """Candidates that gave something else than float64, or failed."""
        return tuple(record for record in self.records if record.status != OK)


def tune(case: Case, run: Callable[[Case], Record], device: DeviceInfo) -> Tuned:
    """Runs ``case`` with every candidate (``run`` checks and times it under the plan) and remembers the fastest.

    Where none is right, an earlier choice is removed. Raises OSError where the disk does not let us.
    """
    own = plan.plan(case.problem, case.pass_, device, by_prediction=True).describe()
    names = [candidate.describe() for candidate, _ in plan.launches(case.problem, case.pass_, device)]
    records = {}
    for name in dict.fromkeys([own, *names]):
        with _only(name):
            records[name] = run(case)
    tuned = Tuned(case, records[own], tuple(records.values()))
    if tuned.fastest is not None:
        tuning.remember(case.problem, case.pass_, device, tuned.fastest.variant)
    else:
        tuning.discard(case.problem, case.pass_, device)
    return tuned


@contextmanager
def _only(candidate: str) -> Iterator[None]:
    _forget_plans()
    with tuning.trial(candidate):
        yield
    _forget_plans()


def _forget_plans() -> None:
    plan.plan.cache_clear()
    runtime.forget_calls()


def table(results: Iterable[Tuned]) -> Table:
    """One line for each case: the planner's own choice, the fastest, and which that is."""
    lines = Table(title="milliseconds, median, L2 flushed", title_justify="left")
    for name in ("layer", "pass", "dtype", "layout"):
        lines.add_column(name)
    for name in ("candidates", "planned", "fastest", "gain"):
        lines.add_column(name, justify="right")
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
            "none is right" if best is None else best.variant,
            style="bold red" if best is None or result.faults else None,
        )
    return lines
