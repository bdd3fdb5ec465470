"""What a layer does with the chain of operations around it (`polyphase.fuse`), at every call."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from polyphase import functional, fused, fused_calls
from polyphase.between import Between
from polyphase.module_steps import has_hooks, sees_input, step_of_module
from polyphase.modules import operands_of
from polyphase.pending import Marked, Pending, Waiting, computed
from polyphase.snakes import snake
from polyphase.torch_op.validate import Layer, output_size
from polyphase.versions import versions_of

_FUSED = {1: fused.conv_transpose1d, 2: fused.conv_transpose2d, 3: fused.conv_transpose3d}
_PLAIN = (Tensor, torch.nn.Parameter)
_LITTLE = 1 << 24  # elements of an output, which one of PyTorch's kernels reads and writes in 30 µs


@dataclass(eq=False, repr=False)
class Chain:
    """The operations around a layer that it computes. The layer and each module of the chain refer to it.

    ``modules``: the modules right after the layer. ``then``: the kinds of the calls that follow
    (`polyphase.elementwise.name_of`), and modules after them, which only a layer that waits computes. ``before``: the
    activation of the layer's input, or None; the layer computes it if no derivatives are recorded.
    ``places``: for each module of the model its parent and its name there; copies of a chain have none.
    Where an output `is_little`, only ``modules`` are fused, and ``before`` only if it is a snake.
    ``changed``: a function changes the result of the last of ``modules`` in place, so that it must not be saved for
    derivatives: if these are recorded, that module computes itself.
    ``shared``: modules of ``then`` that are called elsewhere too, and so belong to no single chain.
    ``normalizes``: one of ``modules`` is a layer norm, whose result is float32 under autocast: then modules compute
    themselves. So they do for an input without a batch if one has a tensor: channels are another dimension there.
    """

    layer: Module
    modules: tuple[Module, ...]
    then: tuple[Module | str, ...]
    before: Module | None
    places: tuple[tuple[weakref.ref[Module], str, Module], ...]
    shared: tuple[Module, ...]
    changed: bool
    normalizes: bool

    def __post_init__(self) -> None:
        #: All modules of the chain in order, without the layer.
        first = () if self.before is None else (self.before,)
        self.all_modules = (*first, *self.modules, *(each for each in self.then if isinstance(each, Module)))
        self._recorded = self.modules[:-1] if self.changed else self.modules
        self._has_channels = any(each._parameters or each._buffers for each in self.modules)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "places": ()}

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
        for holder, name, module in self.places:
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
        return module in self.shared and hasattr(type(module), "_reader")

    def begin(self, input: Any) -> Any:
        """The result of the activation of the layer's input: a `Pending` that the layer reads, or None."""
        layer: Any = self.layer
        if type(input) not in _PLAIN or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return None
        if input.requires_grad or sees_input(layer):  # the first: see `run`
            return None
        if torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active():
            return None
        if input.dim() != len(layer.stride) + 2 or not input.is_floating_point():
            return None
        before: Any = self.before
        if is_little(input, layer) and type(before)._reader is not snake:
            return None
        if not self.is_active() or step_of_module(before) is None:  # or a snake whose numbers have changed
            return None

        def compute(steps: Sequence[fused.Step | None], out: Tensor | None = None) -> Tensor:
            result: Tensor = type(before)._stands_for.forward(before, input)
            return result if out is None else out.copy_(result)

        waiting = Waiting(compute, (input,), (before, layer), lambda: tuple(input.shape), input.dtype, input.device)
        return Pending.of(waiting, [], versions_of(waiting.reads)).pass_through(before)

    def run(self, input: Any, output_padding: Any) -> Any:
        """The layer and its chain: a tensor, or an object that knows the modules and functions expected next."""
        layer: Any = self.layer
        before: list[fused.Step] = []
        if type(input) is Pending and self.before is not None and (found := input.read_by(layer)) is not None:
            input, before = found
        input = computed(input)
        tensors = (input, *operands_of(layer))
        apart = self.normalizes and torch._C._is_any_autocast_enabled()
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
        if not recorded and self._waits(input):
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
        layer: Any = self.layer
        return bool(self.then) and input.dim() == len(layer.stride) + 2 and not is_little(input, layer)

    def _steps(self) -> list[fused.Step | None]:
        """The operations right after the layer, one for each module, with its current parameters."""
        modules: tuple[Any, ...] = self.modules
        return [type(module)._reader(module) for module in modules]

    def _run(
        self,
        tensors: tuple[Any, Any, Any],
        output_padding: Any,
        steps: Sequence[fused.Step | None],
        before: list[fused.Step],
        out: Tensor | None = None,
    ) -> Tensor:
        layer: Any = self.layer
        constants = (layer.stride, layer.padding, output_padding, layer.groups, layer.dilation)
        made, dims = [step for step in steps if step is not None], len(layer.stride)
        return fused_calls.run(_FUSED[dims], dims, tensors, constants, made, before, out)

    def _waiting(
        self,
        tensors: tuple[Any, Any, Any],
        output_padding: Any,
        expected: Sequence[Any],
        before: list[fused.Step],
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


def is_little(input: Tensor, layer: Any) -> bool:
    """Whether the host's time is likely to decide how long a layer and its chain take.

    PyTorch's functions then take less time than their interception does, which is some 50 µs.
    """
    if not input.is_cuda or not layer.in_channels:
        return False
    elements: int = input.numel() // layer.in_channels * layer.out_channels * math.prod(layer.stride)
    return elements < _LITTLE


@lru_cache(maxsize=1024)
def _output_size(size: tuple[int, ...], *layer: Any) -> tuple[int, ...]:
    return output_size(size, Layer(*layer))
