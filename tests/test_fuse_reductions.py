"""Poolings, reductions and norms behind a layer, taken in by ``accelerate(model, fuse=True)``: these and no others."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase
from helpers import EmptiedMeanwhile
from polyphase import reductions
from polyphase.problem.reduction import Reduction
from polyphase.torch_op import reduction as operator

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from kernelbench_level2 import LEVEL2


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Reduction]:
    """What was computed as reductions."""
    found: list[Reduction] = []
    original = operator._by_functions

    def noting(reduction: Reduction, value: Tensor, tensors: Any) -> Tensor:
        found.append(reduction)
        return original(reduction, value, tensors)

    monkeypatch.setattr(operator, "_by_functions", noting)
    return found


class Up(nn.Module):
    """A layer, and what follows it."""

    def __init__(self, behind: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.parts = nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.norm = nn.GroupNorm(2, 4)
        self.divided = nn.AvgPool2d(2, divisor_override=3)
        nn.init.normal_(self.norm.weight), nn.init.normal_(self.norm.bias)
        self.behind = behind

    def forward(self, x: Tensor) -> Any:
        """(N, 6, H, W)."""
        return self.behind(self, self.up(x))


def models(behind: Callable[..., Any], *parts: nn.Module) -> tuple[nn.Module, nn.Module, Any]:
    """A model, what it was before, and its block."""
    model = Up(behind, *parts).eval().double()
    plain = copy.deepcopy(model)
    return model, plain, polyphase.accelerate(model, fuse=True).blocks[0]


X = torch.randn(2, 6, 5, 3, dtype=torch.float64)


def largest(y: Tensor) -> Tensor:
    """Of channels."""
    values, _ = y.max(1, keepdim=True)
    return values


#: What reads a layer, the names of what it computes, and in how many kernels behind its own.
TAKEN: dict[str, tuple[Callable[..., Any], tuple[str, ...], int]] = {
    "pool": (lambda m, y: F.relu(F.max_pool2d(F.relu(y), (2, 3))), ("relu()", "max_pool()", "relu()"), 1),
    "pool twice": (lambda m, y: F.avg_pool2d(F.avg_pool2d(y, 2), 2), ("avg_pool()", "avg_pool()"), 1),
    "pools of two kinds": (lambda m, y: F.avg_pool2d(F.max_pool2d(y, 2), 2), ("max_pool()", "avg_pool()"), 2),
    "pool, norm": (lambda m, y: m.norm(F.max_pool2d(y, 2)), ("max_pool()", "norm"), 1),
    "norm": (lambda m, y: torch.tanh(m.norm(y) * m.scale), ("norm", "mul()", "tanh()"), 1),
    "norm as a function": (lambda m, y: F.group_norm(y, 2, m.norm.weight, m.norm.bias), ("group_norm()",), 1),
    "norm of positions": (lambda m, y: F.layer_norm(y, (6,)) * m.scale, ("layer_norm()", "mul()"), 1),
    "mean": (lambda m, y: y.mean((2, 3)) * 2, ("mean()", "mul()"), 1),
    "mean, kept": (lambda m, y: torch.mean(y, (-1, -2), keepdim=True) + m.scale, ("mean()", "add()"), 1),
    "mean of one dimension": (lambda m, y: y.mean(2, keepdim=True).mean(3), ("mean()", "mean()"), 2),
    "mean twice": (lambda m, y: y.mean((2, 3), keepdim=True).mean(2), ("mean()", "mean()"), 1),
    "adaptive": (lambda m, y: F.adaptive_avg_pool2d(y, 1), ("adaptive_avg_pool()",), 1),
    "logsumexp": (lambda m, y: (z := torch.logsumexp(y, 1, keepdim=True)) * torch.sigmoid(z),
                  ("logsumexp()", "sigmoid()", "mul()"), 1),
    "minimum, sum": (lambda m, y: y.amin(1, True).sum(dim=2, keepdim=True), ("amin()", "sum()"), 2),
    "softmax of lines": (lambda m, y: y.softmax(3), ("softmax()",), 1),
    "softmax of space": (lambda m, y: F.relu(y).flatten(2).softmax(-1).view(y.shape) * m.scale,
                         ("relu()", "view()", "softmax()", "view()", "mul()"), 1),
    "views by sizes": (lambda m, y: y.view(y.size(0), y.shape[1], -1).logsumexp(2),
                       ("view()", "logsumexp()"), 1),
    "a pool as lines": (lambda m, y: torch.flatten(F.max_pool2d(y, 2), 2).mean(2),
                        ("max_pool()", "view()", "mean()"), 2),
    "softmax of pools": (lambda m, y: F.softmax(F.max_pool2d(y, 2), dim=1).amax(1),
                         ("max_pool()", "softmax()", "amax()"), 2),
    "smallest": (lambda m, y: F.relu(torch.min(y, dim=1, keepdim=True)[0]), ("min()", "relu()"), 1),
    "largest": (lambda m, y: torch.max(F.relu(y), 1)[0], ("relu()", "max()"), 1),
    "values by name": (lambda m, y: y.min(-1).values.add_(1), ("min()", "add()"), 1),
    "values by unpacking": (lambda m, y: torch.sigmoid(largest(y)), ("max()", "sigmoid()"), 1),
    "operands between": (lambda m, y: (F.max_pool2d(y, 2) * m.scale + 1).sum((2, 3)),
                         ("max_pool()", "mul()", "add()", "sum()"), 1),
    "values between": (lambda m, y: (z := F.max_pool2d(y, 2) + 1, z * torch.tanh(z))[1].amax(3),
                       ("max_pool()", "add()", "tanh()", "mul()", "amax()"), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, computed: list[Reduction]) -> None:
    behind, taken, count = TAKEN[name]
    model, plain, block = models(behind)
    assert block.fused == taken
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        found, wanted = model(X), plain(X)
    assert type(found) is Tensor
    assert len(computed) == count
    torch.testing.assert_close(found, wanted)
    # With derivatives and in training it is what it was.
    for mode in (False, True):
        model.train(mode), plain.train(mode)
        torch.testing.assert_close(model(X), plain(X))
        model(X).sum().backward(), plain(X).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad, other.grad)
    polyphase.restore(model)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(X), wanted)
    assert len(computed) == count


MODULES = {
    "max": nn.MaxPool2d(2), "avg": nn.AvgPool2d((2, 3)), "adaptive": nn.AdaptiveAvgPool2d(1),
    "group": nn.GroupNorm(2, 4), "instance": nn.InstanceNorm2d(4, affine=True), "layer": nn.LayerNorm((10, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, computed: list[Reduction]) -> None:
    model, plain, block = models(lambda m, y: m.parts[0](y), copy.deepcopy(MODULES[name]))
    assert block.fused == ("parts.0",)
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
        assert len(computed) == 1
        for other in (copy.deepcopy(model), polyphase.restore(copy.deepcopy(model)).model):
            torch.testing.assert_close(other(X), plain(X))
        model.parts[0].register_forward_hook(lambda *_: None)  # type: ignore[index, operator]
        torch.testing.assert_close(model(X), plain(X))
    assert len(computed) == 2
    sequence = nn.Sequential(plain.up, plain.parts[0])  # type: ignore[index, arg-type]
    polyphase.accelerate(sequence, fuse=True)
    loaded = pickle.loads(pickle.dumps(sequence))
    with torch.no_grad():
        torch.testing.assert_close(loaded(X), plain(X))


#: What is not taken in, and what is.
LEFT: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "read again": (lambda m, y: y - y.mean((2, 3), keepdim=True), ()),
    "read before": (lambda m, y: (z := F.relu(y), z.mean(1) + z.sum(1))[1], ("relu()",)),
    "overlapping windows": (lambda m, y: F.max_pool2d(F.relu(y), 3, 2), ("relu()",)),
    "padded windows": (lambda m, y: F.avg_pool2d(y, 2, padding=1), ()),
    "rounded up": (lambda m, y: F.max_pool2d(y, 4, ceil_mode=True), ()),
    "indices": (lambda m, y: F.max_pool2d(y, 2, return_indices=True)[0], ()),
    "samples": (lambda m, y: y.mean((0, 2, 3)), ()),
    "dimensions apart": (lambda m, y: y.amax((1, 3)), ()),
    "another type": (lambda m, y: y.sum(1, dtype=torch.float32), ()),
    "one for all": (lambda m, y: y.sum(), ()),
    "another size": (lambda m, y: F.adaptive_avg_pool2d(y, 2), ()),
    "other channels": (lambda m, y: F.relu(y).reshape(y.shape[0] * 2, 2, -1).mean(2), ("relu()", "view()", "mean()")),
    "places of extremes": (lambda m, y: F.relu(y).max(1)[1], ("relu()",)),
    "extremes and their places": (lambda m, y: (z := y.min(1), z.values * z.indices)[1], ()),
    "a named tuple": (lambda m, y: tuple(torch.max(y, 1)), ()),
    "an extreme of all": (lambda m, y: y.max(), ()),
    "extremes of two": (lambda m, y: torch.min(y, m.scale), ()),
    "extremes with a number": (lambda m, y: torch.min(F.relu(y), torch.tensor(0.5, device=y.device)), ()),
    "another divisor": (lambda m, y: F.avg_pool2d(y, 2, divisor_override=3), ()),
    "another divisor of a module": (lambda m, y: m.divided(y), ()),
    "as a parameter": (lambda m, y: F.layer_norm(torch.ones_like(m.norm.weight), (4,), weight=y[0, :, 0, 0]), ()),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str, computed: list[Reduction]) -> None:
    behind, taken = LEFT[name]
    model, plain, block = models(behind)
    assert block.fused == taken
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
    assert not computed


def test_calls_that_differ_from_what_was_traced(computed: list[Reduction]) -> None:
    """Of such tensors everything is computed as PyTorch does: sizes, formats, types and modes decide at the call."""
    model, plain, block = models(lambda m, y: m.norm(F.max_pool2d(y, 2)))
    assert block.fused == ("max_pool()", "norm")
    with torch.no_grad():
        x = X.to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(x), plain(x))
        assert not computed
        single = models(lambda m, y: m.parts[0](y), nn.MaxPool2d(2))
        torch.testing.assert_close(single[0](X[0]), single[1](X[0]))  # (C, H, W)
        line = nn.Sequential(nn.ConvTranspose1d(3, 4, 2, 2), nn.MaxPool2d(2)).eval()
        assert polyphase.accelerate(line, fuse=True).blocks[0].fused == ()
        assert not computed
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model.float()(X.float()).dtype == plain.float()(X.float()).dtype
        assert not computed
        with pytest.raises(RuntimeError, match="Output size"):
            models(lambda m, y: F.max_pool2d(y, 64))[0](X)
        with pytest.raises(RuntimeError, match="should not be zero"):
            models(lambda m, y: F.max_pool2d(y, 0))[0](X)
        with pytest.raises(RuntimeError, match="output_size must be 2"):
            models(lambda m, y: F.adaptive_avg_pool2d(y, (1,)))[0](X)
        with pytest.raises(RuntimeError, match="divisor must be not zero"):
            models(lambda m, y: F.avg_pool2d(y, 2, divisor_override=0))[0](X)
        with pytest.raises(RuntimeError, match="normalized_shape"):
            models(lambda m, y: F.layer_norm(y, (5,)))[0](X)
        with pytest.raises(IndexError, match="out of range"):
            models(lambda m, y: y.mean(4))[0](X)
        assert not computed
        with pytest.raises(IndexError, match="out of range"):
            models(lambda m, y: F.max_pool2d(y, 2).flatten(2).amax(3))[0](X)


def test_indices_that_no_trace_has_seen(computed: list[Reduction]) -> None:
    """Where Python decides anew at a call, values and indices are those of PyTorch, and NaN is the largest."""

    def behind(m: Any, y: Tensor) -> Tensor:
        found = torch.max(torch.tanh(y), dim=1)
        values = found[0] * 2
        return values + found.indices + found[1].sum() if m.reads else values

    Up.reads = False  # type: ignore[attr-defined]
    model, plain, block = models(behind)
    assert block.fused == ("tanh()", "max()", "mul()")
    x = X.clone()
    x[0, 0, 1, 1] = torch.nan
    for reads in (False, True):
        model.reads = plain.reads = reads  # type: ignore[assignment]
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), equal_nan=True)
            assert model(x).isnan().any()
    assert computed


def test_another_thread_forgets_how(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, _ = models(lambda m, y: F.max_pool2d(y, 2))
    monkeypatch.setattr(reductions, "_FOUND", EmptiedMeanwhile())
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(X), plain(X))


def test_changes_in_place() -> None:
    """A tensor that is changed before the layer is computed is one that the layer does not wait for."""

    def behind(m: Any, y: Tensor) -> Tensor:
        m.up.weight.mul_(2)
        return F.max_pool2d(y, 2)

    model, plain, block = models(behind)
    assert block.fused == ()
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
    model, plain, block = models(lambda m, y: F.max_pool2d(y, 2).add_(1).mean((2, 3)))
    assert block.fused == ("max_pool()", "add()", "mean()")
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
    # The layer's own output may change, if nothing else reads it.
    model, plain, block = models(lambda m, y: m.parts[1](m.parts[0](y)), nn.ReLU(inplace=True), nn.GroupNorm(2, 4))
    assert block.fused == ("parts.0", "parts.1")
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
    behind = lambda m, y: (z := m.parts[0](y), m.parts[1](z) + y)[1]  # noqa: E731
    model, plain, block = models(behind, nn.ReLU(inplace=True), nn.GroupNorm(2, 4))
    assert "parts.1" not in block.fused
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))


@pytest.mark.parametrize(("channels", "groups", "count"), [(64, 1, 0), (65, 1, 1), (200, 1, 1), (8, 2, 1)])
def test_softmax_over_channels(channels: int, groups: int, count: int, computed: list[Reduction]) -> None:
    """In the layer's kernel, or where that is slow or has not all channels, behind it."""
    model = nn.Sequential(nn.ConvTranspose2d(6, channels, 2, 2, groups=groups), nn.ReLU(), nn.Softmax(1)).double()
    plain = copy.deepcopy(model.eval())
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("1", "2")
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
        torch.testing.assert_close(model(X[0]), plain(X[0]))  # over another dimension
    assert len(computed) == count


@pytest.mark.parametrize(("channels", "count"), [(64, 0), (65, 1)])
def test_softmax_that_is_concatenated(channels: int, count: int, computed: list[Reduction]) -> None:
    """The layer's own kernel writes a slice of the result; what another computes is copied to it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(6, channels, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x.repeat(1, 1, 2, 2), F.softmax(self.up(x), 1)], 1)

    model = Model().double().eval()
    plain = copy.deepcopy(model)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("softmax()", "cat()")
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
    assert len(computed) == count


def test_hooks_of_parents_see_what_is_between(computed: list[Reduction]) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(6, 4, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    model = nn.Sequential(Layer(), nn.MaxPool2d(2)).double().eval()
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, given, result: seen.append(result))
    plain = copy.deepcopy(model)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ()
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))
    assert type(seen[-1]) is Tensor
    assert not computed


#: Problems as they were written for experiment 021, with other functions of the same result.
EQUAL: dict[int, Callable[..., Tensor]] = {
    36: lambda m, x: F.gelu(m.up(x).amin(1, keepdim=True).sum(2, keepdim=True)) + m.bias,
    74: lambda m, x: m.pool(F.leaky_relu(F.leaky_relu(m.up(x), 0.2) * m.factor, 0.2)),
    89: lambda m, x: (
        z := torch.softmax(m.pool(m.up(x)), 1) - m.less.view(1, -1, 1, 1, 1),
        (torch.sigmoid(z) * z).amax(1),
    )[1],
}


@pytest.mark.parametrize("number", EQUAL)
def test_level2_asks_for_the_kernels_of_the_record(number: int, computed: list[Reduction]) -> None:
    """As KernelBench publishes them they are fused as the functions with which they were measured."""
    own: list[Any] = []
    results, fused = [], []
    for run in (None, EQUAL[number]):
        torch.manual_seed(number)
        model: Any = LEVEL2[number].build().eval().double()
        model.run = model.run if run is None else run
        fused.append(len(polyphase.accelerate(model, fuse=True).blocks[0].fused))
        channels = LEVEL2[number].inputs[0][1]
        chain = model.up._chain
        chain._run = lambda *args, run=chain._run: (own.append(args[2]), run(*args))[1]
        with torch.no_grad():
            results.append(model(torch.ones(1, channels, *(4,) * (model.up.weight.dim() - 2)).double()))
    assert fused[0] == fused[1]
    assert computed[: len(computed) // 2] == computed[len(computed) // 2 :]
    assert [step.kind for step in own[0]] == [step.kind for step in own[1]]
    assert torch.equal(*results)


@pytest.mark.parametrize("number", LEVEL2)
def test_level2(number: int, computed: list[Reduction]) -> None:
    """KernelBench's problems, at small sizes."""
    torch.manual_seed(number)
    model = LEVEL2[number].build().eval().double()
    plain = copy.deepcopy(model)
    polyphase.accelerate(model, fuse=True)
    inputs = [torch.randn(2, size[1], *(min(each, 6) for each in size[2:])).double() for size in LEVEL2[number].inputs]
    if number in (3, 34):  # whose norm is over 64 columns
        inputs = [torch.randn(1, 32, 2, 3, 32).double()]
    with torch.no_grad():
        if len(inputs) > 1:
            inputs[1] = torch.randn_like(plain.up(inputs[0]))  # type: ignore[operator]
        torch.testing.assert_close(model(*inputs), plain(*inputs))
    assert bool(computed) == (number not in (2, 5, 15, 16, 20, 26, 49, 93, 100))


#: What takes sizes that are read of the output, or one alone.
SIZES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "norm of the last": (lambda m, y: F.layer_norm(y, (y.shape[-1],)), ("layer_norm()",)),
    "norm of a list": (lambda m, y: F.layer_norm(y, [y.size(-1)], eps=0.1), ("layer_norm()",)),
    "norm of several": (lambda m, y: F.layer_norm(y, y.shape[2:]), ()),
    "one dimension": (lambda m, y: y.view(-1), ()),
    "one dimension in brackets": (lambda m, y: F.relu(torch.reshape(y, (-1,))), ("view()", "relu()")),
    "another type": (lambda m, y: y.clamp(1, 1).view(torch.int64), ("clamp()",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    behind, taken = SIZES[name]
    model, plain, block = models(behind)
    assert block.fused == taken
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))


@pytest.mark.parametrize("call", [
    lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    lambda model: torch.jit.trace(model, X),
    lambda model: torch.export.export(model, (X,)).module(),
], ids=["compile", "trace", "export"])  # fmt: skip
def test_sizes_while_traced(call: Callable[[nn.Module], Any]) -> None:
    model, plain, block = models(lambda m, y: m.parts[0](y).view(y.shape[0], y.size(1), -1).mean(2), nn.ReLU())
    assert block.fused == ("parts.0", "view()", "mean()")
    with torch.no_grad():
        torch.testing.assert_close(call(model)(X), plain(X))


#: Attributes of modules that are changed later.
CHANGES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "padding": (nn.MaxPool2d(2), {"padding": 1}),
    "rounded up": (nn.AvgPool2d(4), {"ceil_mode": True}),
    "windows": (nn.AvgPool2d(2), {"kernel_size": 3}),
    "larger windows": (nn.AvgPool2d(2), {"kernel_size": 3, "stride": 3}),
    "size": (nn.AdaptiveAvgPool2d(1), {"output_size": 2}),
    "epsilon": (nn.GroupNorm(2, 4), {"eps": 1}),
    "groups": (nn.GroupNorm(2, 4), {"num_groups": 1}),
    "statistics": (nn.InstanceNorm2d(4), {"running_mean": torch.ones(4).double(), "track_running_stats": True,
                                          "running_var": torch.ones(4).double()}),
    "dimension": (nn.Softmax(1), {"dim": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changed_modules(name: str) -> None:
    """What a module is to compute at the call decides."""
    module, attributes = CHANGES[name]
    model, plain, block = models(lambda m, y: torch.tanh(m.parts[0](y)), copy.deepcopy(module))
    assert block.fused == ("parts.0", "tanh()")
    for each in (model, plain):
        vars(each.parts[0]).update(attributes)  # type: ignore[index]
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))


#: Modules behind a view of three dimensions.
BEHIND_VIEWS = {
    "over channels": nn.Softmax(1), "over samples": nn.Softmax(-3), "third from last": nn.Softmax2d(),
    "group": nn.GroupNorm(2, 4), "layer": nn.LayerNorm(60), "channels and all": nn.LayerNorm((4, 60)),
    "pool": nn.MaxPool2d(2), "adaptive": nn.AdaptiveAvgPool2d(1), "slope": nn.PReLU(4), "batch": nn.BatchNorm2d(4),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND_VIEWS)
def test_modules_behind_views(name: str) -> None:
    """They are of as many dimensions as the view has."""
    model, plain, block = models(lambda m, y: m.parts[0](y.flatten(2)), copy.deepcopy(BEHIND_VIEWS[name]))
    assert block.fused == ("view()", "parts.0")
    with torch.no_grad():
        if name == "batch":
            with pytest.raises(ValueError, match="expected 4D"):
                model(X)
        else:
            torch.testing.assert_close(model(X), plain(X))


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        (nn.MaxPool2d(3, 2, 1), "1 is a MaxPool2d, with settings that are not fused"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "1 is an InstanceNorm2d, with settings that are not fused"),
        (lambda model, y: y.mean(0), "mean() reads its output, in a way that is not fused"),
    ],
)
def test_settings_that_are_not_fused_are_told(behind: Any, reason: str) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), behind) if isinstance(behind, nn.Module) else Up(behind)
    assert reason in str(polyphase.accelerate(model.eval(), fuse=True))
