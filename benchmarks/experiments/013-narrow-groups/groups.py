"""Times forward passes and input gradients of narrow groups: ``python groups.py --csv FILE``. Needs a GPU.

Of each layer the two best other schedules by forecast, and the configs of `grouped_gemm_window` with the least
forecasts, whose results are compared with the first's.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import MEMORY_FORMATS, make_operands
from polyphase.bench.timing import Timer
from polyphase.jit.compiler import compile_kernel
from polyphase.jit.launcher import Executable
from polyphase.plan import planner
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, SRC, WEIGHT
from polyphase.schedules.grouped_gemm.window import GroupedGemmWindow
from polyphase.schedules.schedule import Candidate

LAYERS = """
128x128x30x30x30 -> 24, k=3, p=1, g=8                       | bfloat16
128x256x12x12x12 -> 256, k=4, g=16                          | bfloat16
128x96x195x195 -> 96, k=5, g=4                              | bfloat16
2x512x48x48x48 -> 512, k=(3,4,4), s=(1,2,2), g=32           | bfloat16
8x32x12x24x48 -> 32, k=(3,5,7), s=2, g=4                    | bfloat16
16x128x56x56 -> 128, k=3, p=1, g=32                         | bfloat16 bfloat16,last
32x64x64x64 -> 64, k=4, s=2, p=1, g=8                       | bfloat16 bfloat16,last
16x64x20000 -> 32, k=9, p=4, g=8                            | bfloat16
16x32x128x256 -> 64, k=(3,5), s=(2,3), p=(1,2), d=(2,1), g=4 | bfloat16
8x32x24x24x24 -> 64, k=3, s=2, p=1, op=1, g=16              | bfloat16
"""
CONFIGS = 6  # of the window kernel
Case = tuple[ConvTransposeProblem, Pass]


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400, help="no layer is begun after so many")
    options = parser.parse_args()
    start, place = time.monotonic(), torch.device("cuda", 0)
    device = DeviceInfo.of(place)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool, options.csv.open("w", newline="") as file:
        every = list(cases())
        found = pool.map(offers, every, [device] * len(every))
        writer, timer = csv.writer(file), Timer(place, 7, 0.1)
        writer.writerow(["gpu", "layer", "pass", "floor_us", "config", "error", "forecast_us", "measured_us"])
        for (problem, pass_), programs in zip(every, found):
            print(f"{time.monotonic() - start:.0f} s", flush=True)
            if time.monotonic() - start > options.seconds:
                break
            for row in rows(timer, problem, pass_, programs, device):
                floor = f"{1e6 * problem.bytes / device.copy_bytes_per_second:.1f}"
                writer.writerow([torch.cuda.get_device_name(), problem, pass_.value, floor, *row])
                print(problem, pass_.value, floor, *row, sep=" | ", flush=True)
            file.flush()


def cases() -> Iterator[Case]:
    """The layers in their dtypes and formats, forward passes and input gradients."""
    for line in LAYERS.strip().splitlines():
        layer, settings = line.split("|")
        for each in settings.split():
            dtype, _, last = each.partition(",")
            problem = replace(parse_layer(layer.strip()), dtype=dtype, channels_last=bool(last))
            yield problem, Pass.FORWARD
            yield problem, Pass.INPUT_GRAD


def offers(case: Case, device: DeviceInfo) -> list[tuple[Candidate, Program]]:
    """What is measured of a case, compiled."""
    problem, pass_ = case
    others: dict[str, tuple[Candidate, Program]] = {}
    for candidate, program in planner.programs(problem, pass_, device):
        before = others.get(candidate.schedule)
        if before is None or candidate.seconds < before[0].seconds:
            others[candidate.schedule] = candidate, program
    window, layouts = GroupedGemmWindow(), Layouts.dense(problem)
    others.pop(window.name, None)
    found = sorted(others.values(), key=lambda each: each[0].seconds)[:2]
    costs = {
        config: window.cost(problem, pass_, device, layouts, config)
        for config in window.configs(problem, pass_, device)
    }
    ranked = sorted((cost[0], config) for config, cost in costs.items() if cost is not None)
    for seconds, config in ranked[:CONFIGS]:
        program = window.program(problem, pass_, device, layouts, config)
        found.append((Candidate(window.name, config, seconds, ""), program))
    for _, program in found:
        for source in program.sources:
            compile_kernel(source, device.arch)
    return found


def rows(
    timer: Timer,
    problem: ConvTransposeProblem,
    pass_: Pass,
    programs: list[tuple[Candidate, Program]],
    device: DeviceInfo,
) -> Iterator[tuple[str, ...]]:
    """Of a case: config, error beside the first's result, microseconds foretold and measured."""
    operands, forward, first = make_operands(problem, timer.device), pass_ is Pass.FORWARD, None
    read = operands.input if forward else operands.grad_output
    result = torch.empty(
        problem.output_shape if forward else problem.input_shape, device=timer.device, dtype=read.dtype
    )
    if problem.channels_last:
        result = result.contiguous(memory_format=MEMORY_FORMATS[result.dim()])
    for candidate, program in programs:
        result.fill_(torch.nan)
        tensors = {SRC: read, WEIGHT: operands.weight, BIAS: operands.bias if forward else None, DST: result}
        for each in program.buffers:
            tensors[each.name] = torch.empty(each.bytes, device=timer.device, dtype=torch.uint8)
        places = {name: place for place, name in enumerate(tensors)}
        addresses = [0 if each is None else each.data_ptr() for each in tensors.values()]
        stream, executable = torch.cuda.current_stream().cuda_stream, Executable(program, device.arch, 0, places)
        measured = 1e3 * timer.measure(lambda: executable(stream, addresses)).ms  # noqa: B023
        first = result.clone() if first is None else first
        error = float((result - first).abs().max() / first.abs().max())
        yield candidate.describe(), f"{error:.1e}", f"{candidate.seconds * 1e6:.1f}", f"{measured:.1f}"


if __name__ == "__main__":
    main()
