"""GPU time of calls, captured as CUDA graphs, so that no host time is counted.

A graph holds several calls in a row, as layers of a model follow each other, so that its launch is shared by all of
them. Before each replay a buffer larger than any L2 is written. No call finds another call's data in cache: each has
its own operands, or enough other data is read between two calls on the same operands.

On a CPU a clock times the calls, so that this module also runs without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from polyphase.bench.operands import Operands, make_operands
from polyphase.bench.timing import Timer, Timing
from polyphase.problem import ConvTransposeProblem

GRAPH_SECONDS = 0.3e-3
"""What a graph takes at least at the speed of the floor, so that its launch, a few microseconds, does not count."""
MOST_CALLS = 16
LONGEST_SECONDS = 20e-3
"""What a graph of more than one call takes at most."""
SMALLEST_L2_BYTES = 64 << 20


@dataclass(frozen=True)
class Rotation:
    """How many calls of a pass a graph holds, and on how many sets of operands: more than L2 holds, or one a call."""

    calls: int
    sets: int

    @classmethod
    def of(cls, problem: ConvTransposeProblem, floor_ms: float, device: torch.device) -> Rotation:
        """That of a layer whose passes take ``floor_ms`` at least."""
        if device.type != "cuda":
            return cls(1, 1)
        calls = min(MOST_CALLS, math.ceil(1e3 * GRAPH_SECONDS / floor_ms))
        l2 = max(SMALLEST_L2_BYTES, torch.cuda.get_device_properties(device).L2_cache_size)
        return cls(calls, min(calls, 1 + math.ceil(2 * l2 / problem.bytes)))

    def operands(self, problem: ConvTransposeProblem, device: torch.device) -> list[Operands]:
        """The sets, each of other values."""
        return [make_operands(problem, device, seed) for seed in range(self.sets)]


class GraphTimer:
    """Times calls on one device, by graphs where that is a GPU. It owns the buffer that flushes the cache."""

    def __init__(self, device: torch.device) -> None:
        self._timer = Timer(device, repetitions=7, budget_seconds=0.05)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def measure(self, calls: Sequence[Callable[[], object]], count: int) -> Timing:
        """Time one call, the mean of ``count`` of them on the sets in turn; of fewer, where they take long.

        Each is made before it is timed: it may compile, or search.
        """
        if self._stream is None:
            return self._timer.measure(calls[0])
        self._timer.synchronize()  # the operands are made on another stream
        with torch.cuda.stream(self._stream):
            calls[0]()
            seconds = self._timer.clock(calls[0])
            count = max(1, min(count, int(LONGEST_SECONDS / seconds)))
            for call in calls[1:count]:
                call()
        graph = self._captured([calls[index % len(calls)] for index in range(count)])
        timing = self._timer.measure(graph.replay, warmups=1)
        graph.reset()
        return Timing(timing.ms / count, timing.p10 / count, timing.p90 / count, timing.repetitions)

    def _captured(self, calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        """The calls in a row; all results are kept to the end, so that each is written to memory of its own."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            results = [call() for call in calls]
        del results
        return graph
