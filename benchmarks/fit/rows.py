"""Measured candidates, as `python -m polyphase tune --csv` wrote them, and what the code at hand predicts for them."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from polyphase.bench.layers import parse_layer
from polyphase.bench.records import OK, Record, read_csv
from polyphase.plan.planner import as_computed, plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules import SCHEDULES
from polyphase.schedules.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

# Where a layer's bytes alone take so much of the measured time, other terms than bandwidths cannot be read off it.
_BYTES_BOUND = 0.8
# A float32 result with a larger error was rounded to TF32.
_ROUNDED = 3e-5

_SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in SCHEDULES}
# What older records call schedules.
_RENAMED = {
    "gather_gemm": "grouped_gemm",
    "scatter_gemm": "overlap_gemm",
    "pixel_gemm": "phase_gemm_pixels",
    "input_grad_gemm": "window_dgrad_mma",
    "input_grad_wgmma": "window_dgrad_wgmma",
    "input_grad_boxes": "window_dgrad_tma",
    "input_grad_turned": "window_dgrad_transposed",
    "input_grad_dots": "dot_dgrad",
    "weight_grad_gemm": "window_wgrad_mma",
    "weight_grad_wgmma": "window_wgrad_wgmma",
    "weight_grad_boxes": "window_wgrad_tma",
    "weight_grad_turned": "window_wgrad_transposed",
    "gather_channels": "direct_channels",
    "gather_tiled": "direct_tiled",
    "gather_general": "direct_general",
    "weight_grad_channels": "direct_wgrad_channels",
    "weight_grad_windows": "direct_wgrad_windows",
    "weight_grad": "direct_wgrad_gemm",
}
# What older records call fields.
_RENAMED_FIELDS = {"implicit_gemm": {"boxes": "tma_operands"}}
# Fields that are gone, with the value that today's kernel stands for.
_GONE_FIELDS = {"direct_wgrad_long": {"row_tiles": "0"}}
_COPIES = re.compile(r"copy ([\d.]+) TB/s")  # of the GPU that a record was measured on
_SETTING = re.compile(r"(\w+)=(\([^)]*\)|[^,()]+)")


@dataclass(frozen=True, eq=False)
class Row:
    """One candidate: where it is recorded, what was measured, and what is asked for its prediction."""

    file: str
    case: tuple[str, ...]
    schedule: Schedule
    problem: ConvTransposeProblem
    pass_: Pass
    layouts: Layouts
    config: Any
    device: DeviceInfo
    seconds: float
    planned: bool
    gpu: str

    def prediction(self) -> float:
        """Predicted seconds; infinite where no tile fits any more."""
        cost = self.schedule.cost(self.problem, self.pass_, self.device, self.layouts, self.config)
        return math.inf if cost is None else cost[0]

    @property
    def bytes_bound(self) -> bool:
        """Whether hardly anything but its bytes can be read off its time."""
        return self.problem.bytes / self.device.copy_bytes_per_second > _BYTES_BOUND * self.seconds


@dataclass
class Skipped:
    """Records that are no rows, by the reason."""

    reasons: Counter[str]

    def __str__(self) -> str:
        return "; ".join(f"{count} {reason}" for reason, count in self.reasons.most_common()) or "none"


def read_rows(files: Iterable[Path], arch: str, schedules: Collection[str] = _SCHEDULES) -> tuple[list[Row], Skipped]:
    """The candidates of records that the code at hand can still offer, of some ``schedules``.

    A record is skipped where it has no time, where its schedule is gone, where its configuration's fields are not those
    of today, and where no tile fits.
    """
    rows, skipped, device = [], Skipped(Counter()), DeviceInfo.for_arch(arch)
    for file in files:
        for record in read_csv(file):
            record.algorithm = schedule_of(record)
            if record.algorithm in _SCHEDULES and record.algorithm not in schedules:
                continue
            row = _row(file.name, record, device)
            if isinstance(row, str):
                skipped.reasons[row] += 1
            else:
                rows.append(row)
    return rows, skipped


def schedule_of(record: Record) -> str:
    """The name that the schedule of a record has today."""
    return _RENAMED.get(record.algorithm, record.algorithm)


def _row(file: str, record: Record, device: DeviceInfo) -> Row | str:
    """A record as a row, or why it is none."""
    schedule = _SCHEDULES.get(record.algorithm)
    if record.status != OK or not record.ms:
        return f"of status {record.status}"
    if schedule is None:
        return f"of {record.algorithm}, which is gone"
    config = parse_config(schedule, record.config)
    if config is None:
        return f"of {record.algorithm} with other fields"
    case = record.layer, record.problem, record.pass_name, record.dtype, record.layout
    pass_ = Pass(record.pass_name)
    rounded = record.error > _ROUNDED if record.error is not None else None
    seconds, was_planned = record.ms / 1e3, record.planned is True
    if copied := _COPIES.match(record.ceilings):
        device = replace(device, copy_bytes_per_second=1e12 * float(copied[1]))
    for problem, layouts in _computed(record.problem, pass_, rounded):
        row = Row(file, case, schedule, problem, pass_, layouts, config, device, seconds, was_planned, record.gpu)
        try:
            if math.isfinite(row.prediction()):
                return row
        except (ArithmeticError, AssertionError, IndexError, KeyError, ValueError):
            pass  # a configuration that would not be legal today
    return f"of {record.algorithm} without a tile that fits"


@cache
def _computed(text: str, pass_: Pass, rounded: bool | None) -> list[tuple[ConvTransposeProblem, Layouts]]:
    """A layer as it may have been computed: as it is today, or as given, before gradients read only outputs met.

    Where TF32 is allowed, ``rounded`` or not, whatever is done today.
    """
    given = parse_layer(text)
    found = [as_computed(given, pass_, None), (given.of_pass(pass_), Layouts.of_call(given.of_pass(pass_), pass_))]
    if rounded is None or not given.tf32:
        return found
    return [(replace(problem, tf32=rounded), layouts) for problem, layouts in found]


def parse_config(schedule: Schedule, text: str) -> Any | None:
    """The configuration that a record describes by the names of its fields; None where these are not today's.

    Those that were renamed have their new names, those that came later their defaults, those that are gone none.
    """
    kind = get_type_hints(type(schedule).cost)["config"]
    if kind is Any:  # of col2im, whose configs are those of another schedule
        return None
    today, gone = _RENAMED_FIELDS.get(schedule.name, {}), _GONE_FIELDS.get(schedule.name, {})
    recorded = _SETTING.findall(text[text.index("(") + 1 : -1])
    settings = {today.get(name, name): value for name, value in recorded if gone.get(name) != value}
    if set(settings) - set(kind._fields) or set(kind._fields) - set(settings) - set(kind._field_defaults):
        return None
    return kind(**{name: _value(value) for name, value in settings.items()})


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text  # a name, such as "cells"


@dataclass(frozen=True)
class Ranking:
    """How good choices by predictions are among recorded candidates: chosen over fastest, of each case."""

    ratios: dict[tuple[str, ...], float]

    def __str__(self) -> str:
        if not self.ratios:
            return "not recorded"
        worst = max(self.ratios, key=self.ratios.__getitem__)
        close = sum(ratio <= 1.1 for ratio in self.ratios.values())
        return (
            f"{self.mean:.3f} by geometric mean over {len(self.ratios)} cases, {close / len(self.ratios):.0%} within "
            f"10 %, worst {self.ratios[worst]:.2f} ({', '.join((worst[0], *worst[2:]))})"
        )

    @property
    def mean(self) -> float:
        """By geometric mean."""
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))


def by_case(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """The rows of each case; cases that two files have are one of each."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault((*row.case, row.file), []).append(row)
    return cases


def _ranking(rows: Iterable[Row], choose: Callable[[list[Row]], Row | None]) -> Ranking:
    """Of what is chosen among the rows of each case, where anything is."""
    ratios = {}
    for case, candidates in by_case(rows).items():
        chosen = choose(candidates)
        if chosen is not None:
            ratios[case] = chosen.seconds / min(row.seconds for row in candidates)
    return Ranking(ratios)


def ranking(rows: Sequence[Row], predictions: Sequence[float]) -> Ranking:
    """Of the candidate with the least prediction in each case."""
    seconds = dict(zip(rows, predictions))
    return _ranking(rows, lambda candidates: min(candidates, key=seconds.__getitem__))


def recorded(rows: Iterable[Row]) -> Ranking:
    """Of what the planner chose when the records were made."""
    return _ranking(rows, lambda candidates: next((row for row in candidates if row.planned), None))


def planned(rows: Sequence[Row]) -> tuple[Ranking, int]:
    """Of what the planner chooses today, with its lists and sizes; and the cases whose choice was not recorded."""

    def today(candidates: list[Row]) -> Row | None:
        one = candidates[0]
        choice = plan(parse_layer(one.case[1]), one.pass_, one.device, by_prediction=True).candidate
        wanted = choice and (choice.schedule, choice.config)
        return next((row for row in candidates if (row.schedule.name, row.config) == wanted), None)

    found = _ranking(rows, today)
    return found, len(by_case(rows)) - len(found.ratios)


def error(rows: Sequence[Row], predictions: Sequence[float]) -> float:
    """The geometric mean of how far predictions are from what was measured, as a factor; 1 where there are no rows."""
    if not rows:
        return 1.0
    return math.exp(sum(abs(math.log(f / row.seconds)) for row, f in zip(rows, predictions)) / len(rows))


def bias(rows: Sequence[Row], predictions: Sequence[float]) -> float:
    """The geometric mean of prediction over measured."""
    return math.exp(sum(math.log(f / row.seconds) for row, f in zip(rows, predictions)) / max(1, len(rows)))


def passes(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows by schedule, pass and memory format."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.schedule.name}, {row.pass_.value}, {row.case[4]}", []).append(row)
    yield from sorted(groups.items())
