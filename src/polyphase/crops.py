"""Slices of a layer's output, ``y[..., left:-right]``, which the layer computes alone (`polyphase.fused.crop`)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from polyphase.torch_op.steps import Step
from polyphase.torch_op.validate import Layer

#: The name of a slice in a chain: Python's and PyTorch's function have this name.
NAME = "getitem"
#: The name of ``contiguous()``, which copies only channels_last outputs: others are contiguous already.
CONTIGUOUS = "contiguous"

Ends = tuple[tuple[int, int], ...]


def name_of(target: Any) -> str:
    """`NAME` or `CONTIGUOUS` for a slice's or a copy's function or method; "" for others."""
    if target is operator.getitem or target is Tensor.__getitem__:
        return NAME
    return CONTIGUOUS if target == CONTIGUOUS or target is Tensor.contiguous else ""


def may_be_crop(index: Any, stride: Sequence[int]) -> bool:
    """Whether an index of a layer's output may be a slice that the layer computes; bounds may be nodes of a graph.

    It cuts only spatial dimensions. In 3-D, it cuts no beginning along a dimension with a stride: there padding decides
    whether float32 is rounded to TF32 as PyTorch does.
    """
    return _spatial_parts(index, stride) is not None


def ends_of(index: Any, size: Sequence[int], stride: Sequence[int]) -> Ends | None:
    """Numbers of elements that an index cuts off at both ends of each spatial dimension; None if it is not a crop.

    Also None if that depends on a symbolic size; with such a size the slice may still leave nothing.
    """
    parts = _spatial_parts(index, stride) if len(size) == len(stride) + 2 else None
    if parts is None:
        return None
    ends = [_cut_by(part, count) for part, count in zip(parts, size[2:])]
    return None if None in ends else tuple(ends)  # type: ignore[arg-type]


def _cut_by(part: slice, count: Any) -> tuple[int, int] | None:
    """Numbers of elements that a slice cuts off at both ends of ``count``; None if it is known to leave none."""
    if isinstance(count, int):
        start, stop, _ = part.indices(count)
        return (start, count - stop) if start < stop else None
    left, right = part.start or 0, -(part.stop or 0)
    return (left, right) if left >= 0 and right >= 0 and part.stop != 0 else None


def _spatial_parts(index: Any, stride: Sequence[int]) -> list[slice] | None:
    """The slices of the spatial dimensions, if `may_be_crop`; None for another index."""
    parts = _parts(index, len(stride) + 2)
    if parts is None or any(part != slice(None) for part in parts[:2]):
        return None
    spatial = parts[2:]
    bounds = [each for part in spatial for each in (part.start, part.stop)]
    begins = [part.start in (None, 0) for part, step in zip(spatial, stride) if step > 1]
    if len(stride) == 3 and not all(begins):
        return None
    return spatial if all(each is None or type(each) is int or isinstance(each, Node) for each in bounds) else None


def _parts(index: Any, dims: int) -> list[slice] | None:
    """A slice for each dimension, without a step; None for another index."""
    given = list(index) if isinstance(index, tuple) else [index]
    places = [place for place, part in enumerate(given) if part is Ellipsis]
    if len(places) > 1 or len(given) - len(places) > dims:
        return None
    rest = [slice(None)] * (dims - len(given) + len(places))
    place = places[0] if places else len(given)
    given[place : place + len(places)] = rest
    return given if all(type(part) is slice and part.step in (None, 1) for part in given) else None


def cropped(waiting: Any, ends: Ends) -> Any:
    """The `polyphase.pending.Waiting` of the cropped output, from that of the layer's output."""
    step, size = Step("crop", tuple(each for pair in ends for each in pair)), waiting.size()
    rest = (*size[:2], *(count - left - right for count, (left, right) in zip(size[2:], ends)))

    def compute(steps: Sequence[Step | None], out: Tensor | None = None) -> Tensor:
        result: Tensor = waiting.compute([step, *steps], out)
        return result

    return waiting._replace(compute=compute, size=lambda: rest)


def constants_of(
    padding: Sequence[int], output_padding: Sequence[int], ends: Ends
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding and output padding of the layer whose output is the cropped one.

    Padding crops both ends equally, and a negative output padding crops the last.
    """
    extra = tuple(each + left - right for each, (left, right) in zip(output_padding, ends))
    return tuple(each + left for each, (left, _) in zip(padding, ends)), extra


def split(name: str, layer: Layer, steps: Sequence[Step]) -> tuple[Layer, Sequence[Step]]:
    """The layer whose output is the cropped one, and the steps after the crops, which come first.

    Raises:
        ValueError: a crop is after another step, has other dimensions or is negative.
    """
    count = next((place for place, step in enumerate(steps) if step.kind != "crop"), len(steps))
    for step in steps[:count]:
        constants: tuple[Any, ...] = step.constants
        lefts, rights = constants[::2], constants[1::2]
        wrong = any(isinstance(each, float) or each < 0 for each in constants)
        if wrong or len(lefts) != len(layer.stride) or len(rights) != len(lefts):
            pairs = f"{len(layer.stride)} pairs of integers that are at least 0"
            raise ValueError(f"{name}: a crop takes {pairs}, got {constants}")
        padding, extra = constants_of(layer.padding, layer.output_padding, (*zip(lefts, rights),))
        layer = layer._replace(padding=padding, output_padding=extra)
    if any(step.kind == "crop" for step in steps[count:]):
        raise ValueError(f"{name}: a crop comes before all other operations of an epilogue")
    return layer, steps[count:]


def index_of(whole: Layer, layer: Layer) -> tuple[Any, ...]:
    """The index of the part of a ``whole`` layer's output that `split` keeps."""
    lefts = [cropped - padding for cropped, padding in zip(layer.padding, whole.padding)]
    rights = [left + extra - cropped for left, extra, cropped in zip(lefts, whole.output_padding, layer.output_padding)]
    return (..., *(slice(left, -right if right else None) for left, right in zip(lefts, rights)))
