"""A lower limit and a divisor that is no power of two behind a volume's layer."""

import torch
from torch import nn


class Model(nn.Module):
    """A lower limit and a divisor that is no power of two behind a volume's layer."""

    def __init__(self, channels: int, out: int, least: float, divisor: float) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(channels, out, 3, stride=2, padding=1)
        self.least, self.divisor = least, divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(self.up(x), min=self.least) / self.divisor


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 3, 3, 3)]


def get_init_inputs() -> list[object]:
    return [4, 6, -0.1, 3.0]
