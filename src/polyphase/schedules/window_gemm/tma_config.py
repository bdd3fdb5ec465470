"""Configs of the TMA kernels of both gradients, their stages, tiles and windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Three
from polyphase.schedules.tensor_cores import (
    LEAST_PIPELINE,
    MAX_BOX_SIDE,
    MOST_COLUMNS,
    OPERATION_BYTES,
    STAGED_BYTES,
    pipeline_stages,
)
from polyphase.schedules.tiles import Four
from polyphase.schedules.window_gemm.window import (
    channel_pitch,
    input_tiles,
    is_long_sum,
    sectors_of,
    tile_extents,
    widths,
)

#: Taps of a window that is just a tile.
ALONE: Three = (1, 1, 1)

_TOGETHER = 8  # least positions along w of a tile whose taps share windows
_MOST_SECTORS = 1.5  # most sectors that rows of a tile touch, relative to those that they fill
_MOST_IMAGES = 255  # most images and positions along a side of a tile: a row's position has a byte for each
_MOST_SUMS = 128  # fp32 accumulators of a thread
_MOST_SUMS_OF_THREE = 96  # with three consumer warpgroups


class Windows(NamedTuple):
    """Taps along d, h and w that share a window of the output gradient (``kernels/operand/tap_windows.cuh``).

    ``lanes``: positions of a tile; ``pitch``: bytes of a row, which holds channels of a position.
    """

    taps: Three
    lanes: Three
    pitch: int

    @property
    def along(self) -> int:
        """Taps of a line: those along the innermost dimension with several taps. A line is N of one wgmma."""
        return next((count for count in reversed(self.taps) if count > 1), 1)

    def extents(self, problem: ConvTransposeProblem) -> Three:
        """Positions of a window along d, h and w, halo included."""
        d, h, w = (
            extent + (taps - 1) * axis.element_step for extent, taps, axis in zip(self.lanes, self.taps, problem.axes3)
        )
        return d, h, w

    def bytes(self, problem: ConvTransposeProblem) -> int:
        """Bytes of a window in shared memory."""
        return round_up(math.prod(self.extents(problem)) * self.pitch, 1024)

    def count(self, problem: ConvTransposeProblem) -> int:
        """Windows of a group, of all its channels and taps."""
        channels = math.ceil(problem.out_channels_per_group * DTYPE_BYTES[problem.dtype] / self.pitch)
        return channels * math.prod(
            min(axis.tap_step, axis.kernel) if taps > 1 else axis.kernel for taps, axis in zip(self.taps, problem.axes3)
        )


class TmaConfig(NamedTuple):
    """The compile-time shape of a kernel; ``mainloop/box_product.cuh`` says what the names mean. ``resident`` blocks.

    A weight gradient's ``taps`` along d, h and w share a window of a tile of ``lanes`` positions, whose rows have
    ``pitch`` bytes. If each tap has its own window, any tile of as many positions will do. ``first``: an input gradient
    is stored channels first.
    """

    row_groups: int
    row_tiles: int
    columns: int
    steps: int
    buffers: int
    resident: int
    column_groups: int = 1
    lines: int = 1
    taps: Three = ALONE
    lanes: Three = ALONE
    pitch: int = 0
    first: bool = False

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return self.row_groups * self.column_groups

    @property
    def loaders(self) -> int:
        """Producer threads: a whole warpgroup if setmaxnreg moves their registers to the consumers."""
        return 128 if self.resident == 1 else 32

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups + self.loaders

    @property
    def rows(self) -> int:
        """M of a block."""
        return 64 * self.row_groups * self.row_tiles

    @property
    def block_columns(self) -> int:
        """N of a block; ``columns`` are N of one wgmma."""
        return self.column_groups * self.lines * self.columns

    @property
    def depth_bytes(self) -> int:
        """Bytes of K in a stage, of a row or a column of an input gradient."""
        return OPERATION_BYTES * self.steps

    @property
    def windows(self) -> Windows:
        """The windows of a weight gradient's config."""
        return Windows(self.taps, self.lanes, self.pitch)


def block_windows(problem: ConvTransposeProblem, config: TmaConfig) -> int:
    """Windows of a weight gradient's block."""
    return config.block_columns * DTYPE_BYTES[problem.dtype] // (config.pitch * math.prod(config.taps))


def stage_bytes(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig) -> int:
    """Shared memory of a stage."""
    rows = config.rows * config.depth_bytes
    if pass_ is Pass.WEIGHT_GRAD:
        return round_up(rows + block_windows(problem, config) * config.windows.bytes(problem), 1024)
    return round_up(rows + config.block_columns * config.depth_bytes, 1024)


def tile_extent(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig) -> Four:
    """Extents of the tile with the fewest tiles; a weight gradient's has exactly the positions of a stage.

    Stored channels first, rows of a tile are long enough to fill most of the sectors that they touch.
    """
    if config.taps != ALONE:
        return (1, *config.lanes)
    if pass_ is Pass.WEIGHT_GRAD:
        found = exact_extents(math.prod(config.lanes))
    else:
        found = ((min(n, _MOST_IMAGES), d, h, w) for n, d, h, w in tile_extents(problem, config.rows))

    legal = [tile for tile in found if box_fits(tile[1:], problem) and max(tile) <= _MOST_IMAGES]
    long = [tile for tile in legal if sectors_of(problem, *tile[2:]) <= _MOST_SECTORS] if config.first else legal
    return min(long or legal, key=lambda tile: math.prod(input_tiles(problem, tile)))


def legal_configs(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> Iterator[TmaConfig]:
    """Every config of a layer, with as many stages as fit."""
    for config in _input_configs(problem) if pass_ is Pass.INPUT_GRAD else _weight_configs(problem):
        yield from with_stages(config, problem, pass_, device)


def with_stages(
    config: TmaConfig, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo
) -> Iterator[TmaConfig]:
    """The config with as many stages as fit, if these suffice."""
    staged = config.row_groups * STAGED_BYTES if config.first else 0
    buffers = pipeline_stages(stage_bytes(problem, pass_, config), device, config.resident, staged)
    if buffers >= LEAST_PIPELINE:
        yield config._replace(buffers=buffers)


def _input_configs(problem: ConvTransposeProblem) -> Iterator[TmaConfig]:
    """Configs of the input gradient, without their pipeline depth."""
    pixel = problem.out_channels_per_group * DTYPE_BYTES[problem.dtype]
    most = _MOST_SUMS // 2 if is_long_sum(problem) else _MOST_SUMS
    shapes = itertools.product((4, 2, 1), widths(problem.in_channels_per_group, 8), (1, 2))
    for steps, columns, row_tiles in shapes:
        row = steps * OPERATION_BYTES
        # A box must end with its group: channels of the next one would be multiplied by zero, but may be NaN.
        if (problem.groups > 1 and pixel % row) or (steps > 1 and pixel <= row // 2):
            continue
        if columns * row_tiles // 2 <= most:
            yield TmaConfig(2, row_tiles, columns, steps, 0, 1)


def _weight_configs(problem: ConvTransposeProblem) -> Iterator[TmaConfig]:
    """Configs of the weight gradient, without their pipeline depth."""
    yield from _alone_configs(problem)
    # Float32 reads fragments by threads: with more rows, several row tiles a warp save more than shared windows do.
    if DTYPE_BYTES[problem.dtype] == 4 and problem.in_channels_per_group > 64:
        return
    pitch = channel_pitch(problem, problem.out_channels_per_group)
    for steps in (4, 8):
        for windows in shared_windows(problem, steps * OPERATION_BYTES // DTYPE_BYTES[problem.dtype], pitch):
            yield from _sharing_configs(problem, windows, steps)


def _alone_configs(problem: ConvTransposeProblem) -> Iterator[TmaConfig]:
    """Configs with a window for each tap."""
    size, channels = DTYPE_BYTES[problem.dtype], problem.in_channels_per_group
    pitch = channel_pitch(problem, problem.out_channels_per_group)
    alone = Windows(ALONE, (1, 1, 4 * OPERATION_BYTES // size), pitch)
    units = alone.count(problem) * pitch // size
    for row_groups, row_tiles, resident in itertools.product((1, 2), (1, 2, 4), (1, 2)):
        if 64 * row_groups * row_tiles >= 2 * max(64, channels):
            continue
        column_groups = 2 // row_groups
        for columns in widths(math.ceil(units / column_groups), pitch // size):
            if columns * row_tiles // 2 <= _most_sums(size, 2, resident):
                yield TmaConfig(row_groups, row_tiles, columns, 4, 0, resident, column_groups, 1, *alone)


def _sharing_configs(problem: ConvTransposeProblem, windows: Windows, steps: int) -> Iterator[TmaConfig]:
    """Configs whose blocks have one to four of ``windows``; warpgroups split their lines."""
    size = DTYPE_BYTES[problem.dtype]
    columns, lines = windows.along * windows.pitch // size, math.prod(windows.taps) // windows.along
    row_tiles = (1, 2) if size == 2 else (1,)
    shapes = itertools.product(((1, 2), (2, 1), (1, 3), (3, 1)), row_tiles, (1, 2), (1, 2, 3, 4))
    for (row_groups, column_groups), tiles, resident, count in shapes:
        groups = row_groups * column_groups
        each, rest = divmod(count * lines, column_groups)
        too_many = 64 * row_groups * tiles >= 2 * max(64, problem.in_channels_per_group)
        if rest or too_many or count > windows.count(problem) or groups * resident > 4:
            continue
        if each * columns * tiles // 2 <= _most_sums(size, groups, resident):
            shape = row_groups, tiles, columns, steps, 0, resident, column_groups, each
            yield TmaConfig(*shape, *windows)


def _most_sums(size: int, groups: int, resident: int) -> int:
    """Accumulators of a thread; in float32 threads also hold fragments of both operands."""
    if groups > 2:
        return _MOST_SUMS_OF_THREE if size == 2 else _MOST_SUMS_OF_THREE * 3 // 4
    return _MOST_SUMS // (resident if size == 2 else resident**2)


def box_fits(extents: Iterable[int], problem: ConvTransposeProblem) -> bool:
    """Whether a TMA box can have these extents along d, h and w."""
    return all((count - 1) * axis.stride < MAX_BOX_SIDE for count, axis in zip(extents, problem.axes3))


def shared_windows(problem: ConvTransposeProblem, positions: int, pitch: int) -> Iterator[Windows]:
    """Windows of several taps, of tiles of ``positions``; ``pitch``: most bytes of a row."""
    size = DTYPE_BYTES[problem.dtype]
    sharing = (math.ceil(axis.kernel / axis.tap_step) for axis in problem.axes3)
    for d, h, w in itertools.product(*({1, taps} for taps in sharing)):
        windows = Windows((d, h, w), ALONE, pitch)
        while windows.along * windows.pitch // size > MOST_COLUMNS and windows.pitch > 32:
            windows = windows._replace(pitch=windows.pitch // 2)
        if windows.taps != ALONE and windows.along * windows.pitch // size <= MOST_COLUMNS:
            shapes = [windows._replace(lanes=tile) for tile in _tiles(problem, positions)]
            shapes = [shape for shape in shapes if box_fits(shape.extents(problem), problem)]
            if shapes:
                yield min(shapes, key=lambda shape: _brought(problem, shape))


def exact_extents(positions: int) -> Iterable[Four]:
    """Extents whose product is ``positions``, a power of two; long rows first."""
    powers = [1 << i for i in reversed(range(positions.bit_length()))]
    for w, h, d in itertools.product(powers, repeat=3):
        if w * h * d <= positions:
            yield positions // (w * h * d), d, h, w


def _tiles(problem: ConvTransposeProblem, positions: int) -> Iterator[Three]:
    """Extents of tiles of one image in which the K of a wgmma is a row's, or two whole rows."""
    depth = 32 // DTYPE_BYTES[problem.dtype]
    for n, d, h, w in exact_extents(positions):
        if n == 1 and w >= _TOGETHER and (w >= depth or h % 2 == 0):
            yield d, h, w


def _brought(problem: ConvTransposeProblem, windows: Windows) -> int:
    """Positions of both operands that are loaded for all tiles."""
    tiles = math.prod(input_tiles(problem, (1, *windows.lanes)))
    return tiles * (math.prod(windows.lanes) + math.prod(windows.extents(problem)))
