"""The direct gather kernel for few channels in a group, in channels_last, ``kernels/direct_channels.cu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

from polyphase.costs import Costs, costs
from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass, accumulator_bytes
from polyphase.problem.device import REGISTERS, DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program, assemble
from polyphase.program.step import main_step
from polyphase.schedules.cells import Gather, Side
from polyphase.schedules.cost import overlapped_time, slower_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import arranged, tiles_of, two_dimensions

_THREADS = 256
_MAX_UNROLLED = 1024  # most products of a thread, in straight-line code
_MAX_TERMS = 64  # most terms of a sum in float32, whose error grows with the root of their number (docs/numerics.md)
# Most terms of one chain, from this many channels of a group on; with fewer, PyTorch's sums are one chain too.
_CHAIN_TERMS, _CHAIN_CHANNELS = 32, 4
_MAX_SUMS = 96  # most accumulators of a thread
_MAX_WEIGHT_BYTES = 64 << 10
_LANES = (32, 16, 8, 4, 2, 1)


class ChannelsConfig(NamedTuple):
    """The compile-time shape of a kernel; ``direct_channels.cu`` says what the names mean."""

    vector: int
    cells: int
    lanes: int
    min_blocks: int


class DirectChannels(Schedule):
    """A few neighbouring destination channels a thread, at a few neighbouring cells."""

    name = "direct_channels"
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)
    offered = 4

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if not problem.channels_last:
            return "needs channels_last"
        gather = Gather.of(problem, pass_, Layouts.dense(problem))
        if gather.dtype == "float32" and (terms := _terms(gather)) > _MAX_TERMS:
            return f"{terms} products are too many to be added up one after the other (at most {_MAX_TERMS})"
        return None

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return (
            f"its taps along the width do not unroll, to at most {_MAX_UNROLLED} products and {_MAX_SUMS} sums, "
            f"or the weights of a block's channels exceed {_MAX_WEIGHT_BYTES} bytes"
        )

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Gather | None:
        gather = Gather.of(problem, pass_, layouts)
        return gather if gather.src.channels_last and gather.dst.channels_last else None

    def configs(self, at: Gather, pass_: Pass, device: DeviceInfo) -> Iterator[ChannelsConfig]:
        return legal_configs(at, device)

    def seconds(self, at: Gather, pass_: Pass, device: DeviceInfo, config: ChannelsConfig) -> float:
        """Cycles per cell and channel, the same for all image sizes."""
        return _cycles(at, config, costs("direct_channels", device)) / (config.vector * config.cells)

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: ChannelsConfig
    ) -> Cost:
        gather = Gather.of(problem, pass_, layouts)
        (depths, heights, widths), terms = gather.cells, costs("direct_channels", device)
        moving = problem.bytes / device.copy_bytes_per_second
        lanes = round_up(_vectors(gather, config), config.lanes)
        warps = lanes / 32 * problem.batch * depths * heights * math.ceil(widths / config.cells)
        work = warps * _cycles(gather, config, terms) / (device.multiprocessors * device.clock_hz)
        if gather.src_channels > 1:
            work *= terms.several if _at_once(gather, config.vector) > 1 else terms.one_by_one
        # Few warps are resident, so that compute and memory time overlap only in part.
        return overlapped_time(work, moving, terms.together), slower_of(work, moving)[1]

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: ChannelsConfig
    ) -> Program:
        gather = Gather.of(problem, pass_, layouts)
        source = KernelSource(
            kernel=self.name,
            dtype=gather.dtype,
            wide_offsets=True,
            constants=gather.constants(
                ROUNDED=gather.rounded,
                CHAINED=_chained(gather),
                LANES=config.lanes,
                VECTOR=config.vector,
                CELLS=config.cells,
                SRC_VECTOR=_src_vector(gather, config),
                SRC_PIXEL=_pixel(gather.src),
                DST_PIXEL=_pixel(gather.dst),
                MIN_BLOCKS=config.min_blocks,
            ),
        )
        sizes = (*gather.dst.shape[2:4], math.ceil(gather.cells[2] / config.cells))
        lanes = arranged(problem.batch, sizes, _THREADS // config.lanes)
        blocks = math.ceil(_vectors(gather, config) / config.lanes)
        rows = tiles_of(problem.batch, sizes, lanes)
        # A block computes several tiles along h if the machine stays full: it loads its weights once.
        full = 6 * device.multiprocessors * config.min_blocks
        steps = max(1, min(rows[2], blocks * math.prod(rows) // full))
        tiles = (*rows[:2], math.ceil(rows[2] / steps), rows[3])
        params = {
            "src": gather.src,
            "dst": gather.dst,
            "batch": problem.batch,
            "lanes": lanes,
            "tiles": tiles,
            "steps": steps,
            "vectors": _vectors(gather, config),
        }
        grid = blocks, *two_dimensions(math.prod(tiles))
        shared_bytes = _weight_bytes(gather, config.vector, config.lanes)
        return assemble(problem, pass_, main_step(source, grid, _THREADS, shared_bytes, params))


def _terms(gather: Gather) -> int:
    """Most products of a destination element."""
    met = (math.ceil(axis.kernel / cell.owned) for axis, cell in zip(gather.axes, gather.cell_axes))
    return gather.src_channels * math.prod(met)


def _chained(gather: Gather) -> bool:
    """Whether each row of taps has a chain of its own: if one chain of all would be less accurate than PyTorch."""
    long = gather.src_channels >= _CHAIN_CHANNELS and _terms(gather) > _CHAIN_TERMS
    return long and gather.dtype == "float32" and not gather.rounded


def _vectors(gather: Gather, config: ChannelsConfig) -> int:
    return gather.dst_channels * gather.groups // config.vector


def _src_read(gather: Gather, vector: int) -> int:
    """Source channels of a pixel that a thread reads."""
    return max(1, vector // gather.dst_channels) * gather.src_channels


def _at_once(gather: Gather, vector: int) -> int:
    """How many of the `_src_read` channels one load reads, if pixels are aligned."""
    return math.gcd(_src_read(gather, vector), 16 // DTYPE_BYTES[gather.dtype])


def _src_vector(gather: Gather, config: ChannelsConfig) -> int:
    """How many of the `_src_read` channels one load reads, given the alignment and strides of the source."""
    if not gather.aligned:
        return 1
    return math.gcd(_at_once(gather, config.vector), gather.src.apart(1))


def _pixel(side: Side) -> int:
    """Elements from a pixel to its neighbour along w; if there is none, the channels of a pixel."""
    return side.strides[4] if side.shape[4] > 1 else side.shape[1]


def _weight_bytes(gather: Gather, vector: int, lanes: int) -> int:
    """Shared memory of a block."""
    return gather.taps * gather.src_channels * lanes * vector * accumulator_bytes(gather.dtype)


def legal_configs(gather: Gather, device: DeviceInfo) -> Iterator[ChannelsConfig]:
    """Every config of a layer whose taps unroll and whose weights fit."""
    for vector, cells in itertools.product((8, 4, 2, 1), (8, 4, 2, 1)):
        lanes = _lanes(gather, vector)
        width = gather.cell_axes[2]
        products = gather.axes[2].kernel * _src_held(gather, vector) * vector * cells
        if lanes is None or products > _MAX_UNROLLED or width.dst * vector * cells > _MAX_SUMS:
            continue
        # Distances within a row of cells are 32-bit constants of the kernel.
        if max(_pixel(gather.src) * width.window(cells), _pixel(gather.dst) * width.dst * cells) >= 2**31:
            continue
        shared = device.shared_bytes_per_multiprocessor // (_weight_bytes(gather, vector, lanes) + 1024)
        # The compiler often needs fewer registers than estimated; otherwise it settles for fewer blocks.
        hoped = min(8, shared, _resident(_registers(gather, vector, cells) - 16))
        if hoped:
            yield ChannelsConfig(vector, cells, lanes, hoped)


def _lanes(gather: Gather, vector: int) -> int | None:
    """Neighbouring threads that own neighbouring vectors, or None if channels do not divide into such vectors."""
    channels, size = gather.dst_channels, DTYPE_BYTES[gather.dtype]
    if (channels % vector and vector % channels) or vector * size > 16:
        return None
    if reduce(math.gcd, (vector, channels * gather.groups, gather.dst.apart(1))) != vector:
        return None
    vectors = channels * gather.groups // vector
    fitting = [lanes for lanes in _LANES if _weight_bytes(gather, vector, lanes) <= _MAX_WEIGHT_BYTES]
    least = min((round_up(vectors, lanes) for lanes in fitting), default=0)
    return max((lanes for lanes in fitting if round_up(vectors, lanes) <= 1.25 * least), default=None)


def _src_held(gather: Gather, vector: int) -> int:
    """Source channels of a pixel that a thread holds at a time."""
    return (_src_read if vector > gather.dst_channels else _at_once)(gather, vector)


def _registers(gather: Gather, vector: int, cells: int) -> int:
    """Estimated registers of a thread."""
    width = gather.cell_axes[2]
    chains = cells if _chained(gather) else 0
    values = (width.dst * cells + chains + 2) * vector + width.window_used(cells) * _src_held(gather, vector)
    return 32 + values * accumulator_bytes(gather.dtype) // 4


def _resident(registers: int) -> int:
    """Resident blocks of a multiprocessor with ``registers`` per thread."""
    return REGISTERS // (_THREADS * round_up(registers, 8))


def _cycles(gather: Gather, config: ChannelsConfig, terms: Costs) -> float:
    """Predicted cycles of a multiprocessor for a warp's cells, with as many resident warps as fit."""
    vector, cells, lanes, hoped = config
    resident = max(1, min(hoped, _resident(_registers(gather, vector, cells))))
    return _cycles_alone(gather, vector, cells, lanes, terms) * (1 + 1 / resident)


def _cycles_alone(gather: Gather, vector: int, cells: int, lanes: int, terms: Costs) -> float:
    """`_cycles` without waits for memory."""
    size, words = DTYPE_BYTES[gather.dtype], accumulator_bytes(gather.dtype) // 4
    width = gather.cell_axes[2]
    weights = gather.src_channels * gather.taps
    read, at_once = _src_read(gather, vector), _at_once(gather, vector)
    rows = gather.axes[0].kernel * gather.axes[1].kernel
    columns = rows * width.window_used(cells)
    loads, stores = columns * read // at_once, gather.phases * cells
    widened = columns * read + stores * vector if size == 2 else 0
    chains = rows * read // _src_held(gather, vector) * width.owned * cells * vector if _chained(gather) else 0
    products = weights * (vector * cells * words + 1) + chains
    instructions = products + 3 * columns + loads + 3 * stores + widened + 20 * rows
    from_shared = weights * vector * words

    def lines(side: Side, elements: int, apart: int) -> float:
        """128-byte lines that an access of a warp touches; its rows of ``lanes`` threads are ``apart`` pixels apart."""
        together, from_others = lanes * elements * size, apart * _pixel(side) * size
        return 32 / lanes * max(together, min(from_others, 128)) / 128

    through_l1 = loads * lines(gather.src, at_once, cells * width.src)
    through_l1 += stores * lines(gather.dst, vector, cells * width.dst)
    return instructions / 4 + terms.from_shared * from_shared + terms.line * through_l1 + terms.row * rows
