"""Files that say what the package does without doing it, and what two of them differ in.

There are two kinds: digests of machine code (`compile --digests`) and plans (`plans --csv`). A change that is to leave
kernels or choices as they are leaves its file as it is, which takes no GPU to see. Lines are known by what they are
about (architecture, pass, problem), never by the names of kernels, algorithms or constants; where a problem has
several, they are compared as a set.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyphase.bench.records import write_rows

Row = dict[str, str]

#: What a line is about.
KEY = ("arch", "pass", "problem")

#: The columns of a file of digests, and of one of plans.
DIGESTS = (*KEY, "digest", "registers", "shared", "role", "kernel", "compiler")
PLANS = (
    *KEY, "layer", "algorithm", "config", "seconds", "bound", "grid", "block", "shared", "workspace", "planes",
    "before", "parameters", "other", "other config", "planning",
)  # fmt: skip

# What columns of plans were called in older files.
_OLDER = {"variant": "config", "other variant": "other config"}

# Columns that say more about a line, and are no difference.
_SILENT = {"role", "kernel", "layer", "planning"}

# What is told of a line that has no counterpart.
_TOLD = ("digest", "registers", "config", "seconds")


class GateError(ValueError):
    """Files that cannot be compared."""


@dataclass(frozen=True)
class Change:
    """A problem's lines that only one of two files has."""

    key: tuple[str, ...]
    before: tuple[Row, ...]
    after: tuple[Row, ...]

    @property
    def kind(self) -> str:
        """``missing`` or ``new`` where one file has nothing in its place, else ``changed``."""
        return "missing" if not self.after else "new" if not self.before else "changed"


@dataclass(frozen=True)
class Comparison:
    """Lines that are equal in two files, and those that are not."""

    equal: int
    changes: tuple[Change, ...]
    compared: tuple[str, ...]


def write(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Write rows in an order of their own, each once."""
    distinct = sorted({tuple(row.get(column, "") for column in columns) for row in rows})
    write_rows(path, columns, distinct, end="\n")


def read(path: Path) -> list[Row]:
    """The lines of a file. Raises `GateError`."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = [_OLDER.get(column, column) for column in reader.fieldnames or ()]
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as failure:
        raise GateError(f"{path} cannot be read: {failure}") from None
    if not rows:
        raise GateError(f"{path} has no lines")
    if not {*KEY} <= rows[0].keys() or not rows[0].keys() & {"digest", "algorithm"}:
        raise GateError(f"{path} was written by neither `compile --digests` nor `plans --csv`")
    if any(None in row or None in row.values() for row in rows):
        raise GateError(f"{path} has lines of too many or too few columns")
    return rows


def read_names(path: Path) -> dict[str, str]:
    """Old names and new ones, two on a line with a comma between. Raises `GateError`."""
    try:
        lines = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as failure:
        raise GateError(f"{path} cannot be read: {failure}") from None
    names = [tuple(word.strip() for word in line) for line in lines]
    if any(len(pair) != 2 or not all(re.fullmatch(r"\w+", word) for word in pair) for pair in names):
        raise GateError(f"{path}: a line must be an old name, a comma and the new name")
    return {pair[0]: pair[1] for pair in names}


def compare(
    before: Iterable[Row],
    after: Iterable[Row],
    ignored: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
    part: bool = False,
) -> Comparison:
    """What two files differ in.

    ``ignored`` columns count for nothing; ``names`` are new ones for old words of the first file. ``part``: the second
    file is about some of the first one's problems, and the others count for nothing.

    Raises `GateError` for files of two kinds or compilers, and for a column that there is not.
    """
    olds, news = [_renamed(row, names or {}) for row in before], list(after)
    columns = _compared(olds, news, set(ignored))
    groups = _by_key(olds, columns), _by_key(news, columns)
    equal, changes = 0, []
    for key in sorted(groups[1] if part else {*groups[0], *groups[1]}):
        old, new = (group.get(key, {}) for group in groups)
        equal += len(old.keys() & new.keys())
        if old.keys() != new.keys():
            gone, come = (tuple(a[values] for values in a if values not in b) for a, b in ((old, new), (new, old)))
            changes.append(Change(key, gone, come))
    return Comparison(equal, tuple(changes), columns)


def _compared(old: Sequence[Row], new: Sequence[Row], ignored: set[str]) -> tuple[str, ...]:
    """The columns that count, in their order."""
    kinds = [PLANS if "algorithm" in rows[0] else DIGESTS for rows in (old, new)]
    if kinds[0] != kinds[1]:
        raise GateError("one file has digests of kernels, the other plans")
    if unknown := ignored - {*kinds[0]}:
        raise GateError(f"{', '.join(sorted(unknown))}: the columns are {', '.join(kinds[0])}")
    compilers = {row.get("compiler", "") for row in (*old, *new)}
    if len(compilers) > 1 and "compiler" not in ignored:
        raise GateError(f"the kernels are of different compilers: {', '.join(sorted(compilers))}")
    return tuple(column for column in kinds[0] if column not in (*KEY, *_SILENT, "compiler") and column not in ignored)


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    if not names:
        return row

    def new(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    return {name: value if name in KEY else re.sub(r"\w+", new, value) for name, value in row.items()}


def _by_key(rows: Iterable[Row], columns: Sequence[str]) -> dict[tuple[str, ...], dict[tuple[str, ...], Row]]:
    """The different lines of each problem, by what counts of them."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], Row]] = {}
    for row in rows:
        values = tuple(row.get(column, "") for column in columns)
        groups.setdefault(tuple(row[name] for name in KEY), {}).setdefault(values, row)
    return groups


def subject(row: Row) -> str:
    """What a line is summed up under: its kernel or algorithm, and whether it is the one that is taken."""
    name = row.get("kernel") or row.get("algorithm") or "?"
    return f"{name}, {row['role']}" if row.get("role") else name


def described(change: Change, columns: Sequence[str]) -> Iterator[str]:
    """A change in lines of text."""
    yield f"{change.kind}: {', '.join(change.key)}"
    if len(change.before) == len(change.after) == 1:
        old, new = change.before[0], change.after[0]
        for column in columns:
            if old.get(column, "") != new.get(column, ""):
                yield f"    {column}: {old.get(column) or '-'} → {new.get(column) or '-'}"
        return
    for sign, rows in (("-", change.before), ("+", change.after)):
        for row in rows:
            told = (f"{column} {_short(row[column])}" for column in _TOLD if row.get(column))
            yield f"    {sign} {subject(row)}: {', '.join(told)}"


def _short(value: str) -> str:
    return value[:12] if re.fullmatch(r"[0-9a-f]{64}", value) else value
