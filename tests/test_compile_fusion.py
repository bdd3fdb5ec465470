"""``polyphase.enable_compile_fusion()``: what graphs have in the place of a chain, and the same values."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import polyphase
from polyphase import runtime
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import Epilogue, Operation
from polyphase.torch_op.operators import TAGS
from test_fuse_norm import LayerNorm2d


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert config.pre_grad_custom_pass is None


class Block(nn.Module):
    """A layer, a batch norm, and what is called behind them."""

    def __init__(self, behind: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.act = polyphase.ConvTranspose2d(3, 4, 2, 2), nn.BatchNorm2d(4), nn.PReLU(4)
        self.norm.register_buffer("running_mean", torch.rand(4))
        self.skip = nn.Sequential(polyphase.ConvTranspose2d(3, 4, 2, 2), nn.ReLU(inplace=True))
        self.factor = nn.Parameter(torch.rand(4, 1, 1))
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, 4, 2·H, 2·W)."""
        return self.behind(self, self.up(x), x)


def lowered(chains: list[str], model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """What a compiled model gives of each input, by the pass and no compiler, which takes longer."""

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        chains.append("")  # a graph
        fusion: Any = config.pre_grad_custom_pass
        fusion(graph.graph)
        graph.recompile()
        return graph

    for each in inputs:
        for dim in (0, *range(2, each.dim())):
            torch._dynamo.mark_dynamic(each, dim)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = [compiled(each) for each in inputs]
    chains.remove("")  # one for all sizes
    return results


CHAINS: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "norm": (
        lambda m, y, x: F.leaky_relu(m.norm(y), 0.2, inplace=True).mul_(0.5),
        ["conv_transpose → batch_norm → leaky_relu → mul"],
    ),
    "residual": (
        lambda m, y, x: m.act(m.skip(x) + y),
        ["conv_transpose → add → prelu", "conv_transpose → relu"],
    ),
    "channels": (
        lambda m, y, x: torch.sigmoid(y * m.factor + x.mean((0, 2, 3)).mean()[None, None, None].expand(4, 1, 1)),
        ["conv_transpose → mul → add → sigmoid"],
    ),
    "samples": (  # each has another operand, which kernels would read for each output
        lambda m, y, x: torch.sigmoid(y * m.factor + x.mean((2, 3)).mean(1)[:, None, None, None].expand(-1, 4, 1, 1)),
        ["conv_transpose → mul"],
    ),
    "an earlier value": (
        lambda m, y, x: ((z := m.norm(y)) * torch.sigmoid(z) + y).tanh(),
        ["conv_transpose → batch_norm → sigmoid → mul → add → tanh"],
    ),
    "a part without another reader": (lambda m, y, x: F.relu(z := m.norm(y)) - z, ["conv_transpose → batch_norm"]),
    "two readers": (lambda m, y, x: F.relu(y) - y, []),
    "changed and read again": (lambda m, y, x: (z := torch.relu_(y), z * y)[1], []),
    "an output's copy": (
        lambda m, y, x: (y - m.factor) * y.clone().detach(),
        ["conv_transpose → sub → clone → detach → mul"],
    ),
    "the input changes": (lambda m, y, x: (F.relu(y * m.factor), x.add_(1))[0], ["conv_transpose → mul → relu"]),
    "the input changes before": (lambda m, y, x: (x.add_(1), F.relu(y))[1], []),
    "in place": (lambda m, y, x: F.relu(y, inplace=True).mul_(m.factor) + 1, ["conv_transpose → relu → mul → add"]),
    "changed by a flag's position": (lambda m, y, x: (F.relu(x, True), F.relu(y))[1], []),
    "changed by an operator": (lambda m, y, x: (torch.ops.aten.neg_(x), F.relu(y))[1], []),
    "into another tensor": (lambda m, y, x: (z := torch.ones_like(y), z.add_(y))[0], []),
    "the sum changes later": (
        lambda m, y, x: (s := m.up(x) * 1, z := y + s, s.zero_(), torch.tanh(z))[3],
        ["conv_transpose → add", "conv_transpose → mul"],
    ),
    "another dtype": (lambda m, y, x: F.relu(y.double()).float(), []),
    "no epilogue": (lambda m, y, x: torch.cumsum(F.gelu(y), 1), ["conv_transpose → gelu"]),
    "a slice": (lambda m, y, x: F.relu(y[..., 1:-2]) * m.factor, ["conv_transpose → getitem → relu → mul"]),
    "a copied slice": (lambda m, y, x: y[:, :, 2:, :-1].contiguous().cumsum(1), ["conv_transpose → getitem"]),
    "a slice that is changed": (lambda m, y, x: y[..., :-3].add_(1).cumsum(1), ["conv_transpose → getitem → add"]),
    "a slice of channels": (lambda m, y, x: F.relu(y[:, 1:, 1:]), []),
    "a slice with a step": (lambda m, y, x: F.relu(y[..., ::2]), []),
    "a slice and the whole": (lambda m, y, x: F.relu(y[..., 1:]) + y.sum(), []),
    "a slice behind other operations": (
        lambda m, y, x: (z := (2 * m.norm(y))[..., 1:-1]).tanh() * z,
        ["conv_transpose → batch_norm → mul → getitem → tanh → mul"],
    ),
    "a slice behind a sum": (
        lambda m, y, x: F.relu(y + y.detach().clone())[..., 1:],
        ["conv_transpose → detach → clone → add → relu → getitem"],
    ),
    "a slice behind a residual": (
        lambda m, y, x: F.relu(m.skip(x) + y)[..., 1:],
        ["conv_transpose → add → relu", "conv_transpose → relu"],
    ),
    "two slices and a residual": (
        lambda m, y, x: (y[..., 3:].contiguous()[:, :, :-1] + m.skip(x)[..., :-1, 3:]).relu(),
        ["conv_transpose → getitem → contiguous → getitem → add → relu", "conv_transpose → relu → getitem"],
    ),
    "an earlier value behind a slice": (
        lambda m, y, x: torch.sigmoid(y)[..., :1] + y.cumsum(1)[..., :1],
        [],
    ),
    "softmax": (lambda m, y, x: F.softmax(m.norm(y), 1) * 2, ["conv_transpose → batch_norm → softmax → mul"]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str) -> None:
    behind, chains = CHAINS[name]
    if name in ("norm", "residual") and torch.__version__ < (2, 5):
        pytest.skip("before 2.5 Dynamo does not trace through PyTorch's modules")
    model = Block(behind).eval()
    inputs = [torch.randn(2, 3, 4, 5), torch.randn(3, 3, 6, 4)]
    with torch.no_grad(), polyphase.enable_compile_fusion() as fusion:
        found = lowered(fusion.chains, model, *(x.clone() for x in inputs))
        torch.testing.assert_close(found, [model(x) for x in inputs], rtol=1e-4, atol=1e-5)
        assert sorted(fusion.chains) == sorted(chains)


def _passed(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
    fusion: Any = config.pre_grad_custom_pass
    fusion(graph.graph)
    graph.recompile()
    return graph


def resampled(x: Tensor, taps: Tensor, alpha: Tensor) -> Tensor:
    """BigVGAN's activation: twice the rate, then a snake."""
    channels = x.shape[1]
    y = F.pad(x, (2, 2), mode="replicate")
    y = 2 * F.conv_transpose1d(y, taps.expand(channels, -1, -1), stride=2, groups=channels)
    y = y[..., 5:-5]
    return y + (1.0 / (alpha + 1e-9)) * torch.sin(y * alpha).pow(2)


@pytest.mark.parametrize("device", ["cpu", None])
def test_functions_of_a_library(device: str | None) -> None:
    """Are layers while polyphase overrides PyTorch's."""
    x, taps, alpha = torch.randn(2, 4, 20), torch.rand(1, 1, 6), torch.rand(1, 4, 1)
    override = polyphase.override(device) if device else contextlib.nullcontext()
    with torch.no_grad(), override, polyphase.enable_compile_fusion() as fusion:
        found = torch.compile(resampled, fullgraph=True, dynamic=device is None, backend=_passed)(x, taps, alpha)
        torch.testing.assert_close(found, resampled(x, taps, alpha), rtol=1e-4, atol=1e-5)
        assert fusion.chains == (["conv_transpose → mul → getitem → snake"] if device else [])


def _of_a_later_value(layer: nn.Module, alpha: Tensor, x: Tensor) -> Tensor:
    kept = alpha.clone()
    factor = kept.exp()
    kept.zero_()
    y = layer(x)
    return y + torch.sin(factor * y).pow(2) * (1 / (factor + 1e-9))


def _of_a_changed_value(layer: nn.Module, alpha: Tensor, x: Tensor) -> Tensor:
    factor = alpha.exp()
    factor.mul_(2)
    y = layer(x)
    return y + torch.sin(factor * y).pow(2) * (1 / (factor + 1e-9))


def _before_of_a_changed_value(layer: nn.Module, alpha: Tensor, x: Tensor) -> Tensor:
    factor = alpha.exp()
    factor.mul_(2)
    return layer(x + torch.sin(factor * x).pow(2) * (1 / (factor + 1e-9)))


def _read_twice(layer: nn.Module, alpha: Tensor, x: Tensor) -> Tensor:
    z = F.leaky_relu(x * 1, 0.1, inplace=True)
    return layer(z)[..., 1:-1] + z


def _by_strides(layer: nn.Module, alpha: Tensor, x: Tensor) -> Tensor:
    y = layer(x)[..., 1:]
    return torch.as_strided(y, y.shape, y.stride()) + 1


def _mapped(layer: nn.Module, alpha: Tensor, x: Tensor) -> Tensor:
    return torch.vmap(lambda each: torch.relu(F.conv_transpose1d(each[None], layer.weight, padding=1))[0])(x)


@pytest.mark.parametrize(
    ("function", "chains"),
    [
        (_of_a_later_value, []),
        (_of_a_changed_value, []),
        (_before_of_a_changed_value, []),
        (_read_twice, ["conv_transpose → getitem → add"]),
        (_by_strides, []),
        (_mapped, []),
    ],
)
def test_values_that_change_or_are_read_otherwise(function: Callable[..., Tensor], chains: list[str]) -> None:
    torch.manual_seed(0)
    layer = polyphase.ConvTranspose1d(4, 4, 3, padding=0 if function is _read_twice else 1).requires_grad_(False)
    alpha, x = torch.rand(4, 1), torch.randn(2, 4, 12)
    with torch.no_grad(), polyphase.override("cpu"), polyphase.enable_compile_fusion() as fusion:
        found = torch.compile(function, fullgraph=True, backend=_passed)(layer, alpha.clone(), x.clone())
        torch.testing.assert_close(found, function(layer, alpha.clone(), x.clone()), rtol=1e-4, atol=1e-5)
        assert fusion.chains == chains


def test_a_slice_of_a_volume_keeps_what_decides_about_tf32() -> None:
    layer = polyphase.ConvTranspose3d(2, 3, 3, (1, 2, 2)).requires_grad_(False)
    with torch.no_grad(), polyphase.enable_compile_fusion() as fusion:
        for index in (slice(1, None), (..., slice(None, -1)), (..., slice(1, None))):
            torch._dynamo.reset()
            torch.compile(
                lambda x, index=index: (
                    layer(x)[(slice(None), slice(None), index)].relu()
                    if isinstance(index, slice)
                    else layer(x)[index].relu()
                ),
                backend=_passed,
            )(torch.randn(1, 2, 4, 4, 4))
    assert fusion.chains == ["conv_transpose → getitem → relu"] * 2


def test_a_sum_that_lies_as_its_other_tensor_is_left() -> None:
    """Readers may view it."""
    layer = polyphase.ConvTranspose2d(4, 4, 2, 2).requires_grad_(False)
    x, skip = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    for function, count in (
        (lambda x: (skip + layer(x)).permute(0, 2, 3, 1).view(2, -1), 0),
        (lambda x: (layer(x) + skip).view(2, -1), 1),
    ):
        torch._dynamo.reset()
        with torch.no_grad(), polyphase.enable_compile_fusion() as fusion:
            found = torch.compile(function, backend=_passed, fullgraph=True)(x)
            torch.testing.assert_close(found, function(x))
        assert len(fusion.chains) == count


def test_sizes_that_depend_on_data() -> None:
    layer = polyphase.ConvTranspose1d(4, 4, 3).requires_grad_(False)

    def function(x: Tensor) -> Tensor:
        return torch.tanh(layer(x[(x[:, 0, 0] > 0).nonzero()[:, 0]])[..., 1:])

    x = torch.randn(5, 4, 9)
    with torch.no_grad(), polyphase.enable_compile_fusion() as fusion:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            found = torch.compile(function, backend=_passed, fullgraph=True)(x)
        torch.testing.assert_close(found, function(x))
    assert fusion.chains == ["conv_transpose → getitem → tanh"]


def test_a_snake_that_records_derivatives() -> None:
    layer, alpha = polyphase.ConvTranspose1d(4, 4, 3).requires_grad_(False), torch.rand(1, 4, 1, requires_grad=True)
    with polyphase.enable_compile_fusion() as fusion:
        torch.compile(lambda x: (y := layer(x)) + torch.sin(alpha * y).pow(2) / alpha, backend=_passed)(
            torch.randn(1, 4, 9)
        )
    assert fusion.chains == []


@pytest.mark.parametrize("recorded", [False, True])
def test_a_slice_whose_bound_is_a_size(recorded: bool) -> None:
    """As causal decoders have it. Graphs that record derivatives keep it."""
    model = Block(lambda m, y, x: torch.tanh(y[..., 1 : y.shape[-1] - 2])).eval()
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with torch.set_grad_enabled(recorded), polyphase.enable_compile_fusion() as fusion:
        found = torch.compile(model, fullgraph=True, dynamic=False, backend=_passed)(x)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
        assert fusion.chains == ([] if recorded else ["conv_transpose → getitem → tanh"])


def _by_variance(x: Tensor) -> Tensor:
    return (x - x.mean(1, True)) * torch.rsqrt(torch.var(x, 1, unbiased=False, keepdim=True) + 0.25)


def _by_moments(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
    return (x - mean).div((variance + 1e-5) ** 0.5)


def _biased_by_one(x: Tensor) -> Tensor:
    return (x - x.mean(1, True)) / torch.sqrt(x.var(1, keepdim=True) + 0.25)


def _permuted(model: nn.Module, x: Tensor) -> Tensor:
    found = F.layer_norm(x.permute(0, 2, 3, 1), (4,), model.act.weight, model.of_channels.bias)
    return found.permute(0, 3, 1, 2)


NORMS: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "segment_anything": (
        lambda m, y, x: F.gelu(m.of_channels(y)),
        ["conv_transpose → layer_norm → mul → add → gelu"],
    ),
    "permuted": (lambda m, y, x: _permuted(m, y).contiguous(), ["conv_transpose → layer_norm"]),
    "with other strides": (lambda m, y, x: _permuted(m, y).movedim(1, -1).view(-1, 4), []),
    "cropped": (lambda m, y, x: _by_moments(y[:, :, :3, :3]), []),
    "by the variance": (lambda m, y, x: _by_variance(F.silu(y)) + 1, ["conv_transpose → silu → layer_norm → add"]),
    "by moments": (lambda m, y, x: _by_moments(y), ["conv_transpose → layer_norm"]),
    "another denominator": (lambda m, y, x: _biased_by_one(y), []),
    "over pixels": (lambda m, y, x: (y - y.mean(2, True)) / torch.sqrt(y.var(2, False, True) + 0.25), []),
    "read beside": (lambda m, y, x: _by_moments(y) + y, []),
    "its mean is read": (lambda m, y, x: _by_moments(y) + y.mean(1, True), []),
    "twice": (lambda m, y, x: _by_moments(F.relu(_by_moments(y))), ["conv_transpose → layer_norm → relu"]),
    "never permuted back": (lambda m, y, x: F.layer_norm(y.permute(0, 2, 3, 1), (4,)), []),
}


@pytest.mark.parametrize("name", NORMS)
def test_layer_norms_over_channels(name: str) -> None:
    behind, chains = NORMS[name]
    model, inputs = Block(behind).eval(), [torch.randn(2, 3, 4, 5), torch.randn(3, 3, 6, 5)]
    model.of_channels = LayerNorm2d(4)
    with torch.no_grad(), polyphase.enable_compile_fusion() as fusion:
        found = lowered(fusion.chains, model, *inputs)
        torch.testing.assert_close(found, [model(x) for x in inputs], rtol=1e-4, atol=1e-5)
    assert fusion.chains == chains


def test_layer_norms_that_no_kernel_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left to Inductor."""
    monkeypatch.setattr(DeviceInfo, "of", lambda device: DeviceInfo.for_arch("sm_90a"))
    epilogue, constants = Epilogue((Operation("layer_norm", (0.5,)),)), ((2, 2), (0, 0), (0, 0), (1, 1), 1)
    with FakeTensorMode():
        few, many = torch.empty(2, 16, 4, 4), torch.empty(16, 512, 2, 2)
        assert runtime.has_kernel(few, torch.empty(16, 32, 2, 2), False, epilogue, *constants)
        assert not runtime.has_kernel(few, many, True, epilogue, *constants)
        assert runtime.has_kernel(few, many, True, Epilogue(), *constants)


def test_where_derivatives_are_recorded_again_nothing_is_fused() -> None:
    """Else the layer would be computed there, and have some."""

    def behind(model: Block, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = model.up(x)
        return torch.relu(y)

    model = Block(behind).eval()
    with polyphase.enable_compile_fusion() as fusion:
        with polyphase.enable_compile_fusion():
            pass
        (found,) = lowered(fusion.chains, model, torch.randn(2, 3, 4, 5))  # still enabled
    assert not found.requires_grad
    assert not fusion.chains


def test_more_behind_what_accelerate_has_fused() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(3, 4, 2, 2), nn.BatchNorm1d(4), nn.Sequential()).eval()
    polyphase.accelerate(model, fuse=True)

    class Then(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(x))

    x = torch.randn(2, 3, 5)
    with torch.no_grad(), polyphase.enable_compile_fusion() as fusion:
        (found,) = lowered(fusion.chains, Then(), x)
        torch.testing.assert_close(found, torch.tanh(model(x)))
    assert fusion.chains == ["conv_transpose → tanh"]


def test_training_is_left_as_it_is() -> None:
    model, x = Block(CHAINS["norm"][0]).eval(), torch.randn(1, 3, 4, 4)
    with polyphase.enable_compile_fusion() as fusion:
        lowered(fusion.chains, model, x)
        torch._dynamo.reset()
        with torch.no_grad():
            lowered(fusion.chains, model.train(), x)
    assert fusion.chains == []


def test_enabling_and_disabling() -> None:
    seen: list[object] = []
    with config.patch(pre_grad_custom_pass=seen.append):
        own = config.pre_grad_custom_pass
        fusion = polyphase.enable_compile_fusion()
        assert polyphase.enable_compile_fusion() is fusion
        assert config.pre_grad_custom_pass is fusion
        fusion(torch.fx.Graph())
        assert len(seen) == 1  # the user's own pass still runs
        assert fusion.uuid() is None
        fusion.disable()
        assert config.pre_grad_custom_pass is own
    with polyphase.enable_compile_fusion() as again:
        assert again.uuid() is not None
    assert config.pre_grad_custom_pass is None


def test_inductor_can_make_a_key_of_it() -> None:
    """Some versions of PyTorch pickle it with Inductor's settings, others ask for its `uuid`."""
    with polyphase.enable_compile_fusion() as fusion:
        pickled, key = pickle.dumps(fusion), fusion.uuid()
    assert pickle.loads(pickled) is None
    assert pickle.dumps(fusion) != pickled  # disabled
    assert key != fusion.uuid()
    with polyphase.enable_compile_fusion() as another:
        assert pickle.dumps(another) == pickled
    fusion._before.append(print)
    with pytest.raises(pickle.PicklingError, match="no uuid"):
        pickle.dumps(fusion)


@pytest.mark.slow
def test_by_inductor() -> None:
    """The pass is called, and what it makes is lowered, without a copy for another layout."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.ConvTranspose2d(32, 32, 2, 2), nn.Tanh(), nn.Conv2d(32, 4, 3)
    )
    x = torch.randn(2, 3, 4, 4)
    with torch.no_grad(), config.patch(fx_graph_cache=False), polyphase.enable_compile_fusion() as fusion:
        expected = model.eval()(x)
        polyphase.accelerate(model)
        found, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert fusion.chains == ["relu → conv_transpose → tanh"]
    assert re.search(r"buf(\d+) = torch.ops.polyphase.*\n(.*\n)*?.*extern_kernels.convolution\(buf", code)
    if not TAGS:
        return  # PyTorch decides
    strides = re.findall(r"assert_size_stride\(buf\d+, \(2, 32, 4, 4\), (\(.*?\))", code)
    assert set(strides) <= {"(512, 1, 128, 32)"}


def test_layouts_beside_single_pixels() -> None:
    """A graph whose only convolutions are 1x1 stays as it lies; others are for Inductor to decide."""
    from torch._inductor.graph import GraphLowering

    original = GraphLowering.decide_layout_opt
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    w.meta["val"] = torch.empty(4, 3, 1, 1)
    y = graph.call_function(torch.ops.polyphase.conv_transpose.default, (x, w))
    y.meta["val"] = x.meta["val"] = torch.empty(1, 3, 4, 4)
    constants = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    graph.output(graph.call_function(torch.ops.aten.convolution.default, (y, w, *constants)))
    module = torch.fx.GraphModule({}, graph)
    with polyphase.enable_compile_fusion():
        assert GraphLowering.decide_layout_opt(module, is_inference=True) is False
        w.meta["val"] = torch.empty(4, 3, 3, 3)
        assert GraphLowering.decide_layout_opt(module, is_inference=True) is True  # on a CPU always
    assert GraphLowering.decide_layout_opt is original
