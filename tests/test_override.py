"""PyTorch's own transposed convolutions through polyphase: `override`."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase
from polyphase import functional

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The dimensions of every call that reaches polyphase."""
    calls: list[int] = []
    for dims in (1, 2, 3):
        name = f"conv_transpose{dims}d"

        def noted(*arguments: object, _call: object = getattr(functional, name), _dims: int = dims) -> Tensor:
            calls.append(_dims)
            return _call(*arguments)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(functional, name, noted)
    return calls


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_functions_and_modules(dims: int, batched: bool, device: str, seen: list[int]) -> None:
    """Every argument, in value and gradients, and PyTorch's again afterwards."""
    module = getattr(nn, f"ConvTranspose{dims}d")(4, 6, 3, 2, 1, 1, groups=2, dilation=2).to(device)
    x = torch.randn(*([2] if batched else []), 4, *(5, 4, 3)[:dims], device=device, requires_grad=True)
    leaves = (x, *module.parameters())
    expected = module(x)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    assert not seen
    with polyphase.override(device):
        found = module(x)
        assert seen == [dims]
        ours = torch.autograd.grad(found.square().sum(), leaves)
        function = getattr(F, f"conv_transpose{dims}d")
        torch.testing.assert_close(function(x, module.weight), function(x, module.weight, None, 1, 0, 0, 1, 1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(ours, gradients):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    seen.clear()
    module(x)
    assert not seen


def test_modes(device: str, seen: list[int]) -> None:
    """no_grad, inference mode with tensors of its own, autocast, transforms, second derivatives."""
    layer = nn.ConvTranspose2d(3, 4, 3, 2).to(device)
    x = torch.randn(2, 3, 5, 5, device=device)
    with polyphase.override(device):
        with torch.no_grad():
            layer(x)
        with torch.inference_mode():
            layer(x.clone())
        with torch.autocast(device, torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert seen == [2, 2, 2]
        assert torch.func.vmap(layer)(x.unsqueeze(1)).shape == (2, 1, 4, 11, 11)
        wide = nn.ConvTranspose2d(2, 2, 2).to(device, torch.float64)
        point = torch.randn(1, 2, 2, 2, device=device, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(wide, point)
        plain = nn.Conv2d(3, 4, 3).to(device)(x)
    assert plain.shape == (2, 4, 3, 3)


def test_compiled_before_within_and_after(device: str, seen: list[int]) -> None:
    """PyTorch's operator remembers the kernel by which it was traced."""
    weight, x = torch.randn(3, 4, 4, requires_grad=True, device=device), torch.randn(2, 3, 9, device=device)

    def traced() -> int:
        torch._dynamo.reset()
        before = len(seen)
        torch.compile(lambda x: F.conv_transpose1d(x, weight).relu(), fullgraph=True, backend="aot_eager")(x)
        return len(seen) - before

    assert not traced()
    with polyphase.override(device):
        assert traced()
    assert not traced()


def test_compiled(device: str, seen: list[int]) -> None:
    layer = nn.ConvTranspose1d(3, 4, 4, 2, 1).to(device)
    x = torch.randn(2, 3, 9, device=device)

    def run(x: Tensor) -> Tensor:
        return torch.relu(F.conv_transpose1d(x, layer.weight, layer.bias, 2, 1))

    expected = run(x)
    with polyphase.override(device):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        found = compiled(x)
        traced = len(seen)
        assert traced
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(compiled(x).sum(), [layer.weight])
    (other,) = torch.autograd.grad(expected.sum(), [layer.weight])
    torch.testing.assert_close(gradient, other)


@pytest.mark.gpu
def test_graphs_under_autocast(seen: list[int]) -> None:
    """A CUDA graph that is captured under `override` and autocast replays polyphase's kernels on other contents.

    With PyTorch's cache of cast weights it would replay with one that is freed, as graphs of PyTorch's layers do.
    """
    layer = nn.ConvTranspose2d(16, 8, 4, 2, 1).cuda()
    x = torch.randn(2, 16, 9, 11, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False), polyphase.override():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        seen.clear()
        with torch.cuda.graph(graph):
            found = layer(x)
        assert seen == [2]
    assert found.dtype == torch.bfloat16
    x.copy_(torch.randn_like(x))
    found.fill_(torch.nan)
    graph.replay()
    expected = F.conv_transpose2d(x.double(), layer.weight.double(), layer.bias.double(), 2, 1)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def test_nested_and_undone_twice(seen: list[int]) -> None:
    layer, x = nn.ConvTranspose1d(1, 1, 2), torch.ones(1, 1, 3)
    outer, inner = polyphase.override("cpu"), polyphase.override("cpu")
    inner.undo()
    inner.undo()
    layer(x)
    assert seen == [1]
    with pytest.raises(KeyError), outer:
        raise KeyError
    layer(x)
    assert seen == [1]


def test_transforms_and_other_layouts_are_pytorchs() -> None:
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(3, 4, 3, 3)

    def loss(weight: Tensor) -> Tensor:
        return F.conv_transpose2d(x, weight, stride=2).square().mean()

    expected = torch.func.grad(loss)(weight), torch.func.jvp(loss, (weight,), (weight,))
    with polyphase.override("cpu"):
        found = torch.func.grad(loss)(weight), torch.func.jvp(loss, (weight,), (weight,))
        if torch.backends.mkldnn.is_available():
            assert F.conv_transpose2d(x.to_mkldnn(), weight).shape == (2, 4, 7, 7)
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_default_that_does_nothing_here_is_warned_of(seen: list[int]) -> None:
    layer, x = nn.ConvTranspose1d(1, 1, 2), torch.ones(1, 1, 3)
    with pytest.warns(UserWarning, match=r'finds no CUDA device here: it changes nothing.*override\("cpu"\)') as caught:
        undo = polyphase.override()
    assert caught[0].filename == __file__
    with undo:
        layer(x)
    assert not seen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        polyphase.override("cpu").undo()


def test_a_device_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="'cuda' or 'cpu', not 'meta'"):
        polyphase.override("meta")
