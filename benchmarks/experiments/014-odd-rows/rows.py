"""Times implicit_gemm on layers with odd rows, stored in pieces and by sectors, with and without shared work tiles.

python benchmarks/experiments/011-odd-rows/rows.py --csv rows.csv
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import parse_layer
from polyphase.bench.operands import make_operands
from polyphase.bench.timing import Timer
from polyphase.costs import trial
from polyphase.jit.compiler import compile_kernel
from polyphase.jit.launcher import Executable
from polyphase.jit.source import KernelSource
from polyphase.plan.planner import plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import Sharing
from polyphase.schedules.implicit_gemm import cost, tile
from polyphase.schedules.implicit_gemm import schedule as implicit_gemm
from polyphase.schedules.implicit_gemm.config import GemmConfig
from polyphase.schedules.implicit_gemm.cost import Work

LAYERS = (
    "32x3x278x278 -> 192, k=3, s=2, p=1",
    "2x96x512x512 -> 48, k=(4, 1), s=(6, 4), p=(1, 0), bias",
    "64x32x256x256 -> 32, k=3, s=2, p=1, bias",
    "16x32x128x256 -> 64, k=(3, 5), s=(2, 3), p=(1, 2), op=1, d=(2, 1), bias",
    "1x1024x256x256 -> 512, k=3, s=2, g=8",
    "32x192x100x100 -> 128, k=3, s=2",
    "2x256x19x79 -> 768, k=2, s=5, p=1, d=3",
    "8x64x128x128 -> 64, k=3, s=2, p=1",
    "16x64x113x113 -> 64, k=3, p=1",
    "8x256x1200 -> 128, k=10, s=5, bias",
)
GPU = torch.device("cuda", 0)
SHARED = Sharing(waves=1, cycles=0, most=1e9)
NAMES = "pixels channel_blocks lines k_steps stages split resident loader_groups piece_bytes scaled"


class Case(NamedTuple):
    """A config on a layer; ``sectors``: stored so; ``shared``: blocks take work tiles from each other."""

    layer: str
    dtype: str
    config: GemmConfig
    sectors: bool
    shared: bool

    @property
    def problem(self) -> ConvTransposeProblem:
        return replace(parse_layer(self.layer), dtype=self.dtype, tf32=True)


@contextmanager
def stored(sectors: bool, shared: bool = False) -> Iterator[None]:
    """Odd rows stored by sectors, as rows of an odd stride are then, or in pieces."""
    before = tile.rows_are_odd, cost.rows_are_odd, implicit_gemm._sharing
    tile.rows_are_odd = cost.rows_are_odd = (  # type: ignore[assignment]
        lambda gather: sectors and not gather.dst.channels_last and (gather.dst.shape[4] | gather.axes[2].stride) % 2
    )
    if shared:
        implicit_gemm._sharing = lambda gather, device: SHARED
    tile.best_tile.cache_clear()
    try:
        with trial("implicit_gemm", shared_end=1e6 if sectors else 1e-6):
            yield
    finally:
        tile.rows_are_odd, cost.rows_are_odd, implicit_gemm._sharing = before
        tile.best_tile.cache_clear()


def chosen(problem: ConvTransposeProblem, info: DeviceInfo) -> GemmConfig | None:
    """The config that the planner takes as things are."""
    plan.cache_clear()
    candidate = plan(problem, Pass.FORWARD, info, by_prediction=True).candidate
    return candidate.config if candidate and candidate.schedule == "implicit_gemm" else None


def cases(layer: str, dtype: str, info: DeviceInfo) -> list[Case]:
    problem = replace(parse_layer(layer), dtype=dtype, tf32=True)
    with stored(sectors=False):
        found = [chosen(problem, info)]
    found.append(chosen(problem, info))
    wider = [each._replace(lines=1, pixels=128) for each in found[:1] if each and each.lines > 1 and each.parts == 1]
    configs = [each for each in dict.fromkeys([*found, *wider]) if each is not None]
    every = [Case(layer, dtype, each, sectors, False) for each in configs for sectors in (False, True)]
    every += [Case(layer, dtype, configs[0], sectors, True) for sectors in (False, True)]
    return [case for case in every if program_of(case, info) is not None]


def program_of(case: Case, info: DeviceInfo) -> tuple[Program, str, float] | None:
    """With the tile's cells, and the sectors that two pieces share; None where the tile is not stored so."""
    problem, layouts = case.problem, Layouts.dense(case.problem)
    gather = Gather.of(problem, Pass.FORWARD, layouts)
    with stored(case.sectors, case.shared):
        cut = tile.best_tile(gather, case.config, problem.batch, info)
        if cut is None or cut.by_sectors is not case.sectors:
            return None
        program = implicit_gemm.ImplicitGemm().program(problem, Pass.FORWARD, info, layouts, case.config)
    cost.rows_are_odd, before = lambda gather: True, cost.rows_are_odd
    ends = Work(gather, case.config, info)._ends(gather, cut)
    cost.rows_are_odd = before
    if program.main.one_way is not None:
        program = program.with_main(replace(program.main, source=program.main.one_way))
    return program, "x".join(map(str, cut.cells)), ends


def executable(program: Program, info: DeviceInfo) -> tuple[Executable, list[str]]:
    names = list(dict.fromkeys(name for step in program.steps for name in step.operands))
    return Executable(program, info.arch, 0, {name: place for place, name in enumerate(names)}), names


def prepare(job: tuple[str, str]) -> tuple[list[Case], list[KernelSource]]:
    """What is timed of a layer, and its kernels."""
    info = DeviceInfo.of(GPU)
    found = cases(*job, info)
    made = [program_of(case, info) for case in found]
    return found, [source for each in made if each for source in each[0].sources]


def rows_of(every: list[Case], info: DeviceInfo, timer: Timer) -> Iterator[list[str]]:
    layer, dtype, problem = every[0].layer, every[0].dtype, every[0].problem
    operands = make_operands(problem, GPU)
    wanted = torch_call(problem, Pass.FORWARD, operands)()
    norm = float(wanted.float().norm())
    result, other = torch.empty_like(wanted), {}
    known = {"x": operands.input, "src": operands.input, "weight": operands.weight, "dst": result}
    if operands.bias is not None:
        known["bias"] = operands.bias
    for case in every:
        made = program_of(case, info)
        assert made is not None
        program, cells, ends = made
        room = {b.name: torch.empty(max(1, b.bytes), device=GPU, dtype=torch.uint8) for b in program.buffers}
        run, names = executable(program, info)
        found = {**known, **room}
        addresses = [found[name].data_ptr() if name in found else 0 for name in names]
        stream = torch.cuda.current_stream().cuda_stream
        result.fill_(float("nan"))
        run(stream, addresses)
        error = float((result - wanted).float().norm()) / norm
        before = other.setdefault(case.config, result.clone())
        same = torch.equal(before, result)
        ms = timer.measure(partial(run, stream, addresses)).ms
        settings = " ".join(f"{name}={getattr(case.config, name)}" for name in NAMES.split())
        stores = "sectors" if case.sectors else "pieces"
        written = result.numel() * result.element_size()
        yield [
            *(layer, dtype, stores, str(case.shared), settings, cells, f"{ends:.0f}", str(written)),
            *(f"{ms:.4f}", f"{written / ms / 1e9:.3f}", f"{error:.2e}", str(same)),
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    began, info = time.monotonic(), DeviceInfo.of(GPU)
    torch.backends.cudnn.allow_tf32 = True
    jobs = [(layer, dtype) for layer in LAYERS for dtype in ("float32", "bfloat16")]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(15, mp_context=spawn) as pool:
        prepared = list(pool.map(prepare, jobs))
        print(f"planned in {time.monotonic() - began:.0f} s", flush=True)
        sources = list(dict.fromkeys(source for _, several in prepared for source in several))
        list(pool.map(partial(compile_kernel, arch=info.arch), sources))
    print(f"{len(sources)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    timer = Timer(GPU, repetitions=7)
    with open(given.csv, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = "layer dtype stored shared config cells shared_ends bytes ms tb_per_s error_to_torch equal"
        writer.writerow(head.split())
        for every, _ in prepared:
            if time.monotonic() - began > given.seconds:
                break
            for row in rows_of(every, info, timer):
                writer.writerow(row)
                print(*row, sep=", ", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
