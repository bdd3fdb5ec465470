"""Times layers of small images by what is planned, and by the best of each kernel that may compute them.

    python benchmarks/experiments/019-taps-that-meet-nothing/taps.py --csv taps.csv

``--role before`` times the plan alone, of the package that PYTHONPATH names.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ["POLYPHASE_TUNING"] = "0"  # before the planner is loaded: no rankings of disk

import torch

from polyphase.bench.contestants import TorchVariant, torch_call, torch_flags
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.oracle import sample
from polyphase.bench.timing import Timer
from polyphase.jit.compiler import compile_kernel
from polyphase.jit.launcher import Executable
from polyphase.plan import planner
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import H200
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.schedules.schedule import Candidate

# Small images, many taps; then layers in which no tap, or hardly any, can be left out.
LAYERS = (
    "6x512x4x4x4 -> 256, k=9, s=2, p=1, bias",
    "64x1024x4x4 -> 768, k=9, s=3, op=2, bias",
    "32x256x8x8x8 -> 128, k=4, bias",
    "64x96x10x4x8 -> 128, k=5, g=4",
    "8x1024x16x16 -> 512, k=9, s=2, op=1, bias",
    "64x256x8x8x8 -> 256, k=8, s=2, p=3, g=8",
    "8x768x3x3x3 -> 320, k=9, s=2, p=4",
    "1x1024x8x8x8 -> 512, k=5, p=2",
    "6x320x4x4x4 -> 320, k=8, s=6, p=1, op=1",
    "64x12x15x15x15 -> 96, k=5, s=2",
    "1x257x31x32x37 -> 128, k=4, s=2, p=1, bias",
    "1x384x144x224 -> 192, k=9, s=2, p=4",
    "8x1024x10485 -> 512, k=3, s=4, op=3",
    "16x192x16x16x16 -> 96, k=(3, 4, 4), p=(0, 2, 2), bias",
)
KERNELS = ("tap_gemm_tma", "col2im", "col2im_tma")  # timed beside the plan
GPU = torch.device("cuda", 0)


class Case(NamedTuple):
    """A layer that a program computes; ``role``: before, the plan, or another."""

    problem: ConvTransposeProblem
    role: str
    candidate: Candidate
    program: Program


def prepare(problem: ConvTransposeProblem, role: str) -> list[Case]:
    """The plan of a layer, and behind it the best of each of `KERNELS`."""
    info = DeviceInfo.of(GPU)
    chosen = planner.plan(problem, Pass.FORWARD, info, by_prediction=True)
    assert chosen.candidate is not None
    assert chosen.program is not None
    found = [Case(problem, role, chosen.candidate, chosen.program)]
    if role == "before":
        return found
    offered = planner.programs(problem, Pass.FORWARD, info)
    for kernel in KERNELS:
        best = min(
            (each for each in offered if each[0].schedule == kernel), key=lambda each: each[0].seconds, default=None
        )
        if best is not None and best[0] != chosen.candidate:
            found.append(Case(problem, "another", *best))
    return found


def rows_of(every: list[Case], timer: Timer, searches: bool) -> Iterator[list[str]]:
    """What each case takes, beside float64 and PyTorch: its heuristics, or its search."""
    problem = every[0].problem
    operands = make_operands(problem, GPU)
    exact = sample(problem, Pass.FORWARD, operands, 4e9)
    with torch_flags(TorchVariant.BENCHMARK if searches else TorchVariant.DEFAULT, False):
        call = torch_call(problem, Pass.FORWARD, operands)
        wanted = call()
        torch_ms = timer.measure(call).ms
    result = torch.empty_like(wanted)
    known = {"x": operands.input, "src": operands.input, "weight": operands.weight, "dst": result}
    if operands.bias is not None:
        known["bias"] = operands.bias
    stream = torch.cuda.current_stream().cuda_stream
    for case in every:
        program = case.program
        names = list(dict.fromkeys(itertools.chain.from_iterable(step.operands for step in program.steps)))
        run = Executable(program, DeviceInfo.of(GPU).arch, 0, {name: place for place, name in enumerate(names)})
        room = {b.name: torch.empty(max(1, b.bytes), device=GPU, dtype=torch.uint8) for b in program.buffers}
        found = {**known, **room}
        addresses = [found[name].data_ptr() if name in found else 0 for name in names]
        result.fill_(float("nan"))
        run(stream, addresses)
        comparison = exact.compare(result, wanted)
        ms = timer.measure(partial(run, stream, addresses)).ms
        yield [
            *(f"{problem}", problem.dtype, case.role, case.candidate.describe()),
            *(f"{1e3 * case.candidate.seconds:.4f}", f"{ms:.4f}", f"{torch_ms:.4f}", f"{H200.floor_ms(problem):.4f}"),
            *(f"{comparison.ok}", f"{bool(result.isfinite().all())}"),
        ]


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--role", choices=("before", "plan"), default="plan")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--searches", action="store_true", help="PyTorch in its benchmark mode")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--processes", type=int, default=15)
    given = parser.parse_args()
    began, info = time.monotonic(), DeviceInfo.of(GPU)
    problems = [
        replace(parse_layer(text), dtype=dtype, tf32=dtype == "float32", tf32_as_pytorch=dtype == "float32")
        for text in LAYERS
        for dtype in given.dtypes.split(",")
    ]
    with ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        prepared = list(pool.map(partial(prepare, role=given.role), problems))
        sources = {source for cases in prepared for case in cases for source in case.program.sources}
        list(pool.map(partial(compile_kernel, arch=info.arch), sources))
    print(f"{len(sources)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    timer, began = Timer(GPU, repetitions=7), time.monotonic()
    with given.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = "layer dtype role config predicted_ms ms torch_ms floor_ms ok finite"
        writer.writerow(head.split())
        for every in prepared:
            if time.monotonic() - began > given.seconds:
                break
            for row in rows_of(every, timer, given.searches):
                writer.writerow(row)
                print(*row, sep=", ", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
