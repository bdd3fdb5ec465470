"""Blocks of models around the layer, on one GPU: PyTorch, polyphase, and polyphase with what stands around the layer.

    PYTHONPATH=src python benchmarks/blocks.py                  # writes benchmarks/results/blocks.csv; see --seconds

Each block runs in inference: by PyTorch, with its layers swapped (`accelerate`), and fused (`accelerate(fuse=True)`);
eager, by `torch.compile`, as a CUDA graph of either. Outputs are compared with float64 on part of the batch: a block
that is further from it than PyTorch's own by more than its dtype allows is ``wrong``, and the exit status 1. Kernels
are compiled before anything is timed, in processes. KernelBench's problems are those of `kernelbench_level2.py`.
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kernelbench_level2 import LEVEL2
from shared import (
    CONTESTANTS,
    ROOT,
    compile_kernels,
    compiled,
    error,
    fill_inductor,
    operands,
    problems_met,
    reductions_met,
    sources_of,
    timed,
    write,
)
from sound_models import Snake
from torch import Tensor, nn
from zoo import evaluating

import polyphase
from polyphase.bench import environment
from polyphase.bench.ceilings import copy_rate
from polyphase.bench.report import make_console
from polyphase.bench.timing import Timer
from polyphase.jit.launcher import quiet
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.reduction import program_of


@dataclass
class Row:
    """One block in one dtype, one way of running it. Milliseconds are medians of one call, the cache flushed before."""

    block: str
    dtype: str
    mode: str  # eager, compile, graph of the eager block, graph of the compiled one
    status: str = ""
    reason: str = ""
    torch_ms: float | None = None
    swapped_ms: float | None = None
    fused_ms: float | None = None
    fused_over_torch: float | None = None
    fused_over_swapped: float | None = None
    floor_ms: float | None = None  # input, weights and output once, at 90 % of the copy rate that is measured
    torch_error: float | None = None
    swapped_error: float | None = None
    fused_error: float | None = None
    megabytes: float | None = None


@dataclass(frozen=True)
class Block:
    """A block: how it is built, and the shapes that it is given."""

    build: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]


class LayerNorm2d(nn.Module):
    """SAM's, over channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W), normalized over C."""
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class UpBlock(nn.Module):
    """U-Net's layer and concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(128, 64, 2, 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """(N, 128, H, W) and (N, 64, 2·H, 2·W) to (N, 128, 2·H, 2·W)."""
        return torch.cat([skip, self.up(x)], 1)


def dcgan(width: int = 64) -> nn.Module:
    """The generator of DCGAN, 64 pixels."""
    widths = (100, 8 * width, 4 * width, 2 * width, width)
    layers: list[nn.Module] = []
    for i, (one, other) in enumerate(itertools.pairwise(widths)):
        layers += [nn.ConvTranspose2d(one, other, 4, *((1, 0) if i == 0 else (2, 1)), bias=False)]
        layers += [nn.BatchNorm2d(other), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def pose(width: int = 256) -> nn.Module:
    """SimpleBaseline's head on ResNet-50."""
    layers: list[nn.Module] = []
    for channels in (8 * width, width, width):
        layers += [nn.ConvTranspose2d(channels, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Conv2d(width, 17, 1))


def mask() -> nn.Module:
    """Mask R-CNN's predictor."""
    return nn.Sequential(nn.ConvTranspose2d(256, 256, 2, 2), nn.ReLU(True), nn.Conv2d(256, 91, 1))


def sam(width: int = 256) -> nn.Module:
    """The mask decoder's upscaling."""
    a, b = width // 4, width // 8
    first = (nn.ConvTranspose2d(width, a, 2, 2), LayerNorm2d(a), nn.GELU())
    return nn.Sequential(*first, nn.ConvTranspose2d(a, b, 2, 2), nn.GELU())


def cyclegan() -> nn.Module:
    """The generator's two upsampling layers."""
    layers: list[nn.Module] = []
    for channels in (128, 64):
        layers += [nn.ConvTranspose2d(2 * channels, channels, 3, 2, 1, 1), nn.InstanceNorm2d(channels), nn.ReLU(True)]
    return nn.Sequential(*layers)


BLOCKS: dict[str, Block] = {
    "DCGAN generator, batch 256": Block(dcgan, ((256, 100, 1, 1),)),
    "pose head, batch 64": Block(pose, ((64, 2048, 8, 6),)),
    "Mask R-CNN head, 400 boxes": Block(mask, ((400, 256, 14, 14),)),
    "U-Net up, batch 16": Block(UpBlock, ((16, 128, 256, 256), (16, 64, 512, 512))),
    "SAM upscaling, batch 16": Block(sam, ((16, 256, 64, 64),)),
    "CycleGAN up, batch 16": Block(cyclegan, ((16, 256, 64, 64),)),
    "HiFi-GAN up, batch 16": Block(
        lambda: nn.Sequential(nn.LeakyReLU(0.1), nn.ConvTranspose1d(128, 64, 4, 2, 1)), ((16, 128, 6400),)
    ),
    "DAC up, batch 8": Block(
        lambda: nn.Sequential(Snake(192), nn.ConvTranspose1d(192, 96, 4, 2, 1)), ((8, 192, 22016),)
    ),
    **{f"KernelBench 2-{number}": Block(problem.build, problem.inputs) for number, problem in LEVEL2.items()},
}


def built(block: Block) -> nn.Module:
    """The block, as `evaluating` makes it, without gradients."""
    return evaluating(block.build).requires_grad_(False)


def kernels_of(name: str, dtype: torch.dtype, device: DeviceInfo) -> list[Any]:
    """The kernels that a block's swapped and fused layers will ask for, found on meta tensors."""
    block = BLOCKS[name]
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in block.inputs]
    met: list[ConvTransposeProblem] = []
    for fusing in (False, True):
        model = built(block).to("meta", dtype)
        polyphase.accelerate(model, fuse=fusing)
        met += problems_met(partial(model, *inputs), dtype)
    behind = [program_of(each, str(dtype).removeprefix("torch.")) for each in reductions_met(partial(model, *inputs))]
    return [*sources_of(met, device, (Pass.FORWARD,)), *(source for program in behind for source in program.sources)]


def contestants(block: Block, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The block by PyTorch's layers, by polyphase's, and fused."""
    found = {who: built(block).to("cuda", dtype) for who in CONTESTANTS}
    for who in CONTESTANTS[1:]:
        polyphase.accelerate(found[who], fuse=who == "fused")
    return found


def least_bytes(model: nn.Module, inputs: list[Tensor], output: Tensor) -> int:
    """Bytes of a block's inputs, weights and output."""
    return sum(each.nbytes for each in (*inputs, *model.parameters(), output))


def compile_one(job: tuple[str, str, str]) -> None:
    """Compile a block, a dtype and a contestant by Inductor, for its cache."""
    name, text, who = job
    dtype = getattr(torch, text)
    with torch.inference_mode(), quiet():
        compiled(contestants(BLOCKS[name], dtype)[who], operands(BLOCKS[name].inputs, dtype), who == "fused")
    torch.cuda.empty_cache()


def measured(
    name: str, block: Block, dtype: torch.dtype, timer: Timer, rate: float, modes: list[str], among: list[str]
) -> list[Row]:
    """A block's rows; ``among``: who is compiled by `torch.compile`."""
    model, text = built(block), str(dtype).removeprefix("torch.")
    inputs = operands(block.inputs, dtype)
    wanted = copy.deepcopy(model).cuda().double()(*(each[:2].double() for each in inputs))
    calls = contestants(block, dtype)
    output = calls["torch"](*inputs)
    allowed = 2 * error(output, wanted) + 4 * torch.finfo(dtype).eps
    moved = least_bytes(calls["torch"], inputs, output)
    rows = []
    for mode in modes:
        row = Row(name, text, mode, "ok", megabytes=moved / 1e6, floor_ms=1e3 * moved / (0.9 * rate))
        times, errors = dict[str, float](), dict[str, float]()
        for who, call in calls.items():
            if "compile" in mode and who not in among:
                continue
            try:
                ready = compiled(call, inputs, who == "fused") if "compile" in mode else call
                errors[who] = error(ready(*inputs), wanted)
                times[who] = timed(ready, inputs, "graph" if "graph" in mode else "eager", timer, who == "fused")
            except Exception as failure:
                row.status, row.reason = "failed", f"{row.reason} {who}: {environment.first_line(failure)}".strip()
        wrong = [who for who, found in errors.items() if who != "torch" and not found <= allowed]
        if wrong and row.status == "ok":
            row.status, row.reason = "wrong", ", ".join(wrong)
        row.torch_error, row.swapped_error, row.fused_error = map(errors.get, CONTESTANTS)
        row.torch_ms, row.swapped_ms, row.fused_ms = times.get("torch"), times.get("swapped"), times.get("fused")
        if row.fused_ms and row.torch_ms and row.swapped_ms:
            row.fused_over_torch, row.fused_over_swapped = row.torch_ms / row.fused_ms, row.swapped_ms / row.fused_ms
        rows.append(row)
    return rows


def main(
    csv_path: Annotated[Path, typer.Option("--csv")] = ROOT / "benchmarks" / "results" / "blocks.csv",
    only: Annotated[str, typer.Option(help="Blocks whose names contain one of these, comma-separated.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    modes: Annotated[str, typer.Option(help="Comma-separated.")] = "eager,compile,graph,compile graph",
    compiling: Annotated[str, typer.Option(help="Who is compiled by torch.compile.")] = ",".join(CONTESTANTS),
    seconds: Annotated[float, typer.Option(help="No block is begun after so many.")] = 330.0,
) -> None:
    """Compile, check and time."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("blocks are timed on an NVIDIA GPU, and PyTorch finds none here")
    warnings.simplefilter("ignore")
    started, console = time.perf_counter(), make_console()
    chosen = {name: block for name, block in BLOCKS.items() if any(part in name for part in only.split(","))}
    kinds = [getattr(torch, dtype) for dtype in dtypes.split(",")]
    device = DeviceInfo.of(torch.device("cuda", 0))
    count = compile_kernels(kernels_of, [(name, dtype, device) for name in chosen for dtype in kinds], device.arch)
    console.print(f"{count} kernels after {time.perf_counter() - started:.0f} s", markup=False)
    among = compiling.split(",")
    if "compile" in modes:
        jobs = [(name, dtype, who) for name in chosen for dtype in dtypes.split(",") for who in among]
        fill_inductor(compile_one, jobs, seconds / 3)
        console.print(f"Inductor's cache after {time.perf_counter() - started:.0f} s", markup=False)
    timer, rows = Timer(torch.device("cuda")), list[Row]()
    rate = copy_rate(timer)
    with torch.inference_mode(), quiet():
        for name, block in chosen.items():
            for dtype in kinds:
                if time.perf_counter() - started > seconds:
                    console.print(f"no time left for {name}, {dtype}", markup=False)
                    continue
                rows += measured(name, block, dtype, timer, rate, modes.split(","), among)
                for row in rows[-len(modes.split(",")) :]:
                    shown = (row.torch_ms, row.swapped_ms, row.fused_ms)
                    times = " ".join("      -" if ms is None else f"{ms:7.3f}" for ms in shown)
                    gain = "" if row.fused_over_torch is None else f"{row.fused_over_torch:5.2f} x"
                    line = f"{row.block:28} {row.dtype:9} {row.mode:14} {times} {gain} {row.status} {row.reason}"
                    console.print(line, markup=False)
                write(csv_path, rows)
                torch.cuda.empty_cache()
    if any(row.status != "ok" for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
