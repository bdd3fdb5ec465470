"""Times forward passes of few output channels by each schedule, and col2im's steps: ``python col2im.py --csv FILE``.

Of each layer the best config by forecast of every schedule that is not hopeless, two of col2im, and PyTorch in
benchmark mode, with which results are compared. Needs a GPU.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import MEMORY_FORMATS, make_operands
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan import planner
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, SRC, WEIGHT
from polyphase.schedules.schedule import Candidate

LAYERS = """
12x320x40x16x30 -> 12, k=3, s=3, bias                | float32 bfloat16
8x320x48x48x48 -> 1, k=4, s=2, p=1, bias             | float32 bfloat16
1x1025x400 -> 1, k=2048, s=512, p=768                | float32 bfloat16
4x768x16x16x16 -> 3, k=7, s=2, bias                  | float32 bfloat16 float32,last
1x150x33x33x33 -> 16, k=5, p=2, bias                 | float32 bfloat16
128x64x26x26x26 -> 8, k=2, s=2                       | float32
8x256x64x64 -> 1, k=9, s=4, p=4, op=3                | float32 bfloat16
2x256x64x64 -> 21, k=16, s=8, p=4                    | float32 bfloat16,last
4x128x32x32x32 -> 4, k=4, s=2, p=1                   | float32 bfloat16,last
16x64x128x128 -> 3, k=4, s=2, p=1                    | float32
2x512x28x28 -> 32, k=11, s=5, p=3                    | float32,last bfloat16
8x1025x400 -> 1, k=1024, s=256                       | float32
16x96x60x60 -> 48, k=8, s=4, p=2, g=2                | float32
1x512x10229 -> 512, k=32, s=32                       | float32
"""
HOPELESS = 2.5  # times the least forecast


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400, help="no layer is begun after so many")
    options = parser.parse_args()
    start, place = time.monotonic(), torch.device("cuda", 0)
    device, timer = DeviceInfo.of(place), Timer(place, 9, 0.1)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    found = {problem: candidates(problem, device) for problem in problems()}
    print(f"{time.monotonic() - start:.0f} s planned", flush=True)
    every = [source for each in found.values() for _, program in each for source in program.sources]
    compile_ahead(every, device.arch)
    print(f"{time.monotonic() - start:.0f} s compiled {len(set(every))}", flush=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "layer", "config", "error", "forecast_us", "measured_us", "torch_us", "steps_us"])
        for problem, programs in found.items():
            if time.monotonic() - start > options.seconds:
                break
            for row in rows(timer, problem, programs, device):
                writer.writerow([torch.cuda.get_device_name(), problem, *row])
                print(problem, *row, sep=" | ", flush=True)
            file.flush()
            torch.cuda.empty_cache()


def problems() -> Iterator[ConvTransposeProblem]:
    """The layers in their dtypes and formats."""
    for line in LAYERS.strip().splitlines():
        layer, settings = line.split("|")
        for each in settings.split():
            dtype, _, last = each.partition(",")
            tf32 = dtype == "float32"
            yield replace(parse_layer(layer.strip()), dtype=dtype, tf32=tf32, channels_last=bool(last))


def candidates(problem: ConvTransposeProblem, device: DeviceInfo) -> list[tuple[Candidate, Program]]:
    """What is measured of a layer."""
    offered: dict[str, list[tuple[Candidate, Program]]] = {}
    for candidate, program in planner.programs(problem, Pass.FORWARD, device):
        offered.setdefault(candidate.schedule, []).append((candidate, program))
    least = min(candidate.seconds for each in offered.values() for candidate, _ in each)
    found = []
    for schedule, each in offered.items():
        each.sort(key=lambda pair: pair[0].seconds)
        found += [pair for pair in each[: 2 if schedule == "col2im" else 1] if pair[0].seconds < HOPELESS * least]
    return found


def rows(
    timer: Timer, problem: ConvTransposeProblem, programs: list[tuple[Candidate, Program]], device: DeviceInfo
) -> Iterator[tuple[str, ...]]:
    """Of a layer: config, error, microseconds foretold, measured, of PyTorch, and of each step alone."""
    operands = make_operands(problem, timer.device)
    reference = torch_call(problem, Pass.FORWARD, operands)
    exact, torch_us = reference().double(), 1e3 * timer.measure(reference).ms
    result = torch.empty(problem.output_shape, device=timer.device, dtype=operands.input.dtype)
    if problem.channels_last:
        result = result.contiguous(memory_format=MEMORY_FORMATS[result.dim()])
    for candidate, program in programs:
        tensors = {SRC: operands.input, WEIGHT: operands.weight, BIAS: operands.bias, DST: result.fill_(torch.nan)}
        for each in program.buffers:
            tensors[each.name] = torch.empty(each.bytes, device=timer.device, dtype=torch.uint8)
        places = {name: place for place, name in enumerate(tensors)}
        addresses = [0 if each is None else each.data_ptr() for each in tensors.values()]
        stream = torch.cuda.current_stream().cuda_stream

        def measured(steps: Program) -> float:
            executable = Executable(steps, device.arch, 0, places)  # noqa: B023
            return 1e3 * timer.measure(lambda: executable(stream, addresses)).ms  # noqa: B023

        us = measured(program)
        error = ((result.double() - exact).norm() / exact.norm()).item()
        alone = [
            f"{step.source.kernel} {measured(Program((replace(step, overlaps=False),))):.0f}"
            for step in program.steps
            if candidate.schedule.startswith("col2im")
        ]
        forecast = 1e6 * candidate.seconds
        yield candidate.describe(), f"{error:.1e}", f"{forecast:.1f}", f"{us:.1f}", f"{torch_us:.1f}", ", ".join(alone)


if __name__ == "__main__":
    main()
