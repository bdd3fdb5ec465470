"""An oblong kernel on square images (KernelBench, level 1, problem 65)."""

import torch
from torch import nn


class Model(nn.Module):
    """One transposed convolution: ``(N, 64, H, W)`` to ``(N, 64, H + 2, W + 6)``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose2d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(8, 64, 512, 512)]


def get_init_inputs() -> list[object]:
    return [64, 64, (3, 7)]
