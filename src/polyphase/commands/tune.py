"""``tune``: measure every kernel that may be a layer's fastest, and use the fastest from then on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyphase.commands.options import LayerTexts, ModelTargets, Suites, choices, device_of, forms, some_layers

if TYPE_CHECKING:
    from rich.console import Console

    from polyphase.bench.tuner import Tuned


def tune(
    files: ModelTargets = [],  # noqa: B006 (none are needed)
    layer: LayerTexts = None,
    suite: Suites = None,
    passes: Annotated[str, typer.Option(help="forward, input_grad, weight_grad.")] = "forward",
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")] = "float32",
    layouts: Annotated[str, typer.Option(help="nchw, channels_last.")] = "nchw",
    strict_fp32: Annotated[bool, typer.Option("--strict-fp32", help="No TF32.")] = False,
    device: Annotated[str | None, typer.Option(help="Default: the GPU.", show_default=False)] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every candidate's time here.", show_default=False)] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            help="Kernels, comma-separated: measure only candidates of these, and the planner's choice.",
            show_default=False,
        ),
    ] = None,
    within: Annotated[
        float, typer.Option(min=1.0, help="Leave out kernels predicted to take over WITHIN times the best's time.")
    ] = 4.0,
    forget: Annotated[bool, typer.Option("--forget", help="Measure nothing: remove all stored choices.")] = False,
) -> None:
    """Measure every kernel that may be a layer's fastest, and store the fastest on disk, where the planner finds it.

    The kernels are compiled first, on all processors. The lines below the table say how much slower the planner's own
    choices are. A choice is used from the next process on, for the layer at any batch and image size (the size measured
    last decides), with this version's kernels, on GPUs of this kind. Emitted files are not affected. The exit status is
    1 if a candidate is wrong or fails.
    """
    from rich.progress import Progress

    from polyphase.bench.records import write_csv
    from polyphase.bench.report import make_console
    from polyphase.bench.runner import Runner, make_cases
    from polyphase.bench.tuner import sources
    from polyphase.bench.tuner import tune as tune_case
    from polyphase.jit.ahead import compile_ahead
    from polyphase.plan import measured as tuning
    from polyphase.problem import Pass
    from polyphase.problem.device import DeviceInfo
    from polyphase.schedules import SCHEDULES

    console = make_console()
    if forget:
        _forget(console)
        return
    layers = some_layers(layer, suite, files)
    place = device_of(device)
    if place.type != "cuda":
        raise typer.BadParameter("polyphase's kernels run on NVIDIA GPUs only", param_hint="--device")
    names, last = forms(dtypes, layouts)
    cases = [
        case
        for case in make_cases(layers, choices(passes, Pass, "--passes"), names, last, tf32=not strict_fp32)
        if not (case.problem.channels_last and case.problem.dims == 1)  # PyTorch has no such format
    ]
    if not cases:
        raise typer.BadParameter("PyTorch has no channels_last for one spatial dimension", param_hint="--layouts")
    info, only = DeviceInfo.of(place), frozenset(kernels.split(",") if kernels else ())
    if unknown := only - {schedule.name for schedule in SCHEDULES}:
        raise typer.BadParameter(f"there is no kernel {', '.join(sorted(unknown))}", param_hint="--kernels")
    results: list[Tuned] = []
    with Progress(console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task("kernels", total=None)
        compile_ahead(
            sources(cases, info, only, within),
            info.arch,
            lambda done, count: progress.update(task, completed=done, total=count),
        )
        progress.reset(task, total=len(cases), description="ceilings")
        runner = Runner(place, names, (), strict_fp32)
        for case in cases:
            progress.update(task, description=f"{case.name}, {case.pass_.value}, {case.problem.dtype}")
            try:
                results.append(tune_case(case, runner.run, info, only, within))
            except OSError as failure:
                console.print(f"{tuning.directory()} cannot be written: {failure}", style="bold red", markup=False)
                raise typer.Exit(1) from None
            progress.advance(task)
            if csv is not None:
                write_csv(csv, [record for result in results for record in result.records])
    _tell(console, results, csv)


def _forget(console: Console) -> None:
    """Removes what was measured before."""
    from polyphase.plan import measured as tuning

    try:
        console.print(f"{tuning.forget()} choices removed from {tuning.directory()}", markup=False)
    except OSError as failure:
        console.print(f"the choices cannot be removed: {failure}", style="bold red", markup=False)
        raise typer.Exit(1) from None


def _tell(console: Console, results: list[Tuned], csv: Path | None) -> None:
    """Prints what was measured, and how far the planner's choices are off. The exit status is 1 after a fault."""
    from polyphase.bench.tuner import accuracy, table
    from polyphase.plan import measured as tuning

    console.print(table(results))
    console.print(str(accuracy(record for result in results for record in result.records)), markup=False)
    for result in results:
        for fault in result.faults:
            console.print(f"{result.case.name}: {fault.config}: {fault.status}, {fault.reason}", markup=False)
    written = sum(result.fastest is not None for result in results)
    console.print(f"{written} choices written to {tuning.directory()}; `tune --forget` removes them", markup=False)
    if csv is not None:
        console.print(f"{sum(len(result.records) for result in results)} candidates written to {csv}", markup=False)
    if any(result.faults or result.fastest is None for result in results):
        raise typer.Exit(1)
