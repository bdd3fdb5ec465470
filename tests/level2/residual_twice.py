"""A bias and sums with the layer's own output, and a product with it."""

import torch
from torch import nn


class Model(nn.Module):
    """A bias and sums with the layer's own output, and a product with it."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(channels, out, 3, stride=2, padding=1)
        self.bias = nn.Parameter(torch.randn(out, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        original = x.clone().detach()
        x = x + self.bias
        x = x + original
        x = x * original
        return x + original


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 4, 3, 2, 3)]


def get_init_inputs() -> list[object]:
    return [4, 5]
