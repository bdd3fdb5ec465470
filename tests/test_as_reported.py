"""What users' reports came to, in one list, on the CPU and on a GPU; the whole kind of each is tested elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import polyphase
from polyphase import ConvTranspose2d, UnsupportedError, conv_transpose1d, conv_transpose2d


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(1, 3, 4, 4, device=device)


@pytest.fixture
def w(device: torch.device) -> Tensor:
    return torch.randn(3, 2, 3, 3, device=device)


@pytest.fixture
def process_group(device: torch.device) -> Iterator[None]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stride", [10**7, 2**31])
def test_strides_of_any_size_answer_at_once(stride: int, device: torch.device) -> None:
    x, w = torch.randn(1, 5, 1, device=device), torch.randn(5, 3, 2, device=device)
    expected = F.conv_transpose1d(x, w, stride=2)  # of one pixel it makes no difference
    conv_transpose1d(x, w, stride=2)
    start = time.process_time()
    found = conv_transpose1d(x, w, stride=stride)
    assert time.process_time() - start < 5  # a GPU's kernel is compiled
    torch.testing.assert_close(found, expected)


def test_distributed_modules(x: Tensor, device: torch.device, process_group: None) -> None:
    pytest.importorskip("torch.distributed.tensor.experimental")  # as of PyTorch 2.5
    tensors = pytest.importorskip("torch.distributed.tensor")
    mesh = dist.init_device_mesh(device.type, (1,))
    layer = ConvTranspose2d(3, 2, 3).to(device)
    expected = layer(x)
    placed = tensors.distribute_tensor(x, mesh, [tensors.Shard(0)])
    found = tensors.distribute_module(layer, mesh)(placed)
    torch.testing.assert_close(found.full_tensor(), expected)
    found.sum().backward()


def test_functionalize(x: Tensor, w: Tensor) -> None:
    found = torch.func.functionalize(lambda w: conv_transpose2d(x, w))(w)
    torch.testing.assert_close(found, F.conv_transpose2d(x, w))


class Spread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return conv_transpose2d(x, x.new_ones(x.shape[1], 1, 3, 3), groups=x.shape[1])


def test_export_keeps_channels_dynamic(device: torch.device) -> None:
    channels = torch.export.Dim("channels", min=2, max=64)
    given = torch.randn(2, 4, 5, 5, device=device)
    program = torch.export.export(Spread(), (given,), dynamic_shapes=({1: channels},))
    x = torch.randn(2, 7, 5, 5, device=device)
    torch.testing.assert_close(program.module()(x), F.conv_transpose2d(x, x.new_ones(7, 1, 3, 3), groups=7))


def test_compiled_autograd_in_one_graph(x: Tensor, device: torch.device) -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    layer = ConvTranspose2d(3, 2, 3).to(device)
    (expected,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
    torch._dynamo.reset()
    with enable(torch.compile(backend="aot_eager", fullgraph=True)):
        layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_a_float32_bias_beside_half_types(x: Tensor, w: Tensor) -> None:
    """Taken on the CPU, where PyTorch takes it at some sizes and in some builds; refused on CUDA, as by PyTorch."""
    bias = torch.randn(2, device=x.device)
    if x.is_cuda:
        for function in (F.conv_transpose2d, conv_transpose2d):
            with pytest.raises(RuntimeError, match=r"same|dtype|type"):
                function(x.bfloat16(), w.bfloat16(), bias)
    else:
        found = conv_transpose2d(x.bfloat16(), w.bfloat16(), bias)
        expected = F.conv_transpose2d(x.bfloat16().float(), w.bfloat16().float(), bias)
        torch.testing.assert_close(found, expected.bfloat16(), rtol=1e-2, atol=1e-2)


def test_fuse_fx_merges_a_batch_norm(x: Tensor, device: torch.device) -> None:
    from torch.ao.quantization.quantize_fx import fuse_fx

    model = nn.Sequential(nn.ConvTranspose2d(3, 2, 3), nn.BatchNorm2d(2)).to(device).eval()
    model[1].running_mean.uniform_(-1, 1)
    expected = model(x)
    polyphase.accelerate(model)
    merged = fuse_fx(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in merged.modules())
    torch.testing.assert_close(merged(x), expected)


def test_large_kernels_on_several_threads(device: torch.device) -> None:
    x, w = torch.randn(1, 1, 20, 20, device=device), torch.randn(1, 1, 32, 30, device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        conv_transpose2d(x, w)
        start = time.process_time()
        conv_transpose2d(x, w)
        assert time.process_time() - start < 1
    finally:
        torch.set_num_threads(threads)


def test_a_side_beyond_2_31(device: torch.device) -> None:
    """On a GPU it is refused by an error that names the limit; the CPU's would take 22 GB."""
    size = (1, 1, 46889, 2)
    problem = polyphase.ConvTransposeProblem.make(size, 1, 1, stride=(46889, 4), bias=True)
    assert problem.output_size == (2198531433, 5)
    if device.type == "cuda":
        half = {"device": device, "dtype": torch.float16}
        x, w, bias = torch.randn(size, **half), torch.randn(1, 1, 1, 1, **half), torch.randn(1, **half)
        with pytest.raises(UnsupportedError, match="the kernels count to 2147483647"):
            conv_transpose2d(x, w, bias, stride=(46889, 4))
