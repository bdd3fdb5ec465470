"""How often tensors were changed in place: what is computed later must read what was there before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyphase import fused


def versions_of(reads: Sequence[Tensor], steps: Sequence[fused.Step | None] = ()) -> list[int]:
    """How often each tensor has been changed in place; those of inference mode do not count it."""
    tensors = [*reads]
    for step in steps:
        if step is not None and step.tensors:
            tensors += [each for _, each in step.tensors]
    if not torch.is_inference_mode_enabled():
        try:
            return [each._version for each in tensors]
        except RuntimeError:  # of a tensor from inference mode: it takes 20 µs, where that is on always
            pass
    return [0 if each.is_inference() else each._version for each in tensors]


def check_versions(reads: Sequence[Tensor], steps: Sequence[fused.Step | None], versions: list[int]) -> None:
    """Raise RuntimeError where a tensor has changed that is to be read."""
    if versions != versions_of(reads, steps):
        raise RuntimeError(
            "a tensor that a fused layer reads (its input, a parameter, what is added) has changed in place "
            "before the functions behind the layer were called"
        )
