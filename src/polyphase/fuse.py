"""Chains of a built model that a transposed convolution computes in its own kernel: ``accelerate(model, fuse=True)``.

A chain is a transposed convolution and the operations that read its output, each the only reader of the one before:
batch norms, layer norms over channels, activations, dropouts, sums, slices, and products and sums with an earlier value
of the chain, as modules or as calls of PyTorch's functions; and an activation, as a module, whose output only the layer
reads. It is found by symbolic tracing (`torch.fx`) of the model, or of the parts of it that can be traced, in
evaluation mode. Nothing is copied, no parameter moves and no code is rewritten: the layer keeps a list of the modules
and calls after it and reads parameters at every call. Its output knows the expected calls (`polyphase.pending`): a
module passes on an output that expects it, and computes its own operation on any other input. This holds while the
whole chain is in evaluation mode and without hooks; otherwise each module computes its own operation, except norms in
training (`polyphase.batch_norms`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from polyphase import batch_norms
from polyphase.between import Between
from polyphase.chain import Chain
from polyphase.elementwise import is_in_place
from polyphase.fuse_graphs import graphs
from polyphase.fuse_trace import Trace, before_waiting, call_name, is_copy, is_layer, shared_modules, why_missing
from polyphase.module_steps import STEPS, layer_norm, reader_of
from polyphase.modules import APART_FOR, LAYERS, StandIn, node_of
from polyphase.pending import Marked, Pending
from polyphase.snakes import snake, snake_of

#: Modules whose derivative a layer computes from their result, and PyTorch from their input.
_KEEP_RESULT = (torch.nn.ELU, torch.nn.LeakyReLU, torch.nn.Hardtanh)


@dataclass(frozen=True)
class Block:
    """A transposed convolution and the operations around it that it computes.

    Attributes:
        name: the layer's qualified name.
        before: the module whose operation it computes on its input, or "".
        fused: the operations after it, in order: modules by their qualified names, calls as ``relu()``.
        reason: why no further operation is fused.
        classes: names of the fused modules, and of their classes.
        function_before: a function of its input that is not fused, but would be as a module.
    """

    name: str
    fused: tuple[str, ...]
    reason: str
    before: str = ""
    classes: tuple[tuple[str, str], ...] = ()
    function_before: str = ""

    def __str__(self) -> str:
        classes = dict(self.classes)
        before, *behind = (
            f"{each} ({classes[each]})" if each in classes else each for each in (self.before, *self.fused)
        )
        taken = " → ".join(behind)
        if before:
            taken = f"{before} before it" + (f" and {taken} behind it" if taken else "")
        name = self.name or "the model itself"
        told = (
            f"{name}: fused with {taken}; ends there: {self.reason}" if taken else f"{name}: not fused: {self.reason}"
        )
        if not self.function_before:
            return told
        return f"{told}; {self.function_before}() before it would be fused as a module, or by enable_compile_fusion"


def _forward(module: Any, input: Any) -> Any:
    is_proxy = type(input) is not Tensor and isinstance(input, torch.fx.Proxy)
    if is_proxy and (node := node_of(module, input)) is not None:
        return node
    kind = type(input)
    if kind is Pending or kind is Marked or kind is Between:
        passed = input.pass_through(module)
        if passed is not None:
            return passed
        input = input.tensor()
    chain = module.__dict__.get("_chain")  # not by `vars`: Dynamo of PyTorch 2.8 may fail at it
    if chain is not None and chain.before is module and (begun := chain.begin(input)) is not None:
        return begun
    if chain is not None and module.training and (given := batch_norms.given_by(chain, module, input)) is not None:
        return given
    return type(module)._stands_for.forward(module, input)


def _extra_repr(module: Any) -> str:
    own = type(module)._stands_for.extra_repr(module)
    chain = module.__dict__.get("_chain")  # not by `vars`: Dynamo of PyTorch 2.8 may fail at it
    where = "behind it" if chain is not None and chain.before is module else "before it"
    told = f"computed by the transposed convolution {where} in evaluation mode"
    return f"{own}, {told}" if own else told


def _taken(cls: type[Module], reader: Any) -> Any:
    """The class of modules that a layer computes; comparisons of exact types see ``cls``."""
    namespace = {
        "__module__": __name__,
        "__qualname__": f"Taken{cls.__name__}",
        "__doc__": f"A `{cls.__name__}` that returns its input, of which the layer before has computed it.",
        "_stands_for": cls,
        "_reader": staticmethod(reader),
        # Tools that merge modules by their types would merge a norm that the layer computes already.
        "_apart_for": (*APART_FOR, "torch.ao.", "torch.fx."),
        "_chain": None,
        "_get_name": lambda module: cls.__name__,
        "forward": _forward,
        "extra_repr": _extra_repr,
    }
    return StandIn(f"Taken{cls.__name__}", (cls,), namespace)


def _taken_class(cls: type[Module], reader: Any) -> Any:
    """The class of modules that a layer computes for ``cls``; created here for layer norms and snakes."""
    found = next((taken for other, taken in _TAKEN.items() if other is cls), None)
    if found is None:
        found = _TAKEN[cls] = _taken(cls, reader)
        found.__reduce_ex__ = _reduced
    return found


def _new(cls: type[Module], reader: Any) -> Any:
    taken = _taken_class(cls, reader)
    return taken.__new__(taken)


def _reduced(module: Any, protocol: Any) -> tuple[Any, ...]:
    """The pickled form, for classes without a name in a module."""
    kind = type(module)
    return (_new, (kind._stands_for, kind._reader), *object.__reduce_ex__(module, max(2, protocol))[2:])


# Under names of this module, so that modules can be pickled.
_TAKEN: dict[type[Module], Any] = {cls: _taken(cls, reader) for cls, reader in STEPS.items()}
globals().update({taken.__name__: taken for taken in _TAKEN.values()})


def fuse(model: Module) -> tuple[Block, ...]:
    """Makes polyphase's transposed convolutions in ``model`` compute the operations around them, in place."""
    blocks: list[Block] = []
    seen: set[int] = set()
    traced: list[str] = []
    shared = shared_modules(model)
    for prefix, graph, root in graphs(model):
        traced.append(prefix)
        trace = Trace(graph, root, shared, prefix[:-1], reduces=True)
        found = []
        for node in graph.nodes:
            layer: Any = root.get_submodule(node.target) if node.op == "call_module" else None
            if layer is None or not is_layer(layer) or id(layer) in seen:
                continue
            seen.add(id(layer))
            if layer._chain is not None:
                blocks.append(Block(f"{prefix}{node.target}", (), "it has been already, by an earlier call"))
                continue
            found.append((node, *trace.chain_of(node)))
        # An operation that a layer computes on its output is not computed by another on its input.
        blocks += [_block(prefix, root, trace, node, chain, reason) for node, chain, reason in found]
    missing = (
        (name, each) for name, each in model.named_modules() if isinstance(each, LAYERS) and id(each) not in seen
    )
    return (*blocks, *(Block(name, (), why_missing(name, layer, traced)) for name, layer in missing))


def _block(
    prefix: str,
    root: Module,
    trace: Trace,
    layer: torch.fx.Node,
    chain: Sequence[torch.fx.Node],
    reason: str,
) -> Block:
    """Makes the layer of a node compute the nodes of its chain; returns the description."""
    before = trace.before(layer)
    if chain or before is not None:
        _join(root, [layer, *chain], before, {str(each.target) for each in chain if trace.is_shared(each)})
    taken = tuple(f"{call_name(each)}()" if call_name(each) else f"{prefix}{each.target}" for each in chain)
    modules = (str(each.target) for each in (before, *chain) if each is not None and each.op == "call_module")
    return Block(
        f"{prefix}{layer.target}",
        taken,
        reason,
        "" if before is None else f"{prefix}{before.target}",
        tuple((f"{prefix}{each}", root.get_submodule(each)._get_name()) for each in modules),
        trace.function_before(layer),
    )


def unfuse(model: Module) -> None:
    """Makes every module of ``model`` compute itself again."""
    for module in model.modules():
        if isinstance(module, LAYERS):
            chain = vars(module).pop("_chain", None)
            for each in () if chain is None else chain.all_modules:  # also modules that are not part of the model
                _free(each)
        else:
            _free(module)


def _free(module: Module) -> None:
    if any(type(module) is taken for taken in _TAKEN.values()):
        module.__class__ = type(module)._stands_for  # type: ignore[attr-defined]
        for name in ("_chain", "_snake"):
            vars(module).pop(name, None)


def _place(root: Module, path: str) -> tuple[weakref.ref[Module], str, Module]:
    """The parent of a module, the name there, and the module itself."""
    holder, _, name = path.rpartition(".")
    return weakref.ref(root.get_submodule(holder)), name, root.get_submodule(path)


def _is_changed(module: Module, value: torch.fx.Node) -> bool:
    """Whether a function changes a module's result in place, which a layer would save for derivatives."""
    return isinstance(module, _KEEP_RESULT) and any(is_in_place(each.target, each.kwargs) for each in value.users)


def _join(root: Module, chain: Sequence[torch.fx.Node], before: torch.fx.Node | None, names: set[str]) -> None:
    """Makes a layer, the module of the chain's first node in ``root``, compute the calls of the further nodes.

    ``before``: the node of the activation of its input, which it computes too; ``names``: of shared modules.
    """
    nodes = [*chain] if before is None else [before, *chain]
    places = [_place(root, str(each.target)) for each in nodes if each.op == "call_module"]
    activation = None if before is None else root.get_submodule(str(before.target))
    called = [each for each in chain if not is_copy(each)]
    layer, *parts = [call_name(each) or root.get_submodule(str(each.target)) for each in called]
    shared = [root.get_submodule(name) for name in names]
    first = before_waiting(called, parts, shared)
    modules: Any = tuple(parts[:first])
    dims = len(layer.stride) + 2  # type: ignore[union-attr, arg-type]
    normalizes = any(reader_of(each, dims) is layer_norm for each in modules)
    changed = bool(modules) and _is_changed(modules[-1], called[first])
    then: Any = tuple(parts[first:])
    joined = Chain(layer, modules, then, activation, tuple(places), tuple(shared), changed, normalizes)  # type: ignore[arg-type]
    vars(layer)["_chain"] = joined
    for module in joined.all_modules:
        known = snake_of(module) if module is activation else None
        if known is not None:
            vars(module)["_snake"] = known
        if not hasattr(type(module), "_reader"):  # otherwise it is shared, and done
            module.__class__ = _taken_class(type(module), layer_norm if known is None else snake)
        if module not in shared:
            vars(module)["_chain"] = joined
