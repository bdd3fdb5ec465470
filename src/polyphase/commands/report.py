"""``report``: will polyphase help this model?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyphase.commands.options import Dtype, device_of

if TYPE_CHECKING:
    from polyphase.problem.device import Card


def report(
    target: Annotated[
        str,
        typer.Argument(
            help="A model file in KernelBench's form; FILE.py:FUNCTION or MODULE:FUNCTION of a function that returns a "
            "model and a list of its inputs; or MODULE:CLASS of a library's model, with --input and --config.",
            metavar="TARGET",
        ),
    ],
    input: Annotated[
        list[str] | None,
        typer.Option(
            help="With MODULE:CLASS: the shape of an input, such as 1x3x64x64. May be given again.", show_default=False
        ),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            help="With MODULE:CLASS: the constructor's arguments, as JSON or a file NAME.json.", show_default=False
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page to write. Default: NAME-report.html in this folder.", show_default=False
        ),
    ] = None,
    card: Annotated[
        str,
        typer.Option(
            help="Without a GPU: the card that times are predicted for, such as h100 or a100, or an architecture."
        ),
    ] = "h200",
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu. Default: the GPU, if there is one.", show_default=False)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and inputs.")] = Dtype.FLOAT32,
    grad: Annotated[bool, typer.Option("--grad/--no-grad", help="Include gradients.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and projections.")] = 42,
) -> None:
    """Report what polyphase does for a model, here and as an HTML page: times, memory, accuracy, the code to add.

    On a GPU everything is measured, against PyTorch. Elsewhere times are the planner's predictions. The exit status is
    1 if a result is wrong, or if there is nothing to accelerate.
    """
    import torch

    from polyphase.bench.environment import device_name
    from polyphase.bench.model_file import ModelFileError
    from polyphase.bench.model_report import report_on
    from polyphase.bench.report import make_console, telling
    from polyphase.bench.report_page import page, summary
    from polyphase.bench.target import opened
    from polyphase.bench.trial import Options
    from polyphase.problem.device import DeviceInfo

    place = device_of(device)
    on_gpu = place.type == "cuda"
    info = DeviceInfo.of(place) if on_gpu else _planned_for(card)
    name = device_name(place.type) if on_gpu else card
    options = Options(place, getattr(torch, dtype.value), trials=2, grad=grad, seed=seed)
    try:
        with telling("reading the model") as tell, opened(target, input or (), config) as file:
            found = report_on(target, file, options, info, name, on_gpu, tell)
    except ModelFileError as failure:
        raise typer.BadParameter(str(failure), param_hint="TARGET") from None
    path = output or Path(f"{_name(target, bool(input))}-report.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(found), encoding="utf-8")
    except OSError as failure:
        raise typer.BadParameter(str(failure), param_hint="--output") from None
    console = make_console()
    for line in summary(found):
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"\nadd to the program:\n{found.recipe}\n" if found.recipe else "nothing to add to the program", markup=False
    )
    console.print(f"written to {path}", markup=False)
    if not found.ok:
        raise typer.Exit(1)


def _name(target: str, is_class: bool) -> str:
    """What the page is called after: the model's file, the function's module, or the class."""
    where, _, name = target.rpartition(":")
    if is_class:
        return name
    return Path(where or target).stem if (where or target).endswith(".py") else where.rpartition(".")[2]


def _planned_for(card: str) -> Card:
    """A card by its name or its architecture. Raises `typer.BadParameter`."""
    from polyphase.errors import UnsupportedError
    from polyphase.problem.device import Card

    try:
        found = Card.of(card)
    except UnsupportedError as failure:
        raise typer.BadParameter(str(failure), param_hint="--card") from None
    if not found.device.is_cuda:
        raise typer.BadParameter("predictions are for NVIDIA GPUs", param_hint="--card")
    return found
