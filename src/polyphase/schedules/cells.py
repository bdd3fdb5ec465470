"""A forward pass or an input gradient on a grid of cells: source, destination, cells (core/geometry.cuh).

Both passes gather: every destination element sums the source elements that it needs, so nothing is written twice and no
sum depends on timing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any

from polyphase.jit.source import Constant
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts, Strides, channels_innermost, extent, five
from polyphase.problem.problem import accumulator_bytes

#: Most destination elements of a cell, or of a thread, for straight-line code.
MAX_PHASES = 512


@dataclass(frozen=True)
class Side:
    """One side of a gather pass: shape ``(N, C, D, H, W)`` and strides."""

    shape: tuple[int, int, int, int, int]
    strides: Strides

    @cached_property
    def channels_last(self) -> bool:
        """Whether neighbouring channels are neighbours in memory."""
        return channels_innermost(self.shape[1], self.strides)

    def apart(self, dimension: int) -> int:
        """The greatest common divisor of all strides but that of one dimension."""
        return reduce(math.gcd, (stride for i, stride in enumerate(self.strides) if i != dimension))

    @property
    def in_pairs(self) -> bool:
        """Whether pairs of neighbouring columns are contiguous, and begin at even elements."""
        return self.strides[4] == 1 and math.gcd(self.shape[4], self.apart(4)) % 2 == 0

    def params(self) -> dict[str, Any]:
        """The kernels' ``Tensor5``."""
        return {"stride": self.strides, "size": self.shape[2:], "channels": self.shape[1]}


def sides_of(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[Side, Side]:
    """The input and the output of a layer, or their gradients."""
    return Side(five(problem.input_shape), layouts.input), Side(five(problem.output_shape), layouts.output)


class CellAxis:
    """One spatial dimension cut into cells of one input element and ``stride`` output elements.

    ``src`` and ``dst`` are the elements of a cell on either side, ``first_offset`` the first source element that any
    tap reads, counted from its cell's first, and ``owned`` the destination elements of a cell that own taps.
    """

    def __init__(self, axis: Axis, forward: bool) -> None:
        self._axis, self._forward = axis, forward
        self.src, self.dst = (1, axis.stride) if forward else (axis.stride, 1)
        self.owned = min(axis.kernel, axis.tap_step) if forward else 1
        ends = self.offset(0), self.offset(axis.kernel - 1)
        self.first_offset, self._reach = min(ends), abs(ends[1] - ends[0])
        self._used: dict[int, int] = {}

    def offset(self, tap: int) -> int:
        """The source element that a tap reads, counted from its cell's first."""
        axis = self._axis
        return -axis.shift(tap) if self._forward else tap * axis.dilation - axis.padding

    @cached_property
    def _offsets(self) -> set[int]:
        return {self.offset(tap) for tap in range(self._axis.kernel)}

    def window(self, cells: int) -> int:
        """Source elements that ``cells`` neighbouring cells span."""
        return (cells - 1) * self.src + self._reach + 1

    def window_used(self, cells: int) -> int:
        """Source elements that ``cells`` neighbouring cells read."""
        if cells not in self._used:
            self._used[cells] = len({cell * self.src + offset for cell in range(cells) for offset in self._offsets})
        return self._used[cells]


@dataclass(frozen=True)
class Gather:
    """One pass of one problem."""

    pass_: Pass
    axes: tuple[Axis, Axis, Axis]
    src_channels: int  # source channels of a group
    dst_channels: int  # destination channels of a group
    groups: int
    dtype: str
    bias: bool
    src: Side
    dst: Side
    weight_channels_last: bool
    aligned: bool
    rounded: bool = False  # operands are rounded to TF32, also by kernels that do not need it
    in_sums: bool = False  # the destination has the accumulator's type
    normalized: bool = False  # the epilogue normalises over the channels of each output pixel
    mirrored: bool = False  # the weight belongs to the layer whose input gradient this forward pass computes
    original: Gather | None = None  # if the source is a copy in float16: the pass on the float32 source itself

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a planner asks for thousands of times
        return hash((self.axes, self.src_channels, self.dst_channels, self.dtype, self.src, self.dst))

    @classmethod
    def of(cls, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts, mirrored: bool = False) -> Gather:
        """The pass of a problem whose tensors have the strides of ``layouts``."""
        input_side, output_side = sides_of(problem, layouts)
        forward = pass_ is Pass.FORWARD
        per_group = problem.in_channels_per_group, problem.out_channels_per_group
        src_channels, dst_channels = per_group if forward else per_group[::-1]
        return cls(
            pass_=pass_,
            axes=problem.axes3,
            src_channels=src_channels,
            dst_channels=dst_channels,
            groups=problem.groups,
            dtype=problem.dtype,
            bias=problem.bias and forward,
            src=input_side if forward else output_side,
            dst=output_side if forward else input_side,
            weight_channels_last=layouts.weight_channels_last,
            aligned=layouts.aligned,
            rounded=forward and problem.tf32_as_pytorch,
            in_sums=layouts.in_sums,
            normalized=forward and problem.epilogue.normalizes,
            mirrored=mirrored,
        )

    @cached_property
    def src_dtype(self) -> str:
        """The type of the source's elements."""
        return self.dtype if self.original is None else "float16"

    @cached_property
    def src_bytes(self) -> int:
        """Bytes of an element of the source."""
        return DTYPE_BYTES[self.src_dtype]

    @property
    def dst_bytes(self) -> int:
        """Bytes of an element of the destination."""
        return accumulator_bytes(self.dtype) if self.in_sums else DTYPE_BYTES[self.dtype]

    @property
    def forward(self) -> bool:
        """Whether this is the forward pass, else the input gradient."""
        return self.pass_ is Pass.FORWARD

    @cached_property
    def taps(self) -> int:
        """Taps of the whole kernel."""
        return math.prod(axis.kernel for axis in self.axes)

    @cached_property
    def cell_axes(self) -> tuple[CellAxis, CellAxis, CellAxis]:
        """Depth, height and width in cells."""
        depth, height, width = (CellAxis(axis, self.forward) for axis in self.axes)
        return depth, height, width

    @cached_property
    def split(self) -> int:
        """Residues by which ``direct_tiled.cu`` splits a row of the source in shared memory."""
        step = self.cell_axes[2].src
        return step if step == 2 or step % 4 == 0 else 1

    @cached_property
    def owned(self) -> int:
        """Destination elements of a cell that own taps."""
        return math.prod(axis.owned for axis in self.cell_axes)

    @cached_property
    def phases(self) -> int:
        """Destination elements of a cell."""
        return math.prod(axis.dst for axis in self.cell_axes)

    @cached_property
    def cells(self) -> tuple[int, int, int]:
        """Cells along depth, height and width."""
        depth, height, width = (math.ceil(size / axis.dst) for size, axis in zip(self.dst.shape[2:], self.cell_axes))
        return depth, height, width

    def constants(self, **config: Constant) -> tuple[tuple[str, Constant], ...]:
        """A kernel's constants: of the pass, and the config's own."""
        out_channels = self.dst_channels if self.forward is not self.mirrored else self.src_channels
        last = self.weight_channels_last
        strides = out_channels * self.taps, 1 if last else self.taps
        common: dict[str, Constant] = {
            "AXIS_D": self.axes[0],
            "AXIS_H": self.axes[1],
            "AXIS_W": self.axes[2],
            "INPUT_GRAD": not self.forward,
            "SRC_CHANNELS": self.src_channels,
            "DST_CHANNELS": self.dst_channels,
            "HAS_BIAS": self.bias,
            "DST_CHANNELS_LAST": self.dst.channels_last,
            "WEIGHT_STRIDE_IN": strides[self.mirrored],
            "WEIGHT_STRIDE_OUT": strides[not self.mirrored],
            "WEIGHT_STRIDE_TAP": (-1 if self.mirrored else 1) * (out_channels if last else 1),
        }
        return tuple({**common, **config}.items())

    @property
    def aligned_src(self) -> bool:
        """Whether four neighbouring source elements (channels, with channels last) can be read by one load anywhere."""
        last = self.src.channels_last
        whole = self.src_channels % 4 == 0 if last else self.src.shape[4] % 4 == 0 and self.src.strides[4] == 1
        return self.aligned and whole and self.src.apart(1 if last else 4) % 4 == 0

    def wide_offsets(self, images: int, stage_channels: int) -> bool:
        """Whether byte offsets within a tile of ``images`` batch entries need more than 32 bits."""
        return any(
            extent((images, channels, *side.shape[2:]), side.strides) * DTYPE_BYTES[self.dtype] >= 2**32
            for side, channels in ((self.src, stage_channels), (self.dst, 1))
        )


@lru_cache(maxsize=2048)
def forward_gather(problem: ConvTransposeProblem, layouts: Layouts) -> Gather:
    """The forward pass of a problem, cached for planners."""
    return Gather.of(problem, Pass.FORWARD, layouts)
