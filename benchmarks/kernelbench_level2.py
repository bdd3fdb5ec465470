"""KernelBench's 30 problems of level 2 with a transposed convolution: a layer, and what stands around it.

Sizes are KernelBench's at its commit 423217d; each problem is written down here as its layer, the shapes of its inputs
and one expression. `blocks.py` times them as users would fuse them: by ``accelerate(fuse=True)``.

Problem 93 is the one that is written with another function of the same result: KernelBench's ``torch.min(x,
torch.tensor(0.0, device=x.device))`` copies a number to the GPU at every call, which no CUDA graph can capture, and is
not fused. Here it is ``torch.clamp(x, max=0.0)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Part = Callable[[], nn.Module | nn.Parameter]


class Model(nn.Module):
    """A layer as ``up``, further parts by their names, and ``run`` of the model and its input as ``forward``."""

    def __init__(self, up: nn.Module, parts: dict[str, Part], run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up = up
        for name, part in parts.items():
            setattr(self, name, part())
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        """The problem's output."""
        return self.run(self, x)


class ModelOfTwo(Model):
    """One with two inputs."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        """The problem's output."""
        return self.run(self, x, other)


@dataclass(frozen=True)
class Level2:
    """A problem: its layer, its output as an expression of model and inputs, the shapes of those, further parts."""

    up: Callable[[], nn.Module]
    run: Callable[..., Tensor]
    inputs: tuple[tuple[int, ...], ...]
    parts: dict[str, Part] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model with PyTorch's layers."""
        return (Model, ModelOfTwo)[len(self.inputs) - 1](self.up(), self.parts, self.run)


def up(dims: int, *sizes: int, **rest: bool) -> Callable[[], nn.Module]:
    """A layer of PyTorch's: channels in and out, kernel, stride, padding, output padding."""
    return partial((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1], *sizes, **rest)


def numbers(*shape: int) -> Part:
    """A parameter of random numbers."""
    return lambda: nn.Parameter(torch.randn(shape))


def number(value: float) -> Part:
    """A parameter of one number."""
    return lambda: nn.Parameter(torch.tensor(value))


def part(kind: Callable[..., nn.Module], *arguments: float) -> Part:
    """A module."""
    return partial(kind, *arguments)


SPACE2, SPACE3 = (2, 3), (2, 3, 4)
SMALL_VOLUME = (128, 3, 16, 32, 32)
"""The input of six of the problems."""

LEVEL2: dict[int, Level2] = {
    2: Level2(
        up(2, 64, 64, 3, 2, 1, 1),
        lambda m, x: torch.clamp(torch.clamp(m.up(x) + m.bias, 0.0, 1.0) * 2.0, 0.0, 1.0) / 2.0,
        ((128, 64, 128, 128),),
        {"bias": numbers(64, 1, 1)},
    ),
    3: Level2(
        up(3, 32, 64, 3, 2, 1, 1),
        lambda m, x: F.gelu(m.pool(m.norm(m.up(x) + m.added))),
        ((32, 32, 16, 32, 32),),
        {"added": number(1.0), "norm": part(nn.LayerNorm, 64), "pool": part(nn.AvgPool3d, 2)},
    ),
    5: Level2(
        up(2, 64, 64, 4, 2, 1, 1),
        lambda m, x: torch.tanh(m.up(x) - m.bias),
        ((32, 64, 256, 256),),
        {"bias": numbers(64, 1, 1)},
    ),
    10: Level2(
        up(2, 64, 64, 3, 1, 1),
        lambda m, x: torch.tanh(F.hardtanh(m.pool(m.up(x)), -1.0, 1.0).mean(SPACE2, keepdim=True)),
        ((128, 64, 256, 256),),
        {"pool": part(nn.MaxPool2d, 2)},
    ),
    11: Level2(
        up(2, 64, 128, 5, 1, 1),
        lambda m, x: m.group_norm(m.pool(torch.tanh(m.norm(m.up(x))))),
        ((512, 64, 32, 32),),
        {"norm": part(nn.BatchNorm2d, 128), "pool": part(nn.MaxPool2d, 2), "group_norm": part(nn.GroupNorm, 8, 128)},
    ),
    13: Level2(
        up(3, 16, 64, 3, 1, 1),
        lambda m, x: torch.tanh(torch.softmax(m.up(x).mean(2, keepdim=True) + m.bias, 1)) * 2.0,
        ((16, 16, 32, 128, 128),),
        {"bias": numbers(1, 64, 1, 1, 1)},
    ),
    15: Level2(
        up(3, 16, 32, 3, 2, 1),
        lambda m, x: less_mean(m.norm(m.up(x))),
        ((16, 16, 16, 32, 32),),
        {"norm": part(nn.BatchNorm3d, 32)},
    ),
    16: Level2(
        up(2, 64, 64, 3, 2, 1, 1),
        lambda m, x: F.hardtanh(F.mish(m.up(x)) + 0.5, -1.0, 1.0) * 2.0,
        ((128, 64, 128, 128),),
    ),
    19: Level2(
        up(2, 64, 64, 3),
        lambda m, x: m.norm(F.gelu(m.up(x))),
        ((128, 64, 256, 256),),
        {"norm": part(nn.GroupNorm, 8, 64)},
    ),
    20: Level2(
        up(3, 32, 64, 3, 2, 1, 1),
        lambda m, x: residual_twice(m.up(x), m.bias),
        ((16, 32, 16, 32, 32),),
        {"bias": numbers(64, 1, 1, 1)},
    ),
    26: Level2(
        up(3, 32, 64, 3, 2, 1, 1),
        lambda m, x, added: times_hardswish(m.up(x) + added),
        ((128, 32, 16, 16, 16), (128, 64, 32, 32, 32)),
    ),
    34: Level2(
        up(3, 32, 64, 4, 2, 1),
        lambda m, x: F.gelu(m.norm(m.up(x))) * 1.0,
        ((32, 32, 16, 32, 32),),
        {"norm": part(nn.LayerNorm, 64)},
    ),
    36: Level2(
        up(2, 64, 128, 3, 2, 1, 1),
        lambda m, x: F.gelu(torch.min(m.up(x), dim=1, keepdim=True)[0].sum(2, keepdim=True)) + m.bias,
        ((16, 64, 128, 128),),
        {"bias": numbers(1, 1, 1)},
    ),
    38: Level2(
        up(3, 32, 64, 3, 2, 1, 1),
        lambda m, x: softmax_of_space(torch.clamp(m.up(m.pool(x)), 0.0, 1.0)) * m.scale,
        ((32, 32, 32, 64, 64),),
        {"pool": part(nn.AvgPool3d, 2), "scale": numbers(1, 64, 1, 1, 1)},
    ),
    42: Level2(
        up(2, 64, 128, 3),
        lambda m, x: torch.logsumexp(m.up(x).mean(SPACE2, keepdim=True) + m.bias, 1, keepdim=True).sum(SPACE2) * 10.0,
        ((16, 64, 512, 512),),
        {"bias": numbers(128, 1, 1)},
    ),
    44: Level2(
        up(2, 64, 128, 3, 2, 1, 1),
        lambda m, x: (m.up(x) * 0.5).mean(SPACE2, keepdim=True).mean(SPACE2, keepdim=True),
        ((16, 64, 128, 128),),
    ),
    49: Level2(
        up(3, 32, 64, 3, 2, 1, 1),
        lambda m, x: torch.sigmoid(torch.softmax(m.up(x), 1)),
        ((16, 32, 16, 32, 32),),
    ),
    50: Level2(
        up(3, 3, 16, 3, 2, 1),
        lambda m, x: (m.pool(m.up(x) * m.scale) + m.bias) * m.other_scale,
        (SMALL_VOLUME,),
        {"scale": number(0.5), "pool": part(nn.AvgPool3d, 2), "bias": numbers(16, 1, 1, 1), "other_scale": number(1.0)},
    ),
    58: Level2(
        up(3, 3, 16, 3, 2, 1),
        lambda m, x: torch.clamp(smooth_gate(torch.logsumexp(m.up(x), 1, keepdim=True)) - m.bias, -1.0, 1.0),
        (SMALL_VOLUME,),
        {"bias": numbers(1, 1, 1, 1)},
    ),
    60: Level2(
        up(3, 3, 16, 3, 2, 1),
        lambda m, x: F.hardswish(m.norm(times_sigmoid(m.up(x)))),
        (SMALL_VOLUME,),
        {"norm": part(nn.GroupNorm, 4, 16)},
    ),
    61: Level2(
        up(3, 64, 128, 3, bias=False),
        lambda m, x: m.norm(F.relu(m.up(x))),
        ((16, 64, 32, 32, 32),),
        {"norm": part(nn.GroupNorm, 8, 128)},
    ),
    72: Level2(
        up(3, 3, 16, 3, 2, 1),
        lambda m, x: m.second_pool(m.pool(m.norm(m.up(x)))),
        ((64, 3, 32, 32, 32),),
        {"norm": part(nn.BatchNorm3d, 16), "pool": part(nn.AvgPool3d, 2), "second_pool": part(nn.AvgPool3d, 2)},
    ),
    74: Level2(
        up(3, 16, 32, 3, 2, 1, 1),
        lambda m, x: m.pool(m.leaky(m.leaky(m.up(x)) * m.factor)),
        ((16, 16, 16, 32, 32),),
        {"leaky": part(nn.LeakyReLU, 0.2), "factor": numbers(32, 1, 1, 1), "pool": part(nn.MaxPool3d, 2)},
    ),
    77: Level2(
        up(3, 64, 128, 5),
        lambda m, x: F.adaptive_avg_pool3d(m.norm(m.up(x) * 2.0), 1),
        ((16, 64, 16, 32, 32),),
        {"norm": part(nn.BatchNorm3d, 128)},
    ),
    78: Level2(
        up(3, 32, 64, 5, 2, 2),
        lambda m, x: F.max_pool3d(F.max_pool3d(m.up(x), 2), 3).sum(1, keepdim=True),
        ((16, 32, 32, 32, 32),),
    ),
    89: Level2(
        up(3, 3, 16, 3, 2, 1, 1),
        lambda m, x: torch.max(times_sigmoid(torch.softmax(m.pool(m.up(x)), 1) - m.less.view(1, -1, 1, 1, 1)), dim=1)[
            0
        ],
        (SMALL_VOLUME,),
        {"pool": part(nn.MaxPool3d, 2), "less": numbers(16)},
    ),
    91: Level2(
        up(2, 64, 128, 4, 2, 1, 1),
        lambda m, x: torch.sigmoid((torch.softmax(m.up(x), 1) + m.bias) * 2.0),
        ((128, 64, 64, 64),),
        {"bias": numbers(128, 1, 1)},
    ),
    93: Level2(
        up(2, 64, 128, 4, 2),
        lambda m, x: F.gelu(torch.clamp(m.up(x) + 0.5, max=0.0)) * 2.0,
        ((128, 64, 64, 64),),
    ),
    96: Level2(
        up(3, 3, 16, 3, 2, 1),
        lambda m, x: torch.clamp(F.adaptive_avg_pool3d(m.pool(m.up(x) * 0.5), 1), 0.0, 1.0),
        (SMALL_VOLUME,),
        {"pool": part(nn.MaxPool3d, 2)},
    ),
    100: Level2(
        up(3, 64, 128, 3, 2, 1),
        lambda m, x: torch.clamp(m.up(x), min=-1.0) / 2.0,
        ((16, 64, 24, 48, 48),),
    ),
}


def less_mean(y: Tensor) -> Tensor:
    """Without its mean over space."""
    return y - y.mean(SPACE3, keepdim=True)


def residual_twice(y: Tensor, bias: Tensor) -> Tensor:
    """A bias, and three operations with the layer's own output."""
    return ((y + bias) + y) * y + y


def times_hardswish(y: Tensor) -> Tensor:
    """A tensor times its hardswish."""
    return y * F.hardswish(y)


def times_sigmoid(y: Tensor) -> Tensor:
    """Swish, as KernelBench writes it."""
    return torch.sigmoid(y) * y


def smooth_gate(y: Tensor) -> Tensor:
    """What problem 58 has behind its logsumexp."""
    return y * torch.sigmoid(y + 3) / 6


def softmax_of_space(y: Tensor) -> Tensor:
    """A softmax over all places of a channel."""
    return torch.softmax(y.flatten(2), 2).view(y.shape)
