"""A leaky ReLU, a factor for each channel, a leaky ReLU and a pool behind a volume's layer."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """A leaky ReLU, a factor for each channel, a leaky ReLU and a pool behind a volume's layer."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(channels, out, 3, stride=2, padding=1, output_padding=1)
        self.leaky = nn.LeakyReLU(0.2)
        self.factor = nn.Parameter(torch.randn(out, 1, 1, 1))
        self.pool = nn.MaxPool3d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu(self.up(x), 0.2) * self.factor
        return self.pool(self.leaky(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 2, 3, 2)]


def get_init_inputs() -> list[object]:
    return [3, 4]
