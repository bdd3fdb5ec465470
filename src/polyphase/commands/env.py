"""``env``: what to put into a bug report."""

from __future__ import annotations


def env() -> None:
    """Versions, GPU, driver and kernel cache, for bug reports. Works without a GPU."""
    from rich.table import Table
    from rich.text import Text

    from polyphase.bench.environment import report
    from polyphase.bench.report import make_console

    table = Table(show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in report():
        table.add_row(name, Text(value))
    make_console().print(table)
