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
from polyphase.modules import APART_FOR, StandIn, operands_of
from polyphase.pending import Marked, Pending, Waiting, computed
from polyphase.snakes import snake, snake_of
from polyphase.torch_op import into
from polyphase.torch_op.validate import Layer, output_size
from polyphase.versions import versions_of

_FUSED = {1: fused.conv_transpose1d, 2: fused.conv_transpose2d, 3: fused.conv_transpose3d}
_PLAIN = (Tensor, torch.nn.Parameter)
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


class Chain:
    """The operations around a layer that it computes. The layer and each module of the chain refer to it.

    ``modules``: the modules right after the layer. ``then``: the kinds of the calls that follow
    (`polyphase.elementwise.name_of`), and modules after them, which only a layer that waits computes. ``before``: the
    activation of the layer's input, or None; the layer computes it if no derivatives are recorded.
    ``places``: for each module of the model its parent and its name there; copies of a chain have none.
    ``changed``: a function changes the result of the last of ``modules`` in place, so that it must not be saved for
    derivatives: if these are recorded, that module computes itself.
    ``shared``: modules of ``then`` that are called elsewhere too, and so belong to no single chain.
    ``normalizes``: one of ``modules`` is a layer norm, whose result is float32 under autocast: then modules compute
    themselves. So they do for an input without a batch if one has a tensor: channels are another dimension there.
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
        #: All modules of the chain in order, without the layer.
        first = () if before is None else (before,)
        self.all_modules = (*first, *modules, *(each for each in then if isinstance(each, Module)))
        self._normalizes = normalizes
        self._has_channels = any(each._parameters or each._buffers for each in modules)
        self._places = places

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_places": ()}

    def is_active(self) -> bool:
        """Whether the layer computes the whole chain now. Every line is host time of every call, as in `is_whole`."""
        if self.layer.training:
            return False
        for module in self.all_modules:
            if module.training:
                return False
        return self.is_whole()

    def is_whole(self) -> bool:
        """Whether no module was restored or replaced, and no hook would see a value that is not computed."""
        for holder, name, module in self._places:
            if (found := holder()) is not None and found._modules.get(name) is not module:
                return False
        hooks: Any = torch.nn.modules.module  # global hooks
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

    # A constant to Dynamo, as `torch.compiler.assume_constant_result` would mark it (but importing Dynamo): its guards
    # took longer than all others of a model, and `restore` changes classes, which Dynamo always guards.
    is_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _shares(self, module: Module) -> bool:
        """Whether a module is shared, and layers still compute it."""
        return module in self._shared and hasattr(type(module), "_reader")

    def begin(self, input: Any) -> Any:
        """The result of the activation of the layer's input: a `Pending` that the layer reads, or None."""
        layer: Any = self.layer
        if type(input) not in _PLAIN or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return None
        if input.requires_grad or sees_input(layer):  # the first: see `run`
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
        """The layer and its chain: a tensor, or an object that knows the modules and functions expected next."""
        layer: Any = self.layer
        before: Sequence[fused.Step] = ()
        if type(input) is Pending and self.before is not None and (found := input.read_by(layer)) is not None:
            input, before = found
        input = computed(input)
        tensors = (input, *operands_of(layer))
        apart = self._normalizes and torch._C._is_any_autocast_enabled()
        apart |= self._has_channels and input.dim() != len(layer.stride) + 2
        if apart or not input.is_floating_point():  # no epilogue supports complex numbers
            return self._run(tensors, output_padding, (), before)
        tracing = torch.compiler.is_compiling() or torch._C._is_tracing()
        if tracing and self.modules:
            return Between(self._run(tensors, output_padding, self._steps(), before), self.modules)
        if tracing or type(input) not in _PLAIN or torch._C._are_functorch_transforms_active():
            return self._run(tensors, output_padding, (), before)
        # A reentrant checkpoint records nothing, and sets requires_grad of a layer's output: it must be a tensor.
        recorded = torch.is_grad_enabled() or input.requires_grad
        if self.then and not recorded and self._waits(input):
            waiting = self._waiting(tensors, output_padding, (*self.modules, *self.then), before)
            return Pending.of(waiting, [], versions_of(waiting.reads))
        modules = self._recorded if recorded else self.modules
        if not modules:
            return self._run(tensors, output_padding, (), before)
        steps = self._steps()[: len(modules)]
        waiting = self._waiting(tensors, output_padding, modules, before)
        return Marked.of(self._run(tensors, output_padding, steps, before), waiting, steps)

    def _waits(self, input: Tensor) -> bool:
        """Whether the layer waits for the calls of ``then``."""
        with_batch = input.dim() == len(self.layer.stride) + 2  # type: ignore[arg-type]
        return with_batch and not (self.then == ("cat",) and into.is_little(input, self.layer))

    def _steps(self) -> list[fused.Step | None]:
        """The operations right after the layer, one for each module, with its current parameters."""
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
            paddings = layer.padding, tuple(output_padding)  # a list if an output size was requested
            known = _output_size(
                input.shape[2:], layer.kernel_size, layer.stride, *paddings, layer.dilation, layer.groups
            )
            return (input.shape[0], layer.out_channels, *known)

        reads = tensors if tensors[2] is not None else tensors[:2]
        reads += tuple(each for step in before for _, each in step.tensors) if before else ()
        return Waiting(compute, reads, expected, size, dtype, input.device, stride=layer.stride)


@lru_cache(maxsize=1024)
def _output_size(size: tuple[int, ...], *layer: Any) -> tuple[int, ...]:
    return output_size(size, Layer(*layer))


def _forward(module: Any, input: Any) -> Any:
    if type(input) is not Tensor and isinstance(input, torch.fx.Proxy):
        tracer: Any = input.tracer
        if getattr(tracer, "root", module) is not module:  # a single node, as for modules of `torch.nn`
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


def _taken_class(cls: type[Module], reader: Any = layer_norm) -> Any:
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
    joined = Chain(layer, modules, then, tuple(places), normalizes, activation, changed, tuple(shared))  # type: ignore[arg-type]
    vars(layer)["_chain"] = joined
    for module in joined.all_modules:
        known = snake_of(module) if module is activation else None
        if known is not None:
            vars(module)["_snake"] = known
        if not hasattr(type(module), "_reader"):  # otherwise it is shared, and done
            module.__class__ = _taken_class(type(module), layer_norm if known is None else snake)
        if module not in shared:
            vars(module)["_chain"] = joined
