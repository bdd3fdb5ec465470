"""What polyphase does for a model: its layers, how long each takes, the gain, and the code to add.

On a GPU layers are measured one by one against PyTorch and the whole model is timed both ways; elsewhere the times are
the planner's predictions for a card that is named. Accuracy is `polyphase.bench.check`'s, on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

import polyphase
from polyphase.bench import environment
from polyphase.bench.check import check_model
from polyphase.bench.model_file import ModelFile, Run, naming_the_line, recorder, sizes_of, trace
from polyphase.bench.records import FAILED, Record
from polyphase.bench.runner import Case, Runner
from polyphase.bench.trial import CheckResult, Options
from polyphase.errors import UnsupportedError
from polyphase.plan.planner import as_shown, plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import about_rates, floor_ms
from polyphase.problem.device import Card, DeviceInfo
from polyphase.torch_op.tf32 import tf32_allowed

if TYPE_CHECKING:
    from polyphase.fuse import Block


def sum_of(values: Iterable[float | None]) -> float | None:
    """The sum, None where one value is."""
    listed = list(values)
    return None if None in listed else sum(value for value in listed if value is not None)


@dataclass(frozen=True)
class Layer:
    """A problem that transposed convolutions of the model solve: ``names`` has a module's name for each of its calls.

    ``records`` are the passes of one call: measured, or with the prediction alone.
    """

    names: tuple[str, ...]
    problem: ConvTransposeProblem
    records: tuple[Record, ...]

    def total(self, of: Callable[[Record], float | None]) -> float | None:
        """The sum over calls and passes, None where one lacks it."""
        total = sum_of(of(record) for record in self.records)
        return None if total is None else len(self.names) * total


@dataclass
class ModelReport:
    """All that is known of a model. ``measured``: layers and model were timed on ``card``, and not predicted.

    ``rates`` says which rates predictions and floors are of.
    """

    target: str
    card: str
    measured: bool
    dtype: str
    inputs: str
    check: CheckResult
    layers: list[Layer] = field(default_factory=list)
    share_of_flops: float | None = None
    functional: int = 0
    facts: list[tuple[str, str]] = field(default_factory=list)
    rates: str = ""

    @property
    def slower(self) -> list[str]:
        """Names of layers that were measured to be slower than PyTorch's, over all calls and passes."""
        lost: dict[str, float] = {}
        for layer in self.layers:
            one = replace(layer, names=layer.names[:1])  # call
            ours, theirs = one.total(lambda record: record.ms), one.total(lambda record: record.torch_default_ms)
            for name in layer.names if ours is not None and theirs is not None else ():
                lost[name] = lost.get(name, 0.0) + (ours or 0.0) - (theirs or 0.0)
        return [name for name, ms in lost.items() if ms > 0]

    @property
    def faults(self) -> list[str]:
        """Passes that are wrong, fail, or that no kernel computes on the card."""
        return [
            f"{record.layer}, {record.pass_name}: {record.status}: {record.reason}"
            for layer in self.layers
            for record in layer.records
            if not record.good
        ]

    @property
    def ok(self) -> bool:
        """Whether the model was accelerated, and all that was compared or measured is right."""
        return self.check.ok and not self.faults

    @property
    def host_bound(self) -> str:
        """What to do where the whole model is slower though none of its layers is; else nothing."""
        lost = [race.what for race in self.check.races if race.ours.ms > race.torch.ms]
        if self.slower or self.faults or not lost:
            return ""
        taken = sum(layer.total(lambda record: record.ms) or 0.0 for layer in self.layers)
        return (
            f"{', '.join(lost)}: slower, though no layer is. All passes of the layers take {taken:.3f} ms; the rest is "
            "the host's time for calls. With larger inputs, torch.compile or a CUDA graph the layers' gain shows"
        )

    @property
    def fused(self) -> list[Block]:
        """The layers that compute more than themselves with ``fuse=True``."""
        return [block for block in self.check.blocks if block.fused or block.before]

    @property
    def recipe(self) -> str:
        """The code to add to a program, for modules and for calls of PyTorch's function; "" where there are neither."""
        swap = ["polyphase.accelerate(model)"] if self.check.swapped.swapped else []
        if self.fused:
            swap.append("# or, for inference: polyphase.accelerate(model.eval(), fuse=True)")
        if self.slower:
            names = ", ".join(map(repr, self.slower))
            swap = [
                f"leave = {{{names}}}  # measured to be slower than PyTorch's",
                "polyphase.accelerate(model, filter=lambda name, module: name not in leave)",
            ]
        if self.functional:
            swap += ["with polyphase.override():  # for calls outside modules, on CUDA devices", "    y = model(x)"]
        return "\n".join(["import polyphase", "", *swap]) if swap else ""


def report_on(
    target: str,
    file: ModelFile,
    options: Options,
    device: DeviceInfo | Card,
    card: str,
    measure: bool,
    progress: Callable[[str], None] = lambda stage: None,
) -> ModelReport:
    """Report on a model: with ``measure`` by timing on ``options.device``, else by predictions for ``device``.

    Raises `ModelFileError` with the model's own line where PyTorch does not run it.
    """
    progress("reading the model's layers")
    model = file.build(options.device, options.dtype, options.seed)
    polyphase.restore(model)
    inputs = file.inputs(options.device, options.dtype)
    run = _observed(file.path, model, inputs)
    sizes = sizes_of(inputs)
    del model, inputs
    checked = check_model(file, replace(options, time=measure), progress)
    passes = list(Pass) if options.grad else [Pass.FORWARD]
    swapped = {name for entry in checked.swapped.swapped for name in entry.names}
    grouped: dict[ConvTransposeProblem, list[str]] = {}
    for name, problem in run.problems:
        if problem is not None and name in swapped:
            grouped.setdefault(replace(problem, tf32=tf32_allowed()), []).append(name)
    own = sum(len(names) * problem.flops for problem, names in grouped.items())
    planned_for = Card.of(device)
    if measure and grouped:
        progress("measuring this machine's peak bandwidth and rates")
        with closing(Runner(options.device, [problem.dtype for problem in grouped], quick=True)) as runner:
            layers = _layers(grouped, passes, runner.run, "timing", progress)
    else:
        layers = _layers(grouped, passes, partial(_prediction, planned_for), "planning", progress)
    return ModelReport(
        target,
        card,
        measure,
        str(options.dtype).removeprefix("torch."),
        sizes,
        checked,
        layers,
        min(own / run.flops, 1.0) if run.flops else None,
        run.functional,
        _facts(options, card, measure),
        "" if measure else about_rates(planned_for),
    )


def _observed(path: Path, model: nn.Module, inputs: Sequence[Any]) -> Run:
    """What the model runs: on shapes alone, or in earnest where it needs numbers."""
    try:
        return trace(model, inputs)
    except Exception:
        problems: list[tuple[str, ConvTransposeProblem | None]] = []
        hooks = [
            module.register_forward_hook(recorder(name, problems))
            for name, module in model.named_modules()
            if isinstance(module, _ConvTransposeNd)
        ]
        with torch.no_grad(), naming_the_line(path, "the model", only_modules=True):
            model(*inputs)
        for hook in hooks:
            hook.remove()
        return Run(problems, 0, False, 0)


def _layers(
    grouped: dict[ConvTransposeProblem, list[str]],
    passes: list[Pass],
    record: Callable[[Case], Record],
    doing: str,
    progress: Callable[[str], None],
) -> list[Layer]:
    """The layers, with a record of each pass."""
    found = []
    for problem, names in grouped.items():
        records = []
        for pass_ in passes:
            progress(f"{doing} {_shown(names[0])}, {pass_.value}")
            records.append(record(Case(_shown(names[0]), problem, pass_)))
        found.append(Layer(tuple(names), problem, tuple(records)))
    return found


def _prediction(card: Card, case: Case) -> Record:
    """A record with the planner's time alone."""
    problem, pass_ = case.problem, case.pass_
    layout = "channels_last" if problem.channels_last else "nchw"
    record = Record(case.name, str(problem), pass_.value, problem.dtype, layout)
    record.floor_ms = floor_ms(problem, card.rates)
    try:
        chosen = plan(problem, pass_, card.device, by_prediction=True)
    except UnsupportedError as failure:
        record.status, record.reason = FAILED, str(failure)
        return record
    assert chosen.candidate is not None
    assert chosen.program is not None
    record.algorithm, record.config = chosen.schedule, chosen.describe()
    record.predicted_ms = 1e3 * as_shown(card, chosen.candidate, problem, pass_).seconds
    record.times_floor = record.predicted_ms / record.floor_ms
    record.workspace_megabytes = sum(buffer.bytes for buffer in chosen.program.buffers) / 1e6
    return record


def _facts(options: Options, card: str, measured: bool) -> list[tuple[str, str]]:
    facts = dict(environment.report())
    kept = ["polyphase", "Python", "PyTorch", "cuDNN", "driver", "NVRTC", "processor"]
    machine = environment.device_name(options.device.type)
    return [
        ("times", f"measured on {machine}" if measured else f"predictions for {card}; no GPU was used"),
        ("accuracy", f"measured on {machine}{'' if measured else ', with the portable path'}"),
        *((name, facts[name]) for name in kept if name in facts),
    ]


def _shown(name: str) -> str:
    return name or "the model itself"
