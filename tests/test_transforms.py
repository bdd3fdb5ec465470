"""`torch.func.functionalize`, make_fx, compiled autograd, symbolic constants, and a bias of another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functionalize, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import polyphase
from helpers import OURS, TORCH

Function = Callable[..., Tensor]
DOUBLE = torch.float64


def tensors(device: torch.device, dims: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shape = (4, 3, 5)[:dims]
    return (
        torch.randn(1, 3, *shape, device=device, dtype=DOUBLE),
        torch.randn(3, 2, *[3] * dims, device=device, dtype=DOUBLE),
        torch.randn(2, device=device, dtype=DOUBLE),
    )


def loss(function: Function) -> Function:
    return lambda x, w, b: function(x, w, b, stride=2).pow(3).sum()


TRANSFORMED: dict[str, Callable[[Function], Function]] = {
    "functionalize": lambda f: functionalize(f),
    "functionalize, mutations and views": lambda f: functionalize(f, remove="mutations_and_views"),
    "functionalize of grad": lambda f: functionalize(grad(loss(f), argnums=(0, 1, 2))),
    "grad of functionalize": lambda f: grad(functionalize(loss(f)), argnums=(0, 1, 2)),
    "functionalize of grad of grad": lambda f: functionalize(
        grad(lambda *given: grad(loss(f), argnums=1)(*given).square().sum(), argnums=(0, 1, 2))
    ),
    "functionalize of vmap": lambda f: (
        lambda x, w, b: functionalize(vmap(f, (None, 0, None)))(x, torch.stack([w, 2 * w]), b)
    ),
    "vmap of functionalize": lambda f: (
        lambda x, w, b: vmap(functionalize(f), (None, 0, 0))(x, torch.stack([w, 2 * w]), torch.stack([b, -b]))
    ),
    "vmap of functionalize of grad": lambda f: (
        lambda x, w, b: vmap(functionalize(grad(loss(f), argnums=(0, 1, 2))), (0, None, None))(
            torch.stack([x, 3 * x]), w, b
        )
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_functionalize(name: str, device: torch.device) -> None:
    for dims in OURS:
        given = tensors(device, dims)
        got, expected = (TRANSFORMED[name](function)(*given) for function in (OURS[dims], TORCH[dims]))
        torch.testing.assert_close(got, expected)


def test_functionalize_below_autograd(device: torch.device) -> None:
    given = [each.requires_grad_() for each in tensors(device)]
    got, expected = (torch.autograd.grad(functionalize(loss(each))(*given), given) for each in (OURS[2], TORCH[2]))
    torch.testing.assert_close(got, expected)


def test_functionalize_still_refuses_other_functions() -> None:
    """PyTorch's own answer, which polyphase's rule leaves as it is."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    x, w, b = tensors(torch.device("cpu"))
    functionalize(OURS[2])(x, w, b)
    with pytest.raises(RuntimeError, match="NYI: Functionalize rule"):
        functionalize(Twice.apply)(x)


MADE: dict[str, Callable[[Function], Function]] = {
    "call": lambda f: lambda *given: f(*given),
    "grad": lambda f: grad(loss(f), argnums=(0, 1, 2)),
    "functionalize of grad": lambda f: functionalize(grad(loss(f), argnums=(0, 1, 2))),
    "vmap": lambda f: lambda x, w, b: vmap(f, (None, 0, None))(x, torch.stack([w, 2 * w]), b),
    "backward": lambda f: lambda *given: backward(f, *given),
}


def backward(function: Function, *given: Tensor) -> tuple[Tensor, ...]:
    given = tuple(each.detach().requires_grad_() for each in given)
    return torch.autograd.grad(loss(function)(*given), given)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", MADE)
def test_make_fx(name: str, mode: str, device: torch.device) -> None:
    given = tensors(device)
    made = make_fx(MADE[name](OURS[2]), tracing_mode=mode)(*given)
    names = {str(node.target) for node in made.graph.nodes}
    assert any("polyphase.conv_transpose" in name for name in names)
    assert not any("aten.convolution" in name for name in names)
    other = tuple(torch.randn_like(each) for each in given)
    torch.testing.assert_close(made(*other), MADE[name](TORCH[2])(*other))


def test_make_fx_of_a_layer(device: torch.device) -> None:
    layer = nn.ConvTranspose2d(3, 2, 3, device=device)
    x = torch.randn(1, 3, 4, 4, device=device)
    expected = layer(x)
    polyphase.accelerate(layer)
    torch.testing.assert_close(make_fx(layer)(x)(x), expected)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_autograd(fullgraph: bool, device: torch.device) -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    torch._dynamo.reset()
    theirs = nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2)).to(device)
    ours = nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2)).to(device)
    ours.load_state_dict(theirs.state_dict())
    polyphase.accelerate(ours)
    x = torch.randn(1, 3, 4, 4, device=device)
    theirs(x).square().sum().backward()
    with enable(torch.compile(backend="eager", fullgraph=fullgraph)):
        ours(x).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


class AsManyGroups(nn.Module):
    """Blurs each channel on its own."""

    def forward(self, x: Tensor) -> Tensor:
        return polyphase.conv_transpose2d(x, x.new_ones(x.shape[1], 1, 3, 3), groups=x.shape[1])


class AnyChannels(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return polyphase.conv_transpose2d(x, w, stride=2, padding=1)


class StrideOfShape(nn.Module):
    """Outputs of a patch for each element of it."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return polyphase.conv_transpose2d(x, w, stride=(w.shape[2], w.shape[3]))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_channels_and_groups(strict: bool) -> None:
    c, o, k = (torch.export.Dim(name, min=2, max=64) for name in "cok")

    def exported(model: nn.Module, given: tuple[Tensor, ...], dynamic: Any, other: tuple[Tensor, ...]) -> None:
        program = torch.export.export(model, given, dynamic_shapes=dynamic, strict=strict)
        torch.testing.assert_close(program.module()(*other), model(*other))

    x, other = torch.randn(2, 4, 5, 5), torch.randn(2, 7, 5, 5)
    exported(AsManyGroups(), (x,), ({1: c},), (other,))
    exported(AnyChannels(), (x, torch.randn(4, 6, 3, 3)), ({1: c}, {0: c, 1: o}), (other, torch.randn(7, 5, 3, 3)))
    exported(StrideOfShape(), (x, torch.randn(4, 6, 3, 3)), (None, {2: k}), (x, torch.randn(4, 6, 5, 3)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_with_dynamic_groups(dynamic: bool, device: torch.device) -> None:
    compiled = torch.compile(AsManyGroups(), backend="aot_eager", dynamic=dynamic, fullgraph=True)
    for channels in (3, 5, 8):
        x = torch.randn(2, channels, 5, 5, device=device, requires_grad=True)
        y = torch.randn(2, channels, 5, 5, device=device, requires_grad=True)
        with torch.no_grad():
            y.copy_(x)
        got = compiled(x)
        expected = TORCH[2](y, y.new_ones(channels, 1, 3, 3), groups=channels)
        torch.testing.assert_close(got, expected)
        got.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", OURS)
def test_float32_bias_beside_half_types(dims: int, dtype: torch.dtype) -> None:
    """It is added before the one rounding, and has a gradient of its own dtype. (PyTorch takes it on some CPUs.)"""
    x, w, _ = (each.to(dtype) for each in tensors(torch.device("cpu"), dims))
    bias = torch.tensor([1 + 2**-11, -1e-3], requires_grad=True)
    got = OURS[dims](x, w, bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got, TORCH[dims](x.float(), w.float(), bias).to(dtype))
    got.float().square().sum().backward()
    assert bias.grad is not None
    assert bias.grad.dtype == torch.float32
    batch = vmap(OURS[dims], (None, None, 0))(x, w, torch.stack([bias, 2 * bias]))
    assert batch.dtype == dtype
    _, tangent = jvp(lambda b: OURS[dims](x, w, b), (bias.detach(),), (torch.ones(2),))
    assert tangent.dtype == dtype
    assert bool((tangent == 1).all())
    compiled = torch.compile(OURS[dims], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w, bias), got)


def test_bias_of_another_dtype_is_refused() -> None:
    x, w, b = tensors(torch.device("cpu"))
    for bias in (b.half(), b.float()):
        with pytest.raises(RuntimeError, match=r"must have the same dtype, got input torch.float64 and bias"):
            OURS[2](x, w, bias)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        OURS[2](x.bfloat16(), w.bfloat16(), b.half())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float32_bias_beside_half_types_is_refused_on_cuda() -> None:
    x, w, b = (each.float().cuda() for each in tensors(torch.device("cpu")))
    for function in (OURS[2], TORCH[2]):
        with pytest.raises(RuntimeError, match="same"):
            function(x.bfloat16(), w.bfloat16(), b)
