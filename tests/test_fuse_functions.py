"""Functions behind a layer, taken in by ``accelerate(model, fuse=True)``: which calls, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase
from polyphase import fused, pending
from polyphase.chain import Chain


class Up(nn.Module):
    """A layer, and functions of its output."""

    def __init__(self, behind: Callable[..., Any], norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.norm = nn.Identity() if norm is None else norm
        self.skip = nn.Sequential(nn.ConvTranspose2d(6, 4, 2, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.slope = nn.Parameter(torch.rand(4))
        self.behind = behind

    def forward(self, x: Tensor) -> Any:
        """(N, 6, H, W) to (N, 4, 2·H, 2·W)."""
        return self.behind(self, self.norm(self.up(x)), x)


BEHIND: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "relu": (lambda m, y, x: F.relu(y), ("relu()",)),
    "method": (lambda m, y, x: y.relu_().tanh(), ("relu()", "tanh()")),
    "leaky": (lambda m, y, x: F.leaky_relu(y, 0.2, inplace=True), ("leaky_relu()",)),
    "elu, clamp": (lambda m, y, x: torch.clamp(F.elu(y, alpha=0.5), max=0.7), ("elu()", "clamp()")),
    "one limit": (lambda m, y, x: y.clamp_min(-0.5).clamp_max_(0.7), ("clamp_min()", "clamp_max()")),
    "expit": (lambda m, y, x: torch.special.expit(y), ("sigmoid()",)),
    "gelu": (lambda m, y, x: F.gelu(y, approximate="tanh"), ("gelu()",)),
    "softplus": (lambda m, y, x: F.softplus(y, 2, threshold=10), ("softplus()",)),
    "sigmoid": (lambda m, y, x: torch.sigmoid(2 * y / 4 - 1), ("mul()", "div()", "sub()", "sigmoid()")),
    "divisor without an inverse": (lambda m, y, x: torch.sigmoid(y / 2.0**-1074), ("div()", "sigmoid()")),
    "channels": (lambda m, y, x: y * m.slope.view(4, 1, 1) + m.slope[0], ("mul()", "add()")),
    "prelu": (lambda m, y, x: F.prelu(y, m.slope), ("prelu()",)),
    "dropout": (lambda m, y, x: F.dropout(F.hardtanh(y), training=m.training), ("hardtanh()", "dropout()")),
    "residual": (lambda m, y, x: F.silu(m.skip(x) + y), ("add()", "silu()")),
    "residual in place": (lambda m, y, x: y.add_(m.skip(x)), ("add()",)),
    "its size": (lambda m, y, x: F.pad(F.relu(y), (0, y.shape[-1], y.size(2), y.size()[3])), ("relu()",)),
    "softmax": (lambda m, y, x: torch.sigmoid(y.softmax(dim=1)), ("softmax()", "sigmoid()")),
    "less": (lambda m, y, x: torch.tanh(y - m.slope.view(4, 1, 1)), ("sub()", "tanh()")),
    "an earlier value": (lambda m, y, x: y * torch.sigmoid(y) + y, ("sigmoid()", "mul()", "add()")),
    "copies": (
        lambda m, y, x: ((z := y.clone().detach(), y + m.slope.view(4, 1, 1))[1] + z) * z,
        ("clone()", "detach()", "add()", "add()", "mul()"),
    ),
}


@pytest.mark.parametrize("name", BEHIND)
def test_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    behind, taken = BEHIND[name]
    model = Up(behind, nn.BatchNorm2d(4)).eval().double()
    x = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    block = polyphase.accelerate(model, fuse=True).blocks[0]
    assert block.fused == ("norm", *taken)
    assert model.state_dict().keys() == plain.state_dict().keys()
    computed: list[list[str]] = []
    original = Chain._run

    def counting(self: Chain, tensors: Any, padding: Any, steps: list[fused.Step | None], *more: Any) -> Tensor:
        computed.append([step.kind for step in steps if step is not None])
        return original(self, tensors, padding, steps, *more)

    monkeypatch.setattr(Chain, "_run", counting)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
        assert type(model(x)) is Tensor
    assert len(computed[-1]) == 1 + len([each for each in taken if each not in ("dropout()", "clone()", "detach()")])
    # With derivatives, in training, and restored it is what it was.
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        torch.testing.assert_close(model(x), expected)
    polyphase.restore(model)
    assert type(model.norm) is nn.BatchNorm2d
    assert "_chain" not in vars(model.up)
    torch.testing.assert_close(model(x), plain(x))


REASONS: dict[str, tuple[Callable[..., Any], str]] = {
    "another function": (lambda m, y, x: torch.cumsum(y, 1), "cumsum() reads its output, and is not fused"),
    "another softmax": (lambda m, y, x: torch.softmax(y, -3), "softmax() has arguments with which it is not fused"),
    "another value less": (lambda m, y, x: F.relu(y) - y, "2 operations read its output"),
    "changed and read again": (lambda m, y, x: (y.add_(1), y.tanh() * y)[1], "3 operations read its output"),
    "two branches": (lambda m, y, x: F.relu(y) * torch.tanh(y), "2 operations read its output"),
    "twice": (lambda m, y, x: y + y, "add() has arguments with which it is not fused"),
    "a tensor of limits": (lambda m, y, x: torch.clamp(y, m.slope.sum()), "clamp() has arguments with which"),
    "in place between": (lambda m, y, x: (x.relu_(), F.relu(y))[1], "relu_ changes a tensor in place before relu()"),
    "in place by out=": (lambda m, y, x: (torch.add(x, 1, out=x), F.relu(y))[1], "add changes a tensor in place"),
    "into another tensor": (lambda m, y, x: m.skip(x).add_(y), "add() changes another tensor in place"),
    "dropout": (lambda m, y, x: F.dropout(y, 0.5, True), "dropout() has arguments with which it is not fused"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name: str) -> None:
    behind, reason = REASONS[name]
    model = Up(behind)
    block = polyphase.accelerate(model, fuse=True).blocks[0]
    assert block.fused == ("norm",)
    assert reason in block.reason


@pytest.mark.parametrize("grad", [True, False])
def test_modules_whose_value_is_read_again(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.gate = nn.ConvTranspose1d(3, 4, 2), nn.BatchNorm1d(4), nn.Sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.up(x))
            return self.gate(y) * y

    model, x = Gate().eval(), torch.randn(2, 3, 5)
    expected = model(x)
    (block,) = polyphase.accelerate(model, fuse=True).blocks
    assert block.fused == ("norm", "gate", "mul()")
    calls = []
    original = Chain._run
    monkeypatch.setattr(Chain, "_run", lambda *args: (calls.append(args[3]), original(*args))[1])
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(x), expected)
    assert [len(steps) for steps in calls] == [1 if grad else 3]  # and the layer is computed once
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


def test_only_one_of_two_takes_a_sum() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.ConvTranspose1d(3, 4, 2), nn.ConvTranspose1d(3, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.one(x) + self.other(x))

    model, x = Two().eval(), torch.randn(2, 3, 5)
    with torch.no_grad():
        expected = model(x)
        one, other = polyphase.accelerate(model, fuse=True).blocks
        assert one.fused == ("add()", "relu()")
        assert other.reason == "add() is fused with another layer"
        torch.testing.assert_close(model(x), expected)


def test_another_course_than_the_trace() -> None:
    """What `forward` does otherwise, for an attribute that has changed, is computed of tensors."""
    ways: dict[str, Callable[..., Any]] = {
        "traced": lambda y: F.relu(y),
        "another constant": lambda y: F.relu(y, inplace=True),
        "another function": lambda y: torch.tanh(y),
        "its size": lambda y: F.relu(y[..., : y.shape[-1] // 2]) * len(y) + y.numel(),
        "twice": lambda y: torch.cat([F.relu(y), y], 1) - y.mean(),
        "in place, and read": lambda y: F.relu(y, inplace=True) is not None and y * 1,
        "operators": lambda y: (2 - y) / (abs(y) + 1) @ y.mT,
        "what it is": lambda y: F.relu(y) if isinstance(y, torch.Tensor) else y * 0,
        "a list": lambda y: torch.stack([y, y]).sum(0),
        "an attribute": lambda y: (y.dtype, repr(y), torch.tensor(y.numpy().sum()), y.mT.shape),
    }
    way = ["traced"]
    model, x = Up(lambda m, y, x: ways[way[0]](y)).eval(), torch.randn(2, 6, 3, 3)
    plain = copy.deepcopy(model)
    polyphase.accelerate(model, fuse=True)
    with torch.no_grad():
        for way[0] in ways:
            found, expected = model(x), plain(x)
            assert type(found) is type(expected), way
            if type(found) is tuple:
                found, expected = found[2], expected[2]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_what_a_residual_must_be() -> None:
    """A sum that broadcasts or changes the dtype is computed of the tensor."""

    class Sum(Up):
        def forward(self, x: Tensor, other: Tensor) -> Any:  # type: ignore[override]
            return self.norm(self.up(x)) + other

    model = Sum(lambda m, y, x: y).eval()
    plain = copy.deepcopy(model)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("norm", "add()")
    x = torch.randn(2, 6, 3, 3)
    with torch.no_grad():
        for size in [(2, 4, 6, 6), (4, 1, 1), (1, 4, 1, 1), (2, 4, 1, 1), (1,), (6,), (2, 1, 1, 1), (4, 6, 6)]:
            torch.testing.assert_close(model(x, other := torch.randn(size)), plain(x, other), rtol=1e-4, atol=1e-5)
        for other in (torch.randn(4, 1, 1).double(), torch.randn(2, 4, 6, 6).double(), torch.tensor(3)):
            found, expected = model(x, other), plain(x, other)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected)


def test_autocast_that_ends_between(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(Up):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.up(x)
            return F.relu(y)

    model, x = Left(lambda m, y, x: y).eval(), torch.randn(1, 6, 3, 3)
    with torch.no_grad():
        expected = model(x)
        assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("relu()",)
        waited: list[object] = []
        original = pending.Pending.tensor

        def computed(self: pending.Pending) -> Tensor:
            waited.append(self)
            return original(self)

        monkeypatch.setattr(pending.Pending, "tensor", computed)
        found = model(x)
    assert len(waited) == 1
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_an_input_that_changes_before_it_is_read() -> None:
    changing = [False]
    model = Up(lambda m, y, x: (x.add_(1) if changing[0] else x, F.relu(y))[1]).eval()
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("norm", "relu()")
    changing[0] = True
    with torch.no_grad(), pytest.raises(RuntimeError, match="changed in place"):
        model(torch.randn(1, 6, 3, 3))


def test_compiled_and_traced() -> None:
    model, x = Up(BEHIND["residual"][0], nn.BatchNorm2d(4)).eval(), torch.randn(1, 6, 3, 3)
    with torch.no_grad():
        expected = model(x)
        polyphase.accelerate(model, fuse=True)
        for call in (torch.compile(model, fullgraph=True, backend="aot_eager"), torch.jit.trace(model, x),
                     torch.fx.symbolic_trace(model), torch.export.export(model, (x,)).module(),
                     copy.deepcopy(model)):  # fmt: skip
            torch.testing.assert_close(call(x), expected, rtol=1e-4, atol=1e-5)


def test_a_sum_that_changes_after_it_was_added() -> None:
    """One that the trace shows ends the chain; one that it does not show is an error."""

    def behind(m: Up, y: Tensor, x: Tensor) -> Tensor:
        skip = m.skip[0](x)
        z = y + skip
        if m.shown:
            skip.zero_()
        return F.relu(z)

    for shown in (True, False):
        model, x = Up(behind).eval(), torch.randn(1, 6, 3, 3)
        model.shown = shown  # type: ignore[assignment]
        with torch.no_grad():
            expected = model(x)
            block = polyphase.accelerate(model, fuse=True).blocks[0]
            assert block.fused == (("norm", "add()") if shown else ("norm", "add()", "relu()"))
            torch.testing.assert_close(model(x), expected)
            if not shown:
                model.shown = True  # type: ignore[assignment]
                with pytest.raises(RuntimeError, match="changed in place"):
                    model(x)


def test_parameters_that_are_replaced_between() -> None:
    replaced = [False]

    def behind(m: Up, y: Tensor, x: Tensor) -> Tensor:
        if replaced[0]:
            m.up.weight = nn.Parameter(torch.zeros_like(m.up.weight))
        return F.relu(y)

    model, x = Up(behind).eval(), torch.randn(1, 6, 3, 3)
    with torch.no_grad():
        expected = model(x)
        polyphase.accelerate(model, fuse=True)
        replaced[0] = True
        torch.testing.assert_close(model(x), expected)


def test_two_that_wait_for_each_other() -> None:
    other = [False]
    model = Up(lambda m, y, x: F.relu(y) + (m.skip[0](x) if other[0] else torch.tanh(m.skip[0](x)))).eval()
    plain, x = copy.deepcopy(model), torch.randn(1, 6, 3, 3)
    one, two = polyphase.accelerate(model, fuse=True).blocks
    assert one.fused == ("norm", "relu()", "add()")
    assert two.fused == ("tanh()",)
    with torch.no_grad():
        for other[0] in (False, True):
            torch.testing.assert_close(model(x), plain(x))


def test_derivatives_that_begin_behind_the_layer() -> None:
    """A norm that is to be trained behind a layer that is not."""

    class Half(Up):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                y = self.behind(self, self.up(x), x)
            return self.norm(y)

    x = torch.randn(1, 6, 3, 3)
    model = Half(lambda m, y, x: F.relu(y), nn.BatchNorm2d(4)).eval()
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("relu()", "norm")
    assert model(x).requires_grad
    model = Half(lambda m, y, x: y, nn.BatchNorm2d(4)).eval()
    plain = copy.deepcopy(model)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("norm",)
    found, expected = model(x), plain(x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward(), expected.square().sum().backward()
    torch.testing.assert_close(model.norm.weight.grad, plain.norm.weight.grad)
    assert model.up.weight.grad is None


def test_a_function_of_autograd_reads_a_tensor() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:  # type: ignore[override]
            return y * 2

    custom = [False]
    model = Up(lambda m, y, x: Double.apply(y) if custom[0] else F.relu(y)).eval()  # type: ignore[no-untyped-call]
    plain, x = copy.deepcopy(model), torch.randn(1, 6, 3, 3)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("norm", "relu()")
    custom[0] = True
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
