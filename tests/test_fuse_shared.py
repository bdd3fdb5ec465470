"""One activation module that a model calls several times, fused at each of its calls."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyphase
from polyphase import fused
from polyphase.chain import Chain

X = torch.randn(2, 3, 4, 5, dtype=torch.float64)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The kinds of what each call of a layer computes behind it."""
    found: list[tuple[str, ...]] = []

    original = Chain._run

    def noting(self: Chain, tensors: Any, padding: Any, steps: list[fused.Step | None], *more: Any) -> Tensor:
        found.append(tuple(step.kind for step in steps if step is not None))
        return original(self, tensors, padding, steps, *more)

    monkeypatch.setattr(Chain, "_run", noting)
    return found


class Twice(nn.Module):
    """Two layers, and an activation behind each and behind a product."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act
        self.up = nn.ConvTranspose2d(3, 4, 2, 2)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.ConvTranspose2d(4, 2, 3, 2)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W)."""
        y = self.act(self.act(self.norm(self.up(x))) * self.scale)
        return self.act(self.last(y))


def models(act: nn.Module) -> tuple[Any, Any, Any]:
    """A model, what it was before, and its blocks."""
    torch.manual_seed(0)
    model = Twice(act).double().eval()
    plain = copy.deepcopy(model)
    return model, plain, polyphase.accelerate(model, fuse=True).blocks


ACTIVATIONS = {
    "relu": nn.ReLU(), "leaky_relu": nn.LeakyReLU(0.2), "gelu": nn.GELU(), "silu": nn.SiLU(), "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(), "elu": nn.ELU(), "clamp": nn.Hardtanh(), "hardswish": nn.Hardswish(),
    "softplus": nn.Softplus(), "": nn.Dropout(), "in place": nn.ReLU(inplace=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_shared_activations(kind: str, steps: list[tuple[str, ...]]) -> None:
    model, plain, blocks = models(copy.deepcopy(ACTIVATIONS[kind]))
    assert [block.fused for block in blocks] == [("norm", "act", "mul()", "act"), ("act",)]
    own = (kind,) if kind not in ("", "in place") else ("relu",) * bool(kind)
    x = X.clone()
    x[0, 0, 0, 0] = torch.nan
    with torch.no_grad():
        for given in (X, x):
            torch.testing.assert_close(model(given), plain(given), equal_nan=True)
        assert steps[:2] == [("normalize", *own, "scale_shift", *own), own]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            del steps[:]
            torch.testing.assert_close(other(X), plain(X))
            assert steps[1:] == [own]
    # With derivatives, and in training, it computes for itself.
    for mode in (False, True):
        model.train(mode), plain.train(mode)
        if kind == "" and mode:
            continue  # random
        torch.testing.assert_close(model(X), plain(X))
        model(X).sum().backward(), plain(X).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad, other.grad)
    model.eval(), plain.eval()
    polyphase.restore(model)
    assert type(model.act) is type(plain.act)
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))


def test_what_changes_later(steps: list[tuple[str, ...]]) -> None:
    """A hook, a replacement or a restored part has the layers compute alone."""
    model, plain, _ = models(nn.ReLU())
    seen: list[Tensor] = []
    hook = model.act.register_forward_hook(lambda module, given, result: seen.append(result))
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
        assert [type(each) for each in seen] == [Tensor] * 3
        hook.remove()
        del steps[:]
        torch.testing.assert_close(model(X), plain(X))
        assert steps[1] == ("relu",)
        assert torch.equal(model.act(-X), plain.act(-X))  # by itself
        kept, model.act, plain.act = model.act, nn.Tanh(), nn.Tanh()
        torch.testing.assert_close(model(X), plain(X))
        model.act, plain.act = kept, nn.ReLU()
        del steps[:]
        polyphase.restore(model.act)
        torch.testing.assert_close(model(X), plain(X))
        assert ("relu",) not in steps


def test_by_another_name_and_another_call(steps: list[tuple[str, ...]]) -> None:
    """A model that has the module twice; and a later call of `accelerate`, which finds it taken already."""
    act = nn.ReLU()
    first, second = (nn.Sequential(nn.ConvTranspose2d(3, 3, 2, 2), act, nn.Conv2d(3, 3, 1), act) for _ in range(2))
    for model in (first, second):
        plain = copy.deepcopy(model.double().eval())
        assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("1",)
        with torch.no_grad():
            torch.testing.assert_close(model(X), plain(X))
            torch.testing.assert_close(model(X[0]), plain(X[0]))  # (C, H, W)
    assert steps == [("relu",), ()] * 2


def test_parameters_are_not_shared() -> None:
    assert models(nn.PReLU())[2][0].reason == "act is called more than once"
    assert models(nn.PReLU())[2][0].fused == ("norm",)
