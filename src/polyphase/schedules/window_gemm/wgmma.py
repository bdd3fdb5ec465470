"""Both gradients by Hopper's instruction, ``kernels/window_dgrad_wgmma.cu`` and ``kernels/window_wgrad_wgmma.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from polyphase.costs import costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import parted, round_up
from polyphase.problem.layouts import Layouts, five
from polyphase.problem.sizes import is_tiny, standard, typical
from polyphase.program.params import params_of
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step
from polyphase.schedules.cells import Side
from polyphase.schedules.cost import rounds_of, slower_of
from polyphase.schedules.schedule import Cost
from polyphase.schedules.tensor_cores import OPERATION_BYTES
from polyphase.schedules.tiles import affordable_planes, constants_of, layer_constants
from polyphase.schedules.window_gemm.wgmma_tile import (
    GROUPS,
    LOADERS,
    Tiling,
    WgmmaConfig,
    shared_bytes_of,
    stage_cycles,
    tiling_of,
)
from polyphase.schedules.window_gemm.wgmma_window import in_pairs
from polyphase.schedules.window_gemm.window import Gradient, as_one_channel, blocks_of, channel_pitch

_SMALLER = 1536, 24, 16  # sides of images that have a say
_BUFFERS = (6, 5, 4, 3)  # of stages; tried from the left
_MOST_COLUMNS = 256  # of an instruction
_MOST_SUMS = 256  # columns by row tiles of a group
_FLUSH = 8192  # k that the cores sum; where an input gradient's are more, sums are half as many


class _WindowWgmma(Gradient):
    """What the two kernels share."""

    compared = 16

    def _limits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} lacks Hopper's matrix instruction"
        if problem.channels_last and (self.pass_ is Pass.INPUT_GRAD or DTYPE_BYTES[problem.dtype] != 2):
            return "reads tensors whose pixels are innermost, but for the weight gradient of half types"
        if problem.channels_last and problem.out_channels * DTYPE_BYTES[problem.dtype] % 32 == 0:
            return "output channels are whole boxes, of each tap alone"
        if _as_read(problem, self.pass_, Layouts.dense(problem)) is None:
            return "there is one input channel, or output channels and taps along the width do not lie side by side"
        row = problem.out_channels_per_group * problem.taps * DTYPE_BYTES[problem.dtype]
        if self.pass_ is Pass.INPUT_GRAD and row % 16:
            return f"an input channel's weights, {row} bytes, are no multiple of 16 bytes"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return f"no stage of {problem.taps} taps fits shared memory, or none whose rows TMA takes"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem | None:
        return None if _as_read(problem, pass_, layouts) is None else standard(problem)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[WgmmaConfig]:
        """Of equal ones that of the most buffers first."""
        found = [each._replace(buffers=count) for each in _configs(at, pass_) for count in _BUFFERS]
        return sorted(found, key=lambda config: (-config.buffers, config))

    def others(self, at: ConvTransposeProblem) -> list[ConvTransposeProblem]:
        """A smaller one: tiles of one may not fit both."""
        return [] if is_tiny(at) else [typical(at, _SMALLER)]

    def score(self, at: ConvTransposeProblem, seconds: Sequence[float]) -> float:
        """As if there were as many pixels of either size."""
        (smaller,) = self.others(at)
        share = math.prod(at.input_size) / math.prod(smaller.input_size)
        return seconds[0] + share * seconds[1]

    def arranged(self, order: list[WgmmaConfig]) -> list[WgmmaConfig]:
        """Each with its best number of buffers alone."""
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
        given, read = problem, _as_read(problem, pass_, layouts)
        assert read is not None
        problem, layouts = read
        tiling = tiling_of(problem, pass_, layouts, config, device)
        assert tiling is not None
        grad = Side(five(problem.output_shape), layouts.output)
        x = Side(five(problem.input_shape), layouts.input)
        blocks = blocks_of(problem, pass_, config.columns, config.out_chunk)
        of_pass: dict[str, int] = {}
        planes, grid = 1, blocks * tiling.total
        if pass_ is Pass.WEIGHT_GRAD:
            length, planes = parted(tiling.total, _parts(problem, config, tiling, device))
            of_pass = _weight_grad_params(problem, tiling, length)
            grid = blocks * planes
        constants: tuple[tuple[str, Constant], ...] = (
            *layer_constants(problem, pass_),
            ("WARPS", 4 * GROUPS + LOADERS // 32),
            ("LOAD_WARPS", LOADERS // 32),
            ("FIRST_LOAD_WARP", 4 * GROUPS),
            *constants_of(config, "row_tiles out_chunk buffers"),
            ("COLUMN_TILES", config.columns // 8),
            ("PAIRS", in_pairs(problem)),
            ("TRANSPOSED", given.channels_last),
            *((("FLUSH", _stages_summed(problem, config)),) if pass_ is Pass.INPUT_GRAD else ()),
            ("MIN_BLOCKS", 1),
            ("WGMMA", True),
        )
        form = WgmmaForm(config.columns, problem.dtype, a_in_registers=True, transpose_b=given.channels_last)
        source = KernelSource(self.name, problem.dtype, True, constants, (form,))
        params = params_of(source).pack(
            x=x,
            g=grad,
            window=tiling.window,
            runs=tiling.runs,
            batch=problem.batch,
            lanes=tiling.lanes,
            tiles=tiling.tiles,
            skew=tiling.skew,
            box_bytes=tiling.box_bytes,
            table_bytes=tiling.table,
            stage_bytes=tiling.stage,
            window_bytes=tiling.window_at,
            **of_pass,
        )
        main = Step(
            source=source,
            grid=(grid, 1, 1),
            block=128 * GROUPS + LOADERS,
            shared_bytes=shared_bytes_of(config, tiling),
            params=params,
            tensor_maps=tuple(each for each in (tiling.runs.tensor_map, tiling.window_map) if each is not None),
        )
        return assemble(problem, pass_, main, splits=planes, dst_channels_last=given.channels_last and given.taps > 1)


class WindowDgradWgmma(_WindowWgmma):
    """The input gradient: a tile of positions and all output channels, stage by stage."""

    passes = (Pass.INPUT_GRAD,)
    name = "window_dgrad_wgmma"


class WindowWgradWgmma(_WindowWgmma):
    """The weight gradient: all taps of some channels, in parts of batch × positions that are added in a fixed order."""

    passes = (Pass.WEIGHT_GRAD,)
    name = "window_wgrad_wgmma"
    adapts = True

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return False


def _weight_grad_params(problem: ConvTransposeProblem, tiling: Tiling, length: int) -> dict[str, int]:
    """What the weight gradient's parameters have beside the input gradient's; ``length`` of a part in tiles."""
    return {
        "groups": problem.groups,
        "joined": tiling.joined,
        "steps": tiling.steps,
        "flush": max(1, _FLUSH * DTYPE_BYTES[problem.dtype] // (OPERATION_BYTES * tiling.steps)),
        "piece_bytes": tiling.runs.piece_bytes,
        "part_length": length,
        "all_tiles": tiling.total,
        "plane": math.prod(problem.weight_shape),
    }


def _as_read(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
) -> tuple[ConvTransposeProblem, Layouts] | None:
    """The layer as the kernel reads it, whose pixels are innermost.

    None where a weight gradient's input lies in another format than the layer's, or output channels and taps along the
    width do not lie side by side.
    """
    x = Side(five(problem.input_shape), layouts.input)
    if pass_ is Pass.WEIGHT_GRAD and x.channels_last != problem.channels_last:
        return None
    return as_one_channel(problem, layouts) if problem.channels_last else (problem, layouts)


def _stages_summed(problem: ConvTransposeProblem, config: WgmmaConfig) -> int:
    """Stages of an input gradient that the cores sum: all, unless they are more than is good for the result."""
    stages = math.ceil(problem.out_channels_per_group / config.out_chunk)
    return max(1, _FLUSH // (config.out_chunk * problem.taps)) if _is_long(problem) else stages


def _is_long(problem: ConvTransposeProblem) -> bool:
    return problem.out_channels_per_group * problem.taps > _FLUSH


def _parts(problem: ConvTransposeProblem, config: WgmmaConfig, tiling: Tiling, device: DeviceInfo) -> int:
    """Parts of the positions: the most that leave no multiprocessor idle for long."""
    blocks = blocks_of(problem, Pass.WEIGHT_GRAD, config.columns, config.out_chunk)
    most = max(1, min(affordable_planes(problem), tiling.total // 8, 4 * device.multiprocessors // blocks))

    def cost(parts: int) -> tuple[int, int]:
        return -(-blocks * parts // device.multiprocessors) * (-(-tiling.total // parts) + 4), parts

    # In as many rounds of blocks there are as many parts as may be, but for those that leave stages as long.
    rounds = range(1, -(-blocks * most // device.multiprocessors) + 1)
    fullest = (min(most, max(1, count * device.multiprocessors // blocks)) for count in rounds)
    lengths = {max(1, -(-tiling.total // parts)) for parts in fullest}
    return min((max(1, -(-tiling.total // length)) for length in lengths), key=cost)


def _estimate(
    problem: ConvTransposeProblem, pass_: Pass, config: WgmmaConfig, tiling: Tiling, device: DeviceInfo
) -> tuple[float, str]:
    """Predicted time, and what bounds it."""
    terms = costs("window_wgmma", device)
    stage = stage_cycles(problem, pass_, config, tiling, terms)
    blocks = blocks_of(problem, pass_, config.columns, config.out_chunk)
    block = terms.block + terms.result * config.rows * config.columns
    if pass_ is Pass.WEIGHT_GRAD:
        parts = _parts(problem, config, tiling, device)
        stages = math.ceil(tiling.total / parts)
        blocks *= parts
        end = terms.reduce + 8 * parts * math.prod(problem.weight_shape) / device.copy_bytes_per_second
    else:
        stages = math.ceil(problem.out_channels_per_group / config.out_chunk)
        blocks *= tiling.total
        end = 0.0
    _, rounds = rounds_of(blocks, 1, device)
    work = rounds * (stages * stage + block) / device.clock_hz + end
    floor = problem.bytes / device.copy_bytes_per_second
    return slower_of(work, floor)


def _configs(problem: ConvTransposeProblem, pass_: Pass) -> Iterator[WgmmaConfig]:
    """Configs worth a thought, their buffers left open."""
    out, taps, size = problem.out_channels_per_group, problem.taps, DTYPE_BYTES[problem.dtype]
    if problem.channels_last:  # all output channels are a block's, as if they were taps
        out, taps = 1, out * taps
    operation = OPERATION_BYTES // size
    most = _MOST_SUMS // 2 if pass_ is Pass.INPUT_GRAD and _is_long(problem) else _MOST_SUMS
    unit = channel_pitch(problem, problem.in_channels_per_group) // size if problem.channels_last else 8
    widths = {
        round_up(math.ceil(problem.in_channels_per_group / math.ceil(problem.in_channels_per_group / widest)), unit)
        for widest in (_MOST_COLUMNS, 128, 64)
    }
    for columns, row_tiles in itertools.product(sorted(widths), (1, 2, 3, 4)):
        if columns * row_tiles > most:
            continue
        config = WgmmaConfig(row_tiles, columns, 1, 1, 3)
        if pass_ is Pass.WEIGHT_GRAD:
            if taps > config.rows:
                continue
            chunk = math.ceil(out / math.ceil(out * taps / (config.rows // taps * taps)))
            for positions in (4 * operation, 8 * operation, 16 * operation):
                yield config._replace(out_chunk=chunk, positions=positions)
        else:
            for chunk in (1, 2, 4, 8, 16, 32, 64, 128):
                if chunk * taps % operation == 0 and 2 <= chunk * taps // operation <= 32 and chunk < 2 * out:
                    yield config._replace(out_chunk=chunk, positions=config.rows)
