"""Both gradients by mma.sync, ``kernels/window_dgrad_mma.cu`` and ``kernels/window_wgrad_mma.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import Constant, KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import equal_part, parted, round_up
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import sides_of
from polyphase.schedules.cost import overlapped_time, slower_of, waves_of
from polyphase.schedules.schedule import Cost
from polyphase.schedules.tiles import Four, affordable_planes, constants_of, layer_constants, least
from polyphase.schedules.window_gemm.stages import (
    MAX_SIDE,
    MOVING_BYTES,
    STILL_BYTES,
    StageBox,
    channel_piece,
    copy_cycles,
    row_bytes,
    row_piece,
    weight_box,
    weight_rows,
)
from polyphase.schedules.window_gemm.window import (
    Gradient,
    Tiles,
    blocks_of,
    extent_of_window,
    input_tiles,
    split_params,
    tile_extents,
    window_of,
)

_WARPS = 8
_THREADS = 32 * _WARPS
_MOST_STRIDED_TAPS = 24  # float32 with a stride: with more taps a config of one resident block spills
_STAGES = (4, 3, 2)  # pipeline depths, deepest first
_MAX_TAPS = 512
_MOST_TERMS = 12288  # K of an input gradient in half types; at 16384 a few elements in a million were too far off
_LEAST_ROW = 8  # positions of a tile along w, unless images are narrower or nothing else fits
# A warp's tiles of 16 rows, its tiles of 8 columns, and warps along M.
_SHAPES = ((4, 8, 2), (4, 8, 1), (2, 8, 2), (4, 4, 2), (4, 4, 1), (2, 4, 2), (2, 8, 1), (2, 4, 1), (1, 8, 1), (1, 4, 1))


class MmaConfig(NamedTuple):
    """The compile-time shape of a kernel; ``mainloop/window_mma.cuh`` says what the names mean."""

    row_tiles: int
    column_tiles: int
    row_warps: int
    out_chunk: int
    positions: int
    buffers: int
    min_blocks: int

    @property
    def rows(self) -> int:
        """Input channels of a block."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def columns(self) -> int:
        """Positions, or pairs of output channel and tap, of a block."""
        return 8 * self.column_tiles * (_WARPS // self.row_warps)


@dataclass(frozen=True)
class _Tiling(Tiles):
    """The tiles of a config, and the shared memory that they take."""

    window: StageBox
    skew: int
    operand: StageBox
    table_bytes: int
    stage_bytes: int


class _WindowMma(Gradient):
    """What the two kernels share."""

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if problem.taps > _MAX_TAPS:
            return f"{problem.taps} taps are too many for a stage (at most {_MAX_TAPS})"
        terms = problem.out_channels_per_group * problem.taps
        if self.pass_ is Pass.INPUT_GRAD and problem.dtype != "float32" and terms > _MOST_TERMS:
            return f"sums of {terms} terms lose too much accuracy in tensor cores (at most {_MOST_TERMS})"
        return None

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem:
        return standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[MmaConfig]:
        return [each._replace(buffers=count) for each in legal_configs(at, pass_, device) for count in _STAGES]

    def search(
        self,
        at: ConvTransposeProblem,
        pass_: Pass,
        device: DeviceInfo,
        most: int | None = None,
        below: float = math.inf,
    ) -> dict[MmaConfig, float]:
        """Each config at the most stages that leave room for its resident blocks."""
        found = sorted(filter(None, (_deepest(at, pass_, each, device) for each in legal_configs(at, pass_, device))))
        return {config: seconds for seconds, config in found}

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: MmaConfig
    ) -> Cost | None:
        tiling = _tiling(problem, pass_, layouts, config, device)
        return None if tiling is None else _estimate(problem, pass_, config, tiling, device)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: MmaConfig
    ) -> Program:
        tiling = _tiling(problem, pass_, layouts, config, device)
        assert tiling is not None
        x, grad = sides_of(problem, layouts)
        blocks, planes = blocks_of(problem, pass_, config.rows, config.out_chunk), 1
        params: dict[str, Any] = {
            **tiling.params(problem, layouts),
            "skew": tiling.skew,
            "table_bytes": tiling.table_bytes,
            "stage_bytes": tiling.stage_bytes,
        }
        if pass_ is Pass.WEIGHT_GRAD:
            length, planes = parted(tiling.total, _splits(problem, config, tiling, device))
            params |= split_params(problem, length, tiling.total) | {"x_box": tiling.operand}
        else:
            pairs = tiling.tile_extent[3] % 2 == 0 and row_piece(x, 8, True, 0) == 2
            params |= {"weight": weight_rows(problem, layouts), "weight_box": tiling.operand, "pairs": pairs}
            blocks *= tiling.total
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_, layouts.weight_channels_last),
            *((("X_CHANNELS_LAST", x.channels_last),) if pass_ is Pass.WEIGHT_GRAD else ()),
            ("G_CHANNELS_LAST", grad.channels_last),
            ("WARPS", _WARPS),
            ("LOAD_WARPS", _WARPS),
            ("FIRST_LOAD_WARP", 0),
            *constants_of(config, "row_tiles column_tiles row_warps out_chunk positions min_blocks"),
            ("STAGES", config.buffers),
        )
        source = KernelSource(self.name, problem.dtype, True, constants)
        main = main_step(source, blocks * planes, _THREADS, _shared_bytes(config, tiling), params)
        return assemble(problem, pass_, main, splits=planes)


class WindowDgradMma(_WindowMma):
    """The input gradient: a tile of positions and all output channels, stage by stage."""

    passes = (Pass.INPUT_GRAD,)
    name = "window_dgrad_mma"


class WindowWgradMma(_WindowMma):
    """The weight gradient: all taps of some channels, in splits of batch × positions, added in a fixed order."""

    passes = (Pass.WEIGHT_GRAD,)
    name = "window_wgrad_mma"


def _splits(problem: ConvTransposeProblem, config: MmaConfig, tiling: _Tiling, device: DeviceInfo) -> int:
    """Split-K count of the positions: one wave of blocks, and no split is mostly its prologue."""
    blocks = blocks_of(problem, Pass.WEIGHT_GRAD, config.rows, config.out_chunk)
    full = max(1, device.multiprocessors * config.min_blocks // blocks)
    return max(1, min(full, affordable_planes(problem), tiling.total // 8))


def _depth(problem: ConvTransposeProblem, pass_: Pass, config: MmaConfig) -> int:
    """Terms of a sum in one stage."""
    if pass_ is Pass.WEIGHT_GRAD:
        return config.positions
    return round_up(config.out_chunk * problem.taps, 32 // DTYPE_BYTES[problem.dtype])


def _shared_bytes(config: MmaConfig, tiling: _Tiling) -> int:
    return tiling.table_bytes + max(config.buffers * tiling.stage_bytes, 8 * config.columns)


@lru_cache(maxsize=8192)
def _tiling(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: MmaConfig, device: DeviceInfo
) -> _Tiling | None:
    """The tiling of least work whose stages fit shared memory."""
    terms = costs("window_mma", device)
    best = _cut(problem, pass_, layouts, config._replace(buffers=0), terms).best(config, device)
    if best is None and layouts.aligned:  # rows of whole pieces are longer, and may not fit
        return _tiling(problem, pass_, replace(layouts, aligned=False), config, device)
    return best


class _Cut:
    """The tilings of a config, at any pipeline depth."""

    def __init__(
        self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: MmaConfig, terms: Costs
    ) -> None:
        self._layer, self._terms = (problem, pass_, layouts, config), terms
        self._tilings: dict[Four, _Tiling] = {}
        least_row = min(_LEAST_ROW, problem.input_size[-1])
        extents = list(tile_extents(problem, config.positions))
        self._long = [each for each in extents if each[3] >= least_row]
        self._short = [each for each in extents if each[3] < least_row]
        # Lower bounds of the work: products alone, without loads.
        stage = _product_cycles(problem, pass_, config, terms)
        self._operand = config.rows * _depth(problem, pass_, config) * DTYPE_BYTES[problem.dtype]  # bytes of a stage
        self._bounds = [math.prod(input_tiles(problem, each)) * stage for each in self._long]

    def best(self, config: MmaConfig, device: DeviceInfo) -> _Tiling | None:
        """The tiling of least work that fits at the depth of ``config``; if all rows are short, the first that fits."""
        problem, pass_, _, _ = self._layer

        def work_of(place: int) -> float | None:
            tiling = self._fitting(self._long[place], config, device)
            return None if tiling is None else tiling.total * _stage_cycles(problem, pass_, config, tiling, self._terms)

        place = least(self._bounds, work_of)
        if place is not None:
            return self._fitting(self._long[place], config, device)
        tilings = (self._fitting(each, config, device) for each in self._short)
        return next((tiling for tiling in tilings if tiling is not None), None)

    def tiling(self, tile: Four) -> _Tiling:
        """The tiling whose tiles have these extents."""
        if tile not in self._tilings:
            self._tilings[tile] = _tiles(*self._layer, tile)
        return self._tilings[tile]

    def _fitting(self, tile: Four, config: MmaConfig, device: DeviceInfo) -> _Tiling | None:
        """The tiling with the most images per tile that fits."""
        problem, (images, depth, height, width) = self._layer[0], tile
        _, *extent = extent_of_window(problem, tile)
        window = config.out_chunk * math.prod(extent) * DTYPE_BYTES[problem.dtype]  # bytes of an image's window
        while images:
            if config.buffers * (self._operand + images * window) <= device.shared_bytes_per_block:
                tiling = self.tiling((images, depth, height, width))
                if _fits(config, tiling, device):
                    return tiling
            images //= 2
        return None


_cut = lru_cache(maxsize=128)(_Cut)


def _fits(config: MmaConfig, tiling: _Tiling, device: DeviceInfo) -> bool:
    """Whether stages fit shared memory, and coordinates in the window the 16 bits of a `Place`."""
    return _shared_bytes(config, tiling) <= device.shared_bytes_per_block and max(tiling.window.extent) <= MAX_SIDE


def _tiles(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: MmaConfig, tile: tuple[int, int, int, int]
) -> _Tiling:
    size = DTYPE_BYTES[problem.dtype]
    x, _ = sides_of(problem, layouts)
    window, skew = window_of(problem, layouts, config.out_chunk, tile)
    depth = _depth(problem, pass_, config)
    a_pitch = depth * size + 16
    if pass_ is Pass.WEIGHT_GRAD:
        if x.channels_last:
            piece = channel_piece(x, problem.in_channels_per_group, config.rows, size, layouts.aligned)
            operand = StageBox(tile, piece, a_pitch, depth)
        else:
            piece = row_piece(x, size, layouts.aligned, tile[3])
            operand = StageBox(tile, piece, a_pitch, depth // piece)
        tables = 4 * depth
    else:
        operand = weight_box(problem, layouts, config.out_chunk, a_pitch, depth)
        tables = 4 * (depth + config.columns)
    moving = pass_ is Pass.WEIGHT_GRAD
    tables += MOVING_BYTES * operand.places + (MOVING_BYTES if moving else STILL_BYTES) * window.places
    stage = config.rows * a_pitch + config.out_chunk * window.pitch
    return _Tiling(tile, input_tiles(problem, tile), window, skew, operand, round_up(tables, 128), round_up(stage, 128))


def _stage_cycles(
    problem: ConvTransposeProblem, pass_: Pass, config: MmaConfig, tiling: _Tiling, terms: Costs
) -> float:
    """Predicted cycles of a multiprocessor for a stage of a block: products, copies and bytes moved."""
    size = DTYPE_BYTES[problem.dtype]
    depth = _depth(problem, pass_, config)
    cycles = _product_cycles(problem, pass_, config, terms)
    moved = 0.0
    for part, channels in ((tiling.operand, config.rows), (tiling.window, config.out_chunk)):
        cycles += copy_cycles(part, channels, _WARPS, size, terms)
        of_weight = part is tiling.operand and pass_ is Pass.INPUT_GRAD
        moved += channels * (depth * size if of_weight else row_bytes(part, size))
    return cycles + moved * terms.byte + terms.stage + (terms.lone_stage if config.min_blocks == 1 else 0.0)


def _product_cycles(problem: ConvTransposeProblem, pass_: Pass, config: MmaConfig, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for the products of a stage."""
    size = DTYPE_BYTES[problem.dtype]
    operations = _depth(problem, pass_, config) * size // 32
    products = config.row_tiles * config.column_tiles
    slots = config.row_tiles + config.column_tiles * (4 if size == 4 else 10) + products + 8
    return operations * _WARPS * (products * terms.operation + slots / 4 * terms.slot)


def _estimate(
    problem: ConvTransposeProblem, pass_: Pass, config: MmaConfig, tiling: _Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("window_mma", device)
    stage = _stage_cycles(problem, pass_, config, tiling, terms)
    blocks, block = blocks_of(problem, pass_, config.rows, config.out_chunk), terms.block
    if pass_ is Pass.WEIGHT_GRAD:
        splits = _splits(problem, config, tiling, device)
        stages = math.ceil(tiling.total / splits)
        blocks *= splits
        end = terms.reduce + 8 * splits * math.prod(problem.weight_shape) / device.copy_bytes_per_second
    else:
        stages = math.ceil(problem.out_channels_per_group / config.out_chunk)
        blocks *= tiling.total
        end = 0.0
        block += terms.stored * config.rows * config.columns
    resident, waves = waves_of(blocks, config.min_blocks, device)
    cycles = waves * resident * (stages * stage + block)
    work = cycles / device.clock_hz + end
    if problem.channels_last and tiling.window.piece == 1:
        if pass_ is Pass.INPUT_GRAD:
            work *= terms.elementwise_input_grad
        elif problem.dtype == "float32":
            work *= terms.elementwise_weight_grad
    moving = problem.bytes / device.copy_bytes_per_second
    return terms.preference * overlapped_time(work, moving, terms.overlap), slower_of(work, moving)[1]


def _deepest(
    problem: ConvTransposeProblem, pass_: Pass, config: MmaConfig, device: DeviceInfo
) -> tuple[float, MmaConfig] | None:
    """The config with the most stages that leave room for its resident blocks, and its predicted seconds."""
    layouts = Layouts.dense(problem)
    terms = costs("window_mma", device)
    # Unaligned tensors, copied element by element, must have a tiling as well.
    unaligned = _cut(problem, pass_, replace(layouts, aligned=False), config._replace(buffers=0), terms)
    single = unaligned.tiling((1, 1, 1, 1))
    for buffers in _STAGES:
        deeper = config._replace(buffers=buffers)
        tiling = _tiling(problem, pass_, layouts, deeper, device)
        if tiling is None or not _fits(deeper, single, device):
            continue
        shared = config.min_blocks * (_shared_bytes(deeper, tiling) + 1024)
        if shared <= device.shared_bytes_per_multiprocessor or buffers == _STAGES[-1]:
            return _estimate(problem, pass_, deeper, tiling, device)[0], deeper
    return None


def legal_configs(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> Iterator[MmaConfig]:
    """Configs worth trying, without their pipeline depth."""
    out, taps = problem.out_channels_per_group, problem.taps
    per_piece = 16 // DTYPE_BYTES[problem.dtype]
    for row_tiles, column_tiles, row_warps in _SHAPES:
        resident = 1 if row_tiles * column_tiles > 16 else 2
        strided = max(problem.stride) > 1 and taps > _MOST_STRIDED_TAPS
        spills = not device.has_tma or (pass_ is Pass.WEIGHT_GRAD and (row_warps == 2 or strided))
        if resident == 1 and problem.dtype == "float32" and spills:
            continue  # registers spill
        config = MmaConfig(row_tiles, column_tiles, row_warps, 1, 1, 2, resident)
        if config.rows > 32 and config.rows >= 2 * problem.in_channels_per_group:
            continue
        if pass_ is Pass.WEIGHT_GRAD:
            if taps > config.columns:
                continue
            chunk = equal_part(out, config.columns // taps)
            chunks = {chunk, min(config.columns // taps, round_up(chunk, per_piece))}
            sizes: Iterator[tuple[int, int]] = itertools.product(chunks, (32, 64))
        else:
            fitting = (1 << i for i in range(7) if 1 << i < 2 * out)
            sizes = ((chunk, config.columns) for chunk in fitting if 16 <= chunk * taps <= 512 or chunk == 1)
        for chunk, positions in sizes:
            yield config._replace(out_chunk=chunk, positions=positions)
