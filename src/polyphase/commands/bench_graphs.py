"""``bench --random`` and ``bench --graphs``: many layers in all passes, by GPU time alone."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from polyphase.bench.layers import NamedLayer
    from polyphase.bench.records import Record

_WORST = 12  # layers that are named
_TOGETHER = 32  # layers whose kernels are compiled together: enough of them for every core


def sweep(
    console: Console,
    place: torch.device,
    layers: Sequence[NamedLayer],
    dtypes: Sequence[str],
    channels_last: Sequence[bool],
    strict_fp32: bool,
    *,
    seed: int | None,
    seconds: float | None,
    csv: Path | None,
    resume: bool,
) -> list[Record]:
    """Compile, check and time layers in each dtype and layout, and write their rows as they come. Returns all of them.

    No layer is begun after ``seconds``. An interruption ends the measurements, and what there is is returned. With
    ``resume`` the rows that ``csv`` has are kept, and their layers are not measured again.
    """
    from polyphase.bench.plans import problems
    from polyphase.bench.records import read_csv, write_csv
    from polyphase.bench.report import make_console
    from polyphase.bench.sweep import Sweep

    started = time.monotonic()
    records = read_csv(csv) if resume and csv is not None and csv.exists() else []
    done = {(record.layer, record.dtype, record.layout == "channels_last") for record in records}
    wanted = [
        each
        for each in problems(layers, dtypes, channels_last, strict_fp32)
        if (each.name, each.problem.dtype, each.problem.channels_last) not in done
    ]
    progress = make_console(stderr=True)
    try:
        with closing(Sweep(place, dtypes, strict_fp32)) as runner, closing(_compiled(wanted, place)) as layers_ready:
            for index, layer in enumerate(layers_ready):
                passed = time.monotonic() - started
                if seconds is not None and passed > seconds:
                    console.print(f"{len(wanted) - index} of {len(wanted)} were left out: {seconds:.0f} s are over")
                    break
                records += runner.run(layer, seed)
                if csv is not None:
                    write_csv(csv, records)  # after every layer: a run that is cut short leaves what it has
                if progress.is_terminal or index % 16 == 15:
                    progress.print(f"{index + 1} of {len(wanted)} measured after {time.monotonic() - started:.0f} s")
    except KeyboardInterrupt:
        console.print("interrupted", style="bold red")
    return records


def tell(console: Console, records: Sequence[Record]) -> None:
    """Print what was measured. The exit status is 1 if a pass is wrong or failed, or nothing was measured."""
    from polyphase.bench.report import notes
    from polyphase.bench.sweep_report import summary_table, worst_tables

    for note in notes(records):
        console.print(note)
    for table in worst_tables(records, _WORST):
        console.print(table)
    for facts in dict.fromkeys((record.gpu, record.torch, record.cudnn, record.commit) for record in records):
        console.print("{}, torch {}, cuDNN {}, commit {}".format(*facts), markup=False)
    console.print(summary_table(records))
    if not records or not all(record.good for record in records):
        raise typer.Exit(1)


def _compiled(layers: Sequence[NamedLayer], place: torch.device) -> Generator[NamedLayer, None, None]:
    """The layers, each when its kernels are on disk. Those of the next `_TOGETHER` are compiled meanwhile.

    What is timed is GPU time alone, so that compilers beside it cost it nothing.
    """
    if place.type != "cuda":
        yield from layers
        return
    parts = [layers[first : first + _TOGETHER] for first in range(0, len(layers), _TOGETHER)]
    with ThreadPoolExecutor(1) as ahead:
        compiled = [ahead.submit(_compile, part, place) for part in parts[:1]]
        for number, part in enumerate(parts):
            compiled.pop().result()
            compiled += [ahead.submit(_compile, part, place) for part in parts[number + 1 : number + 2]]
            yield from part


def _compile(layers: Sequence[NamedLayer], place: torch.device) -> None:
    """Has the kernels of all layers on disk."""
    from polyphase.bench.sweep import sources
    from polyphase.jit.ahead import compile_ahead
    from polyphase.problem.device import DeviceInfo

    info = DeviceInfo.of(place)
    compile_ahead([source for some in sources(layers, info, os.cpu_count() or 1) for source in some], info.arch)
