"""What each schedule is worth: forecasts where it is chosen over the next best; ``python without.py --csv FILE``.

Needs no GPU. All layers of all suites, float32 (TF32) and bfloat16, both memory formats, all passes; with ``--only`` a
schedule's cases, one by one.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from polyphase.bench.layers import every_layer
from polyphase.bench.random_layers import random_layers
from polyphase.errors import UnsupportedError
from polyphase.plan import planner
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo


def main() -> None:
    """Plan every case, and again without the schedule that was chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--random", type=int, default=0, help="so many layers more, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from")
    parser.add_argument("--only", help="a schedule: write each case in which it is chosen")
    options = parser.parse_args()
    device, schedules = DeviceInfo.for_arch(options.arch), planner.SCHEDULES
    ratios: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
    for layer in (*every_layer(), *random_layers(options.random, options.seed)):
        for dtype in ("float32", "bfloat16"):
            for channels_last in (False, True):
                problem = replace(layer.problem, dtype=dtype, channels_last=channels_last, tf32=True)
                for pass_ in Pass:
                    if options.only and not _may_take(options.only, problem, pass_, device):
                        continue
                    name, seconds = _planned(problem, pass_, device)
                    if options.only not in (None, name):
                        continue
                    planner.SCHEDULES = tuple(each for each in schedules if each.name != name)
                    _forget()
                    other, more = _planned(problem, pass_, device)
                    planner.SCHEDULES = schedules
                    _forget()
                    ratios[name].append((more / seconds, other, f"{problem}, {pass_.value}"))
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        if options.only:
            writer.writerow(["schedule", "next", "times", "case"])
            writer.writerows([options.only, other, f"{ratio:.3f}", case] for ratio, other, case in ratios[options.only])
            return
        writer.writerow(["schedule", "chosen", "geometric_mean", "above_1.03", "largest", "next", "of"])
        for name, found in sorted(ratios.items()):
            finite = [ratio for ratio, _, _ in found if math.isfinite(ratio)]
            mean = math.exp(sum(map(math.log, finite)) / len(finite)) if finite else math.inf
            largest, other, case = max(found)
            writer.writerow(
                [
                    name,
                    len(found),
                    f"{mean:.2f}",
                    sum(ratio > 1.03 for ratio, _, _ in found),
                    f"{largest:.2f}",
                    other,
                    case,
                ]
            )


def _planned(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> tuple[str, float]:
    """The schedule and its forecast; no schedule takes forever."""
    try:
        plan = planner.plan(problem, pass_, device)
    except UnsupportedError:
        return "none", math.inf
    return plan.schedule, plan.candidate.seconds if plan.candidate else math.inf


def _may_take(name: str, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
    schedule = next(each for each in planner.SCHEDULES if each.name == name)
    return schedule.supports(planner.as_computed(problem, pass_, None)[0], pass_, device) is None


def _forget() -> None:
    """What the planner keeps of the schedules that it had."""
    for each in vars(planner).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


if __name__ == "__main__":
    main()
