"""The configs of ``tap_gemm_tma``: tiles, and how the source is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.problem.integers import round_up
from polyphase.schedules.tap_gemm.k_major import CONSUMER_GROUPS
from polyphase.schedules.tap_gemm.product import Product, with_merged_phases
from polyphase.schedules.tap_gemm.runs import Runs, runs_of
from polyphase.schedules.tensor_cores import MAX_BOX_STEP, MOST_COLUMNS

_MOST_SUMS, _MOST_SUMS_MERGED = 192, 128  # accumulators of a thread; twice as many registers if promoted
_MOST_ODD_COLUMNS = 160  # of merged phases whose number is no power of two
_MOST_TAPS = 8  # most taps of a window
_LEAST_WIDTH = 16  # least width of a tile whose boxes have a halo
_MANY_COLUMNS = 128  # with which a product reads its rows often enough
_LONG = 8192  # most terms that tensor cores sum without promotion


class TmaTapConfig(NamedTuple):
    """The compile-time shape of ``tap_gemm_tma.cu``; ``pitch`` is a row of a stage in bytes.

    ``back``: the result is written in channels_last, and transposed to where it belongs. ``runs``: the source is
    written as runs of all taps along the width (`polyphase.schedules.tap_gemm.runs`), else a stage reads one box for up
    to ``window`` taps along the width. ``boxes``: weights, too, are loaded as boxes by TMA, with their source channels
    innermost; else they are packed. ``merged``: dimensions, the last ones, along which a cell's outputs are columns
    (`polyphase.schedules.tap_gemm.product.with_merged_phases`).
    """

    row_tiles: int
    columns: int
    pitch: int
    back: bool = False
    runs: bool = False
    window: int = 1
    boxes: bool = False
    merged: int = 0

    @property
    def rows(self) -> int:
        """Cells of a block."""
        return 64 * CONSUMER_GROUPS * self.row_tiles


def of_config(product: Product, config: TmaTapConfig) -> Runs | None:
    """The source as runs, where it is read so."""
    return runs_of(product, chunk_of(product, config)) if config.runs else None


def legal_configs(product: Product) -> Iterator[TmaTapConfig]:
    """Configs of a product, also with merged phases while there are few columns."""
    yield from _configs(product)
    columns = product.gather.dst_channels
    for count in (1, 2, 3):
        merged = with_merged_phases(product, count)
        if merged is not None and columns < _MANY_COLUMNS:
            yield from (config._replace(merged=count) for config in _configs(merged))
            columns = merged.gather.dst_channels


def _configs(product: Product) -> Iterator[TmaTapConfig]:
    """Configs whose accumulators fit the registers; rows of a stage have 128 bytes, or the pitch that pads k least."""
    times = 2 if flush(product, TmaTapConfig(1, 8, 128)) else 1
    outputs = math.prod(product.merged)  # a column's is a remainder, which takes registers if this is no power of two
    widest = min(_MOST_ODD_COLUMNS if outputs & (outputs - 1) else MOST_COLUMNS, 2 * _MOST_SUMS // times)
    blocks = {math.ceil(product.gather.dst_channels / each) for each in (widest, widest * 3 // 4, 128, 64)}
    columns = {round_up(math.ceil(product.gather.dst_channels / count), 8) for count in blocks}
    most = _MOST_SUMS if product.merged == (1, 1, 1) else _MOST_SUMS_MERGED  # whose stores take more registers
    for runs in (False, True):
        pitches = _pitches(product, runs)
        for pitch, count, row_tiles in itertools.product(pitches, sorted(columns), (1, 2)):
            config = TmaTapConfig(row_tiles, count, pitch, runs=runs)
            if times * count * row_tiles // 2 <= most:
                found = [config]
                if not runs and product.parts == 1:
                    found += [config._replace(window=window) for window in _windows(product)]
                yield from found
                if not product.gather.forward and not runs and product.parts == 1:
                    yield from (each._replace(boxes=True) for each in found)


def _windows(product: Product) -> list[int]:
    """Taps along the width that read neighbouring elements: in windows of `_MOST_TAPS` at most, or of half as many."""
    most = max(window_taps(product))
    least = -(-most // _MOST_TAPS)
    return sorted({-(-most // count) for count in (least, 2 * least)} - {1})


def window_taps(product: Product) -> list[int]:
    """Taps along the width that read neighbouring elements, of each phase and each residue of the stride."""
    axis, counts = product.gather.axes[2], product.axis_taps[2]
    if product.gather.forward:
        return [count for count in counts if count]
    residues = range(min(axis.tap_step, axis.kernel))
    return [-(-(axis.kernel - residue) // axis.tap_step) for residue in residues]


def taps_of_window(product: Product, config: TmaTapConfig) -> float:
    """Taps of a stage on average."""
    taps = window_taps(product)
    return sum(taps) / sum(-(-count // config.window) for count in taps)


def halo(product: Product, config: TmaTapConfig) -> int:
    """Cells along the width by which a window's box exceeds a tile."""
    return (config.window - 1) * product.gather.axes[2].element_step


def box_rows(product: Product, config: TmaTapConfig) -> int:
    """Most cells of a box: of tiles that are at least 16 wide, and of one line."""
    return config.rows + (round_up(halo(product, config) * (config.rows // _LEAST_WIDTH), 8))


def _pitches(product: Product, runs: bool) -> list[int]:
    """Pitches worth trying; none with runs if a tap's channels fill rows of 128 bytes without them."""
    ways = {pitch: TmaTapConfig(1, 8, pitch, runs=runs) for pitch in (128, 64, 32)}
    if runs and of_config(product, ways[128]) is None:
        return []
    length = {pitch: sum(stages_of(product, config)) * pitch for pitch, config in ways.items()}
    by_taps = sum(stages_of(product, ways[128]._replace(runs=False))) * 128
    far = product.step > MAX_BOX_STEP
    if (far and not runs) or (not far and runs and length[128] >= by_taps):
        return []
    return sorted({min(length, key=lambda pitch: (length[pitch], -pitch)), 128})


def flush(product: Product, config: TmaTapConfig) -> int:
    """Stages after which sums are promoted, 0 for never."""
    if product.parts == 2:
        return 1
    long = product.gather.src_channels * max(product.phase_taps) > _LONG
    return max(1, _LONG // (2 * chunk_of(product, config) * config.window)) if long else 0


def stage_bytes(product: Product, config: TmaTapConfig) -> int:
    """Shared memory of a stage."""
    rows = box_rows(product, config) + config.window * config.columns
    return round_up(product.parts * rows * config.pitch, 1024)


def stages_of(product: Product, config: TmaTapConfig) -> tuple[int, ...]:
    """Tap groups of each phase: stages, if none has several."""
    if runs := of_config(product, config):
        return runs.stages
    chunks = -(-product.gather.src_channels // chunk_of(product, config))
    return tuple(chunks * taps for taps in product.phase_taps)


def chunk_of(product: Product, config: TmaTapConfig) -> int:
    """Source channels of a tap group."""
    return config.pitch // product.size
