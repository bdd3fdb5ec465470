"""`freeze` a model for inference: its transposed convolutions keep their weights packed in their kernels' order."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch.nn import Module
from torch.nn.parameter import UninitializedParameter

from polyphase.kept import forget, keep, kept_of
from polyphase.modules import LAYERS

_NO_LAYERS = "It has no polyphase layer: call polyphase.accelerate first"


@dataclass(frozen=True, repr=False)
class Frozen:
    """The result of `freeze`: ``layers`` are the names of the layers whose weights are kept, ``model`` the model.

    ``skipped``: the other polyphase layers, each with a reason.
    """

    model: Module
    layers: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        """Memory of packed weights on GPUs now: they are packed at a layer's first call at a size."""
        layers: list[Any] = [self.model.get_submodule(name) for name in self.layers]
        kept = (kept_of(layer.weight) for layer in layers)
        return sum(each.bytes for each in kept if each is not None)

    def __repr__(self) -> str:
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        if not self.layers:
            lines = [f"polyphase.freeze: no weights are kept{'' if self.skipped else f'. {_NO_LAYERS}'}"]
        elif not self.bytes and all(self.model.get_submodule(name).weight.device.type == "cpu" for name in self.layers):
            lines = [f"polyphase.freeze: {count} on the CPU, where nothing is packed: only GPU kernels pack weights"]
        else:
            lines = [f"polyphase.freeze: {count} with {self.bytes / 1e6:.2f} MB of packed weights now"]
        lines += [f"{name}: not kept, {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


def freeze(model: Module) -> Frozen:
    """Keep the weights of the model's transposed convolutions packed, for inference on GPUs.

    Kernels read weights in their own order. Without `freeze` they pack weights at every call; with it, at the first
    call of a size, and again when a weight was changed in place or replaced: PyTorch's version counter and the address
    show that. (They do not show a change through ``.data``: call `freeze` again after one. A CUDA graph replays the
    weights that it has captured: a weight that changes afterwards is not packed again.) Values and gradients do not
    change.

    Call it when the model is on its device in its dtype, after `accelerate`, which swaps the layers.

    Args:
        model: any module.

    Returns:
        A `Frozen`: which layers are kept packed, which not and why, and the memory of packed weights.

    Raises:
        TypeError: ``model`` is no module.

    Warns:
        UserWarning: if the model has no polyphase layer, for example because it was not accelerated.
    """
    _check("polyphase.freeze", model)
    layers, skipped = [], []
    for name, module in model.named_modules():
        if not isinstance(module, LAYERS):
            continue
        reason = _why_not(module)
        if reason:
            skipped.append((name, reason))
        else:
            forget(module.weight)
            keep(module.weight)
            layers.append(name)
    if not layers and not skipped:
        warnings.warn(f"polyphase.freeze: nothing is kept of {model._get_name()}. {_NO_LAYERS}", stacklevel=2)
    return Frozen(model, tuple(layers), tuple(skipped))


def unfreeze(model: Module) -> None:
    """Free the model's packed weights, and keep none from now on. Raises TypeError if ``model`` is no module."""
    _check("polyphase.unfreeze", model)
    for module in model.modules():
        weight = module._parameters.get("weight") if isinstance(module, LAYERS) else None
        if weight is not None:
            forget(weight)


def _check(name: str, model: Module) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"{name} takes a torch.nn.Module, not {type(model).__name__}")


def _why_not(module: Any) -> str:
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is made at every call (a parametrization, or weight norm)"
    if isinstance(weight, UninitializedParameter) or weight.is_meta:
        return "its weight has no values yet"
    if weight.is_inference():
        return "its weight was made in inference mode, where PyTorch counts no versions"
    return ""
