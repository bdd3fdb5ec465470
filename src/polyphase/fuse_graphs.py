"""Graphs of a model, or of the parts of it that `torch.fx` can trace, in evaluation mode (`polyphase.fuse`)."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn import Module

from polyphase.elementwise import OPAQUE
from polyphase.module_steps import normalized_dims
from polyphase.modules import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from polyphase.snakes import snake_of

LAYERS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)


class _Proxy(torch.fx.Proxy):
    """One whose ``x += y`` is a node that changes x; of PyTorch's it is a sum, and the change is in no graph."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def call(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return call


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class InPlaceTracer(torch.fx.Tracer):
    """Changes by operators are nodes."""

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        """What stands for a node's value while a model is traced."""
        return _Proxy(node, self)


class _Tracer(InPlaceTracer):
    """Modules of a chain are nodes, also polyphase's, layer norms over channels and snakes, which PyTorch has not.

    ``known``: such norms and snakes. ``opaque``: further modules that are nodes; nobody knows what they do.
    """

    def __init__(self, known: Collection[Module], opaque: Sequence[Module] = ()) -> None:
        super().__init__()
        self._opaque = set(map(id, opaque))
        self._known = {*map(id, known), *self._opaque}

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Whether a module is a node of the graph."""
        return isinstance(m, LAYERS) or id(m) in self._known or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module's call gives: a node of one that is opaque says so."""
        result = super().call_module(m, forward, args, kwargs)
        if id(m) in self._opaque:
            result.node.meta[OPAQUE] = True
        return result


def graphs(
    model: Module, prefix: str = "", known: Collection[Module] | None = None, opaque: dict[Module, bool] | None = None
) -> Iterator[tuple[str, torch.fx.Graph, Module]]:
    """Graphs of the model in evaluation mode, or of the largest parts of it that can be traced, with their prefixes.

    ``known``: its norms over channels and its snakes. ``opaque``: whether modules cannot be traced, as far as that was
    found.
    """
    if not any(isinstance(module, LAYERS) for module in model.modules()) or isinstance(model, LAYERS):
        return
    if known is None:  # found once: a vocoder has a hundred snakes, each traced to be known
        known = _norms_and_snakes(model)
    graph, opaque = _traced(model, known), {} if opaque is None else opaque
    if graph is None and (leaves := _opaque(model, known, opaque)):
        graph = _traced(model, known, leaves)
    if graph is not None:
        yield prefix, graph, model
        return
    for name, child in model.named_children():
        yield from graphs(child, f"{prefix}{name}.", known, opaque)


@contextmanager
def _left_as_it_is(model: Module) -> Iterator[None]:
    """Modules keep no attributes that are set meanwhile, and their lists and dictionaries no items."""
    modes = [(module, module.training) for module in model.modules()]  # of scripted modules no attribute of Python's
    held: list[Any] = [vars(module) for module in model.modules()]
    held += [each for own in held for each in own.values() if type(each) in (dict, OrderedDict, list)]
    before = [each.copy() for each in held]
    try:
        yield
    finally:
        for each, items in zip(held, before):
            each.clear()
            (each.extend if type(each) is list else each.update)(items)
        for module, training in modes:
            module.training = training


def _norms_and_snakes(model: Module) -> list[Module]:
    """Modules that PyTorch has not: layer norms over channels, and snakes."""
    found = []
    with _left_as_it_is(model):
        for module in model.modules():
            module.training = False
        for module in model.modules():
            with suppress(Exception):  # a scripted one, say, which has no attributes of Python's
                found += [module] * bool(normalized_dims(module) or snake_of(module))
    return found


def _traced(model: Module, known: Collection[Module], opaque: Sequence[Module] = ()) -> torch.fx.Graph | None:
    """The graph of a module in evaluation mode; None where it cannot be traced."""
    with _left_as_it_is(model):
        try:
            for module in model.modules():
                module.training = False
            return _Tracer(known, opaque).trace(model)
        except Exception:  # whatever a model does with a proxy
            return None


def _opaque(model: Module, known: Collection[Module], opaque: dict[Module, bool]) -> list[Module]:
    """The modules without layers within that cannot be traced, none of them a part of another.

    ``opaque``: whether modules are, as far as that was found.
    """
    found: list[Module] = []
    for child in model.children():
        is_list = isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))  # which nobody calls
        if is_list or any(isinstance(module, LAYERS) for module in child.modules()):
            found += _opaque(child, known, opaque)
            continue
        if child not in opaque:
            opaque[child] = not _Tracer(known).is_leaf_module(child, "") and _traced(child, known) is None
        found += [child] * opaque[child]
    return found
