"""Activations and snakes before a layer in graphs of `torch.compile`'s (`polyphase.enable_compile_fusion`)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

import polyphase
from polyphase import fused
from test_fused_prologue import Cosine, Snake1d, SnakeBeta


class Up(nn.Module):
    """A layer behind a function of its input."""

    def __init__(self, function: Callable[..., Tensor], dims: int = 1, again: bool = False) -> None:
        super().__init__()
        layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        self.function, self.up, self.again = function, layer(6, 4, 4, 2, 1), again
        self.slope = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        active = self.function(x, self.slope) if self.function is F.prelu else self.function(x)
        y = torch.tanh(self.up(active))
        return y + active.sum() if self.again else y


def _read_again(x: Tensor) -> Tensor:
    made = torch.cat([x[:, :3], x[:, 3:]], 1)
    active = made.relu_()
    made.add_(1)
    return active


FUNCTIONS: dict[str, tuple[Callable[[], Callable[..., Tensor]], str]] = {
    "leaky": (lambda: lambda x: F.leaky_relu(x, 0.1), "leaky_relu → conv_transpose → tanh"),
    "relu, a method": (lambda: lambda x: x.relu(), "relu → conv_transpose → tanh"),
    "one limit": (lambda: lambda x: torch.clamp_min(x, -0.5), "clamp_min → conv_transpose → tanh"),
    "elu": (nn.ELU, "elu → conv_transpose → tanh"),
    "prelu": (lambda: F.prelu, "prelu → conv_transpose → tanh"),
    "snake": (lambda: Snake1d(6), "snake → conv_transpose → tanh"),
    "snake beta": (lambda: SnakeBeta(6), "snake → conv_transpose → tanh"),
    "snake beta, plain": (lambda: SnakeBeta(6, False), "snake → conv_transpose → tanh"),
    "no snake": (lambda: Cosine(6), "conv_transpose → tanh"),
    "twice a snake": (lambda: SnakeBeta(6, factor=2.0), "conv_transpose → tanh"),
    "in place": (lambda: lambda x: F.relu_(x + 1), "conv_transpose → tanh"),
    "in place, of a new tensor": (
        lambda: lambda x: F.relu(torch.cat([x[:, :2], x[:, 2:]], 1), inplace=True),
        "relu → conv_transpose → tanh",
    ),
    "in place, by position": (
        lambda: lambda x: F.leaky_relu(torch.cat([x[:, :2], x[:, 2:]], 1), 0.1, True),
        "leaky_relu → conv_transpose → tanh",
    ),
    "in place, by position, of one that is read": (
        lambda: lambda x: (z := (x + 1)[:, :], F.leaky_relu(z, 0.1, True) + z)[0],
        "conv_transpose → tanh",
    ),
    "in place, of one that is read": (
        lambda: lambda x: (z := torch.cat([x, x], 1)[:, :6], F.relu_(z))[1],
        "conv_transpose → tanh",
    ),
    "in place, and read": (lambda: _read_again, "conv_transpose → tanh"),
}


def compiled(plain: nn.Module, x: Tensor, dynamic: bool | None = None) -> tuple[Tensor, list[str]]:
    torch._dynamo.reset()
    model = copy.deepcopy(plain)
    polyphase.accelerate(model)
    # Nothing is told of graphs that come from the disk.
    with torch.no_grad(), config.patch(fx_graph_cache=False), polyphase.enable_compile_fusion() as fusion:
        return torch.compile(model, fullgraph=True, dynamic=dynamic)(x), fusion.chains


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_layer_alone_reads(name: str) -> None:
    made, chain = FUNCTIONS[name]
    model = Up(made()).eval()
    x = torch.randn(2, 6, 9)
    found, chains = compiled(model, x)
    torch.testing.assert_close(found, model(x).detach())
    assert chains == [chain]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_of_any_dimensions_and_sizes(dims: int) -> None:
    model = Up(Snake1d(6) if dims == 1 else nn.ReLU(), dims).eval()
    x = torch.randn(2, 6, *[5] * dims)
    found, chains = compiled(model, x, dynamic=True)
    torch.testing.assert_close(found, model(x).detach())
    assert chains in (["snake → conv_transpose → tanh"], ["relu → conv_transpose → tanh"])


def test_a_layer_with_a_prologue_of_its_own() -> None:
    """The activation before it stays with Inductor."""
    x, w, a = torch.randn(2, 4, 8), torch.randn(4, 3, 4), torch.rand(4)

    def f(x: Tensor) -> Tensor:
        return fused.conv_transpose1d(torch.relu(x), w, None, 2, prologue=[fused.snake(a)])

    with torch.no_grad(), polyphase.enable_compile_fusion():
        torch.testing.assert_close(torch.compile(f)(x), f(x))


def test_of_two_readers_none_is_fused() -> None:
    model = Up(nn.ELU(), again=True).eval()
    x = torch.randn(2, 6, 9)
    found, chains = compiled(model, x)
    torch.testing.assert_close(found, model(x).detach())
    assert chains[0].startswith("conv_transpose → tanh")


def test_an_input_that_changes_before_the_layer() -> None:
    class Changed(Up):
        def forward(self, x: Tensor) -> Tensor:
            x = x + 0
            active = F.leaky_relu(x, 0.1)
            x.add_(1)
            return torch.tanh(self.up(active)) + x.mean()

    model = Changed(F.relu).eval()
    x = torch.randn(2, 6, 9)
    found, chains = compiled(model, x)
    torch.testing.assert_close(found, model(x).detach())
    assert chains[0].startswith("conv_transpose → tanh")
