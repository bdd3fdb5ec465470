"""Layer norms over the channels of each pixel, recognised by their results: PyTorch has no module or function for them.

SAM's, ConvNeXt's, torchvision's and timm's are written in several ways: with means and powers, or as
`torch.nn.functional.layer_norm` between two permutations.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

_DEFAULT_EPS = 1e-5
_MOST_NODES = 12


def is_layer_norm(call: Callable[..., Tensor], dims: int, channels: int, eps: float, roles: Sequence[str]) -> bool:
    """Whether ``call(x, *vectors)`` returns the norm for random tensors with ``dims``.

    ``roles``: of each vector, "weight" or "offset".
    """
    generator = torch.Generator().manual_seed(dims)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    given = {role: random(channels) for role in roles}
    sizes = (5, 3, 2) if channels not in (5, 3, 2) else (4, 6, 7)
    try:
        for factor, added in ((1.0, 0.0), (eps**0.5, 0.0), (2.0, 3.0)):
            x = random(2, channels, *sizes[: dims - 2]) * factor + added
            last = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + eps).sqrt()
            last = last.movedim(1, -1) * given.get("weight", 1) + given.get("offset", 0)
            found, wanted = call(x, *given.values()), last.movedim(-1, 1)
            if found.shape != wanted.shape or not torch.allclose(found.to(wanted), wanted, 1e-4, 1e-4):
                return False
    except Exception:  # a model may do anything with unexpected arguments
        return False
    return True


class Norm(NamedTuple):
    """Nodes of a graph that compute a layer norm, the last of which is its result; their other operands by role."""

    nodes: tuple[Node, ...]
    eps: float
    operands: tuple[tuple[str, Node], ...]


def layer_norm_of(value: Node, channels: Any, value_of: Callable[[Node], Any]) -> Norm | None:
    """The layer norm that contains all readers of ``value``; None if there is none.

    ``value_of``: a node's value as a tensor, real or fake.
    """
    if type(channels) is not int:
        return None
    for nodes in closed(value, is_smooth):
        found = _read(value, nodes, channels, value_of)
        if found is not None:
            return found
    return None


def closed(value: Node, taken: Callable[[Node], bool]) -> Iterator[tuple[Node, ...]]:
    """Nodes after ``value`` that are all ``taken``, and of which others read only the last."""
    inside = {value: None}
    node = value.next
    while node.op != "root" and len(inside) <= _MOST_NODES:
        if any(each in inside for each in node.all_input_nodes):
            if not taken(node):
                return
            inside[node] = None
            if all(user in inside for each in inside if each is not node for user in each.users):
                yield tuple(inside)[1:]
        node = node.next


def _read(value: Node, nodes: tuple[Node, ...], channels: int, value_of: Callable[[Node], Any]) -> Norm | None:
    first, last = value_of(value), value_of(nodes[-1])
    if not isinstance(last, Tensor) or last.dtype != first.dtype:
        return None
    # Readers may view the result by its strides.
    if tuple(last.shape) != tuple(first.shape) or last.stride() != first.stride():
        return None
    beside = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in (value, *nodes)))
    if len(beside) > 2 or any(not _is_vector(value_of(each), channels) for each in beside):
        return None
    numbers = (each for node in nodes for each in (*node.args, *node.kwargs.values()))
    candidates = dict.fromkeys((*(each for each in numbers if type(each) is float and 0 < each < 1), _DEFAULT_EPS))

    def call(x: Tensor, *vectors: Tensor) -> Any:
        values = {value: x, **dict(zip(beside, vectors))}
        for node in nodes:
            values[node] = value_in(node, values)
        return values[nodes[-1]]

    for eps, roles in itertools.product(candidates, itertools.permutations(("weight", "offset"), len(beside))):
        if is_layer_norm(call, first.dim(), channels, eps, roles):
            return Norm(nodes, eps, tuple(sorted(zip(roles, beside), key=lambda each: each[0] != "weight")))
    return None


def _is_vector(tensor: Any, channels: int) -> bool:
    return isinstance(tensor, Tensor) and tuple(tensor.shape) == (channels,)


# None of these branches on values: a function made of them is a norm for all tensors if it is one for random tensors.
# None changes a tensor in place.
_NAMES = ("mean", "var", "var_mean", "getitem", "add", "sub", "mul", "div", "truediv", "pow", "square", "sqrt", "rsqrt",
          "layer_norm", "permute", "transpose", "movedim", "moveaxis", "contiguous")  # fmt: skip


def calls_of(names: Sequence[str], homes: Sequence[Any]) -> Callable[[Node], bool]:
    """The test whether a node calls, without ``out``, a method with one of these names or a function of ``homes``."""
    functions = {getattr(home, name) for name in names for home in homes if callable(getattr(home, name, None))}
    called = {"call_method": names, "call_function": functions}
    return lambda node: "out" not in node.kwargs and node.target in called.get(node.op, ())


#: Whether a node calls a smooth function.
is_smooth = calls_of(_NAMES, (operator, torch, torch.nn.functional))


def value_in(node: Node, values: Mapping[Node, Any]) -> Any:
    """The result of a node's call, from the ``values`` of other nodes."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    return target(*args, **kwargs)


def graph_of(module: torch.nn.Module, taken: Callable[[Node], bool]) -> Graph | None:
    """The graph of a module whose calls are all ``taken``; None for others."""
    try:
        graph = torch.fx.Tracer().trace(module)
    except Exception:  # it branches on tensors
        return None
    return graph if all(taken(node) for node in graph.nodes if node.op.startswith("call_")) else None
