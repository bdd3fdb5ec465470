"""Groups of few channels whose taps read a window in shared memory, ``kernels/grouped_gemm_window.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import SECTOR_BYTES, Layouts
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import CellAxis, Gather
from polyphase.schedules.cost import overlapped_time, slower_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tensor_cores import parts_of
from polyphase.schedules.tiles import Four, constants_of, extents_of_tiles, tiles_of
from polyphase.schedules.window_gemm.stages import row_piece

_WARPS = 8
_PIECE_BYTES = 16  # bytes of a piece: some channels of a pixel
_CHANNELS = range(2, 33)  # input channels and output channels of a group
_MAX_TERMS = 8192  # most terms of a sum, which tensor cores truncate
_MAX_SETS, _MAX_KERNEL = 64, 64  # elements of a cell; taps along a dimension, which the compiler pairs with outputs
_MAX_STEPS, _MAX_WEIGHT_BYTES = 512, 128 << 10
_MAX_COLUMNS = 64  # most columns of a set if cells are folded
_MAX_SIDE = 1 << 13  # pixels of a window, or outputs of a tile, along a dimension
_SUMS, _OTHER_REGISTERS = 64, 46  # most accumulators of a thread, and its other registers
_RESIDENT = (1, 2, 3, 4)
_SHARES, _SIZES = (1, 2, 3, 4, 6, 8), (1, 2, 4, 8, 16, 32)  # of tiles along a dimension
_NORM = 3  # exponent by which products, shared memory and instructions overlap


class WindowConfig(NamedTuple):
    """The compile-time shape of a kernel; ``grouped_gemm_window.cu`` says what the names mean."""

    fold_d: int
    fold_h: int
    fold_w: int
    merged: bool
    warps: int
    row_tiles: int
    column_tiles: int
    min_blocks: int

    @property
    def folds(self) -> tuple[int, int, int]:
        """Cells folded into one along depth, height and width."""
        return self.fold_d, self.fold_h, self.fold_w

    @property
    def rows(self) -> int:
        """Most cells of a tile."""
        return 16 * self.row_tiles * self.warps


@dataclass(frozen=True)
class _Side:
    """One dimension, as the kernel's ``Side``: a cell consists of ``fold`` natural cells."""

    axis: Axis
    forward: bool
    fold: int
    merged: bool

    @cached_property
    def natural(self) -> CellAxis:
        """A cell before it is folded."""
        return CellAxis(self.axis, self.forward)

    @property
    def outputs(self) -> int:
        """Outputs of a cell."""
        return self.fold * self.natural.dst

    @property
    def step(self) -> int:
        """Source elements from a cell to the next."""
        return self.fold * self.natural.src

    @property
    def sets(self) -> int:
        return 1 if self.merged else self.natural.dst

    def window(self, cells: int) -> int:
        """Source elements that ``cells`` neighbouring cells span."""
        return self.natural.window(cells * self.fold)

    @cached_property
    def pixels(self) -> tuple[int, ...]:
        """For each set the source elements that its outputs read, and any between these at their common step."""
        found = []
        for number in range(self.sets):
            read: set[int] = set()
            for output in range(number, self.outputs, self.sets):
                cell, phase = divmod(output, self.natural.dst)
                taps = self.axis.taps_by_phase.get(phase, ()) if self.forward else range(self.axis.kernel)
                read.update(cell * self.natural.src + self.natural.offset(tap) for tap in taps)
            first = min(read, default=0)
            step = reduce(math.gcd, (pixel - first for pixel in read), 0) or 1
            found.append((max(read) - first) // step + 1 if read else 0)
        return tuple(found)


@dataclass(frozen=True)
class _Product:
    """What all tiles of a layer share, for one way to fold cells."""

    gather: Gather
    sides: tuple[_Side, _Side, _Side]

    @cached_property
    def pieces(self) -> int:
        """Pieces of a pixel's channels, 16 bytes each."""
        return -(-self.gather.src_channels * DTYPE_BYTES[self.gather.dtype] // _PIECE_BYTES)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Operations of each set."""
        depth, height, width = (side.pixels for side in self.sides)
        return tuple(-(-d * h * w * self.pieces // 2) for d in depth for h in height for w in width)

    @cached_property
    def columns(self) -> int:
        """Columns of a set."""
        return math.prod(side.outputs // side.sets for side in self.sides) * self.gather.dst_channels

    @cached_property
    def cells(self) -> tuple[int, int, int]:
        """Cells of an image along depth, height and width."""
        depth, height, width = (-(-size // side.outputs) for size, side in zip(self.gather.dst.shape[2:], self.sides))
        return depth, height, width

    def blocks(self, config: WindowConfig) -> int:
        """Column blocks of a set."""
        return -(-self.columns // (8 * config.column_tiles))

    def weight_bytes(self, config: WindowConfig) -> int:
        """Shared memory of the weights, and of the tables of offsets, cells and columns."""
        steps = sum(self.steps)
        tiles = self.blocks(config) * config.column_tiles
        tables = round_up(8 * steps, 16) + 16 * (8 * len(self.steps) * tiles + config.rows)
        return 256 * steps * tiles + tables


class _Tiling(NamedTuple):
    """Tiles of cells; ``window``: its extents along n, d, h and w. Its rows begin ``skew`` pixels early."""

    tile_extent: Four
    tiles: Four
    window: Four
    skew: int
    vector: int

    @property
    def pixels(self) -> int:
        """Pixels of a window."""
        return math.prod(self.window)

    @property
    def plane(self) -> int:
        """Bytes from a piece of a pixel to the pixel's next piece."""
        return _PIECE_BYTES * self.pixels


class GroupedGemmWindow(Schedule):
    """Rows are cells, columns are outputs of a cell and channels; every tap reads a window in shared memory."""

    name = "grouped_gemm_window"
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)
    on_tensor_cores = True
    kept = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if problem.groups == 1 and problem.dims < 3:
            return "only for grouped layers and 3-D"
        for channels in (problem.in_channels_per_group, problem.out_channels_per_group):
            if channels not in _CHANNELS:
                many = "few" if channels < _CHANNELS.start else "many"
                allowed = f"{_CHANNELS.start} to {_CHANNELS.stop - 1}"
                return f"{channels} channels in a group are {many} (here {allowed})"
        if parts_of(problem) > 1:
            return "exact float32 is left to direct_tiled, which is as fast"
        terms = max(problem.in_channels_per_group, problem.out_channels_per_group) * problem.taps
        if terms > _MAX_TERMS:
            return f"sums of {terms} products are too long (at most {_MAX_TERMS})"
        if (phases := math.prod(problem.stride)) > _MAX_SETS:
            return f"{phases} elements of a cell are too many (at most {_MAX_SETS})"
        if (taps := max(problem.kernel_size)) > _MAX_KERNEL:
            return f"{taps} taps along a dimension are too many (at most {_MAX_KERNEL})"
        return None

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> Iterator[WindowConfig]:
        return legal_configs(at, pass_, device)

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WindowConfig
    ) -> Cost | None:
        found = _best(problem, pass_, layouts, config, device)
        return None if found is None else (found[1], found[2])

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WindowConfig
    ) -> Program:
        found = _best(problem, pass_, layouts, config, device)
        assert found is not None
        tiling, product = found[0], _product(problem, pass_, layouts, config.folds, config.merged)
        gather, total = product.gather, math.prod(tiling.tiles)
        constants = dict(gather.constants())
        del constants["DST_CHANNELS_LAST"]
        names = "fold_d fold_h fold_w merged warps row_tiles column_tiles min_blocks"
        constants |= {**dict(constants_of(config, names)), "PARTS": 1}
        source = KernelSource(self.name, problem.dtype, True, tuple(constants.items()))
        blocks = _blocks(problem.groups, total, config, device)
        first = [side.natural.first_offset for side in product.sides]
        params = {
            "src": gather.src,
            "dst": gather.dst,
            "batch": problem.batch,
            "groups": problem.groups,
            "tile_extent": tiling.tile_extent,
            "tiles": [max(1, count) for count in tiling.tiles],
            "extent": (*tiling.window[:3], tiling.window[3] // max(1, tiling.vector)),
            "first": (*first[:2], first[2] - tiling.skew),
            "skew": tiling.skew,
            "vector": tiling.vector,
            "apart": (*gather.src.strides[1:4], max(1, tiling.vector) * gather.src.strides[4]),
            "blocks": blocks,
            "pairs": _in_pairs(product, tiling),
        }
        shared_bytes = product.weight_bytes(config) + product.pieces * tiling.plane
        main = main_step(source, blocks * problem.groups if total else 0, 32 * config.warps, shared_bytes, params)
        return assemble(problem, pass_, main)


@lru_cache(maxsize=512)
def _product(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, folds: tuple[int, int, int], merged: bool
) -> _Product:
    gather = Gather.of(problem, pass_, layouts)
    depth, height, width = (_Side(axis, gather.forward, fold, merged) for axis, fold in zip(gather.axes, folds))
    return _Product(gather, (depth, height, width))


def legal_configs(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> Iterator[WindowConfig]:
    """Configs whose sums fit the registers, and whose weights leave room for the window of one cell."""
    layouts = Layouts.dense(problem)
    for folds in _folds(problem, pass_):
        several = pass_ is Pass.FORWARD and math.prod(problem.stride) > 1
        for merged in (False, True) if several else (False,):
            product = _product(problem, pass_, layouts, folds, merged)
            if math.prod(folds) > 1 and product.columns > _MAX_COLUMNS:
                continue
            tiles = -(-product.columns // 8)
            column_tiles = -(-tiles // -(-tiles // 8))
            for row_tiles, min_blocks in itertools.product((4, 2, 1), _RESIDENT):
                config = WindowConfig(*folds, merged, _WARPS, row_tiles, column_tiles, min_blocks)
                if _fits(product, config, device):
                    yield config


def _folds(problem: ConvTransposeProblem, pass_: Pass) -> list[tuple[int, int, int]]:
    """Folds to try along each dimension in which two cells read more than two pixels; along w only for 1-D layers."""
    depth, height, width = (
        CellAxis(axis, pass_ is Pass.FORWARD).window(2) > 2 and axis.kernel > 1 for axis in problem.axes3
    )
    down, across = (1, 2, 4), (1, 2, 4, 8)
    found = itertools.product(
        down if depth else (1,), down if height else (1,), across if width and problem.dims == 1 else (1,)
    )
    return [folds for folds in found if math.prod(folds) <= 8]


def _fits(product: _Product, config: WindowConfig, device: DeviceInfo) -> bool:
    sums = 4 * config.row_tiles * config.column_tiles
    operands = 2 * config.column_tiles + config.row_tiles + 4
    registers = device.registers_of(32 * config.warps * config.min_blocks)
    weights = product.weight_bytes(config)
    if sums > _SUMS or sums + operands + _OTHER_REGISTERS > registers:
        return False
    if sum(product.steps) > _MAX_STEPS or weights > _MAX_WEIGHT_BYTES:
        return False
    depth, height, width = (side.window(1) for side in product.sides)
    one = _PIECE_BYTES * product.pieces * depth * height * (width + 2)
    return weights + one <= device.shared_bytes_of(config.min_blocks)


def _blocks(groups: int, tiles: int, config: WindowConfig, device: DeviceInfo) -> int:
    """Blocks of a group."""
    return max(1, min(tiles, -(-device.multiprocessors * config.min_blocks // groups)))


@lru_cache(maxsize=4096)
def _best(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: WindowConfig, device: DeviceInfo
) -> tuple[_Tiling, float, str] | None:
    """The fitting tiling of least predicted time, this time, and what bounds it."""
    product = _product(problem, pass_, layouts, config.folds, config.merged)
    room = device.shared_bytes_of(config.min_blocks) - product.weight_bytes(config)
    found = []
    for tile in extents_of_tiles(problem.batch, product.cells, config.rows, _SHARES, _SIZES):
        tiling = _tiling(product, tile)
        if tiling is not None and product.pieces * tiling.plane <= room:
            found.append((tiling, *_seconds(problem, product, config, tiling, device)))
    return min(found, key=lambda each: each[1], default=None)


def _tiling(product: _Product, tile: Four) -> _Tiling | None:
    gather, (depth, height, width) = product.gather, product.sides
    size = DTYPE_BYTES[gather.dtype]
    tiles = tiles_of(gather.src.shape[0], product.cells, tile)
    vector = min(2, row_piece(gather.src, size, gather.aligned, 0 if tiles[3] <= 1 else tile[3] * width.step))
    channels, piece = gather.src_channels, _PIECE_BYTES // size
    if gather.src.strides[1] == 1 and gather.aligned and channels % piece == 0 and gather.src.apart(1) % piece == 0:
        vector = 0
    skew = width.natural.first_offset % max(1, vector)
    columns = round_up(width.window(tile[3]) + skew, max(1, vector))
    window = tile[0], depth.window(tile[1]), height.window(tile[2]), columns
    if max(map(abs, gather.src.strides[1:])) * 2 >= 1 << 31:  # strides have 32 bits in the kernel
        return None
    outputs = max(count * side.outputs for count, side in zip(tile[1:], product.sides))
    if max(*window, outputs) > _MAX_SIDE or product.pieces * math.prod(window) * _PIECE_BYTES >= 1 << 20:
        return None
    return _Tiling(tile, tiles, window, skew, vector)


def _in_pairs(product: _Product, tiling: _Tiling) -> bool:
    """Whether results of two neighbouring cells are adjacent, and aligned as a pair."""
    dst = product.gather.dst
    even = dst.apart(4) % 2 == 0 and dst.strides[4] == 1 and tiling.tile_extent[3] % 2 == 0
    return even and product.sides[2].outputs == 1 and product.gather.aligned


def _seconds(
    problem: ConvTransposeProblem, product: _Product, config: WindowConfig, tiling: _Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("grouped_gemm_window", device)
    groups, total = problem.groups, math.prod(tiling.tiles)
    blocks = _blocks(groups, total, config, device)
    warps = -(-math.prod(tiling.tile_extent) // (16 * config.row_tiles))
    work = terms.step * _multiplying(product, config, warps, terms) + _copying(product, tiling, terms)
    work += _storing(product, config, tiling, warps, terms) + terms.tile / config.min_blocks
    cycles = overlapped_time(work, terms.moved * _window_bytes(product, tiling), _NORM)
    cycles *= 1 + terms.alone / config.min_blocks**2
    prepared = terms.prepare * sum(product.steps) * product.blocks(config) * config.column_tiles
    at_once = min(groups * blocks, device.multiprocessors * config.min_blocks)
    resident, waves = -(-at_once // device.multiprocessors), -(-groups * blocks // at_once)
    all_cycles = waves * resident * (-(-total // blocks) * cycles + prepared) + terms.launch
    seconds, moving = all_cycles / device.clock_hz, problem.bytes / device.copy_bytes_per_second
    return overlapped_time(seconds, moving, 2), slower_of(seconds, moving)[1]


def _multiplying(product: _Product, config: WindowConfig, warps: int, terms: Costs) -> float:
    """Cycles of a multiprocessor for a tile's products: tensor cores, shared memory and instructions combined."""
    rows, columns = warps * config.row_tiles, config.column_tiles
    step = product.sides[2].step
    conflicts = min(8, step & -step)  # bank conflicts of ldmatrix, whose rows are ``step`` pixels apart
    shared = rows * 4 * conflicts + warps * 2 * columns
    cores = terms.product * rows * columns
    slots = rows * (1 + columns) + warps * (columns + 4)
    together = (shared**_NORM + cores**_NORM + (slots / 4) ** _NORM) ** (1 / _NORM)
    return float(sum(product.steps) * product.blocks(config) * together)


def _copying(product: _Product, tiling: _Tiling, terms: Costs) -> float:
    """Cycles of a multiprocessor for the instructions that load a window."""
    piece = _PIECE_BYTES // DTYPE_BYTES[product.gather.dtype]
    each = 20.0 if tiling.vector == 0 else (45 + 4 * piece) / tiling.vector + piece
    return float(terms.slot * product.pieces * tiling.pixels / 32 * each / 4)


def _window_bytes(product: _Product, tiling: _Tiling) -> float:
    """Bytes read from the L2 cache for a window: whole sectors, also at the ends of rows."""
    gather, size = product.gather, DTYPE_BYTES[product.gather.dtype]
    if tiling.vector == 0:
        return float(tiling.pixels * round_up(gather.src_channels * size, SECTOR_BYTES))
    return tiling.pixels * gather.src_channels * size * (1 + 24 / (tiling.window[3] * size))


def _storing(product: _Product, config: WindowConfig, tiling: _Tiling, warps: int, terms: Costs) -> float:
    """Cycles of a multiprocessor to store results: instructions, and sectors that they write in whole or in part."""
    gather, size = product.gather, DTYPE_BYTES[product.gather.dtype]
    results = warps * config.row_tiles * 16 * product.blocks(config) * len(product.steps) * 8 * config.column_tiles
    stored = math.prod(tiling.tile_extent) * math.prod(side.outputs for side in product.sides) * gather.dst_channels
    if gather.dst.strides[1] == 1:  # sectors of eight channels of a cell
        sectors = stored / 8 * max(1.0, 8 * size / SECTOR_BYTES)
    else:  # sectors of rows, also partial ones; each of two instructions, and of the phases, writes every other cell
        along = tiling.tile_extent[3] * product.sides[2].outputs
        sectors = stored / along * (1 + along * gather.dst.strides[4] * size / SECTOR_BYTES)
        sectors *= product.sides[2].outputs * (1 if _in_pairs(product, tiling) else 2)
    return float(terms.result * results / 32 + terms.sector * sectors)
