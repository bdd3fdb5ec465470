"""``bench``: how fast layers are, against their floor and against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyphase.commands.options import SUITES, LayerTexts, Least, Seed, choices, device_of, forms

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from polyphase.bench.layers import NamedLayer
    from polyphase.bench.records import Record
    from polyphase.bench.runner import Case, Runner

_DTYPES = {False: "float32", True: "float32,bfloat16"}  # by --graphs


def bench(
    suite: Annotated[
        str | None,
        typer.Option(help=f"Suites: {SUITES}. Default: reference.", show_default=False),
    ] = None,
    layer: LayerTexts = None,
    passes: Annotated[str, typer.Option(help="forward, input_grad, weight_grad.")] = "forward",
    dtypes: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16, float64. Default: float32; with --graphs also bfloat16.",
            show_default=False,
        ),
    ] = None,
    layouts: Annotated[str, typer.Option(help="nchw, channels_last.")] = "nchw",
    against: Annotated[str, typer.Option(help="PyTorch as: default, benchmark, channels_last, compile.")] = "default",
    device: Annotated[str | None, typer.Option(help="Default: the GPU, if there is one.", show_default=False)] = None,
    strict_fp32: Annotated[
        bool, typer.Option("--strict-fp32", help="No TF32, for polyphase, PyTorch and the floor.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="At most five repetitions.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the results here.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the results here.", show_default=False)] = None,
    plot_from: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: draw this CSV into --png. May be given again.", show_default=False),
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Measure the host's time per call, which --csv stores, and first calls.")
    ] = False,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="Time CUDA graphs, without the host's time: all passes and the training step, against PyTorch's "
            "default and benchmark mode.",
        ),
    ] = False,
    random: Annotated[int, typer.Option(min=0, help="Number of random layers; implies --graphs.")] = 0,
    seed: Seed = 0,
    least: Least = 20.0,
    seconds: Annotated[
        float | None, typer.Option(help="With --graphs: start no layer after SECONDS.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --graphs: keep the rows of --csv, and measure the other layers.")
    ] = False,
    summarise: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: summarise this CSV of --graphs. May be given again.", show_default=False),
    ] = None,
) -> None:
    """Check and time layers, against their floor and against PyTorch.

    The exit status is 1 if a case is wrong or fails.
    """
    from polyphase.bench.report import make_console

    console = make_console()
    if png is not None:
        _require_matplotlib()  # before measuring for an hour
    if plot_from:
        _draw_again(console, plot_from, png)
        return
    if summarise:
        from polyphase.commands.bench_graphs import tell

        tell(console, _read(summarise, "--summarise"))
        return
    place = device_of(device)
    if host:
        from polyphase.bench.host_report import show_host_times

        show_host_times(console, place, csv)
        return

    from polyphase.bench.contestants import TorchVariant
    from polyphase.bench.report import notes, results_table, summary_lines
    from polyphase.bench.runner import Runner, make_cases
    from polyphase.commands.options import drawn_layers, named_layers
    from polyphase.problem import Pass

    graphs |= random > 0
    layers = named_layers(layer, suite) + drawn_layers(random, seed, least)
    layers = _not_too_large(layers or named_layers(None, "reference"), place, console)
    names, last = forms(dtypes or _DTYPES[graphs], layouts)
    if graphs:
        from polyphase.commands.bench_graphs import sweep, tell

        found = sweep(
            console, place, layers, names, last, strict_fp32,
            seed=seed if random else None, seconds=seconds, csv=csv, resume=resume,
        )  # fmt: skip
        tell(console, found)
        return
    rivals = choices(against, TorchVariant, "--against")
    cases = make_cases(layers, choices(passes, Pass, "--passes"), names, last)
    records = _measure(cases, lambda: Runner(place, names, rivals, strict_fp32, quick), csv)
    console.print(f"{records[0].gpu}; {records[0].ceilings}", markup=False)
    console.print(results_table(records, rivals))
    for note in notes(records):
        console.print(note)
    for line in summary_lines(records):
        console.print(line, markup=False)
    if csv is not None:
        console.print(f"written to {csv}", markup=False)
    if png is not None:
        _draw(console, records, png)
    if not all(record.good for record in records):
        raise typer.Exit(1)


def _not_too_large(layers: list[NamedLayer], place: torch.device, console: Console) -> list[NamedLayer]:
    """The layers as they are measured on a device: on a CPU large ones are cut."""
    from polyphase.bench.runner import cut_for_cpu

    if place.type == "cuda":
        return layers
    smaller = [cut_for_cpu(layer) for layer in layers]
    if layers != smaller:
        console.print(f"on {place}, large layers are cut: ÷4 means a quarter of the batch and of each image side")
    return smaller


def _draw_again(console: Console, paths: list[Path], png: Path | None) -> None:
    """Draws records that were measured before."""
    if png is None:
        raise typer.BadParameter("give the picture's file with --png", param_hint="--plot-from")
    _draw(console, _read(paths, "--plot-from"), png)


def _read(paths: list[Path], option: str) -> list[Record]:
    from polyphase.bench.records import read_csv

    try:
        return [record for path in paths for record in read_csv(path)]
    except (OSError, ValueError) as failure:
        raise typer.BadParameter(str(failure), param_hint=option) from None


def _measure(cases: list[Case], make_runner: Callable[[], Runner], csv: Path | None) -> list[Record]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from polyphase.bench.records import write_csv
    from polyphase.bench.report import make_console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    records: list[Record] = []
    with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task("ceilings", total=len(cases))
        with closing(make_runner()) as runner:
            for case in cases:
                progress.update(task, description=f"{case.name}, {case.pass_.value}, {case.problem.dtype}")
                records.append(runner.run(case))
                progress.advance(task)
                if csv is not None:
                    write_csv(csv, records)  # after every case: a run that is cut short leaves what it has
    return records


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise typer.BadParameter(
            'drawing needs matplotlib: pip install "torch-polyphase[bench]"', param_hint="--png"
        ) from None


def _draw(console: Console, records: list[Record], png: Path) -> None:
    from polyphase.bench.plot import NothingToDrawError, draw

    try:
        draw(records, png)
    except NothingToDrawError as failure:
        raise typer.BadParameter(str(failure), param_hint="--png") from None
    console.print(f"drawn to {png}", markup=False)
