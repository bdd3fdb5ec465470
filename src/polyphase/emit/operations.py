"""The nodes behind a layer in a traced model, read as operations that kernels of emitted files compute."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx import Node

from polyphase import elementwise, fused, reduction_steps
from polyphase.fuse_trace import call_name
from polyphase.module_steps import reader_of
from polyphase.problem.epilogue import OF_PIXELS


class Operation(NamedTuple):
    """An operation behind a layer: its nodes (the last is its result), what it computes, none or one step, and its
    operands, as they are written, with their shapes. ``any_batch``: whether it is this for any number of samples.
    """

    nodes: list[Node]
    steps: list[fused.Step]
    operands: list[tuple[str, tuple[int, ...]]]
    any_batch: bool = True


def operation_of(
    nodes: list[Node], value: Node, numbers: dict[Node, int], model: nn.Module, tensors: Mapping[int, str]
) -> Operation | None:
    """An operation on the values with these ``numbers``, the last of them ``value``; None if no kernel has it."""
    node, output = nodes[0], value.meta["value"]
    if node.op == "call_module":
        module: Any = model.get_submodule(str(node.target))
        reader = reader_of(module, output.dim())
        step = reduction_steps.module_step(module, output.dim()) if reader is None else reader(module)
        if step is None:
            return None if reader is None else Operation(nodes, [], [])
        named = [(tensors[id(tensor)], tuple(tensor.shape)) for _, tensor in step.tensors]
        return Operation(nodes, [step], named)
    if reduction_steps.name_of(node.target) and (call := _reduced(nodes, value, numbers)) is not None:
        return call
    name = elementwise.name_of(node.target)
    read = elementwise.read_next(name, node, numbers) if name else None
    if read is None:
        return None
    reading, _ = read
    if reading.other is None:
        return Operation(nodes, [fused.Step(reading.kind, reading.constants)] if reading.kind else [], [])
    if reading.other in numbers:
        again = elementwise.step_of_value(reading, numbers[reading.other])
        return None if again is None else Operation(nodes, [again], [])
    other: Any = reading.other.meta.get("value") if isinstance(reading.other, Node) else None
    if not isinstance(other, Tensor) or other.dtype != output.dtype:
        return None
    kind = elementwise.per(reading.kind, other.shape, output.shape)
    if not kind:
        return None
    shape = elementwise.read_as(kind, output.shape)
    step = elementwise.step_of(reading, other if shape is None else other.reshape(shape), kind)
    return Operation(nodes, [step], [(reading.other.name, tuple(other.shape))])


def parted(calls: list[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Operations that a layer's epilogue computes, and those from the first that it does not."""
    behind = (*reduction_steps.KINDS, *OF_PIXELS)
    first = next((place for place, call in enumerate(calls) if any(step.kind in behind for step in call.steps)), None)
    return calls[:first], [] if first is None else calls[first:]


def with_values(node: Node) -> list[Node]:
    """The nodes of an operation; of ``min`` or ``max``, the last one reads the values beside the indices."""
    if call_name(node) not in reduction_steps.EXTREMES or isinstance(node.meta["value"], Tensor):
        return [node]
    return [node, *sorted(node.users, key=lambda user: bool(user.users))]


def _reduced(nodes: list[Node], value: Node, numbers: Collection[Node]) -> Operation | None:
    """A pooling, reduction, norm or view of a ``value``; None for other calls."""
    node, *_ = nodes
    step = reduction_steps.read(node.target, value, node.args, node.kwargs, value.meta["value"].dim())
    if step is None:
        return None
    if step.kind == "view":
        kept = _sizes_kept(node, numbers)
        step = step._replace(constants=tuple(map(float, node.meta["value"].shape)))
        return None if kept is None else Operation(nodes, [step], [], kept)
    operands: list[tuple[str, Any]] = [*step.tensors]
    if not all(isinstance(each, Node) for _, each in operands):
        return None
    tensors = tuple((role, each.meta["value"]) for role, each in operands)
    named = [(each.name, tuple(each.meta["value"].shape)) for _, each in operands]
    return Operation(nodes, [step._replace(tensors=tensors)], named)


def _sizes_kept(view: Node, numbers: Collection[Node]) -> bool | None:
    """Whether a view's result has the samples of its input for any number of these.

    None if its sizes are those of other tensors than a chain's, ``numbers``, whose sizes but the first do not change.
    """
    if call_name(view) != "view" or getattr(view.target, "__name__", view.target) == "flatten":
        return True
    given: Any = view.args[1] if len(view.args) == 2 else view.args[1:]
    if isinstance(given, Node):
        return True if _whose_sizes(given) in numbers else None
    places = [_place_of_size(each, numbers) if isinstance(each, Node) else each for each in given]
    if None in places:
        return None
    first, *others = places
    return (first == -1 or first == "batch") and "batch" not in others


def _whose_sizes(node: Node) -> Node | None:
    """The tensor of which a node is the sizes."""
    by_name = node.op == "call_function" and node.target is getattr and node.args[1:] == ("shape",)
    by_call = node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.args[0] if by_name or by_call else None  # type: ignore[return-value]


def _place_of_size(node: Node, numbers: Collection[Node]) -> str | None:
    """ "batch" for a node that is the first size of a chain's value, "other" for another one; None for other nodes."""
    of: Any
    place: Any
    of, place, *_ = (*node.args, None, None)
    if node.op == "call_function" and node.target is operator.getitem and isinstance(of, Node):
        of = _whose_sizes(of)
    elif node.op != "call_method" or node.target != "size":
        return None
    if not isinstance(of, Node) or of not in numbers or type(place) is not int:
        return None
    return "batch" if place in (0, -of.meta["value"].dim()) else "other"


def name_of(node: Node) -> str:
    """What `emit` calls a node."""
    return f"{call_name(node)}()" if call_name(node) else str(node.target)
