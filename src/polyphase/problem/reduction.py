"""Operations after a layer that no epilogue computes, as data: pooling, then a reduction or norm over groups of values.

One step computes them, ``kernels/steps/reduce_groups.cu``, with operations of an epilogue before and after
(docs/kernels/reductions.md). Values are widened to the accumulator's type when they are read, and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from polyphase.problem import epilogue
from polyphase.problem.epilogue import NONE, Epilogue, Operand, of_input

#: Operations with one result per group (reductions), and with one per value (norms).
REDUCTIONS = ("sum", "mean", "amax", "amin", "logsumexp")
NORMS = ("norm", "softmax")
POOLS = ("max", "avg")


@dataclass(frozen=True)
class Reduction:
    """Windows of a tensor are pooled, then values of a group reduced or normalised together.

    Attributes:
        shape: the shape of the source, ``(N, C, *spatial)``, contiguous.
        pool: one of `POOLS`, or "" for none; ``window``: its sizes and strides. Incomplete windows are left out.
        before: operations on the pooled values, with `Epilogue.is_per_channel`.
        over: one of `REDUCTIONS` and `NORMS`, or "": pooling alone, or nothing.
        first, last: the dimensions of a group, of which the first is divided into ``groups``.
        epsilon: a norm's.
        after: operations on the result. Operands have an element for each channel, or if ``by_position``, for each
            position in a group.
    """

    shape: tuple[int, ...]
    pool: str = ""
    window: tuple[int, ...] = ()
    before: Epilogue = NONE
    over: str = ""
    first: int = 1
    last: int = 1
    groups: int = 1
    epsilon: float = 0.0
    after: Epilogue = NONE
    by_position: bool = False

    @property
    def pooled(self) -> tuple[int, ...]:
        """The shape after pooling."""
        if not self.pool:
            return self.shape
        return (*self.shape[:2], *(size // step for size, step in zip(self.shape[2:], self.window)))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The pooled shape as (outer, length, inner); the `length` values are a group."""
        if not self.over:
            return 1, math.prod(self.pooled), 1
        shape = self.pooled
        outer, inner = math.prod(shape[: self.first]), math.prod(shape[self.last + 1 :])
        return outer * self.groups, math.prod(shape[self.first : self.last + 1]) // self.groups, inner

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The result's shape: reduced dimensions have one element."""
        if self.over not in REDUCTIONS:
            return self.pooled
        return tuple(1 if self.first <= i <= self.last else size for i, size in enumerate(self.pooled))

    @property
    def named_operands(self) -> dict[str, Operand]:
        """The operations' operands, by their names in kernels: operations after, then operations before."""
        before = {of_input(name): each for name, each in self.before.named_operands.items()}
        return {**self.after.named_operands, **before}

    @property
    def is_nothing(self) -> bool:
        """Whether the result equals the source."""
        alone = self.over in REDUCTIONS and self.sizes[1] == 1
        return not self.pool and not self.before and not self.after and (not self.over or alone)


def encoded(of: Reduction) -> str:
    """The reduction as text for an operator of PyTorch."""
    numbers = (of.first, of.last, of.groups, int(of.by_position))
    lists = (",".join(map(str, each)) for each in (of.shape, of.window, numbers))
    return "/".join((*lists, of.pool, of.over, str(of.epsilon), *map(epilogue.encoded, (of.before, of.after))))


@lru_cache(maxsize=1024)
def decoded(text: str) -> Reduction:
    """The reduction of a text from `encoded`."""
    *lists, pool, over, epsilon, before, after = text.split("/")
    shape, window, numbers = (tuple(int(each) for each in part.split(",") if part) for part in lists)
    first, last, groups, by_position = numbers
    operations = [epilogue.decoded(part)[0] for part in (before, after)]
    return Reduction(
        shape, pool, window, operations[0], over, first, last, groups, float(epsilon), operations[1], bool(by_position)
    )
