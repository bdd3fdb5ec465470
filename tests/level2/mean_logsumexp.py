"""The mean of every channel, a bias, and a logarithm of sums of exponentials."""

import torch
from torch import nn


class Model(nn.Module):
    """The mean of every channel, a bias, and a logarithm of sums of exponentials."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 3)
        self.bias = nn.Parameter(torch.randn(out, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.mean(self.up(x), dim=(2, 3), keepdim=True) + self.bias
        x = torch.logsumexp(x, dim=1, keepdim=True)
        return torch.sum(x, dim=(2, 3)) * 10.0


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(3, 4, 5, 6)]


def get_init_inputs() -> list[object]:
    return [4, 8]
