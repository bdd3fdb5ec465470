"""``compile``: every kernel that the planner can choose, compiled without a GPU; spills are errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from polyphase.commands.options import SUITES, LayerTexts, architectures, choices, forms, named_layers


def compile_kernels(
    arch: Annotated[
        str, typer.Option(help="Architectures, comma-separated, as the compiler calls them.")
    ] = "sm_80,sm_90a,sm_100a,sm_120",
    suite: Annotated[
        str | None,
        typer.Option(help=f"Suites: {SUITES}. Default: every layer of each suite.", show_default=False),
    ] = None,
    layer: LayerTexts = None,
    dtypes: Annotated[str, typer.Option(help="Dtypes, comma-separated.")] = "float32,bfloat16,float16,float64",
    layouts: Annotated[str, typer.Option(help="nchw, channels_last, or both.")] = "nchw,channels_last",
    passes: Annotated[str, typer.Option(help="Passes, comma-separated.")] = "forward,input_grad,weight_grad",
    functions: Annotated[
        str,
        typer.Option(help="What is fused into the kernels: none, residual, norm, style, layer_norm, prologue."),
    ] = "none",
    variants: Annotated[
        bool,
        typer.Option(
            "--variants",
            help="Compile the planner's choices, and one kernel of each other code variant. Default: every config.",
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = os.cpu_count() or 1,
    every: Annotated[bool, typer.Option("--every", help="Print one line per kernel.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write one line per kernel here.", show_default=False)] = None,
    digests: Annotated[
        Path | None, typer.Option(help="Write digests of machine code here, for `diff`.", show_default=False)
    ] = None,
) -> None:
    """Compile every kernel that the planner can choose for the suites, without a GPU, and print the resources of each.

    The exit status is 1 if a kernel spills, has a stack frame, makes the assembler warn, or does not compile.
    """
    from rich.progress import track

    from polyphase.bench import kernels
    from polyphase.bench.layers import every_layer
    from polyphase.bench.report import make_console
    from polyphase.errors import UnsupportedError
    from polyphase.jit.compiler import compiler_version
    from polyphase.problem import Pass

    console = make_console()
    layers = named_layers(layer, suite) or every_layer()
    asked = (
        [each.around(one) for each in choices(functions, kernels.Functions, "--functions") for one in layers],
        choices(passes, Pass, "--passes"),
        *forms(dtypes, layouts),
        architectures(arch),
    )
    try:
        compiler_version()
    except UnsupportedError as failure:  # said before everything is planned
        console.print(str(failure), style="bold red", markup=False)
        raise typer.Exit(1) from None
    wanted = kernels.wanted(*asked, jobs)
    if variants:
        wanted = kernels.one_of_each_variant(wanted)
    progress, compiled = make_console(stderr=True), kernels.compile_all(wanted, jobs)
    reports = [*track(compiled, f"{len(wanted)} kernels", len(wanted), console=progress, transient=True)]

    console.print(kernels.every_table(reports) if every else kernels.table(reports))
    faulty = [report for report in reports if not report.clean]
    if faulty and not every:
        console.print(kernels.every_table(faulty, title="Not clean"))
    for report in faulty:
        for line in report.messages:
            console.print(f"{report.wanted.title}: {line}", style="bold red", markup=False)
    if csv is not None:
        kernels.write_csv(csv, reports)
        console.print(f"written to {csv}", markup=False)
    if digests is not None:
        kernels.write_digests(digests, reports)
        console.print(f"digests written to {digests}", markup=False)
    console.print(f"{len(reports) - len(faulty)} of {len(reports)} kernels are clean")
    if faulty:
        raise typer.Exit(1)
