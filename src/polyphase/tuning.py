"""Choices that were measured, on disk: what ``python -m polyphase tune`` found fastest, and the planner then takes.

One small JSON file for each layer, pass and kind of GPU, next to the compiled kernels. It names a candidate, which is
only looked for among those that the planner offers: a file that is damaged or made up costs time, never a result. A
layer is meant here as in the planner, at any batch and image size: what was measured last, at whatever size, holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from polyphase.algorithms.base import standard
from polyphase.device import DeviceInfo
from polyphase.jit.cache import cache_directory
from polyphase.jit.source import KERNELS
from polyphase.problem import ConvTransposeProblem, Pass

_trial: str | None = None


def directory() -> Path:
    """The folder of the choices."""
    return cache_directory() / "tuning"


def choice(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
    """The description of the candidate to take, or None where none was measured.

    With ``POLYPHASE_TUNING=0`` in the environment there is none.
    """
    if _trial is not None:
        return _trial
    if os.environ.get("POLYPHASE_TUNING") == "0" or not directory().is_dir():
        return None
    layer = _layer(problem, pass_, device)
    try:
        entry = json.loads(_path(layer).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(entry, dict) or entry.get("layer") != layer or not isinstance(entry.get("candidate"), str):
        return None
    return str(entry["candidate"])


def remember(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, candidate: str) -> None:
    """Leaves a choice for every later process; those that run already have made theirs. Raises OSError."""
    layer = _layer(problem, pass_, device)
    path = _path(layer)
    for folder in (cache_directory(), path.parent):  # each private: `parents` would leave those above to the umask
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Written aside, then renamed: nobody ever reads half an entry.
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"layer": layer, "candidate": candidate}, file, indent=2)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def discard(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> None:
    """Removes the choice of a layer, where there is one. Raises OSError."""
    _path(_layer(problem, pass_, device)).unlink(missing_ok=True)


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
    """What a choice belongs to, as text, the kernels' text included.

    As at run time, gradients know no bias, the weight's gradient no memory format, and PyTorch's results in double
    precision are never channels_last.
    """
    last = problem.channels_last and pass_ is not Pass.WEIGHT_GRAD and problem.dtype != "float64"
    problem = replace(standard(problem), bias=problem.bias and pass_ is Pass.FORWARD, channels_last=last)
    where = f"{device.arch} with {device.multiprocessors} multiprocessors"
    return f"{pass_.value} of {problem!r} on {where}, kernels {_kernels()}"


@lru_cache(maxsize=1)
def _kernels() -> str:
    """A digest of all kernels: a choice holds for those that were measured."""
    files = sorted(KERNELS.glob("**/*.cu*"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _path(layer: str) -> Path:
    return directory() / f"{hashlib.sha256(layer.encode()).hexdigest()}.json"
