"""The search for configs: what a schedule supports costs nothing, and what is left out could not have been taken."""

from __future__ import annotations

import ast
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

import polyphase
from polyphase.bench.plans import forget
from polyphase.bench.random_layers import random_layers
from polyphase.plan import planner, shortlist
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules import SCHEDULES
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.implicit_gemm.search import Members
from polyphase.schedules.tiles import least

PACKAGE = Path(polyphase.__file__).parent
H200 = DeviceInfo.for_arch("sm_90a")
KINDS = (("bfloat16", False, False), ("float32", True, False), ("float32", False, True), ("float16", False, True))


def problems(count: int, seed: int) -> Iterator[ConvTransposeProblem]:
    """Layers drawn at random, in one dtype and memory format after the other."""
    for number, layer in enumerate(random_layers(count, seed)):
        dtype, tf32, last = KINDS[number % len(KINDS)]
        yield replace(layer.problem, dtype=dtype, tf32=tf32, channels_last=last)


def calls_of(action: Callable[[], object]) -> int:
    """Calls of the package's functions: what something takes, whatever else the machine does."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE))

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_what_a_schedule_supports_is_arithmetic(schedule: planner.Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ranked, no tile is searched: there are few calls, whatever the layer, and nothing cached before."""

    def searched(*_: object) -> None:
        raise AssertionError("ranked to say what is supported")

    for method in ("ranked_at", "configs", "seconds", "search", "cost"):
        monkeypatch.setattr(type(schedule), method, searched)
    monkeypatch.setattr(shortlist, "_rank", searched)
    forget()
    for problem in problems(60, seed=4):
        for pass_ in Pass:
            for arch in ("sm_75", "sm_80", "sm_90a"):
                fresh = replace(problem)  # with nothing cached of it
                assert calls_of(lambda: schedule.supports(fresh, pass_, DeviceInfo.for_arch(arch))) < 200  # noqa: B023


@pytest.mark.slow
def test_a_cold_plan_is_short() -> None:
    """In calls of functions, which a busy machine does not change. Without bounds it takes three times as many."""
    found = []
    for problem in problems(8, seed=1):
        for pass_ in Pass:
            forget()
            found.append(calls_of(lambda: planner.plan(problem, pass_, H200, None, True)))  # noqa: B023
    assert statistics.median(found) < 105_000
    assert max(found) < 800_000


def test_schedules_know_nothing_of_the_planner() -> None:
    for room in ("problem", "program", "schedules", "kernels"):
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
                assert not any(name.startswith("polyphase.plan") for name in names), path


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("problem", list(problems(8, seed=5)), ids=str)
def test_no_prediction_falls_below_its_bound(problem: ConvTransposeProblem) -> None:
    """Of implicit_gemm, at all sizes that it is compared at; and the fastest are those of a search of all."""
    schedule = ImplicitGemm()
    if schedule.supports(problem, Pass.FORWARD, H200) is not None:
        return
    at = schedule.ranked_at(problem, Pass.FORWARD, Layouts.of_call(problem, Pass.FORWARD))
    for sized in (at, *schedule.others(at), *schedule.own(at)):
        gather, members = sized.gather, Members.of(at, H200)
        images = gather.src.shape[0]
        for member in list(members.at(gather).values())[::7]:
            sizes = gather.src.shape[2:] if member.config.whole_images else gather.cells
            cells = images * math.prod(sizes)
            found = member.fastest(gather, cells)
            if found is None:
                continue
            assert member.bound.seconds(gather, cells) <= found[0]
            assert member.fastest(gather, cells, below=found[0]) == found
        every = members.fastest(gather, None, math.inf)
        order = sorted(every, key=every.__getitem__)
        for most in (1, 5, 64):
            few = members.fastest(gather, most, math.inf)
            assert sorted(few, key=few.__getitem__)[:most] == order[:most]
            assert few.items() <= every.items()


@pytest.mark.parametrize("pass_", Pass)
def test_lists_go_on_behind_the_first(pass_: Pass) -> None:
    """What a search left out comes after what it was asked for, and nothing comes twice."""
    for problem in problems(6, seed=6):
        layouts = Layouts.of_call(problem, pass_)
        for schedule in SCHEDULES:
            at = schedule.ranked_at(problem, pass_, layouts) if not schedule.supports(problem, pass_, H200) else None
            if at is None:
                continue
            ranked = shortlist._shortlist(type(schedule), at, pass_, H200)
            order = list(ranked)
            assert len(set(order)) == len(order)
            assert {*order} <= {*schedule.configs(at, pass_, H200)}
            if schedule.prunes and order:
                assert {*schedule.search(at, pass_, H200)} <= {*order}


def test_least_work() -> None:
    """The first of equal ones, those without work left out, and few looked at where bounds tell them apart."""
    rng = random.Random(1)
    for _ in range(200):
        works = [rng.choice((None, *map(float, range(6)))) for _ in range(rng.randrange(12))]
        bounds = [rng.uniform(0, 5 if work is None else work) if rng.random() < 0.8 else work or 0.0 for work in works]
        some = [place for place, work in enumerate(works) if work is not None]
        assert least(bounds, works.__getitem__) == min(some, key=works.__getitem__, default=None)
    looked_at: list[int] = []

    def work_of(place: int) -> float:
        looked_at.append(place)
        return place + 0.5

    assert least(map(float, range(100)), work_of) == 0
    assert looked_at == [0]


@pytest.mark.parametrize("pass_", Pass)
def test_lists_do_not_depend_on_what_was_planned_before(pass_: Pass) -> None:
    """Warm or cold, in whatever order."""
    layers = list(problems(4, seed=8))
    cold = []
    for problem in layers:
        forget()
        cold.append(planner.plan(problem, pass_, H200, None, True).describe())
    planner.plan.cache_clear()
    assert [planner.plan(problem, pass_, H200, None, True).describe() for problem in layers[::-1]] == cold[::-1]
