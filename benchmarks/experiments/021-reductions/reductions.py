"""KernelBench's level 2 with what stands behind a layer in kernels of its own: whole problems, and each kernel alone.

    PYTHONPATH=src python benchmarks/experiments/021-reductions/reductions.py --csv reductions.csv

Each problem runs as a CUDA graph, by PyTorch and fused by `accelerate`; outputs are compared with float64 on one
sample, in poisoned memory, and with those of a second call, bit by bit. Then each kernel behind the layer's runs alone.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[2]))
from blocks import BLOCKS, Block, built
from shared import error, graphed, problems_met, reductions_met, sources_of, write
from torch import Tensor

import polyphase
from polyphase import prepared
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.launcher import quiet
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.reduction import Reduction
from polyphase.program.reduction import program_of
from polyphase.torch_op import reduction as operator


@dataclass
class Row:
    """A problem in one dtype, in milliseconds; or a kernel of it alone, and the bytes that it reads and writes."""

    problem: str
    dtype: str
    part: str
    torch_ms: float | None = None
    fused_ms: float | None = None
    fused_over_torch: float | None = None
    torch_error: float | None = None
    fused_error: float | None = None
    status: str = ""
    part_ms: float | None = None
    megabytes: float | None = None
    terabytes_per_second: float | None = None


def kernels_of(block: Block, dtype: torch.dtype, device: DeviceInfo) -> list[Any]:
    """What a fused problem asks of kernels, found on meta tensors."""
    model = built(block).to("meta", dtype)
    polyphase.accelerate(model, fuse=True)
    call = partial(model, *(torch.empty(size, dtype=dtype, device="meta") for size in block.inputs))
    behind = [program_of(each, str(dtype).removeprefix("torch.")) for each in reductions_met(call)]
    found = sources_of(problems_met(call, dtype), device, (Pass.FORWARD,))
    return [*found, *(source for program in behind for source in program.sources)]


def measured(name: str, dtype: torch.dtype, timer: Timer) -> list[Row]:
    """A problem's rows."""
    block, kind = BLOCKS[name], str(dtype).removeprefix("torch.")
    model = built(block)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(size, device="cuda", dtype=dtype, generator=generator) for size in block.inputs]
    wanted = copy.deepcopy(model).cuda().double()(*[each[:1].double() for each in inputs])
    plain, fused = (copy.deepcopy(model).to("cuda", dtype) for _ in range(2))
    polyphase.accelerate(fused, fuse=True)
    calls: list[tuple[Reduction, Tensor, Any]] = []
    original = operator._by_kernels

    def noting(reduction: Reduction, value: Tensor, tensors: Any) -> Tensor:
        calls.append((reduction, value, tensors))
        return original(reduction, value, tensors)

    with mock.patch.object(operator, "_by_kernels", noting), mock.patch.object(prepared, "POISON", True):
        first = fused(*inputs)
    row = Row(name, kind, "", torch_error=error(plain(*inputs), wanted), fused_error=error(first, wanted))
    assert row.torch_error is not None
    assert row.fused_error is not None
    close = row.fused_error <= 2 * row.torch_error + 4 * torch.finfo(dtype).eps
    row.status = "ok" if close and torch.equal(first, fused(*inputs)) else "wrong"
    row.torch_ms, row.fused_ms = (timer.measure(graphed(call, inputs)).ms for call in (plain, fused))
    row.fused_over_torch = row.torch_ms / row.fused_ms
    rows = [row]
    for reduction, value, tensors in calls:
        ms = timer.measure(graphed(lambda each=(reduction, value, tensors): original(*each), [])).ms  # type: ignore[misc]
        moved = 1e-6 * value.element_size() * (value.numel() + torch.Size(reduction.output_shape).numel())
        pool = f"{reduction.pool} pool of {'x'.join(map(str, reduction.window))}, " if reduction.pool else ""
        rows.append(Row(name, kind, f"{pool}{reduction.over}".strip(", "), part_ms=ms, megabytes=moved))
        rows[-1].terabytes_per_second = 1e-3 * moved / ms
    return rows


def main(
    csv_path: Annotated[Path, typer.Option("--csv")],
    only: Annotated[str, typer.Option(help="Numbers of problems, comma-separated.")] = "",
    seconds: Annotated[float, typer.Option(help="No problem is begun after so many.")] = 120.0,
) -> None:
    """Compile, check and time."""
    started, rows = time.perf_counter(), list[Row]()
    wanted = [f"KernelBench 2-{number}" for number in only.split(",")]
    names = [name for name in BLOCKS if name.startswith(("KernelBench", "CycleGAN")) and (not only or name in wanted)]
    device = DeviceInfo.of(torch.device("cuda", 0))
    kinds, sources = (torch.float32, torch.bfloat16), list[Any]()
    for name in names:
        for dtype in kinds:
            sources += kernels_of(BLOCKS[name], dtype, device)
    compile_ahead(dict.fromkeys(sources), device.arch)
    print(f"{len(set(sources))} kernels after {time.perf_counter() - started:.0f} s", flush=True)
    timer = Timer(torch.device("cuda"), 12, 0.08)
    with torch.inference_mode(), quiet():
        for name in names:
            for dtype in kinds:
                if time.perf_counter() - started < seconds:
                    found = measured(name, dtype, timer)
                    for each in found:
                        print(each, flush=True)
                    rows += found
                    write(csv_path, rows)
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
