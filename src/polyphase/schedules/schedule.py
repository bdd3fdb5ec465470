"""What a schedule tells the planner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from polyphase.problem.layouts import Layouts
from polyphase.problem.problem import ConvTransposeProblem, Pass
from polyphase.program.program import Program

if TYPE_CHECKING:
    from polyphase.problem.device import DeviceInfo


@dataclass(frozen=True)
class Candidate:
    """One variant of a schedule for a problem, with its predicted time and what bounds it."""

    schedule: str
    variant: Any
    seconds: float
    bound: str

    def describe(self) -> str:
        """The variant in one line."""
        settings = (f"{name}={value}" for name, value in self.variant._asdict().items())
        return f"{self.schedule}({', '.join(settings)})"


class Schedule(Protocol):
    """One way to compute a pass. ``any_size``: a layer that it does not refuse it computes at every size.

    ``adapts``: gradients, too, take another of its candidates where that is clearly faster at the size at hand.
    """

    name: str
    any_size: bool
    adapts: bool

    def __hash__(self) -> int: ...

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        """Why the schedule cannot compute the pass, or None where it can."""

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> Iterator[Candidate]:
        """Variants in rising order of predicted time, each predicted when it is asked for.

        Which variants these are, and their order, does not depend on batch and image size, but on whether images are
        tiny, are whole lines of memory, how even their rows are, and whether the cores take their pixels as they lie;
        so new sizes compile few kernels.
        """

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: Any
    ) -> Program:
        """The launch of one variant."""


def first_candidates(
    name: str, variants: Iterable[Any], predict: Callable[[Any], tuple[float, str] | None], count: int
) -> Iterator[Candidate]:
    """The first ``count`` of ``variants`` that ``predict`` has a time and a bound for: None where no tile fits."""
    predicted = ((variant, predict(variant)) for variant in variants)
    candidates = (Candidate(name, variant, *found) for variant, found in predicted if found is not None)
    return itertools.islice(candidates, count)
