"""The weight gradient of any layer by TMA and wgmma, ``kernels/tap_gemm_wgrad_tma.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from polyphase.costs import Costs, costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import equal_part, round_up
from polyphase.problem.layouts import Layouts
from polyphase.problem.problem import DTYPE_BYTES
from polyphase.problem.sizes import standard
from polyphase.program.flatten import GRAD_PLANES, X_PLANES, flatten_positions
from polyphase.program.program import (
    Buffer,
    Program,
    assemble,
    prepared,
    transpose_reduces,
    writing_weight_channels_last,
)
from polyphase.program.step import GRAD, Step, X, main_step
from polyphase.program.tensor_map import TensorMap, tma_strides
from polyphase.schedules.cost import overlapped_time, slower_of, transpose_seconds, whole_waves
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tap_gemm.flat import (
    PITCH,
    FlatProduct,
    flat_product,
    may_count_images_last,
    may_spread,
)
from polyphase.schedules.tap_gemm.k_major import LEAST_STAGES, THREADS, stage_cycles
from polyphase.schedules.tap_gemm.product import common_limits
from polyphase.schedules.tap_gemm.wgrad_tma_config import WgradTmaConfig, legal_configs
from polyphase.schedules.tensor_cores import LEAST_PIPELINE, pipeline_stages
from polyphase.schedules.tiles import affordable_planes, constants_of, fastest_splits

_FLUSH = 8192  # most positions that tensor cores accumulate before a flush
_MOST_BYTES, _MOST_OF_IMAGE = 1 << 30, 8 << 30  # bytes of the planes; the second if one image has more than the first
_MOST_WEIGHTS = 1 << 31  # weights of a group
_MOST_POSITIONS = (1 << 30) - 1
_OVERLAPPED = 128 << 20  # bytes of planes up to which the product gains by an early start
_CACHED = 24 << 20  # bytes of planes that stay in the L2 cache


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
        return [
            config
            for flat in _flats(at)
            for config in legal_configs(flat)
            if pipeline_stages(_stage_bytes(flat, config), device) >= LEAST_PIPELINE
        ]

    def arranged(self, order: list[WgradTmaConfig]) -> list[WgradTmaConfig]:
        """Equally many configs of each operand layout first, so that the actual size can choose between layouts."""
        ways: dict[tuple[bool, bool, bool], list[WgradTmaConfig]] = {}
        for config in order:
            ways.setdefault((config.batched, config.spread, config.in_place), []).append(config)
        first = [each for way in ways.values() for each in way[: self.offered // len(ways)]]
        first.sort(key=order.index)
        return list(dict.fromkeys((*first, *order)))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WgradTmaConfig
    ) -> Cost | None:
        """None if flat operands would take too much memory or time to write, or tensors cannot be read in place."""
        flat = _flat(problem, layouts, config)
        lies = flat.in_place is config.in_place and (not config.batched or may_count_images_last(problem, layouts))
        if not lies or not _affordable(flat):
            return None
        return self._cost(problem, device, flat, config)

    def seconds(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, config: WgradTmaConfig) -> float:
        """Whatever memory the planes would take at the ranking size."""
        return self._cost(at, device, _flat(at, Layouts.dense(at), config), config)[0]

    def _cost(
        self, problem: ConvTransposeProblem, device: DeviceInfo, flat: FlatProduct, config: WgradTmaConfig
    ) -> Cost:
        terms, bandwidth = costs("tap_gemm_wgrad_tma", device), device.copy_bytes_per_second
        slices, size = _slices(flat), DTYPE_BYTES[problem.dtype]
        splits, product, reduction = _splits(slices[0][1], config, device, _narrows(slices))
        element = terms.element_batch if config.batched else terms.element
        seconds = len(slices) * (product + terms.flatten * any(flat.written)) + reduction
        seconds += flat.moved * size / (terms.flattened * bandwidth)
        seconds += flat.moved * element / (device.multiprocessors * device.clock_hz)
        if _goes_back(problem) and not (reduction and transpose_reduces(problem, splits)):
            seconds += transpose_seconds(2 * problem.elements[1] * size, device)
        return slower_of(seconds, problem.bytes / bandwidth)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WgradTmaConfig
    ) -> Program:
        slices = _slices(_flat(problem, layouts, config))
        whole = slices[0][1]
        source, narrows = _source(whole, config, device), _narrows(slices)
        splits = _splits(whole, config, device, narrows)[0]
        steps, alone = [], splits == 1 and narrows
        for first, flat in slices:
            main = _main(flat, config, device, source, splits, first, alone)
            steps += [*_written(flat, first), main]
        back = _goes_back(problem)
        last = back or (problem.channels_last and problem.taps > 1)  # with one tap both orders are the same
        program = assemble(problem, pass_, main, splits=splits, dst_channels_last=last, narrowed=alone)
        planes = _buffers(whole)
        program = prepared(program, (), {of: each for of, each in planes.items() if each.elements})
        operands = program.main.operands
        sliced = [replace(each, operands=operands) if each.source is source else each for each in steps]
        empty = [each for each in planes.values() if any(whole.written) and not each.elements]
        program = replace(
            program,
            steps=(*sliced, *program.steps[1:]),
            main_index=int(any(whole.written)),
            buffers=(*program.buffers, *empty),
        )
        return writing_weight_channels_last(program, problem) if back else program


def _flat(problem: ConvTransposeProblem, layouts: Layouts, config: WgradTmaConfig) -> FlatProduct:
    """The product as a config lays out its operands."""
    return flat_product(problem, layouts, config.swapped, config.batched, config.spread, config.in_place)


def _written(flat: FlatProduct, first: int) -> list[Step]:
    """The step, if any, that writes the planes of some images, from ``first`` on."""
    sides = [each._replace(first_image=first) if new else None for each, new in zip(flat.planes, flat.written)]
    x, grad = reversed(sides) if flat.swapped else sides
    return [flatten_positions(flat.product.problem.dtype, flat.product.word, x, grad)] if x or grad else []


def _buffers(flat: FlatProduct) -> dict[str, Buffer]:
    """The planes of both tensors; empty for one that is read in place."""
    names = ((GRAD, GRAD_PLANES), (X, X_PLANES)) if flat.swapped else ((X, X_PLANES), (GRAD, GRAD_PLANES))
    found = zip(names, flat.planes, flat.written)
    return {of: Buffer(name, flat.product.problem.dtype, each.elements * new) for (of, name), each, new in found}


def _flats(problem: ConvTransposeProblem) -> Iterator[FlatProduct]:
    """All ways to lay out a layer's dense operands."""
    layouts = Layouts.dense(problem)
    ways = [(False, False)]
    ways += [(True, False)] if may_count_images_last(problem, layouts) else []
    ways += [(False, True)] if may_spread(problem, layouts) else []
    swaps = (False, True) if max(problem.stride) == 1 else (False,)
    for (batched, spread), swapped in itertools.product(ways, swaps):
        flat = flat_product(problem, layouts, swapped, batched, spread)
        yield flat
        if flat.base_lies:
            yield flat_product(problem, layouts, swapped, batched, spread, in_place=True)


@lru_cache(maxsize=1024)
def _slices(flat: FlatProduct) -> list[tuple[int, FlatProduct]]:
    """The first image and the product of each share of the images; shares are written and multiplied in turn."""
    problem, unit = flat.product.problem, flat.product.piece if flat.batched else 1
    if problem.batch <= unit or max(flat.written_bytes / _MOST_BYTES, flat.positions / _MOST_POSITIONS) <= 1:
        return [(0, flat)]
    least = flat.of_images(unit)
    most = unit * max(1, min(_MOST_BYTES // max(1, least.written_bytes), _MOST_POSITIONS // least.positions))
    each = round_up(equal_part(problem.batch, most), unit)
    return [(first, flat.of_images(min(each, problem.batch - first))) for first in range(0, problem.batch, each)]


def _flush(flat: FlatProduct) -> int:
    """Stages that tensor cores accumulate before a flush."""
    return _FLUSH // flat.depth if flat.product.parts == 1 else max(1, flat.stages)


def _narrows(slices: list[tuple[int, FlatProduct]]) -> bool:
    """Whether unsplit sums are complete when first stored, so that they are stored in the tensors' type."""
    return len(slices) == 1 and slices[0][1].stages <= _flush(slices[0][1])


def _affordable(flat: FlatProduct) -> bool:
    """Whether a share's planes fit the memory limit, and its positions the kernels."""
    unit = flat.product.piece if flat.batched else 1
    least = flat if flat.product.problem.batch <= unit else flat.of_images(unit)
    return (
        least.written_bytes <= (_MOST_BYTES if flat.batched else _MOST_OF_IMAGE) and least.positions <= _MOST_POSITIONS
    )


def _goes_back(problem: ConvTransposeProblem) -> bool:
    """Whether the result, whose output channels are innermost, is transposed afterwards."""
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
        **dict(constants_of(config, "swapped mirrored window_d window_h spread")),
        "PARTS": flat.product.parts,
        "PITCH": PITCH,
        **dict(constants_of(config, "row_tiles row_items row_chunk columns column_items column_chunk")),
        "PROMOTE": int(exact),
        "STAGES": pipeline_stages(_stage_bytes(flat, config), device),
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
    first: int,
    narrowed: bool,
) -> Step:
    """The step of the product of some images, from ``first`` on; sums are added to those of earlier images.

    ``narrowed``: the sums are complete, and stored in the tensors' type.
    """
    product, slabs = flat.product, flat.outer[1]
    first_images = [0 if new else first for new in flat.written]
    column, work_tiles = flat.images or 1, _tiles(flat, config) * product.problem.groups * splits
    params = {
        "groups": product.problem.groups,
        "splits": splits,
        "work_tiles": work_tiles,
        "stages": flat.stages,
        "slab_stages": max(1, flat.slab_stages),
        "slabs": slabs,
        "flush": _flush(flat),
        "again": first > 0,
        "narrowed": narrowed,
        "column": column,
        "row": column * flat.padded[2],
        "slab": column * flat.padded[1] * flat.padded[2] if slabs == 1 else 0,
        "base_image": first_images[0],
        "phased_image": first_images[1],
        "plane": math.prod(product.problem.weight_shape),
    }
    maps = (
        _map(flat, 0, config.base[0], first_images[0]),
        _map(flat, 1, config.phased[0], first_images[1]),
    )
    stage = _stage_bytes(flat, config)
    shared_bytes, blocks = pipeline_stages(stage, device) * stage, min(work_tiles, device.multiprocessors)
    main = main_step(source, blocks, THREADS, shared_bytes, params, maps)
    return replace(main, overlaps=0 < flat.written_bytes <= _OVERLAPPED)


def _map(flat: FlatProduct, side: int, chunk: int, first: int) -> TensorMap:
    """The map of the base (0) or the phased operand (1): (position, channel, copy, slab, image).

    A box is a stage of an item; ``first``: image.
    """
    planes, (images, slabs), (channel, slab, image) = flat.planes[side], flat.outer, flat.strides(side)
    channels, positions = planes.shape[1], math.prod(planes.padded) if flat.in_place else planes.positions
    deep = planes.padded[0] if slabs > 1 else 1
    counts = channels, math.prod(planes.planes) * planes.parts, deep, first + images
    elements = channel, channels * channel, slab or positions, image or 1
    size = flat.product.size
    strides = tma_strides(zip(counts, (size * each for each in elements)))
    assert strides is not None, "planes are whole pieces of 16 bytes apart"
    return TensorMap(
        flat.product.problem.dtype,
        (max(1, positions // deep), *(max(1, each) for each in counts)),
        strides,
        (flat.depth, chunk, 1, 1, 1),
        PITCH,
        True,
        int((side == 0) == flat.swapped),
    )


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
    work_tiles = _tiles(flat, config) * product.problem.groups
    stages = max(1, flat.stages)
    stage = _stage_cycles(flat, config, terms)
    results = config.rows * config.columns * terms.result
    flush = _flush(flat)
    weights, bandwidth = math.prod(product.problem.weight_shape), device.copy_bytes_per_second
    moving = flat.bytes * (1 if flat.bytes < _CACHED else max(1, work_tiles / device.multiprocessors)) / bandwidth
    moving *= device.clock_hz

    def seconds(splits: int) -> tuple[float, float]:
        waves, each = work_tiles * splits / device.multiprocessors, math.ceil(stages / splits)
        once = terms.item + results * math.ceil(each / flush)
        cycles = whole_waves(waves) * (each * stage + once)
        alone = splits == 1 and (narrows or product.size == 4)
        end = 0.0 if alone else terms.reduce + weights * (8 * splits + product.size) / bandwidth
        return (overlapped_time(cycles, moving, terms.overlap) + terms.launch) / device.clock_hz, end

    waves = 2 * device.multiprocessors // max(1, work_tiles)
    return fastest_splits(min(affordable_planes(product.problem), stages // LEAST_STAGES, waves), seconds)


def _stage_cycles(flat: FlatProduct, config: WgradTmaConfig, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a stage."""
    parts = flat.product.parts
    sides = zip((config.base, config.phased), (flat.straddling(side, config.window) for side in (0, 1)))
    loaded = sum(chunk * items * (1 + terms.straddling * share) for (chunk, items), share in sides) * parts * PITCH
    loading = terms.moved * loaded + terms.box * parts * (config.row_items + config.column_items)
    return stage_cycles(config.row_tiles, config.columns, PITCH, parts, loading, terms)
