"""``explain``: which kernel computes a layer, which ones lost, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyphase.commands.options import SUITES, LayerTexts


def explain(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Model files in KernelBench's form.", metavar="FILE", show_default=False)
    ] = None,
    layer: LayerTexts = None,
    suite: Annotated[str | None, typer.Option(help=f"Suites: {SUITES}.", show_default=False)] = None,
    device: Annotated[
        str | None,
        typer.Option(help="An architecture such as sm_90a, or a device; without one, this machine's GPU or sm_90a."),
    ] = None,
    strict_fp32: Annotated[
        bool, typer.Option("--strict-fp32", help="No TF32: plans as with PyTorch's switch off.")
    ] = False,
) -> None:
    """Print the plan of a layer for all three passes: winner, losers, reasons. Needs no GPU."""
    from dataclasses import replace

    from polyphase import explanation
    from polyphase.bench.report import make_console
    from polyphase.commands.options import some_layers
    from polyphase.errors import UnsupportedError
    from polyphase.plan.explain import explain as explain_text
    from polyphase.torch_op.tf32 import tf32_allowed

    layers = some_layers(layer, suite, files)
    try:
        info = explanation.device_info(device)
    except UnsupportedError as failure:
        raise typer.BadParameter(str(failure), param_hint="--device") from None
    tf32 = tf32_allowed() and not strict_fp32
    console = make_console()
    for index, named in enumerate(layers):
        if index:
            console.rule()
        console.print(named.name, style="bold", markup=False)
        console.print(explain_text(replace(named.problem, tf32=tf32), info), markup=False, soft_wrap=True)
    if explanation.is_for_elsewhere(device):
        console.print(f"\n{explanation.NO_GPU}", markup=False)
