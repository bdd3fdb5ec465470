"""A number that is learned, a layer norm, a pool and a GELU behind a volume's layer."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """A number that is learned, a layer norm, a pool and a GELU behind a volume's layer."""

    def __init__(self, channels: int, out: int, width: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(channels, out, 3, stride=2, padding=1, output_padding=1)
        self.added = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.LayerNorm(width)
        self.pool = nn.AvgPool3d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.pool(self.norm(self.up(x) + self.added)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 3, 2, 3, 4)]


def get_init_inputs() -> list[object]:
    return [3, 4, 8]
