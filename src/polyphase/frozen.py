"""`freeze` a model for inference: its transposed convolutions keep their weights packed as their kernels want them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn import Module
from torch.nn.parameter import UninitializedParameter

from polyphase.kept import forget, keep, kept_of
from polyphase.modules import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

_LAYERS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)


@dataclass(frozen=True, repr=False)
class Frozen:
    """What `freeze` did: ``layers`` are the names of the layers whose weights are kept, ``model`` the model.

    ``skipped`` are the others that are polyphase's, each with a reason.
    """

    model: Module
    layers: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        """What packed weights take on GPUs now: they are packed at a layer's first call at a size."""
        layers: list[Any] = [self.model.get_submodule(name) for name in self.layers]
        kept = (kept_of(layer.weight) for layer in layers)
        return sum(each.bytes for each in kept if each is not None)

    def __repr__(self) -> str:
        lines = [f"polyphase.freeze: {len(self.layers)} layers keep {self.bytes / 1e6:.2f} MB of packed weights"]
        lines += [f"{name}: not kept, {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


def freeze(model: Module) -> Frozen:
    """Keep the weights of the model's transposed convolutions packed, for inference on GPUs.

    Kernels read weights in an order of their own. Without this they are packed at every call; with it at the first
    call of a size, and again when a weight has changed in place or was replaced: PyTorch's version counter and the
    address tell. (What changes a weight through ``.data`` is counted by neither; call `freeze` again then. A CUDA
    graph replays what it has captured: a weight that changes afterwards is not packed again.) Values and gradients
    stay what they are.

    Call it when the model is on its device in its dtype, after `accelerate`, which swaps the layers.

    Args:
        model: any module.

    Returns:
        A `Frozen`: which layers, which not and why, and the memory that packed weights take.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, Module):
        raise TypeError(f"polyphase.freeze takes a torch.nn.Module, not {type(model).__name__}")
    layers, skipped = [], []
    for name, module in model.named_modules():
        if not _is_layer(module):
            continue
        reason = _why_not(module)
        if reason:
            skipped.append((name, reason))
        else:
            forget(module.weight)
            keep(module.weight)
            layers.append(name)
    return Frozen(model, tuple(layers), tuple(skipped))


def unfreeze(model: Module) -> None:
    """Keep nothing of the model's weights, and free what was kept."""
    for module in model.modules():
        weight = module._parameters.get("weight") if _is_layer(module) else None
        if weight is not None:
            forget(weight)


def _is_layer(module: Any) -> bool:
    return isinstance(module, _LAYERS)


def _why_not(module: Any) -> str:
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is made at every call (a parametrization, or weight norm)"
    if isinstance(weight, UninitializedParameter) or weight.is_meta:
        return "its weight has no values yet"
    return (
        "" if not weight.is_inference() else "its weight was made in inference mode, where PyTorch counts no versions"
    )
