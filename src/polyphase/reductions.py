"""Steps after a layer that no epilogue computes (`polyphase.reduction_steps`), computed by their own kernels.

`arranged` makes a list of such steps, and of operations between them, into as few `Reduction`s as possible: pooling,
then operations, then one reduction or norm, then operations. Each is a kernel that reads the result of the kernel
before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyphase import fused
from polyphase.problem.epilogue import MOST_CHANNELS, OF_PIXELS
from polyphase.problem.reduction import REDUCTIONS, Reduction
from polyphase.program.reduction import MOST_ELEMENTS
from polyphase.reduction_steps import KINDS, MOST_IN_WINDOW
from polyphase.torch_op import reduction as operator
from polyphase.torch_op.memory_format import output_channels_last
from polyphase.torch_op.steps import checked


class Arranged(NamedTuple):
    """How steps after a layer are computed: the first ``own`` by its epilogue, the others by ``parts``.

    ``reads``: for each part the step and role of the tensors that its operations read. ``shape``: the result's.
    """

    own: int
    parts: tuple[Reduction, ...]
    reads: tuple[tuple[tuple[int, str], ...], ...]
    shape: tuple[int, ...]


#: For steps without any of `KINDS`.
PLAIN = Arranged(-1, (), (), ())

#: Steps whose results are float32 on a GPU under autocast.
WIDER = frozenset(("softplus", *OF_PIXELS, *KINDS))
_FOUND: dict[Any, tuple[Arranged, Arranged | None]] = {}
_MOST_FOUND = 4096
_MOST_IN_EPILOGUE = 64  # most channels of a softmax in an epilogue: one row block


def following(waiting: Any, before: Arranged, steps: Sequence[fused.Step], step: fused.Step) -> Arranged | None:
    """How a further step and the earlier ones are computed after a layer that waits (`polyphase.pending.Waiting`).

    None if the result would differ from the step's own call (autograd would record some steps of a value without
    derivatives), or for a reduction of channels_last. ``before``: how the earlier steps are computed.
    """
    kind, tensors = step.kind, step.tensors
    if kind in WIDER and torch._C._is_any_autocast_enabled():
        return None
    if tensors and torch.is_grad_enabled() and any(each.requires_grad for _, each in tensors):
        return None
    behind = kind in KINDS or (kind == "softmax" and is_apart(waiting.size(), *waiting.reads[:2]))
    if before is PLAIN and not behind:
        return PLAIN
    read = ((role, type(each), each.shape, each.dtype, each.device) for role, each in tensors)
    about = (kind, step.constants, step.of, *read)
    key: Any = (id(before), *about)
    if before is PLAIN:  # of the epilogue's own steps only the number matters
        if output_channels_last(*waiting.reads[:2]):
            return None
        key = (waiting.size(), waiting.dtype, waiting.device, len(steps), *about)
    found = _FOUND.get(key)
    if found is None:
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        plain = kind not in KINDS or all(type(each) in (Tensor, nn.Parameter) for _, each in tensors)
        own = len(steps) if before is PLAIN else before.own
        found = _FOUND[key] = before, arranged(waiting.size(), own, [*steps[own:], step], waiting) if plain else None
    return found[1]


def is_apart(size: tuple[int, ...], input: Tensor, weight: Tensor) -> bool:
    """Whether a softmax over channels is faster after a layer than in its kernel, or no kernel has all channels.

    ``size``: of the layer's output.
    """
    if size[1] > MOST_CHANNELS or size[1] != weight.shape[1]:
        return True
    return size[1] > _MOST_IN_EPILOGUE and not output_channels_last(input, weight)


def arranged(size: tuple[int, ...], own: int, steps: Sequence[fused.Step], like: Any) -> Arranged | None:
    """How steps after a layer's epilogue, which has ``own`` ones, are computed; None if that is not possible.

    ``size``: of the epilogue's result; ``like``: a tensor with its dtype and device.
    """
    try:
        return _arrange(size, own, steps, like)
    except (RuntimeError, TypeError, ValueError):  # operands that no operation supports
        return None


def _arrange(size: tuple[int, ...], own: int, steps: Sequence[fused.Step], like: Any) -> Arranged | None:
    parts = [_Part(size, own)]
    flat: tuple[int, ...] = ()
    for place, step in enumerate(steps, own):
        if flat and (step.tensors or _is_over(step)):
            return None
        if not _add(parts, place, step, like):
            return None
        shape = parts[-1].output_shape(like)
        if step.kind in REDUCTIONS and not step.constants[2]:
            first, last = map(int, step.constants[:2])
            flat = shape[:first] + shape[last + 1 :]
    made = [(part.reduction(like), part.all_reads()) for part in parts]
    made = [each for each in made if not each[0].is_nothing]
    count = max((math.prod(each.shape) for each, _ in made), default=0)
    if count > MOST_ELEMENTS or 0 in shape:
        return None
    return Arranged(own, tuple(each for each, _ in made), tuple(reads for _, reads in made), flat or shape)


def _add(parts: list[_Part], place: int, step: fused.Step, like: Any) -> bool:
    """Adds a step to the last part, or to a new one; whether that is possible."""
    shape = parts[-1].output_shape(like)
    if step.kind in REDUCTIONS and set(shape[int(step.constants[0]) : int(step.constants[1]) + 1]) == {1}:
        parts[-1].pass_over(place)
        return True
    if not parts[-1].takes(step, like):
        parts.append(_Part(shape, place))
    return parts[-1].add(place, step, shape)


def _is_over(step: fused.Step) -> bool:
    return step.kind in (*KINDS, *OF_PIXELS)


class _Part:
    """The steps of one kernel, which reads a tensor of ``shape``; ``place``: the index of its first step."""

    def __init__(self, shape: tuple[int, ...], place: int) -> None:
        self._shape = shape
        self._pool, self._window = "", (1,) * (len(shape) - 2)
        self._over: dict[str, Any] = {}
        self._viewed: tuple[int, ...] = ()  # the shape of a view of the result
        self._before: list[fused.Step] = []
        self._after: list[fused.Step] = []  # operations before as well, as long as there is no reduction or norm
        self._reads_before: list[tuple[int, str]] = []
        self.reads: list[tuple[int, str]] = []
        self._numbers = [place]  # its values' indices among the values of all steps

    def takes(self, step: fused.Step, like: Any) -> bool:
        """Whether the part can have a further step."""
        if step.kind == "view":
            return True
        if self._viewed and (_is_over(step) or step.kind == "add"):
            return False
        if step.kind in ("max_pool", "avg_pool"):
            return not self._over and not self._after and self._pool in ("", step.kind[:3])
        if _is_over(step):
            return not self._over and checked("before", self._after, like, self._pooled.pooled, True).is_per_channel
        return not (step.tensors and self._over.get("by_position"))

    def pass_over(self, place: int) -> None:
        """Adds a step that does not change the last value."""
        self._numbers[-1] = place + 1

    def add(self, place: int, step: fused.Step, shape: tuple[int, ...]) -> bool:
        """Adds a step that it `takes`; whether the step can be computed from the result so far, of ``shape``."""
        if step.kind == "view":
            return self._add_view(place, step, shape)
        if step.kind in ("max_pool", "avg_pool"):
            self._pool, self._numbers = step.kind[:3], [place + 1]
            self._window = tuple(one * int(other) for one, other in zip(self._window, step.constants))
            return all(self._pooled.pooled) and math.prod(self._window) <= MOST_IN_WINDOW
        if _is_over(step):
            return self._add_over(place, step)
        if step.kind in ("add_value", "multiply_value"):
            if step.of not in self._numbers:
                return False
            step = step._replace(of=self._numbers.index(step.of))
        self._after.append(step)
        self._numbers.append(place + 1)
        self.reads += [(place, role) for role, _ in step.tensors]
        return True

    def _add_view(self, place: int, step: fused.Step, shape: tuple[int, ...]) -> bool:
        """Adds a view with another number of spatial dimensions."""
        sizes = [shape[i] if not size and i < len(shape) else int(size) for i, size in enumerate(step.constants)]
        rest, known = math.prod(shape), math.prod(size for size in sizes if size != -1)
        sizes = [rest // max(1, known) if size == -1 else size for size in sizes]
        if len(sizes) not in (3, 4, 5) or tuple(sizes[:2]) != shape[:2] or math.prod(sizes) != rest:
            return False
        if self._pool or self._over or self._after:
            self._viewed = tuple(sizes)
        else:
            self._shape, self._window = tuple(sizes), (1,) * (len(sizes) - 2)
        self.pass_over(place)
        return True

    def _add_over(self, place: int, step: fused.Step) -> bool:
        shape = self._pooled.pooled
        self._before, self._after = self._after, []
        self._reads_before, self.reads = self.reads, []
        self._numbers = [place + 1]
        first, last, groups = 1, len(shape) - 1, 1
        if step.kind in OF_PIXELS:
            last = 1
        elif step.kind == "group_norm":
            groups = int(step.constants[0])
        elif step.kind == "position_norm":
            first = int(step.constants[0])
        else:
            first, last = map(int, step.constants[:2])
        kind = {"softmax_over": "softmax"}.get(step.kind, step.kind)
        kind = "norm" if kind.endswith("_norm") else kind
        epsilon = step.constants[-1] if kind == "norm" else 0.0
        self._over = {"over": kind, "first": first, "last": last, "groups": groups, "epsilon": epsilon}
        wanted: tuple[int, ...] = (shape[1],)
        if step.kind == "position_norm" and step.tensors:
            self._over["by_position"] = True
            wanted = shape[first:]
        if step.tensors:  # the operands of a norm, which add a value
            roles = {"weight": "scale", "offset": "shift"}
            tensors = tuple((roles[role], each.reshape(-1)) for role, each in step.tensors)
            self._after, self._numbers = [fused.Step("scale_shift", (), tensors)], [-1, place + 1]
            self.reads = [(place, role) for role, _ in step.tensors]
        sizes = step.constants[1:-1] if step.kind == "position_norm" else shape[first:]  # the norm's own sizes
        fits = all(tuple(each.shape) == wanted for _, each in step.tensors) and shape[first] % groups == 0
        fits &= shape[first:] == tuple(sizes)
        return fits and (kind != "norm" or math.prod(shape[first : last + 1]) > groups)

    @property
    def _pooled(self) -> Reduction:
        return Reduction(self._shape, self._pool, self._window if self._pool else ())

    def reduction(self, like: Any) -> Reduction:
        """The part as data."""
        before = checked("before", self._before, like, self._pooled.pooled, True)
        plain = replace(self._pooled, before=before, **self._over)
        shape = plain.output_shape
        if plain.by_position:
            shape = (plain.sizes[0], plain.sizes[1])
        if self._viewed and not plain.by_position:
            shape = self._viewed
        return replace(plain, after=checked("after", self._after, like, shape, True))

    def output_shape(self, like: Any) -> tuple[int, ...]:
        """The shape of the result, or of a view of it."""
        return self._viewed or self.reduction(like).output_shape

    def all_reads(self) -> tuple[tuple[int, str], ...]:
        """The `reads` of operations after, then of operations before."""
        return (*self.reads, *self._reads_before)


def compute(waiting: Any, found: Arranged, steps: Sequence[fused.Step], out: Tensor | None = None) -> Tensor:
    """The result of a layer that waits with the steps after it; in ``out``, if there is no reduction among them."""
    if found is PLAIN:
        result: Tensor = waiting.compute(steps, out)
        return result
    return _compute(found, steps, waiting.compute(steps[: found.own]))


def _compute(found: Arranged, steps: Sequence[fused.Step], value: Tensor) -> Tensor:
    """The reductions of the layer's result."""
    for reduction, reads in zip(found.parts, found.reads):
        tensors = [dict(steps[place].tensors)[role] for place, role in reads]
        value = operator.run(reduction, value.reshape(reduction.shape), tensors)
    return value.reshape(found.shape)
