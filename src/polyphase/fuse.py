"""Chains of a built model that a transposed convolution computes in its own kernel: ``accelerate(model, fuse=True)``.

A chain is a transposed convolution and what reads its output alone, module by module: batch norms, activations and
dropouts. It is found by symbolic tracing (`torch.fx`) of the model, or of the parts of it that can be traced, as they
run in evaluation mode. Nothing is copied and no parameter moves: the layer keeps a list of the modules behind it and
reads their parameters at every call, and these hand on what they are given. All of that holds while the whole chain is
in evaluation mode and without hooks; else every module computes what it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from polyphase import functional, fused
from polyphase.modules import APART_FOR, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, StandIn

_LAYERS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
_FUSED = {1: fused.conv_transpose1d, 2: fused.conv_transpose2d, 3: fused.conv_transpose3d}
_ALONE = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@dataclass(frozen=True)
class Block:
    """A transposed convolution and what it computes of what stands behind it.

    Attributes:
        name: the layer's qualified name.
        fused: the qualified names of the modules that it computes, in order.
        reason: why there are no more.
    """

    name: str
    fused: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        taken = " → ".join(self.fused)
        return f"{self.name}: computes {taken}; then {self.reason}" if taken else f"{self.name}: alone; {self.reason}"


def _norm(module: Any) -> fused.Step:
    return fused.batch_norm(module.running_mean, module.running_var, module.weight, module.bias, module.eps)


def _gelu(module: Any) -> fused.Step:
    return fused.Step("gelu_tanh" if module.approximate == "tanh" else "gelu")


# What a module in evaluation mode does to every element, as a step; None for nothing.
_STEPS: dict[Any, Callable[[Any], fused.Step | None]] = {
    torch.nn.BatchNorm1d: _norm,
    torch.nn.BatchNorm2d: _norm,
    torch.nn.BatchNorm3d: _norm,
    torch.nn.SyncBatchNorm: _norm,
    torch.nn.ReLU: lambda module: fused.Step("relu"),
    torch.nn.ReLU6: lambda module: fused.Step("clamp", (0.0, 6.0)),
    torch.nn.LeakyReLU: lambda module: fused.Step("leaky_relu", (module.negative_slope,)),
    torch.nn.PReLU: lambda module: fused.prelu(module.weight),
    torch.nn.ELU: lambda module: fused.Step("elu", (module.alpha,)),
    torch.nn.GELU: _gelu,
    torch.nn.SiLU: lambda module: fused.Step("silu"),
    torch.nn.Tanh: lambda module: fused.Step("tanh"),
    torch.nn.Sigmoid: lambda module: fused.Step("sigmoid"),
    torch.nn.Hardtanh: lambda module: fused.Step("clamp", (module.min_val, module.max_val)),
    torch.nn.Hardswish: lambda module: fused.Step("hardswish"),
    torch.nn.Softplus: lambda module: fused.Step("softplus", (module.beta, module.threshold)),
    torch.nn.Mish: lambda module: fused.Step("mish"),
    torch.nn.Identity: lambda module: None,
    torch.nn.Dropout: lambda module: None,
    torch.nn.Dropout1d: lambda module: None,
    torch.nn.Dropout2d: lambda module: None,
    torch.nn.Dropout3d: lambda module: None,
}


class Chain:
    """What stands behind a layer and is computed by it: its modules in order. The layer and each of them keep it."""

    def __init__(self, layer: Module, modules: tuple[Module, ...]) -> None:
        self.layer = layer
        self.modules = modules

    def is_active(self) -> bool:
        """Whether the layer computes all of it now; every module of the chain comes to the same answer."""
        if any(vars(each).get("_chain") is not self for each in (self.layer, *self.modules)):
            return False  # one of them was restored
        if self.layer.training or self.layer._forward_hooks:
            return False
        return not any(module.training or module._forward_hooks or module._forward_pre_hooks for module in self.modules)

    def steps(self) -> list[fused.Step]:
        """Its operations, of the parameters as they are now."""
        steps = [_STEPS[type(module)._stands_for](module) for module in self.modules]  # type: ignore[attr-defined]
        return [step for step in steps if step is not None]

    def run(self, input: Tensor, output_padding: Any) -> Tensor:
        """The layer and all of it."""
        layer: Any = self.layer
        dims, tensors = len(layer.stride), (input, layer.weight, layer.bias)
        constants = (layer.stride, layer.padding, output_padding, layer.groups, layer.dilation)
        if input.is_floating_point():
            return _FUSED[dims](*tensors, *constants, epilogue=self.steps())
        output = _ALONE[dims](*tensors, *constants)
        modules: Any = self.modules
        for module in modules:
            output = type(module)._stands_for.forward(module, output)
        return output


def _forward(module: Any, input: Any) -> Tensor:
    if type(input) is not Tensor and isinstance(input, torch.fx.Proxy):
        tracer: Any = input.tracer
        if getattr(tracer, "root", module) is not module:  # a node of its own, as `torch.nn`'s modules are
            node: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), {})
            return node
    output: Tensor = input if module._chain.is_active() else type(module)._stands_for.forward(module, input)
    return output


def _extra_repr(module: Any) -> str:
    own = type(module)._stands_for.extra_repr(module)
    told = "computed by the transposed convolution before it in evaluation mode"
    return f"{own}, {told}" if own else told


def _taken(cls: type[Module]) -> Any:
    """The class of modules that a layer computes: equal to ``cls`` for who asks for exact types."""
    namespace = {
        "__module__": __name__,
        "__qualname__": f"Taken{cls.__name__}",
        "__doc__": f"A `torch.nn.{cls.__name__}` that hands on what the layer before it has computed of it.",
        "_stands_for": cls,
        # Who merges modules by their types would merge a norm that the layer computes already.
        "_apart_for": (*APART_FOR, "torch.ao.", "torch.fx."),
        "_chain": None,
        "_get_name": lambda module: cls.__name__,
        "forward": _forward,
        "extra_repr": _extra_repr,
    }
    return StandIn(f"Taken{cls.__name__}", (cls,), namespace)


# Under names of this module, so that modules can be pickled.
_TAKEN: dict[type[Module], Any] = {cls: _taken(cls) for cls in _STEPS}
globals().update({taken.__name__: taken for taken in _TAKEN.values()})


def fuse(model: Module) -> tuple[Block, ...]:
    """Have the transposed convolutions of ``model`` that are polyphase's compute what stands behind them, in place."""
    blocks: list[Block] = []
    seen: set[int] = set()
    shared = _shared(model)
    for prefix, graph, root in _graphs(model):
        calls = [node.target for node in graph.nodes if node.op == "call_module"]
        for node in graph.nodes:
            layer: Any = root.get_submodule(node.target) if node.op == "call_module" else None
            if layer is None or not _is_layer(layer) or id(layer) in seen:
                continue
            seen.add(id(layer))
            name = f"{prefix}{node.target}"
            if layer._chain is not None:
                blocks.append(Block(name, (), "it has been fused before"))
                continue
            chain, reason = _chain(node, root, calls, shared)
            taken = tuple(f"{prefix}{target}" for target in chain)
            if taken:
                _join(layer, tuple(root.get_submodule(target) for target in chain))
            blocks.append(Block(name, taken, reason))
    missing = (name for name, each in model.named_modules() if _is_layer(each) and id(each) not in seen)
    return (*blocks, *(Block(name, (), "what calls it cannot be traced by torch.fx") for name in missing))


def _is_layer(module: Any) -> bool:
    return any(type(module) is cls for cls in _LAYERS)


def unfuse(model: Module) -> None:
    """Have every module of ``model`` compute for itself again."""
    for module in model.modules():
        if isinstance(module, _LAYERS):
            chain = vars(module).pop("_chain", None)
            for each in () if chain is None else chain.modules:  # also those that are no part of the model
                _free(each)
        else:
            _free(module)


def _free(module: Module) -> None:
    if any(type(module) is taken for taken in _TAKEN.values()):
        module.__class__ = type(module)._stands_for  # type: ignore[attr-defined]
        vars(module).pop("_chain", None)


def _join(layer: Module, modules: tuple[Module, ...]) -> None:
    chain = Chain(layer, modules)
    vars(layer)["_chain"] = chain
    for module in modules:
        module.__class__ = next(taken for cls, taken in _TAKEN.items() if cls is type(module))
        vars(module)["_chain"] = chain


class _Tracer(torch.fx.Tracer):
    """Modules of a chain are nodes, also polyphase's."""

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Whether a module is a node of the graph."""
        return isinstance(m, _LAYERS) or super().is_leaf_module(m, module_qualified_name)


def _graphs(model: Module, prefix: str = "") -> Iterator[tuple[str, torch.fx.Graph, Module]]:
    """Graphs of the model in evaluation mode, or of the largest parts of it that can be traced, with their prefixes."""
    if not any(isinstance(module, _LAYERS) for module in model.modules()) or isinstance(model, _LAYERS):
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        graph = _Tracer().trace(model)
    except Exception:  # whatever a model does with a proxy
        for name, child in model.named_children():
            yield from _graphs(child, f"{prefix}{name}.")
        return
    finally:
        for module, training in modes:
            module.training = training
    yield prefix, graph, model


def _shared(model: Module) -> set[int]:
    """Modules that have several names."""
    names: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        names[id(module)] = names.get(id(module), 0) + 1
    return {module for module, count in names.items() if count > 1}


def _chain(node: torch.fx.Node, root: Module, calls: list[Any], shared: set[int]) -> tuple[list[str], str]:
    """The names of the modules behind a layer that it can compute, and why there are no more."""
    found: list[str] = []
    if calls.count(node.target) > 1 or id(root.get_submodule(str(node.target))) in shared:
        return found, "it is called more than once"
    if root.get_submodule(str(node.target))._forward_hooks:
        return found, "it has forward hooks, which see its own output"
    while True:
        readers = list(node.users)
        if len(readers) != 1:
            return found, f"{len(readers)} read the result" if readers else "nothing reads the result"
        (node,) = readers
        if node.op == "output":
            return found, "it is the result of what was traced"
        if node.op != "call_module":
            name = getattr(node.target, "__name__", str(node.target))
            return found, f"{name} reads it, which is a call and no module: polyphase.fused can compute that"
        module = root.get_submodule(str(node.target))
        reason = _why_not(module, node, calls, shared)
        if reason:
            return found, f"{node.target} {reason}"
        found.append(str(node.target))


def _why_not(module: Any, node: torch.fx.Node, calls: list[Any], shared: set[int]) -> str:
    """Why a module cannot be computed by the layer before it, or ""."""
    if not any(type(module) is cls for cls in _STEPS):
        return f"is a {type(module).__name__}, which no epilogue computes"
    if calls.count(node.target) > 1 or id(module) in shared:
        return "is called more than once"
    if len(node.args) != 1 or node.kwargs:
        return "takes further arguments"
    if "forward" in vars(module):
        return "has a forward of its own on the instance"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks"
    if _STEPS[type(module)] is _norm and module.running_mean is None:
        return "has no running statistics"
    return ""
