"""Options and fixtures of the suite: a test that takes ``device`` runs on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch

from helpers import forbid_tf32
from polyphase.bench.pool import collect_seldom
from polyphase.problem import problem

os.environ["POLYPHASE_TUNING"] = "0"  # what was measured on this machine decides nothing here
collect_seldom()  # most tests plan layers
forbid_tf32()  # for what runs before the first test
problem.FEW_POSITIONS, problem.LITTLE_WORK = 0, 0.0  # see helpers.EXACT_BELOW
torch.backends.cuda.matmul.allow_tf32 = False

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]

#: Files whose tests one process takes, as they share what takes long to make: by the name of what they share.
TOGETHER = {"tests/test_emit.py": "emitted", "tests/test_emitted.py": "emitted", "tests/test_params.py": "sources"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Shares tests out among processes one by one, and those that share something to a single one.

    pytest-xdist's own groups (3.8) are lost on pytest 9.2: its items do not take the names that carry them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(nodeid.partition("::")[0], nodeid)

    return Scheduler(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polyphase")
    group.addoption("--all", action="store_true", help="the slow tests too, and more cases of those that are sampled")
    group.addoption("--every", action="store_true", help="--all, and every case of those that are sampled")
    group.addoption("--seed", type=int, default=0, help="first seed of the fuzz; each case has a seed of its own")
    group.addoption("--cases", type=int, default=300, help="cases of the fuzz, three passes each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is slow, unless it is asked for: by --all, --every, a marker expression, or the test's own name.

    And what is timed, or fills the memory, where other processes are at work on the GPU; without one, what needs it.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    _mark_cases_that_are_left_out(items)
    named = any("::" in argument for argument in config.args)
    if not (config.getoption("--every") or config.option.markexpr or named):
        left_out = {"rare"} if config.getoption("--all") else {"rare", "slow"}
        several = [item for item in items if left_out & {marker.name for marker in item.iter_markers()}]
        items[:] = [item for item in items if item not in {*several}]
        config.hook.pytest_deselected(items=several)
    if hasattr(config, "workerinput"):
        shared = pytest.mark.skip(reason="needs a GPU for itself: pytest -m alone")
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(shared)


def _mark_cases_that_are_left_out(items: list[pytest.Item]) -> None:
    """Of a test that is `sampled(n, m)` one of n cases is neither slow nor rare, and one of m not rare."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        sampled = cases[0].get_closest_marker("sampled")
        assert sampled is not None
        by_default, of_all = sampled.args if len(sampled.args) == 2 else (sampled.args[0], 1)
        assert by_default % of_all == 0, name
        several = _sample(cases, of_all, name)
        few = _sample(several, by_default // of_all, name)
        for item in cases:
            if item not in several:
                item.add_marker(pytest.mark.rare)
            elif item not in few:
                item.add_marker(pytest.mark.slow)


Item = TypeVar("Item")


def _sample(items: Sequence[Item], step: int, name: str) -> list[Item]:
    """One of every ``step`` neighbours, the same in every run; which of them is another one each time."""
    chosen = (start + zlib.crc32(f"{name} {start}".encode()) % step for start in range(0, len(items), step))
    return [items[index] for index in chosen if index < len(items)] or [*items[:1]]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="session")
def _poisoned_outputs() -> Iterator[None]:
    """CUDA outputs are filled with NaN before the launch, so that what a kernel leaves out shows."""
    if not torch.cuda.is_available():
        yield
        return
    from polyphase import prepared

    prepared.POISON = True
    yield
    prepared.POISON = False


@pytest.fixture(autouse=True)
def _strict_float32() -> None:
    """Every test begins with TF32 forbidden, in polyphase and in PyTorch; `helpers.tf32` allows it for a while."""
    forbid_tf32()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
