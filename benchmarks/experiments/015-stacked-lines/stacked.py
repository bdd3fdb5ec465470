"""Times forward passes of few output channels with lines that share row blocks, and without, beside PyTorch.

python benchmarks/experiments/015-stacked-lines/stacked.py --csv stacked.csv
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
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
from polyphase.jit.source import KernelSource
from polyphase.plan import planner, shortlist
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import H200
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.schedules.implicit_gemm import search
from polyphase.schedules.implicit_gemm.config import Taps

LAYERS = (
    "8x64x512x512 -> 32, k=8, s=4, p=2",
    "4x24x288x512 -> 32, k=16, s=8, p=4",
    "16x320x256x256 -> 32, k=5, s=2, p=2, op=1",
    "16x64x256x256 -> 32, k=4, s=2, p=1",
    "16x64x256x256 -> 32, k=3, s=2, p=1, op=1, bias",
    "8x128x128x128 -> 16, k=4, s=2, p=1",
    "2x64x64x64x64 -> 32, k=4, s=2, p=1",
    "2x64x64x64x64 -> 16, k=3, s=2, p=1, op=1",
    "16x128x64x64 -> 64, k=4, s=2, p=1, g=4",
    "8x128x96x96 -> 16, k=6, s=3, p=1",
    "32x512x16x16 -> 32, k=4, s=2, p=1",
    "16x64x256x256 -> 32, k=2, s=2",
    "32x256x160x160 -> 12, k=5, s=2",
)
LAST = ("8x64x512x512 -> 32, k=8, s=4, p=2", "16x64x256x256 -> 32, k=3, s=2, p=1, op=1, bias")
FURTHER = 1  # configs of each case beside the planner's choice, for the cost model
GPU = torch.device("cuda", 0)


class Case(NamedTuple):
    """A layer that a program computes; ``role``: the planner's choice with stacked lines or without, or another."""

    problem: ConvTransposeProblem
    role: str
    config: str
    predicted_ms: float
    program: Program


@contextmanager
def stacked(may: bool) -> Iterator[None]:
    """Whether lines may share row blocks."""
    before = Taps.may_stack
    if not may:
        Taps.may_stack = lambda self, count: False  # type: ignore[method-assign]
    for forget in (
        planner.plan.cache_clear,
        planner._ranked.cache_clear,
        search._members.cache_clear,
        shortlist.forget,
    ):
        forget()
    try:
        yield
    finally:
        Taps.may_stack = before  # type: ignore[method-assign]


def cases(problem: ConvTransposeProblem) -> list[Case]:
    """Both choices, and further configs with stacked lines."""
    info, found = DeviceInfo.of(GPU), []
    for may in (False, True):
        with stacked(may):
            chosen = planner.plan(problem, Pass.FORWARD, info, by_prediction=True)
            assert chosen.candidate is not None
            assert chosen.program is not None
            offers = [("choice", chosen.candidate, chosen.program)]
            if may:
                others = planner.programs(problem, Pass.FORWARD, info)
                others = [each for each in others if getattr(each[0].config, "stacked", 1) > 1]
                ranked = sorted(others, key=lambda each: each[0].seconds)
                offers += [("another", *each) for each in ranked if each[0] != chosen.candidate][:FURTHER]
            for role, candidate, program in offers:
                if program.main.one_way is not None:
                    program = program.with_main(replace(program.main, source=program.main.one_way))
                role = role if may else "before"
                found.append(Case(problem, role, candidate.describe(), candidate.seconds * 1e3, program))
    return found


def prepare(problem: ConvTransposeProblem) -> tuple[list[Case], list[KernelSource]]:
    """What is timed of a layer, and its kernels."""
    found = cases(problem)
    return found, [source for case in found for source in case.program.sources]


def rows_of(every: list[Case], timer: Timer) -> Iterator[list[str]]:
    """What each case takes, beside float64 and PyTorch."""
    problem = every[0].problem
    operands = make_operands(problem, GPU)
    exact = sample(problem, Pass.FORWARD, operands, 4e9)
    call = torch_call(problem, Pass.FORWARD, operands)
    wanted = call()
    torch_ms = timer.measure(call).ms
    floor_ms = H200.floor_ms(problem)
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
        order = "channels_last" if problem.channels_last else "nchw"
        yield [
            *(f"{problem}", problem.dtype, order, case.role, case.config, f"{case.predicted_ms:.4f}", f"{ms:.4f}"),
            *(f"{torch_ms:.4f}", f"{floor_ms:.4f}", str(comparison.ok), f"{bool(result.isfinite().all())}"),
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--processes", type=int, default=15)
    given = parser.parse_args()
    began, info = time.monotonic(), DeviceInfo.of(GPU)
    layers = [(parse_layer(text), last) for text, last in [*((t, False) for t in LAYERS), *((t, True) for t in LAST)]]
    problems = [
        replace(layer, dtype=dtype, tf32=dtype == "float32", tf32_as_pytorch=dtype == "float32", channels_last=last)
        for layer, last in layers
        for dtype in ("float32", "bfloat16")
    ]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, mp_context=spawn) as pool:
        prepared = list(pool.map(prepare, problems))
        print(f"planned in {time.monotonic() - began:.0f} s", flush=True)
        sources = list(dict.fromkeys(source for _, several in prepared for source in several))
        list(pool.map(partial(compile_kernel, arch=info.arch), sources))
    print(f"{len(sources)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    timer, began = Timer(GPU, repetitions=7), time.monotonic()
    with open(given.csv, "w", newline="", encoding="utf-8") as file, torch_flags(TorchVariant.DEFAULT, False):
        writer = csv.writer(file)
        head = "layer dtype layout role config predicted_ms ms torch_ms floor_ms ok finite"
        writer.writerow(head.split())
        for every, _ in prepared:
            if time.monotonic() - began > given.seconds:
                break
            for row in rows_of(every, timer):
                writer.writerow(row)
                print(*row, sep=", ", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
