"""The picture of a benchmark, drawn from its CSV alone: how far each layer stands from what the machine allows.

One panel for each pass, one block of panels for each dtype and layout. Along the axis, the time as a multiple of the
floor; a line joins PyTorch's time (ring) to polyphase's (disc), so that its length is the speed-up. Where PyTorch's
benchmark mode was measured too, it is a diamond. A layer that was not measured stays in the picture, with the word that
says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyphase.bench.records import PASS_TITLES, Record, Summary, grouped, summaries

# Okabe and Ito's palette: told apart with every kind of colour vision, and in print by ring, diamond and disc.
_OURS, _TORCH, _BENCHMARK, _WORSE, _QUIET = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8C8C8C"
_RING: dict[str, Any] = {
    "marker": "o",
    "linestyle": "",
    "markersize": 6.5,
    "markerfacecolor": "white",
    "markeredgewidth": 1.8,
}
_DIAMOND: dict[str, Any] = {"marker": "D", "linestyle": "", "markersize": 5.5, "markeredgecolor": "white"}
_ROW_INCHES = 0.27
_PANEL_INCHES = 4.6
_LABEL_INCHES = 2.6


class NothingToDrawError(ValueError):
    """A set of records without a single layer."""


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw ``records`` into a picture at ``path``, whose ending says its format.

    Raises `NothingToDrawError` for no records, and ImportError where matplotlib is not installed.
    """
    if not records:
        raise NothingToDrawError("there are no records to draw")
    from matplotlib.figure import Figure  # no pyplot: no state, no window

    blocks = _blocks(records)
    columns = max(len(passes) for passes in blocks.values())
    layers = {key: _order(next(iter(passes.values()))) for key, passes in blocks.items()}
    heights = [max(len(names), 3) * _ROW_INCHES + 1.15 for names in layers.values()]
    figure = Figure(figsize=(_LABEL_INCHES + _PANEL_INCHES * columns, sum(heights) + 0.9), layout="constrained")
    figure.set_facecolor("white")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)  # type: ignore[union-attr, call-arg]
    grid: Any = figure.subplots(len(blocks), columns, squeeze=False, gridspec_kw={"height_ratios": heights})

    means = {(found.pass_name, found.dtype, found.layout): found for found in summaries(records)}
    for row, ((dtype, layout), passes) in enumerate(blocks.items()):
        # One scale for a block's panels, so that passes can be compared by eye.
        limits = _limits([record for group in passes.values() for record in group])
        for column, (pass_name, group) in enumerate(passes.items()):
            title = f"{PASS_TITLES.get(pass_name, pass_name)} · {dtype} · {layout.replace('nchw', 'NCHW')}"
            _panel(grid[row][column], group, layers[dtype, layout], limits, labels=column == 0)
            _head(grid[row][column], title, means.get((pass_name, dtype, layout)))
        for column in range(len(passes), columns):
            grid[row][column].set_axis_off()
    _frame(figure, records)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _blocks(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, list[Record]]]:
    blocks: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for (pass_name, dtype, layout), group in grouped(records).items():
        blocks.setdefault((dtype, layout), {})[pass_name] = group
    return blocks


def _order(group: Sequence[Record]) -> list[str]:
    """Layer names as they stand from the bottom up: what was not measured, then from least to most accelerated."""
    ranks = {record.layer: record.speedup or 1 / (record.times_floor or float("inf")) for record in group}
    return sorted(ranks, key=lambda name: ranks[name])


def _limits(records: Sequence[Record]) -> tuple[float, float]:
    times = [
        _multiple(record, value)
        for record in records
        for value in (record.ms, record.torch_default_ms, record.torch_benchmark_ms)
    ]
    known = [value for value in times if value is not None]
    return min([0.85, *(value / 1.15 for value in known)]), 1.3 * max([2.0, *known])


def _multiple(record: Record, ms: float | None) -> float | None:
    return None if ms is None or not record.floor_ms else ms / record.floor_ms


def _panel(axes: Any, group: Sequence[Record], order: Sequence[str], limits: tuple[float, float], labels: bool) -> None:
    rows = {name: index for index, name in enumerate(order)}
    for record in group:
        y = rows.setdefault(record.layer, len(rows))
        ours, rival = _multiple(record, record.ms), _multiple(record, record.torch_default_ms)
        if ours is None:
            axes.text(1.06, y, record.status, color=_WORSE, fontsize=8, va="center", style="italic")
            continue
        if rival is not None:
            colour = _OURS if ours <= rival else _WORSE
            axes.plot([ours, rival], [y, y], color=colour, alpha=0.3, linewidth=3.2, solid_capstyle="butt", zorder=2)
            axes.plot(rival, y, color=_TORCH, zorder=3, **_RING)
        axes.plot(ours, y, "o", markersize=7, color=_OURS, zorder=4)
        searched = _multiple(record, record.torch_benchmark_ms)
        if searched is not None:
            axes.plot(searched, y, color=_BENCHMARK, zorder=5, **_DIAMOND)
        if record.speedup is not None:
            colour = "#222222" if record.speedup >= 1 else _WORSE
            axes.text(
                1.012, y, _times(record.speedup), transform=axes.get_yaxis_transform(), color=colour, fontsize=8.5,
                va="center",
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(limits)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.axvline(1.0, color="#222222", linewidth=1.0, zorder=1)
    ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500, 1000, 10000) if tick <= limits[1]]
    axes.set_xticks(ticks, [f"{tick}×" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), list(rows) if labels else [""] * len(rows), fontsize=9)
    axes.tick_params(length=0)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _times(speedup: float) -> str:
    return f"{speedup:.1f}×" if speedup >= 1 else f"{speedup:.2f}×"


def _head(axes: Any, title: str, summary: Summary | None) -> None:
    lines = summary.lines() if summary else ["nothing measured"]
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=11 + 10 * len(lines))
    axes.text(
        0.0, 1.0, "\n".join(lines), transform=axes.transAxes, fontsize=8.5,
        color="#444444", va="bottom",
    )  # fmt: skip


def _frame(figure: Any, records: Sequence[Record]) -> None:
    from matplotlib.lines import Line2D

    first = records[0]
    benchmarked = any(record.torch_benchmark_ms is not None for record in records)
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=7, color=_OURS, label="polyphase"),
        Line2D([], [], color=_TORCH, label="PyTorch", **_RING),
        *([Line2D([], [], color=_BENCHMARK, label="PyTorch, benchmark mode", **_DIAMOND)] if benchmarked else []),
        Line2D([], [], color="#222222", linewidth=1.0, label="floor (copy or product rate)"),
    ]  # fmt: skip
    title = "Transposed convolution: how many times the floor"
    figure.suptitle(title, fontsize=12.5, fontweight="bold", x=0.01, ha="left")
    precision = "strict fp32" if first.strict_fp32 else ""
    versions = [f"torch {first.torch}", f"cuDNN {first.cudnn}" if first.cudnn else ""]
    facts = [first.gpu, *versions, precision, *sorted({record.date[:10] for record in records})]
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9,
        title=" · ".join(filter(None, facts)), title_fontsize=8, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(_QUIET)
