"""Which nodes of a traced model a transposed convolution can compute, and why there are no more (`polyphase.fuse`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module

from polyphase.elementwise import CONCATENATIONS, change_between, changes_other, concatenated, name_of, read
from polyphase.module_steps import has_hooks, norm, normalized_dims, reader_of
from polyphase.modules import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

LAYERS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)


class _Tracer(torch.fx.Tracer):
    """Modules of a chain are nodes, also polyphase's, and layer norms over channels, which PyTorch does not have."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self._norms = {id(module) for module in model.modules() if normalized_dims(module)}

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Whether a module is a node of the graph."""
        return isinstance(m, LAYERS) or id(m) in self._norms or super().is_leaf_module(m, module_qualified_name)


def graphs(model: Module, prefix: str = "") -> Iterator[tuple[str, torch.fx.Graph, Module]]:
    """Graphs of the model in evaluation mode, or of the largest parts of it that can be traced, with their prefixes."""
    if not any(isinstance(module, LAYERS) for module in model.modules()) or isinstance(model, LAYERS):
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        graph = _Tracer(model).trace(model)
    except Exception:  # whatever a model does with a proxy
        for name, child in model.named_children():
            yield from graphs(child, f"{prefix}{name}.")
        return
    finally:
        for module, training in modes:
            module.training = training
    yield prefix, graph, model


def shared_modules(model: Module) -> set[int]:
    """Modules that have several names."""
    names: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        names[id(module)] = names.get(id(module), 0) + 1
    return {module for module, count in names.items() if count > 1}


def call_name(node: torch.fx.Node) -> str:
    """The kind of a call; "" if no layer can compute it."""
    if node.op == "call_function" and node.target in CONCATENATIONS:
        return "cat"
    return name_of(node.target) if node.op in ("call_function", "call_method") else ""


class Trace:
    """A graph of what a module calls, and which of its nodes a layer computes already."""

    def __init__(self, graph: torch.fx.Graph, root: Module, shared: set[int]) -> None:
        self._root = root
        self._shared = shared
        self._nodes = list(graph.nodes)
        self._order = {node: place for place, node in enumerate(self._nodes)}
        self._calls = [node.target for node in self._nodes if node.op == "call_module"]
        self._taken: set[torch.fx.Node] = set()

    def _module(self, node: torch.fx.Node) -> Module:
        return self._root.get_submodule(str(node.target))

    def _module_of(self, node: torch.fx.Node) -> Module | None:
        return self._module(node) if node.op == "call_module" else None

    def chain_of(self, layer: torch.fx.Node) -> tuple[list[torch.fx.Node], str]:
        """The nodes behind a layer's that it can compute, and why there are no more."""
        found: list[torch.fx.Node] = []
        if self._calls.count(layer.target) > 1 or id(self._module(layer)) in self._shared:
            return found, "it is called more than once"
        if self._module(layer)._forward_hooks:
            return found, "it has forward hooks, which see its own output"
        node = layer
        while True:
            readers = list(node.users)
            if len(readers) != 1:
                return found, f"{len(readers)} read the result" if readers else "nothing reads the result"
            (reader,) = readers
            if reader.op == "output":
                return found, "it is the result of what was traced"
            if reader.op == "call_module":
                dims = _dims(self._module(layer))
                reason = _why_not(self._module(reader), dims, reader, self._calls, self._shared)
                reason = reason and f"{reader.target} {reason}"
            else:
                reason = self._why_no_call(layer, node, reader)
            if reason:
                return found, reason
            found.append(reader)
            self._taken.add(reader)
            if call_name(reader) == "cat":
                return found, "its output is a part of the result"
            node = reader

    def _why_no_call(self, layer: torch.fx.Node, value: torch.fx.Node, call: torch.fx.Node) -> str:
        """Why a call of ``value`` cannot be computed by the layer, or ""."""
        name = call_name(call)
        if not name:
            name = getattr(call.target, "__name__", str(call.target))
            return f"{name} reads it, which no epilogue computes"
        if name == "cat":
            parts = concatenated(call.args, call.kwargs, _dims(self._module(layer)))
            if parts is None or sum(each is value for each in parts) != 1:
                return "cat does not join it once along channels"
            return self._why_not_later(layer, call, name)
        if call in self._taken:
            return f"another layer computes {name}()"
        if changes_other(call.target, value, call.args, call.kwargs):
            return f"{name} changes another tensor in place"
        if read(name, value, call.args, call.kwargs) is None:
            return f"{name} reads it with arguments that no epilogue takes"
        return self._why_not_later(layer, call, name)

    def _why_not_later(self, layer: torch.fx.Node, call: torch.fx.Node, name: str) -> str:
        """Why the layer cannot be computed when a function is called, or ""."""
        path = str(layer.target).split(".")
        parents = (self._root.get_submodule(".".join(path[:depth])) for depth in range(1, len(path)))
        if any(parent._forward_hooks for parent in parents):
            return f"hooks would see it before {name}()"
        between = self._nodes[self._order[layer] + 1 : self._order[call]]
        changing = change_between(between, self._taken, self._module_of)
        return "" if changing is None else f"{changing} changes a tensor in place before {name}() is called"


def _dims(layer: Any) -> int:
    """Of a layer's output."""
    return len(layer.stride) + 2


def _why_not(module: Any, dims: int, node: torch.fx.Node, calls: list[Any], shared: set[int]) -> str:
    """Why a module cannot be computed by the layer before it, whose output has so many dimensions, or ""."""
    reader = reader_of(module, dims)
    if reader is None:
        return f"is a {type(module).__name__}, which no epilogue computes"
    if calls.count(node.target) > 1 or id(module) in shared:
        return "is called more than once"
    if len(node.args) != 1 or node.kwargs:
        return "takes further arguments"
    if "forward" in vars(module):
        return "has a forward of its own on the instance"
    if has_hooks(module):
        return "has hooks"
    if reader is norm and module.running_mean is None:
        return "has no running statistics"
    return ""
