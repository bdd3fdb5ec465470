"""Layers as people build them, drawn at random: the same for a seed on every machine and every Python.

Kernels, strides, channels, groups, batches and image sizes are those of models (generators, decoders, vocoders,
super-resolution, segmentation), and such beside them as nobody has tuned for: odd sizes, few channels, uneven kernels.
A layer is kept where its floor on an H200, in float32 as TF32, lies between `LEAST_SECONDS` and `MOST_SECONDS`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from polyphase.bench.layers import NamedLayer
from polyphase.problem import ConvTransposeProblem

Value = TypeVar("Value")

#: Bytes and TF32 operations per second of an H200, as measured.
BYTES_PER_SECOND = 4.27e12
FLOPS_PER_SECOND = 366e12

#: The floors of the layers that are drawn.
LEAST_SECONDS = 10e-6
MOST_SECONDS = 2e-3

_CHANNELS = (32, 64, 64, 96, 128, 128, 192, 256, 256, 320, 384, 512, 512, 768, 1024)
_FEW_CHANNELS = (1, 1, 2, 3, 3, 4, 8, 12, 16, 16, 24)
_ODD_CHANNELS = (5, 7, 18, 21, 29, 37, 49, 50, 75, 80, 100, 150, 257, 513, 1026)
_BATCHES = (1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 64, 128)
_ODD_BATCHES = (3, 5, 6, 10, 12, 25, 50)

# Sides of images, by the number of dimensions.
_SIDES = {
    1: (16, 32, 64, 75, 86, 100, 128, 200, 256, 500, 512, 800, 1024, 1200, 2048, 4000, 4096, 8192, 16384, 32768, 65536),
    2: (1, 4, 7, 8, 14, 16, 24, 28, 32, 32, 48, 56, 64, 64, 96, 112, 128, 128, 160, 224, 256, 256, 512),
    3: (4, 6, 7, 8, 8, 12, 14, 16, 16, 24, 28, 32, 32, 40, 48, 56, 64),
}
# Height, or depth, for the width of images that are not square.
_FORMATS = (0.25, 0.5, 0.5625, 0.75, 0.75, 1.0, 1.34, 2.0)
_MOST_ODD_SIDE = {1: 20000, 2: 300, 3: 49}


def random_layers(
    count: int, seed: int, dims: int | None = None, least_seconds: float = LEAST_SECONDS
) -> list[NamedLayer]:
    """The first ``count`` layers of a seed, float32 and contiguous, of ``dims`` spatial dimensions or of 1 to 3.

    Those whose floor is below ``least_seconds`` are left out. A layer's name is its notation, as ``--layer`` takes it.
    Fewer layers of the same seed are the first of these.
    """
    draw = _Draw(random.Random(seed))
    found: dict[str, NamedLayer] = {}
    while len(found) < count:
        problem = _problem(draw, draw.one_of((1, 2, 2, 3)) if dims is None else dims)
        if problem is not None and floor_seconds(problem) >= least_seconds:
            name = notation(problem)
            found.setdefault(name, NamedLayer(name, problem))
    return list(found.values())


def floor_seconds(problem: ConvTransposeProblem) -> float:
    """The floor of a float32 layer on an H200."""
    return problem.floor_seconds(BYTES_PER_SECOND, FLOPS_PER_SECOND)


def notation(problem: ConvTransposeProblem) -> str:
    """A float32 layer as one writes it on a command line."""
    return str(problem).replace("×", "x").replace("→", "->").replace(f", {problem.dtype}", "")


class _Draw:
    """Choices from the fractions of a generator, which every version of Python draws alike."""

    def __init__(self, generator: random.Random) -> None:
        self._fraction = generator.random

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self._fraction() < probability

    def one_of(self, values: Sequence[Value]) -> Value:
        """One of the values, each as likely as the others."""
        return values[int(self._fraction() * len(values))]

    def between(self, least: int, most: int) -> int:
        """An integer, both ends among them."""
        return least + int(self._fraction() * (most - least + 1))


@dataclass(frozen=True)
class _Axis:
    """A layer along one dimension."""

    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1


def _problem(draw: _Draw, dims: int) -> ConvTransposeProblem | None:
    """One layer, or None where what was drawn is no layer, or one of too little or too much work."""
    axes = _axes(draw, dims)
    groups, in_channels, out_channels = _channels(draw, axes)
    batch = draw.one_of(_ODD_BATCHES) if draw.chance(0.12) else draw.one_of(_BATCHES)
    problem = ConvTransposeProblem(
        batch=batch,
        in_channels=in_channels,
        out_channels=out_channels,
        input_size=_sides(draw, dims),
        kernel_size=tuple(axis.kernel for axis in axes),
        stride=tuple(axis.stride for axis in axes),
        padding=tuple(axis.padding for axis in axes),
        output_padding=tuple(axis.output_padding for axis in axes),
        dilation=tuple(axis.dilation for axis in axes),
        groups=groups,
        bias=draw.chance(0.5),
    )
    if min(problem.output_size) < 1:
        return None
    return problem if LEAST_SECONDS <= floor_seconds(problem) <= MOST_SECONDS else None


def _axes(draw: _Draw, dims: int) -> tuple[_Axis, ...]:
    """Kernel, stride and padding of each dimension; mostly the same along all of them."""
    kind = draw.one_of(_KINDS[dims])
    axis = kind(draw)
    if dims > 1 and draw.chance(0.1 * (dims - 1)):  # uneven: frames or slices that are not enlarged, spectrograms
        first = _Axis(1) if draw.chance(0.5) else kind(draw)
        return (first, *(axis,) * (dims - 1))
    if dims == 2 and draw.chance(0.05):
        return axis, _Axis(1)
    return (axis,) * dims


def _twice_the_stride(draw: _Draw) -> _Axis:
    stride = draw.one_of((2, 2, 2, 2, 4, 4, 8))
    return _Axis(2 * stride, stride, stride // 2)


def _the_stride(draw: _Draw) -> _Axis:
    stride = draw.one_of((2, 2, 2, 2, 3, 4, 8))
    return _Axis(stride, stride)


def _odd_kernel(draw: _Draw) -> _Axis:
    kernel = draw.one_of((3, 3, 3, 3, 5, 5, 7, 9))
    stride = draw.one_of((2, 2, 2, 2, 3, 4))
    padding = draw.one_of((0, kernel // 2, kernel // 2))
    return _Axis(kernel, stride, padding, stride - 1 if draw.chance(0.6) else 0)


def _stride_one(draw: _Draw) -> _Axis:
    kernel = draw.one_of((1, 2, 3, 3, 3, 3, 4, 5, 5, 7))
    return _Axis(kernel, padding=draw.one_of((0, kernel // 2)))


def _dilated(draw: _Draw) -> _Axis:
    kernel, dilation = draw.one_of((2, 3, 3, 5)), draw.one_of((2, 2, 3, 4))
    stride = draw.one_of((1, 1, 2, 3, 5))
    return _Axis(kernel, stride, draw.one_of((0, 1, dilation * (kernel - 1) // 2)), dilation=dilation)


def _any(draw: _Draw) -> _Axis:
    kernel, stride = draw.between(1, 10), draw.between(1, 6)
    output_padding = draw.between(0, stride - 1) if draw.chance(0.4) else 0
    return _Axis(kernel, stride, draw.between(0, kernel // 2), output_padding)


def _long(draw: _Draw) -> _Axis:
    """Inverse Fourier transforms, wavelets, codecs, whole-image upsampling: frames that overlap."""
    kernel = draw.one_of((16, 20, 25, 31, 32, 40, 64, 128, 256, 512, 1024, 2048))
    stride = max(1, kernel // draw.one_of((1, 2, 2, 4, 4)))
    return _Axis(kernel, stride, draw.one_of((0, 0, (kernel - stride) // 2)))


# How often layers of each kind are built, by the number of dimensions.
_COMMON = (
    (_twice_the_stride,) * 4 + (_the_stride,) * 3 + (_odd_kernel,) * 4 + (_stride_one,) * 3 + (_dilated, _any, _any)
)
_KINDS = {1: _COMMON + (_twice_the_stride,) * 2 + (_long,) * 4, 2: _COMMON, 3: _COMMON}


def _channels(draw: _Draw, axes: tuple[_Axis, ...]) -> tuple[int, int, int]:
    """Groups, input channels and output channels."""
    if draw.chance(0.08):  # depthwise
        channels = draw.one_of(_CHANNELS)
        return channels, channels, channels * draw.one_of((1, 1, 1, 2))
    if draw.chance(0.14):
        groups = draw.one_of((2, 2, 4, 4, 8, 16, 32))
        within, beside = (draw.one_of((4, 8, 8, 16, 16, 32, 64, 3, 12, 24)) for _ in range(2))
        return groups, groups * within, groups * (within if draw.chance(0.5) else beside)
    inputs = _some_channels(draw, few=0.1)
    if max(axis.kernel for axis in axes) >= 64:  # a wave, or a few
        return 1, inputs, draw.one_of((1, 1, 1, 2, 8, 16))
    if draw.chance(0.4):
        return 1, inputs, max(1, inputs // 2)
    return (1, inputs, inputs) if draw.chance(0.3) else (1, inputs, _some_channels(draw, few=0.4))


def _some_channels(draw: _Draw, few: float) -> int:
    if draw.chance(few):
        return draw.one_of(_FEW_CHANNELS)
    return draw.one_of(_ODD_CHANNELS) if draw.chance(0.15) else draw.one_of(_CHANNELS)


def _sides(draw: _Draw, dims: int) -> tuple[int, ...]:
    """The image: mostly as high as wide, or of a usual format; a quarter of the sides are arbitrary."""

    def side() -> int:
        if draw.chance(0.25):
            return draw.between(1, _MOST_ODD_SIDE[dims])
        return draw.one_of(_SIDES[dims])

    if draw.chance(0.6):
        return (side(),) * dims
    if draw.chance(0.3):
        return tuple(side() for _ in range(dims))
    last = side()
    return (*(max(1, int(last * draw.one_of(_FORMATS))) for _ in range(dims - 1)), last)
