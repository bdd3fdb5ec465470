"""Times weight gradients with and without clusters: ``python clusters.py --csv FILE``; needs a Hopper GPU.

For each layer the best configs of `tap_gemm_wgrad_tma` by forecast, each with blocks alone and with clusters of two. A
config's two results must be equal bit for bit, and right against float64. Results are NaN before. Microseconds: of all
steps, and of the product alone.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import Operands, make_operands
from polyphase.bench.oracle import sample
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan.planner import as_computed
from polyphase.plan.shortlist import in_order
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.program.step import DST, GRAD, X
from polyphase.schedules.tap_gemm.wgrad_tma import TapGemmWgradTma
from polyphase.schedules.tap_gemm.wgrad_tma_config import WgradTmaConfig

LAYERS = """
8x256x18693 -> 256, k=8, s=4, p=2
16x512x32x32 -> 256, k=4, s=2, p=1
8x512x28x28 -> 512, k=3, p=1
64x1026x3x14 -> 513, k=3
16x64x16x16x16 -> 256, k=4, s=2, p=1
16x1024x16x16 -> 512, k=4, s=2, p=1
4x128x32x32x32 -> 64, k=4, s=2, p=1
16x128x64x64 -> 128, k=3, s=2, p=1, op=1
4x320x16x16x16 -> 320, k=3, p=1
32x192x48x48 -> 96, k=5, s=2, p=2, op=1
4x1536x860 -> 768, k=16, s=8, p=4
16x256x56x56 -> 256, k=2, s=2
12x384x24x75 -> 384, k=3, s=2, p=1
"""
HEAD = ("gpu", "problem", "config", "cluster", "forecast_us", "all_us", "product_us", "error", "worst", "equal")
PASS, CHECKED, CONFIGS = Pass.WEIGHT_GRAD, 2e8, 2
SCHEDULE = TapGemmWgradTma()


def main() -> None:
    """Measure all layers in both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--compile", action="store_true", help="compile for an H200, without a GPU")
    options, start = parser.parse_args(), time.monotonic()
    device = DeviceInfo.for_arch("sm_90a") if options.compile else DeviceInfo.of(torch.device("cuda", 0))
    problems = [
        replace(parse_layer(line), dtype=dtype, tf32=True)
        for line in LAYERS.strip().splitlines()
        for dtype in ("float32", "bfloat16")
    ]
    found = {problem: list(ways(problem, device)) for problem in problems}
    sources = dict.fromkeys(source for each in found.values() for *_, one in each for source in one.sources)
    compile_ahead(sources, device.arch)
    print(f"compiled {len(sources)} kernels after {time.monotonic() - start:.0f} s", flush=True)
    if options.compile:
        return
    timer = Timer(torch.device("cuda", 0), repetitions=7, budget_seconds=0.02)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["gpu", "problem", "config", "cluster", "forecast_us", "all_us", "product_us", "error", "worst", "equal"]
        )
        for problem in problems:
            for row in rows(timer, problem, found[problem]):
                writer.writerow([torch.cuda.get_device_name(), problem, *row])
                print(problem, *row, sep=" | ", flush=True)
            file.flush()
            torch.cuda.empty_cache()


def ways(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[tuple[WgradTmaConfig, float, Program]]:
    """Configs with their forecasts and programs, those with clusters and without in turn."""
    computed, layouts = as_computed(problem, PASS, None)

    def seconds(config: WgradTmaConfig) -> float | None:
        cost = SCHEDULE.cost(computed, PASS, device, layouts, config)
        return None if cost is None else cost[0]

    order = in_order(SCHEDULE, computed, PASS, device, layouts)
    known = {config: time for config in order if (time := seconds(config)) is not None}
    both = [config for config in known if config.cluster == 2 and config._replace(cluster=1) in known]
    best = sorted(both, key=known.__getitem__)[:CONFIGS]
    alone = min(both, key=lambda config: known[config._replace(cluster=1)])
    for config in dict.fromkeys([*best, alone]):
        for each in (config._replace(cluster=1), config):
            yield each, known[each], SCHEDULE.program(computed, PASS, device, layouts, each)


def rows(
    timer: Timer, problem: ConvTransposeProblem, found: list[tuple[WgradTmaConfig, float, Program]]
) -> Iterator[list[object]]:
    """One for each config."""
    operands = make_operands(problem, timer.device, 0)
    checked, before = sample(problem, PASS, operands, CHECKED), None
    for config, seconds, program in found:
        result = torch.empty_like(operands.weight)
        times = measure(timer, program, operands, result)
        compared = checked.compare(result, result)
        equal = "" if config.cluster == 1 else torch.equal(before, result)
        before = result
        yield [
            *(str(config._replace(cluster=1)), config.cluster, f"{1e6 * seconds:.1f}"),
            *(f"{each:.1f}" for each in times),
            *(f"{compared.error:.3e}", f"{compared.worst:.2f}", equal),
        ]


def measure(timer: Timer, program: Program, operands: Operands, result: torch.Tensor) -> tuple[float, float]:
    """Microseconds of the program, whose result is left in ``result``, and of its product."""
    arch, stream = DeviceInfo.of(timer.device).arch, torch.cuda.current_stream().cuda_stream
    room = {
        each.name: torch.full((max(1, each.bytes),), 255, device="cuda", dtype=torch.uint8) for each in program.buffers
    }
    tensors = {X: operands.input, GRAD: operands.grad_output, DST: result, **room}
    names = list(dict.fromkeys(name for step in program.steps for name in step.operands))
    places = {name: place for place, name in enumerate(names)}
    addresses = [tensors[name].data_ptr() if name in tensors else 0 for name in names]

    def microseconds(of: Program) -> float:
        result.fill_(float("nan"))
        call = Executable(of, arch, 0, places)
        return 1e3 * timer.measure(lambda: call(stream, addresses)).ms

    product = microseconds(Program((program.main,)))
    return microseconds(program), product


if __name__ == "__main__":
    main()
