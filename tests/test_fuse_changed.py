"""Models that change after ``accelerate(fuse=True)``, and parts of chains called alone: right values, or an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import polyphase
from polyphase import pending


def _pair() -> tuple[Any, Any]:
    """A model with a chain of two modules, and fused."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Conv2d(4, 2, 1))
    plain[1].running_mean.fill_(0.3)
    plain[1].weight.data.fill_(2.0)
    plain.eval().double()
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("1", "2")
    return plain, model


def _derivatives(model: Any, call: Callable[[Any, Tensor], Tensor], x: Tensor) -> list[Tensor | None]:
    """Values and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = call(model, x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(each.grad for each in model.parameters())]


def _assert_the_same(plain: Any, model: Any, call: Callable[[Any, Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for found, expected in zip(_derivatives(model, call, x), _derivatives(plain, call, x)):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(call(model, x), call(plain, x))


def _changed_in_place(m: Any, x: Tensor) -> Tensor:
    y = m[0](x)
    y[:, 0].add_(1)
    return m[1:](y)  # type: ignore[no-any-return]


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the layer alone": lambda m, x: m[0](x),
    "its mean": lambda m, x: torch.stack([m[0](x).mean(), m[0](x).square().mean()]),
    "without the norm": lambda m, x: m[3](m[2](m[0](x))),
    "without the activation": lambda m, x: m[3](m[1](m[0](x))),
    "the norm twice": lambda m, x: m[1:](m[1](m[0](x))),
    "another order": lambda m, x: m[1](m[2](m[0](x))),
    "a part of a chain": lambda m, x: m[1](m[0](x)),
    "the rest alone": lambda m, x: m[2](m[1](x[:, :1].expand(-1, 4, -1, -1))),
    "read beside": lambda m, x: (lambda y: torch.cat([m[1:](y), y[:, :2]], 1))(m[0](x)),
    "in place": lambda m, x: m[1:](m[0](x).mul_(2)),
    "in place, a view": _changed_in_place,
    "detached": lambda m, x: m[1:](m[0](x).detach()) + 0 * x.sum(),
    "a checkpoint of the layer": lambda m, x: m[1:](checkpoint(m[0], x, use_reentrant=False)),
    "a checkpoint of the rest": lambda m, x: checkpoint(m[1:], m[0](x), use_reentrant=False),
    "reentrant, of the layer": lambda m, x: m[1:](checkpoint(m[0], x, use_reentrant=True)),
    "reentrant, of the norm": lambda m, x: m[2:](checkpoint(m[1], m[0](x), use_reentrant=True)),
    "reentrant, of the rest": lambda m, x: checkpoint(m[1:], m[0](x), use_reentrant=True),
    "reentrant, of all": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "in segments": lambda m, x: checkpoint_sequential(m, 4, x, use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_the_trace_has_not_seen(name: str) -> None:
    _assert_the_same(*_pair(), CALLS[name])


CHANGES: dict[str, Callable[[Any], None]] = {
    "the layer": lambda m: m.__setitem__(0, nn.ConvTranspose2d(3, 4, 2, 2).double()),
    "the layer, by polyphase's": lambda m: m.__setitem__(0, polyphase.ConvTranspose2d(3, 4, 2, 2).double()),
    "the norm": lambda m: m.__setitem__(1, nn.Identity()),
    "the activation": lambda m: m.__setitem__(2, nn.Sigmoid()),
    "the activation is gone": lambda m: m.__delitem__(2),
    "a layer between": lambda m: m.insert(1, nn.Dropout(0.5).eval()),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("copied", [False, True])
def test_modules_that_are_replaced(name: str, copied: bool) -> None:
    plain, model = _pair()
    if copied:
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (plain, model):
        torch.manual_seed(1)
        CHANGES[name](each)
    _assert_the_same(plain, model, lambda m, x: m(x))


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("name", list(CHANGES)[:4])
@pytest.mark.parametrize("derivatives", [False, True])
def test_modules_that_are_replaced_in_what_is_compiled(name: str, derivatives: bool) -> None:
    plain, model = _pair()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    with torch.set_grad_enabled(derivatives):
        torch.testing.assert_close(compiled(x), plain(x))
        for each in (plain, model):
            torch.manual_seed(1)
            CHANGES[name](each)
        torch.testing.assert_close(compiled(x), plain(x))


def test_what_is_skipped_in_what_is_compiled_is_an_error() -> None:
    _, model = _pair()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: model[1](model[0](x)).square(), fullgraph=True, backend="aot_eager")
    told = "before the modules that the layer computes are called" if torch.__version__ >= (2, 9) else "."
    with torch.no_grad(), pytest.raises(Exception, match=told):  # older versions of Dynamo leave an error's text out
        compiled(torch.randn(2, 3, 4, 5, dtype=torch.float64))


def test_a_compiled_layer_and_modules_that_are_not() -> None:
    plain, model = _pair()
    torch._dynamo.reset()
    layer = torch.compile(model[0], backend="aot_eager")
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(model[1:](layer(x)), plain(x))
    with pytest.raises(RuntimeError, match="before the modules that the layer computes are called"):
        layer(x).mean()


@pytest.mark.parametrize("derivatives", [False, True])
def test_a_layer_and_modules_that_are_compiled(derivatives: bool) -> None:
    plain, model = _pair()
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    with torch.set_grad_enabled(derivatives):
        for behind in (lambda m, y: m[1:](y), lambda m, y: y.square(), lambda m, y: m[2](y)):
            torch._dynamo.reset()
            compiled = torch.compile(behind, backend="aot_eager")
            torch.testing.assert_close(compiled(model, model[0](x)), behind(plain, plain[0](x)))


def test_an_input_that_changes_before_the_layer_is_read_alone() -> None:
    _, model = _pair()
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    y = model[0](x)
    x.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.mean()


def test_read_without_derivatives_it_is_an_error() -> None:
    """A function of autograd would be handed values that are not those whose gradient it gives."""
    _, model = _pair()
    y = model[0](torch.randn(2, 3, 4, 5, dtype=torch.float64))
    assert y.shape == (2, 4, 8, 10)
    assert y.dtype == torch.float64
    with torch.no_grad(), pytest.raises(RuntimeError, match="has derivatives, is read within"):
        y.mean()


def test_marks_are_no_part_of_what_leaves_a_chain() -> None:
    _, model = _pair()
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    assert type(model[0](x)) is pending.Marked
    assert type(model[:3](x)) is Tensor
    assert type(copy.deepcopy(model[0](x.detach()).detach())) is Tensor
    assert type(pickle.loads(pickle.dumps(model[0](x).detach()))) is Tensor
    with torch.no_grad():
        assert type(model[:3](x)) is Tensor


def test_under_autocast() -> None:
    plain, model = _pair()
    plain.float(), model.float()
    x = torch.randn(2, 3, 4, 5)
    for call in (CALLS["the layer alone"], CALLS["without the norm"], lambda m, x: m(x)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found, expected = call(model, x), call(plain, x)
            assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        within = model[0](x)
    with torch.no_grad():
        assert within.mul(1).dtype == torch.bfloat16


CHANGED_ELSEWHERE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a detached value": lambda m, y: ((z := y.detach()), (w := z.sigmoid_()), y * w if m.more else w)[-1],
    "a view, and a detached value": lambda m, y: ((z := y.detach()), m.more and y.view(-1).mul_(2), z.tanh())[-1],
    "an element of a detached value": lambda m, y: ((z := y.detach()), m.more and z[:, 0].mul_(2), y.tanh() * z)[-1],
    "a value that is read again": lambda m, y: ((w := torch.sigmoid(y)), m.more and y.tanh_(), w * y)[-1],
    "by a module": lambda m, y: ((w := m.act(y)), y if m.more else w)[-1],
    "by a module, and again": lambda m, y: ((w := m.act(y)), (z := w.tanh()), y * z if m.more else z)[-1],
    "by a module and a function": lambda m, y: ((w := m.act(y).neg()), y * w if m.more else w)[-1],
    "a clone": lambda m, y: ((z := y.clone()), m.more and y.view(-1).mul_(2), z.tanh())[-1],
}


@pytest.mark.parametrize("name", CHANGED_ELSEWHERE)
def test_values_that_are_changed_in_place_as_the_trace_has_not_seen(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.more = nn.ConvTranspose2d(3, 4, 2, 2), nn.LeakyReLU(0.1, inplace=True), False

        def forward(self, x: Tensor) -> Tensor:
            return CHANGED_ELSEWHERE[name](self, self.up(x))

    plain = Model().eval()
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused
    x = torch.randn(2, 3, 4, 5)
    for plain.more in (False, True):
        model.more = plain.more
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                torch.testing.assert_close(model(x), plain(x))


def test_a_softmax_over_another_dimension() -> None:
    plain = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.Softmax(-3), nn.Tanh()).eval()
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("1", "2")
    plain[1].dim = model[1].dim = 2
    with torch.no_grad():
        x = torch.randn(2, 3, 4, 5)
        torch.testing.assert_close(model(x), plain(x))


def test_layers_that_are_replaced_are_fused_anew() -> None:
    """What has been a chain's is no other's: it computes for itself."""
    from test_fuse_norm import LayerNorm2d

    model = nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(3, 4, 2, 2), LayerNorm2d(4), nn.GELU()).eval()
    polyphase.accelerate(model, fuse=True)
    model[1] = nn.ConvTranspose2d(3, 4, 3, 2)
    block = polyphase.accelerate(model, fuse=True).blocks[0]
    assert str(block) == "1: not fused: 2 is fused with another layer"
    plain = polyphase.restore(copy.deepcopy(model)).model
    x = torch.randn(2, 3, 4, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    # Other models' modules are theirs.
    other = nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(3, 4, 2, 2)).eval()
    plain = copy.deepcopy(other)
    assert polyphase.accelerate(other, fuse=True).blocks[0].before == "0"
    with torch.no_grad():
        torch.testing.assert_close(other(x), plain(x))


BEHIND: list[Callable[[], nn.Module]] = [lambda: nn.ReLU(), lambda: nn.Softplus(), lambda: nn.Softmax(1)]


@pytest.mark.parametrize("behind", BEHIND)
def test_reentrant_checkpoints_of_parts_that_wait(behind: Callable[[], nn.Module]) -> None:
    """A checkpoint gives derivatives to what it computes without, which must be a tensor."""
    plain = nn.Sequential(nn.ELU(), nn.ConvTranspose2d(3, 4, 2, 2), behind(), nn.Tanh(), nn.Conv2d(4, 2, 1)).eval()
    model = copy.deepcopy(plain)
    polyphase.accelerate(model, fuse=True)

    def call(m: Any, x: Tensor) -> Tensor:
        result: Tensor = checkpoint_sequential(m, 5, x, use_reentrant=True)
        return result

    _assert_the_same(plain.double(), model.double(), call)


@pytest.mark.parametrize("module", [nn.PReLU, nn.BatchNorm1d])
def test_what_are_channels_of_a_batch_alone(module: Callable[[int], nn.Module]) -> None:
    """Of ``(C, L)`` these have L."""
    plain = nn.Sequential(nn.ConvTranspose1d(3, 4, 2, 2), module(4), nn.Tanh()).eval()
    for tensor in (*plain[1].parameters(), *plain[1].buffers()):
        tensor.data = torch.arange(1, 5) / 4 if tensor.dim() else tensor.data
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("1", "2")
    x = torch.randn(3, 2)
    torch.testing.assert_close(model(x), plain(x))
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


class Between(nn.Module):
    """What changes between a layer and what waits behind it."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.soft, self.act, self.between = nn.ConvTranspose2d(3, 3, 1), nn.Softplus(), nn.Tanh(), between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x + 1)


def _add(m: Any, x: Tensor) -> Tensor:
    y = m.up(x)
    x += 1
    return torch.relu(y)


def _sub(m: Any, x: Tensor) -> Tensor:
    y = m.up(x)
    x -= 0.5
    return y * x


def _module(m: Any, x: Tensor) -> Tensor:
    y = torch.relu(m.up(x))
    x.add_(1)
    return m.act(y)


def _waiting(m: Any, x: Tensor) -> Tensor:
    y = m.up(x)
    x.add_(1)
    return m.soft(y)


@pytest.mark.parametrize("between", [_add, _sub, _module, _waiting])
def test_changes_between_a_layer_and_what_waits(between: Callable[[Any, Tensor], Tensor]) -> None:
    """By operators too, which torch.fx takes for sums; tensors of inference mode do not count changes."""
    plain = Between(between).eval()
    model = copy.deepcopy(plain)
    assert "changes a tensor in place before" in polyphase.accelerate(model, fuse=True).blocks[0].reason
    x = torch.randn(2, 3, 4, 5)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("norm", [nn.Softmax(1), nn.Softmax2d()])
def test_a_chain_has_one_operation_of_all_channels(norm: nn.Module) -> None:
    plain = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.Softmax2d(), nn.Tanh(), norm, nn.ReLU()).eval()
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("1", "2")
    x = torch.randn(2, 3, 4, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("behind", [nn.BatchNorm2d(4), nn.GELU(), nn.PReLU(), nn.ELU(), nn.ReLU6(), nn.LeakyReLU()])
def test_an_output_that_is_changed_in_place_and_recorded(behind: nn.Module) -> None:
    """PyTorch's functions keep it no more than these do."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.behind = nn.ConvTranspose2d(3, 4, 2, 2), nn.BatchNorm2d(4), behind

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.behind(self.norm(self.up(x)))
            y += x.mean()
            return y.sin()

    plain = Model().eval().double()
    model = copy.deepcopy(plain)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("norm", "behind", "add()")
    _assert_the_same(plain, model, lambda m, x: m(x))
    with torch.no_grad():
        x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
        torch.testing.assert_close(model(x), plain(x))
