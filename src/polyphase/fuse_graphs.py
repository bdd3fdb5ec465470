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
from polyphase.modules import LAYERS
from polyphase.snakes import snake_of


class _Proxy(torch.fx.Proxy):
    """A proxy whose ``x += y`` is a node that changes x; PyTorch's proxies record a sum, without the change."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def call(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return call


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class InPlaceTracer(torch.fx.Tracer):
    """A tracer that records in-place operators as nodes."""

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        """The proxy of a node's value while a model is traced."""
        return _Proxy(node, self)


class _Tracer(InPlaceTracer):
    """A tracer that makes modules of chains nodes, also polyphase's, layer norms over channels, and snakes.

    ``known``: these norms and snakes, which PyTorch lacks. ``opaque``: further modules that are nodes, of unknown kind.
    """

    def __init__(self, known: Collection[Module], opaque: Sequence[Module] = ()) -> None:
        super().__init__()
        self._opaque = set(map(id, opaque))
        self._known = {*map(id, known), *self._opaque}

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Whether a module is a node of the graph."""
        return isinstance(m, LAYERS) or id(m) in self._known or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a module's call; an opaque module's node is marked."""
        result = super().call_module(m, forward, args, kwargs)
        if id(m) in self._opaque:
            result.node.meta[OPAQUE] = True
        return result


def graphs(
    model: Module, prefix: str = "", known: Collection[Module] | None = None, opaque: dict[Module, bool] | None = None
) -> Iterator[tuple[str, torch.fx.Graph, Module]]:
    """Graphs of the model in evaluation mode, or of its largest parts that can be traced, with their prefixes.

    ``known``: the model's norms over channels and snakes. ``opaque``: for modules examined so far, whether they cannot
    be traced.
    """
    if not any(isinstance(module, LAYERS) for module in model.modules()) or isinstance(model, LAYERS):
        return
    if known is None:  # found once: a vocoder has a hundred snakes, each recognised by tracing
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
def _in_evaluation(model: Module) -> Iterator[None]:
    """Evaluation mode; then modules' attributes, and items of their lists and dictionaries, are restored."""
    modes = [(module, module.training) for module in model.modules()]  # not a Python attribute of scripted modules
    held: list[Any] = [vars(module) for module in model.modules()]
    held += [each for own in held for each in own.values() if type(each) in (dict, OrderedDict, list)]
    before = [each.copy() for each in held]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for each, items in zip(held, before):
            each.clear()
            (each.extend if type(each) is list else each.update)(items)
        for module, training in modes:
            module.training = training


def _norms_and_snakes(model: Module) -> list[Module]:
    """Modules that PyTorch lacks: layer norms over channels, and snakes."""
    found = []
    with _in_evaluation(model):
        for module in model.modules():
            with suppress(Exception):  # for example a scripted module, which has no Python attributes
                found += [module] * bool(normalized_dims(module) or snake_of(module))
    return found


def _traced(model: Module, known: Collection[Module], opaque: Sequence[Module] = ()) -> torch.fx.Graph | None:
    """The graph of a module in evaluation mode; None if it cannot be traced."""
    try:
        with _in_evaluation(model):
            return _Tracer(known, opaque).trace(model)
    except Exception:  # a model may do anything with a proxy
        return None


def _opaque(model: Module, known: Collection[Module], opaque: dict[Module, bool]) -> list[Module]:
    """The modules without layers inside that cannot be traced, the outermost ones.

    ``opaque``: for modules examined so far, whether they cannot be traced.
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
