"""Times weight gradients by several schedules: ``python ways.py --csv FILE``; needs a Hopper GPU.

For each layer the two best schedules by forecast. All steps together, then each by itself, beside PyTorch's time in
benchmark mode and errors against float64. Results are NaN before.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import Operands, make_operands
from polyphase.bench.oracle import sample
from polyphase.bench.timing import Timer
from polyphase.errors import PolyphaseError
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan.planner import programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.program.step import DST, GRAD, X

# Which dtype, and the layer.
LAYERS = """
b 12x64x32x32 -> 768, k=3
b 8x256x12868 -> 256, k=3, s=2, p=1
b 8x100x171x128 -> 100, k=3
b 8x64x192x256 -> 64, k=4, s=2, p=1
b 16x32x128x256 -> 64, k=(3, 5), s=(2, 3), p=(1, 2), d=(2, 1), g=4
f 32x256x160x160 -> 12, k=5, s=2, p=2, op=1, g=4
b 128x256x2880 -> 256, k=5, p=2
b 64x512x8x8 -> 256, k=(1, 7), s=(1, 3), p=(0, 3)
b 4x64x128x128 -> 64, k=3, p=1
f 1x24x31x75x56 -> 24, k=3, g=8
b 16x32x128x256 -> 64, k=(3, 5), s=(2, 3), p=(1, 2), d=(2, 1)
b 8x192x128x128 -> 128, k=2, s=2
b 32x32x65536 -> 16, k=2, s=2
b 4x320x112x224 -> 96, k=4, s=2, p=1
b 8x256x64x64 -> 128, k=4, s=2, p=1
b 32x256x160x160 -> 12, k=5, s=2, p=2, op=1, g=4
b 128x128x8x8x8 -> 64, k=(1, 2, 2), s=(1, 2, 2)
b 8x150x64x16x32 -> 256, k=1
b 16x768x9x9x9 -> 384, k=(1, 4, 4), s=(1, 2, 2), p=(0, 1, 1)
b 16x512x5x23x23 -> 256, k=(5, 3, 3), s=(2, 3, 3), p=(2, 1, 1)
b 2x64x43x43x43 -> 64, k=7, s=2, p=3
"""
DTYPES = {"f": "float32", "b": "bfloat16"}
WEIGHT_GRAD, CHECKED = Pass.WEIGHT_GRAD, 2e9
Way = tuple[str, float, str, Program]


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100, help="no layer is begun after so many")
    options, start = parser.parse_args(), time.monotonic()
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    timer = Timer(torch.device("cuda", 0), repetitions=7, budget_seconds=0.02)
    device = DeviceInfo.of(timer.device)
    problems = [
        replace(parse_layer(layer), dtype=DTYPES[letter], tf32=letter == "f")
        for letter, layer in (line.split(" ", 1) for line in LAYERS.strip().splitlines())
    ]
    found = {problem: list(ways(problem, device)) for problem in problems}
    print(f"planned after {time.monotonic() - start:.0f} s", flush=True)
    compile_ahead(
        [source for each in found.values() for *_, program in each for source in program.sources], device.arch
    )
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["gpu", "problem", "way", "config", "forecast_us", "torch_us", "error", "worst", "all_us", "steps_us"]
        )
        for problem in problems:
            if time.monotonic() - start > options.seconds:
                break
            for row in rows(timer, problem, found[problem]):
                writer.writerow([torch.cuda.get_device_name(), problem, *row])
                print(*row[:1], *row[2:], row[1], sep=" | ", flush=True)
            file.flush()
            torch.cuda.empty_cache()
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)


def ways(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[Way]:
    """The program of each way, by name, with its forecast and config."""
    found: dict[str, Way] = {}
    for candidate, program in sorted(programs(problem, WEIGHT_GRAD, device), key=lambda each: each[0].seconds):
        if candidate.schedule not in found and len(found) < 2:
            text = f"{candidate.describe()} splits {program.splits}"
            found[candidate.schedule] = candidate.schedule, candidate.seconds, text, program
    yield from found.values()


def rows(timer: Timer, problem: ConvTransposeProblem, found: list[Way]) -> Iterator[list[object]]:
    """One for each way."""
    operands = make_operands(problem, timer.device, 0)
    pytorch = torch_call(problem, WEIGHT_GRAD, operands)
    torch_out = pytorch()
    torch_us = 1e3 * timer.measure(pytorch).ms
    checked = sample(problem, WEIGHT_GRAD, operands, CHECKED)
    print(f"{problem}: PyTorch {torch_us:.1f}")
    for name, forecast, config, program in found:
        try:
            result, times = measure(timer, problem, program, operands)
        except PolyphaseError as error:
            print(name, config, f"{error}"[-300:])
            continue
        comparison = checked.compare(result, torch_out)
        steps = (step.source.kernel for step in program.steps)
        of_steps = " ".join(f"{step}={us:.1f}" for step, us in zip(steps, times[1:]))
        error = [f"{comparison.error:.2e}", f"{comparison.worst:.2f}"]
        yield [name, config, f"{1e6 * forecast:.1f}", f"{torch_us:.1f}", *error, f"{times[0]:.1f}", of_steps]


def measure(
    timer: Timer, problem: ConvTransposeProblem, program: Program, operands: Operands
) -> tuple[torch.Tensor, list[float]]:
    """The result, and microseconds of the program and of each of its steps."""
    arch = DeviceInfo.of(timer.device).arch
    dst = torch.full((math.prod(problem.weight_shape),), math.nan, device=timer.device, dtype=operands.input.dtype)
    tensors = {X: operands.input, GRAD: operands.grad_output, DST: dst}
    for each in program.buffers:
        tensors[each.name] = torch.full((max(1, each.bytes),), 255, device=timer.device, dtype=torch.uint8)
    stream = torch.cuda.current_stream().cuda_stream
    places, addresses = {name: i for i, name in enumerate(tensors)}, [each.data_ptr() for each in tensors.values()]
    times = []
    for part in (program, *(Program((step,)) for step in program.steps)):
        call = Executable(part, arch, 0, places)
        call(stream, addresses)
        if part is program:
            result = dst.clone().reshape(problem.weight_shape)
        times.append(1e3 * timer.measure(lambda call=call: call(stream, addresses)).ms)  # type: ignore[misc]
    return result, times


if __name__ == "__main__":
    main()
