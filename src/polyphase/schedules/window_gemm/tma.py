"""Both gradients of tensors in channels_last, ``kernels/window_dgrad_tma.cu`` and ``kernels/window_wgrad_tma.cu``."""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import parted
from polyphase.problem.layouts import Layouts, dense_strides, five
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import HALF_COPIES, WEIGHT, WORKSPACE, Step, main_step
from polyphase.program.tensor_map import TensorMap
from polyphase.program.transpose import Transposed, to_halves
from polyphase.schedules.cells import Side, sides_of
from polyphase.schedules.cost import transpose_seconds
from polyphase.schedules.schedule import Cost
from polyphase.schedules.tensor_cores import MAX_BOX_STEP, pack_for_boxes, pixel_map, pixel_strides, weight_map
from polyphase.schedules.tiles import Four, constants_of, layer_constants
from polyphase.schedules.window_gemm.tma_config import (
    ALONE,
    TmaConfig,
    legal_configs,
    stage_bytes,
    tile_extent,
)
from polyphase.schedules.window_gemm.tma_cost import (
    depth_stages,
    estimate,
    flush_of,
    input_splits,
    input_work_tiles,
    weight_blocks,
    weight_splits,
)
from polyphase.schedules.window_gemm.window import FLUSH, Gradient, channel_pitch, input_tiles, is_long_sum

_ALONE_OFFERED = 2  # least number of offered configs that have a window for each tap


class _WindowTma(Gradient):
    """What the two kernels share."""

    adapts = True

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} has no wgmma"
        if not problem.channels_last:
            return "needs NHWC"
        for what, channels in self._channels(problem).items():
            if channels * DTYPE_BYTES[problem.dtype] % 16:
                pixel = channels * DTYPE_BYTES[problem.dtype]
                return f"a group's {what} channels, {pixel} bytes, are no multiple of 16 bytes"
        if max(problem.stride) > MAX_BOX_STEP:
            return f"an element stride of {max(problem.stride)} is too large for TMA (at most {MAX_BOX_STEP})"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return "no config fits: every box holds channels of the next group as well, which may be NaN"

    def _channels(self, problem: ConvTransposeProblem) -> dict[str, int]:
        """Channels of a group that TMA boxes are cut from, by the tensor's name."""
        raise NotImplementedError

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        x, grad = sides_of(problem, layouts)
        read = (x, grad) if pass_ is Pass.WEIGHT_GRAD else (grad,)
        lie = all(pixel_strides(problem.dtype, side) for side in read) and layouts.input[1] == 1 and layouts.aligned
        return standard(problem) if lie else None

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TmaConfig]:
        return sorted(legal_configs(at, pass_, device))

    def arranged(self, order: list[TmaConfig]) -> list[TmaConfig]:
        """Some configs with a window for each tap first: shared windows fix the tile, which may not suit images."""
        alone = [config for config in order if config.taps == ALONE]
        return list(dict.fromkeys((*order[: self.offered - _ALONE_OFFERED], *alone[:_ALONE_OFFERED], *order)))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Cost:
        return estimate(problem, pass_, config, device)

    def _constants(
        self, problem: ConvTransposeProblem, config: TmaConfig, row_pitch: int, column_pitch: int, scaled: bool
    ) -> tuple[tuple[str, Constant], ...]:
        mn_major = self.pass_ is Pass.WEIGHT_GRAD
        return (
            *layer_constants(problem, self.pass_),
            ("SCALED", scaled),
            ("LOADERS", config.loaders),
            *constants_of(config, "row_groups column_groups row_tiles lines columns steps"),
            ("STAGES", config.buffers),
            ("ROW_PITCH", row_pitch),
            ("COLUMN_PITCH", column_pitch),
            ("MN_MAJOR", mn_major),
            ("MIN_BLOCKS", config.resident),
            ("WGMMA", True),
            ("BY_THREADS", mn_major and DTYPE_BYTES[problem.dtype] == 4),
        )


class WindowDgradTma(_WindowTma):
    """The input gradient: for each tap a box of the output gradient times a box of the weight."""

    passes = (Pass.INPUT_GRAD,)
    name = "window_dgrad_tma"

    def _channels(self, problem: ConvTransposeProblem) -> dict[str, int]:
        return {"output": problem.out_channels_per_group}

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TmaConfig
    ) -> Cost:
        """With the bytes of packing weights; its launch is part of the kernel's."""
        seconds, bound = estimate(problem, pass_, config, device)
        weights = problem.elements[1] * DTYPE_BYTES[problem.dtype] if _is_packed(problem, layouts) else 0
        return seconds + transpose_seconds(2 * weights, device, 0), bound

    def program(
        self,
        problem: ConvTransposeProblem,
        pass_: Pass,
        device: DeviceInfo,
        layouts: Layouts,
        config: TmaConfig,
        given: ConvTransposeProblem | None = None,
    ) -> Program:
        """The program of one config. ``given``: the layer whose weight it reads, which may have fewer channels.

        If that is in float32 and the ``problem`` in float16, operands are copies (kernels/operand/half_copies.cuh).
        """
        given = given or problem
        scaled = given.dtype != problem.dtype
        tile = tile_extent(problem, pass_, config)
        tiles = input_tiles(problem, tile)
        work_tiles, stages = input_work_tiles(problem, config), depth_stages(problem, config)
        dense = layouts.input == dense_strides(problem.input_shape, not config.first)
        length, splits = parted(stages, input_splits(problem, config, device)[0] if dense else 1)
        pitch = config.depth_bytes
        flush = max(1, FLUSH // 2 * DTYPE_BYTES[problem.dtype] // pitch) if is_long_sum(problem) else stages
        packed = scaled or _is_packed(problem, layouts) or given.out_channels != problem.out_channels
        packs = (_pack(problem, given, layouts.weight_channels_last),) if packed else ()
        workspace = problem.elements[1] * DTYPE_BYTES[problem.dtype] if packed else 0
        constants = (
            *self._constants(problem, config, pitch, pitch, scaled),
            ("FLUSH", flush),
            ("CHANNELS_FIRST", config.first),
        )
        form = WgmmaForm(config.columns, problem.dtype)
        source = KernelSource(self.name, problem.dtype, True, constants, (form,))
        x, grad = sides_of(problem, layouts)
        params = {
            "x": x,
            "batch": problem.batch,
            "groups": problem.groups,
            "tile_extent": tile,
            "tiles": tiles,
            "splits": splits,
            "split_length": length,
            "plane": problem.elements[0] if splits > 1 else 0,
        }
        maps = _grad_map(problem, grad, tile, pitch), weight_map(problem, pitch, config.columns)
        blocks = min(work_tiles * splits, device.multiprocessors * config.resident)
        shared_bytes = config.buffers * stage_bytes(problem, pass_, config)
        main = main_step(source, blocks, config.threads, shared_bytes, params, maps)
        result = replace(problem, dtype=given.dtype)
        program = assemble(result, pass_, main, packs=packs, workspace_bytes=workspace, splits=splits, may_split=True)
        return _reading_scales(program) if scaled else program


class WindowWgradTma(_WindowTma):
    """The weight gradient: boxes of the input times windows of the output gradient, of one or several taps; split-K."""

    passes = (Pass.WEIGHT_GRAD,)
    name = "window_wgrad_tma"

    def _channels(self, problem: ConvTransposeProblem) -> dict[str, int]:
        return {"input": problem.in_channels_per_group, "output": problem.out_channels_per_group}

    def program(
        self,
        problem: ConvTransposeProblem,
        pass_: Pass,
        device: DeviceInfo,
        layouts: Layouts,
        config: TmaConfig,
        given: ConvTransposeProblem | None = None,
    ) -> Program:
        """The program of one config. ``given``: the layer in its dtype, as for an input gradient."""
        given = given or problem
        scaled = given.dtype != problem.dtype
        tile = tile_extent(problem, pass_, config)
        tiles = input_tiles(problem, tile)
        total, blocks = math.prod(tiles), weight_blocks(problem, config)
        planes = weight_splits(problem, config, device)[0]
        flush = flush_of(tile)
        narrowed = planes == 1 and total <= flush and not scaled
        work_tiles = math.prod(blocks) * problem.groups * planes
        x, grad = sides_of(problem, layouts)
        of_x, windows = channel_pitch(problem, problem.in_channels_per_group), config.windows
        boxes = tile if windows.taps == ALONE else (1, *windows.extents(problem))
        constants = (
            *self._constants(problem, config, of_x, windows.pitch, scaled),
            *zip(("WINDOW_D", "WINDOW_H", "WINDOW_W"), windows.taps),
            *zip(("TILE_D", "TILE_H", "TILE_W"), windows.lanes),
        )
        both = WgmmaForm(config.columns, problem.dtype, transpose_a=True, transpose_b=True)
        forms = () if dict(constants)["BY_THREADS"] else (both,)
        source = KernelSource(self.name, problem.dtype, True, constants, forms)
        params = {
            "groups": problem.groups,
            "blocks": blocks,
            "tile_extent": tile,
            "tiles": tiles,
            "ahead": _digits(planes, tiles),
            "splits": planes,
            "flush": flush,
            "narrowed": narrowed,
            "work_tiles": work_tiles,
            "all_tiles": total,
            "plane": problem.elements[1],
        }
        maps = (
            pixel_map(problem.dtype, x, tile, of_x),
            _grad_map(problem, grad, boxes, windows.pitch, tensor=1),
        )
        grid = min(work_tiles, device.multiprocessors * config.resident)
        shared_bytes = config.buffers * stage_bytes(problem, pass_, config)
        main = main_step(source, grid, config.threads, shared_bytes, params, maps)
        result = replace(problem, dtype=given.dtype)
        program = assemble(result, pass_, main, splits=planes, dst_channels_last=problem.taps > 1, narrowed=narrowed)
        return _reading_scales(program) if scaled else program


def _reading_scales(program: Program) -> Program:
    """A program whose main step also reads the scales of its operands, which are copies in float16."""
    first, second, *_, written = program.main.operands
    return program.with_main(replace(program.main, operands=(first, second, HALF_COPIES, written)))


def _is_packed(problem: ConvTransposeProblem, layouts: Layouts) -> bool:
    """Whether a step must transpose the weight so that output channels are innermost."""
    return problem.taps > 1 and problem.out_channels_per_group > 1 and not layouts.weight_channels_last


def _pack(problem: ConvTransposeProblem, given: ConvTransposeProblem, channels_last: bool) -> Step:
    """Transposes the weight of the ``given`` layer so that output channels are innermost, and pads these with zeros."""
    if given.dtype == problem.dtype:
        return pack_for_boxes(given, channels_last, problem.out_channels_per_group)
    shape = five(given.weight_shape)
    how = Transposed(shape, dense_strides(shape, channels_last), padded=problem.out_channels_per_group)
    return replace(to_halves(how, which=1), operands=(WEIGHT, HALF_COPIES, WORKSPACE))


def _grad_map(problem: ConvTransposeProblem, grad: Side, tile: Four, pitch: int, tensor: int = 0) -> TensorMap:
    """The map whose boxes are the outputs' gradients of a tile of positions at one tap."""
    return pixel_map(problem.dtype, grad, tile, pitch, tuple(axis.stride for axis in problem.axes3), tensor)


def _digits(count: int, tiles: Four) -> Four:
    """``count`` in mixed radix: tiles along n, d, h and w."""
    count, w = divmod(count, tiles[3])
    count, h = divmod(count, tiles[2])
    n, d = divmod(count, tiles[1])
    return n, d, h, w
