"""Times input gradients by boxes of taps: ``python ways.py --csv FILE``; needs a Hopper GPU.

For each layer the best configs of `tap_gemm_tma` by forecast, weights packed or read in place, and the first config of
other schedules. All steps together, then each by itself, beside PyTorch's time and errors against float64. Results are
NaN before.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.oracle import sample
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan.planner import as_computed, programs
from polyphase.plan.shortlist import in_order, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.program.step import DST, SRC, WEIGHT
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.tap_gemm.tma import TapGemmTma

LAYERS = """
1x512x128 -> 256, k=16, s=8, p=4, bias, float32, tf32
1x1536x100 -> 768, k=8, s=4, p=2, bias, bfloat16
1x512x16x16 -> 256, k=4, s=2, p=1, bfloat16
16x1024x8x8 -> 512, k=4, s=2, p=1, bfloat16, channels_last
128x100x1x1 -> 1024, k=4, float32, tf32
16x1024x32x32 -> 512, k=2, s=2, bias, float32, tf32, channels_last
5x32x97x301 -> 64, k=(3, 5), s=(2, 3), p=(1, 2), d=(2, 1), g=4, float32, tf32, channels_last
1x256x32x24 -> 256, k=4, s=2, p=1, bfloat16
1x2048x8x6 -> 256, k=4, s=2, p=1, float32, tf32, channels_last
128x1024x4x4 -> 512, k=4, s=2, p=1, bfloat16
1x64x128x128 -> 32, k=2, s=2, bias, bfloat16, channels_last
2x320x10x16x16 -> 256, k=(1, 2, 2), s=(1, 2, 2), bias, bfloat16, channels_last
1x256x62x54 -> 128, k=4, s=4, float32, tf32, channels_last
1x768x3x3x3 -> 384, k=2, s=2, float32, tf32
1x64x128x128 -> 32, k=2, s=2, bias, float32, tf32, channels_last
16x512x4x4x4 -> 256, k=4, s=2, p=1, float32, tf32, channels_last
128x512x8x8 -> 256, k=4, s=2, p=1, bfloat16, channels_last
16x128x16x16x16 -> 64, k=4, s=2, p=1, bfloat16, channels_last
128x100x1x1 -> 1024, k=4, bfloat16, channels_last
1x256x600 -> 128, k=10, s=5, bias, bfloat16
2x256x8x8x8 -> 128, k=2, s=2, bias, float32, tf32, channels_last
16x512x4x4x4 -> 256, k=4, s=2, p=1, float32, tf32
1x1536x100 -> 768, k=8, s=4, p=2, bias, float32, tf32
3x37x61x83 -> 29, k=(4, 5), s=(3, 2), bfloat16
4x256x62x54 -> 128, k=4, s=4, bfloat16, channels_last
2x320x16x16x16 -> 256, k=2, s=2, bias, float32, tf32, channels_last
1x4096x32x32 -> 4096, k=3, s=2, g=8, bfloat16, channels_last
2x320x8x8x8 -> 320, k=2, s=2, bfloat16, channels_last
8x256x24x24 -> 256, k=4, s=4, bias, bfloat16, channels_last
16x512x4x4x4 -> 256, k=4, s=2, p=1, bfloat16
16x256x128x128 -> 128, k=2, s=2, bias, bfloat16, channels_last
2x128x32x32x32 -> 64, k=2, s=2, bfloat16, channels_last
64x2048x8x6 -> 256, k=4, s=2, p=1, bfloat16, channels_last
1x4096x32x32 -> 4096, k=3, s=2, g=8, bfloat16
4x512x16x32 -> 128, k=5, s=2, p=2, op=1, bias, bfloat16, channels_last
4x1536x86 -> 768, k=16, s=8, p=4, bias, float32, tf32
16x256x64x64 -> 64, k=2, s=2, bias, float32, tf32, channels_last
256x128x7x7 -> 64, k=4, s=2, p=1, bfloat16
256x128x7x7 -> 64, k=4, s=2, p=1, float32, tf32
16x128x16x16x16 -> 64, k=4, s=2, p=1, float32, channels_last
8x768x64x64 -> 384, k=2, s=2, bias, bfloat16, channels_last
1x1024x4x7x12 -> 832, k=(1, 4, 4), s=(1, 2, 2), p=(0, 1, 1), float32, channels_last
1x256x64x64 -> 64, k=2, s=2, bias, float32, tf32, channels_last
1x1024x256x256 -> 512, k=3, s=2, g=8, bfloat16, channels_last
64x768x16x12 -> 256, k=4, s=2, p=1, bfloat16
4x96x128x336 -> 48, k=(8, 1), s=(4, 1), bias, bfloat16, channels_last
16x1024x8x8 -> 512, k=4, s=2, p=1, float32, tf32
32x512x64 -> 256, k=25, s=4, p=11, op=1, bias, bfloat16
16x1024x8x8 -> 512, k=4, s=2, p=1, float32, tf32, channels_last
8x32x128x128 -> 32, k=3, s=2, p=1, op=1, bias, bfloat16, channels_last
1x2048x8x6 -> 256, k=4, s=2, p=1, float32, channels_last
4x512x16x32 -> 128, k=5, s=2, p=2, op=1, bias, bfloat16
8x512x4000 -> 1, k=16, s=8, float32
1x1536x86 -> 768, k=16, s=8, p=4, bias, bfloat16
1x256x600 -> 128, k=10, s=5, bias, float32, tf32
1x256x1024 -> 128, k=16, s=8, p=4, bias, bfloat16
16x49x128x128 -> 32, k=4, s=2, p=1, float32, channels_last
32x768x7x7 -> 24, k=10, s=5, p=3, op=1, bfloat16, channels_last
8x64x128x256 -> 16, k=3, s=2, p=1, op=1, bias, float32, channels_last
1x2048x8x6 -> 256, k=4, s=2, p=1, float32
64x256x32x24 -> 256, k=4, s=2, p=1, bfloat16, channels_last
1x512x75 -> 256, k=16, s=8, bias, float32, tf32
1x512x128 -> 256, k=16, s=8, p=4, bias, bfloat16
1x4096x32x32 -> 4096, k=3, s=2, g=8, float32, tf32
1x2048x8x6 -> 256, k=4, s=2, p=1, float32, tf32
1x64x64x64x64 -> 32, k=2, s=2, bfloat16, channels_last
128x1024x4x4 -> 512, k=4, s=2, p=1, bfloat16, channels_last
64x768x16x12 -> 256, k=4, s=2, p=1, bfloat16, channels_last
16x64x128x128 -> 32, k=2, s=2, bias, bfloat16, channels_last
8x21x32x32 -> 21, k=4, s=2, float32
1x48x48x48x48 -> 48, k=2, s=2, bfloat16, channels_last
1x480x4x28x48 -> 192, k=(1, 4, 4), s=(1, 2, 2), p=(0, 1, 1), bfloat16, channels_last
1x1024x256x256 -> 512, k=3, s=2, g=8, bfloat16
1x1024x4x7x12 -> 832, k=(1, 4, 4), s=(1, 2, 2), p=(0, 1, 1), float32, tf32
64x64x16x16 -> 32, k=4, s=2, p=1, bias, float32, tf32, channels_last
128x256x16x16 -> 128, k=4, s=2, p=1, bfloat16, channels_last
16x32x16x32x32 -> 64, k=3, s=2, p=1, d=2, float32, tf32
8x56x270x480 -> 1, k=9, s=4, p=4, op=3, bias, bfloat16
8x384x128x128 -> 192, k=2, s=2, bias, bfloat16, channels_last
1x48x48x48x48 -> 48, k=2, s=2, float32, channels_last
2x64x16x128x128 -> 32, k=(1, 2, 2), s=(1, 2, 2), float32, tf32, channels_last
1x256x1024 -> 128, k=16, s=8, p=4, bias, float32, tf32
1x1024x4x7x12 -> 832, k=(1, 4, 4), s=(1, 2, 2), p=(0, 1, 1), float32
1x256x32x24 -> 256, k=4, s=2, p=1, float32, tf32
1x2048x8x6 -> 256, k=4, s=2, p=1, bfloat16
32x512x64 -> 256, k=25, s=4, p=11, op=1, bias, float32, tf32
1x256x16x32x32 -> 128, k=(1, 2, 2), s=(1, 2, 2), bias, float32, tf32, channels_last
16x512x4x4x4 -> 256, k=4, s=2, p=1, bfloat16, channels_last
128x100x1x1 -> 1024, k=4, bfloat16
512x256x14x14 -> 256, k=2, s=2, bias, float32, tf32, channels_last
4x96x128x336 -> 48, k=(8, 1), s=(4, 1), bias, float32, channels_last
1x320x8x8x8 -> 320, k=2, s=2, bfloat16
1x256x64x64 -> 64, k=2, s=2, bias, float32
1x256x32x24 -> 256, k=4, s=2, p=1, bfloat16, channels_last
1x512x75 -> 256, k=16, s=8, bias, float32
1x512x75 -> 256, k=16, s=8, bias, bfloat16
64x2048x8x6 -> 256, k=4, s=2, p=1, float32, tf32, channels_last
64x64x16x16 -> 32, k=4, s=2, p=1, bias, bfloat16, channels_last
1x1536x86 -> 768, k=16, s=8, p=4, bias, float32, tf32
32x768x7x7 -> 24, k=10, s=5, p=3, op=1, float32, tf32, channels_last
1x512x16x16 -> 256, k=4, s=2, p=1, float32, tf32, channels_last
4x32x256x512 -> 1, k=5, s=2, p=2, op=1, bias, bfloat16, channels_last
2x320x8x8x8 -> 320, k=2, s=2, float32, tf32, channels_last
1x768x3x3x3 -> 384, k=2, s=2, bfloat16, channels_last
8x1026x12x16 -> 256, k=4, s=2, p=1, float32
256x128x7x7 -> 64, k=4, s=2, p=1, bfloat16, channels_last
1x320x8x8x8 -> 320, k=2, s=2, float32, tf32
1x1024x4x7x12 -> 832, k=(1, 4, 4), s=(1, 2, 2), p=(0, 1, 1), bfloat16
128x128x32x32 -> 3, k=4, s=2, p=1, float32, tf32, channels_last
32x768x7x7 -> 24, k=10, s=5, p=3, op=1, float32, tf32
4x240x4x32x32 -> 240, k=4, s=2, p=1, bias, bfloat16, channels_last
1x256x16x32x32 -> 128, k=(1, 2, 2), s=(1, 2, 2), bias, bfloat16, channels_last
128x1024x4x4 -> 512, k=4, s=2, p=1, float32, tf32
64x2048x8x6 -> 256, k=4, s=2, p=1, float32
16x1024x8x8 -> 512, k=4, s=2, p=1, bfloat16
1x512x16x16 -> 256, k=4, s=2, p=1, float32
1x1024x4x7x12 -> 832, k=(1, 4, 4), s=(1, 2, 2), p=(0, 1, 1), bfloat16, channels_last
128x100x1x1 -> 1024, k=4, float32, tf32, channels_last
8x768x64x64 -> 384, k=2, s=2, bias, float32, tf32, channels_last
2x320x8x8x8 -> 320, k=2, s=2, float32, tf32
4x128x124x108 -> 128, k=2, s=2, bfloat16, channels_last
8x256x1200 -> 128, k=10, s=5, bias, bfloat16
1x64x64x64x64 -> 32, k=2, s=2, float32, tf32, channels_last
2x128x32x32x32 -> 64, k=3, s=2, p=1, op=1, bias, float32, tf32, channels_last
1x512x16x16 -> 256, k=4, s=2, p=1, float32, tf32
4x1536x86 -> 768, k=16, s=8, p=4, bias, bfloat16
4x512x16x32 -> 128, k=5, s=2, p=2, op=1, bias, float32, tf32
1x768x3x3x3 -> 384, k=2, s=2, bfloat16
32x192x100x100 -> 128, k=3, s=2, bfloat16, channels_last
"""
INPUT_GRAD, CHECKED, CONFIGS = Pass.INPUT_GRAD, 2e8, 3
OTHERS = ["window_dgrad_tma", "window_dgrad_transposed"]


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100, help="no layer is begun after so many")
    parser.add_argument("--plan", action="store_true", help="plan and list, without a GPU")
    options, start = parser.parse_args(), time.monotonic()
    device = DeviceInfo.for_arch("sm_90a") if options.plan else DeviceInfo.of(torch.device("cuda", 0))
    problems = [parse_layer(line) for line in LAYERS.strip().splitlines()]
    found = {problem: list(ways(problem, device)) for problem in problems}
    print(f"planned after {time.monotonic() - start:.0f} s", flush=True)
    sources = dict.fromkeys(source for each in found.values() for _, one in each for source in one.sources)
    if options.plan:
        for problem, each in found.items():
            print(problem, *(f"{1e6 * one.seconds:8.1f} {one.describe()}" for one, _ in each), sep="\n   ")
        print(len(sources), "kernels")
        return
    compile_ahead(sources, device.arch)
    print(f"compiled {len(sources)} after {time.monotonic() - start:.0f} s", flush=True)
    timer = Timer(torch.device("cuda", 0), repetitions=7, budget_seconds=0.02)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        head = "gpu problem schedule config forecast_us torch_us torch_error error worst all_us steps_us"
        writer.writerow(head.split())
        for problem in problems:
            if time.monotonic() - start > options.seconds:
                break
            for row in rows(timer, problem, found[problem]):
                writer.writerow([torch.cuda.get_device_name(), problem, *row])
                print(row[0], *row[2:], row[1], sep=" | ", flush=True)
            file.flush()
            torch.cuda.empty_cache()
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)


def ways(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[tuple[Candidate, Program]]:
    """The candidates of a layer with their programs."""
    first: dict[str, tuple[Candidate, Program]] = {}
    for candidate, program in programs(problem, INPUT_GRAD, device):
        best = first.get(candidate.schedule)
        if candidate.schedule in OTHERS and (best is None or candidate.seconds < best[0].seconds):
            first[candidate.schedule] = candidate, program
    schedule = TapGemmTma()
    computed, layouts = as_computed(problem, INPUT_GRAD, None)
    if refusal(schedule, computed, INPUT_GRAD, device, layouts) is None:
        costs = {
            config: cost[0]
            for config in in_order(schedule, computed, INPUT_GRAD, device, layouts)
            if (cost := schedule.cost(computed, INPUT_GRAD, device, layouts, config)) is not None
        }
        order = sorted(costs, key=costs.__getitem__)
        chosen = order[:CONFIGS]
        for kind in {each._replace(row_tiles=0, columns=0, pitch=0, window=0) for each in order} if order else ():
            fastest = next(each for each in order if each._replace(row_tiles=0, columns=0, pitch=0, window=0) == kind)
            chosen += [fastest] if fastest not in chosen and costs[fastest] < 1.15 * costs[order[0]] else []
        for config in chosen:
            candidate = Candidate(schedule.name, config, costs[config], "bytes")
            yield candidate, schedule.program(computed, INPUT_GRAD, device, layouts, config)
    yield from first.values()


def rows(timer: Timer, problem: ConvTransposeProblem, found: list[tuple[Candidate, Program]]) -> Iterator[list[object]]:
    """One for each config."""
    operands = make_operands(problem, timer.device, 0)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, problem.tf32
    pytorch = torch_call(problem, INPUT_GRAD, operands)
    torch_out = pytorch()
    torch_us = 1e3 * timer.measure(pytorch).ms
    checked = sample(problem, INPUT_GRAD, operands, CHECKED)
    print(f"{problem}: PyTorch {torch_us:.1f}")
    known = {SRC: operands.grad_output, WEIGHT: operands.weight, DST: torch.empty_like(operands.input)}
    for candidate, program in found:
        times = measure(timer, program, known)
        steps = " ".join(f"{step.source.kernel}={us:.1f}" for step, us in zip(program.steps, times[1:]))
        ours, theirs = checked.compare(known[DST], torch_out), checked.compare(torch_out, torch_out).error
        yield [
            *(candidate.schedule, candidate.describe(), f"{1e6 * candidate.seconds:.1f}", f"{torch_us:.1f}"),
            *(f"{theirs:.3e}", f"{ours.error:.3e}", f"{ours.worst:.2f}", f"{times[0]:.1f}", steps),
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
