"""The direct gather kernel without limits, ``kernels/gather_general.cu``: one destination element a thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.jit.source import KernelSource
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.params import params_of
from polyphase.program.program import Launch
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import cost_seconds
from polyphase.schedules.schedule import Candidate

# Measured over predicted time of input gradients in channels_last (docs/performance.md).
_MEASURED_INPUT_GRAD_LAST = 2.3
_STEP_CYCLES = 450.0  # of a thread, for a source element and its weights; measured on an H200


class GeneralVariant(NamedTuple):
    """The compile-time shape of ``gather_general.cu``."""

    dst_per_thread: int


class GatherGeneral:
    """One destination element a thread: any layer."""

    name = "gather_general"
    any_size = True
    adapts = False
    _THREADS = 256

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if pass_ is Pass.WEIGHT_GRAD:
            return "computes the forward pass and the input gradient only"
        return None

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> Iterator[Candidate]:
        gather = Gather.of(problem, pass_, layouts)
        result = []
        for dst in (1, 4):
            if dst > 1 and (gather.dst.channels_last or gather.dst_channels < dst):
                continue
            steps = gather.src_channels * gather.taps / gather.phases
            threads = math.prod(gather.dst.shape) / dst
            # Per step: the loop, one source element and `dst` weights; weights of neighbouring lanes lie apart.
            instructions = 150 + steps * (14 + 4 * dst)
            wavefronts = steps * (2 + 3 * dst)
            cycles = threads / 32 * max(instructions / 4, wavefronts)
            if problem.channels_last and not gather.forward:
                cycles *= _MEASURED_INPUT_GRAD_LAST
            seconds, bound = cost_seconds(problem, device, cycles)
            seconds = max(seconds, steps * _STEP_CYCLES / device.clock_hz)  # where threads are few, one's own
            result.append(Candidate(self.name, GeneralVariant(dst), seconds, bound))
        yield from sorted(result, key=lambda candidate: (candidate.seconds, -candidate.variant.dst_per_thread))

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: GeneralVariant
    ) -> Launch:
        gather = Gather.of(problem, pass_, layouts)
        source = KernelSource(
            kernel=self.name,
            dtype=gather.dtype,
            wide_offsets=True,
            constants=gather.constants(ROUNDED=gather.rounded, DST_PER_THREAD=variant.dst_per_thread, MIN_BLOCKS=4),
        )
        blocks = math.ceil(gather.dst_channels / variant.dst_per_thread) * gather.groups
        threads = problem.batch * blocks * math.prod(gather.dst.shape[2:])
        grid = math.ceil(threads / self._THREADS)
        geometry = params_of(source).pack(src=gather.src, dst=gather.dst, batch=problem.batch, groups=gather.groups)
        return Launch(source, (grid, 1, 1), self._THREADS, 0, geometry)
