"""Both gradients by wgmma, ``kernels/window_dgrad_wgmma.cu`` and ``kernels/window_wgrad_wgmma.cu``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyphase.costs import costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import parted
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import is_tiny, standard, typical
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import sides_of
from polyphase.schedules.cost import overlapped_time, slower_of, waves_of
from polyphase.schedules.schedule import Cost
from polyphase.schedules.tensor_cores import OPERATION_BYTES
from polyphase.schedules.tiles import affordable_planes, constants_of, layer_constants, splits_in_few_waves
from polyphase.schedules.window_gemm.wgmma_tile import (
    CONSUMER_GROUPS,
    LOADERS,
    Tiling,
    WgmmaConfig,
    legal_configs,
    shared_bytes_of,
    stage_cycles,
    stored_cycles,
    tiling_of,
)
from polyphase.schedules.window_gemm.wgmma_window import in_pairs, rows_in_pairs
from polyphase.schedules.window_gemm.window import (
    FLUSH,
    Gradient,
    as_one_channel,
    blocks_of,
    is_long_sum,
    split_params,
)

_SMALLER = 1536, 24, 16  # image side in 1-D, 2-D, 3-D of the second size at which configs are scored
_LEAST_SPLIT = 8  # least tiles of a weight gradient's split
_MOST_WAVES = 4  # most waves of blocks with splits
_PRELOADED = 4  # row tiles × column tiles whose earlier sums a weight gradient's flush loads together
_PERSISTENT = 4  # stages of an input gradient's tile from which on blocks are persistent


class _WindowWgmma(Gradient):
    """What the two kernels share."""

    adapts = True
    compared = 16

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} has no wgmma"
        if problem.channels_last and (self.pass_ is Pass.INPUT_GRAD or DTYPE_BYTES[problem.dtype] != 2):
            return "needs NCHW (NHWC only for the weight gradient in 16-bit types)"
        if problem.channels_last and problem.out_channels * DTYPE_BYTES[problem.dtype] % 32 == 0:
            return "left to window_wgrad_tma, as C_out fills whole boxes of 32 bytes"
        layouts = Layouts.dense(problem)
        if _input_differs(problem, self.pass_, layouts):
            return "needs several input channels in NHWC"
        if _as_read(problem, self.pass_, layouts) is None:
            return "needs one group in NHWC, and taps without dilation along the width, which C_out is folded into"
        row = problem.out_channels_per_group * problem.taps * DTYPE_BYTES[problem.dtype]
        if self.pass_ is Pass.INPUT_GRAD and row % 16:
            return f"an input channel's weights, {row} bytes, are no multiple of 16 bytes"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return f"no stage of {problem.taps} taps fits shared memory, or none whose rows TMA takes"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        return None if _as_read(problem, pass_, layouts) is None else standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[WgmmaConfig]:
        """All configs; among equally fast ones the deepest pipeline comes first."""
        return sorted(legal_configs(at, pass_), key=lambda config: (-config.buffers, config))

    def others(self, at: ConvTransposeProblem) -> list[ConvTransposeProblem]:
        """A second, smaller size: a tile for large images may waste small ones."""
        return [] if is_tiny(at) else [typical(at, _SMALLER)]

    def score(self, at: ConvTransposeProblem, seconds: Sequence[float]) -> float:
        """Seconds per pixel, summed over both sizes, in pixels of the larger one."""
        (smaller,) = self.others(at)
        share = math.prod(at.input_size) / math.prod(smaller.input_size)
        return seconds[0] + share * seconds[1]

    def arranged(self, order: list[WgmmaConfig]) -> list[WgmmaConfig]:
        """Each shape at its best pipeline depth only."""
        best: dict[WgmmaConfig, WgmmaConfig] = {}
        for config in order:
            best.setdefault(config._replace(buffers=0), config)
        return list(best.values())

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WgmmaConfig
    ) -> Cost | None:
        read = _as_read(problem, pass_, layouts)
        if read is None:
            return None
        problem, layouts = read
        tiling = tiling_of(problem, pass_, layouts, config, device)
        return None if tiling is None else _estimate(problem, pass_, config, tiling, device)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: WgmmaConfig
    ) -> Program:
        read = _as_read(problem, pass_, layouts)
        assert read is not None
        flattened, layouts = read
        tiling = tiling_of(flattened, pass_, layouts, config, device)
        assert tiling is not None
        blocks, planes, narrowed = blocks_of(flattened, pass_, config.columns, config.out_chunk), 1, False
        params = {
            **tiling.params(flattened, layouts),
            "runs": tiling.runs,
            "skew": tiling.skew,
            "box_bytes": tiling.box_bytes,
            "table_bytes": tiling.table,
            "stage_bytes": tiling.stage,
            "window_offset": tiling.runs.bytes,
        }
        if pass_ is Pass.WEIGHT_GRAD:
            length, planes = parted(tiling.total, _splits(flattened, config, tiling, device))
            narrowed = _narrows(flattened, tiling, length)
            params |= split_params(flattened, length, tiling.total) | {
                "joined": tiling.runs.joined,
                "steps": tiling.steps,
                "flush": _flush(flattened, tiling),
                "narrowed": narrowed,
                "piece_bytes": tiling.runs.piece_bytes,
            }
        else:
            params["work_tiles"] = blocks = blocks * tiling.total
            if math.ceil(flattened.out_channels_per_group / config.out_chunk) >= _PERSISTENT:
                blocks = min(blocks, device.multiprocessors)
        source, threads = self._source(problem, flattened, pass_, config), 128 * CONSUMER_GROUPS + LOADERS
        maps = tuple(each for each in (tiling.runs.tensor_map, tiling.window_map) if each is not None)
        main = main_step(source, blocks * planes, threads, shared_bytes_of(config, tiling), params, maps)
        last = problem.channels_last and problem.taps > 1
        return assemble(problem, pass_, main, splits=planes, dst_channels_last=last, narrowed=narrowed)

    def _source(
        self, problem: ConvTransposeProblem, flattened: ConvTransposeProblem, pass_: Pass, config: WgmmaConfig
    ) -> KernelSource:
        """The kernel; ``flattened``: the layer as it reads it (`_as_read`)."""
        preloaded = max(1, _PRELOADED // config.row_tiles)
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(flattened, pass_),
            ("WARPS", 4 * CONSUMER_GROUPS + LOADERS // 32),
            ("LOAD_WARPS", LOADERS // 32),
            ("FIRST_LOAD_WARP", 4 * CONSUMER_GROUPS),
            *constants_of(config, "row_tiles out_chunk"),
            ("STAGES", config.buffers),
            ("COLUMN_TILES", config.columns // 8),
            ("PAIRS", in_pairs(flattened)),
            ("ROWS_IN_PAIRS", rows_in_pairs(flattened, pass_)),
            ("MN_MAJOR", problem.channels_last),
            ("FLUSH", _stages_summed(flattened, config)) if pass_ is Pass.INPUT_GRAD else ("PRELOADED", preloaded),
            ("MIN_BLOCKS", 1),
            ("WGMMA", True),
        )
        form = WgmmaForm(config.columns, problem.dtype, a_in_registers=True, transpose_b=problem.channels_last)
        fallbacks = tuple((("PRELOADED", tiles),) for tiles in (1, 0)) if pass_ is Pass.WEIGHT_GRAD else ()
        return KernelSource(self.name, problem.dtype, True, constants, (form,), fallbacks)


class WindowDgradWgmma(_WindowWgmma):
    """The input gradient: a tile of positions and all output channels, stage by stage."""

    passes = (Pass.INPUT_GRAD,)
    name = "window_dgrad_wgmma"


class WindowWgradWgmma(_WindowWgmma):
    """The weight gradient: all taps of some channels, in splits of batch × positions, added in a fixed order."""

    passes = (Pass.WEIGHT_GRAD,)
    name = "window_wgrad_wgmma"

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return False


def _flush(problem: ConvTransposeProblem, tiling: Tiling) -> int:
    """Stages of a weight gradient between flushes."""
    return max(1, FLUSH * DTYPE_BYTES[problem.dtype] // (OPERATION_BYTES * tiling.steps))


def _narrows(problem: ConvTransposeProblem, tiling: Tiling, length: int) -> bool:
    """Whether a split of such a ``length`` is the whole sum, with one flush: it is narrowed at once."""
    return 0 < tiling.total == length <= _flush(problem, tiling)


def _as_read(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
) -> tuple[ConvTransposeProblem, Layouts] | None:
    """The layer as the kernel reads it, whose pixels are innermost.

    None if a weight gradient's input has another format than the layer, or output channels and taps along the
    width are not contiguous.
    """
    if _input_differs(problem, pass_, layouts):
        return None
    return as_one_channel(problem, layouts) if problem.channels_last else (problem, layouts)


def _input_differs(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> bool:
    """Whether a weight gradient's input has another format than the layer; with one channel it counts as NCHW."""
    x, _ = sides_of(problem, layouts)
    return pass_ is Pass.WEIGHT_GRAD and x.channels_last != problem.channels_last


def _stages_summed(problem: ConvTransposeProblem, config: WgmmaConfig) -> int:
    """Stages of an input gradient between flushes: all of them, unless K is long."""
    stages = math.ceil(problem.out_channels_per_group / config.out_chunk)
    return max(1, FLUSH // 2 // (config.out_chunk * problem.taps)) if is_long_sum(problem) else stages


def _splits(problem: ConvTransposeProblem, config: WgmmaConfig, tiling: Tiling, device: DeviceInfo) -> int:
    """Split-K count of the positions: the most that leave no multiprocessor idle for long."""
    blocks, resident = blocks_of(problem, Pass.WEIGHT_GRAD, config.columns, config.out_chunk), device.multiprocessors
    most = min(affordable_planes(problem), _MOST_WAVES * resident // blocks)
    return parted(tiling.total, splits_in_few_waves(blocks, resident, tiling.total, _LEAST_SPLIT, most))[1]


def _estimate(
    problem: ConvTransposeProblem, pass_: Pass, config: WgmmaConfig, tiling: Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("window_wgmma", device)
    stage = stage_cycles(problem, pass_, config, tiling, terms)
    blocks = blocks_of(problem, pass_, config.columns, config.out_chunk)
    if pass_ is Pass.WEIGHT_GRAD:
        splits, size = _splits(problem, config, tiling, device), DTYPE_BYTES[problem.dtype]
        stages = math.ceil(tiling.total / splits)
        blocks *= splits
        flushes = max(1, math.ceil(stages / _flush(problem, tiling)))
        block = terms.block + flushes * terms.result * config.rows * config.columns
        alone = splits == 1 and (size == 4 or _narrows(problem, tiling, stages))
        moved = math.prod(problem.weight_shape) * (size if alone else 8 * splits + size)
        end = (0.0 if alone else terms.reduce) + moved / device.copy_bytes_per_second
    else:
        stages = math.ceil(problem.out_channels_per_group / config.out_chunk)
        blocks *= tiling.total
        block, end = terms.block + stored_cycles(problem, config, tiling.tile_extent, terms), 0.0
        if stages >= _PERSISTENT:  # persistent: a block loads its next tile in the epilogue
            block, end = block - terms.block, terms.block / device.clock_hz
    _, waves = waves_of(blocks, 1, device)
    work = waves * (stages * stage + block) / device.clock_hz + end
    moving = problem.bytes / device.copy_bytes_per_second
    return overlapped_time(work, moving, terms.overlap), slower_of(work, moving)[1]
