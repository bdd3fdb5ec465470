"""``plans``: every choice of the planner, one line each, in a file that `diff` compares with another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from polyphase.commands.options import LayerTexts, Seed, Suites, architectures, choices, forms, named_layers


def plans(
    csv: Annotated[Path, typer.Option(help="Write one line per plan here.", show_default=False)],
    arch: Annotated[
        str, typer.Option(help="Architectures, comma-separated, as the compiler calls them.")
    ] = "sm_80,sm_90a",
    suite: Suites = None,
    layer: LayerTexts = None,
    random: Annotated[
        int, typer.Option(min=0, help="Number of random layers, each in one of the dtypes and formats.")
    ] = 0,
    seed: Seed = 0,
    dtypes: Annotated[str, typer.Option(help="Dtypes, comma-separated.")] = "float32,bfloat16,float16,float64",
    layouts: Annotated[str, typer.Option(help="nchw, channels_last, or both.")] = "nchw,channels_last",
    passes: Annotated[str, typer.Option(help="Passes, comma-separated.")] = "forward,input_grad,weight_grad",
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Plan each as in a new process, and write the CPU seconds that it takes."),
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that plan.")] = os.cpu_count() or 1,
) -> None:
    """Write what the planner chooses for layers, without a GPU: algorithm, config, prediction, launch.

    Default: every layer of each suite. Float32 is planned with TF32 forbidden and allowed. Ignores tuning results and
    caches on disk. `diff` compares two such files.
    """
    from rich.progress import track

    from polyphase.bench import plans as planned
    from polyphase.bench.layers import every_layer
    from polyphase.bench.random_layers import random_layers
    from polyphase.bench.report import make_console
    from polyphase.problem import Pass

    console = make_console()
    layers = named_layers(layer, suite)
    cases = planned.cases(
        layers if layers or random else every_layer(),
        choices(passes, Pass, "--passes"),
        *forms(dtypes, layouts),
        architectures(arch),
        random_layers(random, seed),
        cold,
    )
    progress = make_console(stderr=True)
    told = track(planned.rows(cases, jobs), f"{len(cases)} problems", len(cases), console=progress, transient=True)
    found = [row for rows in told for row in rows]
    planned.write(csv, found)
    for name, (median, ninetieth, most) in planned.planning_seconds(found).items():
        text = f"a cold {name} plan takes {median:.3f} s in the median, {ninetieth:.3f} s at the 90th percentile"
        console.print(f"{text}, {most:.3f} s at most", markup=False)
    console.print(f"{len(found)} plans written to {csv}", markup=False)
