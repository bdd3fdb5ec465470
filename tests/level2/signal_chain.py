"""Two layers of a signal, each with what is behind it, and a sum of both paths."""

import torch
from torch import nn


class Model(nn.Module):
    """Two layers of a signal, each with what is behind it, and a sum of both paths."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.ConvTranspose1d(channels, 6, 4, stride=2, padding=1), nn.PReLU(), nn.Dropout(0.5))
        self.second = nn.ConvTranspose1d(6, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.relu(self.second(x) + x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 9)]


def get_init_inputs() -> list[object]:
    return [4]
