"""The input gradient of few channels in a group without tensor cores, ``kernels/window_dgrad_fma.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import REGISTERS, DeviceInfo
from polyphase.problem.integers import equal_part, parted, round_up
from polyphase.problem.layouts import Layouts, five
from polyphase.problem.problem import accumulator_bytes
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cost import overlapped_time, slower_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import Four, constants_of, layer_constants, least
from polyphase.schedules.window_gemm.stages import MAX_SIDE, MOVING_BYTES
from polyphase.schedules.window_gemm.wgmma_window import (
    PIECE_BYTES,
    Window,
    copied_window,
    first_places,
    least_extent,
    wavefronts,
)
from polyphase.schedules.window_gemm.window import Tiles, extents_of, input_tiles

_MOST_CHANNELS = 64  # input channels of a group: with more, `direct_tiled` reads its weights less often
_FEW, _MANY_TERMS = 8, 1024  # channels of a group and terms of a sum from which on tensor cores are faster
_MOST_SUMS, _MOST_WEIGHTS = 32, 60  # registers of a thread: sums, and by rows weights
_MOST_THREADS = 512
_MOST_TERMS, _MOST_EXACT_TERMS = 256, 64  # most terms of a sum in a stage, in float32, unless a channel has more
_WEIGHT_ITEMS = 16  # most weights that a thread loads for a stage
_CHAIN = 50  # terms of float32 after which a chain may end with its stage (docs/numerics.md)
_PLACE = 8  # bytes of a `Place`
_BUFFERS = 2
_RESERVED = 1024  # bytes of shared memory of a block in addition
_LANES = 32


class FmaConfig(NamedTuple):
    """The compile-time shape of ``window_dgrad_fma.cu``, whose file says what the names mean."""

    slice_threads: int
    in_slices: int
    in_tile: int
    cells: int
    by_rows: bool
    out_chunk: int
    min_blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.slice_threads * self.in_slices


@dataclass(frozen=True)
class _Tiling(Tiles):
    """The tiles of a config; ``lanes``: the threads of a slice."""

    window: Window
    lanes: Four
    conflicts: float


class WindowDgradFma(Schedule):
    """A tile of positions, whose threads read one window for all taps."""

    name = "window_dgrad_fma"
    passes = (Pass.INPUT_GRAD,)
    adapts = True
    kept = True
    offered = 4

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if not device.has_tma:
            return f"{device.arch} has no bulk copies"
        if problem.channels_last:
            return "needs NCHW"
        if problem.in_channels_per_group > _MOST_CHANNELS:
            return f"more than {_MOST_CHANNELS} input channels in a group"
        if problem.tf32 or DTYPE_BYTES[problem.dtype] == 2:
            fewer = min(problem.in_channels_per_group, problem.out_channels_per_group)
            terms = problem.out_channels_per_group * problem.taps
            if fewer > _FEW or terms > _MANY_TERMS:
                return f"left to tensor cores: {fewer} channels in a group, and sums of {terms} terms"
        return None

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        return standard(problem) if layouts.output[4] == 1 else None

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[FmaConfig]:
        return list(legal_configs(at))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: FmaConfig
    ) -> Cost | None:
        tiling = _tiling(problem, layouts, config, device)
        return None if tiling is None else _seconds(problem, config, tiling, device)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: FmaConfig
    ) -> Program:
        tiling = _tiling(problem, layouts, config, device)
        assert tiling is not None
        work_tiles, length, blocks = _shares(problem, config, tiling, device)
        source = KernelSource(
            self.name,
            problem.dtype,
            True,
            (
                *layer_constants(problem, pass_, layouts.weight_channels_last),
                ("WARPS", config.threads // 32),
                ("LOAD_WARPS", config.threads // 32),
                ("FIRST_LOAD_WARP", 0),
                *constants_of(config, "in_slices in_tile cells by_rows out_chunk min_blocks"),
                ("FLUSH", _flush(problem, config)),
            ),
        )
        params = {
            **tiling.params(problem, layouts),
            "work_tiles": work_tiles,
            "work_tiles_per_block": length,
            "lanes": tiling.lanes,
            "window_bytes": _window_bytes(problem, config, tiling.window),
        }
        shared = _shared(problem, config, tiling.window) - _RESERVED
        return assemble(problem, pass_, main_step(source, blocks, config.threads, shared, params))


def legal_configs(problem: ConvTransposeProblem) -> Iterator[FmaConfig]:
    """Every config of a layer."""
    inputs, out, taps = problem.in_channels_per_group, problem.out_channels_per_group, problem.taps
    height = problem.axes3[1]
    in_tiles = sorted({equal_part(inputs, most) for most in (4, 8)})
    most = _MOST_EXACT_TERMS if problem.dtype == "float32" else _MOST_TERMS
    chunk = max(chunk for chunk in (1, 2, 4, 8) if chunk == 1 or (chunk < 2 * out and chunk * taps <= most))
    for threads, in_tile, cells in itertools.product((128, 256), in_tiles, (1, 2, 4, 8)):
        slices = min(math.ceil(inputs / in_tile), _MOST_THREADS // threads)
        config = FmaConfig(threads, slices, in_tile, cells, False, chunk, 1)
        if cells * in_tile > _MOST_SUMS or _weight_items(problem, config) > _WEIGHT_ITEMS:
            continue
        rows = height.kernel > 1 and cells > 1 and _slab(problem, config) <= _MOST_WEIGHTS
        for by_rows in {rows, rows and in_tile > 2}:
            config = config._replace(by_rows=by_rows)
            blocks = REGISTERS // (round_up(_registers(problem, config), 8) * config.threads)
            if blocks > 0:
                yield config._replace(min_blocks=min(blocks, 1536 // config.threads))


def _registers(problem: ConvTransposeProblem, config: FmaConfig) -> int:
    """Registers of a thread, on the safe side."""
    words = accumulator_bytes(problem.dtype) // 4
    sums = config.cells * config.in_tile * (1 if _flush(problem, config) >= _stages(problem, config) else 2)
    weights, met, places = _pitch(problem, config), config.cells, config.cells
    if config.by_rows:
        weights, met, places = _slab(problem, config), problem.axes3[2].kernel, 1
    return 64 + words * (sums + weights + met) + places + _weight_items(problem, config)


def _pitch(problem: ConvTransposeProblem, config: FmaConfig) -> int:
    """Weights of a tap in shared memory, for a slice."""
    vector = 16 // accumulator_bytes(problem.dtype)
    return round_up(config.in_tile, vector) if config.in_tile > 2 else config.in_tile


def _slab(problem: ConvTransposeProblem, config: FmaConfig) -> int:
    """Weights of a slab of taps in shared memory, for a slice."""
    _, height, width = problem.axes3
    return round_up(height.kernel * width.kernel * _pitch(problem, config), 16 // accumulator_bytes(problem.dtype))


def _weight_items(problem: ConvTransposeProblem, config: FmaConfig) -> int:
    """Weights of a stage that a thread loads."""
    return math.ceil(config.in_tile * config.in_slices * config.out_chunk * problem.taps / config.threads)


def _stages(problem: ConvTransposeProblem, config: FmaConfig) -> int:
    return math.ceil(problem.out_channels_per_group / config.out_chunk)


def _flush(problem: ConvTransposeProblem, config: FmaConfig) -> int:
    """Stages of a chain."""
    stages = _stages(problem, config)
    return min(stages, math.ceil(_CHAIN / (config.out_chunk * problem.taps))) if problem.dtype == "float32" else stages


def _window_bytes(problem: ConvTransposeProblem, config: FmaConfig, window: Window) -> int:
    """Bytes of a buffer's window."""
    return round_up(config.out_chunk * window.steps[3] * DTYPE_BYTES[problem.dtype] + PIECE_BYTES, 16)


def _shared(problem: ConvTransposeProblem, config: FmaConfig, window: Window) -> int:
    """Shared memory of a block, with the system's share."""
    slabs = config.out_chunk * problem.axes3[0].kernel * config.in_slices
    weights = slabs * _slab(problem, config) * accumulator_bytes(problem.dtype)
    places = _PLACE * config.slice_threads * (1 if config.by_rows else config.cells) + MOVING_BYTES * window.rows
    return _BUFFERS * (_window_bytes(problem, config, window) + weights) + places + _RESERVED


def _resident(problem: ConvTransposeProblem, config: FmaConfig, window: Window, device: DeviceInfo) -> int:
    """Resident blocks of a multiprocessor."""
    return max(1, min(config.min_blocks, device.shared_bytes_per_multiprocessor // _shared(problem, config, window)))


def _shares(
    problem: ConvTransposeProblem, config: FmaConfig, tiling: _Tiling, device: DeviceInfo
) -> tuple[int, int, int]:
    """Work tiles of the layer, work tiles of a block, and blocks."""
    work_tiles = math.ceil(problem.in_channels_per_group / (config.in_tile * config.in_slices))
    work_tiles *= problem.groups * tiling.total
    blocks = device.multiprocessors * _resident(problem, config, tiling.window, device)
    return (work_tiles, *parted(work_tiles, min(work_tiles, blocks))) if work_tiles else (0, 1, 0)


@lru_cache(maxsize=4096)
def _tiling(problem: ConvTransposeProblem, layouts: Layouts, config: FmaConfig, device: DeviceInfo) -> _Tiling | None:
    """The tiles of least work."""
    terms = costs("window_fma", device)
    found = list(_extents(problem, config))
    tilings: dict[int, _Tiling] = {}

    def work(place: int, conflicts: float, window: Window) -> float:
        tiles = math.prod(input_tiles(problem, found[place][1]))
        resident = _resident(problem, config, window, device)
        return tiles * _item_cycles(problem, config, window, conflicts, resident, terms)

    def least_work(place: int) -> float:
        extent = least_extent(problem, found[place][1], _is_masked(problem))
        columns, pitch = extent[3], math.prod(extent)
        window = Window(extent, (pitch, pitch, columns, pitch))
        fits = max(extent) <= MAX_SIDE and _shared(problem, config, window) <= device.shared_bytes_per_block + _RESERVED
        return work(place, 1.0, window) if fits else math.inf

    def work_of(place: int) -> float | None:
        lanes, extent = found[place]
        conflicts = partial(_conflicts, problem, config, lanes)
        window = copied_window(problem, layouts, config.out_chunk, extent, conflicts, _is_masked(problem))
        if window is None or _shared(problem, config, window) > device.shared_bytes_per_block + _RESERVED:
            return None
        tilings[place] = _Tiling(extent, input_tiles(problem, extent), window, lanes, conflicts(window.steps))
        return work(place, tilings[place].conflicts, window)

    best = least(map(least_work, range(len(found))), work_of)
    return None if best is None else tilings[best]


def _is_masked(problem: ConvTransposeProblem) -> bool:
    """Whether threads have a mask of the taps along the width that read padding."""
    return problem.padding[-1] > 0 and problem.axes3[2].kernel <= _LANES


def _row_step(problem: ConvTransposeProblem) -> tuple[int, int]:
    """By rows: the distance of a thread's positions, and the rows by which each begins further."""
    axis = problem.axes3[1]
    return axis.element_step, axis.tap_step


def _extents(problem: ConvTransposeProblem, config: FmaConfig) -> Iterator[tuple[Four, Four]]:
    """A slice's threads along n, d, h and w, and the extents of their tile."""
    depth, height, width = five(problem.input_shape)[2:]
    step, cells = (_row_step(problem)[0], config.cells) if config.by_rows else (1, 1)
    most = config.slice_threads * (1 if config.by_rows else config.cells)
    for images, d, h, w in extents_of(problem.batch, (depth, math.ceil(height / cells), width), most):
        h = round_up(h, step)
        images = min(images, most // (d * h * w))
        if 4 * max(1, images) * d * h * w < most and images < problem.batch:
            continue  # most threads would idle
        for halved in range(images.bit_length()):
            lanes = images >> halved, d, h, w
            yield lanes, (lanes[0], d, h * cells, w)


def _conflicts(problem: ConvTransposeProblem, config: FmaConfig, lanes: Four, steps: Four) -> float:
    """Wavefronts of a warp's read of a window whose images, slabs and rows are ``steps`` apart."""
    of_d, of_h, of_w = problem.axes3
    step, cells = (_row_step(problem)[0], config.cells) if config.by_rows else (1, 1)
    (n, d, h, w), (image, slab, row, _) = lanes, steps
    row *= of_h.stride
    places = first_places((n, d, h // step, step, w), (image, of_d.stride * slab, step * cells * row, row, of_w.stride))
    return wavefronts(places, DTYPE_BYTES[problem.dtype])


@lru_cache(maxsize=4096)
def _product(problem: ConvTransposeProblem, config: FmaConfig, terms: Costs) -> tuple[float, float, float]:
    """For a stage: a thread's issue slots, its reads of the window, and its reads of weights."""
    depth, height, width = problem.axes3
    words, taps = accumulator_bytes(problem.dtype) // 4, height.kernel * width.kernel
    if config.by_rows:
        further = _row_step(problem)[1]
        rows = (config.cells - 1) * min(further, height.kernel) + height.kernel
        reads, weights, lines = rows * width.kernel, math.ceil(_slab(problem, config) * words / 4), rows
    else:
        each = math.ceil(_pitch(problem, config) * words / 4)
        reads, weights, lines = taps * config.cells, taps * each, height.kernel * (1 + config.cells)
    slabs = config.out_chunk * depth.kernel
    read = terms.read + (terms.widen if DTYPE_BYTES[problem.dtype] == 2 else 0.0)
    products = taps * config.cells * config.in_tile * words
    slots = products + reads * read + weights * terms.weight_read + lines * terms.line + terms.slab
    return slabs * slots, slabs * reads * words, slabs * weights


def _item_cycles(
    problem: ConvTransposeProblem, config: FmaConfig, window: Window, conflicts: float, resident: int, terms: Costs
) -> float:
    """Predicted cycles of a multiprocessor for a work tile, with ``resident`` blocks."""
    slots, reads, weights = _product(problem, config, terms)
    rows = config.out_chunk * window.rows
    lines = math.ceil((window.extent[3] * DTYPE_BYTES[problem.dtype] + PIECE_BYTES - 1) / 128)
    slots += math.ceil(rows / config.threads) * terms.row_found + terms.stage
    slots += _weight_items(problem, config) * terms.weight
    warps = config.threads / 32
    moved = rows * (terms.row_copied + lines * terms.line_copied)
    stores = config.cells * (terms.place + config.in_tile * terms.store)
    stages = _stages(problem, config)
    instructions = warps * (stages * max(slots / 4, reads * conflicts + weights) + stores / 4)
    instructions *= 1 + terms.latency / math.pow(warps * resident, terms.hidden)
    return max(instructions, stages * moved)


def _seconds(
    problem: ConvTransposeProblem, config: FmaConfig, tiling: _Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("window_fma", device)
    work_tiles, length, blocks = _shares(problem, config, tiling, device)
    resident = max(1, math.ceil(blocks / device.multiprocessors))
    cycles = _item_cycles(problem, config, tiling.window, tiling.conflicts, resident, terms)
    cycles = resident * length * cycles + terms.launch
    read = work_tiles * problem.out_channels_per_group * math.prod(tiling.window.extent) * DTYPE_BYTES[problem.dtype]
    moving = max(problem.bytes, read / terms.from_l2) / device.copy_bytes_per_second
    work = cycles / device.clock_hz
    return overlapped_time(work, moving, terms.overlap), slower_of(work, moving)[1]
