"""Every config of `implicit_gemm` that the registers allow.

What registers hold beside sums, here and in `config.held_by_stores`, was found by compiling the layers of all suites,
and odd ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.problem.sizes import TINY, is_tiny
from polyphase.schedules.implicit_gemm.config import (
    BOX_PIXELS,
    CHUNK_BYTES,
    CONSUMERS,
    ROWS,
    STAGES,
    GemmConfig,
    Taps,
    fills_stages,
    held_by_stores,
)
from polyphase.schedules.tensor_cores import parts_of

# Pixels of an instruction, by loading groups: its sums must fit the registers that a thread has at launch.
_WIDEST = {1: 256, 2: 192, 4: 192}
_FEW_CHANNELS = 32  # output channels of a group, up to which taps may be rows
_HELD_BY_CHANNELS = 16  # registers, where a thread adds up several channels' partial products at a time
_SCALED_CHANNELS = 32  # of a group, from which on float32 may be multiplied as float16: sums of fewer take little time
_MOST_SCALED_ROWS = 512  # taps of a set, each with 16 channels in float32, that a block packs
_MAX_CELL_WIDTH = 16  # output columns of a cell, which a thread then holds at once

# Loading groups, their raw slots, and the stages they may have, by whether they copy in place. Such copies are waited
# for by those who multiply: they take more stages (see LOOKAHEAD in the kernel), unless TMA brings them.
_LOADERS = {False: ((2, 4, STAGES), (1, 4, STAGES), (1, 2, STAGES)), True: ((4, 4, (8, 12)), (1, 4, (3, 4)))}
_BOX_LOADERS = ((1, 4, STAGES),)


class _Shape(NamedTuple):
    """The rows of a row group, by the names of `GemmConfig`: ``row_blocks`` of them."""

    channel_blocks: int
    lines: int
    width_parts: int
    row_blocks: int
    row_channels: int = 0
    whole_images: bool = False


class _Way(NamedTuple):
    """How they are multiplied."""

    wgmma: bool
    scaled: bool
    k_steps: int
    split: str
    resident: bool
    cluster: int


def configs(problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, tma: bool) -> Iterator[GemmConfig]:
    """Every config that the registers allow; ``channels_last`` is the source's memory format.

    ``tma``: whether TMA can take it apart (`cuts.box_strides`).
    """
    for config, stages in families(problem, device, channels_last, tma):
        yield from (config._replace(stages=count) for count in reversed(stages))


def families(
    problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, tma: bool, may_scale: bool = True
) -> Iterator[tuple[GemmConfig, tuple[int, ...]]]:
    """The `configs`, those that differ in nothing but their stages as one with none, beside these in rising order.

    ``may_scale``: those that are ``scaled``, too.
    """
    layer = _Layer(problem, device, channels_last, tma)
    shapes = layer.shapes()
    for wgmma, scaled in layer.instructions(may_scale):
        for shape in shapes:
            held = layer.held(shape)
            for way in layer.ways(shape, wgmma, scaled):
                if not layer.is_left_out(shape, way):
                    yield from layer.members(shape, way, held)


class _Layer:
    """A layer, as its configs are enumerated; ``channels_last`` is the source's memory format."""

    def __init__(self, problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool, tma: bool) -> None:
        self._problem, self._device, self._channels_last, self._tma = problem, device, channels_last, tma
        self._taps, self._parts = Taps.of(problem.axes3), parts_of(problem)
        self._channels = problem.out_channels_per_group

    def instructions(self, may_scale: bool) -> list[tuple[bool, bool]]:
        """Whether wgmma is used, and whether float32 is multiplied as float16."""
        problem, wgmma = self._problem, self._device.has_wgmma
        deep_enough = problem.in_channels_per_group >= _SCALED_CHANNELS
        may_scale &= wgmma and not self._channels_last and problem.dtype == "float32" and deep_enough
        found = [(True, False), (False, False)] if wgmma else [(False, False)]
        return [*found, *([(True, True)] if may_scale else [])]

    def shapes(self) -> list[_Shape]:
        """Row groups: of channels of some phases, of a part of those along the width, or of taps."""
        problem, taps, channels = self._problem, self._taps, self._channels
        blocks = math.ceil(channels / ROWS)
        some_lines = [lines for lines in range(1, len(taps.lines) + 1) if len(taps.lines) % lines == 0]
        shapes = [
            _Shape(channel_blocks, lines, 1, channel_blocks * lines * taps.owned_w)
            for channel_blocks in ({1, 2, 4} if blocks > 2 else {1, blocks})
            for lines in some_lines
        ]
        if not problem.channels_last and (width_parts := Taps.width_parts(problem.axes3)) > 1:
            shapes.append(_Shape(1, 1, width_parts, taps.owned_w // width_parts))
        # In two parts, or with many small groups, the direct kernel is faster (docs/notebook.md).
        few = channels <= _FEW_CHANNELS and problem.groups == 1 and self._parts == 1
        if few and problem.axes3[2].stride <= _MAX_CELL_WIDTH:
            shapes += [_Shape(1, lines, 1, taps.row_blocks(channels, lines), channels) for lines in some_lines]
        taps_of_channel = taps.rows(1, len(taps.lines))
        if is_tiny(problem) and taps_of_channel <= ROWS and not Taps.stay_in_cells(problem.axes3):
            row_channels = min(ROWS // taps_of_channel, channels)
            shapes += [_Shape(sets, len(taps.lines), 1, sets, row_channels, True) for sets in (1, 2, 4)]
        return shapes

    def ways(self, shape: _Shape, wgmma: bool, scaled: bool) -> Iterator[_Way]:
        """All ways to multiply a shape, those that are left out among them."""
        channel_groups = math.ceil(self._channels / (shape.channel_blocks * (shape.row_channels or ROWS)))
        row_groups = channel_groups * (len(self._taps.lines) // shape.lines) * shape.width_parts
        may_reside = wgmma and row_groups * self._problem.groups <= self._device.multiprocessors // 4
        splits = _splits(1 if shape.row_channels and not shape.whole_images else row_groups, wgmma)
        weights = (*([(True, 1)] if may_reside else []), (False, 1), *([(False, 2)] if wgmma else []))
        for k_steps, split, (resident, cluster) in itertools.product((1, 2, 4), splits, weights):
            yield _Way(wgmma, scaled, k_steps, split, resident, cluster)

    def is_left_out(self, shape: _Shape, way: _Way) -> bool:
        """Whether registers spill, or such a config is hardly ever the fastest."""
        taps, in_rows = self._taps, shape.row_channels > 0
        if way.cluster > 1 and self._cluster_is_left_out(shape, way):
            return True
        if way.split == "rows" and shape.channel_blocks > 1 and not in_rows:
            return True  # registers spill
        if way.scaled and in_rows and taps.rows(shape.row_channels, shape.lines) > _MOST_SCALED_ROWS:
            return True  # too many to be staged by a block that packs
        if way.k_steps < 4:
            return False
        # Scaled: hardly ever the fastest, as such a stage is 64 channels. Else it had a fence for each product (C7519),
        # so the model was never fitted to them.
        return way.scaled or (not in_rows and not taps.are_alike(shape.lines))

    def _cluster_is_left_out(self, shape: _Shape, way: _Way) -> bool:
        if way.split != "turns":
            return True  # there the block's own warp groups share weights
        if way.k_steps == 4 and shape.row_channels and not shape.whole_images:
            return True  # registers spill
        return self._channels_last and shape.lines > 2 and self._taps.owned_w > 2  # registers spill

    def held(self, shape: _Shape) -> int:
        """Registers of a thread beside its sums, whatever the way."""
        if shape.row_channels:
            return _HELD_BY_CHANNELS if shape.whole_images else 0
        held = held_by_stores(self._taps.owned_w, shape.lines, self._channels, self._channels_last)
        return max(held, self._held_by_partial_blocks(shape)) + self._held_by_bias + self._held_by_zeros

    def _held_by_partial_blocks(self, shape: _Shape) -> int:
        """Registers that stores hold which ask whether a channel exists, for several blocks or lines."""
        several = shape.channel_blocks > 1 or (shape.lines > 1 and self._problem.dtype != "float32")
        return 32 if self._channels % ROWS and several else 0

    @cached_property
    def _held_by_zeros(self) -> int:
        """Registers of stores in two parts where elements of a cell's row own no taps."""
        zeros = self._problem.axes3[2].stride - self._taps.owned_w
        return min(32 + 16 * zeros, 96) if self._parts == 2 and zeros else 0

    @cached_property
    def _held_by_bias(self) -> int:
        """Registers that the bias takes beside the values of long runs."""
        owned = self._taps.owned_w
        return 16 if self._problem.bias and owned >= 4 and (self._parts == 2 or owned % 2) else 0

    def _held_by_way(self, shape: _Shape, way: _Way) -> int:
        """Registers that a way to multiply takes beside those."""
        problem, by_cells = self._problem, way.split == "cells"
        in_two_parts_last = self._parts == 2 and self._channels_last
        beside = 16 * (way.k_steps >= 2 and shape.channel_blocks > 1)
        if way.scaled and shape.channel_blocks > 1 and (self._taps.owned_w == 1 or way.split == "turns"):
            beside = 32  # what rows are multiplied by, too
        elif way.scaled and way.k_steps >= 2 and way.split == "turns":
            beside += 8
        if problem.bias and by_cells and (beside or in_two_parts_last):
            beside += 16
        elif problem.groups > 1 and shape.lines > 1 and by_cells and in_two_parts_last:
            beside += 16  # which group it is
        return beside

    def members(self, shape: _Shape, way: _Way, held: int) -> Iterator[tuple[GemmConfig, tuple[int, ...]]]:
        """Configs of one shape and way, and their stages."""
        sums = _accumulators(self._parts, way.wgmma, held + self._held_by_way(shape, way))
        for tma_operands, loaders, raw_slots, stages in self._loaders(shape, way):
            loaders = loaders if way.wgmma else 1
            for pixels, pixel_blocks in _widths(2 * sums // shape.row_blocks, way.wgmma, loaders):
                if tma_operands and not self._channels_last and pixels % BOX_PIXELS:
                    continue  # boxes are whole
                cells = pixels * pixel_blocks * (CONSUMERS if way.split == "cells" else 1)
                if shape.whole_images and cells < TINY:
                    continue
                config = GemmConfig(
                    pixels, pixel_blocks, shape.channel_blocks, shape.lines, way.k_steps, 0, self._parts, way.split,
                    way.resident, loaders, way.wgmma, shape.row_channels, tma_operands, shape.whole_images, raw_slots,
                    way.cluster, width_parts=shape.width_parts, scaled=way.scaled,
                )  # fmt: skip
                yield config, stages

    def _loaders(self, shape: _Shape, way: _Way) -> list[tuple[bool, int, int, tuple[int, ...]]]:
        """Whether TMA brings operands, loading groups, their raw slots, and the stages that there may be."""
        problem = self._problem
        element = 2 if way.scaled else DTYPE_BYTES[problem.dtype]
        stage_channels = way.k_steps * 2 * CHUNK_BYTES // element
        fills = fills_stages(problem.groups, problem.in_channels_per_group, stage_channels)
        may = self._tma and way.wgmma and self._parts == 1 and fills
        found: list[tuple[bool, int, int, tuple[int, ...]]] = []
        if not (may and self._channels_last):
            found += [(False, *each) for each in _LOADERS[self._channels_last]]
        if may and (self._channels_last or _may_be_transposed(problem, shape.whole_images)):
            found += [(True, *each) for each in _BOX_LOADERS]
        return found


def _may_be_transposed(problem: ConvTransposeProblem, whole_images: bool) -> bool:
    """Whether pixels of channels can be an operand: in half precision, and where a tap is no distance."""
    return DTYPE_BYTES[problem.dtype] == 2 and (whole_images or Taps.stay_in_cells(problem.axes3))


def _accumulators(parts: int, wgmma: bool, held: int) -> int:
    """Sums of a thread that leave it registers enough; those of two parts are added up beside the cores."""
    if not wgmma:
        return 80 // (1 if parts == 1 else 3)
    return (160 - held) // parts


def _widths(cells: int, wgmma: bool, loaders: int) -> list[tuple[int, int]]:
    """Pixels of an instruction and their number, for at most ``cells`` cells and for fewer."""
    multiple = 8 if wgmma else 16
    found = []
    for share in (20, 18, 16, 13, 10):  # images are seldom as wide as registers allow
        blocks = math.ceil(cells * share / 20 / _WIDEST[loaders])
        pixels = cells * share // 20 // blocks // multiple * multiple if blocks else 0
        if pixels >= 16:
            found.append((pixels, blocks))
    return list(dict.fromkeys(found))


def _splits(row_groups: int, wgmma: bool) -> tuple[str, ...]:
    """What warp groups may share out; ``row_groups`` are those of one of the layer's groups."""
    return ("cells", *(("rows",) if row_groups % CONSUMERS == 0 else ()), *(("turns",) if wgmma else ()))
