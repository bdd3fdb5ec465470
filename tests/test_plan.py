"""The planner, which needs no GPU: every layer gets a plan that its device can launch, whatever images it meets."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import random_problem, refusals
from kernel_harness import formats, offers, params
from polyphase import UnsupportedError, runtime
from polyphase.bench.layers import NamedLayer, Suite, every_layer, parse_layer, suite
from polyphase.bench.operands import Operands, make_operands
from polyphase.jit.source import KernelSource
from polyphase.plan import planner as plan
from polyphase.plan.explain import explain
from polyphase.plan.shortlist import candidates
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass
from polyphase.problem.device import PORTABLE, DeviceInfo, _of_cuda
from polyphase.problem.layouts import Layouts, Strides
from polyphase.problem.sizes import has_odd_rows, is_tiny
from polyphase.program.program import Program
from polyphase.program.struct_layout import divisor
from polyphase.program.tensor_map import TensorMap
from polyphase.schedules import SCHEDULES
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import Product
from polyphase.schedules.implicit_gemm.cuts import box_strides
from polyphase.schedules.implicit_gemm.families import Layer, families
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.implicit_gemm.tile import Room, best_tile
from polyphase.schedules.window_gemm.wgmma_window import in_pairs

make = ConvTransposeProblem.make
ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120")
H200 = DeviceInfo.for_arch("sm_90a")
FURTHER = (Suite.MODELS, Suite.VOLUMES, Suite.BATCH_ONE, Suite.HOLES)
NAMES = {layer.name for which in FURTHER for layer in suite(which)} - {layer.name for layer in suite(Suite.ALL)}
MODELS = [layer for layer in every_layer() if layer.name in NAMES]
LAYERS = [layer for layer in every_layer() if layer not in MODELS]
MOST_BLOCKS = (2**31 - 1, 65535, 65535)


def assert_launchable(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, program: Program) -> None:
    assert program.main.block % 32 == 0
    assert 32 <= program.main.block <= 1024
    assert all(blocks <= most for blocks, most in zip(program.main.grid, MOST_BLOCKS))
    assert program.main.shared_bytes <= device.shared_bytes_per_block
    assert program.splits >= 1
    if program.main.source.kernel != "direct_tiled":
        return
    constants = dict(program.main.source.constants)
    found = params(program)
    lanes, tiles, items, per_block = (found[name] for name in ("lanes", "tiles", "work_tiles", "work_tiles_per_block"))
    assert math.prod(lanes) <= constants["LANES"]
    forward = pass_ is Pass.FORWARD
    sizes = problem.output_size if forward else problem.input_size
    cells = [math.ceil(n / (s if forward else 1)) for n, s in zip(sizes, problem.stride)]
    extents = [problem.batch, *[1] * (3 - problem.dims), *cells]
    per_lane = (1, 1, constants["CELLS_H"], constants["CELLS_W"])
    for extent, lane, each, count in zip(extents, lanes, per_lane, tiles):
        assert (count - 1) * lane * each < extent <= count * lane * each or extent == count == 0
    along_items, *along_tiles = program.main.grid
    assert math.prod(along_tiles) >= math.prod(tiles)
    assert (along_items - 1) * per_block < items <= along_items * per_block
    slices = int(constants["DST_PER_THREAD"]) * int(constants["DST_SLICES"])
    channels = problem.out_channels_per_group if forward else problem.in_channels_per_group
    assert items == problem.groups * math.ceil(channels / slices)


@pytest.mark.parametrize(
    "arch", [arch if arch == "sm_90a" else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS]
)
def test_every_layer_has_a_plan(arch: str) -> None:
    """In one dtype and memory format, others for each layer and architecture; beside Hopper half of the layers."""
    device = DeviceInfo.for_arch(arch)
    for number, layer in enumerate(LAYERS[:: 1 if device is H200 else 2], start=ARCHS.index(arch)):
        both = formats(replace(layer.problem, dtype=list(DTYPE_BYTES)[number // 2 % len(DTYPE_BYTES)]))
        problem = both[number // 8 % len(both)]
        for pass_ in Pass:
            chosen = plan.plan(problem, pass_, device)
            assert chosen.schedule in chosen.describe()
            assert chosen.program is not None
            assert chosen.program.main.source in plan.kernel_sources(problem, pass_, device)
            assert_launchable(problem, pass_, device, chosen.program)


@pytest.mark.parametrize("pass_", Pass)
def test_calls_are_planned_as_explained(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `explain` and `compile` show is what runs, in either memory format, with a bias or without."""

    class PlannedError(Exception):
        """Before anything is compiled."""

    def planned(*arguments: Any) -> None:
        raise PlannedError(plan.plan(*arguments))

    monkeypatch.setattr(runtime, "plan", planned)
    monkeypatch.setattr(DeviceInfo, "of", lambda device: H200)
    for number, layer in enumerate(LAYERS[::4]):
        small = replace(layer.problem, batch=2, input_size=(9,) * layer.problem.dims, bias=number % 2 == 0)
        for problem in formats(replace(small, dtype=("float32", "bfloat16")[number // 2 % 2])):
            if problem.channels_last and 1 in (problem.in_channels, problem.out_channels):
                continue  # both memory formats at once
            operands = make_operands(problem, torch.device("cpu"))
            with pytest.raises(PlannedError) as made:
                run_pass(problem, pass_, operands)
            (found,) = made.value.args
            expected = plan.plan(problem, pass_, H200)
            assert found.describe() == expected.describe(), f"{problem}, {pass_}"
            sources = [source for program in found.programs for source in program.sources]
            assert sources == [source for program in expected.programs for source in program.sources]
            assert set(sources) <= set(plan.kernel_sources(problem, pass_, H200))


def run_pass(problem: ConvTransposeProblem, pass_: Pass, operands: Operands) -> None:
    fixed = (problem.stride, problem.padding, problem.output_padding, problem.dilation, problem.groups)
    x, w, g = operands.input, operands.weight, operands.grad_output
    if pass_ is Pass.FORWARD:
        runtime.forward(x, w, operands.bias, *fixed)
    elif pass_ is Pass.INPUT_GRAD:
        runtime.input_grad(g, w, *fixed)
    else:
        runtime.weight_grad(x, g, problem.kernel_size, *fixed)


@pytest.mark.sampled(64, 8)
@pytest.mark.parametrize("layer", MODELS, ids=lambda layer: layer.name)
def test_layers_of_models_have_plans(layer: NamedLayer) -> None:
    """Each with the kernel that it has at most other sizes, where that is another."""
    for dtype in ("float32", "bfloat16"):
        problem = replace(layer.problem, dtype=dtype, tf32=True)
        chosen = plan.plan(problem, Pass.FORWARD, H200)
        assert chosen.programs
        for program in chosen.programs:
            assert_launchable(problem, Pass.FORWARD, H200, program)
            assert set(program.sources) <= set(plan.kernel_sources(problem, Pass.FORWARD, H200))


def test_single_pixels_are_a_product_of_matrices() -> None:
    """Where tensors are dense and nothing is cut off or added."""
    layer = make((128, 100, 1, 1), 1024, 4, tf32=True)
    chosen = plan.plan(layer, Pass.FORWARD, H200)
    assert chosen.problem == layer
    assert dict(chosen.program.main.source.constants)["AXIS_W"] == Axis(1)
    assert "computed as 1×100×1×128 → 16384, k=1, float32, tf32, channels_last" in explain(layer, H200)
    dense = Layouts.dense(layer)
    same = replace(dense, input=(100, 1, 0, 7, 9))  # strides of single pixels say nothing
    assert plan.plan(layer, Pass.FORWARD, H200, same).program.main.source == chosen.program.main.source
    last = replace(layer, channels_last=True)
    assert plan.plan(last, Pass.FORWARD, H200).program.main.source == chosen.program.main.source
    spread = replace(dense, input=(200, 2, 1, 1, 1))
    others = [(replace(layer, **change), dense) for change in OTHERS_THAN_PIXELS]
    mixed = [(layer, replace(dense, weight_channels_last=True)), (last, dense)]  # formats that are not one
    for problem, layouts in [(layer, spread), *mixed, *others]:
        assert dict(plan.plan(problem, Pass.FORWARD, H200, layouts).program.main.source.constants)["AXIS_W"] != Axis(1)


def test_single_pixels_are_in_every_memory_format() -> None:
    """A channels_last input of single pixels is a contiguous one, too: so is what its weight takes a gradient from."""
    layer = make((128, 100, 1, 1), 1024, 4, tf32=True)
    chosen = plan.plan(layer, Pass.WEIGHT_GRAD, H200)
    assert dict(chosen.program.main.source.constants)["AXIS_W"] == Axis(1)
    last = plan.plan(replace(layer, channels_last=True), Pass.WEIGHT_GRAD, H200, Layouts.dense(layer))
    assert last.program == chosen.program


OTHERS_THAN_PIXELS: list[dict[str, object]] = [
    {"padding": (1, 1)},
    {"output_padding": (1, 0), "stride": (2, 2)},
    {"dilation": (1, 2)},
    {"bias": True},
    {"batch": 0},
    {"input_size": (1, 2)},
    {"groups": 2},
]


def test_gradients_of_weights_know_no_bias() -> None:
    layer = make((128, 100, 1, 1), 1024, 4, tf32=True)
    plans = [plan.plan(replace(layer, bias=bias), Pass.WEIGHT_GRAD, H200).program for bias in (False, True)]
    assert plans[0] == plans[1]


def test_single_pixels_round_where_the_layer_does() -> None:
    """PyTorch computes few channels in full float32; as a product of matrices they are many."""
    layers = [make((256, 512, 1, 1), channels, 4, tf32=True) for channels in (8, 128)]
    few, many = (plan.as_computed(layer, Pass.FORWARD, None)[0] for layer in layers)
    assert (few.out_channels, few.tf32) == (128, False)
    assert (many.out_channels, many.tf32) == (2048, True)


def test_small_sizes_have_a_kernel_of_their_own() -> None:
    """The choice changes with the size; what most sizes have is there, too."""
    layer = make((8, 1, 256, 256), 1, 4, 2, 1)
    sizes = [plan.plan(replace(layer, batch=batch), Pass.FORWARD, H200) for batch in (1, 4096)]
    assert sizes[0].candidate != sizes[1].candidate
    assert sizes[0].programs[1].main.source == sizes[1].program.main.source
    assert len(sizes[1].programs) == 1
    assert sizes[0].candidate.seconds < sizes[0].selected[1].candidate.seconds


@pytest.mark.sampled(16, 4)
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_every_config_is_launchable(arch: str, first: int) -> None:
    device = DeviceInfo.for_arch(arch)
    for seed in range(first, 40, 4):
        problem = random_problem(random.Random(seed))
        for formatted in formats(replace(problem, dtype=random.Random(seed).choice(list(DTYPE_BYTES)))):
            for pass_ in Pass:
                offers = plan.programs(formatted, pass_, device)
                assert offers
                for _, program in offers:
                    assert_launchable(formatted, pass_, device, program)


def other_sizes(problem: ConvTransposeProblem) -> list[ConvTransposeProblem]:
    """The layer on images of one pixel to thousands, and batches of 1 to 100,000."""
    rng = random.Random(str(problem))
    found = []
    for _ in range(60):
        sides = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 33, 64, 100, 127, 256, 1000, 4096)
        size = tuple(rng.choice(sides) for _ in range(problem.dims))
        extra = tuple(rng.randrange(max(s, d)) for s, d in zip(problem.stride, problem.dilation))
        batch = rng.choice((1, 2, 3, 8, 17, 64, 1000, 100_000))
        sized = replace(problem, batch=batch, input_size=size, output_padding=extra)
        if min(sized.output_size) >= 1 and sized.bytes < 2**39:  # more than any GPU holds
            found.append(sized)
    return found[:25]


MOST_KERNELS = 10  # of a layer's forward pass, and of gradients by a schedule that adapts


def assert_few_sources(problem: ConvTransposeProblem) -> None:
    """The layer has one kernel for tiny images, and one for all others; its forward pass a few of either.

    So have gradients of each schedule that is the fastest at some size; those whose tiles or boxes TMA
    does not bring at every size have a few. Gradients by Hopper's instruction that take taps in pairs have others where
    the output's rows are odd by their padding, which is an argument of its own.
    So has the forward pass in half precision where the input's rows are odd; the product of matrices that it is of
    single pixels, of which a batch is the image; and the forward pass of a kernel that is its stride, whose padded
    outputs have elements without a tap.
    """
    for pass_ in Pass:
        sources: dict[tuple[bool | str, ...], dict[KernelSource, ConvTransposeProblem]] = {}
        for sized in [*other_sizes(problem), replace(problem, batch=0), problem]:
            chosen = plan.plan(sized, pass_, H200)
            program = chosen.program
            assert_launchable(sized, pass_, H200, program)
            computed, _ = plan.as_computed(sized, pass_, None)
            by_tma = chosen.schedule == "window_wgrad_wgmma"
            assert not by_tma or len(chosen.programs) > 1
            even = replace(sized, output_padding=(*sized.output_padding[:-1], 0))
            odd = chosen.schedule.endswith("wgmma") and in_pairs(even) and not in_pairs(sized)
            cells = chosen.schedule == "phase_gemm_pixels"
            single = pass_ is Pass.FORWARD and has_odd_rows(computed)
            by = "" if pass_ is Pass.FORWARD else chosen.schedule
            kind = computed == sized, is_tiny(computed), odd, cells, single, by
            sources.setdefault(kind, {}).setdefault(program.main.source, sized)
        for kind, found in sources.items():
            narrow = {replace(source, wide_offsets=True): sized for source, sized in found.items()}
            adapt = next((each.adapts for each in SCHEDULES if each.name == kind[-1]), pass_ is Pass.FORWARD)
            most = MOST_KERNELS if adapt or str(kind[-1]).endswith("wgmma") else 1
            assert len(narrow) <= most, (
                f"the {pass_.value} has a kernel each for {', '.join(map(str, narrow.values()))}"
            )
            assert len(found) <= 2 * most


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dilation", [960, 994, 1000, 1012, 1020])
def test_reaches_that_only_small_images_have_tiles_for(dilation: int, dtype: str) -> None:
    """At the typical size no tile is wide enough, at others some are."""
    problem = make((1, 16, 340), 16, 2, dilation=dilation, dtype=dtype, tf32=dtype == "float32")
    program = plan.plan(problem, Pass.FORWARD, H200).program
    assert_launchable(problem, Pass.FORWARD, H200, program)


def test_tiny_images_far_apart_share_no_tile() -> None:
    """A view of large images: the offsets of a tile's images have 32 bits."""
    problem = make((64, 256, 1, 1), 128, 4, 2, 1, dtype="float16")
    layouts = replace(Layouts.dense(problem), input=(256 * 520 * 524, 520 * 524, 0, 524, 1))
    for candidate, program in plan.programs(problem, Pass.FORWARD, H200, layouts):
        if candidate.schedule == "implicit_gemm" and not program.main.source.wide_offsets:
            assert params(program)["images"] * layouts.input[0] < 2**31


@pytest.mark.sampled(36, 6)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_kernels_do_not_depend_on_sizes(layer: NamedLayer) -> None:
    """In float32 and bfloat16; where there are two memory formats, one in each."""
    forms = formats(layer.problem)
    order = 1 if LAYERS.index(layer) % 2 else -1
    for formatted, dtype in zip([*forms, *forms][:2], ("float32", "bfloat16")[::order]):
        assert_few_sources(replace(formatted, dtype=dtype))


@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("seed", range(30))
def test_kernels_of_random_layers_do_not_depend_on_sizes(seed: int) -> None:
    for formatted in formats(random_problem(random.Random(seed))):
        assert_few_sources(formatted)


def test_offsets_beyond_4_gib() -> None:
    """Offsets within a tile have 32 bits wherever those suffice: many images, and many channels, are no reason."""
    for problem, wide in (
        (make((8, 64, 1024, 1024), 64, 3), False),
        (make((100_000, 64, 128, 128), 64, 3), False),
        (make((1, 4096, 512, 1024), 64, 3), False),
        (make((1, 1, 2**15, 2**16), 1, 3), True),
        (make((1, 3, 2048, 1024, 1024), 4, 3), True),
    ):
        for formatted in (problem, replace(problem, dtype="float64")):
            program = plan.plan(formatted, Pass.FORWARD, H200).program
            assert_launchable(formatted, Pass.FORWARD, H200, program)
            if formatted.dtype == "float32":
                assert program.main.source.wide_offsets is wide


@pytest.mark.parametrize(
    "problem",
    [
        make((100_000, 2, 3, 3), 2, 3),
        make((3_000_000, 1, 8), 1, 2, 2),
        make((2, 65_536, 4, 4), 65_536, 3, groups=65_536),
        make((1, 3, 2**16, 2**15), 2, 1),  # 2³¹ positions
        make((1, 1, 2**30), 1, 2, 1),
        make((64, 1, 4096, 8192), 1, 2, 2),  # 2³¹ elements in, 2³³ out
    ],
    ids=str,
)
def test_grids_stay_within_their_limits(problem: ConvTransposeProblem) -> None:
    for formatted in formats(problem):
        for pass_ in Pass:
            for _, program in plan.programs(formatted, pass_, H200):
                assert_launchable(formatted, pass_, H200, program)


def test_an_empty_batch_launches_no_gather() -> None:
    for pass_ in (Pass.FORWARD, Pass.INPUT_GRAD):
        for _, program in plan.programs(make((0, 3, 8, 8), 4, 3), pass_, H200):
            assert 0 in program.main.grid
    program = plan.plan(make((0, 3, 8, 8), 4, 3), Pass.WEIGHT_GRAD, H200).program
    assert 0 not in program.main.grid  # the gradient is zero, and somebody must write it


def test_weight_gradient_parts_cover_every_position() -> None:
    for problem in (make((1, 3, 5), 4, 3), make((64, 3, 128, 128), 4, 3), make((2, 512, 9, 9), 512, 3)):
        offered = plan.programs(problem, Pass.WEIGHT_GRAD, H200)
        for candidate, program in (each for each in offered if each[0].schedule == "direct_wgrad_gemm"):
            found = params(program)
            splits, length, positions, weights = map(found.get, ("splits", "split_length", "positions", "plane"))
            assert splits == program.splits
            assert positions == problem.batch * math.prod(problem.input_size)
            assert weights == problem.elements[1]
            assert (splits - 1) * length < positions <= splits * length
            assert length % candidate.config.depth == 0
            assert splits * weights * 4 <= max(64 << 20, weights * 4)


def test_layouts_are_part_of_a_plan() -> None:
    problem = make((32, 8, 64, 64), 8, 3)  # not so small that `direct_general` computes it
    dense = Layouts.dense(problem)
    last = Layouts.dense(replace(problem, channels_last=True))
    mixed = plan.plan(problem, Pass.FORWARD, H200, replace(dense, input=last.input)).program
    assert mixed is not None
    assert dict(mixed.main.source.constants)["SRC_CHANNELS_LAST"] is True
    assert dict(mixed.main.source.constants)["DST_CHANNELS_LAST"] is False
    # Alignment and gaps are for the launch to know, not for the kernel.
    plain = plan.plan(problem, Pass.FORWARD, H200).program
    for layouts in (replace(dense, aligned=False), replace(dense, input=(9999, 1111, 0, 33, 1))):
        other = plan.plan(problem, Pass.FORWARD, H200, layouts).program
        assert plain is not None
        assert other is not None
        assert other.main.source == plain.main.source
        assert other.main.params != plain.main.params


# Boxes of pixels that TMA copies


def strides_of_boxes(problem: ConvTransposeProblem, strides: Strides, aligned: bool = True) -> tuple[int, ...] | None:
    layouts = replace(Layouts.dense(problem), input=strides, aligned=aligned)
    return box_strides(Gather.of(problem, Pass.FORWARD, layouts))


@pytest.mark.parametrize(
    ("strides", "found"),
    [
        ((2048, 256, 0, 16, 1), (64, 16, 8192, 1024)),
        ((2**38 - 4, 256, 0, 16, 1), (64, 16, 2**40 - 16, 1024)),
        ((2**38, 256, 0, 16, 1), None),
        ((0, 256, 0, 16, 1), None),
        ((2048, 0, 0, 16, 1), None),
        ((2048, 256, 0, 0, 1), None),
        ((4096, 512, 0, 32, 2), None),
        ((2048, 256, 0, 1, 16), None),
        ((2048, 256, 0, 18, 1), None),
        ((2050, 256, 0, 16, 1), None),
        ((2048, 1, 0, 128, 8), (32, 512, 16, 8192)),
        ((0, 1, 0, 128, 8), None),
        ((2048, 1, 0, 128, 0), None),
        ((4096, 2, 0, 256, 16), None),
        ((2304, 1, 0, 144, 9), None),
    ],
    ids=str,
)
def test_strides_that_tma_can_take(strides: Strides, found: tuple[int, ...] | None) -> None:
    """Of float32 images of 16×16 pixels and 8 channels."""
    problem = make((2, 8, 16, 16), 8, 3)
    assert strides_of_boxes(problem, strides) == found
    assert strides_of_boxes(problem, strides, aligned=False) is None
    if found is not None:  # the stride of a single image is nothing
        assert strides_of_boxes(replace(problem, batch=1), (3, *strides[1:])) is not None


def assert_driver_takes(boxes: TensorMap) -> None:
    """The rules of ``cuTensorMapEncodeTiled``."""
    size = DTYPE_BYTES[boxes.dtype]
    assert len(boxes.sizes) == len(boxes.box) == len(boxes.strides) + 1 == 5
    assert all(0 < each <= 2**32 for each in boxes.sizes)
    assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in boxes.strides)
    assert all(1 <= side <= 256 for side in boxes.box)
    assert boxes.box[0] * size % 16 == 0
    assert boxes.swizzle in (16, 32, 64, 128)
    assert boxes.swizzle == 16 or boxes.box[0] * size <= boxes.swizzle


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_boxes_are_what_the_driver_takes(dtype: str, first: int) -> None:
    met = set()
    for layer in LAYERS[first::3]:
        for formatted in formats(layer.problem):
            problem = replace(formatted, dtype=dtype, tf32=True)
            for candidate, program in plan.programs(problem, Pass.FORWARD, H200):
                if not program.main.tensor_maps:
                    continue
                boxes = program.main.tensor_maps[0]
                assert_driver_takes(boxes)
                if program.main.source.kernel == "tap_gemm_tma":
                    constants = dict(program.main.source.constants)
                    assert math.prod(boxes.box) <= constants["BOX_ROWS"] * constants["CHUNK"]
                    continue
                assert program.main.source.kernel == "implicit_gemm"
                count, pixels = params(program)["boxes"], params(program)["box_pixels"]
                assert count >= 1
                stage = math.prod(boxes.box) * DTYPE_BYTES[boxes.dtype]
                config = candidate.config
                becomes_halves = config.scaled and boxes.dtype == "float32"
                assert stage == pixels * 32 * config.k_steps * (2 if becomes_halves else 1)
                in_place = problem.channels_last or config.tma_operands  # TMA writes stages, not raw slots
                slots = config.stages if in_place else config.raw_slots
                assert slots * count * stage <= program.main.shared_bytes
                met.add((problem.channels_last, boxes.swizzle))
    assert {last for last, _ in met} == {False, True}


@pytest.mark.parametrize(
    ("width", "channels", "channels_last", "float32", "bfloat16"),
    [
        (32, 64, False, 4, 8),
        (28, 64, False, 4, 4),
        (30, 64, False, 2, 2),
        (31, 64, False, 1, 1),
        (31, 64, True, 4, 8),
        (32, 65, True, 1, 1),
        (32, 66, True, 2, 2),
        (32, 68, True, 4, 4),
    ],
)
def test_stores_are_as_wide_as_rows_allow(
    width: int, channels: int, channels_last: bool, float32: int, bfloat16: int
) -> None:
    """Elements that a store of outputs of such a width holds: of a row, or channels."""
    odd = width % 2
    for dtype, expected in (("float32", float32), ("bfloat16", bfloat16)):
        problem = make((2, 64, 8, (width + odd) // 2), channels, 2 + odd, 2, odd, dtype=dtype, tf32=True)
        problem = replace(problem, channels_last=channels_last)
        assert problem.output_size[1] == width
        for candidate, program in plan.programs(problem, Pass.FORWARD, H200):
            if candidate.schedule == "implicit_gemm":
                assert params(program)["store_vector"] == expected, candidate.describe()


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(-1, 1))
@example(1, 2**31 - 1, 0)
@example(2**31 - 1, 1, -1)
@example(2**30 + 1, 1, -1)
def test_division_by_a_reciprocal_rounds_down(value: int, number: int, beside: int) -> None:
    """Of any number, and of those beside a multiple of the divisor, as 64 bits have it in the kernel."""
    stored, reciprocal, shift = divisor(value).values()
    multiple = number // value * value + beside
    for each in (number, multiple if 0 <= multiple < 2**31 else 0):
        assert each * reciprocal < 2**64
        assert each * reciprocal >> shift == each // value
    assert stored == value


@pytest.mark.parametrize(("dtype", "shared"), [("float32", True), ("bfloat16", False)])
def test_blocks_share_tiles_where_bytes_bind(dtype: str, shared: bool) -> None:
    """Of grouped_gemm: KernelBench 75, whose tiles in bfloat16 are short."""
    (layer,) = (each.problem for each in suite("all") if each.name == "KernelBench 75")
    planned = plan.plan(replace(layer, dtype=dtype, tf32=True), Pass.FORWARD, H200, by_prediction=True)
    assert planned.schedule == "grouped_gemm"
    assert planned.program is not None
    assert (len(planned.program.steps) > 1) is shared


@pytest.mark.parametrize(
    ("layer", "last", "shared"),
    [
        (make((8, 64, 1024, 1024), 64, 3), False, True),  # bytes
        (make((8, 64, 1024, 1024), 64, 3), True, False),  # products, and rows of whole sectors
        (make((16, 128, 256, 256), 64, 2, 2, bias=True), True, True),
        (make((16, 48, 32, 32, 32), 48, 3), False, False),  # products
        (make((1, 256, 64, 64), 64, 2, 2), False, False),  # few items
        (make((0, 256, 64, 64), 64, 2, 2), False, False),  # none
    ],
)
def test_blocks_share_work_tiles_where_bytes_bind(layer: ConvTransposeProblem, last: bool, shared: bool) -> None:
    """And never take one before it is told of the others' (FURTHER in core/tile_scheduler.cuh)."""
    problem = replace(layer, channels_last=last, dtype="bfloat16")
    candidate, program = offers(ImplicitGemm(), problem)[0]
    constants, config = dict(program.main.source.constants), candidate.config
    items, own = params(program)["work_tiles"], params(program)["own"]
    clusters = program.main.grid[0] // constants["CLUSTER"]
    assert (own * clusters < items) is shared
    assert own > math.ceil(items / max(1, clusters)) or shared
    stages = Product(Gather.of(problem, Pass.FORWARD, Layouts.dense(problem)), config).stages
    assert own >= 2 + math.ceil((constants["LOADER_GROUPS"] - 1) / stages)


def test_clusters_are_whole() -> None:
    """Blocks come in whole clusters, whatever the number of tiles and multiprocessors; items are a cluster's."""
    problem = make((3, 16, 9, 11), 16, 3, 1, 1, tf32=True)
    layouts = Layouts.dense(problem)
    offered = [each.config for each in candidates(ImplicitGemm(), problem, Pass.FORWARD, H200, layouts)]
    config = next(each for each in offered if each.split == "turns")._replace(resident=False, cluster=2)
    for multiprocessors in (2, 5, 132):
        device = replace(H200, multiprocessors=multiprocessors)
        program = ImplicitGemm().program(problem, Pass.FORWARD, device, layouts, config)
        assert program.main.grid[0] % 2 == 0
        assert 0 < program.main.grid[0] <= multiprocessors
        assert "#define CLUSTER 2" in program.main.source.text


def test_resident_weights_have_blocks_on_small_gpus() -> None:
    """A config that was chosen for another GPU still covers every row group."""
    problem = make((3, 16, 9, 11), 200, 2, 2, tf32=True)
    layouts = Layouts.dense(problem)
    offered = [each.config for each in candidates(ImplicitGemm(), problem, Pass.FORWARD, H200, layouts)]
    config = offered[0]._replace(resident=True, cluster=1, split="turns")
    program = ImplicitGemm().program(problem, Pass.FORWARD, replace(H200, multiprocessors=2), layouts, config)
    assert program.main.grid[0] == Product(Gather.of(problem, Pass.FORWARD, layouts), config).row_groups > 2


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("reserve", [0, 2048])
def test_families_have_the_tiles_of_their_configs(last: bool, reserve: int) -> None:
    """What is found among the tiles of all stages is what each would find."""
    for problem in (
        make((4, 48, 33, 31), 24, 4, 2, 1, tf32=True, channels_last=last),
        make((64, 24, 5, 6, 7), 40, 3, (2, 1, 3), dtype="bfloat16", channels_last=last),
        make((3, 130, 300), 8, 5, 3, channels_last=last),
        make((9, 32, 4, 4), 16, 4, 2, 1, tf32=True, channels_last=last),
    ):
        gather = Gather.of(problem, Pass.FORWARD, Layouts.dense(problem))
        found = set()
        for config, stages in families(Layer(problem, last, last and box_strides(gather) is not None), H200):
            room = Room(gather, config, stages, H200, reserve)
            tiles = [room.first_that_fits(room.tiles(gather)[0], count) for count in stages]
            alone = [best_tile(gather, config._replace(stages=n), H200, reserve) for n in stages]
            assert tiles == alone
            found |= {(len({*tiles}), None in tiles)}
        assert len(found) > 2


def test_plans_are_cached() -> None:
    problem = make((3, 5, 17, 19), 7, 3, 2)
    first = plan.plan(problem, Pass.FORWARD, H200)
    hits = plan.plan.cache_info().hits
    assert plan.plan(make((3, 5, 17, 19), 7, 3, 2), Pass.FORWARD, DeviceInfo.for_arch("sm_90")) is first
    assert plan.plan.cache_info().hits == hits + 1


# Refusals


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (make((1, 1, 20, 20, 20), 1, 12, dtype="float64"), "1728 taps do not unroll (at most 1600)"),
        (make((1, 1, 8, 8), 1, 12, 12), "144 phases do not fit a thread's registers (at most 96)"),
        (make((1, 8, 8, 8), 8, 3, groups=8, channels_last=True), "groups of less than 4 channels"),
        (make((1, 4, 64, 64), 4, 3, dilation=500, dtype="float64"), "the halo of a tile does not fit"),
    ],
    ids=str,
)
def test_refusals_have_reasons_and_another_schedule(problem: ConvTransposeProblem, reason: str) -> None:
    chosen = plan.plan(problem, Pass.FORWARD, H200)
    assert chosen.schedule == ("direct_channels" if problem.channels_last else "direct_general")
    text = explain(problem, H200)
    (found,) = {why for name, why in refusals(text) if name == "direct_tiled" and "taps only" not in why
                and reason in why}  # fmt: skip
    assert reason in found


def test_no_schedule_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons are those of the schedules of the pass."""
    monkeypatch.setattr(
        plan, "SCHEDULES", [each for each in SCHEDULES if each.name in ("direct_channels", "dot_dgrad")]
    )
    with pytest.raises(
        UnsupportedError, match=r"no schedule computes the forward of .* on sm_90a: direct_channels: [^;]*$"
    ):
        plan.plan(make((9, 9, 9, 9), 9, 9), Pass.FORWARD, H200)


@pytest.mark.parametrize(
    "problem",
    [
        make((1, 1, 2**31), 1, 1),  # a side
        make((1, 1, 2**30), 1, 1, 2, 0, 1),  # a side of the output
        make((1, 2**16, 1, 1), 2**15, 1),  # weights of a group
    ],
    ids=str,
)
def test_sizes_beyond_the_kernels_integers_are_a_named_error(problem: ConvTransposeProblem) -> None:
    """Tensors may have more elements than 2³¹, but not along one side, and not in the weights of one group."""
    for pass_ in (Pass.FORWARD, Pass.INPUT_GRAD):
        with pytest.raises(UnsupportedError, match="2147483648"):
            plan.plan(problem, pass_, H200)


def test_more_positions_than_kernels_count() -> None:
    problem = make((10**9, 64, 100, 100), 32, 4, 2, 1, bias=True)
    with pytest.raises(UnsupportedError, match="has more positions than the kernels count: 2147483647"):
        plan.plan(problem, Pass.FORWARD, H200)


def test_other_devices_are_portable() -> None:
    problem = make((4, 8, 16, 16), 12, 4, 2, 1)
    for pass_ in Pass:
        chosen = plan.plan(problem, pass_, PORTABLE)
        assert (chosen.schedule, chosen.describe(), chosen.program) == ("portable", "portable", None)
    assert "polyphase's kernels need an NVIDIA GPU" in explain(problem, PORTABLE)


# Devices


def test_architectures_have_names() -> None:
    assert DeviceInfo.for_arch("sm_90") is DeviceInfo.for_arch("sm_90a") is H200
    assert DeviceInfo.for_arch("cpu") is DeviceInfo.for_arch("portable") is PORTABLE
    with pytest.raises(UnsupportedError, match=r"unknown architecture 'sm_70'; known are sm_75, .*sm_120"):
        DeviceInfo.for_arch("sm_70")


@pytest.mark.parametrize(
    ("capability", "arch", "like"),
    [
        ((7, 5), "sm_75", "sm_75"),
        ((8, 0), "sm_80", "sm_80"),
        ((8, 7), "sm_87", "sm_86"),
        ((8, 9), "sm_89", "sm_89"),
        ((9, 0), "sm_90a", "sm_90a"),
        ((10, 0), "sm_100a", "sm_100a"),
        ((10, 3), "sm_103a", "sm_100a"),
        ((11, 0), "sm_110", "sm_100a"),
        ((12, 0), "sm_120", "sm_120"),
        ((12, 1), "sm_121", "sm_120"),
    ],
    ids=str,
)
def test_gpus_are_like_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str, like: str
) -> None:
    """A GPU that the table does not know has the rates of the next older one, and its own sizes."""
    fake(monkeypatch, capability)
    info, known = _of_cuda.__wrapped__(0), DeviceInfo.for_arch(like)
    assert info.arch == arch
    assert (info.clock_hz, info.copy_bytes_per_second) == (known.clock_hz, known.copy_bytes_per_second)
    assert (info.multiprocessors, info.shared_bytes_per_block) == (77, 99 << 10)
    assert plan.plan(make((4, 8, 16, 16), 12, 4, 2, 1), Pass.FORWARD, info).program is not None


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, (7, 0))
    with pytest.raises(UnsupportedError, match=r"Fake has compute capability 7\.0; .* need 7\.5 or newer"):
        _of_cuda.__wrapped__(0)


def fake(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    properties: dict[str, Any] = {
        "name": "Fake",
        "major": capability[0],
        "minor": capability[1],
        "multi_processor_count": 77,
        "shared_memory_per_block_optin": 99 << 10,
        "shared_memory_per_multiprocessor": 100 << 10,
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))


@pytest.mark.parametrize("layout", [False, True])
def test_vast_strides_are_not_unrolled(layout: bool) -> None:
    """Elements without taps are stored too: straight-line code for millions of them would never compile."""
    stride, dilation = (200, 200, 32), (1, 8, 30)
    problem = ConvTransposeProblem.make((2, 1, 8, 8, 8), 2, (2, 9, 1), stride, dilation=dilation, channels_last=layout)
    assert plan.plan(problem, Pass.FORWARD, H200).schedule == "direct_general"


@pytest.mark.parametrize(
    ("layer", "schedule"),
    [
        ("1×256×32×24 → 256, k=4, s=2, p=1, bfloat16, channels_last", "window_dgrad_tma"),
        ("64×768×16×12 → 256, k=4, s=2, p=1, bfloat16, channels_last", "window_dgrad_tma"),
        ("3×37×61×83 → 29, k=(4, 5), s=(3, 2), bfloat16", "window_dgrad_transposed"),
        ("4×240×4×32×32 → 240, k=4, s=2, p=1, bias, bfloat16, channels_last", "tap_gemm_tma"),
    ],
)
def test_input_gradients_by_boxes_of_taps(layer: str, schedule: str) -> None:
    """The faster by benchmarks/experiments/025-boxes-of-taps."""
    chosen = plan.plan(parse_layer(layer), Pass.INPUT_GRAD, DeviceInfo.for_arch("sm_90a"), by_prediction=True)
    assert chosen.schedule == schedule
