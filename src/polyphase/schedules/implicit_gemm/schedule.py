"""The forward pass on tensor cores, ``kernels/implicit_gemm.cu``: choice and launch of a config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from polyphase.costs import costs
from polyphase.jit.source import Constant, KernelSource, WgmmaForm
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import MOST_CHANNELS, Epilogue
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import is_tiny, standard, typical
from polyphase.program.params import params_of
from polyphase.program.program import Program, assemble
from polyphase.program.step import Step
from polyphase.schedules.cells import MAX_PHASES, Gather
from polyphase.schedules.cost import Sharing
from polyphase.schedules.implicit_gemm.config import CHUNK_BYTES, CONSUMERS, STAGES, GemmConfig, Product
from polyphase.schedules.implicit_gemm.cost import estimate, prologue_estimate, shared_ends
from polyphase.schedules.implicit_gemm.cuts import Tile
from polyphase.schedules.implicit_gemm.families import Layer, legal_configs
from polyphase.schedules.implicit_gemm.packing import pack_weights, packing_constants, scales_bytes
from polyphase.schedules.implicit_gemm.search import RESERVE, Members
from polyphase.schedules.implicit_gemm.tile import (
    best_tile,
    may_take_operands,
    needs_wide_offsets,
    raw_pitch,
    shared_bytes,
    store_vector,
    tensor_map,
)
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tiles import constants_of

_MAX_TAPS = 4096
_CACHED = 32 << 20  # bytes of weights, read and packed, that stay in the L2 cache
# Batch and sides of other images, by whether they are tiny: sizes that count in a config's score, and sizes whose own
# best config is also offered. There are few images and many, small and large ones.
_HAVING_A_SAY = {
    True: ((1, (16, 4, 2)), (64, (4, 2, 1)), (256, (64, 8, 4))),
    False: ((5, (2048, 40, 16)), (256, (1000, 28, 14)), (8, (65536, 512, 96))),
}
_WITH_THEIR_OWN = {
    True: ((128, (16, 4, 2)), (64, (25, 5, 3)), (32, (64, 8, 4)), (256, (49, 7, 4)), (256, (64, 8, 4))),
    False: (
        (1, (512, 24, 8)),
        (8, (256, 14, 6)),
        (64, (256, 14, 6)),
        (64, (1024, 24, 10)),
        (1, (16384, 128, 32)),
        (8, (16384, 128, 32)),
        (64, (65536, 256, 64)),
    ),
}
_ALL = 2**31 - 1
_STAGES_COST = 1.01  # at most, of stages given up for longer pieces of rows: times the prediction before
# Pairs of GIVEN_REGISTERS and CHUNKS_AT_ONCE that are tried in turn if registers spill: registers moved from each
# consumer thread to the producers. The last two serve kernels that have too few registers on either side.
_SHARES = ((-8, 2), (16, 2), (24, 2), (0, 1), (16, 1))
_LEAST_PIECE = 16  # cells


class ImplicitGemm(Schedule):
    """Taps as products of matrices on tensor cores, all phases of a tile in one block."""

    name = "implicit_gemm"
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)
    on_tensor_cores = True
    offered = 10
    kept = True
    compared = 64
    best = 3
    prunes = True
    _reads_copies = False  # of the source, which a step before the kernel writes

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if pass_ is Pass.INPUT_GRAD and problem.mirrored() is None:
            return "computes input gradients of layers of stride 1 only"
        if problem.taps > _MAX_TAPS:
            return f"{problem.taps} taps are too many to list (at most {_MAX_TAPS})"
        if (phases := math.prod(problem.stride)) > MAX_PHASES:
            return f"{phases} elements of a cell are too many for straight-line code (at most {MAX_PHASES})"
        return None

    def epilogue_limits(self, problem: ConvTransposeProblem) -> str | None:
        if not problem.epilogue.normalizes:
            return None
        if problem.groups > 1:
            return "a norm over channels needs one group"
        if problem.out_channels > MOST_CHANNELS:
            return f"a block does not have all {problem.out_channels} channels of a pixel (at most {MOST_CHANNELS})"
        return None

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Layer | None:
        problem, gather = self._as_forward(problem, pass_, layouts)
        # The gradient of a tiny image need not be tiny, and a layer has one kernel for all of either kind.
        sized = typical(problem) if gather.mirrored else standard(problem)
        # The gradients of an output's pixels often differ by far more than an input's pixels do, and would want several
        # bands of magnitudes (kernels/operand/scales.cuh).
        return Layer(sized, gather.src.channels_last, may_take_operands(gather), not gather.mirrored)

    def configs(self, at: Layer, pass_: Pass, device: DeviceInfo) -> list[GemmConfig]:
        return list(legal_configs(at, device))

    def seconds(self, at: Layer, pass_: Pass, device: DeviceInfo, config: GemmConfig) -> float:
        """Whatever the bytes."""
        return Members.of(at, device).at(at.gather)[config._replace(stages=0)].seconds(at.gather, config.stages)

    def search(
        self, at: Layer, pass_: Pass, device: DeviceInfo, most: int | None = None, below: float = math.inf
    ) -> dict[GemmConfig, float]:
        """Each with the best of its stages."""
        return Members.of(at, device).fastest(at.gather, most, below)

    def others(self, at: Layer) -> list[Layer]:
        return at.sized(_HAVING_A_SAY[is_tiny(at.problem)])

    def score(self, at: Layer, seconds: Sequence[float]) -> float:
        """All other sizes together weigh as much as the first."""
        first, *others = map(math.log, seconds)
        return first + sum(others) / max(1, len(others))

    def own(self, at: Layer) -> list[Layer]:
        """But images that TMA takes in another way than these: they have another list."""
        found = at.sized(_WITH_THEIR_OWN[is_tiny(at.problem)])
        return [each for each in found if not at.tma or may_take_operands(each.gather)]

    def refined(self, at: Layer, device: DeviceInfo, config: GemmConfig) -> GemmConfig:
        return _with_long_pieces(at, config, device)

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost | None:
        problem, gather = self._as_forward(problem, pass_, layouts)
        tile = best_tile(gather, config, device)
        if tile is None:
            return None
        seconds, bound = estimate(gather, config, tile, device, problem.bytes)
        return seconds + _packing_seconds(problem, gather, config, device), bound

    def prologue_seconds(
        self,
        problem: ConvTransposeProblem,
        prologue: Epilogue,
        device: DeviceInfo,
        layouts: Layouts,
        config: GemmConfig,
    ) -> float | None:
        _, gather = self._as_forward(problem, Pass.FORWARD, layouts)
        # Pixels that do not exist stay zero, also after the prologue.
        if gather.src.channels_last or config.tma_operands or not prologue.keeps_zero:
            return None
        tile = best_tile(gather, config, device)
        assert tile is not None
        return prologue_estimate(gather, config, tile, device, problem.bytes, prologue)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Program:
        problem, gather = self._as_forward(problem, pass_, layouts)
        product = Product(gather, config)
        tile = best_tile(gather, config, device)
        assert tile is not None
        work_tiles = math.ceil(tile.total / config.cluster) * product.tile_shares
        vector = store_vector(gather, config, tile)
        clusters = _clusters(work_tiles, product.tile_shares, device, config)
        operands = "float16" if config.scaled else problem.dtype
        transposed = config.tma_operands and not gather.src.channels_last
        source = KernelSource(
            "implicit_gemm",
            problem.dtype,
            needs_wide_offsets(gather),
            self._constants(product),
            wgmma=(WgmmaForm(config.pixels, operands, transpose_b=transposed),) if config.wgmma else (),
            fallbacks=_fallbacks(gather, config),
        )
        packs = pack_weights(product)
        workspace = product.counter_bytes + scales_bytes(product) + product.packed_bytes
        params = params_of(source).pack(
            src=(gather.original or gather).src,
            dst=gather.dst,
            batch=problem.batch,
            images=tile.images,
            cells=tile.cells,
            tiles=tile.tiles,
            tile_shares=product.tile_shares,
            pitch=tile.pitch,
            work_tiles=work_tiles,
            run_pixels=tile.halo,
            raw_pitch=tile.box_pixels if tile.boxes else raw_pitch(tile.halo, gather.src_bytes),
            chunk_bytes=tile.allocated * CHUNK_BYTES,
            skew=tile.skew,
            copy_bytes=tile.copy_bytes,
            store_vector=vector,
            boxes=tile.boxes,
            box_pixels=tile.box_pixels,
            run=tile.run,
            own=_own_work_tiles(gather, config, tile, device, problem, math.ceil(work_tiles / max(1, clusters))),
        )
        main = Step(
            source=source,
            grid=(config.cluster * clusters, 1, 1),
            block=config.loader_threads + 128 * CONSUMERS,
            shared_bytes=shared_bytes(gather, config, tile),
            params=params,
            tensor_maps=(tensor_map(gather, config, tile),) if tile.boxes else (),
            one_way=None
            if config.whole_images and config.parts == 2  # a register spills
            else source.with_constants(STORE_VECTOR=vector, COPY_BYTES=0 if tile.boxes else tile.copy_bytes),
        )
        return assemble(problem, pass_, main, packs=packs, workspace_bytes=workspace)

    def _as_forward(
        self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts
    ) -> tuple[ConvTransposeProblem, Gather]:
        """The layer whose forward pass this is, and that pass."""
        if pass_ is Pass.FORWARD:
            return problem, Gather.of(problem, pass_, layouts)
        mirrored = problem.mirrored()
        assert mirrored is not None
        layouts = replace(layouts, input=layouts.output, output=layouts.input)
        return mirrored, Gather.of(mirrored, Pass.FORWARD, layouts, mirrored=True)

    def _constants(self, product: Product) -> tuple[tuple[str, Constant], ...]:
        gather, config = product.gather, product.config
        return (
            *packing_constants(product),
            ("SRC_CHANNELS_LAST", gather.src.channels_last),
            ("SRC_WRITTEN", self._reads_copies),
            *([] if gather.original is None else [("REPLACED", gather.mirrored)]),
            *constants_of(
                config, "whole_images tma_operands pixels pixel_blocks resident loader_groups stages cluster wgmma"
            ),
            ("CONSUMERS", CONSUMERS),
            ("COOPERATIVE", config.split == "rows"),
            ("PING_PONG", config.split == "turns"),
            ("LOADER_THREADS", config.loader_threads),
            ("GIVEN_REGISTERS", 0),
            ("CHUNKS_AT_ONCE", 2),
            ("TRANSPOSE_GROUPS", config.transpose_groups(config.stages)),
            ("STORE_VECTOR", 0),
            ("COPY_BYTES", 0),
            ("RAW_STAGES", config.raw_slots // config.loader_groups),
            *(
                [("SETS", config.sets_at_once(gather)), ("ROUND_PIXELS", config.round_pixels(gather))]
                if config.taps_in_rows
                else [("PIECE", config.piece(gather)), ("IN_SUMS", gather.in_sums)]
            ),
        )


def _fallbacks(gather: Gather, config: GemmConfig) -> tuple[tuple[tuple[str, Constant], ...], ...]:
    """Attempts if registers spill: other shares of registers, then smaller pieces, which epilogues need.

    Smaller pieces come first where the epilogue normalises over channels: it takes most registers, and each attempt
    seconds to compile.
    """
    shares = [(("GIVEN_REGISTERS", n), ("CHUNKS_AT_ONCE", chunks)) for n, chunks in _SHARES] if config.wgmma else []
    piece = 0 if config.taps_in_rows else config.piece(gather)
    # With channels last a warpgroup stores 16 bytes of 8 cells of float32, or of 16 cells of half types, twice in turn.
    least = 64 // gather.dst_bytes if gather.dst.channels_last else _LEAST_PIECE
    smaller = (("GIVEN_REGISTERS", 0), ("CHUNKS_AT_ONCE", 2), ("PIECE", max(least, piece // 4)))
    pieces = [smaller] if piece > least else []
    return (*pieces, *shares) if gather.normalized else (*shares, *pieces)


def _packing_seconds(problem: ConvTransposeProblem, gather: Gather, config: GemmConfig, device: DeviceInfo) -> float:
    """Packing time of weights that do not stay in L2; for smaller ones it is part of ``launch``."""
    moved = problem.elements[1] * DTYPE_BYTES[problem.dtype] + Product(gather, config).packed_bytes
    return max(0, moved - _CACHED) / device.copy_bytes_per_second


def _clusters(work_tiles: int, tile_shares: int, device: DeviceInfo, config: GemmConfig) -> int:
    """Clusters of blocks; clusters with resident weights keep their row groups, even with few multiprocessors."""
    clusters = max(1, device.multiprocessors // config.cluster)
    if config.resident:
        clusters = max(1, clusters // tile_shares) * tile_shares
    return min(work_tiles, clusters)


def _sharing(gather: Gather, device: DeviceInfo) -> Sharing:
    terms = costs("implicit_gemm", device)
    most = terms.sharing_most_last if gather.dst.channels_last else terms.sharing_most
    return Sharing(terms.sharing_rounds, terms.sharing_cycles, most)


def _own_work_tiles(
    gather: Gather, config: GemmConfig, tile: Tile, device: DeviceInfo, problem: ConvTransposeProblem, waves: int
) -> int:
    """Static work tiles of a block, of ``waves`` in all (``own`` in core/tile_scheduler.cuh)."""
    sharing, ends = _sharing(gather, device), shared_ends(gather, config, tile)
    # Sectors that tiles share count as memory traffic, too: blocks that drift apart complete them too late.
    moved = problem.bytes + ends * costs("implicit_gemm", device).shared_end
    alone = problem.bytes if ends else 0
    if not sharing.pays(waves, lambda: estimate(gather, config, tile, device, alone), moved, device):
        return _ALL
    stages = Product(gather, config).stages
    told_ahead = math.ceil((config.loader_groups - 1) / stages)
    loaded_ahead = config.stages if gather.src.channels_last or config.tma_operands else config.raw_slots
    return 1 + told_ahead + math.ceil(loaded_ahead / stages)


@lru_cache(maxsize=4096)
def _with_long_pieces(at: Layer, config: GemmConfig, device: DeviceInfo) -> GemmConfig:
    """The config with the longest pieces of rows that do not change its tiles, at all compared sizes.

    It may have fewer stages for them, as long as its prediction hardly rises.
    """
    longer_pieces = list(config.with_longer_pieces(at.gather))
    if not longer_pieces:
        return config
    gathers = [each.gather for each in (at, *at.sized(_HAVING_A_SAY[is_tiny(at.problem)]))]
    tiles = [best_tile(gather, config, device, RESERVE) for gather in gathers]
    if tiles[0] is None:
        return config
    most = _STAGES_COST * estimate(gathers[0], config, tiles[0], device, 0)[0]
    fewer_stages = [] if at.src_channels_last else [count for count in reversed(STAGES) if count < config.stages]
    for longer in longer_pieces:
        for count in (config.stages, *fewer_stages):
            fewer = longer._replace(stages=count)
            sized = zip(gathers, tiles)
            same = all(best_tile(each, fewer, device, RESERVE) == tile for each, tile in sized)
            if same and estimate(gathers[0], fewer, tiles[0], device, 0)[0] <= most:
                return fewer
    return config
