"""Predictions left on disk: read instead of made again, and never more than an order of what is offered anyway."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from polyphase.jit import compiler
from polyphase.jit.cache import cache_directory
from polyphase.plan import planner as plan
from polyphase.plan import ranking_cache, shortlist
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass, sizes
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.schedule import Schedule

H200 = DeviceInfo.for_arch("sm_90a")
SCHEDULES_OF_PASSES = {
    Pass.FORWARD: "implicit_gemm",
    Pass.INPUT_GRAD: "window_dgrad_mma",
    Pass.WEIGHT_GRAD: "window_wgrad_mma",
}
LAYER = ConvTransposeProblem.make((4, 48, 33, 31), 24, 4, 2, 1, bias=True, tf32=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("POLYPHASE_TUNING", raising=False)
    forget()
    yield tmp_path / "cache" / "rankings"
    forget()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The layers whose configs were ranked, of one schedule for each pass."""
    found, rank = [], shortlist._rank

    def record(schedule: Schedule, at: object, *rest: object) -> object:
        if schedule.name in SCHEDULES_OF_PASSES.values():
            found.append(at)
        return rank(schedule, at, *rest)

    monkeypatch.setattr(shortlist, "_rank", record)
    return found


def forget() -> None:
    """As a new process."""
    plan.plan.cache_clear()
    plan._ranked.cache_clear()
    shortlist.forget()


def entry_of(folder: Path, pass_: Pass) -> Path:
    """The file of the pass's schedule."""
    about = f"{SCHEDULES_OF_PASSES[pass_]}, {pass_.value} of "
    (path,) = (path for path in folder.iterdir() if json.loads(path.read_text())["about"].startswith(about))
    return path


def offers(problem: ConvTransposeProblem = LAYER, device: DeviceInfo = H200, pass_: Pass = Pass.FORWARD) -> list[str]:
    forget()
    return [candidate.describe() for candidate, _ in plan.programs(problem, pass_, device)]


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_later_process_ranks_nothing(
    channels_last: bool, dtype: str, arch: str, pass_: Pass, made: list[object], folder: Path
) -> None:
    layer, device = replace(LAYER, channels_last=channels_last, dtype=dtype), DeviceInfo.for_arch(arch)
    first = offers(layer, device, pass_)
    assert len(made) == 1
    assert offers(layer, device, pass_) == first
    assert len(made) == 1
    assert {path.suffix for path in folder.iterdir()} == {".json"}


def test_another_size_ranks_nothing(made: list[object]) -> None:
    first = offers()
    assert offers(replace(LAYER, batch=3, input_size=(40, 51))) == first
    assert len(made) == 1
    assert plan.plan(LAYER, Pass.FORWARD, H200).describe() in first


def test_a_user_without_a_home_plans_and_compiles(
    made: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    first = offers()
    for name in ("POLYPHASE_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (folder,) = {cache_directory(), compiler.cache().directory}
    assert folder.parent == tmp_path
    assert offers() == first
    assert plan.plan(LAYER, Pass.FORWARD, H200).describe() in first
    assert compiler.cache().problem is None
    assert len(made) == 2


def test_sources_that_cannot_be_read_are_ranked_every_time(made: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    first = offers()
    monkeypatch.setattr(ranking_cache, "_PLANNER", None)
    assert offers() == first
    assert len(made) == 2


def test_rankings_belong_to_layer_pass_device_and_planner(made: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    offers()
    for problem in (replace(LAYER, tf32=False), replace(LAYER, channels_last=True), replace(LAYER, stride=(2, 1))):
        offers(problem)
    offers(device=replace(H200, multiprocessors=78))
    assert len(made) == 5
    offers(pass_=Pass.INPUT_GRAD), offers(pass_=Pass.WEIGHT_GRAD)
    assert len(made) == 7
    monkeypatch.setattr(ranking_cache, "_PLANNER", "another")
    offers()
    assert len(made) == 8


def _with_value(value: object) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), "value": value})


VALUES = (None, 3, "x", {}, [], [[0]], ["0"], [0.0], [-1], [10**6], [0, None], [2, 2])
DAMAGES: dict[str, Callable[[str], str]] = {
    **{f"value {value!r}": _with_value(value) for value in VALUES},
    "cut short": lambda text: text[:-9],
    "empty": lambda text: "",
    "no JSON": lambda text: "\0",
    "nested too deep": lambda text: "[" * 100_000,
}


@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_ranked_anew(damage: str, pass_: Pass, made: list[object], folder: Path) -> None:
    first = offers(pass_=pass_)
    path = entry_of(folder, pass_)
    entry = json.loads(path.read_text())
    assert len(entry["value"]) > 9
    made.clear()
    path.write_text(DAMAGES[damage](path.read_text()))
    assert offers(pass_=pass_) == first
    assert len(made) == 1
    assert json.loads(path.read_text()) == entry  # and written again


def test_what_is_made_up_leaves_all_schedules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the order of schedules a later process reads, it asks each that is missing, too."""
    chosen = plan.plan(LAYER, Pass.WEIGHT_GRAD, H200)
    names = [
        schedule.name for schedule in plan._ranked(sizes.compared(LAYER, Pass.WEIGHT_GRAD), Pass.WEIGHT_GRAD, H200)
    ]
    assert chosen.schedule in names
    assert len(names) == len(plan.SCHEDULES)
    unable = [refusal(schedule, LAYER, Pass.WEIGHT_GRAD, H200) is not None for schedule in plan.SCHEDULES].index(True)
    monkeypatch.setattr(ranking_cache, "read", lambda *_: [unable])
    forget()
    assert plan.plan(LAYER, Pass.WEIGHT_GRAD, H200).program is not None


@pytest.mark.parametrize("pass_", Pass)
def test_what_is_made_up_changes_an_order_alone(pass_: Pass, folder: Path) -> None:
    first = offers(pass_=pass_)
    path = entry_of(folder, pass_)
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "value": entry["value"][::-1]}))
    assert {*offers(pass_=pass_)} != {*first}
    for _, program in plan.programs(LAYER, pass_, H200):
        assert program.main.shared_bytes <= H200.shared_bytes_per_block


def test_a_disk_that_takes_nothing_is_no_error(
    made: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "file"))
    assert offers() == offers()
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "full"))

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert offers() == offers()
    assert len(made) == 4
    assert not any((tmp_path / "full" / "rankings").iterdir())


def test_they_can_be_switched_off(made: list[object], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("POLYPHASE_TUNING", "0")
    offers(), offers()
    assert len(made) == 2
    assert not folder.exists()
