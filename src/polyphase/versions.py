"""Checks of in-place changes: a fused layer, computed later, must read its tensors' values at its call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyphase import fused


def versions_of(reads: Sequence[Tensor], steps: Sequence[fused.Step | None] = ()) -> list[int]:
    """The number of in-place changes of each tensor; 0 for tensors of inference mode, which do not count them."""
    tensors = [*reads]
    for step in steps:
        if step is not None and step.tensors:
            tensors += [each for _, each in step.tensors]
    if not torch.is_inference_mode_enabled():
        try:
            return [each._version for each in tensors]
        except RuntimeError:  # for a tensor of inference mode: the exception takes 20 µs
            pass
    return [0 if each.is_inference() else each._version for each in tensors]


def check_versions(reads: Sequence[Tensor], steps: Sequence[fused.Step | None], versions: list[int]) -> None:
    """Raises RuntimeError if a tensor that is still to be read has changed since."""
    if versions != versions_of(reads, steps):
        raise RuntimeError(
            "a tensor that a fused layer reads (its input, a parameter, or the tensor that is added) was changed in "
            "place between the calls that are fused into one kernel. Change a clone instead, or call "
            "polyphase.restore(model)"
        )
