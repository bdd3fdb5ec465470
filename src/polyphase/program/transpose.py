"""Layout transposes, ``kernels/steps/transpose.cu``: contiguous to channels_last, and back; copies in float16."""

from __future__ import annotations

import math
from typing import NamedTuple

from polyphase.jit.source import Constant, KernelSource
from polyphase.problem import DTYPE_BYTES
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import SECTOR_BYTES, Strides, Three, channels_innermost, extent, five
from polyphase.program.params import params_of
from polyphase.program.step import Step, plain_step

#: A transpose counts fewer pixels, of all images.
MOST_PIXELS = 2**31

_THREADS = 256
_PIECES = 1536  # 16-byte pieces of a block's tile in shared memory
_LEAST_PIXELS = 64  # least pixels of a tile
_WHOLE_ROWS = 20  # pieces of a pixel up to which a tile has whole rows, if these are not whole pieces
_LEAST_RUN, _LEAST_ROW, _LEAST_ODD_ROW = 32, 32, 256  # least elements, for ROWS, of the source's and the result's rows
_RUN_BITS, _MOST_RUN_BITS = range(5, 8), 8  # log2 of a source row's elements in a tile, with ROWS
_SAMPLE, _SAMPLES, _MOST_STEP = 8, 1 << 16, 512  # elements of a sample; samples of a tensor; most of which one is read
_PARTS_OF_TENSOR = 128
_MOST_TILE_PIXELS = 512
_MANY_TILES = 1 << 11  # of a copy in float16, from which on tiles are larger
_HALVED_RUN, _HALVED_BESIDE = 8, 4  # pixels of a thread of ``halve.cu``, and of most neighbouring threads
_HALVED_PIECES = 16  # pieces of a pixel that neighbouring threads copy at least, or of several pixels
_MOST_UNIT = 16  # pieces of a pixel that are checked together
HALF_COPIES_BYTES = 32 + 2 * 4 * _PARTS_OF_TENSOR  #: of ``HalfCopies`` in kernels/operand/half_copies.cuh
_RUN_ELEMENTS, _LONG_RUN = 1 << 13, 64  # elements of such a tile; of a row beyond which tiles with a halo are narrower


class Transposed(NamedTuple):
    """A tensor ``(N, C, *spatial)`` of any strides, and its copy without gaps whose channels are innermost.

    The channels of each of its ``groups`` are ``padded`` with zeros to that number (0: they are not padded), and split
    into ``parts``: two are TF32 and the remainder, as separate channels, the second part of a group after the first.
    """

    shape: tuple[int, ...]
    strides: Strides
    groups: int = 1
    padded: int = 0
    parts: int = 1

    @property
    def group(self) -> int:
        """Channels of a group, in each of its parts."""
        return self.padded or self.shape[1] // self.groups

    @property
    def channels(self) -> int:
        """Channels of the copy."""
        return self.groups * self.parts * self.group

    @property
    def elements(self) -> int:
        """Elements of the copy."""
        return math.prod(self.shape) // self.shape[1] * self.channels


def transpose_source(dtype: str, sums: bool = False, rows: bool = False) -> KernelSource:
    """The kernel, for all tensors of a dtype, for partial ``sums`` of these, or for tensors of whole ``rows``."""
    return _source(dtype, False, SUMS=sums, ROWS=rows, MIN_BLOCKS=5 if rows else 6)


def _source(dtype: str, scaled: bool, **others: Constant) -> KernelSource:
    constants = {"THREADS": _THREADS, "PARTS": 2, "SCALED": scaled, "PIECES": _PIECES, **others}
    return KernelSource("transpose", dtype, False, tuple(constants.items()), folder="steps")


def transpose_sources(dtype: str) -> tuple[KernelSource, ...]:
    """The kernels for tensors of a dtype with any sizes."""
    ways = (False, True) if DTYPE_BYTES[dtype] == 2 else (False,)
    return tuple(transpose_source(dtype, rows=rows) for rows in ways)


class _Tile(NamedTuple):
    """A block's tile."""

    pieces: int  # of a pixel, with ROWS of a channel
    pixel_bits: int  # logarithm of the pixels
    halo: int  # channels that it shares with its neighbour
    row: int  # channels that it writes

    def blocks(self, channels: int, pixels: int) -> int:
        """Blocks for a result with ``channels`` of ``pixels``."""
        return math.ceil(pixels / (1 << self.pixel_bits)) * math.ceil((channels + max(0, self.halo - 1)) / self.row)


def _tile(channels: int, element: int, larger: bool = False, checked: bool = False) -> _Tile:
    """The tile for elements of ``element`` bytes; tiles of one row have equal widths.

    ``checked``: a tile's channels of a pixel are a unit of a checked copy. Then the last tile has at least half as many
    as others: a few numbers may all be too small.
    """
    vector, widest = 16 // element, 8 if element == 2 else 16
    pieces, halo = math.ceil(channels / vector), 0
    if channels % vector == 0:
        of_row, pieces = pieces, math.ceil(pieces / math.ceil(pieces / widest))
        while checked and 2 * ((of_row - 1) % pieces + 1) < pieces:
            pieces -= 1
    elif pieces > _WHOLE_ROWS:
        pieces, halo = 16 + SECTOR_BYTES // 16, SECTOR_BYTES // element
    pixels = max(_LEAST_PIXELS, _LEAST_PIXELS * widest // pieces)
    if larger and 2 * pixels <= _MOST_TILE_PIXELS and 2 * (pieces | 1) * pixels <= _PIECES:
        pixels *= 2
    row = pieces * vector - halo if halo else min(channels, pieces * vector)
    return _Tile(pieces, pixels.bit_length() - 1, halo, row)


def transpose_blocks(dtype: str, channels: int, pixels: int) -> int:
    """Blocks of a transpose that writes ``channels`` of ``pixels``, those of all images."""
    return _tile(channels, DTYPE_BYTES[dtype]).blocks(channels, pixels)


def to_channels_last(dtype: str, how: Transposed, splits: int = 0) -> Step:
    """The step that writes a copy in the tensor's type.

    ``splits``: number of partial planes of the source, which are added; 0 if it is a tensor of ``dtype``.
    """
    whole = how.groups == 1 or how.group * how.groups == how.shape[1]
    if splits == 0 and how.parts == 1 and whole and _by_rows(dtype, how):
        return _rows_to_channels_last(dtype, how)
    return _by_pixels(transpose_source(dtype, splits > 0), how, splits)


def to_halves(
    how: Transposed,
    which: int = 0,
    by_channels: Three | None = None,
    measures: bool = False,
    grouped: bool = False,
) -> Step:
    """The step that writes a copy in float16 of a float32 tensor.

    It checks the copy by units of numbers (kernels/operand/half_copies.cuh). With ``by_channels`` these are pixels of a
    channel, so far apart along d, h and w; else channels of a pixel. If it is ``grouped``, not all channels of a pixel
    are added up. ``measures``: the source is the input of a forward pass, whose magnitudes are told, too. ``which``: of
    the tensors of `sample_magnitudes`.
    """
    if channels_innermost(how.shape[1], how.strides):
        return _halve(how, which, by_channels, measures, grouped)
    source = _source("float32", True, SUMS=False, MIN_BLOCKS=6, BY_CHANNELS=by_channels is not None, MEASURES=measures)
    return _by_pixels(source, how, which=which, grouped=grouped, apart=by_channels or (1, 1, 1))


def _halve(how: Transposed, which: int, by_channels: Three | None, measures: bool, grouped: bool) -> Step:
    """`to_halves` of a tensor whose channels are innermost."""
    shape, strides, padded = how.shape, how.strides, how.group
    batch, channels, *sizes = five(shape)
    pieces, group = how.groups * padded // 8, channels // how.groups
    apart, steps = by_channels or (1, 1, 1), (strides[0], *strides[2:])
    if apart == (1, 1, 1) and (pitch := _pixel_pitch(shape, strides)) is not None:
        batch, sizes, steps = 1, [1, 1, batch * math.prod(sizes)], (0, 0, 0, pitch)
    # Neighbouring threads have neighbouring pixels, so that they read runs of memory; a thread's are not far apart.
    beside = min(_HALVED_BESIDE, math.ceil(_HALVED_PIECES / (pieces * apart[2])), sizes[2] // apart[2])
    apart = (*apart[:2], apart[2] * max(1, beside))
    constants = {"THREADS": _THREADS, "BY_CHANNELS": by_channels is not None, "MEASURES": measures, "MIN_BLOCKS": 3}
    source = KernelSource("halve", "float32", False, tuple(constants.items()), folder="steps")
    aligned = all(step % 4 == 0 for step in steps) and group == padded
    params = params_of(source).pack(
        stride=steps,
        batch=batch,
        sizes=sizes,
        apart=apart,
        pieces=pieces,
        padded=padded,
        group=group,
        run=_HALVED_RUN,
        unit=1 if grouped else math.gcd(padded // 8, _MOST_UNIT),
        which=which,
        aligned=aligned,
    )
    pixels = batch * math.prod(math.ceil(size / each) for size, each in zip(sizes, apart))  # of the largest class
    threads = max(1, pixels // _HALVED_RUN) * math.prod(apart) * pieces
    return plain_step(source, math.ceil(threads / _THREADS), _THREADS, params)


def has_lone_channels(channels: int) -> bool:
    """Whether a checked copy has units of one channel, if channels are innermost in its source, in one group."""
    return channels % 8 == 1 and math.gcd(math.ceil(channels / 8), _MOST_UNIT) == 1


def _pixel_pitch(shape: tuple[int, ...], strides: Strides) -> int | None:
    """Elements from a pixel to the next, of the next row or image, too; None if these differ."""
    batch, _, *sizes = five(shape)
    pitch, count = None, 1
    for size, stride in zip((*reversed(sizes), batch), (*strides[:1:-1], strides[0])):
        if size > 1:
            pitch = stride if pitch is None else pitch
            if stride != pitch * count:
                return None
            count *= size
    return pitch or 0


def sample_magnitudes(*tensors: tuple[tuple[int, ...], Strides]) -> Step:
    """The step before copies in float16 of one or two float32 tensors ``(N, C, *spatial)``: their shapes and strides.

    Its operands are the tensors and ``HALF_COPIES``.
    """
    constants = (("THREADS", _THREADS), ("TENSORS", len(tensors)), ("MIN_BLOCKS", 1))
    source = KernelSource("sample_magnitudes", "float32", False, constants, folder="steps")
    samples = [_samples(*_channels_as_pixels(shape, strides)) for shape, strides in tensors]
    params = params_of(source).pack(of=[samples[0], samples[-1]])
    return plain_step(source, len(tensors) * _PARTS_OF_TENSOR, _THREADS, params)


def _channels_as_pixels(shape: tuple[int, ...], strides: Strides) -> tuple[tuple[int, ...], Strides]:
    """A tensor whose channels are innermost as one whose pixels are; others unchanged."""
    batch, channels, *sizes = five(shape)
    pitch = _pixel_pitch(shape, strides)
    if channels == 1 or strides[1] != 1 or pitch is None:
        return shape, strides
    return (1, batch * math.prod(sizes), channels), (0, pitch, 0, 0, 1)


def _samples(shape: tuple[int, ...], strides: Strides) -> dict[str, object]:
    batch, channels, *sizes = five(shape)
    pixels = math.prod(sizes)
    samples = -(-pixels // _SAMPLE)
    every = min(batch * channels * samples, 2**31 - 1 - _MOST_STEP)  # the kernel counts no further
    return {
        "stride": strides,
        "all": every,
        "sizes": sizes,
        "channels": channels,
        "samples": samples,
        "pixels": pixels,
        "step": max(1, min(_MOST_STEP, every // _SAMPLES)),
    }


def _by_pixels(
    source: KernelSource,
    how: Transposed,
    splits: int = 0,
    which: int = 0,
    grouped: bool = False,
    apart: Three = (1, 1, 1),
) -> Step:
    """A tile of pixels in each block."""
    batch, channels, *sizes = five(how.shape)
    pixels, written = batch * math.prod(sizes), how.channels
    known = dict(source.constants)
    scaled = bool(known["SCALED"])
    element = 2 if scaled else DTYPE_BYTES[source.dtype]
    checked = scaled and not known["BY_CHANNELS"]
    larger = scaled and _tile(written, element).blocks(written, pixels) >= _MANY_TILES
    tile = _tile(written, element, larger, checked)
    params = params_of(source).pack(
        stride=how.strides,
        channels=written,
        pixels=pixels,
        sizes=sizes,
        padded=how.group,
        group=channels // how.groups,
        parts=how.parts,
        **tile._asdict(),
        advance=_THREADS * max(1, 4 // element) // tile.row,
        planes=max(1, splits),
        plane=math.prod(how.shape),
        which=which,
        grouped=grouped,
        strides=apart,
        residues=math.prod(apart),
    )
    return plain_step(source, tile.blocks(written, pixels), _THREADS, params)


def _by_rows(dtype: str, how: Transposed) -> bool:
    """Whether the kernel's ROWS mapping serves a tensor."""
    run, joins = math.prod(how.shape[2:]), _pixel_pitch((1, *how.shape[1:]), how.strides) == 1
    least = _LEAST_ODD_ROW if how.channels % (16 // DTYPE_BYTES[dtype]) else _LEAST_ROW
    return DTYPE_BYTES[dtype] == 2 and joins and run >= _LEAST_RUN and how.channels >= least


def _rows_to_channels_last(dtype: str, how: Transposed) -> Step:
    """`to_channels_last` by ROWS: a row is an image's pixels of a channel, without gaps."""
    batch, channels, *sizes = five(how.shape)
    run, element, written = math.prod(sizes), DTYPE_BYTES[dtype], how.channels
    vector = 16 // element
    halo = SECTOR_BYTES // element if written % vector else 0
    # A row of the result begins anywhere in a sector. Tiles have few rows of long runs, or many of short ones.
    wanted = round_up(written + max(0, halo - 1), halo or vector)
    bits = next((bits for bits in _RUN_BITS if run <= 1 << bits), _RUN_BITS[-1]) - (run > _LONG_RUN and halo > 0)
    most = _RUN_ELEMENTS >> bits
    row = round_up(-(-wanted // -(-wanted // most)), 4 * vector if wanted > most else vector)
    while 1 << bits < run and bits < _MOST_RUN_BITS and _rows_pieces(bits + 1, row + halo) <= _PIECES:
        bits += 1
    tile, source = _Tile((1 << bits) // vector + 1, bits, halo, row), transpose_source(dtype, rows=True)
    params = params_of(source).pack(
        stride=how.strides,
        channels=written,
        pixels=batch * run,
        sizes=(1, 1, run),
        padded=written,
        group=channels,
        parts=1,
        **tile._asdict(),
        advance=0,
        planes=1,
        plane=extent(how.shape, how.strides),
        which=0,
        grouped=0,
        strides=(1, 1, 1),
        residues=1,
    )
    return plain_step(source, batch * tile.blocks(written, run), _THREADS, params)


def _rows_pieces(bits: int, rows: int) -> int:
    """16-byte pieces of ``rows`` of 16-bit elements in shared memory, with the padding between them."""
    return -(-rows // 8) * (8 * ((1 << bits) // 8 + 1) + 2)


def to_contiguous(dtype: str, shape: tuple[int, ...], splits: int = 0) -> Step:
    """The step from a tensor ``(N, C, *spatial)`` without gaps whose channels are innermost to a contiguous one.

    To the kernel pixels are channels, and channels are pixels. ``splits``: as in `to_channels_last`.
    """
    batch, channels, *sizes = shape
    pixels = math.prod(sizes)
    how = Transposed((batch, pixels, channels), (pixels * channels, channels, 0, 0, 1))
    return to_channels_last(dtype, how, splits)
