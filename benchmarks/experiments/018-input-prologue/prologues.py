"""Checks and times functions of the input: ``python prologues.py --csv FILE``. Needs a GPU.

First layers of all kinds behind a function, in poisoned memory, against float64: no further from it than PyTorch's two
calls, or its function and polyphase's layer; and calls in a row against calls one by one. Then HiFi-GAN's and DAC's
upsampling blocks, an activation and a layer each, as CUDA graphs: by PyTorch, with polyphase's layer, fused; of the
programs alone the layer without the activation, with it in its kernel, and with it in a step before. Last each model's
four blocks together, and these by `torch.compile`.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import polyphase
from polyphase import fused, prepared
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import Executable
from polyphase.kept import forget, keep
from polyphase.plan import planner
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, Epilogue, Operand, Operation, of_input
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.program.prologue import apply_step, in_a_step, within_kernels
from polyphase.program.step import BIAS, DST, SRC, WEIGHT, Step

LEAKY = Epilogue((Operation("leaky_relu", (0.1,)),))
ELU = Epilogue((Operation("elu", (1.0,)),))
PRELU = Epilogue((Operation("prelu", (), (Operand("slope", CHANNEL),)),))
SNAKE = Epilogue((Operation("snake", (1e-9, 0.0), (Operand("alpha", CHANNEL),)),))
BETA = Epilogue((Operation("snake", (1e-9, 1.0), (Operand("alpha", CHANNEL), Operand("beta", CHANNEL))),))
RELU = Epilogue((Operation("relu"),))
SIGMOID = Epilogue((Operation("sigmoid"),))

CHECKED = (
    ("3x512x101 -> 256, k=16, s=8, p=4, bias", LEAKY),
    ("3x512x100 -> 256, k=16, s=8, p=4, bias", BETA),
    ("2x256x333 -> 128, k=10, s=5, p=3, op=1, bias", SNAKE),
    ("5x64x1001 -> 32, k=4, s=2, p=1, bias", ELU),
    ("2x192x2752 -> 96, k=4, s=2, p=1, bias", SNAKE),
    ("2x72x515 -> 40, k=7, s=3, p=2, bias", PRELU),
    ("3x56x33x35 -> 1, k=9, s=3, p=4, op=2", PRELU),
    ("2x512x8x8 -> 512, k=4, s=2, p=1, bias", RELU),
    ("2x1024x16x16 -> 256, k=4, s=2, p=1, bias", RELU),
    ("4x64x63x65 -> 64, k=2, s=2, bias", BETA),
    ("4x96x33x31 -> 48, k=4, s=2, p=1, g=4, bias", ELU),
    ("2x32x9x17x18 -> 24, k=3, s=2, p=1, op=1, bias", SNAKE),
    ("2x128x40x40 -> 64, k=4, s=2, p=1, channels_last, bias", LEAKY),
    ("4x128x300 -> 64, k=4, s=2, p=1, bias", SIGMOID),
    ("2x1536x86 -> 768, k=16, s=8, p=4, bias", SNAKE),
    ("2x768x688 -> 384, k=16, s=8, p=4, bias", SIGMOID),
)
HIFI_GAN = ("512x100 -> 256, k=16, s=8, p=4", "256x800 -> 128, k=16, s=8, p=4",
            "128x6400 -> 64, k=4, s=2, p=1", "64x12800 -> 32, k=4, s=2, p=1")  # fmt: skip
DAC = ("1536x86 -> 768, k=16, s=8, p=4", "768x688 -> 384, k=16, s=8, p=4",
       "384x5504 -> 192, k=8, s=4, p=2", "192x22016 -> 96, k=4, s=2, p=1")  # fmt: skip
MODELS = {"HiFi-GAN": (HIFI_GAN, LEAKY, (1, 16)), "DAC": (DAC, SNAKE, (1, 8))}
DTYPES = ("float32", "bfloat16")
HEADER = ("gpu", "part", "block", "batch", "dtype", "way", "value", "unit", "note")


def main() -> None:
    """Compile, check, time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150, help="nothing is begun after so many")
    options = parser.parse_args()
    start, place = time.monotonic(), torch.device("cuda", 0)
    device, timer = DeviceInfo.of(place), Timer(place, 15, 0.05)
    timed = [programs(problem, device) for problem in (*problems(1), *problems(0))]
    sources = {source for ways in timed for program in ways.values() for source in program.sources}
    sources |= {step.source for each in problems(1) for _, step in steps_of(each, Layouts.of_call(each, Pass.FORWARD))}
    for problem in checked():
        for each in (problem, replace(problem, prologue=Epilogue()), wide_of(problem)):
            sources |= set(planner.plan(each, Pass.FORWARD, device, by_prediction=True).programs[0].sources)
    compile_ahead(sources, device.arch)
    print(f"{len(sources)} kernels after {time.monotonic() - start:.0f} s", flush=True)
    with options.csv.open("w", newline="") as file, torch.inference_mode():
        writer = csv.writer(file)
        writer.writerow(HEADER)
        parts = itertools.chain(
            map(check, checked()),
            map(races, problems(0)),
            (steps(each, device, timer) for each in problems(1)),
            (blocks(each, device, timer) for each in problems(1)),
            models(timer),
            (blocks(each, device, timer) for each in problems(0)),
        )
        for rows in parts:
            for row in rows:
                writer.writerow([torch.cuda.get_device_name(), *row])
                print(f"{time.monotonic() - start:4.0f} s", *row, sep=" | ", flush=True)
            file.flush()
            if time.monotonic() - start > options.seconds:
                break


def layer(text: str, dtype: str, prologue: Epilogue) -> ConvTransposeProblem:
    return replace(parse_layer(text), dtype=dtype, tf32=dtype == "float32", prologue=prologue)


def checked() -> Iterator[ConvTransposeProblem]:
    """The layers that are checked."""
    for (text, prologue), dtype in itertools.product(CHECKED, DTYPES):
        yield layer(text, dtype, prologue)


def problems(large: int) -> Iterator[ConvTransposeProblem]:
    """The blocks that are timed, of the large batch or of one."""
    for texts, prologue, batches in MODELS.values():
        for dtype, text in itertools.product(DTYPES, texts):
            yield layer(f"{batches[large]}x{text}, bias", dtype, prologue)


def wide_of(problem: ConvTransposeProblem) -> ConvTransposeProblem:
    return replace(problem, dtype="float64", channels_last=False, tf32=False, prologue=Epilogue())


def programs(problem: ConvTransposeProblem, device: DeviceInfo) -> dict[str, Program]:
    """Of a block: the layer alone, what is planned, and both ways to compute the prologue."""
    bare = planner.plan(replace(problem, prologue=Epilogue()), Pass.FORWARD, device, by_prediction=True)
    planned = planner.plan(problem, Pass.FORWARD, device, by_prediction=True)
    selected, layouts = bare.selected[0], Layouts.of_call(problem, Pass.FORWARD)
    found = {"bare": selected.program, "planned": planned.programs[0]}
    found["in a step"] = in_a_step(selected.program, problem, layouts)
    config = selected.candidate.config
    if selected.schedule.prologue_seconds(bare.problem, problem.prologue, device, layouts, config) is not None:
        found["in its kernels"] = within_kernels(selected.program, problem.prologue)
    return found


class Block:
    """A block's tensors, and what computes it."""

    def __init__(self, problem: ConvTransposeProblem) -> None:
        self.problem = problem
        made = make_operands(problem, torch.device("cuda", 0))
        self.x, self.weight, self.bias = made.input, made.weight, made.bias
        generator = torch.Generator("cuda").manual_seed(1)
        self.operands = {
            of_input(name): torch.rand(problem.in_channels, device="cuda", generator=generator)
            .add(0.3)
            .to(self.x.dtype)
            for name in problem.prologue.named_operands
        }
        extra = {"output_padding": problem.output_padding, "groups": problem.groups, "dilation": problem.dilation}
        self.constants: dict[str, Any] = {"stride": problem.stride, "padding": problem.padding, **extra}
        (self.operation,) = problem.prologue.operations

    def steps(self) -> list[fused.Step]:
        """Of the prologue."""
        roles = [operand.role for operand in self.operation.operands]
        return [fused.Step(self.operation.kind, self.operation.constants, tuple(zip(roles, self.operands.values())))]

    def active(self, x: Tensor) -> Tensor:
        """The activation as models write it."""
        kind, constants = self.operation.kind, self.operation.constants
        if kind == "snake":
            alpha, *beta = (each.view(1, -1, *[1] * (x.dim() - 2)).to(x.dtype) for each in self.operands.values())
            (beta_of,) = beta or [alpha]
            if constants[1]:
                alpha, beta_of = alpha.exp(), beta_of.exp()
            return x + (beta_of + constants[0]).reciprocal() * torch.sin(alpha * x).pow(2)
        if kind == "prelu":
            return F.prelu(x, self.operands["input_slope_0"].to(x.dtype))
        function: Callable[..., Tensor] = getattr(F, kind, None) or getattr(torch, kind)
        return function(x, *constants)

    def torch(self, x: Tensor) -> Tensor:
        """By PyTorch."""
        function = getattr(F, f"conv_transpose{self.problem.dims}d")
        return function(self.active(x), self.weight, self.bias, **self.constants)

    def swapped(self, x: Tensor) -> Tensor:
        """With polyphase's layer."""
        function = getattr(polyphase, f"conv_transpose{self.problem.dims}d")
        return function(self.active(x), self.weight, self.bias, **self.constants)

    def fused(self, x: Tensor) -> Tensor:
        """In one call."""
        function = getattr(fused, f"conv_transpose{self.problem.dims}d")
        return function(x, self.weight, self.bias, **self.constants, prologue=self.steps())

    def exact(self) -> Tensor:
        """In float64."""
        function = getattr(polyphase, f"conv_transpose{self.problem.dims}d")
        bias = None if self.bias is None else self.bias.double()
        return function(self.active(self.x.double()), self.weight.double(), bias, **self.constants)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def check(problem: ConvTransposeProblem) -> Iterator[tuple[object, ...]]:
    """The error of the fused call beside those of PyTorch's two, and of PyTorch's function and polyphase's layer."""
    block = Block(problem)
    wanted = block.exact()
    prepared.POISON = True
    errors = {way: error(getattr(block, way)(block.x), wanted) for way in ("torch", "swapped", "fused")}
    prepared.POISON = False
    note = "ok" if errors["fused"] <= 1.05 * max(errors["torch"], errors["swapped"]) + 1e-7 else "FURTHER OFF"
    layer_text = str(problem).replace("×", "x").replace("→", "->")
    for way, value in errors.items():
        yield "check", layer_text, problem.batch, problem.dtype, way, f"{value:.3e}", "relative", note
    torch.cuda.empty_cache()


def blocks(problem: ConvTransposeProblem, device: DeviceInfo, timer: Timer) -> Iterator[tuple[object, ...]]:
    """One block, in all ways."""
    block = Block(problem)
    shared = importlib.import_module("shared")
    what = (
        "block",
        f"{problem.in_channels}x{problem.input_size[0]} -> {problem.out_channels}",
        problem.batch,
        problem.dtype,
    )
    for way, call in (("PyTorch", block.torch), ("swapped", block.swapped), ("fused", block.fused)):
        milliseconds = timer.measure(shared.graphed(call, [block.x])).ms
        yield *what, way, f"{1e3 * milliseconds:.2f}", "us", "graph"
    result = torch.empty(problem.output_shape, device="cuda", dtype=block.x.dtype)
    found = programs(problem, device)
    kernels = [step.source.kernel for step in found.pop("planned").steps]
    for way, program in found.items():
        tensors: dict[str, Tensor | None] = {SRC: block.x, WEIGHT: block.weight, BIAS: block.bias, DST: result}
        tensors |= block.operands
        for each in program.buffers:
            tensors[each.name] = torch.empty(each.bytes, device="cuda", dtype=torch.uint8)
        places = {tensor: place for place, tensor in enumerate(tensors)}
        addresses = [0 if each is None else each.data_ptr() for each in tensors.values()]
        executable = Executable(program, device.arch, 0, places)

        def launch(*_: object) -> None:
            executable(torch.cuda.current_stream().cuda_stream, addresses)  # noqa: B023

        milliseconds = timer.measure(shared.graphed(launch, [])).ms
        note = " ".join(kernels) if way == "bare" else ""
        yield *what, f"program, {way}", f"{1e3 * milliseconds:.2f}", "us", note
    torch.cuda.empty_cache()


def races(problem: ConvTransposeProblem) -> Iterator[tuple[object, ...]]:
    """Calls in a row, on inputs that change between them, against calls one by one; with packed weights kept, too."""
    block = Block(problem)
    given = [torch.randn_like(block.x) for _ in range(3)]
    for kept in (False, True):
        if kept:
            keep(block.weight)
        wanted = []
        for each in given:
            torch.cuda.synchronize()
            wanted.append(block.fused(each))
        torch.cuda.synchronize()
        found = []
        for turn in range(24):
            block.x.copy_(given[turn % 3])
            found.append(block.fused(block.x))
        wrong = sum(not torch.equal(each, wanted[turn % 3]) for turn, each in enumerate(found))
        text = f"{problem.in_channels}x{problem.input_size[0]} -> {problem.out_channels}"
        yield "races", text, problem.batch, problem.dtype, "kept" if kept else "packed", wrong, "calls", "of 24"
    forget(block.weight)
    torch.cuda.empty_cache()


def steps(problem: ConvTransposeProblem, device: DeviceInfo, timer: Timer) -> Iterator[tuple[object, ...]]:
    """The step that computes a prologue, by how many vectors a thread has."""
    block, result = Block(problem), torch.empty(problem.input_shape, device="cuda", dtype=getattr(torch, problem.dtype))
    shared, layouts = importlib.import_module("shared"), Layouts.of_call(problem, Pass.FORWARD)
    for count, step in steps_of(problem, layouts):
        tensors = [block.x, *block.operands.values(), result]
        operands = tuple(map(str, range(len(tensors))))
        program = Program((replace(step, operands=operands),))
        executable = Executable(program, device.arch, 0, {name: place for place, name in enumerate(operands)})
        addresses = [each.data_ptr() for each in tensors]

        def launch(*_: object) -> None:
            executable(torch.cuda.current_stream().cuda_stream, addresses)  # noqa: B023

        milliseconds = timer.measure(shared.graphed(launch, [])).ms
        text = f"{problem.in_channels}x{problem.input_size[0]}"
        yield "step", text, problem.batch, problem.dtype, f"{count} at once", f"{1e3 * milliseconds:.2f}", "us", ""
    torch.cuda.empty_cache()


def steps_of(problem: ConvTransposeProblem, layouts: Layouts) -> list[tuple[int, Step]]:
    """It with one vector for each thread, and with more."""
    return [(count, apply_step(problem, layouts, count)) for count in (1, 2, 4)]


def models(timer: Timer) -> Iterator[Iterator[tuple[object, ...]]]:
    """Each model's blocks together, the large batch first."""
    for large, (name, (texts, prologue, batches)), dtype in itertools.product((1, 0), MODELS.items(), DTYPES):
        yield model(name, [Block(layer(f"{batches[large]}x{text}, bias", dtype, prologue)) for text in texts], timer)


def model(name: str, parts: list[Block], timer: Timer) -> Iterator[tuple[object, ...]]:
    """Four blocks as one CUDA graph."""
    shared, inputs = importlib.import_module("shared"), [block.x for block in parts]
    problem = parts[0].problem

    def all_of(way: str) -> Callable[..., list[Tensor]]:
        return lambda *given: [getattr(block, way)(x) for block, x in zip(parts, given)]

    for way in ("torch", "swapped", "fused", "compiled"):
        call = all_of("torch" if way == "compiled" else way)
        if way == "compiled":
            torch._dynamo.reset()
            call = torch.compile(call, fullgraph=True, dynamic=False)
        milliseconds = timer.measure(shared.graphed(call, inputs)).ms
        yield "four blocks", name, problem.batch, problem.dtype, way, f"{1e3 * milliseconds:.2f}", "us", "graph"
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
