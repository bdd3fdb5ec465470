"""Modules read as operations of an epilogue: norms and activations, which compute every element alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from polyphase import fused, reduction_steps
from polyphase.layer_norms import graph_of, is_layer_norm, is_smooth
from polyphase.modules import operands_of
from polyphase.snakes import snake, snake_of


def norm(module: Any) -> fused.Step:
    """A batch norm in evaluation mode."""
    return fused.batch_norm(module.running_mean, module.running_var, *operands_of(module), module.eps)


def layer_norm(module: Any) -> fused.Step:
    """A layer norm over channels, as `normalized_dims` finds it."""
    return fused.layer_norm(module.weight, module.bias, module.eps)


def _gelu(module: Any) -> fused.Step:
    return fused.Step("gelu_tanh" if module.approximate == "tanh" else "gelu")


#: The operation of a PyTorch module in evaluation mode on every element, as a step; None for an identity.
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
    torch.nn.Softmax: lambda module: fused.softmax(),
    torch.nn.Softmax2d: lambda module: fused.softmax(),
    torch.nn.Identity: lambda module: None,
    torch.nn.Dropout: lambda module: None,
    torch.nn.Dropout1d: lambda module: None,
    torch.nn.Dropout2d: lambda module: None,
    torch.nn.Dropout3d: lambda module: None,
}


#: Modules that a layer computes on its input. For tensors without a batch others have another dimension as channels.
BEFORE = (torch.nn.ReLU, torch.nn.ReLU6, torch.nn.LeakyReLU, torch.nn.PReLU, torch.nn.ELU, torch.nn.GELU, torch.nn.SiLU,
          torch.nn.Tanh, torch.nn.Hardtanh, torch.nn.Hardswish, torch.nn.Mish)  # fmt: skip


def reader_of(module: Any, dims: int) -> Callable[[Any], fused.Step | None] | None:
    """The function that reads a module as a step on tensors with ``dims``; None if no epilogue computes it."""
    kind = shared_class(module) or type(module)
    if kind in (torch.nn.Softmax, torch.nn.Softmax2d) and not is_over_channels(module, dims):
        return None
    for cls, reader in STEPS.items():
        if kind is cls:
            return reader
    return layer_norm if dims in normalized_dims(module) else None


def has_no_state(module: Module) -> bool:
    """Whether a module computes the same at every call, like activations without parameters."""
    return not (module._parameters or module._buffers or module._modules)


def shared_class(module: Any) -> type[Module] | None:
    """The original class of a module that several layers compute, and that belongs to no single chain; else None."""
    cls: type[Module] | None = getattr(type(module), "_stands_for", None)
    return cls if hasattr(type(module), "_reader") and vars(module).get("_chain") is None else None


def is_over_channels(module: Any, dims: int) -> bool:
    """Whether a softmax is over channels, for tensors with ``dims``."""
    return getattr(module, "dim", -3) in (1, 1 - dims)  # `Softmax2d` is over the third dimension from the last


def reader_before(module: Any) -> Callable[[Any], fused.Step | None] | None:
    """The function that reads a module as an operation on a layer's input; None if no prologue computes it."""
    for cls in BEFORE:
        if type(module) is cls:  # not `==`: classes of modules that another layer computes are equal to cls
            return STEPS[cls]
    return snake if snake_of(module) is not None else None


def step_of_module(module: Any, dims: int = 0) -> fused.Step | None:
    """The step of a module of a chain on a tensor with ``dims``, with the module's current parameters."""
    if reduction_steps.is_module(module):
        return reduction_steps.module_step(module, dims)
    step: fused.Step | None = type(module)._reader(module)
    return step


def is_step_of(module: Any, step: fused.Step | None, dims: int, of_layer: int) -> bool:
    """Whether a module computes its `step_of_module` on a tensor with ``dims``.

    ``of_layer``: dimensions of the layer's output, before views of it.
    """
    if step is None:  # an identity; or a pooling or a norm that was changed, or has other dimensions
        return not reduction_steps.is_module(module)
    if step.kind == "softmax":
        return is_over_channels(module, dims)
    return reduction_steps.is_module(module) or not step.tensors or dims == of_layer


def normalized_dims(module: Any) -> tuple[int, ...]:
    """The numbers of dimensions of tensors ``(N, C, *spatial)`` that a module normalises over channels of each pixel.

    PyTorch has no such module. SAM's, ConvNeXt's, torchvision's and timm's ``LayerNorm2d`` are recognised by their
    contents and results, not by their names: a weight, a bias, an ``eps`` and no other number, and smooth functions
    without branches on tensors, whose result for random numbers is the norm.
    """
    vectors = [each for each in module._parameters.values() if each is not None]
    names = set(module._parameters.keys())  # scripted modules have another type of dictionary
    has_more = module._modules or module._buffers or names != {"weight", "bias"}
    if has_more or type(getattr(module, "eps", None)) is not float or "forward" in vars(module):
        return ()
    if type(module).__module__.startswith("torch.") or hasattr(type(module), "_stands_for"):
        return ()  # a layer already computes the second kind
    if any(type(each) in (int, float) and name != "eps" for name, each in vars(module).items()):
        return ()  # for example a factor of 1, which may change
    if not vectors or any(each.dim() != 1 or each.shape != vectors[0].shape for each in vectors):
        return ()
    return tuple(dims for dims in (3, 4, 5) if _normalizes(module, vectors[0].numel(), dims))


def _normalizes(module: Any, channels: int, dims: int) -> bool:
    probe = copy.copy(module)
    names = [name for name in ("weight", "bias") if module._parameters[name] is not None]

    def call(x: torch.Tensor, *vectors: torch.Tensor) -> Any:
        given = {name: torch.nn.Parameter(each) for name, each in zip(names, vectors)}
        vars(probe).update(_parameters={**module._parameters, **given}, training=False)
        return type(module).forward(probe, x)

    roles = ["offset" if name == "bias" else name for name in names]
    with torch.no_grad():
        if not is_layer_norm(call, dims, channels, module.eps, roles):
            return False
    return graph_of(probe, is_smooth) is not None


def has_hooks(module: Module) -> bool:
    """Whether hooks see the module's input, output or gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def sees_input(layer: Module) -> bool:
    """Whether a hook sees a layer's input. (Hooks of PyTorch's weight and spectral norms ignore it.)"""
    hooks = layer._forward_pre_hooks.values()
    return any(not type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks)
