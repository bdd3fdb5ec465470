"""Planes with positions innermost, ``kernels/steps/flatten_positions.cu``: operands of weight gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyphase.jit.source import KernelSource
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Strides, Three, channels_innermost
from polyphase.program.params import params_of
from polyphase.program.step import GRAD, MANY_BLOCKS, Step, X, plain_step

_THREADS = 256
_TILE = 64  # extents of a tile
_ROW_CHANNELS, _FEW_CHANNELS = (64, 32, 16, 8), (32, 16, 8, 4)  # of a block of rows; of pieces, or of several planes
_ENOUGH_BLOCKS = 8 * MANY_BLOCKS  # least blocks for many channels of a block of rows
_RESIDUES_FROM = {1: 4, 2: 6}  # least planes along the width for blocks with several, by elements of four bytes
# Limits of a block with several planes: positions, 16-byte pieces in shared memory, planes.
_MOST_POSITIONS, _MOST_PIECES, _MOST_RESIDUES = 512, 2176, 32
_MOST_CHUNKS = 5  # 16-byte pieces of the source that a thread reads for a piece of positions
_ROWS, _CHANNELS_LAST, _BATCH, _RESIDUES, _PIECES = range(5)  # the kernel's index mappings

#: Buffers of the planes.
X_PLANES, GRAD_PLANES = "x_planes", "grad_planes"


class Flattened(NamedTuple):
    """A tensor as planes ``[plane][part][channel][position]``, with the positions of all images, ``padded``.

    Position ``i`` of plane ``p`` along a dimension is the tensor's element ``i * step + first + p * apart``, or zero
    if there is none. ``shape`` is ``(N, C, D, H, W)``; ``pitch``: elements from a channel to the next. In positions
    images are outermost if ``images`` is 0, else innermost and padded to ``images``. The images of a larger tensor
    begin at its ``first_image``.
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
        """Positions of all images."""
        return (self.images or self.shape[0]) * math.prod(self.padded)

    @property
    def elements(self) -> int:
        """Elements of all planes."""
        return math.prod(self.planes) * self.parts * self.shape[1] * self.pitch


def flatten_positions(dtype: str, word: int, x: Flattened | None, grad: Flattened | None) -> Step:
    """The launch that writes the planes of both operands, or of one, if the other is None.

    ``word``: elements in four bytes.
    """
    sides = [how for how in (x or grad, grad or x) if how is not None]  # a single operand's parameters serve both
    ways = [_way(how, word) for how in sides]
    along_width = [
        (f"{side}_{name}", value if way == _PIECES else 1)
        for side, how, way in zip(("X", "GRAD"), sides, ways)
        for name, value in (("STEP", how.step[2]), ("PLANES", how.planes[2]), ("APART", how.apart[2]))
    ]
    constants = (
        ("THREADS", _THREADS),
        ("PARTS", sides[0].parts),
        ("X_WAY", ways[0]),
        ("GRAD_WAY", ways[1]),
        *along_width,
        ("MIN_BLOCKS", 4 if _RESIDUES in ways else 1),
    )
    source = KernelSource("flatten_positions", dtype, False, constants, folder="steps")
    blocks = [_blocks(how, way, word) for how, way in zip(sides, ways)]
    operands = [_operand(how, along, word) for how, (_, along, _) in zip(sides, blocks)]
    x_blocks, grad_blocks = (math.prod(each) if how else 0 for how, each in zip((x, grad), blocks))
    params = params_of(source).pack(x=operands[0], grad=operands[1], x_blocks=x_blocks)
    return plain_step(source, x_blocks + grad_blocks, _THREADS, params, (X, GRAD, X_PLANES, GRAD_PLANES))


def _way(how: Flattened, word: int) -> int:
    """The kernel's index mapping that reads the tensor coalesced."""
    if how.images:
        return _BATCH
    if channels_innermost(how.shape[1], how.strides):
        return _CHANNELS_LAST
    if _in_pieces(how, word):
        return _PIECES
    return _RESIDUES if how.step[2] > 1 and how.planes[2] >= _RESIDUES_FROM[word] else _ROWS


def _in_pieces(how: Flattened, word: int) -> bool:
    """Whether a few 16-byte pieces of the source hold a piece of positions, which is of one row."""
    piece = 4 * word
    span = (piece - 1) * how.step[2] + 1 + (how.planes[2] - 1) * abs(how.apart[2])
    few = -(-(span + piece - 1) // piece) <= _MOST_CHUNKS
    return word == 2 and how.strides[4] == 1 and how.padded[2] % piece == 0 and few


def _images(how: Flattened) -> int:
    """Images of a block, if images are innermost."""
    return min(_TILE, max(1, how.images))


class _Strip(NamedTuple):
    """A block of several residues: planes along the width, pieces of positions, channels.

    ``row``: elements from a plane to the next in shared memory, so that planes begin in different banks.
    """

    residues: int
    pieces: int
    channels: int
    row: int


def _strip(how: Flattened, word: int) -> _Strip:
    """As many channels as fit shared memory and leave many blocks; if there are too few blocks, fewer positions."""
    planes, piece, run = how.planes[2], 4 * word, 32 * word
    residues = -(-planes // -(-planes // _MOST_RESIDUES))
    pad = -(-8 // residues) if residues > 1 else 0
    most = min(_MOST_POSITIONS, (_MOST_PIECES // (_FEW_CHANNELS[-1] * residues) - pad) * piece // run * run)
    positions = min(most, round_up(max(1, how.positions), run))

    def blocks(channels: int) -> int:
        across = -(-how.shape[1] // channels)
        return across * -(-how.positions // positions) * -(-planes // residues) * math.prod(how.planes[:2])

    for channels in _FEW_CHANNELS:
        fits = channels * residues * (positions // piece + pad) <= _MOST_PIECES and channels < 2 * how.shape[1]
        if fits and blocks(channels) >= MANY_BLOCKS:
            break
    while positions > run and blocks(channels) < MANY_BLOCKS:
        positions = round_up(positions // 2, run)
    return _Strip(residues, positions // piece, channels, positions + pad * piece)


def _rows(how: Flattened, way: int, word: int) -> tuple[int, int, int]:
    """Blocks of rows or of pieces along planes and along positions, and the channels of each.

    These are many if many blocks remain: a position's offset is computed once for all of them. They are few if residues
    of float32 read the same sectors, since blocks of many channels read some of these twice.
    """
    counts: tuple[int, ...]
    planes, elements, counts, enough = math.prod(how.planes), word, _ROW_CHANNELS, _ENOUGH_BLOCKS
    if way == _PIECES:
        planes, elements, counts, enough = math.prod(how.planes[:2]), 4 * word, _FEW_CHANNELS, _ENOUGH_BLOCKS // 2
    elif word == 1 and how.step[2] > 1 and how.planes[2] > 1:
        counts = counts[-1:]
    along = -(-how.positions // (_THREADS * elements))
    fit = (each for each in counts if planes * along * (how.shape[1] // each) >= enough)
    return planes, along, next(fit, counts[-1])


def _blocks(how: Flattened, way: int, word: int) -> tuple[int, int, int]:
    """Blocks along planes, along positions, and along channels."""
    planes, positions, channels = math.prod(how.planes), how.positions, how.shape[1]
    if way == _BATCH:
        images = _images(how)
        along = -(-math.prod(how.padded) // _TILE) * -(-how.images // images)
        return planes, along, -(-channels // (_TILE // images))
    if way == _CHANNELS_LAST:
        return planes, -(-positions // _TILE), -(-channels // _TILE)
    if way in (_ROWS, _PIECES):
        planes, along, each = _rows(how, way, word)
        return planes, along, -(-channels // each)
    strip = _strip(how, word)
    along = -(-positions // (strip.pieces * 4 * word))
    return math.prod(how.planes[:2]) * -(-how.planes[2] // strip.residues), along, -(-channels // strip.channels)


def _operand(how: Flattened, blocks: int, word: int) -> dict[str, Any]:
    """The kernel's ``Operand``."""
    batch, channels, *sizes = how.shape
    image, channel, *strides = how.strides
    strip = _strip(how, word)
    way, extents = _way(how, word), zip(how.strides, (how.first_image + batch, channels, *sizes))

    def ordered(of_images: int, others: Sequence[int]) -> tuple[int, ...]:
        return (*others, of_images) if how.images else (of_images, *others)

    return {
        "stride": ordered(image, strides),
        "channel_stride": channel,
        "pitch": how.pitch,
        "elements": 1 + sum(stride * max(0, size - 1) for stride, size in extents),
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
        "block_channels": _rows(how, way, word)[2] if way in (_ROWS, _PIECES) else strip.channels,
        "row": strip.row,
    }
