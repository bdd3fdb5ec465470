"""Writes `ways.csv` as a record of `tune`, which ``benchmarks/fit`` reads: ``python records.py RECORD``."""

from __future__ import annotations

import ast
import csv
import re
import sys
from pathlib import Path

from polyphase.bench.layers import parse_layer
from polyphase.bench.records import OK, Record, write_csv
from polyphase.problem.layouts import Layouts
from polyphase.schedules import SCHEDULES
from polyphase.schedules.tap_gemm.flat import flat_product

_CEILINGS = "copy 4.25 TB/s (read + write); products tf32 415, float32 50.8, bfloat16 797 TFLOP/s"
_COMMAND = "python benchmarks/experiments/016-operands-in-place/ways.py --csv ways.csv"
_TUPLE, _NAMED = re.compile(r"(\w+) (\(.*\)) splits \d+"), re.compile(r"(\w+)\((.*)\)")


def main() -> None:
    """One record for each config of a layer; those of an older kernel are left out."""
    rows = list(csv.DictReader((Path(__file__).parent / "ways.csv").open(newline="")))
    found: dict[tuple[str, str], Record] = {}
    for row in rows:
        if not row["way"].endswith("one tile"):
            name, config = _config(row)
            known = found.setdefault((row["layer"], config), _record(row, name, config))
            known.planned = known.planned or row["way"] == "planned"
    write_csv(Path(sys.argv[1]), list(found.values()))


def _config(row: dict[str, str]) -> tuple[str, str]:
    """The schedule, and its config with the names of its fields."""
    if at := _TUPLE.fullmatch(row["config"]):
        name, values = at[1], ast.literal_eval(at[2])
        kind = next(type(each) for each in SCHEDULES if each.name == name)
        fields = kind.cost.__globals__[kind.cost.__annotations__["config"]]._fields
        settings = [f"{field}={value}" for field, value in zip(fields, values)]
    else:
        at = _NAMED.fullmatch(row["config"])
        assert at is not None
        name, settings = at[1], [at[2]]
    if name == "tap_gemm_wgrad_tma":
        settings.append(f"in_place={'in place' in row['way'] or (row['way'] == 'planned' and _lies(row, settings))}")
    return name, f"{name}({', '.join(settings)})"


def _lies(row: dict[str, str], settings: list[str]) -> bool:
    """Whether the base could be read in place, which the planner chose wherever it could."""
    problem = parse_layer(row["layer"])
    swapped, batched, spread = (f"{name}=True" in settings[0] for name in ("swapped", "batched", "spread"))
    return flat_product(problem, Layouts.dense(problem), swapped, batched, spread, in_place=True).in_place


def _record(row: dict[str, str], name: str, config: str) -> Record:
    problem = parse_layer(row["layer"])
    layer = row["layer"].removesuffix(", tf32").rpartition(", ")[0]
    found = Record(layer, str(problem), "weight_grad", problem.dtype, "nchw", OK, "", name, config)
    found.ms, found.predicted_ms = float(row["all_us"]) / 1e3, float(row["forecast_us"]) / 1e3
    found.planned, found.error, found.compared = False, float(row["error"]), "all"
    found.torch_default_ms, found.gpu = float(row["torch_us"]) / 1e3, row["gpu"]
    found.ceilings, found.command, found.torch, found.date = _CEILINGS, _COMMAND, "2.11.0", "2026-11-28"
    return found


if __name__ == "__main__":
    main()
