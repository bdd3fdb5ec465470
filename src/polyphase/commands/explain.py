"""``explain``: which kernel computes a layer, which ones lose, and why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from polyphase.commands.options import LayerTexts, Least, ModelTargets, Seed, Suites, forms

if TYPE_CHECKING:
    from rich.console import Console

    from polyphase.bench.layers import NamedLayer
    from polyphase.problem.device import Card

_OVER = 3.0  # times the floor, above which passes of random layers are shown


def explain(
    files: ModelTargets = [],  # noqa: B006 (none are needed)
    layer: LayerTexts = None,
    suite: Suites = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="A card such as h100, an architecture or a device. Default: this machine's GPU, or sm_90a.",
            show_default=False,
        ),
    ] = None,
    strict_fp32: Annotated[
        bool, typer.Option("--strict-fp32", help="No TF32: plans as with PyTorch's switch off.")
    ] = False,
    random: Annotated[int, typer.Option(min=0, help="Number of random layers.")] = 0,
    seed: Seed = 0,
    least: Least = 20.0,
    over: Annotated[
        float | None,
        typer.Option(
            help="Show only passes that are predicted to take more than OVER times their floor, and kinds of layers. "
            "Default with --random: 3.",
            show_default=False,
        ),
    ] = None,
    dtypes: Annotated[str, typer.Option(help="With --over: float32, bfloat16, float16, float64.")] = "float32,bfloat16",
    layouts: Annotated[str, typer.Option(help="With --over: nchw, channels_last, or both.")] = "nchw",
    show: Annotated[int, typer.Option(min=0, help="With --over: how many passes to show.")] = 100,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that plan.")] = os.cpu_count() or 1,
) -> None:
    """Print the plan of a layer for all three passes: winner, losers, reasons. Needs no GPU.

    With --random or --over, compare the predictions for many layers with their floors.
    """
    from dataclasses import replace

    from polyphase import explanation
    from polyphase.bench.plans import problems
    from polyphase.bench.report import make_console
    from polyphase.commands.options import drawn_layers, some_layers
    from polyphase.errors import UnsupportedError
    from polyphase.plan.explain import explain as explain_text
    from polyphase.torch_op.tf32 import tf32_allowed

    drawn = drawn_layers(random, seed, least)
    layers = drawn if drawn and not (layer or suite or files) else some_layers(layer, suite, files) + drawn
    try:
        card = explanation.card_of(device)
    except UnsupportedError as failure:
        raise typer.BadParameter(str(failure), param_hint="--device") from None
    console = make_console()
    if drawn or over is not None:
        if not card.device.is_cuda:
            raise typer.BadParameter("predictions are for NVIDIA GPUs, such as sm_90a", param_hint="--device")
        _tell_predictions(console, [*problems(layers, *forms(dtypes, layouts), strict_fp32)], card, over, show, jobs)
        return
    tf32 = tf32_allowed() and not strict_fp32
    for index, named in enumerate(layers):
        if index:
            console.rule()
        if not _is_notation(named):
            console.print(named.name, style="bold", markup=False)
        console.print(explain_text(replace(named.problem, tf32=tf32), card), markup=False, soft_wrap=True)
    if explanation.is_for_elsewhere(device):
        console.print(f"\n{explanation.NO_GPU}", markup=False)


def _is_notation(named: NamedLayer) -> bool:
    """Whether the layer's name is its notation, which the explanation begins with."""
    from polyphase.bench.layers import LayerSyntaxError, parse_layer

    try:
        return parse_layer(named.name) == named.problem
    except LayerSyntaxError:
        return False


def _tell_predictions(
    console: Console, layers: list[NamedLayer], card: Card, over: float | None, show: int, jobs: int
) -> None:
    """Print which passes are predicted to be far above their floor, and by kinds how far all are."""
    from rich.progress import track

    from polyphase.bench import predictions
    from polyphase.bench.report import make_console
    from polyphase.problem.ceilings import about_rates

    over = _OVER if over is None else over
    plans = predictions.predictions(layers, card, jobs)
    progress = make_console(stderr=True)
    found = [each for some in track(plans, "planning", len(layers), console=progress, transient=True) for each in some]
    console.print(f"on {card}; {about_rates(card)}", markup=False)
    console.print(predictions.worst_table(found, over, show))
    for table in predictions.group_tables(found, over):
        console.print()
        console.print(table)
    lacking = [each for each in found if each.lacks_tensor_cores]
    console.print(f"\n{len(lacking)} passes with at least 8 channels and 1 GFLOP have no schedule on tensor cores")
    for each in lacking:
        console.print(f"  {each.pass_.value}, {each.problem}", markup=False)
