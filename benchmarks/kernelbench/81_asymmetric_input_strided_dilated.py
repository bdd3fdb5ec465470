"""A large stride and a dilation on oblong images (KernelBench, level 1, problem 81)."""

import torch
from torch import nn


class Model(nn.Module):
    """One transposed convolution: ``(N, 32, H, W)`` to ``(N, 64, H', W')``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels,
            out_channels,
            kernel_size=(kernel_size, kernel_size),
            stride=stride,
            padding=padding,
            dilation=dilation,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose2d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(16, 32, 64, 128)]


def get_init_inputs() -> list[object]:
    in_channels, out_channels, kernel_size = 32, 64, 3
    stride, padding, dilation = 5, 1, 2
    return [in_channels, out_channels, kernel_size, stride, padding, dilation]
