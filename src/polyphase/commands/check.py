"""``check``: does a model give the same results with polyphase as without, and how much faster?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyphase.commands.options import Dtype, ModelTargets, device_of, known_targets, model_files

if TYPE_CHECKING:
    from rich.console import Console

    from polyphase.bench.trial import Options


def check(
    files: ModelTargets,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu. Default: the GPU, if there is one.", show_default=False)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and inputs.")] = Dtype.FLOAT32,
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cut the batch and the image sides to 1/SCALE. Default: 1 on a GPU; on a CPU enough to take seconds.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Sets of inputs. Two are used where get_inputs() returns one size.")
    ] = 5,
    grad: Annotated[bool, typer.Option("--grad/--no-grad", help="Compare and time gradients too.")] = True,
    time: Annotated[bool, typer.Option("--time/--no-time", help="Time polyphase and PyTorch.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and projections.")] = 42,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse/--no-fuse", help="Compare and time a fused copy too, in evaluation mode and without gradients."
        ),
    ] = True,
    emitted: Annotated[
        Path | None,
        typer.Option(
            help="Check OUT.py, which `emit` wrote for FILE, by KernelBench's rules and against float64. Needs a GPU.",
            metavar="OUT.py",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Accelerate a copy of a model, compare it with float64 and with PyTorch, and time both.

    The exit status is 1 if an output or a gradient is wrong, if a model does not run, or if there was nothing to
    accelerate or to compare.
    """
    from polyphase.bench import report
    from polyphase.bench.check import check_model
    from polyphase.bench.check_report import show
    from polyphase.bench.environment import device_name
    from polyphase.bench.model_file import ModelFileError
    from polyphase.bench.target import opened
    from polyphase.bench.trial import Options

    known_targets(files)
    import torch

    place = device_of(device)
    options = Options(place, getattr(torch, dtype.value), scale, trials, grad, time, seed, fuse)
    console = report.make_console()
    if emitted is not None:
        _check_emitted(console, emitted, files, options)
        return
    wrong = []
    for target in files:
        console.rule(f"[bold]{target}[/bold]")
        console.print(f"{dtype.value} on {place} ({device_name(place.type)}), seed {seed}", markup=False)
        try:
            with report.make_console(stderr=True).status("starting") as status, opened(target) as file:
                result = check_model(file, options, status.update)
        except ModelFileError as failure:
            console.print(f"✗ {failure}", style="bold red", markup=False)
            wrong.append(target)
            continue
        except (Exception, SystemExit):  # raised by the model in PyTorch: where polyphase fails, the result says so
            console.print_exception(max_frames=4)
            wrong.append(target)
            continue
        show(console, result)
        if not result.ok:
            wrong.append(target)
    console.rule()
    if wrong:
        counted = f"{len(wrong)} of {len(files)} models failed"
        console.print(f"{counted}: {', '.join(wrong)}", style="bold red", markup=False)
        raise typer.Exit(1)
    console.print(f"{len(files)} of {len(files)} models agree with float64 and PyTorch", style="bold green")


def _check_emitted(console: Console, emitted: Path, targets: list[str], options: Options) -> None:
    from polyphase.bench.check_emitted import check_emitted, load_emitted
    from polyphase.bench.check_report import show_emitted
    from polyphase.bench.environment import device_name
    from polyphase.bench.model_file import ModelFileError
    from polyphase.bench.report import make_console
    from polyphase.bench.target import opened

    if len(targets) != 1:
        raise typer.BadParameter(f"an emitted file is compared with one model, got {len(targets)}", param_hint="FILE")
    model_files([emitted], "--emitted")
    if options.device.type != "cuda":
        raise typer.BadParameter(
            f"an emitted file runs on a GPU only, and the device is {options.device}", param_hint="--emitted"
        )
    if options.scale is not None:
        raise typer.BadParameter("an emitted file is checked on whole inputs", param_hint="--scale")
    console.rule(f"[bold]{emitted}[/bold], made of {targets[0]}")
    console.print(f"{options.dtype} on {options.device} ({device_name('cuda')}), seed {options.seed}", markup=False)
    try:
        with make_console(stderr=True).status("building the kernels") as status, opened(targets[0]) as file:
            result = check_emitted(load_emitted(emitted), file, options, status.update)
    except ModelFileError as failure:
        raise typer.BadParameter(str(failure), param_hint="--emitted") from None
    show_emitted(console, result)
    if not result.ok:
        raise typer.Exit(1)
