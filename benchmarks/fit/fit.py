"""Fits the terms of the cost models to measured candidates, and writes them with how well they fit.

    python -m polyphase tune --suite all,models --passes forward,input_grad,weight_grad --layouts nchw,channels_last \
        --dtypes float32,bfloat16 --csv tune.csv
    python benchmarks/fit/fit.py tune.csv --arch sm_80

README.md in this folder says what is read, what is fitted, and when a fit is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ["POLYPHASE_TUNING"] = "0"  # neither measured choices nor rankings on disk: they are of other terms
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from rows import Row, bias, by_case, error, passes, planned, ranking, read_rows, recorded  # noqa: E402
from search import Values, affected, fit, forget, predictions, same_tiles  # noqa: E402

from polyphase.costs import table  # noqa: E402

_SLOWER = 1.03  # times what a case took before, up to which a fit is taken
_GAINS = 4  # cases that are faster by as much, for each that is slower by more
_AS_GOOD = 1.0005  # times the mean before, up to which choices are as good
_ROWS_OF_A_TERM = 4  # at least
_FOLDER = Path(table.__file__).parent


@dataclass
class Section:
    """One section of a file of costs, and the rows of its schedules."""

    name: str
    data: dict[str, Any]
    rows: list[Row]

    @property
    def terms(self) -> dict[str, dict[str, Any]]:
        return self.data["terms"]

    @property
    def values(self) -> Values:
        return {name: term["value"] for name, term in self.terms.items()}


def weights_of(rows: Sequence[Row], all_rows: Sequence[Row]) -> np.ndarray:
    """What a row counts: the less the slower it is than the fastest of its case, which it has little to do with."""
    fastest = {row: min(each.seconds for each in found) for found in by_case(all_rows).values() for row in found}
    return np.array([fastest[row] / row.seconds for row in rows])


def take(section: Section, values: Values) -> None:
    """From now on the section has these values, in the planner too."""
    for name, value in values.items():
        section.terms[name]["value"] = value
    for found in table.COSTS.values():
        found[section.name] = dict(values)
    table._costs.cache_clear()
    forget()


def candidate(section: Section, rows: Sequence[Row], only: Sequence[str] = ()) -> Values | None:
    """Values that a fit to all rows finds; None where there are few rows, or where a fit does not carry over.

    It carries over where fitted to two thirds of the layers it makes the error on the others less. ``only``: the terms
    to fit; without them, all.
    """
    start = section.values
    terms = {name: term for name, term in section.terms.items() if name in only or not only}
    with same_tiles():
        told_of = sum(len(affected(section.rows, section.name, start, term)) > 0 for term in terms)
    if len(section.rows) < _ROWS_OF_A_TERM * told_of:
        print(f"{section.name}: {len(section.rows)} rows are few for {told_of} terms (at least {_ROWS_OF_A_TERM} each)")
        return None
    seen = [row for row in section.rows if zlib.crc32(row.case[0].encode()) % 3]
    unseen = [row for row in section.rows if row not in set(seen)]
    part = fit(seen, section.name, start, terms, weights_of(seen, rows))
    found = fit(section.rows, section.name, start, terms, weights_of(section.rows, rows))
    told, own = (
        [error(some, list(predictions(some, section.name, values))) for values in (start, fitted)]
        for some, fitted in ((unseen, part), (section.rows, found))
    )
    print(f"{section.name}: error {own[0]:.3f} -> {own[1]:.3f}, on layers not seen {told[0]:.3f} -> {told[1]:.3f}")
    changed = (f"{name} {start[name]:.4g} -> {found[name]:.4g}" for name in found if found[name] != start[name])
    print(f"    {', '.join(changed)}")
    return found if told[1] < told[0] and own[1] < own[0] else None


def judge(sections: Sequence[Section], fits: dict[str, Values], rows: Sequence[Row], before: np.ndarray) -> np.ndarray:
    """Takes as many fits as make no choice worse, and gives the predictions then.

    All are taken at first. While choices are worse by geometric mean, or more of them are slower by over `_SLOWER` than
    a quarter of those that are faster by as much, the fit is given up without which they are best.
    """
    by_name = {section.name: section for section in sections}
    start = {name: section.values for name, section in by_name.items()}
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.schedule.name, []).append(place)
    old, known = ranking(rows, list(before)), dict[tuple[str, frozenset[str]], list[float]]()

    def seconds(taken: frozenset[str]) -> np.ndarray:
        found = before.copy()
        for schedule, mine in places.items():
            of_it = {name for name in fits if schedule in by_name[name].data["schedules"]}
            key = schedule, frozenset(of_it & taken)
            if key[1] and key not in known:
                for name in of_it:
                    take(by_name[name], fits[name] if name in taken else start[name])
                known[key] = [rows[place].prediction() for place in mine]
            found[mine] = known[key] if key[1] else before[mine]
        return found

    def worth(taken: frozenset[str]) -> tuple[int, float]:
        new = ranking(rows, list(seconds(taken)))
        slower = sum(ratio > _SLOWER * old.ratios[case] for case, ratio in new.ratios.items())
        faster = sum(ratio * _SLOWER < old.ratios[case] for case, ratio in new.ratios.items())
        return max(0, slower - faster // _GAINS), new.mean

    taken = frozenset(fits)
    while taken and (worth(taken)[0] or worth(taken)[1] > _AS_GOOD * old.mean):
        slower, mean = worth(taken)
        print(f"fits of {', '.join(sorted(taken))}: choices {mean:.4f}, {slower} too many lose over {_SLOWER - 1:.0%}")
        taken = min((taken - {name} for name in sorted(taken)), key=worth)
    print(f"taken are the fits of {', '.join(sorted(taken)) or 'no section'}: {old.mean:.4f} -> {worth(taken)[1]:.4f}")
    for name, section in by_name.items():
        take(section, fits[name] if name in taken else start[name])
    return seconds(taken)


def changes(rows: Sequence[Row], before: np.ndarray, after: np.ndarray) -> list[str]:
    """Every case whose least prediction is another candidate's."""
    old, new = dict(zip(rows, before)), dict(zip(rows, after))
    lines = []
    for found in by_case(rows).values():
        was, now = min(found, key=old.__getitem__), min(found, key=new.__getitem__)
        if was is not now:
            ratio = now.seconds / was.seconds
            lines.append(f"{ratio:.3f} {', '.join((was.case[0], *was.case[2:]))}: {_text(was)} -> {_text(now)}")
    return sorted(lines)


def _text(row: Row) -> str:
    return f"{row.schedule.name} {row.seconds * 1e3:.4g} ms"


def describe(section: Section) -> None:
    """Writes into the section what its terms are worth: rows, records and error, of each term and of all."""
    seconds = np.array([row.prediction() for row in section.rows])
    files = Counter(row.file for row in section.rows)
    section.data.update(
        records=dict(sorted(files.items())),
        rows=len(section.rows),
        error=round(error(section.rows, list(seconds)), 3) if section.rows else None,
    )
    with same_tiles():
        parts = {name: affected(section.rows, section.name, section.values, name) for name in section.terms}
    for name, term in section.terms.items():
        rows, found = [section.rows[place] for place in parts[name]], parts[name]
        term.update(records=sorted({row.file for row in rows}), rows=len(rows))
        term["error"] = round(error(rows, list(seconds[found])), 3) if rows else None


def report(title: str, rows: Sequence[Row], seconds: Sequence[float]) -> None:
    """Errors by schedule, pass and format, and how good choices are."""
    of = dict(zip(rows, seconds))
    print(f"\n{title}\n{'schedule, pass, format':52s} rows  error  predicted/measured")
    for name, group in passes(rows):
        found = [of[row] for row in group]
        print(f"{name:52s} {len(group):4d}  {error(group, found):5.3f}  {bias(group, found):5.3f}")
    print(f"{'all':52s} {len(rows):4d}  {error(rows, list(seconds)):5.3f}")
    print(f"chosen by prediction / fastest recorded: {ranking(rows, seconds)}")


def say_planned(rows: Sequence[Row], asked: bool) -> None:
    """How good the planner's own choices are, where that is asked for."""
    if asked:
        found, unknown = planned(rows)
        print(f"chosen by the planner / fastest recorded: {found}; {unknown} choices were not recorded")
    print()


def write(path: Path, data: dict[str, Any]) -> None:
    """One line for each term, so that a fit is a readable change."""
    lines = ["{"]
    lines += [f' "{key}": {_json(value)},' for key, value in data.items() if key != "sections"]
    lines.append(' "sections": {')
    for section in data["sections"].values():
        section["terms"] = section.pop("terms")  # last
    sections = []
    for name, section in data["sections"].items():
        head = [f'   "{key}": {_json(value)}' for key, value in section.items() if key != "terms"]
        terms = ",\n".join(f'    "{term}": {_json(value)}' for term, value in section["terms"].items())
        sections.append(f'  "{name}": {{\n' + ",\n".join([*head, f'   "terms": {{\n{terms}\n   }}']) + "\n  }")
    lines += [",\n".join(sections), " }", "}"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_outdated(row: Row, sections: dict[str, Any]) -> bool:
    """Whether the record is of a kernel that computes in another way today: its schedule's section says so.

    It names a file, or a file and a pass of it.
    """
    names = {row.file, f"{row.file} {row.pass_.value}"}
    return any(
        row.schedule.name in each["schedules"] and names & {*each.get("outdated", ())} for each in sections.values()
    )


def commit() -> str:
    """Of the code that predicts."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def gpus_of(rows: Sequence[Row]) -> str:
    """The GPUs that rows were measured on, that of the most rows first."""
    return ", ".join(name for name, _ in Counter(row.gpu for row in rows).most_common())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of `tune`")
    parser.add_argument("--arch", default=table.MEASURED, help="the architecture of the GPU that they were measured on")
    parser.add_argument("--sections", help="those to fit, comma-separated; without it, all")
    parser.add_argument("--terms", default="", help="of these sections, comma-separated; without it, all")
    parser.add_argument("--keep", action="store_true", help="fit nothing: say and write how well today's terms fit")
    parser.add_argument("--plan", action="store_true", help="ask the planner for each case, before and after (minutes)")
    parser.add_argument("--out", type=Path, help="where to write; without it, the package's file of the architecture")
    given = parser.parse_args(arguments)

    base = _FOLDER / f"{given.arch}.json"
    data = json.loads((base if base.exists() else _FOLDER / f"{table.MEASURED}.json").read_text(encoding="utf-8"))
    table.COSTS.setdefault(given.arch, {name: dict(found) for name, found in table.COSTS[table.MEASURED].items()})
    rows, skipped = read_rows(given.files, given.arch)
    if not rows:
        sys.exit(f"no candidate to fit to; skipped: {skipped}")
    rows = [row for row in rows if not is_outdated(row, data["sections"])]
    print(f"{len(rows)} candidates; skipped: {skipped}")
    before = after = np.array([row.prediction() for row in rows])
    report("before", rows, list(before))
    print(f"chosen when recorded / fastest recorded: {recorded(rows)}")
    say_planned(rows, given.plan)
    wanted = given.sections.split(",") if given.sections else list(data["sections"])
    if unknown := set(wanted) - set(data["sections"]):
        sys.exit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(data['sections'])}")
    now = {"commit": commit(), "date": datetime.now(timezone.utc).date().isoformat()}
    sections = [
        Section(name, found, [row for row in rows if row.schedule.name in found["schedules"]])
        for name, found in data["sections"].items()
    ]
    fits: dict[str, Values] = {}
    for section in sections:
        if (
            section.name in wanted
            and not given.keep
            and (found := candidate(section, rows, tuple(filter(None, given.terms.split(",")))))
        ):
            fits[section.name] = found
    values = {section.name: section.values for section in sections}
    if fits:
        after = judge(sections, fits, rows, before)
    for section in sections:
        changed = section.values != values[section.name]
        if changed or "commit" not in section.data or (given.keep and section.name in wanted):
            section.data.update(now)
        describe(section)
    data["arch"], data["gpu"] = given.arch, gpus_of(rows)
    if not given.keep:
        report("after", rows, list(after))
        for text in changes(rows, before, after):
            print(f"  {text}")
        say_planned(rows, given.plan)
    out = given.out or base
    write(out, data)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
