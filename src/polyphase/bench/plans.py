"""Every choice of the planner for many layers, as lines of a file that `polyphase.bench.gates` compares."""

from __future__ import annotations

import functools
import gc
import hashlib
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyphase.bench import gates, pool
from polyphase.bench.layers import NamedLayer
from polyphase.errors import UnsupportedError
from polyphase.plan import planner as plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.program.step import WORKSPACE, Step
from polyphase.schedules.schedule import Candidate


@dataclass(frozen=True)
class Case:
    """A layer, dtype, memory format and rounding, planned for one device."""

    layer: str
    problem: ConvTransposeProblem
    device: DeviceInfo
    passes: tuple[Pass, ...]
    cold: bool = False


def cases(
    layers: Iterable[NamedLayer],
    passes: Sequence[Pass],
    dtypes: Sequence[str],
    channels_last: Sequence[bool],
    devices: Iterable[DeviceInfo],
    drawn: Sequence[NamedLayer] = (),
    cold: bool = False,
) -> list[Case]:
    """Every layer in every dtype and format, float32 with TF32 forbidden and allowed, each once.

    Of the layers ``drawn`` at random each has one of these combinations, the first the first and so on in turn.
    ``cold``: each is planned as a process would that has planned nothing before.
    """
    problems: dict[ConvTransposeProblem, str] = {}
    for layer in layers:
        for problem in variants(layer.problem, dtypes, channels_last):
            problems.setdefault(problem, layer.name)
    for index, layer in enumerate(drawn):
        if combinations := variants(layer.problem, dtypes, channels_last):
            problems.setdefault(combinations[index % len(combinations)], layer.name)
    return [
        Case(name, problem, device, tuple(passes), cold) for device in devices for problem, name in problems.items()
    ]


def variants(
    problem: ConvTransposeProblem, dtypes: Sequence[str], channels_last: Sequence[bool]
) -> list[ConvTransposeProblem]:
    """A layer in every dtype and memory format, in float32 with TF32 forbidden and allowed."""
    return [
        replace(problem, dtype=dtype, channels_last=last, tf32=tf32)
        for dtype in dtypes
        for last in channels_last
        for tf32 in ((False, True) if dtype == "float32" else (False,))
        if not (last and problem.dims == 1)  # PyTorch has no channels_last for one dimension
    ]


def problems(
    layers: Iterable[NamedLayer], dtypes: Sequence[str], channels_last: Sequence[bool], strict_fp32: bool
) -> Iterator[NamedLayer]:
    """Each layer in every dtype and layout before the next one; those that PyTorch has no such layout for left out."""
    for layer in layers:
        for problem in variants(layer.problem, dtypes, channels_last):
            if problem.dtype != "float32" or problem.tf32 is not strict_fp32:
                yield NamedLayer(layer.name, problem)


def rows(wanted: Sequence[Case], jobs: int) -> Iterator[list[gates.Row]]:
    """The lines of each case, in their order."""
    return pool.each(_rows, wanted, jobs)


def _rows(case: Case) -> list[gates.Row]:
    return [_row(case, pass_) for pass_ in case.passes]


def _row(case: Case, pass_: Pass) -> gates.Row:
    if case.cold:
        forget()
    started = time.process_time()
    row = {"arch": case.device.arch, "pass": pass_.value, "problem": str(case.problem), "layer": case.layer}
    try:
        chosen = plan.plan(case.problem, pass_, case.device, by_prediction=True)
    except UnsupportedError:
        row["algorithm"] = "refused"
    else:
        row |= _choice(chosen)
    if case.cold:
        row["planning"] = f"{time.process_time() - started:.4f}"
    return row


def _choice(chosen: plan.Plan) -> gates.Row:
    candidate, program = chosen.candidate, chosen.program
    assert candidate is not None
    assert program is not None
    other = chosen.selected[1].candidate if len(chosen.selected) > 1 else None
    main = program.main
    parameters = b"".join(step.params for step in (*_packs(program), main))
    return {
        "algorithm": chosen.schedule,
        "config": _settings(candidate),
        "seconds": f"{candidate.seconds:.6g}",
        "bound": candidate.bound,
        "grid": _grid(main),
        "block": str(main.block),
        "shared": str(main.shared_bytes),
        "workspace": str(program.workspace_bytes),
        "planes": str(program.splits),
        "before": "; ".join(_steps(program)),
        "parameters": hashlib.sha256(parameters).hexdigest()[:12],
        "other": other.schedule if other else "",
        "other config": _settings(other) if other else "",
    }


def _settings(candidate: Candidate) -> str:
    """A config without the algorithm's name."""
    return candidate.describe().removeprefix(candidate.schedule).removeprefix("(").removesuffix(")")


def _packs(program: Program) -> list[Step]:
    """What measures and packs weights."""
    return [step for step in program.steps[: program.main_index] if WORKSPACE in step.operands]


def _steps(program: Program) -> Iterator[str]:
    """What runs before the kernel: tensors that are transposed to channels_last, then what packs or measures."""
    packs = _packs(program)
    if transposed := program.main_index - len(packs):
        yield f"{transposed} transposed"
    for each in packs:
        yield f"{each.source.kernel} {_grid(each)} of {each.block}, {each.shared_bytes} bytes"


def _grid(step: Step) -> str:
    return "x".join(map(str, step.grid))


def forget() -> None:
    """Empties every cache of the package that remembers what was planned."""
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper and found.__module__.startswith("polyphase"):
            found.cache_clear()


def write(path: Path, found: Iterable[gates.Row]) -> None:
    """Write one line for each plan, in an order that does not depend on that of the layers."""
    rows = list(found)
    timed = any(row.get("planning") for row in rows)
    gates.write(path, gates.PLANS if timed else gates.PLANS[:-1], rows)


def planning_seconds(found: Iterable[gates.Row]) -> dict[str, tuple[float, float, float]]:
    """Seconds of a processor that plans took, by pass, where these were measured: median, 90th percentile and most."""
    by_pass: dict[str, list[float]] = {}
    for row in found:
        if row.get("planning"):
            by_pass.setdefault(row["pass"], []).append(float(row["planning"]))
    return {
        pass_: (statistics.median(seconds), sorted(seconds)[len(seconds) * 9 // 10], max(seconds))
        for pass_, seconds in by_pass.items()
    }
