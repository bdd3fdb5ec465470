"""Times the steps around products, and their bytes: ``python steps.py LABEL --csv FILE``; needs a Hopper GPU.

The package is the one that Python finds, so that two checkouts are compared by PYTHONPATH. Of each layer, the first
config that a schedule offers; its result is checked against PyTorch's. A step's bytes are those of its operands, each
read or written once, and of a flattening that of a share of the images. ``--steps`` times some kernels alone, of all
layers that have them, and neither compiles nor checks the product.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.plan.shortlist import candidates
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, GRAD, SRC, WEIGHT, X
from polyphase.schedules import SCHEDULES

LAYERS = """
8x256x18693 -> 256, k=8, s=4, p=2 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
16x64x16x16x16 -> 256, k=4, s=2, p=1 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
16x512x32x32 -> 256, k=4, s=2, p=1 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
4x320x16x16x16 -> 320, k=3, p=1 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
12x384x24x75 -> 384, k=3, s=2, p=1 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
16x128x65x63 -> 128, k=3, s=2, p=1, op=1 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
5x96x65x63 -> 160, k=5, p=2 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
4x128x48x48 -> 128, k=8, s=4, p=2 | weight_grad | tap_gemm_wgrad_tma | bfloat16
6x256x47x53 -> 128, k=5, s=3, p=1 | weight_grad | tap_gemm_wgrad_tma | bfloat16
16x128x64x64 -> 128, k=3, s=2, p=1, op=1 | weight_grad | tap_gemm_wgrad_tma | bfloat16
6x768x2x8 -> 384, k=16, s=8, p=4 | forward | tap_gemm_tma | float32
6x768x2x8 -> 384, k=16, s=8, p=4 | weight_grad | window_wgrad_wgmma | bfloat16
6x768x2x8 -> 384, k=16, s=8, p=4 | weight_grad | tap_gemm_wgrad_tma | bfloat16
2x192x6x6x6 -> 768, k=6, s=3 | forward | tap_gemm_tma | bfloat16
2x192x6x6x6 -> 768, k=6, s=3 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
1x512x10229 -> 512, k=32, s=32 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
4x768x160x160 -> 768, k=4, s=2, p=1, g=32 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
1x512x14x14x14 -> 256, k=5, s=3, p=2, op=2 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
1x512x14x14x14 -> 256, k=5, s=3, p=2, op=2 | forward | tap_gemm_tma | bfloat16
8x512x17x71 -> 513, k=3, s=5, p=3, d=3 | forward | tap_gemm_tma | bfloat16
8x512x17x71 -> 513, k=3, s=5, p=3, d=3 | weight_grad | tap_gemm_wgrad_tma | bfloat16
4x64x32x32 -> 64, k=3, p=1 | forward | tap_gemm_tma | float32,bfloat16
4x64x32x32 -> 64, k=3, p=1 | input_grad | tap_gemm_tma | float32,bfloat16
4x64x32x32 -> 64, k=3, p=1 | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
16x512x8x8 -> 256, k=4, s=2, p=1 | forward | tap_gemm_tma | float32
16x512x8x8 -> 256, k=4, s=2, p=1 | input_grad | tap_gemm_tma | bfloat16
16x512x8x8 -> 256, k=4, s=2, p=1 | weight_grad | tap_gemm_wgrad_tma | bfloat16
8x512x17x71 -> 513, k=3, s=5, p=3, d=3 | input_grad | window_dgrad_transposed | bfloat16
16x512x8x8 -> 256, k=4, s=2, p=1 | input_grad | window_dgrad_transposed | bfloat16
4x64x32x32 -> 64, k=3, p=1 | input_grad | window_dgrad_transposed | float32,bfloat16
8x8x5153 -> 8, k=2048, s=512, p=768, g=2 | weight_grad | tap_gemm_wgrad_tma | float32
32x192x100x100 -> 128, k=3, s=2 | weight_grad | tap_gemm_wgrad_tma | bfloat16
16x150x19241 -> 75, k=1 | weight_grad | tap_gemm_wgrad_tma | bfloat16
12x320x40x16x30 -> 12, k=3, s=3 | input_grad | tap_gemm_tma | float32,bfloat16
1x512x10229 -> 512, k=32, s=32 | input_grad | tap_gemm_tma | float32,bfloat16
32x192x100x100 -> 128, k=3, s=2 | input_grad | tap_gemm_tma | float32
6x512x177x177 -> 256, k=(1, 2), s=(1, 2), d=(1, 4) | weight_grad | tap_gemm_wgrad_tma | float32,bfloat16
"""


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("label")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--steps", default="", help="kernels, separated by commas")
    parser.add_argument("--layers", default="", help="beginnings of layers, separated by commas; all without")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = True
    timer = Timer(torch.device("cuda", 0), repetitions=9)
    device = DeviceInfo.of(timer.device)
    wanted = cases(tuple(options.layers.split(",")))
    found = [(case, program) for case in wanted if (program := program_of(*case, device)) is not None]
    only = set(filter(None, options.steps.split(",")))
    sources = [source for _, program in found for source in program.sources]
    compile_ahead([source for source in sources if not only or source.kernel in only], device.arch)
    new = not options.csv.exists()
    with options.csv.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["label", "gpu", "layer", "pass", "schedule", "error", "step", "us", "megabytes", "tb_s"])
        for (problem, pass_, schedule), program in found:
            for row in rows(timer, problem, pass_, program, only):
                writer.writerow([options.label, torch.cuda.get_device_name(), problem, pass_.value, schedule, *row])
            file.flush()
            torch.cuda.empty_cache()


def cases(beginnings: tuple[str, ...]) -> Iterator[tuple[ConvTransposeProblem, Pass, str]]:
    """All layers, passes and dtypes, of the lines that have one of the ``beginnings``."""
    for line in filter(lambda line: line.startswith(beginnings), LAYERS.strip().splitlines()):
        layer, pass_, schedule, dtypes = (part.strip() for part in line.split("|"))
        for dtype in dtypes.split(","):
            yield replace(parse_layer(layer), dtype=dtype, tf32=dtype == "float32"), Pass(pass_), schedule


def program_of(problem: ConvTransposeProblem, pass_: Pass, name: str, device: DeviceInfo) -> Program | None:
    """That of the first config of a schedule."""
    schedule = next(each for each in SCHEDULES if each.name == name)
    layouts = Layouts.dense(problem)
    first = next(iter(candidates(schedule, problem, pass_, device, layouts)), None)
    return None if first is None else schedule.program(problem, pass_, device, layouts, first.config)


def rows(
    timer: Timer, problem: ConvTransposeProblem, pass_: Pass, program: Program, only: set[str]
) -> Iterator[list[object]]:
    """All steps together first, then each by itself; those of the kernels ``only`` where such are given."""
    parts = [Program((step,)) for step in program.steps if not only or step.source.kernel in only]
    if not parts:
        return
    operands = make_operands(problem, timer.device, 0)
    if only:
        written = {
            Pass.FORWARD: operands.grad_output,
            Pass.INPUT_GRAD: operands.input,
            Pass.WEIGHT_GRAD: operands.weight,
        }
        expected, error = written[pass_], math.nan
    else:
        expected, parts = torch_call(problem, pass_, operands)(), [program, *parts]
    dst = torch.full_like(expected, math.nan)
    tensors = {X: operands.input, GRAD: operands.grad_output, WEIGHT: operands.weight, DST: dst}
    tensors[SRC] = operands.input if pass_ is Pass.FORWARD else operands.grad_output
    for each in program.buffers:
        tensors[each.name] = torch.empty(each.bytes, device=timer.device, dtype=torch.uint8)
    stream = torch.cuda.current_stream().cuda_stream
    places = {name: i for i, name in enumerate((*tensors, BIAS))}
    addresses = [*(each.data_ptr() for each in tensors.values()), 0]
    sizes = {name: each.numel() * each.element_size() for name, each in tensors.items()} | {BIAS: 0}
    shares = sum(step.source.kernel == "flatten_positions" for step in program.steps)
    for part in parts:
        call = Executable(part, DeviceInfo.of(timer.device).arch, 0, places)
        call(stream, addresses)
        if part is program:
            error = ((dst - expected).float().norm() / expected.float().norm()).item()
        us = 1e3 * timer.measure(lambda call=call: call(stream, addresses)).ms  # type: ignore[misc]
        name = "all" if part is program else part.main.source.kernel
        moved = 0.0
        if part is not program and part.main is not program.main:
            divided = {X, GRAD} if name == "flatten_positions" else set()
            moved = sum(sizes[each] / (shares if each in divided else 1) for each in part.main.operands)
        yield [f"{error:.1e}", name, f"{us:.1f}", f"{moved / 1e6:.1f}", f"{moved / us / 1e6:.2f}"]


if __name__ == "__main__":
    main()
