"""Times layer norms over channels in the epilogue: ``python norms.py --csv FILE``. Needs a GPU.

Of each layer the planned config with each epilogue, and of those marked "every" all configs with the last one, unless
``--planned``. Then SAM's upscaling block as a CUDA graph: by PyTorch, fused but for its norm, fused; by `torch.compile`
alone, and with `enable_compile_fusion`. Results are compared with float64.
"""

from __future__ import annotations

import argparse
import copy
import csv
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polyphase
from polyphase import fuse_graphs, module_steps
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import MEMORY_FORMATS, make_operands
from polyphase.bench.timing import Timer
from polyphase.jit.compiler import compile_kernel
from polyphase.jit.launcher import Executable
from polyphase.plan import planner
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, Epilogue, Operand, Operation
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, SRC, WEIGHT
from polyphase.schedules.schedule import Candidate
from polyphase.torch_op.epilogue import by_tensor_operations

LAYERS = """
16x256x64x64 -> 64, k=2, s=2, bias          | float32 bfloat16 | every
16x64x128x128 -> 32, k=2, s=2, bias         | float32 bfloat16 |
16x256x64x64 -> 64, k=2, s=2, bias          | float32,last bfloat16,last |
16x256x32x32 -> 128, k=2, s=2, bias         | float32 bfloat16 |
16x96x65x67 -> 48, k=3, s=2, p=1, op=1      | bfloat16 |
"""
NORM = Operation("layer_norm", (1e-6,), (Operand("weight", CHANNEL), Operand("offset", CHANNEL)))
EPILOGUES = {
    "none": Epilogue(),
    "gelu": Epilogue((Operation("gelu"),)),
    "norm": Epilogue((NORM,)),
    "norm, gelu": Epilogue((NORM, Operation("gelu"))),
}
Offer = tuple[str, ConvTransposeProblem, Candidate, Program]


def main() -> None:
    """Measure all layers, then the block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400, help="no layer is begun after so many")
    parser.add_argument("--planned", action="store_true", help="no configs but those that are planned")
    options = parser.parse_args()
    start, place = time.monotonic(), torch.device("cuda", 0)
    device, timer = DeviceInfo.of(place), Timer(place, 15, 0.1)
    every = [(problem, each and not options.planned) for problem, each in cases()]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool, options.csv.open("w", newline="") as file:
        found = [offers(*case, device) for case in every]
        sources = {source for case in found for _, _, _, program in case for source in program.sources}
        for problem, _ in every:  # the references'
            wide = replace(problem, dtype="float64", batch=1, channels_last=False, tf32=False)
            reference = planner.plan(wide, Pass.FORWARD, device, by_prediction=True).program
            sources |= set() if reference is None else set(reference.sources)
        list(pool.map(compile_kernel, sources, [device.arch] * len(sources)))
        print(f"{len(sources)} kernels after {time.monotonic() - start:.0f} s", flush=True)
        writer = csv.writer(file)
        writer.writerow(["gpu", "layer", "epilogue", "floor_us", "config", "error", "forecast_us", "measured_us"])

        def write(*row: object) -> None:
            writer.writerow([torch.cuda.get_device_name(), *row])
            print(*row, sep=" | ", flush=True)
            file.flush()

        with torch.inference_mode():
            for case in found:
                if time.monotonic() - start > options.seconds:
                    break
                for row in rows(timer, case, device):
                    write(*row)
            for row in blocks(timer):
                write(*row)


def cases() -> Iterator[tuple[ConvTransposeProblem, bool]]:
    """The layers in their dtypes and formats, and whether all configs are measured."""
    for line in LAYERS.strip().splitlines():
        layer, settings, every = line.split("|")
        for each in settings.split():
            dtype, _, last = each.partition(",")
            problem = replace(
                parse_layer(layer.strip()), dtype=dtype, channels_last=bool(last), tf32=dtype == "float32"
            )
            yield problem, "every" in every


def offers(problem: ConvTransposeProblem, every: bool, device: DeviceInfo) -> list[Offer]:
    """What is measured of a layer."""
    found: list[Offer] = []
    for name, epilogue in EPILOGUES.items():
        asked = replace(problem, epilogue=epilogue)
        planned = planner.plan(asked, Pass.FORWARD, device, by_prediction=True)
        assert planned.candidate is not None and planned.program is not None  # noqa: PT018
        found.append((name, asked, planned.candidate, planned.program))
    if every:
        described = {candidate.describe() for _, _, candidate, _ in found[-1:]}
        more = planner.programs(asked, Pass.FORWARD, device)
        found += [(name, asked, *each) for each in more if each[0].describe() not in described]
    return found


def rows(timer: Timer, case: list[Offer], device: DeviceInfo) -> Iterator[tuple[object, ...]]:
    """Of a layer: epilogue, config, error, microseconds foretold and measured."""
    problem = case[0][1]
    operands = make_operands(problem, timer.device)
    x, weight, bias = operands.input, operands.weight, operands.bias
    like = {"device": timer.device, "dtype": x.dtype}
    two = [torch.randn(problem.out_channels, **like) for _ in range(2)]  # type: ignore[call-overload]
    constants = problem.stride, problem.padding, problem.output_padding, problem.groups, problem.dilation
    wide = [None if each is None else each.double() for each in (x[:1], weight, bias)]
    sums = getattr(polyphase, f"conv_transpose{problem.dims}d")(*wide, *constants)
    result = torch.empty(problem.output_shape, **like)  # type: ignore[call-overload]
    if problem.channels_last:
        result = result.contiguous(memory_format=MEMORY_FORMATS[result.dim()])
    floor = f"{1e6 * problem.bytes / device.copy_bytes_per_second:.1f}"
    for name, asked, candidate, program in case:
        result.fill_(torch.nan)
        tensors: dict[str, Tensor | None] = {SRC: x, WEIGHT: weight, BIAS: bias, DST: result}
        tensors |= dict(zip(asked.epilogue.named_operands, two))
        for each in program.buffers:
            tensors[each.name] = torch.empty(each.bytes, device=timer.device, dtype=torch.uint8)
        places = {tensor: place for place, tensor in enumerate(tensors)}
        addresses = [0 if each is None else each.data_ptr() for each in tensors.values()]
        stream, executable = torch.cuda.current_stream().cuda_stream, Executable(program, device.arch, 0, places)
        measured = 1e3 * timer.measure(lambda: executable(stream, addresses)).ms  # noqa: B023
        wanted = by_tensor_operations(asked.epilogue, [each.double() for each in two], sums)
        error = float((result[:1].double() - wanted).norm() / wanted.norm())
        forecast = f"{candidate.seconds * 1e6:.1f}"
        yield problem, name, floor, candidate.describe(), f"{error:.1e}", forecast, f"{measured:.1f}"


def blocks(timer: Timer) -> Iterator[tuple[object, ...]]:
    """SAM's upscaling as CUDA graphs."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    known, shared = importlib.import_module("blocks"), importlib.import_module("shared")
    block = known.BLOCKS["SAM upscaling, batch 16"]
    for dtype in (torch.float32, torch.bfloat16):
        model = known.built(block)
        inputs = [torch.randn(shape, device="cuda", dtype=dtype) for shape in block.inputs]
        wanted = copy.deepcopy(model).cuda().double()(*(each[:1].double() for each in inputs))
        for name in ("PyTorch", "fused but for the norm", "fused", "compiled", "compiled and fused"):
            call: Any = copy.deepcopy(model).to("cuda", dtype)
            if "compiled" in name:
                call = compiled(call, name)
            elif name != "PyTorch":
                find = module_steps.normalized_dims
                if name != "fused":
                    fuse_graphs.normalized_dims = module_steps.normalized_dims = lambda module: ()
                polyphase.accelerate(call, fuse=True)
                fuse_graphs.normalized_dims = module_steps.normalized_dims = find
            error = shared.error(call(*inputs)[:1], wanted)
            measured = 1e3 * timer.measure(shared.graphed(call, inputs)).ms
            yield "SAM upscaling, batch 16", str(dtype), "", name, f"{error:.1e}", "", f"{measured:.1f}"


def compiled(model: nn.Module, name: str) -> Callable[..., Tensor]:
    """A model by `torch.compile`, with polyphase's layers and what follows them as its graph has it, or without."""
    torch._dynamo.reset()
    if name == "compiled":
        return torch.compile(model, fullgraph=True)
    polyphase.accelerate(model)
    fusion, call = polyphase.enable_compile_fusion(), torch.compile(model, fullgraph=True)

    def first(*inputs: Tensor) -> Tensor:
        result = call(*inputs)
        if fusion.chains:
            print(fusion.chains, flush=True)
            fusion.chains.clear()
        fusion.disable()
        return result

    return first


if __name__ == "__main__":
    main()
