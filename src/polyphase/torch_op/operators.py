"""The three passes as operators of PyTorch's dispatcher: schemas, implementations per device, and fakes.

``polyphase::conv_transpose``, ``polyphase::conv_transpose_input_grad`` and ``polyphase::conv_transpose_weight_grad``
take batched tensors of one dtype and one device and one integer per spatial dimension, and assume that they are valid:
users call functions like `polyphase.conv_transpose2d`, which check first. Derivatives and vmap rules are in
`polyphase.torch_op.derivatives`.

All constants may be symbolic under ``torch.compile`` and ``torch.export``; constants computed from shapes are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from polyphase.errors import UnsupportedError
from polyphase.problem import Axis
from polyphase.problem.layouts import ALIGNMENT
from polyphase.torch_op import as_real, portable
from polyphase.torch_op.call_cache import CallCache
from polyphase.torch_op.memory_format import empty_output
from polyphase.torch_op.sharding import know_dtensors
from polyphase.torch_op.tf32 import tf32_allowed
from polyphase.torch_op.validate import FLOATING, Layer, output_size

CONSTANTS = "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt[] dilation, SymInt groups"
_SCHEMAS = {
    "conv_transpose": f"(Tensor input, Tensor weight, Tensor? bias, {CONSTANTS}) -> Tensor",
    "conv_transpose_input_grad": f"(Tensor grad_output, Tensor weight, {CONSTANTS}) -> Tensor",
    "conv_transpose_weight_grad": f"(Tensor input, Tensor grad_output, SymInt[] kernel_size, {CONSTANTS}) -> Tensor",
}


@functools.cache
def _runtime() -> ModuleType:
    """The CUDA path, planner and compiler, which the first call on a GPU imports: `import polyphase` stays cheap."""
    from polyphase import runtime

    return runtime


def _on_cuda(name: str) -> Callable[..., Tensor]:
    """The implementation of a pass for CUDA tensors."""
    without_kernels = _portably(name)

    def implementation(first: Tensor, second: Tensor, *arguments: Any) -> Tensor:
        if first.numel() == 0:  # an empty batch, of any size
            return without_kernels(first, second, *arguments)
        # The dispatcher turns tuples into lists.
        arguments = tuple(tuple(each) if isinstance(each, list) else each for each in arguments)
        real: Callable[..., Tensor] = getattr(_runtime(), name)
        if first.dtype in FLOATING:
            return real(first, second, *arguments)
        if first.dtype.is_complex:
            complex_pass: Callable[..., Tensor] = getattr(as_real, name)
            return complex_pass(real, first, second, *arguments)
        raise UnsupportedError(f"polyphase has no CUDA kernels for {first.dtype}")

    return implementation


def _portably(name: str) -> Callable[..., Tensor]:
    """The implementation of a pass for tensors of any other device."""
    portable_pass: Callable[..., Tensor] = getattr(portable, name)

    def implementation(first: Tensor, *arguments: Any) -> Tensor:
        if not torch._C._is_any_autocast_enabled():
            return portable_pass(first, *arguments)
        with torch.autocast(first.device.type, enabled=False):  # it would compute float32 products in half precision
            return portable_pass(first, *arguments)

    return implementation


def pass_autograd(library: torch.library.Library, name: str, implementation: Callable[..., Tensor], key: str) -> None:
    """Makes an operator of ``library`` with registered derivatives call its implementation, if no derivative is needed.

    Compiled code calls operators with derivatives switched off. Derivatives registered in Python would dispatch again,
    which takes as much host time as the rest of the call. ``key``: the dispatch key of ``implementation``.
    """
    operator, wanted = getattr(getattr(torch.ops, library.ns), name).default, getattr(torch._C.DispatchKey, key)

    def call(keys: Any, *arguments: Any) -> Any:
        below = keys & _AFTER_AUTOGRAD
        if not torch.is_grad_enabled() and below.highestPriorityTypeId() == wanted:  # no other key is in between
            return implementation(*arguments)
        return operator.redispatch(below | _AUTOGRAD, *arguments)

    library.impl(name, call, f"Autograd{key}", with_keyset=True)


def forward_fake(input: Tensor, weight: Tensor, bias: Tensor | None, *constants: Any) -> Tensor:
    """An output without values."""
    layer = Layer(tuple(weight.shape[2:]), *constants)
    size = output_size(input.shape[2:], layer)
    return empty_output((input.shape[0], weight.shape[1] * layer.groups, *size), input, weight)


def input_grad_shape(
    grad_output: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[int, ...]:
    """The shape of the input, whose gradient the operator computes."""
    axes = map(Axis, weight.shape[2:], stride, padding, dilation)
    size = [axis.input_size(n, extra) for axis, n, extra in zip(axes, grad_output.shape[2:], output_padding)]
    return grad_output.shape[0], weight.shape[0], *size


def weight_grad_shape(
    input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *constants: Any
) -> tuple[int, ...]:
    """The shape of the weight, whose gradient the operator computes."""
    return input.shape[1], grad_output.shape[1] // constants[-1], *kernel_size


def _input_grad_fake(grad_output: Tensor, weight: Tensor, *constants: Any) -> Tensor:
    return empty_output(input_grad_shape(grad_output, weight, *constants), grad_output, weight)


def _weight_grad_fake(input: Tensor, grad_output: Tensor, *constants: Any) -> Tensor:
    return empty_output(weight_grad_shape(input, grad_output, *constants), input, grad_output)


LIBRARY = torch.library.Library("polyphase", "DEF")
_AFTER_AUTOGRAD: Any = torch._C._after_autograd_keyset
_AUTOGRAD: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)

#: Operators and fakes support tensors of any strides: Inductor need not copy tensors to give them other strides.
TAGS = (torch.Tag.flexible_layout,) if hasattr(torch.Tag, "flexible_layout") else ()

for _name, _pass, _fake in (
    ("conv_transpose", "forward", forward_fake),
    ("conv_transpose_input_grad", "input_grad", _input_grad_fake),
    ("conv_transpose_weight_grad", "weight_grad", _weight_grad_fake),
):
    LIBRARY.define(_name + _SCHEMAS[_name], tags=TAGS)
    LIBRARY.impl(_name, _portably(_pass), "CompositeExplicitAutograd")
    if torch.version.cuda is not None:  # ROCm's tensors have the key CUDA too, and use the portable path
        _implementation = _on_cuda(_pass)
        LIBRARY.impl(_name, _implementation, "CUDA")
        pass_autograd(LIBRARY, _name, _implementation, "CUDA")
    torch.library.register_fake(f"polyphase::{_name}", _fake, lib=LIBRARY)


conv_transpose: Callable[..., Tensor] = torch.ops.polyphase.conv_transpose.default
conv_transpose_input_grad: Callable[..., Tensor] = torch.ops.polyphase.conv_transpose_input_grad.default
conv_transpose_weight_grad: Callable[..., Tensor] = torch.ops.polyphase.conv_transpose_weight_grad.default

# Calls that compute passes without a bias, without the dispatcher.
_operator_calls: CallCache[Callable[..., Tensor]] = CallCache()


def call_below_autograd(operator: Callable[..., Tensor], first: Tensor, second: Tensor, *arguments: Any) -> Tensor:
    """One of the three operators without derivatives; without the dispatcher (4 µs) if nothing observes its calls."""
    plain = type(first) in _PLAIN and type(second) in _PLAIN  # sizes of others may not be hashable
    if plain and not isinstance(arguments[0], Tensor) and not is_heard():
        key = (id(operator), first.shape, second.shape, arguments, tf32_allowed())  # hashing an operator takes longer
        call = _operator_calls.find(key, first, second)
        if call is None:
            call = find_call(operator, first, second, *arguments)
            if call is not None:
                _operator_calls.add(key, call, first, second, lie_so=True)
        if call is not None:
            return call(first, second)
    if not plain:
        know_dtensors()
    with torch._C._AutoDispatchBelowAutograd():
        return operator(first, second, *arguments)


def is_heard() -> bool:
    """Whether a mode, a transform or a profiler may observe every operator's call."""
    return (
        torch._C._len_torch_dispatch_stack() != 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
    )


def find_call(
    operator: Callable[..., Tensor], first: Tensor, second: Tensor, *arguments: Any
) -> Callable[..., Tensor] | None:
    """The call that computes an operator for tensors like these without the dispatcher; it takes only the tensors.

    None if only the dispatcher can: for other devices, wrappers, and dtypes without kernels.
    """
    tensors = (first, second, arguments[0]) if isinstance(arguments[0], Tensor) else (first, second)
    if not first.is_cuda or torch.version.cuda is None or not all(map(is_plain, tensors)):
        return None
    if first.numel() == 0 or first.dtype not in FLOATING:
        return None
    find: Callable[..., Callable[..., Tensor]] = getattr(_runtime(), _FINDERS[operator])
    return find(first, second, *arguments)


GradientsCall = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

# Calls that compute the gradients of input and weight together, by the call that has computed the layer.
_gradients_calls: CallCache[GradientsCall] = CallCache()


def find_both_gradients(call: object, x: Tensor, w: Tensor, g: Tensor, layer: Layer) -> GradientsCall | None:
    """The call that computes both gradients without the dispatcher; None if only the dispatcher can, or if `is_heard`.

    ``call``: the layer's, from `find_call`.
    """
    if is_heard():
        return None
    try:
        at_x, at_w, at_g = x.data_ptr(), w.data_ptr(), g.data_ptr()
    except RuntimeError:  # a batch of gradients has no address
        return None
    key = (call, (at_x | at_g) % ALIGNMENT, (at_w | at_g) % ALIGNMENT, tf32_allowed())
    found = _gradients_calls.find(key, x, w, g)
    if found is None:
        of_input = find_call(conv_transpose_input_grad, g, w, *layer[1:])
        of_weight = find_call(conv_transpose_weight_grad, x, g, *layer)
        if of_input is None or of_weight is None:
            return None
        found = as_one(of_input, of_weight)
        _gradients_calls.add(key, found, x, w, g, lie_so=False)
    return found


def as_one(of_input: Any, of_weight: Any) -> GradientsCall:
    """Two calls of `find_call` as one."""
    from polyphase.prepared import BothGradients

    return BothGradients(of_input, of_weight)


#: Further caches of calls that are emptied with this one.
FURTHER_CALLS: list[CallCache[Any]] = []


def forget_operator_calls() -> None:
    """Makes every later call of an operator be looked up in `polyphase.runtime`, and prepared again there."""
    caches: tuple[CallCache[Any], ...] = (_operator_calls, _gradients_calls, *FURTHER_CALLS)
    for calls in caches:
        calls.clear()
    _runtime().forget_prepared_calls()


_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's values are the memory at its address."""
    return (
        type(tensor) in _PLAIN
        and torch._C._has_storage(tensor)  # the legacy vmap, which is not functorch's, wraps tensors too
        and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
    )


_FINDERS = {
    conv_transpose: "forward_call",
    conv_transpose_input_grad: "input_grad_call",
    conv_transpose_weight_grad: "weight_grad_call",
}

know_dtensors()
