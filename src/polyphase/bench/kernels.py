"""What the kernels of many layers need of the machine: registers, shared memory, and whether anything spills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from rich.table import Table

from polyphase.bench import gates, plans, pool
from polyphase.bench.environment import first_line
from polyphase.bench.layers import NamedLayer
from polyphase.bench.records import write_rows
from polyphase.bench.report import table_of
from polyphase.errors import CompilationError
from polyphase.jit.compiler import Resources, compiler_version, resources_of
from polyphase.jit.source import KernelSource
from polyphase.plan import planner as plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, ELEMENT, SAMPLE, Epilogue, Operand, Operation


class Functions(str, Enum):
    """What a layer's kernels compute beside it, of each kind that takes other registers."""

    NONE = "none"
    RESIDUAL = "residual"  # read for each output
    NORM = "norm"  # terms of a channel, and a function
    STYLE = "style"  # terms of a sample and channel
    LAYER_NORM = "layer_norm"  # all channels of a pixel
    PROLOGUE = "prologue"

    def around(self, layer: NamedLayer) -> NamedLayer:
        """The layer with these."""
        if self is Functions.PROLOGUE:
            return replace(layer, problem=replace(layer.problem, prologue=_EPILOGUES[Functions.NORM]))
        return replace(layer, problem=replace(layer.problem, epilogue=_EPILOGUES[self]))


def _scale_and_shift(per: str) -> Operation:
    return Operation("scale_shift", (), (Operand("scale", per), Operand("shift", per)))


_EPILOGUES = {
    Functions.NONE: Epilogue(),
    Functions.RESIDUAL: Epilogue((Operation("add", (), (Operand("residual", ELEMENT),)),)),
    Functions.NORM: Epilogue((_scale_and_shift(CHANNEL), Operation("silu"))),
    Functions.STYLE: Epilogue((_scale_and_shift(SAMPLE), Operation("leaky_relu", (0.2,)))),
    Functions.LAYER_NORM: Epilogue((Operation("layer_norm", (1e-6,)),)),
}


@dataclass(frozen=True)
class Asker:
    """A pass of a layer that asks for a kernel: to compute it, or as another algorithm's first (not ``chosen``)."""

    layer: str
    problem: ConvTransposeProblem
    pass_: Pass
    chosen: bool


@dataclass(frozen=True)
class Wanted:
    """A kernel to compile, and all that ask for it, in the order of the layers."""

    source: KernelSource
    arch: str
    askers: tuple[Asker, ...]
    dynamic_shared: int

    @property
    def first(self) -> Asker:
        """What asks for it first."""
        return self.askers[0]

    @property
    def chosen(self) -> bool:
        """Whether the planner takes it for any of them, as opposed to a candidate behind its choice."""
        return any(asker.chosen for asker in self.askers)

    @property
    def title(self) -> str:
        """Kernel, architecture and the layer that asks for it."""
        return f"{self.source.kernel}, {self.arch}, {self.first.pass_.value} of {self.first.problem}"


@dataclass(frozen=True)
class Report:
    """A kernel and what it needs, or the message of the compiler that refused it."""

    wanted: Wanted
    resources: Resources | None
    failure: str = ""

    @property
    def clean(self) -> bool:
        """Compiled, without a spill, a stack frame or a warning."""
        return self.resources is not None and self.resources.clean

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block, asked for in the source and at launch."""
        return self.wanted.dynamic_shared + (self.resources.shared if self.resources else 0)

    @property
    def messages(self) -> tuple[str, ...]:
        """The compiler's complaints."""
        return (self.failure,) if self.resources is None else self.resources.warnings


def wanted(
    layers: Iterable[NamedLayer],
    passes: Sequence[Pass],
    dtypes: Sequence[str],
    channels_last: Sequence[bool],
    devices: Iterable[DeviceInfo],
    jobs: int = 1,
) -> list[Wanted]:
    """Every kernel that the planner can choose for these layers, TF32 forbidden and allowed; identical ones once."""
    cases = plans.cases(layers, passes, dtypes, channels_last, devices)
    found: dict[tuple[KernelSource, str], list[tuple[Asker, int]]] = {}
    for case, asked in zip(cases, pool.each(_asked, cases, jobs)):
        for source, asker, shared in asked:
            found.setdefault((source, case.device.arch), []).append((asker, shared))
    return [
        Wanted(source, arch, tuple(asker for asker, _ in askers), askers[0][1])
        for (source, arch), askers in found.items()
    ]


def _asked(case: plans.Case) -> list[tuple[KernelSource, Asker, int]]:
    """The kernels that a case asks for, and the shared memory that each has at launch, as far as that is known."""
    found = []
    for pass_ in case.passes:
        chosen = plan.plan(case.problem, pass_, case.device, by_prediction=True)
        taken = {source for program in chosen.programs for source in program.sources}
        for source in plan.kernel_sources(case.problem, pass_, case.device):
            # What a kernel asks for at launch is known of the winner; a loser is launched by nobody.
            winner = chosen.program
            shared = winner.main.shared_bytes if winner and winner.main.source == source else 0
            found.append((source, Asker(case.layer, case.problem, pass_, source in taken), shared))
    return found


def one_of_each_variant(kernels: Iterable[Wanted]) -> list[Wanted]:
    """Those that the planner takes, and one of each other variant: kernels that differ in sizes alone."""
    first = sorted(kernels, key=lambda kernel: not kernel.chosen)
    met: set[tuple[object, ...]] = set()
    kept = []
    for kernel in first:
        variant = (kernel.arch, *kernel.source.variant)
        if kernel.chosen or variant not in met:
            kept.append(kernel)
        met.add(variant)
    return kept


def compile_all(kernels: Sequence[Wanted], jobs: int) -> Iterator[Report]:
    """Compile kernels, ``jobs`` at a time, and yield the reports as they come."""
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_compile, kernel) for kernel in kernels]):
            yield future.result()


def _compile(kernel: Wanted) -> Report:
    try:
        return Report(kernel, resources_of(kernel.source, kernel.arch))
    except CompilationError as failure:
        return Report(kernel, None, f"{first_line(failure)}\n{failure.log}")


def table(reports: Iterable[Report]) -> Table:
    """One line for each kernel file and architecture, with the most that any of its kernels needs."""
    groups: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        groups.setdefault((report.wanted.source.kernel, report.wanted.arch), []).append(report)
    figures = ("kernels", "registers", "shared (B)", "stack (B)", "spills (B)", "warnings", "failures", "seconds")
    title = "The most that any kernel of a file needs"
    lines = table_of(title, ("kernel", "arch"), figures, title_justify="center")
    for (kernel, arch), group in sorted(groups.items()):
        known = [report.resources for report in group if report.resources is not None]
        low, high = (pick((found.registers for found in known), default=0) for pick in (min, max))
        lines.add_row(
            kernel,
            arch,
            str(len(group)),
            f"{low}–{high}",
            str(max(report.shared for report in group)),
            str(max((found.stack for found in known), default=0)),
            str(max((found.spills for found in known), default=0)),
            str(sum(len(found.warnings) for found in known)),
            str(len(group) - len(known)),
            f"{sum(found.seconds for found in known) / max(len(known), 1):.2f}",
            style=None if all(report.clean for report in group) else "bold red",
        )
    return lines


def every_table(reports: Iterable[Report], title: str = "Every kernel") -> Table:
    """One line for each kernel."""
    names = ("kernel", "arch", "pass", "first asked for by")
    figures = ("registers", "shared (B)", "stack (B)", "spills (B)", "warnings", "seconds")
    lines = table_of(title, names, figures, title_justify="center")
    for report in sorted(reports, key=lambda report: report.wanted.title):
        kernel, found = report.wanted, report.resources
        asker = f"{kernel.first.layer}: {kernel.first.problem}"
        names = (kernel.source.kernel, kernel.arch, kernel.first.pass_.value, asker)
        if found is None:
            lines.add_row(*names, "did not compile", style="bold red")
            continue
        needs = (found.registers, report.shared, found.stack, found.spills, len(found.warnings))
        style = None if found.clean else "bold red"
        lines.add_row(*names, *map(str, needs), f"{found.seconds:.2f}", style=style)
    return lines


def write_csv(path: Path, reports: Iterable[Report]) -> None:
    """Write one line for each kernel."""
    columns = ["kernel", "arch", "pass", "layer", "problem", "registers", "shared", "stack", "spills", "messages"]
    rows = []
    for report in sorted(reports, key=lambda report: report.wanted.title):
        kernel, found = report.wanted, report.resources
        needs = [found.registers, report.shared, found.stack, found.spills] if found else [""] * 4
        asker = [kernel.first.pass_.value, kernel.first.layer, str(kernel.first.problem)]
        rows.append([kernel.source.kernel, kernel.arch, *asker, *needs, " | ".join(report.messages)])
    write_rows(path, columns, rows)


def write_digests(path: Path, reports: Iterable[Report]) -> None:
    """Write the digest of each kernel's machine code, once for every problem that asks for the kernel."""
    gates.write(path, gates.DIGESTS, (row for report in reports for row in _digests(report)))


def _digests(report: Report) -> Iterator[gates.Row]:
    found = report.resources
    needs = (found.digest, str(found.registers), str(found.shared)) if found else ("did not compile", "", "")
    for asker in report.wanted.askers:
        yield {
            "arch": report.wanted.arch,
            "pass": asker.pass_.value,
            "problem": str(asker.problem),
            "role": "chosen" if asker.chosen else "offered",
            "kernel": report.wanted.source.kernel,
            "compiler": compiler_version(),
            **dict(zip(("digest", "registers", "shared"), needs)),
        }
