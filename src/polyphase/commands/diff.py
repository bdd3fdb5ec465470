"""``diff``: the differences between two files of digests or of plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from polyphase.bench.gates import Comparison


def diff(
    before: Annotated[Path, typer.Argument(help="A file of `compile --digests` or `plans --csv`.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Another of the same kind.", show_default=False)],
    ignore: Annotated[
        list[str] | None, typer.Option(help="A column that may differ. May be given again.", show_default=False)
    ] = None,
    names: Annotated[
        Path | None, typer.Option(help="A file of new names in the second file: lines `old,new`.", show_default=False)
    ] = None,
    part: Annotated[
        bool, typer.Option("--part", help="The second file has only some of the first one's problems.")
    ] = False,
    show: Annotated[int, typer.Option(min=0, help="How many of the problems that differ to show.")] = 20,
) -> None:
    """Print the differences between two files of machine-code digests, or of plans. The exit status is 1 if any.

    Kernels are identified by their problem, so they may be renamed. In plans the names of algorithms and of a config's
    settings are compared, unless they are ignored or given new names.
    """
    from polyphase.bench import gates
    from polyphase.bench.report import make_console

    console = make_console()
    try:
        found = gates.compare(
            gates.read(before), gates.read(after), ignore or (), gates.read_names(names) if names else None, part
        )
    except gates.GateError as failure:
        raise typer.BadParameter(str(failure)) from None
    if not found.changes:
        console.print(f"{found.equal} lines are equal")
        return
    for change in found.changes[:show]:
        for line in gates.described(change, found.compared):
            console.print(line, markup=False, soft_wrap=True)
    if len(found.changes) > show:
        console.print(f"and {len(found.changes) - show} problems more")
    console.print(_table(found))
    console.print(f"{found.equal} lines are equal, {len(found.changes)} problems differ")
    raise typer.Exit(1)


def _table(found: Comparison) -> Table:
    """Lines that only one file has, by kernel or algorithm."""
    from polyphase.bench.gates import subject
    from polyphase.bench.report import table_of

    counts: dict[str, list[int]] = {}
    for change in found.changes:
        for place, rows in enumerate((change.before, change.after)):
            for row in rows:
                counts.setdefault(subject(row), [0, 0])[place] += 1
    title = "Lines that only one file has"
    lines = table_of(title, ("kernel or algorithm",), ("before", "after"), title_justify="center")
    for name, (before, after) in sorted(counts.items()):
        lines.add_row(name, str(before), str(after))
    return lines
