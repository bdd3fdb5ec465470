"""Compiles many kernels before they are launched, in several processes: within one, NVRTC may serialise."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from polyphase.errors import PolyphaseError, UnsupportedError
from polyphase.jit.compiler import cache, compile_kernel, is_cached
from polyphase.jit.source import KernelSource

# A process takes as long to start as some kernels to compile, and memory.
_KERNELS_PER_PROCESS = 4
_MOST_PROCESSES = 32


def compile_ahead(
    sources: Iterable[KernelSource], arch: str, tell: Callable[[int, int], object] = lambda done, count: None
) -> None:
    """Fills the cache on disk with the kernels that it lacks, and stops if the disk does not store them.

    ``tell`` is called with the number of kernels done, and of all to do. No failure is raised here: a kernel that is
    missing afterwards is compiled when it is launched, or fails then.
    """
    with contextlib.suppress(UnsupportedError, BrokenProcessPool, OSError):
        if cache().problem is not None:
            return
        jobs = [(source, arch) for source in dict.fromkeys(sources) if not is_cached(source, arch)]
        count = min(_processors(), _MOST_PROCESSES, len(jobs) // _KERNELS_PER_PROCESS)
        if count < 2:
            return
        tell(0, len(jobs))
        # CUDA does not survive a fork. Only the waiting process handles Ctrl-C.
        context, ignored = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=signal.signal, initargs=ignored)
        try:
            for done, kept in enumerate(pool.map(_compile, jobs), start=1):
                if not kept:
                    return
                tell(done, len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(job: tuple[KernelSource, str]) -> bool:
    """Compiles a kernel; whether the disk stores kernels. One that does not compile does not count against the disk."""
    with contextlib.suppress(PolyphaseError):
        compile_kernel(*job)
    return cache().problem is None


def _processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
