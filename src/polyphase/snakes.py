"""Snakes, recognised by their results: ``x + sin²(alpha·x) / (beta + eps)``, for which PyTorch has no module.

Vocoders and codecs have their own: DAC's ``Snake1d``, BigVGAN's and Qwen's ``SnakeBeta``, with or without exponentials.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from polyphase import fused
from polyphase.elementwise import known_equal
from polyphase.layer_norms import calls_of, closed, graph_of, value_in

# None of these branches on values: a function made of them is a snake for all numbers if it is one for random numbers.
_NAMES = ("add", "sub", "mul", "div", "truediv", "pow", "square", "sin", "exp", "reciprocal", "reshape", "view",
          "unsqueeze", "getitem", "size")  # fmt: skip
_MOST_NODES = 16
_is_call = calls_of(_NAMES, (operator, torch))


class Snake(NamedTuple):
    """A snake's constants, as for `polyphase.fused.snake`, and the module's numbers, whose change may change it."""

    eps: float
    logarithmic: bool
    numbers: tuple[tuple[str, Any], ...] = ()
    has_beta: bool = False


def is_snake(call: Callable[..., Tensor], shape: tuple[int, ...], count: int, snake: Snake) -> bool:
    """Whether ``call(x, *parameters)``, with ``count`` parameters of one element per channel, computes ``snake``."""
    generator = torch.Generator().manual_seed(len(shape))
    ones = (1,) * (len(shape) - 2)
    try:
        for scale in (1.0, snake.eps or 1e-9):  # divisors as small as eps reveal it, with numbers as large as 1 / eps
            x = torch.randn(shape, generator=generator, dtype=torch.float64) / scale
            read = [(1 + torch.rand(shape[1], generator=generator, dtype=torch.float64)) * scale for _ in range(count)]
            given = [each.log() for each in read] if snake.logarithmic else read
            read = [each.exp() for each in given] if snake.logarithmic else read
            alpha, beta = (each.view(1, -1, *ones) for each in (read[0], read[-1]))
            wanted = x + torch.sin(alpha * x).square() / (beta + snake.eps)
            found = call(x, *given)
            if found.shape != x.shape or not torch.allclose(found.to(wanted), wanted, 1e-6, 1e-12):
                return False
    except Exception:  # a module may do anything with unexpected arguments
        return False
    return True


def is_smooth(node: Node) -> bool:
    """Whether a node calls a smooth function."""
    return _is_call(node) or (node.target is getattr and node.args[1] == "shape")


def snake_of(module: Any) -> Snake | None:
    """The snake that a module computes on tensors ``(N, C, *spatial)``; None if it is none."""
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    names = [*parameters]
    if names not in (["alpha"], ["alpha", "beta"]) or module._modules or module._buffers or "forward" in vars(module):
        return None
    if hasattr(type(module), "_stands_for"):  # a layer already computes it
        return None
    channels = {each.numel() for each in parameters.values()}
    if len(channels) != 1 or type(module).__module__.startswith("torch."):
        return None
    graph = graph_of(module, is_smooth)
    if graph is None:
        return None
    probe = copy.copy(module)

    def call(x: Tensor, *given: Tensor) -> Any:
        shaped = {name: torch.nn.Parameter(each.view(parameters[name].shape)) for name, each in zip(names, given)}
        vars(probe).update(_parameters=shaped, training=False)
        return type(module).forward(probe, x)

    shape = (2, channels.pop(), 5)
    with torch.no_grad():
        numbers = (each for node in graph.nodes for each in (*node.args, *node.kwargs.values()))
        for eps, logarithmic in itertools.product(_small(numbers), (False, True)):
            found = Snake(eps, logarithmic, _numbers(module), len(names) > 1)
            if is_snake(call, shape, len(names), found):
                return found
    return None


def _small(numbers: Iterable[Any]) -> list[float]:
    """Candidates for ``eps``, which is added to the divisor."""
    return [*dict.fromkeys(each for each in numbers if type(each) is float and 0 < each < 1e-3), 0.0]


def _numbers(module: Any) -> tuple[tuple[str, Any], ...]:
    """The module's own numbers and flags."""
    return tuple((name, each) for name, each in vars(module).items() if type(each) in (int, float, bool))


def snake(module: Any) -> fused.Step | None:
    """A snake module's step, with its current parameters; None if its numbers have changed."""
    known: Snake = vars(module)["_snake"]
    if known.numbers != _numbers(module):
        return None
    beta = module.beta if known.has_beta else None  # a parameter, or its replacement
    return fused.snake(module.alpha, beta, known.eps, known.logarithmic)


class Found(NamedTuple):
    """Nodes of a graph, in order, the last of which is a snake of ``input``; ``operands``: its alpha, and beta.

    ``helpers``: nodes that read only these, if they are not among ``nodes``.
    """

    nodes: tuple[Node, ...]
    snake: Snake
    input: Node
    operands: tuple[Node, ...]
    helpers: tuple[Node, ...] = ()


_RESHAPES = ("reshape", "view", torch.reshape)


def snake_at(value: Node, value_of: Callable[[Node], Any]) -> Found | None:
    """The snake whose result is ``value``; ``value_of``: a node's value as a tensor, real or fake."""
    tensor = value_of(value)
    if not isinstance(tensor, Tensor) or tensor.dim() not in (3, 4, 5) or type(tensor.shape[1]) is not int:
        return None
    last: Any = value
    while _is_idle(last, value_of):
        last = last.args[0]
    for input in last.all_input_nodes:
        shown = value_of(input)
        if not _same(shown, tensor) or shown.dtype != tensor.dtype:
            continue
        nodes, leaves = _between(input, value, value_of)
        channels = tensor.shape[1]
        tensors = [value_of(leaf) for leaf in leaves]
        if not nodes or not 0 < len(leaves) < 3:
            continue
        if all(isinstance(each, Tensor) and each.numel() == channels for each in tensors):
            found = _read(input, nodes, leaves, (2, channels, *(4, 3, 2)[: tensor.dim() - 2]), value_of)
            if found is not None:
                return found
    return None


def snake_behind(value: Node, value_of: Callable[[Node], Any]) -> Found | None:
    """The snake of ``value`` that contains all of its readers."""
    for nodes in closed(value, is_smooth):
        if any(getattr(node.target, "__name__", node.target) == "sin" for node in nodes):
            found = snake_at(nodes[-1], value_of)
            if found is not None and found.input is value:
                return found._replace(nodes=nodes, helpers=tuple(each for each in found.nodes if each not in nodes))
    return None


def _between(input: Node, value: Node, value_of: Callable[[Node], Any]) -> tuple[list[Node], list[Node]]:
    """The smooth nodes that compute ``value`` from ``input``, and their other inputs, in order; empty if many."""
    inside: set[Node] = set()
    leaves: set[Node] = set()
    todo = [value]
    while todo and len(inside) <= _MOST_NODES:
        node = todo.pop()
        if node is input or node in inside:
            continue
        if node.op in ("call_function", "call_method") and is_smooth(node):
            inside.add(node)
            first: Any = node.args[0]
            todo += [first] if _is_idle(node, value_of) else node.all_input_nodes
        else:
            leaves.add(node)
    if todo:
        return [], []
    order = {node: place for place, node in enumerate(value.graph.nodes)}
    return sorted(inside, key=order.__getitem__), sorted(leaves, key=order.__getitem__)


def _read(
    input: Node, nodes: list[Node], leaves: list[Node], shape: tuple[int, ...], value_of: Callable[[Node], Any]
) -> Found | None:
    small = _small(each for node in nodes for each in (*node.args, *node.kwargs.values()))
    for order in itertools.permutations(leaves):

        def call(x: Tensor, *given: Tensor) -> Any:
            shaped = {leaf: each.view(value_of(leaf).shape) for leaf, each in zip(order, given)}  # noqa: B023
            values: dict[Any, Any] = {input: x, **shaped}
            for node in nodes:
                is_idle = _is_idle(node, value_of)  # then its sizes differ here
                values[node] = values[node.args[0]] if is_idle else value_in(node, values)
            return values[nodes[-1]]

        for eps, logarithmic in itertools.product(small, (False, True)):
            if is_snake(call, shape, len(order), Snake(eps, logarithmic)):
                return Found(tuple(nodes), Snake(eps, logarithmic), input, order)
    return None


def _is_idle(node: Node, value_of: Callable[[Node], Any]) -> bool:
    """Whether a node reshapes a tensor to its own shape."""
    first = node.args[0] if node.target in _RESHAPES else None
    return isinstance(first, Node) and _same(value_of(first), value_of(node))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are tensors with space and of one shape; symbolic sizes must be known to be equal."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not 2 < one.dim() == other.dim():
        return False
    return all(map(known_equal, one.shape, other.shape))
