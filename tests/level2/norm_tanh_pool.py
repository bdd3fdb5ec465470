"""A batch norm, a tanh, a pool and a group norm behind a layer."""

import torch
from torch import nn


class Model(nn.Module):
    """A batch norm, a tanh, a pool and a group norm behind a layer."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 4, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(out)
        self.tanh = nn.Tanh()
        self.pool = nn.MaxPool2d(2)
        self.groups = nn.GroupNorm(2, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tanh(self.norm(self.up(x)))
        return self.groups(self.pool(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 5, 6, 4)]


def get_init_inputs() -> list[object]:
    return [5, 4]
