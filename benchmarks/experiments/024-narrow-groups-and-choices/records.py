"""Writes `ways.csv` and `dgrad.csv` as a record of `tune`, for ``benchmarks/fit``: ``python records.py RECORD``."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from polyphase.bench.layers import parse_layer
from polyphase.bench.records import OK, Record, write_csv

_CEILINGS = "copy 4.23 TB/s (read + write); products tf32 415, float32 50.7, bfloat16 804 TFLOP/s"


def main() -> None:
    """One record for each config of a layer."""
    found = {}
    for name, pass_ in (("ways", "weight_grad"), ("dgrad", "input_grad")):
        for row in csv.DictReader((Path(__file__).parent / f"{name}.csv").open(newline="")):
            config = row["config"].partition(" splits ")[0].replace(", raw=0", "")  # of the refused kernel
            if "," not in row["way"] or row["way"].startswith("window_dgrad_transposed, rows of 128"):
                found.setdefault((row["problem"], pass_, config), _record(row, pass_, config, f"{name}.csv"))
    write_csv(Path(sys.argv[1]), list(found.values()))


def _record(row: dict[str, str], pass_: str, config: str, file: str) -> Record:
    problem = parse_layer(row["problem"])
    layer = row["problem"].removesuffix(", tf32").rpartition(", ")[0]
    schedule = config.partition("(")[0]
    found = Record(layer, str(problem), pass_, problem.dtype, "nchw", OK, "", schedule, config)
    found.ms, found.predicted_ms = float(row["all_us"]) / 1e3, float(row["forecast_us"]) / 1e3
    found.planned, found.error, found.compared = False, float(row["error"]), "some images"
    found.torch_benchmark_ms, found.gpu = float(row["torch_us"]) / 1e3, row["gpu"]
    found.ceilings, found.torch, found.date = _CEILINGS, "2.11.0", "2026-11-28"
    found.command = f"python benchmarks/experiments/024-narrow-groups-and-choices/ways.py --csv {file}"
    return found


if __name__ == "__main__":
    main()
