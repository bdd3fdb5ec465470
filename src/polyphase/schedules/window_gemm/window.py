"""Shared by the window GEMMs: extents of tiles of positions, and windows of the output gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import equal_part, round_up
from polyphase.problem.layouts import Layouts, five
from polyphase.schedules.cells import Side, sides_of
from polyphase.schedules.schedule import Schedule
from polyphase.schedules.tensor_cores import MOST_COLUMNS
from polyphase.schedules.tiles import Four, tiles_of
from polyphase.schedules.window_gemm.stages import StageBox, channel_piece, row_piece

#: K that wgmma accumulates before a flush: tensor cores truncate at every step. An input gradient with longer K keeps a
#: second set of accumulators, so that its tile is at most half, and is flushed twice as often.
FLUSH = 8192

_SECTOR = 32  # bytes


@dataclass(frozen=True)
class Tiles:
    """The tiles into which a config cuts the input positions, and the window of one."""

    tile_extent: Four
    tiles: Four
    window: Any

    @property
    def total(self) -> int:
        """Tiles in all."""
        return math.prod(self.tiles)

    def params(self, problem: ConvTransposeProblem, layouts: Layouts) -> dict[str, Any]:
        """The parameters that all kernels of windows have."""
        x, grad = sides_of(problem, layouts)
        tiles = {"tile_extent": self.tile_extent, "tiles": self.tiles}
        return {"x": x, "g": grad, "window": self.window, "batch": problem.batch, **tiles}


class Gradient(Schedule):
    """A schedule for one of the gradients."""

    on_tensor_cores = True
    kept = True

    @property
    def pass_(self) -> Pass:
        """The pass that the schedule computes."""
        return self.passes[0]

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if problem.dtype == "float32" and not problem.tf32:
            return "PyTorch would not use TF32 for this layer and pass"
        return self._limits(problem, device)

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        """Why the schedule's mainloop cannot compute a layer whose dtype tensor cores support."""
        raise NotImplementedError


def is_long_sum(problem: ConvTransposeProblem) -> bool:
    """Whether an input gradient's K is longer than tensor cores should accumulate."""
    return problem.out_channels_per_group * problem.taps > FLUSH


def sectors_of(problem: ConvTransposeProblem, rows: int, columns: int) -> float:
    """Sectors that an input gradient's tile touches in NCHW, relative to the sectors that its results would fill."""
    together = columns * (rows if columns == problem.input_size[-1] else 1)
    return 1.0 + _SECTOR / (together * DTYPE_BYTES[problem.dtype])


def blocks_of(problem: ConvTransposeProblem, pass_: Pass, in_chunk: int, out_chunk: int) -> int:
    """Blocks of a tile (input gradient) or split (weight gradient), of ``in_chunk`` and ``out_chunk`` channels each."""
    blocks = math.ceil(problem.in_channels_per_group / in_chunk) * problem.groups
    if pass_ is Pass.WEIGHT_GRAD:
        blocks *= math.ceil(problem.out_channels_per_group / out_chunk)
    return blocks


def split_params(problem: ConvTransposeProblem, length: int, tiles: int) -> dict[str, int]:
    """The split-K parameters of a weight gradient: a split has ``length`` tiles of positions, of ``tiles`` in all."""
    plane = math.prod(problem.weight_shape)
    return {"groups": problem.groups, "split_length": length, "all_tiles": tiles, "plane": plane}


def input_tiles(problem: ConvTransposeProblem, extent: Four) -> Four:
    """Number of tiles of ``extent`` into which the input's positions are cut."""
    return tiles_of(problem.batch, five(problem.input_shape)[2:], extent)


def tile_extents(problem: ConvTransposeProblem, positions: int) -> tuple[Four, ...]:
    """Extents of tiles along n, d, h and w, of at most ``positions`` in all, with as many images as fit.

    Long rows come first.
    """
    return extents_of(problem.batch, five(problem.input_shape)[2:], positions)


@lru_cache(maxsize=256)
def extents_of(batch: int, sizes: tuple[int, int, int], positions: int) -> tuple[Four, ...]:
    """`tile_extents` for images with three ``sizes``."""
    depth, height, width = sizes
    return tuple(
        (max(1, min(batch, positions // (w * h * d))), d, h, w)
        for w in reversed(_extents(width, positions))
        for h in _extents(height, positions // w)
        for d in _extents(depth, positions // (w * h))
    )


@lru_cache(maxsize=4096)
def _extents(size: int, most: int) -> list[int]:
    """Extents worth trying along one dimension: powers of two, and the largest equal share up to ``most``."""
    found = {1 << i for i in range(most.bit_length()) if 1 << i < size}
    return sorted(found | ({equal_part(size, most)} if most > 0 else set()))


def extent_of_window(problem: ConvTransposeProblem, tile: Four) -> Four:
    """Extent of the window of a tile with extents ``tile``: the elements of a channel that its taps read."""
    images, d, h, w = tile
    of_d, of_h, of_w = problem.axes3
    return (
        images,
        (d - 1) * of_d.stride + (of_d.kernel - 1) * of_d.dilation + 1,
        (h - 1) * of_h.stride + (of_h.kernel - 1) * of_h.dilation + 1,
        (w - 1) * of_w.stride + (of_w.kernel - 1) * of_w.dilation + 1,
    )


def window_of(problem: ConvTransposeProblem, layouts: Layouts, out_chunk: int, tile: Four) -> tuple[StageBox, int]:
    """The window of ``tile`` positions in ``out_chunk`` channels of the output gradient, in pieces.

    The second result is the skew: elements by which the window's rows begin early, so that pieces are aligned.
    """
    size = DTYPE_BYTES[problem.dtype]
    grad = Side(five(problem.output_shape), layouts.output)
    extent = extent_of_window(problem, tile)
    if grad.channels_last:
        piece = channel_piece(grad, problem.out_channels_per_group, out_chunk, size, layouts.aligned)
        return StageBox(extent, piece, size * (math.prod(extent) | 1), math.prod(extent)), 0
    axis = problem.axes3[2]
    whole_rows = tile[3] >= problem.input_size[-1]
    piece = row_piece(grad, size, layouts.aligned, 0 if whole_rows else tile[3] * axis.stride)
    skew = -axis.padding % piece
    extent = (*extent[:3], round_up(skew + extent[3], piece))
    pitch = 16 * (math.ceil(math.prod(extent) * size / 16) | 1)
    return StageBox(extent, piece, pitch, math.prod(extent) // piece), skew


def as_one_channel(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[ConvTransposeProblem, Layouts] | None:
    """A layer with channels_last output restated as a layer of one output channel, and its layouts.

    A row of pixels becomes one row of single-channel pixels: each pixel's channels, then the next pixel's. So do taps
    along the width, and one step along it becomes C_out steps. None if pixels or taps along the width have gaps.
    """
    channels, axis = problem.out_channels, problem.axes3[2]
    if problem.groups > 1 or not problem.channels_last or (axis.dilation > 1 and axis.kernel > 1):
        return None
    batch, _, depth, height, width = layouts.output
    if problem.output_size[-1] * channels >= 2**31:  # kernels count columns in 32 bits
        return None
    if width != channels or (channels > 1 and layouts.output[1] != 1):
        return None

    def widened(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:-1], values[-1] * channels)

    narrow = replace(
        problem,
        out_channels=1,
        kernel_size=widened(problem.kernel_size),
        stride=widened(problem.stride),
        padding=widened(problem.padding),
        output_padding=widened(problem.output_padding),
        dilation=(*problem.dilation[:-1], 1),
        channels_last=False,
    )
    return narrow, replace(layouts, output=(batch, 0, depth, height, 1))


def rows_as_one_channel(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[ConvTransposeProblem, Layouts] | None:
    """`as_one_channel` for an input gradient, whose weight must be channels_last as well; NCHW is unchanged."""
    if not problem.channels_last:
        return problem, layouts
    alike = layouts.weight_channels_last or problem.out_channels == 1
    return as_one_channel(problem, layouts) if alike else None


def widths(channels: int, multiple: int) -> list[int]:
    """N of a wgmma worth trying: equal shares of the channels, rounded up to a ``multiple``."""
    return sorted({round_up(equal_part(channels, MOST_COLUMNS >> i), multiple) for i in range(3)})


def channel_pitch(problem: ConvTransposeProblem, channels: int) -> int:
    """Bytes of the channels in a row of a box, 128, 64 or 32: the widest with the least padding."""
    pixel = channels * DTYPE_BYTES[problem.dtype]
    return min((128, 64, 32), key=lambda pitch: (round_up(pixel, pitch), -pitch))
