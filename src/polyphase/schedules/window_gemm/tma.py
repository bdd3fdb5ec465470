"""Both gradients of tensors in channels_last, ``kernels/window_dgrad_tma.cu`` and ``kernels/window_wgrad_tma.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import parted, round_up
from polyphase.problem.layouts import Layouts, dense_strides, five
from polyphase.problem.sizes import standard
from polyphase.program.params import params_of
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step, plain_step
from polyphase.program.tensor_map import TensorMap, tma_strides
from polyphase.schedules.cells import Side
from polyphase.schedules.cost import slower_of
from polyphase.schedules.schedule import Cost
from polyphase.schedules.tensor_cores import OPERATION_BYTES
from polyphase.schedules.tiles import Four, affordable_planes, layer_constants, tiles_of
from polyphase.schedules.window_gemm.tap_windows import ALONE, Three, Windows, box_fits, exact_lanes, shared_windows
from polyphase.schedules.window_gemm.window import Gradient, channel_pitch, lanes_of

_ALONE_OFFERED = 2  # of the configs that are offered, those whose taps share no windows
_MAX_BOX_STEP = 8  # elements of the tensor from one of a box to the next
_MOST_IMAGES = 255  # of a tile, and positions along a side: a row's place has a byte for each
_MOST_COLUMNS = 256  # of an instruction
_MOST_SUMS = 128  # of a thread
_MOST_SUMS_OF_THREE = 96  # where three groups multiply
_LEAST_BUFFERS, _MOST_BUFFERS = 3, 8
_DECLARED = 1024  # bytes of shared memory that a kernel has beside its stages
_FLUSH = 8192  # k that the cores sum; where an input gradient's are more, sums are half as many
_PACK_THREADS = 256
_LEAST_STAGES = 4  # of a part of an input gradient's sum


class TmaConfig(NamedTuple):
    """The compile-time shape of a kernel; ``mainloop/box_product.cuh`` says what the names mean. ``resident`` blocks.

    A weight gradient's ``taps`` along d, h and w share a window of a tile of ``lanes`` positions, whose rows have
    ``pitch`` bytes. Where each tap has its own, any tile of as many positions will do.
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

    @property
    def groups(self) -> int:
        """Of 128 threads that multiply."""
        return self.row_groups * self.column_groups

    @property
    def loaders(self) -> int:
        """Threads beside those that multiply: a whole warpgroup where setmaxnreg moves registers between warpgroups."""
        return 128 if self.resident == 1 else 32

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.groups + self.loaders

    @property
    def rows(self) -> int:
        """The same."""
        return 64 * self.row_groups * self.row_tiles

    @property
    def block_columns(self) -> int:
        """The same; ``columns`` are a line's."""
        return self.column_groups * self.lines * self.columns

    @property
    def depth_bytes(self) -> int:
        """What a stage holds of a row, or of a column that is no window's."""
        return OPERATION_BYTES * self.steps

    @property
    def windows(self) -> Windows:
        """Of a weight gradient."""
        return Windows(self.taps, self.lanes, self.pitch)


class _WindowTma(Gradient):
    """What the two kernels share."""

    adapts = True

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} lacks Hopper's matrix instruction"
        if not problem.channels_last:
            return "reads tensors whose channels are innermost"
        for what, channels in self._channels(problem).items():
            if channels * DTYPE_BYTES[problem.dtype] % 16:
                pixel = channels * DTYPE_BYTES[problem.dtype]
                return f"a group's {what} channels, {pixel} bytes, are no multiple of 16 bytes"
        if max(problem.stride) > _MAX_BOX_STEP:
            return f"TMA takes every {_MAX_BOX_STEP}th element at most, not every {max(problem.stride)}th"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return "no config fits: the next group's channels lie within every box, and may be no numbers"

    def _channels(self, problem: ConvTransposeProblem) -> dict[str, int]:
        """Those that boxes are of."""
        raise NotImplementedError

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        read = [_pixel_strides(problem, layouts, output=True)]
        if pass_ is Pass.WEIGHT_GRAD:
            read.append(_pixel_strides(problem, layouts, output=False))
        return None if None in read or layouts.input[1] != 1 or not layouts.aligned else standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TmaConfig]:
        return sorted(_configs(at, pass_, device))

    def seconds(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, config: TmaConfig) -> float:
        return _estimate(at, pass_, config, device)[0]

    def arranged(self, order: list[TmaConfig]) -> list[TmaConfig]:
        """Some whose taps share no windows among the first: the others are of one tile, far from what images may be."""
        alone = [config for config in order if config.taps == ALONE]
        first = order[: self.offered - _ALONE_OFFERED]
        first += [config for config in alone[:_ALONE_OFFERED] if config not in first]
        return first + [config for config in order if config not in first]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Cost:
        return _estimate(problem, pass_, config, device)

    def _constants(
        self, problem: ConvTransposeProblem, config: TmaConfig, row_pitch: int, column_pitch: int
    ) -> tuple[tuple[str, Constant], ...]:
        transposed = self.pass_ is Pass.WEIGHT_GRAD
        return (
            *layer_constants(problem, self.pass_),
            ("LOADERS", config.loaders),
            ("ROW_GROUPS", config.row_groups),
            ("COLUMN_GROUPS", config.column_groups),
            ("ROW_TILES", config.row_tiles),
            ("LINES", config.lines),
            ("COLUMNS", config.columns),
            ("STEPS", config.steps),
            ("ROW_PITCH", row_pitch),
            ("COLUMN_PITCH", column_pitch),
            ("TRANSPOSED", transposed),
            ("BUFFERS", config.buffers),
            ("MIN_BLOCKS", config.resident),
            ("WGMMA", True),
            ("BY_THREADS", transposed and DTYPE_BYTES[problem.dtype] == 4),
        )


class WindowDgradTma(_WindowTma):
    """The input gradient: boxes of the output gradient, one for each tap, by the weight's."""

    passes = (Pass.INPUT_GRAD,)
    name = "window_dgrad_tma"

    def _channels(self, problem: ConvTransposeProblem) -> dict[str, int]:
        return {"output": problem.out_channels_per_group}

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Program:
        lanes = _lanes(problem, pass_, config)
        tiles = tiles_of(problem.batch, five(problem.input_shape)[2:], lanes)
        items, stages = _items(problem, config, math.prod(tiles)), _depth_stages(problem, config)
        dense = layouts.input == dense_strides(problem.input_shape, True)
        length, parts = parted(stages, _input_parts(problem, config, items, device)[0] if dense else 1)
        x = Side(five(problem.input_shape), layouts.input)
        pitch = config.depth_bytes
        flush = _FLUSH * DTYPE_BYTES[problem.dtype] // pitch if _is_long(problem) else stages
        packed = problem.taps > 1 and problem.out_channels_per_group > 1 and not layouts.weight_channels_last
        packs = (_pack(problem, pass_),) if packed else ()
        workspace = problem.elements[1] * DTYPE_BYTES[problem.dtype] if packed else 0
        constants = (*self._constants(problem, config, pitch, pitch), ("FLUSH", flush))
        form = WgmmaForm(config.columns, problem.dtype)
        source = KernelSource(self.name, problem.dtype, True, constants, (form,))
        params = params_of(source).pack(
            x=x,
            batch=problem.batch,
            groups=problem.groups,
            lanes=lanes,
            tiles=tiles,
            parts=parts,
            part_size=length,
            plane=problem.elements[0] if parts > 1 else 0,
        )
        main = Step(
            source=source,
            grid=(min(items * parts, device.multiprocessors * config.resident), 1, 1),
            block=config.threads,
            shared_bytes=config.buffers * _stage_bytes(problem, pass_, config),
            params=params,
            tensor_maps=(_pixel_map(problem, layouts, lanes, pitch), _weight_map(problem, config)),
        )
        return assemble(problem, pass_, main, packs=packs, workspace_bytes=workspace, splits=parts, may_split=True)


class WindowWgradTma(_WindowTma):
    """The weight gradient: windows of the output gradient, of a tap or of several, by boxes of the input, in parts."""

    passes = (Pass.WEIGHT_GRAD,)
    name = "window_wgrad_tma"

    def _channels(self, problem: ConvTransposeProblem) -> dict[str, int]:
        return {"input": problem.in_channels_per_group, "output": problem.out_channels_per_group}

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Program:
        lanes = _lanes(problem, pass_, config)
        tiles = tiles_of(problem.batch, five(problem.input_shape)[2:], lanes)
        total, blocks = math.prod(tiles), _blocks(problem, config)
        planes = _parts(problem, config, total, device)[0]
        flush = max(1, _FLUSH // math.prod(lanes))
        narrowed = planes == 1 and total <= flush
        items = math.prod(blocks) * problem.groups * planes
        of_x, windows = channel_pitch(problem, problem.in_channels_per_group), config.windows
        boxes = lanes if windows.taps == ALONE else (1, *windows.extents(problem))
        constants = (
            *self._constants(problem, config, of_x, windows.pitch),
            *zip(("WINDOW_D", "WINDOW_H", "WINDOW_W"), windows.taps),
            *zip(("LANES_D", "LANES_H", "LANES_W"), windows.lanes),
        )
        both = WgmmaForm(config.columns, problem.dtype, transpose_a=True, transpose_b=True)
        forms = () if dict(constants)["BY_THREADS"] else (both,)
        source = KernelSource(self.name, problem.dtype, True, constants, forms)
        params = params_of(source).pack(
            groups=problem.groups,
            blocks=blocks,
            lanes=lanes,
            tiles=tiles,
            ahead=_digits(planes, tiles),
            parts=planes,
            flush=flush,
            narrowed=narrowed,
            items=items,
            all_tiles=total,
            plane=problem.elements[1],
        )
        main = Step(
            source=source,
            grid=(min(items, device.multiprocessors * config.resident), 1, 1),
            block=config.threads,
            shared_bytes=config.buffers * _stage_bytes(problem, pass_, config),
            params=params,
            tensor_maps=(
                _pixel_map(problem, layouts, lanes, of_x, output=False),
                _pixel_map(problem, layouts, boxes, windows.pitch, tensor=1),
            ),
        )
        return assemble(problem, pass_, main, splits=planes, dst_channels_last=problem.taps > 1, narrowed=narrowed)


def _pack(problem: ConvTransposeProblem, pass_: Pass) -> Step:
    """The weight's channels to where boxes want them."""
    chunks = problem.elements[1] * DTYPE_BYTES[problem.dtype] // 16
    constants = (
        *layer_constants(problem, pass_),
        ("ALL_IN_CHANNELS", problem.in_channels),
        ("THREADS", _PACK_THREADS),
        ("MIN_BLOCKS", 1),
    )
    source = KernelSource("pack_channels", problem.dtype, False, constants, folder="steps")
    return plain_step(source, math.ceil(chunks / _PACK_THREADS), _PACK_THREADS)


def _pixel_strides(problem: ConvTransposeProblem, layouts: Layouts, output: bool) -> tuple[int, ...] | None:
    """Of boxes of the input or the output gradient, where TMA takes them."""
    size = DTYPE_BYTES[problem.dtype]
    shape, strides = (problem.output_shape, layouts.output) if output else (problem.input_shape, layouts.input)
    batch, channels, depth, height, width = five(shape)
    image, channel, slab, row, column = (step * size for step in strides)
    if channel != size and channels > 1:
        return None
    return tma_strides(zip((width, height, depth, batch), (column, row, slab, image)))


def _pixel_map(
    problem: ConvTransposeProblem, layouts: Layouts, lanes: Four, pitch: int, output: bool = True, tensor: int = 0
) -> TensorMap:
    """``pitch`` bytes of a tile's positions, in the input, or where a tap meets the output gradient."""
    batch, channels, depth, height, width = five(problem.output_shape if output else problem.input_shape)
    strides = _pixel_strides(problem, layouts, output)
    assert strides is not None
    steps = (axis.stride if output and count > 1 else 1 for axis, count in zip(problem.axes3[::-1], lanes[:0:-1]))
    return TensorMap(
        problem.dtype,
        (channels, width, height, depth, max(1, batch)),
        strides,
        (pitch // DTYPE_BYTES[problem.dtype], *lanes[::-1]),
        pitch,
        True,
        tensor,
        (1, *steps, 1),
    )


def _weight_map(problem: ConvTransposeProblem, config: TmaConfig) -> TensorMap:
    size, out = DTYPE_BYTES[problem.dtype], problem.out_channels_per_group
    per_tap = [(problem.in_channels, out * problem.taps * size), (problem.taps, out * size), (1, 0), (1, 0)]
    strides, pitch = tma_strides(per_tap), config.depth_bytes
    assert strides is not None
    box = (pitch // size, config.columns, 1, 1, 1)
    return TensorMap(problem.dtype, (out, problem.in_channels, problem.taps, 1, 1), strides, box, pitch, True, 1)


def _items(problem: ConvTransposeProblem, config: TmaConfig, tiles: int) -> int:
    """Of an input gradient, what blocks share out."""
    columns = math.ceil(problem.in_channels_per_group / config.columns)
    return tiles * problem.groups * columns


def _block_windows(problem: ConvTransposeProblem, config: TmaConfig) -> int:
    """Of a weight gradient's block."""
    return config.block_columns * DTYPE_BYTES[problem.dtype] // (config.pitch * math.prod(config.taps))


def _blocks(problem: ConvTransposeProblem, config: TmaConfig) -> tuple[int, int]:
    """Of a weight gradient, of rows and of columns of a group."""
    columns = math.ceil(config.windows.count(problem) / _block_windows(problem, config))
    return math.ceil(problem.in_channels_per_group / config.rows), columns


def _stage_bytes(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig) -> int:
    """In shared memory."""
    rows = config.rows * config.depth_bytes
    if pass_ is Pass.WEIGHT_GRAD:
        return round_up(rows + _block_windows(problem, config) * config.windows.bytes(problem), 1024)
    return round_up(rows + config.block_columns * config.depth_bytes, 1024)


def _digits(count: int, tiles: Four) -> Four:
    """Tiles along n, d, h and w that come to so many."""
    count, w = divmod(count, tiles[3])
    count, h = divmod(count, tiles[2])
    n, d = divmod(count, tiles[1])
    return n, d, h, w


def _lanes(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig) -> Four:
    """Extents of a tile of positions, so that there are few tiles; of a weight gradient just so many, of a stage."""
    if config.taps != ALONE:
        return (1, *config.lanes)
    if pass_ is Pass.WEIGHT_GRAD:
        found = exact_lanes(math.prod(config.lanes))
    else:
        found = ((min(n, _MOST_IMAGES), d, h, w) for n, d, h, w in lanes_of(problem, config.rows))

    def fits(lanes: Four) -> bool:
        return box_fits(lanes[1:], problem) and max(lanes) <= _MOST_IMAGES

    def tiles(lanes: Four) -> int:
        return math.prod(tiles_of(problem.batch, five(problem.input_shape)[2:], lanes))

    return min(filter(fits, found), key=tiles)


def _depth_stages(problem: ConvTransposeProblem, config: TmaConfig) -> int:
    """Stages of an input gradient: of each tap some."""
    pixel = problem.out_channels_per_group * DTYPE_BYTES[problem.dtype]
    return problem.taps * math.ceil(pixel / config.depth_bytes)


def _is_long(problem: ConvTransposeProblem) -> bool:
    return problem.out_channels_per_group * problem.taps > _FLUSH


def _terms(pass_: Pass, device: DeviceInfo) -> Costs:
    return costs("window_dgrad_tma" if pass_ is Pass.INPUT_GRAD else "window_wgrad_tma", device)


def _estimate(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig, device: DeviceInfo) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = _terms(pass_, device)
    tiles = math.prod(tiles_of(problem.batch, five(problem.input_shape)[2:], _lanes(problem, pass_, config)))
    if pass_ is Pass.WEIGHT_GRAD:
        _, seconds, end = _parts(problem, config, tiles, device)
    else:
        _, seconds, end = _input_parts(problem, config, _items(problem, config, tiles), device)
    moving = problem.bytes / (terms.bandwidth * device.copy_bytes_per_second)
    _, bound = slower_of(seconds, moving)
    return (seconds**terms.beside + moving**terms.beside) ** (1 / terms.beside) + end, bound


def _stage_cycles(problem: ConvTransposeProblem, pass_: Pass, config: TmaConfig, terms: Costs) -> float:
    """Of a multiprocessor, for a block."""
    size, weights = DTYPE_BYTES[problem.dtype], pass_ is Pass.WEIGHT_GRAD
    operations = config.groups * config.row_tiles * config.lines * config.steps
    if weights and size == 4:
        instructions, reads = _warp_work(problem, config)
        products = terms.threads_product * instructions + terms.threads_read * reads
        products *= 4 * config.groups * config.steps * (terms.third_group if config.groups > 2 else 1)
    else:
        products = terms.product * operations * max(config.columns / 2, 16 + config.columns / 4)
    boxes = 2.0
    if weights:
        boxes = config.rows * size / channel_pitch(problem, problem.in_channels_per_group)
        boxes += _block_windows(problem, config)
    loading = max(terms.moved * _stage_bytes(problem, pass_, config), terms.box * boxes)
    both: float = (products**terms.overlap + loading**terms.overlap) ** (1 / terms.overlap)
    return both + terms.stage


def _warp_work(problem: ConvTransposeProblem, config: TmaConfig) -> tuple[float, float]:
    """Instructions of a warp for an operation of float32, and words that each of its threads reads for them."""
    columns, strips = config.lines * config.columns, config.row_tiles  # of 16 rows
    if config.row_tiles == 1:  # mainloop/box_product.cuh: ABREAST
        abreast = 4 if config.columns % 32 == 0 else 2 if config.columns % 16 == 0 else 1
        columns //= abreast
        strips = min(4, math.ceil(problem.in_channels_per_group / 16)) if abreast == 4 else abreast
    return strips * columns / 8, 4 * strips + columns / 4


@lru_cache(maxsize=4096)
def _input_parts(
    problem: ConvTransposeProblem, config: TmaConfig, items: int, device: DeviceInfo
) -> tuple[int, float, float]:
    """Parts of each of an input gradient's sums, their predicted seconds, and those of what comes after."""
    terms, places = _terms(Pass.INPUT_GRAD, device), device.multiprocessors * config.resident
    stages, stage = _depth_stages(problem, config), _stage_cycles(problem, Pass.INPUT_GRAD, config, terms)
    once = config.rows * config.block_columns * terms.result + terms.item / config.resident
    moved = problem.elements[0]

    def seconds(parts: int) -> tuple[float, float]:
        rounds = items * parts / places
        rounds = math.ceil(rounds) if rounds < 8 else rounds + 0.5
        cycles = rounds * (math.ceil(stages / parts) * stage + once) * config.resident
        end = terms.reduce + moved * (8 * parts + DTYPE_BYTES[problem.dtype]) / device.copy_bytes_per_second
        return (cycles + terms.launch) / device.clock_hz, end if parts > 1 else 0.0

    most = max(
        1, min(affordable_planes(problem, Pass.INPUT_GRAD), stages // _LEAST_STAGES, 2 * places // max(1, items))
    )
    found = min(range(1, most + 1), key=lambda parts: (sum(seconds(parts)), parts))
    return (found, *seconds(found))


@lru_cache(maxsize=4096)
def _parts(
    problem: ConvTransposeProblem, config: TmaConfig, tiles: int, device: DeviceInfo
) -> tuple[int, float, float]:
    """Parts of a weight gradient's positions, their predicted seconds, and those of what comes after."""
    blocks, places = math.prod(_blocks(problem, config)) * problem.groups, device.multiprocessors * config.resident
    terms = _terms(Pass.WEIGHT_GRAD, device)
    stage = _stage_cycles(problem, Pass.WEIGHT_GRAD, config, terms)
    size, weights = DTYPE_BYTES[problem.dtype], problem.elements[1]
    flush = max(1, _FLUSH // math.prod(config.lanes))
    results, once = config.rows * config.block_columns, terms.item / config.resident

    def seconds(parts: int) -> tuple[float, float]:
        stages = -(-tiles // parts)
        block = stages * stage + (-(-stages // flush) * results * terms.result + once)
        cycles = -(-blocks * parts // places) * block * config.resident
        alone = parts == 1 and (size == 4 or stages <= flush)
        moved = weights * (4 if alone else 8 * parts + size)
        end = 0.0 if alone else terms.launch / 2 / device.clock_hz
        return (cycles + terms.launch) / device.clock_hz, end + terms.planes * moved / device.copy_bytes_per_second

    most = max(1, min(affordable_planes(problem), tiles // 4, 4 * places // blocks))
    found = min(range(1, most + 1), key=lambda parts: (sum(seconds(parts)), parts))
    return (found, *seconds(found))


def _configs(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> Iterator[TmaConfig]:
    for config in _input_configs(problem) if pass_ is Pass.INPUT_GRAD else _weight_configs(problem):
        room = device.shared_bytes_of(config.resident) - _DECLARED
        buffers = min(_MOST_BUFFERS, room // _stage_bytes(problem, pass_, config))
        if buffers >= _LEAST_BUFFERS:
            yield config._replace(buffers=buffers)


def _input_configs(problem: ConvTransposeProblem) -> Iterator[TmaConfig]:
    """Their buffers left open."""
    pixel = problem.out_channels_per_group * DTYPE_BYTES[problem.dtype]
    most = _MOST_SUMS // 2 if _is_long(problem) else _MOST_SUMS
    steps = next(steps for steps in (4, 2, 1) if steps == 1 or _fill(pixel, steps) <= _fill(pixel, steps // 2))
    # Behind a group's channels lie those of the next, which meet no weight but may be no numbers.
    while problem.groups > 1 and steps and pixel % (steps * OPERATION_BYTES):
        steps //= 2
    for columns, row_tiles in itertools.product(_widths(problem.in_channels_per_group, 8), (1, 2) if steps else ()):
        if columns * row_tiles // 2 <= most:
            yield TmaConfig(2, row_tiles, columns, steps, 0, 1)


def _fill(pixel: int, steps: int) -> int:
    """Bytes that a pixel's channels take in stages of so many operations."""
    return round_up(pixel, steps * OPERATION_BYTES)


def _weight_configs(problem: ConvTransposeProblem) -> Iterator[TmaConfig]:
    """Their buffers left open."""
    yield from _alone_configs(problem)
    # Of float32 with more rows a block has them in tiles of a warp's own, which is worth more.
    if DTYPE_BYTES[problem.dtype] == 4 and problem.in_channels_per_group > 64:
        return
    pitch = channel_pitch(problem, problem.out_channels_per_group)
    for steps in (4, 8):
        for windows in shared_windows(problem, steps * OPERATION_BYTES // DTYPE_BYTES[problem.dtype], pitch):
            yield from _sharing_configs(problem, windows, steps)


def _alone_configs(problem: ConvTransposeProblem) -> Iterator[TmaConfig]:
    """Those whose taps have windows of their own."""
    size, channels = DTYPE_BYTES[problem.dtype], problem.in_channels_per_group
    pitch = channel_pitch(problem, problem.out_channels_per_group)
    alone = Windows(ALONE, (1, 1, 4 * OPERATION_BYTES // size), pitch)
    units = alone.count(problem) * pitch // size
    for row_groups, row_tiles, resident in itertools.product((1, 2), (1, 2, 4), (1, 2)):
        if 64 * row_groups * row_tiles >= 2 * max(64, channels):
            continue
        column_groups = 2 // row_groups
        for columns in _widths(math.ceil(units / column_groups), pitch // size):
            if columns * row_tiles // 2 <= _most_sums(size, 2, resident):
                yield TmaConfig(row_groups, row_tiles, columns, 4, 0, resident, column_groups, 1, *alone)


def _sharing_configs(problem: ConvTransposeProblem, windows: Windows, steps: int) -> Iterator[TmaConfig]:
    """Those whose blocks have one window or a few of such: all their lines, shared out among groups."""
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
    """Of a thread. Those that find operands need registers for that."""
    if groups > 2:
        return _MOST_SUMS_OF_THREE if size == 2 else _MOST_SUMS_OF_THREE * 3 // 4
    return _MOST_SUMS // (resident if size == 2 else resident**2)


def _widths(channels: int, multiple: int) -> list[int]:
    """Columns of a block, so that all are alike."""
    return sorted(
        {
            round_up(math.ceil(channels / math.ceil(channels / widest)), multiple)
            for widest in (_MOST_COLUMNS, _MOST_COLUMNS // 2, _MOST_COLUMNS // 4)
        }
    )
