"""`polyphase.explain`: how a layer would be computed, on this machine or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from polyphase.errors import UnsupportedError
from polyphase.problem import ConvTransposeProblem
from polyphase.problem.device import ARCHITECTURES, CARDS, Card, DeviceInfo
from polyphase.torch_op.memory_format import is_channels_last
from polyphase.torch_op.tf32 import tf32_allowed
from polyphase.torch_op.validate import FLOATING


def explain(
    layer: ConvTransposeProblem | torch.nn.Module,
    input_shape: Sequence[int] | None = None,
    device: str | torch.device | DeviceInfo | None = None,
) -> str:
    """Which kernel computes each pass of a layer, which ones lose, and why. Needs no GPU and runs nothing.

    Args:
        layer: a ``ConvTransposeProblem``, or a ``ConvTranspose1d/2d/3d`` module of polyphase or PyTorch. The problem,
            or for a module PyTorch's flags now, decides whether float32 may be rounded to TF32.
        input_shape: with a module, the shape ``(N, C_in, *spatial)`` or ``(C_in, *spatial)`` of its input.
        device: an architecture such as ``"sm_90a"``, a card such as ``"h100"``, a device such as ``"cuda:1"``, or None
            for this machine's GPU or, without one, ``"sm_90a"``; then a last line says that this machine uses the
            portable path.

    Raises:
        TypeError: ``layer`` is neither of these, or a module without an ``input_shape``, or in a dtype that is no real
            floating-point one.
        ValueError: ``input_shape`` has other channels than the module, sizes that are no positive integers, or is too
            small for it; a lazy module that has seen no input.
        UnsupportedError: no such architecture or device.
    """
    from polyphase.plan import explain as plan  # all schedules: `import polyphase` does not wait for them

    problem = layer if isinstance(layer, ConvTransposeProblem) else _problem(layer, input_shape)
    text = plan.explain(problem, card_of(device))
    return f"{text}\n\n{NO_GPU}" if is_for_elsewhere(device) else text


NO_GPU = "This machine has no NVIDIA GPU: the plan is for sm_90a. Here polyphase uses its portable path."
"""The last line of a plan that `is_for_elsewhere`."""


def is_for_elsewhere(device: str | torch.device | DeviceInfo | None) -> bool:
    """Whether no device is given, and this machine has none to plan for."""
    return device is None and not torch.cuda.is_available()


def card_of(device: str | torch.device | DeviceInfo | None) -> Card:
    """The card for which `explain` plans. Raises `UnsupportedError`."""
    if isinstance(device, DeviceInfo):
        return Card.of(device)
    if device is None:
        return Card.of(DeviceInfo.of(torch.device("cuda")) if torch.cuda.is_available() else "sm_90a")
    try:
        place = torch.device(device)
    except RuntimeError:  # not a device of PyTorch
        try:
            return Card.of(str(device))
        except UnsupportedError as failure:
            raise UnsupportedError(f"{failure}, and PyTorch's devices such as cuda:1 or cpu") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        allowed = f"give an architecture ({', '.join(ARCHITECTURES)}) or a card ({', '.join(CARDS)})"
        raise UnsupportedError(f"PyTorch finds no CUDA device here, so not {device!r}; {allowed}")
    return Card.of(DeviceInfo.of(place))


def _problem(layer: torch.nn.Module, input_shape: Sequence[int] | None) -> ConvTransposeProblem:
    kinds = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
    if not isinstance(layer, kinds):
        raise TypeError(f"explain takes a ConvTransposeProblem or a ConvTranspose module, not {type(layer).__name__}")
    if isinstance(layer.weight, torch.nn.parameter.UninitializedParameter):
        raise ValueError(f"{layer} has no weight yet: a lazy module gets it from its first input")
    dims = len(layer.kernel_size)
    if isinstance(input_shape, torch.Tensor):
        raise TypeError(f"explain takes the input's shape, not the tensor: {tuple(input_shape.shape)}")
    if isinstance(input_shape, str) or input_shape is None or len(input_shape) not in (dims + 1, dims + 2):
        raise TypeError(
            f"explain needs the input's shape with a module: {dims + 2} sizes (N, C_in, *spatial), "
            f"or {dims + 1} without the batch, got {input_shape!r}"
        )
    if len(input_shape) == dims + 1:
        input_shape = (1, *input_shape)
    if not all(isinstance(size, int) and size >= 1 for size in input_shape):
        raise ValueError(f"sizes of the input must be integers of at least 1, got {tuple(input_shape)}")
    if input_shape[1] != layer.in_channels:
        raise ValueError(f"{layer} takes {layer.in_channels} channels, and the input's shape is {tuple(input_shape)}")
    if layer.weight.dtype not in FLOATING:
        raise TypeError(f"explain takes modules of a real floating-point dtype, got {layer.weight.dtype}")
    problem = ConvTransposeProblem(
        batch=input_shape[0],
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
        input_size=tuple(input_shape[2:]),
        kernel_size=layer.kernel_size,
        stride=layer.stride,
        padding=cast("tuple[int, ...]", layer.padding),
        output_padding=layer.output_padding,
        dilation=layer.dilation,
        groups=layer.groups,
        bias=layer.bias is not None,
        dtype=str(layer.weight.dtype).removeprefix("torch."),
        channels_last=is_channels_last(layer.weight),
        tf32=tf32_allowed(),
    )
    if min(problem.output_size) < 1:
        raise ValueError(f"the output of {layer} on {tuple(input_shape)} would have the size {problem.output_size}")
    return problem
