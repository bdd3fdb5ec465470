"""A square kernel on oblong images (KernelBench, level 1, problem 71)."""

import torch
from torch import nn


class Model(nn.Module):
    """One transposed convolution: ``(N, 32, H, W)`` to ``(N, 32, H + 2, W + 2)``."""

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
    return [torch.rand(8, 32, 512, 1024)]


def get_init_inputs() -> list[object]:
    return [32, 32, 3]
