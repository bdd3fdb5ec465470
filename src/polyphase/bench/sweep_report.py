"""What a sweep over many layers comes to: means over PyTorch's best and over the floor, and the worst layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from polyphase.bench.records import PASS_TITLES, STEP, Record, geometric_mean, grouped, percentile
from polyphase.bench.report import factor, milliseconds, plain_table

TITLES = PASS_TITLES | {STEP: "training step"}


def summary_table(records: Iterable[Record]) -> Table:
    """One line for each pass, dtype and layout. PyTorch's best is the faster of its default and its benchmark mode."""
    figures = "layers, failed, speed-up, default, benchmark, slower, < 0.9, lowest, × floor, 95 % below, highest"
    table = plain_table(
        "geometric means of GPU time; speed-up over PyTorch: the faster of default and benchmark mode, then each",
        ("pass", "dtype", "layout"),
        (*figures.split(", "), "× predicted"),
    )
    for (pass_name, dtype, layout), group in grouped(records).items():
        table.add_row(TITLES.get(pass_name, pass_name), dtype, layout, *_figures(group))
    return table


def _figures(group: Sequence[Record]) -> list[str]:
    best = sorted(_known(record.best_speedup for record in group))
    floors = sorted(_known(record.times_floor for record in group))
    prediction = [record.ms / record.predicted_ms for record in group if record.ms and record.predicted_ms]
    return [
        str(len(floors)),
        str(sum(not record.good for record in group)),
        _mean(best),
        _mean(_known(record.speedup for record in group)),
        _mean(_known(record.benchmark_speedup for record in group)),
        _share(sum(value < 1 for value in best), len(best)),
        _share(sum(value < 0.9 for value in best), len(best)),
        factor(best[0] if best else None),
        _mean(floors),
        factor(percentile(floors, 0.95) if floors else None),
        factor(floors[-1] if floors else None),
        _mean(prediction),
    ]


def worst_tables(records: Sequence[Record], count: int) -> list[Table]:
    """The passes that are slowest beside PyTorch, and those that are furthest from their floor."""

    def below(record: Record) -> float:
        return -(record.best_speedup or 0.0)

    def over(record: Record) -> float:
        return record.times_floor or 0.0

    passes = [record for record in records if record.pass_name != STEP]
    rivals = [record for record in passes if record.best_speedup]
    return [
        _worst("slowest beside PyTorch's best", rivals, below, count),
        _worst("furthest from their floor", passes, over, count),
    ]


def _worst(title: str, records: Iterable[Record], badness: Callable[[Record], float], count: int) -> Table:
    table = plain_table(
        f"{title}, ms",
        ("layer", "pass", "dtype", "layout", "by"),
        ("speed-up", "× floor", "ours", "predicted", "floor", "torch", "benchmark"),
    )
    chosen = sorted((record for record in records if record.ms is not None), key=badness, reverse=True)
    for record in chosen[:count]:
        times = (record.ms, record.predicted_ms, record.floor_ms, record.torch_default_ms, record.torch_benchmark_ms)
        table.add_row(
            record.layer,
            TITLES.get(record.pass_name, record.pass_name),
            record.dtype,
            record.layout,
            record.algorithm,
            factor(record.best_speedup),
            factor(record.times_floor),
            *map(milliseconds, times),
        )
    return table


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value]


def _mean(values: Sequence[float]) -> str:
    return factor(geometric_mean(values) if values else None)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"
