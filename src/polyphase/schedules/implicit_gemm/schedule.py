"""The forward pass on tensor cores, ``kernels/implicit_gemm.cu``: choice and launch of a variant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from polyphase.jit.source import Constant, KernelSource
from polyphase.plan.rankings import kept
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.problem.sizes import is_tiny, standard, typical
from polyphase.program.params import params_of
from polyphase.program.program import Launch
from polyphase.schedules.cells import MAX_PHASES, Gather
from polyphase.schedules.cost import Sharing
from polyphase.schedules.implicit_gemm.config import (
    CHUNK_BYTES,
    CONSUMERS,
    STAGES,
    GemmVariant,
    Product,
    families,
)
from polyphase.schedules.implicit_gemm.cost import estimate
from polyphase.schedules.implicit_gemm.packing import pack_weights, packing_constants, scales_bytes
from polyphase.schedules.implicit_gemm.tile import (
    Tile,
    best_tile,
    best_tiles,
    boxes,
    may_take_operands,
    needs_wide_offsets,
    raw_pitch,
    shared_bytes,
    store_vector,
)
from polyphase.schedules.schedule import Candidate, first_candidates
from polyphase.schedules.tensor_cores import lacks_cores

_MAX_OPERATIONS = 512
_MAX_TAPS = 4096
_OFFERED = 10
_BEST = 3  # of those, at the typical size
_COMPARED = 64
# Batch and sides of other images, by whether they are tiny: those that have a say in what is best, and those whose own
# best is offered, too. There are few images and many, small and large ones.
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
_AS_GOOD = 0.99  # of the prediction at another size: what is offered already does there
# By whether channels come last in the destination.
_SHARING = {False: Sharing(rounds=32, cycles=1800.0, most=3.0), True: Sharing(rounds=32, cycles=1800.0, most=1.2)}
_ALL = 2**31 - 1
_STAGES_COST = 1.01  # at most, of stages given up for longer pieces of rows: times the prediction before
_RESERVE = 2 << 10  # left where variants are compared, so that they fit at other sizes, too


class ImplicitGemm:
    """Taps as products of matrices on tensor cores, all phases of a tile in one block."""

    name = "implicit_gemm"
    any_size = True
    adapts = False

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if pass_ is Pass.WEIGHT_GRAD:
            return "computes the forward pass and the input gradient only"
        if pass_ is Pass.INPUT_GRAD and problem.mirrored() is None:
            return "computes input gradients of layers of stride 1 only"
        if (reason := lacks_cores(problem, device)) is not None:
            return reason
        gather = Gather.of(problem, Pass.FORWARD, Layouts.dense(problem))
        if gather.taps > _MAX_TAPS:
            return f"{gather.taps} taps are too many to list (at most {_MAX_TAPS})"
        if gather.phases > MAX_PHASES:
            return f"{gather.phases} elements of a cell are too many for straight-line code (at most {MAX_PHASES})"
        if next(self.candidates(problem, pass_, device, Layouts.dense(problem)), None) is None:
            return f"no tile fits {device.shared_bytes_per_block} bytes of shared memory"
        return None

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> Iterator[Candidate]:
        problem, gather = _as_forward(problem, pass_, layouts)
        # The gradient of a tiny image need not be tiny, and a layer has one kernel for all of either kind.
        sized = typical(problem) if gather.mirrored else standard(problem)
        last = gather.src.channels_last
        by_boxes = may_take_operands(gather)

        def predict(variant: GemmVariant) -> tuple[float, str] | None:
            tile = best_tile(gather, variant, problem.batch, device)
            return None if tile is None else estimate(gather, variant, tile, device, problem.bytes)

        # The gradients of an output's pixels often differ by far more than an input's pixels do, and would want several
        # bands of magnitudes (kernels/common/scales.cuh).
        order = ranked(sized, device, last, by_boxes, not gather.mirrored)
        variants = (_with_long_pieces(sized, last, variant, device) for variant in order)
        return first_candidates(self.name, variants, predict, _OFFERED)

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: GemmVariant
    ) -> Launch:
        problem, gather = _as_forward(problem, pass_, layouts)
        product = Product.of(gather, variant)
        tile = best_tile(gather, variant, problem.batch, device)
        assert tile is not None
        tile_items = product.row_groups // variant.row_parts
        items = math.ceil(tile.total / variant.cluster) * tile_items
        vector = store_vector(gather, variant, tile)
        clusters = _clusters(items, tile_items, device, variant)
        source = KernelSource(
            self.name, problem.dtype, needs_wide_offsets(gather), self._constants(gather, variant, product)
        )
        geometry = params_of(source).pack(
            src=gather.src,
            dst=gather.dst,
            batch=problem.batch,
            images=tile.images,
            cells=tile.cells,
            tiles=tile.tiles,
            tile_items=tile_items,
            pitch=tile.pitch,
            items=items,
            halo=tile.halo,
            raw_pitch=tile.box_pixels if tile.boxes else raw_pitch(tile.halo, DTYPE_BYTES[problem.dtype]),
            chunk_bytes=tile.allocated * CHUNK_BYTES,
            skew=tile.skew,
            copy_bytes=tile.copy_bytes,
            store_vector=vector,
            boxes=tile.boxes,
            box_pixels=tile.box_pixels,
            run=tile.run,
            own=_own_items(gather, variant, tile, device, problem, math.ceil(items / max(1, clusters))),
        )
        return Launch(
            source=source,
            grid=(variant.cluster * clusters, 1, 1),
            block=variant.loader_threads + 128 * CONSUMERS,
            shared_bytes=shared_bytes(gather, variant, tile),
            geometry=geometry,
            prologue=pack_weights(gather, variant, product, problem.batch),
            workspace_bytes=product.counter_bytes(variant)
            + scales_bytes(gather, variant, product)
            + product.row_groups * product.weight_bytes(variant),
            boxes=(boxes(gather, variant, tile),) if tile.boxes else (),
            one_way=None
            if variant.whole_images and variant.parts == 2  # a register spills
            else source.with_constants(STORE_VECTOR=vector, COPY_BYTES=0 if tile.boxes else tile.copy_bytes),
        )

    @staticmethod
    def _constants(gather: Gather, variant: GemmVariant, product: Product) -> tuple[tuple[str, Constant], ...]:
        return (
            *packing_constants(gather, variant, product),
            ("SRC_CHANNELS_LAST", gather.src.channels_last),
            ("WHOLE_IMAGES", variant.whole_images),
            ("BOXES", variant.boxes),
            ("PIXELS", variant.pixels),
            ("PIXEL_BLOCKS", variant.pixel_blocks),
            ("CONSUMERS", CONSUMERS),
            ("SPLIT_ROWS", variant.split == "rows"),
            ("TAKE_TURNS", variant.split == "turns"),
            ("RESIDENT", variant.resident),
            ("LOADER_GROUPS", variant.loader_groups),
            ("LOADER_THREADS", variant.loader_threads),
            ("GIVEN_REGISTERS", 0),
            ("TURNING_GROUPS", variant.turning_groups),
            ("STAGES", variant.stages),
            ("CLUSTER", variant.cluster),
            ("STORE_VECTOR", 0),
            ("COPY_BYTES", 0),
            ("RAW_STAGES", variant.raw_slots // variant.loader_groups),
            *(
                [("SETS", variant.sets_at_once(gather)), ("ROUND_PIXELS", variant.round_pixels(gather))]
                if variant.taps_in_rows
                else [("PIECE", variant.piece(gather))]
            ),
            ("WGMMA", variant.wgmma),
        )


def _as_forward(problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> tuple[ConvTransposeProblem, Gather]:
    """The layer whose forward pass this is, and that pass."""
    if pass_ is Pass.FORWARD:
        return problem, Gather.of(problem, pass_, layouts)
    mirrored = problem.mirrored()
    assert mirrored is not None
    layouts = replace(layouts, input=layouts.output, output=layouts.input)
    return mirrored, Gather.of(mirrored, Pass.FORWARD, layouts, mirrored=True)


def _clusters(items: int, tile_items: int, device: DeviceInfo, variant: GemmVariant) -> int:
    """Clusters of blocks; those with resident weights stay with their row groups, however few multiprocessors."""
    clusters = max(1, device.multiprocessors // variant.cluster)
    if variant.resident:
        clusters = max(1, clusters // tile_items) * tile_items
    return min(items, clusters)


def _own_items(
    gather: Gather, variant: GemmVariant, tile: Tile, device: DeviceInfo, problem: ConvTransposeProblem, rounds: int
) -> int:
    """Of the ``rounds`` of items for each block, those that it does not share with the others (item_queue.cuh)."""
    sharing = _SHARING[gather.dst.channels_last]
    if not sharing.pays(rounds, lambda: estimate(gather, variant, tile, device, 0), problem.bytes, device):
        return _ALL
    stages = Product.of(gather, variant).stages(variant)
    told_ahead = math.ceil((variant.loader_groups - 1) / stages)
    loaded_ahead = variant.stages if gather.src.channels_last or variant.boxes else variant.raw_slots
    return 1 + told_ahead + math.ceil(loaded_ahead / stages)


@lru_cache(maxsize=4096)
def ranked(
    problem: ConvTransposeProblem, device: DeviceInfo, src_channels_last: bool, boxes: bool, may_scale: bool = True
) -> list[GemmVariant]:
    """The variants that compute a layer of typical size: the best ones there, then those that other sizes want.

    Some other sizes have half the say in what is best; more of them have their own best offered, where nothing before
    does as well there. Behind these stand all others.
    """
    members = list(families(problem, device, src_channels_last, boxes, may_scale))
    offered = [variant._replace(stages=count) for variant, stages in members for count in stages]
    layout = f"input {'channels' if src_channels_last else 'pixels'} last"
    about = f"{problem!r}, {layout}, boxes {boxes}, scaled {may_scale}, on {device!r}"
    return kept(about, offered, lambda: _rank(problem, device, src_channels_last, boxes, members))


@lru_cache(maxsize=4096)
def _with_long_pieces(
    problem: ConvTransposeProblem, src_channels_last: bool, variant: GemmVariant, device: DeviceInfo
) -> GemmVariant:
    """The variant with the longest pieces of rows that leave it its tiles, at all sizes that have a say.

    For these it may give up stages, as long as its prediction hardly rises.
    """
    longer_pieces = list(variant.with_longer_pieces(_sized_gather(problem, src_channels_last)))
    if not longer_pieces:
        return variant
    others = _sizes(problem, _HAVING_A_SAY[is_tiny(problem)])
    gathers = [_sized_gather(sized, src_channels_last) for sized in (problem, *others)]
    tiles = [best_tile(gather, variant, gather.src.shape[0], device, _RESERVE) for gather in gathers]
    if tiles[0] is None:
        return variant
    most = _STAGES_COST * estimate(gathers[0], variant, tiles[0], device, 0)[0]
    fewer_stages = [] if src_channels_last else [count for count in reversed(STAGES) if count < variant.stages]
    for longer in longer_pieces:
        for count in (variant.stages, *fewer_stages):
            fewer = longer._replace(stages=count)
            sized = zip(gathers, tiles)
            same = all(best_tile(each, fewer, each.src.shape[0], device, _RESERVE) == tile for each, tile in sized)
            if same and estimate(gathers[0], fewer, tiles[0], device, 0)[0] <= most:
                return fewer
    return variant


def _sizes(
    problem: ConvTransposeProblem, sizes: Sequence[tuple[int, tuple[int, int, int]]]
) -> list[ConvTransposeProblem]:
    found = (replace(typical(problem, sides), batch=batch) for batch, sides in sizes)
    return [sized for sized in found if is_tiny(sized) is is_tiny(problem)]


_Members = Sequence[tuple[GemmVariant, tuple[int, ...]]]


def _rank(
    problem: ConvTransposeProblem, device: DeviceInfo, src_channels_last: bool, boxes: bool, members: _Members
) -> list[GemmVariant]:
    def gather_of(sized: ConvTransposeProblem) -> Gather:
        return _sized_gather(sized, src_channels_last)

    members = [each for each in members if Product.of(gather_of(problem), each[0]).operations <= _MAX_OPERATIONS]
    predicted = _predictions(gather_of(problem), members, device)
    order = sorted(predicted, key=predicted.__getitem__)
    compared, others = order[:_COMPARED], _sizes(problem, _HAVING_A_SAY[is_tiny(problem)])
    scores = {variant: math.log(predicted[variant]) for variant in compared}
    for gather in map(gather_of, others):
        for variant in compared:
            scores[variant] += math.log(_seconds(gather, variant, device)) / len(others)
    order = sorted(compared, key=scores.__getitem__) + order[_COMPARED:]
    chosen = order[:_BEST]
    for gather in map(gather_of, _sizes(problem, _WITH_THEIR_OWN[is_tiny(problem)])):
        if boxes and not may_take_operands(gather):
            continue  # such images have another list
        predicted = _predictions(gather, members, device)
        fastest = min(predicted, key=predicted.__getitem__, default=None)
        if fastest is None:
            continue
        before = min((_seconds(gather, variant, device) for variant in chosen), default=math.inf)
        if predicted[fastest] < _AS_GOOD * before:
            chosen.append(fastest)
    return [*chosen, *(variant for variant in order if variant not in chosen)]


def _predictions(gather: Gather, members: _Members, device: DeviceInfo) -> dict[GemmVariant, float]:
    """Seconds, whatever the bytes, of those variants that have a tile, each with the best of its stages."""
    found = {}
    for variant, stages in members:
        tiles = best_tiles(gather, variant, stages, gather.src.shape[0], device, _RESERVE)
        if (fastest := _fastest(gather, variant, stages, tiles, device)) is not None:
            found[fastest[1]] = fastest[0]
    return found


def _seconds(gather: Gather, variant: GemmVariant, device: DeviceInfo) -> float:
    """Of one variant; infinite where it has no tile."""
    tile = best_tile(gather, variant, gather.src.shape[0], device, _RESERVE)
    return math.inf if tile is None else estimate(gather, variant, tile, device, 0)[0]


def _fastest(
    gather: Gather, variant: GemmVariant, stages: Sequence[int], tiles: Sequence[Tile | None], device: DeviceInfo
) -> tuple[float, GemmVariant] | None:
    """The prediction, whatever the bytes, for the best of these ``stages`` and its variant; None where no tile fits."""
    fastest, before = None, None
    for count, tile in zip(reversed(stages), reversed(tiles)):
        if tile is None:
            continue
        if tile is before:
            break  # fewer stages only pay for a better tile
        before = tile
        fewer = variant._replace(stages=count)
        seconds = estimate(gather, fewer, tile, device, 0)[0]
        if fastest is not None and seconds >= fastest[0]:
            break
        fastest = seconds, fewer
    return fastest


def _sized_gather(problem: ConvTransposeProblem, src_channels_last: bool) -> Gather:
    dense = Layouts.dense(problem)
    if src_channels_last != problem.channels_last:
        dense = replace(dense, input=dense_strides(problem.input_shape, src_channels_last))
    return Gather.of(problem, Pass.FORWARD, dense)
