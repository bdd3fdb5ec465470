"""A dilated kernel on long signals (KernelBench, level 1, problem 74)."""

import torch
from torch import nn


class Model(nn.Module):
    """One transposed convolution: ``(N, 32, L)`` to ``(N, 64, L + 12)``."""

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
        self.conv1d_transpose = nn.ConvTranspose1d(
            in_channels,
            out_channels,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv1d_transpose(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(32, 32, 131072)]


def get_init_inputs() -> list[object]:
    in_channels, out_channels, kernel_size = 32, 64, 5
    stride, padding, dilation = 1, 0, 3
    return [in_channels, out_channels, kernel_size, stride, padding, dilation]
