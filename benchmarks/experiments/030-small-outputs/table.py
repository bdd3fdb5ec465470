"""Prints the geometric means of `models.csv` over the models that every run of a mode has: ``python table.py``."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path


def main() -> None:
    """A line for each mode, batch, dtype and rule."""
    with (Path(__file__).parent / "models.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        found[row["mode"], row["dtype"]][row["left to PyTorch"]].add(row["model"])
    means: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row["model"] in set.intersection(*found[row["mode"], row["dtype"]].values()):
            batch = "batch 1" if row["batch"] == "1" else "large"
            key = (row["mode"], batch, row["dtype"], row["left to PyTorch"])
            means[key].append(math.log(float(row["fused_over_torch"])))
    for key, logs in sorted(means.items()):
        print(*key, len(logs), f"{math.exp(sum(logs) / len(logs)):.2f}", sep=", ")


if __name__ == "__main__":
    main()
