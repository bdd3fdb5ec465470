"""Times forward passes of long kernels with large strides: ``python cells.py --csv FILE``; needs a GPU.

The best configs of each schedule by forecast: all steps together, then each by itself, beside PyTorch's time and both
errors against float64. Results are NaN before.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import every_layer, parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.oracle import sample
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan.planner import programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, SRC, WEIGHT
from polyphase.schedules.schedule import Candidate

# Kinds of arithmetic (float32 in TF32, exact float32, bfloat16) and the layer, in both formats.
LAYERS = """
fb FCN-32s
e FCN-8s, ×8
fb 64x64x1024 -> 8, k=128, s=32, p=48
e FCN-32s
b inverse STFT
b 4x192x800 -> 192, k=128, s=32, g=192
"""
KINDS = {"f": ("float32", True), "e": ("float32", False), "b": ("bfloat16", False)}
FORWARD, SLOWER, CONFIGS, CHECKED = Pass.FORWARD, 1.7, 4, 2e9


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=50, help="no layer is begun after so many")
    options, start = parser.parse_args(), time.monotonic()
    timer = Timer(torch.device("cuda", 0), repetitions=7, budget_seconds=0.02)
    device = DeviceInfo.of(timer.device)
    found = {problem: list(offers(problem, device)) for problem in problems()}
    print(f"planned after {time.monotonic() - start:.0f} s", flush=True)
    compile_ahead(
        [source for each in found.values() for _, one in each for source in (step.source for step in one.steps)],
        device.arch,
    )
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        head = "gpu problem schedule config forecast_us torch_us torch_error error all_us steps_us"
        writer.writerow(head.split())
        for problem, offered in found.items():
            if time.monotonic() - start > options.seconds:
                break
            for row in rows(timer, problem, offered):
                writer.writerow([torch.cuda.get_device_name(), problem, *row])
                print(row[0], *row[2:], row[1], sep=" | ", flush=True)
            file.flush()
            torch.cuda.empty_cache()
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)


def problems() -> Iterator[ConvTransposeProblem]:
    """Each layer in its kinds of arithmetic and both formats."""
    named = {each.name: each.problem for each in every_layer()}
    for letters, name in (line.split(" ", 1) for line in LAYERS.strip().splitlines()):
        layer = named.get(name) or parse_layer(name)
        for dtype, tf32 in (KINDS[letter] for letter in letters):
            for channels_last in (False, True):
                yield replace(layer, dtype=dtype, tf32=tf32, channels_last=channels_last)


def offers(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[tuple[Candidate, Program]]:
    """The config of least forecast of each schedule, and of images three more of `col2im_cells`."""
    found, met = sorted(programs(problem, FORWARD, device), key=lambda each: each[0].seconds), Counter[str]()
    for candidate, program in found:
        most = CONFIGS if problem.dims > 1 and candidate.schedule == "col2im_cells" else 1
        if candidate.seconds < SLOWER * found[0][0].seconds and met[candidate.schedule] < most:
            met[candidate.schedule] += 1
            yield candidate, program


def rows(timer: Timer, problem: ConvTransposeProblem, found: list[tuple[Candidate, Program]]) -> Iterator[list[object]]:
    """One for each config."""
    operands = make_operands(problem, timer.device, 0)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, problem.tf32
    pytorch = torch_call(problem, FORWARD, operands)
    torch_out = pytorch()
    torch_us = 1e3 * timer.measure(pytorch).ms
    checked = sample(problem, FORWARD, operands, CHECKED)
    print(f"{problem}: PyTorch {torch_us:.1f}")
    known = {SRC: operands.input, WEIGHT: operands.weight, DST: torch.empty_like(torch_out)}
    if operands.bias is not None:
        known[BIAS] = operands.bias
    for candidate, program in found:
        times = measure(timer, program, known)
        steps = " ".join(f"{step.source.kernel}={us:.1f}" for step, us in zip(program.steps, times[1:]))
        ours, theirs = checked.compare(known[DST], torch_out).error, checked.compare(torch_out, torch_out).error
        yield [
            *(candidate.schedule, candidate.describe(), f"{1e6 * candidate.seconds:.1f}", f"{torch_us:.1f}"),
            *(f"{theirs:.3e}", f"{ours:.3e}", f"{times[0]:.1f}", steps),
        ]


def measure(timer: Timer, program: Program, known: dict[str, torch.Tensor]) -> list[float]:
    """Microseconds of the program and of each of its steps, whose result is left in the destination."""
    arch, stream = DeviceInfo.of(timer.device).arch, torch.cuda.current_stream().cuda_stream
    room = {
        each.name: torch.full((max(1, each.bytes),), 255, device="cuda", dtype=torch.uint8) for each in program.buffers
    }
    tensors = {**known, **room}
    names = list(dict.fromkeys(name for step in program.steps for name in step.operands))
    places = {name: place for place, name in enumerate(names)}
    addresses = [tensors[name].data_ptr() if name in tensors else 0 for name in names]
    parts = [Program((step,)) for step in program.steps] if len(program.steps) > 1 else []
    times = []
    for part in (*parts, program):  # the whole last: its result is looked at
        known[DST].fill_(float("nan"))
        call = Executable(part, arch, 0, places)
        times.append(1e3 * timer.measure(lambda call=call: call(stream, addresses)).ms)  # type: ignore[misc]
    return [times[-1], *(times[:-1] or times)]


if __name__ == "__main__":
    main()
