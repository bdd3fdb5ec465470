"""Vocoders and decoders of codecs, from their published configurations, with random weights, without weight norms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import Model, Residual


class HiFiGAN(nn.Module):
    """The generator of HiFi-GAN, V1: (N, 80, frames) to (N, 1, 256·frames)."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 7, 1, 3)
        rates = ((8, 16), (8, 16), (2, 4), (2, 4))
        sizes = [width >> i for i in range(5)]
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(a, b, k, s, (k - s) // 2) for a, b, (s, k) in zip(sizes, sizes[1:], rates)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.ModuleList(nn.Conv1d(size, size, k, 1, d * (k - 1) // 2, d) for step in (1, 3, 5) for d in (step, 1))
                for k in (3, 7, 11)
            )
            for size in sizes[1:]
        )
        self.last = nn.Conv1d(sizes[-1], 1, 7, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The waveform."""
        x = self.first(x)
        for up, blocks in zip(self.up, self.blocks):
            x = up(F.leaky_relu(x, 0.1))
            results = []
            modules: Any = blocks
            for block in modules:
                y = x
                for one, other in zip(block[::2], block[1::2]):
                    y = y + other(F.leaky_relu(one(F.leaky_relu(y, 0.1)), 0.1))
                results.append(y)
            x = sum(results[1:], results[0]) / len(results)
        return torch.tanh(self.last(F.leaky_relu(x)))


class Snake(nn.Module):
    """x + sin²(αx) / α, α for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, L)."""
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class SnakeBeta(nn.Module):
    """x + sin²(eᵅx) / eᵝ, α and β for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, L)."""
        alpha, beta = (each.unsqueeze(0).unsqueeze(-1).exp() for each in (self.alpha, self.beta))
        return x + (1.0 / (beta + 1e-9)) * torch.pow(torch.sin(x * alpha), 2)


class CausalConv(nn.Module):
    """A convolution of what was before, and of padding there."""

    def __init__(self, a: int, b: int, k: int, dilation: int = 1, groups: int = 1, mode: str = "constant") -> None:
        super().__init__()
        self.conv = nn.Conv1d(a, b, k, 1, 0, dilation, groups)
        self.padding, self.mode = (k - 1) * dilation, mode

    def forward(self, x: Tensor) -> Tensor:
        """(N, a, L) to (N, b, L)."""
        result: Tensor = self.conv(F.pad(x, (self.padding, 0), mode=self.mode))
        return result


class CroppedUp(nn.Module):
    """A transposed convolution whose result is cropped: k - s at the right, which makes it causal, or at both ends."""

    def __init__(self, a: int, b: int, k: int, s: int, groups: int = 1, bias: bool = True, both: bool = False) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(a, b, k, s, groups=groups, bias=bias)
        self.left, self.right = (k - s) * both, k - s

    def forward(self, x: Tensor) -> Tensor:
        """(N, a, L) to (N, b, s·L), or less where both ends are cropped."""
        y = self.up(x)
        return y[..., self.left : y.shape[-1] - self.right].contiguous()


def dac(width: int = 1536, given: int = 1024) -> nn.Module:
    """The decoder of DAC at 44 kHz: (N, 1024, frames) to (N, 1, 512·frames)."""
    layers: list[nn.Module] = [nn.Conv1d(given, width, 7, 1, 3)]
    for place, s in enumerate((8, 8, 4, 2)):
        a, b = width >> place, width >> (place + 1)
        layers += [Snake(a), nn.ConvTranspose1d(a, b, 2 * s, s, s // 2)]
        layers += [Residual(Snake(b), nn.Conv1d(b, b, 7, 1, 3 * d, d), Snake(b), nn.Conv1d(b, b, 1)) for d in (1, 3, 9)]
    return nn.Sequential(*layers, Snake(width >> 4), nn.Conv1d(width >> 4, 1, 7, 1, 3), nn.Tanh())


def seanet(given: int, width: int, ratios: Sequence[int], last: int, mode: str, shortcuts: bool) -> list[nn.Module]:
    """SEANet's decoder: an ELU and a layer, cropped at the right, for each ratio, and a residual block."""
    conv, channels = partial(CausalConv, mode=mode), width << len(ratios)
    layers: list[nn.Module] = [conv(given, channels, 7)]
    for s in ratios:
        layers += [nn.ELU(), CroppedUp(channels, channels // 2, 2 * s, s)]
        channels //= 2
        block = (nn.ELU(), conv(channels, channels // 2, 3), nn.ELU(), conv(channels // 2, channels, 1))
        layers += [Residual(*block, shortcut=conv(channels, channels, 1) if shortcuts else None)]
    return [*layers, nn.ELU(), conv(channels, 1, last)]


def encodec(width: int = 32, given: int = 128) -> nn.Module:
    """The decoder of EnCodec at 24 kHz: (N, 128, frames) to (N, 1, 320·frames).

    Without its LSTM, which `torch.compile` takes into no graph.
    """
    return nn.Sequential(*seanet(given, width, (8, 5, 4, 2), 7, "reflect", True))


class Layer(nn.Module):
    """A layer of a transformer: causal attention within a window, rotary positions, scales of what is added.

    ``gated``: of Qwen's, with root mean square norms and a SwiGLU; else of Mimi's, with layer norms and a GELU.
    """

    def __init__(self, width: int, heads: int, hidden: int, gated: bool) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = partial(nn.RMSNorm, eps=1e-5) if gated else nn.LayerNorm
        self.norms = nn.ModuleList((norm(width), norm(width)))
        self.scales = nn.Parameter(torch.full((2, width), 0.01))
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, (1 + gated) * hidden, bias=False)
        self.narrow = nn.Linear(hidden, width, bias=False)
        self.heads, self.gated = heads, gated

    def forward(self, x: Tensor, turn: Callable[[Tensor], Tensor], mask: Tensor) -> Tensor:
        """(N, L, C); ``turn`` rotates queries and keys."""
        queries, keys, values = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(turn(queries), turn(keys), values, mask)
        x = x + self.scales[0] * self.out(found.transpose(1, 2).flatten(2))
        wide = self.wide(self.norms[1](x))
        if self.gated:
            gate, wide = wide.chunk(2, -1)
            wide = F.silu(gate) * wide
        result: Tensor = x + self.scales[1] * self.narrow(wide if self.gated else F.gelu(wide))
        return result


class Transformer(nn.Module):
    """Layers over a sequence of frames."""

    def __init__(self, count: int, width: int, heads: int, hidden: int, window: int, gated: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, hidden, gated) for _ in range(count))
        self.window, self.size = window, width // heads

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, L)."""
        x = x.transpose(1, 2)
        places = torch.arange(x.shape[1], device=x.device)
        apart = places[:, None] - places
        frequencies = 1e4 ** (-torch.arange(0, self.size, 2, device=x.device) / self.size)
        angles = (places[:, None] * frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def turn(y: Tensor) -> Tensor:
            one, other = y.chunk(2, -1)
            return y * cos + torch.cat([-other, one], -1) * sin

        for layer in self.layers:
            x = layer(x, turn, (apart >= 0) & (apart < self.window))
        return x.transpose(1, 2)


def mimi(width: int = 64, given: int = 512, layers: int = 8) -> nn.Module:
    """The decoder of Mimi: (N, 512, frames) to (N, 1, 1920·frames)."""
    up = CroppedUp(given, given, 4, 2, groups=given, bias=False)
    transformer = Transformer(layers, given, 8, 4 * given, 250, False)
    return nn.Sequential(up, transformer, *seanet(given, width, (8, 6, 5, 4), 3, "constant", False))


class ConvNeXt(nn.Module):
    """A block of ConvNeXt over frames."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, 1e-6)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, L)."""
        y = self.narrow(F.gelu(self.wide(self.norm(self.conv(x).transpose(1, 2)))))
        return x + (self.gamma * y).transpose(1, 2)


class Code2Wav(nn.Module):
    """What makes sound of the embeddings of Qwen3-Omni's codes: (N, 1024, frames) to (N, 1, about 1920·frames)."""

    def __init__(self, width: int = 1536, given: int = 1024, layers: int = 8) -> None:
        super().__init__()
        self.transformer = Transformer(layers, given, 16, 3 * given, 72, True)
        self.norm = nn.RMSNorm(given, 1e-5)
        self.first = nn.Sequential(
            *(each for _ in range(2) for each in (CroppedUp(given, given, 2, 2), ConvNeXt(given))),
            CausalConv(given, width, 7),
        )
        blocks: list[nn.Module] = []
        for place, s in enumerate((8, 5, 4, 3)):
            a, b = width >> place, width >> (place + 1)
            blocks += [SnakeBeta(a), CroppedUp(a, b, 2 * s, s, both=True)]
            blocks += [Residual(SnakeBeta(b), CausalConv(b, b, 7, d), SnakeBeta(b), CausalConv(b, b, 1))
                       for d in (1, 3, 9)]  # fmt: skip
        self.blocks = nn.Sequential(*blocks, SnakeBeta(width >> 4), CausalConv(width >> 4, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        """The waveform."""
        x = self.norm(self.transformer(x).transpose(1, 2)).transpose(1, 2)
        return torch.clamp(self.blocks(self.first(x)), -1, 1)


class AntiAliased(nn.Module):
    """A snake at twice the rate, between filters that are called as functions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.snake = SnakeBeta(channels)
        times = (torch.arange(12) - 5.5) / 2
        window = torch.kaiser_window(12, False, 4.664)
        taps = window * torch.sinc(times)
        self.register_buffer("taps", (taps / taps.sum())[None, None])

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, L)."""
        channels = x.shape[1]
        taps = self.taps.expand(channels, -1, -1)
        x = 2 * F.conv_transpose1d(F.pad(x, (5, 5), mode="replicate"), taps, stride=2, groups=channels)
        x = self.snake(x[..., 15:-15])
        return F.conv1d(F.pad(x, (5, 6), mode="replicate"), taps, stride=2, groups=channels)


class AliasFreeBlock(nn.Module):
    """A residual block of BigVGAN's."""

    def __init__(self, channels: int, k: int) -> None:
        super().__init__()
        dilations = (1, 1, 3, 1, 5, 1)
        self.convs = nn.ModuleList(nn.Conv1d(channels, channels, k, 1, d * (k - 1) // 2, d) for d in dilations)
        self.activations = nn.ModuleList(AntiAliased(channels) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, L)."""
        pairs = list(zip(self.convs, self.activations))
        for (one, before), (other, between) in zip(pairs[::2], pairs[1::2]):
            x = other(between(one(before(x)))) + x
        return x


class BigVGAN(nn.Module):
    """BigVGAN v2 of 24 kHz, 100 bands and 256 times: (N, 100, frames) to (N, 1, 256·frames)."""

    def __init__(self, width: int = 1536, ratios: tuple[int, ...] = (4, 4, 2, 2, 2, 2)) -> None:
        super().__init__()
        self.first = nn.Conv1d(100, width, 7, 1, 3)
        sizes = [width >> place for place in range(len(ratios) + 1)]
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(a, b, 2 * s, s, s // 2) for (a, b), s in zip(itertools.pairwise(sizes), ratios)
        )
        self.blocks = nn.ModuleList(nn.ModuleList(AliasFreeBlock(size, k) for k in (3, 7, 11)) for size in sizes[1:])
        self.activation, self.last = AntiAliased(sizes[-1]), nn.Conv1d(sizes[-1], 1, 7, 1, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The waveform."""
        x = self.first(x)
        for up, blocks in zip(self.up, self.blocks):
            x = up(x)
            modules: Any = blocks
            results = [block(x) for block in modules]
            x = sum(results[1:], results[0]) / len(results)
        return torch.clamp(self.last(self.activation(x)), -1.0, 1.0)


SOUND_MODELS: dict[str, Model] = {
    "HiFi-GAN": Model(HiFiGAN, 8, ((80, 128),)),
    "DAC decoder": Model(dac, 4, ((1024, 64),)),
    "EnCodec decoder": Model(encodec, 8, ((128, 150),)),
    "Mimi decoder": Model(mimi, 8, ((512, 25),)),
    "Qwen code2wav": Model(Code2Wav, 4, ((1024, 25),)),
    "BigVGAN": Model(BigVGAN, 4, ((100, 64),), calls=True),
}
