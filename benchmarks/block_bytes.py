"""Bytes that fused blocks move to and from the GPU's memory, as its counters see them, beside what they must.

    PYTHONPATH=src python benchmarks/block_bytes.py             # writes benchmarks/results/block-bytes.csv

Each block of `blocks.py` runs fused, in inference, under Nsight Compute (``ncu``, which must be on the PATH and
allowed to read counters). It empties the caches before each kernel. The sums over a call's kernels are compared with
inputs, outputs and weights once. What a kernel leaves in L2 at its end is not counted, so blocks are chosen whose
outputs are many times as large.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from blocks import BLOCKS, contestants, least_bytes
from shared import ROOT, operands, write

from polyphase.bench.report import make_console
from polyphase.jit.launcher import quiet

CHOSEN = ("KernelBench 2-2", "KernelBench 2-16", "KernelBench 2-20", "KernelBench 2-49", "KernelBench 2-93",
          "U-Net up, batch 16", "SAM upscaling, batch 16")  # fmt: skip
_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


@dataclass
class Row:
    """A block in one dtype. ``over``: megabytes moved beside inputs, outputs and weights once."""

    block: str
    dtype: str
    kernels: str
    megabytes: float
    read_megabytes: float
    written_megabytes: float
    over: float


def moved(name: str, dtype: torch.dtype) -> float:
    """Megabytes of a block's inputs, output and weights."""
    model, inputs = contestants(BLOCKS[name], dtype)["torch"], operands(BLOCKS[name].inputs, dtype)
    with torch.inference_mode():
        return 1e-6 * least_bytes(model, inputs, model(*inputs))


def run(name: str, dtype: torch.dtype) -> None:
    """One call of a fused block between the profiler's start and stop, and two calls before."""
    model, inputs = contestants(BLOCKS[name], dtype)["fused"], operands(BLOCKS[name].inputs, dtype)
    with torch.inference_mode(), quiet():
        for _ in range(2):
            model(*inputs)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        model(*inputs)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def counted(name: str, dtype: str) -> Row:
    """A block's row, by a process of its own under ``ncu``."""
    command = f"ncu --csv --metrics {','.join(_METRICS)} --profile-from-start off --clock-control none".split()
    done = subprocess.run(
        [*command, sys.executable, __file__, "--block", name, "--dtypes", dtype], capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    header = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or header is None:
        raise RuntimeError(f"ncu: {(done.stderr + done.stdout).strip()[-500:]}")
    found = list(csv.DictReader(io.StringIO("\n".join(lines[header:]))))
    read, written = (
        1e-6 * sum(float(each["Metric Value"].replace(",", "")) * _UNITS[each["Metric Unit"]]
                   for each in found if each["Metric Name"] == metric) for metric in _METRICS)  # fmt: skip
    wanted = moved(name, getattr(torch, dtype))
    kernels = [each["Kernel Name"].partition("(")[0] for each in found if each["Metric Name"] == _METRICS[0]]
    return Row(name, dtype, " ".join(kernels), wanted, read, written, (read + written) / wanted)


def main(
    csv_path: Annotated[Path, typer.Option("--csv")] = ROOT / "benchmarks" / "results" / "block-bytes.csv",
    only: Annotated[str, typer.Option(help="Blocks, separated by semicolons.")] = ";".join(CHOSEN),
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    block: Annotated[str, typer.Option(help="Run one block once; for ncu.")] = "",
) -> None:
    """Count."""
    if block:
        run(block, getattr(torch, dtypes))
        return
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        raise typer.BadParameter("bytes are counted by Nsight Compute (ncu) on an NVIDIA GPU; one of both is not found")
    rows, console = list[Row](), make_console()
    for name in only.split(";"):
        for dtype in dtypes.split(","):
            rows.append(counted(name, dtype))
            console.print(str(rows[-1]), markup=False)
            write(csv_path, rows)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
