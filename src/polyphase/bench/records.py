"""One measured case as one row of a CSV, complete enough to be read, plotted and repeated on its own."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from polyphase.bench.timing import Timing

#: What people call the passes.
PASS_TITLES = {"forward": "forward", "input_grad": "input gradient", "weight_grad": "weight gradient"}

#: Takes the place of a pass: forward and both gradients, one after the other.
STEP = "step"

OK, WRONG, FAILED, SKIPPED = "ok", "wrong", "failed", "not applicable"


@dataclass
class Record:
    """A pass of a layer in one dtype and layout. Times in milliseconds, None where nothing was measured.

    ``status`` is ``ok``; ``wrong`` (checked, found wrong, not timed); ``failed``, or ``not applicable``, each with its
    ``reason``. ``ms`` is polyphase's median, ``p10`` and ``p90`` its spread. Of PyTorch, ``default`` is as it comes
    and ``benchmark`` with ``torch.backends.cudnn.benchmark``, in a process of its own. ``speedup`` is PyTorch's default
    time over ``ms``, ``times_floor`` is ``ms`` over ``floor_ms``. The errors are ``‖x - ref64‖ / ‖ref64‖`` over what
    ``compared`` says. The workspaces are what a call allocates beside its result, polyphase's and that of PyTorch's
    default.

    ``predicted_ms`` is the planner's time. Of candidates that `tune` measured ``planned`` says whether it is the
    planner's own choice. ``seed`` is that of layers drawn at random.
    """

    layer: str
    problem: str
    pass_name: str
    dtype: str
    layout: str
    status: str = OK
    reason: str = ""
    algorithm: str = ""
    config: str = ""
    ms: float | None = None
    p10: float | None = None
    p90: float | None = None
    repetitions: int | None = None
    predicted_ms: float | None = None
    planned: bool | None = None
    torch_default_ms: float | None = None
    torch_benchmark_ms: float | None = None
    torch_channels_last_ms: float | None = None
    torch_compile_ms: float | None = None
    floor_ms: float | None = None
    times_floor: float | None = None
    speedup: float | None = None
    error: float | None = None
    torch_error: float | None = None
    compared: str = ""
    workspace_megabytes: float | None = None
    torch_workspace_megabytes: float | None = None
    gflop: float | None = None
    megabytes: float | None = None
    strict_fp32: bool = False
    ceilings: str = ""
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    cudnn: str = ""
    cuda: str = ""
    polyphase: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""
    seed: int | None = None

    def take(self, timing: Timing) -> None:
        """What polyphase was timed to take."""
        self.ms, self.p10, self.p90, self.repetitions = timing.ms, timing.p10, timing.p90, timing.repetitions
        if self.floor_ms:
            self.times_floor = timing.ms / self.floor_ms

    def note(self, text: str) -> None:
        """A remark beside those that there are."""
        self.reason = f"{self.reason}; {text}" if self.reason else text

    @property
    def good(self) -> bool:
        """Whether nothing went wrong (a case that does not exist is not wrong)."""
        return self.status in (OK, SKIPPED)

    @property
    def benchmark_speedup(self) -> float | None:
        """The time of PyTorch's benchmark mode over polyphase's, None where one of them was not measured."""
        return self.torch_benchmark_ms / self.ms if self.torch_benchmark_ms and self.ms else None

    @property
    def best_speedup(self) -> float | None:
        """The time of PyTorch's default or of its benchmark mode, whichever is less, over polyphase's."""
        times = [ms for ms in (self.torch_default_ms, self.torch_benchmark_ms) if ms]
        return min(times) / self.ms if times and self.ms else None


# The CSV's column is called `pass`, a word that Python keeps for itself.
_COLUMNS = {field.name: "pass" if field.name == "pass_name" else field.name for field in fields(Record)}

# Columns that older files call otherwise.
_OLDER = {"variant": "config"}

# Columns that older files lack.
_NEWER = {"predicted_ms", "planned", "workspace_megabytes", "torch_workspace_megabytes", "seed"}


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Write ``records`` to ``path``, making its folder if need be."""
    rows = ([_text(getattr(record, name)) for name in _COLUMNS] for record in records)
    write_rows(path, _COLUMNS.values(), rows)


def write_rows(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]], end: str = "\r\n") -> None:
    """Write a CSV of any columns, making its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator=end)
        writer.writerow(columns)
        writer.writerows(rows)


def read_csv(path: Path) -> list[Record]:
    """Read what `write_csv` wrote. Raises ValueError for a file with other columns."""
    types = get_type_hints(Record)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        reader.fieldnames = [_OLDER.get(column, column) for column in reader.fieldnames or ()]
        columns = set(reader.fieldnames)
        missing = set(_COLUMNS.values()) - columns - _NEWER
        if missing:
            raise ValueError(f"{path} is not a CSV written by `bench`: it has no column {', '.join(sorted(missing))}")
        return [
            Record(**{name: _value(row[column], types[name]) for name, column in _COLUMNS.items() if column in columns})
            for row in reader
        ]


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _value(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is bool:
        return text == "True"
    if not text:
        return None
    if kind == bool | None:
        return text == "True"
    return int(text) if kind == int | None else float(text)


@dataclass(frozen=True)
class Summary:
    """Geometric means over the layers of one pass, dtype and layout that were measured.

    ``speedup`` is against PyTorch as it comes, ``benchmark_speedup`` against its benchmark mode, which was measured on
    ``benchmarked`` layers and is faster than polyphase on ``slower`` of them.
    """

    pass_name: str
    dtype: str
    layout: str
    layers: int
    unmeasured: int
    times_floor: float
    torch_times_floor: float | None
    speedup: float | None
    benchmarked: int
    benchmark_speedup: float | None
    slower: int
    slowest: Record

    def __str__(self) -> str:
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """The means in words; those against PyTorch's benchmark mode, where it was measured, are a second line."""
        text = f"{self.times_floor:.2f} × the floor"
        if self.speedup is not None and self.torch_times_floor is not None:
            text += f", PyTorch {self.torch_times_floor:.2f}: {self.speedup:.2f} times as fast"
        lines = [text + (f" ({self.unmeasured} not measured)" if self.unmeasured else "")]
        if self.benchmark_speedup is not None:
            lines.append(
                f"{self.benchmark_speedup:.2f} times as fast as PyTorch's benchmark mode, "
                f"slower on {self.slower} of {self.benchmarked}"
            )
        return lines


def grouped(records: Iterable[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """The records by pass, dtype and layout, in the order in which these first appear."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.pass_name, record.dtype, record.layout), []).append(record)
    return groups


def summaries(records: Iterable[Record]) -> list[Summary]:
    """One `Summary` for each group in which at least one layer was measured."""
    found = []
    for key, group in grouped(records).items():
        measured = [record for record in group if record.times_floor is not None]
        if not measured:
            continue
        rivals = [record for record in measured if record.speedup is not None]
        benchmarked = [speedup for record in measured if (speedup := record.benchmark_speedup) is not None]
        found.append(
            Summary(
                *key,
                layers=len(measured),
                unmeasured=sum(not record.good for record in group),
                times_floor=geometric_mean(record.times_floor for record in measured),
                torch_times_floor=geometric_mean(_torch_times_floor(record) for record in rivals) if rivals else None,
                speedup=geometric_mean(record.speedup for record in rivals) if rivals else None,
                benchmarked=len(benchmarked),
                benchmark_speedup=geometric_mean(benchmarked) if benchmarked else None,
                slower=sum(speedup < 1 for speedup in benchmarked),
                slowest=max(measured, key=lambda record: record.times_floor or 0.0),
            )
        )
    return found


def _torch_times_floor(record: Record) -> float | None:
    if record.torch_default_ms is None or record.floor_ms is None:
        return None
    return record.torch_default_ms / record.floor_ms


def percentile(values: Iterable[float], share: float) -> float:
    """The least of at least one value that this ``share`` of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def geometric_mean(values: Iterable[float | None]) -> float:
    """Of the values that there are."""
    return statistics.geometric_mean(value for value in values if value)
