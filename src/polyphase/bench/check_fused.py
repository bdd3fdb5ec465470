"""The check of a model whose layers compute what stands behind them, as ``accelerate(model, fuse=True)`` has it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import polyphase
from polyphase.bench import check


def check_fused(
    path: Path,
    model: nn.Module,
    inputs: list[Any],
    options: check.Options,
    result: check.CheckResult,
    progress: Callable[[str], None] = lambda stage: None,
) -> None:
    """Compare and time a fused copy in evaluation mode, without derivatives; what is found goes into ``result``.

    Without chains there is nothing to compare: its report, ``result.fused``, says why.
    """
    plain = copy.deepcopy(model).eval()
    fast = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result.fused = polyphase.accelerate(fast, fuse=True)
    if not any(block.fused for block in result.fused.blocks):
        return
    # Without a report of what was swapped, whose layers a trial watches by hooks: those would see what is not computed.
    found = check.CheckResult(result.cut, polyphase.Report("fused", ()), result.plans)
    trial = check.Trial(
        path, plain, fast, replace(options, grad=False), found, lambda stage: progress(f"fused, {stage}")
    )
    trial.run(1, inputs)
    if options.time and found.ok:
        trial.race(inputs)
    result.findings += [replace(each, what=f"{each.what}, fused") for each in found.findings]
    result.problems += [f"fused: {problem}" for problem in found.problems]
    result.races += [replace(each, what="forward, fused, in evaluation mode") for each in found.races]
