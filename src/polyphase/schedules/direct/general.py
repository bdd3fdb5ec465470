"""The direct gather kernel without limits, ``kernels/direct_general.cu``: a thread computes one destination element."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.params import params_of
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import cost_seconds
from polyphase.schedules.schedule import Cost, Schedule

_DST_TOGETHER = 4  # channels of a thread, if there are as many


class GeneralConfig(NamedTuple):
    """The compile-time shape of ``direct_general.cu``."""

    dst_per_thread: int


class DirectGeneral(Schedule):
    """One destination element a thread: any layer."""

    name = "direct_general"
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)
    any_constants = True
    _THREADS = 256

    def ranked_at(
        self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
    ) -> tuple[ConvTransposeProblem, Layouts]:
        return problem, layouts  # there are two configs: the actual size can have the better one

    def configs(
        self, at: tuple[ConvTransposeProblem, Layouts], pass_: Pass, device: DeviceInfo
    ) -> Iterator[GeneralConfig]:
        gather = Gather.of(at[0], pass_, at[1])
        if not gather.dst.channels_last and gather.dst_channels >= _DST_TOGETHER:
            yield GeneralConfig(_DST_TOGETHER)
        yield GeneralConfig(1)

    def seconds(
        self, at: tuple[ConvTransposeProblem, Layouts], pass_: Pass, device: DeviceInfo, config: GeneralConfig
    ) -> float:
        return self.cost(at[0], pass_, device, at[1], config)[0]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GeneralConfig
    ) -> Cost:
        gather, dst = Gather.of(problem, pass_, layouts), config.dst_per_thread
        terms = costs("direct_general", device)
        steps = gather.src_channels * gather.taps / gather.phases
        threads = math.prod(gather.dst.shape) / dst
        # Per step: the loop, one source element and `dst` weights; neighbouring lanes' weights are not adjacent.
        rows = 0.0 if gather.forward else steps / gather.axes[2].kernel  # rows of forward passes have few taps
        instructions = 150 + steps * (14 + 4 * dst) + rows * terms.input_grad_row
        wavefronts = steps * (_lines(gather) + 3 * dst)
        cycles = threads / 32 * max(instructions / 4, wavefronts)
        if problem.channels_last and not gather.forward:
            cycles *= terms.input_grad_last
        seconds, bound = cost_seconds(problem, device, cycles)
        return max(seconds, steps * terms.step / device.clock_hz), bound  # with few threads, the latency of one

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GeneralConfig
    ) -> Program:
        gather = Gather.of(problem, pass_, layouts)
        source = KernelSource(
            kernel=self.name,
            dtype=gather.dtype,
            wide_offsets=True,
            constants=gather.constants(ROUNDED=gather.rounded, DST_PER_THREAD=config.dst_per_thread, MIN_BLOCKS=4),
        )
        blocks = math.ceil(gather.dst_channels / config.dst_per_thread) * gather.groups
        threads = problem.batch * blocks * math.prod(gather.dst.shape[2:])
        grid = math.ceil(threads / self._THREADS)
        params = params_of(source).pack(src=gather.src, dst=gather.dst, batch=problem.batch, groups=gather.groups)
        main = Step(
            source=source,
            grid=(grid, 1, 1),
            block=self._THREADS,
            shared_bytes=0,
            params=params,
        )
        return assemble(problem, pass_, main)


def _lines(gather: Gather) -> float:
    """Lines that a warp's load of the source touches: input gradients read elements a stride apart."""
    if gather.forward or gather.dst.channels_last:
        return 2.0
    apart = gather.cell_axes[2].src * gather.src.strides[4] * DTYPE_BYTES[gather.dtype]
    return max(2.0, min(32.0, 32 * apart / 128, gather.dst.shape[4]))
