"""PyTorch's modules, read as operations of an epilogue: what a batch norm or an activation does to every element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from polyphase import fused


def norm(module: Any) -> fused.Step:
    """A batch norm in evaluation mode."""
    return fused.batch_norm(module.running_mean, module.running_var, module.weight, module.bias, module.eps)


def _gelu(module: Any) -> fused.Step:
    return fused.Step("gelu_tanh" if module.approximate == "tanh" else "gelu")


#: What a module in evaluation mode does to every element, as a step; None for nothing.
STEPS: dict[Any, Callable[[Any], fused.Step | None]] = {
    torch.nn.BatchNorm1d: norm,
    torch.nn.BatchNorm2d: norm,
    torch.nn.BatchNorm3d: norm,
    torch.nn.SyncBatchNorm: norm,
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


def step_of_module(module: Any) -> fused.Step | None:
    """What a module of a chain computes, of its parameters as they are now."""
    return STEPS[type(module)._stands_for](module)


def has_hooks(module: Module) -> bool:
    """Whether something sees what the module is given, gives, or has as gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
