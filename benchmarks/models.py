"""Whole models on one GPU: PyTorch, polyphase's layers, and layers that compute what stands behind them.

    PYTHONPATH=src python benchmarks/models.py                  # writes benchmarks/results/models.csv

Models are written from their published configurations, with random weights (`image_models.py`, `sound_models.py`), or
are those of `transformers`, where that is installed (`library_models.py`). Each runs inference at batch 1 and a large
one, and a training step (forward, and backward of the mean square) at the large one: eager, as a CUDA graph, and by
`torch.compile`; with PyTorch's layers, accelerated, and accelerated with `fuse=True` (compiled: within
`enable_compile_fusion`). Models that call PyTorch's function, too, run the latter two within `override`. Outputs, and
gradients of a step, are compared with float64 on two samples; what is further from it than PyTorch's by more than its
dtype allows is ``wrong``, and the exit status 1. Kernels are compiled before that, and nothing is begun after
``--seconds``.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from image_models import IMAGE_MODELS
from library_models import LIBRARY_MODELS
from shared import (
    CONTESTANTS,
    ROOT,
    compile_kernels,
    compiled,
    error,
    fill_inductor,
    in_turn,
    norms_met,
    operands,
    problems_met,
    sources_of,
    timed,
    write,
)
from sound_models import SOUND_MODELS
from torch import Tensor, nn
from zoo import Model, built, shapes

import polyphase
from polyphase.bench import environment
from polyphase.bench.report import make_console
from polyphase.bench.timing import Timer
from polyphase.jit.launcher import quiet
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo

ALL = (Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)


@dataclass
class Row:
    """A model in one dtype, one way of running it.

    Milliseconds are medians: of a graph the GPU's time of one call, the cache flushed before; else of calls in a row,
    the host's time or the GPU's, whichever is longer.
    """

    model: str
    dtype: str
    run: str  # inference, or a training step
    batch: int
    mode: str  # eager, graph, compile
    status: str = ""
    reason: str = ""
    torch_ms: float | None = None
    swapped_ms: float | None = None
    fused_ms: float | None = None
    swapped_over_torch: float | None = None
    fused_over_torch: float | None = None
    torch_error: float | None = None
    swapped_error: float | None = None
    fused_error: float | None = None
    fused_chains: str = ""


MODELS: dict[str, Model] = IMAGE_MODELS | SOUND_MODELS
if importlib.util.find_spec("transformers") is not None:
    MODELS |= LIBRARY_MODELS


def sources(name: str, dtype: torch.dtype, device: DeviceInfo, runs: list[str]) -> list[Any]:
    """The kernels that a model's swapped and fused layers will ask for, found on meta tensors."""
    found: list[Any] = []
    model = MODELS[name]
    for batch in {1, 2, model.batch} if "inference" in runs else {2, model.batch}:  # 2: of the check
        inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes(model, batch)]
        for fusing in (False, True):
            with torch.device("meta"):
                module = built(model).to(dtype)
            polyphase.accelerate(module, fuse=fusing)
            met = problems_met(partial(module, *inputs), dtype)
            training = "training" in runs and not fusing and batch == model.batch
            found += sources_of(met, device, ALL if training else ALL[:1])
            if "training" in runs and batch == model.batch:
                found += norms_met(partial(step, module.train(), *inputs))
    return found


def step(module: nn.Module, *inputs: Tensor) -> Tensor:
    """A training step without the optimizer's."""
    for parameter in module.parameters():
        parameter.grad = None
    loss: Tensor = module(*inputs).float().square().mean()
    loss.backward()
    return loss


def outcome(module: nn.Module, run: str, inputs: list[Tensor]) -> Tensor:
    """What a model's output is in evaluation mode, or its parameters' gradients after a training step, one by one."""
    if run == "inference":
        with torch.inference_mode():
            result: Tensor = module(*inputs)
        return result
    step(module.train(), *inputs)
    return torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])


def run_of(module: nn.Module, run: str, mode: str) -> tuple[Callable[..., Any], str]:
    """What is timed, and its mode; of a training step the model is compiled, and not what calls backward."""
    if run == "inference":
        return module, mode
    if "compile" not in mode:
        return partial(step, module), mode
    torch._dynamo.reset()
    return partial(step, torch.compile(module, fullgraph=True)), mode.replace("compile", "eager")  # type: ignore[arg-type]


def contestants(model: Model, dtype: torch.dtype) -> tuple[dict[str, nn.Module], str]:
    """The model by PyTorch's layers, by polyphase's, and fused, and the chains that are fused."""
    found = {who: built(model).to("cuda", dtype) for who in CONTESTANTS}
    polyphase.accelerate(found["swapped"])
    blocks = polyphase.accelerate(found["fused"], fuse=True).blocks
    return found, "; ".join(str(block).partition(";")[0] for block in blocks if block.fused)


def around(model: Model, who: str) -> AbstractContextManager[Any]:
    """What a contestant runs in: PyTorch's function is called within `override`, where that is not PyTorch's turn."""
    return polyphase.override() if model.calls and who != "torch" else nullcontext()


def compile_one(job: tuple[str, str, str, int, str]) -> None:
    """Compile a model in a dtype, a run, a batch and by a contestant with Inductor, for its cache."""
    name, text, run, batch, who = job
    dtype = getattr(torch, text)
    module = contestants(MODELS[name], dtype)[0][who].train(run == "training")
    inputs = operands(shapes(MODELS[name], batch), dtype)
    with quiet(), torch.inference_mode(run == "inference"), around(MODELS[name], who):
        if run == "inference":
            compiled(module, inputs, who == "fused")
        else:
            run_of(module, run, "compile")[0](*inputs)
    torch.cuda.empty_cache()


def measured(
    name: str, model: Model, dtype: torch.dtype, run: str, batch: int, timer: Timer, modes: list[str]
) -> list[Row]:
    """A model's rows of one batch."""
    module, text = built(model), str(dtype).removeprefix("torch.")
    inputs = operands(shapes(model, batch), dtype)
    few, (models, chains) = [each[:2] for each in inputs], contestants(model, dtype)
    wanted = outcome(module.to("cuda").double(), run, [each.double() for each in few])
    errors = {}
    for who, each in models.items():
        with around(model, who):
            errors[who] = error(outcome(each, run, few), wanted)
    del module, wanted
    allowed = 2 * errors["torch"] + 4 * torch.finfo(dtype).eps
    wrong = [who for who in models if not errors[who] <= allowed]
    rows = []
    for mode in modes:
        row = Row(name, text, run, batch, mode, "wrong" if wrong else "ok", ", ".join(wrong), fused_chains=chains)
        row.torch_error, row.swapped_error, row.fused_error = (errors.get(who) for who in CONTESTANTS)
        times: dict[str, float] = {}
        for together in [models] if mode == "eager" else [{who: each} for who, each in models.items()]:
            try:
                times |= times_of(model, together, run, mode, inputs, timer)
            except Exception as failure:
                row.status, row.reason = (
                    "failed",
                    f"{row.reason} {', '.join(together)}: {environment.first_line(failure)}".strip(),
                )
            for parameter in itertools.chain.from_iterable(each.parameters() for each in together.values()):
                parameter.grad = None
        row.torch_ms, row.swapped_ms, row.fused_ms = (times.get(who) for who in CONTESTANTS)
        if row.torch_ms and row.swapped_ms:
            row.swapped_over_torch = row.torch_ms / row.swapped_ms
        if row.torch_ms and row.fused_ms:
            row.fused_over_torch = row.torch_ms / row.fused_ms
        rows.append(row)
    return rows


def times_of(
    model: Model, modules: dict[str, nn.Module], run: str, mode: str, inputs: list[Tensor], timer: Timer
) -> dict[str, float]:
    """Milliseconds of contestants; eager ones in turn."""

    @contextmanager
    def within(who: str) -> Iterator[None]:
        with torch.inference_mode(run == "inference"), around(model, who):
            yield

    calls = {who: run_of(each.train(run == "training"), run, mode) for who, each in modules.items()}
    if mode == "eager":
        return in_turn({who: partial(call, *inputs) for who, (call, _) in calls.items()}, within)
    found = {}
    for who, (call, how) in calls.items():
        with within(who):
            found[who] = timed(call, inputs, how, timer, who == "fused")
    return found


def shown(row: Row) -> str:
    """A row on the screen."""
    times = " ".join("       -" if ms is None else f"{ms:8.3f}" for ms in (row.torch_ms, row.swapped_ms, row.fused_ms))
    gains = " ".join("     -" if x is None else f"{x:4.2f} x" for x in (row.swapped_over_torch, row.fused_over_torch))
    return (
        f"{row.model:20} {row.dtype:9} {row.run:9} {row.batch:4} {row.mode:8} {times} {gains} {row.status} {row.reason}"
    )


def main(
    csv_path: Annotated[Path, typer.Option("--csv")] = ROOT / "benchmarks" / "results" / "models.csv",
    only: Annotated[str, typer.Option(help="Models whose names contain one of these, comma-separated.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    runs: Annotated[str, typer.Option(help="Comma-separated.")] = "inference,training",
    modes: Annotated[str, typer.Option(help="Comma-separated.")] = "eager,graph,compile",
    batches: Annotated[str, typer.Option(help="Of inference: 1, large, or both, comma-separated.")] = "1,large",
    seconds: Annotated[float, typer.Option(help="No model is begun after so many.")] = 450.0,
) -> None:
    """Compile, check and time."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("models are timed on an NVIDIA GPU, and PyTorch finds none here")
    warnings.simplefilter("ignore")
    started, console = time.perf_counter(), make_console()
    chosen = {name: each for name, each in MODELS.items() if any(part in name for part in only.split(","))}
    kinds, asked = [getattr(torch, dtype) for dtype in dtypes.split(",")], runs.split(",")
    device = DeviceInfo.of(torch.device("cuda", 0))
    count = compile_kernels(sources, [(*each, device, asked) for each in itertools.product(chosen, kinds)], device.arch)
    console.print(f"{count} kernels after {time.perf_counter() - started:.0f} s", markup=False)
    rounds = [
        (name, dtype, run, batch)
        for name, dtype, run in itertools.product(chosen, kinds, asked)
        for batch in ({"1": 1}.get(which, chosen[name].batch) for which in batches.split(","))
        if run == "inference" or batch == chosen[name].batch
    ]
    if "compile" in modes:
        jobs = [
            (name, str(dtype).removeprefix("torch."), run, batch, who)
            for name, dtype, run, batch in rounds
            for who in CONTESTANTS
            if run == "inference" or who != "fused"  # which are compiled as what is swapped is
        ]
        fill_inductor(compile_one, jobs, seconds / 3)
        console.print(f"Inductor's cache after {time.perf_counter() - started:.0f} s", markup=False)
    timer, rows = Timer(torch.device("cuda"), budget_seconds=0.1), list[Row]()
    for name, dtype, run, batch in rounds:
        if time.perf_counter() - started > seconds:
            console.print(f"no time left for {name}, {dtype}, {run} at batch {batch}", markup=False)
            continue
        with quiet():
            found = measured(name, chosen[name], dtype, run, batch, timer, modes.split(","))
        rows += found
        for row in found:
            console.print(shown(row), markup=False)
        write(csv_path, rows)
        torch.cuda.empty_cache()
    if any(row.status != "ok" for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
