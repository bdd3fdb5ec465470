"""The commands as one program."""

from __future__ import annotations

from typing import Annotated

import typer

from polyphase import __version__
from polyphase.commands.bench import bench
from polyphase.commands.check import check
from polyphase.commands.compile import compile_kernels
from polyphase.commands.diff import diff
from polyphase.commands.emit import emit
from polyphase.commands.env import env
from polyphase.commands.explain import explain
from polyphase.commands.plans import plans
from polyphase.commands.report import report
from polyphase.commands.tune import tune

app = typer.Typer(
    name="polyphase",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
app.command()(report)
app.command()(check)
app.command()(bench)
app.command()(explain)
app.command()(plans)
app.command()(tune)
app.command()(emit)
app.command()(env)
app.command("compile")(compile_kernels)
app.command()(diff)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polyphase {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Transposed convolutions for PyTorch with CUDA kernels of their own."""
