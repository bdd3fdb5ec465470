"""What each layer's input gradient is planned by today, by the records of this experiment, against the fastest there.

Needs no GPU: ``python benchmarks/experiments/025-boxes-of-taps/choices.py``.
"""

import collections
import csv
import math
import pathlib

from polyphase.bench.layers import parse_layer
from polyphase.plan.planner import plan
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo

HERE = pathlib.Path(__file__).parent


def main() -> None:
    """Print, for each layer, the schedule, its recorded time over the old choice's, and the fastest one's over that."""
    times: dict[str, dict[str, float]] = collections.defaultdict(dict)
    old: dict[str, float] = {}
    for name in ("ways.csv", "check.csv"):  # the later run goes before
        for row in csv.DictReader((HERE / name).open()):
            times[row["problem"]][row["config"]] = float(row["all_us"])
            if "old_us" in row:
                old[row["problem"]] = float(row["old_us"])
    device = DeviceInfo.for_arch("sm_90a")
    ratios, unknown = [], []
    for layer, old_us in old.items():
        chosen = plan(parse_layer(layer), Pass.INPUT_GRAD, device, by_prediction=True)
        best = min(times[layer].values()) / old_us
        own = times[layer].get(chosen.describe())
        if own is None:
            unknown.append(f"{chosen.describe()}: {layer}")
        else:
            ratios.append((own / old_us, best, chosen.schedule, layer))
    for ratio, best, schedule, layer in sorted(ratios, reverse=True):
        print(f"{ratio:.2f} {best:.2f} {schedule}: {layer}")
    print(*unknown, sep="\n")
    mean = math.exp(sum(math.log(each[0]) for each in ratios) / len(ratios))
    print(f"{len(ratios)} of {len(old)} recorded: {mean:.3f}, above 1.03: {sum(each[0] > 1.03 for each in ratios)}")


if __name__ == "__main__":
    main()
