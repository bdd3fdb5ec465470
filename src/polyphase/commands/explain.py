"""``explain``: which kernel computes a layer, which ones lost, and why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from polyphase.commands.options import SUITES, LayerTexts, Least, ModelTargets, Seed

if TYPE_CHECKING:
    from rich.console import Console

    from polyphase.bench.layers import NamedLayer
    from polyphase.problem.device import Card

_OVER = 3.0  # times the floor: what of layers drawn at random is shown


def explain(
    files: ModelTargets = [],  # noqa: B006 (none are needed)
    layer: LayerTexts = None,
    suite: Annotated[str | None, typer.Option(help=f"Suites: {SUITES}.", show_default=False)] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="A card such as h100, an architecture or a device. Without, this machine's GPU, or sm_90a.",
            show_default=False,
        ),
    ] = None,
    strict_fp32: Annotated[
        bool, typer.Option("--strict-fp32", help="No TF32: plans as with PyTorch's switch off.")
    ] = False,
    random: Annotated[int, typer.Option(min=0, help="So many layers drawn at random.")] = 0,
    seed: Seed = 0,
    least: Least = 20.0,
    over: Annotated[
        float | None,
        typer.Option(
            help="Only passes that are predicted to take more than so many times their floor, and their kinds; "
            "3 for layers drawn at random.",
            show_default=False,
        ),
    ] = None,
    dtypes: Annotated[str, typer.Option(help="With --over: float32, bfloat16, float16, float64.")] = "float32,bfloat16",
    layouts: Annotated[str, typer.Option(help="With --over: nchw, channels_last, or both.")] = "nchw",
    show: Annotated[int, typer.Option(min=0, help="With --over: passes to show.")] = 100,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that plan.")] = os.cpu_count() or 1,
) -> None:
    """Print the plan of a layer for all three passes: winner, losers, reasons. Needs no GPU.

    With --random or --over, what is predicted for many layers beside their floors.
    """
    from dataclasses import replace

    from polyphase import explanation
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
            raise typer.BadParameter("forecasts are of NVIDIA GPUs, such as sm_90a", param_hint="--device")
        _tell_forecasts(console, _in_forms(layers, dtypes, layouts, strict_fp32), card, over, show, jobs)
        return
    tf32 = tf32_allowed() and not strict_fp32
    for index, named in enumerate(layers):
        if index:
            console.rule()
        console.print(named.name, style="bold", markup=False)
        console.print(explain_text(replace(named.problem, tf32=tf32), card), markup=False, soft_wrap=True)
    if explanation.is_for_elsewhere(device):
        console.print(f"\n{explanation.NO_GPU}", markup=False)


def _in_forms(layers: list[NamedLayer], dtypes: str, layouts: str, strict_fp32: bool) -> list[NamedLayer]:
    """The layers in each dtype and memory format."""
    from polyphase.bench.plans import problems
    from polyphase.commands.options import Dtype, Layout, choices

    names = [dtype.value for dtype in choices(dtypes, Dtype, "--dtypes")]
    last = [layout is Layout.CHANNELS_LAST for layout in choices(layouts, Layout, "--layouts")]
    return [*problems(layers, names, last, strict_fp32)]


def _tell_forecasts(
    console: Console, layers: list[NamedLayer], card: Card, over: float | None, show: int, jobs: int
) -> None:
    """Print which passes are predicted to be far above their floor, and by kinds how far all are."""
    from rich.progress import track

    from polyphase.bench import forecasts
    from polyphase.bench.report import make_console
    from polyphase.problem.ceilings import about_rates

    over = _OVER if over is None else over
    plans = forecasts.forecasts(layers, card, jobs)
    progress = make_console(stderr=True)
    found = [each for some in track(plans, "planning", len(layers), console=progress, transient=True) for each in some]
    console.print(f"on {card}; {about_rates(card)}", markup=False)
    console.print(forecasts.worst_table(found, over, show))
    for table in (forecasts.kind_table, forecasts.schedule_table, forecasts.summary_table):
        console.print()
        console.print(table(found, over))
    lacking = [each for each in found if each.lacks_tensor_cores]
    console.print(f"\n{len(lacking)} passes have no schedule on tensor cores, of 8 channels a side and a GFLOP or more")
    for each in lacking:
        console.print(f"  {each.pass_.value}, {each.problem}", markup=False)
