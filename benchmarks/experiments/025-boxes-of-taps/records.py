"""Writes ``tap_gemm_tma``'s rows of `ways.csv` as a record for ``benchmarks/fit``: ``python records.py RECORD``."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from polyphase.bench.layers import parse_layer
from polyphase.bench.records import OK, Record, write_csv

_CEILINGS = "copy 4.23 TB/s (read + write); products tf32 418, float32 50.7, bfloat16 797 TFLOP/s"
_COMMAND = "python benchmarks/experiments/025-boxes-of-taps/ways.py --csv ways.csv"


def main() -> None:
    """One record for each config of a layer by ``tap_gemm_tma``: the other's are in the record of the suites."""
    with (Path(__file__).parent / "ways.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["schedule"] == "tap_gemm_tma"]
        write_csv(Path(sys.argv[1]), list(map(_record, rows)))


def _record(row: dict[str, str]) -> Record:
    problem, layout = parse_layer(row["problem"]), "channels_last" if "channels_last" in row["problem"] else "nchw"
    layer = row["problem"].partition(f", {problem.dtype}")[0]
    found = Record(layer, str(problem), "input_grad", problem.dtype, layout, OK, "", row["schedule"], row["config"])
    found.ms, found.predicted_ms = float(row["all_us"]) / 1e3, float(row["forecast_us"]) / 1e3
    found.planned, found.error, found.torch_error = False, float(row["error"]), float(row["torch_error"])
    found.torch_benchmark_ms, found.gpu, found.compared = float(row["torch_us"]) / 1e3, row["gpu"], "all"
    found.ceilings, found.command, found.torch, found.date = _CEILINGS, _COMMAND, "2.11.0", "2026-11-28"
    return found


if __name__ == "__main__":
    main()
