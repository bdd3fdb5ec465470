"""A Mish, a number, a hard tanh and a factor behind a layer."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """A Mish, a number, a hard tanh and a factor behind a layer."""

    def __init__(self, channels: int, out: int, added: float, scale: float) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 3)
        self.added, self.scale = added, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.mish(self.up(x)) + self.added
        return F.hardtanh(x, min_val=-1, max_val=1) * self.scale


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 7, 5)]


def get_init_inputs() -> list[object]:
    return [4, 6, 0.5, 2.0]
