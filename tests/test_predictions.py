"""What predictions count. Whether they are right, only a GPU can tell (docs/notebook.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyphase.costs import costs
from polyphase.plan.shortlist import candidates
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.cells import Gather
from polyphase.schedules.direct.tiled import DirectTiled
from polyphase.schedules.direct.tiled_cost import Counts, cycles_of_waves

make = ConvTransposeProblem.make
H200 = DeviceInfo.for_arch("sm_90a")


def test_direct_kernel_counts_rounds() -> None:
    """Few blocks take as long as their own warps need, and those that are left over have a round of their own."""
    layer = make((8, 2, 96, 128), 2, 4, 2, 1)
    layouts = Layouts.dense(layer)
    first, *others = candidates(DirectTiled(), layer, Pass.FORWARD, H200, layouts)
    counts = Counts.of(Gather.of(layer, Pass.FORWARD, layouts), first.config)
    full = H200.multiprocessors * first.config.min_blocks
    assert first.config.min_blocks > 1

    def cycles(items: int) -> float:
        return cycles_of_waves(first.config, counts, items, H200.multiprocessors, costs("direct_tiled", H200))

    assert cycles(3 * full) == pytest.approx(3 * cycles(full))
    assert cycles(full + 1) == pytest.approx(cycles(full) + cycles(1))
    assert cycles(1) == cycles(H200.multiprocessors)
    assert cycles(1) > cycles(full) / first.config.min_blocks  # latencies are bare
    # Where blocks are few, those of twice the threads are faster; where there are enough, the first remain the first.
    assert any(each.config.threads == 2 * first.config.threads and each.seconds < first.seconds for each in others)
    many = list(candidates(DirectTiled(), replace(layer, batch=4096), Pass.FORWARD, H200, layouts))
    assert many[0].config == first.config
    assert many[0].seconds == min(each.seconds for each in many)
