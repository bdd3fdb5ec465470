"""Times candidates for gradients of long kernels and narrow groups, beside PyTorch, whose result each is compared to.

python benchmarks/experiments/010-long-kernels/long.py --csv long.csv
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.timing import Timer
from polyphase.jit.launcher import Executable
from polyphase.plan import planner
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.schedules.schedule import Candidate

LAYERS = {
    "8x8x5153 -> 8, k=2048, s=512, p=768, g=2": "w",
    "8x64x16 -> 256, k=2048, s=1024, g=4": "w",
    "16x256x64 -> 512, k=128, s=128, g=256": "wd",
    "1x2x4096 -> 768, k=40, s=20": "w",
    "16x64x500 -> 64, k=16, s=16, g=64": "wd",
    "4x128x1000 -> 128, k=64, s=32, p=16, g=128": "wd",
    "4x32x1000 -> 32, k=320, s=160, g=4": "wd",
    "32x8x200 -> 4, k=256, s=64": "w",
    "2x21x16x16 -> 21, k=64, s=32, p=16": "w",
    "4x48x3000 -> 24, k=16, s=8, p=4": "w",
    "2x8x20000 -> 8, k=27, s=9, g=2": "wd",
    "2x16x16x16x16 -> 16, k=8, s=8, g=16": "wd",
    "2x512x50 -> 1, k=400, s=200": "w",
    "8x16x2000 -> 2, k=512, s=32, p=240": "w",
    "4x64x16x16 -> 16, k=16, s=16": "w",
    "2x128x500 -> 32, k=64, s=32, p=16": "w",
}
PASSES = {"d": Pass.INPUT_GRAD, "w": Pass.WEIGHT_GRAD}
SHOWN = {"direct_wgrad_long": 6, "dot_dgrad": 2}  # candidates of a schedule; one of others
GPU = torch.device("cuda", 0)
Job = tuple[str, str, str]


def problem_of(job: Job) -> ConvTransposeProblem:
    return replace(parse_layer(job[0]), dtype=job[2], tf32=job[2] == "float32")


def candidates(job: Job, info: DeviceInfo) -> list[tuple[Candidate, Program]]:
    """The first of each schedule by forecast, but for hopeless ones."""
    found: dict[str, list[tuple[Candidate, Program]]] = {}
    for candidate, program in planner.programs(problem_of(job), PASSES[job[1]], info):
        found.setdefault(candidate.schedule, []).append((candidate, program))
    least = min(candidate.seconds for each in found.values() for candidate, _ in each)
    first = []
    for name, some in found.items():
        first += sorted(some, key=lambda each: each[0].seconds)[: SHOWN.get(name, 1)]
    return [each for each in first if each[0].seconds < 20 * least]


def executable(program: Program, info: DeviceInfo) -> tuple[Executable, list[str]]:
    names = list(dict.fromkeys(name for step in program.steps for name in step.operands))
    return Executable(program, info.arch, 0, {name: place for place, name in enumerate(names)}), names


def compile_all(job: Job) -> None:
    info = DeviceInfo.of(GPU)
    for _, program in candidates(job, info):
        executable(program, info)


def rows_of(job: Job, info: DeviceInfo, timer: Timer) -> list[list[str]]:
    problem, pass_ = problem_of(job), PASSES[job[1]]
    operands = make_operands(problem, GPU)
    reference = torch_call(problem, pass_, operands)
    torch_ms, wanted = timer.measure(reference).ms, reference().double()
    result = torch.empty_like(wanted, dtype=operands.input.dtype)
    known = {"x": operands.input, "grad": operands.grad_output, "src": operands.grad_output, "dst": result}
    known["weight"] = operands.weight
    rows = []
    for candidate, program in candidates(job, info):
        room = {b.name: torch.empty(max(1, b.bytes), device=GPU, dtype=torch.uint8) for b in program.buffers}
        run, names = executable(program, info)
        found = {**known, **room}
        addresses = [found[name].data_ptr() if name in found else 0 for name in names]
        stream = torch.cuda.current_stream().cuda_stream
        result.fill_(float("nan"))
        run(stream, addresses)
        error = ((result.double() - wanted).norm() / wanted.norm()).item()
        ms = timer.measure(partial(run, stream, addresses)).ms
        forecast = f"{candidate.seconds * 1e3:.4f}"
        rows.append([*job, candidate.describe(), f"{ms:.4f}", forecast, f"{torch_ms:.4f}", f"{error:.2e}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    path = parser.parse_args().csv
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    jobs = [(layer, each, dtype) for layer in LAYERS for each in LAYERS[layer] for dtype in ("float32", "bfloat16")]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, jobs))
    info, timer = DeviceInfo.of(GPU), Timer(GPU, repetitions=7)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["layer", "pass", "dtype", "candidate", "ms", "predicted_ms", "torch_ms", "error_to_torch"])
        for job in jobs:
            writer.writerows(rows_of(job, info, timer))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
