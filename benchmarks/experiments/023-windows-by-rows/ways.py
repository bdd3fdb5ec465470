"""Times gradients by several schedules: ``python ways.py --csv FILE``; needs a Hopper GPU.

For each layer the first configs of the schedules that copy windows row by row, the first of every other schedule, and
the planner's choice, all of a program's steps together, with a cold L2 and results that are NaN before. ``worst`` is
the largest error of an element over what `polyphase.bench.accuracy` allows it, with float64 rounded once for PyTorch's
result. PyTorch's time is measured in benchmark mode with ``--pytorch``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ["POLYPHASE_TUNING"] = "0"

import torch

from polyphase.bench import environment
from polyphase.bench.accuracy import compare
from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.oracle import sample
from polyphase.bench.records import OK, WRONG, Record, write_csv
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan.planner import plan, programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import H200
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.program.step import DST, GRAD, SRC, WEIGHT, X
from polyphase.schedules.schedule import Candidate

# Passes (i: of the input, w: of the weight), dtypes, and the layer.
LAYERS = """
i fb 64x128x16x16 -> 128, k=4, s=4, g=128
i fb 2x128x96x96 -> 128, k=7, s=6, p=3, op=4, g=128
i fb 16x64x56x40x46 -> 64, k=(1, 7, 7), s=(1, 2, 2), p=(0, 1, 1), g=64
i fb 4x32x56x56x56 -> 32, k=3, d=3, g=32
i fb 1x24x31x75x56 -> 24, k=4, s=2, p=1, g=8
iw fb 8x7x84x112 -> 192, k=3, s=2, p=1
i fb 32x96x56x73 -> 96, k=2, s=2
i fb 4x64x164x293 -> 64, k=2, s=2, g=2
i fb 4x64x5932 -> 256, k=7, s=5, p=3, g=8
i fb 16x24x181x181 -> 12, k=3, s=2, p=1, op=1
i fb 32x5x64x64x64 -> 2, k=3, s=3
iw fb 8x128x35x112 -> 64, k=7, s=6, p=3, op=4
iw fb 4x320x114x228 -> 160, k=4, p=2
i fb 8x256x64x64 -> 256, k=4, s=2, p=1, g=256
i fb 8x64x65x97 -> 64, k=3, s=2, p=1, op=1, g=64
i fb 4x96x28x28 -> 96, k=5, p=2, g=96
i fb 8x48x2000 -> 48, k=25, s=5, g=48
i fb 4x32x16x32x32 -> 64, k=3, s=2, p=1, op=1, g=8
i f 8x32x12x24x48 -> 32, k=(3, 5, 7), s=2, g=4
i f 2x128x24x24x24 -> 384, k=7, g=32
i fb 2x256x48x48 -> 2048, k=9, s=3, p=1, g=32
iw fb 1x384x144x224 -> 192, k=9, s=2, p=4
iw f 16x192x16x16x16 -> 96, k=(3, 4, 4), p=(0, 2, 2)
i fb 2x512x18206 -> 256, k=1, s=2
i b 8x768x2905 -> 768, k=4
i fb 16x192x199x199 -> 12, k=3, s=3
iw b 4x256x40x160 -> 37, k=7, s=2, op=1
i b 25x32x16x16x16 -> 32, k=8, s=8, g=32
i f 8x56x270x480 -> 1, k=9, s=4, p=4, op=3
w f 16x32x64x128 -> 64, k=3, s=5, p=1, d=2
iw fb 4x128x33x47 -> 64, k=3, s=2, p=1
iw fb 16x64x56x57 -> 128, k=2, s=2
iw fb 16x96x28x25 -> 48, k=4, s=2, p=1
i fb 2x64x20x33x33 -> 32, k=2, s=2
iw fb 64x128x501 -> 64, k=5, s=1, p=2
i f 8x48x64x64x64 -> 48, k=3
"""
DTYPES = {"f": "float32", "b": "bfloat16"}
PASSES = {"i": Pass.INPUT_GRAD, "w": Pass.WEIGHT_GRAD}
SLOWER, FAR, CHECKED = 1.6, 5.0, 5e8
FIRST = {"window_dgrad_fma": 3, "window_dgrad_wgmma": 3, "window_wgrad_wgmma": 3}
ALWAYS = ("direct_tiled",)
Case = tuple[ConvTransposeProblem, Pass]


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=55, help="no layer is begun after so many")
    parser.add_argument("--pytorch", action="store_true")
    options, start = parser.parse_args(), time.monotonic()
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    timer = Timer(torch.device("cuda", 0), repetitions=7, budget_seconds=0.02)
    device = DeviceInfo.of(timer.device)
    lines = (line.split(" ", 2) for line in LAYERS.strip().splitlines())
    cases = [
        (replace(parse_layer(layer), dtype=DTYPES[dtype], tf32=dtype == "f"), PASSES[of])
        for passes, dtypes, layer in lines
        for dtype in dtypes
        for of in passes
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = pool.map(_ways, [(*case, device) for case in cases], chunksize=1)
    print(f"planned after {time.monotonic() - start:.0f} s", flush=True)
    sources = [source for ways in found for _, _, program in ways for source in program.sources]
    compile_ahead(sources, device.arch)
    print(f"{len(set(sources))} kernels compiled after {time.monotonic() - start:.0f} s", flush=True)
    records: list[Record] = []
    facts = {name: value for name, value in environment.facts("cuda").items() if hasattr(Record, name)}
    for case, ways in zip(cases, found):
        if time.monotonic() - start > options.seconds:
            break
        records += _measured(timer, *case, ways, options.pytorch)
        for record in records:
            vars(record).update(facts)
        write_csv(options.csv, records)
        torch.cuda.empty_cache()
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)


def _ways(of: tuple[ConvTransposeProblem, Pass, DeviceInfo]) -> list[tuple[Candidate, bool, Program]]:
    """What is measured: candidates, whether the planner chooses them, and their programs."""
    problem, pass_, device = of
    planned = plan(problem, pass_, device)
    offers = sorted(programs(problem, pass_, device), key=lambda each: each[0].seconds)
    met: dict[str, int] = {}
    ways = []
    for candidate, program in offers:
        name, chosen = candidate.schedule, candidate == planned.candidate
        met[name] = met.get(name, 0) + 1
        near = candidate.seconds < offers[0][0].seconds * (FAR if name in (*FIRST, *ALWAYS) else SLOWER)
        if chosen or (near and met[name] <= FIRST.get(name, 1)):
            ways.append((candidate, chosen, program))
    return ways


def _measured(
    timer: Timer, problem: ConvTransposeProblem, pass_: Pass, ways: list[tuple[Candidate, bool, Program]], pytorch: bool
) -> Iterator[Record]:
    """One record for each way."""
    operands = make_operands(problem, timer.device, 0)
    floor, torch_ms = H200.floor_ms(problem, strict_fp32=False), None
    if pytorch:
        torch_ms = timer.measure(torch_call(problem, pass_, operands)).ms
    checked = sample(problem, pass_, operands, CHECKED)
    rounded = checked.reference.to(operands.weight.dtype)
    input_grad = pass_ is Pass.INPUT_GRAD
    result = torch.empty_like(operands.input if input_grad else operands.weight)
    known = {DST: result, SRC: operands.grad_output, WEIGHT: operands.weight}
    if not input_grad:
        known = {DST: result, X: operands.input, GRAD: operands.grad_output}
    print(f"{pass_.value} of {problem}: floor {floor:.4f}, PyTorch {torch_ms or 0:.4f}", flush=True)
    for candidate, chosen, program in ways:
        timing = _time(timer, program, known)
        found = compare(checked.of(result), rounded, checked.reference, checked.rounding)
        record = Record(str(problem), str(problem), pass_.value, problem.dtype, "nchw", OK if found.ok else WRONG)
        record.reason = "" if found.ok else f"{found.broken} elements, {found.worst:.2f} times what is allowed"
        record.algorithm, record.config = candidate.schedule, candidate.describe()
        record.ms, record.predicted_ms, record.planned = timing, 1e3 * candidate.seconds, chosen
        record.torch_benchmark_ms, record.floor_ms, record.times_floor = torch_ms, floor, timing / floor
        record.error, record.torch_error, record.compared = found.error, found.torch_error, checked.compared
        record.ceilings = str(H200)
        said = f"{timing:.4f} ms, {timing / floor:.2f} x floor, forecast {record.predicted_ms:.4f}"
        said = f"  {'*' if chosen else ' '} {said}, worst {found.worst:.2f}"
        print(f"{said}: {candidate.describe()} {record.reason}", flush=True)
        yield record


def _time(timer: Timer, program: Program, known: dict[str, torch.Tensor]) -> float:
    """Milliseconds of a program, whose result is left in the destination."""
    arch, stream = DeviceInfo.of(timer.device).arch, torch.cuda.current_stream().cuda_stream
    room = {
        each.name: torch.full((max(1, each.bytes),), 255, device="cuda", dtype=torch.uint8) for each in program.buffers
    }
    tensors = {**known, **room}
    names = list(dict.fromkeys(name for step in program.steps for name in step.operands))
    addresses = [tensors[name].data_ptr() if name in tensors else 0 for name in names]
    call = Executable(program, arch, 0, {name: place for place, name in enumerate(names)})
    known[DST].fill_(float("nan"))
    return timer.measure(lambda: call(stream, addresses)).ms


if __name__ == "__main__":
    main()
