"""Concatenations behind layers, taken in by ``accelerate(model, fuse=True)``: layers write slices of the result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase
from polyphase import chain
from polyphase.torch_op import into
from test_fused_prologue import Snake1d


class UNet(nn.Module):
    """Layers, and a concatenation with what else there is."""

    def __init__(self, join: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Sequential(nn.ConvTranspose2d(6, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.other = nn.ConvTranspose2d(6, 3, 2, 2)
        self.last = nn.Conv2d(7, 2, 1)
        self.join = join

    def forward(self, x: Tensor, skip: Tensor) -> Any:
        """(N, 6, H, W) and (N, 3, 2H, 2W) to what ``join`` gives."""
        return self.join(self, x, skip)


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a fused layer from now on writes to an ``out``."""
    written: list[bool] = []
    original = chain.Chain._run

    def counting(self: Any, tensors: Any, padding: Any, steps: Any, before: Any, out: Tensor | None = None) -> Tensor:
        written.append(out is not None)
        return original(self, tensors, padding, steps, before, out)

    monkeypatch.setattr(chain.Chain, "_run", counting)
    return written


JOINS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], tuple[str, ...], tuple[str, ...]]] = {
    "skip first": (lambda m, x, skip: m.last(torch.cat([skip, m.up(x)], 1)), ("cat()",), ()),
    "skip last": (lambda m, x, skip: torch.cat((m.up(x), skip), dim=1), ("cat()",), ()),
    "a negative dimension": (lambda m, x, skip: torch.concat([skip, m.up(x)], axis=-3), ("cat()",), ()),
    "of keywords": (lambda m, x, skip: torch.concatenate(tensors=[skip, m.up(x)], dim=1), ("cat()",), ()),
    "a function before": (lambda m, x, skip: torch.cat([F.silu(m.up(x)), skip], 1), ("silu()", "cat()"), ()),
    "two layers": (lambda m, x, skip: torch.cat([m.up(x), skip, m.other(x)], 1), ("cat()",), ("cat()",)),
    "two layers, one not": (
        lambda m, x, skip: torch.cat([m.up(x), torch.cumsum(m.other(x), 1)], 1), ("cat()",), ()
    ),
    "a layer without anything": (lambda m, x, skip: torch.cat([m.other(x), skip], 1), (), ("cat()",)),
    "and a function behind": (lambda m, x, skip: torch.cat([m.up(x), skip], 1).relu(), ("cat()",), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINS)
def test_joined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    join, of_up, of_other = JOINS[name]
    plain = UNet(join).eval()
    model = copy.deepcopy(plain)
    blocks = {each.name: each for each in polyphase.accelerate(model, fuse=True).blocks}
    if of_up:
        assert blocks["up.0"].fused == ("up.1", "up.2", *of_up)
        assert blocks["up.0"].reason == "cat() joins its output with other tensors"
    if of_other:
        assert blocks["other"].fused == of_other
    written = calls_of(monkeypatch)
    x, skip = torch.randn(2, 6, 4, 5), torch.randn(2, 3, 8, 10)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expected = plain(x, skip)
            torch.testing.assert_close(model(x, skip), expected)
            assert sum(written) == len(of_up[-1:]) + len(of_other)
            assert type(model(x, skip)) is Tensor
            written.clear()
    # with derivatives, and compiled
    gradients = []
    for each in (plain, model):
        each.zero_grad()
        each(x, skip).square().sum().backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    assert not any(written)
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x, skip), expected)


def test_what_is_not_joined_so_is_what_pytorch_gives() -> None:
    plain = UNet(lambda m, x, skip: torch.cat([skip, m.up(x)], 1)).eval()
    model = copy.deepcopy(plain)
    polyphase.accelerate(model, fuse=True)
    x, skip = torch.randn(2, 6, 4, 5), torch.randn(2, 3, 8, 10)
    last = torch.channels_last
    calls: list[Callable[[Any], Tensor]] = [
        lambda m: m(x.to(memory_format=last), skip.to(memory_format=last)),
        lambda m: m(x, skip.double()),
        lambda m: m(x, skip.expand(2, 3, 8, 10)[:, :0]),
        lambda m: m(x[:1], skip[:1].to(memory_format=last)),
        lambda m: m(x[:, :, :1, :1], skip[:, :, :2, :2]),  # behind 12 elements, where no kernel writes vectors
    ]
    with torch.no_grad():
        for call in calls:
            found, expected = call(model), call(plain)
            assert found.dtype == expected.dtype
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found, expected)
        for each in (plain, model):
            with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
                each(x, skip[:, :, 1:])
        with torch.autocast("cpu", torch.bfloat16):
            for other in (skip, skip.bfloat16()):
                found, expected = model(x, other), plain(x, other)
                assert found.dtype == expected.dtype
                torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    recorded = skip.clone().requires_grad_()
    model(x, recorded).sum().backward()
    assert torch.equal(recorded.grad, torch.ones_like(skip))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["skip first", "skip last", "two layers"])
def test_joined_in_channels_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels of 16 and 24 channels are aligned; a contiguous skip makes the result contiguous, as PyTorch's is."""
    join, of_up, of_other = JOINS[name]
    plain = UNet(join).eval()
    plain.up[0], plain.up[1], plain.other = (
        nn.ConvTranspose2d(6, 8, 2, 2),
        nn.BatchNorm2d(8),
        nn.ConvTranspose2d(6, 8, 2, 2),
    )
    plain.last = nn.Conv2d(16, 2, 1)
    model = copy.deepcopy(plain.eval())
    polyphase.accelerate(model, fuse=True)
    written = calls_of(monkeypatch)
    last = torch.channels_last
    x, skip = torch.randn(2, 6, 4, 5).to(memory_format=last), torch.randn(2, 8, 8, 10).to(memory_format=last)
    with torch.no_grad():
        expected = plain(x, skip)
        found = model(x, skip)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        assert sum(written) == len(of_up[-1:]) + len(of_other)
        contiguous = skip.contiguous()
        assert model(x, contiguous).stride() == plain(x, contiguous).stride()


REASONS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], str]] = {
    "rows": (lambda m, x, skip: torch.cat([m.other(x), skip], 2), "cat() does not join it once along channels"),
    "twice": (lambda m, x, skip: (lambda y: torch.cat([y, skip, y], 1))(m.other(x)), "cat() does not join it once"),
    "read beside": (
        lambda m, x, skip: (lambda y: torch.cat([y, skip], 1) + y.mean())(m.other(x)),
        "2 operations read its output",
    ),
}


def _changed(m: Any, x: Tensor, skip: Tensor) -> Tensor:
    y = m.other(x)
    x.relu_()
    return torch.cat([y, skip], 1)


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name: str) -> None:
    join, reason = REASONS[name]
    blocks = {each.name: each for each in polyphase.accelerate(UNet(join), fuse=True).blocks}
    assert reason in blocks["other"].reason


def test_what_changes_before_it_is_joined() -> None:
    blocks = {each.name: each for each in polyphase.accelerate(UNet(_changed), fuse=True).blocks}
    assert blocks["other"].reason == "relu_ changes a tensor in place before cat() is called"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 3, 5, 7), (1, 5, 4, 4)])
def test_a_slice_is_copied(dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(into, "_COPIED_AT_ONCE", 0)
    part = torch.randn(shape).to(dtype)
    for before in (1, 4):
        result = torch.full((shape[0], before + shape[1] + 2, *shape[2:]), 7.0, dtype=dtype)
        slices = result.split([before, shape[1], 2], 1)
        into.copy_to_slice(part, slices[1])
        assert torch.equal(slices[1], part)
        assert all((each == 7).all() for each in (slices[0], slices[2]))
        into.copy_to_slice(part.transpose(-1, -2).contiguous().transpose(-1, -2), slices[1].zero_())
        assert torch.equal(slices[1], part)


def test_little_is_joined_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a small output is concatenated by PyTorch, with its modules still fused (`chain.is_little`)."""
    plain = UNet(JOINS["skip first"][0]).eval()
    model = copy.deepcopy(plain)
    polyphase.accelerate(model, fuse=True)
    monkeypatch.setattr(chain, "is_little", lambda input, layer: True)
    written, x, skip = calls_of(monkeypatch), torch.randn(2, 6, 4, 4), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x, skip), plain(x, skip))
    assert written == [False]


@pytest.mark.parametrize("snakes", [False, True])
def test_little_is_computed_by_pytorch(snakes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are functions and slices behind a small output, and activations before it, but snakes, of several kernels."""

    class Codec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = Snake1d(6) if snakes else nn.ELU()
            self.up, self.norm = nn.ConvTranspose1d(6, 4, 4, 2), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.norm(self.up(self.act(x)))[..., 1:-1])

    model = Codec().eval()
    plain, x, given = copy.deepcopy(model), torch.randn(2, 6, 5), []
    block = polyphase.accelerate(model, fuse=True).blocks[0]
    assert (block.before, block.fused) == ("act", ("norm", "getitem()", "silu()"))
    original = chain.Chain._run
    monkeypatch.setattr(chain.Chain, "_run", lambda *each: (given.append(each[3:5]), original(*each))[1])
    for little in (True, False):
        monkeypatch.setattr(chain, "is_little", lambda input, layer, little=little: little)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
        behind, before = [[step.kind for step in steps] for steps in given.pop()]
        assert behind == (["normalize"] if little else ["crop", "normalize", "silu"])
        assert before == ([] if little and not snakes else ["snake" if snakes else "elu"])


def test_what_is_little() -> None:
    """By the elements of an output on a GPU; a layer without channels is left to its own error."""
    layer = nn.ConvTranspose2d(4, 8, 2, 2)
    small, large = chain._LITTLE // 32 - 1, chain._LITTLE // 32
    for elements, on_gpu, little in ((small, True, True), (large, True, False), (small, False, False)):
        input: Any = SimpleNamespace(numel=lambda elements=elements: 4 * elements, is_cuda=on_gpu)
        assert chain.is_little(input, layer) is little
    assert not chain.is_little(input, SimpleNamespace(in_channels=0))
