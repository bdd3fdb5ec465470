"""Models that `torch.fx` cannot trace as a whole: modules without layers that it cannot trace are nodes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase


class Branching(nn.Module):
    """A module that asks for values of sizes, as residual units of codecs do."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        pad = (x.shape[-1] - y.shape[-1]) // 2
        if pad > 0:
            x = x[..., pad:-pad]
        if self.in_place:
            x.mul_(2)
        return x + y


class Decoder(nn.Module):
    """Layers between such modules, in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Branching()
        self.acts = nn.ModuleList([nn.ELU(), nn.LeakyReLU(0.3)])
        self.ups = nn.ModuleList([nn.ConvTranspose1d(4, 4, 4, 2, 1), nn.ConvTranspose1d(4, 4, 3, 1, 1)])
        self.units = nn.ModuleList([Branching(), Branching()])
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for act, up, unit in zip(self.acts, self.ups, self.units):
            x = unit(up(act(x)))
        return self.last(x)


class Keeping(nn.Module):
    """A module that keeps what it computes, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.steps, self.seen = 0, list[Tensor]()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.other = x * torch.ones(1)
        self.seen.append(x)
        self.steps += 1
        self.count = self.count + 1
        return self.last


def test_tracing_leaves_modules_as_they_are() -> None:
    for behind in (nn.Identity(), Branching()):
        scripted = torch.jit.script(nn.Sequential(nn.Hardtanh()))
        model = nn.Sequential(Keeping(), behind, nn.ConvTranspose1d(4, 4, 4, 2, 1), nn.ReLU(), scripted).train()
        blocks = polyphase.accelerate(model, fuse=True).blocks
        assert [block.fused for block in blocks] == [("3",)]
        assert all(module.training for module in model.modules())
        kept: Any = copy.deepcopy(model)[0]
        assert (kept.last, kept.steps, kept.seen, float(kept.count)) == (None, 0, [], 0)
        assert not {"other", "_tensor_constant0"} & (vars(kept).keys() | vars(model).keys())


def compare(model: nn.Module, x: Tensor) -> list[str]:
    """What is fused; the results are those of the model by itself."""
    plain = copy.deepcopy(model).double().eval()
    fused = copy.deepcopy(plain)
    blocks = polyphase.accelerate(fused, fuse=True).blocks
    with torch.inference_mode():
        torch.testing.assert_close(fused(x.double().clone()), plain(x.double().clone()))
    return list(map(str, blocks))


def test_modules_that_cannot_be_traced_are_nodes() -> None:
    blocks = compare(Decoder(), torch.randn(2, 4, 30))
    assert [block.partition(";")[0] for block in blocks] == [
        "ups.0: fused with acts.0 (ELU) before it",
        "ups.1: fused with acts.1 (LeakyReLU) before it",
    ]
    assert "ends there: units.0 is a Branching, which is not fused" in blocks[0]


class Between(nn.Module):
    """What lies between a layer and a function that it would compute, and may change what the layer reads."""

    def __init__(self, between: nn.Module, own: bool) -> None:
        super().__init__()
        self.up, self.between, self.own = nn.ConvTranspose1d(4, 4, 3, 1, 1), between, own

    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        z = self.between(x if self.own else x.clone())
        return F.relu(y)[..., :4] + z[..., :4]


def test_what_may_change_in_place_ends_a_chain() -> None:
    for in_place in (False, True):
        for own in (False, True):
            (block,) = compare(Between(Branching(in_place), own), torch.randn(2, 4, 30))
            assert "between changes a tensor in place" in block


def test_a_layer_within_is_no_node() -> None:
    """A module that cannot be traced and has a layer is searched, and so are its parts."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = Branching()
            self.inner = nn.Sequential(nn.ConvTranspose1d(4, 4, 4, 2, 1), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.unit(x) if x.mean() > -100 else x)  # type: ignore[no-any-return]

    (block,) = compare(Outer(), torch.randn(2, 4, 30))
    assert block.startswith("inner.0: fused with inner.1 (ReLU)")
