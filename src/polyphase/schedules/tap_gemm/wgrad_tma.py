"""The weight gradient of any layer by TMA and wgmma, ``kernels/tap_gemm_wgrad_tma.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts
from polyphase.problem.problem import DTYPE_BYTES
from polyphase.problem.sizes import standard
from polyphase.program.flatten import GRAD_PLANES, X_PLANES, Flattened, flatten_positions
from polyphase.program.params import params_of
from polyphase.program.program import (
    Buffer,
    Program,
    assemble,
    prepared,
    transpose_reduces,
    writing_weight_channels_last,
)
from polyphase.program.step import GRAD, Step, X
from polyphase.program.tensor_map import TensorMap
from polyphase.schedules.cost import slower_of, transpose_seconds
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tap_gemm.flat import PITCH, FlatProduct, flat_product, may_count_images_last, may_swap
from polyphase.schedules.tap_gemm.k_major import (
    GROUPS,
    LEAST_BUFFERS,
    LEAST_STAGES,
    MOST_COLUMNS,
    THREADS,
    best_splits,
    buffers,
    stage_cycles,
    whole_rounds,
)
from polyphase.schedules.tap_gemm.product import common_limits
from polyphase.schedules.tiles import affordable_planes, constants_of

_MOST_SUMS = 128  # of a thread, those that are promoted counted twice
_LEAST_CHUNK = 32  # channels of an item, where there are so many: small boxes cost as much as large ones
_MOST_BOX = 256  # channels that a box spans
_FLUSH = 8192  # positions that tensor cores accumulate before a flush
_SHAPES = 3  # of columns, offered with each shape of rows
_MOST_BYTES, _MOST_OF_IMAGE = 1 << 30, 8 << 30  # of the planes; the latter where one image has more than the former
_MOST_WEIGHTS = 1 << 31  # of a group
_MOST_POSITIONS = (1 << 30) - 1
_OVERLAPPED = 128 << 20  # bytes of planes up to which it pays that the product may start before they are complete
_CACHED = 24 << 20  # bytes of planes that surely stay in the L2 cache


class WgradTmaConfig(NamedTuple):
    """The compile-time shape of ``tap_gemm_wgrad_tma.cu``: items of rows and columns, and channels of each.

    ``mirrored``: rows are of the base. ``swapped``: the base is the gradient of the output. ``window_d``,
    ``window_h``: the base has taps along depth or height, too, not those along the width alone.
    ``batched``: images are the innermost dimension of positions.
    """

    row_tiles: int
    row_items: int
    row_chunk: int
    column_items: int
    column_chunk: int
    mirrored: bool = False
    swapped: bool = False
    window_d: bool = False
    window_h: bool = False
    batched: bool = False

    @property
    def rows(self) -> int:
        """Of a block."""
        return 64 * GROUPS * self.row_tiles

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.column_items * self.column_chunk

    @property
    def window(self) -> tuple[bool, bool]:
        """Whether the base has taps along depth, and along height."""
        return self.window_d, self.window_h

    @property
    def base(self) -> tuple[int, int]:
        """Channels of an item of the base, and its items in a block."""
        return (self.row_chunk, self.row_items) if self.mirrored else (self.column_chunk, self.column_items)

    @property
    def phased(self) -> tuple[int, int]:
        """The same of the phased operand."""
        return (self.column_chunk, self.column_items) if self.mirrored else (self.row_chunk, self.row_items)


class TapGemmWgradTma(Schedule):
    """Rows and columns are channels at a tap of either operand; TMA loads a box of positions for each."""

    name = "tap_gemm_wgrad_tma"
    passes = (Pass.WEIGHT_GRAD,)
    on_tensor_cores = True
    adapts = True
    kept = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} has no wgmma"
        weights = math.prod(problem.weight_shape) // problem.groups
        if weights >= _MOST_WEIGHTS:
            return f"{weights} weights of a group are too many (at most {_MOST_WEIGHTS - 1})"
        if not any(map(_affordable, _flats(problem))):
            return f"planes of one image would take more than {_MOST_OF_IMAGE} bytes"
        return common_limits(problem)

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return False

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem:
        return standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[WgradTmaConfig]:
        found = itertools.chain.from_iterable(((flat, config) for config in _configs(flat)) for flat in _flats(at))
        return [config for flat, config in found if buffers(_stage_bytes(flat, config), device) >= LEAST_BUFFERS]

    def arranged(self, order: list[WgradTmaConfig]) -> list[WgradTmaConfig]:
        """Among the first as many with images innermost as others: the size at hand decides between them."""
        ways = [[config for config in order if config.batched is batched] for batched in (False, True)]
        first = [each for way in ways for each in way[: self.offered // 2]] if all(ways) else []
        first.sort(key=order.index)
        return first + [config for config in order if config not in first]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WgradTmaConfig
    ) -> Cost | None:
        """None where the planes would take too much memory, or would be slow to write."""
        flat = flat_product(problem, layouts, config.swapped, config.batched)
        if config.batched and not may_count_images_last(problem, layouts):
            return None
        if not _affordable(flat):
            return None
        return self._cost(problem, device, flat, config)

    def seconds(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, config: WgradTmaConfig) -> float:
        """Whatever memory the planes would take at the ranking size."""
        return self._cost(at, device, flat_product(at, Layouts.dense(at), config.swapped, config.batched), config)[0]

    def _cost(
        self, problem: ConvTransposeProblem, device: DeviceInfo, flat: FlatProduct, config: WgradTmaConfig
    ) -> Cost:
        terms, bandwidth = costs("tap_gemm_wgrad_tma", device), device.copy_bytes_per_second
        slices, size = _slices(flat), DTYPE_BYTES[problem.dtype]
        splits, product, reduction = _splits(slices[0][1], config, device, _narrows(slices))
        read = (problem.elements[0] + problem.elements[2]) * size
        share = terms.flattened_batch if config.batched else terms.flattened
        seconds = len(slices) * (product + terms.flatten) + reduction + (read + flat.bytes) / (share * bandwidth)
        if _goes_back(problem) and not (reduction and transpose_reduces(problem, splits)):
            seconds += transpose_seconds(2 * problem.elements[1] * size, device)
        return slower_of(seconds, problem.bytes / bandwidth)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WgradTmaConfig
    ) -> Program:
        slices = _slices(flat_product(problem, layouts, config.swapped, config.batched))
        source, narrows = _source(slices[0][1], config, device), _narrows(slices)
        splits = _splits(slices[0][1], config, device, narrows)[0]
        steps, alone = [], splits == 1 and narrows
        for first, flat in slices:
            planes = [each._replace(first_image=first) for each in flat.planes]
            x, grad = planes[::-1] if config.swapped else planes
            main = _main(flat, config, device, source, splits, first > 0, alone)
            steps.append((flatten_positions(problem.dtype, flat.product.word, x, grad), main))
        back = _goes_back(problem)
        last = back or (problem.channels_last and problem.taps > 1)  # one tap lies in the layer's order, either way
        program = assemble(problem, pass_, steps[0][1], splits=splits, dst_channels_last=last, narrowed=alone)
        x, grad = slices[0][1].planes[::-1] if config.swapped else slices[0][1].planes
        buffers = {
            X: Buffer(X_PLANES, problem.dtype, x.elements),
            GRAD: Buffer(GRAD_PLANES, problem.dtype, grad.elements),
        }
        program = prepared(program, (), buffers)
        operands = program.main.operands
        sliced = [each for before, main in steps for each in (before, replace(main, operands=operands))]
        program = replace(program, steps=(*sliced, *program.steps[1:]), main_index=1)
        return writing_weight_channels_last(program, problem) if back else program


def _flats(problem: ConvTransposeProblem) -> Iterator[FlatProduct]:
    """All ways to lay out a layer's dense operands."""
    layouts = Layouts.dense(problem)
    for batched in (False, True) if may_count_images_last(problem, layouts) else (False,):
        for swapped in (False, True) if may_swap(problem) else (False,):
            yield flat_product(problem, layouts, swapped, batched)


@lru_cache(maxsize=1024)
def _slices(flat: FlatProduct) -> list[tuple[int, FlatProduct]]:
    """The first image and the product of each share of the images, whose planes are written one after the other."""
    problem, unit = flat.product.problem, flat.product.piece if flat.batched else 1
    if problem.batch <= unit or max(flat.bytes / _MOST_BYTES, flat.positions / _MOST_POSITIONS) <= 1:
        return [(0, flat)]
    least = flat.of_images(unit)
    most = unit * max(1, min(_MOST_BYTES // least.bytes, _MOST_POSITIONS // least.positions))
    each = round_up(-(-problem.batch // -(-problem.batch // most)), unit)
    return [(first, flat.of_images(min(each, problem.batch - first))) for first in range(0, problem.batch, each)]


def _flush(flat: FlatProduct) -> int:
    """Stages that tensor cores accumulate before a flush."""
    return _FLUSH // flat.depth if flat.product.parts == 1 else flat.stages


def _narrows(slices: list[tuple[int, FlatProduct]]) -> bool:
    """Whether sums that are not split are complete when they are first stored, and then in the tensors' type."""
    return len(slices) == 1 and slices[0][1].stages <= _flush(slices[0][1])


def _affordable(flat: FlatProduct) -> bool:
    """Whether memory may be spent on the planes of a share of few images, and the kernels take so many positions."""
    unit = flat.product.piece if flat.batched else 1
    least = flat if flat.product.problem.batch <= unit else flat.of_images(unit)
    return least.bytes <= (_MOST_BYTES if flat.batched else _MOST_OF_IMAGE) and least.positions <= _MOST_POSITIONS


def _goes_back(problem: ConvTransposeProblem) -> bool:
    """Whether the result, whose output channels are innermost, is transposed to where it belongs."""
    return not problem.channels_last and problem.taps > 1 and problem.out_channels_per_group > 1


def _source(flat: FlatProduct, config: WgradTmaConfig, device: DeviceInfo) -> KernelSource:
    """The kernel of a config."""
    base, phased = flat.channels
    exact = flat.product.parts == 2
    constants: dict[str, Constant] = {
        "AXIS_D": flat.axes[0],
        "AXIS_H": flat.axes[1],
        "AXIS_W": flat.axes[2],
        "BASE_CHANNELS": base,
        "PHASED_CHANNELS": phased,
        "COPIES": flat.copies,
        **dict(constants_of(config, "swapped mirrored window_d window_h")),
        "PARTS": flat.product.parts,
        "PITCH": PITCH,
        **dict(constants_of(config, "row_tiles row_items row_chunk columns column_items column_chunk")),
        "PROMOTE": int(exact),
        "BUFFERS": buffers(_stage_bytes(flat, config), device),
        "MIN_BLOCKS": 1,
        "WGMMA": True,
    }
    dtype = flat.product.problem.dtype
    form = WgmmaForm(config.columns, dtype)
    return KernelSource("tap_gemm_wgrad_tma", dtype, True, tuple(constants.items()), (form,))


def _main(
    flat: FlatProduct,
    config: WgradTmaConfig,
    device: DeviceInfo,
    source: KernelSource,
    splits: int,
    again: bool,
    narrowed: bool,
) -> Step:
    """The launch of the product of some images, ``again`` where planes of sums have those of others already.

    ``narrowed``: the sums are complete, and stored in the tensors' type.
    """
    product, stages = flat.product, flat.stages
    column, items = flat.images or 1, _tiles(flat, config) * product.problem.groups * splits
    params = params_of(source).pack(
        groups=product.problem.groups,
        splits=splits,
        items=items,
        stages=stages,
        flush=max(1, _flush(flat)),
        again=again,
        narrowed=narrowed,
        column=column,
        row=column * flat.padded[2],
        slab=column * flat.padded[1] * flat.padded[2],
        plane=math.prod(product.problem.weight_shape),
    )
    base, phased = flat.planes
    return Step(
        source=source,
        grid=(min(items, device.multiprocessors), 1, 1),
        block=THREADS,
        shared_bytes=buffers(_stage_bytes(flat, config), device) * _stage_bytes(flat, config),
        params=params,
        tensor_maps=(
            _map(flat, base, config.base[0], int(config.swapped)),
            _map(flat, phased, config.phased[0], int(not config.swapped)),
        ),
        overlaps=flat.bytes <= _OVERLAPPED,
    )


def _map(flat: FlatProduct, planes: Flattened, chunk: int, tensor: int) -> TensorMap:
    """A stage of an item."""
    size, channels = flat.product.size, planes.shape[1]
    return TensorMap(
        flat.product.problem.dtype,
        (max(1, planes.positions), channels, math.prod(planes.planes) * planes.parts, 1, 1),
        (planes.pitch * size, channels * planes.pitch * size, 16, 16),
        (flat.depth, chunk, 1, 1, 1),
        PITCH,
        True,
        tensor,
    )


def _configs(flat: FlatProduct) -> Iterator[WgradTmaConfig]:
    """Configs whose accumulators fit the registers; for each shape of rows the best shapes of columns."""
    most = _MOST_SUMS // flat.product.parts
    for window, mirrored, row_tiles in itertools.product(flat.windows, (False, True), (1, 2)):
        (rows, row_taps), (columns, column_taps) = _sides(flat, mirrored, window)
        all_rows = 64 * GROUPS * row_tiles
        row_chunk, row_items = _row_shape(rows, row_taps, all_rows)
        if row_tiles > 1 and row_items * row_chunk <= all_rows // 2:
            continue
        shapes = _column_shapes(columns, column_taps, min(MOST_COLUMNS, 2 * most // row_tiles), all_rows)
        for column_chunk, column_items in shapes[:_SHAPES]:
            yield WgradTmaConfig(
                row_tiles,
                row_items,
                row_chunk,
                column_items,
                column_chunk,
                mirrored,
                flat.swapped,
                *window,
                flat.batched,
            )


def _sides(flat: FlatProduct, mirrored: bool, window: tuple[bool, bool]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Channels and taps of the rows' side, and of the columns'."""
    (base, phased), width = flat.channels, flat.along[2]
    found = (phased, width.residues * flat.phased_taps(window)), (base, width.taps * flat.base_taps(window))
    return (found[1], found[0]) if mirrored else found


def _chunks(channels: int, most: int) -> Iterator[tuple[int, int]]:
    """Channels that an item may have, at most so many, and items that all channels come to."""
    for pieces in range(1, -(-channels // min(channels, _LEAST_CHUNK)) + 1):
        chunk = round_up(-(-channels // pieces), 8)
        if chunk <= most:
            yield chunk, pieces


def _row_shape(channels: int, taps: int, rows: int) -> tuple[int, int]:
    """Channels of an item and items of a block, so that few of the block's rows are empty, in few boxes."""
    best, found = 0.0, (8, 1)
    for chunk, pieces in _chunks(channels, min(rows, _MOST_BOX)):
        items = min(rows // chunk, taps * pieces)
        blocks = -(-taps * pieces // items)
        share = channels * taps / (blocks * rows) - 0.002 * items
        if share > best or best == 0.0:
            best, found = share, (chunk, items)
    return found


def _column_shapes(channels: int, taps: int, most: int, rows: int) -> list[tuple[int, int]]:
    """Channels of an item and items of a block, the best first: few columns are empty, and many share the rows."""
    found: dict[tuple[int, int], float] = {}
    for chunk, pieces in _chunks(channels, most):
        total, fit = taps * pieces, most // chunk
        for items in {min(fit, total), -(-total // -(-total // min(fit, total))), max(1, fit // 2)}:
            if items > total:
                continue
            columns, blocks = items * chunk, -(-total // items)
            # Cycles of 32 bytes of k: products, or bytes from the L2 cache.
            cycles = max(rows / 64 * max(columns / 2, 16 + columns / 4), 0.8 * (rows + columns)) + items
            found[chunk, items] = blocks * cycles
    return sorted(found, key=lambda each: found[each])


def _stage_bytes(flat: FlatProduct, config: WgradTmaConfig) -> int:
    return flat.product.parts * (config.rows + config.columns) * PITCH


def _tiles(flat: FlatProduct, config: WgradTmaConfig) -> int:
    """Tiles of a group: the kernel's ``TILES``."""
    width, (base, phased) = flat.along[2], flat.channels
    (base_chunk, base_items), (phased_chunk, phased_items) = config.base, config.phased
    of_tap = -(-base // base_chunk) * flat.base_taps(config.window)
    of_residue = -(-phased // phased_chunk) * flat.phased_taps(config.window)
    last = flat.axes[2].kernel - (width.taps - 1) * width.step
    tiles = -(-width.taps * of_tap // base_items)
    whole = tiles if last >= width.residues else -(-(width.taps - 1) * of_tap // base_items)
    many, few = (-(-residues * of_residue // phased_items) for residues in (width.residues, last))
    return whole * many + (tiles - whole) * few


@lru_cache(maxsize=4096)
def _splits(flat: FlatProduct, config: WgradTmaConfig, device: DeviceInfo, narrows: bool) -> tuple[int, float, float]:
    """Splits of the positions, and the predicted seconds of the product and of the reduction.

    ``narrows``: see `_narrows`.
    """
    terms, product = costs("tap_gemm_wgrad_tma", device), flat.product
    items = _tiles(flat, config) * product.problem.groups
    stages = max(1, flat.stages)
    stage = _stage_cycles(flat, config, terms)
    results = config.rows * config.columns * terms.result
    flush = max(1, _flush(flat))
    weights, bandwidth = math.prod(product.problem.weight_shape), device.copy_bytes_per_second
    moving = flat.bytes * (1 if flat.bytes < _CACHED else max(1, items / device.multiprocessors)) / bandwidth

    def seconds(splits: int) -> tuple[float, float]:
        rounds, each = items * splits / device.multiprocessors, math.ceil(stages / splits)
        once = terms.item + results * math.ceil(each / flush)
        cycles = whole_rounds(rounds) * (each * stage + once)
        alone = splits == 1 and (narrows or product.size == 4)
        end = 0.0 if alone else terms.reduce + weights * (8 * splits + product.size) / bandwidth
        return max(cycles / device.clock_hz, moving) + terms.launch / device.clock_hz, end

    most = min(affordable_planes(product.problem), stages // LEAST_STAGES)
    found = best_splits(lambda splits: sum(seconds(splits)), most, items, device)
    return (found, *seconds(found))


def _stage_cycles(flat: FlatProduct, config: WgradTmaConfig, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a stage."""
    parts = flat.product.parts
    loaded = parts * (config.row_items * config.row_chunk + config.columns) * PITCH
    loading = terms.moved * loaded + terms.box * parts * (config.row_items + config.column_items)
    return stage_cycles(config.row_tiles, config.columns, PITCH, parts, loading, terms)
