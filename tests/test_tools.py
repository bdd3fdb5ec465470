"""Tools that go by a layer's exact type: they take an accelerated model as they take PyTorch's."""

from __future__ import annotations

import copy
import warnings
from abc import ABC
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import polyphase
from helpers import OUR_MODULES, TORCH_MODULES
from processes import run_python

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def generator() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 4, 2, 1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 3, 3, dilation=2),
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 1, 1),
    ).eval()


def both() -> tuple[nn.Sequential, nn.Sequential]:
    """A model, and its accelerated copy."""
    theirs = generator()
    for norm in (theirs[1], theirs[4]):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    return theirs, polyphase.accelerate(copy.deepcopy(theirs)).model


X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dims", OUR_MODULES)
def test_classes_are_equal_to_those_they_stand_for(dims: int) -> None:
    ours, theirs = OUR_MODULES[dims], TORCH_MODULES[dims]
    assert ours is not theirs
    assert ours == theirs
    assert theirs == ours
    assert (ours != theirs) is False
    assert ours in (nn.Linear, theirs)
    assert {theirs: 1}[ours] == 1
    assert {ours: 1}[theirs] == 1
    assert ours != TORCH_MODULES[dims % 3 + 1]
    assert isinstance(ours(2, 2, 3), theirs)
    assert not isinstance(theirs(2, 2, 3), ours)

    class Own(ours, ABC):  # type: ignore[misc, valid-type]
        pass

    assert Own not in (ours, theirs)
    assert Own in {Own}
    assert str(Own(2, 2, 3)).startswith("Own(")


def test_initialiser_by_type() -> None:
    def init(module: nn.Module) -> None:
        if type(module) in (nn.Conv2d, nn.ConvTranspose2d):
            nn.init.ones_(module.weight)

    _, ours = both()
    ours.apply(init)
    assert all(bool((ours[layer].weight == 1).all()) for layer in (0, 3, 5))


@pytest.mark.parametrize("fuse", ["fx", "modules"])
def test_batch_norms_are_fused(fuse: str) -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    from torch.ao.quantization.quantize_fx import fuse_fx

    models = [
        fuse_fx(model) if fuse == "fx" else quantization.fuse_modules(model, [["0", "1"], ["3", "4"]])
        for model in both()
    ]
    layers, expected = (dict(model.named_modules()) for model in reversed(models))
    assert isinstance(layers["0"], polyphase.ConvTranspose2d)
    assert isinstance(layers["3"], polyphase.ConvTranspose2d)
    assert layers.keys() == expected.keys()
    assert not isinstance(layers.get("4"), nn.BatchNorm2d)
    torch.testing.assert_close(models[1](X), models[0](X))
    torch.testing.assert_close(models[1](X), both()[0](X))


@pytest.mark.parametrize("tool", ["fuse_fx", "fuse_modules", "eager", "fx"])
def test_norms_that_the_layer_computes_are_not_merged_once_more(tool: str) -> None:
    """After ``accelerate(model, fuse=True)`` they stay where they are, or it is an error."""
    quantization = pytest.importorskip("torch.ao.quantization")
    from torch.ao.quantization.quantize_fx import fuse_fx

    theirs, ours = both()
    polyphase.accelerate(ours, fuse=True)
    with torch.no_grad():
        if tool == "fuse_modules":
            with pytest.raises((AssertionError, NotImplementedError), match="ConvTranspose2d"):
                quantization.fuse_modules(ours, [["0", "1"], ["3", "4"]])
            found = ours(X)
        elif tool == "fuse_fx":
            found = fuse_fx(ours)(X)
        else:
            quantize = quantized_eagerly if tool == "eager" else quantized_by_fx
            with pytest.warns(UserWarning, match="is to be quantized"):
                found = quantize(ours)(X)
            exact = theirs(X)
            of_theirs = quantize(theirs)(X)
            assert (found - exact).square().mean() < 2 * (of_theirs - exact).square().mean()
            return
        torch.testing.assert_close(found, theirs(X))


def test_fx_sees_layers() -> None:
    """A node for each, so that patterns of layers match and `restore` finds them."""
    _, ours = both()
    traced = torch.fx.symbolic_trace(ours)
    assert [node.op for node in traced.graph.nodes][1:-1] == ["call_module"] * 6
    assert torch.equal(traced(X), ours(X))
    assert len(polyphase.restore(traced).swapped) == 2
    torch.testing.assert_close(traced(X), ours(X))

    alone = torch.fx.symbolic_trace(ours[0], concrete_args={"output_size": None})
    assert torch.equal(alone(X), ours[0](X))

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = polyphase.ConvTranspose2d(4, 2, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=(12, 12))

    sized = Sized()
    assert torch.equal(torch.fx.symbolic_trace(sized)(X), sized(X))


def quantized_eagerly(model: nn.Module) -> nn.Module:
    quantization = torch.ao.quantization
    model = quantization.QuantWrapper(model)
    # Weights by tensor: per channel, PyTorch's transposed convolutions are not quantized.
    model.qconfig = quantization.QConfig(quantization.default_observer, quantization.default_weight_observer)
    quantization.prepare(model, inplace=True)
    model(X)
    return quantization.convert(model)


def quantized_by_fx(model: nn.Module) -> nn.Module:
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    quantization = torch.ao.quantization
    qconfig = quantization.QConfig(quantization.default_observer, quantization.default_weight_observer)
    prepared = prepare_fx(model, quantization.QConfigMapping().set_global(qconfig), (X,))
    prepared(X)
    return convert_fx(prepared)


@pytest.mark.parametrize("quantize", [quantized_eagerly, quantized_by_fx])
def test_quantization(quantize: Callable[[nn.Module], nn.Module]) -> None:
    """Calibrated and quantized layers are PyTorch's, which is told."""
    engines = [each for each in torch.backends.quantized.supported_engines if each in ("fbgemm", "qnnpack", "onednn")]
    if not engines:
        pytest.skip("this PyTorch quantizes nothing")
    theirs, ours = both()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = quantize(theirs)
    with pytest.warns(UserWarning, match=r"polyphase.ConvTranspose2d\(4, 6, .*\) is to be quantized, and is PyTorch's"):
        ours = quantize(ours)
    expected, got = theirs(X), ours(X)
    assert [type(module) for module in ours.modules()][1:] == [type(module) for module in theirs.modules()][1:]
    assert not any(isinstance(module, polyphase.ConvTranspose2d) for module in ours.modules())
    torch.testing.assert_close(got, expected, rtol=0, atol=0.05)


def quantized_dynamically(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def quantized_in_part(model: nn.Module) -> nn.Module:
    """Eagerly, all but the transposed convolution."""
    quantization = torch.ao.quantization
    model = quantization.QuantWrapper(model)
    model.qconfig = quantization.QConfig(quantization.default_observer, quantization.default_weight_observer)
    model.module[0].qconfig = None
    model.module = nn.Sequential(model.module[0], quantization.QuantStub(model.qconfig), model.module[1:])
    prepared = quantization.prepare(model)
    prepared.module(X)
    return quantization.convert(prepared).module


@pytest.mark.parametrize("quantize", [quantized_dynamically, quantized_in_part])
def test_layers_that_are_not_quantized_stay(quantize: Callable[[nn.Module], nn.Module]) -> None:
    """Tools set their configuration to None, and delete it in the end."""
    if not {"fbgemm", "qnnpack", "onednn"} & set(torch.backends.quantized.supported_engines):
        pytest.skip("this PyTorch quantizes nothing")
    theirs = nn.Sequential(nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Flatten(), nn.Linear(300, 8)).eval()
    ours = polyphase.accelerate(copy.deepcopy(theirs)).model
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*to be quantized")
        got, expected = quantize(ours), quantize(copy.deepcopy(theirs))
    layers = [module for module in got.modules() if isinstance(module, nn.ConvTranspose2d)]
    assert [type(layer) is polyphase.ConvTranspose2d for layer in layers] == [True]
    assert not hasattr(layers[0], "qconfig")
    with pytest.raises(AttributeError, match=r"polyphase\.ConvTranspose2d has no qconfig"):
        del layers[0].qconfig
    torch.testing.assert_close(got(X), expected(X), rtol=0, atol=0.05)


def test_quantized_tensors_are_told_of() -> None:
    x = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)
    with pytest.raises(
        polyphase.UnsupportedError, match=r"quantized tensors, got torch.quint8 as input.*restore\(model\)"
    ):
        both()[1](x)


def test_script_says_what_to_do() -> None:
    _, ours = both()
    with pytest.raises(
        NotImplementedError, match=r"cannot compile polyphase.ConvTranspose2d: .*polyphase.restore\(model\)"
    ):
        torch.jit.script(ours)
    polyphase.restore(ours)
    torch.testing.assert_close(torch.jit.script(ours)(X), ours(X))


def test_thop() -> None:
    thop = pytest.importorskip("thop")
    theirs, ours = both()
    assert thop.profile(ours, (X,), verbose=False) == thop.profile(theirs, (X,), verbose=False)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["fvcore.nn", "ptflops"])
def test_counters_that_are_imported_after_the_model_was_accelerated(tool: str) -> None:
    pytest.importorskip(tool)
    printed = run_python(f"""
        import torch, polyphase
        model = polyphase.accelerate(torch.nn.Sequential(torch.nn.ConvTranspose2d(4, 2, 3, bias=False))).model
        import {tool}
        if {tool!r} == "ptflops":
            count, _ = ptflops.get_model_complexity_info(
                model, (4, 5, 5), as_strings=False, print_per_layer_stat=False, verbose=False, backend="aten"
            )
        else:
            count = fvcore.nn.FlopCountAnalysis(model, torch.randn(1, 4, 5, 5)).total()
        print(int(count))
    """)
    assert int(printed.splitlines()[-1]) == 5 * 5 * 4 * 2 * 3 * 3


def test_fvcore() -> None:
    fvcore = pytest.importorskip("fvcore.nn")
    theirs, ours = both()
    expected, got = fvcore.FlopCountAnalysis(theirs, X), fvcore.FlopCountAnalysis(ours, X)
    assert got.total() == expected.total()
    assert got.by_module() == expected.by_module()
    assert not {name for name in got.unsupported_ops() if "polyphase" in name}


@pytest.mark.parametrize("backend", ["pytorch", "aten"])
def test_ptflops(backend: str) -> None:
    ptflops = pytest.importorskip("ptflops")
    counted = [
        ptflops.get_model_complexity_info(
            model, (4, 5, 5), as_strings=False, print_per_layer_stat=False, verbose=False, backend=backend
        )
        for model in both()
    ]
    assert counted[1] == counted[0]
