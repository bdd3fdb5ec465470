"""Times each step of weight gradients by `tap_gemm_wgrad_tma`: ``python steps.py --csv FILE``; needs a Hopper GPU.

For each layer and config that the schedule offers: the planes' step, the product, the reduction, and all together.
Results are checked against those of the planner's choice without it, which is timed as well.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path

import torch

from polyphase.bench.timing import Timer
from polyphase.jit.launcher import Executable
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.program.step import DST, GRAD, X
from polyphase.schedules import SCHEDULES
from polyphase.schedules.tap_gemm.wgrad_tma import TapGemmWgradTma

make = ConvTransposeProblem.make
LAYERS = (
    ((5, 128, 262, 262), 64, {"kernel_size": 9, "stride": 6, "padding": 3}),
    ((1, 50, 209, 209), 256, {"kernel_size": 7, "padding": 1}),
    ((8, 32, 48, 16, 40), 32, {"kernel_size": 7, "groups": 2}),
    ((16, 150, 19241), 75, {"kernel_size": 1}),
    ((32, 192, 100, 100), 128, {"kernel_size": 3, "stride": 2}),
    ((4, 256, 32, 32), 256, {"kernel_size": 3, "padding": 1}),
    ((16, 64, 64, 64), 64, {"kernel_size": 4, "stride": 2, "padding": 1}),
    ((16, 64, 16, 32, 32), 128, {"kernel_size": 5}),
    ((32, 3, 24, 24, 24), 384, {"kernel_size": 3, "padding": 1}),
    ((2, 512, 48, 48, 48), 512, {"kernel_size": (3, 4, 4), "stride": (1, 2, 2), "groups": 32}),
    ((16, 512, 8, 8), 256, {"kernel_size": 4, "stride": 2, "padding": 1}),
    ((64, 256, 6, 6, 6), 256, {"kernel_size": (1, 3, 3), "stride": (1, 4, 4), "padding": (0, 1, 1)}),
)
DTYPES = ({"tf32": True}, {"dtype": "bfloat16"}, {})
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    """Measure all layers in TF32, bfloat16 and exact float32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400, help="no layer is begun after so many")
    parser.add_argument("--configs", type=int, default=6)
    options = parser.parse_args()
    timer, start = Timer(torch.device("cuda", 0)), time.monotonic()
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "layer", "schedule", "config", "error", "forecast_us", "all_us", "steps_us"])
        for settings in DTYPES:
            for shape, out, layer in LAYERS:
                if time.monotonic() - start > options.seconds:
                    return
                problem = make(shape, out, **layer, **settings)  # type: ignore[arg-type]
                try:
                    for row in rows(timer, problem, options.configs):
                        writer.writerow([torch.cuda.get_device_name(), problem, *row])
                        print(*row, sep=" | ", flush=True)
                    file.flush()
                except torch.OutOfMemoryError:
                    print(f"{problem}: no memory")
                torch.cuda.empty_cache()


def rows(timer: Timer, problem: ConvTransposeProblem, configs: int):  # type: ignore[no-untyped-def]
    """Of a layer, the other schedules' best by forecast first."""
    device, dtype = DeviceInfo.of(timer.device), TORCH[problem.dtype]
    layouts = Layouts.dense(problem)
    x = torch.randn(problem.input_shape, device=timer.device, dtype=dtype)
    grad = torch.randn(problem.output_shape, device=timer.device, dtype=dtype)
    others = [
        (candidate, schedule)
        for schedule in SCHEDULES
        if schedule.name != "tap_gemm_wgrad_tma" and refusal(schedule, problem, Pass.WEIGHT_GRAD, device) is None
        for candidate in candidates(schedule, problem, Pass.WEIGHT_GRAD, device, layouts)
    ]
    chosen, own = [min(others, key=lambda each: each[0].seconds)], TapGemmWgradTma()
    print(problem)
    if (reason := refusal(own, problem, Pass.WEIGHT_GRAD, device)) is None:
        found = candidates(own, problem, Pass.WEIGHT_GRAD, device, layouts)
        chosen += [(candidate, own) for candidate, _ in zip(found, range(configs))]
    else:
        print(reason)
    expected = None
    for candidate, schedule in chosen:
        program = schedule.program(problem, Pass.WEIGHT_GRAD, device, layouts, candidate.config)
        result, times = measure(timer, problem, program, x, grad)
        expected = result if expected is None else expected
        error = ((result - expected).norm() / expected.norm()).item()
        yield (
            schedule.name,
            candidate.describe(),
            f"{error:.2e}",
            f"{candidate.seconds * 1e6:.1f}",
            f"{times[0]:.1f}",
            " ".join(f"{name}={us:.1f}" for name, us in zip((step.source.kernel for step in program.steps), times[1:])),
        )


def measure(
    timer: Timer, problem: ConvTransposeProblem, program: Program, x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, list[float]]:
    """The result, and microseconds of the program and of each of its steps."""
    arch = DeviceInfo.of(timer.device).arch
    dst = torch.full((math.prod(problem.weight_shape),), math.nan, device=timer.device, dtype=x.dtype)
    tensors = {X: x, GRAD: grad, DST: dst}
    for each in program.buffers:
        tensors[each.name] = torch.empty(each.bytes, device=timer.device, dtype=torch.uint8)
    stream = torch.cuda.current_stream().cuda_stream
    names = tuple(tensors)
    places, addresses = {name: i for i, name in enumerate(names)}, [tensors[name].data_ptr() for name in names]
    times = []
    for part in (program, *(Program((step,)) for step in program.steps)):
        call = Executable(part, arch, 0, places)
        call(stream, addresses)
        if part is program:
            result = dst.double()
            if program.dst_channels_last:
                inputs, outputs, *kernel = problem.weight_shape
                result = result.view(inputs, math.prod(kernel), outputs).movedim(-1, 1).flatten()
        times.append(1e3 * timer.measure(lambda call=call: call(stream, addresses)).ms)  # type: ignore[misc]
    return result, times


if __name__ == "__main__":
    main()
