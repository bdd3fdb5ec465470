"""Direct kernels of the forward pass and the input gradient: ``kernels/gather_tiled.cu`` and ``gather_general.cu``.

Both passes gather: every destination element sums what it needs of the source, so nothing is written twice and no sum
depends on timing. `GatherTiled` unrolls the whole kernel for a tile of cells; `GatherGeneral` has no limits.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache

from polyphase.algorithms.base import (
    Candidate,
    Launch,
    Layouts,
    Strides,
    channels_innermost,
    cost_seconds,
    extent,
    two_dimensions,
)
from polyphase.device import DeviceInfo
from polyphase.jit.source import Constant, KernelSource
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass

# Straight-line code stays short enough to compile in tenths of a second and to fit the instruction cache.
_MAX_UNROLLED = 1600
_MAX_ACCUMULATORS = 96
_MAX_LOADS = 8  # SourceLoader keeps four bits of each in one word
_REGISTERS = 65536


@dataclass(frozen=True)
class Side:
    """One side of a gather pass: shape ``(N, C, D, H, W)`` and strides."""

    shape: tuple[int, int, int, int, int]
    strides: Strides

    @property
    def channels_last(self) -> bool:
        return channels_innermost(self.shape[1], self.strides)

    def packed(self) -> bytes:
        """The kernels' ``Tensor5``."""
        return struct.pack("<5q4i", *self.strides, *self.shape[2:], self.shape[1])


@dataclass(frozen=True)
class Gather:
    """A forward pass or an input gradient as the kernels see it: source, destination, cells (see geometry.cuh)."""

    pass_: Pass
    axes: tuple[Axis, Axis, Axis]
    src_channels: int  # of a group
    dst_channels: int  # of a group
    groups: int
    dtype: str
    bias: bool
    src: Side
    dst: Side
    weight_channels_last: bool
    aligned: bool

    @classmethod
    def of(cls, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Gather:
        input_side = Side(five(problem.input_shape), layouts.input)
        output_side = Side(five(problem.output_shape), layouts.output)
        forward = pass_ is Pass.FORWARD
        per_group = problem.in_channels_per_group, problem.out_channels_per_group
        src_channels, dst_channels = per_group if forward else per_group[::-1]
        return cls(
            pass_=pass_,
            axes=problem.axes3,
            src_channels=src_channels,
            dst_channels=dst_channels,
            groups=problem.groups,
            dtype=problem.dtype,
            bias=problem.bias and forward,
            src=input_side if forward else output_side,
            dst=output_side if forward else input_side,
            weight_channels_last=layouts.weight_channels_last,
            aligned=layouts.aligned,
        )

    @property
    def forward(self) -> bool:
        return self.pass_ is Pass.FORWARD

    @property
    def taps(self) -> int:
        return math.prod(axis.kernel for axis in self.axes)

    def dst_cell(self, axis: Axis) -> int:
        """Destination elements of a cell."""
        return axis.stride if self.forward else 1

    def src_cell(self, axis: Axis) -> int:
        """Source elements of a cell."""
        return 1 if self.forward else axis.stride

    def src_offsets(self, axis: Axis) -> list[int]:
        """The source element that each tap reads, counted from the cell's first."""
        if self.forward:
            return [-axis.shift(tap) for tap in range(axis.kernel)]
        return [tap * axis.dilation - axis.padding for tap in range(axis.kernel)]

    def window(self, axis: Axis, cells: int) -> int:
        """Source elements that ``cells`` neighbouring cells span."""
        offsets = self.src_offsets(axis)
        return (cells - 1) * self.src_cell(axis) + max(offsets) - min(offsets) + 1

    def window_used(self, axis: Axis, cells: int) -> int:
        """Source elements that ``cells`` neighbouring cells read."""
        step = self.src_cell(axis)
        return len({cell * step + offset for cell in range(cells) for offset in self.src_offsets(axis)})

    def owned(self, axis: Axis) -> int:
        """Destination elements of a cell that own taps."""
        return len({axis.phase(tap) for tap in range(axis.kernel)}) if self.forward else 1

    @property
    def cells(self) -> tuple[int, int, int]:
        """Cells along depth, height and width."""
        depth, height, width = (
            math.ceil(size / self.dst_cell(axis)) for size, axis in zip(self.dst.shape[2:], self.axes)
        )
        return depth, height, width

    def constants(self, **variant: Constant) -> tuple[tuple[str, Constant], ...]:
        """What both kernels are specialised by, and the variant's own constants."""
        out_channels = self.dst_channels if self.forward else self.src_channels
        last = self.weight_channels_last
        common: dict[str, Constant] = {
            "AXIS_D": self.axes[0],
            "AXIS_H": self.axes[1],
            "AXIS_W": self.axes[2],
            "INPUT_GRAD": not self.forward,
            "SRC_CHANNELS": self.src_channels,
            "DST_CHANNELS": self.dst_channels,
            "HAS_BIAS": self.bias,
            "DST_CHANNELS_LAST": self.dst.channels_last,
            "WEIGHT_STRIDE_IN": out_channels * self.taps,
            "WEIGHT_STRIDE_OUT": 1 if last else self.taps,
            "WEIGHT_STRIDE_TAP": out_channels if last else 1,
        }
        return tuple({**common, **variant}.items())

    @property
    def aligned_src(self) -> bool:
        """Whether four neighbouring source elements (channels, where those come last) can be read at once everywhere."""
        batch, channel, depth, height, width = self.src.strides
        if self.src.channels_last:
            whole, others = self.src_channels % 4 == 0, (batch, depth, height, width)
        else:
            whole, others = self.src.shape[4] % 4 == 0 and width == 1, (batch, channel, depth, height)
        return self.aligned and whole and all(stride % 4 == 0 for stride in others)

    def wide_offsets(self, images: int, stage_channels: int) -> bool:
        """Whether byte offsets within a tile of ``images`` batch entries need more than 32 bits."""
        return any(
            extent((images, channels, *side.shape[2:]), side.strides) * DTYPE_BYTES[self.dtype] >= 2**32
            for side, channels in ((self.src, stage_channels), (self.dst, 1))
        )


def five(shape: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """A shape ``(N, C, *spatial)`` as ``(N, C, D, H, W)``."""
    batch, channels, *spatial = shape
    depth, height, width = [1] * (3 - len(spatial)) + spatial
    return batch, channels, depth, height, width


@dataclass(frozen=True)
class TiledVariant:
    """The compile-time shape of ``gather_tiled.cu``; its file says what the names mean."""

    lanes: int
    dst_per_thread: int
    cells_h: int
    cells_w: int
    dst_slices: int
    src_slices: int
    stage_channels: int
    loads: int
    min_blocks: int
    dst_vector: int

    @property
    def threads(self) -> int:
        return self.lanes * self.dst_slices * self.src_slices


@dataclass(frozen=True)
class _Layer:
    """What a variant may depend on: the layer and its layout, never batch or image size."""

    gather: Gather

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Layer) and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        g = self.gather
        alignment = math.gcd(*g.dst.strides[2:], g.dst.strides[0], 16) if g.dst.channels_last else 1
        layout = (g.src.channels_last, g.dst.channels_last, alignment, g.weight_channels_last)
        return g.pass_, g.axes, g.src_channels, g.dst_channels, g.groups > 1, g.dtype, g.bias, layout


class GatherTiled:
    """All phases of a tile in one block, the kernel's taps unrolled."""

    name = "gather_tiled"

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if pass_ is Pass.WEIGHT_GRAD:
            return "computes the forward pass and the input gradient only"
        gather = Gather.of(problem, pass_, Layouts.dense(problem))
        if gather.taps > _MAX_UNROLLED:
            return f"{gather.taps} taps do not unroll (at most {_MAX_UNROLLED})"
        phases = math.prod(map(gather.owned, gather.axes))
        if phases > _MAX_ACCUMULATORS:
            return f"{phases} phases do not fit a thread's registers (at most {_MAX_ACCUMULATORS})"
        if problem.channels_last and min(gather.src_channels, gather.dst_channels) < 4 and problem.groups > 4:
            return "channels_last groups of less than 4 channels would leave its lanes far apart in memory"
        if not _variants(_Layer(gather)):
            return "the halo of a tile does not fit the registers in flight"
        if not any(
            _fits(gather, variant, (1, 1, 1, variant.lanes), device) for variant, _ in _variants(_Layer(gather))
        ):
            return f"the halo of a tile does not fit {device.shared_bytes_per_block} bytes of shared memory"
        return None

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> list[Candidate]:
        gather = Gather.of(problem, pass_, layouts)
        work = problem.batch * problem.groups * math.prod(gather.cells) * gather.dst_channels
        result = []
        for variant, cycles in _variants(_Layer(gather)):
            if _fits(gather, variant, (1, 1, 1, variant.lanes), device):
                seconds, bound = cost_seconds(problem, device, work * cycles)
                result.append(Candidate(self.name, variant, seconds, bound))
        return result

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: TiledVariant
    ) -> Launch:
        gather = Gather.of(problem, pass_, layouts)
        lanes = _arrange(gather, variant, device)
        per_lane = (1, 1, variant.cells_h, variant.cells_w)
        extents = (problem.batch, *gather.cells)
        tiles = [math.ceil(size / (lane * cells)) for size, lane, cells in zip(extents, lanes, per_lane)]
        dst_blocks = math.ceil(gather.dst_channels / (variant.dst_per_thread * variant.dst_slices))
        source = KernelSource(
            kernel=self.name,
            dtype=gather.dtype,
            wide_offsets=gather.wide_offsets(lanes[0], variant.stage_channels),
            constants=gather.constants(
                SRC_CHANNELS_LAST=gather.src.channels_last,
                LANES=variant.lanes,
                DST_PER_THREAD=variant.dst_per_thread,
                CELLS_H=variant.cells_h,
                CELLS_W=variant.cells_w,
                DST_SLICES=variant.dst_slices,
                SRC_SLICES=variant.src_slices,
                STAGE_CHANNELS=variant.stage_channels,
                LOADS=variant.loads,
                DST_VECTOR=variant.dst_vector,
                MIN_BLOCKS=variant.min_blocks,
            ),
        )
        # Blocks go on to further items of their tile as long as the machine stays full: they know their way already.
        items = dst_blocks * gather.groups
        full = 8 * device.multiprocessors * variant.min_blocks
        per_block = max(1, min(items, items * math.prod(tiles) // full))
        geometry = gather.src.packed() + gather.dst.packed()
        geometry += struct.pack(
            "<13i4x",
            problem.batch,
            *lanes,
            *tiles,
            items,
            per_block,
            gather.aligned_src,
            _aligned_rows(gather, variant),
        )
        return Launch(
            source=source,
            grid=(math.ceil(items / per_block), *two_dimensions(math.prod(tiles))),
            block=variant.threads,
            shared_bytes=_shared_bytes(gather, variant, lanes),
            geometry=geometry,
        )


@dataclass(frozen=True)
class _TileSize:
    """The source of one channel of a tile, halo included: elements along each dimension as they lie in shared memory."""

    images: int
    depth: int
    height: int
    width: int

    @classmethod
    def of(cls, gather: Gather, variant: TiledVariant, lanes: tuple[int, ...]) -> _TileSize:
        depth, height, width = gather.axes
        skew = min(gather.src_offsets(width)) % 4
        return cls(
            lanes[0],
            gather.window(depth, lanes[1]),
            gather.window(height, lanes[2] * variant.cells_h),
            _round_up(skew + gather.window(width, lanes[3] * variant.cells_w), 4),
        )

    @property
    def elements(self) -> int:
        return self.images * self.depth * self.height * self.width

    def loads(self, gather: Gather, variant: TiledVariant) -> int:
        """Quads that a thread loads for a stage."""
        return math.ceil(self.elements * variant.stage_channels / 4 / variant.threads)

    def row(self, gather: Gather) -> int:
        """Elements of a row with the gaps between its residues."""
        step = gather.src_cell(gather.axes[2])
        split = step if step == 2 or step % 4 == 0 else 1
        return _round_up(self.width, split)


def _shared_bytes(gather: Gather, variant: TiledVariant, lanes: tuple[int, ...]) -> int:
    accumulator = 8 if gather.dtype == "float64" else 4
    tile = _TileSize.of(gather, variant, lanes)
    weights = variant.stage_channels * variant.dst_slices * _round_up(gather.taps * variant.dst_per_thread, 4)
    plane = tile.images * tile.depth * tile.height * tile.row(gather)
    main = 2 * (weights + variant.stage_channels * plane)
    slice_threads = variant.lanes * variant.dst_slices
    counts = _Counts.of(gather, variant)
    staging = slice_threads * counts.run
    reduction = slice_threads * counts.accumulators if variant.src_slices > 1 else 0
    wide = gather.wide_offsets(lanes[0], variant.stage_channels)
    elements = variant.lanes * counts.run * (16 if wide else 8) if counts.run > 1 else 0
    return (main + max(staging, reduction)) * accumulator + elements


def _fits(gather: Gather, variant: TiledVariant, lanes: tuple[int, ...], device: DeviceInfo) -> bool:
    """Whether the compiled variant can take tiles of these lanes: loads, shared memory, tiles that start at quads."""
    width = lanes[3] * variant.cells_w
    return (
        _TileSize.of(gather, variant, lanes).loads(gather, variant) <= variant.loads
        and _shared_bytes(gather, variant, lanes) <= device.shared_bytes_per_block
        and (width >= gather.cells[2] or width * gather.src_cell(gather.axes[2]) % 4 == 0)
    )


def _arrange(gather: Gather, variant: TiledVariant, device: DeviceInfo) -> tuple[int, int, int, int]:
    """How a tile's lanes extend along n, d, h and w: the least work over all tiles that fits the compiled variant."""
    extents = (gather.src.shape[0], gather.cells[0], math.ceil(gather.cells[1] / variant.cells_h),
               math.ceil(gather.cells[2] / variant.cells_w))  # fmt: skip
    per_tile = _thread_cycles(_Counts.of(gather, variant), variant) * variant.threads / 32
    best, best_cost = (1, 1, 1, variant.lanes), math.inf
    for width in _extents(extents[3], variant.lanes):
        for height in _extents(extents[2], variant.lanes // width):
            for depth in _extents(extents[1], variant.lanes // (width * height)):
                batch = max(1, min(extents[0], variant.lanes // (width * height * depth)))
                lanes = (batch, depth, height, width)
                if not _fits(gather, variant, lanes, device):
                    continue
                tiles = math.prod(math.ceil(size / lane) for size, lane in zip(extents, lanes))
                resident = max(
                    1, device.shared_bytes_per_multiprocessor // (_shared_bytes(gather, variant, lanes) + 1024)
                )
                crowding = max(1.0, min(variant.min_blocks, 4) / resident)
                load = _TileSize.of(gather, variant, lanes).elements * gather.src_channels * 5 / 32
                short_rows = 1 + 4 / (width * variant.cells_w)
                cost = tiles * (per_tile * crowding + load * short_rows)
                if cost < best_cost:
                    best, best_cost = lanes, cost
    return best


def _extents(cells: int, most: int) -> list[int]:
    """Extents worth trying along one dimension: powers of two, and shares of the whole that leave little over."""
    shares = {math.ceil(cells / parts) for parts in range(1, 9)}
    powers = {1 << i for i in range(max(1, most).bit_length())}
    return sorted(extent_ for extent_ in shares | powers | {most} if 1 <= extent_ <= min(most, max(cells, 1))) or [1]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class _Counts:
    """What one thread does: per source channel, per stage, and per item (gather_tiled.cu has the words)."""

    stages: int
    channels: float  # of a stage that a thread computes
    products: int
    weight_reads: int
    patch_reads: int
    weight_items: int
    loads: int
    accumulators: int  # phases without taps included
    owned: int  # accumulators that have taps
    patch: int  # source elements held at once
    run: int
    words: int  # registers of a value

    @classmethod
    def of(cls, gather: Gather, variant: TiledVariant) -> _Counts:
        depth, height, width = gather.axes
        cells = variant.cells_h * variant.cells_w
        per_stage = variant.stage_channels * variant.dst_per_thread * variant.dst_slices * gather.taps
        patch = gather.window_used(height, variant.cells_h) * gather.window_used(width, variant.cells_w)
        words = 2 if gather.dtype == "float64" else 1
        return cls(
            stages=math.ceil(gather.src_channels / variant.stage_channels),
            channels=variant.stage_channels / variant.src_slices,
            products=gather.taps * variant.dst_per_thread * cells * words,
            weight_reads=math.ceil(gather.taps * variant.dst_per_thread / 4) * words,
            patch_reads=depth.kernel * patch * words,
            weight_items=math.ceil(per_stage / variant.threads),
            loads=variant.loads,
            accumulators=cells * math.prod(map(gather.dst_cell, gather.axes)) * variant.dst_per_thread,
            owned=cells * math.prod(map(gather.owned, gather.axes)) * variant.dst_per_thread,
            patch=patch,
            run=variant.cells_w * gather.dst_cell(width),
            words=words,
        )


# Costs in issue slots, stalls included: fitted to 2,899 measured variants of 21 layers and passes on an H200
# (docs/performance.md, "The cost model of gather_tiled").
_COST_CHANNEL, _COST_WEIGHT_READ, _COST_PATCH_READ = 6.0, 1.9, 1.36
_COST_STAGE, _COST_LOAD, _COST_WEIGHT_ITEM = 98.0, 28.0, 16.0
_COST_VECTOR_ELEMENT, _COST_TURNED_ELEMENT, _COST_LONE_ELEMENT, _COST_REDUCTION = 40.0, 33.0, 44.0, 25.0
_COST_LONG_CODE, _COST_ROLLED_CODE = 0.07, 0.06
_COST_BARE_LATENCY, _COST_LONE_BLOCK = 2.25, 0.08


def _thread_cycles(counts: _Counts, variant: TiledVariant) -> float:
    """Issue slots of a thread for one item."""
    straight = counts.products * counts.channels  # products in one piece of code, unless the kernel rolls channels up
    code = _COST_ROLLED_CODE if straight > 1024 else _COST_LONG_CODE * max(0.0, straight / 700 - 1)
    reads = counts.weight_reads * _COST_WEIGHT_READ + counts.patch_reads * _COST_PATCH_READ
    compute = counts.channels * (counts.products * (1 + code) + reads + _COST_CHANNEL)
    load = counts.loads * _COST_LOAD + counts.weight_items * _COST_WEIGHT_ITEM + _COST_STAGE
    if counts.run == 1:
        element = _COST_LONE_ELEMENT
    else:
        element = _COST_VECTOR_ELEMENT if counts.run in (2, 4) else _COST_TURNED_ELEMENT
    epilogue = counts.accumulators * element / variant.src_slices
    reduction = counts.accumulators * _COST_REDUCTION * (variant.src_slices - 1) / variant.src_slices
    return counts.stages * (compute + load) + epilogue + reduction


def _wavefronts(counts: _Counts, conflicts: int) -> float:
    """Passes through shared memory that a warp causes for one item; weights are broadcast, and nearly free."""
    loads = 8 * counts.loads + 2 * counts.weight_items
    return counts.stages * (counts.channels * counts.patch_reads * conflicts + loads) + 3 * counts.accumulators


def _registers(counts: _Counts) -> int:
    """Registers that a thread needs without spilling: fitted to the same variants, on the safe side."""
    always = counts.owned + 7 * counts.loads + 1.7 * counts.weight_items
    stages = 0.2 * counts.patch + 1.1 * min(4 * counts.weight_reads // counts.words, 24)
    epilogue = 10.5 * counts.run
    return round(counts.words * (always + max(stages, epilogue))) + 25


@lru_cache(maxsize=512)
def _variants(layer: _Layer) -> tuple[tuple[TiledVariant, float], ...]:
    """The best variants of a layer with their cycles per cell and destination channel, in rising order."""
    scored = sorted(
        ((variant, score(layer.gather, variant)) for variant in enumerate_variants(layer.gather)),
        key=lambda item: item[1],
    )
    return tuple(scored[:8])


def enumerate_variants(gather: Gather) -> list[TiledVariant]:
    """Every legal variant of a layer."""
    variants = []
    height_exists = gather.axes[1] != Axis(1)
    most = min(16, gather.dst_channels)
    per_thread = sorted({1, 2, 3, 4, 6, 8, 16} & set(range(1, most + 1)) | ({most} if most <= 8 else set()))
    cells = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)) if height_exists else ((1, 1), (1, 2))
    for lanes, dst, (cells_h, cells_w), dst_slices, src_slices, stage_channels in itertools.product(
        (64, 128, 256), per_thread, cells, (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)
    ):
        threads = lanes * dst_slices * src_slices
        if not 64 <= threads <= 512 or stage_channels % src_slices or (dst_slices - 1) * dst >= gather.dst_channels:
            continue
        least = 4 if gather.src.channels_last else 1
        if stage_channels > max(src_slices, gather.src_channels, least) or src_slices > gather.src_channels // 16 + 1:
            continue
        if gather.taps * dst * cells_h * cells_w > _MAX_UNROLLED:
            continue
        variant = TiledVariant(lanes, dst, cells_h, cells_w, dst_slices, src_slices, stage_channels, 0, 1, 1)
        if gather.src.channels_last and stage_channels % 4:
            continue
        spans = {(1, 1, 1, lanes), (1, 1, lanes // 32, 32)} if height_exists else {(1, 1, 1, lanes)}
        loads = max(_TileSize.of(gather, variant, span).loads(gather, variant) for span in spans)
        if loads > _MAX_LOADS:
            continue
        accumulators = cells_h * cells_w * math.prod(map(gather.owned, gather.axes)) * dst
        if accumulators > _MAX_ACCUMULATORS:
            continue
        variant = replace(variant, loads=loads, dst_vector=_dst_vector(gather, dst))
        registers = _round_up(_registers(_Counts.of(gather, variant)), 8)
        blocks = min(_REGISTERS // (registers * threads), 1536 // threads)
        # Where the estimate is too low the compiler settles for fewer resident blocks; a lone block has no such way out.
        if blocks > 1 or (blocks == 1 and registers + 16 <= min(255, _REGISTERS // threads)):
            variants.append(replace(variant, min_blocks=blocks))
    return variants


def score(gather: Gather, variant: TiledVariant) -> float:
    """Predicted cycles of a multiprocessor per cell and destination channel."""
    counts = _Counts.of(gather, variant)
    warps = variant.threads / 32
    cycles = max(_thread_cycles(counts, variant) * warps / 4, _wavefronts(counts, variant.cells_w) * warps)
    # Few resident warps leave latencies bare, and a single block waits for itself at every barrier.
    lone_block = _COST_LONE_BLOCK / variant.min_blocks if counts.stages > 1 else 0.0
    cycles *= 1 + _COST_BARE_LATENCY / math.pow(warps * variant.min_blocks, 0.81) + lone_block
    blocks = math.ceil(gather.dst_channels / (variant.dst_per_thread * variant.dst_slices))
    return cycles * blocks / (variant.lanes * variant.cells_h * variant.cells_w * gather.dst_channels)


def _aligned_rows(gather: Gather, variant: TiledVariant) -> bool:
    """Whether a lane's elements along w start at a multiple of their number, in every row of a new tensor."""
    run = variant.cells_w * gather.dst_cell(gather.axes[2])
    batch, channel, depth, height, width = gather.dst.strides
    whole_rows = gather.dst.shape[4] % run == 0
    return whole_rows and width == 1 and all(stride % run == 0 for stride in (batch, channel, depth, height))


def _dst_vector(gather: Gather, dst_per_thread: int) -> int:
    """Channels that a thread stores at once, in a channels-last destination."""
    if not gather.dst.channels_last:
        return 1
    most = 16 // DTYPE_BYTES[gather.dtype]
    strides = (*gather.dst.strides[2:], gather.dst.strides[0], gather.dst_channels)
    return math.gcd(most, dst_per_thread, *strides)


@dataclass(frozen=True)
class GeneralVariant:
    """The compile-time shape of ``gather_general.cu``."""

    dst_per_thread: int


class GatherGeneral:
    """One destination element a thread: any layer."""

    name = "gather_general"
    _THREADS = 256

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if pass_ is Pass.WEIGHT_GRAD:
            return "computes the forward pass and the input gradient only"
        return None

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> list[Candidate]:
        gather = Gather.of(problem, pass_, layouts)
        phases = math.prod(map(gather.dst_cell, gather.axes))
        result = []
        for dst in (1, 4):
            if dst > 1 and (gather.dst.channels_last or gather.dst_channels < dst):
                continue
            steps = gather.src_channels * gather.taps / phases
            threads = math.prod(gather.dst.shape) / dst
            # Per step: the loop, one source element and `dst` weights; weights of neighbouring lanes lie apart.
            instructions = 150 + steps * (14 + 4 * dst)
            wavefronts = steps * (2 + 3 * dst)
            cycles = threads / 32 * max(instructions / 4, wavefronts)
            seconds, bound = cost_seconds(problem, device, cycles)
            result.append(Candidate(self.name, GeneralVariant(dst), seconds, bound))
        return sorted(result, key=lambda candidate: (candidate.seconds, -candidate.variant.dst_per_thread))

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: GeneralVariant
    ) -> Launch:
        gather = Gather.of(problem, pass_, layouts)
        source = KernelSource(
            kernel=self.name,
            dtype=gather.dtype,
            wide_offsets=True,
            constants=gather.constants(DST_PER_THREAD=variant.dst_per_thread, MIN_BLOCKS=4),
        )
        blocks = math.ceil(gather.dst_channels / variant.dst_per_thread) * gather.groups
        threads = problem.batch * blocks * math.prod(gather.dst.shape[2:])
        grid = math.ceil(threads / self._THREADS)
        geometry = gather.src.packed() + gather.dst.packed() + struct.pack("<2i", problem.batch, gather.groups)
        return Launch(source, (grid, 1, 1), self._THREADS, 0, geometry)
