"""Every argument is checked here, before anything runs.

Bad arguments raise the exception type that PyTorch's own function raises for them: ``TypeError`` for an argument that
should be a tensor or an integer, ``ValueError`` for an integer beyond 64 bits, ``RuntimeError`` for the rest. The
message says what was given and what is allowed.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyphase.errors import UnsupportedError
from polyphase.problem import Axis

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)


class Layer(NamedTuple):
    """The layer's constants, one value per spatial dimension, except ``groups``."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def check(
    name: str,
    dims: int,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
) -> Layer:
    """The layer of a call of the function ``name`` in ``dims`` dimensions, with every constant per dimension.

    Raises:
        TypeError: an argument is not of the right type.
        ValueError: an integer beyond 64 bits.
        RuntimeError: shapes, dtypes, devices or constants that do not go together.
        UnsupportedError: a dtype that the device cannot compute, or a nested or a quantized tensor (a
            ``NotImplementedError``).
    """
    _check_tensors(name, input, weight, bias)
    _check_ranks(name, dims, input, weight)
    groups = _integer(name, "groups", groups)
    layer = Layer(
        kernel_size=tuple(weight.shape[2:]),
        stride=_per_dim(name, "stride", stride, dims, least=1),
        padding=_per_dim(name, "padding", padding, dims, least=0),
        output_padding=_per_dim(name, "output_padding", output_padding, dims, least=0),
        dilation=_per_dim(name, "dilation", dilation, dims, least=1),
        groups=groups,
    )
    _check_channels(name, input.shape[-1 - dims], weight, bias, groups)
    _check_sizes(name, dims, input, layer)
    return layer


def _check_tensors(name: str, input: Any, weight: Any, bias: Any) -> None:
    for role, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        if role == "bias" and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {role} must be a Tensor, not {type(tensor).__name__}")
        if tensor.is_nested:
            raise UnsupportedError(f"{name} takes no nested tensors, got one as {role}; unbind it, or pad it")
        if tensor.is_quantized:
            raise UnsupportedError(
                f"{name} takes no quantized tensors, got {tensor.dtype} as {role}; before a model is quantized, "
                "polyphase.restore(model)"
            )
        if tensor.layout != torch.strided:
            raise RuntimeError(f"{name}: {role} must be a dense (strided) tensor, got {tensor.layout}")
        if tensor.dtype != input.dtype and not (role == "bias" and _goes_beside(tensor, input)):
            raise RuntimeError(
                f"{name}: input, weight and bias must have the same dtype, got input {input.dtype} and "
                f"{role} {tensor.dtype}; convert one of them, or use torch.autocast"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"{name}: input, weight and bias must be on the same device, got input on {input.device} and "
                f"{role} on {tensor.device}"
            )
    if input.dtype not in FLOATING and input.dtype not in COMPLEX and (input.dtype != torch.int64 or input.is_cuda):
        raise UnsupportedError(
            f"{name} is not implemented for {input.dtype} on {input.device.type}: it takes float64, float32, float16, "
            "bfloat16 and complex, and int64 except on CUDA"
        )


def _goes_beside(bias: Tensor, input: Tensor) -> bool:
    """Whether a bias of another dtype is accepted: float32 with half types, except on CUDA, where PyTorch refuses it.

    On the CPU it depends on PyTorch's build, the processor and the number of dimensions whether PyTorch accepts it.
    """
    return bias.dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16) and not input.is_cuda


def _check_ranks(name: str, dims: int, input: Tensor, weight: Tensor) -> None:
    if input.dim() != dims + 2 and input.dim() != dims + 1:
        raise RuntimeError(
            f"{name}: expected a {dims + 2}D input (N, C_in, {_SPATIAL[dims]}) or a {dims + 1}D unbatched input "
            f"(C_in, {_SPATIAL[dims]}), got input of shape {tuple(input.shape)}"
        )
    if weight.dim() != dims + 2:
        raise RuntimeError(
            f"{name}: expected a {dims + 2}D weight (C_in, C_out/groups, {_SPATIAL[dims]}), "
            f"got weight of shape {tuple(weight.shape)}"
        )


def _check_channels(name: str, in_channels: int, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    if groups < 1:
        raise RuntimeError(f"{name}: groups must be at least 1, got groups={groups}")
    if in_channels != weight.shape[0]:
        raise RuntimeError(
            f"{name}: weight of shape {tuple(weight.shape)} takes {weight.shape[0]} input channels, "
            f"but the input has {in_channels}"
        )
    if weight.shape[0] % groups != 0:
        raise RuntimeError(f"{name}: groups={groups} does not divide in_channels={weight.shape[0]}")
    if 0 in weight.shape:
        raise RuntimeError(f"{name}: every size of the weight must be at least 1, got shape {tuple(weight.shape)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[1] * groups):
        raise RuntimeError(
            f"{name}: bias must have shape ({weight.shape[1] * groups},), one element per output channel "
            f"(weight.shape[1]·groups = {weight.shape[1]}·{groups}), got shape {tuple(bias.shape)}"
        )


def _check_sizes(name: str, dims: int, input: Tensor, layer: Layer) -> None:
    input_size = input.shape[-dims:]
    for n in input_size:
        if n == 0 and not (input.dim() == dims + 2 and input.shape[0] == 0):
            raise RuntimeError(
                f"{name}: every spatial size of the input must be at least 1, except for an empty batch, "
                f"got {tuple(input_size)}"
            )
    for extra, s, d in zip(layer.output_padding, layer.stride, layer.dilation):
        if extra >= s and extra >= d:
            raise RuntimeError(
                f"{name}: output_padding must be smaller than stride or dilation, got "
                f"output_padding={layer.output_padding}, stride={layer.stride}, dilation={layer.dilation}"
            )
    check_sizes(name, input_size, layer)


def check_sizes(name: str, input_size: tuple[int, ...], layer: Layer) -> None:
    """Raises RuntimeError if the output would have no elements, or too many."""
    sizes = output_size(input_size, layer)
    for size in sizes:
        if size < 1:
            raise RuntimeError(
                f"{name}: the output would have size {sizes}, and every size must be at least 1: input size "
                f"{tuple(input_size)}, kernel_size={layer.kernel_size}, stride={layer.stride}, "
                f"padding={layer.padding}, output_padding={layer.output_padding}, dilation={layer.dilation}"
            )
        if isinstance(size, int) and size >= 2**63:
            raise RuntimeError(f"{name}: the output would have size {sizes}, and a size must be less than 2**63")


def output_size(input_size: tuple[int, ...], layer: Layer) -> tuple[int, ...]:
    """The spatial size of the output, from that of the input."""
    return tuple(
        Axis(k, s, p, d).output_size(n, extra)
        for n, k, s, p, extra, d in zip(
            input_size, layer.kernel_size, layer.stride, layer.padding, layer.output_padding, layer.dilation
        )
    )


def _per_dim(name: str, argument: str, value: Any, dims: int, least: int) -> tuple[int, ...]:
    """``value``, an integer or one integer per dimension, as one per dimension."""
    if isinstance(value, (tuple, list)):
        values = tuple([_integer(name, argument, element) for element in value])
        if len(values) == 1:
            values = values * dims  # not in place: older versions of Dynamo do not support that
        if len(values) != dims:
            raise RuntimeError(f"{name}: {argument} must be one integer or {dims} of them, got {argument}={value}")
    else:
        values = (_integer(name, argument, value),) * dims
    for element in values:
        if element < least:
            raise RuntimeError(f"{name}: {argument} must be at least {least}, got {argument}={value}")
    return values


def _integer(name: str, argument: str, value: Any) -> int:
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: {argument} must fit 64 bits, got {value}")
        return value  # type: ignore[return-value]
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        with suppress(TypeError):  # an array or a tensor of several elements
            return operator.index(value)
    allowed = "an integer" if argument == "groups" else "an integer or a tuple of integers"
    raise TypeError(f"{name}: {argument} must be {allowed}, not {type(value).__name__}")


_SPATIAL = {1: "L", 2: "H, W", 3: "D, H, W"}
