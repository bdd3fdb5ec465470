"""Weight gradients in NCHW beside the same in channels_last and the transposes before it, from two records.

python benchmarks/experiments/032-large-copies/copies.py --csv copies.csv
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

from polyphase.bench.layers import Suite, suite
from polyphase.plan.planner import plan
from polyphase.problem import DTYPE_BYTES, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.cost import transpose_seconds

RESULTS = Path(__file__).parents[2] / "results"
LEAST = 400  # megabytes of both tensors
HEAD = """layer dtype megabytes pytorch_workspace_mb nchw_ms channels_last_ms transposes_ms sum_ms times chosen
forecast_ms"""


def recorded(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """Measured weight gradients by layer and dtype."""
    with (RESULTS / name).open() as file:
        rows = [row for row in csv.DictReader(file) if row["pass"] == Pass.WEIGHT_GRAD.value and row["ms"]]
    return {(row["layer"], row["dtype"]): row for row in rows}


def main() -> None:
    """Write a line for each large layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    nchw, last = recorded("h200-gradients.csv"), recorded("h200-gradients-channels-last.csv")
    device = DeviceInfo.for_arch("sm_90a")
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEAD.split())
        for layer in suite(Suite.ALL):
            for dtype in ("float32", "bfloat16"):
                key = layer.name, dtype
                x, _, y = layer.problem.elements
                megabytes = (x + y) * DTYPE_BYTES[dtype] / 1e6
                if megabytes < LEAST or key not in nchw or key not in last:
                    continue
                moved = transpose_seconds(round(2e6 * megabytes), device, 2) * 1e3
                before, product = float(nchw[key]["ms"]), float(last[key]["ms"])
                problem = replace(layer.problem, dtype=dtype, tf32=True)
                chosen = plan(problem, Pass.WEIGHT_GRAD, device)
                assert chosen.candidate is not None
                writer.writerow(
                    [
                        *key,
                        f"{megabytes:.0f}",
                        nchw[key]["torch_workspace_megabytes"],
                        f"{before:.3f}",
                        f"{product:.3f}",
                        f"{moved:.3f}",
                        f"{product + moved:.3f}",
                        f"{before / (product + moved):.2f}",
                        chosen.schedule,
                        f"{chosen.candidate.seconds * 1e3:.3f}",
                    ]
                )


if __name__ == "__main__":
    main()
