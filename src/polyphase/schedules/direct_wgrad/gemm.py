"""Weight gradient on CUDA cores, ``kernels/direct_wgrad_gemm.cu``: a matrix product along batch × input positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass, accumulator_bytes
from polyphase.problem.device import REGISTERS, DeviceInfo
from polyphase.problem.integers import next_power_of_two
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step, main_step
from polyphase.schedules.cells import Side, sides_of
from polyphase.schedules.cost import cost_seconds
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import affordable_planes, constants_of, layer_constants

_THREADS = 256
_DEPTHS = (8, 16, 32, 64, 128)
# Up to this many positions, and from this many weights of a group on, each power of two of positions has its own list.
_FEW, _LARGE = 256, 1 << 20


class GemmConfig(NamedTuple):
    """The compile-time shape of ``direct_wgrad_gemm.cu``; its file says what the names mean.

    ``whole``: a stage holds all positions.
    """

    rows: int
    columns: int
    thread_rows: int
    thread_columns: int
    k_slices: int
    depth: int
    min_blocks: int
    whole: bool = False


class GemmProduct(NamedTuple):
    """Rows and columns of a group's product, registers of a sum, and lines of a warp's load of the output gradient.

    ``few``: positions rounded up to a power of two, if there are few positions and many weights, else 0: storing the
    weights is then most of the work, and a block's prologue and epilogue count. ``along_channels``: columns are
    contiguous, so that a thread needs no table of their offsets.
    """

    rows: int
    columns: int
    words: int
    lines: int
    few: int = 0
    along_channels: bool = False


class DirectWgradGemm(Schedule):
    """Blocks split K (batch × positions), and their partial sums are added in a fixed order."""

    name = "direct_wgrad_gemm"
    passes = (Pass.WEIGHT_GRAD,)
    any_constants = True
    adapts = True
    offered = 8

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> GemmProduct:
        return _product(problem)

    def configs(self, at: GemmProduct, pass_: Pass, device: DeviceInfo) -> Iterator[GemmConfig]:
        return legal_configs(at, device.shared_bytes_per_block)

    def seconds(self, at: GemmProduct, pass_: Pass, device: DeviceInfo, config: GemmConfig) -> float:
        """Cycles of a multiprocessor per position, the same for all image sizes; for few positions, of all of them."""
        terms = costs("direct_wgrad_gemm", device)
        if at.few:
            launch = _launch(at, config, device, 1, at.few, 1)
            return launch.tiles * _tile_cycles(config, at, launch, terms.channels_first, terms)
        tiles = math.ceil(at.rows / config.rows) * math.ceil(at.columns / config.columns)
        return tiles * stage_cycles(config, at, terms) / config.depth

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost:
        terms, product = costs("direct_wgrad_gemm", device), _product(problem)
        launch = _launched(problem, config, device)
        measured = terms.channels_last if problem.channels_last else terms.channels_first
        idle = max(1.0, device.multiprocessors / launch.blocks)  # multiprocessors without a block
        if product.few:
            cycles = launch.splits * _tile_cycles(config, product, launch, measured, terms)
        else:
            positions = problem.batch * math.prod(problem.input_size)
            cycles = measured * positions * stage_cycles(config, product, terms) / config.depth
        seconds, bound = cost_seconds(problem, device, idle * launch.tiles * cycles)
        alone = product.few and launch.splits == 1  # there is no reduction, and prologues are counted
        return seconds if alone else seconds + terms.launch, bound

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Program:
        launch = _launched(problem, config, device)
        narrowed = launch.splits == 1
        main = gemm_step(problem, sides_of(problem, layouts), config, launch, problem.in_channels_per_group, narrowed)
        return assemble(problem, pass_, main, splits=launch.splits, narrowed=narrowed)


class Launch(NamedTuple):
    """Tiles of a split along the rows and in all, blocks that share the rows, splits, and positions of a split."""

    row_blocks: int
    tiles: int
    row_shares: int
    splits: int
    positions: int

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.tiles // self.row_blocks * self.row_shares * self.splits

    @property
    def tiles_of_block(self) -> float:
        """Tiles that a block computes one after another, on average."""
        return self.row_blocks / self.row_shares


def gemm_step(
    layer: ConvTransposeProblem,
    sides: tuple[Side, Side],
    config: GemmConfig,
    launch: Launch,
    rows: int,
    narrowed: bool,
    along_channels: bool = False,
) -> Step:
    """The launch of the kernel for the first ``rows`` input channels of each group of a layer.

    ``narrowed``: it writes the weights themselves, not partial planes. ``along_channels``: lanes load neighbouring
    channels, else neighbouring positions.
    """
    constants = (
        *layer_constants(layer, Pass.WEIGHT_GRAD),
        *constants_of(config),
        ("ALONG_CHANNELS", along_channels),
    )
    source = KernelSource("direct_wgrad_gemm", layer.dtype, True, constants)
    params = {
        "x": sides[0],
        "g": sides[1],
        "batch": layer.batch,
        "groups": layer.groups,
        "rows": rows,
        "row_shares": launch.row_shares,
        "splits": launch.splits,
        "split_length": launch.positions,
        "positions": layer.batch * math.prod(layer.input_size),
        "plane": layer.groups * rows * layer.out_channels_per_group * layer.taps,
        "narrowed": narrowed,
    }
    return main_step(source, launch.blocks, _THREADS, _shared_values(config) * accumulator_bytes(layer.dtype), params)


def _product(problem: ConvTransposeProblem) -> GemmProduct:
    """A group's product. Lanes of a warp load neighbouring positions, whose elements of g are a stride apart."""
    lines = min(32, max(1, problem.stride[-1] * DTYPE_BYTES[problem.dtype] // 4))
    columns, words = problem.out_channels_per_group * problem.taps, accumulator_bytes(problem.dtype) // 4
    positions = problem.batch * math.prod(problem.input_size)
    rows, few = problem.in_channels_per_group, 0
    if positions <= _FEW and rows * columns >= _LARGE:
        few = next_power_of_two(max(_DEPTHS[0], positions))
    return GemmProduct(rows, columns, words, 1 if problem.channels_last else lines, few)


def _launch(
    product: GemmProduct, config: GemmConfig, device: DeviceInfo, groups: int, positions: int, planes: int
) -> Launch:
    """The launch for ``groups`` of a product, with at most ``planes`` partial planes.

    Four waves of blocks balance their ends; a split of less than 16 stages would be mostly prologue. A block that has
    all positions in one stage computes several tiles of the same columns, if two waves of blocks remain.
    """
    row_blocks, resident = math.ceil(product.rows / config.rows), device.multiprocessors * config.min_blocks
    others = groups * math.ceil(product.columns / config.columns)
    tiles = max(1, others * row_blocks)
    splits = max(1, min(math.ceil(4 * resident / tiles), planes, positions // (16 * config.depth)))
    length = max(1, math.ceil(positions / splits / config.depth)) * config.depth
    tiles_of_block = min(row_blocks, max(1, tiles // (2 * resident))) if config.whole else 1
    shares = math.ceil(row_blocks / tiles_of_block)
    return Launch(row_blocks, tiles, shares, max(1, math.ceil(positions / length)), length)


def _launched(problem: ConvTransposeProblem, config: GemmConfig, device: DeviceInfo) -> Launch:
    positions = problem.batch * math.prod(problem.input_size)
    return _launch(_product(problem), config, device, problem.groups, positions, affordable_planes(problem))


def _shared_values(config: GemmConfig) -> int:
    """Values of a block in shared memory, in the accumulator's type."""
    row_pitch, column_pitch = -(-config.rows // 4) * 4 + 4, -(-config.columns // 4) * 4 + 4
    return 2 * config.depth * (row_pitch + column_pitch) + _THREADS * config.thread_rows * config.thread_columns


def legal_configs(product: GemmProduct, shared_bytes: int) -> Iterator[GemmConfig]:
    """Every config that fits registers and shared memory, and whose threads are not mostly idle."""
    rows = [count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count <= next_power_of_two(product.rows)]
    columns = [count for count in (4, 8, 16, 32, 64, 128) if count <= max(4, next_power_of_two(product.columns))]
    items = {(side, depth): items_of(side, depth) for side in {*rows, *columns} for depth in _DEPTHS}
    shapes: Iterable[tuple[int, ...]] = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), rows, columns)
    if product.few or product.along_channels:  # of equal configs, those with one vector of columns per thread first
        shapes = sorted(shapes, key=lambda shape: shape[1])
    for thread_rows, thread_columns, block_rows, block_columns in shapes:
        slice_threads = (block_rows // thread_rows) * (block_columns // thread_columns)
        if block_rows < thread_rows or block_columns < thread_columns or slice_threads > _THREADS:
            continue
        k_slices = _THREADS // slice_threads
        held = thread_rows * thread_columns + 2 * (thread_rows + thread_columns)
        for depth in _DEPTHS:
            x_items, g_items = items[block_rows, depth], items[block_columns, depth]
            if depth % k_slices or x_items + g_items > 24:
                continue
            blocks = _resident(product, held, x_items, g_items)
            if blocks < 1:
                continue
            config = GemmConfig(block_rows, block_columns, thread_rows, thread_columns, k_slices, depth, blocks)
            if 0 < product.few <= depth:
                config = config._replace(whole=True)
            if _shared_values(config) * 4 * product.words <= shared_bytes:
                yield config


def _resident(product: GemmProduct, held: int, x_items: int, g_items: int) -> int:
    """Resident blocks by registers: as many as possible if blocks wait most of the time."""
    registers = product.words * (held + x_items + g_items) + 56 + 2 * g_items
    if product.few or product.along_channels:
        registers -= 28 + (2 * g_items if product.along_channels else 0)
        return min(6, int(REGISTERS / (registers * _THREADS)))
    return min(6, int(REGISTERS / (registers * 1.25 * _THREADS)))


def items_of(side: int, depth: int) -> int:
    """Elements of an operand that a thread loads for a stage."""
    return -(-side * depth // _THREADS)


def stage_cycles(config: GemmConfig, product: GemmProduct, terms: Costs, gathers: bool = True) -> float:
    """Predicted cycles of a multiprocessor for a stage of a tile; ``gathers``: it loads its columns, too."""
    x_items, g_items = items_of(config.rows, config.depth), items_of(config.columns, config.depth) if gathers else 0
    steps = config.depth // config.k_slices
    products = config.thread_rows * config.thread_columns * product.words
    of_rows, of_columns = (product.words * max(1, n // 4) for n in (config.thread_rows, config.thread_columns))
    # Threads with two vectors of columns read every other vector: bank conflicts. (Other products' factor has these.)
    ways = max(1, config.thread_columns // 4) if product.few or product.along_channels else 1
    instructions = 70 + x_items * 8 + g_items * 9 + steps * (products + of_rows + of_columns + 2)
    wavefronts = (
        steps * 2 * (of_rows + ways * of_columns) + 3 * x_items + max(3, terms.line * product.lines) * g_items + 4
    )
    return _issued(config, instructions, wavefronts, terms)


def seconds_along_channels(
    product: GemmProduct, config: GemmConfig, launch: Launch, dtype: str, device: DeviceInfo
) -> float:
    """Predicted time by instructions, or by bytes of the columns, with one stage per resident block in flight."""
    terms, slots = costs("direct_wgrad_gemm", device), device.multiprocessors * config.min_blocks
    waves = max(1.0, launch.blocks / slots) if launch.blocks > 4 * slots else math.ceil(launch.blocks / slots)
    work = config.min_blocks * stage_cycles(config, product, terms)
    rate = device.copy_bytes_per_second / (device.multiprocessors * device.clock_hz)  # bytes in a cycle
    moved = config.min_blocks * config.depth * config.columns * DTYPE_BYTES[dtype] / rate
    stages = launch.positions // config.depth
    return (waves * (stages * max(work, moved, terms.latency / 2) + terms.latency)) / device.clock_hz


def _tile_cycles(config: GemmConfig, product: GemmProduct, launch: Launch, measured: float, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a whole tile, on average over a block's tiles.

    ``measured``: the factor from predicted to measured time of gathered loads.
    """
    sums = product.words * config.thread_rows * config.thread_columns
    begin = _issued(config, 250 + 60 * items_of(config.columns, config.depth), 0, terms)
    end = _issued(config, 60 + 2 * sums + 3 * sums / config.k_slices, 4 * sums, terms)
    gathered = measured * launch.positions / config.depth * stage_cycles(config, product, terms)
    of_block = begin + gathered + (launch.tiles_of_block - 1) * stage_cycles(config, product, terms, False)
    waits = terms.latency / config.min_blocks
    return (of_block + waits) / launch.tiles_of_block + end


def _issued(config: GemmConfig, instructions: float, wavefronts: float, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a block whose warps have ``instructions`` and ``wavefronts`` each."""
    warps = _THREADS / 32
    return max(instructions * warps / 4, wavefronts * warps) * (terms.stalls + terms.few_blocks / config.min_blocks)
