"""Planes whose positions are innermost, ``kernels/steps/flatten_positions.cu``: operands of weight gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyphase.jit.source import KernelSource
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Strides, channels_innermost
from polyphase.program.params import params_of
from polyphase.program.step import GRAD, MANY_BLOCKS, Step, X, plain_step

_THREADS = 256
_CHANNELS, _TILE = 8, 64  # channels of a thread that are in flight, and what a tile has either way
_ROUNDS, _ENOUGH_BLOCKS = (8, 4, 2), 8 * MANY_BLOCKS  # times so many of a block of rows, and blocks that are left then
_RESIDUES_FROM = {1: 4, 2: 6}  # planes along the width from which a block has several, by elements of four bytes
# Of such a block: positions, 16 bytes in shared memory, planes, channels; and blocks wanted.
_MOST_POSITIONS, _MOST_PIECES, _MOST_RESIDUES, _STRIP_CHANNELS = 512, 2176, 32, (32, 16, 8, 4)
_ROWS, _CHANNELS_LAST, _BATCH, _RESIDUES = range(4)  # the kernel's index mappings

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


def flatten_positions(dtype: str, word: int, x: Flattened | None, grad: Flattened | None) -> Step:
    """The launch that writes the planes of both operands, or of the one that is not None; there the others are empty.

    ``word`` are elements of four bytes.
    """
    sides = [how for how in (x or grad, grad or x) if how is not None]  # of one, its parameters stand for both
    ways = [_way(how, word) for how in sides]
    constants = (
        ("THREADS", _THREADS),
        ("PARTS", sides[0].parts),
        ("X_WAY", ways[0]),
        ("GRAD_WAY", ways[1]),
        ("MIN_BLOCKS", 4 if _RESIDUES in ways else 1),
    )
    source = KernelSource("flatten_positions", dtype, False, constants, folder="steps")
    blocks = [_blocks(how, way, word) for how, way in zip(sides, ways)]
    operands = [_operand(how, along, word) for how, (_, along, _) in zip(sides, blocks)]
    x_blocks, grad_blocks = (math.prod(each) if how else 0 for how, each in zip((x, grad), blocks))
    params = params_of(source).pack(x=operands[0], grad=operands[1], x_blocks=x_blocks)
    return plain_step(source, x_blocks + grad_blocks, _THREADS, params, (X, GRAD, X_PLANES, GRAD_PLANES))


def _way(how: Flattened, word: int) -> int:
    """Which of the kernel's index mappings reads the tensor coalesced."""
    if how.images:
        return _BATCH
    if channels_innermost(how.shape[1], how.strides):
        return _CHANNELS_LAST
    return _RESIDUES if how.step[2] > 1 and how.planes[2] >= _RESIDUES_FROM[word] else _ROWS


def _images(how: Flattened) -> int:
    """Of a block, where images are innermost."""
    return min(_TILE, max(1, how.images))


class _Strip(NamedTuple):
    """A block of many residues: planes along the width, pieces of positions, channels.

    ``row``: elements from a plane to the next in shared memory, so that those lie in different banks.
    """

    residues: int
    pieces: int
    channels: int
    row: int


def _strip(how: Flattened, word: int) -> _Strip:
    """As many channels as shared memory takes, and blocks are many; then fewer positions."""
    planes, piece, run = how.planes[2], 4 * word, 32 * word
    residues = -(-planes // -(-planes // _MOST_RESIDUES))
    pad = -(-8 // residues) if residues > 1 else 0
    most = min(_MOST_POSITIONS, (_MOST_PIECES // (_STRIP_CHANNELS[-1] * residues) - pad) * piece // run * run)
    positions = min(most, round_up(max(1, how.positions), run))

    def blocks(channels: int) -> int:
        across = -(-how.shape[1] // channels)
        return across * -(-how.positions // positions) * -(-planes // residues) * math.prod(how.planes[:2])

    for channels in _STRIP_CHANNELS:
        fits = channels * residues * (positions // piece + pad) <= _MOST_PIECES and channels < 2 * how.shape[1]
        if fits and blocks(channels) >= MANY_BLOCKS:
            break
    while positions > run and blocks(channels) < MANY_BLOCKS:
        positions = round_up(positions // 2, run)
    return _Strip(residues, positions // piece, channels, positions + pad * piece)


def _row_channels(how: Flattened, word: int) -> int:
    """Of a block of rows, where blocks stay many: where each position lies is worked out once for all of them.

    Few where residues of float32 read the same sectors, of which blocks of many channels read some twice.
    """
    if word == 1 and how.step[2] > 1 and how.planes[2] > 1:
        return _CHANNELS
    along = math.prod(how.planes) * -(-how.positions // (_THREADS * word))
    rounds = (each for each in _ROUNDS if along * (how.shape[1] // (each * _CHANNELS)) >= _ENOUGH_BLOCKS)
    return next(rounds, 1) * _CHANNELS


def _blocks(how: Flattened, way: int, word: int) -> tuple[int, int, int]:
    """Of planes, of positions, and of channels."""
    planes, positions, channels = math.prod(how.planes), how.positions, how.shape[1]
    if way == _BATCH:
        images = _images(how)
        along = -(-math.prod(how.padded) // _TILE) * -(-how.images // images)
        return planes, along, -(-channels // (_TILE // images))
    if way == _CHANNELS_LAST:
        return planes, -(-positions // _TILE), -(-channels // _TILE)
    if way == _ROWS:
        return planes, -(-positions // (_THREADS * word)), -(-channels // _row_channels(how, word))
    strip = _strip(how, word)
    along = -(-positions // (strip.pieces * 4 * word))
    return math.prod(how.planes[:2]) * -(-how.planes[2] // strip.residues), along, -(-channels // strip.channels)


def _operand(how: Flattened, blocks: int, word: int) -> dict[str, Any]:
    """The kernel's ``Operand``."""
    batch, channels, *sizes = how.shape
    image, channel, *strides = how.strides
    strip = _strip(how, word)
    in_rows = _way(how, word) == _ROWS

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
        "residues": strip.residues,
        "pieces": strip.pieces,
        "block_channels": _row_channels(how, word) if in_rows else strip.channels,
        "row": strip.row,
    }
