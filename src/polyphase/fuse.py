"""Chains of a built model that a transposed convolution computes in its own kernel: ``accelerate(model, fuse=True)``.

A chain is a transposed convolution and what reads its output alone, one after the other: batch norms, activations,
dropouts and sums, as modules or as calls of PyTorch's functions. It is found by symbolic tracing (`torch.fx`) of the
model, or of the parts of it that can be traced, as they run in evaluation mode. Nothing is copied, no parameter moves
and no code is rewritten: the layer keeps a list of the modules behind it and reads their parameters at every call, and
these return their input as it is. Where functions are called the layer computes when the last of them is
(`polyphase.pending`). All of that holds while the whole chain is in evaluation mode and without hooks; else each
computes what it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from polyphase import functional, fused
from polyphase.elementwise import change_between, changes_other, name_of, read
from polyphase.modules import APART_FOR, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, StandIn
from polyphase.pending import Pending, Waiting
from polyphase.torch_op.validate import Layer, output_size

_LAYERS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
_FUSED = {1: fused.conv_transpose1d, 2: fused.conv_transpose2d, 3: fused.conv_transpose3d}
_ALONE = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@dataclass(frozen=True)
class Block:
    """A transposed convolution and what it computes of what stands behind it.

    Attributes:
        name: the layer's qualified name.
        fused: what it computes, in order: modules by their qualified names, calls as ``relu()``.
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
    """What stands behind a layer and is computed by it. The layer and each module of it keep it.

    ``modules``: those right behind the layer, which it computes at once. ``then``: the kinds of the calls that follow
    (`polyphase.elementwise.name_of`), and modules behind them, for which it waits.
    """

    def __init__(self, layer: Module, modules: tuple[Module, ...], then: tuple[Module | str, ...] = ()) -> None:
        self.layer = layer
        self.modules = modules
        self.then = then

    @property
    def all_modules(self) -> tuple[Module, ...]:
        """Its modules in order, without the layer."""
        return (*self.modules, *(each for each in self.then if isinstance(each, Module)))

    def is_active(self) -> bool:
        """Whether the layer computes all of it now; every module of the chain comes to the same answer."""
        if not self._is_whole():
            return False
        if self.layer.training:
            return False
        return not any(module.training for module in (self.all_modules if self.then else self.modules))

    def _is_whole(self) -> bool:
        """Whether none of it was restored, and no hook would see what is not computed."""
        if any(vars(each).get("_chain") is not self for each in (self.layer, *self.all_modules)):
            return False
        hooks: Any = torch.nn.modules.module  # of all modules
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return False
        if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
            return False
        if self.layer._forward_hooks or self.layer._backward_hooks or self.layer._backward_pre_hooks:
            return False
        return not any(_has_hooks(module) for module in self.all_modules)

    # To Dynamo a constant, as `torch.compiler.assume_constant_result` marks it (which would import Dynamo): its guards
    # took longer than all others of a model, and `restore` changes classes, which are guarded in any case.
    _is_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def steps(self) -> list[fused.Step]:
        """The operations right behind the layer, of the parameters as they are now."""
        steps = [_step(module) for module in self.modules]
        return [step for step in steps if step is not None]

    def run(self, input: Tensor, output_padding: Any) -> Any:
        """The layer and what is right behind it: a tensor, or what waits for the calls that follow."""
        layer: Any = self.layer
        if self.then and _can_wait(input, len(layer.stride)):
            return self._pending(input, output_padding)
        return self._run((input, layer.weight, layer.bias), output_padding, self.steps() if self.modules else [])

    def _run(self, tensors: tuple[Any, Any, Any], output_padding: Any, steps: list[fused.Step]) -> Tensor:
        layer: Any = self.layer
        dims, input = len(layer.stride), tensors[0]
        constants = (layer.stride, layer.padding, output_padding, layer.groups, layer.dilation)
        if input.is_floating_point():
            return _FUSED[dims](*tensors, *constants, epilogue=steps)
        output = _ALONE[dims](*tensors, *constants)
        modules: Any = self.modules
        for module in modules:
            output = type(module)._stands_for.forward(module, output)
        return output

    def _pending(self, input: Tensor, output_padding: Any) -> Pending:
        layer: Any = self.layer
        tensors = (input, layer.weight, layer.bias)
        dtype, cast = input.dtype, None
        if torch._C._is_any_autocast_enabled():
            dtype, device = functional.autocast_dtype(input) or input.dtype, input.device.type
            cast = partial(torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

        def compute(steps: list[fused.Step]) -> Tensor:
            if cast is None and not torch._C._is_any_autocast_enabled():
                return self._run(tensors, output_padding, steps)
            with torch.autocast(input.device.type, enabled=False) if cast is None else cast():
                return self._run(tensors, output_padding, steps)

        def size() -> tuple[int, ...]:
            known = Layer(layer.kernel_size, layer.stride, layer.padding, output_padding, layer.dilation, layer.groups)
            return (input.shape[0], layer.out_channels, *output_size(input.shape[2:], known))

        reads = tensors if tensors[2] is not None else tensors[:2]
        return Pending(Waiting(compute, reads, self.then, size, dtype, input.device), self.steps())


def _has_hooks(module: Module) -> bool:
    """Whether something sees what the module is given, gives, or has as gradients."""
    hooks: Any = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    )  # fmt: skip
    return any(hooks)


def _step(module: Any) -> fused.Step | None:
    """What a module of a chain computes, of its parameters as they are now."""
    return _STEPS[type(module)._stands_for](module)


def _can_wait(input: Tensor, dims: int) -> bool:
    """Whether a layer may compute later than it is called: in inference, of a batch, and while nothing traces."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or type(input) not in (Tensor, torch.nn.Parameter)
        or not input.is_floating_point()
        or input.dim() != dims + 2
    )


def _forward(module: Any, input: Any) -> Any:
    if type(input) is not Tensor and isinstance(input, torch.fx.Proxy):
        tracer: Any = input.tracer
        if getattr(tracer, "root", module) is not module:  # a node of its own, as `torch.nn`'s modules are
            node: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), {})
            return node
    chain = module._chain
    active = chain.is_active()
    if any(each is module for each in chain.modules):  # the layer has computed it
        if active and torch.is_grad_enabled():
            _check_derivatives(module, input)
        return input if active else type(module)._stands_for.forward(module, input)
    if type(input) is Pending:
        passed = input.pass_through(module, _step(module)) if active else None
        if passed is not None:
            return passed
        input = input.tensor()
    return type(module)._stands_for.forward(module, input)


def _check_derivatives(module: Module, output: Tensor) -> None:
    """Raise RuntimeError where the layer has computed without derivatives what is to have some."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    waits = type(output) is Pending  # type: ignore[comparison-overlap]
    if not waits and (type(output) is not Tensor or output.requires_grad):
        return
    if any(each.requires_grad for each in module.parameters()):
        raise RuntimeError(
            f"a {module._get_name()} is fused into a layer that was called within torch.no_grad(), and is called "
            "outside of it, where its parameters require gradients: polyphase.restore(model), or call both in one mode"
        )


def _extra_repr(module: Any) -> str:
    own = type(module)._stands_for.extra_repr(module)
    told = "computed by the transposed convolution before it in evaluation mode"
    return f"{own}, {told}" if own else told


def _taken(cls: type[Module]) -> Any:
    """The class of modules that a layer computes: equal to ``cls`` for who asks for exact types."""
    namespace = {
        "__module__": __name__,
        "__qualname__": f"Taken{cls.__name__}",
        "__doc__": f"A `torch.nn.{cls.__name__}` that returns its input, of which the layer before has computed it.",
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
        trace = _Trace(graph, root, shared)
        for node in graph.nodes:
            layer: Any = root.get_submodule(node.target) if node.op == "call_module" else None
            if layer is None or not _is_layer(layer) or id(layer) in seen:
                continue
            seen.add(id(layer))
            name = f"{prefix}{node.target}"
            if layer._chain is not None:
                blocks.append(Block(name, (), "it has been fused before"))
                continue
            chain, reason = trace.chain_of(node)
            if chain:
                _join(layer, [_name(each) or root.get_submodule(str(each.target)) for each in chain])
            taken = (f"{_name(each)}()" if _name(each) else f"{prefix}{each.target}" for each in chain)
            blocks.append(Block(name, tuple(taken), reason))
    missing = (name for name, each in model.named_modules() if _is_layer(each) and id(each) not in seen)
    return (*blocks, *(Block(name, (), "what calls it cannot be traced by torch.fx") for name in missing))


def _is_layer(module: Any) -> bool:
    return any(type(module) is cls for cls in _LAYERS)


def unfuse(model: Module) -> None:
    """Have every module of ``model`` compute for itself again."""
    for module in model.modules():
        if isinstance(module, _LAYERS):
            chain = vars(module).pop("_chain", None)
            for each in () if chain is None else chain.all_modules:  # also those that are no part of the model
                _free(each)
        else:
            _free(module)


def _free(module: Module) -> None:
    if any(type(module) is taken for taken in _TAKEN.values()):
        module.__class__ = type(module)._stands_for  # type: ignore[attr-defined]
        vars(module).pop("_chain", None)


def _join(layer: Module, parts: Sequence[Module | str]) -> None:
    """Have a layer compute modules and calls of these kinds behind it."""
    # A Softplus waits as calls do: under autocast it may have to compute for itself.
    calls = [place for place, part in enumerate(parts) if isinstance(part, (str, torch.nn.Softplus))]
    first = calls[0] if calls else len(parts)
    chain = Chain(layer, tuple(parts[:first]), tuple(parts[first:]))  # type: ignore[arg-type]
    vars(layer)["_chain"] = chain
    for module in chain.all_modules:
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


def _name(node: torch.fx.Node) -> str:
    """The kind of a call; "" if no epilogue has it."""
    return name_of(node.target) if node.op in ("call_function", "call_method") else ""


class _Trace:
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
                reason = _why_not(self._module(reader), reader, self._calls, self._shared)
                reason = reason and f"{reader.target} {reason}"
            else:
                reason = self._why_no_call(layer, node, reader)
            if reason:
                return found, reason
            found.append(reader)
            self._taken.add(reader)
            node = reader

    def _why_no_call(self, layer: torch.fx.Node, value: torch.fx.Node, call: torch.fx.Node) -> str:
        """Why a call of ``value`` cannot be computed by the layer, or ""."""
        name = _name(call)
        if not name:
            name = getattr(call.target, "__name__", str(call.target))
            return f"{name} reads it, which no epilogue computes"
        if call in self._taken:
            return f"another layer computes {name}()"
        if changes_other(call.target, value, call.args, call.kwargs):
            return f"{name} changes another tensor in place"
        if read(name, value, call.args, call.kwargs) is None:
            return f"{name} reads it with arguments that no epilogue takes"
        path = str(layer.target).split(".")
        parents = (self._root.get_submodule(".".join(path[:depth])) for depth in range(1, len(path)))
        if any(parent._forward_hooks for parent in parents):
            return f"hooks would see it before {name}()"
        between = self._nodes[self._order[layer] + 1 : self._order[call]]
        changing = change_between(between, self._taken, self._module_of)
        return "" if changing is None else f"{changing} changes a tensor in place before {name}() is called"


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
    if _has_hooks(module):
        return "has hooks"
    if _STEPS[type(module)] is _norm and module.running_mean is None:
        return "has no running statistics"
    return ""
