"""Writes `ways.csv` as a record of `tune`, which ``benchmarks/fit`` reads: ``python records.py RECORD``."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from polyphase.bench.layers import parse_layer
from polyphase.bench.records import OK, Record, write_csv

_CEILINGS = "copy 4.23 TB/s (read + write); products tf32 418, float32 50.7, bfloat16 797 TFLOP/s"
_COMMAND = "python benchmarks/experiments/020-gradients-that-lose/ways.py --csv ways.csv"
_OTHERWISE = "no pairs", "a block each", "packed in turn"  # ways that are no configs
_ONE_STAGE = "128×512×10733 → 1,"  # whose tiles have a block each since


def main() -> None:
    """One record for each config of a layer."""
    rows = list(csv.DictReader((Path(__file__).parent / "ways.csv").open(newline="")))
    found: dict[tuple[str, str], Record] = {}
    for row in rows:
        each = row["problem"].startswith(_ONE_STAGE) and row["config"].startswith("window_dgrad_wgmma")
        if row["way"].endswith("a block each") if each else not row["way"].endswith(_OTHERWISE):
            known = found.setdefault((row["problem"], row["config"]), _record(row))
            known.planned = known.planned or row["way"] == "planned"
    write_csv(Path(sys.argv[1]), list(found.values()))


def _record(row: dict[str, str]) -> Record:
    problem, name = parse_layer(row["problem"]), row["config"].partition("(")[0]
    layer = row["problem"].removesuffix(", tf32").rpartition(", ")[0]
    found = Record(layer, str(problem), "input_grad", problem.dtype, "nchw", OK, "", name, row["config"])
    found.ms, found.predicted_ms = float(row["all_us"]) / 1e3, float(row["forecast_us"]) / 1e3
    found.planned, found.error, found.torch_error = False, float(row["error"]), float(row["torch_error"])
    found.torch_benchmark_ms, found.gpu, found.compared = float(row["torch_us"]) / 1e3, row["gpu"], "all"
    found.ceilings, found.command, found.torch, found.date = _CEILINGS, _COMMAND, "2.11.0", "2026-11-28"
    return found


if __name__ == "__main__":
    main()
