"""What is predicted beside the floor: by kind, worst first, and for 200 random layers no worse than today."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
from rich.console import Console

from polyphase.bench import predictions
from polyphase.bench.layers import NamedLayer
from polyphase.bench.plans import problems
from polyphase.bench.predictions import Prediction, kinds
from polyphase.bench.random_layers import random_layers
from polyphase.bench.records import percentile
from polyphase.plan import planner as plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import H200
from polyphase.problem.device import DeviceInfo

make = ConvTransposeProblem.make
H200_INFO = DeviceInfo.for_arch("sm_90a")


def _predictions(*layers: ConvTransposeProblem) -> list[Prediction]:
    named = [NamedLayer(str(layer), layer) for layer in layers]
    return [found for some in predictions.predictions(named, H200_INFO, 1) for found in some]


def test_a_prediction_is_the_plan_s_over_the_floor() -> None:
    problem = make((16, 256, 64, 64), 128, 4, stride=2, padding=1, tf32=True)
    strict = replace(problem, tf32=False)
    for found in _predictions(problem, strict):
        chosen = plan.plan(found.problem, found.pass_, H200_INFO, by_prediction=True)
        assert chosen.candidate is not None
        assert (found.schedule, found.seconds) == (chosen.schedule, chosen.candidate.seconds)
        assert found.floor_seconds == pytest.approx(
            found.problem.flops / H200.flops_per_second["tf32" if found.problem.tf32 else "float32"]
        )
        assert found.over == found.seconds / found.floor_seconds
        assert not (found.problem.tf32 and found.lacks_tensor_cores)


def test_a_pass_without_tensor_cores_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has the channels and the work for them; others are right to do without."""
    layer = make((16, 64, 64, 64), 64, 3, padding=1, tf32=True)
    assert not any(found.lacks_tensor_cores for found in _predictions(layer))
    for schedule in predictions.SCHEDULES:
        monkeypatch.setattr(type(schedule), "on_tensor_cores", False)
    few = make((16, 64, 64, 64), 4, 3, padding=1, tf32=True)
    small = make((1, 64, 8, 8), 64, 3, padding=1, tf32=True)
    lacking = [found.problem for found in _predictions(layer, few, small) if found.lacks_tensor_cores]
    assert lacking == [layer] * 3


def test_a_pass_that_nothing_computes_is_infinitely_far_from_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise predictions.UnsupportedError("too large")

    monkeypatch.setattr(plan, "plan", refused)
    assert {(found.schedule, found.over) for found in _predictions(make((1, 8, 8), 8, 3))} == {("none", math.inf)}


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (make((8, 64, 64, 64), 64, 4, stride=2, padding=1), {"2-D"}),
        (make((1, 1026, 500), 1, 1024, stride=256),
         {"1-D", "one image", "fewer than 8 outputs", "many taps", "long kernel", "stride of 5 or more"}),
        (make((2, 64, 32, 32, 32), 64, (1, 2, 2), stride=(1, 2, 2), groups=64),
         {"3-D", "depthwise", "kernel is stride"}),
        (make((2, 64, 32, 32), 64, 3, dilation=2, groups=4),
         {"2-D", "groups of 16 or fewer", "stride 1", "dilated"}),
        (make((2, 3, 9, 9), 100, 3, padding=1),
         {"2-D", "fewer than 8 inputs", "rows that TMA cannot take", "stride 1", "small images"}),
        (make((2, 128, 32, 33), 100, 3, padding=1, channels_last=True),
         {"2-D", "channels no multiple of 8", "stride 1"}),
    ],
)  # fmt: skip
def test_a_layer_has_the_names_of_its_kinds(layer: ConvTransposeProblem, expected: set[str]) -> None:
    assert set(kinds(layer)) == expected


def test_the_worst_come_first_and_kinds_have_what_they_have_in_common() -> None:
    layer, other = make((8, 64, 64, 64), 64, 4, stride=2, padding=1), make((8, 64, 32), 3, 4)
    found = [
        Prediction("fine", layer, Pass.FORWARD, "quick", 2e-5, 1e-5),
        Prediction("bad", other, Pass.FORWARD, "slow", 8e-5, 1e-5),
        Prediction("worse", other, Pass.FORWARD, "slow", 32e-5, 1e-5),
    ]
    console = Console(width=200)

    def text(table: object) -> str:
        with console.capture() as capture:
            console.print(table)
        return capture.get()

    worst = text(predictions.worst_table(found, 3.0, 10))
    assert "2 passes of more than 3 ×" in worst
    assert worst.index("worse") < worst.index("bad")
    assert "fine" not in worst
    assert "the 1 worst" in text(predictions.worst_table(found, 3.0, 1))
    figures = {
        "fewer than 8 outputs": ["2", "16.00", "32.00", "32.00", "2"],
        "quick": ["1", "2.00", "2.00", "2.00", "0"],
        "nchw": ["3", "8.00", "32.00", "32.00", "2"],
    }
    for table, (name, expected) in zip(predictions.group_tables(found, 3.0), figures.items(), strict=True):
        line = next(line for line in text(table).splitlines() if name in line)
        assert line.split()[-5:] == expected


# What is wanted of 200 layers of 20 µs and more: predictions of at most so many times the floor on 95 % and on all, and
# no pass without tensor cores that has the channels and the work for them.
WANTED = (3.0, 6.0, 0)

# What is reached of so many layers, which may only become less; nobody who makes it less needs to wait for somebody to
# lower these. If costs are fitted anew and predict more of the same kernels, they rise, knowingly.
REACHED = {
    50: {
        (Pass.FORWARD, "float32"): (11.1, 15.8, 0),
        (Pass.FORWARD, "bfloat16"): (8.0, 10.1, 0),
        (Pass.INPUT_GRAD, "float32"): (8.0, 10.8, 0),
        (Pass.INPUT_GRAD, "bfloat16"): (10.5, 12.5, 0),
        (Pass.WEIGHT_GRAD, "float32"): (6.6, 9.0, 0),
        (Pass.WEIGHT_GRAD, "bfloat16"): (9.3, 16.6, 0),
    },
    200: {
        (Pass.FORWARD, "float32"): (15.6, 31.2, 7),
        (Pass.FORWARD, "bfloat16"): (18.6, 44.2, 6),
        (Pass.INPUT_GRAD, "float32"): (12.6, 42.1, 29),
        (Pass.INPUT_GRAD, "bfloat16"): (14.6, 127.2, 3),
        (Pass.WEIGHT_GRAD, "float32"): (25.4, 56.0, 32),
        (Pass.WEIGHT_GRAD, "bfloat16"): (15.1, 68.9, 2),
    },
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.rare)])
def test_random_layers_are_as_near_their_floor_as_before(count: int) -> None:
    """`explain --random 200 --seed 49` shows which are far from it."""
    layers = [
        *problems(random_layers(count, 49, least_seconds=20e-6), ["float32", "bfloat16"], [False], strict_fp32=False)
    ]
    groups: dict[tuple[Pass, str], list[Prediction]] = {}
    for some in predictions.predictions(layers, H200_INFO, os.cpu_count() or 1):
        for found in some:
            groups.setdefault((found.pass_, found.problem.dtype), []).append(found)
    assert set(groups) == set(REACHED[count])
    worse = []
    for key, group in groups.items():
        over = [found.over for found in group]
        reached = (percentile(over, 0.95), max(over), sum(found.lacks_tensor_cores for found in group))
        if any(now > max(most, goal) for now, most, goal in zip(reached, REACHED[count][key], WANTED, strict=True)):
            worse.append(f"{key[0].value}, {key[1]}: {reached}, at most {REACHED[count][key]}")
    assert not worse
