"""Checks and times one pass of one layer after the other, and never lets a failure of one hide the others.

A case is checked before it is timed: its output is poisoned with NaN, computed, and held against float64
(`polyphase.bench.oracle`). What is wrong is reported as wrong and not timed. On a GPU a plan that names the portable
path is a failure: a benchmark that times a fallback is a defect. Both contestants run under the same flags. PyTorch's
benchmark mode runs in another process (`polyphase.bench.apart` says why).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyphase.bench import ceilings, environment, oracle
from polyphase.bench.accuracy import compare
from polyphase.bench.apart import BenchmarkProcess
from polyphase.bench.contestants import TorchVariant, polyphase_call, torch_call, torch_flags, torch_variant_call
from polyphase.bench.layers import NamedLayer, cut
from polyphase.bench.memory import workspace_megabytes
from polyphase.bench.operands import MEMORY_FORMATS, Operands, make_operands
from polyphase.bench.records import FAILED, SKIPPED, WRONG, Record
from polyphase.bench.timing import Timer
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import Ceilings

CPU_FLOPS = 1e9
"""What one pass may cost on a CPU; larger layers are cut, which their name then says."""


@dataclass(frozen=True)
class Case:
    """One pass of one layer; dtype and layout are the problem's."""

    name: str
    problem: ConvTransposeProblem
    pass_: Pass


def make_cases(
    layers: Iterable[NamedLayer],
    passes: Sequence[Pass],
    dtypes: Sequence[str],
    channels_last: Sequence[bool],
    tf32: bool = False,
) -> list[Case]:
    """Every combination, ordered so that the passes of a layer follow each other and share its operands."""
    return [
        Case(layer.name, replace(layer.problem, dtype=dtype, channels_last=layout, tf32=tf32), pass_)
        for dtype in dtypes
        for layout in channels_last
        for layer in layers
        for pass_ in passes
    ]


def cut_for_cpu(layer: NamedLayer) -> NamedLayer:
    """The layer with its batch and image sides cut until it fits `CPU_FLOPS`, the divisor added to its name."""
    factor = cutting_factor(layer.problem, CPU_FLOPS)
    if factor == 1:
        return layer
    return NamedLayer(f"{layer.name} ÷{factor}", cut(layer.problem, factor))


def cutting_factor(problem: ConvTransposeProblem, flops: float) -> int:
    """The smallest power of two by which batch and sides must be cut for a pass to cost at most ``flops``."""
    factor = 1
    while cut(problem, factor).flops > flops and cut(problem, 2 * factor) != cut(problem, factor):
        factor *= 2
    return factor


class Runner:
    """Runs cases on one device, against some of PyTorch's variants. To be closed at the end."""

    def __init__(
        self,
        device: torch.device,
        dtypes: Sequence[str],
        against: Sequence[TorchVariant] = (TorchVariant.DEFAULT,),
        strict_fp32: bool = False,
        quick: bool = False,
        known: Ceilings | None = None,
    ) -> None:
        self.device = device
        self.against = against
        self.strict_fp32 = strict_fp32
        self.timer = Timer(device, repetitions=5 if quick else 20, budget_seconds=0.05 if quick else 0.2)
        self.ceilings = known or ceilings.measure(self.timer, dtypes)
        self._benchmark_mode = BenchmarkProcess(self.timer, strict_fp32)
        self._operands: tuple[ConvTransposeProblem, Operands] | None = None
        self._facts: dict[str, Any] = {
            "strict_fp32": strict_fp32,
            "ceilings": str(self.ceilings),
            **environment.facts(device.type),
        }

    def run(self, case: Case) -> Record:
        """Check and time one case. Never raises for what the case itself does: that is in the record."""
        case = replace(case, problem=self.as_run(case.problem))
        record = self.blank(case.name, case.problem, case.pass_.value)
        if record.status == SKIPPED:
            return record
        if not self.attempt(record, lambda: self._measure(case, record)):
            self._operands = None
        if self.device.type == "cuda" and torch.cuda.memory_reserved(self.device) > 32 << 30:
            torch.cuda.empty_cache()
        return record

    def as_run(self, problem: ConvTransposeProblem) -> ConvTransposeProblem:
        """The problem as it is under this runner's flags."""
        return replace(problem, tf32=self.device.type == "cuda" and not self.strict_fp32)

    def blank(self, name: str, problem: ConvTransposeProblem, pass_name: str) -> Record:
        """A record of which nothing is measured yet; one that cannot be says so."""
        record = Record(
            layer=name,
            problem=str(problem),
            pass_name=pass_name,
            dtype=problem.dtype,
            layout="channels_last" if problem.channels_last else "nchw",
            floor_ms=self.ceilings.floor_ms(problem, self.strict_fp32),
            gflop=problem.flops / 1e9,
            megabytes=problem.bytes / 1e6,
            **self._facts,
        )
        if problem.channels_last and problem.dims + 2 not in MEMORY_FORMATS:
            record.status, record.reason = SKIPPED, "PyTorch has no channels_last for one spatial dimension"
        return record

    @staticmethod
    def attempt(record: Record, work: Callable[[], object]) -> bool:
        """Whether ``work`` succeeds. Its failure is recorded with the reason: other cases must not be lost."""
        from polyphase.jit.launcher import quiet

        try:
            with quiet():
                work()
        except Exception as failure:
            record.status, record.reason = FAILED, environment.first_line(failure)
            return False
        return True

    def close(self) -> None:
        """End the other process, if there is one."""
        self._benchmark_mode.close()

    def _measure(self, case: Case, record: Record) -> None:
        self.plan(case, record)
        operands = self._operands_of(case.problem)
        ours = polyphase_call(case.problem, case.pass_, operands)
        if not self.check(case, operands, record):
            return
        with torch_flags(TorchVariant.DEFAULT, self.strict_fp32):
            timing = self.timer.measure(ours)
            record.workspace_megabytes = workspace_megabytes(ours, self.device)
        record.take(timing)
        for variant in self.against:
            self._measure_torch(variant, case, operands, record)
        if record.torch_default_ms is not None:
            record.speedup = record.torch_default_ms / timing.ms

    def plan(self, case: Case, record: Record) -> None:
        """Record schedule, config and prediction, and remark where they were not chosen by prediction."""
        from polyphase.plan import planner as plan
        from polyphase.problem.device import PORTABLE, DeviceInfo

        on_gpu = self.device.type == "cuda"
        chosen = plan.plan(case.problem, case.pass_, DeviceInfo.of(self.device) if on_gpu else PORTABLE)
        if on_gpu and chosen.schedule == "portable":
            raise RuntimeError("the plan is the portable path, which is no kernel of the GPU's: nothing to be timed")
        record.algorithm, record.config = chosen.schedule, chosen.describe()
        record.reason = "its kernel was chosen by `tune`" if chosen.measured else ""
        if chosen.candidate is not None:
            record.predicted_ms = 1e3 * chosen.candidate.seconds

    def _operands_of(self, problem: ConvTransposeProblem) -> Operands:
        if self._operands is None or self._operands[0] != problem:
            self._operands = None  # the old ones first give their memory back
            self._operands = problem, make_operands(problem, self.device)
        return self._operands[1]

    def check(self, case: Case, operands: Operands, record: Record, flop_budget: float | None = None) -> bool:
        """Whether polyphase is right, by as much of float64's result as costs ``flop_budget``; else it is recorded."""
        budget = () if flop_budget is None else (flop_budget,)
        expected = oracle.sample(case.problem, case.pass_, operands, *budget)
        with poisoned_outputs(self.device), torch_flags(TorchVariant.DEFAULT, self.strict_fp32):
            out = expected.of(polyphase_call(case.problem, case.pass_, operands)())
        try:
            with torch_flags(TorchVariant.DEFAULT, self.strict_fp32):
                rival = expected.of(torch_call(case.problem, case.pass_, operands)())
        except Exception:  # PyTorch lacks the case; the best result of this dtype takes its place as the yardstick
            rival, rival_counts = expected.reference.to(out.dtype), False
        else:
            rival_counts = True
        found = compare(out, rival, expected.reference, expected.rounding)
        record.error, record.torch_error = found.error, found.torch_error if rival_counts else None
        record.compared = expected.compared
        if not found.ok:
            record.status = WRONG
            record.reason = (
                f"{found.broken} of {found.elements} elements differ from float64 by up to "
                f"{found.worst:.3g} times what is allowed"
            )
        return found.ok

    def _measure_torch(self, variant: TorchVariant, case: Case, operands: Operands, record: Record) -> None:
        try:
            setattr(record, f"torch_{variant.value}_ms", self._torch_ms(variant, case, operands, record))
        except Exception as failure:  # PyTorch's failure is a note beside our time, not a failure of ours
            record.note(f"PyTorch {variant.value}: {environment.first_line(failure)}")
        finally:
            if variant is TorchVariant.COMPILE:
                torch.compiler.reset()  # or the next case counts as a recompilation of this one

    def _torch_ms(self, variant: TorchVariant, case: Case, operands: Operands, record: Record) -> float | None:
        if variant is TorchVariant.BENCHMARK:
            return self._benchmark_mode.measure(case.problem, case.pass_)
        with torch_flags(variant, self.strict_fp32):
            call = torch_variant_call(variant, case.problem, case.pass_, operands)
            if call is None:
                return None
            ms = self.timer.measure(call).ms
            if variant is TorchVariant.DEFAULT:
                record.torch_workspace_megabytes = workspace_megabytes(call, self.device)
            return ms


@contextmanager
def poisoned_outputs(device: torch.device) -> Iterator[None]:
    """Within it, polyphase fills every output on a GPU with NaN before its kernel runs: what is not written shows."""
    if device.type != "cuda":
        yield
        return
    from polyphase import prepared

    before = prepared.POISON
    prepared.POISON = True
    try:
        yield
    finally:
        prepared.POISON = before
