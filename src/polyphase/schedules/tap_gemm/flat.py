"""A weight gradient as a product over contiguous positions: the problem of ``tap_gemm_wgrad_tma``.

Along each dimension a tap is ``residue + j * step``: every ``step``-th tap meets elements of the same residue of the
stride, ``shift`` positions further. One operand, the *base*, is the layer's input; the other one, *phased*, is the
gradient of its output, with a plane for each residue. With stride 1 they may be swapped, and taps count backwards.
Rows of images are padded so that a shift is a distance in memory. If taps along the width are *spread*, each has its
own plane of the phased operand, and the base is not shifted along it: it is read in place if its rows are in that
order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, Three, channels_innermost
from polyphase.program.flatten import Flattened
from polyphase.schedules.cells import Side
from polyphase.schedules.tap_gemm.product import Product, product_of

#: Bytes of a row of a stage.
PITCH = 128

_PADDED = 1.15  # most images after padding to whole pieces, relative to the images
_WHOLE_LINES = 1.125  # most elements of rows after padding to whole cache lines, relative to the elements


@dataclass(frozen=True)
class FlatAxis:
    """One dimension: ``residues`` have at most ``taps`` taps, each ``shift`` positions after the previous one."""

    step: int
    shift: int
    residues: int
    taps: int

    @classmethod
    def of(cls, axis: Axis) -> FlatAxis:
        """The values of one of the layer's dimensions."""
        step = axis.tap_step
        return cls(step, axis.element_step, min(axis.kernel, step), -(-axis.kernel // step))

    @property
    def reach(self) -> int:
        """Positions from a residue's first tap to its last."""
        return self.shift * (self.taps - 1)


@dataclass(frozen=True)
class FlatProduct:
    """Both operands as planes, and the taps' shifts in them."""

    product: Product
    swapped: bool
    batched: bool  # images are the innermost dimension of positions
    spread: bool  # every tap along the width has its own plane of the phased operand
    in_place: bool  # the base is read without a copy, image by image

    def of_images(self, count: int) -> FlatProduct:
        """The product of the first ``count`` images alone."""
        product, gather = self.product, self.product.gather
        src, dst = (replace(side, shape=(count, *side.shape[1:])) for side in (gather.src, gather.dst))
        problem = replace(product.problem, batch=count)
        return replace(self, product=replace(product, problem=problem, gather=replace(gather, src=src, dst=dst)))

    @cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """The dimensions of the product: with swapped operands, taps count backwards."""
        depth, height, width = (
            Axis(each.kernel, 1, (each.kernel - 1) * each.dilation - each.padding, each.dilation)
            if self.swapped
            else each
            for each in self.product.problem.axes3
        )
        return depth, height, width

    @cached_property
    def along(self) -> tuple[FlatAxis, FlatAxis, FlatAxis]:
        """Depth, height and width."""
        depth, height, width = map(FlatAxis.of, self.axes)
        taps = self.axes[2].kernel
        return depth, height, FlatAxis(taps, 0, taps, 1) if self.spread else width

    @property
    def depth(self) -> int:
        """Positions of a stage."""
        return PITCH // self.product.size

    @property
    def stages(self) -> int:
        """Stages of all positions."""
        return self.outer[0] * self.outer[1] * self.slab_stages

    @property
    def slab_stages(self) -> int:
        """Stages of a slab: of positions that are contiguous in both operands."""
        if not self.in_place:
            return -(-self.positions // self.depth)
        return -(-math.prod(self.padded) // self.outer[1] // self.depth)

    @property
    def outer(self) -> tuple[int, int]:
        """(images, slabs per image) that stages must not cross; (1, 1) where positions run over all images.

        Slabs are separate if the rows of the base are not padded like those of the phased operand.
        """
        if not self.in_place:
            return 1, 1
        return self.product.problem.batch, self.padded[0] if self.along[1].reach else 1

    @property
    def copies(self) -> int:
        """Copies of the base, each shifted by one more tap along the width; larger shifts are whole pieces."""
        width, piece = self.along[2], self.product.piece
        return 1 if self.batched else min(width.taps, piece // math.gcd(width.shift, piece))

    @property
    def sides(self) -> tuple[Side, Side]:
        """The base and the phased operand."""
        input_side, output_side = self.product.gather.dst, self.product.gather.src
        return (output_side, input_side) if self.swapped else (input_side, output_side)

    @property
    def channels(self) -> tuple[int, int]:
        """Channels of a group, of the base and the phased operand."""
        base, phased = (side.shape[1] // self.product.problem.groups for side in self.sides)
        return base, phased

    @cached_property
    def padded(self) -> Three:
        """A padded image. Rows are whole pieces if taps shift by rows; whole cache lines if that adds few elements."""
        depth, height, width = (size + axis.reach for size, axis in zip(self.sides[0].shape[2:], self.along))
        if self.in_place or self.batched or max(self.along[0].taps, self.along[1].taps) == 1:
            return depth, height, width
        lines = round_up(width, self.depth)
        return depth, height, lines if lines <= _WHOLE_LINES * width else round_up(width, self.product.piece)

    @property
    def base_lies(self) -> bool:
        """Whether TMA may read the base in place: an image as one plane, shifted by whole pieces of 16 bytes."""
        base, product = self.sides[0], self.product
        if self.batched or self.copies > 1 or product.parts > 1 or not _lies(base, product.piece):
            return False
        depth, height, width = base.shape[2:]
        above = 1 if self.along[1].taps > 1 else height if self.along[0].taps > 1 else height * depth
        return width * above % product.piece == 0

    @property
    def written(self) -> tuple[bool, bool]:
        """Whether planes of the base, and of the phased operand, are written; else the tensor is such a plane."""
        base, phased = self.sides
        pixels = base.shape[2:] == phased.shape[2:]  # an output may be padded after its last pixel
        pixels = pixels and all((each.kernel, each.stride, each.padding) == (1, 1, 0) for each in self.axes)
        return not self.in_place, not (self.in_place and pixels and _lies(phased, self.product.piece))

    @property
    def positions(self) -> int:
        """Positions of all images."""
        return (self.images or self.product.problem.batch) * math.prod(self.padded)

    @property
    def images(self) -> int:
        """Images, padded to whole pieces, if they are the innermost dimension of positions; else 0."""
        return round_up(max(1, self.product.problem.batch), self.product.piece) if self.batched else 0

    @cached_property
    def planes(self) -> tuple[Flattened, Flattened]:
        """The base and the phased operand as planes."""
        base, phased = self.sides
        first, second, third = self.axes

        def pitch(padded: Three) -> int:
            images = self.images or self.product.problem.batch
            return round_up(max(1, images * math.prod(padded)), self.depth)

        around = base.shape[2:] if self.in_place else self.padded
        still = Flattened(
            base.shape,
            base.strides,
            around,
            (1, 1, 1),
            (0, 0, 0),
            (0, 0, -self.along[2].shift),
            (1, 1, self.copies),
            self.product.parts,
            pitch(around),
            self.images,
        )
        moved = Flattened(
            phased.shape,
            phased.strides,
            self.padded,
            (first.stride, second.stride, third.stride),
            (-first.padding, -second.padding, -third.padding),
            (first.dilation, second.dilation, third.dilation),
            (self.along[0].residues, self.along[1].residues, self.along[2].residues),
            self.product.parts,
            pitch(self.padded),
            self.images,
        )
        return still, moved

    def strides(self, side: int) -> Three:
        """Elements from a channel of the base (0) or the phased operand (1) to the next, from a slab, and an image."""
        planes, slabs = self.planes[side], self.outer[1]
        if self.in_place and not self.written[side]:
            return planes.strides[1], math.prod(planes.padded[1:]) if slabs > 1 else 0, planes.strides[0]
        image = math.prod(planes.padded)
        return planes.pitch, image // planes.padded[0] if slabs > 1 else 0, image if self.in_place else 0

    def straddling(self, side: int, window: tuple[bool, bool]) -> float:
        """The share of a stage's rows of 128 bytes that span two cache lines."""
        depth, height, width = self.along
        row = (self.images or 1) * self.padded[2]
        begin = [*self.strides(side)] if self.sides[side].shape[1] > 1 else [*self.strides(side)[1:]]
        if height.taps > 1 and window[1] is (side == 0):
            begin.append(row * height.shift)
        if depth.taps > 1 and window[0] is (side == 0) and self.outer[1] == 1:
            begin.append(row * self.padded[1] * depth.shift)
        if width.taps > self.copies and side == 0:
            begin.append((self.images or 1) * width.shift * self.copies)
        return 1 - math.gcd(self.depth, *begin) / self.depth

    @property
    def bytes(self) -> int:
        """Size of both operands as the product reads them."""
        return sum(each.elements for each in self.planes) * self.product.size

    @property
    def written_bytes(self) -> int:
        """Size of the planes that are written."""
        written = (each.elements for each, new in zip(self.planes, self.written) if new)
        return sum(written) * self.product.size

    @property
    def moved(self) -> int:
        """Elements of the tensors that are read, without slabs and rows that no tap meets, and of their planes."""
        met = math.prod(min(1.0, flat.residues / axis.stride) for flat, axis in zip(self.along[:2], self.axes[:2]))
        read = (math.prod(each.shape) * share for each, new, share in zip(self.sides, self.written, (1, met)) if new)
        return int(sum(read)) + self.written_bytes // self.product.size

    @cached_property
    def windows(self) -> list[tuple[bool, bool]]:
        """Whether base items may be numbered by taps along depth, and height: all residues have as many taps."""
        may = [
            (False, True) if axis.taps > 1 and axis.taps * axis.residues == each.kernel else (False,)
            for axis, each in zip(self.along, self.axes)
        ]
        return [(d, h) for d in may[0] for h in may[1]]

    def base_taps(self, window: tuple[bool, bool]) -> int:
        """Taps of the base that have the same ``j`` along the width."""
        return math.prod(axis.taps for axis, here in zip(self.along, window) if here)

    def phased_taps(self, window: tuple[bool, bool]) -> int:
        """Taps of the phased operand that have the same residue along the width."""
        return self.axes[0].kernel * self.axes[1].kernel // self.base_taps(window)


@lru_cache(maxsize=1024)
def flat_product(
    problem: ConvTransposeProblem,
    layouts: Layouts,
    swapped: bool = False,
    batched: bool = False,
    spread: bool = False,
    in_place: bool = False,
) -> FlatProduct:
    """The product of a weight gradient; planes of the base are written if it cannot be read in place."""
    found = FlatProduct(product_of(problem, Pass.WEIGHT_GRAD, layouts), swapped, batched, spread, False)
    return replace(found, in_place=True) if in_place and layouts.aligned and found.base_lies else found


def may_count_images_last(problem: ConvTransposeProblem, layouts: Layouts) -> bool:
    """Whether images may be innermost: they nearly fill whole pieces, taps shift, and columns are contiguous."""
    sides = ((problem.in_channels, layouts.input), (problem.out_channels, layouts.output))
    taps = max(FlatAxis.of(axis).taps for axis in problem.axes3)
    padded = round_up(problem.batch, 16 // DTYPE_BYTES[problem.dtype])
    few = padded <= _PADDED * problem.batch
    return few and taps > 1 and not any(channels_innermost(*side) for side in sides)


def may_spread(problem: ConvTransposeProblem, layouts: Layouts) -> bool:
    """Whether taps along the width shift the base, so that they may be planes of the phased operand instead."""
    return flat_product(problem, layouts).along[2].taps > 1


def _lies(side: Side, piece: int) -> bool:
    """Whether TMA may read a tensor's images as planes: without gaps, and whole pieces of 16 bytes apart."""
    image, channel, *strides = side.strides
    run = 1
    for stride, size in zip(reversed(strides), reversed(side.shape[2:])):
        if size > 1 and stride != run:
            return False
        run *= size
    apart = ((side.shape[0], image), (side.shape[1], channel))
    return all(count == 1 or (stride > 0 and stride % piece == 0) for count, stride in apart)
