"""A ReLU in place and a group norm behind a layer without a bias."""

import torch
from torch import nn


class Model(nn.Module):
    """A ReLU in place and a group norm behind a layer without a bias."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 3, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.norm = nn.GroupNorm(2, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.relu(self.up(x)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 6, 6)]


def get_init_inputs() -> list[object]:
    return [4, 8]
