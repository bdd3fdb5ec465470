"""By which margins schedules of gradients should replace one another: ``python rules.py``; needs no GPU.

For each layer of the H200's records that has times of several schedules: what the planner takes where another schedule
must be forecast below some share of the first one's time, and offers its first config, or its fastest at that size. The
loss is the time of what is taken over the fastest recorded, by geometric mean.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "fit"))

from rows import read_rows  # noqa: E402

from polyphase.plan import planner  # noqa: E402
from polyphase.problem import ConvTransposeProblem, Pass  # noqa: E402
from polyphase.problem.device import DeviceInfo  # noqa: E402
from polyphase.problem.layouts import Layouts  # noqa: E402
from polyphase.problem.sizes import compared  # noqa: E402
from polyphase.schedules import SCHEDULES  # noqa: E402

DEVICE, MARGINS = DeviceInfo.for_arch("sm_90a"), (0.7, 0.8, 0.9, 0.95, 1.0)
Times = dict[tuple[str, object], float]


def main() -> None:
    """Both gradients, by every rule."""
    files = sorted((ROOT / "benchmarks" / "results").glob("h200-*.csv"))
    rows, _ = read_rows([file for file in files if not {"host", "blocks"} & set(file.stem.split("-"))], "sm_90a")
    for pass_ in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        cases: dict[tuple[ConvTransposeProblem, Layouts], Times] = defaultdict(dict)
        for row in rows:
            if row.pass_ is pass_ and not row.problem.channels_last:
                key = row.schedule.name, row.config
                times = cases[row.problem, row.layouts]
                times[key] = min(times.get(key, math.inf), row.seconds)
        several = {case: times for case, times in cases.items() if len({name for name, _ in times}) > 1}
        losses = defaultdict(list)
        for (problem, layouts), times in several.items():
            for rule, key in taken(problem, layouts, pass_).items():
                if key in times:
                    losses[rule].append(times[key] / min(times.values()))
        print(f"{pass_.value}: {len(several)} layers")
        for (offered, margin), found in losses.items():
            mean = math.exp(sum(map(math.log, found)) / len(found))
            print(f"  below {margin}, {offered}: {mean:.4f} on {len(found)}, at worst {max(found):.2f}")


def taken(problem: ConvTransposeProblem, layouts: Layouts, pass_: Pass) -> dict[tuple[str, float], tuple[str, object]]:
    """The config that each rule takes."""
    order = planner._ranked(compared(problem, pass_), pass_, DEVICE)
    schedules = [each for each in order if each in planner._that_take(problem, pass_, SCHEDULES)]
    offers = [(each, list(found)) for each, found in planner._offers(schedules, problem, pass_, DEVICE, layouts)]
    fastest = [planner._by_size(schedule, iter(found), pass_)[0] for schedule, found in offers]
    found = {}
    for offered, others in (("its first", [each[0] for _, each in offers]), ("its fastest", fastest)):
        other = min(others[1:], key=lambda each: each.seconds, default=fastest[0])
        for margin in MARGINS:
            chosen = other if other.seconds < margin * fastest[0].seconds else fastest[0]
            found[offered, margin] = chosen.schedule, chosen.config
    return found


if __name__ == "__main__":
    main()
