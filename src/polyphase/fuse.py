"""Chains of a built model that a transposed convolution computes in its own kernel: ``accelerate(model, fuse=True)``.

A chain is a transposed convolution and what reads its output, where nothing else does, one after the other: batch
norms, layer norms over channels, activations, dropouts, sums, slices, and products and sums with an earlier value of
the chain, as modules or as calls of PyTorch's functions; and an activation, as a module, whose output the layer alone
reads. It is found by symbolic tracing (`torch.fx`) of the model, or of the parts of it that can be traced, as they run
in evaluation mode. Nothing is copied, no parameter moves and no code is rewritten: the layer keeps a list of what
follows it and reads parameters at every call. What it returns says what is expected of it (`polyphase.pending`): a
module passes on what expects it, and computes its own operation of anything else. All of that holds while the whole
chain is in evaluation mode and without hooks; else each computes what it always did, but for norms in training
(`polyphase.batch_norms`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from polyphase import batch_norms, functional, fused
from polyphase.between import Between
from polyphase.elementwise import is_in_place
from polyphase.fuse_graphs import LAYERS, graphs
from polyphase.fuse_trace import Trace, before_waiting, call_name, is_copy, is_layer, shared_modules, why_missing
from polyphase.module_steps import STEPS, has_hooks, layer_norm, reader_of, sees_input, step_of_module
from polyphase.modules import APART_FOR, StandIn
from polyphase.pending import Marked, Pending, Waiting, computed
from polyphase.snakes import snake, snake_of
from polyphase.torch_op.validate import Layer, output_size
from polyphase.versions import versions_of

_FUSED = {1: fused.conv_transpose1d, 2: fused.conv_transpose2d, 3: fused.conv_transpose3d}
_PLAIN = (Tensor, torch.nn.Parameter)
#: Those whose derivative a layer takes from their result, and PyTorch from what they are given.
_KEEP_RESULT = (torch.nn.ELU, torch.nn.LeakyReLU, torch.nn.Hardtanh)


@dataclass(frozen=True)
class Block:
    """A transposed convolution and what it computes of what follows it.

    Attributes:
        name: the layer's qualified name.
        before: the module of which it computes the operation on its input, or "".
        fused: what it computes, in order: modules by their qualified names, calls as ``relu()``.
        reason: why there are no more.
        classes: names of modules among these, and of their classes.
        function_before: a function that it does not compute of its input, and would if it were a module.
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


class Chain:
    """What follows a layer and is computed by it. The layer and each module of it keep it.

    ``modules``: those right behind the layer. ``then``: the kinds of the calls that follow
    (`polyphase.elementwise.name_of`), and modules behind them, which only a layer that waits computes. ``before``: the
    activation of the layer's input, where there is one; without derivatives the layer computes it.
    ``places``: where the model had each, the module that holds it and its name there; copies of a chain have none.
    ``changed``: a function changes in place what the last of ``modules`` gives, which is then not to be kept for
    derivatives: with these that module computes for itself.
    ``shared``: modules of ``then`` that are called elsewhere too, of which no chain is the only one.
    ``normalizes``: one of ``modules`` is a layer norm, which gives float32 under autocast: all are then computed by
    themselves. So they are of an input without a batch where one has a tensor: its channels are another dimension.
    """

    def __init__(
        self,
        layer: Module,
        modules: tuple[Module, ...],
        then: tuple[Module | str, ...] = (),
        places: tuple[tuple[weakref.ref[Module], str, Module], ...] = (),
        normalizes: bool = False,
        before: Module | None = None,
        changed: bool = False,
        shared: tuple[Module, ...] = (),
    ) -> None:
        self.layer = layer
        self.before = before
        self.modules = modules
        self._recorded = modules[:-1] if changed else modules
        self.then = then
        self._shared = shared
        #: Its modules in order, without the layer.
        first = () if before is None else (before,)
        self.all_modules = (*first, *modules, *(each for each in then if isinstance(each, Module)))
        self._normalizes = normalizes
        self._has_channels = any(each._parameters or each._buffers for each in modules)
        self._places = places

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_places": ()}

    def is_active(self) -> bool:
        """Whether the layer computes all of it now. Every line is host time of every call, as in `is_whole`."""
        if self.layer.training:
            return False
        for module in self.all_modules:
            if module.training:
                return False
        return self.is_whole()

    def is_whole(self) -> bool:
        """Whether none of it was restored or replaced, and no hook would see what is not computed."""
        for holder, name, module in self._places:
            if (found := holder()) is not None and found._modules.get(name) is not module:
                return False
        hooks: Any = torch.nn.modules.module  # of all modules
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return False
        if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
            return False
        for module in self.all_modules:
            if module.__dict__.get("_chain") is not self and not self._shares(module):
                return False
            if has_hooks(module):
                return False
        layer = self.layer
        if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
        return layer.__dict__.get("_chain") is self

    # To Dynamo a constant, as `torch.compiler.assume_constant_result` marks it (which would import Dynamo): its guards
    # took longer than all others of a model, and `restore` changes classes, which are guarded in any case.
    is_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _shares(self, module: Module) -> bool:
        """Whether a module is shared, and computed by layers still."""
        return module in self._shared and hasattr(type(module), "_reader")

    def begin(self, input: Any) -> Any:
        """What the activation of the layer's input returns: what stands for it, for the layer; else None."""
        layer: Any = self.layer
        if type(input) not in _PLAIN or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return None
        if input.requires_grad or sees_input(layer):  # for the first see `run`
            return None
        if torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active():
            return None
        if input.dim() != len(layer.stride) + 2 or not input.is_floating_point() or not self.is_active():
            return None
        before: Any = self.before
        if step_of_module(before) is None:  # a snake whose numbers have changed
            return None

        def compute(steps: Sequence[fused.Step | None], out: Tensor | None = None) -> Tensor:
            result: Tensor = type(before)._stands_for.forward(before, input)
            return result if out is None else out.copy_(result)

        waiting = Waiting(compute, (input,), (before, layer), lambda: tuple(input.shape), input.dtype, input.device)
        return Pending.of(waiting, [], versions_of(waiting.reads)).pass_through(before)

    def run(self, input: Any, output_padding: Any) -> Any:
        """The layer and what is around it: a tensor, or what knows of the modules and functions that are to follow."""
        layer: Any = self.layer
        before: Sequence[fused.Step] = ()
        if type(input) is Pending and self.before is not None and (found := input.read_by(layer)) is not None:
            input, before = found
        input = computed(input)
        tensors = (input, layer.weight, layer.bias)
        apart = self._normalizes and torch._C._is_any_autocast_enabled()
        apart |= self._has_channels and input.dim() != len(layer.stride) + 2
        if apart or not input.is_floating_point():  # no epilogue takes complex numbers
            return self._run(tensors, output_padding, (), before)
        tracing = torch.compiler.is_compiling() or torch._C._is_tracing()
        if tracing and self.modules:
            return Between(self._run(tensors, output_padding, self._steps(), before), self.modules)
        if tracing or type(input) not in _PLAIN or torch._C._are_functorch_transforms_active():
            return self._run(tensors, output_padding, (), before)
        # A reentrant checkpoint records nothing, and gives what a layer returns derivatives: it must be a tensor.
        recorded = torch.is_grad_enabled() or input.requires_grad
        if self.then and not recorded and input.dim() == len(layer.stride) + 2:
            waiting = self._waiting(tensors, output_padding, (*self.modules, *self.then), before)
            return Pending.of(waiting, [], versions_of(waiting.reads))
        modules = self._recorded if recorded else self.modules
        if not modules:
            return self._run(tensors, output_padding, (), before)
        steps = self._steps()[: len(modules)]
        waiting = self._waiting(tensors, output_padding, modules, before)
        return Marked.of(self._run(tensors, output_padding, steps, before), waiting, steps)

    def _steps(self) -> list[fused.Step | None]:
        """The operations right behind the layer, one for each module, of the parameters as they are now."""
        return [step_of_module(module) for module in self.modules]

    def _run(
        self,
        tensors: tuple[Any, Any, Any],
        output_padding: Any,
        steps: Sequence[fused.Step | None],
        before: Sequence[fused.Step],
        out: Tensor | None = None,
    ) -> Tensor:
        layer: Any = self.layer
        more: dict[str, Any] = {} if out is None else {"out": out}
        if before:
            more["prologue"] = before
        dims = len(layer.stride)
        constants = (layer.stride, layer.padding, output_padding, layer.groups, layer.dilation)
        return _FUSED[dims](*tensors, *constants, epilogue=[step for step in steps if step is not None], **more)

    def _waiting(
        self,
        tensors: tuple[Any, Any, Any],
        output_padding: Any,
        expected: Sequence[Any],
        before: Sequence[fused.Step],
    ) -> Waiting:
        layer: Any = self.layer
        input = tensors[0]
        dtype, cast = input.dtype, None
        if torch._C._is_any_autocast_enabled():
            dtype, device = functional.autocast_dtype(input) or input.dtype, input.device.type
            cast = partial(torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

        def compute(steps: Sequence[fused.Step | None], out: Tensor | None = None) -> Tensor:
            if cast is None and not torch._C._is_any_autocast_enabled():
                return self._run(tensors, output_padding, steps, before, out)
            with torch.autocast(input.device.type, enabled=False) if cast is None else cast():
                return self._run(tensors, output_padding, steps, before, out)

        def size() -> tuple[int, ...]:
            paddings = layer.padding, tuple(output_padding)  # a list where an output size was asked for
            known = _output_size(
                input.shape[2:], layer.kernel_size, layer.stride, *paddings, layer.dilation, layer.groups
            )
            return (input.shape[0], layer.out_channels, *known)

        reads = tensors if tensors[2] is not None else tensors[:2]
        reads = (*reads, *(each for step in before for _, each in step.tensors))
        return Waiting(compute, reads, expected, size, dtype, input.device)


@lru_cache(maxsize=1024)
def _output_size(size: tuple[int, ...], *layer: Any) -> tuple[int, ...]:
    return output_size(size, Layer(*layer))


def _forward(module: Any, input: Any) -> Any:
    if type(input) is not Tensor and isinstance(input, torch.fx.Proxy):
        tracer: Any = input.tracer
        if getattr(tracer, "root", module) is not module:  # a node of its own, as `torch.nn`'s modules are
            node: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), {})
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
    """The class of modules that a layer computes: equal to ``cls`` for who asks for exact types."""
    namespace = {
        "__module__": __name__,
        "__qualname__": f"Taken{cls.__name__}",
        "__doc__": f"A `{cls.__name__}` that returns its input, of which the layer before has computed it.",
        "_stands_for": cls,
        "_reader": staticmethod(reader),
        # Who merges modules by their types would merge a norm that the layer computes already.
        "_apart_for": (*APART_FOR, "torch.ao.", "torch.fx."),
        "_chain": None,
        "_get_name": lambda module: cls.__name__,
        "forward": _forward,
        "extra_repr": _extra_repr,
    }
    return StandIn(f"Taken{cls.__name__}", (cls,), namespace)


def _taken_class(cls: type[Module], reader: Any = layer_norm) -> Any:
    """The class of modules that a layer computes for ``cls``, made here where it is a layer norm's or a snake's."""
    found = next((taken for other, taken in _TAKEN.items() if other is cls), None)
    if found is None:
        found = _TAKEN[cls] = _taken(cls, reader)
        found.__reduce_ex__ = _reduced
    return found


def _new(cls: type[Module], reader: Any) -> Any:
    taken = _taken_class(cls, reader)
    return taken.__new__(taken)


def _reduced(module: Any, protocol: Any) -> tuple[Any, ...]:
    """What is pickled: no module has its class under a name."""
    kind = type(module)
    return (_new, (kind._stands_for, kind._reader), *object.__reduce_ex__(module, max(2, protocol))[2:])


# Under names of this module, so that modules can be pickled.
_TAKEN: dict[type[Module], Any] = {cls: _taken(cls, reader) for cls, reader in STEPS.items()}
globals().update({taken.__name__: taken for taken in _TAKEN.values()})


def fuse(model: Module) -> tuple[Block, ...]:
    """Have the transposed convolutions of ``model`` that are polyphase's compute what follows them, in place."""
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
        # What a layer computes of its output, no other does of its input.
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
    """Have the layer of a node compute the nodes of its chain, and tell it."""
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
    """Have every module of ``model`` compute for itself again."""
    for module in model.modules():
        if isinstance(module, LAYERS):
            chain = vars(module).pop("_chain", None)
            for each in () if chain is None else chain.all_modules:  # also those that are no part of the model
                _free(each)
        else:
            _free(module)


def _free(module: Module) -> None:
    if any(type(module) is taken for taken in _TAKEN.values()):
        module.__class__ = type(module)._stands_for  # type: ignore[attr-defined]
        for name in ("_chain", "_snake"):
            vars(module).pop(name, None)


def _place(root: Module, path: str) -> tuple[weakref.ref[Module], str, Module]:
    """The module that holds another one, the name there, and the module itself."""
    holder, _, name = path.rpartition(".")
    return weakref.ref(root.get_submodule(holder)), name, root.get_submodule(path)


def _is_changed(module: Module, value: torch.fx.Node) -> bool:
    """Whether a function changes in place what a module gives, of which a layer would keep it for derivatives."""
    return isinstance(module, _KEEP_RESULT) and any(is_in_place(each.target, each.kwargs) for each in value.users)


def _join(root: Module, chain: Sequence[torch.fx.Node], before: torch.fx.Node | None, names: set[str]) -> None:
    """Have a layer, the module of the first of these nodes of ``root``, compute what the others call behind it.

    ``before``: the node of the activation that it computes of its input; ``names``: of modules that are shared.
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
    joined = Chain(layer, modules, then, tuple(places), normalizes, activation, changed, tuple(shared))  # type: ignore[arg-type]
    vars(layer)["_chain"] = joined
    for module in joined.all_modules:
        known = snake_of(module) if module is activation else None
        if known is not None:
            vars(module)["_snake"] = known
        if not hasattr(type(module), "_reader"):  # else it is shared
            module.__class__ = _taken_class(type(module), layer_norm if known is None else snake)
        if module not in shared:
            vars(module)["_chain"] = joined
