"""Functions of a layer's input in PyTorch's terms: ``polyphase.fused``, and activations before a layer in a model.

What the kernels compute is `test_prologue.py`'s.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase
from polyphase import fused, fused_calls
from polyphase.problem.epilogue import Epilogue
from polyphase.snakes import snake_of

FUSED = {1: fused.conv_transpose1d, 2: fused.conv_transpose2d, 3: fused.conv_transpose3d}
PLAIN = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SHAPES = {1: (2, 4, 7), 2: (2, 4, 3, 4), 3: (1, 4, 2, 3, 2)}


def snake(x: Tensor, alpha: Tensor, beta: Tensor, eps: float = 1e-9, logarithmic: bool = False) -> Tensor:
    alpha, beta = (each.reshape(1, -1, *[1] * (x.dim() - 2)).to(x.dtype) for each in (alpha, beta))
    alpha, beta = (alpha.exp(), beta.exp()) if logarithmic else (alpha, beta)
    return x + torch.sin(alpha * x) ** 2 / (beta + eps)


#: Prologues by name: their steps of tensors with one element for each channel, and the same by PyTorch's functions.
PROLOGUES: dict[str, tuple[Callable[..., list[fused.Step | str]], Callable[..., Tensor], int]] = {
    "relu": (lambda: ["relu"], F.relu, 0),
    "leaky_relu": (lambda: [fused.activation("leaky_relu", 0.1)], lambda x: F.leaky_relu(x, 0.1), 0),
    "elu": (lambda: ["elu"], F.elu, 0),
    "prelu": (lambda a: [fused.prelu(a)], F.prelu, 1),
    "snake": (lambda a: [fused.snake(a)], lambda x, a: snake(x, a, a), 1),
    "snake, logarithmic": (
        lambda a: [fused.snake(a, None, 0.1, True)],
        lambda x, a: snake(x, a, a, 0.1, True),
        1,
    ),
    "snake beta": (lambda a, b: [fused.snake(a, b)], lambda x, a, b: snake(x, a, b), 2),
    "snake beta, logarithmic": (
        lambda a, b: [fused.snake(a.view(1, -1), b, 1e-3, True)],
        lambda x, a, b: snake(x, a, b, 1e-3, True),
        2,
    ),
    "scale, shift, sigmoid": (
        lambda a, b: [fused.scale_shift(a, b), "sigmoid"],
        lambda x, a, b: torch.sigmoid(x * _per(a, x) + _per(b, x)),
        2,
    ),
}


def _per(tensor: Tensor, x: Tensor) -> Tensor:
    return tensor.view(1, -1, *[1] * (x.dim() - 2))


def tensors(dims: int, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Input, weight, bias, and operands."""
    generator = torch.Generator().manual_seed(dims)
    shapes = [SHAPES[dims], (4, 3, *[3] * dims), (3,)]
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found += [torch.rand(4, generator=generator, dtype=torch.float64) + 0.3 for _ in range(count)]
    return [each.to(dtype).requires_grad_() for each in found]


def both(name: str, dims: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor], int]:
    steps, function, count = PROLOGUES[name]

    def ours(x: Tensor, w: Tensor, b: Tensor, *of: Tensor) -> Tensor:
        return FUSED[dims](x, w, b, 2, 1, prologue=steps(*of), epilogue=["silu"])

    def theirs(x: Tensor, w: Tensor, b: Tensor, *of: Tensor) -> Tensor:
        return F.silu(PLAIN[dims](function(x, *of), w, b, 2, 1))

    return ours, theirs, count


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", PROLOGUES)
def test_values_and_gradients_are_pytorchs(name: str, dims: int) -> None:
    ours, theirs, count = both(name, dims)
    given = tensors(dims, count)
    found, wanted = ours(*given), theirs(*given)
    torch.testing.assert_close(found, wanted)
    cotangent = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, given, cotangent), torch.autograd.grad(wanted, given, cotangent)
    )
    for place in range(len(given)):  # each alone
        some = [each.detach().requires_grad_(at == place) for at, each in enumerate(given)]
        of = some[place]
        torch.testing.assert_close(*(torch.autograd.grad(f(*some), of, cotangent)[0] for f in (ours, theirs)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["elu", "prelu", "snake", "snake beta, logarithmic"])
def test_derivatives_of_second_order(name: str) -> None:
    ours, _, count = both(name, 1)
    given = tensors(1, count)
    assert torch.autograd.gradcheck(ours, given)
    assert torch.autograd.gradgradcheck(ours, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    """Never further from float64 than PyTorch's own, which rounds behind each of a snake's functions."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 32, 99), (32, 9, 4)))
    a = (torch.rand(32, generator=generator) + 0.3).to(dtype)
    found = fused.conv_transpose1d(x, w, None, 2, prologue=[fused.snake(a)])
    read = snake(x.float(), a, a).to(dtype)
    # Not of PyTorch's function: which order its sums have differs between CPUs.
    assert torch.equal(found, polyphase.conv_transpose1d(read.float(), w.float(), None, 2).to(dtype))
    wanted = F.conv_transpose1d(snake(x.double(), a, a), w.double(), None, 2)
    theirs = F.conv_transpose1d(snake(x, a, a), w, None, 2)
    assert (found.double() - wanted).norm() <= 1.001 * (theirs.double() - wanted).norm()


def test_transforms_compile_and_meta() -> None:
    x, w, b, a = tensors(1, 1)
    ours, theirs, _ = both("snake", 1)
    batched = torch.func.vmap(lambda x: ours(x, w, b, a))(x.detach()[:, None])
    torch.testing.assert_close(batched[:, 0], theirs(x, w, b, a))
    compiled = torch.compile(ours, fullgraph=True)(x, w, b, a)
    torch.testing.assert_close(compiled, theirs(x, w, b, a))
    grads = torch.autograd.grad(compiled.sum(), (x, w, a))
    torch.testing.assert_close(grads, torch.autograd.grad(theirs(x, w, b, a).sum(), (x, w, a)))
    meta = fused.conv_transpose1d(x.to("meta"), w.to("meta"), None, 2, prologue=[fused.snake(a.to("meta"))])
    assert meta.shape == (2, 3, 15)
    _, tangent = torch.func.jvp(lambda x: ours(x, w, b, a), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.func.jvp(lambda x: theirs(x, w, b, a), (x,), (torch.ones_like(x),))[1])


def test_autocast_rounds_behind_the_function() -> None:
    x, w, b, a = (each.detach() for each in tensors(1, 1, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        found = fused.conv_transpose1d(x, w, b, 2, 1, prologue=[fused.snake(a)])
        wanted = polyphase.conv_transpose1d(snake(x, a, a), w, b, 2, 1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


def test_inputs_of_other_kinds() -> None:
    x, w, b, a = (each.detach() for each in tensors(1, 1))
    wanted = F.conv_transpose1d(snake(x, a, a), w, b, 2)
    unbatched = fused.conv_transpose1d(x[0], w, b, 2, prologue=[fused.snake(a)])
    torch.testing.assert_close(unbatched, wanted[0])
    out = torch.empty_like(wanted)
    assert fused.conv_transpose1d(x, w, b, 2, prologue=[fused.snake(a)], out=out) is out
    torch.testing.assert_close(out, wanted)
    shared = x[:, :1].expand(-1, 4, -1)  # the channels are one, but for their parameters
    torch.testing.assert_close(
        fused.conv_transpose1d(shared, w, b, 2, prologue=[fused.snake(a)]),
        F.conv_transpose1d(snake(shared, a, a), w, b, 2),
    )


def test_operator_passes_opcheck() -> None:
    x, w, b, a = tensors(1, 1, torch.float32)
    arguments = (x, w, b, [a], "snake:1e-09,0.0:alpha channel :0|relu:::0", (2,), (1,), (0,), (1,), 1)
    torch.library.opcheck(torch.ops.polyphase.conv_transpose_epilogue.default, arguments)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (
            lambda a: fused.add(torch.zeros(2, 4, 7, dtype=torch.float64)),
            ValueError,
            "elements and their channels alone",
        ),
        (lambda a: fused.layer_norm(), ValueError, "elements and their channels alone"),
        (lambda a: fused.snake(a[:3]), RuntimeError, r"alpha of prologue\[0\] must have shape \(4,\)"),
        (lambda a: fused.scale_shift(a.expand(2, 4)), ValueError, "elements and their channels alone"),
        (lambda a: 3, TypeError, r"prologue\[0\] must be made by polyphase.fused"),
    ],
)
def test_errors(step: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    x, w, b, a = tensors(1, 1)
    with pytest.raises(error, match=message):
        fused.conv_transpose1d(x, w, b, 2, prologue=[step(a)])


class Snake1d(nn.Module):
    """As DAC's in transformers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(1, channels, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(shape[0], shape[1], -1)
        x = x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)
        return x.reshape(shape)


class SnakeBeta(nn.Module):
    """As BigVGAN's."""

    def __init__(self, channels: int, logarithmic: bool = True, factor: float = 1.0) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(channels) + 0.1)
        self.beta = nn.Parameter(torch.rand(channels) + 0.1)
        self.logarithmic, self.no_div_by_zero, self.factor = logarithmic, 0.000000001, factor

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = (each.unsqueeze(0).unsqueeze(-1) for each in (self.alpha, self.beta))
        if self.logarithmic:
            alpha, beta = torch.exp(alpha), torch.exp(beta)
        return x + (self.factor / (beta + self.no_div_by_zero)) * torch.pow(torch.sin(x * alpha), 2)


class Cosine(Snake1d):
    """Nearly a snake."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + 1e-9).reciprocal() * (1 - torch.cos(self.alpha * x).pow(2))


def test_snakes_are_known_by_what_they_compute() -> None:
    found = snake_of(Snake1d(3))
    assert found is not None
    assert found[:2] == (1e-9, False)
    for logarithmic in (False, True):
        found = snake_of(SnakeBeta(3, logarithmic))
        assert found is not None
        assert found[:2] == (1e-9, logarithmic)
    assert snake_of(SnakeBeta(3, factor=2.0)) is None
    assert snake_of(Cosine(3)) is None
    assert snake_of(nn.PReLU(3)) is None


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky": lambda: nn.LeakyReLU(0.1), "elu": nn.ELU, "prelu": lambda: nn.PReLU(6), "snake": lambda: Snake1d(6),
    "snake beta": lambda: SnakeBeta(6), "in place": lambda: nn.ReLU(inplace=True),
}  # fmt: skip


def model(activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(4, 6, 3), activation, nn.ConvTranspose1d(6, 5, 4, 2, 1), nn.Tanh()).eval()


@pytest.fixture
def prologues(monkeypatch: pytest.MonkeyPatch) -> list[Epilogue]:
    """What fused calls have as prologues."""
    met: list[Epilogue] = []
    run = fused_calls._run

    def noted(known: Any, *rest: Any) -> Tensor:
        met.append(known.prologue)
        return run(known, *rest)

    monkeypatch.setattr(fused_calls, "_run", noted)
    return met


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_accelerate_computes_activations_before_layers(name: str, prologues: list[Epilogue]) -> None:
    plain = model(ACTIVATIONS[name]())
    taken = copy.deepcopy(plain)
    report = polyphase.accelerate(taken, fuse=True)
    assert re.match(
        r"2: fused with 1 \(\w+\) before it and 3 \(\w+\) behind it; ends there: the next thing", str(report.blocks[0])
    )
    assert "transposed convolution behind it" in repr(taken)
    x = torch.randn(2, 4, 9)
    with torch.no_grad():
        wanted = plain(x)
        torch.testing.assert_close(taken(x), wanted)
        assert len(prologues) == 1
        assert prologues[0]
        torch.testing.assert_close(pickle.loads(pickle.dumps(taken))(x), wanted)
        torch.testing.assert_close(torch.compile(taken)(x), wanted)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(taken(x), plain(x), rtol=0.02, atol=0.02)
        if name not in ("prelu", "snake"):  # without a batch each computes for itself
            torch.testing.assert_close(taken(x[0]), plain(x[0]))
    torch.testing.assert_close(torch.autograd.grad(taken(x).sum(), list(taken.parameters())),
                               torch.autograd.grad(plain(x).sum(), list(plain.parameters())))  # fmt: skip
    polyphase.restore(taken)
    assert type(taken[1]) is type(plain[1])
    assert taken.state_dict().keys() == plain.state_dict().keys()


def test_what_else_reads_is_what_the_module_gives(prologues: list[Epilogue]) -> None:
    """Somebody who reads an activation's output is given a tensor, and the layer then reads that."""
    taken = model(nn.LeakyReLU(0.1))
    x = torch.randn(2, 4, 9)
    wanted = taken(x).detach()
    polyphase.accelerate(taken, fuse=True)
    with torch.no_grad():
        active = taken[1](taken[0](x))
        assert torch.equal(active + 0, F.leaky_relu(taken[0](x), 0.1))
        torch.testing.assert_close(taken[2](active).tanh(), wanted)
    assert not any(prologues)
    seen: list[Tensor] = []
    with torch.no_grad():
        taken[1].register_forward_hook(lambda module, given, output: seen.append(output))
        torch.testing.assert_close(taken(x), wanted)
    assert type(seen[0]) is Tensor


@pytest.mark.parametrize("change", ["train", "replaced", "number"])
def test_changes_are_noticed(change: str, prologues: list[Epilogue]) -> None:
    taken = model(SnakeBeta(6))
    polyphase.accelerate(taken, fuse=True)
    x = torch.randn(2, 4, 9)
    if change == "train":
        taken[1].train()
    elif change == "replaced":
        taken[1] = nn.ELU()
    else:
        taken[1].logarithmic = False
    plain = polyphase.restore(copy.deepcopy(taken)) and copy.deepcopy(taken)
    polyphase.restore(plain)
    with torch.no_grad():
        torch.testing.assert_close(taken(x), plain(x))
    assert not any(prologues)


class Residual(nn.Module):
    """An activation that has another reader; its input has one, too."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.activation, self.up, self.twice = nn.LeakyReLU(0.1), nn.ConvTranspose1d(4, 4, 3, 1, 1), twice

    def forward(self, x: Tensor) -> Tensor:
        active = self.activation(x)
        return self.up(active) + (active if self.twice else x)


@pytest.mark.parametrize("twice", [True, False])
def test_the_activation_may_have_one_reader_its_input_more(twice: bool, prologues: list[Epilogue]) -> None:
    taken = Residual(twice).eval()
    x = torch.randn(2, 4, 9)
    wanted = taken(x).detach()
    polyphase.accelerate(taken, fuse=True)
    with torch.no_grad():
        torch.testing.assert_close(taken(x), wanted)
    assert any(prologues) is not twice


def test_an_input_that_changes_in_place_is_an_error_or_not_fused() -> None:
    taken = nn.Sequential(nn.ReLU(inplace=True), nn.ConvTranspose1d(4, 4, 3)).eval()
    report = polyphase.accelerate(taken, fuse=True)
    assert report.blocks[0].before == ""  # the caller sees the change
    taken = model(nn.ELU())
    polyphase.accelerate(taken, fuse=True)
    with torch.no_grad():
        x = torch.randn(2, 6, 9)
        active = taken[1](x)
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"was changed in place.*clone.*polyphase.restore\(model\)"):
            taken[2](active)


@pytest.mark.parametrize("of", ["a buffer", "parametrized"])
def test_what_takes_the_place_of_a_snakes_parameter(of: str, prologues: list[Epilogue]) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    plain = model(SnakeBeta(6, False))
    taken = copy.deepcopy(plain)
    polyphase.accelerate(taken, fuse=True)
    for each in (plain, taken):
        act: Any = each[1]
        if of == "parametrized":
            nn.utils.parametrize.register_parametrization(act, "beta", Twice())
        else:
            beta = act.beta.detach() * 2
            del act.beta
            act.register_buffer("beta", beta)
    x = torch.randn(2, 4, 9)
    with torch.no_grad():
        torch.testing.assert_close(taken(x), plain(x))
    assert any(prologues)


def test_hooks_between_are_given_tensors(prologues: list[Epilogue]) -> None:
    seen: list[Tensor] = []

    def note(module: Any, given: Any, result: Any = None) -> None:
        seen.append(given[0] if result is None else result)

    def made(register: Callable[[Any], Any]) -> Any:
        part = nn.Sequential(nn.Conv1d(4, 4, 1), nn.ELU())
        plain = nn.Sequential(part, nn.Sequential(nn.ConvTranspose1d(4, 4, 3))).eval()
        register(plain)
        polyphase.accelerate(plain, fuse=True)
        seen.clear()
        with torch.no_grad():
            plain(torch.randn(2, 4, 9))
        return plain

    for register in (
        lambda m: m[0].register_forward_hook(note),
        lambda m: m[1].register_forward_pre_hook(note),
        lambda m: m[1][0].register_forward_pre_hook(note),
    ):
        made(register)
        assert [type(each) for each in seen] == [Tensor]
    assert not any(prologues)
    # PyTorch's own do not look at what the layer is given.
    later = made(lambda m: nn.utils.weight_norm(m[1][0]))
    assert any(prologues)
    later[1][0].register_forward_pre_hook(note)
    with torch.no_grad():
        later(torch.randn(2, 4, 9))
    assert [type(each) for each in seen] == [Tensor]
