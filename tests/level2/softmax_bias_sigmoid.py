"""A softmax, a bias, a factor and a sigmoid behind a layer."""

import torch
from torch import nn


class Model(nn.Module):
    """A softmax, a bias, a factor and a sigmoid behind a layer."""

    def __init__(self, channels: int, out: int, factor: float) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 4, stride=2, padding=1)
        self.bias = nn.Parameter(torch.randn(out, 1, 1))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.softmax(self.up(x), dim=1) + self.bias
        return torch.sigmoid(x * self.factor)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 6, 4, 5)]


def get_init_inputs() -> list[object]:
    return [6, 4, 2.0]
