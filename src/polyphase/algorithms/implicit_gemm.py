"""The forward pass on tensor cores, ``kernels/implicit_gemm.cu``: variants, tiles, cost and launch."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from polyphase.algorithms.base import Candidate, Launch, Layouts, dense_strides, extent, typical
from polyphase.algorithms.gather import Gather
from polyphase.device import DeviceInfo
from polyphase.jit.source import Constant, KernelSource
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass

_ROWS = 64  # of a row block
_CONSUMERS = 2  # warp groups that multiply
_MAX_OPERATIONS = 512
_MAX_PHASES = 512
_MAX_SIDE = 1023, 63, 63  # of a tile and its halo: pixels of a row, slabs, images (Pixel in the kernel packs them)
_STATIC_SHARED = 9 << 10  # barriers, distances and positions
_OFFERED = 8
_RESERVE = 2 << 10  # left where variants are compared, so that they fit at other sizes, too
# Loading groups, and the stages they may have, by whether channels come last. Copies in place are waited for by those
# who multiply: they take more stages (see LOOKAHEAD in the kernel).
_LOADERS = {False: ((2, (2, 3, 4)),), True: ((4, (6, 8)), (1, (3,)))}


@dataclass(frozen=True)
class GemmVariant:
    """One specialisation of the kernel.

    ``pixels`` of the tile and ``channel_blocks · lines · (phases along the width)`` row blocks are a warp group's
    accumulators. ``parts`` is 2 where float32 is split in two TF32 numbers, ``k_steps`` the depth of a stage in
    instructions, ``wgmma`` whether Hopper's instruction is used, or ``mma.sync``.
    """

    pixels: int
    pixel_blocks: int
    channel_blocks: int
    lines: int
    k_steps: int
    stages: int
    raw_stages: int
    parts: int
    take_turns: bool
    resident: bool
    loader_groups: int
    wgmma: bool

    @property
    def cells(self) -> int:
        """Cells of a tile, those in its halo included."""
        return self.group_cells * (1 if self.take_turns else _CONSUMERS)

    @property
    def loader_threads(self) -> int:
        """Threads that load; the registers of those who multiply leave no more."""
        return 256 if self.wgmma and self.loader_groups > 1 else 128

    @property
    def group_cells(self) -> int:
        """Cells of a warp group."""
        return self.pixels * self.pixel_blocks


@dataclass(frozen=True)
class Tile:
    """The cells of a block and how their halo lies in shared memory, in pixels (see `Geometry` in the kernel)."""

    images: int
    cells: tuple[int, int, int]
    pitch: tuple[int, int, int]  # from one image, slab and row to the next
    halo: int
    allocated: int
    skew: int
    copy_bytes: int
    tiles: tuple[int, int, int, int]

    @property
    def count(self) -> int:
        """Tiles of the whole problem."""
        return math.prod(self.tiles)


@dataclass(frozen=True)
class _Taps:
    """What the layer's phases come to (kernels/common/row_blocks.cuh)."""

    owned_w: int
    lines: tuple[int, ...]  # taps of each phase along depth and height that owns any
    along_w: int  # taps of all phases along the width

    @classmethod
    def of(cls, axes: tuple[Axis, Axis, Axis]) -> _Taps:
        depth, height, width = ([len(taps) for taps in axis.taps_by_phase if taps] for axis in axes)
        return cls(len(width), tuple(d * h for d in depth for h in height), sum(width))

    def operations(self, variant: GemmVariant) -> int:
        """Taps of the busiest thread block."""
        groups = (self.lines[i : i + variant.lines] for i in range(0, len(self.lines), variant.lines))
        return max(sum(group) for group in groups) * self.along_w * variant.channel_blocks


class ImplicitGemm:
    """Taps as products of matrices on tensor cores, all phases of a tile in one block."""

    name = "implicit_gemm"

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if pass_ is not Pass.FORWARD:
            return "computes the forward pass only"
        if problem.dtype not in ("float32", "float16", "bfloat16"):
            return f"tensor cores here do not take {problem.dtype}"
        if int(device.arch.rstrip("af")[3:]) < 80:
            return f"{device.arch} lacks the tensor cores' instructions"
        gather = Gather.of(problem, pass_, Layouts.dense(problem))
        if gather.taps > 4096:
            return f"{gather.taps} taps are too many to list"
        if gather.phases > _MAX_PHASES:
            return f"{gather.phases} elements of a cell are too many for straight-line code (at most {_MAX_PHASES})"
        if not self.candidates(problem, pass_, device, Layouts.dense(problem)):
            return f"no tile fits {device.shared_bytes_per_block} bytes of shared memory"
        return None

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> list[Candidate]:
        gather = Gather.of(problem, pass_, layouts)
        result = []
        for variant in _ranked(typical(problem), device, gather.src.channels_last):
            if (tile := _tile(gather, variant, problem.batch, device)) is not None:
                seconds, bound = estimate(gather, problem, device, variant, tile)
                result.append(Candidate(self.name, variant, seconds, bound))
                if len(result) == _OFFERED:
                    break
        return result

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: GemmVariant
    ) -> Launch:
        gather = Gather.of(problem, pass_, layouts)
        taps = _Taps.of(problem.axes3)
        operations = taps.operations(variant)
        tile = _tile(gather, variant, problem.batch, device)
        assert tile is not None
        size = DTYPE_BYTES[problem.dtype]
        steps = _steps(gather, variant)
        channel_groups = math.ceil(gather.dst_channels / (_ROWS * variant.channel_blocks))
        row_groups = gather.groups * channel_groups * math.ceil(len(taps.lines) / variant.lines)
        items = tile.count * row_groups
        constants = gather.constants(
            CHANNEL_BLOCKS=variant.channel_blocks,
            LINES=variant.lines,
            K_STEPS=variant.k_steps,
            PARTS=variant.parts,
            OPERATIONS=operations,
            MIN_BLOCKS=1,
        )
        kernel_constants: tuple[tuple[str, Constant], ...] = (
            *constants,
            ("SRC_CHANNELS_LAST", gather.src.channels_last),
            ("PIXELS", variant.pixels),
            ("PIXEL_BLOCKS", variant.pixel_blocks),
            ("CONSUMERS", _CONSUMERS),
            ("TAKE_TURNS", variant.take_turns),
            ("RESIDENT", variant.resident),
            ("LOADER_GROUPS", variant.loader_groups),
            ("LOADER_THREADS", variant.loader_threads),
            ("STAGES", variant.stages),
            ("RAW_STAGES", variant.raw_stages),
            ("WGMMA", variant.wgmma),
        )
        wide = _wide(gather)
        operation_bytes = variant.parts * 2 * _ROWS * 16
        raw_pitch = _raw_pitch(tile.halo, size)
        geometry = gather.src.packed() + gather.dst.packed()
        geometry += struct.pack(
            "<20i",
            problem.batch,
            tile.images,
            *tile.cells,
            *tile.tiles,
            items,
            row_groups,
            *tile.pitch,
            tile.halo,
            raw_pitch,
            tile.allocated * 16,
            tile.skew,
            tile.copy_bytes,
            _store_vector(gather, tile),
        )
        chunks = row_groups * steps * operations * 2 * _ROWS
        prologue = Launch(
            source=KernelSource(
                "pack_weights", problem.dtype, False, tuple(c for c in constants if c[0] != "HAS_BIAS")
            ),
            grid=(math.ceil(chunks / 256), 1, 1),
            block=256,
            shared_bytes=0,
            geometry=struct.pack("<i", gather.groups),
        )
        return Launch(
            source=KernelSource(self.name, problem.dtype, wide, kernel_constants),
            grid=(_blocks(items, row_groups, device, variant), 1, 1),
            block=variant.loader_threads + 128 * _CONSUMERS,
            shared_bytes=_shared_bytes(gather, variant, operations, tile),
            geometry=geometry,
            prologue=prologue,
            workspace_bytes=row_groups * steps * operations * operation_bytes,
        )


def _steps(gather: Gather, variant: GemmVariant) -> int:
    """Depth of the whole product in instructions, which take 32 bytes of channels each."""
    return math.ceil(gather.src_channels * DTYPE_BYTES[gather.dtype] / 32 / variant.k_steps) * variant.k_steps


def _blocks(items: int, row_groups: int, device: DeviceInfo, variant: GemmVariant) -> int:
    """Thread blocks; those with resident weights stay with one row group."""
    most = device.multiprocessors
    return min(items, most // row_groups * row_groups if variant.resident else most)


def _raw_pitch(halo: int, size: int) -> int:
    """Pixels of a channel in a copied stage. Eight 16-byte rows of half precision lie in different banks."""
    whole = math.ceil(halo / 32) * 32
    return whole if size == 4 else math.ceil((whole - 8) / 64) * 64 + 8


def _shared_bytes(gather: Gather, variant: GemmVariant, operations: int, tile: Tile, aligned: bool = True) -> int:
    """Dynamic shared memory of a tile; not ``aligned``: of the worst like it, where every pixel is copied by itself."""
    size = DTYPE_BYTES[gather.dtype]
    stage = variant.parts * 2 * variant.k_steps * (tile.allocated + (0 if aligned else 32)) * 16
    step = operations * variant.parts * 2 * _ROWS * 16
    if variant.resident:
        total = variant.stages * stage + _steps(gather, variant) * step
    else:
        total = variant.stages * (stage + variant.k_steps * step)
    if not gather.src.channels_last:
        total += variant.loader_groups * variant.raw_stages * variant.k_steps * 32 * _raw_pitch(tile.halo, size)
    if not gather.dst.channels_last:
        total += _CONSUMERS * 4 * 8 * (_piece(gather.axes[2].stride, size) + 8) * size
    copied = 1 if gather.src.channels_last or not aligned else tile.copy_bytes // size
    return total + (4 + (8 if _wide(gather) else 4) * variant.loader_groups) * math.ceil(tile.halo / copied) + 8


def _wide(gather: Gather) -> bool:
    """Whether offsets within an image need more than 32 bits."""
    return max(extent((1, 1, *side.shape[2:]), side.strides) for side in (gather.src, gather.dst)) >= 2**31


def _piece(stride: int, size: int) -> int:
    """Elements of a row that a warp turns around at once (``PIECE`` in the kernel)."""
    cells = 128
    while cells > 8 and cells * stride * size > 256:
        cells //= 2
    return cells * stride


def _variants(problem: ConvTransposeProblem, device: DeviceInfo, channels_last: bool) -> Iterator[GemmVariant]:
    """Every variant that the registers allow."""
    taps = _Taps.of(problem.axes3)
    blocks = math.ceil(problem.out_channels_per_group / _ROWS)
    parts = 1 if problem.dtype != "float32" or _tf32(problem) else 2
    for wgmma in (True, False) if device.arch == "sm_90a" else (False,):
        sums = (144 if channels_last and taps.owned_w >= 3 else 160) if wgmma else 80
        sums //= 1 if parts == 1 else 2 if wgmma else 3  # those of two parts are added up beside the cores
        for channel_blocks in {1, 2, 4} if blocks > 2 else {1, blocks}:
            for lines in range(1, len(taps.lines) + 1):
                row_blocks = channel_blocks * lines * taps.owned_w
                cells = 2 * sums // row_blocks // 8 * 8
                if cells < 16 or (lines != len(taps.lines) and len(taps.lines) % lines):
                    continue
                pixel_blocks = math.ceil(cells / 256)
                multiple = 8 if wgmma else 16
                for pixels in {c // pixel_blocks // multiple * multiple for c in (cells, max(cells // 2, 16))}:
                    settings = itertools.product((1, 2, 4), (True, False) if wgmma else (False,), (True, False))
                    for k_steps, take_turns, resident in settings:
                        groups = (
                            math.ceil(blocks / channel_blocks) * math.ceil(len(taps.lines) / lines) * problem.groups
                        )
                        if resident and (not wgmma or groups > device.multiprocessors // 4):
                            continue
                        # Copies in place are waited for by those who multiply: they take more stages (see LOOKAHEAD).
                        for loaders, stages in _LOADERS[channels_last]:
                            for count in stages:
                                yield GemmVariant(
                                    pixels, pixel_blocks, channel_blocks, lines, k_steps, count, 2, parts,
                                    take_turns, resident, loaders if wgmma else 1, wgmma,
                                )  # fmt: skip


def _tf32(problem: ConvTransposeProblem) -> bool:
    """Whether rounding to TF32 is allowed, and PyTorch would do so too: it computes narrow layers in full float32."""
    channels = min(problem.in_channels_per_group, problem.out_channels_per_group)
    return problem.tf32 and problem.groups == 1 and channels >= 16


@lru_cache(maxsize=4096)
def _ranked(problem: ConvTransposeProblem, device: DeviceInfo, src_channels_last: bool) -> list[GemmVariant]:
    """The variants that compute a layer of typical size, the fastest prediction first.

    A quarter of the say has the prediction for tiny images, which leave much of a wide tile empty.
    """
    sizes = problem, replace(problem, input_size=tuple(axis.input_size(8 * axis.stride) + 8 for axis in problem.axes))
    scores: dict[GemmVariant, float] = {}
    for sized, weight in zip(sizes, (0.75, 0.25)):
        dense = Layouts.dense(sized)
        if src_channels_last != sized.channels_last:
            dense = replace(dense, input=dense_strides(sized.input_shape, src_channels_last))
        gather = Gather.of(sized, Pass.FORWARD, dense)
        taps = _Taps.of(sized.axes3)
        for variant in _variants(sized, device, src_channels_last):
            if taps.operations(variant) > _MAX_OPERATIONS:
                continue
            tile = _tile(gather, variant, sized.batch, device, _RESERVE)
            seconds = math.inf if tile is None else estimate(gather, sized, device, variant, tile)[0]
            scores[variant] = scores.get(variant, 0.0) + weight * math.log(seconds)
    fitting = [variant for variant, score in scores.items() if score < math.inf]
    return sorted(fitting, key=lambda variant: (scores[variant], -variant.stages))


def _rows_join(gather: Gather) -> bool:
    """Whether neither a tap nor memory leaves a gap between the rows of a channel."""
    alone = all(axis.shifts == (0, 0) for axis in gather.axes[1:])
    return alone and gather.src.strides[3] == gather.src.shape[4] and gather.cells[2] == gather.src.shape[4]


def _copy_sizes(gather: Gather, joined: bool = False) -> list[int]:
    """Bytes that one copy from global memory may have: whole chunks where all of them are aligned, and less.

    ``joined``: also across the ends of rows, where the rows of a channel and of a tile follow each other without gaps.
    """
    size = DTYPE_BYTES[gather.dtype]
    batch, channel, depth, height, width = gather.src.strides
    chunk = 16 // size
    if gather.src.channels_last:
        whole = gather.src_channels % chunk == 0 and all(s % chunk == 0 for s in (batch, depth, height, width))
        return [16] if whole and gather.aligned else [size]
    sizes = [size]
    if width == 1 and gather.aligned:
        for copied in (4, 16):
            count = copied // size
            rows = depth if joined and _rows_join(gather) else math.gcd(math.gcd(gather.src.shape[4], depth), height)
            if count > 1 and all(s % count == 0 for s in (rows, batch, channel)):
                sizes.append(copied)
    return sizes


@lru_cache(maxsize=65536)
def _tile(gather: Gather, variant: GemmVariant, batch: int, device: DeviceInfo, reserve: int = 0) -> Tile | None:
    """The tile that covers the problem with the least work; None where none fits shared memory less ``reserve``."""
    limit = device.shared_bytes_per_block - _STATIC_SHARED - reserve
    operations = _Taps.of(gather.axes).operations(variant)
    # Chunks of a pixel lie in different banks, where they are copied together.
    banks = 8 // min(8, 2 * variant.k_steps) if gather.src.channels_last else 0
    tiles = _tiles(gather, variant.cells, batch, banks)
    fits = (tile for tile in tiles if _shared_bytes(gather, variant, operations, tile, not reserve) <= limit)
    return next(fits, None)


@lru_cache(maxsize=65536)
def _tiles(gather: Gather, capacity: int, batch: int, banks: int) -> list[Tile]:
    """Tiles whose cells, with the halo between them, are a run of at most ``capacity`` pixels; least work first.

    A row of the run is followed by the next row's halo on the left, which is its own on the right where a tile is as
    wide as the image: all of it is padding then. So it is with rows, between images.
    """
    size = DTYPE_BYTES[gather.dtype]
    depth, height, width = gather.cells
    ahead = [max(0, -axis.shifts[0]) for axis in gather.axes]  # pixels that any tap needs behind a cell
    back = [axis.shifts[1] for axis in gather.axes]  # and before it; negative where all are behind
    reach = [axis.shifts[1] - axis.shifts[0] for axis in gather.axes]
    result = []
    # Several images only where offsets within the tile have 32 bits.
    sides = [(side.strides[0], extent((1, 1, *side.shape[2:]), side.strides)) for side in (gather.src, gather.dst)]
    addressable = min((2**31 - one) // max(1, stride) for stride, one in sides)
    for copy_bytes in _copy_sizes(gather, joined=True):
        vector = 1 if gather.src.channels_last else copy_bytes // size
        joined = copy_bytes not in _copy_sizes(gather)  # only rows that follow each other without gaps are aligned
        even = vector
        skew = -back[2] % vector
        lead = back[2] + skew
        widest = min(width, capacity, _MAX_SIDE[0])
        least = math.ceil(width / widest)
        parts = range(least, min(math.ceil(width / 8), least + 128) + 1)
        widths = (math.ceil(math.ceil(width / n) / even) * even if n > 1 else width for n in parts)
        for columns in dict.fromkeys(widths):
            if columns > min(capacity, _MAX_SIDE[0]) or (joined and columns != width):
                continue
            shared = columns == width and lead >= ahead[2] and width >= gather.src.shape[4]
            row = math.ceil((lead + columns if shared else skew + columns + reach[2]) / even) * even
            row = columns if joined else row
            most = min(height, (capacity - columns) // row + 1)
            for rows in {math.ceil(height / math.ceil(height / max(1, most * n // 8))) for n in (8, 6, 4, 3, 2, 1)}:
                if joined and rows != height and rows * columns % vector:
                    continue
                whole = rows == height and back[1] >= ahead[1] and height >= gather.src.shape[3] and depth == 1
                slab = (back[1] + rows if whole else rows + reach[1]) * row
                flat = (rows - 1) * row + columns
                slabs = min(depth, _MAX_SIDE[1], (capacity - flat) // slab + 1)
                slabs = math.ceil(depth / math.ceil(depth / slabs))
                if row > _MAX_SIDE[0] or rows + reach[1] > _MAX_SIDE[0] or slabs + reach[0] > _MAX_SIDE[1]:
                    continue
                flat += (slabs - 1) * slab
                image = (slabs + reach[0]) * slab
                images = 1
                if (slabs, rows, columns) == (depth, height, width):
                    images = max(1, min(batch, _MAX_SIDE[2], (capacity - flat) // image + 1, addressable))
                span = reach[0] * slab + reach[1] * row + reach[2] + skew
                tail = (ahead[1] * row if whole else 0) + ahead[2]
                halo = images * image + math.ceil(tail / even) * even
                allocated = max(math.ceil(halo / 32) * 32, capacity + span)
                if banks:
                    allocated += (banks - allocated) % 8
                tiles = (
                    math.ceil(batch / images),
                    math.ceil(depth / slabs),
                    math.ceil(height / rows),
                    math.ceil(width / columns),
                )
                pitch = image, slab, row
                result.append(Tile(images, (slabs, rows, columns), pitch, halo, allocated, skew, copy_bytes, tiles))
    per_copy = {16: 0.3, 4: 0.6, 2: 4.0}  # two bytes pass registers

    def work(tile: Tile) -> float:
        # Short rows move parts of memory's lines.
        row = 1 + 8 / tile.cells[2] if tile.tiles[3] > 1 else 1.0
        return tile.count * (capacity + per_copy[tile.copy_bytes] * tile.halo) * row

    return sorted(result, key=work)


def _store_vector(gather: Gather, tile: Tile) -> int:
    """Elements of a store, where every row allows the widest that the kernel has; else 1."""
    size = DTYPE_BYTES[gather.dtype]
    batch, channel, depth, height, width = gather.dst.strides
    if gather.dst.channels_last:
        even = gather.dst_channels % 2 == 0 and all(s % 2 == 0 for s in (batch, depth, height, width))
        return 2 if even else 1
    stride = gather.axes[2].stride
    for count in (8 // size, 2):
        rows = tile.pitch[2] * stride % count == 0 and (tile.cells[2] * stride % count == 0 or tile.tiles[3] == 1)
        if width == 1 and rows and all(s % count == 0 for s in (batch, channel, depth, height)):
            return count
    return 1


@dataclass(frozen=True)
class _Costs:
    """Multiprocessor cycles of the parts of an item, fitted to the times of an H200 (docs/performance.md)."""

    issue: float = 6.5  # each matrix instruction, above what the cores and shared memory take
    stage: float = 770.0  # barriers and latencies of a stage, for the group that loads it
    copy_rows: float = 70.0  # a warp's copies, channels first
    copy_pixels: float = 200.0  # and channels last
    convert: float = 140.0  # a chunk of 32 pixels turned around, for each warp
    moved: float = 59.0  # bytes per cycle from the L2 cache
    store_rows: float = 29.0  # a thread's value, channels first
    odd_stride: float = 4.0  # times that and the bytes of a value, where a thread's elements are no vector
    store_pixels: float = 50.0  # and channels last
    overlap: float = 0.5  # of the shorter of loading and multiplying, what does not hide behind the longer
    launch: float = 29000.0
    few_stages: float = 0.1  # more time for every stage less than four


_COSTS = _Costs()


def estimate(
    gather: Gather,
    problem: ConvTransposeProblem,
    device: DeviceInfo,
    variant: GemmVariant,
    tile: Tile,
    costs: _Costs = _COSTS,
) -> tuple[float, str]:
    """Predicted seconds of a variant, and whether bytes or instructions bound it."""
    taps = _Taps.of(gather.axes)
    size = DTYPE_BYTES[gather.dtype]
    operations = taps.operations(variant)
    stages = _steps(gather, variant) // variant.k_steps
    chunks = 2 * variant.k_steps
    sharers = 1 if variant.take_turns else _CONSUMERS
    last = gather.src.channels_last

    width = max(variant.pixels / 2, 16 + variant.pixels / 4) * (1 if variant.wgmma else 2.2)
    instructions = variant.k_steps * operations * variant.pixel_blocks * sharers * (3 if variant.parts == 2 else 1)
    multiply = stages * instructions * (width + costs.issue)

    vector = tile.copy_bytes // size
    pieces = 1 if tile.copy_bytes == 16 else 16 // size
    warps = variant.loader_threads // variant.loader_groups // 32
    rows = math.ceil(tile.halo / vector / 32) * chunks * 16 / size
    copies = (tile.halo * chunks / 32 * pieces if last else rows) / warps
    turned = 0 if last and size == 2 else math.ceil(math.ceil(tile.halo / 32) * chunks / warps)
    load = (
        costs.stage + (costs.copy_pixels if last else costs.copy_rows) * copies + costs.convert * turned * variant.parts
    )
    load *= stages / variant.loader_groups
    weights = 0 if variant.resident else variant.k_steps * operations * variant.parts * 2 * _ROWS * 16
    load = max(load, stages * (weights + tile.halo * chunks * 16) / costs.moved)

    row_blocks = variant.channel_blocks * variant.lines * taps.owned_w
    values = variant.group_cells / 2 * row_blocks * gather.phases / (taps.owned_w * len(taps.lines))
    stride = gather.axes[2].stride
    rows = costs.store_rows * (1 if stride & (stride - 1) == 0 else costs.odd_stride * size)
    store = values * (costs.store_pixels if gather.dst.channels_last else rows)

    main = max(multiply, load) + costs.overlap * min(multiply, load)
    main *= 1 + costs.few_stages * max(0, 4 - variant.stages)
    total = max(main, (multiply + store) / 2) if variant.take_turns else main + store
    row_groups = gather.groups * math.ceil(gather.dst_channels / (_ROWS * variant.channel_blocks))
    row_groups *= math.ceil(len(taps.lines) / variant.lines)
    items = tile.count * row_groups
    waves = items / device.multiprocessors
    if waves < 8:
        waves = math.ceil(waves)
    cycles = max(waves, 2 if variant.take_turns else 1) * total + costs.launch
    floor = problem.bytes / (0.8 * device.copy_bytes_per_second)
    busy = cycles / device.clock_hz
    return max(floor, busy), "bytes" if floor > busy else "instructions"
