"""The host's time per call and first calls, as tables for people."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from polyphase.bench.environment import device_name
from polyphase.bench.host import SMALL, first_calls, warm_calls


def show_host_times(console: Console, device: torch.device) -> None:
    """Measure and print what a call costs the host, warm and for the first time."""
    with console.status("warm calls"):
        warm = warm_calls(device)
    table = Table(title=f"Host time of a warm call, µs ({device_name(device.type)})", title_justify="left")
    table.add_column("what")
    for name in ("polyphase", "PyTorch"):
        table.add_column(name, justify="right")
    for time in warm:
        table.add_row(time.what, f"{time.ours:.1f}", f"{time.torch:.1f}")
    console.print(table)
    console.print(f"the layer is {SMALL}: the GPU is done before the next call", style="dim")

    with console.status("first calls, in fresh processes"):
        first = first_calls(device)
    table = Table(title="First calls in a fresh process, ms", title_justify="left")
    table.add_column("kernel cache")
    for name in ("importing polyphase", "starting the device", "first layer", "second layer", "PyTorch's first layer"):
        table.add_column(name, justify="right")
    for found in first:
        table.add_row(
            found.cache,
            *(f"{1e3 * value:.1f}" for value in (found.package, found.device, found.first, found.second, found.torch)),
        )
    console.print(table)
