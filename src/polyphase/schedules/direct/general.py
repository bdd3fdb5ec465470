"""The direct gather kernel without limits, ``kernels/direct_general.cu``.

A thread computes a few destination elements. It serves layers of long kernels and strides with few source channels,
whose forward pass is bound by writing: neighbours of one cell share source elements, cells share weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import cost_seconds
from polyphase.schedules.schedule import Cost, Schedule

_THREADS = 256
_DST_TOGETHER = 4  # channels of a thread, if there are as many
_MOST_CELLS = 8
_APART = 32  # least elements between a thread's cells
_MOST_SOURCES = 32  # source channels of a group, for threads with neighbours: their sums have one level
_SUMS = (16, 32)  # accumulators of a thread that owns several elements of a channel


class GeneralConfig(NamedTuple):
    """The compile-time shape of ``direct_general.cu``: channels, neighbours and cells of a thread."""

    dst_per_thread: int
    run: int = 1
    cells: int = 1

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.dst_per_thread * self.run * self.cells


class DirectGeneral(Schedule):
    """A few destination elements a thread: any layer."""

    name = "direct_general"
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)
    any_constants = True

    def ranked_at(
        self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
    ) -> tuple[ConvTransposeProblem, Layouts]:
        return problem, layouts  # there are few configs: the actual size can have the best one

    def configs(
        self, at: tuple[ConvTransposeProblem, Layouts], pass_: Pass, device: DeviceInfo
    ) -> Iterator[GeneralConfig]:
        gather = Gather.of(at[0], pass_, at[1])
        if not gather.dst.channels_last and gather.dst_channels >= _DST_TOGETHER:
            yield GeneralConfig(_DST_TOGETHER)
        yield GeneralConfig(1)
        run, powers = _most_neighbours(gather), (1, 2, 4, 8)
        if run > 1:
            shapes = (GeneralConfig(dst, run, cells) for dst in powers for cells in powers if cells <= _cells(gather))
            yield from (each for each in shapes if each.sums in _SUMS and each.dst_per_thread <= gather.dst_channels)

    def seconds(
        self, at: tuple[ConvTransposeProblem, Layouts], pass_: Pass, device: DeviceInfo, config: GeneralConfig
    ) -> float:
        return self.cost(at[0], pass_, device, at[1], config)[0]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GeneralConfig
    ) -> Cost:
        gather, dst = Gather.of(problem, pass_, layouts), config.dst_per_thread
        terms, run = costs("direct_general", device), _neighbours(gather, config)
        config = config._replace(run=run)
        steps = float(gather.src_channels * gather.taps)
        if gather.forward:  # lanes of a warp own different phases of the width, and wait for those with most taps
            depth, height, width = gather.axes
            steps *= math.ceil(width.kernel / width.tap_step) / (width.kernel * depth.stride * height.stride)
        threads = math.prod(gather.dst.shape) / config.sums
        if config.run > 1 or config.cells > 1:
            cycles = threads / 32 * terms.runs * _slots(gather, config, steps, terms)
        else:
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
        gather, (dst, _, cells) = Gather.of(problem, pass_, layouts), config
        _, _, depth, height, width = gather.dst.shape
        run = _neighbours(gather, config)
        cell = gather.cell_axes[2].dst
        apart = math.ceil(math.ceil(width / cell) / cells) * cell if cells > 1 else 0
        columns = (apart or width) // run
        blocks = math.ceil(gather.dst_channels / dst) * gather.groups
        threads = problem.batch * blocks * depth * height * columns
        source = KernelSource(
            kernel=self.name,
            dtype=gather.dtype,
            wide_offsets=True,
            constants=gather.constants(
                ROUNDED=gather.rounded,
                DST_PER_THREAD=dst,
                RUN=run,
                CELLS=cells,
                MIN_BLOCKS=4 if config.sums <= _SUMS[0] else 3,
            ),
        )
        params = {
            "src": gather.src,
            "dst": gather.dst,
            "blocks": blocks,
            "slabs": depth,
            "rows": height,
            "columns": columns,
            "batch": problem.batch,
            "apart": apart,
        }
        return assemble(problem, pass_, main_step(source, math.ceil(threads / _THREADS), _THREADS, 0, params))


def _most_neighbours(gather: Gather) -> int:
    """Neighbours along the width that are in one cell, whose taps are neighbours, too; by the layer's constants."""
    axis = gather.axes[2]
    few = gather.src_channels <= _MOST_SOURCES and gather.dtype != "float64"
    if not gather.forward or gather.dst.channels_last or axis.dilation > 1 or not few:
        return 1
    return math.gcd(16 // DTYPE_BYTES[gather.dtype], axis.kernel, axis.stride, axis.padding)


def _neighbours(gather: Gather, config: GeneralConfig) -> int:
    """Neighbours of a thread, which lie side by side in whole vectors: as the config says, or fewer."""
    dst = gather.dst
    if dst.strides[4] != 1 or gather.weight_channels_last or not gather.aligned:
        return 1
    return math.gcd(math.gcd(config.run, dst.shape[4]), dst.apart(4))


def _cells(gather: Gather) -> int:
    """Most cells of a thread: a row has as many, and neighbouring threads have neighbouring elements."""
    width = gather.dst.shape[4]
    return min(_MOST_CELLS, math.ceil(width / gather.cell_axes[2].dst), max(1, width // _APART))


def _slots(gather: Gather, config: GeneralConfig, steps: float, terms: Costs) -> float:
    """Cycles of a warp of threads with neighbours: issue slots of its instructions, and wavefronts of its loads."""
    dst, run, cells = config
    size, width = DTYPE_BYTES[gather.dtype], gather.axes[2]
    rows = steps / math.ceil(width.kernel / width.tap_step)
    widened = run if size == 2 else 0
    step = 25 + 8 * cells + dst * (3 + widened) + config.sums
    instructions = 110 + rows * 35 + steps * step + dst * cells * (6 + 2 * run)
    distinct = min(32, max(1, width.stride // run))  # lanes of one phase share its weights
    wavefronts = steps * (cells + terms.weight_line * dst * max(1.0, distinct * run * size / 128))
    return math.hypot(instructions / 4, wavefronts)


def _lines(gather: Gather) -> float:
    """Lines that a warp's load of the source touches: input gradients read elements a stride apart."""
    if gather.forward or gather.dst.channels_last:
        return 2.0
    apart = gather.cell_axes[2].src * gather.src.strides[4] * DTYPE_BYTES[gather.dtype]
    return max(2.0, min(32.0, 32 * apart / 128, gather.dst.shape[4]))
