"""Choices that were measured, on disk: what ``python -m polyphase tune`` found fastest, and the planner then takes.

One small JSON file for each layer, pass and kind of GPU, next to the compiled kernels. It names a candidate, which is
only looked for among those that the planner offers: a file that is damaged or made up costs time, never a result. A
layer is meant here as in the planner, at any batch and image size, but for whether that size rounds to TF32: what was
measured last holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from polyphase.jit.cache import cache_directory
from polyphase.jit.source import KERNELS
from polyphase.plan import entries
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.sizes import standard

_FOLDER = "tuning"
_trial: str | None = None


def directory() -> Path:
    """The folder of the choices."""
    return cache_directory() / _FOLDER


def choice(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
    """The description of the candidate to take, or None where none was measured.

    With ``POLYPHASE_TUNING=0`` in the environment there is none.
    """
    if _trial is not None:
        return _trial
    if os.environ.get("POLYPHASE_TUNING") == "0" or not directory().is_dir():
        return None
    candidate = entries.read(_FOLDER, _layer(problem, pass_, device))
    return candidate if isinstance(candidate, str) else None


def remember(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, candidate: str) -> None:
    """Leaves a choice for every later process; those that run already have made theirs. Raises OSError."""
    entries.write(_FOLDER, _layer(problem, pass_, device), candidate)


def discard(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> None:
    """Removes the choice of a layer, if there is one. Raises OSError."""
    entries.path_of(_FOLDER, _layer(problem, pass_, device)).unlink(missing_ok=True)


def forget() -> int:
    """Removes all choices and returns how many there were. Raises OSError."""
    count = len(list(directory().glob("*.json")))
    if directory().exists():
        shutil.rmtree(directory())
    return count


@contextlib.contextmanager
def trial(candidate: str) -> Iterator[None]:
    """Within it, plans that are made take this candidate where it is offered, and measured choices count for nothing.

    For one thread: whoever opens it sees to it that plans made before are forgotten.
    """
    global _trial
    before, _trial = _trial, candidate
    try:
        yield
    finally:
        _trial = before


def _layer(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str:
    """The key of a choice, as text, the kernels' text included."""
    where = f"{device.arch} with {device.multiprocessors} multiprocessors"
    layer = replace(standard(problem).of_pass(pass_), tf32=problem.tf32)  # decided by the size that it has
    return f"{pass_.value} of {layer!r} on {where}, kernels {_kernels()}"


@lru_cache(maxsize=1)
def _kernels() -> str:
    """A digest of all kernels: a choice holds for those that were measured."""
    return entries.digest([*KERNELS.glob("**/*.cu*")])
