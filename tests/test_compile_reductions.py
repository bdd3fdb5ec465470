"""Poolings, reductions and norms behind a layer under `torch.compile`, as calls of ``polyphase::reduce_groups``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase
from polyphase import compile_fusion
from polyphase.problem.epilogue import Epilogue, Operand, Operation
from polyphase.problem.reduction import Reduction, decoded, encoded
from test_compile_fusion import _passed
from test_fuse_reductions import TAKEN, Up, X

#: Those of `TAKEN` that Inductor computes.
LEFT = {"softmax of pools"}


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass as on a GPU."""
    monkeypatch.setattr(compile_fusion, "has_kernels", Tensor.is_contiguous)


def reduced(model: nn.Module, x: Tensor, **options: Any) -> tuple[Any, list[Reduction], list[str]]:
    """The result of a compiled model, the reductions in its graph, and the chains found."""
    found: list[Reduction] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        _passed(graph, examples)
        calls = (node for node in graph.graph.nodes if node.target is compile_fusion.reduce_groups)
        found.extend(decoded(node.args[2]) for node in calls)
        return graph

    torch._dynamo.reset()
    polyphase.accelerate(model)
    with torch.no_grad(), polyphase.enable_compile_fusion() as fusion:
        result = torch.compile(model, backend=backend, fullgraph=True, **options)(x)
    return result, found, fusion.chains


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    behind, _, count = TAKEN[name]
    model = Up(behind).eval().double()
    with torch.no_grad():
        wanted = model(X)
    found, kernels, chains = reduced(model, X)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()
    assert len(kernels) == (0 if name in LEFT else count)
    assert len(chains) == (name not in LEFT)


def test_what_a_later_value_reads_stays() -> None:
    for behind in (
        lambda m, y: y - y.mean((2, 3), keepdim=True),
        lambda m, y: (y.amax(1), y.argmax(1)),
        lambda m, y: y.max(1)[1],
        lambda m, y: sum(y.max(1)),
        lambda m, y: F.max_pool2d(y, 2, return_indices=True),
        lambda m, y: y.flatten(2),
        lambda m, y: y.view(2, 4, -1).mul(2).exp(),
        lambda m, y: y.mean((0, 2)),
        lambda m, y: F.max_pool2d(y, 3, 2),
        lambda m, y: y.double().mean(1, dtype=torch.float32),
    ):
        model = Up(behind).eval().double()
        with torch.no_grad():
            wanted = model(X)
        found, kernels, chains = reduced(model, X)
        torch.testing.assert_close(found, wanted)
        assert not kernels
        assert not chains


def test_behind_an_epilogue_and_a_slice() -> None:
    model = Up(lambda m, y: m.norm(F.relu(y[..., 1:, :-1] * m.scale).amax(2, keepdim=True))).eval().double()
    with torch.no_grad():
        wanted = model(X)
    found, kernels, chains = reduced(model, X)
    torch.testing.assert_close(found, wanted)
    assert chains == ["conv_transpose → getitem → mul → relu → amax → group_norm"]
    assert [each.shape for each in kernels] == [(2, 4, 9, 5), (2, 4, 1, 5)]


def test_behind_what_computes_nothing() -> None:
    model = Up(lambda m, y: F.max_pool2d(F.dropout(y, training=False), 2)).eval().double()
    found, kernels, chains = reduced(model, X)
    torch.testing.assert_close(found, F.max_pool2d(model.up(X), 2))
    assert len(kernels) == 1
    assert chains == ["conv_transpose → dropout → max_pool"]


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_norms_that_read_a_group_twice(dtype: torch.dtype, count: int) -> None:
    model = nn.Sequential(nn.ConvTranspose1d(2, 4, 2, 2), nn.GroupNorm(1, 4), nn.ReLU()).eval().to(dtype)
    x = torch.randn(1, 2, 4096, dtype=dtype)
    with torch.no_grad():
        wanted = model(x)
    found, kernels, _ = reduced(model, x)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert len(kernels) == count


def _copied_meanwhile(m: nn.Module, y: Tensor) -> Tensor:
    q = torch.relu(y)
    y.clone()
    z = q.amax(2)
    return torch.sigmoid(z) * z


@pytest.mark.parametrize(
    "behind",
    [
        *(lambda m, y, of=of: of(torch.relu(y).mean((1, 2, 3)), m.scale[0, 0]) for of in (torch.add, torch.mul)),
        lambda m, y: y.sum((1, 2, 3)) - m.scale[0, 0, 0],
        _copied_meanwhile,
        lambda m, y: y.amax(1, keepdim=True) * m.scale,
        lambda m, y: F.relu(y.amax(2) + m.scale[:, 0]),
    ],
)
def test_operands_of_other_shapes(behind: Any) -> None:
    model = Up(behind).eval().double()
    with torch.no_grad():
        wanted = model(X)
    found, _, _ = reduced(model, X)
    torch.testing.assert_close(found, wanted)


class Alone(nn.Module):
    """A layer, and what follows it."""

    def __init__(self, up: nn.Module, behind: Any) -> None:
        super().__init__()
        self.up, self.behind = up, behind

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, *spatial)."""
        result: Tensor = self.behind(self.up(x))
        return result


@pytest.mark.parametrize(
    ("up", "shape", "behind"),
    [
        (nn.ConvTranspose2d(2, 2, 2, 2), (2, 2, 1, 5),
         lambda y: torch.relu(p := y.amax(3, keepdim=True)).amax(3) + p),
        (nn.ConvTranspose1d(2, 4, 2, 2), (1, 2, 6),
         lambda y: torch.relu(p := F.max_pool1d(y, 2)).view(1, 4, 1, 6) + p),
    ],
)  # fmt: skip
def test_an_earlier_value_that_is_broadcast(up: nn.Module, shape: tuple[int, ...], behind: Any) -> None:
    model, x = Alone(up, behind).eval().double(), torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(x)
    found, _, _ = reduced(model, x)
    torch.testing.assert_close(found, wanted)


def test_symbolic_sizes_are_left_to_inductor() -> None:
    model = Up(lambda m, y: F.relu(y).amax(1)).eval().double()
    with torch.no_grad():
        wanted = model(X)
    found, kernels, chains = reduced(model, X, dynamic=True)
    torch.testing.assert_close(found, wanted)
    assert not kernels
    assert chains == ["conv_transpose → relu"]


@pytest.mark.parametrize(("channels", "count"), [(64, 0), (72, 1)])
def test_softmaxes_of_many_channels(channels: int, count: int) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, channels, 2, 2), nn.Softmax(1)).eval()
    x = torch.randn(1, 4, 3, 3)
    with torch.no_grad():
        wanted = model(x)
    found, kernels, chains = reduced(model, x)
    torch.testing.assert_close(found, wanted)
    assert len(kernels) == count
    assert chains == ["conv_transpose → softmax"]


def test_derivatives_and_training() -> None:
    model = Up(lambda m, y: F.relu(y).amax(1)).double()
    polyphase.accelerate(model)
    with polyphase.enable_compile_fusion() as fusion:
        found = torch.compile(model, backend=_passed)(X)
    torch.testing.assert_close(found, model(X))
    assert not fusion.chains


def test_text() -> None:
    """A reduction and its text."""
    before = Epilogue((Operation("prelu", (), (Operand("slope", "channel"),)), Operation("affine", (2.0, -0.5))))
    after = Epilogue((Operation("scale_shift", (), (Operand("scale", "channel", True),)), Operation("add_value", of=0)))
    for reduction in (
        Reduction((2, 4, 8)),
        Reduction((2, 4, 8, 6), "max", (2, 3), before, "norm", 1, 3, 2, 1e-5, after),
        Reduction((2, 4, 8), over="softmax", first=2, last=2, after=after, by_position=True),
    ):
        assert decoded(encoded(reduction)) == reduction
