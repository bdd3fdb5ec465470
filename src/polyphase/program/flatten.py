"""Planes whose positions are innermost, ``kernels/steps/flatten_positions.cu``: operands of weight gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

from polyphase.jit.source import KernelSource
from polyphase.problem.layouts import Strides, channels_innermost
from polyphase.program.params import params_of
from polyphase.program.step import GRAD, Step, X, plain_step

_THREADS = 256
_CHANNELS, _TILE = 8, 64  # of a block: channels, or where these are innermost channels and positions

#: The planes.
X_PLANES, GRAD_PLANES = "x_planes", "grad_planes"

#: Along depth, height and width.
Three = tuple[int, int, int]


class Flattened(NamedTuple):
    """A tensor as planes ``[plane][part][channel][position]``, positions of images that are ``padded``, all batches'.

    Position ``i`` of plane ``p`` along a dimension is the tensor's element ``i * step + first + p * apart``, or zero
    where there is none. ``shape`` is ``(N, C, D, H, W)``; ``pitch`` are elements from a channel to the next.
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

    @property
    def positions(self) -> int:
        """Of all images."""
        return self.shape[0] * math.prod(self.padded)

    @property
    def elements(self) -> int:
        """Of all planes."""
        return math.prod(self.planes) * self.parts * self.shape[1] * self.pitch


def flatten_positions(dtype: str, word: int, x: Flattened, grad: Flattened) -> Step:
    """The launch that writes the planes of both operands; ``word`` are elements of four bytes."""
    last = [channels_innermost(how.shape[1], how.strides) for how in (x, grad)]
    constants = (
        ("THREADS", _THREADS),
        ("PARTS", x.parts),
        ("X_CHANNELS_LAST", last[0]),
        ("GRAD_CHANNELS_LAST", last[1]),
        ("MIN_BLOCKS", 1),
    )
    source = KernelSource("flatten_positions", dtype, False, constants, folder="steps")
    operands, blocks = [], []
    for how, innermost in zip((x, grad), last):
        along, across = (_TILE, _TILE) if innermost else (_THREADS * word, _CHANNELS)
        of_positions = -(-how.positions // along)
        blocks.append(math.prod(how.planes) * of_positions * -(-how.shape[1] // across))
        operands.append(
            {
                "stride": how.strides,
                "channels": how.shape[1],
                "positions": how.positions,
                "padded": how.padded,
                "size": how.shape[2:],
                "step": how.step,
                "first": how.first,
                "apart": how.apart,
                "planes": how.planes,
                "blocks": of_positions,
                "pitch": how.pitch,
            }
        )
    params = params_of(source).pack(x=operands[0], grad=operands[1], x_blocks=blocks[0])
    return plain_step(source, sum(blocks), _THREADS, params, (X, GRAD, X_PLANES, GRAD_PLANES))
