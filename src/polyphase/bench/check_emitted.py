"""An emitted file against the model that it was made from, by KernelBench's rules and against float64.

KernelBench seeds its generator before it builds the inputs and each of the two models, compares outputs in five trials,
and times calls between which the cache is flushed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import polyphase
from polyphase.bench.accuracy import kernelbench_rule
from polyphase.bench.environment import first_line
from polyphase.bench.model_file import Cut, ModelFile, ModelFileError, copied, leaves, run_file, sizes_of
from polyphase.bench.timing import Timer
from polyphase.bench.trial import CheckResult, Finding, Options, Trial, quiet_dropout
from polyphase.emit.rules import broken


@dataclass
class EmittedResult:
    """What was found out. Times are mean milliseconds of a forward call; ``problems`` names what is wrong."""

    trials: list[tuple[int, str, float]] = field(default_factory=list)  # number, sizes, share of elements that differ
    findings: list[Finding] = field(default_factory=list)
    emitted_ms: float | None = None
    package_ms: float | None = None
    torch_ms: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the file keeps every rule, and everything compared agrees."""
        return not self.problems


def load_emitted(path: Path) -> ModelFile:
    """The emitted file as a model file of its own, whose model is ``ModelNew``. Raises `ModelFileError`."""
    module = run_file(path, "polyphase_emitted")
    names = ("ModelNew", "get_inputs", "get_init_inputs")
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ModelFileError(f"{path} lacks {', '.join(missing)}: it was not written by `emit`")
    return ModelFile(path, module.ModelNew, module.get_inputs, module.get_init_inputs)


def check_emitted(
    emitted: ModelFile, original: ModelFile, options: Options, progress: Callable[[str], None] = lambda stage: None
) -> EmittedResult:
    """Compare an emitted file with its original on a GPU; ``progress`` is told what happens next."""
    result = EmittedResult()
    rules = broken(emitted.path.read_text(encoding="utf-8"))
    result.problems += [f"KernelBench's static check refuses the file, which {rule}" for rule in rules]
    progress("building the models")
    model = original.build(options.device, options.dtype, options.seed)
    polyphase.restore(model)  # a file may use polyphase's modules itself
    fast = replace(original, make_model=emitted.make_model).build(options.device, options.dtype, options.seed)
    states = model.state_dict(), fast.state_dict()
    if states[0].keys() != states[1].keys() or not all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    ):
        result.problems.append("under one seed, the emitted model has other parameters than the original")
        return result

    seeds = _seeds(options)
    inputs: list[object] | None = None  # of the trials the largest: sizes may change from call to call
    for number, seed in enumerate(seeds, 1):
        progress(f"trial {number} of {len(seeds)}")
        torch.manual_seed(seed)
        given = original.inputs(options.device, options.dtype)
        if inputs is None or _elements(given) > _elements(inputs):
            inputs = copy.deepcopy(given)  # a model may change what it is given
        _trial(result, number, seed, given, model, fast)
    assert inputs is not None
    if options.grad and result.ok:
        progress("gradients, against float64")
        _against_float64(result, original.path, inputs, model, fast, options)
    if options.time and result.ok:
        progress("timing")
        package = copied(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            polyphase.accelerate(package)
        calls = [_forward(each, inputs) for each in (fast, package, model)]
        result.emitted_ms, result.package_ms, result.torch_ms = Timer(options.device).means(calls)
    return result


def _seeds(options: Options) -> list[int]:
    torch.manual_seed(options.seed)
    return [int(torch.randint(0, 2**32 - 1, (1,)).item()) for _ in range(options.trials)]


def _trial(
    result: EmittedResult,
    number: int,
    seed: int,
    inputs: list[object],
    model: torch.nn.Module,
    fast: torch.nn.Module,
) -> None:
    sizes = sizes_of(inputs)
    outputs = []
    for each in (model, fast):
        torch.manual_seed(seed)
        try:
            outputs.append(leaves(_forward(each, inputs)()))
        except Exception as failure:  # whatever it is, it is a finding
            which = "the original" if each is model else "the emitted model"
            result.problems.append(f"{sizes}: {which} does not run: {first_line(failure)}")
            return
    shapes = [[(tuple(out.shape), out.dtype) for out in each] for each in outputs]
    if shapes[0] != shapes[1]:
        result.problems.append(f"{sizes}: the outputs are {shapes[1]}, and should be {shapes[0]}")
        return
    for expected, out in zip(*outputs):
        share = kernelbench_rule(out, expected)
        result.trials.append((number, sizes, share))
        if share:
            result.problems.append(f"{sizes}: {share:.2%} of the output fail KernelBench's rule in trial {number}")


def _elements(inputs: list[object]) -> int:
    return sum(value.numel() for value in leaves(inputs))


def _forward(model: torch.nn.Module, inputs: list[object]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(*inputs)

    return call


def _against_float64(
    result: EmittedResult,
    path: Path,
    inputs: list[object],
    model: torch.nn.Module,
    fast: torch.nn.Module,
    options: Options,
) -> None:
    model, fast = copied(model), copied(fast)
    quiet_dropout(model)
    quiet_dropout(fast)
    found = CheckResult(Cut(), polyphase.Report("emitted", ()))
    Trial(path, model, fast, options, found, lambda stage: None).run(1, inputs)
    result.findings += found.findings
    found.findings = []
    Trial(path, model.eval(), fast.eval(), replace(options, grad=False), found, lambda stage: None).run(1, inputs)
    what = "in evaluation mode, without derivatives"
    result.findings += [replace(each, what=f"{each.what}, {what}") for each in found.findings]
    result.problems += found.problems
