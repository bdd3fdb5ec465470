"""The cost of ``tap_gemm_tma``: tiles of cells, stages and splits."""

from __future__ import annotations

import math
from functools import lru_cache

from polyphase.costs import Costs, costs
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import equal_part, round_up
from polyphase.problem.layouts import Three
from polyphase.schedules.cost import whole_waves
from polyphase.schedules.tap_gemm.k_major import LEAST_STAGES, stage_cycles
from polyphase.schedules.tap_gemm.product import Product, is_dense, pairs_along_width, taps_met
from polyphase.schedules.tap_gemm.tma_config import (
    TmaTapConfig,
    box_rows,
    chunk_of,
    halo,
    of_config,
    stages_of,
    taps_of_window,
)
from polyphase.schedules.tensor_cores import MAX_BOX_SIDE
from polyphase.schedules.tiles import Four, affordable_planes, fastest_splits, tiles_of

_SECTOR = 32  # bytes
_RUN = 8  # rows that a descriptor reads contiguously


@lru_cache(maxsize=1024)
def _extents(batch: int, cells: Three, steps: Three, rows: int, halo: int, most_rows: int) -> list[tuple[Four, int]]:
    """Extents along n, d, h and w of tiles of at most ``rows``, and the number of such tiles.

    With a halo along the width a tile is one line of runs of eight cells, or a multiple of eight lines, and its box has
    room for ``most_rows``.
    """
    run = _RUN if halo else 1

    def along(size: int, step: int, most: int, halo: int = 0, multiple: int = 1) -> list[int]:
        most = min(most, (MAX_BOX_SIDE - 1) // step + 1 - halo)
        found = {1 << i for i in range(most.bit_length()) if 1 << i < size}
        found |= {round_up(equal_part(size, most), multiple)} if most > 0 else set()
        return sorted((each for each in found if each % multiple == 0 and each <= most), reverse=True)

    found = []
    for w in along(cells[2], steps[2], rows, halo, run):
        for h in along(cells[1], steps[1], rows // w):
            for d in along(cells[0], steps[0], rows // (w * h)):
                n, whole = max(1, min(batch, rows // (w * h * d), MAX_BOX_SIDE)), run // math.gcd(run, d * h)
                n = n // whole * whole
                if n * d * h * (w + halo) <= most_rows and n > 0:
                    found.append((n, d, h, w))
        if halo and w + halo <= most_rows:
            found.append((1, 1, 1, w))
    return [(tile, math.prod(tiles_of(batch, cells, tile))) for tile in found]


def options(product: Product, config: TmaTapConfig) -> list[tuple[Four, int]]:
    """Extents that a tile may have, and the number of such tiles."""
    depth, height, width = (1 if config.runs else axis.src for axis in product.gather.cell_axes)
    room = box_rows(product, config)
    steps = (depth, height, width)
    return _extents(product.problem.batch, product.cells, steps, config.rows, halo(product, config), room)


@lru_cache(maxsize=2048)
def tiles_of_cells(product: Product, config: TmaTapConfig, device: DeviceInfo) -> tuple[Four, Four]:
    """Extents of the tile along n, d, h and w that takes least time, and tiles along each."""
    once, stored = _cycles_of_tile(product, config, device)
    phases = len(product.phase_taps)

    def cycles(each: tuple[Four, int]) -> float:
        tile, count = each
        stages, stage = _all_stages(product, config, tile)[0], _stage_cycles(product, config, tile, device)
        return stages * stage + count * phases * (once + stored * _sectors(product, tile))

    tile, _ = min(options(product, config), key=cycles)
    return tile, tiles_of(product.problem.batch, product.cells, tile)


def _all_stages(product: Product, config: TmaTapConfig, tile: Four) -> tuple[int, float]:
    """Stages of all work tiles of a column block and a group, and the most of one over their mean.

    Taps that meet only zeros in all of a tile are skipped. Windows have the average number of taps.
    """
    runs, most = of_config(product, config), 1.0
    axes = list(zip(product.gather.axes, product.gather.src.shape[2:], product.cells, tile[1:]))
    count = tiles_of(product.problem.batch, product.cells, tile)[0]
    if runs is not None:
        if not product.gather.forward:
            return sum(runs.stages) * math.prod(tiles_of(product.problem.batch, product.cells, tile)), 1.0
        axes.pop()
        count *= sum(runs.row_stages) * -(-product.cells[2] // tile[3])
    else:
        count *= -(-product.gather.src_channels // chunk_of(product, config))
    for axis, size, cells, extent in axes:
        all_tiles, largest = taps_met(axis, product.gather.forward, size, cells, extent)
        count *= all_tiles
        most *= largest * -(-cells // extent) / max(1, all_tiles)
    return count if config.window == 1 else math.ceil(count / taps_of_window(product, config)), most


def _sectors(product: Product, tile: Four) -> float:
    """Sectors that the results of a tile touch, relative to those that contiguous results would fill."""
    if product.gather.dst.strides[1] == 1:
        return 1.0
    _, _, rows, columns = tile
    together = columns * (rows if columns == product.cells[2] else 1) * _outputs_of_cell(product)
    return 1.0 + _SECTOR / (together * product.size)


def work_tiles_of(product: Product, config: TmaTapConfig, tiles: Four) -> int:
    """Work tiles, without split-K."""
    columns = -(-product.gather.dst_channels // config.columns)
    return math.prod(tiles) * len(product.phase_taps) * columns * product.problem.groups


@lru_cache(maxsize=4096)
def splits_of(product: Product, config: TmaTapConfig, device: DeviceInfo) -> tuple[int, float]:
    """Splits of a work tile's stages, and the predicted seconds of packing, product and reduction."""
    terms, own = costs("tap_gemm_tma", device), costs("tap_gemm", device)
    tile, tiles = tiles_of_cells(product, config, device)
    work_tiles, stages = work_tiles_of(product, config, tiles), stages_of(product, config)
    stage = _stage_cycles(product, config, tile, device)
    once, stored = _cycles_of_tile(product, config, device)
    once += stored * _sectors(product, tile)
    size, elements = product.size, math.prod(product.gather.dst.shape)
    packed = sum(stages) * config.pitch * product.parts * round_up(product.gather.dst_channels, config.columns)
    packing = own.pack + packed * product.problem.groups * own.packed / device.copy_bytes_per_second
    of_all, most_over_mean = _all_stages(product, config, tile)
    mean = of_all / max(1, math.prod(tiles) * len(stages))
    if config.boxes:
        packing = 0.0

    def seconds(splits: int) -> tuple[float, float]:
        of_block = work_tiles * splits / device.multiprocessors
        in_turn = whole_waves(of_block) * most_over_mean  # static: every n-th work tile
        waves = in_turn if config.boxes else _waves_of_unequal(of_block, most_over_mean)
        cycles = waves * (math.ceil(mean / splits) * stage + once)
        end = terms.reduce + elements * (8 * splits + size) / device.copy_bytes_per_second if splits > 1 else 0.0
        return (cycles + terms.launch) / device.clock_hz, end

    most = 1
    if is_dense(product.gather.dst):
        planes = affordable_planes(product.problem, product.gather.pass_)
        most = min(planes, int(mean) // LEAST_STAGES, 2 * device.multiprocessors // max(1, work_tiles))
    splits, multiplying, reducing = fastest_splits(most, seconds)
    return splits, packing + (multiplying + reducing)


def _waves_of_unequal(waves: float, most: float) -> float:
    """Waves of work tiles of unequal length, the longest of them ``most`` times the mean.

    Blocks end half of a longest one apart; they never take longer than if all were the longest.
    """
    whole = whole_waves(waves)
    return max(whole, min(whole * most, waves + most / 2))


def _stage_cycles(product: Product, config: TmaTapConfig, tile: Four, device: DeviceInfo) -> float:
    """Predicted cycles of a stage."""
    terms = costs("tap_gemm_tma", device)
    taps, rows = 1.0, config.rows
    if config.window > 1:
        taps, rows = taps_of_window(product, config), math.prod(tile[:3]) * (tile[3] + halo(product, config))
    loaded = product.parts * (rows + taps * config.columns) * config.pitch
    loading = max(terms.moved * loaded, terms.box_row * rows * product.parts)
    return stage_cycles(config.row_tiles, config.columns, config.pitch, product.parts, loading, terms, taps)


def _cycles_of_tile(product: Product, config: TmaTapConfig, device: DeviceInfo) -> tuple[float, float]:
    """Predicted cycles of a work tile without its stages, and of its results if they fill whole sectors."""
    terms = costs("tap_gemm_tma", device)
    return terms.item, config.rows * config.columns * _store_cycles(product, terms)


def _outputs_of_cell(product: Product) -> int:
    """Results of a cell along the width."""
    return product.problem.axes3[2].stride if product.gather.forward else 1


def _store_cycles(product: Product, terms: Costs) -> float:
    """Predicted cycles of a result: by columns stored together, pairs of cells, or neighbours in an instruction."""
    halves = product.word == 2
    last = product.gather.dst.strides[1] == 1
    if not product.gather.forward:
        rows = terms.grad_rows_halves if halves else terms.grad_rows
        return (terms.grad_pixels_halves if halves else terms.grad_pixels) if last else rows
    if last or (product.merged[2] > 1 and pairs_along_width(product)):
        return terms.pixels_halves if halves else terms.pixels
    if product.merged[2] > 1:
        return terms.merged_halves if halves else terms.merged
    if _outputs_of_cell(product) > 1:
        return terms.strided_halves if halves else terms.strided
    return terms.rows_halves if halves else terms.rows
