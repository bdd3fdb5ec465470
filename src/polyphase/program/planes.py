"""Planes of padded rows, channels innermost, ``kernels/steps/write_planes.cu``: sources of tap_gemm_tma."""

from __future__ import annotations

import math
from typing import NamedTuple

from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES
from polyphase.problem.layouts import Strides, Three
from polyphase.program.params import params_of
from polyphase.program.step import MANY_BLOCKS, SRC, Step, plain_step

_THREADS = 256
_PIECES = 1536  # 16-byte pieces of a block's tile in shared memory
_FEW_CHANNELS = 4  # up to which positions are written directly
_MOST_DIRECT = 2048  # most positions of a tile then
_MOST_PIECES = 16  # most pieces of a position in a tile

#: Buffer of the planes.
SRC_PLANES = "src_planes"

#: Values along depth and height.
Two = tuple[int, int]


class Planes(NamedTuple):
    """A tensor as planes ``[part][group][residue along d, h][image]`` of ``padded`` positions, channels innermost.

    Position ``i`` along a dimension is, in the plane of residue ``r``, the tensor's element
    ``i * step + first + r * apart``, or zero if there is none. ``shape`` is ``(N, C, D, H, W)``. ``residues``: their
    numbers along d and h. ``inner`` residues are channels, not planes: each adds all channels of the tensor's group.
    These channels together are padded to ``channels``.
    """

    shape: tuple[int, int, int, int, int]
    strides: Strides
    groups: int
    channels: int
    parts: int
    padded: Three
    step: Three
    first: Three
    apart: Two
    residues: Two
    inner: Two

    @property
    def of_part(self) -> int:
        """Planes of a part, of all images."""
        return self.groups * math.prod(self.residues) * self.shape[0]

    @property
    def positions(self) -> int:
        """Positions of a part."""
        return self.of_part * math.prod(self.padded)

    @property
    def group(self) -> int:
        """Channels of a group of the tensor."""
        return self.shape[1] // self.groups

    def directly(self, element: int) -> int:
        """Bytes of a position of few channels, which is written without shared memory; 0 for others."""
        position = self.channels * element
        return position if position in (4, 8, 16) and self.channels <= _FEW_CHANNELS else 0

    @property
    def elements(self) -> int:
        """Elements of the result."""
        return self.parts * self.positions * self.channels


def padded_channels(channels: int, unit: int, element: int) -> int:
    """Channels of a position, padded to a multiple of ``unit``, and if they are many, to whole 16-byte pieces."""
    piece = 16 // element
    unit = piece if channels > _MOST_PIECES * piece else max(unit, 4 // element)
    return -(-channels // unit) * unit


def write_planes(dtype: str, how: Planes) -> Step:
    """The step that writes the planes."""
    vector, directly = 16 // DTYPE_BYTES[dtype], how.directly(DTYPE_BYTES[dtype])
    pieces = -(-how.channels // vector)
    if how.channels % vector == 0:
        pieces = -(-pieces // -(-pieces // _MOST_PIECES))
    bits = min(_THREADS, _PIECES // (pieces | 1)).bit_length() - 1
    while directly and 1 << bits < _MOST_DIRECT and how.positions >> bits > 8 * MANY_BLOCKS:
        bits += 1
    row = min(how.channels, pieces * vector)
    across = -(-how.channels // row)
    constants = (
        ("THREADS", _THREADS),
        ("PARTS", how.parts),
        ("PIECES", _PIECES),
        ("MOST_PIECES", _MOST_PIECES),
        ("DIRECTLY", directly),
        ("MIN_BLOCKS", 4 if directly else 6),
    )
    source = KernelSource("write_planes", dtype, False, constants, folder="steps")
    params = params_of(source).pack(
        stride=how.strides,
        size=how.shape[2:],
        step=how.step,
        first=how.first,
        apart=how.apart,
        padded=how.padded,
        images=max(1, how.shape[0]),
        residues=how.residues,
        inner=how.inner,
        group=how.group,
        channels=how.channels,
        positions=how.positions,
        pieces=pieces,
        row=row,
        across=across,
        position_bits=bits,
    )
    blocks = -(-how.positions >> bits) * across
    return plain_step(source, blocks, _THREADS, params, (SRC, SRC_PLANES))
