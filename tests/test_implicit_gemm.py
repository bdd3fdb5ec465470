"""The implicit GEMM in the emulator: products on tensor cores, of every shape, format and way to load them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import Emulator, assert_exact, formats, params, reference, run
from polyphase.plan.shortlist import candidates
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.params import params_of
from polyphase.program.program import Program
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import Sharing
from polyphase.schedules.implicit_gemm import schedule as implicit_gemm
from polyphase.schedules.implicit_gemm import tile as implicit_gemm_tile
from polyphase.schedules.implicit_gemm.config import GemmConfig, Product, Taps
from polyphase.schedules.implicit_gemm.families import Layer, legal_configs
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.implicit_gemm.tile import best_tile, may_take_operands, work_tiles_known
from polyphase.schedules.schedule import Candidate

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
H200 = DeviceInfo.for_arch("sm_90a")


@pytest.fixture(autouse=True)
def work_tiles_to_take(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other test blocks take from each other what they take only where there are many items."""
    if zlib.crc32(request.node.name.encode()) % 2:
        share_all_work_tiles(monkeypatch)


def share_all_work_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All those that are not a block's own because they are loaded before any can be taken."""
    always = Sharing(waves=1, cycles=0, most=1e9)
    monkeypatch.setattr(implicit_gemm, "_sharing", lambda gather, device: always)


GEMM_LAYERS = {
    "few, odd channels": make((2, 5, 9, 11), 3, 3, 1, 1, bias=True),
    "several stages, rows beyond a block": make((2, 37, 5, 6), 70, 4, 2, 1, bias=True),
    "four blocks of channels": make((3, 20, 3, 4), 259, 2, 2),
    "mixed, grouped, dilated": make((2, 20, 5, 9), 12, (3, 5), (2, 3), (1, 2), (1, 1), 4, True, (2, 1)),
    "phases without taps": make((2, 17, 4, 5), 16, (2, 3), (2, 4), (1, 0), (1, 3), dilation=(2, 2), bias=True),
    "kernel < stride": make((2, 16, 5, 8), 20, 2, (3, 4), 0, 1, bias=True),
    "cropped": make((1, 24, 6, 7), 17, 5, 2, 6),
    "many small images": make((41, 33, 2, 3), 18, 3, 2, 1, 1, bias=True),
    "wide": make((2, 16, 3, 264), 16, 3, 1, 1),
    "tall": make((1, 18, 150, 2), 16, (5, 1), 2, (1, 0), bias=True),
    "rows without gaps": make((2, 20, 8, 7), 16, 2, 2, bias=True),
    "images without gaps": make((23, 20, 4, 4), 16, 2, 2),
    "1-D": make((2, 70, 77), 16, 4, 2, 1),
    "1-D, long reach": make((1, 20, 340), 16, 2, dilation=700),
    "1-D, wide cells": make((2, 36, 70), 70, 16, 8, 4, bias=True),
    "1-D, cells of four": make((2, 20, 90), 40, 8, 4, 2),
    "wide cells": make((1, 20, 4, 6), 20, (4, 24), (2, 12), (1, 6), bias=True),
    "3-D": make((2, 17, 3, 4, 5), 16, (3, 2, 4), (1, 1, 2), (1, 0, 1), bias=True),
    "3-D, long reach": make((1, 16, 4, 2, 4), 16, (2, 1, 1), dilation=(80, 1, 1)),
}


@dataclass(frozen=True)
class GemmCase:
    """A config of implicit_gemm, and how the tensors lie. Blocks are few, so that each takes several tiles.

    ``one_way``: the kernel is that for tensors that lie like these, where there is one.
    """

    problem: ConvTransposeProblem
    layouts: Layouts
    config: GemmConfig
    one_way: bool = False

    def offers(self, device: DeviceInfo) -> list[tuple[Candidate, Program]]:
        few = replace(device, multiprocessors=self.params(device)["tile_shares"] if self.config.resident else 2)
        program = ImplicitGemm().program(self.problem, Pass.FORWARD, few, self.layouts, self.config)
        if self.one_way and program.main.one_way is not None:
            program = program.with_main(replace(program.main, source=program.main.one_way))
        return [(Candidate("implicit_gemm", self.config, 0.0, ""), program)]

    def params(self, device: DeviceInfo) -> dict[str, Any]:
        """The kernel's parameters."""
        return params(ImplicitGemm().program(self.problem, Pass.FORWARD, device, self.layouts, self.config))

    def kinds(self) -> set[tuple[object, ...]]:
        """What a sample should meet: settings with every instruction, layout and element size; and kinds of tiles."""
        each, bits16 = self.config, self.problem.dtype != "float32"
        src_last, dst_last = self.layouts.input[1] == 1, self.layouts.output[1] == 1
        settings = [setting for setting in each._asdict().items() if setting[0] != "pixels"]
        met: set[tuple[object, ...]] = {(each.wgmma, each.split, *setting) for setting in settings}
        met |= {(side, *setting) for side in ((src_last, dst_last), bits16) for setting in settings}
        found = self.params(H200)
        met |= {("tiles", axis, count > 1, src_last) for axis, count in enumerate(found["tiles"])}
        return met | {
            ("copy", found["copy_bytes"], bits16, src_last),
            ("store", found["store_vector"], bits16, dst_last),
            (found["images"] > 1, found["run"] > 0, found["boxes"]),
        }


def gemm_layouts(problem: ConvTransposeProblem) -> list[Layouts]:
    """The problem's own format, aligned and not; and with channels last on the input's side alone."""
    dense = Layouts.dense(problem)
    found = [dense, replace(dense, aligned=False, weight_channels_last=True)]
    if problem.dims > 1:
        found.append(replace(dense, input=Layouts.dense(replace(problem, channels_last=True)).input))
    return found


def gemm_problems(layers: Mapping[str, ConvTransposeProblem], share: int = 1) -> Iterator[ParameterSet]:
    """Each layer in each dtype and format, with a ``share`` of n in every n-th of these, others for each layer."""
    for index, (name, layer) in enumerate(layers.items()):
        for last, formatted in enumerate(formats(layer)):
            bits16 = ("float16", "bfloat16")[index % 2]
            for kind, (dtype, tf32) in enumerate((("float32", False), ("float32", True), (bits16, False))):
                if (index // 2 + last + kind) % share == 0:
                    order = "last" if formatted.channels_last else "first"
                    label = f"{name}-{order}-{dtype}{'-tf32' if tf32 else ''}"
                    yield pytest.param(replace(formatted, dtype=dtype, tf32=tf32), id=label)


def gemm_cases(most: int, device: DeviceInfo) -> Iterator[ParameterSet]:
    """Of each problem as many configs, up to ``most``, as meet another kind; half of them one way."""
    met: set[tuple[object, ...]] = set()
    for each in gemm_problems(GEMM_LAYERS):
        (problem,) = each.values
        found = gemm_configs(problem, device, random.Random(str(problem)))
        for i in range(most):
            case = max(islice(found, 60), key=lambda case: len(case.kinds() - met), default=None)
            if case is None or (i > 0 and case.kinds() <= met):
                break
            met |= case.kinds()
            label = f"{each.id}-{i}"
            yield pytest.param(replace(case, one_way=zlib.crc32(label.encode()) % 4 < 2), id=label)


def gemm_configs(
    problem: ConvTransposeProblem, device: DeviceInfo = H200, rng: random.Random | None = None, **settings: object
) -> Iterator[GemmCase]:
    """Every config with such settings that fits, with every layout; in random order where there is an ``rng``."""
    gathers = [(layouts, Gather.of(problem, Pass.FORWARD, layouts)) for layouts in gemm_layouts(problem)]
    offered = (
        (layouts, gather, each)
        for layouts, gather in gathers
        for config in legal_configs(Layer(problem, gather.src.channels_last, may_take_operands(gather)), device)
        for each in (config, *config.with_longer_pieces(gather))
        if not settings or settings.items() <= each._asdict().items()
    )
    if rng is not None:
        several = list(offered)
        offered = iter(rng.sample(several, len(several)))
    for layouts, gather, each in offered:
        if best_tile(gather, each, device) is not None:
            yield GemmCase(problem, layouts, each)


@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("problem", list(gemm_problems(GEMM_LAYERS, share=2)))
def test_products(problem: ConvTransposeProblem) -> None:
    """Settings of implicit_gemm beyond what the planner likes best for small layers; on a GPU it is many more."""
    case = next(gemm_configs(problem, rng=random.Random(str(problem))))
    seed = zlib.crc32(str(case).encode())
    case = replace(case, one_way=seed % 4 < 2)
    for candidate, program in case.offers(H200):
        assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(seed % 1000))


@pytest.mark.sampled(108, 18)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", ["turns", "rows", "cells"])
@pytest.mark.parametrize("name", ["1-D, wide cells", "1-D, cells of four", "wide cells"])
@pytest.mark.parametrize("number", range(3))
def test_parts_of_wide_cells(number: int, name: str, split: str, dtype: str) -> None:
    """Row groups have some of the phases along the width each, and store these parts of rows."""
    layer = replace(GEMM_LAYERS[name], dtype=dtype, tf32=True)
    parts = Taps.width_parts(layer.axes3)
    assert parts == max(2, layer.stride[-1] // 4)
    found = gemm_configs(layer, rng=random.Random(str(layer)), width_parts=parts, split=split, wgmma=True)
    case = next(islice(found, number, None))
    for candidate, program in case.offers(H200):
        assert_exact(layer, Pass.FORWARD, candidate, program, case.layouts, Emulator(1))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("1-D, wide cells", {"width_parts": 2, "split": "rows"}),
        ("1-D, wide cells", {"width_parts": 2, "split": "cells"}),
        ("1-D, cells of four", {"width_parts": 2, "split": "rows"}),
        ("wide cells", {"width_parts": 3, "split": "turns"}),
        ("several stages, rows beyond a block", {"loader_groups": 2}),
        ("few, odd channels", {"row_channels": 3}),
        ("images without gaps", {"tma_operands": True}),
    ],
)
def test_shared_memory_is_what_the_kernel_takes(name: str, settings: dict[str, object]) -> None:
    """The planner counts it by itself."""
    problem = replace(GEMM_LAYERS[name], in_channels=32, dtype="bfloat16", channels_last="tma_operands" in settings)
    case = gemm_case(problem, wgmma=True, **settings)
    ((_, program),) = case.offers(H200)
    gather = Gather.of(problem, Pass.FORWARD, case.layouts)
    product = Product(gather, case.config)
    shared = implicit_gemm_tile._static_shared_bytes(product, case.config.stages)
    stored = implicit_gemm_tile._store_bytes(gather, case.config)
    alignment = 1024 if case.config.tma_operands else 128
    text = f"""{emulator.text_of(program.main.source)}
static_assert(round_up((int)sizeof(Shared), {alignment}) == {shared}, "Shared");
static_assert(STORE_BYTES == {stored}, "STORE_BYTES");
"""
    emulator.EmulatedKernel(text, "implicit_gemm")


def gemm_case(problem: ConvTransposeProblem, **settings: object) -> GemmCase:
    """The first config with such settings, the problem in its own format."""
    return next(gemm_configs(problem, **settings))


@pytest.mark.parametrize("row_channels", [0, 16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_products_with_wide_offsets(monkeypatch: pytest.MonkeyPatch, channels_last: bool, row_channels: int) -> None:
    """Tables of 64-bit offsets, as images beyond 2³¹ elements have them, in as much shared memory as they are given."""
    for module in (implicit_gemm_tile, implicit_gemm):
        monkeypatch.setattr(module, "needs_wide_offsets", lambda gather: True)
    # A layer of its own: what is cached of its tiles is of wide offsets.
    problem = make((3, 20, 7, 13), 16, 3, 2, 1, 1, bias=True, channels_last=channels_last, tf32=True)
    case = gemm_case(problem, wgmma=True, row_channels=row_channels)
    for candidate, program in case.offers(H200):
        assert program.main.source.wide_offsets
        assert_exact(problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(1))


@pytest.mark.parametrize("width", [37, 40])
@pytest.mark.parametrize(("stride", "piece_bytes", "cells"), [(3, 256, 16), (3, 512, 32), (5, 1024, 32)])
def test_products_stored_in_pieces(stride: int, piece_bytes: int, cells: int, width: int) -> None:
    """Pieces of rows of every length, whole and in part, of rows that start aligned and of others."""
    problem = make((2, 12, 3, width), 64, 3, (2, stride), 1, 1, dilation=(1, 2), tf32=True)
    case = gemm_case(problem, wgmma=True, split="turns", piece_bytes=piece_bytes)
    for candidate, program in case.offers(H200):
        assert dict(program.main.source.constants)["PIECE"] == cells
        assert_exact(problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(2))


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("channels", "channel_blocks"), [(192, 2), (192, 4), (320, 2)])
def test_products_of_whole_blocks_that_do_not_exist(channels: int, channel_blocks: int, channels_last: bool) -> None:
    """Channels that fill blocks of 64, of which the last item has some too many: nothing is stored for those."""
    problem = make((3, 16, 3, 8), 2 * channels, 1, groups=2, bias=True, channels_last=channels_last, tf32=True)
    case = gemm_case(problem, wgmma=True, channel_blocks=channel_blocks)
    for candidate, program in case.offers(H200):
        assert_exact(problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(0))


RINGS = {
    "four groups of loaders, items of a stage": (8, True, {"loader_groups": 4, "k_steps": 1}),
    "four groups of loaders, items of several": (40, True, {"loader_groups": 4, "k_steps": 1}),
    "two groups of loaders": (24, False, {"loader_groups": 2, "k_steps": 1, "split": "turns"}),
    "a cluster": (24, False, {"loader_groups": 2, "k_steps": 1, "cluster": 2}),
    "resident weights": (8, False, {"k_steps": 1, "resident": True}),
    "float32 as float16": (48, False, {"loader_groups": 2, "k_steps": 1, "scaled": True}),
    "all multiply an item": (16, False, {"k_steps": 2, "split": "cells"}),
    "warps that multiply alone": (16, True, {"wgmma": False}),
}


def ring_case(name: str, device: DeviceInfo) -> GemmCase:
    """So many work tiles that each slot of the queue is used again, where blocks share all they can."""
    channels, channels_last, settings = RINGS[name]
    layer = make((1, channels, 4, 8), 70, 1, bias=True, channels_last=channels_last, tf32=True)
    for batch in (64, 128, 256, 512, 1024):
        case = gemm_case(replace(layer, batch=batch), **{"wgmma": True, **settings})
        ((_, program),) = case.offers(device)
        product = Product(Gather.of(case.problem, Pass.FORWARD, case.layouts), case.config)
        items, own = params(program)["work_tiles"], params(program)["own"]
        taken = items - own * program.main.grid[0] // case.config.cluster
        taken //= product.row_groups if case.config.resident else 1
        if taken > 1.2 * work_tiles_known(product, case.config.stages):
            return case
    raise AssertionError("too few work tiles")


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("name", RINGS)
def test_work_tiles_around_the_ring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    share_all_work_tiles(monkeypatch)
    case = ring_case(name, H200)
    for candidate, program in case.offers(H200):
        for order in (3, "reversed"):
            assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(order))


@pytest.mark.sampled(16, 4)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("wgmma", "split"), [(True, "turns"), (True, "rows"), (True, "cells"), (False, "cells")])
def test_products_do_not_race(wgmma: bool, split: str, channels_last: bool) -> None:
    """More tiles and stages than there are slots, and warps that run ahead of others or lag behind."""
    channels = 128 if split == "rows" else 8
    layer = make((1, 24, 4, 5), channels, 3, 1, 1, channels_last=channels_last, tf32=True)
    case = of_several_tiles(layer, lambda problem: gemm_case(problem, wgmma=wgmma, split=split, k_steps=1))
    for candidate, program in case.offers(H200):
        for seed in range(8):
            assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(seed))


def test_tiles_of_one_stage_do_not_race() -> None:
    """The next tile's pixels are found as soon as all warps have copied this one's, not before."""
    layer = make((1, 4, 4, 5), 8, 3, 1, 1, channels_last=True, tf32=True)
    case = of_several_tiles(layer, lambda problem: gemm_case(problem, wgmma=True, split="turns", k_steps=1))
    for candidate, program in case.offers(H200):
        for seed in range(2):
            assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(seed))


def of_several_tiles(layer: ConvTransposeProblem, config_of: Callable[[ConvTransposeProblem], GemmCase]) -> GemmCase:
    """The config on as few images as come in more tiles than twice the two that a block computes at a time."""
    cases = (config_of(replace(layer, batch=batch)) for batch in (3, 6, 12, 24, 48, 96))
    return next(case for case in cases if case.params(H200)["work_tiles"] > 2 * 2)


@pytest.mark.parametrize(("size", "copied"), [((4, 4), 16), ((3, 4), 8), ((2, 5), 4), ((3, 3), 2)])
@pytest.mark.parametrize("more_rows", [0, 1])
def test_products_of_runs(size: tuple[int, int], copied: int, more_rows: int) -> None:
    """Tiles that hold images in part, copied in vectors of every size; none where the output has rows of its own."""
    problem = make((37, 40, *size), 70, 2, 2, 0, (more_rows, 0), bias=True, dtype="bfloat16")
    case = gemm_case(problem, wgmma=True, pixels=80, k_steps=1)
    found = case.params(H200)
    assert (found["run"] == 0) is bool(more_rows)
    assert more_rows or found["copy_bytes"] == copied
    for candidate, program in case.offers(H200):
        assert_exact(problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(0))


# Whole images whose partial products are added up in rounds of several sets: a layer, settings of the config, sets.
ROUNDS = {
    "odd pixels": (make((23, 24, 3, 5), 24, 4, 2, 1, bias=True, dtype="bfloat16"), {"split": "turns"}, 2),
    "float32": (make((23, 24, 3, 5), 24, 4, 2, 1, bias=True, tf32=True), {"split": "cells"}, 2),
    "row groups shared out": (make((19, 24, 4, 4), 32, 4, 2, 1, dtype="float16"), {"split": "rows"}, 2),
    "channels in part": (make((19, 24, 4, 4), 13, 4, 2, 1, 1, bias=True, dtype="bfloat16"), {}, 2),
    "four sets": (make((23, 24, 3, 5), 16, (4, 8), (2, 1), (1, 3), dtype="bfloat16"), {"channel_blocks": 4}, 4),
    "two rounds of sets": (make((23, 24, 3, 5), 32, 4, 2, 1, tf32=True), {"channel_blocks": 4}, 2),
    "an image a round": (make((5, 24, 7, 9), 16, 4, 2, 1, dtype="float16", bias=True), {"split": "turns"}, 2),
    "lines without taps": (make((23, 24, 3, 5), 24, (2, 8), (3, 2), (0, 3), bias=True, tf32=True), {}, 2),
    "a volume": (make((9, 20, 2, 3, 3), 16, 4, 2, 1, dtype="bfloat16"), {"channel_blocks": 4}, 4),
    "in two parts": (make((23, 12, 3, 5), 16, 4, 2, 1, bias=True), {"parts": 2}, 2),
    "mma.sync": (make((23, 24, 3, 5), 24, 4, 2, 1, bias=True, dtype="bfloat16"), {"wgmma": False}, 2),
}


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_of_images(name: str) -> None:
    layer, settings, sets = ROUNDS[name]
    layer = replace(layer, channels_last=True)
    settings = {"channel_blocks": 2, "whole_images": True, "wgmma": True, **settings}
    case = next(case for case in gemm_configs(layer, **settings) if case.layouts == Layouts.dense(layer))
    for candidate, program in case.offers(H200):
        assert dict(program.main.source.constants)["SETS"] == sets
        for order in ("reversed", 3):
            assert_exact(layer, Pass.FORWARD, candidate, program, case.layouts, Emulator(order))


# Boxes of pixels that TMA copies: a layer, settings of the config, and what its tiles are to be.
BOXED = {
    "one box": (
        make((2, 20, 6, 16), 70, 3, 1, 1, bias=True, tf32=True),
        {"k_steps": 1},
        {"boxes": 1, "run": False, "several": True},
    ),
    "in two parts": (make((1, 20, 5, 8), 16, 3, 1, 1), {"parts": 2, "k_steps": 2}, {"boxes": 1}),
    "one box, as halves": (
        make((2, 40, 6, 16), 70, 3, 1, 1, bias=True, tf32=True),
        {"k_steps": 1, "scaled": True},
        {"boxes": 1, "run": False, "several": True},
    ),
    "a run in two boxes, as halves in two parts": (
        make((2, 40, 16, 36), 40, 1),
        {"k_steps": 2, "scaled": True},
        {"boxes": 2, "run": True},
    ),
    "whole images, as halves": (
        make((9, 40, 4, 4), 20, 4, 2, 1, tf32=True),
        {"whole_images": True, "scaled": True},
        {"boxes": 1, "run": True, "several": True},
    ),
    "a row in two boxes": (
        make((2, 20, 2, 520), 16, (1, 3), 1, (0, 1), tf32=True),
        {"k_steps": 1},
        {"boxes": 2, "run": False},
    ),
    "a row in boxes, 1-D": (make((2, 24, 600), 16, 4, dtype="bfloat16"), {"k_steps": 2}, {"boxes": 2, "run": False}),
    "a run": (make((3, 24, 5, 24), 40, 2, 2, dtype="bfloat16"), {"k_steps": 1}, {"boxes": 1, "run": True}),
    "a run in two boxes": (make((2, 20, 16, 36), 40, 1, tf32=True), {"k_steps": 1}, {"boxes": 2, "run": True}),
    "a run of joined rows": (make((3, 24, 6, 6), 40, 2, 2, tf32=True), {"k_steps": 2}, {"boxes": 1, "run": True}),
    "whole images of joined rows": (
        make((19, 40, 4, 4), 9, 4, 2, 1, bias=True, dtype="float16"),
        {"whole_images": True, "k_steps": 1},
        {"boxes": 1, "run": True, "several": True},
    ),
    "whole images": (
        make((11, 20, 3, 8), 9, 4, 2, 1, bias=True, dtype="bfloat16"),
        {"whole_images": True, "k_steps": 2},
        {"boxes": 1, "run": True, "several": True},
    ),
    "whole images in two parts": (
        make((9, 12, 4, 4), 70, 4, 2, 1),
        {"whole_images": True, "parts": 2},
        {"boxes": 1, "run": True, "several": True},
    ),
    "zeros behind": (
        make((5, 20, 9, 8), 40, 4, 2, 1, tf32=True),
        {"k_steps": 4},
        {"boxes": 1, "zeros": True, "several": True},
    ),
    "groups": (
        make((2, 64, 9, 16), 24, 3, 1, 1, groups=2, dtype="bfloat16", bias=True),
        {"k_steps": 2},
        {"boxes": 1, "several": True},
    ),
    "3-D": (make((2, 18, 3, 4, 8), 16, (3, 2, 4), (1, 1, 2), (1, 0, 1), dtype="float16"), {"k_steps": 1}, {"boxes": 1}),
    "operands, a run": (
        make((2, 40, 9, 24), 40, 2, 2, dtype="bfloat16", bias=True),
        {"tma_operands": True, "k_steps": 1, "split": "turns"},
        {"boxes": 2, "run": True},
    ),
    "operands, a run in parts": (
        make((2, 72, 20, 40), 70, 2, 2, dtype="float16"),
        {"tma_operands": True, "k_steps": 4, "split": "cells"},
        {"run": True},
    ),
    "operands, an image without taps": (
        make((2, 20, 3, 8), 24, (1, 2), (2, 3), dtype="bfloat16", bias=True),
        {"tma_operands": True, "k_steps": 2},
        {"boxes": 1, "run": True},
    ),
    "operands, a volume": (
        make((2, 24, 4, 6, 4), 40, 2, 2, dtype="float16", bias=True),
        {"tma_operands": True, "k_steps": 2},
        {"run": True},
    ),
    "operands, a signal": (
        make((3, 24, 104), 40, 4, 4, dtype="bfloat16"),
        {"tma_operands": True, "cluster": 2},
        {"run": True},
    ),
    "operands, whole images": (
        make((5, 40, 4, 4, 4), 9, 3, 2, 1, 1, bias=True, dtype="bfloat16"),
        {"tma_operands": True, "whole_images": True, "k_steps": 2, "pixels": 128},
        {"boxes": 2, "run": True, "several": True},
    ),
    "operands, whole images shared out": (
        make((5, 24, 8, 8), 20, 3, 2, 1, 1, dtype="float16"),
        {"tma_operands": True, "whole_images": True, "k_steps": 1, "split": "cells"},
        {"run": True, "several": True},
    ),
    "operands, groups": (
        make((2, 64, 9, 16), 128, 2, 2, groups=2, dtype="bfloat16", bias=True),
        {"tma_operands": True, "k_steps": 2},
        {"run": True},
    ),
    "last, swizzled by 32": (
        make((2, 40, 9, 9), 24, 3, 1, 1, dtype="bfloat16", channels_last=True),
        {"k_steps": 1, "whole_images": False},
        {"boxes": 1, "run": False, "zeros": True},
    ),
    "last, swizzled by 64": (
        make((3, 20, 7, 10), 24, 4, 2, 1, tf32=True, channels_last=True, bias=True),
        {"k_steps": 2},
        {"boxes": 1, "run": False},
    ),
    "last, swizzled by 128": (
        make((3, 72, 9, 8), 24, 3, 1, 1, dtype="bfloat16", channels_last=True),
        {"k_steps": 4},
        {"boxes": 1, "run": False},
    ),
    "last, a run in two boxes": (
        make((7, 40, 7, 11), 24, 2, 2, tf32=True, channels_last=True),
        {"k_steps": 4},
        {"boxes": 2, "run": True},
    ),
    "last, whole images": (
        make((23, 24, 3, 5), 9, 4, 2, 1, dtype="bfloat16", channels_last=True),
        {"whole_images": True, "k_steps": 2},
        {"boxes": 1, "run": True, "several": True},
    ),
    "last, groups": (
        make((2, 64, 5, 15), 24, 3, 1, 1, groups=2, dtype="bfloat16", channels_last=True),
        {"k_steps": 2, "whole_images": False},
        {"boxes": 1},
    ),
}


def tile_of(case: GemmCase) -> dict[str, int]:
    """What `BOXED` says of tiles: boxes of a stage, whether they are runs, of several images, fewer than the halo."""
    found = case.params(H200)
    zeros = found["run_pixels"] > found["boxes"] * found["box_pixels"]
    return {"boxes": found["boxes"], "run": found["run"] > 0, "several": found["images"] > 1, "zeros": zeros}


def boxed(
    problem: ConvTransposeProblem, settings: dict[str, object], wanted: dict[str, int]
) -> tuple[GemmCase, Candidate, Program]:
    """The first config with such settings that has such tiles, the problem in its own format; its program."""
    dense = Layouts.dense(problem)
    cases = gemm_configs(problem, **settings)
    case = next(case for case in cases if case.layouts == dense and wanted.items() <= tile_of(case).items())
    return case, *case.offers(H200)[0]


@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("name", BOXED)
def test_products_of_boxes(name: str) -> None:
    case, candidate, program = boxed(*BOXED[name])
    (tensor_map,) = program.main.tensor_maps
    last, operands = case.problem.channels_last, name.startswith("operands")
    assert case.config.tma_operands is (last or operands)
    assert tensor_map.swizzle == (32 * case.config.k_steps if last else 128 if operands else 16)
    assert tensor_map.tf32 is (case.config.parts == 1 and not case.config.scaled)
    for order in ("reversed", 5):
        assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(order))


@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize(
    ("channels_last", "settings"),
    [
        (True, {"stages": 3}),
        (False, {"stages": 2, "loader_groups": 2}),
        (False, {"stages": 3, "loader_groups": 2}),
        (False, {"stages": 3, "raw_slots": 2}),
    ],
    ids=["last", "one group", "two groups take turns", "few slots"],
)
@pytest.mark.parametrize("split", ["turns", "rows", "cells"])
def test_boxes_do_not_race(split: str, channels_last: bool, settings: dict[str, object]) -> None:
    """More tiles and stages than there are slots, and warps that run ahead of others or lag behind."""
    channels = 128 if split == "rows" else 16
    layer = make((1, 40, 5, 8), channels, 3, 1, 1, channels_last=channels_last, tf32=True)
    settings = {"split": split, "k_steps": 1, "whole_images": False, **settings}
    case = of_several_tiles(layer, lambda problem: boxed(problem, settings, {"boxes": 1})[0])
    for candidate, program in case.offers(H200):
        for seed in range(2):
            assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts, Emulator(seed))


def stages_by_tma(problem: ConvTransposeProblem, **layout: bool) -> set[int]:
    """The depths of stages, in instructions, of which TMA brings the pixels."""
    layouts = replace(Layouts.dense(problem), **layout)
    found = set()
    for case in gemm_configs(problem):
        if (case.layouts.input, case.layouts.aligned) == (layouts.input, layouts.aligned):
            program = ImplicitGemm().program(problem, Pass.FORWARD, H200, case.layouts, case.config)
            assert bool(program.main.tensor_maps) is (case.params(H200)["boxes"] > 0)
            found |= {case.config.k_steps} if program.main.tensor_maps else set()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
def test_tma_only_where_it_can(channels_last: bool) -> None:
    """Not of unaligned tensors, rows or pixels that are no multiple of 16 bytes, nor beyond a group's channels."""
    problem = make((2, 64, 9, 16), 24, 3, 1, 1, dtype="bfloat16", channels_last=channels_last)
    assert stages_by_tma(problem) == {1, 2, 4}
    assert stages_by_tma(problem, aligned=False) == set()
    assert stages_by_tma(replace(problem, in_channels=60, input_size=(9, 12))) == set()
    assert stages_by_tma(replace(problem, groups=2)) == {1, 2}
    assert stages_by_tma(replace(problem, groups=8, in_channels=80)) == set()


STRANGE = {
    "a column with gaps": (make((2, 16, 80, 1), 16, 2, 2, tf32=True), (5120, 320, 0, 4, 4)),
    "a short column with gaps": (make((5, 16, 16, 1), 16, 4, 2, 1, tf32=True), (1024, 64, 0, 4, 4)),
    "one pixel": (make((1, 32, 1, 1), 16, 4, tf32=True), (32, 1, 0, 7, 5)),
    "gaps between rows": (make((2, 16, 9, 8), 16, 2, 2, tf32=True), (4096, 256, 0, 12, 1)),
    "gaps between images": (make((3, 16, 9, 8), 16, 2, 2, tf32=True), (1600, 1, 0, 160, 20)),
    "images in another order": (make((3, 16, 9, 8), 16, 3, 1, 1, tf32=True), (72, 216, 0, 8, 1)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_boxes_of_strange_tensors(name: str) -> None:
    """The first config with boxes, where there is one."""
    problem, strides = STRANGE[name]
    layouts = replace(Layouts.dense(problem), input=strides)
    found = list(candidates(ImplicitGemm(), problem, Pass.FORWARD, H200, layouts))
    offers = [GemmCase(problem, layouts, candidate.config).offers(H200)[0] for candidate in found]
    candidate, program = next((offer for offer in offers if offer[1].main.tensor_maps), offers[0])
    assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(1))


def test_boxes_begin_at_multiples_of_16_bytes() -> None:
    """The emulator does not let TMA begin elsewhere, which it cannot."""
    case, candidate, program = boxed(*BOXED["one box"])
    found = params(program)
    moved = params_of(program.main.source).pack(**{**found, "skew": found["skew"] + 1})
    program = program.with_main(replace(program.main, params=moved))
    with pytest.raises(emulator.EmulationError, match="__trap"):
        assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts)


def tf32(values: torch.Tensor) -> torch.Tensor:
    """Rounded to the 11 significant bits of TF32, ties away from zero."""
    bits = values.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()


@pytest.mark.parametrize(("channels_last", "width"), [(False, 5), (False, 8), (True, 5)])
@pytest.mark.parametrize("parts", [1, 2])
def test_products_of_float32(parts: int, channels_last: bool, width: int) -> None:
    """One part is TF32 rounded to nearest, two are as good as float32; with neither does an Inf become a NaN."""
    problem = make((1, 20, 4, width), 16, 4, 2, 1, tf32=parts == 1, channels_last=channels_last)
    case = gemm_case(problem, parts=parts)
    ((_, program),) = case.offers(H200)
    assert bool(program.main.tensor_maps) is (parts == 1 if channels_last else width == 8)
    torch.manual_seed(3)
    x, w = (torch.randn(shape).double() for shape in (problem.input_shape, problem.weight_shape))
    out = run(problem, Pass.FORWARD, program, case.layouts, (x, w)).double()
    expected = reference(problem, Pass.FORWARD, (x, w) if parts == 2 else (tf32(x), tf32(w)))
    scale = reference(problem, Pass.FORWARD, (x.abs(), w.abs()))
    assert bool(((out - expected).abs() <= 2**-20 * scale).all())
    w = w.abs()
    w[:, ::2] = 0.5  # exact in TF32: its second part is zero
    for value in (torch.inf, -torch.inf, torch.nan):
        x[0, 3, 1, 2] = value
        out = run(problem, Pass.FORWARD, program, case.layouts, (x, w)).double()
        expected = reference(problem, Pass.FORWARD, (x, w))
        finite = expected.isfinite()
        assert torch.equal(out[~finite].nan_to_num(7), expected[~finite].nan_to_num(7))
        assert bool(out[finite].isfinite().all())


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("channels", [20, 70])
def test_chains_of_two_parts_end_within_a_stage(channels: int) -> None:
    """21 operations of a row block are more than the 16 of a chain (CHAIN in implicit_gemm.cu)."""
    case = gemm_case(make((1, 20, 5, 19), channels, (3, 7), bias=True), parts=2, wgmma=True, k_steps=1)
    ((candidate, program),) = case.offers(H200)
    assert dict(program.main.source.constants)["OPERATIONS"] // case.config.channel_blocks == 21
    assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts)


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("split", ["cells", "rows", "turns"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "layer",
    [make((2, 20, 4, 5), 70, 3, 2, bias=True), make((1, 20, 3, 4, 3), 20, (3, 5, 2), (2, 2, 1), 1)],
    ids=["two kinds", "four kinds"],
)
def test_products_of_every_kind_of_line_groups(layer: ConvTransposeProblem, dtype: str, split: str) -> None:
    """Lines of more and of fewer taps have code of their own (KINDS in implicit_gemm.cu)."""
    case = gemm_case(replace(layer, dtype=dtype), wgmma=True, split=split, lines=1, row_channels=0)
    ((candidate, program),) = case.offers(H200)
    assert not Taps.of(layer.axes3).are_alike(1)
    assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts)
