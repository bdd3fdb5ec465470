"""Costs: the terms of the cost models, where they come from, and the script that fits them."""

from __future__ import annotations

import ast
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import processes
from polyphase.bench.records import OK, read_csv
from polyphase.costs import UnknownTermError, costs, table, trial
from polyphase.problem.device import ARCHITECTURES, DeviceInfo
from polyphase.schedules import SCHEDULES

sys.path.insert(0, str(processes.ROOT / "benchmarks" / "fit"))

import fit
import rows as fitted_rows
import search

H200 = DeviceInfo.for_arch("sm_90a")
FOLDER = Path(table.__file__).parent
FILES = sorted(FOLDER.glob("*.json"))
RECORDS = sorted(fitted_rows.RESULTS.glob("*-tune*.csv"))
SWEEPS = [path for kind in ("random", "input-grads") for path in sorted(fitted_rows.RESULTS.glob(f"*-{kind}*.csv"))]


def sections(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["sections"]
    return found


def test_terms_are_attributes_that_cannot_change() -> None:
    terms = costs("grouped_gemm", H200)
    assert terms.slot == terms["slot"] == table.COSTS["sm_90a"]["grouped_gemm"]["slot"]
    assert costs("grouped_gemm", H200) is terms
    with pytest.raises(UnknownTermError, match="'grouped_gemm' of the costs of sm_90a has no term 'slots'"):
        terms.slots  # noqa: B018
    with pytest.raises(UnknownTermError, match="no section 'gathered'; there are col2im, "):
        costs("gathered", H200)
    with pytest.raises(TypeError, match="cannot be changed"):
        terms.slot = 1.0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_has_terms(arch: str) -> None:
    """Its own, or those of the one that was measured."""
    device = DeviceInfo.for_arch(arch)
    measured = arch if (FOLDER / f"{arch}.json").exists() else table.MEASURED
    for section, terms in table.COSTS[measured].items():
        assert {name: costs(section, device)[name] for name in terms} == terms


def test_other_values_for_a_while() -> None:
    before = costs("grouped_gemm", H200).slot
    with trial("grouped_gemm", slot=7.0):
        assert costs("grouped_gemm", H200).slot == 7.0
        assert costs("grouped_gemm", DeviceInfo.for_arch("sm_80")).slot == 7.0
    assert costs("grouped_gemm", H200).slot == before
    with pytest.raises(UnknownTermError, match="no term slots"), trial("grouped_gemm", slots=1.0):
        pass


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_code_and_file_have_the_same_terms(file: Path) -> None:
    """Each folder of schedules, and what they share, uses the terms of the sections that it reads, and all of them."""
    named: dict[str, set[str]] = {}
    used: dict[str, set[str]] = {}
    schedules = Path(table.__file__).parents[1] / "schedules"
    for path in (*schedules.glob("*/*.py"), schedules / "cost.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            room = path.parent.name
            if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
                if (node.value.id if isinstance(node.value, ast.Name) else node.value.attr) in ("terms", "_terms"):
                    used.setdefault(room, set()).add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "costs":
                for each in ast.walk(node.args[0]):
                    if isinstance(each, ast.Constant):
                        named.setdefault(room, set()).add(each.value)
    found = sections(file)
    assert set(used) == set(named)
    for room, names in used.items():
        here = [section for section in found if section in named[room]]
        terms = {term for section in here for term in found[section]["terms"]}
        put_together = {term for term in terms if term.startswith(("step_", "copy_"))}  # names with a kind in them
        assert names <= terms, room
        assert terms - put_together <= names, room
    assert set().union(*named.values()) == set(found)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_terms_say_where_they_come_from(file: Path) -> None:
    """Records exist and have as many candidates of these schedules as the file says, and a few that no tile fits."""
    counted: dict[str, Counter[str]] = {}
    schedules = {schedule.name: schedule for schedule in SCHEDULES}
    each = sections(file).values()
    outdated = {
        (name, path) for section in each for name in section["schedules"] for path in section.get("outdated", ())
    }
    for path in (*RECORDS, *SWEEPS):
        for record in read_csv(path):
            schedule = schedules.get(name := fitted_rows.schedule_of(record))
            if outdated & {(name, path.name), (name, f"{path.name} {record.pass_name}")}:
                continue
            if record.status == OK and schedule and fitted_rows.parse_config(schedule, record.config) is not None:
                counted.setdefault(name, Counter())[path.name] += 1
    for name, section in sections(file).items():
        assert set(section["schedules"]) <= set(schedules), name
        records: Counter[str] = sum((counted.get(each, Counter()) for each in section["schedules"]), Counter())
        tuned = {path.name for path in RECORDS}
        assert set(records) & tuned <= set(section["records"]) <= set(records), name
        for file, rows in section["records"].items():
            assert 0 <= records[file] - rows <= max(1, 0.03 * records[file]), (name, file)
        assert section["rows"] == sum(section["records"].values()), name
        assert section["commit"]
        assert section["date"]
        for term, about in section["terms"].items():
            assert about["unit"] in ("cycles", "seconds", "bytes", "1"), term
            assert about["meaning"], term
            assert math.isfinite(about["value"])
            assert set(about["records"]) <= set(section["records"]), term
            assert 0 <= about["rows"] <= section["rows"], term
            assert (about["rows"] > 0) is bool(about["records"]) is (about["error"] is not None), term


def section_of(name: str) -> fit.Section:
    """A small section with its rows."""
    data = sections(FOLDER / "sm_90a.json")[name]
    files = [path for path in (*RECORDS, *SWEEPS) if path.name in data["records"]]
    found, _ = fitted_rows.read_rows(files, "sm_90a", data["schedules"])
    return fit.Section(name, data, found)


@pytest.mark.parametrize("name", ["phase_gemm_pixels", "direct_wgrad_channels"])
def test_errors_are_those_of_the_code_at_hand(name: str) -> None:
    section = section_of(name)
    written = json.loads(json.dumps(section.data))
    fit.describe(section)
    assert section.data == written


def test_a_fit_finds_its_way_back() -> None:
    """From values that are far off, to predictions that are at least as good as today's."""
    section = section_of("phase_gemm_pixels")
    today = fitted_rows.error(section.rows, list(search.predictions(section.rows, section.name, section.values)))
    off = {**section.values, "product": 1.5, "store": 0.1, "stage": 1200.0}
    before = fitted_rows.error(section.rows, list(search.predictions(section.rows, section.name, off)))
    terms = {name: {**term, "value": off[name]} for name, term in section.terms.items()}
    found = search.fit(section.rows, section.name, off, terms, fit.weights_of(section.rows, section.rows))
    after = fitted_rows.error(section.rows, list(search.predictions(section.rows, section.name, found)))
    assert before > 1.1 * today
    assert after <= today
    assert section.values == table.COSTS["sm_90a"]["phase_gemm_pixels"]  # nothing is left of the search
    for name, value in found.items():
        low, high = search.bounds(terms[name])
        assert low <= value <= high


def test_the_command_writes_what_it_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fitting nothing, from a few records: values stay, rows are counted anew, what is not offered is skipped."""
    record = tmp_path / "few.csv"
    lines = (fitted_rows.RESULTS / "h200-tune.csv").read_text(encoding="utf-8").splitlines()
    kept = [lines[0], *(line for line in lines if ",pixel_gemm," in line)]
    changed = kept[-1].replace("pixel_gemm(", "pixel_gemm(colour=3, ")
    record.write_text("\n".join([*kept, changed]) + "\n", encoding="utf-8")
    out = tmp_path / "sm_90a.json"
    fit.main([str(record), "--keep", "--out", str(out)])
    assert "1 of phase_gemm_pixels with other fields" in capsys.readouterr().out
    today, written = sections(FOLDER / "sm_90a.json"), sections(out)
    for name, section in written.items():
        values = {term: about["value"] for term, about in section["terms"].items()}
        assert values == {term: about["value"] for term, about in today[name]["terms"].items()}
        assert section["rows"] == (len(kept) - 1 if name == "phase_gemm_pixels" else 0)


def test_costs_of_another_architecture_name_the_gpu_of_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sm_80 has no file: its costs begin as those of sm_90a, and are not said to be an H200's."""
    lines = (fitted_rows.RESULTS / "h200-tune.csv").read_text(encoding="utf-8").splitlines()
    kept = [lines[0], *(line.replace("NVIDIA H200", "NVIDIA A100") for line in lines if ",gather_tiled," in line)]
    record, out = tmp_path / "few.csv", tmp_path / "sm_80.json"
    record.write_text("\n".join(kept) + "\n", encoding="utf-8")
    monkeypatch.setattr(table, "COSTS", dict(table.COSTS))
    fit.main([str(record), "--arch", "sm_80", "--keep", "--out", str(out)])
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["arch"], written["gpu"]) == ("sm_80", "NVIDIA A100")
