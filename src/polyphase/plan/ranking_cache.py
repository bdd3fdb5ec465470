"""Rankings on disk, by which a later process need not predict again. They change no choice.

A ranking is a list of indices into a list that the reader makes itself, so that a damaged or forged file can offer
only legal configs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

from polyphase.plan.entries import digest, read, write

_Config = TypeVar("_Config", bound=Hashable)

_FOLDER = "rankings"
_PACKAGE = Path(__file__).parent.parent
_ROOMS = ("costs", "problem", "plan", "program", "schedules")
_FILES = [file for room in _ROOMS for kind in ("py", "json") for file in _PACKAGE.glob(f"{room}/**/*.{kind}")]
# A digest of the sources that predictions depend on, when they are loaded; None if there are no sources.
_PLANNER = digest(_FILES) if _FILES else None


def kept(about: str, configs: Callable[[], Sequence[_Config]], rank: Callable[[], list[_Config]]) -> list[_Config]:
    """Some of ``configs``, in the order that ``rank`` returns, or returned in an earlier process for the same.

    With ``POLYPHASE_TUNING=0`` in the environment nothing is read or written; nor if the disk refuses.
    """
    if os.environ.get("POLYPHASE_TUNING") == "0" or _PLANNER is None:
        return rank()
    about = f"{about}, planner {_PLANNER}"
    found, offered = read(_FOLDER, about), configs()
    if _are_places(found, len(offered)):
        return [offered[place] for place in found]
    ranking = rank()
    places = {config: place for place, config in enumerate(offered)}
    with contextlib.suppress(OSError):
        write(_FOLDER, about, [places[config] for config in ranking])
    return ranking


def _are_places(found: object, count: int) -> bool:
    """Whether this is a list of distinct indices into a list of ``count`` elements."""
    if not isinstance(found, list) or not all(isinstance(place, int) and 0 <= place < count for place in found):
        return False
    return 0 < len(found) == len(set(found))
