"""Direct kernel of the weight gradient of few output channels, ``kernels/direct_wgrad_windows.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import REGISTERS, DeviceInfo
from polyphase.problem.integers import equal_parts, parted, round_up
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import Side, sides_of
from polyphase.schedules.cost import overlapped_time, slower_of
from polyphase.schedules.direct_wgrad.channels import MAX_CHANNELS
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import Four, affordable_planes, constants_of, layer_constants, tiles_of
from polyphase.schedules.window_gemm.stages import channel_piece, row_piece
from polyphase.schedules.window_gemm.window import as_one_channel, blocks_of, extent_of_window, split_params

_POSITIONS = 4  # positions of a thread's step
_THREADS = (384, 512)  # approximate threads of a block; one block is resident
_FEW_THREADS = 320  # least threads of a block: fewer hide too little latency
_MOST_COLUMNS = 512  # most pairs of output channel and tap
_MOST_SLICE = 512  # most threads of a slice of K
_MOST_SUMS = 96  # most accumulators of a thread
_MOST_CHUNKS = 4  # sizes of `out_chunk` to try
_MOST_LINES = 4  # most kernel rows of a thread
_MOST_QUADS = 40  # most vectors of four elements of the window in a thread's registers
_MOST_ROW = 256  # most positions of a tile along the width
_SPARE = 8  # registers required beyond the estimate, before Hopper
_CHAIN = 1024  # positions in one chain of a thread's sums


class WindowsConfig(NamedTuple):
    """The compile-time shape of a kernel; ``direct_wgrad_windows.cu`` says what the names mean."""

    thread_rows: int
    thread_lines: int
    thread_columns: int
    row_threads: int
    out_chunk: int
    k_slices: int
    slice_threads: int

    @property
    def rows(self) -> int:
        """Input channels of a block."""
        return self.thread_rows * self.row_threads

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return round_up(self.k_slices * self.slice_threads, 32)


@dataclass(frozen=True)
class _Layer:
    """The layer as the kernel sees it, its tensors' layouts, and the elements of one copy of each."""

    problem: ConvTransposeProblem
    x: Side
    grad: Side
    x_piece: int
    grad_piece: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, given: ConvTransposeProblem, layouts: Layouts) -> _Layer | None:
        """None if elements of a row of the output gradient are not adjacent."""
        problem, channels = given, given.in_channels_per_group
        if given.channels_last and given.out_channels > 1:
            found = as_one_channel(given, layouts)
            if found is None:
                return None
            problem, layouts = found
        x, grad = sides_of(problem, layouts)
        x_piece, grad_piece = (row_piece(side, 4, layouts.aligned, 0) for side in (x, grad))
        if x.channels_last:
            x_piece = channel_piece(x, channels, channels, 4, layouts.aligned)
        return cls(problem, x, grad, *(piece if piece == 4 else 1 for piece in (x_piece, grad_piece)))

    @property
    def columns(self) -> int:
        """Pairs of output channel and tap, of a group."""
        return self.problem.out_channels_per_group * self.problem.taps

    @property
    def skew(self) -> int:
        """Elements by which a row of the window begins before the first one that taps read."""
        return -self.problem.axes3[2].padding % 4


@dataclass(frozen=True)
class _Tiling:
    """The tiles into which a config cuts the input positions, and the layout of a stage, in elements."""

    tile_extent: Four
    tiles: Four
    rows: int
    pitch: int
    x_pitch: int
    window_at: int
    stage: int
    cycles: float  # cycles of a multiprocessor for a tile

    @property
    def total(self) -> int:
        return math.prod(self.tiles)


class DirectWgradWindows(Schedule):
    """A window of the output gradient serves all taps; a thread accumulates some channels and taps, in float32."""

    name = "direct_wgrad_windows"
    passes = (Pass.WEIGHT_GRAD,)
    adapts = True
    offered = 4
    kept = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if problem.dtype != "float32" or device.capability < 80:
            return "copies float32 asynchronously, from compute capability 8.0 on"
        if problem.groups > 1 and problem.in_channels_per_group <= MAX_CHANNELS:
            return f"groups of at most {MAX_CHANNELS} input channels leave a block few threads for each position"
        if problem.tf32 and problem.out_channels_per_group >= 16 and not problem.channels_last:
            return "uses no tensor cores, which with TF32 are faster for 16 output channels and more in NCHW"
        if (columns := problem.out_channels_per_group * problem.taps) > _MOST_COLUMNS:
            return f"{columns} pairs of an output channel and a tap are too many (at most {_MOST_COLUMNS})"
        if _Layer.of(problem, Layouts.dense(problem)) is None:
            return "in channels_last needs one group, and no dilation along the width"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return "no tile fits shared memory, or no thread's taps its registers"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> _Layer | None:
        if _Layer.of(problem, layouts) is None:
            return None
        problem = standard(problem)
        return _Layer.of(problem, Layouts.dense(problem))

    def configs(self, at: _Layer, pass_: Pass, device: DeviceInfo) -> list[WindowsConfig]:
        members = dict.fromkeys(legal_configs(at, 0 if device.has_wgmma else _SPARE))
        return sorted([config for config in members if config.threads >= _FEW_THREADS] or members)

    def seconds(self, at: _Layer, pass_: Pass, device: DeviceInfo, config: WindowsConfig) -> float:
        tiling = _tiling(at, config, device)
        return math.inf if tiling is None else _estimate(at, config, tiling, device)[0]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WindowsConfig
    ) -> Cost | None:
        layer = _Layer.of(problem, layouts)
        assert layer is not None
        tiling = _tiling(layer, config, device)
        return None if tiling is None else _estimate(layer, config, tiling, device)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WindowsConfig
    ) -> Program:
        layer = _Layer.of(problem, layouts)
        assert layer is not None
        tiling = _tiling(layer, config, device)
        assert tiling is not None
        length, planes = parted(tiling.total, _splits(layer, config, tiling, device))
        flush = max(1, _CHAIN * config.k_slices // math.prod(tiling.tile_extent))
        source = KernelSource(
            kernel=self.name,
            dtype=problem.dtype,
            wide_offsets=True,
            constants=(
                *layer_constants(layer.problem, pass_),
                ("X_LAST", layer.x.channels_last),
                *constants_of(config),
                ("MIN_BLOCKS", 1),
            ),
        )
        params = {
            "x": layer.x,
            "g": layer.grad,
            "tile_extent": tiling.tile_extent,
            "tiles": tiling.tiles,
            "rows": tiling.rows,
            "pitch": tiling.pitch,
            "x_pitch": tiling.x_pitch,
            "x_piece": layer.x_piece,
            "g_piece": layer.grad_piece,
            "lanes_log": _lanes_log(layer, tiling),
            "window_at": tiling.window_at,
            "stage": tiling.stage,
            "flush": flush,
            **split_params(problem, length, tiling.total),
        }
        blocks, shared_bytes = _blocks(layer, config) * planes, _shared_bytes(layer, config, tiling)
        main = main_step(source, blocks, config.threads, shared_bytes, params)
        last = layer.problem != problem and problem.taps > 1
        return assemble(problem, pass_, main, splits=planes, dst_channels_last=last)


def _blocks(layer: _Layer, config: WindowsConfig) -> int:
    """Blocks of a split."""
    return blocks_of(layer.problem, Pass.WEIGHT_GRAD, config.rows, config.out_chunk)


def _splits(layer: _Layer, config: WindowsConfig, tiling: _Tiling, device: DeviceInfo) -> int:
    """Split-K count of the positions: every multiprocessor has a block."""
    full = max(1, device.multiprocessors // _blocks(layer, config))
    return max(1, min(full, affordable_planes(layer.problem), tiling.total))


def _shared_bytes(layer: _Layer, config: WindowsConfig, tiling: _Tiling) -> int:
    sums = config.k_slices * config.rows * config.out_chunk * layer.problem.taps
    return 4 * max(2 * tiling.stage, sums)


def _lanes_log(layer: _Layer, tiling: _Tiling) -> int:
    """Logarithm of the threads along a row of the input: a thread for each piece, at most a warp."""
    return min(5, (math.ceil(tiling.tile_extent[3] / layer.x_piece) - 1).bit_length())


@lru_cache(maxsize=8192)
def _tiling(layer: _Layer, config: WindowsConfig, device: DeviceInfo) -> _Tiling | None:
    """The tiling of least work whose stages fit shared memory."""
    (height, width), terms = layer.x.shape[3:], costs("direct_wgrad_windows", device)
    extents = itertools.product(_widths(width), _heights(height))
    tilings = (_tile(layer, config, (1, 1, h, w), terms) for w, h in extents)
    fitting = (each for each in tilings if _shared_bytes(layer, config, each) <= device.shared_bytes_per_block)
    return min(fitting, key=lambda each: _cycles(layer, config, each, device), default=None)


def _widths(size: int) -> list[int]:
    """Extents along the width worth trying: about equal shares, in whole steps of a thread."""
    counts = range(math.ceil(size / _MOST_ROW), math.ceil(size / 8) + 1)
    found = {round_up(math.ceil(size / count), _POSITIONS) for count in itertools.islice(counts, 8)}
    return sorted(found | {16, 32}, reverse=True)


def _heights(size: int) -> list[int]:
    return sorted({min(size, count) for count in (1, 2, 3, 4, 6, 8, 12, 16)})


def _tile(layer: _Layer, config: WindowsConfig, tile: Four, terms: Costs) -> _Tiling:
    _, slabs, rows, columns = extent_of_window(layer.problem, tile)
    axis = layer.problem.axes3[2]
    unused = round_up(axis.kernel, config.thread_columns) - axis.kernel  # of a row's last thread
    columns += layer.skew + unused * axis.dilation
    pitch = 4 * (math.ceil(columns / 4) | 1)  # an odd number of quads: rows begin in different banks
    positions = tile[2] * tile[3]
    x_pitch = config.rows if layer.x.channels_last else positions + (4 - positions) % 32
    window_at = config.rows * positions if layer.x.channels_last else config.rows * x_pitch
    window_rows = config.out_chunk * slabs * rows
    stage = window_at + window_rows * pitch
    tiles = tiles_of(layer.problem.batch, layer.x.shape[2:], tile)
    cycles = _tile_cycles(layer, config, positions, window_rows, pitch, terms)
    return _Tiling(tile, tiles, rows, pitch, x_pitch, window_at, stage, cycles)


def _quads(layer: _Layer, thread_columns: int, positions: int = _POSITIONS) -> int:
    """Quads of a row of the window that ``positions`` of a thread read."""
    axis, skew = layer.problem.axes3[2], layer.skew
    places = itertools.product(range(positions), range(thread_columns))
    return len({(skew + position * axis.stride + column * axis.dilation) // 4 for position, column in places})


def _tile_cycles(
    layer: _Layer, config: WindowsConfig, positions: int, window_rows: int, pitch: int, terms: Costs
) -> float:
    """Predicted cycles of a multiprocessor for a tile."""
    steps = math.ceil(positions / _POSITIONS / config.k_slices)
    products = _POSITIONS * config.thread_rows * config.thread_lines * config.thread_columns
    of_window = config.thread_lines * _quads(layer, config.thread_columns)
    warps = 4 * math.ceil(config.threads / 128)  # as if rounded up to a warp for each scheduler
    issued = (products + config.thread_rows + of_window + terms.loop) / 4 * terms.issued * warps
    passes = config.thread_rows * math.ceil(min(32, config.row_threads) / 8) + of_window
    x_copies = config.rows * positions / layer.x_piece / 32
    copies = (x_copies + window_rows * math.ceil(pitch / layer.grad_piece / 32)) * terms.copy + window_rows * terms.row
    return steps * max(issued, passes * terms.wavefront * config.threads / 32) + copies / 4 + terms.stage


def _cycles(layer: _Layer, config: WindowsConfig, tiling: _Tiling, device: DeviceInfo) -> float:
    """Predicted cycles of the busiest multiprocessor."""
    splits = _splits(layer, config, tiling, device)
    waves = math.ceil(_blocks(layer, config) * splits / device.multiprocessors)
    return waves * math.ceil(tiling.total / splits) * tiling.cycles


def _estimate(layer: _Layer, config: WindowsConfig, tiling: _Tiling, device: DeviceInfo) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("direct_wgrad_windows", device)
    splits = _splits(layer, config, tiling, device)
    work = _cycles(layer, config, tiling, device) / device.clock_hz
    moving = layer.problem.bytes / device.copy_bytes_per_second
    planes = 8 * splits * layer.columns * layer.problem.in_channels / device.copy_bytes_per_second
    return overlapped_time(work, moving, terms.together) + planes + terms.end, slower_of(work, moving)[1]


def legal_configs(layer: _Layer, spare: int = 0) -> Iterator[WindowsConfig]:
    """Configs worth trying; a thread needs ``spare`` registers beyond the estimate."""
    problem = layer.problem
    axis = problem.axes3[2]
    taps = problem.axes3[0].kernel * problem.axes3[1].kernel
    for out_chunk in equal_parts(problem.out_channels_per_group)[:_MOST_CHUNKS]:
        for thread_lines, columns, thread_rows in _thread_tiles(layer, out_chunk * taps):
            row_shares = math.ceil(axis.kernel / columns)
            registers = _registers(layer, thread_rows, thread_lines, columns) + spare
            for row_blocks in (1, 2):
                row_threads = math.ceil(math.ceil(problem.in_channels_per_group / row_blocks) / thread_rows)
                used = row_threads * math.ceil(out_chunk * taps / thread_lines) * row_shares
                if used > _MOST_SLICE:
                    continue
                whole = round_up(used, 32)
                slice_threads = whole if whole <= 1.1 * used else used
                for threads in _THREADS:
                    k_slices = max(1, threads // slice_threads)
                    config = WindowsConfig(
                        thread_rows, thread_lines, columns, row_threads, out_chunk, k_slices, slice_threads
                    )
                    if round_up(config.threads, 128) * registers <= REGISTERS:
                        yield config


def _registers(layer: _Layer, thread_rows: int, thread_lines: int, columns: int) -> int:
    """Estimated registers of a thread; with fewer the compiler spills."""
    all_quads = _quads(layer, columns)
    if layer.x.channels_last:  # quads of one position, and quads that the next position adds
        of_one = _quads(layer, columns, 1)
        held = 4 * thread_lines * (of_one + (all_quads - of_one) / (_POSITIONS - 1)) + 8
    else:
        held = 4 * thread_lines * all_quads + 4
    return round_up(math.ceil(thread_rows * thread_lines * columns + held + 4 * thread_lines + 38), 8)


def _thread_tiles(layer: _Layer, lines: int) -> Iterator[tuple[int, int, int]]:
    """Kernel rows of a thread, columns of each, and input channels of the thread."""
    axis = layer.problem.axes3[2]
    for columns in equal_parts(axis.kernel):
        if columns < axis.kernel:  # threads begin at whole quads
            columns = round_up(columns, 4 // math.gcd(4, axis.dilation))
        quads = _quads(layer, columns) if columns <= _MOST_SUMS // 4 else math.inf
        for thread_lines, thread_rows in itertools.product(range(1, min(lines, _MOST_LINES) + 1), (8, 4)):
            if thread_rows * thread_lines * columns <= _MOST_SUMS and thread_lines * quads <= _MOST_QUADS:
                yield thread_lines, columns, thread_rows
