"""A softmax over all positions of a channel, and the least values of lines."""

import torch
from torch import nn


class Model(nn.Module):
    """Limits, a softmax over positions, a factor, the least values of lines and a tanh behind a layer."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 3, stride=2, padding=1)
        self.factor = nn.Parameter(torch.randn(1, out, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.clamp(self.up(x), -1.0, 1.5)
        batch, channels, height, width = x.shape
        x = torch.softmax(x.view(batch, channels, -1), dim=2).view(batch, channels, height, width) * self.factor
        least, _ = torch.min(x, dim=2, keepdim=True)
        return torch.tanh(least)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 5, 6)]


def get_init_inputs() -> list[object]:
    return [4, 8]
