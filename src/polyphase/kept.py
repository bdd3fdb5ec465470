"""Weights that `polyphase.freeze` has marked, and their packed copies on GPUs, which calls look up by the weight."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Packed:
    """A weight as one call's kernel wants it, for launches on one stream; ``state``: its own when it was packed."""

    workspace: Tensor
    state: tuple[int, int] | None = None


@dataclass
class Kept:
    """What is kept of one weight: packed copies by call and stream, or graph."""

    weight: weakref.ref[Tensor]
    packed: dict[tuple[Any, int | str], Packed] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """What the copies take."""
        return sum(each.workspace.numel() for each in self.packed.values())


#: By the id of the weight, until it dies.
KEPT: dict[int, Kept] = {}


def keep(weight: Tensor) -> Kept:
    """Have packed copies of a weight kept from here on."""
    found = kept_of(weight)
    if found is None:
        place = id(weight)
        found = KEPT[place] = Kept(weakref.ref(weight, lambda _: KEPT.pop(place, None)))
    return found


def kept_of(weight: Tensor) -> Kept | None:
    """What is kept of a weight, None where it was not asked for."""
    found = KEPT.get(id(weight))
    return found if found is not None and found.weight() is weight else None


def forget(weight: Tensor) -> None:
    """Keep nothing more of a weight."""
    if kept_of(weight) is not None:
        del KEPT[id(weight)]


def state_of(weight: Tensor) -> tuple[int, int] | None:
    """What changes with a weight's values: its version and its address. None where PyTorch counts no versions."""
    return None if weight.is_inference() else (weight._version, weight.data_ptr())
