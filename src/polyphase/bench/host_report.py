"""The host's time per call and first calls, as tables for people."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from polyphase.bench.environment import device_name
from polyphase.bench.host import SMALL, first_calls, warm_calls
from polyphase.bench.host_layers import SITUATIONS, HostRecord, measure, write_csv
from polyphase.bench.report import table_of, telling
from polyphase.jit.launcher import quiet


def show_host_times(console: Console, device: torch.device, csv: Path | None = None) -> None:
    """Measure and print what a call costs the host, warm and for the first time; warm ones of layers go to ``csv``."""
    with quiet(), telling("warm calls") as tell:  # what a thread compiled for later calls would be in the times
        warm = warm_calls(device, progress=lambda name: tell(f"warm calls: {name}"))
        records = measure(device, lambda name: tell(f"warm calls: {name}"))
    if csv is not None:
        write_csv(csv, records, device)
    title = f"Host time of a warm call, µs ({device_name(device.type)})"
    table = table_of(title, ("what",), ("polyphase", "PyTorch"))
    for time in warm:
        table.add_row(time.what, f"{time.ours:.1f}", f"{time.torch:.1f}")
    console.print(table)
    console.print(f"the layer is {SMALL}: the GPU is done before the next call", style="dim")
    console.print(_layers(records, device))
    if csv is not None:
        console.print(f"written to {csv}", markup=False)

    with telling("first calls") as tell:
        first = first_calls(device, lambda cache: tell(f"first calls, in a new process: {cache} kernel cache"))
    figures = ("importing polyphase", "starting the device", "first layer", "second layer", "PyTorch's first layer")
    table = table_of("First calls in a fresh process, ms", ("kernel cache",), figures)
    for found in first:
        table.add_row(
            found.cache,
            *(f"{1e3 * value:.1f}" for value in (found.package, found.device, found.first, found.second, found.torch)),
        )
    console.print(table)


def _layers(records: list[HostRecord], device: torch.device) -> Table:
    """A row for each layer: polyphase's time, PyTorch's, and polyphase's launches in each situation."""
    title = f"Host time of a warm call of a function, µs: polyphase, PyTorch ({device_name(device.type)})"
    table = table_of(title, ("layer",), [name for situation in SITUATIONS for name in (situation, "launches")])
    rows: dict[str, list[str]] = {}
    for record in records:
        row = rows.setdefault(record.layer, [record.layer])
        row += [f"{record.polyphase_us:.1f}, {record.torch_us:.1f}", str(record.launches or "")]
    for row in rows.values():
        table.add_row(*row)
    medians = ["median"]
    for situation in SITUATIONS:
        of_situation = [record for record in records if record.situation == situation]
        ours = statistics.median(record.polyphase_us for record in of_situation)
        theirs = statistics.median(record.torch_us for record in of_situation)
        medians += [f"{ours:.1f}, {theirs:.1f}", ""]
    table.add_row(*medians)
    return table
