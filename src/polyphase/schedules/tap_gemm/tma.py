"""The forward pass and the input gradient of any layer by TMA and wgmma, ``kernels/tap_gemm_tma.cu``."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.problem.sizes import standard
from polyphase.program.params import params_of
from polyphase.program.planes import SRC_PLANES, Planes, Three, write_planes
from polyphase.program.program import (
    Buffer,
    Program,
    Transposed,
    assemble,
    prepared,
    reading_channels_last,
    writing_channels_last,
)
from polyphase.program.step import SRC, Step
from polyphase.program.tensor_map import TensorMap
from polyphase.schedules.cells import Side
from polyphase.schedules.cost import slower_of, transpose_seconds
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tap_gemm.k_major import (
    LEAST_BUFFERS,
    LEAST_STAGES,
    THREADS,
    best_splits,
    buffers,
    rounds_of_unequal,
    stage_cycles,
)
from polyphase.schedules.tap_gemm.product import (
    MOST_STEP,
    Product,
    as_read,
    common_limits,
    is_dense,
    kernels_change,
    pack_step,
    product_of,
    seconds_before,
    step_of,
    taps_met,
)
from polyphase.schedules.tap_gemm.runs import side_by_side
from polyphase.schedules.tap_gemm.tma_config import (
    TmaTapConfig,
    box_rows,
    chunk_of,
    configs_of,
    flush,
    halo,
    of_config,
    stage_bytes,
    stages_of,
    taps_of_window,
)
from polyphase.schedules.tensor_cores import counter_bytes
from polyphase.schedules.tiles import Four, affordable_planes, tiles_of

_MOST_SIDE = 256  # elements that a box spans
_SECTOR = 32  # bytes
_RUN = 8  # rows that wgmma reads at an address


class TapGemmTma(Schedule):
    """Rows are a tile of cells of one phase, columns are destination channels; TMA loads a box for each tap group."""

    name = "tap_gemm_tma"
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)
    on_tensor_cores = True
    adapts = True
    kept = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} has no wgmma"
        layouts = Layouts.dense(problem)
        if (step := _too_far(problem, pass_, layouts)) > 0:
            return f"TMA brings every {MOST_STEP}-th element at most, not every {step}-th"
        return common_limits(problem)

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return not kernels_change(problem, pass_, device)

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        """None, too, where a layer of one output channel cannot be folded, and its stride is too large."""
        return None if _too_far(problem, pass_, layouts) else standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TmaTapConfig]:
        product = product_of(at, pass_, Layouts.dense(at))
        found = [
            config for config in configs_of(product) if buffers(stage_bytes(product, config), device) >= LEAST_BUFFERS
        ]
        if product.gather.dst.strides[1] != 1:
            found += [config._replace(back=True) for config in found]
        return found

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaTapConfig
    ) -> Cost | None:
        lie = _written(problem, pass_, layouts, config)
        if lie is None:
            return None
        product = product_of(problem, pass_, lie)
        if not _can_read(product, config) or not _options(product, config):
            return None
        _, seconds = _splits(product, config, device)
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
        lie = _written(problem, pass_, layouts, config)
        assert lie is not None
        product = product_of(problem, pass_, lie)
        gather, chunk = product.gather, chunk_of(product, config)
        lanes, tiles = _tiles(product, config, device)
        splits, stages = _splits(product, config, device)[0], max(stages_of(product, config))
        read = _read(product, config, layouts.aligned, lanes)
        constants = {
            **dict(gather.constants()),
            "CHUNK": chunk,
            "PITCH": config.pitch,
            "WINDOW": config.window,
            "BOX_ROWS": box_rows(product, config),
            **read.constants,
            "PARTS": product.parts,
            "PACKED_STAGES": stages,
            "ROW_TILES": config.row_tiles,
            "COLUMNS": config.columns,
            "FLUSH": flush(product, config),
            "BUFFERS": buffers(stage_bytes(product, config), device),
            "ONE_BIAS": problem.out_channels == 1,
            "COUNTER_BYTES": (counters := counter_bytes(1)),
            "MIN_BLOCKS": 1,
            "WGMMA": True,
        }
        del constants["DST_CHANNELS_LAST"]
        form = WgmmaForm(config.columns, problem.dtype)
        source = KernelSource(self.name, problem.dtype, True, tuple(constants.items()), (form,))
        pack, packed_bytes = pack_step(product, source, config.columns, chunk, stages, True, counters)
        even = math.gcd(gather.dst_channels, gather.dst.apart(1)) % 2 == 0
        params = params_of(source).pack(
            dst=gather.dst,
            source_size=gather.src.shape[2:],
            batch=problem.batch,
            groups=problem.groups,
            lanes=lanes,
            tiles=tiles,
            splits=splits,
            sums=layouts.in_sums or splits > 1,
            vector=even and layouts.aligned and gather.dst.strides[1] == 1,
            plane=math.prod(gather.dst.shape),
        )
        main = Step(
            source=source,
            grid=(min(_items(product, config, tiles) * splits, device.multiprocessors), 1, 1),
            block=THREADS,
            shared_bytes=buffers(stage_bytes(product, config), device) * stage_bytes(product, config),
            params=params,
            tensor_maps=read.maps,
        )
        reduced = 1 if layouts.in_sums else splits  # the sums' reader adds up their planes
        program = assemble(problem, pass_, main, (pack,), packed_bytes, reduced, may_split=not layouts.in_sums)
        program = read.before(replace(program, splits=splits), problem.dtype)
        if not config.back:
            return program
        return writing_channels_last(program, problem.dtype, _shape(problem, pass_))


class _Read(NamedTuple):
    """The source as the kernel reads it, and how it is written so before."""

    constants: dict[str, Constant]
    maps: tuple[TensorMap, TensorMap]
    transposed: Transposed | Planes | None

    def before(self, inner: Program, dtype: str) -> Program:
        """The program that writes it so first."""
        how = self.transposed
        if isinstance(how, Planes):
            return prepared(inner, (write_planes(dtype, how),), {SRC: Buffer(SRC_PLANES, dtype, how.elements)})
        return reading_channels_last(inner, dtype, {} if how is None else {SRC: how})


def _read(product: Product, config: TmaTapConfig, aligned: bool, lanes: Four) -> _Read:
    """The source of a config."""
    how: Transposed | Planes | None
    if runs := of_config(product, config):
        padded, inner, how = runs.channels, runs.inner, runs.planes
        maps = runs.maps(config.pitch, lanes)
    else:
        side, how = _as_read(product, config, aligned)
        padded, inner = side.shape[1] // (product.problem.groups * product.parts), (1, 1)
        maps = (_map(product, config, side, lanes),) * 2
    joined = runs is not None and runs.joined
    constants: dict[str, Constant] = {"RUNS": config.runs, "JOINED": joined, "PADDED_CHANNELS": padded}
    return _Read({**constants, "INNER_D": inner[0], "INNER_H": inner[1]}, maps, how)


def _too_far(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> int:
    """Source elements from a cell to the next where TMA does not bring them and they are no runs; else 0."""
    gather, step = product_of(problem, pass_, layouts).gather, step_of(problem, pass_, layouts)
    return step if step > MOST_STEP and not side_by_side(gather.axes[2], gather.forward) else 0


def _can_read(product: Product, config: TmaTapConfig) -> bool:
    """Whether TMA can load the source, and it is not too large."""
    if config.runs:
        runs = of_config(product, config)
        return runs is not None and runs.fits
    return max(axis.src for axis in product.gather.cell_axes) <= MOST_STEP


def _shape(problem: ConvTransposeProblem, pass_: Pass) -> tuple[int, ...]:
    """The result's."""
    return problem.output_shape if pass_ is Pass.FORWARD else problem.input_shape


def _written(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, config: TmaTapConfig) -> Layouts | None:
    """The layouts that the kernel sees. None where the transpose after it cannot write the result's strides."""
    if not config.back:
        return layouts
    shape = _shape(problem, pass_)
    lies = layouts.output if pass_ is Pass.FORWARD else layouts.input
    if lies != dense_strides(shape, False):
        return None
    last = dense_strides(shape, True)
    return replace(layouts, output=last) if pass_ is Pass.FORWARD else replace(layouts, input=last)


def _as_read(product: Product, config: TmaTapConfig, aligned: bool) -> tuple[Side, Transposed | None]:
    """The source as TMA takes boxes of it, and how it is transposed if it lies otherwise.

    A box that reaches beyond a group's channels, or a part's, must not meet the next one's.
    """
    apart = product.problem.groups * product.parts > 1
    return as_read(
        product, product.gather.src, aligned, chunk_of(product, config) if apart else product.piece, product.parts
    )


@lru_cache(maxsize=1024)
def _extents(batch: int, cells: Three, steps: Three, rows: int, halo: int, most_rows: int) -> list[tuple[Four, int]]:
    """Extents along n, d, h and w that a tile of so many rows may have, and how many tiles there are then.

    With a halo along the width a tile is one line of runs of eight cells, or a multiple of eight lines, and its box has
    room for so many rows.
    """
    run = _RUN if halo else 1

    def along(size: int, step: int, most: int, halo: int = 0, multiple: int = 1) -> list[int]:
        most = min(most, (_MOST_SIDE - 1) // step + 1 - halo)
        found = {1 << i for i in range(most.bit_length()) if 1 << i < size}
        found |= {round_up(math.ceil(size / math.ceil(size / most)), multiple)} if most > 0 else set()
        return sorted((each for each in found if each % multiple == 0 and each <= most), reverse=True)

    found = []
    for w in along(cells[2], steps[2], rows, halo, run):
        for h in along(cells[1], steps[1], rows // w):
            for d in along(cells[0], steps[0], rows // (w * h)):
                n, whole = max(1, min(batch, rows // (w * h * d), _MOST_SIDE)), run // math.gcd(run, d * h)
                n = n // whole * whole
                if n * d * h * (w + halo) <= most_rows and n > 0:
                    found.append((n, d, h, w))
        if halo and w + halo <= most_rows:
            found.append((1, 1, 1, w))
    return [(lanes, math.prod(tiles_of(batch, cells, lanes))) for lanes in found]


def _options(product: Product, config: TmaTapConfig) -> list[tuple[Four, int]]:
    """What extents a tile may have, and how many tiles there are then."""
    depth, height, width = (1 if config.runs else axis.src for axis in product.gather.cell_axes)
    room = box_rows(product, config)
    steps = (depth, height, width)
    return _extents(product.problem.batch, product.cells, steps, config.rows, halo(product, config), room)


@lru_cache(maxsize=2048)
def _tiles(product: Product, config: TmaTapConfig, device: DeviceInfo) -> tuple[Four, Four]:
    """Extents of a tile of cells along n, d, h and w, so that all take least time, and tiles along each."""
    once, stored = _cycles_of_tile(product, config, device)
    phases = len(product.phase_taps)

    def cycles(each: tuple[Four, int]) -> float:
        lanes, count = each
        stages, stage = _all_stages(product, config, lanes)[0], _stage_cycles(product, config, lanes, device)
        return stages * stage + count * phases * (once + stored * _sectors(product, lanes))

    lanes, _ = min(_options(product, config), key=cycles)
    return lanes, tiles_of(product.problem.batch, product.cells, lanes)


def _all_stages(product: Product, config: TmaTapConfig, lanes: Four) -> tuple[int, float]:
    """Stages of all work tiles of a column block and a group, and the most of one over their mean.

    Taps that meet nothing but zeros in all of a tile have none. Windows have as many taps as in the mean.
    """
    runs, most = of_config(product, config), 1.0
    axes = list(zip(product.gather.axes, product.gather.src.shape[2:], product.cells, lanes[1:]))
    count = tiles_of(product.problem.batch, product.cells, lanes)[0]
    if runs is not None:
        if not product.gather.forward:
            return sum(runs.stages) * math.prod(tiles_of(product.problem.batch, product.cells, lanes)), 1.0
        axes.pop()
        count *= sum(runs.row_stages) * -(-product.cells[2] // lanes[3])
    else:
        count *= -(-product.gather.src_channels // chunk_of(product, config))
    for axis, size, cells, extent in axes:
        all_tiles, largest = taps_met(axis, product.gather.forward, size, cells, extent)
        count *= all_tiles
        most *= largest * -(-cells // extent) / max(1, all_tiles)
    return count if config.window == 1 else math.ceil(count / taps_of_window(product, config)), most


def _sectors(product: Product, lanes: Four) -> float:
    """Sectors that the results of a tile touch, over those that they would fill if they lay together."""
    if product.gather.dst.strides[1] == 1:
        return 1.0
    _, _, rows, columns = lanes
    together = columns * (rows if columns == product.cells[2] else 1) * product.gather.cell_axes[2].dst
    return 1.0 + _SECTOR / (together * product.size)


def _items(product: Product, config: TmaTapConfig, tiles: Four) -> int:
    """Work tiles, without split-K."""
    columns = -(-product.gather.dst_channels // config.columns)
    return math.prod(tiles) * len(product.phase_taps) * columns * product.problem.groups


@lru_cache(maxsize=4096)
def _splits(product: Product, config: TmaTapConfig, device: DeviceInfo) -> tuple[int, float]:
    """Splits of a work tile's stages, and the predicted seconds of packing, product and reduction."""
    terms, own = costs("tap_gemm_tma", device), costs("tap_gemm", device)
    lanes, tiles = _tiles(product, config, device)
    items, stages = _items(product, config, tiles), stages_of(product, config)
    stage = _stage_cycles(product, config, lanes, device)
    once, stored = _cycles_of_tile(product, config, device)
    once += stored * _sectors(product, lanes)
    size, elements = product.size, math.prod(product.gather.dst.shape)
    packed = sum(stages) * config.pitch * product.parts * round_up(product.gather.dst_channels, config.columns)
    packing = own.pack + packed * product.problem.groups * own.packed / device.copy_bytes_per_second
    of_all, most_over_mean = _all_stages(product, config, lanes)
    mean = of_all / max(1, math.prod(tiles) * len(stages))

    def seconds(splits: int) -> float:
        rounds = rounds_of_unequal(items * splits / device.multiprocessors, most_over_mean)
        cycles = rounds * (math.ceil(mean / splits) * stage + once)
        end = terms.reduce + elements * (8 * splits + size) / device.copy_bytes_per_second if splits > 1 else 0.0
        return (cycles + terms.launch) / device.clock_hz + end

    most = 1
    if is_dense(product.gather.dst):
        pass_ = Pass.FORWARD if product.gather.forward else Pass.INPUT_GRAD
        most = min(affordable_planes(product.problem, pass_), int(mean) // LEAST_STAGES)
    found = best_splits(seconds, most, items, device)
    return found, packing + seconds(found)


def _stage_cycles(product: Product, config: TmaTapConfig, lanes: Four, device: DeviceInfo) -> float:
    """Predicted cycles of a stage."""
    terms = costs("tap_gemm_tma", device)
    taps, rows = 1.0, config.rows
    if config.window > 1:
        taps, rows = taps_of_window(product, config), math.prod(lanes[:3]) * (lanes[3] + halo(product, config))
    loaded = product.parts * (rows + taps * config.columns) * config.pitch
    loading = max(terms.moved * loaded, terms.box_row * rows * product.parts)
    return stage_cycles(config.row_tiles, config.columns, config.pitch, product.parts, loading, terms, taps)


def _cycles_of_tile(product: Product, config: TmaTapConfig, device: DeviceInfo) -> tuple[float, float]:
    """Predicted cycles of a work tile without its stages, and of its results where they fill whole sectors."""
    terms = costs("tap_gemm_tma", device)
    return terms.item, config.rows * config.columns * _store_cycles(product, terms)


def _store_cycles(product: Product, terms: Costs) -> float:
    """Predicted cycles of a result: by channels stored together, or neighbouring cells in an instruction."""
    halves = product.word == 2
    if product.gather.dst.strides[1] == 1:
        return terms.pixels_halves if halves else terms.pixels
    if product.gather.cell_axes[2].dst > 1:
        return terms.strided_halves if halves else terms.strided
    return terms.rows_halves if halves else terms.rows


def _map(product: Product, config: TmaTapConfig, read: Side, lanes: Four) -> TensorMap:
    """The box of a stage of a tile of cells."""
    size = product.size
    batch, channels, depth, height, width = read.shape
    image, _, slab, row, column = (step * size for step in read.strides)
    dimensions = zip((width, height, depth, batch), (column, row, slab, image))
    counts = (lanes[3] + halo(product, config), lanes[2], lanes[1])
    steps = (axis.src if count > 1 else 1 for axis, count in zip(product.gather.cell_axes[::-1], counts))
    return TensorMap(
        product.problem.dtype,
        (channels, width, height, depth, max(1, batch)),
        tuple(16 if count == 1 else step for count, step in dimensions),
        (config.pitch // size, lanes[3] + halo(product, config), *lanes[2::-1]),
        config.pitch,
        True,
        0,
        (1, *steps, 1),
    )
