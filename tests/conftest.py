"""Options and fixtures of the suite: a test that takes ``device`` runs on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from helpers import forbid_tf32

os.environ["POLYPHASE_TUNING"] = "0"  # what was measured on this machine decides nothing here
forbid_tf32()  # for what runs before the first test
torch.backends.cuda.matmul.allow_tf32 = False

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polyphase")
    group.addoption("--seed", type=int, default=0, help="first seed of the fuzz; each case has a seed of its own")
    group.addoption("--cases", type=int, default=300, help="cases of the fuzz, three passes each")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="session")
def _poisoned_outputs() -> Iterator[None]:
    """CUDA outputs are filled with NaN before the launch, so that what a kernel leaves out shows."""
    if not torch.cuda.is_available():
        yield
        return
    from polyphase import runtime

    runtime.POISON = True
    yield
    runtime.POISON = False


@pytest.fixture(autouse=True)
def _strict_float32() -> None:
    """Every test begins with TF32 forbidden, in polyphase and in PyTorch; `helpers.tf32` allows it for a while."""
    forbid_tf32()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
