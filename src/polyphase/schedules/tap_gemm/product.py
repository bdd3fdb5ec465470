"""A pass as a product whose operands are gathered by tap groups: the problem of all kernels of the schedule."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce

from polyphase.jit.source import Constant, KernelSource
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import equal_part, round_up
from polyphase.problem.layouts import Layouts, Three, dense_strides, extent
from polyphase.program.planes import Planes
from polyphase.program.step import MANY_BLOCKS, Step, plain_step
from polyphase.program.transpose import Transposed
from polyphase.schedules.cells import Gather, Side
from polyphase.schedules.cost import planes_seconds, transpose_seconds
from polyphase.schedules.tensor_cores import MAX_BOX_STEP, parts_of

_MOST_TERMS = 1 << 21  # terms of a sum, and columns of a group: quotients in float32 are exact below
_MOST_CELLS = 1 << 30
_MOST_PHASES = 1 << 16
_MOST_OUTPUTS = 30  # of a cell along all merged dimensions: they are bits of a word
_PADDED = 1.15  # most source channels after padding to whole chunks, relative to the channels
_PACK_THREADS = 256
_PACK_RUN = 64  # most contiguous elements that a packing block reads together
_PACK_CONSTANTS = (
    "SRC_CHANNELS DST_CHANNELS AXIS_D AXIS_H AXIS_W LAYER_D LAYER_H LAYER_W CHANNELS_INNERMOST INPUT_GRAD CHUNK PARTS "
    "PACKED_STAGES WEIGHT_STRIDE_IN WEIGHT_STRIDE_OUT WEIGHT_STRIDE_TAP"
)
_PACK_ITEMS = (1024, 512, 256)  # 16-byte pieces of a packing block: the most with enough blocks


@dataclass(frozen=True)
class Product:
    """A pass as a product.

    Phases may be `merged`: outputs of a cell are then columns beside the channels, and the axes of ``gather`` have
    stride 1 and as many taps as one phase has at most. The layer's own axes are those of ``problem``.
    """

    problem: ConvTransposeProblem
    gather: Gather

    @cached_property
    def parts(self) -> int:
        """Parts into which an element is split."""
        return parts_of(self.problem)

    @property
    def step(self) -> int:
        """Source elements from a cell to the next, at most."""
        return max(axis.src for axis in self.gather.cell_axes)

    @cached_property
    def merged(self) -> Three:
        """Outputs of a cell that are columns, along depth, height and width."""
        depth, height, width = (of.stride // by.stride for of, by in zip(self.problem.axes3, self.gather.axes))
        return depth, height, width

    @property
    def channels(self) -> int:
        """Destination channels of a group."""
        return self.gather.dst_channels // math.prod(self.merged)

    @property
    def word(self) -> int:
        """Elements in four bytes."""
        return 4 // self.size

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.problem.dtype]

    @property
    def piece(self) -> int:
        """Elements in 16 bytes."""
        return 4 * self.word

    @cached_property
    def axis_taps(self) -> tuple[tuple[int, ...], ...]:
        """Taps of each phase along depth, height and width."""
        axes = self.gather.axes
        if not self.gather.forward:
            return tuple((axis.kernel,) for axis in axes)
        return tuple(tuple(len(axis.taps_by_phase.get(i, ())) for i in range(axis.stride)) for axis in axes)

    @cached_property
    def phase_taps(self) -> tuple[int, ...]:
        """Taps of each phase."""
        depth, height, width = self.axis_taps
        return tuple(d * h * w for d in depth for h in height for w in width)

    @cached_property
    def cells(self) -> Three:
        """Cells of an image along depth, height and width; where phases are merged the first may be cropped."""
        if not self.gather.forward:
            return self.gather.cells
        along = zip(self.gather.dst.shape[2:], self.problem.axes3, self.merged)
        depth, height, width = (-(-(size + axis.padding % count) // axis.stride) for size, axis, count in along)
        return depth, height, width

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants of `Gather.constants`, the layer's own axes, and whether neighbouring columns are channels."""
        gather, layer = self.gather, self.problem.axes3
        constants = dict(replace(gather, axes=layer, dst_channels=self.channels).constants())
        for name, axis, own in zip("DHW", gather.axes, layer):
            constants |= {f"AXIS_{name}": axis, f"LAYER_{name}": own}
        return constants | {"DST_CHANNELS": gather.dst_channels, "CHANNELS_INNERMOST": self.channels_innermost}

    @property
    def channels_innermost(self) -> bool:
        """Whether neighbouring columns are channels, not outputs of a cell; at all sizes of a layer alike."""
        return self.merged == (1, 1, 1) or self.gather.dst.channels_last

    @property
    def all_cells(self) -> int:
        """Cells of all images."""
        return self.problem.batch * math.prod(self.cells)

    def chunk(self, most: int) -> int:
        """Source channels of a tap group: a power of two, at most ``most``."""
        channels = self.gather.src_channels
        found = self.piece
        while found < most and -(-channels // (2 * found)) * 2 * found <= _PADDED * channels:
            found *= 2
        return found


def _folded(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[ConvTransposeProblem, Layouts]:
    """A layer of one output channel as one of several, if its stride is a multiple of them.

    Neighbouring output elements along the width become channels of one element, and so do neighbouring taps: inverse
    Fourier transforms, whose kernel is several times a large stride, become layers of a few taps. Nothing moves in
    memory.
    """
    count = _folded_channels(problem)
    if count == 1 or problem.output_size[-1] % count or layouts.output[4] != 1:
        return problem, layouts

    def divided(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:-1], values[-1] // count)

    batch, _, depth, height, _ = layouts.output
    folded = replace(
        problem,
        out_channels=count,
        kernel_size=divided(problem.kernel_size),
        stride=divided(problem.stride),
        padding=divided(problem.padding),
        output_padding=divided(problem.output_padding),
    )
    return folded, replace(layouts, output=(batch, 1, depth, height, count), weight_channels_last=True)


def _folded_channels(problem: ConvTransposeProblem) -> int:
    """Channels into which the output of a layer of one channel is folded, if its width is a multiple of them."""
    axis = problem.axes3[2]
    if problem.out_channels > 1 or axis.dilation > 1:
        return 1
    return reduce(math.gcd, (axis.kernel, axis.stride, axis.padding))


@lru_cache(maxsize=1024)
def product_of(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, mirrored: bool = False) -> Product:
    """The product of a pass.

    A weight gradient has the source and destination of the input gradient, or ``mirrored`` those of the forward pass.
    """
    if pass_ is Pass.WEIGHT_GRAD:
        pass_ = Pass.FORWARD if mirrored else Pass.INPUT_GRAD
        layouts = replace(layouts, weight_channels_last=False)  # the result is contiguous
    folded, layouts = _folded(problem, layouts)
    return Product(folded, Gather.of(folded, pass_, layouts))


@lru_cache(maxsize=1024)
def with_merged_phases(product: Product, count: int) -> Product | None:
    """A forward product whose phases along the last ``count`` dimensions are columns; None if that changes nothing.

    Cells begin at multiples of the stride in the output before it is cropped. So phase r of cell m is the sum over j of
    source element m - j at tap r + j·stride: all phases read the same elements. Weights of taps that the kernel does
    not have are zero.
    """
    layer = product.problem.axes3
    along = layer[3 - count :]
    if (
        not product.gather.forward
        or layer[3 - count].stride == 1
        or any(axis.dilation > 1 < axis.stride for axis in along)
    ):
        return None
    outputs = [axis.stride for axis in along]
    channels = product.gather.dst_channels * math.prod(outputs)
    if sum(outputs) > _MOST_OUTPUTS or channels >= _MOST_TERMS:
        return None
    depth, height, width = (*layer[: 3 - count], *map(_of_a_phase, along))
    return replace(product, gather=replace(product.gather, axes=(depth, height, width), dst_channels=channels))


def _of_a_phase(axis: Axis) -> Axis:
    """The axis that any phase of another sees."""
    return Axis(-(-axis.kernel // axis.stride), 1, axis.padding // axis.stride) if axis.stride > 1 else axis


def as_read(
    product: Product, side: Side, aligned: bool, multiple: int | None = None, parts: int = 1, written: int | None = None
) -> tuple[Side, Transposed | None]:
    """A tensor as a kernel reads it, and its transpose if it has another layout.

    Its channels are innermost, in ``parts``, and those of a group a ``multiple``, by default of whole pieces; if they
    have to be copied they are ``written``, by default the next multiple.
    """
    groups, multiple = product.problem.groups, multiple or product.piece
    batch, channels, depth, height, width = side.shape
    whole = math.gcd(channels // groups, side.apart(1)) % multiple == 0
    if parts == 1 and aligned and side.channels_last and whole:
        return side, None
    padded = written or round_up(channels // groups, multiple)
    shape = batch, groups * parts * padded, depth, height, width
    return Side(shape, dense_strides(shape, True)), Transposed(side.shape, side.strides, groups, padded, parts)


def seconds_before(product: Product, how: Transposed | Planes | None, device: DeviceInfo) -> float:
    """Predicted seconds of the step that writes a tensor as the kernel reads it, if it is not read in place."""
    if how is None:
        return 0.0
    if isinstance(how, Planes):
        return planes_seconds(how, product.size, device)
    return transpose_seconds((how.elements + math.prod(how.shape)) * product.size, device)


def pack_step(
    product: Product, main: KernelSource, rows: int, depth: int, stages: int, swizzled: bool, counters: int = 0
) -> tuple[Step, int]:
    """The step that packs the weights for a kernel, and their bytes: blocks of ``rows``, stages of ``depth`` elements.

    Before them are ``counters`` bytes of counters.
    """
    constants, padded = dict(main.constants) | product.constants, round_up(product.gather.dst_channels, rows)
    elements = padded * len(product.phase_taps) * product.problem.groups * stages * depth
    names, own = _PACK_CONSTANTS, {"ROWS": rows, "THREADS": _PACK_THREADS, "COUNTER_BYTES": counters}
    if constants.get("JOINED"):  # taps and channels, as runs have them
        kernel, names = "pack_runs", names + " PADDED_CHANNELS INNER_D INNER_H JOINED"
        of_block = -(-rows * stages * depth // product.piece // _PACK_THREADS)
        blocks = elements // (rows * stages * depth) * of_block
        own |= {"BLOCKS_EACH": of_block, "MIN_BLOCKS": 1}
    else:
        kernel, chunk = "pack_tap_groups", constants["CHUNK"]
        assert isinstance(chunk, int)
        chunks = -(-product.gather.src_channels // chunk)
        tile_rows, tile_taps = _pack_tile(product, padded, chunks, chunk)
        tiles = -(-padded // tile_rows) * -(-product.gather.taps // tile_taps)
        blocks = tiles * chunks * product.problem.groups
        own |= {"DEPTH": depth, "SWIZZLED": swizzled, "TILE_ROWS": tile_rows, "TILE_TAPS": tile_taps, "MIN_BLOCKS": 4}
    settings = (*((name, constants[name]) for name in names.split()), *own.items())
    source = KernelSource(kernel, product.problem.dtype, True, settings, folder="steps")
    return plain_step(source, blocks, _PACK_THREADS), counters + elements * product.size * product.parts


def _pack_tile(product: Product, rows: int, chunks: int, chunk: int) -> tuple[int, int]:
    """Rows and taps of a packing block, so that runs of both orders are long and there are many blocks."""
    taps, pieces = product.gather.taps, chunk // product.piece
    all_items = rows * taps * pieces * chunks
    items = next((each for each in _PACK_ITEMS if all_items >= each * MANY_BLOCKS), _PACK_ITEMS[-1])
    pairs = max(1, items // pieces)
    if not product.gather.weight_channels_last:
        tile_taps = equal_part(taps, min(pairs, _PACK_RUN))
        return min(rows, pairs // tile_taps), tile_taps
    tile_rows = 1 if not product.gather.forward else min(rows, pairs, _PACK_RUN)
    tile_taps = min(taps, pairs // tile_rows)
    return min(rows, pairs // tile_taps), tile_taps


@lru_cache(maxsize=4096)
def taps_met(axis: Axis, forward: bool, size: int, cells: int, extent: int) -> tuple[int, int]:
    """Taps that meet any of ``size`` source elements: in all tiles of ``extent`` cells, and in the middle one.

    No tile has more than that one.
    """
    tiles, step = -(-cells // extent), (1 if forward else axis.stride)
    last, found, of_middle = (extent - 1) * step, 0, 0
    offsets = _source_offsets(axis, forward)
    if 0 < tiles < len(offsets):  # for long kernels: tile by tile
        firsts = range(0, tiles * extent * step, extent * step)
        met = [bisect_right(offsets, size - 1 - first) - bisect_left(offsets, -first - last) for first in firsts]
        return sum(met), met[tiles // 2]
    for offset in offsets:
        least = max(0, -((offset + last) // (extent * step)))
        most = min(tiles - 1, (size - 1 - offset) // (extent * step))
        found += max(0, most - least + 1)
        of_middle += least <= tiles // 2 <= most
    return found, of_middle


@lru_cache(maxsize=1024)
def _source_offsets(axis: Axis, forward: bool) -> list[int]:
    """Source elements that cell 0 reads at its taps, in ascending order."""
    return sorted(-axis.shift(tap) if forward else tap * axis.dilation - axis.padding for tap in range(axis.kernel))


def common_limits(problem: ConvTransposeProblem) -> str | None:
    """Why no kernel of the schedule can compute a layer: integers would overflow."""
    terms = max(problem.in_channels_per_group, problem.out_channels_per_group) * problem.taps
    if terms >= _MOST_TERMS:
        return f"{terms} pairs of channel and tap are too many (at most {_MOST_TERMS - 1})"
    cells = problem.batch * max(math.prod(problem.input_size), math.prod(problem.output_size))
    if cells >= _MOST_CELLS:
        return f"{cells} positions are too many (at most {_MOST_CELLS - 1})"
    if math.prod(problem.stride) > _MOST_PHASES:
        return f"{math.prod(problem.stride)} phases are too many (at most {_MOST_PHASES})"
    return None


def pairs_along_width(product: Product) -> bool:
    """Whether merged outputs that are neighbours along the width are in aligned pairs."""
    axis = product.problem.axes3[2]
    return math.gcd(axis.stride, axis.padding) % 2 == 0 and product.gather.dst.in_pairs


def is_dense(side: Side) -> bool:
    """Whether a tensor has no gaps, as partial planes have none."""
    return extent(side.shape, side.strides) == math.prod(side.shape)


def kernels_change(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
    """Whether kernels differ by size: TMA can step over the elements of a folded layer, but not of others."""
    stride, folded = problem.axes3[2].stride, problem.axes3[2].stride // _folded_channels(problem)
    return device.has_wgmma and pass_ is Pass.INPUT_GRAD and folded <= MAX_BOX_STEP < stride
