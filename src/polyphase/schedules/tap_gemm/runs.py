"""The source of ``tap_gemm_tma`` as runs: the elements that a cell reads at the taps along the width are contiguous.

Rows are written with their padding, channels innermost (`polyphase.program.planes.Planes`). A cell then reads one run
of contiguous elements of a row, and neighbouring cells' runs begin a stride apart. For TMA that is a tensor that
overlaps itself, of dimensions (run, cell). Groups, parts and residues of the stride along other dimensions have planes
of their own. The kernel's side is ``kernels/core/run_groups.cuh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from polyphase.problem import Axis
from polyphase.problem.integers import round_up
from polyphase.program.planes import Planes, padded_channels
from polyphase.program.tensor_map import TensorMap
from polyphase.schedules.tap_gemm.flat import FlatAxis
from polyphase.schedules.tap_gemm.product import Product
from polyphase.schedules.tiles import Four

_MOST_POSITIONS = (1 << 31) - (1 << 12)  # positions of a part's planes, of which a tile may have some more


@dataclass(frozen=True)
class Runs:
    """The source of a product as runs, in tap groups of ``chunk`` elements.

    ``inner``: residues along depth and height that are channels.
    """

    product: Product
    chunk: int
    inner: tuple[int, int]

    @cached_property
    def channels(self) -> int:
        """Channels of a position, padded so that cells are whole pieces of 16 bytes apart."""
        gather = self.product.gather
        unit = self.product.piece // math.gcd(self.product.piece, gather.cell_axes[2].src)
        return padded_channels(math.prod(self.inner) * gather.src_channels, unit, self.product.size)

    @cached_property
    def taps(self) -> int:
        """Most taps of a run."""
        return max(self.product.axis_taps[2])

    @property
    def joined(self) -> bool:
        """Whether taps and channels are one dimension of k: tap groups are not whole channels of one tap."""
        return self.channels % self.chunk > 0 or self.inner != (1, 1)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Tap groups of each phase."""
        depth, height, _ = self.product.axis_taps
        slabs, rows = ([taps // inner for taps in along] for along, inner in zip((depth, height), self.inner))
        return tuple(d * h * w for d in slabs for h in rows for w in self.row_stages)

    @cached_property
    def row_stages(self) -> tuple[int, ...]:
        """Tap groups of each phase along the width, at one tap along depth and height."""
        return tuple(-(-taps * self.channels // self.chunk) for taps in self.product.axis_taps[2])

    @cached_property
    def planes(self) -> Planes:
        """How the source is written."""
        gather, cells = self.product.gather, self.product.cells
        unit = self.product.piece // math.gcd(self.product.piece, self.channels)
        width = round_up(gather.cell_axes[2].window(cells[2]), unit)
        if gather.forward:
            (depth, height), step, apart, residues = gather.src.shape[2:4], (1, 1), (0, 0), (1, 1)
            first = (0, 0)
        else:
            axes = gather.axes[:2]
            along = [FlatAxis.of(axis) for axis in axes]
            depth, height = cells[0] + along[0].reach, cells[1] + along[1].reach
            step, apart = (axes[0].stride, axes[1].stride), (axes[0].dilation, axes[1].dilation)
            first = -axes[0].padding, -axes[1].padding
            residues = along[0].residues // self.inner[0], along[1].residues // self.inner[1]
        return Planes(
            gather.src.shape,
            gather.src.strides,
            gather.groups,
            self.channels,
            self.product.parts,
            (depth, height, width),
            (*step, 1),
            (*first, gather.cell_axes[2].first_offset),
            apart,
            residues,
            self.inner,
        )

    @property
    def fits(self) -> bool:
        """Whether the step that writes the planes can count their positions."""
        return self.planes.positions < _MOST_POSITIONS

    def tensor_map(self, pitch: int, tile: Four, taps: int) -> TensorMap:
        """The map of boxes: a tap group of a tile of cells, from runs of ``taps``."""
        size, planes, axis = self.product.size, self.planes, self.product.gather.cell_axes[2]
        depth, height, width = planes.padded
        row = width * self.channels * size
        cells = (axis.window(self.product.cells[2]) - taps) // axis.src + 1
        dimensions = (
            (cells, axis.src * self.channels * size),
            (height, row),
            (depth, height * row),
            (max(1, planes.parts * planes.of_part), depth * height * row),
        )
        return TensorMap(
            self.product.problem.dtype,
            (taps * self.channels, *(count for count, _ in dimensions)),
            tuple(16 if count == 1 else step for count, step in dimensions),
            (pitch // size, *tile[::-1]),
            pitch,
            True,
        )

    def maps(self, pitch: int, tile: Four) -> tuple[TensorMap, TensorMap]:
        """The maps for phases with most taps along the width, and for phases with one tap less."""
        most, fewer = self.tensor_map(pitch, tile, self.taps), self.taps - 1
        differ = fewer > 0 and fewer in self.product.axis_taps[2]
        return most, self.tensor_map(pitch, tile, fewer) if differ else most


def side_by_side(axis: Axis, forward: bool) -> bool:
    """Whether the elements that a cell reads at a phase's taps are neighbours."""
    taps = -(-axis.kernel // axis.tap_step) if forward else axis.kernel
    return taps <= 1 or (axis.element_step if forward else axis.dilation) == 1


@lru_cache(maxsize=4096)
def runs_of(product: Product, chunk: int) -> Runs | None:
    """None if the elements of taps along the width are not contiguous.

    Residues become channels if all have as many taps, and there are fewer tap groups then.
    """
    gather = product.gather
    if not side_by_side(gather.axes[2], gather.forward):
        return None
    plain = Runs(product, chunk, (1, 1))
    if gather.forward:
        return plain
    others = [(axis.kernel, FlatAxis.of(axis)) for axis in gather.axes[:2]]
    depth, height = (each.residues if each.residues * each.taps == kernel else 1 for kernel, each in others)
    inner = Runs(product, chunk, (depth, height))
    return inner if sum(inner.stages) < sum(plain.stages) else plain
