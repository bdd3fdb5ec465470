"""Long kernels with large strides on tensor cores, ``kernels/phase_gemm.cu``."""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import standard
from polyphase.program.params import params_of
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step
from polyphase.schedules.cells import forward_gather
from polyphase.schedules.cost import rounds_of, slower_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tensor_cores import parts_of, steps_of
from polyphase.schedules.tiles import constants_of, layer_constants

_MIN_PHASES = 16  # elements of a cell; `implicit_gemm` has straight-line code for fewer
_MAX_COLUMNS = 1 << 18  # of a group: blocks are counted in 31 bits
_RUN = 8  # neighbouring outputs of a thread


class PhaseConfig(NamedTuple):
    """The compile-time shape of a kernel; ``phase_gemm.cu`` says what the names mean."""

    warp_rows: int
    warp_columns: int
    row_tiles: int
    stage_steps: int
    min_blocks: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.warp_rows * self.warp_columns

    @property
    def rows(self) -> int:
        """Cells of a block."""
        return 16 * self.row_tiles * self.warp_rows

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return 32 * self.warp_columns


_SHAPES = ((2, 4, 4), (2, 4, 2), (4, 2, 2), (4, 2, 1), (8, 1, 1))  # warp rows, warp columns, row tiles
_CONFIGS = tuple(
    PhaseConfig(*shape, stage_steps, min_blocks)
    for min_blocks in (2, 1)
    for shape in _SHAPES
    for stage_steps in (1, 2, 3, 4)
)


class PhaseGemm(Schedule):
    """All elements of a cell as columns of one product."""

    name = "phase_gemm"
    passes = (Pass.FORWARD,)
    on_tensor_cores = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if (phases := math.prod(problem.stride)) < _MIN_PHASES:
            return f"{phases} elements of a cell are few (here at least {_MIN_PHASES})"
        if (columns := phases * problem.out_channels_per_group) > _MAX_COLUMNS:
            return f"{columns} columns of a group are too many (at most {_MAX_COLUMNS})"
        return None

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem:
        return standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[PhaseConfig]:
        return [
            config
            for config in _CONFIGS
            if config.stage_steps <= steps_of(at) and config.min_blocks <= _resident(at, config, device)
        ]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: PhaseConfig
    ) -> Cost:
        return _estimate(problem, config, device)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: PhaseConfig
    ) -> Program:
        gather = forward_gather(problem, layouts)
        cells = [_cells(axis, size) for axis, size in zip(problem.axes3, gather.dst.shape[2:])]
        rows = problem.batch * math.prod(map(len, cells))
        row_tiles = math.ceil(rows / config.rows)
        constants = (
            *layer_constants(problem, pass_, layouts.weight_channels_last),
            ("HAS_BIAS", problem.bias),
            *constants_of(config, "warp_rows warp_columns row_tiles stage_steps min_blocks"),
            ("PARTS", parts_of(problem)),
            ("CHANNELS_INNERMOST", gather.dst.channels_last),
        )
        source = KernelSource(self.name, problem.dtype, True, constants)
        params = params_of(source).pack(
            x=gather.src,
            y=gather.dst,
            rows=rows,
            row_tiles=row_tiles,
            cells=[len(each) for each in cells],
            first=[each.start for each in cells],
            vector=_vector(problem, layouts),
        )
        main = Step(
            source=source,
            grid=(row_tiles * _column_tiles(problem, config) * problem.groups, 1, 1),
            block=32 * config.warps,
            shared_bytes=_shared_bytes(problem, config),
            params=params,
        )
        return assemble(problem, pass_, main)


def _cells(axis: Axis, size: int) -> range:
    """The cells that an output of so many elements lies in, counted with the padding."""
    return range(axis.padding // axis.stride, (axis.padding + size - 1) // axis.stride + 1)


def _reach(axis: Axis) -> int:
    """Pixels that a cell reads along a dimension."""
    return math.ceil(((axis.kernel - 1) * axis.dilation + 1) / axis.stride)


def _vector(problem: ConvTransposeProblem, layouts: Layouts) -> int:
    """Neighbouring outputs that lie at a multiple of their size whatever the cell: 16 bytes, 8, or one alone."""
    axis, dst = problem.axes3[2], forward_gather(problem, layouts).dst
    if dst.strides[4] != 1 or not layouts.aligned:
        return 1
    whole = reduce(math.gcd, (_RUN, axis.stride, axis.padding, dst.apart(4)))
    elements = [count // DTYPE_BYTES[problem.dtype] for count in (16, 8)]
    return next((count for count in elements if whole % count == 0), 1)


def _column_tiles(problem: ConvTransposeProblem, config: PhaseConfig) -> int:
    """Column tiles of a group."""
    return math.ceil(problem.out_channels_per_group * math.prod(problem.stride) / config.columns)


def _shared_bytes(problem: ConvTransposeProblem, config: PhaseConfig) -> int:
    words = 8 * config.stage_steps * (config.rows + 8 + config.columns + 2)
    return 2 * parts_of(problem) * 4 * words


def _estimate(problem: ConvTransposeProblem, config: PhaseConfig, device: DeviceInfo) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("phase_gemm", device)
    size, parts, channels = DTYPE_BYTES[problem.dtype], parts_of(problem), problem.in_channels_per_group
    cells = math.prod(len(_cells(axis, size)) for axis, size in zip(problem.axes, problem.output_size))
    column_tiles, phases = _column_tiles(problem, config), math.prod(problem.stride)
    tiles = math.ceil(problem.batch * cells / config.rows) * column_tiles * problem.groups
    resident, rounds = rounds_of(tiles, _resident(problem, config, device), device)
    stages = math.prod(map(_reach, problem.axes)) * math.ceil(steps_of(problem) / config.stage_steps)
    products = 4 * config.warps * config.row_tiles * (3 if parts == 2 else 1)
    words = 8 * (config.rows + config.columns) / 32 * (4 // size)
    words *= 1 if channels % (config.stage_steps * 32 // size) == 0 else terms.partial
    stage = config.stage_steps * (products * terms.multiply + words * terms.move) + config.warps * terms.stage
    run = problem.axes3[2].stride
    output = terms.alone
    if run % _RUN == 0 and not (problem.channels_last and problem.out_channels > 1):
        vectors = _vector(problem, Layouts.dense(problem)) * size >= 8
        output = (terms.vectors if vectors else terms.rows) + terms.short * (max(1.0, 32 / run) - 1)
    outputs = problem.out_channels_per_group * phases / column_tiles * config.rows / 32
    work = stages * stage + outputs * output
    latencies = stages * terms.wait + (terms.lone_block if resident == 1 else 0)
    seconds = (rounds * max(resident * work, latencies + work) + terms.launch) / device.clock_hz
    seconds *= terms.lines if phases > run else 1.0
    floor = problem.bytes / device.copy_bytes_per_second
    return slower_of(seconds, floor)


def _resident(problem: ConvTransposeProblem, config: PhaseConfig, device: DeviceInfo) -> int:
    """Blocks that fit a multiprocessor, which may be more than are asked for."""
    parts = parts_of(problem)
    elements = 8 * config.stage_steps * (config.rows + config.columns) // (32 * config.warps)
    elements *= 1 if DTYPE_BYTES[problem.dtype] == 4 else 2
    # Sums, and those of an operation in flight; operands; elements of the next stage; and addresses.
    needed = 16 * config.row_tiles * parts + 12 * parts + elements + 11 * config.row_tiles + 38
    shared = _shared_bytes(problem, config)
    fitting = (
        blocks
        for blocks in (2, 1)
        if needed <= device.registers_of(32 * config.warps * blocks) and shared <= device.shared_bytes_of(blocks)
    )
    return next(fitting, 0)
