"""Shared by both TMA kernels: stages and cycles of ``mainloop/k_major_product.cuh``."""

from __future__ import annotations

from polyphase.costs import Costs
from polyphase.schedules.cost import overlapped_time
from polyphase.schedules.tensor_cores import wgmma_cycles

#: Consumer warpgroups; one more warpgroup is the producer.
CONSUMER_GROUPS = 2
THREADS = 128 * (CONSUMER_GROUPS + 1)

#: Stages of a split, at least.
LEAST_STAGES = 4


def stage_cycles(
    row_tiles: int, columns: int, pitch: int, parts: int, loading: float, terms: Costs, taps: float = 1.0
) -> float:
    """Predicted cycles of a multiprocessor for a stage whose rows have ``pitch`` bytes; TMA takes ``loading`` of them.

    Each of a stage's ``taps`` has products of its own, which wait for the previous tap's.
    """
    operations = CONSUMER_GROUPS * row_tiles * pitch / 32 * (3 if parts == 2 else 1)
    products = terms.product * operations * wgmma_cycles(columns)
    cycles: float = overlapped_time(taps * products, loading, terms.overlap) + taps * terms.stage
    return cycles
