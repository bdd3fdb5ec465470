"""float32 that is multiplied as float16 by `implicit_gemm`: numbers of any size (kernels/operand/scales.cuh)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch

from kernel_harness import H200, Emulator, Executor, reference, run, strange_layouts
from polyphase.jit.compiler import resources_of
from polyphase.plan.shortlist import candidates
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import GemmConfig
from polyphase.schedules.implicit_gemm.families import Layer, legal_configs
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.implicit_gemm.tile import best_tile
from polyphase.schedules.implicit_gemm.transposed import ImplicitGemmTransposed

make = ConvTransposeProblem.make

LAYERS = {
    "stride 2": make((2, 36, 5, 6), 24, 4, 2, 1, bias=True, tf32=True),
    "tiny images": make((5, 36, 4, 4), 20, 4, 2, 1, tf32=True),
    "stride 1, grouped": make((1, 64, 9, 7), 40, 3, 1, 1, groups=2, tf32=True),
    "few channels": make((2, 40, 6, 5), 17, 3, 2, 1, 1, tf32=True),
    "1-D": make((3, 40, 37), 16, 16, 8, 4, tf32=True),
    "3-D": make((1, 33, 3, 4, 5), 16, 3, 2, 1, 1, bias=True, tf32=True),
}


def scaled(problem: ConvTransposeProblem, most: int, layouts: Layouts | None = None) -> Iterator[Program]:
    """Launches of so many configs that multiply halves, at random."""
    layouts = layouts or Layouts.dense(problem)
    gather = Gather.of(problem, Pass.FORWARD, layouts)

    def fits(config: GemmConfig) -> bool:
        return config.scaled and best_tile(gather, config, H200) is not None

    found = [*legal_configs(Layer(problem, gather.src.channels_last, tma=False), H200)]
    shuffled = random.Random(str(problem)).sample(found, len(found))
    for config in islice(filter(fits, shuffled), most):
        yield ImplicitGemm().program(problem, Pass.FORWARD, H200, layouts, config)


def copied(problem: ConvTransposeProblem, most: int, layouts: Layouts | None = None) -> Iterator[Program]:
    """The same of configs that read transposed copies, in TF32's accuracy."""
    if not problem.tf32:
        return
    layouts, schedule = layouts or Layouts.dense(problem), ImplicitGemmTransposed()
    at = schedule.ranked_at(problem, Pass.FORWARD, layouts)
    assert at is not None
    found = schedule.configs(at, Pass.FORWARD, H200)
    assert all(config.scaled for config in found)
    shuffled = random.Random(str(problem)).sample(found, len(found))
    fitting = (each for each in shuffled if schedule.cost(problem, Pass.FORWARD, H200, layouts, each) is not None)
    for config in islice(fitting, most):
        yield schedule.program(problem, Pass.FORWARD, H200, layouts, config)


def both(problem: ConvTransposeProblem, most: int, layouts: Layouts | None = None) -> Iterator[Program]:
    """So many of each."""
    yield from scaled(problem, most, layouts)
    yield from copied(problem, most, layouts)


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """From -3 to 3, which have few bits."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def powers(shape: tuple[int, ...], most: int, seed: int) -> torch.Tensor:
    """Powers of two from 2^-most to 2^most."""
    return 2.0 ** torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).double()


def assert_near(
    problem: ConvTransposeProblem,
    program: Program,
    x: torch.Tensor,
    weight: torch.Tensor,
    executor: Executor | None = None,
    most: float = 2.0**-21,
) -> None:
    """Every output is as exact as its own products let it be, whatever the others are."""
    bias = torch.zeros(problem.out_channels) if problem.bias else None
    wide = None if bias is None else bias.double()
    exact = reference(problem, Pass.FORWARD, (x.double(), weight.double()), wide)
    sums = reference(problem, Pass.FORWARD, (x.double().abs(), weight.double().abs()), wide)
    found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight), bias, executor).double()
    wrong = ~((found - exact).abs() <= most * sums)
    assert not wrong.any(), (program.main.source.specialisation, wrong.nonzero()[0], found[wrong][0], exact[wrong][0])


@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_many_sizes(name: str, tf32: bool) -> None:
    problem = replace(LAYERS[name], tf32=tf32)
    for program in both(problem, 3):
        assert_near(problem, program, *of_many_sizes(problem))


def of_many_sizes(problem: ConvTransposeProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels far smaller than others, and output channels."""
    batch, channels, *sides = problem.input_shape
    x = integers(problem.input_shape, 1) * powers((batch, 1, *sides), 40, 2).float()
    outputs = problem.out_channels // problem.groups
    weight = integers(problem.weight_shape, 3)
    for group in weight.split(channels // problem.groups):  # a channel's weights are those of its group
        group *= powers((1, outputs, *(1 for _ in sides)), 20, 4).float()
    return x, weight


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_two_bands_have_copies(name: str, batch: int) -> None:
    """Of one image, too, whose copies are the only images."""
    problem = replace(LAYERS[name], batch=batch)
    sides = problem.input_size
    far = torch.randint(2, (batch, 1, *sides), generator=torch.Generator().manual_seed(21)) * 40.0
    x = (integers(problem.input_shape, 22) * 2.0**-far).float()
    weight = integers(problem.weight_shape, 23)
    for program in copied(problem, 4):
        assert_near(problem, program, x, weight)


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("magnitude", [2.0**-110, 1.0, 2.0**120])
def test_a_pixel_far_larger_than_all_others(magnitude: float, tf32: bool) -> None:
    """An outlier does not take from the others, and zeros are no small numbers."""
    problem = replace(LAYERS["stride 2"], tf32=tf32)
    x, weight = integers(problem.input_shape, 5) * magnitude, integers(problem.weight_shape, 6)
    x[:, :, 1] = 0
    for outlier in (1.0, 2.0**20, 2.0**60):
        if magnitude * outlier < 2.0**122:
            x[1, 3, 4, 5] = 3 * magnitude * outlier
            for program in both(problem, 1):
                assert_near(problem, program, x, weight)


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("outlier", [1.0, 2.0**16, 2.0**26])
def test_channels_of_many_sizes(outlier: float, tf32: bool) -> None:
    """Those of a pixel, with weights to match, beside an outlier: what is lost is a share of the pixel's largest."""
    problem = replace(LAYERS["stride 2"], tf32=tf32, bias=False)
    sizes = powers((1, problem.in_channels, 1, 1), 6, 19).float()
    generator = torch.Generator().manual_seed(20)
    x, weight = (torch.randn(shape, generator=generator) for shape in (problem.input_shape, problem.weight_shape))
    x, weight = x * sizes, weight / sizes.movedim(1, 0)
    x[0, 0, 0, 0] = 2.0**6 * outlier
    exact = reference(problem, Pass.FORWARD, (x.double(), weight.double()))
    sums = reference(problem, Pass.FORWARD, (x.double().abs(), weight.double().abs()))
    largest = x.double().abs().amax(1, True).expand(x.shape)
    lost = reference(problem, Pass.FORWARD, (largest, weight.double().abs()))
    rounding, losing = (2.0**-10, 2.0**-19) if tf32 else (2.0**-21, 2.0**-27)
    for program in both(problem, 2):
        found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight)).double()
        assert ((found - exact).abs() <= rounding * sums + losing * lost).all()


@pytest.mark.parametrize("tf32", [True, False])
def test_forward_passes_alone(tf32: bool) -> None:
    """Gradients of pixels often differ by so much that there would be several bands."""
    problem = make((8, 256, 64, 64), 256, 3, 1, 1, tf32=tf32)
    dense = Layouts.dense(problem)
    for pass_ in (Pass.FORWARD, Pass.INPUT_GRAD):
        offered = [each.config.scaled for each in candidates(ImplicitGemm(), problem, pass_, H200, dense)]
        assert any(offered) is (pass_ is Pass.FORWARD)


MANY_TAPS = {
    "1-D": make((2, 64, 300), 64, 256, 64, 96, tf32=True),
    "2-D": make((2, 64, 16, 16), 20, 16, 8, 4, tf32=True),
    "few channels": make((2, 64, 9, 9), 3, 8, 4, 2, tf32=True),
    "3-D": make((1, 64, 6, 6, 6), 40, 4, 2, 1, tf32=True),
}


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("name", MANY_TAPS)
def test_packing_kernels_have_room(name: str) -> None:
    """A kernel has 48 KiB of shared memory unless more is asked for."""
    problem = MANY_TAPS[name]
    kernels = {source for program in both(problem, 40) for source in program.sources}
    packing = {source for source in kernels if source.kernel != "implicit_gemm"}
    assert {source.kernel for source in packing} > {"measure_scales"}
    for source in packing:
        assert resources_of(source, "sm_90a").shared <= 48 << 10, source.kernel


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("most", [0, 60])
def test_what_is_not_finite(most: int, tf32: bool) -> None:
    """Outputs that it does not reach are as they were, in one band of magnitudes and in several."""
    problem = replace(LAYERS["stride 2"], tf32=tf32)
    batch, _, *sides = problem.input_shape
    x = (integers(problem.input_shape, 7).abs() + 1) * powers((batch, 1, *sides), most, 8).float()
    weight = integers(problem.weight_shape, 9).abs() + 1
    x[0, 3, 1, 1], x[1, 4, 2, 2], x[1, 5, 4, 5] = math.inf, -math.inf, math.nan
    bias = torch.zeros(problem.out_channels)
    exact = reference(problem, Pass.FORWARD, (x.double(), weight.double()), bias.double())
    for program in both(problem, 3):
        found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight), bias).double()
        torch.testing.assert_close(found, exact, equal_nan=True, rtol=2.0**-21, atol=0)


@pytest.mark.parametrize("name", ["stride 2", "stride 1, grouped"])
def test_weights_that_are_not_finite(name: str) -> None:
    """Other channels are as they were, and theirs is not finite: beside the image, where it meets zeros, NaN."""
    problem = replace(LAYERS[name], bias=False)
    x, weight = integers(problem.input_shape, 10).abs() + 1, integers(problem.weight_shape, 11).abs() + 1
    finite = reference(problem, Pass.FORWARD, (x.double(), weight.double()))
    weight[0, 1], weight[3, 2], weight[0:8, 3] = math.inf, math.nan, math.inf
    exact = reference(problem, Pass.FORWARD, (x.double(), weight.double()))
    changed = ~exact.isfinite()
    assert changed.any()
    for program in both(problem, 2):
        found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight)).double()
        assert torch.equal(found[~changed], finite[~changed])
        assert not found[changed].isfinite().any()


@pytest.mark.parametrize("zeros", ["input", "weight", "both"])
def test_zeros(zeros: str) -> None:
    problem = LAYERS["tiny images"]
    x, weight = integers(problem.input_shape, 12), integers(problem.weight_shape, 13)
    x *= zeros == "weight"
    weight *= zeros == "input"
    for program in both(problem, 2):
        assert not run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight)).any()


@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("name", LAYERS)
def test_all_pixels_are_measured(name: str) -> None:
    """Wherever the largest lies, in tensors of all kinds: unaligned, with gaps between rows and columns."""
    problem = LAYERS[name]
    for number, layouts in enumerate(strange_layouts(problem)):
        program = next(scaled(problem, 1, layouts))
        for seed in range(3):
            x, weight = integers(problem.input_shape, 14), integers(problem.weight_shape, 15)
            place = tuple(random.Random(f"{number} {seed}").randrange(side) for side in x.shape)
            x[place] = 2.0**20  # would be infinite, were it not found
            found = run(problem, Pass.FORWARD, program, layouts, (x, weight), zeros_of(problem), Emulator(seed))
            exact = reference(problem, Pass.FORWARD, (x.double(), weight.double()))
            torch.testing.assert_close(found.double(), exact, rtol=2.0**-21, atol=0)


def zeros_of(problem: ConvTransposeProblem) -> torch.Tensor | None:
    """A bias that changes nothing."""
    return torch.zeros(problem.out_channels) if problem.bias else None


def test_no_races() -> None:
    """Threads and blocks in any order, with several bands."""
    problem = LAYERS["tiny images"]
    x = integers(problem.input_shape, 16) * powers((5, 1, 4, 4), 30, 17).float()
    weight = integers(problem.weight_shape, 18)
    for program in both(problem, 2):
        run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight), executor=Emulator(order=None))
