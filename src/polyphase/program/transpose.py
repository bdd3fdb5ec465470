"""Layout transposes, ``kernels/steps/transpose.cu``: contiguous to channels_last, and back."""

from __future__ import annotations

import math

from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES
from polyphase.problem.layouts import Strides, five
from polyphase.program.params import params_of
from polyphase.program.step import Step, plain_step

_THREADS = 256
_PIECES = 1536  # of 16 bytes, of a block's tile in shared memory
_LEAST_PIXELS = 64  # of a tile
_WHOLE_ROWS = 20  # pieces of a pixel up to which a tile has all, where rows of the result are not whole pieces
_SECTOR = 32  # bytes that memory writes at once


def transpose_source(dtype: str, sums: bool = False) -> KernelSource:
    """The kernel, for all tensors of a dtype, or for partial ``sums`` of such tensors."""
    return KernelSource(
        "transpose",
        dtype,
        False,
        (
            ("THREADS", _THREADS),
            ("PARTS", 2),
            ("PIECES", _PIECES),
            ("SUMS", sums),
            ("MIN_BLOCKS", 6),
        ),
        folder="steps",
    )


def _tile(channels: int, element: int) -> tuple[int, int, int]:
    """Of a block's tile: pieces of a pixel, logarithm of the pixels, and channels that it shares with its neighbour.

    Tiles of one row have equal widths.
    """
    vector, widest = 16 // element, 8 if element == 2 else 16
    row, halo = math.ceil(channels / vector), 0
    if channels % vector == 0:
        row = math.ceil(row / math.ceil(row / widest))
    elif row > _WHOLE_ROWS:
        row, halo = 16 + _SECTOR // 16, _SECTOR // element
    pixels = max(_LEAST_PIXELS, _LEAST_PIXELS * widest // row)
    return row, pixels.bit_length() - 1, halo


def transpose_blocks(dtype: str, channels: int, pixels: int) -> int:
    """Thread blocks of a transpose that writes so many channels of so many pixels of all images."""
    pieces, pixel_bits, halo = _tile(channels, DTYPE_BYTES[dtype])
    row = min(channels, pieces * 16 // DTYPE_BYTES[dtype]) if halo == 0 else pieces * 16 // DTYPE_BYTES[dtype] - halo
    return math.ceil(pixels / (1 << pixel_bits)) * math.ceil((channels + max(0, halo - 1)) / row)


def to_channels_last(
    dtype: str,
    shape: tuple[int, ...],
    strides: Strides,
    groups: int = 1,
    padded: int | None = None,
    parts: int = 1,
    splits: int = 0,
) -> Step:
    """From a tensor ``(N, C, *spatial)`` of any strides to one without gaps whose channels are innermost.

    ``padded``: channels of each of the ``groups`` in the result, those that do not exist zero; as many as there are by
    default. ``parts``: two are TF32 and what that loses, channels of their own, a group's one behind the other's.
    ``splits``: the source has so many planes of partial sums, which are added up; 0 where it is a tensor of ``dtype``.
    """
    batch, channels, *sizes = five(shape)
    pixels, group = batch * math.prod(sizes), channels // groups
    each = group if padded is None else padded
    written, vector = groups * parts * each, 16 // DTYPE_BYTES[dtype]
    pieces, pixel_bits, halo = _tile(written, DTYPE_BYTES[dtype])
    row = min(written, pieces * vector) if halo == 0 else pieces * vector - halo
    source = transpose_source(dtype, splits > 0)
    params = params_of(source).pack(
        stride=strides,
        channels=written,
        pixels=pixels,
        sizes=sizes,
        padded=each,
        group=group,
        parts=parts,
        pieces=pieces,
        row=row,
        pixel_bits=pixel_bits,
        halo=halo,
        advance=_THREADS * max(1, 4 // DTYPE_BYTES[dtype]) // row,
        planes=max(1, splits),
        plane=math.prod(shape),
    )
    return plain_step(source, transpose_blocks(dtype, written, pixels), _THREADS, params)


def to_contiguous(dtype: str, shape: tuple[int, ...], splits: int = 0) -> Step:
    """From a tensor ``(N, C, *spatial)`` without gaps whose channels are innermost to a contiguous one.

    To the kernel that is a tensor whose pixels are channels, and the other way round. ``splits``: as above.
    """
    batch, channels, *sizes = shape
    pixels = math.prod(sizes)
    return to_channels_last(dtype, (batch, pixels, channels), (pixels * channels, channels, 0, 0, 1), splits=splits)
