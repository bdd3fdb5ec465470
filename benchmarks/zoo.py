"""What a model of `models.py` is: how it is built, and what it is given.

The models are in `image_models.py`, `sound_models.py` and `library_models.py`. Published sizes are defaults of their
arguments, so that tests can build small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """How a model is built, its large batch, and the shapes of its inputs without the batch.

    ``calls``: it calls PyTorch's transposed convolution as a function too, which `polyphase.override` reaches.
    """

    build: Callable[..., nn.Module]
    batch: int
    inputs: tuple[tuple[int, ...], ...]
    calls: bool = False


class Residual(nn.Module):
    """Layers whose result is added to what they are given, or to a ``shortcut`` of that."""

    def __init__(self, *layers: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.shortcut = nn.Sequential(*layers), shortcut

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, *spatial)."""
        result: Tensor = (x if self.shortcut is None else self.shortcut(x)) + self.block(x)
        return result


def evaluating(build: Callable[[], nn.Module]) -> nn.Module:
    """A module with random weights, and statistics as training leaves them, in evaluation mode."""
    torch.manual_seed(0)
    module = build()
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.register_buffer("running_mean", torch.rand(each.num_features) - 0.5)
            each.register_buffer("running_var", torch.rand(each.num_features) + 0.5)
    return module.eval()


def built(model: Model) -> nn.Module:
    """The model, as `evaluating` makes it."""
    return evaluating(model.build)


def shapes(model: Model, batch: int) -> list[tuple[int, ...]]:
    """The inputs' shapes."""
    return [(batch, *shape) for shape in model.inputs]
