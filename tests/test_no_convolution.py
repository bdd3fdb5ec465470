"""No convolution of PyTorch's is called, in any pass: here they all raise."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import polyphase
from helpers import OURS, constants, make_operands
from polyphase import ConvTransposeProblem

make = ConvTransposeProblem.make

PROBLEMS = [
    make((2, 4, 9), 6, 5, stride=3, padding=2, output_padding=1, groups=2, bias=True),
    make((2, 4, 5, 6), 3, 3, stride=2, padding=1),
    make((1, 4, 5, 6), 4, 3, groups=4, dilation=2, bias=True),
    make((1, 2, 3, 4, 3), 3, 2, stride=2, bias=True),
]


def is_convolution(name: str) -> bool:
    """Of an operator ``namespace::name`` or a function."""
    return re.search(r"conv(\d|_|olution)|mkldnn|cudnn|miopen", name) is not None and not name.startswith("polyphase")


class NoConvolutions(TorchDispatchMode):
    """Raises at every operator below autograd that convolves."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if is_convolution(func.name()):
            raise AssertionError(f"{func.name()} was called")
        return func(*args, **(kwargs or {}))


def forbidden(name: str) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"{name} was called")

    return raises


@pytest.fixture
def no_convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forbids them as functions, as attributes of torch, and as operators."""
    for home in (F, torch):
        for name in dir(home):
            if is_convolution(name) and callable(getattr(home, name)):
                monkeypatch.setattr(home, name, forbidden(name))
    with NoConvolutions():
        yield


def test_the_fixture_catches_them(no_convolutions: None) -> None:
    x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)
    with pytest.raises(AssertionError, match="conv_transpose2d was called"):
        F.conv_transpose2d(x, w)
    with pytest.raises(AssertionError, match="conv_transpose2d was called"):
        nn.ConvTranspose2d(2, 2, 3)(x)
    with pytest.raises(AssertionError, match="was called"):
        torch.conv_transpose2d(x, w)
    for operator in (
        lambda: torch.ops.aten.convolution(x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1),
        lambda: torch.ops.aten.conv2d(x, w),
        lambda: torch.ops.aten.convolution_backward(
            x, x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1, [True, True, False]
        ),
    ):
        with pytest.raises(AssertionError, match=r"aten::conv.* was called"):
            operator()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_function_and_derivatives(
    problem: ConvTransposeProblem, dtype: torch.dtype, device: torch.device, no_convolutions: None
) -> None:
    operands = make_operands(problem, dtype, device)
    tensors = [t.requires_grad_() for t in (operands.input, operands.weight, operands.bias) if t is not None]
    call = OURS[problem.dims]
    for channels_last in (False, True):
        if channels_last:
            tensors = [t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t for t in tensors]
        with torch.no_grad():
            call(*tensors, **constants(problem))
        output = call(*tensors, **constants(problem))
        first = torch.autograd.grad(output, tensors, operands.grad_output, create_graph=True)
        total = sum(gradient.abs().pow(2).sum() for gradient in first)
        torch.autograd.grad(total, tensors, allow_unused=True)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(tensor, torch.ones_like(tensor)) for tensor in tensors]
            call(*duals, **constants(problem))
        stacked = [torch.stack([tensor, tensor]) for tensor in tensors]
        torch.func.vmap(lambda *tensors: call(*tensors, **constants(problem)))(*stacked)


def test_modules_and_accelerated_models(device: torch.device, no_convolutions: None) -> None:
    model = nn.Sequential(
        nn.LazyConvTranspose2d(4, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 2, 3, bias=False),
        polyphase.ConvTranspose2d(2, 2, 2, 2),
    ).to(device)
    polyphase.accelerate(model)
    x = torch.randn(2, 3, 5, 5, device=device)
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.autocast(device.type, torch.bfloat16):
        model(x).sum().backward()
    polyphase.restore(model)
    with pytest.raises(AssertionError, match="conv_transpose2d was called"):
        model(x)


def test_shapes_alone(no_convolutions: None) -> None:
    layer = polyphase.ConvTranspose2d(3, 2, 3, device="meta")
    layer(torch.empty(1, 3, 4, 4, device="meta")).sum().backward()


def test_compiled(device: torch.device) -> None:
    """The traced graph, backward included, holds no convolution."""
    from torch._dynamo.backends.common import aot_autograd

    names: list[str] = []

    def look(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    layer = copy.deepcopy(polyphase.ConvTranspose2d(3, 2, 3)).to(device)
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)
    compiled(torch.randn(1, 3, 4, 4, device=device, requires_grad=True)).sum().backward()
    assert sum(name.startswith("polyphase.") for name in names) == 3
    assert not any(map(is_convolution, names)), names
