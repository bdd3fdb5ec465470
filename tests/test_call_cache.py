"""Calls that were made before: what tells them from others, and who is not to go past the dispatcher."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import polyphase
from polyphase import functional
from polyphase.problem.layouts import ALIGNMENT
from polyphase.torch_op import call_cache, operators, portable
from polyphase.torch_op.call_cache import CallCache


def like(tensor: Tensor, **changes: Any) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=changes.get("dtype"), device=changes.get("device"))


X, W = torch.ones(1, 2, 4, 4), torch.ones(2, 2, 3, 3)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (like(X), True),
        (like(X).to(memory_format=torch.channels_last), False),
        (torch.ones(1, 2, 4, 5), False),
        (like(X, dtype=torch.float64), False),
        (like(X, device="meta"), False),
        (like(X).requires_grad_(), False),
        (torch.nn.Parameter(like(X), requires_grad=False), False),
        (torch._neg_view(like(X)), False),
        (torch._efficientzerotensor(tuple(X.shape)), False),
        (like(X).to_sparse(), False),
        (torch.ones(4, 4, 2, 1).permute(3, 2, 0, 1), False),
    ],
    ids=[
        "equal",
        "strides",
        "sizes",
        "dtype",
        "device",
        "requires_grad",
        "type",
        "negated",
        "zeros",
        "sparse",
        "permuted",
    ],
)
def test_kinds_of_tensors_are_told_apart(other: Tensor, same: bool) -> None:
    known: CallCache[str] = CallCache()
    known.add("key", "value", X, W, lie_so=False)
    assert known.find("key", X, W) == "value"
    assert known.find("other", X, W) is None
    assert known.find("key", other, W) == ("value" if same else None)


@pytest.mark.parametrize("lie_so", [False, True])
def test_alignment_counts_where_tensors_are_to_lie_so(lie_so: bool) -> None:
    flat = torch.zeros(ALIGNMENT + X.numel() + 1)
    start = -flat.data_ptr() % ALIGNMENT // 4
    aligned, beyond = (flat[start + i : start + i + X.numel()].view(X.shape) for i in (0, 1))
    weight = torch.zeros(1024)[:36].view(W.shape)
    assert weight.data_ptr() % ALIGNMENT == 0
    known: CallCache[str] = CallCache()
    known.add("key", "value", aligned, weight, lie_so=lie_so)
    assert known.find("key", aligned, weight) == "value"
    assert known.find("key", beyond, weight) == (None if lie_so else "value")
    assert known.find("key", weight.new_zeros(2), weight) is None


def test_the_alignment_of_one_tensor_does_not_stand_for_the_other_s() -> None:
    """A forward pass looks at its input alone: kernels for aligned ones cannot read others."""
    flat = torch.zeros(2, 64)
    start = -flat.data_ptr() % ALIGNMENT // 4
    (x, x_beyond), (w, w_beyond) = (
        [row[start + i : start + i + 4].view(1, 1, 2, 2) for i in (0, 1)] for row in flat.unbind()
    )
    known: CallCache[str] = CallCache()
    known.add("key", "aligned input", x, w_beyond, lie_so=True)
    assert known.find("key", x_beyond, w) is None
    assert known.find("key", x, w) is None
    assert known.find("key", x, w_beyond) == "aligned input"


def test_memory_is_bounded_and_holds_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_MOST_KEYS", 3)
    monkeypatch.setattr(call_cache, "_MOST_OF_A_KEY", 2)
    known: CallCache[int] = CallCache()
    for number in range(20):
        known.add(number % 7, number, torch.ones(1, number + 1), W, lie_so=True)
        assert known.find(number % 7, torch.ones(1, number + 1), W) == number
        assert len(known._found) <= 3
        assert all(len(of_key) <= 2 for of_key in known._found.values())
    tensor = torch.ones(3, 3)
    known.add("key", 1, tensor, W, lie_so=True)
    dead = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert dead() is None
    known.clear()
    assert not known._found


# Past the dispatcher


class Direct:
    """Stands for the kernels: what `find_call` finds on a GPU, for CPU tensors. It counts the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr(operators, "find_call", self.find)
        monkeypatch.setattr(functional, "_checked_calls", CallCache())
        monkeypatch.setattr(operators, "_operator_calls", CallCache())
        monkeypatch.setattr(operators, "_gradients_calls", CallCache())
        monkeypatch.setattr(operators, "as_one", lambda first, second: lambda x, w, g: (first(g, w), second(x, g)))

    def find(self, operator: object, first: Tensor, second: Tensor, *arguments: Any) -> Callable[..., Tensor] | None:
        tensors = [each for each in (first, second, arguments[0]) if isinstance(each, Tensor)]
        if not all(map(operators.is_plain, tensors)):
            return None

        def call(first: Tensor, second: Tensor, *bias: Tensor | None) -> Tensor:
            self.calls += 1
            if operator is operators.conv_transpose:
                return portable.forward(first, second, *(bias or (None,)), *arguments[1:])
            is_input = operator is operators.conv_transpose_input_grad
            return (portable.input_grad if is_input else portable.weight_grad)(first, second, *arguments)

        return call


class Hears(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


class HearsFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@pytest.fixture(params=[False, True], ids=["first", "again"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Direct:
    """With a memory of plain calls or without."""
    found = Direct(monkeypatch)
    if request.param:
        for x, w, b in ((X, W, None), (X, W, torch.ones(2)), (X[0], W, None)):
            polyphase.conv_transpose2d(x, w, b, stride=2)
            polyphase.conv_transpose2d(x.clone().requires_grad_(), w, b, stride=2)
        found.calls = 0
    return found


def layer(x: Tensor, w: Tensor = W, b: Tensor | None = None) -> Tensor:
    return polyphase.conv_transpose2d(x, w, b, stride=2)


def test_plain_calls_go_past_the_dispatcher(direct: Direct) -> None:
    bias = torch.full((2,), 3.0)
    expected = torch.nn.functional.conv_transpose2d(X, W, stride=2)
    x = X.clone().requires_grad_()
    for got, wanted in (
        (layer(X), expected),
        (layer(X, b=bias), expected + 3),
        (layer(X[0]), expected[0]),
        (layer(x), expected),
        (layer(x, b=bias), expected + 3),
        (layer(torch.nn.Parameter(X.clone()), torch.nn.Parameter(W.clone())), expected),
    ):
        assert torch.equal(got, wanted)
    assert direct.calls == 6
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    assert torch.equal(gradient, torch.full_like(x, 18))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X)
        primal, tangent = torch.autograd.forward_ad.unpack_dual(layer(dual))
    assert torch.equal(primal, expected)
    assert torch.equal(tangent, expected)


def test_gradients_go_past_the_dispatcher(direct: Direct) -> None:
    """Of any order."""
    rng = torch.Generator().manual_seed(1)
    x, w, b, g, v = (
        torch.randint(-3, 4, shape, generator=rng).double().requires_grad_()
        for shape in ((1, 2, 4, 4), (2, 2, 3, 3), (2,), (1, 2, 9, 9), (1, 2, 4, 4))
    )

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(function(x, w, b, 2), (x, w, b), g, create_graph=True)
        return [*first, *torch.autograd.grad(first[:2], (x, w, g), (v, w))]

    expected = gradients(torch.nn.functional.conv_transpose2d)
    for _ in range(3):
        direct.calls = 0
        for got, wanted in zip(gradients(polyphase.conv_transpose2d), expected):
            assert torch.equal(got, wanted)
        assert direct.calls == 1 + 2 + 4
    direct.calls = 0
    output = polyphase.conv_transpose2d(x, w, b, 2)
    got = torch.autograd.grad(output, (x, w), g[None].expand(2, *g.shape), is_grads_batched=True)
    for batch, wanted in zip(got, expected):
        assert torch.equal(batch[0], wanted)
        assert torch.equal(batch[1], wanted)
    assert direct.calls == 1, "batched gradients are no plain tensors"


def test_both_gradients_are_one_call(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both are wanted and nothing is recorded; it is prepared again where flags or tensors are others."""
    joined: list[Callable[..., Any]] = []
    as_one = operators.as_one

    def counted(first: Any, second: Any) -> Any:
        joined.append(first)
        return as_one(first, second)

    monkeypatch.setattr(operators, "as_one", counted)
    monkeypatch.setattr(operators, "_runtime", lambda: SimpleNamespace(forget_prepared_calls=lambda: None))
    x, w, b = (each.clone().requires_grad_() for each in (X, W, torch.ones(2)))
    output, reference = layer(x, w, b), torch.nn.functional.conv_transpose2d(x, w, b, 2)
    gradient = torch.arange(162.0).view(1, 2, 9, 9)
    channels_last = gradient.contiguous(memory_format=torch.channels_last)

    def compare(leaves: Sequence[Tensor], given: Tensor = gradient, **options: bool) -> None:
        got, wanted = (
            torch.autograd.grad(each, leaves, given, retain_graph=True, **options) for each in (output, reference)
        )
        assert all(map(torch.equal, got, wanted))

    for given, times in ((gradient, 1), (gradient, 1), (channels_last, 2), (gradient.expand(1, 2, 9, 9), 2)):
        compare((x, w, b), given)
        assert len(joined) == times
    compare((x, w))
    compare((b,))
    compare((x, b))
    compare((x, w, b), create_graph=True)
    assert len(joined) == 2
    monkeypatch.setattr(operators, "tf32_allowed", lambda: "another answer")
    compare((x, w, b))
    assert len(joined) == 3
    polyphase.functional.forget_calls()
    compare((x, w, b))
    assert len(joined) == 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compare((x, w, b))
    assert any(event.key == "polyphase::conv_transpose_weight_grad" for event in profile.key_averages())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
        output = layer(x, w, b)
    compare((x, w, b))
    assert len(joined) == 5, "what hooks have made needs no gradient"
    frozen = layer(x, w.detach(), b)
    torch.autograd.grad(frozen, (x, b), gradient)
    assert len(joined) == 5


def test_who_listens_hears_of_every_call(direct: Direct) -> None:
    expected = torch.nn.functional.conv_transpose2d(X, W, stride=2)
    with Hears() as mode:
        assert torch.equal(layer(X), expected)
    assert operators.conv_transpose in mode.heard
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(X)
    assert any(event.key == "polyphase::conv_transpose" for event in profile.key_averages())
    assert torch.equal(torch._vmap_internals._vmap(layer)(X[None]), expected[None])
    assert not direct.calls
    # Transforms end in calls of plain tensors.
    assert torch.equal(torch.vmap(layer)(X[None]), expected[None])
    assert torch.equal(torch.func.jvp(layer, (X,), (X,))[1], expected)
    assert direct.calls == 1 + 2


def test_what_is_not_plain_goes_by_the_dispatcher(direct: Direct) -> None:
    expected = torch.nn.functional.conv_transpose2d(X, W, stride=2)
    assert torch.equal(layer(torch._neg_view(X)), -expected)
    assert torch.equal(layer(X, torch._neg_view(W)), -expected)
    assert torch.equal(layer(X, b=torch._neg_view(torch.ones(2))), expected - 1)
    assert not layer(torch._efficientzerotensor(tuple(X.shape))).any()
    assert type(layer(X.as_subclass(Subclass))) is Subclass
    assert not direct.calls
    escaped: list[Tensor] = []
    torch.func.grad(lambda x: (escaped.append(x), x.sum())[1])(X)
    assert torch.equal(layer(escaped[0]), expected)
    direct.calls = 0
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(X).dtype == torch.bfloat16
    assert direct.calls == 1  # what autocast has cast is plain


def test_a_function_mode_sees_the_function(direct: Direct) -> None:
    with HearsFunctions():
        layer(X)
