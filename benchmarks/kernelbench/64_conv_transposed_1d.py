"""Stride 1 on long signals (KernelBench, level 1, problem 64)."""

import torch
from torch import nn


class Model(nn.Module):
    """One transposed convolution: ``(N, 128, L)`` to ``(N, 128, L + 2)``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv1d_transpose = nn.ConvTranspose1d(
            in_channels,
            out_channels,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv1d_transpose(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(64, 128, 65536)]


def get_init_inputs() -> list[object]:
    return [128, 128, 3]
