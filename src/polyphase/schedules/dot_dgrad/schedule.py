"""The input gradient of layers with long kernels, as dot products, ``kernels/dot_dgrad.cu``."""

from __future__ import annotations

import math
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass, accumulator_bytes
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import parted
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import sides_of
from polyphase.schedules.cost import slower_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import affordable_planes, layer_constants
from polyphase.schedules.window_gemm.window import rows_as_one_channel

_WARPS = 8
_LEAST_TAPS = 32  # one for each lane
_CHAIN = 64  # approximate products of a lane in one chain
_RESIDENT = 2  # resident blocks of a multiprocessor, by registers


class DotDgradConfig(NamedTuple):
    """The compile-time shape of ``dot_dgrad.cu``: input channels of a warp, which has 32 sums."""

    in_tile: int

    @property
    def positions(self) -> int:
        """Neighbouring positions along w of a warp."""
        return 32 // self.in_tile


_CONFIGS = tuple(DotDgradConfig(in_tile) for in_tile in (16, 8, 4, 2, 1))


class DotDgrad(Schedule):
    """The lanes of a warp split the taps."""

    name = "dot_dgrad"
    passes = (Pass.INPUT_GRAD,)
    adapts = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        read = rows_as_one_channel(problem, Layouts.dense(problem))
        if read is None:
            return "in channels_last needs one group, and no dilation along the width"
        if read[0].taps < _LEAST_TAPS:
            return f"has fewer taps than a warp has lanes: {read[0].taps} (at least {_LEAST_TAPS})"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return "columns or warps are more than 32 bits count"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        if rows_as_one_channel(problem, layouts) is None:
            return None
        problem = standard(problem)
        read = rows_as_one_channel(problem, Layouts.dense(problem))
        return None if read is None else read[0]

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[DotDgradConfig]:
        least = accumulator_bytes(at.dtype) // 4  # with fewer channels doubles would spill
        most = 2 * max(least, at.in_channels_per_group)
        return [each for each in _CONFIGS if least <= each.in_tile < most]

    def seconds(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, config: DotDgradConfig) -> float:
        return _seconds(at, config, device)[0]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: DotDgradConfig
    ) -> Cost | None:
        read = rows_as_one_channel(problem, layouts)
        assert read is not None
        return _seconds(read[0], config, device, read[1].output[4]) if _is_countable(read[0], config) else None

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: DotDgradConfig
    ) -> Program:
        dense = layouts.input == dense_strides(problem.input_shape, problem.channels_last)
        read = rows_as_one_channel(problem, layouts)
        assert read is not None
        problem, layouts = read
        tiles_w, tiles = _tiles(problem, config)
        splits = _splits(problem, config, device) if dense else 1
        length, splits = parted(problem.out_channels_per_group, splits)
        x, g = sides_of(problem, layouts)
        source = KernelSource(
            kernel=self.name,
            dtype=problem.dtype,
            wide_offsets=True,
            constants=(
                *layer_constants(problem, pass_, layouts.weight_channels_last),
                ("WIDTH_APART", g.strides[4] != 1 and g.shape[4] > 1),
                ("IN_TILE", config.in_tile),
                ("PIECE", 32 * _CHAIN),
                ("FLUSH", max(1, round(_CHAIN / math.ceil(problem.taps / 32)))),
                ("MIN_BLOCKS", _RESIDENT // (accumulator_bytes(problem.dtype) // 4)),
            ),
        )
        params = {
            "g": g,
            "x": x,
            "batch": problem.batch,
            "groups": problem.groups,
            "tiles_w": tiles_w,
            "tiles": tiles,
            "splits": splits,
            "split_length": length,
            "plane": problem.elements[0] if splits > 1 else 0,
        }
        main = main_step(source, _blocks(problem, config) * splits, 32 * _WARPS, 0, params)
        return assemble(problem, pass_, main, splits=splits, may_split=True)


def _is_countable(problem: ConvTransposeProblem, config: DotDgradConfig) -> bool:
    """Whether columns that a tile reads, and warps, can be counted in 32 bits."""
    axis = problem.axes3[2]
    beyond = 32 * axis.stride + axis.kernel * axis.dilation
    columns = problem.output_size[-1] + axis.padding + 2 * beyond
    return max(columns, _WARPS * _blocks(problem, config)) < 2**31


def _tiles(problem: ConvTransposeProblem, config: DotDgradConfig) -> tuple[int, int]:
    """Tiles along w, and tiles of all positions."""
    *others, width = problem.input_size
    along = math.ceil(width / config.positions)
    return along, problem.batch * math.prod(others) * along


def _blocks(problem: ConvTransposeProblem, config: DotDgradConfig) -> int:
    """Blocks of a split."""
    channels = math.ceil(problem.in_channels_per_group / config.in_tile) * problem.groups
    return math.ceil(_tiles(problem, config)[1] / _WARPS) * channels


def _splits(problem: ConvTransposeProblem, config: DotDgradConfig, device: DeviceInfo) -> int:
    """Split-K count of the output channels, with which blocks fill the machine."""
    room = 2 * _RESIDENT * device.multiprocessors // max(1, _blocks(problem, config))
    return max(1, min(problem.out_channels_per_group, room, affordable_planes(problem, Pass.INPUT_GRAD)))


_FEW_WAVES = 4  # with fewer, the last wave counts as a whole one


def _seconds(
    problem: ConvTransposeProblem, config: DotDgradConfig, device: DeviceInfo, apart: int = 1
) -> tuple[float, str]:
    """Predicted time, and what bounds it; ``apart``: elements between columns of the output gradient."""
    splits, bytes_ = _splits(problem, config, device), accumulator_bytes(problem.dtype)
    steps = math.ceil(problem.out_channels_per_group / splits) * math.ceil(problem.taps / 32)
    terms = costs("dot_dgrad", device)
    step = terms[f"step{'_halves' if DTYPE_BYTES[problem.dtype] < 4 else ''}_{config.in_tile}"] * bytes_ / 4
    lines = min(32.0, 32 * apart * DTYPE_BYTES[problem.dtype] / 128)  # lines that a warp's load touches
    step = max(step, config.positions * lines)
    waves = _blocks(problem, config) * splits / (_RESIDENT * device.multiprocessors)
    waves = math.ceil(waves) if waves < _FEW_WAVES else waves
    cycles = waves * _RESIDENT * _WARPS * (steps * step + terms.end) + terms.launch
    planes = 2 * bytes_ * splits * problem.elements[0] / device.copy_bytes_per_second
    sums = terms.reduce + planes if splits > 1 else 0.0
    # L2 traffic: weights once for each block; elements that a warp's positions share, once.
    axis = problem.axes3[2]
    row = (axis.kernel - 1) * axis.dilation + 1
    share = min(1.0, ((config.positions - 1) * axis.stride + row) / (config.positions * row))
    products = _blocks(problem, config) * problem.out_channels_per_group * problem.taps
    read = products * DTYPE_BYTES[problem.dtype] * (config.in_tile + _WARPS * config.positions * share)
    moving = max(problem.bytes, read / terms.from_l2) / device.copy_bytes_per_second
    return slower_of(cycles / device.clock_hz + sums, moving)
