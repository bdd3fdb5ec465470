"""Emits the five examples and ten problems of KernelBench, builds them, checks them and times them, on one GPU.

    PYTHONPATH=src python benchmarks/emitted.py                  # writes benchmarks/results/emitted.csv

Files are emitted and built in parallel, a process each; then one after the other is checked (``check --emitted``) and
timed beside the package's own modules and PyTorch's. The exit status is 1 if a file is wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from shared import ROOT, write

from polyphase.bench.check_emitted import EmittedResult, check_emitted, load_emitted
from polyphase.bench.check_report import show_emitted
from polyphase.bench.model_file import ModelFile
from polyphase.bench.report import make_console
from polyphase.bench.trial import Options

MODELS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "benchmarks" / "kernelbench").glob("*.py"))]


@dataclass
class Row:
    """One emitted file. Milliseconds are means of 100 forward calls, the cache flushed before each."""

    model: str
    status: str
    reason: str = ""
    dtype: str = "float32"
    emitted_ms: float | None = None
    package_ms: float | None = None
    torch_ms: float | None = None
    over_package: float | None = None
    speedup: float | None = None
    gradients: str = ""  # against float64
    build_seconds: float | None = None


def emit_and_build(job: tuple[Path, Path, str]) -> tuple[Path, float, str]:
    """Emits a model and builds its kernels: where to, the seconds it took, and what went wrong."""
    model, output, dtype = job
    started = time.perf_counter()
    emit = [sys.executable, "-m", "polyphase", "emit", shown(model), "--dtype", dtype, "-o", shown(output)]
    build = (
        "import importlib.util, sys, torch; spec = importlib.util.spec_from_file_location('emitted', sys.argv[1]); "
        "sys.modules['emitted'] = module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "module.build(module.arch_of(torch.device('cuda', 0)))"
    )
    for command in (emit, [sys.executable, "-c", build, str(output)]):
        variables = {**os.environ, "MAX_JOBS": "2", "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables)
        if done.returncode:
            return output, time.perf_counter() - started, (done.stdout + done.stderr)[-4000:]
    return output, time.perf_counter() - started, ""


def shown(path: Path) -> str:
    """A path within the repository where it lies there."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def row_of(model: Path, dtype: str, result: EmittedResult, seconds: float) -> Row:
    """What was found out, as a row."""
    row = Row(shown(model), "ok" if result.ok else "wrong", "; ".join(result.problems), dtype)
    row.emitted_ms, row.package_ms, row.torch_ms = result.emitted_ms, result.package_ms, result.torch_ms
    if result.emitted_ms and result.package_ms and result.torch_ms:
        row.over_package = result.emitted_ms / result.package_ms
        row.speedup = result.torch_ms / result.emitted_ms
    worst = max((found.comparison.worst for found in result.findings), default=None)
    row.gradients = "" if worst is None else f"worst {worst:.2f} of what is allowed"
    row.build_seconds = seconds
    return row


def main(
    models: Annotated[list[Path] | None, typer.Argument(help="Model files; without, all fifteen.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for what is emitted.")] = ROOT / "build" / "emitted",
    csv_path: Annotated[Path, typer.Option("--csv")] = ROOT / "benchmarks" / "results" / "emitted.csv",
    dtype: Annotated[str, typer.Option(help="Dtype of weights and inputs.")] = "float32",
    jobs: Annotated[int, typer.Option(help="Files that are built at a time.")] = max(1, (os.cpu_count() or 2) // 2),
) -> None:
    """Emit, build, check and time."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("emitted files are timed on an NVIDIA GPU, and PyTorch finds none here")
    console = make_console()
    chosen = [model.resolve() for model in models or MODELS]
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    work = [(model, output.resolve() / model.name, dtype) for model in chosen]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        built = list(pool.map(emit_and_build, work))
    console.print(f"emitted and built in {time.perf_counter() - started:.0f} s", markup=False)
    rows: list[Row] = []
    for (model, path, _), (_, seconds, failure) in zip(work, built):
        console.rule(shown(model))
        if failure:
            console.print(failure, markup=False)
            rows.append(Row(shown(model), "not built", failure.strip().splitlines()[-1], dtype))
        else:
            options = Options(torch.device("cuda"), getattr(torch, dtype))
            result = check_emitted(load_emitted(path), ModelFile.load(model), options)
            show_emitted(console, result)
            rows.append(row_of(model, dtype, result, seconds))
        write(csv_path, rows)
        torch.cuda.empty_cache()
    slower = [row for row in rows if row.over_package is not None and row.over_package > 1.05]
    for row in slower:
        console.print(f"{row.model} takes {row.over_package:.3f} of the package's time", style="yellow", markup=False)
    good = [row for row in rows if row.status == "ok"]
    console.print(f"{len(good)} of {len(rows)} are right, {len(slower)} more than 5 % slower than the package")
    console.print(f"written to {csv_path}; {time.perf_counter() - started:.0f} s in all", markup=False)
    raise typer.Exit(len(good) < len(rows))


if __name__ == "__main__":
    typer.run(main)
