"""Work shared out among processes that plan: Python's own, for as long as planning takes all of one core."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Starting a process takes as long as this many plans.
_ITEMS_PER_PROCESS = 16


def each(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, rankings: bool = False
) -> Iterator[Result]:
    """``function`` of every item, in their order, in ``jobs`` processes where there are many items.

    Without ``rankings``, those on disk are neither read nor written meanwhile: what is planned is what this planner
    says.
    """
    collect_seldom()
    jobs = min(jobs, len(items) // _ITEMS_PER_PROCESS)
    if jobs < 2:
        with contextlib.nullcontext() if rankings else _without_rankings():
            yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(rankings,)) as pool:
        yield from pool.map(function, items, chunksize=4)


def collect_seldom() -> None:
    """Has Python look for garbage less often: a fifth of the time in which many layers are planned went to that.

    What is planned lives as long as the planner's caches.
    """
    gc.set_threshold(50_000, 20, 100)


def _begin(rankings: bool) -> None:
    collect_seldom()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    if not rankings:
        os.environ["POLYPHASE_TUNING"] = "0"


@contextlib.contextmanager
def _without_rankings() -> Iterator[None]:
    before = os.environ.get("POLYPHASE_TUNING")
    os.environ["POLYPHASE_TUNING"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["POLYPHASE_TUNING"]
        else:
            os.environ["POLYPHASE_TUNING"] = before
