"""The command line: ``python -m polyphase check | bench | explain | plans | tune | emit | env | compile | diff``."""

from __future__ import annotations

import typer

from polyphase.commands.bench import bench
from polyphase.commands.check import check
from polyphase.commands.compile import compile_kernels
from polyphase.commands.diff import diff
from polyphase.commands.emit import emit
from polyphase.commands.env import env
from polyphase.commands.explain import explain
from polyphase.commands.plans import plans
from polyphase.commands.tune import tune

app = typer.Typer(
    name="polyphase",
    help="Transposed convolutions for PyTorch with CUDA kernels of their own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(check)
app.command()(bench)
app.command()(explain)
app.command()(plans)
app.command()(tune)
app.command()(emit)
app.command()(env)
app.command("compile")(compile_kernels)
app.command()(diff)


def main() -> None:
    """Run the command line."""
    app(prog_name="python -m polyphase")


if __name__ == "__main__":
    main()
