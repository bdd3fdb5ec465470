"""The forward pass and the input gradient of any layer by TMA and wgmma, ``kernels/tap_gemm_tma.cu``."""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.problem.sizes import standard
from polyphase.program.planes import SRC_PLANES, Planes, write_planes
from polyphase.program.program import (
    Buffer,
    Program,
    assemble,
    prepared,
    reading_channels_last,
    writing_channels_last,
)
from polyphase.program.step import SRC, Step, main_step
from polyphase.program.tensor_map import TensorMap
from polyphase.program.transpose import Transposed
from polyphase.schedules.cells import Side
from polyphase.schedules.cost import slower_of, transpose_seconds
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tap_gemm.k_major import CONSUMER_GROUPS, THREADS
from polyphase.schedules.tap_gemm.product import (
    Product,
    as_read,
    common_limits,
    kernels_change,
    pack_step,
    pairs_along_width,
    product_of,
    seconds_before,
    with_merged_phases,
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
    stage_bytes,
    stages_of,
)
from polyphase.schedules.tap_gemm.tma_cost import options, splits_of, tiles_of_cells, work_tiles_of
from polyphase.schedules.tensor_cores import (
    LEAST_PIPELINE,
    MAX_BOX_STEP,
    STAGED_BYTES,
    counter_bytes,
    pack_for_boxes,
    pipeline_stages,
    pixel_map,
    pixel_pitch,
    weight_map,
)
from polyphase.schedules.tiles import Four


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
            return f"an element stride of {step} is too large for TMA (at most {MAX_BOX_STEP})"
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
        seconds += seconds_before(product, before, device)
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
        reading, maps, how = _read(product, config, layouts.aligned, tile)
        constants = {
            **product.constants,
            "CHUNK": chunk,
            "PITCH": config.pitch,
            "WINDOW": config.window,
            "BOX_ROWS": box_rows(product, config),
            **reading,
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
        if config.boxes:
            packs, packed_bytes = _weight_boxes(product, layouts)
        else:
            pack, packed_bytes = pack_step(product, source, config.columns, chunk, stages, True, counters)
            packs = (pack,)
        params = {
            "dst": gather.dst,
            "source_size": gather.src.shape[2:],
            "batch": problem.batch,
            "groups": problem.groups,
            "tile_extent": tile,
            "tiles": tiles,
            "splits": splits,
            "sums": layouts.in_sums or splits > 1,
            "vector": _stores_together(product, layouts.aligned),
            "plane": math.prod(gather.dst.shape),
        }
        blocks = min(work_tiles_of(product, config, tiles) * splits, device.multiprocessors)
        main = main_step(source, blocks, THREADS, pipeline * stage_bytes(product, config), params, maps)
        own = not layouts.in_sums  # else the reader of the sums adds the planes
        program = assemble(problem, pass_, main, packs, packed_bytes, splits if own else 1, may_split=own)
        program = _reading(replace(program, splits=splits), problem.dtype, how)
        return writing_channels_last(program, problem.dtype, problem.output_shape) if config.back else program


def _product(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: TmaTapConfig) -> Product:
    """The product as a config computes it."""
    product = product_of(problem, pass_, layouts)
    return (with_merged_phases(product, config.merged) if config.merged else None) or product


def _read(
    product: Product, config: TmaTapConfig, aligned: bool, tile: Four
) -> tuple[dict[str, Constant], tuple[TensorMap, TensorMap], Transposed | Planes | None]:
    """How the kernel reads the source: its constants and maps, and how the source is written before."""
    how: Transposed | Planes | None
    if runs := of_config(product, config):
        padded, inner, how = runs.channels, runs.inner, runs.planes
        maps = runs.maps(config.pitch, tile)
    else:
        side, how = _as_read(product, config, aligned)
        padded, inner = side.shape[1] // (product.problem.groups * product.parts), (1, 1)
        box = *tile[:3], tile[3] + halo(product, config)
        steps = tuple(axis.src for axis in product.gather.cell_axes)
        source = pixel_map(product.problem.dtype, side, box, config.pitch, steps)
        maps = source, weight_map(product.problem, config.pitch, config.columns) if config.boxes else source
    joined = runs is not None and runs.joined
    constants: dict[str, Constant] = {"RUNS": config.runs, "JOINED": joined, "PADDED_CHANNELS": padded}
    return {**constants, "INNER_D": inner[0], "INNER_H": inner[1]}, maps, how


def _reading(inner: Program, dtype: str, how: Transposed | Planes | None) -> Program:
    """The program with the step before it that writes the source."""
    if isinstance(how, Planes):
        return prepared(inner, (write_planes(dtype, how),), {SRC: Buffer(SRC_PLANES, dtype, how.elements)})
    return reading_channels_last(inner, dtype, {} if how is None else {SRC: how})


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
    product = product_of(problem, pass_, layouts)
    far = product.step > MAX_BOX_STEP and not side_by_side(product.gather.axes[2], product.gather.forward)
    return product.step if far else 0


def _can_read(product: Product, config: TmaTapConfig) -> bool:
    """Whether TMA can load the source."""
    return of_config(product, config) is not None if config.runs else product.step <= MAX_BOX_STEP


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
    written = pixel_pitch(product.gather.src_channels * product.size) // product.size
    return as_read(product, product.gather.src, aligned, written=written)


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
    return pipeline_stages(stage_bytes(product, config), device, staged=staged)


def _weight_boxes(product: Product, layouts: Layouts) -> tuple[tuple[Step, ...], int]:
    """The step that writes the weight for TMA boxes, unless TMA reads it in place, and the bytes written."""
    if _lies(product, layouts):
        return (), 0
    padded = round_up(product.gather.src_channels, product.piece)
    step = pack_for_boxes(product.problem, product.gather.weight_channels_last, padded)
    return (step,), product.problem.in_channels * product.problem.taps * padded * product.size
