"""The forward of a model as `torch.fx` traces it: its lines, its values on shapes, and what must hold for both."""

from __future__ import annotations

import ast
import builtins
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from polyphase.bench.model_file import copied

_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
PLAIN = (bool, int, float, str, type(None), torch.dtype)
_FREED = re.compile(r";  ((?:\w+ = )+)None$")


class NotFused(Exception):  # noqa: N818
    """Why a model's forward stays as it is."""


@contextmanager
def reading(found: dict[tuple[int, str], Any]) -> Iterator[None]:
    """Notes which plain attributes of modules are read: torch.fx takes them for constants."""

    def read(module: Any, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name not in _OF_MODULES and name in object.__getattribute__(module, "__dict__"):
            found[id(module), name] = value
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """What modules hold, by identity, except for the constants that torch.fx makes of tensors."""
    held = (vars(module).items() for module in model.modules())
    return [{name: id(value) for name, value in each if not name.startswith("_tensor_constant")} for each in held]


def constant(value: Any) -> str | None:
    """A value as text, or None for what has none."""
    if isinstance(value, tuple):
        items = [constant(each) for each in value]
        return None if None in items else f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")' if value == value else None
    return repr(value) if type(value) in PLAIN else None


def attribute(path: str) -> str:
    """``self.path``, where a part of the path may be no identifier."""
    root = "self"
    for part in filter(None, path.split(".")):
        root = f"{root}.{part}" if part.isidentifier() else f'getattr({root}, "{part}")'
    return root


def tensors_of(model: nn.Module, graph: Graph) -> dict[int, str]:
    """Parameters and buffers, by identity, as the method has them."""
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) not in named:
            raise NotFused("its forward makes a tensor of its own, which torch.fx takes for a constant")
    return {id(tensor): attribute(name) for name, tensor in named.items()}


class _Shapes(Interpreter):
    def run_node(self, n: Node) -> Any:
        n.meta["value"] = value = super().run_node(n)
        return value


def run_on_shapes(model: nn.Module, graph: Graph, inputs: Sequence[Any]) -> None:
    """Leaves its value at each node, as ``node.meta["value"]``. Raises `NotFused`."""
    try:
        with torch.no_grad():
            _Shapes(GraphModule(copied(model), graph)).run(*inputs)
    except Exception as failure:  # whatever the model does on shapes alone
        what = str(failure).strip().partition("\n")[0]
        raise NotFused(f"what torch.fx traced does not run ({type(failure).__name__}: {what})") from None


def lines_of(graph: Graph, called: dict[str, Any]) -> dict[Node, str]:
    """The line of each node; the names in them are torch, builtins, and those of the model's file."""
    code = graph.python_code("self")
    body = code.src[code.src.index("def forward(") :].splitlines()[1:]
    lines = [line.strip() for line in body if line.strip()]
    found: dict[Node, str] = {}
    for node in graph.nodes:
        has_none = node.op == "placeholder" and node.name == str(node.target)
        found[node] = "" if has_none else _FREED.sub("", lines.pop(0))
    if lines:
        raise NotFused("torch.fx writes its forward in a way that is not known")
    names = {node.name for node in graph.nodes} | {str(node.target) for node in graph.nodes if node.op == "placeholder"}
    for line in found.values():
        for used in (each for each in ast.walk(ast.parse(line.removeprefix("return "))) if isinstance(each, ast.Name)):
            known = used.id in names or used.id in ("self", "torch") or hasattr(builtins, used.id)
            if not known and called.get(used.id) is not code.globals.get(used.id, called):
                raise NotFused(f"its forward calls {used.id}, which the file does not have under that name")
    return found
