"""A second input is added to the output, and the sum multiplied by its hard swish."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """A second input is added to the output, and the sum multiplied by its hard swish."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(channels, out, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = self.up(x) + skip
        return x * F.hardswish(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 2, 3, 3), torch.randn(2, 6, 4, 6, 6)]


def get_init_inputs() -> list[object]:
    return [4, 6]
