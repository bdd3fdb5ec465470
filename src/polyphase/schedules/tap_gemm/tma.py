"""The forward pass and the input gradient of any layer by TMA and wgmma, ``kernels/tap_gemm_tma.cu``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, dense_strides, five
from polyphase.problem.sizes import standard
from polyphase.program.params import params_of
from polyphase.program.planes import SRC_PLANES, Planes, write_planes
from polyphase.program.program import (
    Buffer,
    Program,
    assemble,
    prepared,
    reading_channels_last,
    writing_channels_last,
)
from polyphase.program.step import SRC, WEIGHT, WORKSPACE, Step
from polyphase.program.tensor_map import TensorMap, tma_strides
from polyphase.program.transpose import Transposed, to_channels_last
from polyphase.schedules.cells import Side
from polyphase.schedules.cost import slower_of, transpose_seconds
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tap_gemm.k_major import CONSUMER_GROUPS, LEAST_PIPELINE, THREADS, pipeline_stages
from polyphase.schedules.tap_gemm.product import (
    MOST_STEP,
    Product,
    as_read,
    common_limits,
    kernels_change,
    pack_step,
    pairs_along_width,
    product_of,
    seconds_before,
    step_of,
)
from polyphase.schedules.tap_gemm.runs import side_by_side
from polyphase.schedules.tap_gemm.tma_config import (
    TmaTapConfig,
    box_rows,
    chunk_of,
    flush,
    halo,
    legal_configs,
    of_config,
    product_of_config,
    stage_bytes,
    stages_of,
)
from polyphase.schedules.tap_gemm.tma_cost import options, splits_of, tiles_of_cells, work_tiles_of
from polyphase.schedules.tensor_cores import STAGED_BYTES, counter_bytes
from polyphase.schedules.tiles import Four

_PIXELS, _PIXEL = (16, 32, 64, 128), 64  # bytes of a transposed pixel: one of these, or a multiple of the last


class TapGemmTma(Schedule):
    """Rows are a tile of cells of one phase, columns are destination channels; TMA loads a box for each tap group."""

    name = "tap_gemm_tma"
    behind = ("window_dgrad_tma", "window_dgrad_transposed")
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)
    on_tensor_cores = True
    adapts = True
    offered = 8
    kept = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} has no wgmma"
        layouts = Layouts.dense(problem)
        if (step := _too_far(problem, pass_, layouts)) > 0:
            return f"an element stride of {step} is too large for TMA (at most {MOST_STEP})"
        return common_limits(problem)

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return not kernels_change(problem, pass_, device)

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        """None also if a layer of one output channel cannot be folded, and its stride is too large."""
        return None if _too_far(problem, pass_, layouts) else standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TmaTapConfig]:
        product = product_of(at, pass_, Layouts.dense(at))
        found = [config for config in legal_configs(product) if _pipeline(product, config, device) >= LEAST_PIPELINE]
        if product.gather.forward and product.gather.dst.strides[1] != 1:
            found += [config._replace(back=True) for config in found if not config.merged]
        return found

    def arranged(self, order: list[TmaTapConfig]) -> list[TmaTapConfig]:
        """The fastest configs of several tiles first: the actual size decides which suits few positions."""
        tiles: dict[tuple[int, int], TmaTapConfig] = {}
        for config in order:
            tiles.setdefault((config.row_tiles, config.columns), config)
        return list(dict.fromkeys((*order[: self.offered // 2], *tiles.values(), *order)))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaTapConfig
    ) -> Cost | None:
        lie = _written(problem, layouts, config)
        runs = None if lie is None else of_config(_product(problem, pass_, lie, config), config)
        return None if lie is None or (runs and not runs.fits) else self._cost(problem, pass_, device, lie, config)

    def seconds(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, config: TmaTapConfig) -> float:
        """Whatever memory planes of runs would take at the ranking size."""
        lie = _written(at, Layouts.dense(at), config)
        cost = None if lie is None else self._cost(at, pass_, device, lie, config)
        return math.inf if cost is None else cost[0]

    def _cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaTapConfig
    ) -> Cost | None:
        """The cost with the layouts that the kernel sees."""
        product = _product(problem, pass_, layouts, config)
        if not _can_read(product, config) or not options(product, config):
            return None
        _, seconds = splits_of(product, config, device)
        if config.boxes and not _lies(product, layouts):
            seconds += transpose_seconds(2 * math.prod(problem.weight_shape) * product.size, device, 0)
        if config.back:
            seconds += transpose_seconds(2 * math.prod(product.gather.dst.shape) * product.size, device)
        runs = of_config(product, config)
        before = runs.planes if runs else _as_read(product, config, layouts.aligned)[1]
        seconds += seconds_before(product, (before,), device)
        moving = problem.bytes / device.copy_bytes_per_second
        return slower_of(seconds, moving)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaTapConfig
    ) -> Program:
        lie = _written(problem, layouts, config)
        assert lie is not None
        product = _product(problem, pass_, lie, config)
        gather, chunk = product.gather, chunk_of(product, config)
        tile, tiles = tiles_of_cells(product, config, device)
        splits, stages = splits_of(product, config, device)[0], max(stages_of(product, config))
        read = _read(product, config, layouts.aligned, tile)
        constants = {
            **product.constants,
            "CHUNK": chunk,
            "PITCH": config.pitch,
            "WINDOW": config.window,
            "BOX_ROWS": box_rows(product, config),
            **read.constants,
            "PARTS": product.parts,
            "WEIGHT_BOXES": config.boxes,
            "PACKED_STAGES": stages,
            "ROW_TILES": config.row_tiles,
            "COLUMNS": config.columns,
            "FLUSH": flush(product, config),
            "STAGES": (pipeline := _pipeline(product, config, device)),
            "ONE_BIAS": problem.out_channels == 1,
            "DST_CHANNELS_LAST": not gather.forward and not _stores_columns(product),
            "COUNTER_BYTES": (counters := counter_bytes(1)),
            "MIN_BLOCKS": 1,
            "WGMMA": True,
        }
        forms = (WgmmaForm(config.columns, problem.dtype),)
        source = KernelSource(self.name, problem.dtype, True, tuple(constants.items()), forms)
        packs, packed_bytes = _weight_boxes(product, layouts)
        if not config.boxes:
            pack, packed_bytes = pack_step(product, source, config.columns, chunk, stages, True, counters)
            packs = (pack,)
        params = params_of(source).pack(
            dst=gather.dst,
            source_size=gather.src.shape[2:],
            batch=problem.batch,
            groups=problem.groups,
            tile_extent=tile,
            tiles=tiles,
            splits=splits,
            sums=layouts.in_sums or splits > 1,
            vector=_stores_together(product, layouts.aligned),
            plane=math.prod(gather.dst.shape),
        )
        main = Step(
            source=source,
            grid=(min(work_tiles_of(product, config, tiles) * splits, device.multiprocessors), 1, 1),
            block=THREADS,
            shared_bytes=pipeline * stage_bytes(product, config),
            params=params,
            tensor_maps=read.maps,
        )
        own = not layouts.in_sums  # else the reader of the sums adds the planes
        program = assemble(problem, pass_, main, packs, packed_bytes, splits if own else 1, may_split=own)
        program = read.before(replace(program, splits=splits), problem.dtype)
        return writing_channels_last(program, problem.dtype, problem.output_shape) if config.back else program


def _product(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: TmaTapConfig) -> Product:
    return product_of_config(product_of(problem, pass_, layouts), config)


class _Read(NamedTuple):
    """The source as the kernel reads it, and the step that writes it so."""

    constants: dict[str, Constant]
    maps: tuple[TensorMap, TensorMap]
    transposed: Transposed | Planes | None

    def before(self, inner: Program, dtype: str) -> Program:
        """The program with the step that writes it before."""
        how = self.transposed
        if isinstance(how, Planes):
            return prepared(inner, (write_planes(dtype, how),), {SRC: Buffer(SRC_PLANES, dtype, how.elements)})
        return reading_channels_last(inner, dtype, {} if how is None else {SRC: how})


def _read(product: Product, config: TmaTapConfig, aligned: bool, tile: Four) -> _Read:
    """The source of a config."""
    how: Transposed | Planes | None
    if runs := of_config(product, config):
        padded, inner, how = runs.channels, runs.inner, runs.planes
        maps = runs.maps(config.pitch, tile)
    else:
        side, how = _as_read(product, config, aligned)
        padded, inner = side.shape[1] // (product.problem.groups * product.parts), (1, 1)
        source = _map(product, config, side, tile)
        maps = source, _weight_map(product, config) if config.boxes else source
    joined = runs is not None and runs.joined
    constants: dict[str, Constant] = {"RUNS": config.runs, "JOINED": joined, "PADDED_CHANNELS": padded}
    return _Read({**constants, "INNER_D": inner[0], "INNER_H": inner[1]}, maps, how)


def _stores_together(product: Product, aligned: bool) -> bool:
    """Whether neighbouring columns are stored together: eight bytes (input gradient) or two columns (forward).

    They are channels, or with merged phases outputs that are neighbours along the width.
    """
    dst, count = product.gather.dst, 2 if product.gather.forward else 2 * product.word
    if product.channels_innermost:
        return aligned and dst.strides[1] == 1 and math.gcd(product.channels, dst.apart(1)) % count == 0
    return aligned and product.merged[2] > 1 and pairs_along_width(product)


def _too_far(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> int:
    """Source elements from a cell to the next, if TMA cannot load them and they are not runs; else 0."""
    gather, step = product_of(problem, pass_, layouts).gather, step_of(problem, pass_, layouts)
    return step if step > MOST_STEP and not side_by_side(gather.axes[2], gather.forward) else 0


def _can_read(product: Product, config: TmaTapConfig) -> bool:
    """Whether TMA can load the source."""
    if config.runs:
        return of_config(product, config) is not None
    return max(axis.src for axis in product.gather.cell_axes) <= MOST_STEP


def _written(problem: ConvTransposeProblem, layouts: Layouts, config: TmaTapConfig) -> Layouts | None:
    """The layouts that the kernel sees; None if the transpose after it cannot write the output's strides."""
    if not config.back:
        return layouts
    shape = problem.output_shape
    return (
        replace(layouts, output=dense_strides(shape, True)) if layouts.output == dense_strides(shape, False) else None
    )


def _as_read(product: Product, config: TmaTapConfig, aligned: bool) -> tuple[Side, Transposed | None]:
    """The source as TMA loads boxes of it, and its transpose if it has another layout.

    A box that extends beyond the channels of a group or part must not read the next one's. Pixels that are written
    span few cache lines.
    """
    if product.problem.groups * product.parts > 1:
        return as_read(product, product.gather.src, aligned, chunk_of(product, config), product.parts)
    pixel = product.gather.src_channels * product.size
    written = next((each for each in _PIXELS if pixel <= each), _PIXEL) // product.size
    return as_read(product, product.gather.src, aligned, written=written)


def _map(product: Product, config: TmaTapConfig, read: Side, tile: Four) -> TensorMap:
    """The box of a stage of a tile of cells."""
    size = product.size
    batch, channels, depth, height, width = read.shape
    image, _, slab, row, column = (step * size for step in read.strides)
    dimensions = zip((width, height, depth, batch), (column, row, slab, image))
    counts = (tile[3] + halo(product, config), tile[2], tile[1])
    steps = (axis.src if count > 1 else 1 for axis, count in zip(product.gather.cell_axes[::-1], counts))
    return TensorMap(
        product.problem.dtype,
        (channels, width, height, depth, max(1, batch)),
        tuple(16 if count == 1 else step for count, step in dimensions),
        (config.pitch // size, tile[3] + halo(product, config), *tile[2::-1]),
        config.pitch,
        True,
        0,
        (1, *steps, 1),
    )


def _lies(product: Product, layouts: Layouts) -> bool:
    """Whether TMA loads boxes of the weight in place: its source channels are innermost, and whole pieces."""
    innermost = product.gather.weight_channels_last or product.problem.taps == 1
    return innermost and layouts.aligned and product.gather.src_channels % product.piece == 0


def _stores_columns(product: Product) -> bool:
    """Whether an input gradient is stored in NCHW: odd rows pass through shared memory."""
    return not product.gather.forward and product.gather.dst.strides[1] != 1


def _pipeline(product: Product, config: TmaTapConfig, device: DeviceInfo) -> int:
    """Stages of the pipeline."""
    staged = CONSUMER_GROUPS * STAGED_BYTES if _stores_columns(product) else 0
    return pipeline_stages(stage_bytes(product, config), device, staged)


def _weight_boxes(product: Product, layouts: Layouts) -> tuple[tuple[Step, ...], int]:
    """The step that writes the weight for TMA boxes, unless TMA reads it in place, and the bytes written."""
    if _lies(product, layouts):
        return (), 0
    shape, padded = five(product.problem.weight_shape), round_up(product.gather.src_channels, product.piece)
    strides = dense_strides(shape, product.gather.weight_channels_last)
    step = to_channels_last(product.problem.dtype, Transposed(shape, strides, padded=padded))
    elements = math.prod(shape) // product.gather.src_channels * padded
    return (replace(step, operands=(WEIGHT, WORKSPACE)),), elements * product.size


def _weight_map(product: Product, config: TmaTapConfig) -> TensorMap:
    """The box of a tap's weights: source channels, destination channels, taps."""
    gather, size, taps = product.gather, product.size, product.problem.taps
    rows, channels = product.problem.groups * gather.dst_channels, round_up(gather.src_channels, product.piece)
    strides = tma_strides([(rows, taps * channels * size), (taps, channels * size), (1, 0), (1, 0)])
    assert strides is not None, "channels are whole pieces of 16 bytes"
    return TensorMap(
        product.problem.dtype,
        (gather.src_channels, rows, taps, 1, 1),
        strides,
        (config.pitch // size, config.columns, 1, 1, 1),
        config.pitch,
        True,
        1,
    )
