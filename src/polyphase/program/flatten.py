"""Planes whose positions are innermost, ``kernels/steps/flatten_positions.cu``: operands of weight gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyphase.jit.source import KernelSource
from polyphase.problem.layouts import Strides, channels_innermost
from polyphase.program.params import params_of
from polyphase.program.step import GRAD, Step, X, plain_step

_THREADS = 256
_CHANNELS, _TILE = 8, 64  # of a block: channels, and what a tile has either way
_ROWS, _CHANNELS_LAST, _BATCH = range(3)  # the kernel's three index mappings

#: The planes.
X_PLANES, GRAD_PLANES = "x_planes", "grad_planes"

#: Along depth, height and width.
Three = tuple[int, int, int]


class Flattened(NamedTuple):
    """A tensor as planes ``[plane][part][channel][position]``, positions of images that are ``padded``, all batches'.

    Position ``i`` of plane ``p`` along a dimension is the tensor's element ``i * step + first + p * apart``, or zero
    where there is none. ``shape`` is ``(N, C, D, H, W)``; ``pitch`` are elements from a channel to the next. Positions
    count images last, padded to ``images``, where that is not 0, else first. Those of a larger tensor begin at its
    ``first_image``.
    """

    shape: tuple[int, int, int, int, int]
    strides: Strides
    padded: Three
    step: Three
    first: Three
    apart: Three
    planes: Three
    parts: int
    pitch: int
    images: int = 0
    first_image: int = 0

    @property
    def positions(self) -> int:
        """Of all images."""
        return (self.images or self.shape[0]) * math.prod(self.padded)

    @property
    def elements(self) -> int:
        """Of all planes."""
        return math.prod(self.planes) * self.parts * self.shape[1] * self.pitch


def flatten_positions(dtype: str, word: int, x: Flattened, grad: Flattened) -> Step:
    """The launch that writes the planes of both operands; ``word`` are elements of four bytes."""
    ways = [_way(how) for how in (x, grad)]
    constants = (
        ("THREADS", _THREADS),
        ("PARTS", x.parts),
        ("X_WAY", ways[0]),
        ("GRAD_WAY", ways[1]),
        ("MIN_BLOCKS", 1),
    )
    source = KernelSource("flatten_positions", dtype, False, constants, folder="steps")
    blocks = [_blocks(how, way, word) for how, way in zip((x, grad), ways)]
    operands = [_operand(how, along) for how, (along, _) in zip((x, grad), blocks)]
    x_blocks, grad_blocks = (math.prod(how.planes) * along * across for how, (along, across) in zip((x, grad), blocks))
    params = params_of(source).pack(x=operands[0], grad=operands[1], x_blocks=x_blocks)
    return plain_step(source, x_blocks + grad_blocks, _THREADS, params, (X, GRAD, X_PLANES, GRAD_PLANES))


def _way(how: Flattened) -> int:
    """Which of the kernel's index mappings reads the tensor coalesced."""
    if how.images:
        return _BATCH
    return _CHANNELS_LAST if channels_innermost(how.shape[1], how.strides) else _ROWS


def _images(how: Flattened) -> int:
    """Of a block, where images are innermost."""
    return min(_TILE, max(1, how.images))


def _blocks(how: Flattened, way: int, word: int) -> tuple[int, int]:
    """Of positions, and of channels."""
    if way == _BATCH:
        images = _images(how)
        along = -(-math.prod(how.padded) // _TILE) * -(-how.images // images)
        return along, -(-how.shape[1] // (_TILE // images))
    along, across = (_TILE, _TILE) if way == _CHANNELS_LAST else (_THREADS * word, _CHANNELS)
    return -(-how.positions // along), -(-how.shape[1] // across)


def _operand(how: Flattened, blocks: int) -> dict[str, Any]:
    """The kernel's ``Operand``."""
    batch, channels, *sizes = how.shape
    image, channel, *strides = how.strides

    def ordered(of_images: int, others: Sequence[int]) -> tuple[int, ...]:
        return (*others, of_images) if how.images else (of_images, *others)

    return {
        "stride": ordered(image, strides),
        "channel_stride": channel,
        "pitch": how.pitch,
        "channels": channels,
        "positions": how.positions,
        "extent": ordered(how.images, how.padded)[1:],
        "size": ordered(how.first_image + batch, sizes),
        "step": ordered(1, how.step),
        "first": ordered(how.first_image, how.first),
        "apart": ordered(0, how.apart),
        "planes": ordered(1, how.planes),
        "blocks": blocks,
        "images": _images(how),
    }
