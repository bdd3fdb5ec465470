"""Rankings on disk: what one process has predicted, a later one reads. It is the same with and without them.

A ranking is a list of places in a list that the reader makes for itself, so that a file that is damaged or made up can
offer nothing but legal variants.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from polyphase.entries import digest, read, write

_FOLDER = "rankings"
_PACKAGE = Path(__file__).parent.parent
_FILES = [*_PACKAGE.glob("*.py"), *_PACKAGE.glob("algorithms/*.py")]
# A digest of all that predicts, as it is when it is loaded; None where there are no sources to tell planners apart by.
_PLANNER = digest(_FILES) if _FILES else None


def kept(about: str, fits: Callable[[object], bool], rank: Callable[[], list[list[int]]]) -> list[list[int]]:
    """What ``rank`` gives, or gave an earlier process that ranked the same. What was read must be what ``fits``.

    With ``POLYPHASE_TUNING=0`` in the environment nothing is read or written; nor where the disk does not let us.
    """
    if os.environ.get("POLYPHASE_TUNING") == "0" or _PLANNER is None:
        return rank()
    about = f"{about}, planner {_PLANNER}"
    found = read(_FOLDER, about)
    if isinstance(found, list) and found and all(map(fits, found)) and len(set(map(tuple, found))) == len(found):
        return found
    ranking = rank()
    with contextlib.suppress(OSError, RuntimeError):  # the latter where there is no home folder
        write(_FOLDER, about, ranking)
    return ranking
