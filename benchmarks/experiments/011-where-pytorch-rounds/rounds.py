"""Which passes PyTorch rounds to TF32, read off its errors in the records, beside the rule of `uses_tf32`.

PYTHONPATH=src python benchmarks/experiments/011-where-pytorch-rounds/rounds.py --csv rounds.csv
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from polyphase.bench.layers import parse_layer
from polyphase.bench.random_layers import notation
from polyphase.problem import ConvTransposeProblem, Pass

HERE = Path(__file__).parent
RECORDS = HERE.parent.parent / "results"
PROBES = "h200-random.csv", "probe.csv", "volumes.csv", "few.csv"
#: A float32 result that is further from float64 than this was rounded to TF32: 2.9e-4 where it was, 2e-6 where not.
ROUNDED = 3e-5


def problem_of(row: dict[str, str]) -> ConvTransposeProblem:
    text = re.sub(r", (float32|tf32|channels_last)\b", "", row["problem"]).replace("×", "x").replace("→", "->")
    return replace(parse_layer(text), tf32=True, channels_last=row["layout"] == "channels_last")


def rows() -> Iterator[tuple[str, str, str, ConvTransposeProblem, Pass, float]]:
    """GPU, layer, layout, problem, pass and PyTorch's error of every float32 pass in the records, each once."""
    seen: set[tuple[str, ...]] = set()
    for path in [*sorted(RECORDS.glob("*.csv")), *(HERE / name for name in PROBES)]:
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get("dtype") != "float32" or not row.get("torch_error") or row.get("strict_fp32") == "True":
                    continue
                if row.get("pass") not in {each.value for each in Pass} or not row["gpu"].startswith("NVIDIA"):
                    continue
                problem = problem_of(row)
                key = row["gpu"], notation(problem), row["layout"], row["pass"]
                if key not in seen:
                    seen.add(key)
                    yield *key[:3], problem, Pass(row["pass"]), float(row["torch_error"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    counts: Counter[tuple[str, bool, bool]] = Counter()
    with options.csv.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "layer", "layout", "pass", "torch_error", "pytorch_rounds", "polyphase_may"])
        for gpu, layer, layout, problem, pass_, error in rows():
            rounds, may = error > ROUNDED, problem.uses_tf32(pass_)
            counts[pass_.value, rounds, may] += 1
            writer.writerow([gpu, layer, layout, pass_.value, error, rounds, may])
    for pass_ in Pass:
        name = pass_.value
        both, alone, exact = counts[name, True, True], counts[name, False, True], counts[name, True, False]
        neither = counts[name, False, False]
        print(f"{name}: PyTorch rounds {both + exact} of {both + alone + exact + neither};", end=" ")
        print(f"polyphase stays exact in {exact} of these, and may round {alone} that PyTorch does not")


if __name__ == "__main__":
    main()
