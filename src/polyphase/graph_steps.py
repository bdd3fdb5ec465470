"""Operations in the graphs that `torch.compile` makes, as steps of a layer's epilogue or prologue."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from polyphase import crops, fused, reduction_steps
from polyphase.elementwise import (
    changes_other,
    is_in_place,
    known_equal,
    makes_new,
    name_of,
    per,
    read,
    read_as,
    read_next,
    step_of,
    step_of_value,
)
from polyphase.layer_norms import layer_norm_of
from polyphase.problem.epilogue import ACTIVATIONS, ELEMENT, decoded
from polyphase.snakes import Found, snake_at, snake_behind
from polyphase.torch_op.epilogue import conv_transpose_epilogue


def value_of(node: Any) -> Any:
    """A node's value as a fake tensor or number."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def around(layer: Node) -> tuple[Any, ...]:
    """The operands of a layer's own prologue and epilogue, and both as text."""
    return layer.args[3:5] if layer.target is conv_transpose_epilogue else ((), "")


class GraphStep(NamedTuple):
    """An operation in a graph: its step on fake tensors, if any, and the nodes of it and of its operands."""

    name: str
    number: int  # number of operations before its result
    nodes: Sequence[Node]  # the last is its result
    step: fused.Step | None
    operands: Sequence[tuple[Node, tuple[int, ...] | None]] = ()  # with the shape to read each in, if it differs
    ends: crops.Ends | None = None  # of a slice
    helpers: Sequence[Node] = ()  # nodes whose values the step computes from their inputs, which it reads
    apart: bool = False  # computed behind the layer's kernel (`polyphase.reductions`)

    @property
    def computes(self) -> bool:
        """Whether a kernel does something for it: nothing is to be done for dropouts, copies and views."""
        return self.ends is not None or (self.step is not None and self.step.kind != "view")


def step_before(value: Node) -> GraphStep | None:
    """The operation whose result is ``value``, which a layer may compute on its input; that is the first operand."""
    return _activation(value) or _snake(snake_at(value, value_of))


def step_after(reader: Node | None, layer: Node, last: Node, numbers: dict[Node, int]) -> GraphStep | None:
    """The operation after a chain; None if no epilogue computes it.

    ``reader``: the node that reads the chain's values next, if it may be taken alone; ``last``: the chain's last node;
    ``numbers``: the numbers of its values, as in `read_next`.
    """
    step = _snake_behind(last, numbers)
    if step is None and reader is not None:
        step = _slice(reader, layer, numbers) or _step_of(reader, last, numbers)
    return step or _layer_norm(last, layer, numbers)


_FIRST = (operator.getitem, 0)  # of the values and indices of `torch.max`


def step_apart(call: Node | None, numbers: dict[Node, int]) -> GraphStep | None:
    """The pooling, reduction, norm or view of a call on a chain's last value; None for others."""
    value = call.args[0] if call is not None and call.args else None
    if call is None or not isinstance(value, Node) or numbers.get(value) != max(numbers.values()):
        return None
    step = reduction_steps.read(call.target, value, call.args, call.kwargs, value_of(value).dim())
    nodes = (call, *call.users) if isinstance(value_of(call), tuple) else (call,)  # no other may read the indices
    if step is None or (len(nodes) > 1 and [(node.target, node.args[1]) for node in nodes[1:]] != [_FIRST]):
        return None
    result, operands = value_of(nodes[-1]), dict[str, Any](step.tensors)
    tensors = {role: value_of(node) for role, node in operands.items()}
    if not all(isinstance(each, Tensor) for each in (result, *tensors.values())):
        return None
    if result.requires_grad or result.dtype != value_of(value).dtype:
        return None
    step, name = step._replace(tensors=tuple(tensors.items())), reduction_steps.name_of(call.target)
    return GraphStep(name, numbers[value] + 1, nodes, step, [(each, None) for each in operands.values()], apart=True)


def _activation(value: Node) -> GraphStep | None:
    """The step of a call of an activation; None for others."""
    name = name_of(value.target) if value.op in ("call_function", "call_method") else ""
    if not name or not value.args or not isinstance(value.args[0], Node):
        return None
    input = value.args[0]
    if is_in_place(value.target, value.kwargs) and not is_only_for(input, value):
        return None  # other readers of the input would see that it is not changed
    reading = read(name, input, value.args, value.kwargs)
    if reading is None or not (reading.kind in ACTIVATIONS or reading.kind == "prelu"):
        return None
    if reading.other is None:
        return GraphStep(name, 0, (value,), fused.Step(reading.kind, reading.constants), [(input, None)])
    other = value_of(reading.other)
    if not isinstance(reading.other, Node) or not isinstance(other, Tensor):
        return None
    return GraphStep(name, 0, (value,), fused.prelu(other.reshape(-1)), [(input, None), (reading.other, (-1,))])


def is_only_for(value: Node, reader: Node) -> bool:
    """Whether only ``reader`` has a tensor, so that nothing else sees in-place changes."""
    return makes_new(value) and list(value.users) == [reader]


def _snake(found: Found | None, number: int = 0) -> GraphStep | None:
    if found is None:
        return None
    vectors = [value_of(node).reshape(-1) for node in found.operands]
    step = fused.snake(vectors[0], vectors[1] if len(vectors) > 1 else None, found.snake.eps, found.snake.logarithmic)
    return GraphStep(
        "snake", number, found.nodes, step, [(found.input, None), *((node, (-1,)) for node in found.operands)]
    )


def _snake_behind(value: Node, numbers: dict[Node, int]) -> GraphStep | None:
    found = snake_behind(value, value_of) if numbers[value] == max(numbers.values()) else None
    if found is None or any(getattr(value_of(node), "requires_grad", False) for node in found.nodes):
        return None
    step = _snake(found, numbers[value] + 1)
    return None if step is None else step._replace(operands=step.operands[1:], helpers=found.helpers)


def _slice(call: Node, layer: Node, numbers: dict[Node, int]) -> GraphStep | None:
    """The step of a slice that leaves all samples and channels, or of its copy; None for others."""
    name, value = crops.name_of(call.target), call.args[0] if call.args else None
    if not name or not isinstance(value, Node) or numbers.get(value) != max(numbers.values()):
        return None
    if name == crops.CONTIGUOUS:
        alone = len(call.args) == 1 and not call.kwargs and value_of(layer).is_contiguous()
        return GraphStep(name, numbers[value], (call,), None) if alone else None
    stride, padding, extra, *_ = layer.args[-5:]
    existing, _ = decoded(around(layer)[1])
    size, kept = value_of(value).shape, value_of(call)
    ends = crops.ends_of(map_arg(call.args[1], value_of), size, stride)  # type: ignore[arg-type]
    if ends is None or existing.residuals or not all(type(each) is int for each in (*padding, *extra)):  # type: ignore[misc]
        return None
    if not all(known_equal(count - sum(pair), left) for count, pair, left in zip(size[2:], ends, kept.shape[2:])):
        return None
    if any("as_strided" in (node.target, getattr(node.target, "__name__", "")) for node in layer.graph.nodes):
        return None  # a slice has the strides of the whole output
    return GraphStep(name, numbers[value], (call,), None, ends=ends)


def _layer_norm(value: Node, layer: Node, numbers: dict[Node, int]) -> GraphStep | None:
    if numbers[value] != max(numbers.values()):
        return None
    norm = layer_norm_of(value, value_of(layer).shape[1], value_of)
    if norm is None or any(getattr(value_of(node), "requires_grad", False) for node in norm.nodes):
        return None
    vectors = {role: value_of(node) for role, node in norm.operands}
    step = fused.layer_norm(vectors.get("weight"), vectors.get("offset"), norm.eps)
    number = numbers[value] + 1
    return GraphStep("layer_norm", number, norm.nodes, step, [(node, None) for _, node in norm.operands])


def _step_of(call: Node, last: Node, numbers: dict[Node, int]) -> GraphStep | None:
    """The operation of a call on the values with these ``numbers``; None if no epilogue computes it.

    ``last``: a node with the size and dtype of the last value.
    """
    size, output = value_of(last).shape, value_of(last)
    result = value_of(call)
    if not isinstance(result, Tensor) or result.dtype != output.dtype or result.requires_grad:
        return None
    number, name = max(numbers.values()) + 1, name_of(call.target)
    if call.target is torch.nn.functional.batch_norm:
        return _norm(call, numbers)
    found = read_next(name, call, numbers) if name else None
    if found is None or changes_other(call.target, found[1], call.args, call.kwargs):
        return None
    reading, value = found
    if not _is_of_shape(result, value_of(value).shape):
        return None  # another value, of another shape, is broadcast
    if not reading.kind:
        return GraphStep(name, numbers[value], (call,), None)
    if reading.other is None:
        return GraphStep(name, number, (call,), fused.Step(reading.kind, reading.constants))
    if reading.other in numbers:
        again = step_of_value(reading, numbers[reading.other])
        return None if again is None else GraphStep(name, number, (call,), again)
    other = value_of(reading.other)
    if not isinstance(reading.other, Node) or not isinstance(other, Tensor) or other.dtype != output.dtype:
        return None
    kind = per(reading.kind, other.shape, size, known_equal)
    if not kind or not _lies_as(result, output, kind):
        return None
    shape = read_as(kind, size)
    step = step_of(reading, other if shape is None else other.reshape(shape), kind)
    return GraphStep(name, number, (call,), step, [(reading.other, shape)])


def _is_of_shape(result: Tensor, shape: Sequence[Any]) -> bool:
    return len(result.shape) == len(shape) and all(map(known_equal, result.shape, shape))


def _lies_as(result: Tensor, value: Tensor, kind: str) -> bool:
    """Whether a sum has the strides of an operation on ``value`` alone: readers may view it by its strides."""
    if kind != ELEMENT:
        return True
    strides = zip(result.stride(), torch.empty_like(value).stride(), result.shape)
    return all(known_equal(size, 1) or known_equal(one, other) for one, other, size in strides)


def _norm(call: Node, numbers: dict[Node, int]) -> GraphStep | None:
    """The step of a batch norm in evaluation mode; None for others."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {"weight": None, "bias": None, "training": False, "eps": 1e-5, **dict(zip(names, call.args)), **call.kwargs}
    tensors = [given.get(name) for name in ("running_mean", "running_var", "weight", "bias")]
    number = numbers.get(given["input"], -1)  # type: ignore[arg-type]
    if given["training"] is not False or number != max(numbers.values()) or type(given["eps"]) is not float:
        return None
    if any(each is not None and not isinstance(value_of(each), Tensor) for each in tensors) or None in tensors[:2]:
        return None
    mean, variance, weight, bias = map(value_of, tensors)
    step = fused.batch_norm(mean, variance, weight, bias, given["eps"])
    return GraphStep(
        "batch_norm", number + 1, (call,), step, [(each, None) for each in tensors if isinstance(each, Node)]
    )
