"""Shared by both TMA kernels: tiles, stages and cycles of ``mainloop/k_major_product.cuh``."""

from __future__ import annotations

import math
from collections.abc import Callable

from polyphase.costs import Costs
from polyphase.problem.device import DeviceInfo
from polyphase.schedules.cost import overlapped_time

#: Consumer warpgroups; one more warpgroup is the producer.
CONSUMER_GROUPS = 2
THREADS = 128 * (CONSUMER_GROUPS + 1)

#: N of a wgmma, at most.
MOST_COLUMNS = 256

#: Stages of the pipeline, at least.
LEAST_PIPELINE = 3

#: Stages of a split, at least.
LEAST_STAGES = 4

_MOST_PIPELINE = 8
_DECLARED = 1024  # bytes of shared memory beside the stages


def pipeline_stages(stage_bytes: int, device: DeviceInfo, staged: int = 0) -> int:
    """Stages of the pipeline in shared memory, beside ``staged`` bytes for results."""
    return min(_MOST_PIPELINE, (device.shared_bytes_of(1) - _DECLARED - staged) // stage_bytes)


def stage_cycles(
    row_tiles: int, columns: int, pitch: int, parts: int, loading: float, terms: Costs, taps: float = 1.0
) -> float:
    """Predicted cycles of a multiprocessor for a stage whose rows have ``pitch`` bytes; TMA takes ``loading`` of them.

    Narrow products take as long as shared memory is read for their rows. Each of a stage's ``taps`` has products of its
    own, which wait for the previous tap's.
    """
    operations = CONSUMER_GROUPS * row_tiles * pitch / 32 * (3 if parts == 2 else 1)
    products = terms.product * operations * max(columns / 2, 16 + columns / 4)
    cycles: float = overlapped_time(taps * products, loading, terms.overlap) + taps * terms.stage
    return cycles


def whole_waves(waves: float) -> float:
    """Waves of work tiles on all multiprocessors; a few waves are rounded up."""
    return math.ceil(waves) if waves < 8 else waves + 0.5


def waves_of_unequal(waves: float, most: float) -> float:
    """Waves of work tiles of unequal length, the longest of them ``most`` times the mean.

    Blocks end half of a longest one apart; they never take longer than if all were the longest.
    """
    whole = whole_waves(waves)
    return max(whole, min(whole * most, waves + most / 2))


def best_splits(seconds: Callable[[int], float], most: int, work_tiles: int, device: DeviceInfo) -> int:
    """The fastest split-K of ``work_tiles``: at most ``most`` splits, and at most two waves of blocks."""
    most = max(1, min(most, 2 * device.multiprocessors // max(1, work_tiles)))
    return min(range(1, most + 1), key=lambda splits: (seconds(splits), splits))
