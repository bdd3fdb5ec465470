"""The same problems by `torch.compile`, as CUDA graphs: ``python compiled.py --csv compiled.csv``. Needs a GPU.

Processes fill Inductor's cache first, as it takes seconds for each problem.
"""

from __future__ import annotations

import csv
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[2]))
from blocks import BLOCKS, built
from shared import graphed
from torch import Tensor

from polyphase.bench.timing import Timer

Job = tuple[str, str]


def model_of(job: Job) -> tuple[Callable[..., object], list[Tensor]]:
    """A compiled problem and its inputs."""
    dtype = getattr(torch, job[1])
    torch._dynamo.reset()
    model = torch.compile(built(BLOCKS[job[0]]).to("cuda", dtype), fullgraph=True)
    return model, [torch.randn(size, device="cuda", dtype=dtype) for size in BLOCKS[job[0]].inputs]


def fill(job: Job) -> None:
    """Compile a problem, for the cache."""
    with torch.inference_mode():
        model, inputs = model_of(job)
        model(*inputs)
    torch.cuda.synchronize()
    del model, inputs
    torch.cuda.empty_cache()


def main(csv_path: Annotated[Path, typer.Option("--csv")], seconds: float = 85.0) -> None:
    """Fill the cache, then time one problem after the other."""
    started = time.perf_counter()
    names = [name for name in BLOCKS if name.startswith("KernelBench")]
    jobs = [(name, dtype) for dtype in ("float32", "bfloat16") for name in names]
    with multiprocessing.get_context("spawn").Pool(10) as pool:
        pool.map_async(fill, jobs, 1).wait(70)
    timer = Timer(torch.device("cuda"), 12, 0.08)
    with csv_path.open("w") as file:
        table = csv.writer(file)
        table.writerow(["problem", "dtype", "compiled_ms"])
        for job in jobs:
            if time.perf_counter() - started < seconds:
                with torch.inference_mode():
                    ms = timer.measure(graphed(*model_of(job))).ms
                print(*job, ms, flush=True)
                table.writerow([*job, f"{ms:.6g}"])
                torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
