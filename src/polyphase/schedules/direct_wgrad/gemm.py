"""Weight gradient on CUDA cores, ``kernels/direct_wgrad_gemm.cu``: a matrix product along batch × input positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass, accumulator_bytes
from polyphase.problem.device import REGISTERS, DeviceInfo
from polyphase.problem.integers import next_power_of_two
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import sides_of
from polyphase.schedules.cost import cost_seconds
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import affordable_planes, constants_of, layer_constants

_THREADS = 256
_DEPTHS = (8, 16, 32, 64, 128)


class GemmConfig(NamedTuple):
    """The compile-time shape of ``direct_wgrad_gemm.cu``; its file says what the names mean."""

    rows: int
    columns: int
    thread_rows: int
    thread_columns: int
    k_slices: int
    depth: int
    min_blocks: int


class _Product(NamedTuple):
    """Rows and columns of a group's product, registers of a sum, and lines that a warp meets of the output gradient."""

    rows: int
    columns: int
    words: int
    lines: int


class DirectWgradGemm(Schedule):
    """Split along batch × positions over blocks, whose partial sums are added in a fixed order."""

    name = "direct_wgrad_gemm"
    passes = (Pass.WEIGHT_GRAD,)
    any_constants = True
    offered = 8

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> _Product:
        return _product(problem)

    def configs(self, at: _Product, pass_: Pass, device: DeviceInfo) -> Iterator[GemmConfig]:
        return _configs(at, device.shared_bytes_per_block)

    def seconds(self, at: _Product, pass_: Pass, device: DeviceInfo, config: GemmConfig) -> float:
        """Cycles of a multiprocessor per position, whatever the size of images."""
        tiles = math.ceil(at.rows / config.rows) * math.ceil(at.columns / config.columns)
        return tiles * _cycles(config, at, costs("direct_wgrad_gemm", device)) / config.depth

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost:
        positions, terms = problem.batch * math.prod(problem.input_size), costs("direct_wgrad_gemm", device)
        cycles = _cycles(config, _product(problem), terms) / config.depth
        tiles, splits = _tiles(problem, config), _splits(problem, config, device)
        measured = terms.channels_last if problem.channels_last else terms.channels_first
        idle = max(1.0, device.multiprocessors / (tiles * splits))  # multiprocessors without a block
        seconds, bound = cost_seconds(problem, device, measured * idle * tiles * positions * cycles)
        return seconds + terms.launch, bound

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Program:
        tiles, splits = _tiles(problem, config), _splits(problem, config, device)
        positions = problem.batch * math.prod(problem.input_size)
        split_length = max(1, math.ceil(positions / splits / config.depth)) * config.depth
        splits = max(1, math.ceil(positions / split_length))
        source = KernelSource(
            kernel=self.name,
            dtype=problem.dtype,
            wide_offsets=True,
            constants=(
                *layer_constants(problem, pass_),
                *constants_of(config, "rows columns thread_rows thread_columns k_slices depth min_blocks"),
            ),
        )
        x, grad = sides_of(problem, layouts)
        params = {
            "x": x,
            "g": grad,
            "batch": problem.batch,
            "groups": problem.groups,
            "splits": splits,
            "split_length": split_length,
            "positions": positions,
            "plane": problem.elements[1],
        }
        shared_bytes = _shared_floats(config) * accumulator_bytes(problem.dtype)
        main = main_step(source, tiles * splits, _THREADS, shared_bytes, params)
        return assemble(problem, pass_, main, splits=splits)


def _product(problem: ConvTransposeProblem) -> _Product:
    """A group's product. Lanes of a warp are at neighbouring positions: their elements of g are a stride apart."""
    lines = min(32, max(1, problem.stride[-1] * DTYPE_BYTES[problem.dtype] // 4))
    columns, words = problem.out_channels_per_group * problem.taps, accumulator_bytes(problem.dtype) // 4
    return _Product(problem.in_channels_per_group, columns, words, 1 if problem.channels_last else lines)


def _tiles(problem: ConvTransposeProblem, config: GemmConfig) -> int:
    """CTAs of a split."""
    columns = problem.out_channels_per_group * problem.taps
    rows = math.ceil(problem.in_channels_per_group / config.rows)
    return problem.groups * rows * math.ceil(columns / config.columns)


def _splits(problem: ConvTransposeProblem, config: GemmConfig, device: DeviceInfo) -> int:
    """Four waves of blocks even out their ends; a split of less than 16 stages would be mostly prologue."""
    waves = math.ceil(4 * device.multiprocessors * config.min_blocks / max(1, _tiles(problem, config)))
    positions = problem.batch * math.prod(problem.input_size)
    return max(1, min(waves, affordable_planes(problem), positions // (16 * config.depth)))


def _shared_floats(config: GemmConfig) -> int:
    row_pitch, column_pitch = -(-config.rows // 4) * 4 + 4, -(-config.columns // 4) * 4 + 4
    return 2 * config.depth * (row_pitch + column_pitch) + _THREADS * config.thread_rows * config.thread_columns


def _configs(product: _Product, shared_bytes: int) -> Iterator[GemmConfig]:
    """Every config whose registers and shared memory suffice for a block, and that is not mostly idle."""
    rows = [count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count <= next_power_of_two(product.rows)]
    columns = [count for count in (4, 8, 16, 32, 64, 128) if count <= max(4, next_power_of_two(product.columns))]
    items = {(side, depth): _items(side, depth) for side in {*rows, *columns} for depth in _DEPTHS}
    shapes = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), rows, columns)
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
            registers = product.words * (held + x_items + g_items) + 56 + 2 * g_items
            blocks = min(6, int(REGISTERS / (registers * 1.25 * _THREADS)))
            if blocks < 1:
                continue
            config = GemmConfig(block_rows, block_columns, thread_rows, thread_columns, k_slices, depth, blocks)
            if _shared_floats(config) * 4 * product.words <= shared_bytes:
                yield config


def _items(side: int, depth: int) -> int:
    """Elements of a stage that a thread loads of an operand."""
    return -(-side * depth // _THREADS)


def _cycles(config: GemmConfig, product: _Product, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a stage of a tile."""
    x_items, g_items = _items(config.rows, config.depth), _items(config.columns, config.depth)
    steps = config.depth // config.k_slices
    products = config.thread_rows * config.thread_columns * product.words
    reads = product.words * (max(1, config.thread_rows // 4) + max(1, config.thread_columns // 4))
    instructions = 70 + x_items * 8 + g_items * 9 + steps * (products + reads + 2)
    wavefronts = steps * 2 * reads + 3 * x_items + max(3, terms.line * product.lines) * g_items + 4
    warps = _THREADS / 32
    return max(instructions * warps / 4, wavefronts * warps) * (terms.stalls + terms.few_blocks / config.min_blocks)
