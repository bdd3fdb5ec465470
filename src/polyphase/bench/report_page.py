"""A `ModelReport` as one HTML page that needs nothing beside it, and as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from html import escape
from pathlib import Path

from polyphase.bench.model_report import ModelReport, sum_of
from polyphase.bench.records import PASS_TITLES, Record
from polyphase.bench.report import OF_VANISHING, errors, factor, milliseconds
from polyphase.functional_calls import NO_MODULES, override_call

NUMBER = ' class="n"'  # of a cell
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --page: #ffffff; --box: #f6f8fa;
  --ours: #0969da; --theirs: #afb8c1; --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --page: #0d1117;
  --box: #151b23; --ours: #4493f8; --theirs: #656c76; --good: #3fb950; --bad: #f85149; } }
body { font: 16px/1.5 -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: var(--ink);
  background: var(--page); max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
.soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.card { flex: 1 1 11rem; background: var(--box); border: 1px solid var(--line); border-radius: 8px;
  padding: .75rem 1rem; }
.card b { display: block; font-size: 1.75rem; line-height: 1.2; } .card span { color: var(--soft); font-size: .875rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; width: 100%; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } .n { text-align: right; white-space: nowrap; }
.bar { height: .6rem; border-radius: 2px; margin: .15rem 0; min-width: 1px; } .ours { background: var(--ours); }
.theirs { background: var(--theirs); } .times { min-width: 9rem; }
td:first-child { white-space: nowrap; }
td.group { padding-top: 1rem; border-bottom: 0; white-space: normal; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1rem;
  overflow-x: auto; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .875rem; }
"""


_LAUNCHES = (
    "without the launches of kernels: some µs each, which are most of a small layer's time, so that small layers are "
    "many times over their floor"
)
_FLOOR = f"floor: the least time that the layers' bytes and flops take on the card, {_LAUNCHES}"
_SHOWN = 6  # layers that the short version names
_NO_GPU = "PyTorch's times, and so the gain, are not known without a GPU: run the same command on a GPU"
_SORT = Path(__file__).with_name("sort.js")  # the tables' headings sort
_MARKS = {True: '<span class="good">✓</span>', False: '<span class="bad">✗</span>'}


def summary(report: ModelReport) -> list[str]:
    """The short version: one line each for layers, times, memory, accuracy, and what was left alone."""
    calls = sum(len(layer.names) for layer in report.layers)
    share = "" if report.share_of_flops is None else f", {report.share_of_flops:.0%} of the model's flops"
    about = f"{report.target} on {report.inputs}, {report.dtype}"
    if not report.check.swapped.swapped:
        nothing = "no module is swapped" if report.check.swapped.left else NO_MODULES
        return [f"{about}: {nothing}", *(f"left alone: {what}" for what in _left(report))]
    lines = [f"{about}: {_counted(calls, 'call')} of transposed convolutions{share}"]
    if report.measured:
        lines += [
            f"{race.what}: PyTorch {milliseconds(race.torch.ms)} ms, polyphase {milliseconds(race.ours.ms)} ms, "
            f"{factor(race.torch.ms / race.ours.ms)} times as fast"
            for race in report.check.races
        ]
    else:
        lines += [
            f"{title} of the swapped layers: {milliseconds(time)} ms predicted on {report.card}, floor "
            f"{milliseconds(floor)} ms"
            for title, time, floor in _totals(report)
        ]
        lines += [report.rates, _FLOOR, _NO_GPU]
    lines += _fused(report)
    if report.host_bound:
        lines.append(report.host_bound)
    if report.slower:
        lines.append(f"slower than PyTorch's, leave them out: {', '.join(report.slower)}")
    lines.append("accuracy: " + _verdict(report))
    lines += [f"left alone: {what}" for what in _left(report)]
    return lines


def _fused(report: ModelReport) -> list[str]:
    """What is fused with which layers, and why nothing is with others; fused layers come first."""
    blocks = sorted(report.check.blocks, key=lambda block: block not in report.fused)
    if not blocks:
        return []
    more = [f"  and {len(blocks) - _SHOWN} more layers, on the page"] if len(blocks) > _SHOWN else []
    return ["with fuse=True, in evaluation mode:", *(f"  {block}" for block in blocks[:_SHOWN]), *more]


def page(report: ModelReport) -> str:
    """The page. All text that comes from the model is escaped."""
    title = f"polyphase for {report.target}"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>",
        f"<script>\n{_SORT.read_text(encoding='utf-8')}</script>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">inputs {escape(report.inputs)}, {escape(report.dtype)}; '
        f"{'measured on' if report.measured else 'times predicted for'} {escape(report.card)}</p>",
        "" if report.measured else f"<p>{escape(report.rates[0].upper() + report.rates[1:])}. {escape(_NO_GPU)}.</p>",
        _cards(report),
        f'<p class="soft">{escape(report.host_bound)}</p>' if report.host_bound else "",
        "<h2>Code to add</h2>",
        f"<pre><code>{escape(report.recipe)}</code></pre>" if report.recipe else "<p>Nothing to add.</p>",
        "<h2>Layers</h2>",
        _layers(report),
        *(["<h2>Fusion</h2>", _fusion(report)] if report.check.blocks else []),
        "<h2>Accuracy</h2>",
        _accuracy(report),
        "<h2>Left alone</h2>",
        _list(_left(report))
        or f"<p>Nothing{': every transposed convolution is swapped' if report.layers else ''}.</p>",
        "<h2>Conditions</h2>",
        _table(("", ""), [[escape(name), escape(value)] for name, value in report.facts]),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _cards(report: ModelReport) -> str:
    cards = []
    if report.measured:
        for race in report.check.races:
            gain = race.torch.ms / race.ours.ms
            text = f"{race.what}, whole model: {milliseconds(race.torch.ms)} to {milliseconds(race.ours.ms)} ms"
            cards.append((f"{factor(gain)}×", text, "good" if gain >= 1 else "bad"))
    else:
        for title, time, floor in _totals(report):
            text = f"{title} of all swapped layers, predicted; floor {milliseconds(floor)} ms"
            cards.append((f"{milliseconds(time)} ms", text, ""))
    if report.share_of_flops is not None:
        cards.append((f"{report.share_of_flops:.0%}", "of the model's forward flops are transposed convolutions", ""))
    good = report.ok
    cards.append(("✓" if good else "✗", _verdict(report), "good" if good else "bad"))
    shown = (
        f'<div class="card"><b class="{style}">{escape(large)}</b><span>{escape(small)}</span></div>'
        for large, small, style in cards
    )
    return f'<div class="cards">{"".join(shown)}</div>'


def _totals(report: ModelReport) -> list[tuple[str, float | None, float | None]]:
    """Title, prediction and floor of each pass, over all calls of all layers."""
    found = []
    for index, record in enumerate(report.layers[0].records if report.layers else ()):
        one = [replace(layer, records=(layer.records[index],)) for layer in report.layers]
        time = sum_of(layer.total(lambda record: record.predicted_ms) for layer in one)
        floor = sum_of(layer.total(lambda record: record.floor_ms) for layer in one)
        found.append((PASS_TITLES[record.pass_name], time, floor))
    return found


def _layers(report: ModelReport) -> str:
    if not report.layers:
        return "<p>The model calls no transposed convolution module that polyphase has kernels for.</p>"
    times = [time for layer in report.layers for record in layer.records for time in _times(report, record)]
    longest = max((time for time in times if time is not None), default=1.0)
    rows: list[list[str] | str] = []
    for layer in report.layers:
        names = ", ".join(dict.fromkeys(name or "the model itself" for name in layer.names))
        calls = f" ({len(layer.names)} calls)" if len(layer.names) > 1 else ""
        rows.append(f'<b>{escape(names)}</b>{calls} <span class="soft">{escape(str(layer.problem))}</span>')
        rows += [_row(report, record, longest) for record in layer.records]
    head = ["pass", "", "polyphase, ms", "floor, ms", "× floor"]
    head += ["PyTorch, ms", "speed-up", "memory, MB", "PyTorch's"] if report.measured else ["memory, MB"]
    note = "Bars are polyphase (blue) and PyTorch (grey). " if report.measured else ""
    note += (
        "The floor is the time of a layer's bytes at the copy bandwidth, or of its flops at the rate of the tensor "
        f"cores, whichever is longer, {_LAUNCHES}. Memory is what a call allocates in addition to its result. Click a "
        "heading to sort."
    )
    return f'{_table((*head, "kernel"), rows, numbers=range(2, len(head)))}<p class="soft">{note}</p>'


def _fusion(report: ModelReport) -> str:
    """What each layer computes with fuse=True."""
    lead = (
        "What <code>polyphase.accelerate(model, fuse=True)</code> fuses into each layer's kernel in evaluation mode; "
        "functions only where no gradients are recorded."
    )
    return f'<p class="soft">{lead}</p>{_list(map(str, report.check.blocks))}'


def _times(report: ModelReport, record: Record) -> tuple[float | None, float | None]:
    """Polyphase's, measured or predicted, and PyTorch's."""
    return (record.ms if report.measured else record.predicted_ms, record.torch_default_ms)


def _row(report: ModelReport, record: Record, longest: float) -> list[str]:
    ours, theirs = _times(report, record)
    bars = "".join(
        f'<div class="bar {style}" style="width: {100 * time / longest:.1f}%"></div>'
        for time, style in ((ours, "ours"), (theirs, "theirs"))
        if time is not None
    )
    row = [PASS_TITLES[record.pass_name], f'<div class="times">{bars}</div>', milliseconds(ours)]
    row += [milliseconds(record.floor_ms), factor(record.times_floor)]
    if report.measured:
        style = "bad" if (record.speedup or 1) < 1 else "good"
        row += [milliseconds(theirs), f'<span class="{style}">{factor(record.speedup)}×</span>']
    row.append(_megabytes(record.workspace_megabytes))
    if report.measured:
        row.append(_megabytes(record.torch_workspace_megabytes))
    fault = "" if record.good else f'<span class="bad">{escape(f"{record.status}: {record.reason}")}</span>'
    return [*row, f"{escape(record.algorithm)} {fault}".strip()]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _megabytes(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _verdict(report: ModelReport) -> str:
    problems = [*report.check.problems, *report.faults]
    compared = len(report.check.findings)
    here = "" if report.measured else f" (tested: the portable path on this machine, not {report.card}'s kernels)"
    return "; ".join(problems) or f"{compared} outputs and gradients agree with float64 as PyTorch's do{here}"


def _accuracy(report: ModelReport) -> str:
    check = report.check
    rows = [
        [
            escape(found.what), escape(found.sizes), *errors(found.comparison), _MARKS[found.ok],
        ]
        for found in check.findings
    ]  # fmt: skip
    table = _table(("what", "inputs", "polyphase's error", "PyTorch's", ""), rows, numbers=(2, 3)) if rows else ""
    lead = f'<p class="soft">Error is ‖x − ref64‖ / ‖ref64‖, on inputs {escape(str(check.cut))}.</p>'
    if any(found.comparison.vanishes for found in check.findings):
        lead += f'<p class="soft">{OF_VANISHING}.</p>'
    return lead + table + _list([*check.problems, *check.remarks])


def _left(report: ModelReport) -> list[str]:
    found = [
        f"{', '.join(name or 'the model itself' for name in entry.names)}: {entry.module}: {entry.reason}"
        for entry in report.check.swapped.left
    ]
    if report.functional:
        calls = f"{_counted(report.functional, 'call')} outside modules"
        found.append(f"{calls}: run it within {override_call()}, or call polyphase's function there")
    return found


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(head: Iterable[str], rows: Iterable[list[str] | str], numbers: Iterable[int] = ()) -> str:
    """A table; a row that is text, and not a list of cells, is a heading of those below, and begins a body."""
    right = set(numbers)

    def cells(tag: str, row: Iterable[str]) -> str:
        return "".join(f"<{tag}{NUMBER if index in right else ''}>{cell}</{tag}>" for index, cell in enumerate(row))

    named = list(head)
    group = f'</tbody>\n<tbody><tr><td class="group" colspan="{len(named)}">'
    lines = [f"{group}{row}</td></tr>" if isinstance(row, str) else f"<tr>{cells('td', row)}</tr>" for row in rows]
    body = "\n".join(lines).removeprefix("</tbody>\n<tbody>")
    headings = f"<thead><tr>{cells('th', map(escape, named))}</tr></thead>\n" if any(named) else ""
    return f'<div class="wide"><table>\n{headings}<tbody>{body}</tbody>\n</table></div>'
