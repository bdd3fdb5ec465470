"""What follows depends on the input's size, so that nothing can be traced."""

import torch
from torch import nn


class Model(nn.Module):
    """What follows depends on the input's size, so that nothing can be traced."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.up(x))
        return x * 2 if x.shape[2] > 4 else x


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 5, 5)]


def get_init_inputs() -> list[object]:
    return [4, 3]
