"""The direct weight gradient for few channels in a group: ``kernels/direct_wgrad_channels.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass, accumulator_bytes
from polyphase.problem.device import REGISTERS, DeviceInfo
from polyphase.problem.integers import equal_parts, parted, round_up
from polyphase.problem.layouts import Layouts, Strides, dense_strides, five
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import Side, sides_of
from polyphase.schedules.cost import overlapped_time, slower_of, waves_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import (
    Four,
    affordable_planes,
    arranged,
    constants_of,
    layer_constants,
    splits_in_few_waves,
    tiles_of,
)
from polyphase.schedules.window_gemm.stages import widest_piece

_THREADS = 256  # most threads of a block
_MAX_LANES, _MIN_LANES = 32, 8
MAX_CHANNELS = 16  # most input and most output channels of a group
_MAX_SUMS = 112  # most accumulators of a thread
_MAX_SUMS_OF_ROW = 48
_MAX_UNROLLED = 448  # most products of a thread, in straight-line code; with more some configs would spill
_MAX_REGISTERS = 180  # most registers by estimate; with more some configs would spill
_CHAIN = 2048  # terms of one chain
_SHARED_BYTES = 48 << 10  # most shared memory of a block, unless one row of its threads' sums takes more
_LEAST_TILES = 4  # least tiles of a split


class ChannelsConfig(NamedTuple):
    """The compile-time shape of a kernel; ``direct_wgrad_channels.cu`` says what the names mean."""

    vector: int
    positions: int
    rows: int
    columns: int
    in_held: int
    lanes: int
    block_shares: int
    min_blocks: int

    @property
    def walkers(self) -> int:
        """Threads along positions."""
        return max(1, _THREADS // (self.lanes * self.block_shares))

    @property
    def threads(self) -> int:
        """Threads of a block, in whole warps."""
        return round_up(self.lanes * self.block_shares * self.walkers, 32)

    @property
    def sums_of_row(self) -> int:
        """Sums of a thread for a row of the kernel."""
        return self.columns * self.in_held * self.vector

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.rows * self.sums_of_row

    def x_held(self, problem: ConvTransposeProblem) -> int:
        """Input channels of a position that a thread holds."""
        return max(1, self.vector // problem.out_channels_per_group) * self.in_held

    def shares(self, problem: ConvTransposeProblem) -> int:
        """Number of shares into which the weights of a vector's channels are cut, one per thread."""
        depth, height, width = (axis.kernel for axis in problem.axes3)
        of_taps = math.ceil(depth * height / self.rows) * math.ceil(width / self.columns)
        return of_taps * problem.in_channels_per_group // self.in_held


class DirectWgradChannels(Schedule):
    """A thread sums all or some weights of a few neighbouring output channels, over a share of the positions."""

    name = "direct_wgrad_channels"
    passes = (Pass.WEIGHT_GRAD,)
    adapts = True
    offered = 4

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        channels = max(problem.in_channels_per_group, problem.out_channels_per_group)
        if channels > MAX_CHANNELS:
            return f"groups of {channels} channels are not few (at most {MAX_CHANNELS})"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return f"the sums of a row of taps fit neither a thread's registers nor straight-line code of {_MAX_UNROLLED}"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        x, grad = sides_of(problem, layouts)
        if problem.channels_last and not (x.channels_last and grad.channels_last):
            return None
        return standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[ChannelsConfig]:
        return sorted(legal_configs(at, device))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: ChannelsConfig
    ) -> Cost | None:
        x, grad = sides_of(problem, layouts)
        # Distances within a row are 32-bit constants of the kernel.
        if max(_pixel(problem, x) * config.positions, _pixel(problem, grad) * _window(problem, config)) >= 2**31:
            return None
        return _estimate(problem, config, device)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: ChannelsConfig
    ) -> Program:
        x, grad = sides_of(problem, layouts)
        run = _run(problem, config, grad.strides) if layouts.aligned else 1
        source = KernelSource(
            kernel=self.name,
            dtype=problem.dtype,
            wide_offsets=True,
            constants=(
                *layer_constants(problem, pass_),
                *constants_of(config, "lanes block_shares vector positions rows columns in_held min_blocks"),
                ("WALKERS", config.walkers),
                ("ROWS_AT_ONCE", _rows_at_once(problem, config)),
                ("X_VECTOR", _at_once(x, config.x_held(problem), problem, layouts)),
                ("GRAD_VECTOR", run if run > 1 else _at_once(grad, config.vector, problem, layouts)),
                ("GRAD_RUN", run),
                ("X_PIXEL", _pixel(problem, x)),
                ("GRAD_PIXEL", _pixel(problem, grad)),
            ),
        )
        walkers, (n, d, h, w) = _tiles(problem, config)
        all_tiles = n * d * h * w
        blocks = _blocks(problem, config)
        length, splits = parted(all_tiles, _splits(problem, config, device))
        flush = max(1, _CHAIN // config.positions)
        params = {
            "x": x,
            "g": grad,
            "batch": problem.batch,
            "vectors": problem.out_channels // config.vector,
            "vector_blocks": blocks[0],
            "flush": flush,
            "walkers": walkers,
            "tiles": (n, d, w, h),
            "split_length": length,
            "all_tiles": all_tiles,
            "plane": problem.elements[1],
        }
        shared_bytes = _shared_bytes(problem, config, _rows_at_once(problem, config))
        main = main_step(source, math.prod(blocks) * splits, config.threads, shared_bytes, params)
        return assemble(problem, pass_, main, splits=splits)


def _pixel(problem: ConvTransposeProblem, side: Side) -> int:
    """Elements from a pixel to its neighbour along w; also for rows of one pixel."""
    if side.shape[4] > 1:
        return side.strides[4]
    return side.shape[1] if problem.channels_last else 1


def _at_once(side: Side, held: int, problem: ConvTransposeProblem, layouts: Layouts) -> int:
    """Channels of a vectorised load, if a thread holds ``held``."""
    if not layouts.aligned:
        return 1
    return widest_piece(DTYPE_BYTES[problem.dtype], held, side.apart(1))


def _window(problem: ConvTransposeProblem, config: ChannelsConfig) -> int:
    """Columns of a row of the output gradient, from the first that a thread's positions read to the last."""
    width = problem.axes3[2]
    return (config.positions - 1) * width.stride + (config.columns - 1) * width.dilation + 1


def _run(problem: ConvTransposeProblem, config: ChannelsConfig, strides: Strides | None = None) -> int:
    """Neighbours along the width of an aligned load of the output gradient; 1 with channels last.

    ``strides`` are the output gradient's; by default it is dense.
    """
    width = problem.axes3[2]
    batch, channel, depth, height, pixel = strides or dense_strides(problem.output_shape, problem.channels_last)
    if problem.channels_last or pixel != 1:
        return 1
    shares = 0 if config.columns >= width.kernel else config.columns * width.dilation
    apart = (batch, channel, depth, height, problem.output_size[-1], config.positions * width.stride, shares)
    return widest_piece(DTYPE_BYTES[problem.dtype], *apart)


def _runs_met(problem: ConvTransposeProblem, config: ChannelsConfig) -> tuple[int, int]:
    """Runs of a row of the output gradient that a thread's positions read at its taps, and elements of a run."""
    width, run = problem.axes3[2], _run(problem, config)
    columns = (
        i * width.stride + tap * width.dilation for i in range(config.positions) for tap in range(config.columns)
    )
    return len({(column - width.padding) // run for column in columns}), run


def _tiles(problem: ConvTransposeProblem, config: ChannelsConfig) -> tuple[Four, Four]:
    """Extents of a block's walkers along n, d, h and w, and the number of such tiles along each."""
    depth, height, width = five(problem.input_shape)[2:]
    sizes = depth, height, math.ceil(width / config.positions)
    walkers = arranged(problem.batch, sizes, config.walkers)
    return walkers, tiles_of(problem.batch, sizes, walkers)


def _blocks(problem: ConvTransposeProblem, config: ChannelsConfig) -> tuple[int, int]:
    """Blocks of a split: along vectors, and along shares."""
    vectors = problem.out_channels // config.vector
    return math.ceil(vectors / config.lanes), math.ceil(config.shares(problem) / config.block_shares)


def _splits(problem: ConvTransposeProblem, config: ChannelsConfig, device: DeviceInfo) -> int:
    """Split-K count of the positions: a split has at least a few tiles."""
    blocks, tiles = math.prod(_blocks(problem, config)), math.prod(_tiles(problem, config)[1])
    resident = device.multiprocessors * config.min_blocks
    return splits_in_few_waves(blocks, resident, tiles, _LEAST_TILES, affordable_planes(problem))


def legal_configs(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[ChannelsConfig]:
    """Every config whose sums fit a thread's registers."""
    size, of_in, of_out = DTYPE_BYTES[problem.dtype], problem.in_channels_per_group, problem.out_channels_per_group
    words = accumulator_bytes(problem.dtype) // 4
    depth, height, width = (axis.kernel for axis in problem.axes3)
    for vector in (8, 4, 2, 1) if problem.channels_last else (1,):
        if vector * size > 16 or (vector % of_out and of_out % vector) or problem.out_channels % vector:
            continue
        held = [of_in] if vector > of_out else [n for n in range(1, min(of_in, 8) + 1) if of_in % n == 0]
        held = held if problem.channels_last else [1]
        for in_held, rows, columns in itertools.product(held, equal_parts(depth * height), equal_parts(width)):
            of_row = columns * in_held * vector
            if rows * of_row * words > _MAX_SUMS or of_row * words > _MAX_SUMS_OF_ROW:
                continue
            for positions in (8, 4, 2, 1):
                config = ChannelsConfig(vector, positions, rows, columns, in_held, 1, 1, 1)
                registers = _registers(problem, config)
                if registers > _MAX_REGISTERS or rows * of_row * words * positions > _MAX_UNROLLED:
                    continue
                lanes, block_shares = _lanes(problem, config)
                config = config._replace(lanes=lanes, block_shares=block_shares)
                shared = _shared_bytes(problem, config, _rows_at_once(problem, config)) + 1024
                resident = REGISTERS // (config.threads * round_up(registers, 8))
                hoped = min(8, resident, device.shared_bytes_per_multiprocessor // shared)
                if hoped and shared <= device.shared_bytes_per_block:
                    yield config._replace(min_blocks=hoped)


def _shared_bytes(problem: ConvTransposeProblem, config: ChannelsConfig, rows: int) -> int:
    """Shared memory of a block that reduces ``rows`` of its threads' sums at once."""
    return config.threads * (rows * config.sums_of_row | 1) * accumulator_bytes(problem.dtype)


def _rows_at_once(problem: ConvTransposeProblem, config: ChannelsConfig) -> int:
    """Rows of its threads' sums that a block reduces at once."""
    fitting = (n for n in range(config.rows, 1, -1) if _shared_bytes(problem, config, n) <= _SHARED_BYTES)
    return next(fitting, 1)


def _lanes(problem: ConvTransposeProblem, config: ChannelsConfig) -> tuple[int, int]:
    """Neighbouring threads that own neighbouring vectors, and the shares of a block."""
    vectors, shares = problem.out_channels // config.vector, config.shares(problem)
    if not problem.channels_last:
        return 1, math.ceil(shares / math.ceil(shares / _THREADS))
    most = max(_MIN_LANES, min(_MAX_LANES, _THREADS // shares))
    lanes = math.ceil(vectors / math.ceil(vectors / most))
    return lanes, math.ceil(shares / math.ceil(shares * lanes / _THREADS))


def _held(problem: ConvTransposeProblem, channels: int) -> int:
    """Registers of neighbouring ``channels`` before they are widened: two of 16 bits share a register."""
    return channels // 2 if DTYPE_BYTES[problem.dtype] == 2 and channels % 2 == 0 else channels


def _registers(problem: ConvTransposeProblem, config: ChannelsConfig) -> int:
    """Estimated registers of a thread: sums, input, a row of the output gradient, and part of further rows."""
    met, run = _runs_met(problem, config)
    held = config.positions * _held(problem, config.x_held(problem)) + met * _held(problem, run * config.vector)
    others = 8 * min(3, config.rows - 1) if DTYPE_BYTES[problem.dtype] == 2 and config.positions > 2 else 0
    return 48 + others + (config.sums + held) * accumulator_bytes(problem.dtype) // 4


def _estimate(problem: ConvTransposeProblem, config: ChannelsConfig, device: DeviceInfo) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("direct_wgrad_channels", device)
    size, words = DTYPE_BYTES[problem.dtype], accumulator_bytes(problem.dtype) // 4
    x_held = config.x_held(problem)
    met, run = _runs_met(problem, config)
    loads = config.positions * _loads(problem, x_held) + config.rows * met * _loads(problem, config.vector)
    instructions = terms.issue * words * config.sums * config.positions + terms.load * loads
    if size == 2:  # large inputs are widened again for each tap
        x_elements = config.positions * x_held
        x_widened = x_elements * (config.rows * config.columns if x_elements > 32 else 1)
        instructions += terms.issue * (x_widened + config.rows * met * run * config.vector)
    cycles = instructions * (1 + terms.borders * _at_borders(problem, config)) / 4
    if not problem.channels_last:  # neighbouring threads read apart: the lines that a warp's load touches
        cycles += terms.line * config.positions * max(1, config.positions * size / 4)
        cycles += terms.line * config.rows * met * max(1, config.positions * problem.axes3[2].stride * size / 4)

    # A thread loads as many rows as it has registers for, then waits.
    limit = device.registers_of(config.threads * config.min_blocks)
    spare = limit - 32 - words * (config.sums + config.positions * _held(problem, x_held))
    rows_at_once = max(1, spare // (words * met * _held(problem, run * config.vector)))
    waits = math.ceil(config.rows / rows_at_once)

    splits = _splits(problem, config, device)
    blocks = splits * math.prod(_blocks(problem, config))
    resident, _ = waves_of(blocks, config.min_blocks, device)
    waves = math.ceil(blocks / (device.multiprocessors * config.min_blocks))
    warps = config.threads // 32 * resident
    tiles = math.ceil(math.prod(_tiles(problem, config)[1]) / splits)
    # A step is bound by the issue slots of all warps, or by the latency of one.
    alone = terms.one_warp * cycles + terms.wait * waits
    step = overlapped_time(warps * cycles, alone, terms.together)
    work = waves * tiles * step / device.clock_hz
    moving = problem.bytes / device.copy_bytes_per_second
    # Partial planes are stored by kernel rows, or by parts of them, and then reduced.
    scattered = terms.store_pieces if config.columns < problem.axes3[2].kernel else terms.store_rows
    storing = splits * problem.elements[1] * scattered / (device.multiprocessors * device.clock_hz)
    adding = terms.reduce + terms.reduce_part * splits if splits > 1 else 0.0
    return math.hypot(work, moving) + terms.launch + storing + adding, slower_of(work, moving)[1]


def _loads(problem: ConvTransposeProblem, channels: int) -> int:
    """Loads for neighbouring ``channels``, if pixels are aligned."""
    return channels // math.gcd(channels, 16 // DTYPE_BYTES[problem.dtype])


def _at_borders(problem: ConvTransposeProblem, config: ChannelsConfig) -> float:
    """Share of a warp's steps that read outside the output gradient, where each element is checked."""
    width = problem.axes3[2]
    at_once = max(1, 32 / (config.lanes * config.block_shares))  # walkers of a warp
    steps = math.ceil(problem.input_size[-1] / config.positions)
    return min(1, (math.ceil(width.padding / (width.stride * config.positions)) + 1) * at_once / steps)
