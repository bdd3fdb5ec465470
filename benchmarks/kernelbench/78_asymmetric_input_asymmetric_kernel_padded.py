"""An oblong kernel on oblong images of the same size before and after (KernelBench, level 1, problem 78)."""

import torch
from torch import nn


class Model(nn.Module):
    """One transposed convolution: ``(N, 32, H, W)`` to ``(N, 32, H, W)``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose2d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(8, 32, 512, 1024)]


def get_init_inputs() -> list[object]:
    in_channels, out_channels, kernel_size = 32, 32, (3, 7)
    stride, padding = (1, 1), (1, 3)
    return [in_channels, out_channels, kernel_size, stride, padding]
