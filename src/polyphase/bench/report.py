"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyphase.bench.accuracy import Comparison
from polyphase.bench.contestants import TorchVariant
from polyphase.bench.records import OK, SKIPPED, Record, summaries

PLAIN_WIDTH = 160
"""Columns of a table that goes to a file or a pipe, where nobody's window says how wide it may be."""


def make_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, and wide enough for the tables where there is none."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


@contextmanager
def telling(what: str) -> Iterator[Callable[[str], None]]:
    """A function to be told what is worked at: shown in place on a terminal, and elsewhere on lines of stderr."""
    console = make_console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
    else:
        yield lambda stage: console.print(stage, markup=False)


def table_of(title: str, names: Iterable[str], figures: Iterable[str] = (), **style: Any) -> Table:
    """A table of columns of words, then of figures, which are aligned to the right."""
    table = Table(title=title, **{"title_justify": "left", **style})
    for name in names:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right")
    return table


def plain_table(title: str, names: Iterable[str], figures: Iterable[str]) -> Table:
    """A table without rules, for logs of limited width. Of its columns only ``layer`` is wrapped."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=name != "layer", min_width=24 if name == "layer" else None)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def milliseconds(value: float | None) -> str:
    """Milliseconds with three significant digits, ``–`` where there is none."""
    if value is None:
        return "–"
    if value < 0.01:
        return f"{value:.2g}"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def error(value: float | None) -> str:
    """A relative error, ``–`` where there is none."""
    return "–" if value is None else f"{value:.1e}"


VANISHES = "0 in float64"
"""What stands for both errors of a tensor that `Comparison.vanishes`."""
OF_VANISHING = (
    f"{VANISHES}: zero except for rounding, as is the gradient of a bias before a batch norm, so that it has no "
    "relative error"
)


def errors(found: Comparison) -> tuple[str, str]:
    """Polyphase's error and PyTorch's."""
    return (VANISHES, VANISHES) if found.vanishes else (error(found.error), error(found.torch_error))


def factor(value: float | None) -> str:
    """A ratio, ``–`` where there is none."""
    return "–" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def results_table(records: Sequence[Record], against: Iterable[TorchVariant]) -> Table:
    """One line per case: its floor, polyphase's time, PyTorch's, and both errors.

    What all cases have in common stands above the table.
    """
    variants = list(against)
    names = {"pass": "pass_name", "dtype": "dtype", "layout": "layout", "algorithm": "algorithm"}
    values = {name: {getattr(record, field) for record in records} for name, field in names.items()}
    common = ", ".join(str(*values[name]) for name in values if len(values[name]) == 1)
    table = Table(
        title=f"{common}: milliseconds, median (10th–90th percentile), L2 flushed; err is ‖out−ref64‖ / ‖ref64‖",
        title_justify="left",
    )
    table.add_column("layer", ratio=3, min_width=16)
    varying = [name for name in names if len(values[name]) > 1]
    for name in varying:
        table.add_column(name)
    rivals = ["torch" if name is TorchVariant.DEFAULT else name.value.replace("_", " ") for name in variants]
    for name in ["floor", "polyphase", "× floor", *rivals, "speed-up", "err", "torch err"]:
        table.add_column(name, justify="right", no_wrap=name not in rivals)
    for record in records:
        torch_times = [milliseconds(getattr(record, f"torch_{variant.value}_ms")) for variant in variants]
        line = [milliseconds(record.floor_ms), _our_time(record), factor(record.times_floor), *torch_times]
        line += [_speedup(record.speedup), error(record.error), error(record.torch_error)]
        table.add_row(record.layer, *(getattr(record, names[name]) for name in varying), *line)
    return table


def notes(records: Iterable[Record]) -> list[Text]:
    """One line for every case that failed, is wrong, does not exist, or has a remark."""
    styles = {OK: "dim", SKIPPED: "dim"}
    return [
        Text(
            f"{record.status}: {record.layer}, {record.pass_name}, {record.dtype}, {record.layout}: {record.reason}",
            style=styles.get(record.status, "bold red"),
        )
        for record in records
        if record.status != OK or record.reason
    ]


def summary_lines(records: Iterable[Record]) -> list[str]:
    """The geometric means of each pass, dtype and layout, and where it is furthest from its floor."""
    return [
        f"{found.pass_name}, {found.dtype}, {found.layout}, {found.layers} layers: {found}; "
        f"furthest from its floor: {found.slowest.layer} ({factor(found.slowest.times_floor)})"
        for found in summaries(records)
    ]


def _our_time(record: Record) -> str | Text:
    if record.ms is None:
        return Text(record.status, style="dim" if record.status == SKIPPED else "bold red")
    return f"{milliseconds(record.ms)} ({milliseconds(record.p10)}–{milliseconds(record.p90)})"


def _speedup(value: float | None) -> str | Text:
    if value is None:
        return "–"
    return Text(f"{value:.2f}", style="green" if value >= 1 else "red")
