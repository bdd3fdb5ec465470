"""How long a call takes: CUDA events around it with a cold L2, or a clock on the CPU.

Before each timed call a buffer larger than any L2 is written, so that a call finds in cache what it would find between
two other layers: nothing. The writes also keep the GPU busy while the host prepares the next call, so that what is
measured is the GPU's time and not Python's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20
HEAD_START = 8
"""Flushes queued before the first timed call: about half a millisecond in which the host gets ahead of the GPU."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, and the 10th and 90th percentile as its spread."""

    ms: float
    p10: float
    p90: float
    repetitions: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """The summary of at least one sample in milliseconds."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


class Timer:
    """Times calls on one device. Make one and keep it: it owns the buffer that flushes the cache."""

    def __init__(self, device: torch.device, repetitions: int = 20, budget_seconds: float = 0.2) -> None:
        self.device = device
        self.repetitions = repetitions
        self.budget_seconds = budget_seconds
        self._flush = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else torch.empty(0)
        )

    def measure(self, call: Callable[[], object], warmups: int = 2) -> Timing:
        """Time ``call``: ``repetitions`` times, or as often as ``budget_seconds`` allow, but at least five times.

        ``warmups`` calls come first; they may compile, and their time is not counted.
        """
        for _ in range(warmups):
            call()
        estimate = self.clock(call)
        wanted = min(self.repetitions, int(self.budget_seconds / max(estimate, 1e-9)))
        count = max(wanted, min(5, self.repetitions))
        return Timing.of(self._samples(call, count))

    def means(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Mean milliseconds of each call over a hundred, in four rounds in turn, so that none meets other clocks."""
        for call in calls:
            for _ in range(3):
                call()
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(4):
            for call, times in zip(calls, samples):
                times += self._samples(call, 25)
        return [statistics.fmean(times) for times in samples]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clock(self, call: Callable[[], object]) -> float:
        """Seconds of one call, the host's among them."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def _samples(self, call: Callable[[], object], count: int) -> list[float]:
        """Milliseconds of each of ``count`` calls."""
        if self.device.type != "cuda":
            return [1e3 * self.clock(call) for _ in range(count)]
        with torch.cuda.device(self.device):
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
            for _ in range(HEAD_START):
                self._flush.zero_()
            for start, end in zip(starts, ends):
                self._flush.zero_()
                start.record()
                call()
                end.record()
            self.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends)]
