"""Epilogues on real hardware: every schedule, fused models in graphs and under autocast, gradients.

pytest tests -k epilogue
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._inductor import config

import polyphase
from helpers import tf32
from kernel_harness import Gpu, formats
from polyphase import chain, fused
from polyphase.jit.ahead import compile_ahead
from polyphase.plan.planner import programs
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import Epilogue
from polyphase.program.batch_norm import BatchNorm, programs_of
from polyphase.program.reduction import program_of
from test_batch_norms import ACTIVATIONS, SHAPES
from test_batch_norms import check as check_norm
from test_compile_fusion import resampled
from test_epilogue import ALONE, Case, cases, check, make
from test_layer_norm import EPILOGUES as NORMALIZING
from test_layer_norm import LAYERS as NORMALIZED
from test_reductions import CASES as REDUCTIONS
from test_reductions import check as check_reduction

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """The GPU, with all kernels of the cases that this run asks for in the cache."""
    device = DeviceInfo.of(DEVICE)
    asked = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    offers = [offer for case in asked if isinstance(case, Case) for offer in case.offers()]
    compile_ahead((source for _, _, program in offers for source in program.sources), device.arch)
    return Gpu(0)


@pytest.mark.sampled(24, 2)
@pytest.mark.parametrize("case", list(cases(DeviceInfo.of(DEVICE))))
def test_combined_in_every_schedule(case: Case, gpu: Gpu) -> None:
    for offer in case.offers():
        check(*offer, gpu)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_every_operation_alone(dtype: str) -> None:
    bare = make((2, 2, 3, 2), 5, 3, 2, 1, bias=True, dtype=dtype)
    problems = [replace(bare, epilogue=Epilogue((operation,))) for operation in ALONE.values()]
    device = DeviceInfo.of(DEVICE)
    found = [
        (
            problem,
            *next(each for each in programs(problem, Pass.FORWARD, device) if each[0].schedule == "direct_general"),
        )
        for problem in problems
    ]
    compile_ahead((source for _, _, program in found for source in program.sources), device.arch)
    for problem, candidate, program in found:
        check(problem, candidate, program, Gpu(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_norms(dtype: str) -> None:
    device = DeviceInfo.of(DEVICE)
    found = []
    for number, (layer, bare) in enumerate(NORMALIZED.items()):
        epilogue = list(NORMALIZING.values())[number % len(NORMALIZING)]
        for problem in formats(replace(bare, dtype=dtype, tf32=True, epilogue=epilogue)):
            offers = programs(problem, Pass.FORWARD, device)
            assert offers or layer == "many channels"
            found += [(problem, *offer) for offer in offers[:: max(1, len(offers) - 1)]]
    compile_ahead((source for _, _, program in found for source in program.sources), device.arch)
    for problem, candidate, program in found:
        check(problem, candidate, program, Gpu(0))


def _generator() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(24, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.GELU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_fused_model(dtype: torch.dtype, layout: torch.memory_format) -> None:
    """As near to float64 as what rounds in between, eager and in a graph."""
    wide, x = _generator().double(), torch.randn(5, 24, 1, 1)
    expected = wide(x.double())
    model = copy.deepcopy(wide).to(DEVICE, dtype, memory_format=layout)
    report = polyphase.accelerate(model, fuse=True)
    assert [block.fused for block in report.blocks] == [("1", "2"), ("4", "5"), ("7",)]
    given = x.to(DEVICE, dtype)
    with torch.inference_mode(), tf32(False):
        found = model(given)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(given)
        graph.replay()
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=tolerance)
    assert torch.equal(captured, found)


def test_gradients_and_autocast_of_an_epilogue() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 8, 5, 6), (8, 6, 4, 4), (6,), (6,), (6,), (2, 6, 10, 12))
    leaves = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]

    def run(x, w, b, scale, shift, residual):  # type: ignore[no-untyped-def]
        steps = [fused.scale_shift(scale, shift), fused.add(residual), "silu"]
        return fused.conv_transpose2d(x, w, b, 2, 1, epilogue=steps)

    def expected(x, w, b, scale, shift, residual):  # type: ignore[no-untyped-def]
        y = torch.nn.functional.conv_transpose2d(x, w, b, 2, 1)
        return torch.nn.functional.silu(y * scale.view(-1, 1, 1) + shift.view(-1, 1, 1) + residual)

    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    wanted = expected(*wide)
    g = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    with tf32(False):
        found = run(*leaves)
        gradients = torch.autograd.grad(found, leaves, g.to(DEVICE, torch.float32))
        compiled = torch.compile(run, fullgraph=True)(*leaves)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled, found)
    for one, other in zip(gradients, torch.autograd.grad(wanted, wide, g)):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-3, atol=1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        half = run(*leaves)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.cpu().double(), wanted, rtol=0.05, atol=0.1)


def test_a_residual_that_lies_otherwise() -> None:
    x, w, residual = torch.ones(2, 4, 3, 3), torch.ones(4, 5, 2, 2), torch.randn(2, 5, 6, 6)
    last = residual.to(DEVICE).to(memory_format=torch.channels_last)
    found = fused.conv_transpose2d(x.to(DEVICE), w.to(DEVICE), None, 2, epilogue=[fused.add(last), "relu"])
    assert torch.equal(found.cpu(), torch.relu(4 + residual))


def test_a_residual_that_is_not_aligned() -> None:
    x, w, residual = torch.ones(2, 64, 4, 4), torch.ones(64, 64, 2, 2), torch.randn(2, 64, 8, 8)
    further = torch.empty(residual.numel() + 1, device=DEVICE)[1:].view(residual.shape).copy_(residual)
    found = fused.conv_transpose2d(x.to(DEVICE), w.to(DEVICE), None, 2, epilogue=[fused.add(further), "relu"])
    assert torch.equal(found.cpu(), torch.relu(64 + residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_model_is_the_same(dtype: torch.dtype) -> None:
    """Bit for bit, after a change of weights, and in a graph."""
    model = _generator().to(DEVICE, dtype)
    polyphase.accelerate(model, fuse=True)
    frozen = copy.deepcopy(model)
    report = polyphase.freeze(frozen)
    x = torch.randn(5, 24, 1, 1, device=DEVICE, dtype=dtype)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(frozen(x), model(x))
    assert report.bytes > 0
    for each in (model, frozen):
        with torch.no_grad():
            each[3].weight.mul_(1.5)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(frozen(x), model(x))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            frozen(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = frozen(x)
        for _ in range(2):
            graph.replay()
            assert torch.equal(captured, frozen(x))
            assert torch.equal(captured, model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(16, 16), (7, 9)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_written_to_a_slice(layout: torch.memory_format, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Kernels write between the channels of others, and by a copy where a slice is not aligned."""
    torch.manual_seed(0)
    x, w = torch.randn(3, 32, *size, device=DEVICE, dtype=dtype), torch.randn(32, 16, 2, 2, device=DEVICE, dtype=dtype)
    x = x.to(memory_format=layout)
    for first in (16, 1):
        larger = torch.full((3, 48, 2 * size[0], 2 * size[1]), 7.0, device=DEVICE, dtype=dtype)
        larger = larger.to(memory_format=layout)
        out, version = larger[:, first : first + 16], larger._version
        fused.conv_transpose2d(x, w, None, 2, epilogue=["relu"], out=out)
        assert larger._version > version
        assert torch.equal(out, fused.conv_transpose2d(x, w, None, 2, epilogue=["relu"]))
        polyphase.conv_transpose2d(x, w, None, 2, out=out)
        assert torch.equal(out, polyphase.conv_transpose2d(x, w, None, 2))
        assert bool((larger[:, :first] == 7).all())
        assert bool((larger[:, first + 16 :] == 7).all())


class Up(nn.Module):
    """A layer, a norm and an activation, joined with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.ConvTranspose2d(32, 16, 2, 2), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """(N, 32, H, W) and (N, C, 2H, 2W) to (N, C + 16, 2H, 2W)."""
        return torch.cat([skip, self.up(x)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [8, 300])
def test_joined_with_a_skip(dtype: torch.dtype, side: int) -> None:
    """Eager, and as a CUDA graph: an output so small that PyTorch joins it, and one that the kernel writes in place."""
    torch.manual_seed(0)
    plain = Up().eval().to(DEVICE, dtype)
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("up.1", "up.2", "cat()")
    x, skip = (
        torch.randn(3, 32, side, side, device=DEVICE, dtype=dtype),
        torch.randn(3, 24, 2 * side, 2 * side, device=DEVICE, dtype=dtype),
    )
    assert chain.is_little(x, model.up[0]) == (side == 8)
    with torch.no_grad(), tf32(False):
        expected = copy.deepcopy(plain).cpu().double()(x.cpu().double(), skip.cpu().double())
        found = model(x, skip)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x, skip)
        graph.replay()
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=tolerance)
    assert torch.equal(captured, found)
    assert torch.equal(found[:, :24], skip)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_by_inductor(dtype: torch.dtype, layout: torch.memory_format) -> None:
    """The layer writes the slice that Inductor gives it."""
    torch.manual_seed(0)
    plain = Up().eval().to(DEVICE, dtype)
    model = copy.deepcopy(plain)
    polyphase.accelerate(model)
    x, skip = (
        torch.randn(3, channels, size, size, device=DEVICE, dtype=dtype).to(memory_format=layout)
        for channels, size in ((32, 8), (16, 16))
    )
    torch._dynamo.reset()
    no_cache = config.patch(fx_graph_cache=False)  # from which nothing is told
    with torch.no_grad(), tf32(False), no_cache, polyphase.enable_compile_fusion() as fusion:
        expected = copy.deepcopy(plain).cpu().double()(x.cpu().double(), skip.cpu().double())
        found = torch.compile(model, fullgraph=True)(x, skip)
    torch._dynamo.reset()
    assert fusion.chains.count("conv_transpose → cat") == 1, fusion.reasons
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=tolerance)
    assert torch.equal(found[:, :16], skip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [64, 3])
def test_crops(channels: int, dtype: torch.dtype) -> None:
    """What is left is what a slice of the whole output is, also in a CUDA graph; uneven crops at both ends."""
    torch.manual_seed(0)
    x = torch.randn(2, 96, 75, device=DEVICE, dtype=dtype)
    w = torch.randn(96, channels, 8, device=DEVICE, dtype=dtype)
    with tf32(False):
        whole = polyphase.conv_transpose1d(x.double(), w.double(), None, 4)
        for left, right in ((0, 4), (3, 5), (7, 0)):
            expected = whole[..., left : whole.shape[-1] - right]
            epilogue = [fused.crop((left, right))]
            found = fused.conv_transpose1d(x, w, None, 4, epilogue=epilogue)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = fused.conv_transpose1d(x, w, None, 4, epilogue=epilogue)
            graph.replay()
            tolerance = 1e-3 if dtype == torch.float32 else 0.5
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
            assert torch.equal(captured, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_library_s_resampler_compiled(dtype: torch.dtype) -> None:
    """BigVGAN's: a depthwise function of PyTorch's, a slice and a snake are one kernel while polyphase overrides."""
    torch.manual_seed(0)
    given = [torch.randn(2, 32, 300), torch.rand(1, 1, 12), torch.rand(1, 32, 1)]
    given = [each.to(DEVICE, dtype) for each in given]
    expected = resampled(*(each.cpu().double() for each in given))
    torch._dynamo.reset()
    no_cache = config.patch(fx_graph_cache=False)  # from which nothing is told
    with torch.no_grad(), tf32(False), no_cache, polyphase.override(), polyphase.enable_compile_fusion() as fusion:
        found = torch.compile(resampled, fullgraph=True)(*given)
    torch._dynamo.reset()
    assert fusion.chains == ["conv_transpose → mul → getitem → snake"]
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reductions(dtype: str) -> None:
    """What follows an epilogue, in kernels of its own."""
    offers = [(reduction, program_of(reduction, dtype)) for reduction in REDUCTIONS.values()]
    compile_ahead((source for _, program in offers for source in program.sources), DeviceInfo.of(DEVICE).arch)
    for reduction, program in offers:
        check_reduction(reduction, program, dtype, Gpu(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_of_a_norm_over_groups(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_LITTLE", 0)
    layers = (nn.ConvTranspose2d(16, 8, 2, 2), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(*layers).eval().to(DEVICE, dtype)
    plain = copy.deepcopy(model).double()
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("1", "2", "3", "4")
    x = torch.randn(3, 16, 70, 90, device=DEVICE, dtype=dtype)
    with torch.inference_mode():
        for _ in range(2):
            first = model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, first)
        rounded = 2**-7 if dtype == torch.bfloat16 else 2**-9
        torch.testing.assert_close(y.double(), plain(x.double()), rtol=rounded, atol=rounded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_norms(dtype: str) -> None:
    """A batch norm in training and its activation, forward and backward."""
    norms = [BatchNorm((5, 6, 8, 40), 1e-3, 0.3, activation) for activation in ACTIVATIONS]
    norms += [BatchNorm(shape, 1e-5, 0.1, ACTIVATIONS[1]) for shape in (*SHAPES.values(), (64, 16, 64, 64))]
    norms += [BatchNorm((3, 5, 4, 8), 1e-5, 0.1, ACTIVATIONS[2], wide=True)] * (dtype != "float32")
    sources = [source for norm in norms for program in programs_of(norm, dtype) for source in program.sources]
    compile_ahead(sources, DeviceInfo.of(DEVICE).arch)
    for norm in norms:
        check_norm(norm, dtype, Gpu(0))


@pytest.mark.parametrize("how", ["", "autocast", "half"])
def test_training_with_batch_norms(how: str) -> None:
    """Steps of a model whose norms are fused, and a graph of one, beside the same model by itself in float64."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.ConvTranspose2d(16, 24, 4, 2, 1, bias=False), nn.BatchNorm2d(24), nn.LeakyReLU(0.2, inplace=True),
        nn.ConvTranspose2d(24, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Tanh()).cuda()  # fmt: skip
    kind = torch.bfloat16 if how == "half" else torch.float32
    reference, model = copy.deepcopy(model).double(), model.to(kind)
    polyphase.accelerate(model, fuse=True)
    x = torch.randn(4, 16, 9, 8, device=DEVICE, dtype=kind)

    def step(of: nn.Module, given: torch.Tensor) -> torch.Tensor:
        of.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast" and of is model):
            y = of(given)
        y.double().square().sum().backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = step(model, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model, x)
    graph.replay()
    step(reference, x.double())
    expected = step(reference, x.double())
    near = 1e-2 if how else 1e-3
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4 * near)
    assert torch.equal(found, captured)
    for one, other in zip((*model.parameters(), *model.buffers()), (*reference.parameters(), *reference.buffers())):
        one, other = (each if each.grad is None else each.grad for each in (one, other))
        assert float((one.double() - other).norm()) <= 8 * near * float(other.double().norm()) + 1e-2
