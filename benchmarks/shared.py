"""What `blocks.py`, `models.py` and `emitted.py` share: the kernels a model asks for, its times, its error, the CSV."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import polyphase
from polyphase import batch_norms, reductions
from polyphase.bench import environment
from polyphase.bench.records import write_rows
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.plan.planner import plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import NONE, Epilogue, decoded
from polyphase.problem.reduction import Reduction

ROOT = Path(__file__).parent.parent
CONTESTANTS = ("torch", "swapped", "fused")
"""PyTorch's layers, polyphase's, and those that compute what stands around them."""


def problems_met(run: Callable[[], object], dtype: torch.dtype) -> list[ConvTransposeProblem]:
    """The forward passes that a call of a model on meta tensors asks of polyphase, or of PyTorch's function."""
    met: list[ConvTransposeProblem] = []
    name = str(dtype).removeprefix("torch.")

    def note(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        constants: tuple[Any, ...],
        around: tuple[Epilogue, Epilogue],
    ) -> None:
        shape = (input.shape[0], input.shape[1], weight.shape[1] * constants[4])
        sizes = (tuple(input.shape[2:]), tuple(weight.shape[2:]))
        found = ConvTransposeProblem(*shape, *sizes, *constants)
        found = replace(found, bias=bias is not None, dtype=name, tf32=name == "float32")
        met.append(replace(found, epilogue=around[0], prologue=around[1]))

    class Watched(TorchDispatchMode):
        """Takes down the calls of polyphase's operators."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.polyphase.conv_transpose.default:
                note(args[0], args[1], args[2], tuple(map(_tuple, args[3:])), (NONE, NONE))
            if func is torch.ops.polyphase.conv_transpose_epilogue.default:
                note(args[0], args[1], args[2], tuple(map(_tuple, args[5:])), decoded(args[4]))
            if func is torch.ops.aten.convolution.default and args[6]:  # a call that `polyphase.override` computes
                note(*args[:3], (*map(_tuple, (*args[3:5], args[7], args[5])), args[8]), (NONE, NONE))
            return func(*args, **(kwargs or {}))

    with Watched(), torch.no_grad():  # type: ignore[no-untyped-call]
        run()
    return met


def reductions_met(run: Callable[[], object]) -> list[Reduction]:
    """What a call of a model on meta tensors asks of kernels behind its layers' own."""
    found: list[Reduction] = []

    def note(arranged: reductions.Arranged, steps: Any, value: Tensor) -> Tensor:
        found.extend(arranged.parts)
        return value.new_empty(arranged.shape)

    with mock.patch.object(reductions, "_compute", note), torch.no_grad():
        run()
    return found


def norms_met(run: Callable[[], object]) -> list[Any]:
    """The kernels of norms that a training step of a model on meta tensors asks for."""
    found: list[Any] = []

    def note(prepared: batch_norms.Prepared, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        found.extend(source for program in prepared.programs for source in program.sources)
        return torch.empty_like(x), torch.empty_like(x)

    def pass_on(prepared: batch_norms.Prepared, x: Tensor, grad: Tensor, *affine: Any) -> tuple[Any, ...]:
        return grad, *affine[:2]

    patched = partial(mock.patch.object, batch_norms.Prepared)
    on_gpu = mock.patch.object(batch_norms, "is_on_gpu", return_value=True)
    with patched("forward", note), patched("backward", pass_on), on_gpu:
        run()
    return found


def sources_of(problems: list[ConvTransposeProblem], device: DeviceInfo, passes: tuple[Pass, ...]) -> list[Any]:
    """The kernels that passes of these problems launch."""
    found = []
    for problem, pass_ in itertools.product(problems, passes):
        asked = problem if pass_ is Pass.FORWARD else replace(problem, bias=False, epilogue=NONE, prologue=NONE)
        found += [source for program in plan(asked, pass_, device).programs[:1] for source in program.sources]
    return found


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def compile_kernels(find: Callable[..., list[Any]], jobs: Sequence[tuple[Any, ...]], arch: str) -> int:
    """Compile what ``find`` gives for each job, all of it in processes; how many kernels these are."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        sources = dict.fromkeys(itertools.chain.from_iterable(pool.starmap(find, jobs, 1)))
    compile_ahead(sources, arch)
    return len(sources)


def operands(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Random tensors on the GPU, the same each time."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


def timed(call: Callable[..., Any], inputs: list[Tensor], mode: str, timer: Timer, fusing: bool) -> float:
    """Milliseconds of a call: eager, by `torch.compile`, as a CUDA graph of either; ``fusing``: compiled, fused.

    Of a graph it is the GPU's time, with the cache flushed before; else as `in_turn` says.
    """
    ready = compiled(call, inputs, fusing) if "compile" in mode else call
    if "graph" not in mode:
        return in_turn({"": partial(ready, *inputs)})[""]
    milliseconds: float = timer.measure(graphed(ready, inputs)).ms
    return milliseconds


def in_turn(
    calls: dict[str, Callable[[], object]],
    around: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
    rounds: int = 7,
    seconds: float = 0.03,
) -> dict[str, float]:
    """Milliseconds of each call, one after the other: the host's time or the GPU's, whichever is longer.

    Medians of rounds of ``seconds``, the calls in turn, so that all meet the same machine.
    """

    def lasts(call: Callable[[], object], count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    samples: dict[str, list[float]] = {name: [] for name in calls}
    counts: dict[str, int] = {}
    for number in range(rounds + 1):
        for name, call in calls.items():
            with around(name):
                if number == 0:
                    lasts(call, 2)
                    counts[name] = max(3, int(seconds / lasts(call, 3)))
                else:
                    samples[name].append(lasts(call, counts[name]))
    return {name: 1e3 * statistics.median(found) for name, found in samples.items()}


def compiled(call: Callable[..., Any], inputs: list[Tensor], fusing: bool) -> Callable[..., Any]:
    """A model by `torch.compile`, after its first call; ``fusing``: within `enable_compile_fusion`."""
    torch._dynamo.reset()
    with polyphase.enable_compile_fusion() if fusing else nullcontext():
        ready: Callable[..., Any] = torch.compile(call, fullgraph=True)
        ready(*inputs)
    return ready


def fill_inductor(compile_one: Callable[[Any], None], jobs: Sequence[Any], seconds: float) -> None:
    """Compile models with Inductor in processes, for its cache, for ``seconds`` at most."""
    if jobs:
        with multiprocessing.get_context("spawn").Pool(12) as pool:
            pool.map_async(compile_one, jobs, 1).wait(seconds)


def graphed(call: Callable[..., object], inputs: list[Tensor]) -> Callable[[], object]:
    """A CUDA graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*inputs)
    return graph.replay


def error(found: Tensor, wanted: Tensor) -> float:
    """``‖found - wanted‖ / ‖wanted‖`` of the first of the batch."""
    return float((found[: len(wanted)].double() - wanted).norm() / wanted.norm())


def write(path: Path, rows: Sequence[Any]) -> None:
    """All rows, of one dataclass, each with the machine and the command."""
    facts = environment.facts("cuda") | {"command": shlex.join(["python", *sys.argv])}
    machine = {name: facts[name] for name in ("gpu", "driver", "torch", "cuda", "commit", "date", "command")}
    texts = ([f"{x:.6g}" if isinstance(x, float) else "" if x is None else x for x in astuple(row)] for row in rows)
    write_rows(
        path, [*(field.name for field in fields(rows[0])), *machine], ([*row, *machine.values()] for row in texts)
    )
