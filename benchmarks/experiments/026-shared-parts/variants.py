"""Times the planner's choice for layers of few channels by the kernels of several checkouts, one after the other.

``python variants.py --csv FILE SRC ...``: folders with a package `polyphase`, the first to compare others with. Each
plans and compiles in a process of its own, or has before (``--plan FILE.pkl``). Needs a GPU.
"""

from __future__ import annotations

import argparse
import csv
import os
import pickle
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import MEMORY_FORMATS, make_operands
from polyphase.bench.timing import Timer
from polyphase.jit import launcher
from polyphase.jit.compiler import compile_kernel
from polyphase.plan import planner
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.step import BIAS, DST, SRC, WEIGHT

#: Layers, then dtypes of forward passes, then of input gradients; "l" is channels_last.
LAYERS = """
16x32x128x256 -> 64, k=(3, 5), s=(2, 3), p=(1, 2), d=(2, 1), g=4 | float32 bfloat16 | bfloat16 bfloat16,l
8x16x256x512 -> 20, k=2, s=2, bias                               | float32 |
4x64x110250 -> 8, k=8, s=4, bias                                 | float32 |
8x32x12x24x48 -> 32, k=(3, 5, 7), s=2, p=(1, 2, 3), op=1, g=4    | float32 bfloat16 | bfloat16 bfloat16,l
4x32x32x64x128 -> 32, k=3, s=2, p=1, g=4                         | float32 bfloat16 | bfloat16 bfloat16,l
2x512x48x48x48 -> 512, k=(3, 4, 4), s=(1, 2, 2), g=32            | float32 bfloat16 |
1x64x128x128 -> 64, k=10, s=5, g=8                               | float32 bfloat16 | float32,l bfloat16 bfloat16,l
64x64x16384 -> 128, k=5, s=5, p=1, d=2, g=4, bias                | float32 bfloat16 |
16x16x32x32x32 -> 4, k=5, s=2, p=2                               | float32 bfloat16 | float32,l bfloat16 bfloat16,l
4x192x512x512 -> 32, k=2, s=2, g=8, bias                         | float32 bfloat16 |
8x96x216x216 -> 16, k=3, s=4, p=1, g=4, bias                     | bfloat16 |
128x128x30x30x30 -> 24, k=3, p=1, g=8                            | bfloat16 bfloat16,l |
"""
Case = tuple[Any, ...]  # problem, pass, program, its description, seconds foretold, binaries by kernel


def main() -> None:
    """Measure all layers by all checkouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plan", type=Path, help="only plan and compile, into this file")
    parser.add_argument("sources", type=Path, nargs="*")
    options = parser.parse_args()
    if options.plan:
        options.plan.write_bytes(pickle.dumps(list(map(planned, cases()))))
        return
    variants = [pickle.loads(plans_of(source, options.csv).read_bytes()) for source in options.sources]
    timer = Timer(torch.device("cuda", 0), 15, 0.1)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["problem", "pass", "config", "forecast_us", "variant", "us", "difference"])
        for case in zip(*variants):
            for source, row in zip(options.sources, measured(timer, case)):
                writer.writerow(
                    [case[0][0], case[0][1].value, case[0][3], f"{1e6 * case[0][4]:.1f}", source.stem, *row]
                )


def plans_of(source: Path, beside: Path) -> Path:
    """The file of a checkout's plans."""
    if source.suffix == ".pkl":
        return source
    file = beside.with_suffix(".pkl")
    command = [sys.executable, __file__, "--plan", str(file)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(source)}, check=True)
    return file


def cases() -> list[tuple[Any, Pass]]:
    """Problems and passes."""
    found = []
    for line in LAYERS.strip().splitlines():
        layer, *of_passes = line.split("|")
        for pass_, kinds in zip((Pass.FORWARD, Pass.INPUT_GRAD), of_passes):
            for dtype, _, last in (kind.partition(",") for kind in kinds.split()):
                problem = replace(parse_layer(layer.strip()), dtype=dtype, tf32=True, channels_last=bool(last))
                found.append((problem, pass_))
    return found


def planned(case: tuple[Any, Pass]) -> Case:
    """The planner's choice, compiled."""
    device = DeviceInfo.for_arch("sm_90a")
    plan = planner.plan(*case, device, by_prediction=True)
    assert plan.program is not None
    assert plan.candidate is not None
    binaries = {source.kernel: compile_kernel(source, device.arch) for source in plan.program.sources}
    return *case, plan.program, plan.describe(), plan.candidate.seconds, binaries


def measured(timer: Timer, variants: tuple[Case, ...]) -> list[tuple[str, str]]:
    """Microseconds of each variant, the least of three rounds, and how far its result is from the first's."""
    problem, pass_ = variants[0][:2]
    operands, forward = make_operands(problem, timer.device), pass_ is Pass.FORWARD
    read = operands.input if forward else operands.grad_output
    shape = problem.output_shape if forward else problem.input_shape
    result = torch.empty(shape, device=timer.device, dtype=read.dtype)
    if problem.channels_last:
        result = result.contiguous(memory_format=MEMORY_FORMATS[result.dim()])
    calls, results, kept = [], [], []
    for _, _, program, _, _, binaries in variants:
        kept.append(dict(launcher._loaded))
        launcher._loaded.clear()
        tensors = {SRC: read, WEIGHT: operands.weight, BIAS: operands.bias if forward else None, DST: result}
        for each in program.buffers:
            tensors[each.name] = torch.empty(each.bytes, device=timer.device, dtype=torch.uint8)
        places = {name: place for place, name in enumerate(tensors)}
        with (
            mock.patch.object(launcher, "_compiled", lambda source, *_: binaries[source.kernel]),  # noqa: B023
            mock.patch.object(launcher, "_compile_in_thread", lambda source, *_: _done(binaries[source.kernel])),  # noqa: B023
        ):
            executable = launcher.Executable(program, "sm_90a", 0, places)
        addresses = [0 if each is None else each.data_ptr() for each in tensors.values()]
        calls.append((executable, addresses, tensors))
        result.fill_(torch.nan)
        executable(torch.cuda.current_stream().cuda_stream, addresses)
        results.append(result.clone())
    times = [
        [1e3 * timer.measure(lambda: executable(torch.cuda.current_stream().cuda_stream, addresses)).ms for _ in "123"]  # noqa: B023
        for executable, addresses, _ in calls
    ]
    differences = [float((each - results[0]).abs().max()) for each in results]
    return [(f"{min(found):.2f}", f"{difference:.1e}") for found, difference in zip(times, differences)]


def _done(binary: bytes) -> Future[bytes]:
    found: Future[bytes] = Future()
    found.set_result(binary)
    return found


if __name__ == "__main__":
    main()
