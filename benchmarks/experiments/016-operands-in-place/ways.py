"""Times weight gradients by the ways to lay out their operands: ``python ways.py --csv FILE``; needs a Hopper GPU.

For each layer: the best config by forecast of `tap_gemm_wgrad_tma` with both operands written as planes (images first,
and last), with taps along the width spread over planes of the gradient, and with an operand read in place; of
`window_wgrad_wgmma`, with the sums of one column tile loaded together by a flush, as before, and of several; of
`window_wgrad_transposed`; and the planner's choice. All steps together, then each by itself, beside PyTorch's time and
errors against float64. Results are NaN before.
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
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan.planner import plan
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.program.step import DST, GRAD, X
from polyphase.schedules import SCHEDULES
from polyphase.schedules.tap_gemm.wgrad_tma import TapGemmWgradTma
from polyphase.schedules.tap_gemm.wgrad_tma_config import WgradTmaConfig

LAYERS = """
1x512x44x44x44 -> 256, k=1
16x1024x8282 -> 256, k=3, s=2
64x512x75 -> 512, k=4, s=2, p=1
16x320x26x26 -> 320, k=(3, 8), s=(3, 8)
16x320x256x256 -> 32, k=5, s=2, p=2, op=1
32x256x160x160 -> 12, k=5, s=2, p=2, op=1
4x320x112x224 -> 96, k=4, s=2, p=1
8x64x512x512 -> 32, k=8, s=4, p=2
2x320x208x208 -> 160, k=8, s=8
8x512x32x32 -> 256, k=2, s=2
16x512x1024 -> 256, k=8, s=4, p=2
4x64x128x128 -> 64, k=3, p=1
8x256x64x64 -> 128, k=4, s=2, p=1
2x256x16x16x16 -> 128, k=4, s=2, p=1
8x768x28x28 -> 384, k=1
25x384x4000 -> 1, k=7, s=3, p=1
1x768x197x197 -> 96, k=5, s=2
2x256x31x56x56 -> 16, k=3
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHT_GRAD, OWN = Pass.WEIGHT_GRAD, TapGemmWgradTma()


def main() -> None:
    """Measure all layers in TF32 and bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400, help="no layer is begun after so many")
    parser.add_argument("--layers", default="", help="beginnings of layers, separated by commas; all without")
    options, start = parser.parse_args(), time.monotonic()
    torch.backends.cudnn.allow_tf32 = True
    timer = Timer(torch.device("cuda", 0), repetitions=9, budget_seconds=0.03)
    device = DeviceInfo.of(timer.device)
    lines = [line for line in LAYERS.strip().splitlines() if line.startswith(tuple(options.layers.split(",")))]
    problems = [replace(parse_layer(line), dtype=dtype, tf32=dtype == "float32") for line in lines for dtype in DTYPES]
    found = {problem: worth_measuring(list(ways(problem, device))) for problem in problems}
    sources = [source for each in found.values() for _, _, program in each for source in program.sources]
    compile_ahead(sources, device.arch)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "layer", "way", "config", "forecast_us", "torch_us", "error", "all_us", "steps_us"])
        for problem in problems:
            if time.monotonic() - start > options.seconds:
                break
            for row in rows(timer, problem, found[problem]):
                writer.writerow([torch.cuda.get_device_name(), problem, *row])
                print(*row[:1], *row[2:], sep=" | ", flush=True)
            file.flush()
            torch.cuda.empty_cache()


Way = tuple[str, str, Program]

#: How `tap_gemm_wgrad_tma` lays out positions: images innermost, taps along the width as planes, the base in place.
WAYS = {
    "planes": (False, False, False),
    "planes, images last": (True, False, False),
    "in place": (False, False, True),
    "spread, planes": (False, True, False),
    "spread, in place": (False, True, True),
}


def way(config: WgradTmaConfig) -> tuple[bool, bool, bool]:
    """Which of them a config has."""
    return config.batched, config.spread, config.in_place


def worth_measuring(found: list[Way]) -> list[Way]:
    """Those whose forecasts are not far above the least."""
    forecasts = [float(told.split(" | ")[0]) for _, told, _ in found]
    return [way for way, forecast in zip(found, forecasts) if forecast <= 2.2 * min(forecasts)]


def ways(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[Way]:
    """The program of each way, by name, with its forecast and config in words."""
    layouts = Layouts.dense(problem)

    def told(schedule, config, program) -> str:  # type: ignore[no-untyped-def]
        cost = schedule.cost(problem, WEIGHT_GRAD, device, layouts, config)
        splits = f"splits {program.splits}"
        return f"{1e6 * cost[0]:.1f} | {schedule.name} {tuple(config)} {splits}"

    configs = OWN.configs(problem, WEIGHT_GRAD, device)
    for name, of_way in WAYS.items():
        costs = (
            (OWN.cost(problem, WEIGHT_GRAD, device, layouts, each), each) for each in configs if way(each) == of_way
        )
        for _, config in sorted((cost[0], config) for cost, config in costs if cost is not None)[:1]:
            program = OWN.program(problem, WEIGHT_GRAD, device, layouts, config)
            yield name, told(OWN, config, program), program
    for schedule in SCHEDULES:
        if schedule.name not in ("window_wgrad_wgmma", "window_wgrad_transposed"):
            continue
        if refusal(schedule, problem, WEIGHT_GRAD, device) is not None:
            continue
        offered = sorted(candidates(schedule, problem, WEIGHT_GRAD, device, layouts), key=lambda each: each.seconds)
        for candidate in offered[:1]:
            program = schedule.program(problem, WEIGHT_GRAD, device, layouts, candidate.config)
            yield schedule.name, told(schedule, candidate.config, program), program
            if schedule.name == "window_wgrad_wgmma":
                source = program.main.source.with_constants(PRELOADED=1)
                before = program.with_main(replace(program.main, source=source))
                yield f"{schedule.name}, one tile", told(schedule, candidate.config, before), before
    chosen = plan(problem, WEIGHT_GRAD, device)
    if chosen.program is not None and chosen.candidate is not None:
        yield "planned", f"{1e6 * chosen.candidate.seconds:.1f} | {chosen.candidate.describe()}", chosen.program


def rows(timer: Timer, problem: ConvTransposeProblem, found: list[Way]) -> Iterator[list[object]]:
    """One for each way."""
    operands = make_operands(problem, timer.device, 0)
    pytorch, checked = torch_call(problem, WEIGHT_GRAD, operands), sample(problem, WEIGHT_GRAD, operands)
    torch_out = pytorch()
    torch_us = 1e3 * timer.measure(pytorch).ms
    done: dict[tuple[object, ...], list[object]] = {}
    print(f"{problem}: PyTorch {torch_us:.1f}")
    for name, told, program in found:
        key = program.steps
        if key not in done:
            result, times = measure(timer, problem, program, operands)
            comparison = checked.compare(result, torch_out)
            steps = (step.source.kernel for step in program.steps)
            of_steps = " ".join(f"{step}={us:.1f}" for step, us in zip(steps, times[1:]))
            done[key] = [f"{torch_us:.1f}", f"{comparison.error:.2e}", f"{times[0]:.1f}", of_steps]
        forecast, config = told.split(" | ", 1)
        yield [name, config, forecast, *done[key]]


def measure(
    timer: Timer, problem: ConvTransposeProblem, program: Program, operands: Operands
) -> tuple[torch.Tensor, list[float]]:
    """The result, and microseconds of the program and of each of its steps."""
    arch = DeviceInfo.of(timer.device).arch
    dst = torch.full((math.prod(problem.weight_shape),), math.nan, device=timer.device, dtype=DTYPES[problem.dtype])
    tensors = {X: operands.input, GRAD: operands.grad_output, DST: dst}
    for each in program.buffers:
        tensors[each.name] = torch.full((each.bytes,), 255, device=timer.device, dtype=torch.uint8)
    stream = torch.cuda.current_stream().cuda_stream
    places, addresses = {name: i for i, name in enumerate(tensors)}, [each.data_ptr() for each in tensors.values()]
    times = []
    for part in (program, *(Program((step,)) for step in program.steps)):
        call = Executable(part, arch, 0, places)
        call(stream, addresses)
        if part is program:
            inputs, outputs, *kernel = problem.weight_shape
            last = program.dst_channels_last
            result = dst.clone().view(inputs, math.prod(kernel), outputs).movedim(-1, 1) if last else dst.clone()
            result = result.reshape(problem.weight_shape)
        times.append(1e3 * timer.measure(lambda call=call: call(stream, addresses)).ms)  # type: ignore[misc]
    return result, times


if __name__ == "__main__":
    main()
