"""Whether a model gives the same with polyphase as without, and how much sooner.

Copies of a model with the same weights run on the same inputs (`polyphase.bench.trial`): accelerated in training mode,
with derivatives, and fused in evaluation mode, without.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

import polyphase
from polyphase.bench.model_file import Cut, ModelFile, copied, find_cut, sizes_of
from polyphase.bench.runner import CPU_FLOPS
from polyphase.bench.trial import CheckResult, Options, Trial, quiet_dropout
from polyphase.functional_calls import NO_MODULES


def check_model(file: ModelFile, options: Options, progress: Callable[[str], None] = lambda stage: None) -> CheckResult:
    """Check one model file; ``progress`` is called with what is done next.

    Raises `ModelFileError` with the model's own line where PyTorch does not run it either.
    """
    progress("building the model")
    model = file.build(options.device, options.dtype, options.seed)
    polyphase.restore(model)  # a file may use polyphase's modules itself; what it is compared with must be PyTorch's
    quiet_dropout(model)
    fast = copied(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `result.problems` says it where nothing was swapped
        swapped = polyphase.accelerate(fast)

    first = file.inputs(options.device, options.dtype)
    result = CheckResult(_cut(model, first, options), swapped)
    if not swapped.swapped:
        nothing = f"{len(swapped.left)} left alone, none swapped" if swapped.left else NO_MODULES
        result.problems.append(f"nothing to check: {nothing}")
        return result
    trial = Trial(file.path, model, fast, options, result, progress)
    inputs, sizes = first, sizes_of(first)
    for number in range(1, options.trials + 1):
        inputs = result.cut.apply(inputs)
        trial.run(number, inputs)
        if number == 1 and options.time and result.ok:
            trial.race(inputs)
        if number == 1 and options.fuse and result.ok:
            _check_fused(trial, inputs)
        if number == options.trials:
            break
        progress(f"making the inputs of trial {number + 1}")
        inputs = file.inputs(options.device, options.dtype)
        if number == 2 and sizes_of(inputs) == sizes:
            result.remarks.append("get_inputs returns one size: two trials, the second with warm caches")
            break
    trial.conclude()
    return result


def _check_fused(of: Trial, inputs: list[Any]) -> None:
    """Compare and time a fused copy of a trial's model in evaluation mode, without derivatives.

    What is found goes into the trial's result. Without chains there is nothing to compare: ``result.blocks`` say why.
    """
    result, options = of.result, of.options
    plain = copied(of.model).eval()
    fast = copied(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result.blocks = polyphase.accelerate(fast, fuse=True).blocks
    if not any(block.fused for block in result.blocks):
        return
    # Without a report of what was swapped, whose layers a trial watches by hooks: those would see what is not computed.
    found = CheckResult(result.cut, polyphase.Report("fused", ()), result.plans)
    trial = Trial(
        of.path, plain, fast, replace(options, grad=False), found, lambda stage: of.progress(f"fused, {stage}")
    )
    trial.run(1, inputs)
    if options.time and found.ok:
        trial.race(inputs)
    result.findings += [replace(each, what=f"{each.what}, fused") for each in found.findings]
    result.problems += [f"fused: {problem}" for problem in found.problems]
    result.races += [replace(each, what="forward, fused, in evaluation mode") for each in found.races]


def _cut(model: nn.Module, inputs: Sequence[Any], options: Options) -> Cut:
    if options.scale is not None:
        return Cut(options.scale)
    return find_cut(model, inputs, CPU_FLOPS) if options.device.type == "cpu" else Cut()
