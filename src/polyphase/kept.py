"""Weights that `polyphase.freeze` has marked, and their packed copies on GPUs, which calls look up by the weight."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Packed:
    """A weight packed for one call's kernel, for launches on one stream; ``state``: the weight's when it was packed."""

    workspace: Tensor
    state: tuple[int, int] | None = None


@dataclass
class Kept:
    """The packed copies of one weight, by call and stream, or by graph."""

    weight: weakref.ref[Tensor]
    packed: dict[tuple[Any, int | str], Packed] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(each.workspace.numel() for each in self.packed.values())


#: Kept weights by id, until they die.
KEPT: dict[int, Kept] = {}


def keep(weight: Tensor) -> Kept:
    """Keeps packed copies of a weight from now on."""
    found = kept_of(weight)
    if found is None:
        place = id(weight)
        found = KEPT[place] = Kept(weakref.ref(weight, lambda _: KEPT.pop(place, None)))
    return found


def kept_of(weight: Tensor) -> Kept | None:
    """The packed copies of a weight, None if it is not kept."""
    found = KEPT.get(id(weight))
    return found if found is not None and found.weight() is weight else None


def forget(weight: Tensor) -> None:
    """Frees the packed copies of a weight, and keeps none from now on."""
    if kept_of(weight) is not None:
        del KEPT[id(weight)]


def state_of(weight: Tensor) -> tuple[int, int] | None:
    """A weight's version and address, which change with its values. None if PyTorch counts no versions."""
    return None if weight.is_inference() else (weight._version, weight.data_ptr())
