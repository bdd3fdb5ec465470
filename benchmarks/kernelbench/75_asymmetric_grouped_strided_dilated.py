"""Strides, paddings and dilations that differ by dimension, in four groups (KernelBench, level 1, problem 75)."""

import torch
from torch import nn


class Model(nn.Module):
    """One transposed convolution: ``(N, 32, H, W)`` to ``(N, 64, H', W')``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
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
            dilation=dilation,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose2d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(16, 32, 128, 256)]


def get_init_inputs() -> list[object]:
    in_channels, out_channels, kernel_size = 32, 64, (3, 5)
    stride, padding, dilation, groups = (2, 3), (1, 2), (2, 1), 4
    return [in_channels, out_channels, kernel_size, stride, padding, dilation, groups]
