"""What a check found out, as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyphase.bench.check_emitted import EmittedResult
from polyphase.bench.report import OF_VANISHING, errors, milliseconds, table_of
from polyphase.bench.trial import CheckResult, Finding


def show(console: Console, result: CheckResult) -> None:
    """Print a check: what was swapped, the plans, every comparison, the times, and the verdict."""
    console.print(result.swapped)
    console.print(f"compared on inputs {result.cut}", markup=False)
    for table, rows in ((_plans(result), result.plans), (_findings(result.findings), result.findings)):
        if rows:
            console.print(table)
    if result.races:
        console.print(_races(result))
    for block in result.blocks:
        console.print(f"· fuse=True, {block}", style="dim", markup=False)
    for remark in result.remarks:
        console.print(f"· {remark}", style="dim", markup=False)
    for problem in result.problems:
        console.print(f"✗ {problem}", style="bold red", markup=False)
    if result.ok:
        console.print("✓ the same as PyTorch, to the accuracy of its dtype", style="bold green")


def show_emitted(console: Console, result: EmittedResult) -> None:
    """Print the check of an emitted file: KernelBench's trials, float64, the times, and the verdict."""
    for number, sizes, share in result.trials:
        verdict = "passes" if share == 0 else f"fails on {share:.2%} of the elements"
        console.print(f"trial {number}, {sizes}: {verdict} KernelBench's rule", markup=False)
    if result.findings:
        console.print(_findings(result.findings))
    if result.emitted_ms and result.package_ms and result.torch_ms:
        console.print(
            f"forward, mean of 100: {milliseconds(result.emitted_ms)} ms; the package's modules "
            f"{milliseconds(result.package_ms)} ms ({result.emitted_ms / result.package_ms:.3f} of it); PyTorch "
            f"{milliseconds(result.torch_ms)} ms ({result.torch_ms / result.emitted_ms:.2f}× as long)",
            markup=False,
        )
    for problem in result.problems:
        console.print(f"✗ {problem}", style="bold red", markup=False)
    if result.ok:
        console.print("✓ the emitted model agrees with its original", style="bold green")


def _plans(result: CheckResult) -> Table:
    table = table_of("Plans", ("layer", "problem", "pass", "plan"))
    for name, problem, pass_name, chosen in result.plans:
        table.add_row(name, problem, pass_name, chosen)
    return table


def _findings(findings: list[Finding]) -> Table:
    title = "Against float64: error is ‖x − ref64‖ / ‖ref64‖"
    elementwise = any(found.elementwise for found in findings)
    if elementwise:
        title += "; worst is the largest error of an element over its limit"
    note = OF_VANISHING if any(found.comparison.vanishes for found in findings) else None
    figures = ("polyphase error", "PyTorch error", *(["worst"] if elementwise else []), "elements")
    table = table_of(title, ("trial", "inputs", "what"), figures, caption=note, caption_justify="left")
    table.add_column("")
    for found in findings:
        values = found.comparison
        table.add_row(
            str(found.trial),
            found.sizes,
            found.what,
            *errors(values),
            *([f"{values.worst:.2f}" if found.elementwise else "–"] if elementwise else []),
            f"{values.elements:,}",
            Text("✓", style="green") if found.ok else Text("✗ wrong", style="bold red"),
        )
    return table


def _races(result: CheckResult) -> Table:
    title = "Milliseconds, median (10th–90th percentile), the inputs of trial 1"
    table = table_of(title, ("what",), ("polyphase", "PyTorch", "speed-up"))
    for race in result.races:
        times = [f"{milliseconds(t.ms)} ({milliseconds(t.p10)}–{milliseconds(t.p90)})" for t in (race.ours, race.torch)]
        speedup = race.torch.ms / race.ours.ms
        table.add_row(race.what, *times, Text(f"{speedup:.2f}×", style="green" if speedup >= 1 else "red"))
    return table
