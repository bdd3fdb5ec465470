"""A bias, a clamp, a factor, a clamp and a divisor behind a layer."""

import torch
from torch import nn


class Model(nn.Module):
    """A bias, a clamp, a factor, a clamp and a divisor behind a layer."""

    def __init__(self, channels: int, out: int, scale: float) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 3, stride=2, padding=1, output_padding=1)
        self.bias = nn.Parameter(torch.randn(out, 1, 1))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x) + self.bias
        x = torch.clamp(x, min=0.0, max=1.0)
        x = torch.clamp(x * self.scale, min=0.0, max=1.0)
        return x / self.scale


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 6, 5, 7)]


def get_init_inputs() -> list[object]:
    return [6, 4, 2.0]
