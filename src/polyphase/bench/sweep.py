"""Measures layers in all passes and as a training step, by GPU time alone, against PyTorch in two modes.

One process checks polyphase and times it and PyTorch by heuristics on the same operands; another times PyTorch in
benchmark mode (`polyphase.bench.apart` says why). This one only waits, so that neither an error that CUDA does not
recover from nor a call that never ends costs more than its own layer. Kernels are compiled before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from polyphase.bench import environment, pool
from polyphase.bench.apart import OtherProcess
from polyphase.bench.contestants import (
    Call,
    Step,
    TorchVariant,
    polyphase_call,
    polyphase_step,
    torch_call,
    torch_flags,
    torch_step,
)
from polyphase.bench.graphs import GraphTimer, Rotation
from polyphase.bench.layers import NamedLayer
from polyphase.bench.operands import Operands
from polyphase.bench.records import FAILED, OK, SKIPPED, STEP, Record
from polyphase.bench.runner import Case, Runner
from polyphase.bench.timing import Timing
from polyphase.jit.source import KernelSource
from polyphase.plan import planner as plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import Ceilings
from polyphase.problem.device import DeviceInfo

TIMED = (*(pass_.value for pass_ in Pass), STEP)
"""What is measured of each layer."""

CHECK_FLOPS = 4e9
"""Flops of float64 work per check, of which a layer in one dtype has three."""

ANSWER_SECONDS = 180.0
"""What a layer in one dtype may take, before it counts as failed."""

SEARCH_SECONDS = 60.0
"""What PyTorch's benchmark mode may take for a layer: its search does not end on some large 3-D layers."""


@dataclass(frozen=True)
class Setup:
    """What all layers of a sweep have in common. ``ceilings`` are measured once, so that floors agree."""

    device: torch.device
    strict_fp32: bool
    ceilings: Ceilings

    def rotation(self, problem: ConvTransposeProblem) -> Rotation:
        """That of a layer's passes."""
        return Rotation.of(problem, self.ceilings.floor_ms(problem, self.strict_fp32), self.device)


def sources(layers: Sequence[NamedLayer], device: DeviceInfo, jobs: int) -> Iterator[list[KernelSource]]:
    """The kernels that first calls of each layer launch, planned by ``jobs`` processes, which leave their rankings."""
    return pool.each(_sources, [(layer.problem, device) for layer in layers], jobs, rankings=True)


def _sources(of: tuple[ConvTransposeProblem, DeviceInfo]) -> list[KernelSource]:
    problem, device = of
    found = []
    for pass_ in Pass:
        try:
            program = plan.plan(problem, pass_, device).program
        except Exception:  # which is the layer's failure when it is measured
            continue
        assert program is not None
        main = program.main
        # The one for tensors that lie as these do alone takes half the time, and is what such a call then takes.
        found += [main.one_way or main.source, *(source for source in program.sources if source != main.source)]
    return found


class Sweep:
    """Runs layers on one device. To be closed at the end."""

    def __init__(self, device: torch.device, dtypes: Sequence[str], strict_fp32: bool = False) -> None:
        self._ours, self._rival = OtherProcess(), OtherProcess()
        known = self._ours.call(_ceilings, device, tuple(dtypes), seconds=ANSWER_SECONDS)
        self._setup = Setup(device, strict_fp32, known)

    def run(self, layer: NamedLayer, seed: int | None = None) -> list[Record]:
        """A record for each of `TIMED`. Never raises for what the layer does: that is in the records."""
        records = self._ours.call(_blank, self._setup, layer, seconds=ANSWER_SECONDS)
        for record in records.values():
            record.seed = seed
        if any(record.status == SKIPPED for record in records.values()):
            return [*records.values()]
        try:
            records = self._ours.call(_measured, self._setup, layer, records, seconds=ANSWER_SECONDS)
        except Exception as failure:  # its process died, or would never have answered
            for record in records.values():
                record.status, record.reason = FAILED, environment.first_line(failure)
            return [*records.values()]
        wanted = [name for name, record in records.items() if record.ms is not None]
        if wanted:
            self._add_benchmark_mode(layer, records, wanted)
        return [*records.values()]

    def _add_benchmark_mode(self, layer: NamedLayer, records: dict[str, Record], wanted: list[str]) -> None:
        times: dict[str, Timing | str]
        try:
            times = self._rival.call(_benchmark_mode, self._setup, layer, wanted, seconds=SEARCH_SECONDS)
        except Exception as failure:
            times = dict.fromkeys(wanted, environment.first_line(failure))
        for name, time in times.items():
            _add_torch(records[name], TorchVariant.BENCHMARK, time)

    def close(self) -> None:
        """End the other processes."""
        self._ours.close()
        self._rival.close()


# What follows runs in the other processes.

_known: tuple[Setup, Runner, GraphTimer] | None = None


def _ceilings(device: torch.device, dtypes: Sequence[str]) -> Ceilings:
    return Runner(device, dtypes, ()).ceilings


def _tools(setup: Setup) -> tuple[Runner, GraphTimer]:
    """A process makes them once."""
    global _known
    if _known is None or _known[0] != setup:
        runner = Runner(setup.device, (), (), setup.strict_fp32, known=setup.ceilings)
        _known = setup, runner, GraphTimer(setup.device)
    return _known[1:]


def _blank(setup: Setup, layer: NamedLayer) -> dict[str, Record]:
    runner, _ = _tools(setup)
    records = {name: runner.blank(layer.name, runner.as_run(layer.problem), name) for name in TIMED}
    step = records[STEP]
    for name in ("floor_ms", "gflop", "megabytes"):
        setattr(step, name, sum(getattr(records[pass_.value], name) for pass_ in Pass))
    return records


def _measured(setup: Setup, layer: NamedLayer, records: dict[str, Record]) -> dict[str, Record]:
    """Checks each pass, then times it and PyTorch by heuristics. The step is timed where all passes are right."""
    runner, timer = _tools(setup)
    problem, step = runner.as_run(layer.problem), records[STEP]
    rotation = setup.rotation(problem)
    sets = rotation.operands(problem, setup.device)
    for pass_ in Pass:
        _check(runner, Case(layer.name, problem, pass_), sets[0], records[pass_.value])
    faults = [f"{record.pass_name} is {record.status}" for record in records.values() if record.status != OK]
    if faults:
        step.status, step.reason = FAILED, ", ".join(faults)
    else:
        parts = [records[pass_.value] for pass_ in Pass]
        step.algorithm = " + ".join(record.algorithm for record in parts)
        step.predicted_ms = sum(record.predicted_ms or 0.0 for record in parts) or None
    with torch_flags(TorchVariant.DEFAULT, setup.strict_fp32):
        for name, record in records.items():
            if record.status == OK:
                ours = [_contestant(name, problem, each, polyphase_call, polyphase_step) for each in sets]
                runner.attempt(record, partial(_time, record, timer, ours, rotation))
            if record.status == OK:
                _add_torch(record, TorchVariant.DEFAULT, _torch_time(name, problem, sets, timer, rotation))
    return records


def _check(runner: Runner, case: Case, operands: Operands, record: Record) -> None:
    def check() -> None:
        runner.plan(case, record)
        runner.check(case, operands, record, CHECK_FLOPS)

    runner.attempt(record, check)


def _time(record: Record, timer: GraphTimer, calls: Sequence[Call | Step], rotation: Rotation) -> None:
    record.take(timer.measure(calls, rotation.calls))


def _benchmark_mode(setup: Setup, layer: NamedLayer, wanted: Sequence[str]) -> dict[str, Timing | str]:
    """PyTorch's times in benchmark mode, or why there is none, if no layer was called in another mode here."""
    runner, timer = _tools(setup)
    problem = runner.as_run(layer.problem)
    rotation = setup.rotation(problem)
    sets = rotation.operands(problem, setup.device)
    with torch_flags(TorchVariant.BENCHMARK, setup.strict_fp32):
        return {name: _torch_time(name, problem, sets, timer, rotation) for name in wanted}


def _torch_time(
    name: str, problem: ConvTransposeProblem, sets: Sequence[Operands], timer: GraphTimer, rotation: Rotation
) -> Timing | str:
    """PyTorch's time, or its failure, which is a note beside our time."""
    try:
        return timer.measure(
            [_contestant(name, problem, each, torch_call, torch_step) for each in sets], rotation.calls
        )
    except Exception as failure:
        return environment.first_line(failure)


def _add_torch(record: Record, variant: TorchVariant, time: Timing | str) -> None:
    if isinstance(time, Timing):
        setattr(record, f"torch_{variant.value}_ms", time.ms)
        if variant is TorchVariant.DEFAULT and record.ms:
            record.speedup = time.ms / record.ms
        return
    record.note(f"PyTorch {variant.value}: {time}")


def _contestant(
    name: str,
    problem: ConvTransposeProblem,
    operands: Operands,
    call: Callable[[ConvTransposeProblem, Pass, Operands], Call],
    step: Callable[[ConvTransposeProblem, Operands], Step],
) -> Call | Step:
    return step(problem, operands) if name == STEP else call(problem, Pass(name), operands)
