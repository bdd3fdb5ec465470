"""Times input gradients by several schedules and options: ``python ways.py --csv FILE``; needs a Hopper GPU.

For each layer: `window_dgrad_wgmma` with persistent blocks or a block for each tile, with a thread's rows in pairs, and
not; `window_dgrad_transposed` with rows of a stage of 128, 64 and 32 bytes, stored channels first or transposed back;
weights packed while the source is transposed, or when it has been; the first configs of other schedules; the planner's
choice. All steps together, then each by itself, beside PyTorch's time and errors against float64; ``worst`` is the
largest error of an element over what it is allowed. Results are NaN before.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.oracle import sample
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan.planner import plan, programs
from polyphase.plan.shortlist import in_order, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.program.step import DST, SRC, WEIGHT
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.window_gemm.transposed import WindowDgradTransposed
from polyphase.schedules.window_gemm.wgmma import WindowDgradWgmma

# Which dtypes, and the layer.
LAYERS = """
b 1x257x31x32x37 -> 128, k=4, s=2, p=1
fb 2x128x96x96 -> 128, k=7, s=6, p=3, op=4, g=128
fb 64x256x800 -> 128, k=4, s=2, p=1
fb 1x96x256x256 -> 96, k=3, p=1
b 4x256x40x160 -> 37, k=7, s=2, op=1
b 2x512x18206 -> 256, k=1, s=2
b 128x512x10733 -> 1, k=64, s=16
b 1x257x251x251 -> 128, k=2, s=2
b 4x256x40x160 -> 64, k=7, s=2, op=1
b 8x256x48x48 -> 150, k=3, s=2, p=1
b 32x256x160x160 -> 12, k=5, s=2, p=2, op=1
f 4x256x40x160 -> 37, k=7, s=2, op=1
b 8x384x2048 -> 192, k=8, s=4, p=2
b 4x320x112x224 -> 96, k=4, s=2, p=1
b 16x21x128x128 -> 21, k=5, s=2, op=1
f 2x512x18206 -> 256, k=1, s=2
b 3x32x512x512 -> 16, k=4, s=2, p=1
b 32x96x56x73 -> 96, k=2, s=2
f 2x257x34x34x34 -> 128, k=2, s=2
f 8x48x12x12x12 -> 48, k=8, s=4, p=2, g=4
b 2x320x208x208 -> 160, k=8, s=8
"""
DTYPES = {"f": "float32", "b": "bfloat16"}
INPUT_GRAD, SLOWER, CHECKED = Pass.INPUT_GRAD, 1.5, 2e9
Way = tuple[str, float, str, Program]


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=50, help="no layer is begun after so many")
    options, start = parser.parse_args(), time.monotonic()
    torch.backends.cudnn.allow_tf32 = True
    timer = Timer(torch.device("cuda", 0), repetitions=7, budget_seconds=0.02)
    device = DeviceInfo.of(timer.device)
    problems = [
        replace(parse_layer(layer), dtype=DTYPES[letter], tf32=letter == "f")
        for dtypes, layer in (line.split(" ", 1) for line in LAYERS.strip().splitlines())
        for letter in dtypes
    ]
    found = {problem: list(ways(problem, device)) for problem in problems}
    print(f"planned after {time.monotonic() - start:.0f} s", flush=True)
    compile_ahead(
        [source for each in found.values() for *_, program in each for source in program.sources], device.arch
    )
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        head = "gpu problem way config forecast_us torch_us torch_error torch_worst error worst all_us steps_us"
        writer.writerow(head.split())
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
    offers = [*programs(problem, INPUT_GRAD, device), *transposed(problem, device)]
    offers = sorted(offers, key=lambda each: each[0].seconds)
    most, met = SLOWER * offers[0][0].seconds, set()
    for candidate, program in offers:
        kind = candidate.schedule
        if kind == "window_dgrad_transposed":
            stored = "channels first" if candidate.config.first else "transposed back"
            kind += f", rows of {candidate.config.depth_bytes} bytes, {stored}"
        least = most if "32 bytes" not in kind and "64 bytes" not in kind else 0.7 * most
        if kind in met or (candidate.seconds > least and not kind.startswith("window_dgrad_w")):
            continue
        met.add(kind)
        yield kind, candidate.seconds, candidate.describe(), program
        if kind == "window_dgrad_wgmma":
            schedule, layouts = WindowDgradWgmma(), Layouts.dense(problem)
            many = replace(device, multiprocessors=1 << 24)  # so that each block has one tile
            alone = schedule.program(problem, INPUT_GRAD, many, layouts, candidate.config)
            yield f"{kind}, a block each", candidate.seconds, candidate.describe(), alone
            source = program.main.source.with_constants(ROWS_IN_PAIRS=False)
            if source != program.main.source:
                single = program.with_main(replace(program.main, source=source))
                yield f"{kind}, no pairs", candidate.seconds, candidate.describe(), single
                single = alone.with_main(replace(alone.main, source=source))
                yield f"{kind}, a block each, no pairs", candidate.seconds, candidate.describe(), single
        if program.steps[:-1] and (later := in_turn(program)).steps != program.steps and "back" not in kind:
            yield f"{kind}, packed in turn", candidate.seconds, candidate.describe(), later
    chosen = plan(problem, INPUT_GRAD, device)
    if chosen.program is not None and chosen.candidate is not None:
        yield "planned", chosen.candidate.seconds, chosen.candidate.describe(), chosen.program


def in_turn(program: Program) -> Program:
    """A program whose weights are packed when the source has been transposed."""
    main = program.main
    return replace(
        program, steps=tuple(step if step is main else replace(step, overlaps=False) for step in program.steps)
    )


def transposed(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[tuple[Candidate, Program]]:
    """All configs of `window_dgrad_transposed`, of which the planner is offered a few."""
    schedule, layouts = WindowDgradTransposed(), Layouts.dense(problem)
    if refusal(schedule, problem, INPUT_GRAD, device) is not None:
        return
    for config in in_order(schedule, problem, INPUT_GRAD, device, layouts):
        cost = schedule.cost(problem, INPUT_GRAD, device, layouts, config)
        program = schedule.program(problem, INPUT_GRAD, device, layouts, config)
        yield Candidate(schedule.name, config, *cost), program


def rows(timer: Timer, problem: ConvTransposeProblem, found: list[Way]) -> Iterator[list[object]]:
    """One for each way."""
    operands = make_operands(problem, timer.device, 0)
    pytorch = torch_call(problem, INPUT_GRAD, operands)
    torch.backends.cudnn.benchmark = True
    torch_out = pytorch()
    torch_us = 1e3 * timer.measure(pytorch).ms
    checked = sample(problem, INPUT_GRAD, operands, CHECKED)
    print(f"{problem}: PyTorch {torch_us:.1f}")
    known = {SRC: operands.grad_output, WEIGHT: operands.weight, DST: torch.empty_like(operands.input)}
    done: dict[tuple[object, ...], list[object]] = {}
    for name, forecast, config, program in found:
        if program.steps not in done:
            times = measure(timer, program, known)
            comparison = checked.compare(known[DST], torch_out)
            by_us = checked.compare(torch_out, known[DST])  # PyTorch's result, with ours as the yardstick
            errors = (f"{each.error:.3e} {each.worst:.2f}".split() for each in (by_us, comparison))
            steps = (step.source.kernel for step in program.steps)
            of_steps = " ".join(f"{step}={us:.1f}" for step, us in zip(steps, times[1:]))
            done[program.steps] = [
                *(f"{torch_us:.1f}", *chain.from_iterable(errors)),
                *(f"{times[0]:.1f}", of_steps),
            ]
        yield [name, config, f"{1e6 * forecast:.1f}", *done[program.steps]]


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
