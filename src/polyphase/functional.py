"""``conv_transpose1d/2d/3d`` with the signatures of `torch.nn.functional`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from polyphase.export import run_traced
from polyphase.torch_op import operators
from polyphase.torch_op.call_cache import CallCache
from polyphase.torch_op.derivatives import run as run_differentiable
from polyphase.torch_op.derivatives import run_operator
from polyphase.torch_op.sharding import DTENSORS, know_dtensors
from polyphase.torch_op.tf32 import tf32_allowed
from polyphase.torch_op.validate import Layer, check

T = TypeVar("T")


class _CheckedCall(NamedTuple):
    """A checked call: its constants, its layer, and the call that computes it without the dispatcher, if any."""

    constants: tuple[Any, ...]
    layer: Layer
    call: Callable[..., Tensor] | None


# Calls with checked arguments. A warm call is one look-up here.
_checked_calls: CallCache[_CheckedCall] = CallCache()


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The 1-D transposed convolution, `torch.nn.functional.conv_transpose1d`.

    Args:
        input: ``(N, C_in, L)``, or ``(C_in, L)`` unbatched.
        weight: ``(C_in, C_out/groups, kL)``.
        bias: ``(C_out,)``; beside float16 and bfloat16 it may be float32, except on CUDA.
        stride: distance between the outputs of neighbouring inputs.
        padding: how many outputs are cropped on either side.
        output_padding: how many outputs are added at the end; smaller than stride or dilation.
        groups: number of independent layers into which the channels are divided.
        dilation: distance between the outputs of neighbouring taps.
        out: the tensor to write the output to, of its shape, dtype and device; without derivatives. Kernels write to it
            directly if it starts at a multiple of 32 bytes and has a new output's layout, except for gaps between
            images, or in channels_last between pixels, as in a slice of a larger tensor's channels. Otherwise the
            output is copied.

    Returns:
        ``(N, C_out, L_out)`` with ``L_out = (L - 1)·stride - 2·padding + dilation·(kL - 1) + output_padding + 1``.

    Raises:
        TypeError, RuntimeError: as PyTorch's function does for such arguments.
        UnsupportedError: the dtype, the device or the GPU cannot be served.
    """
    constants = (stride, padding, output_padding, groups, dilation)
    if out is not None:
        return _into(conv_transpose1d, 1, (input, weight, bias), constants, out)
    return _conv_transpose(conv_transpose1d, 1, input, weight, bias, constants)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The 2-D transposed convolution, `torch.nn.functional.conv_transpose2d`.

    ``(N, C_in, H, W)`` or ``(C_in, H, W)``, weight ``(C_in, C_out/groups, kH, kW)``, to ``(N, C_out, H_out, W_out)``.
    Constants are one integer or one per dimension; see `conv_transpose1d` for their meaning, and for what is raised.
    """
    constants = (stride, padding, output_padding, groups, dilation)
    if out is not None:
        return _into(conv_transpose2d, 2, (input, weight, bias), constants, out)
    return _conv_transpose(conv_transpose2d, 2, input, weight, bias, constants)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The 3-D transposed convolution, `torch.nn.functional.conv_transpose3d`.

    ``(N, C_in, D, H, W)`` or ``(C_in, D, H, W)``, weight ``(C_in, C_out/groups, kD, kH, kW)``, to
    ``(N, C_out, D_out, H_out, W_out)``. Constants are one integer or one per dimension; see `conv_transpose1d` for
    their meaning, and for what is raised.
    """
    constants = (stride, padding, output_padding, groups, dilation)
    if out is not None:
        return _into(conv_transpose3d, 3, (input, weight, bias), constants, out)
    return _conv_transpose(conv_transpose3d, 3, input, weight, bias, constants)


def _conv_transpose(
    function: Callable[..., Tensor],
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    constants: tuple[Any, ...],
) -> Tensor:
    """Casts for autocast, checks, and runs: an `autograd.Function` if derivatives are needed, else the operator.

    Every line here is host time of every call.
    """
    tracing = torch.compiler.is_compiling() or torch._C._is_tracing()
    if not tracing and has_torch_function_variadic(input, weight, bias):
        tensors = (input, weight, bias)
        overridden: Tensor = handle_torch_function(function, tensors, *tensors, *constants)
        return overridden
    if torch._C._is_any_autocast_enabled():
        input, weight, bias = autocast(input), autocast(weight), None if bias is None else autocast(bias)

    arguments = (function.__name__, dims, input, weight, bias, *constants)
    layer, call = (while_traced(check, *arguments), None) if tracing else _check_once(arguments, constants)
    batch = input if input.dim() == dims + 2 else input.unsqueeze(0)
    if tracing:  # Dynamo supports no Function with a jvp; the operators have their own derivatives and vmap rules
        if DTENSORS:
            know_dtensors()
        run = run_operator if torch.compiler.is_dynamo_compiling() else run_traced
        output = run((batch, weight, None), bias, layer)
    elif _wants_derivatives(input, weight, bias):
        output = run_differentiable((batch, weight, None), bias, layer, call)
    elif call is not None:
        output = call(batch, weight, bias)
    else:
        output = operators.call_below_autograd(operators.conv_transpose, batch, weight, bias, *layer[1:])
    return output if batch is input else output.squeeze(0)


def _into(function: Callable[..., Tensor], dims: int, tensors: Any, constants: tuple[Any, ...], out: Tensor) -> Tensor:
    """The layer's output in ``out``: a fused call without operations."""
    from polyphase import fused_calls

    return fused_calls.run(function, dims, tensors, constants, [], [], out)


def _check_once(arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> tuple[Layer, Callable[..., Tensor] | None]:
    """The layer of a call and the call that computes it, cached if an equal one was made before."""
    _, dims, input, weight, bias, *_ = arguments
    tensors = (input, weight) if bias is None else (input, weight, bias)
    heard = operators.is_heard()
    key: tuple[Any, ...] | None
    try:
        key = (dims, input.shape, weight.shape, bias is None, constants, heard, tf32_allowed())
        known = _checked_calls.find(key, *tensors)
    except (TypeError, AttributeError, RuntimeError):  # lists or symbolic sizes; not a tensor; a nested tensor
        key, known = None, None
    # 2, 2.0 and True are one key: constants must be the checked objects, or at least have their types.
    if known is not None and (all(map(is_, constants, known.constants)) or are_integers(constants)):
        return known.layer, known.call
    layer = check(*arguments)
    batch = input if input.dim() == dims + 2 else input.unsqueeze(0)
    call = None if heard else operators.find_call(operators.conv_transpose, batch, weight, bias, *layer[1:])
    if key is not None and are_integers(constants):
        _checked_calls.add(key, _CheckedCall(constants, layer, call), *tensors, lie_so=call is not None)
    return layer, call


def forget_calls() -> None:
    """Makes every later call be checked, prepared and planned again: empties this cache and the two below it."""
    _checked_calls.clear()
    operators.forget_operator_calls()


def _wants_derivatives(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autograd, a functorch transform or forward-mode differentiation needs derivatives."""
    return (
        (
            torch.is_grad_enabled()
            and (input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        )
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def are_integers(constants: tuple[Any, ...]) -> bool:
    """Whether constants can be part of a key: a tensor may also be an integer, but may change."""
    for constant in constants:  # loops: every line is host time of calls
        if type(constant) is tuple:
            for value in constant:
                if type(value) is not int:
                    return False
        elif type(constant) is not int:
            return False
    return True


def while_traced(checks: Callable[..., T], *arguments: Any) -> T:
    """The result of ``checks`` for the arguments of a traced call, without warnings of the tracer."""
    if torch.compiler.is_compiling():
        return checks(*arguments)
    with warnings.catch_warnings():  # torch.jit.trace makes tensors of sizes, and warns that checks are not traced
        warnings.filterwarnings("ignore", "Converting a tensor|Iterating over a tensor")
        return checks(*arguments)


def autocast(tensor: Tensor) -> Tensor:
    """The tensor in `autocast_dtype`."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None else tensor.to(dtype)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Autocast's dtype for the tensor's device, to which PyTorch casts all floats but float64 for convolutions.

    None if the tensor is not cast.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return None
    device = tensor.device.type
    if not torch.compiler.is_compiling() and not torch.amp.autocast_mode.is_autocast_available(device):
        return None  # for example the device "meta", which is_autocast_enabled does not support
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
