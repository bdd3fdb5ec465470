"""Measured choices on disk: the candidates that ``python -m polyphase tune`` found fastest, which the planner uses.

There is one small JSON file for each layer, pass and kind of GPU, next to the compiled kernels. It names a candidate,
which is only looked up among the planner's own: a damaged or forged file costs time, never correctness. As in the
planner, a layer has any batch and image size, but it matters whether that size rounds to TF32. The last measurement
counts.
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
    """The description of the measured candidate, or None.

    With ``POLYPHASE_TUNING=0`` in the environment there is none.
    """
    if _trial is not None:
        return _trial
    if os.environ.get("POLYPHASE_TUNING") == "0" or not directory().is_dir():
        return None
    candidate = entries.read(_FOLDER, _layer(problem, pass_, device))
    return candidate if isinstance(candidate, str) else None


def remember(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, candidate: str) -> None:
    """Writes a choice for every later process; running ones have already made theirs. Raises OSError."""
    entries.write(_FOLDER, _layer(problem, pass_, device), candidate)


def discard(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> None:
    """Removes the choice of a layer, if there is one. Raises OSError."""
    entries.path_of(_FOLDER, _layer(problem, pass_, device)).unlink(missing_ok=True)


def forget() -> int:
    """Removes all choices and returns their number. Raises OSError."""
    count = len(list(directory().glob("*.json")))
    if directory().exists():
        shutil.rmtree(directory())
    return count


@contextlib.contextmanager
def trial(candidate: str) -> Iterator[None]:
    """A context in which new plans use this candidate if it is offered, and ignore measured choices.

    For one thread. The caller must clear the cache of earlier plans.
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
    layer = replace(standard(problem).of_pass(pass_), tf32=problem.tf32)  # tf32 depends on the actual size
    return f"{pass_.value} of {layer!r} on {where}, kernels {_kernels()}"


@lru_cache(maxsize=1)
def _kernels() -> str:
    """A digest of all kernels: a choice is valid for the kernels that were measured."""
    return entries.digest([*KERNELS.glob("**/*.cu*")])
