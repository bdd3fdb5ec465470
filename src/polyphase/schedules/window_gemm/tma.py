"""The weight gradient of tensors in channels_last, ``kernels/window_wgrad_tma.cu``."""

from __future__ import annotations

import math

from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts, five
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.program.tensor_map import TensorMap, tma_strides
from polyphase.schedules.schedule import Cost
from polyphase.schedules.tiles import Four, constants_of, layer_constants, tiles_of
from polyphase.schedules.window_gemm.tma_config import ALONE, TmaConfig, legal_configs, stage_bytes, tile_lanes
from polyphase.schedules.window_gemm.tma_cost import estimate, weight_blocks, weight_splits
from polyphase.schedules.window_gemm.window import FLUSH, Gradient, channel_pitch

_ALONE_OFFERED = 2  # at least so many configs that are offered have a window for each tap
_MAX_BOX_STEP = 8  # TMA's largest element stride


class WindowWgradTma(Gradient):
    """Boxes of the input times windows of the output gradient, of one or several taps; split-K."""

    passes = (Pass.WEIGHT_GRAD,)
    name = "window_wgrad_tma"
    adapts = True

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} has no wgmma"
        if not problem.channels_last:
            return "needs NHWC"
        channels = {"input": problem.in_channels_per_group, "output": problem.out_channels_per_group}
        for what, count in channels.items():
            if (pixel := count * DTYPE_BYTES[problem.dtype]) % 16:
                return f"a group's {what} channels, {pixel} bytes, are no multiple of 16 bytes"
        if max(problem.stride) > _MAX_BOX_STEP:
            return f"TMA takes every {_MAX_BOX_STEP}th element at most, not every {max(problem.stride)}th"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return "no config fits: every box holds channels of the next group as well, which may be NaN"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        read = [_pixel_strides(problem, layouts, output) for output in (False, True)]
        return None if None in read or layouts.input[1] != 1 or not layouts.aligned else standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TmaConfig]:
        return sorted(legal_configs(at, device))

    def arranged(self, order: list[TmaConfig]) -> list[TmaConfig]:
        """Some with a window for each tap among the first: shared windows fix the tile, which may not suit images."""
        alone = [config for config in order if config.taps == ALONE]
        first = order[: self.offered - _ALONE_OFFERED]
        first += [config for config in alone[:_ALONE_OFFERED] if config not in first]
        return first + [config for config in order if config not in first]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Cost:
        return estimate(problem, config, device)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Program:
        lanes = tile_lanes(problem, config)
        tiles = tiles_of(problem.batch, five(problem.input_shape)[2:], lanes)
        total, blocks = math.prod(tiles), weight_blocks(problem, config)
        planes = weight_splits(problem, config, total, device)[0]
        flush = max(1, FLUSH // math.prod(lanes))
        narrowed = planes == 1 and total <= flush
        items = math.prod(blocks) * problem.groups * planes
        of_x, windows = channel_pitch(problem, problem.in_channels_per_group), config.windows
        boxes = lanes if windows.taps == ALONE else (1, *windows.extents(problem))
        by_threads = DTYPE_BYTES[problem.dtype] == 4
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_),
            *constants_of(config, "row_groups column_groups row_tiles lines columns steps"),
            ("STAGES", config.buffers),
            ("ROW_PITCH", of_x),
            ("COLUMN_PITCH", windows.pitch),
            ("MIN_BLOCKS", 1),
            ("WGMMA", True),
            ("BY_THREADS", by_threads),
            *zip(("WINDOW_D", "WINDOW_H", "WINDOW_W"), windows.taps),
            *zip(("TILE_D", "TILE_H", "TILE_W"), windows.lanes),
        )
        forms = () if by_threads else (WgmmaForm(config.columns, problem.dtype, transpose_a=True, transpose_b=True),)
        source = KernelSource(self.name, problem.dtype, True, constants, forms)
        params = {
            "groups": problem.groups,
            "blocks": blocks,
            "tile_extent": lanes,
            "tiles": tiles,
            "ahead": _digits(planes, tiles),
            "splits": planes,
            "flush": flush,
            "narrowed": narrowed,
            "items": items,
            "all_tiles": total,
            "plane": problem.elements[1],
        }
        maps = (
            _pixel_map(problem, layouts, lanes, of_x, output=False),
            _pixel_map(problem, layouts, boxes, windows.pitch, output=True),
        )
        grid = min(items, device.multiprocessors)
        shared_bytes = config.buffers * stage_bytes(problem, config)
        main = main_step(source, grid, config.threads, shared_bytes, params, maps)
        return assemble(problem, pass_, main, splits=planes, dst_channels_last=problem.taps > 1, narrowed=narrowed)


def _pixel_strides(problem: ConvTransposeProblem, layouts: Layouts, output: bool) -> tuple[int, ...] | None:
    """Strides in bytes of a tensor map of the input or the output gradient; None where TMA cannot read it."""
    size = DTYPE_BYTES[problem.dtype]
    shape, strides = (problem.output_shape, layouts.output) if output else (problem.input_shape, layouts.input)
    batch, channels, depth, height, width = five(shape)
    image, channel, slab, row, column = (step * size for step in strides)
    if channel != size and channels > 1:
        return None
    return tma_strides(zip((width, height, depth, batch), (column, row, slab, image)))


def _pixel_map(problem: ConvTransposeProblem, layouts: Layouts, lanes: Four, pitch: int, output: bool) -> TensorMap:
    """The map whose boxes are ``pitch`` bytes of channels at a tile's positions: of x, or of g with element strides."""
    batch, channels, depth, height, width = five(problem.output_shape if output else problem.input_shape)
    strides = _pixel_strides(problem, layouts, output)
    assert strides is not None
    steps = (axis.stride if output and count > 1 else 1 for axis, count in zip(problem.axes3[::-1], lanes[:0:-1]))
    return TensorMap(
        problem.dtype,
        (channels, width, height, depth, max(1, batch)),
        strides,
        (pitch // DTYPE_BYTES[problem.dtype], *lanes[::-1]),
        pitch,
        True,
        int(output),
        (1, *steps, 1),
    )


def _digits(count: int, tiles: Four) -> Four:
    """``count`` in mixed radix: tiles along n, d, h and w."""
    count, w = divmod(count, tiles[3])
    count, h = divmod(count, tiles[2])
    n, d = divmod(count, tiles[1])
    return n, d, h, w
