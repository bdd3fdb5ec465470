"""Concatenations behind layers under `torch.compile`: Inductor has layers write slices of the result."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config, lowering
from torch._inductor.ir import ConcatKernel
from torch._inductor.utils import run_and_get_code

import polyphase
from polyphase import inductor
from polyphase.torch_op import into, into_operator

WRITTEN = "conv_transpose → cat"


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    for name in ("realize_into", "can_realize_into_without_copy"):
        assert isinstance(vars(ConcatKernel)[name], classmethod)
    assert inductor.LAYERS[0] not in lowering.lowerings or lowering.lowerings[inductor.LAYERS[0]]._is_fallback_handler


class Up(nn.Module):
    """Layers, and what ``join`` makes of them, by names."""

    def __init__(self, join: Callable[[Any, Tensor, Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Sequential(nn.ConvTranspose2d(6, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.other = nn.ConvTranspose2d(6, 8, 4, 2, 1, bias=False)
        self.odd = nn.ConvTranspose2d(6, 3, 2, 2)
        self.norm = nn.BatchNorm2d(8)
        self.join = join

    def forward(self, x: Tensor, skip: Tensor) -> dict[str, Tensor]:
        """(N, 6, H, W) and (N, 8, 2H, 2W) to what ``join`` gives."""
        return self.join(self, x, skip)


def swapped(plain: nn.Module) -> Any:
    model = copy.deepcopy(plain)
    polyphase.accelerate(model)
    return model


def models(join: Callable[[Any, Tensor, Tensor], dict[str, Tensor]]) -> tuple[Up, Any, Tensor, Tensor]:
    """A model in evaluation mode with PyTorch's layers, the same with polyphase's, and inputs."""
    plain = Up(join).eval()
    return plain, swapped(plain), torch.randn(2, 6, 4, 8), torch.randn(2, 8, 8, 16)


@contextmanager
def fusing() -> Iterator[polyphase.CompileFusion]:
    """Fusion in what is compiled meanwhile, without derivatives; nothing comes from Inductor's cache."""
    with torch.no_grad(), config.patch(fx_graph_cache=False), polyphase.enable_compile_fusion() as fusion:
        yield fusion


def within(found: dict[str, Tensor], plain: nn.Module, x: Tensor, skip: Tensor) -> None:
    """Results are those of float64, as near as those of PyTorch's layers, and lie as these do."""
    expected = copy.deepcopy(plain).double()(x.double(), skip.double())
    theirs = plain(x, skip)
    for name, each in found.items():
        assert each.dtype == theirs[name].dtype, name
        assert each.stride() == theirs[name].stride(), name
        error = (theirs[name].double() - expected[name]).abs().max()
        assert (each.double() - expected[name]).abs().max() <= 2 * error + 1e-6, name


def _taken(m: Any, x: Tensor, skip: Tensor) -> dict[str, Tensor]:
    active = F.silu(skip)
    return {
        "skip first": torch.cat([skip, m.up(x)], 1),
        "skip last, of a keyword": torch.cat((m.up(x), skip), dim=1),
        "a negative dimension": torch.concat([skip, m.other(x)], axis=-3),
        "between": torch.concatenate(tensors=[skip, torch.tanh(m.other(x)), active], dim=1),
        "what is computed": active + 1,
        "two layers": torch.cat([m.up(x), m.other(x)], 1),
        "and a function behind, which reads other pixels": torch.cat([m.up(x), skip], 1).flip(-1),
        "changed in place": torch.cat([m.up(x), skip], 1).mul_(2),
        "of a concatenation": torch.cat([torch.cat([skip, m.up(x)], 1), m.other(x)], 1),
        "first, of odd channels": torch.cat([m.odd(x), skip], 1),
        "behind odd channels": torch.cat([m.odd(x), m.other(x)], 1),
        "through a view": torch.cat([skip[:, 2:], m.other(x[:, :, :, :]), skip[:, :2]], 1),
    }


#: How many layers write slices in what `_taken` gives.
TAKEN = 14


@pytest.mark.slow
def test_taken() -> None:
    plain, model, x, skip = models(_taken)
    with fusing() as fusion:
        found, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), x, skip)
        within(found, plain, x, skip)
    assert fusion.chains.count(WRITTEN) == code.count(f"{into_operator.NAME}.default(") == TAKEN
    assert fusion.reasons == []


class Sized(nn.Module):
    """`Up` beside a tensor of twice its input's size."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.up = up

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(N, 6, H, W)."""
        return self.up(x, F.interpolate(torch.cat([x, x[:, :2]], 1), scale_factor=2))


@pytest.mark.slow
def test_of_symbolic_sizes() -> None:
    """What starts at a multiple of 32 bytes whatever the sizes are is written in place; none is behind 3 channels."""
    plain = Sized(Up(_taken)).eval()
    model, x, another = swapped(plain), torch.randn(2, 6, 4, 8), torch.randn(3, 6, 5, 7)
    with fusing() as fusion:
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for each in (x, another):
            expected = copy.deepcopy(plain).double()(each.double())
            for name, found in compiled(each).items():
                torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-5)
    assert fusion.chains.count(WRITTEN) == TAKEN - 1  # and nothing was compiled anew
    assert fusion.reasons == ["cat(): a layer's slice starts at no multiple of 32 bytes that is known"]


def _left(m: Any, x: Tensor, skip: Tensor) -> dict[str, Tensor]:
    y, z, one = m.other(x), m.other(x), x[:, :, :1, :1]
    return {
        "rows": torch.cat([m.other(x), skip], 2),
        "twice": torch.cat([y, skip, y], 1),
        "read beside": torch.cat([z, skip], 1) + z.mean(),
        "another type": torch.cat([skip.double(), m.other(x)], 1),
        "a residual": torch.cat([skip, m.other(x) + skip], 1),
        "behind 48 bytes": torch.cat([skip[:, :3, :2, :2].exp(), m.other(one)], 1),
    }


LEFT = [
    "a residual would have to lie as the slice does",
    "a layer's output is torch.float32, and the result torch.float64",
    "a layer's slice starts at no multiple of 32 bytes that is known",
    "it does not join a layer's output once along channels",
    "it does not join a layer's output once along channels",
    "2 operations read a layer's output",
]


@pytest.mark.slow
def test_what_is_left_to_inductor() -> None:
    plain, model, x, skip = models(_left)
    with fusing() as fusion:
        within(torch.compile(model, fullgraph=True)(x, skip), plain, x, skip)
    assert sorted(fusion.reasons) == sorted(f"cat(): {each}" for each in LEFT)
    assert WRITTEN not in fusion.chains


def _only_layers(m: Any, x: Tensor, skip: Tensor) -> dict[str, Tensor]:
    return {"y": torch.cat([m.other(x), m.up(x)], 1)}


@pytest.mark.slow
def test_channels_last() -> None:
    """Slices of pixels; the result of parts that lie in two ways lies as Inductor decides."""
    x, skip = torch.randn(2, 6, 4, 8), torch.randn(2, 8, 8, 16)
    pixels = [each.to(memory_format=torch.channels_last) for each in (x, skip)]
    with fusing() as fusion:
        plain = Up(_only_layers).eval()
        within(torch.compile(swapped(plain), fullgraph=True)(pixels[0], skip), plain, pixels[0], skip)
        assert fusion.chains.count(WRITTEN) == 2
        plain = Up(_only_skip).eval()
        for given, count in ((pixels, 3), ((x, pixels[1]), 3), ((pixels[0], skip), 4)):
            torch._dynamo.reset()
            found = torch.compile(swapped(plain), fullgraph=True)(*given)
            torch.testing.assert_close(found, plain(*given))
            assert fusion.chains.count(WRITTEN) == count
    assert fusion.reasons == ["cat(): the result does not lie as a layer's output does"]


def test_of_layers_alone() -> None:
    """In any mode without derivatives."""
    plain, model, x, skip = models(_only_layers)
    for mode in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        with mode(), config.patch(fx_graph_cache=False), polyphase.enable_compile_fusion() as fusion:
            within(torch.compile(model, fullgraph=True)(x, skip), plain, x, skip)
        assert fusion.chains.count(WRITTEN) == 2
    torch._dynamo.reset()
    with torch.no_grad(), config.patch(fx_graph_cache=False), torch.autocast("cpu", torch.bfloat16):
        with polyphase.enable_compile_fusion() as fusion:
            found = torch.compile(model, fullgraph=True)(x, skip)["y"]
        expected = model(x, skip)["y"]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert fusion.chains.count(WRITTEN) == 2


def _of_training(m: Any, x: Tensor, skip: Tensor) -> dict[str, Tensor]:
    return {"y": torch.cat([skip, m.other(x)], 1), "z": torch.cat([torch.sigmoid(skip), m.odd(x)], 1)}


@pytest.mark.slow
def test_training() -> None:
    """Nothing is fused there but concatenations, which have Inductor's derivatives."""
    plain = Up(_of_training).train()
    model, x, skip = swapped(plain), torch.randn(2, 6, 4, 8), torch.randn(2, 8, 8, 16)
    gradients = []
    with config.patch(fx_graph_cache=False), polyphase.enable_compile_fusion() as fusion:
        for each in (plain, torch.compile(model, fullgraph=True)):
            given = [x.clone().requires_grad_(), skip.clone().requires_grad_()]
            sum(found.square().sum() for found in each(*given).values()).backward()
            gradients.append([*(tensor.grad for tensor in given)])
        gradients[0] += [each.grad for each in plain.parameters()]
        gradients[1] += [each.grad for each in model.parameters()]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    assert fusion.chains == [WRITTEN, WRITTEN]


def _only_skip(m: Any, x: Tensor, skip: Tensor) -> dict[str, Tensor]:
    return {"y": torch.cat([skip, m.other(x)], 1)}


def _beside_silu(m: Any, x: Tensor, skip: Tensor) -> dict[str, Tensor]:
    return {"y": torch.cat([F.silu(skip), m.up(x)], 1)}


@pytest.mark.slow
def test_what_is_computed_beside_writes_its_own_slice() -> None:
    plain, model, x, skip = models(_beside_silu)
    with fusing() as fusion:
        found, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), x, skip)
        within(found, plain, x, skip)
        assert len(re.findall(r"= empty_strided_cpu\(", code)) == 1  # the result
        assert fusion.chains.count(WRITTEN) == 1
        torch._dynamo.reset()
        with config.patch(force_pointwise_cat=True):
            within(torch.compile(model, fullgraph=True)(x, skip), plain, x, skip)
    assert fusion.chains.count(WRITTEN) == 1
    assert fusion.reasons == ["cat(): Inductor computes it with what reads it"]


def test_other_backends_and_the_cache() -> None:
    """Nothing is changed elsewhere, and what Inductor keeps on disk says by what it was made."""
    plain, model, x, skip = models(_only_layers)
    with torch.no_grad(), polyphase.enable_compile_fusion() as fusion:
        within(torch.compile(model, fullgraph=True, backend="aot_eager")(x, skip), plain, x, skip)
    assert fusion.chains == fusion.reasons == []
    with torch.no_grad():
        torch._dynamo.reset()
        _, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), x, skip)
    assert into_operator.NAME not in code


def test_on_a_gpu_kernels_write_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they cannot, there is a copy."""
    asked: list[tuple[Any, ...]] = []

    def call_for(out: Tensor, tensors: Any, text: str, layer: Any) -> Any:
        asked.append((text, layer))

        def call(input: Tensor, weight: Tensor, bias: Tensor | None, operands: Any, out: Tensor) -> None:
            out.fill_(3)

        return call

    monkeypatch.setattr(into, "call_for", call_for)
    x, w, slope = torch.randn(2, 6, 4, 8), torch.randn(6, 8, 2, 2), torch.rand(8)
    text = "prelu::slope channel :0"
    arguments = (x, w, None, [slope], text, [2, 2], [0, 0], [0, 0], [1, 1], 1)
    result = torch.zeros(2, 16, 8, 16)
    into_operator._on_cuda(*arguments, out=result[:, 8:])
    assert asked == [(text, ((2, 2), (2, 2), (0, 0), (0, 0), (1, 1), 1))]
    assert bool((result[:, 8:] == 3).all())
    shifted = torch.zeros(2 * 16 * 8 * 16 + 1)[1:].view_as(result)  # at no multiple of 32 bytes
    in_place = (*arguments[:3], [result[0, :8, 0, 0]], *arguments[4:])  # a tensor that is read
    for given, out in ((arguments, shifted[:, 8:]), (in_place, result[:, :8])):
        expected = torch.ops.polyphase.conv_transpose_epilogue(*given)
        into_operator._on_cuda(*given, out=out)
        assert torch.equal(out, expected)
    empty = (x[:0], *arguments[1:])
    into_operator._on_cuda(*empty, out=result[:0, 8:])
    assert len(asked) == 1
    into_operator._portably(*arguments, out=result[:, 8:])
    assert torch.equal(result[:, 8:], torch.ops.polyphase.conv_transpose_epilogue(*arguments))
