"""The direct weight gradient of long kernels with large strides: ``kernels/direct_wgrad_long.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass, accumulator_bytes
from polyphase.problem.device import REGISTERS, DeviceInfo
from polyphase.problem.integers import equal_parts, parted, round_up
from polyphase.problem.layouts import Layouts, five
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import sides_of
from polyphase.schedules.cost import overlapped_time, slower_of, waves_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import affordable_planes, constants_of, layer_constants, splits_in_few_waves

_THREADS = 128  # most threads of a block: larger blocks fill the registers worse
_QUAD = 4  # elements of the output gradient in a vectorised load
_LEAST_RESIDUES = 8  # taps within a stride; with fewer, loads of neighbouring threads are not coalesced
_MAX_SUMS = 128  # most registers for a thread's sums
_MAX_HELD = 16  # most input channels of a thread, and most taps a stride apart
_MAX_UNROLLED = 1024  # most products of a step, in straight-line code
_MAX_REGISTERS = 216  # most registers by estimate
_MAX_SUMS_AND_LOADS = 160  # sums and loads of x, which the compiler moves to a step's beginning; more would spill
_LOADED_CHANNELS = 4  # input channels with elements in a thread's registers at once
_CHAIN = 2048  # terms of one chain
_LEAST_STEPS = 4  # least steps of a thread in a split


class LongConfig(NamedTuple):
    """The compile-time shape of a kernel; ``direct_wgrad_long.cu`` says what the names mean."""

    vector: int
    positions: int
    in_held: int
    taps_held: int
    lanes: int
    walkers: int
    min_blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block, in whole warps."""
        return round_up(self.lanes * self.walkers, 32)

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.in_held * self.taps_held * self.vector

    @property
    def x_met(self) -> int:
        """Positions of x that a step reads."""
        return self.positions + self.taps_held - 1


class DirectWgradLong(Schedule):
    """A thread sums neighbouring taps, several of them a stride apart, for several input channels."""

    name = "direct_wgrad_long"
    passes = (Pass.WEIGHT_GRAD,)
    adapts = True
    offered = 6

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        width = problem.axes3[2]
        if width.dilation > 1 and width.kernel > 1:
            return "needs taps without dilation along the width"
        if _residues(problem) < _LEAST_RESIDUES:
            return f"needs kernel and stride of at least {_LEAST_RESIDUES} along the width, not {_residues(problem)}"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return "columns of the output gradient are more than 32 bits count"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        return standard(problem) if layouts.output[4] == 1 else None

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[LongConfig]:
        return sorted(legal_configs(at))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: LongConfig
    ) -> Cost | None:
        width = problem.axes3[2]
        columns = problem.output_size[-1] + 2 * (config.x_met + 1) * width.stride + width.kernel + width.padding
        if max(columns, _steps(problem, config)[0], _pixel(problem, layouts) * 2 * config.x_met) >= 2**31:
            return None
        return _estimate(problem, config, device, _piece(problem, layouts))

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: LongConfig
    ) -> Program:
        steps, along = _steps(problem, config)
        piece = _piece(problem, layouts)
        length, splits = parted(steps, _splits(problem, config, device, piece))
        source = KernelSource(
            kernel=self.name,
            dtype=problem.dtype,
            wide_offsets=True,
            constants=(
                *layer_constants(problem, pass_),
                *constants_of(config),
                ("PIECE", piece),
                ("X_PIXEL", _pixel(problem, layouts)),
            ),
        )
        x, grad = sides_of(problem, layouts)
        params = {
            "x": x,
            "g": grad,
            "groups": problem.groups,
            "column_blocks": math.ceil(_columns(problem, config, piece) / config.lanes),
            "steps": steps,
            "split_length": length,
            "flush": config.walkers * max(1, _CHAIN // config.positions),
            "along": along,
            "plane": problem.elements[1],
        }
        blocks = _blocks(problem, config, piece) * splits
        main = main_step(source, blocks, config.threads, _shared_bytes(problem, config), params)
        return assemble(problem, pass_, main, splits=splits)


def _residues(problem: ConvTransposeProblem) -> int:
    """Taps along the width within one stride."""
    width = problem.axes3[2]
    return min(width.kernel, width.stride)


def _taps_along(problem: ConvTransposeProblem) -> int:
    """Most taps along the width that are a stride apart."""
    width = problem.axes3[2]
    return math.ceil(width.kernel / width.stride)


def _pixel(problem: ConvTransposeProblem, layouts: Layouts) -> int:
    """Elements from a pixel of the input to its neighbour along the width; 1 if there is none."""
    return layouts.input[4] if problem.input_size[-1] > 1 else 1


def _piece(problem: ConvTransposeProblem, layouts: Layouts) -> int:
    """Elements of a load of the output gradient: `_QUAD` if all loads are aligned, else 1."""
    batch, channel, depth, height, _ = layouts.output
    multiples = problem.axes3[2].stride, problem.output_size[-1], batch, channel, depth, height
    fits = DTYPE_BYTES[problem.dtype] * _QUAD <= 16
    return _QUAD if layouts.aligned and fits and all(value % _QUAD == 0 for value in multiples) else 1


def _steps(problem: ConvTransposeProblem, config: LongConfig) -> tuple[int, tuple[int, int, int]]:
    """Steps of all images; and steps of a row, rows of a slab, slabs of an image."""
    depth, height, width = five(problem.input_shape)[2:]
    along = math.ceil((width + config.taps_held - 1) / config.positions) if width else 0
    return problem.batch * depth * height * along, (max(1, along), max(1, height), max(1, depth))


def _columns(problem: ConvTransposeProblem, config: LongConfig, piece: int) -> int:
    """Columns of a group."""
    depth, height, width = problem.axes3
    skew = -width.padding % piece
    lines = problem.out_channels_per_group * depth.kernel * height.kernel
    return lines * math.ceil((_residues(problem) + skew) / config.vector)


def _row_blocks(problem: ConvTransposeProblem, config: LongConfig) -> int:
    """Blocks that read the same elements of the output gradient."""
    channels = math.ceil(problem.in_channels_per_group / config.in_held)
    return channels * math.ceil(_taps_along(problem) / config.taps_held)


def _blocks(problem: ConvTransposeProblem, config: LongConfig, piece: int) -> int:
    """Blocks of a split."""
    columns = math.ceil(_columns(problem, config, piece) / config.lanes)
    return problem.groups * columns * _row_blocks(problem, config)


def _splits(problem: ConvTransposeProblem, config: LongConfig, device: DeviceInfo, piece: int) -> int:
    """Split-K count of the steps."""
    blocks, steps = _blocks(problem, config, piece), _steps(problem, config)[0]
    resident = device.multiprocessors * config.min_blocks
    return splits_in_few_waves(blocks, resident, steps, _LEAST_STEPS, affordable_planes(problem), config.walkers)


def _shared_bytes(problem: ConvTransposeProblem, config: LongConfig) -> int:
    """Two rows of sums."""
    return 2 * config.threads * config.vector * accumulator_bytes(problem.dtype)


def legal_configs(problem: ConvTransposeProblem) -> Iterator[LongConfig]:
    """Every config whose sums fit a thread's registers."""
    words, size = accumulator_bytes(problem.dtype) // 4, DTYPE_BYTES[problem.dtype]
    channels = [held for held in equal_parts(problem.in_channels_per_group) if held <= _MAX_HELD]
    taps = [held for held in equal_parts(_taps_along(problem)) if held <= _MAX_HELD]
    vectors = (_QUAD, 2 * _QUAD) if size == 2 else (_QUAD,)
    for vector, positions, in_held, taps_held in itertools.product(vectors, (2, 4, 8), channels, taps):
        config = LongConfig(vector, positions, in_held, taps_held, 1, 1, 1)
        loaded = 2 * positions * vector * size // 4
        met = config.x_met * min(in_held, _LOADED_CHANNELS)
        registers = 40 + words * (config.sums + met) + loaded + (positions * vector if size == 2 else 0)
        if words * config.sums > _MAX_SUMS or words * config.sums * positions > _MAX_UNROLLED:
            continue
        if registers > _MAX_REGISTERS or words * (config.sums + in_held * config.x_met) > _MAX_SUMS_AND_LOADS:
            continue
        columns = _columns(problem, config, _QUAD)
        lanes = math.ceil(columns / math.ceil(columns / _THREADS))
        config = config._replace(lanes=lanes, walkers=_THREADS // lanes)
        yield config._replace(min_blocks=max(1, min(12, REGISTERS // (config.threads * round_up(registers, 8)))))


def _step(problem: ConvTransposeProblem, config: LongConfig, terms: Costs, piece: int) -> tuple[float, float]:
    """Issue slots of a warp's step, and lines that its loads touch."""
    size, words = DTYPE_BYTES[problem.dtype], accumulator_bytes(problem.dtype) // 4
    elements = config.positions * config.vector  # elements of the output gradient that a thread loads
    loads, x_loads = elements // piece, config.in_held * config.x_met
    issued = terms.issue * config.positions * config.sums * words + terms.load * (loads + x_loads) + terms.step
    if size == 2:
        issued += terms.widen * (elements + x_loads)
    # Lines that a load touches: columns of a kernel row are adjacent.
    apart = 32 / math.ceil(_residues(problem) / config.vector)
    lines = loads * max(config.vector * size / 4, apart) + x_loads * max(1.0, min(config.walkers, 32 / config.lanes))
    return issued, lines


def _estimate(problem: ConvTransposeProblem, config: LongConfig, device: DeviceInfo, piece: int) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("direct_wgrad_long", device)
    size, words = DTYPE_BYTES[problem.dtype], accumulator_bytes(problem.dtype) // 4
    issued, lines = _step(problem, config, terms, piece)
    cycles = issued / 4 + terms.line * lines
    splits = _splits(problem, config, device, piece)
    blocks = _blocks(problem, config, piece) * splits
    resident, waves = waves_of(blocks, config.min_blocks, device)
    steps = math.ceil(math.ceil(_steps(problem, config)[0] / splits) / config.walkers)
    # A step is bound by the issue slots of all warps, or by the issue and latency of one.
    warps, alone = config.threads // 32 * resident, max(terms.wait, issued + terms.wait / 3)
    step = overlapped_time(warps * cycles, alone, terms.together)
    storing = terms.store * config.in_held * config.taps_held * resident
    work = waves * (steps * step + storing) / device.clock_hz
    again = (_row_blocks(problem, config) - 1) * problem.elements[2] * size / terms.from_l2
    moving = (problem.bytes + again) / device.copy_bytes_per_second
    adding = 0.0
    if splits > 1 or size == 2:  # half types are narrowed by the reduction
        moved = problem.elements[1] * (8 * words * splits + size)
        adding = terms.reduce + moved / device.copy_bytes_per_second
    return math.hypot(work, moving) + terms.launch + adding, slower_of(work, moving)[1]
