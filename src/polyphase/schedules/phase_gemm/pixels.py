"""Layers whose kernel is their stride on Hopper's tensor cores, ``kernels/phase_gemm_pixels.cu``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import standard
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step, main_step, plain_step
from polyphase.schedules.cells import forward_gather
from polyphase.schedules.cost import overlapped_time, slower_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tensor_cores import OPERATION_BYTES, parts_of
from polyphase.schedules.tiles import constants_of, layer_constants

_GROUPS = 2  # consumer warpgroups
_REGISTERS = 226  # most registers of a consumer thread that do not spill
_OTHER_REGISTERS = 30  # registers of neither channels nor sums
_APART_REGISTERS = 16  # more, if a thread's pixels are not neighbours
_PARTIAL_REGISTERS = 16  # more, if the channels do not fill the last operation
_WIDE_REGISTERS = 32  # then also in chunks of more than 32 columns, or for many 16-bit channels, an odd number
_ODD_STEPS = 14  # operations up to which channels are not many
_COLUMNS = {4: (32, 64, 128), 2: (32, 64)}  # by bytes of an element
_MOST_STEPS = 16  # most operations of a stage
_MAX_STAGES = 64
_IN_TIME = 3072  # least operations × columns in all stages but one, so that weights arrive in time
_RESERVE = 2048  # bytes of shared memory for barriers
_DIVISIONS = (132 << 10, 164 << 10)  # shared memory that leaves L1 cache, through which pixels are loaded
_TERM_PLACES = 3  # chunks whose scales and bias shared memory holds
_PIXEL_BYTES = 64 << 10  # bytes of the ring buffers for prefetched pixels
_LINE_BYTES = 128  # bytes of a line of memory
_LEAST_COPY = 8  # least bytes of a prefetching copy
_PACK_THREADS, _PACK_COLUMNS = 128, 8
_MOST_AT_ONCE = 8  # most channels by which a thread advances


class PixelsConfig(NamedTuple):
    """The compile-time shape of a kernel; ``phase_gemm_pixels.cu`` says what the names mean."""

    columns: int
    stage_steps: int
    stages: int
    resident: bool
    ahead: bool


class PhaseGemmPixels(Schedule):
    """Pixels are the rows of one product, and their channels stay in registers."""

    name = "phase_gemm_pixels"
    passes = (Pass.FORWARD,)
    on_tensor_cores = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if not device.has_wgmma:
            return f"{device.arch} has no wgmma"
        if parts_of(problem) > 1:
            return "exact float32 is left to other schedules"
        if any((a.kernel, a.padding, a.dilation) != (a.stride, 0, 1) for a in problem.axes):
            return "needs a kernel size equal to the stride, and no padding or dilation"
        if any(problem.output_padding):
            return "needs no output padding"
        if problem.stride[-1] % 2:
            return f"needs an even stride along the width, not {problem.stride[-1]}"
        if not any(_registers(problem, columns, apart=True) <= _REGISTERS for columns in _columns(problem)):
            return f"{problem.in_channels_per_group} input channels do not fit registers"
        if problem.channels_last:
            return "needs NCHW"
        return None

    def ranked_at(
        self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
    ) -> tuple[ConvTransposeProblem, bool] | None:
        """The layer at a typical size, with rows as even as its own, and `_cuts_lines`."""
        counted = _pixels(problem) + _tile(problem), _MOST_AT_ONCE * layouts.input[1], *layouts.output
        return None if max(counted) >= 2**31 else (_like(problem), _cuts_lines(problem))

    def configs(self, at: tuple[ConvTransposeProblem, bool], pass_: Pass, device: DeviceInfo) -> Iterator[PixelsConfig]:
        return legal_configs(at[0], device)

    def seconds(
        self, at: tuple[ConvTransposeProblem, bool], pass_: Pass, device: DeviceInfo, config: PixelsConfig
    ) -> float:
        return _estimate(at[0], config, device, at[1])[0]

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: PixelsConfig
    ) -> Cost:
        return _estimate(problem, config, device, _cuts_lines(problem))

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: PixelsConfig
    ) -> Program:
        gather, piece = forward_gather(problem, layouts), _piece(problem, layouts)
        together = piece >= max(_run(problem) * DTYPE_BYTES[problem.dtype], _LEAST_COPY * config.ahead)
        run, ahead = (_run(problem), config.ahead) if together else (1, False)
        units, chunks = _tiles(problem) * problem.groups, _chunks(problem, config.columns)
        blocks = max(1, min(units * chunks, device.multiprocessors))
        rounds, rest = divmod(units, blocks)
        constants = (
            *layer_constants(problem, pass_, layouts.weight_channels_last),
            ("COLUMN_TILES", config.columns // 8),
            ("SCALED", _scaled(problem)),
            ("MIN_BLOCKS", 1),
        )
        columns = problem.groups * chunks * config.columns
        multiplying = (
            *constants,
            ("PARTS", 1),
            ("ROW_TILES", _row_tiles(problem)),
            ("HAS_BIAS", problem.bias),
            *constants_of(config, "stage_steps stages resident"),
            ("PREFETCH", ahead),
            ("RUN", run),
            ("WGMMA", True),
        )
        operands = "float16" if _scaled(problem) else problem.dtype
        forms = (WgmmaForm(config.columns, operands, a_in_registers=True),)
        source = KernelSource(self.name, problem.dtype, True, multiplying, forms)
        params = {
            "x": gather.src,
            "y": gather.dst,
            "pixels": _pixels(problem),
            "sizes": gather.src.shape[2:],
            "groups": problem.groups,
            "rounds": rounds,
            "units": units,
            "share": math.ceil(rest * chunks / blocks),
            "piece": piece,
            "vector": min(2 * run, _vector(problem, layouts)),
            "x_stride": layouts.input[1],
            "y_stride": layouts.output[1:],
        }
        shared_bytes = config.stages * config.stage_steps * config.columns * OPERATION_BYTES
        shared_bytes += _other_bytes(problem, config.columns, ahead)
        main = main_step(source, blocks if units else 0, 128 * (_GROUPS + 1), shared_bytes, params)
        workspace = columns * (_steps(problem) * OPERATION_BYTES + 4 * _scaled(problem))
        packs = (_pack_columns(problem, constants, columns),)
        return assemble(problem, pass_, main, packs=packs, workspace_bytes=workspace)


def _pack_columns(problem: ConvTransposeProblem, constants: tuple[tuple[str, Constant], ...], columns: int) -> Step:
    """The step that packs the weights of ``columns`` for a kernel with ``constants``."""
    packing = (*constants, ("THREADS", _PACK_THREADS), ("GROUPS", problem.groups))
    source = KernelSource("pack_columns", problem.dtype, False, packing, folder="steps")
    return plain_step(source, columns // _PACK_COLUMNS, _PACK_THREADS)


def _like(problem: ConvTransposeProblem) -> ConvTransposeProblem:
    """The layer at a typical size, whose width has the same remainder modulo 4."""
    typical, width = standard(problem), problem.input_size[-1]
    *others, of_typical = typical.input_size
    return replace(typical, input_size=(*others, of_typical - of_typical % 4 + width % 4))


def _pixels(problem: ConvTransposeProblem) -> int:
    return problem.batch * math.prod(problem.input_size)


def _tiles(problem: ConvTransposeProblem) -> int:
    return math.ceil(_pixels(problem) / _tile(problem))


def _scaled(problem: ConvTransposeProblem) -> bool:
    """Whether float32 is multiplied as float16, ``operand/scaled_half.cuh``."""
    return problem.dtype == "float32"


def _steps(problem: ConvTransposeProblem) -> int:
    """Operations along a group's input channels."""
    return math.ceil(problem.in_channels_per_group * 2 / OPERATION_BYTES)


def _row_tiles(problem: ConvTransposeProblem) -> int:
    """Row tiles, of 64 pixels each, of a consumer warpgroup."""
    return 4 // DTYPE_BYTES[problem.dtype]


def _tile(problem: ConvTransposeProblem) -> int:
    """Pixels of a tile."""
    return 64 * _row_tiles(problem) * _GROUPS


def _columns(problem: ConvTransposeProblem) -> tuple[int, ...]:
    """Columns that a chunk may have."""
    return _COLUMNS[DTYPE_BYTES[problem.dtype]]


def _registers(problem: ConvTransposeProblem, columns: int, apart: bool) -> int:
    """Registers of a consumer thread: channels, sums and the rest; ``apart``: its pixels are not neighbours."""
    other = _OTHER_REGISTERS + (_APART_REGISTERS if apart and not _scaled(problem) else 0)
    if problem.in_channels_per_group % (OPERATION_BYTES // 2):
        other += _PARTIAL_REGISTERS
        odd = problem.in_channels_per_group % 2 and _steps(problem) > _ODD_STEPS
        wide = columns > 32 and (not _scaled(problem) or apart or _steps(problem) > _ODD_STEPS)
        if wide or (odd and not _scaled(problem)):
            other += _WIDE_REGISTERS
    if 8 % problem.taps:  # 8 columns are not whole channels: each 8 have an address of their own
        other += columns // 8 + (8 if problem.stride[-1] != 2 else 0)
    channels = 4 * _steps(problem) * (2 if _scaled(problem) else 1)  # float32 until it is scaled
    return _row_tiles(problem) * (channels + columns // 2) + other


def _chunks(problem: ConvTransposeProblem, columns: int) -> int:
    """Chunks of a group."""
    return math.ceil(_all_columns(problem) / columns)


def _all_columns(problem: ConvTransposeProblem) -> int:
    """Columns of a group."""
    return problem.out_channels_per_group * math.prod(problem.stride)


def _piece(problem: ConvTransposeProblem, layouts: Layouts) -> int:
    """Bytes of one copy of neighbouring pixels, of a thread or of several; 0 if pixels are not contiguous."""
    size = DTYPE_BYTES[problem.dtype]
    width, (batch, channel, depth, height, step) = problem.input_size[-1], layouts.input
    rows_follow = height == width and (depth == height * problem.input_size[-2] if problem.dims == 3 else True)
    run = math.prod(problem.input_size) if problem.dims == 1 or rows_follow else width
    strides = (batch, channel) if run != width else (batch, channel, depth, height)
    if not layouts.aligned or _run(problem) == 1 or step != 1:
        return 0
    whole = (n for n in (16, 8, 4) if all(count * size % n == 0 for count in (run, *strides)))
    return next(whole, 0)


def _run(problem: ConvTransposeProblem) -> int:
    """Neighbouring pixels that a thread reads and stores at once."""
    return max(1, _vector(problem, Layouts.dense(problem)) // 2)


def _vector(problem: ConvTransposeProblem, layouts: Layouts) -> int:
    """Outputs of one store: of all or two of a thread's neighbouring pixels, of one pixel, or a single output."""
    *strides, step = layouts.output
    neighbours = 2 * _row_tiles(problem) if problem.stride[-1] == 2 else 1
    for pixels in (4, 2, 1):
        whole = problem.input_size[-1] % pixels == 0 and all(stride % (2 * pixels) == 0 for stride in strides)
        if pixels <= neighbours and step == 1 and whole:
            return 2 * pixels
    return 1


def _other_bytes(problem: ConvTransposeProblem, columns: int, ahead: bool) -> int:
    """Shared memory besides the weights: pixels, and the columns' scales and bias."""
    terms = _scaled(problem) + problem.bias
    return _GROUPS * _TERM_PLACES * columns * 4 * terms + _PIXEL_BYTES * ahead


def legal_configs(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[PixelsConfig]:
    """Configs with the most columns that registers and shared memory allow."""
    wanted = [each for each in _columns(problem) if each == _columns(problem)[0] or each < 2 * _all_columns(problem)]
    apart, most = _run(problem) == 1, device.shared_bytes_of(1)
    narrow_enough = [each for each in wanted if _registers(problem, each, apart) <= _REGISTERS]
    if not narrow_enough:
        return
    columns = narrow_enough[-1]  # fewer than fit have never been faster
    comes_ahead = _piece(problem, Layouts.dense(problem)) >= _LEAST_COPY
    if comes_ahead and (ahead := _staged(problem, columns, most, True)):
        yield ahead
        if _scaled(problem):  # prefetching is always faster then, and leaves registers free
            return
    found = [_staged(problem, columns, memory, False) for memory in (*_DIVISIONS, most)]
    yield from sorted(filter(None, found), key=lambda config: not config.resident)[:1]


def _staged(problem: ConvTransposeProblem, columns: int, shared_bytes: int, ahead: bool) -> PixelsConfig | None:
    """The config with the longest stages that fit and arrive in time; None if none do."""
    steps, memory = _steps(problem), shared_bytes - _RESERVE - _other_bytes(problem, columns, ahead)
    for stage_steps in (count for count in range(_MOST_STEPS, 0, -1) if steps % count == 0):
        fitting = min(_MAX_STAGES, memory // (stage_steps * columns * OPERATION_BYTES))
        of_chunk = steps // stage_steps
        if problem.groups == 1 and _chunks(problem, columns) * of_chunk <= fitting:
            return PixelsConfig(columns, stage_steps, _chunks(problem, columns) * of_chunk, True, ahead)
        in_time = (fitting - 1) * stage_steps * columns * _row_tiles(problem) >= _IN_TIME
        if fitting > of_chunk and in_time:  # one warpgroup is a chunk behind the other
            return PixelsConfig(columns, stage_steps, fitting, False, ahead)
    return None


def _estimate(problem: ConvTransposeProblem, config: PixelsConfig, device: DeviceInfo, cut: bool) -> tuple[float, str]:
    """Predicted time, and what bounds it; ``cut``: `_cuts_lines`."""
    terms = costs("phase_gemm_pixels", device)
    size, steps, chunks = DTYPE_BYTES[problem.dtype], _steps(problem), _chunks(problem, config.columns)
    layouts = Layouts.dense(problem)
    rounds, rest = divmod(_tiles(problem) * problem.groups, device.multiprocessors)
    share = math.ceil(rest * chunks / device.multiprocessors)
    products = terms.product * _tile(problem) * steps * config.columns / 128
    width = 16 / (_vector(problem, layouts) * size)
    stores = terms.store * _tile(problem) * config.columns * size * width**terms.narrow
    if size == 2 and problem.axes3[2].stride > 8:  # four lanes store half a sector of a cell
        stores *= terms.half_sectors
    storing = (products + stores + terms.stage * steps / config.stage_steps) / 2  # one of two warpgroups
    chunk = overlapped_time(products, storing, terms.overlap) + terms.hand_over
    row, tile, launch = terms.row, terms.tile, terms.launch
    if config.ahead:
        at_hand = _PIXEL_BYTES / (_tile(problem) * size)  # channels
        late = max(0.0, 1 - at_hand / problem.in_channels_per_group)
        tile = (terms.tile_ahead * size + terms.tile_cut * cut) * late
        row, launch = terms.row_ahead, terms.launch_ahead
    tile += row * _tile(problem) * steps * (OPERATION_BYTES // 2) * size
    cycles = (rounds * chunks + share) * chunk + (rounds + (share > 0)) * tile + launch
    work, moving = cycles / device.clock_hz, problem.bytes / (terms.bandwidth * device.copy_bytes_per_second)
    return overlapped_time(work, moving, terms.beside), slower_of(work, moving)[1]


def _cuts_lines(problem: ConvTransposeProblem) -> bool:
    """Whether pixels are copied 16 bytes at a time from images that are not whole lines of memory."""
    image = math.prod(problem.input_size) * DTYPE_BYTES[problem.dtype]
    return _piece(problem, Layouts.dense(problem)) == 16 and image % _LINE_BYTES > 0
