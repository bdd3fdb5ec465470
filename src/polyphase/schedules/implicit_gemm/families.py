"""Every config of `implicit_gemm` that the registers allow.

The registers needed besides accumulators, here and in `config.held_by_stores`, were found by compiling the layers of
all suites, and odd ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.problem.sizes import TINY, is_tiny, typical
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import (
    BOX_PIXELS,
    CONSUMERS,
    ROWS,
    STAGES,
    GemmConfig,
    Taps,
    fills_stages,
    held_by_stores,
)
from polyphase.schedules.tensor_cores import parts_of

# Pixels of an instruction, by producer groups: its accumulators must fit the registers that a thread has at launch.
_WIDEST = {1: 256, 2: 192, 4: 192}
_FEW_CHANNELS = 32  # output channels of a group, up to which taps may be rows
_HELD_BY_NORMALS = 16  # registers, where outputs are normalised over their channels
_HELD_BY_CHANNELS = 16  # registers, where a thread adds up several channels' partial products at a time
#: Channels from which float32 may be multiplied as float16: shorter sums take little time.
SCALED_CHANNELS = 32
_MOST_SCALED_ROWS = 512  # most taps of a set, each with 16 channels in float32, that a block packs
_MAX_CELL_WIDTH = 16  # most output columns of a cell, which a thread holds at once

# Producer groups, their raw slots, and choices of stages, by whether producers copy in place. Such copies are
# waited for by the consumers: they take more stages (see LOOKAHEAD in the kernel), unless TMA loads them.
_LOADERS = {False: ((2, 4, STAGES), (1, 4, STAGES), (1, 2, STAGES)), True: ((4, 4, (8, 12)), (1, 4, (3, 4)))}
_BOX_LOADER = (1, 4, STAGES)


@dataclass(frozen=True)
class Layer:
    """A layer at a size, of dense tensors.

    ``tma``: whether TMA can load pixels as operands (`tile.may_take_operands`); ``may_scale``: whether float32 may be
    multiplied as float16; ``in_halves``: whether the source is a copy in float16.
    """

    problem: ConvTransposeProblem
    src_channels_last: bool
    tma: bool
    may_scale: bool = True
    in_halves: bool = False

    @cached_property
    def gather(self) -> Gather:
        """The forward pass."""
        problem, dense = self.problem, Layouts.dense(self.problem)
        if self.src_channels_last != problem.channels_last:
            dense = replace(dense, input=dense_strides(problem.input_shape, self.src_channels_last))
        gather = Gather.of(problem, Pass.FORWARD, dense)
        return replace(gather, original=gather) if self.in_halves else gather

    def sized(self, sizes: Sequence[tuple[int, tuple[int, int, int]]]) -> list[Layer]:
        """The layer at other sizes (batch, sides in one to three dimensions) that are tiny if it is."""
        found = (replace(typical(self.problem, sides), batch=batch) for batch, sides in sizes)
        return [replace(self, problem=sized) for sized in found if is_tiny(sized) is is_tiny(self.problem)]


def legal_configs(layer: Layer, device: DeviceInfo) -> Iterator[GemmConfig]:
    """Every config that the registers allow."""
    for config, stages in families(layer, device):
        yield from (config._replace(stages=count) for count in reversed(stages))


def families(layer: Layer, device: DeviceInfo) -> Iterator[tuple[GemmConfig, tuple[int, ...]]]:
    """The `legal_configs` by family: a config without stages, and the stages that it may have in rising order.

    Each is made in steps: the rows of a row group, how they are multiplied, then producers and columns.
    """
    of_layer = _Families(layer, device)
    for wgmma, scaled in of_layer.instructions():
        for shape in of_layer.shapes():
            for config in of_layer.ways(shape._replace(wgmma=wgmma, scaled=scaled)):
                if not of_layer.is_left_out(config):
                    yield from of_layer.members(config)


class _Families:
    """Enumerates the `families` of a layer."""

    def __init__(self, layer: Layer, device: DeviceInfo) -> None:
        self._layer, self._problem, self._device = layer, layer.problem, device
        self._taps, self._parts = Taps.of(layer.problem.axes3), parts_of(layer.problem)
        self._channels = layer.problem.out_channels_per_group

    def instructions(self) -> list[tuple[bool, bool]]:
        """Whether wgmma is used, and whether float32 is multiplied as float16."""
        problem, wgmma = self._problem, self._device.has_wgmma
        deep_enough = problem.in_channels_per_group >= SCALED_CHANNELS
        if self._layer.in_halves:
            return [(True, True)] if wgmma else []
        scaled = self._layer.may_scale and wgmma and not self._layer.src_channels_last
        scaled = scaled and problem.dtype == "float32" and deep_enough
        return [*([(True, False)] if wgmma else []), (False, False), *([(True, True)] if scaled else [])]

    def _shape(self, channel_blocks: int, lines: int, **settings: int) -> GemmConfig:
        """A config of which only the rows of a row group are known."""
        shape = GemmConfig(0, 0, channel_blocks, lines, 0, 0, self._parts, "", False, 0, False)
        return shape._replace(**settings)  # type: ignore[arg-type]

    def shapes(self) -> list[GemmConfig]:
        """Row groups: channels of some phases, or of a part of the phases along the width, or taps."""
        problem, taps, channels = self._problem, self._taps, self._channels
        blocks, lines_of_layer = math.ceil(channels / ROWS), len(taps.lines)
        some_lines = [lines for lines in range(1, lines_of_layer + 1) if lines_of_layer % lines == 0]
        counts = {1, 2, 4} if blocks > 2 else {1, blocks}
        if problem.epilogue.normalizes:  # warpgroups have all channels of a pixel
            return [self._shape(blocks, lines) for lines in some_lines]
        shapes = [self._shape(count, lines) for count in counts for lines in some_lines]
        if not problem.channels_last and (width_parts := Taps.width_parts(problem.axes3)) > 1:
            shapes.append(self._shape(1, 1, width_parts=width_parts))
        most_stacked = ROWS // round_up(channels, ROWS // 4)
        for stacked in filter(taps.may_stack, range(2, most_stacked + 1)):
            shapes += [self._shape(1, lines, stacked=stacked) for lines in some_lines if lines % stacked == 0]
        return shapes + self._shapes_of_taps(some_lines)

    def _shapes_of_taps(self, some_lines: list[int]) -> list[GemmConfig]:
        """Row groups whose rows are taps."""
        problem, taps, channels, shapes = self._problem, self._taps, self._channels, []
        # In two parts, or with many small groups, the direct kernel is faster (docs/notebook.md).
        few = channels <= _FEW_CHANNELS and problem.groups == 1 and self._parts == 1
        if few and problem.axes3[2].stride <= _MAX_CELL_WIDTH:
            shapes += [self._shape(1, lines, row_channels=channels) for lines in some_lines]
        taps_of_channel = taps.rows(1, len(taps.lines))
        if is_tiny(problem) and taps_of_channel <= ROWS and not Taps.stay_in_cells(problem.axes3):
            row_channels = min(ROWS // taps_of_channel, channels)
            whole = {"row_channels": row_channels, "whole_images": True}
            shapes += [self._shape(sets, len(taps.lines), **whole) for sets in (1, 2, 4)]
        return shapes

    def ways(self, shape: GemmConfig) -> Iterator[GemmConfig]:
        """All ways to multiply a shape, including those that are skipped."""
        channel_groups = math.ceil(self._channels / (shape.channel_blocks * (shape.row_channels or ROWS)))
        row_groups = channel_groups * (len(self._taps.lines) // shape.lines) * shape.width_parts
        may_reside = shape.wgmma and row_groups * self._problem.groups <= self._device.multiprocessors // 4
        in_pairs = row_groups % CONSUMERS == 0 and (shape.whole_images or not shape.taps_in_rows)
        splits = ["cells", *(["rows"] if in_pairs else []), *(["turns"] if shape.wgmma else [])]
        weights = [*([(True, 1)] if may_reside else []), (False, 1), *([(False, 2)] if shape.wgmma else [])]
        for k_steps, split, (resident, cluster) in itertools.product((1, 2, 4), splits, weights):
            yield shape._replace(k_steps=k_steps, split=split, resident=resident, cluster=cluster)

    def is_left_out(self, config: GemmConfig) -> bool:
        """Whether registers spill, or such a config is hardly ever the fastest."""
        taps, in_rows = self._taps, config.taps_in_rows
        if config.cluster > 1 and self._cluster_is_left_out(config):
            return True
        if config.split == "rows" and config.channel_blocks > 1 and not in_rows:
            return True  # registers spill
        if config.stacked > 1 and not config.wgmma and taps.owned_w > 4:
            return True  # registers spill
        if config.scaled and in_rows and taps.rows(config.row_channels, config.lines) > _MOST_SCALED_ROWS:
            return True  # too many to be staged by a block that packs
        if config.k_steps < 4:
            return False
        # Scaled: hardly ever the fastest, as such a stage is 64 channels. Else it had a fence for each product (C7519),
        # so the model was never fitted to them.
        return config.scaled or (not in_rows and not taps.are_alike(config.lines, config.stacked))

    def _cluster_is_left_out(self, config: GemmConfig) -> bool:
        if config.split != "turns":
            return True  # in such configs the block's own warpgroups share weights
        if config.k_steps == 4 and config.taps_in_rows and not config.whole_images:
            return True  # registers spill
        return self._layer.src_channels_last and config.lines > 2 and self._taps.owned_w > 2  # registers spill

    def _held(self, config: GemmConfig) -> int:
        """Registers of a thread in addition to its accumulators."""
        problem, by_cells, several_blocks = self._problem, config.split == "cells", config.channel_blocks > 1
        in_two_parts_last = self._parts == 2 and self._layer.src_channels_last
        beside = 16 * (config.k_steps >= 2 and several_blocks)
        if config.scaled and several_blocks and (self._taps.owned_w == 1 or config.split == "turns"):
            beside = 32  # including the rows' scales
        elif config.scaled and config.k_steps >= 2 and config.split == "turns":
            beside += 8
        if problem.bias and by_cells and (beside or in_two_parts_last):
            beside += 16
        elif problem.groups > 1 and config.lines > 1 and by_cells and in_two_parts_last:
            beside += 16  # the index of the group
        return beside + self._held_by_epilogue(config)

    def _held_by_epilogue(self, config: GemmConfig) -> int:
        if config.taps_in_rows:
            return _HELD_BY_CHANNELS if config.whole_images else 0
        held = held_by_stores(self._taps.owned_w, config.lines, self._channels, self._problem.channels_last)
        several = config.channel_blocks > 1 or (config.lines > 1 and self._problem.dtype != "float32")
        if self._channels % ROWS and several:
            held = max(held, 32)  # stores ask whether a channel exists
        if self._problem.epilogue.normalizes:
            held += _HELD_BY_NORMALS * (3 if config.channel_blocks > 1 else 1)
        return held + self._held_by_bias_and_zeros

    @cached_property
    def _held_by_bias_and_zeros(self) -> int:
        """Registers of the bias beside values of long rows; of stores where elements of a row or lines own no taps."""
        owned = self._taps.owned_w
        bias = 16 if self._problem.bias and owned >= 4 and (self._parts == 2 or owned % 2) else 0
        zeros = self._problem.axes3[2].stride - owned
        # Few lines own taps: all others are stored by a loop of their own.
        few_lines = any(4 * min(axis.kernel, axis.tap_step) <= axis.stride for axis in self._problem.axes3[:2])
        return bias + 16 * few_lines + (min(32 + 16 * zeros, 96) if self._parts == 2 and zeros else 0)

    def members(self, config: GemmConfig) -> Iterator[tuple[GemmConfig, tuple[int, ...]]]:
        """The config with all loaders and columns, and the stages of each."""
        accumulators = 80 // (1 if self._parts == 1 else 3)  # most accumulators of a thread, so that registers are left
        if config.wgmma:  # with two parts a second set of sums
            accumulators = (160 - self._held(config)) // self._parts
        most_cells = 2 * accumulators // self._taps.row_blocks(config)
        for tma_operands, loaders, raw_slots, stages in self._loaders(config):
            loaders = loaders if config.wgmma else 1
            for pixels, pixel_blocks in _columns(most_cells, config.wgmma, loaders):
                if tma_operands and not self._layer.src_channels_last and pixels % BOX_PIXELS:
                    continue  # boxes are whole
                found = config._replace(
                    pixels=pixels,
                    pixel_blocks=pixel_blocks,
                    loader_groups=loaders,
                    tma_operands=tma_operands,
                    raw_slots=raw_slots,
                )
                if not found.whole_images or found.cells >= TINY:
                    yield found, stages

    def _loaders(self, config: GemmConfig) -> list[tuple[bool, int, int, tuple[int, ...]]]:
        """Whether TMA loads operands, producer groups, their raw slots, and choices of stages."""
        problem, last = self._problem, self._layer.src_channels_last
        fills = fills_stages(problem.groups, problem.in_channels_per_group, config.stage_channels(problem.dtype))
        may = self._layer.tma and config.wgmma and self._parts == 1 and fills
        by_threads = [] if (may and last) or self._layer.in_halves else [(False, *each) for each in _LOADERS[last]]
        # Channel by channel, pixels are an MN-major operand: in half precision, if no tap shifts them.
        a_tap_is_no_distance = config.whole_images or Taps.stay_in_cells(problem.axes3)
        may_lie = last or (DTYPE_BYTES[problem.dtype] == 2 and a_tap_is_no_distance)
        return [*by_threads, *([(True, *_BOX_LOADER)] if may and may_lie else [])]


def _columns(cells: int, wgmma: bool, loaders: int) -> list[tuple[int, int]]:
    """Pixels of an instruction and their number, for at most ``cells`` cells and for fewer."""
    multiple = 8 if wgmma else 16
    found = []
    for share in (20, 18, 16, 13, 10):  # images are seldom as wide as registers allow
        blocks = math.ceil(cells * share / 20 / _WIDEST[loaders])
        pixels = cells * share // 20 // blocks // multiple * multiple if blocks else 0
        if pixels >= 16:
            found.append((pixels, blocks))
    return list(dict.fromkeys(found))
