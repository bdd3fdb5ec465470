"""A batch norm in training and an activation behind it: kernels against float64, in the emulator, and who uses them.

Results lie amid guards of NaN. Sizes are odd, so that vectors, shares and threads are partly used.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import polyphase
from emulator import available
from helpers import EmptiedMeanwhile
from kernel_harness import DTYPES, Buffer, Emulator, Executor
from polyphase import batch_norms
from polyphase.jit.compiler import resources_of
from polyphase.problem.epilogue import Operation
from polyphase.problem.layouts import dense_strides
from polyphase.program import batch_norm as module
from polyphase.program.batch_norm import GRADIENTS, BatchNorm, programs_of
from polyphase.program.step import DST, GRAD, X
from polyphase.torch_op import epilogue

needs_emulator = pytest.mark.skipif(not available(), reason="needs Linux and g++")

CONSTANTS = {"leaky_relu": (0.2,), "elu": (1.5,), "clamp": (-0.5, 1.0)}
ACTIVATIONS = [None if not kind else Operation(kind, CONSTANTS.get(kind, ())) for kind in GRADIENTS]
SHAPES = {
    "vectors": (3, 5, 4, 8),
    "odd runs": (2, 3, 5, 7),
    "one image, one dimension": (1, 2, 1030),
    "no spatial dimensions": (9, 7),
    "three dimensions, several rounds": (2, 2, 9, 40, 12),
}


def computed(norm: BatchNorm, dtype: str, of: dict[str, Tensor], executor: Executor) -> dict[str, Tensor]:
    """The results of both programs, by their names."""
    kind, aligned = DTYPES[dtype], True
    own = torch.float32 if norm.wide else kind

    def buffer(values: Tensor | None, kind: torch.dtype, shape: tuple[int, ...]) -> Buffer:
        shape = shape if len(shape) > 2 else (1,) * (3 - len(shape)) + shape
        values = None if values is None else values.reshape(shape)
        return Buffer(shape, dense_strides(shape, False), kind, executor.device, values)

    channels = norm.shape[1]
    wide = torch.float64 if dtype == "float64" else torch.float32
    buffers = {name: buffer(of[name], kind, norm.shape) for name in (X, GRAD)}
    buffers |= {name: buffer(of[name], own, (channels,)) for name in of if name not in buffers}
    buffers |= {name: buffer(None, own, (channels,)) for name in ("of_weight", "of_bias")}
    buffers["stats"] = buffer(None, wide, (2, channels))
    found: dict[str, Tensor] = {}
    for name, program in zip(("y", "dx"), programs_of(norm, dtype, aligned)):
        made = buffers | {DST: buffer(None, kind, norm.shape)}
        made |= {each.name: buffer(None, DTYPES[each.dtype], (each.elements,)) for each in program.buffers}
        for step in program.steps:
            executor(step, [made[operand].tensor if operand in made else None for operand in step.operands])
        found[name] = made[DST].read().reshape(norm.shape).double()
    names = ("of_weight", "of_bias", "running_mean", "running_variance")
    return found | {name: buffers[name].read().flatten().double() for name in names}


def wanted(norm: BatchNorm, of: dict[str, Tensor]) -> dict[str, Tensor]:
    """By PyTorch in float64."""
    x, weight, bias = (of[name].clone().requires_grad_() for name in (X, "weight", "bias"))
    mean, variance = of["running_mean"].clone(), of["running_variance"].clone()
    v = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, True, norm.momentum, norm.epsilon)
    y = activated(norm, v)
    y.backward(of[GRAD])
    found = {"y": y.detach(), "dx": x.grad, "of_weight": weight.grad, "of_bias": bias.grad}
    return found | {"running_mean": mean, "running_variance": variance}  # type: ignore[dict-item]


def operands(norm: BatchNorm, dtype: str, seed: int = 0) -> dict[str, Tensor]:
    """Numbers that the types hold, in float64; no argument of an activation is where its derivative jumps."""
    torch.manual_seed(seed)
    channels, own = norm.shape[1], torch.float32 if norm.wide else DTYPES[dtype]
    of = {X: torch.randn(norm.shape) * 2 + 3, GRAD: torch.randn(norm.shape)}
    of = {name: each.to(DTYPES[dtype]).double() for name, each in of.items()}
    vectors = {name: torch.rand(channels) + 0.5 for name in ("weight", "bias", "running_mean", "running_variance")}
    return of | {name: each.to(own).double() for name, each in vectors.items()}


def check(norm: BatchNorm, dtype: str, executor: Executor | None = None, of: dict[str, Tensor] | None = None) -> None:
    of = operands(norm, dtype) if of is None else of
    found, expected = computed(norm, dtype, of, executor or Emulator(None)), wanted(norm, of)
    for name, value in expected.items():
        kind = torch.float32 if norm.wide and name not in ("y", "dx") else DTYPES[dtype]
        near = 1e-11 if dtype == "float64" else max(2e-5, 2 * torch.finfo(kind).eps)
        scale = float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=near, atol=near * scale, msg=f"{name} of {norm}, {dtype}")


@needs_emulator
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for blocks in (1, module._BLOCKS):
        monkeypatch.setattr(module, "_BLOCKS", blocks)
        check(BatchNorm(SHAPES[name], 1e-5, 0.1, Operation("relu")), dtype)


@needs_emulator
@pytest.mark.sampled(6)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=GRADIENTS)
def test_activations(activation: Operation | None) -> None:
    check(BatchNorm((2, 3, 4, 6), 1e-3, 0.3, activation), "float64")
    check(BatchNorm((2, 3, 4, 6), 1e-3, 0.3, activation), "float32")


@needs_emulator
@pytest.mark.parametrize("kind", ["relu", "clamp", "hardswish"])
def test_infinite_gradients_where_an_activation_is_constant(kind: str) -> None:
    """As a square root's behind a ReLU: PyTorch does not multiply them by zero."""
    norm = BatchNorm((2, 3, 4, 6), 1e-3, 0.3, Operation(kind, CONSTANTS.get(kind, ())))
    of = operands(norm, "float32")
    of["weight"] = of["weight"] * 4
    v = F.batch_norm(of[X], None, None, of["weight"], of["bias"], True, 0.0, norm.epsilon).requires_grad_()
    (slope,) = torch.autograd.grad(activated(norm, v).sum(), v)
    assert (slope == 0).any()
    of[GRAD][slope == 0] = float("inf")
    check(norm, "float32", of=of)


@needs_emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wide_parameters(dtype: str) -> None:
    check(BatchNorm((3, 5, 4, 8), 1e-5, 0.1, Operation("leaky_relu", (0.2,)), wide=True), dtype)


def test_shares() -> None:
    """A channel has blocks enough to fill a GPU, and each share some rounds of its threads."""
    few, _ = programs_of(BatchNorm((256, 64, 32, 32), 1e-5, 0.1), "float32")
    assert 1000 < few.steps[0].grid[0] < 2 * 4 * 264
    assert few.steps[0].grid == few.steps[1].grid
    many, _ = programs_of(BatchNorm((256, 512, 4, 4), 1e-5, 0.1), "float32")
    assert many.steps[0].grid[0] == 512


@pytest.mark.nvrtc
@pytest.mark.sampled(40, 10)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=GRADIENTS)
def test_registers_suffice(activation: Operation | None, arch: str) -> None:
    for dtype in ("float32", "float16"):
        for program in programs_of(BatchNorm((8, 16, 32, 32), 1e-5, 0.1, activation), dtype):
            for step in program.steps:
                found = resources_of(step.source, arch)
                assert found.clean, found


# Who uses them: modules behind a fused layer, on this machine with PyTorch's functions for the kernels.


@pytest.fixture
def by_functions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, BatchNorm]]:
    """Which norms were computed, forward (0) and backward (1)."""
    called: list[tuple[int, BatchNorm]] = []

    def forward(self: Any, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any) -> tuple[Tensor, Tensor]:
        called.append((0, self.norm))
        assert not x.is_neg()
        of = x.view(self.norm.shape)
        v = F.batch_norm(of, mean, variance, weight, bias, True, self.norm.momentum, self.norm.epsilon)
        return activated(self.norm, v).view(x.shape).clone(), torch.empty(1)

    def backward(self: Any, x: Tensor, grad: Tensor, weight: Any, bias: Any, scratch: Tensor) -> Any:
        called.append((1, self.norm))
        assert not grad.is_neg()
        assert grad.data_ptr()  # a kernel reads it
        of = x.view(self.norm.shape)
        given = [each.detach().requires_grad_() for each in (of, weight, bias) if each is not None]
        with torch.enable_grad():
            v = F.batch_norm(given[0], None, None, *(given[1:] or (None, None)), True, 0.0, self.norm.epsilon)
            found = torch.autograd.grad(activated(self.norm, v), given, grad.reshape(v.shape))
        return (found[0].view(x.shape).clone(), *found[1:], None, None)[:3]

    monkeypatch.setattr(batch_norms.Prepared, "forward", forward)
    monkeypatch.setattr(batch_norms.Prepared, "backward", backward)
    monkeypatch.setattr(batch_norms, "is_on_gpu", lambda x: True)
    return called


def activated(norm: BatchNorm, v: Tensor) -> Tensor:
    if norm.activation is not None and norm.activation.kind == "clamp":  # of another derivative at its ends
        return F.hardtanh(v, *norm.activation.constants)
    return v if norm.activation is None else epilogue.apply(norm.activation, 0, lambda place: v, {})


class Block(nn.Module):
    """A layer, a norm and what ``behind`` says, as a user may write it."""

    def __init__(self, behind: Any, norm: Any = None, act: Any = None) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 4, 2, 1)
        self.norm = nn.BatchNorm2d(4) if norm is None else norm
        self.act = nn.LeakyReLU(0.2, inplace=True) if act is None else act
        self.behind = behind

    def forward(self, x: Tensor) -> Any:
        return self.behind(self, x)


def trained(model: nn.Module, x: Tensor, steps: int = 2) -> list[Tensor]:
    """What training steps give: outputs, gradients and buffers."""
    found = []
    for _ in range(steps):
        y = model(x)
        model.zero_grad()
        y.square().mean().backward()
        found += [y.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
    return found + [each.clone() for each in model.buffers()]


def compare(model: nn.Module, x: Tensor, train: Any = trained) -> None:
    """A model trains fused as it does by itself."""
    torch.manual_seed(1)
    plain = copy.deepcopy(model).double().train()
    fused = copy.deepcopy(plain)
    polyphase.accelerate(fused, fuse=True)
    for one, other in zip(train(fused, x.double()), train(plain, x.double()), strict=True):
        torch.testing.assert_close(one, other)


def chain(*behind: nn.Module) -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(3, 4, 4, 2, 1), *behind)


MODELS: dict[str, tuple[Any, int]] = {
    "two blocks": (lambda: nn.Sequential(chain(nn.BatchNorm2d(4), nn.ReLU(True)), nn.ConvTranspose2d(4, 2, 2, 2),
                                         nn.BatchNorm2d(2, affine=False), nn.SiLU()), 2),
    "no activation": (lambda: chain(nn.BatchNorm2d(4)), 1),
    "an activation without a derivative": (lambda: chain(nn.BatchNorm2d(4), nn.Mish()), 1),
    "more behind": (lambda: chain(nn.BatchNorm2d(4), nn.GELU(), nn.Identity(), nn.Tanh()), 1),
    "a function": (lambda: Block(lambda self, x: F.relu(self.norm(self.up(x)))), 1),
    "read twice": (lambda: Block(lambda self, x: (y := self.norm(self.up(x))) + self.act(y.clone())), 1),
    "read in training alone": (
        lambda: Block(lambda self, x: (y := self.norm(self.up(x))).mean() * self.training + self.act(y)), 1),
    "not called in training": (
        lambda: Block(lambda self, x: self.norm(self.up(x)) if self.training else self.act(self.norm(self.up(x)))), 1),
    "changed in place": (
        lambda: Block(lambda self, x: self.act(self.norm(self.up(x))).add_(x.mean()).mul_(2), act=nn.SiLU()), 1),
    "an activation in place, changed": (
        lambda: Block(lambda self, x: F.dropout(self.act(self.norm(self.up(x))), 0.0, inplace=True)), 1),
    "a norm changed in place": (lambda: Block(lambda self, x: self.norm(self.up(x)).add_(1)), 1),
    "other momentum": (lambda: chain(nn.BatchNorm2d(4, eps=0.1, momentum=0.7), nn.ELU(0.5)), 1),
    "an average of all": (lambda: chain(nn.BatchNorm2d(4, momentum=None), nn.ReLU()), 0),
    "no statistics": (lambda: chain(nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()), 0),
    "instance norms": (lambda: chain(nn.InstanceNorm2d(4), nn.ReLU()), 1),
    "instance norms with parameters": (lambda: chain(nn.InstanceNorm2d(4, affine=True), nn.ReLU()), 0),
    "instance norms with statistics": (lambda: chain(nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU()), 0),
    "an instance norm and a function": (
        lambda: Block(lambda self, x: F.relu(self.norm(self.up(x))), nn.InstanceNorm2d(4)), 1),
    "one dimension": (lambda: nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Flatten(2), nn.ConvTranspose1d(3, 4, 4, 2),
                                            nn.BatchNorm1d(4), nn.Sigmoid()), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, by_functions: list[tuple[int, BatchNorm]]) -> None:
    build, count = MODELS[name]
    x = torch.randn(2, 3, 5, 6) if name != "one dimension" else torch.randn(2, 3, 30)
    compare(build(), x)
    assert [way for way, _ in by_functions].count(0) == 2 * count


def test_what_is_computed_with_the_norm(by_functions: list[tuple[int, BatchNorm]]) -> None:
    compare(chain(nn.BatchNorm2d(4), nn.LeakyReLU(0.3)), torch.randn(2, 3, 5, 6))
    assert {(way, norm.activation) for way, norm in by_functions} == {
        (way, Operation("leaky_relu", (0.3,))) for way in (0, 1)
    }
    assert by_functions[0][1].shape == (2, 4, 10, 12)


def test_derivatives_of_derivatives(by_functions: list[tuple[int, BatchNorm]]) -> None:
    model = chain(nn.BatchNorm2d(4, momentum=0.0), nn.Tanh()).double().train()
    polyphase.accelerate(model, fuse=True)
    x = torch.randn(2, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradgradcheck(model, (x,))
    assert by_functions


def test_hooks_see_what_they_saw(by_functions: list[tuple[int, BatchNorm]]) -> None:
    model, seen = chain(nn.BatchNorm2d(4), nn.ReLU()), list[Tensor]()
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    compare(model, torch.randn(2, 3, 5, 6))
    assert not by_functions
    assert float(seen[0].min()) < 0


def test_partly_in_evaluation_mode(by_functions: list[tuple[int, BatchNorm]]) -> None:
    """A frozen norm in a model that is trained; and evaluation after training."""
    model = chain(nn.BatchNorm2d(4), nn.ReLU())

    def frozen(model: Any, x: Tensor) -> list[Tensor]:
        model[1].eval()
        return trained(model, x)

    compare(model, torch.randn(2, 3, 5, 6), frozen)
    assert not by_functions

    def then_evaluated(model: Any, x: Tensor) -> list[Tensor]:
        trained(model, x)
        return [model.eval()(x).detach()]

    compare(model, torch.randn(2, 3, 5, 6), then_evaluated)
    assert by_functions


def test_without_derivatives(by_functions: list[tuple[int, BatchNorm]]) -> None:
    def run(model: Any, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            first = model(x)
        with torch.inference_mode():
            return [first, model(x).clone(), *(each.clone() for each in model.buffers())]

    compare(chain(nn.BatchNorm2d(4), nn.ReLU(True)), torch.randn(2, 3, 5, 6), run)
    assert len(by_functions) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, by_functions: list[tuple[int, BatchNorm]]) -> None:
    def run(model: Any, x: Tensor) -> list[Tensor]:
        x.requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(each.grad for each in model.parameters()), *model.buffers()]  # type: ignore[list-item]

    compare(chain(nn.BatchNorm2d(4), nn.ReLU(True)), torch.randn(2, 3, 5, 6), run)
    assert by_functions


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_ends_at_the_norm(reentrant: bool, by_functions: list[tuple[int, BatchNorm]]) -> None:
    def run(model: Any, x: Tensor) -> list[Tensor]:
        x.requires_grad_()
        y = model[2](checkpoint(model[:2], x, use_reentrant=reentrant))
        y.square().sum().backward()
        return [y.detach(), x.grad, *(each.grad for each in model.parameters()), *model.buffers()]  # type: ignore[list-item]

    compare(chain(nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 5, 6), run)
    assert by_functions


def test_one_value(by_functions: list[tuple[int, BatchNorm]]) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    polyphase.accelerate(model, fuse=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3, 1, 1))
    with pytest.raises(ValueError, match="expected 4D input"):
        model(torch.randn(3, 2, 2))
    assert not by_functions


def test_restored(by_functions: list[tuple[int, BatchNorm]]) -> None:
    model = chain(nn.BatchNorm2d(4), nn.ReLU())
    polyphase.accelerate(model, fuse=True)
    polyphase.restore(model)
    trained(model, torch.randn(2, 3, 5, 6))
    assert not by_functions


def split(act: nn.Module, run: Any) -> None:
    """Compare models of which ``run`` makes the output by the layer and the norm, and the activation, by itself."""

    def train(model: Any, x: Tensor) -> list[Tensor]:
        y = run(model[:2], model[2], x.requires_grad_())
        if y.requires_grad:
            y.square().sum().backward()
        found = [y, *(each.grad for each in (x, *model.parameters()) if each.grad is not None), *model.buffers()]
        return [*found, torch.tensor(y.requires_grad)]

    compare(chain(nn.BatchNorm2d(4), act), torch.randn(2, 3, 5, 6), train)


class ScaledCopy(torch.autograd.Function):
    """A function that scales gradients, and gives a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


class Scaled(torch.autograd.Function):
    """A function in C++ and Python that scales gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


def _without_derivatives(before: Any, act: Any, x: Tensor) -> Tensor:
    y = before(x)
    with torch.no_grad():
        return act(y)  # type: ignore[no-any-return]


def _copy_without_derivatives(before: Any, act: Any, x: Tensor) -> Tensor:
    y = before(x)
    with torch.no_grad():
        copied, detached = y.clone(), y.detach()
    assert not copied.requires_grad
    return act(copied) + act(detached)  # type: ignore[no-any-return]


def _in_inference_mode_first(before: Any, act: Any, x: Tensor) -> Tensor:
    y = before(x)
    with torch.inference_mode():
        act(y)
    return act(y)  # type: ignore[no-any-return]


def _twice(before: Any, act: Any, x: Tensor) -> Tensor:
    y = before(x)
    first = act(y)
    second = act(y)
    first.mul_(2)
    return first * act(y) + second  # type: ignore[no-any-return]


def _twice_without_derivatives(before: Any, act: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return _twice(before, act, x)


def _both(before: Any, act: Any, x: Tensor) -> Tensor:
    y = before(x)
    return act(y) * act(Scaled.apply(y))  # type: ignore[no-any-return, no-untyped-call]


def _changed_weight(before: Any, act: Any, x: Tensor) -> Tensor:
    y = before(x)
    with torch.no_grad():
        before[1].weight.mul_(2)
    return act(y).detach()  # type: ignore[no-any-return]


BETWEEN = {
    "a weight that changes": _changed_weight,
    "the activation in a reentrant checkpoint": lambda before, act, x: checkpoint(act, before(x), use_reentrant=True),
    "the activation in a checkpoint": lambda before, act, x: checkpoint(act, before(x), use_reentrant=False),
    "the activation compiled": lambda before, act, x: torch.compile(act, backend="eager")(before(x)),
    "a function of gradients": lambda before, act, x: act(Scaled.apply(before(x))),  # type: ignore[no-untyped-call]
    "a function that copies": lambda before, act, x: act(ScaledCopy.apply(before(x))),  # type: ignore[no-untyped-call]
    "a copy without derivatives": _copy_without_derivatives,
    "that and the activation": _both,
    "the activation without derivatives": _without_derivatives,
    "the activation in inference mode": _in_inference_mode_first,
    "the activation several times": _twice,
    "and without derivatives": _twice_without_derivatives,
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_norm_and_activation(name: str, by_functions: list[tuple[int, BatchNorm]]) -> None:
    split(nn.SiLU(), BETWEEN[name])
    assert by_functions


def test_a_parents_hook_of_gradients(by_functions: list[tuple[int, BatchNorm]]) -> None:
    def train(model: Any, x: Tensor) -> list[Tensor]:
        model[0].register_full_backward_hook(lambda module, inputs, grads: None)
        return trained(model, x.requires_grad_())

    compare(nn.Sequential(chain(nn.BatchNorm2d(4)), nn.SiLU()), torch.randn(2, 3, 5, 6), train)
    assert by_functions


@pytest.mark.parametrize("given", [torch._neg_view, lambda grad: grad])
def test_gradients_that_are_no_plain_tensors(given: Any, by_functions: list[tuple[int, BatchNorm]]) -> None:
    """Several at once, and such as are negated when they are read."""

    def train(model: Any, x: Tensor) -> list[Tensor]:
        y, some = model(x.requires_grad_()), torch.linspace(-1, 1, 3 * 960, dtype=x.dtype).view(3, 2, 4, 10, 12)
        (many,) = torch.autograd.grad(y, x, given(some), is_grads_batched=True, retain_graph=True)
        return [many, *torch.autograd.grad(y, x, given(some[0]))]

    compare(chain(nn.BatchNorm2d(4), nn.SiLU()), torch.randn(2, 3, 5, 6), train)
    assert by_functions


@pytest.mark.parametrize("act", [nn.ReLU6(), nn.Hardtanh(), nn.ReLU(), nn.Hardswish()], ids=str)
def test_derivatives_where_they_jump(act: nn.Module, by_functions: list[tuple[int, BatchNorm]]) -> None:
    """A norm with weights of 0 gives its bias; with a graph of the gradients as without."""

    def train(model: Any, x: Tensor) -> list[Tensor]:
        found = []
        for value in (-3.0, -1.0, 0.0, 1.0, 3.0, 6.0):
            nn.init.zeros_(model[1].weight)
            nn.init.constant_(model[1].bias, value)
            for graph in (False, True):
                y = model(x)
                found += torch.autograd.grad(y.square().sum() + y.sum(), [*model.parameters()], create_graph=graph)
        return [each.detach() for each in found]

    compare(chain(nn.BatchNorm2d(4), act), torch.randn(2, 3, 5, 6), train)
    assert by_functions


@pytest.mark.parametrize("frozen", [False, True])
def test_hooks_of_tensors_are_called_once(frozen: bool, by_functions: list[tuple[int, BatchNorm]]) -> None:
    """With a graph of the gradients, too: these are computed by a graph of their own."""

    def train(model: Any, x: Tensor) -> list[Tensor]:
        called, given = [], model[0](x.requires_grad_())
        given.register_hook(lambda grad: grad * 0.5)
        for each in model[1].parameters():
            each.register_hook(called.append)
        y = model[2](model[1](given))
        model[1].weight.requires_grad_(not frozen)
        found = torch.autograd.grad(y.square().sum(), [x, model[1].bias], create_graph=True)
        found += torch.autograd.grad(found[0].square().sum(), [x])
        return [*(each.detach() for each in found), torch.tensor(len(called))]

    compare(chain(nn.BatchNorm2d(4), nn.SiLU()), torch.randn(2, 3, 5, 6), train)
    assert by_functions


def test_saved_tensors_that_come_back_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks keep them elsewhere, and bring them back with other strides and alignment."""

    def launch(self: Any, way: int, reads: Any, scratch: Tensor, writes: Any) -> None:
        assert all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (*reads[:2], scratch, writes[2]))
        found.extend([*reads[:2], scratch])

    found: list[Tensor] = []
    monkeypatch.setattr(batch_norms.Prepared, "_launch", launch)
    x, grad, scratch = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.arange(64, dtype=torch.uint8)
    prepared = batch_norms.Prepared(BatchNorm((2, 4, 6, 8), 1e-5, 0.1), x, True)
    moved = torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)
    bytes_moved = torch.cat([scratch[:1], scratch])[1:]
    for one, kept in ((x.mT.contiguous().mT, scratch), (moved, bytes_moved)):
        prepared.backward(one, grad, None, None, kept)
    for one, other in zip(found, [x, grad, scratch] * 2, strict=True):
        assert torch.equal(one, other)


def test_another_thread_forgets_norms(
    monkeypatch: pytest.MonkeyPatch, by_functions: list[tuple[int, BatchNorm]]
) -> None:
    monkeypatch.setattr(batch_norms, "_PREPARED", EmptiedMeanwhile())
    compare(chain(nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 5, 6))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_norms_that_compute_for_themselves(by_functions: list[tuple[int, BatchNorm]]) -> None:
    """What a norm has or is told between calls, which kernels do not know of."""

    def negated_view(model: Any, x: Tensor) -> list[Tensor]:
        y = model[2](model[1](torch._neg_view(model[0](x).detach())))
        return [y.detach(), *model.buffers()]

    def frozen_statistics(model: Any, x: Tensor) -> list[Tensor]:
        model[1].track_running_stats = False
        return trained(model, x)

    def parametrized(model: Any, x: Tensor) -> list[Tensor]:
        nn.utils.parametrize.register_parametrization(model[1], "weight", Doubled())
        return trained(model, x)

    def replicated(model: Any, x: Tensor) -> list[Tensor]:
        """As by `torch.nn.DataParallel`: parameters are plain attributes."""
        for part in model:
            copied = part._replicate_for_data_parallel()
            copied._buffers = dict(part._buffers)
            for name, each in part._parameters.items():
                setattr(copied, name, 1 * each)
            x = copied(x)
        x.square().sum().backward()
        return [x, *(each.grad for each in model.parameters()), *model.buffers()]

    def followed(model: Any, x: Tensor) -> list[Tensor]:
        graph = make_fx(model)(x)
        assert "batch_norm" in str(graph.graph)
        return [graph(x).detach()]

    for change in (negated_view, frozen_statistics, parametrized, replicated, followed):
        compare(chain(nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 5, 6), change)
    for name in ("weight", "running_var"):
        model = chain(nn.BatchNorm2d(4), nn.ReLU())
        polyphase.accelerate(model, fuse=True)
        model(torch.randn(2, 3, 5, 6))
        by_functions.clear()
        setattr(
            model[1],
            name,
            copy.deepcopy(getattr(model[1], name))[:2] if name != "weight" else nn.Parameter(torch.ones(2)),
        )
        with pytest.raises(RuntimeError, match=f"{name} should contain 4 elements not 2"):
            model(torch.randn(2, 3, 5, 6))
        assert not by_functions


def test_no_cycles(by_functions: list[tuple[int, BatchNorm]]) -> None:
    """Memory is free when the last reader is gone, not at the next collection of garbage."""
    model = chain(nn.BatchNorm2d(4), nn.SiLU())
    polyphase.accelerate(model, fuse=True)
    given = model[0](torch.randn(2, 3, 5, 6))
    kept = weakref.ref(given)
    gc.disable()
    try:
        for read in (lambda y: model[2](y), lambda y: y + 1):
            read(model[1](given))
            with torch.no_grad():
                read(model[1](given))
        del given
        assert kept() is None
    finally:
        gc.enable()
    assert by_functions
