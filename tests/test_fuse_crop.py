"""Slices of a layer's output, ``y[..., left:-right]``: the layer computes what is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase
from polyphase import fused, fused_calls

PLAIN = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
FUSED = {1: fused.conv_transpose1d, 2: fused.conv_transpose2d, 3: fused.conv_transpose3d}
ENDS = {
    "the right": (1, ((0, 4),)),
    "both alike": (1, ((4, 4),)),
    "more at the left": (1, ((7, 2),)),
    "nothing": (1, ((0, 0),)),
    "an image": (2, ((0, 3), (2, 1))),
    "a volume": (3, ((1, 0), (0, 0), (1, 2))),
}


def operands(dims: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Input, weight and bias."""
    torch.manual_seed(0)
    shapes = (2, 4, *(5, 4, 3)[:dims]), (4, 3, *(6, 4, 3)[:dims]), (6,)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def left(y: Tensor, ends: tuple[tuple[int, int], ...]) -> Tensor:
    """PyTorch's slice."""
    return y[(..., *(slice(left, size - right) for (left, right), size in zip(ends, y.shape[-len(ends) :])))]


@pytest.mark.parametrize("name", ENDS)
def test_values_and_gradients(name: str) -> None:
    dims, ends = ENDS[name]
    leaves = [each.requires_grad_() for each in operands(dims)]
    scale = torch.rand(6, dtype=torch.float64, requires_grad=True)
    skip = torch.randn_like(left(PLAIN[dims](*leaves, 2, 1, 1, 2), ends)).requires_grad_()
    leaves += [scale, skip]

    def ours(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, skip: Tensor, **more: Any) -> Tensor:
        epilogue = [fused.crop(*ends), fused.scale_shift(scale), fused.add(skip), "tanh"]
        return FUSED[dims](x, w, b, 2, 1, 1, 2, epilogue=epilogue, prologue=["relu"], **more)

    def theirs(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, skip: Tensor) -> Tensor:
        y = left(PLAIN[dims](x.relu(), w, b, 2, 1, 1, 2), ends)
        return torch.tanh(y * scale.reshape(-1, *[1] * dims) + skip)

    expected = theirs(*leaves)
    torch.testing.assert_close(ours(*leaves), expected)
    gradients = zip(*(torch.autograd.grad(each(*leaves).square().sum(), leaves) for each in (ours, theirs)))
    for one, other in gradients:
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(*leaves), expected)
        out = torch.empty_like(expected)
        assert ours(*leaves, out=out) is out
        torch.testing.assert_close(out, expected)
        one = ours(leaves[0][0], *leaves[1:4], leaves[4][0])
        torch.testing.assert_close(one, expected[0])
    batched = torch.vmap(lambda x: ours(x, *leaves[1:4], leaves[4]))(leaves[0][None])
    torch.testing.assert_close(batched[0], expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager", fullgraph=True)(*leaves), expected)


def test_a_crop_alone_of_half_types_and_channels_last() -> None:
    x, w, b = (each.bfloat16() for each in operands(2))
    x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        found = fused.conv_transpose2d(x, w, b, 2, 1, 1, 2, epilogue=[fused.crop((1, 2), (0, 3))])
        expected = F.conv_transpose2d(x.double(), w.double(), b.double(), 2, 1, 1, 2)[:, :, 1:-2, :-3]
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, expected.bfloat16())


def test_errors() -> None:
    x, w, b = operands(1)
    for wrong, words in (
        ([fused.crop((1, 2), (1, 2))], "1 pairs of integers"),
        ([fused.crop((-1, 2))], "at least 0"),
        ([fused.crop((0, 1.0))], "pairs of integers"),  # type: ignore[arg-type]
        (["relu", fused.crop((0, 1))], "before all other"),
    ):
        with pytest.raises(ValueError, match=words):
            fused.conv_transpose1d(x, w, b, 2, 1, 1, 2, epilogue=wrong)
    with pytest.raises(RuntimeError, match="every size must be at least 1"):
        fused.conv_transpose1d(x, w, b, 2, 1, 1, 2, epilogue=[fused.crop((9, 9))])


class Up(nn.Module):
    """A layer of one or two dimensions, and what ``call`` does with it."""

    def __init__(self, dims: int, call: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = getattr(nn, f"ConvTranspose{dims}d")(4, 6, 4, 2)
        self.norm, self.act = nn.InstanceNorm1d(6), nn.PReLU(6)
        self.right = 2
        self.call = call

    def forward(self, x: Tensor, skip: Tensor) -> Any:
        """(N, 4, L) and (N, 6, 2·L) to what ``call`` gives."""
        return self.call(self, x, skip)


def _sized(m: Any, x: Tensor, skip: Tensor) -> Any:
    y = m.up(x)
    return y[..., : y.shape[-1] - m.right].contiguous()


MODELS: dict[str, tuple[int, Callable[[Any, Tensor, Tensor], Any], tuple[str, ...]]] = {
    "causal": (1, lambda m, x, skip: m.up(x)[..., :-2], ("getitem()",)),
    "of the size": (1, _sized, ("getitem()",)),
    "all dimensions": (1, lambda m, x, skip: m.up(x)[:, :, 1:-1], ("getitem()",)),
    "twice": (1, lambda m, x, skip: m.up(x)[..., 1:][..., :-1], ("getitem()", "getitem()")),
    "and an activation": (1, lambda m, x, skip: m.act(m.up(x)[..., :-2]), ("getitem()", "act")),
    "behind an activation": (1, lambda m, x, skip: m.act(m.up(x))[..., :-2].tanh(), ("act", "getitem()", "tanh()")),
    "and a residual": (1, lambda m, x, skip: F.relu(m.up(x)[..., 1:-1] + skip), ("getitem()", "add()", "relu()")),
    "and a gate": (
        1, lambda m, x, skip: (lambda y: y * torch.sigmoid(y))(m.up(x)[..., 2:].contiguous()),
        ("getitem()", "contiguous()", "sigmoid()", "mul()"),
    ),
    "and a norm": (1, lambda m, x, skip: m.norm(m.up(x)[..., :-2]), ("getitem()", "norm")),
    "and a concatenation": (1, lambda m, x, skip: torch.cat([m.up(x)[..., :-2], skip], 1), ("getitem()", "cat()")),
    "an image": (2, lambda m, x, skip: m.up(x)[:, :, 1:-1, : 2 * x.shape[-1]].relu(), ("getitem()", "relu()")),
    "channels": (1, lambda m, x, skip: m.up(x)[:, :3], ()),
    "a step": (1, lambda m, x, skip: m.up(x)[..., ::2], ()),
    "a pixel": (1, lambda m, x, skip: m.up(x)[..., 3], ()),
    "a new dimension": (1, lambda m, x, skip: m.up(x)[..., None, :-2], ()),
    "both": (1, lambda m, x, skip: (lambda y: (y[..., :-2], y.mean()))(m.up(x)), ()),
    "behind a sum": (1, lambda m, x, skip: (m.up(x) + F.pad(skip, (1, 1)))[..., :-2], ("add()",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dims, call, expected = MODELS[name]
    plain = Up(dims, call).double().eval()
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == expected
    x, skip = torch.randn(2, 4, *[5] * dims).double(), torch.randn(2, 6, 10).double()
    x = x.contiguous(memory_format=torch.channels_last) if dims == 2 else x
    sizes = []
    original = fused_calls._run
    monkeypatch.setattr(fused_calls, "_run", lambda *given: (sizes.append(given[0].whole), original(*given))[1])
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            for one, other in zip(_flat(model(x, skip)), _flat(plain(x, skip))):
                torch.testing.assert_close(one, other)
    if "getitem()" in expected and "cat()" not in expected:
        assert sum(whole is not None for whole in sizes) == 2
    gradients = []
    for each in (plain, model):
        each.zero_grad()
        sum(one.square().sum() for one in _flat(each(x, skip))).backward()
        gradients.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


def _flat(values: Any) -> list[Tensor]:
    return list(values) if isinstance(values, tuple) else [values]


def test_an_index_that_changes() -> None:
    """The index is that of the call, and not of the trace."""
    plain = Up(1, lambda m, x, skip: m.up(x)[m.index].relu()).eval()
    plain.index = (..., slice(None, -2))
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("getitem()", "relu()")
    x = torch.randn(2, 4, 5)
    for index in (slice(2, 5),), (slice(0, 3), slice(1, 2)), (slice(0, 2), slice(0, 6), slice(1, 20)), (), (None,):
        plain.index = model.index = index if len(index) != 1 or index[0] is None else (..., *index)
        with torch.no_grad():
            torch.testing.assert_close(model(x, x), plain(x, x))
    y = model(x, x)
    y.sum().backward()


def test_a_contiguous_copy_of_channels_last() -> None:
    plain = Up(2, lambda m, x, skip: m.up(x)[..., :-1].contiguous().relu()).eval()
    model = copy.deepcopy(plain)
    polyphase.accelerate(model, fuse=True)
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        found, expected = model(x, x), plain(x, x)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)
