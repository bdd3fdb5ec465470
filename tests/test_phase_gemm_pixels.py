"""Layers whose kernel is their stride on Hopper, executed by the emulator; test_gpu.py runs the same on a GPU."""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import replace

import pytest
import torch

import emulator
from kernel_harness import DTYPES, H200, Emulator, assert_exact, choices, offers, reference, run
from polyphase.emit.file import _choose
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.phase_gemm.pixels import PhaseGemmPixels, PixelsConfig, _columns, _piece, _vector
from polyphase.schedules.schedule import Candidate

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make

LAYERS = {
    "an upsampling by two": make((3, 24, 6, 8), 20, 2, 2, bias=True, tf32=True),
    "odd widths": make((2, 19, 7, 5), 16, 2, 2, tf32=True),
    "images that end amid a tile": make((5, 16, 7, 6), 17, 2, 2, bias=True, tf32=True),
    "one cell": make((2, 18, 1, 1), 70, 2, 2, tf32=True),
    "by four": make((2, 20, 5, 6), 16, 4, 4, bias=True, tf32=True),
    "by one and six": make((1, 16, 5, 7), 18, (1, 6), (1, 6), bias=True, tf32=True),
    "1-D": make((3, 33, 30), 18, 2, 2, bias=True, tf32=True),
    "1-D, by eight": make((2, 16, 21), 19, 8, 8, tf32=True),
    "3-D": make((2, 20, 3, 4, 6), 17, 2, 2, bias=True, tf32=True),
    "3-D, other strides": make((1, 17, 3, 2, 5), 16, (3, 1, 2), (3, 1, 2), tf32=True),
    "grouped": make((2, 128, 6, 6), 128, 2, 2, groups=2, bias=True, tf32=True),
    "several chunks": make((1, 100, 12, 12), 40, 2, 2, bias=True, tf32=True),
    "more weights than fit": make((1, 130, 8, 8), 120, 2, 2, bias=True, tf32=True),
    "empty batch": make((0, 16, 4, 4), 16, 2, 2, tf32=True),
}
CASES = [
    pytest.param(replace(problem, dtype=dtype), id=f"{name}-{dtype}")
    for name, problem in LAYERS.items()
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.sampled(16, 2)
@pytest.mark.parametrize("problem", CASES)
def test_layers(problem: ConvTransposeProblem) -> None:
    order = zlib.crc32(str(problem).encode())
    for layouts, candidate, program in choices(PhaseGemmPixels(), problem):
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts, Emulator(order))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_blocks_of_several_tiles(blocks: int, dtype: str) -> None:
    """Tiles that blocks have for themselves, and chunks of others that they share out."""
    problem = make((3, 72, 10, 22), 40, 2, 2, bias=True, dtype=dtype, tf32=True)
    device = replace(H200, multiprocessors=blocks)
    for candidate in candidates(PhaseGemmPixels(), problem, Pass.FORWARD, H200, Layouts.dense(problem)):
        program = PhaseGemmPixels().program(problem, Pass.FORWARD, device, Layouts.dense(problem), candidate.config)
        assert program.main.grid == (blocks, 1, 1)
        assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(blocks))


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("resident", [False, True])
def test_every_chunk(resident: bool, ahead: bool, dtype: str) -> None:
    """Chunks of every width, with columns that do not exist, whose weights stay or stream through the ring."""
    problem = make((1, 40, 9, 16), 21, 2, 2, bias=True, dtype=dtype, tf32=True)
    steps = 3
    for columns in _columns(problem):
        chunks = -(-84 // columns)
        config = PixelsConfig(columns, 1, steps * chunks if resident else steps + 2, resident, ahead)
        program = PhaseGemmPixels().program(problem, Pass.FORWARD, H200, Layouts.dense(problem), config)
        assert_exact(
            problem, Pass.FORWARD, Candidate("phase_gemm_pixels", config, 0.0, ""), program, executor=Emulator(columns)
        )


@pytest.mark.parametrize("name", ["grouped", "more weights than fit", "images that end amid a tile"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_races(name: str, dtype: str) -> None:
    problem = replace(LAYERS[name], dtype=dtype)
    for candidate, program in offers(PhaseGemmPixels(), problem)[:1]:
        assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(order=None))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_of_any_value(dtype: str) -> None:
    """The channel whose bias it is is NaN or infinite alone."""
    problem = make((2, 20, 5, 6), 16, 2, 2, bias=True, dtype=dtype, tf32=True)
    generator = torch.Generator().manual_seed(4)
    shapes = problem.input_shape, problem.weight_shape
    operands = tuple(torch.randint(-3, 4, shape, generator=generator).to(DTYPES[dtype]) for shape in shapes)
    bias = torch.tensor([1, math.inf, -2, math.nan, 3, -math.inf, 0, 5] * 2, dtype=DTYPES[dtype])
    exact = reference(problem, Pass.FORWARD, tuple(each.double() for each in operands), bias.double()).to(DTYPES[dtype])
    for _, program in offers(PhaseGemmPixels(), problem):
        found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), operands, bias)
        torch.testing.assert_close(found, exact, equal_nan=True, rtol=0, atol=0)


def test_numbers_of_many_sizes() -> None:
    """float32 is multiplied as float16: every pixel and every output channel has a power of two of its own."""
    problem = make((2, 20, 6, 6), 16, 2, 2, bias=True, tf32=True)
    generator = torch.Generator().manual_seed(5)

    def scaled(shape: tuple[int, ...], powers: tuple[int, ...], most: int) -> torch.Tensor:
        numbers = torch.randint(-3, 4, shape, generator=generator)
        return numbers * 2.0 ** torch.randint(-most, most + 1, powers, generator=generator)

    x = scaled(problem.input_shape, (2, 1, 6, 6), 90)
    weight = scaled(problem.weight_shape, (1, 16, 1, 1), 30)
    x[0, :, 0, 0] = 0
    weight[:, 0] = 0
    bias = torch.zeros(16)
    exact = reference(problem, Pass.FORWARD, (x.double(), weight.double()), bias.double())
    for _, program in offers(PhaseGemmPixels(), problem):
        found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight), bias)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=0)


def test_what_far_smaller_numbers_lose() -> None:
    """Beside a pixel's largest channel, or a column's largest weight, 2^-39 of it at most."""
    problem = make((1, 32, 6, 6), 16, 2, 2, tf32=True)
    generator = torch.Generator().manual_seed(6)
    x, weight = (torch.randn(shape, generator=generator) for shape in (problem.input_shape, problem.weight_shape))
    x[:, 1:] *= 2.0 ** torch.randint(-45, 1, (1, 31, 6, 6), generator=generator)
    weight[0] = 0  # the largest channel has no weight
    exact = reference(problem, Pass.FORWARD, (x.double(), weight.double()))
    sums = reference(problem, Pass.FORWARD, (x.double().abs(), weight.double().abs()))
    largest = reference(problem, Pass.FORWARD, (x.double().abs().amax(1, True).expand(x.shape), weight.double().abs()))
    for _, program in offers(PhaseGemmPixels(), problem):
        found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight))
        assert ((found.double() - exact).abs() <= 2.0**-10 * sums + 2.0**-39 * largest).all()


def test_infinite_channels() -> None:
    """A pixel's outputs are NaN or infinite with one of its channels, those of other pixels are as they were."""
    problem = make((1, 20, 6, 6), 16, 2, 2, tf32=True)
    generator = torch.Generator().manual_seed(7)
    shapes = problem.input_shape, problem.weight_shape
    x, weight = (torch.randint(1, 4, shape, generator=generator).float() for shape in shapes)
    x[0, 3, 1, 1], x[0, 4, 2, 2], x[0, 5, 3, 3] = math.inf, -math.inf, math.nan
    exact = reference(problem, Pass.FORWARD, (x.double(), weight.double())).float()
    for _, program in offers(PhaseGemmPixels(), problem):
        found = run(problem, Pass.FORWARD, program, Layouts.dense(problem), (x, weight))
        torch.testing.assert_close(found, exact, equal_nan=True, rtol=0, atol=0)


def test_layers_take_every_way() -> None:
    """Pixels are read together and apart, weights stay and do not, and stores have every width."""
    ways: dict[str, set[object]] = {"piece": set(), "resident": set(), "vector": set()}
    for dtype in ("float32", "bfloat16"):
        for layer in LAYERS.values():
            problem = replace(layer, dtype=dtype)
            ways["piece"].add(_piece(problem, Layouts.dense(problem)))
            ways["vector"].add((dtype, _vector(problem, Layouts.dense(problem))))
            ways["resident"] |= {candidate.config.resident for candidate, _ in offers(PhaseGemmPixels(), problem)}
    assert ways["piece"] == {0, 4, 8, 16}
    assert ways["resident"] == {False, True}
    assert ways["vector"] == {("float32", 2), ("float32", 4), ("bfloat16", 2), ("bfloat16", 4), ("bfloat16", 8)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [(14, 14), (13, 15), (64, 64)])
def test_emitted_files_have_the_kernels_of_all_sizes(size: tuple[int, int], dtype: str) -> None:
    """Which pixels a thread has follows from how even rows are."""
    layer = make((8, 256, *size), 256, 2, 2, bias=True, dtype=dtype, tf32=dtype == "float32")
    chosen, sources = _choose(layer, Pass.FORWARD, H200)
    assert chosen.schedule.name == "phase_gemm_pixels"
    for height, width in itertools.product(range(1, 10), repeat=2):
        problem = replace(layer, input_size=(height, width))
        program = PhaseGemmPixels().program(
            problem, Pass.FORWARD, H200, Layouts.dense(problem), chosen.candidate.config
        )
        assert program.main.source in sources


def test_where_it_refuses() -> None:
    layer = make((2, 32, 8, 8), 32, 2, 2, dtype="bfloat16")
    assert refusal(PhaseGemmPixels(), layer, Pass.FORWARD, H200) is None
    wanted = {
        replace(layer, dtype="float32"): "exact float32",
        replace(layer, dtype="float64"): "tensor cores for float64",
        replace(layer, channels_last=True): "needs NCHW",
        replace(layer, padding=(1, 1)): "equal to the stride",
        replace(layer, kernel_size=(3, 3)): "equal to the stride",
        replace(layer, output_padding=(1, 1)): "output padding",
        replace(layer, kernel_size=(3, 3), stride=(3, 3)): "an even stride",
        replace(layer, in_channels=1024): "1024 input channels do not fit",
    }
    for problem, reason in wanted.items():
        assert reason in (refusal(PhaseGemmPixels(), problem, Pass.FORWARD, H200) or "")
    assert "only" in (refusal(PhaseGemmPixels(), layer, Pass.INPUT_GRAD, H200) or "")
    assert "has no wgmma" in (refusal(PhaseGemmPixels(), layer, Pass.FORWARD, DeviceInfo.for_arch("sm_80")) or "")
