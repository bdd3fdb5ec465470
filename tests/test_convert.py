"""``accelerate`` and ``restore``: what is swapped, what is kept, what is told."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import polyphase
from polyphase.convert import Outcome
from polyphase.functional_calls import function_calls


class Block(nn.Module):
    """An up-convolution with a skip connection, as in a U-Net."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        self.conv = nn.Conv2d(channels // 2, channels // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.up(x)).relu()


class Custom(nn.ConvTranspose2d):
    """Computes something else than its base."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(input, output_size) + 1


def unet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(8), Block(4), nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1))


def accelerate_quietly(model: nn.Module) -> polyphase.Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return polyphase.accelerate(model)


def test_swaps_in_place_and_restores() -> None:
    model = unet()
    x = torch.randn(2, 8, 4, 4)
    expected, before = model(x), str(model)
    modules, parameters = list(model.modules()), list(model.parameters())
    report = polyphase.accelerate(model)
    assert [entry.names for entry in report.swapped] == [("0.up",), ("1.up",), ("2",)]
    assert not report.left
    assert not report.already
    layers = [m for m in model.modules() if "Transpose" in repr(type(m))]
    assert len(layers) == 3
    assert all(type(m) is polyphase.ConvTranspose2d for m in layers)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert str(model) == before.replace("ConvTranspose2d", "polyphase.ConvTranspose2d")
    torch.testing.assert_close(model(x), expected)

    restored = polyphase.restore(model)
    assert [entry.names for entry in restored.swapped] == [("0.up",), ("1.up",), ("2",)]
    assert str(restored).startswith("polyphase.restore: 3 restored, 0 already done, 0 left alone")
    assert str(restored).count(" restored") == 4
    assert {type(m).__module__.split(".")[0] for m in model.modules() if m is not model} == {"torch", __name__}
    assert str(model) == before
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_root_itself(dims: int) -> None:
    model = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims](2, 3, 3)
    ours = {1: polyphase.ConvTranspose1d, 2: polyphase.ConvTranspose2d, 3: polyphase.ConvTranspose3d}[dims]
    theirs = type(model)
    report = polyphase.accelerate(model)
    assert type(model) is ours
    assert report.swapped[0].names == ("",)
    assert "the model itself" in str(report)
    polyphase.restore(model)
    assert type(model) is theirs


def test_it_really_is_the_other_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests here do not compare a model with itself."""
    model = unet()
    calls = []
    monkeypatch.setattr(
        polyphase.modules, "conv_transpose2d", lambda *arguments: calls.append(1) or arguments[0].new_zeros(1, 1, 4, 4)
    )
    polyphase.accelerate(model)
    model[2](torch.randn(1, 2, 4, 4))
    polyphase.restore(model)
    model[2](torch.randn(1, 2, 4, 4))
    assert calls == [1]


def test_shared_submodules() -> None:
    shared = nn.ConvTranspose2d(4, 4, 3)
    model = nn.ModuleDict(OrderedDict(first=shared, second=nn.Sequential(shared), third=nn.ConvTranspose2d(4, 4, 3)))
    report = polyphase.accelerate(model)
    assert [entry.names for entry in report.swapped] == [("first", "second.0"), ("third",)]
    assert model["first"] is model["second"][0] is shared
    assert type(shared) is polyphase.ConvTranspose2d
    assert "first, second.0" in str(report)


def test_shared_parameters() -> None:
    one, two = nn.ConvTranspose2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    polyphase.accelerate(model)
    assert model[0].weight is model[1].weight


def test_keeps_mode_hooks_attributes_and_optimizer() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 3))
    layer = model[0]
    seen = []
    layer.register_forward_pre_hook(lambda module, arguments: seen.append("pre"))
    layer.register_forward_hook(lambda module, arguments, output: seen.append("post"))
    layer.register_full_backward_hook(lambda module, given, got: seen.append("backward"))
    layer.register_buffer("extra", torch.ones(1))
    layer.note = "kept"
    layer.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([layer.bias], 0.1)
    model.eval()
    polyphase.accelerate(model)
    assert not layer.training
    assert layer.note == "kept"
    assert "extra" in layer.state_dict()
    assert not layer.weight.requires_grad
    before = layer.bias.clone()
    model(torch.randn(1, 2, 4, 4, requires_grad=True)).sum().backward()
    optimizer.step()
    assert seen == ["pre", "post", "backward"]
    assert not torch.equal(layer.bias, before)


def test_filter() -> None:
    model = unet()
    asked = []

    def wanted(name: str, module: nn.Module) -> bool:
        asked.append((name, type(module)))
        return name != "1.up"

    report = polyphase.accelerate(model, filter=wanted)
    assert [name for name, _ in asked] == ["0.up", "1.up", "2"]
    assert all(cls is nn.ConvTranspose2d for _, cls in asked)
    assert [entry.names[0] for entry in report.left] == ["1.up"]
    assert "filter" in report.left[0].reason
    assert type(model[1].up) is nn.ConvTranspose2d


def test_a_filter_that_raises_swaps_nothing() -> None:
    model = unet()

    def broken(name: str, module: nn.Module) -> bool:
        if name == "1.up":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError, match=r"1\.up"):
        polyphase.accelerate(model, filter=broken)
    assert all(type(module) is nn.ConvTranspose2d for module in (model[0].up, model[1].up, model[2]))


def test_subclasses_are_left_alone() -> None:
    class Later(polyphase.ConvTranspose2d):
        pass

    model = nn.Sequential(Custom(2, 2, 3), Later(2, 2, 3), nn.ConvTranspose2d(2, 2, 3))
    report = polyphase.accelerate(model)
    assert [entry.outcome for entry in report.entries] == [Outcome.LEFT, Outcome.LEFT, Outcome.SWAPPED]
    assert "Custom is a subclass of ConvTranspose2d" in report.left[0].reason
    assert type(model[0]) is Custom
    restored = polyphase.restore(model)
    assert [entry.outcome for entry in restored.entries] == [Outcome.LEFT, Outcome.LEFT, Outcome.RESTORED]
    assert type(model[1]) is Later


def test_a_second_time() -> None:
    model = unet()
    polyphase.accelerate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = polyphase.accelerate(model)
    assert not report.swapped
    assert len(report.already) == 3


@pytest.mark.parametrize(
    ("model", "mentions"),
    [
        (nn.Sequential(nn.Conv2d(2, 2, 3)), "nothing was swapped in Sequential"),
        (nn.Linear(2, 2), "nothing was swapped in Linear"),
        (nn.Sequential(Custom(2, 2, 3)), "Custom is a subclass"),
    ],
)
def test_warns_when_nothing_matched(model: nn.Module, mentions: str) -> None:
    with pytest.warns(UserWarning, match=mentions) as caught:
        report = polyphase.accelerate(model)
    assert not report.swapped
    assert caught[0].filename == __file__


@pytest.mark.parametrize("filter", [3, "up", [nn.ConvTranspose2d]])
def test_a_filter_that_cannot_be_called(filter: Any) -> None:
    model = unet()
    words = f"as filter a function of a name and a module, or None, not {filter!r}"
    with pytest.raises(TypeError, match=re.escape(words)):
        polyphase.accelerate(model, filter)
    assert not any(isinstance(module, polyphase.ConvTranspose2d) for module in model.modules())


def test_report_says_where_the_portable_path_computes() -> None:
    words = "On cpu polyphase uses its portable path"
    report = polyphase.accelerate(nn.Sequential(nn.ConvTranspose1d(2, 2, 3), nn.LazyConvTranspose1d(2, 3)))
    assert report.note.startswith(words)
    assert words in str(report)
    assert report.entries[0].device == torch.device("cpu")
    assert not polyphase.accelerate(nn.ConvTranspose1d(2, 2, 3, device="meta")).note, "it will be moved"
    assert not polyphase.restore(nn.Sequential(polyphase.ConvTranspose1d(2, 2, 3))).note, "PyTorch computes"


def test_warns_when_the_filter_excludes_all() -> None:
    with pytest.warns(UserWarning, match="filter"):
        polyphase.accelerate(unet(), filter=lambda name, module: False)


def test_report_reads_well() -> None:
    model = nn.Sequential(unet(), Custom(2, 2, 3), polyphase.ConvTranspose1d(2, 2, 3))
    report = polyphase.accelerate(model)
    text = str(report)
    assert "3 swapped, 1 already done, 1 left alone" in text
    assert "0.0.up" in text
    assert "ConvTranspose2d(8, 4, kernel_size=(2, 2), stride=(2, 2))" in text
    assert "left alone: Custom is a subclass" in text
    assert "\x1b" not in text
    assert report.__rich__().row_count == 5
    assert repr(report) == text
    with pytest.warns(UserWarning, match="nothing was swapped in Sequential"):
        nothing = polyphase.accelerate(nn.Sequential(nn.ReLU(), AlreadyOurs()))
    assert str(nothing) == "polyphase.accelerate: no ConvTranspose1d/2d/3d module found"


def test_a_report_s_notes_have_lines_of_their_own() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)).eval()
    lines = str(polyphase.accelerate(model, fuse=True)).splitlines()
    assert any(line.startswith("On cpu polyphase uses its portable path") for line in lines)
    assert any(
        line.startswith("0: fused with 1 (ReLU); ends there: 2 is a ConvTranspose2d, which is not fused")
        for line in lines
    )
    assert any(line.startswith("2: not fused: the next thing is the model's output") for line in lines)


def test_a_report_is_not_the_model() -> None:
    built = unet()
    model = polyphase.accelerate(built)
    words = r"accelerate changes the model itself, and returns this report: write polyphase.accelerate\(model\) without"
    with pytest.raises(TypeError, match=words):
        model(torch.rand(1, 8, 4, 4))
    for name in ("eval", "parameters", "state_dict", "to", "half"):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=words + f".*{name!r}"):
            getattr(model, name)
    assert model.model is built
    assert copy.copy(model) == model
    assert str(pickle.loads(pickle.dumps(model))) == str(model)


class Functional(nn.Module):
    """Has no layer to swap: it calls the function, from a method of its own."""

    weight = torch.ones(2, 2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)

    def up(self, x: Tensor) -> Tensor:
        return nn.functional.conv_transpose2d(x, self.weight)


class AlreadyOurs(Functional):
    def up(self, x: Tensor) -> Tensor:
        return polyphase.conv_transpose2d(x, self.weight)


def test_tells_of_calls_of_the_function() -> None:
    with pytest.warns(UserWarning, match=r"Functional\.up calls conv_transpose2d\. Call polyphase's"):
        polyphase.accelerate(nn.Sequential(Functional(), nn.ReLU()))
    report = polyphase.accelerate(nn.Sequential(Functional(), nn.ConvTranspose2d(2, 2, 3)))
    assert "Functional.up calls conv_transpose2d" in report.note
    assert ('polyphase.override("cpu")' in report.note) is not torch.cuda.is_available()
    assert len(report.swapped) == 1
    assert function_calls(AlreadyOurs()) == []


def test_weight_norm_of_either_kind() -> None:
    for apply in (nn.utils.weight_norm, parametrizations.weight_norm):
        theirs, ours = nn.ConvTranspose1d(4, 2, 8, stride=4), nn.ConvTranspose1d(4, 2, 8, stride=4)
        ours.load_state_dict(theirs.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old kind is deprecated
            theirs, ours = apply(theirs), apply(ours)
        assert len(polyphase.accelerate(ours).swapped) == 1
        assert list(ours.state_dict()) == list(theirs.state_dict())
        x = torch.randn(2, 4, 5)
        for model in (theirs, ours):
            model(x).square().sum().backward()
        for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_parametrizations_stay_and_can_be_removed() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.ConvTranspose2d(3, 2, 3))
    plain = copy.deepcopy(model)
    parametrize.register_parametrization(model[0], "weight", Doubled())
    parametrize.register_parametrization(model[0], "bias", Doubled())
    untouched = copy.deepcopy(model)
    x = torch.randn(1, 2, 5, 5)
    expected = model(x)
    report = polyphase.accelerate(model)
    assert len(report.swapped) == 2
    assert isinstance(model[0], polyphase.ConvTranspose2d)
    assert parametrize.is_parametrized(model[0], "weight")
    assert parametrize.type_before_parametrizations(model[0]) is polyphase.ConvTranspose2d
    assert list(model.state_dict()) == list(untouched.state_dict())
    torch.testing.assert_close(model(x), expected)
    assert not isinstance(untouched[0], polyphase.ConvTranspose2d), "a copy shares its class with the original"
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)

    parametrize.register_parametrization(model[1], "weight", Doubled())
    assert isinstance(model[1], polyphase.ConvTranspose2d)

    parametrize.remove_parametrizations(model[0], "weight")
    assert parametrize.is_parametrized(model[0], "bias")
    parametrize.remove_parametrizations(model[0], "bias", leave_parametrized=False)
    assert type(model[0]) is polyphase.ConvTranspose2d
    torch.testing.assert_close(model[0].weight, 2 * plain[0].weight)
    torch.testing.assert_close(model[0].bias, plain[0].bias)
    assert len(polyphase.restore(model).swapped) == 2
    assert parametrize.type_before_parametrizations(model[1]) is nn.ConvTranspose2d
    parametrize.remove_parametrizations(model[1], "weight")
    assert type(model[1]) is nn.ConvTranspose2d


def test_restores_parametrized_modules_with_their_parametrizations() -> None:
    model = parametrizations.spectral_norm(nn.ConvTranspose2d(2, 3, 3)).eval()
    x = torch.randn(1, 2, 4, 4)
    expected = model(x)
    polyphase.accelerate(model)
    torch.testing.assert_close(model(x), expected)
    polyphase.restore(model)
    assert type(model).__bases__[0] is nn.ConvTranspose2d
    assert torch.equal(model(x), expected)


def test_parametrized_subclasses_are_left_alone() -> None:
    model = parametrize.register_parametrization(Custom(2, 2, 3), "weight", Doubled())
    report = accelerate_quietly(model)
    assert "subclass" in report.left[0].reason


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyConvTranspose2d(4, 3, stride=2), nn.LazyConvTranspose2d(2, 3))
    reference = copy.deepcopy(model)
    polyphase.accelerate(model)
    assert all(type(m) is polyphase.LazyConvTranspose2d for m in model)
    x = torch.randn(1, 5, 4, 4)
    outputs = []
    for each in (model, reference):
        torch.manual_seed(0)
        outputs.append(each(x))
    torch.testing.assert_close(*outputs)
    assert all(type(m) is polyphase.ConvTranspose2d for m in model)
    polyphase.restore(model)
    assert all(type(m) is nn.ConvTranspose2d for m in model)
    fresh = nn.LazyConvTranspose1d(2, 3)
    polyphase.accelerate(fresh)
    polyphase.restore(fresh)
    assert type(fresh) is nn.LazyConvTranspose1d
    assert type(fresh(torch.randn(1, 2, 6))) is Tensor
    assert type(fresh) is nn.ConvTranspose1d


def test_forward_replaced_on_the_instance() -> None:
    layer = nn.ConvTranspose2d(2, 2, 3)
    original = layer.forward
    layer.forward = lambda x: original(x) + 1  # type: ignore[method-assign]
    report = accelerate_quietly(layer)
    assert "forward was replaced" in report.left[0].reason
    assert type(layer) is nn.ConvTranspose2d


def test_scripted_modules_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.ConvTranspose2d(2, 2, 3)), nn.ConvTranspose2d(2, 2, 3))
    report = polyphase.accelerate(model)
    assert [entry.outcome for entry in report.entries] == [Outcome.LEFT, Outcome.SWAPPED]
    assert "TorchScript" in report.left[0].reason


def test_quantized_modules_are_left_alone() -> None:
    quantized = pytest.importorskip("torch.ao.nn.quantized.dynamic")
    if not {"fbgemm", "qnnpack", "onednn"} & set(torch.backends.quantized.supported_engines):
        pytest.skip("this PyTorch quantizes nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(quantized.ConvTranspose2d(2, 2, 3), nn.ConvTranspose2d(2, 2, 3))
    report = polyphase.accelerate(model)
    assert [entry.outcome for entry in report.entries] == [Outcome.LEFT, Outcome.SWAPPED]
    assert "quantized" in report.left[0].reason


def test_another_librarys_layer_of_the_same_name() -> None:
    class ConvTranspose2d(nn.Module):
        pass

    report = accelerate_quietly(nn.Sequential(ConvTranspose2d()))
    assert "no subclass of PyTorch's module" in report.left[0].reason


def test_wrapped_models() -> None:
    model = unet()
    wrapped = nn.DataParallel(model)
    assert [entry.names[0] for entry in polyphase.accelerate(wrapped).swapped] == [
        "module.0.up",
        "module.1.up",
        "module.2",
    ]
    compiled = torch.compile(nn.Sequential(nn.ConvTranspose2d(2, 2, 3)), backend="eager")
    x = torch.randn(1, 2, 4, 4)
    expected = compiled(x)
    assert len(polyphase.accelerate(compiled).swapped) == 1
    torch.testing.assert_close(compiled(x), expected)


def test_state_dict_goes_both_ways() -> None:
    model, other = unet(), unet()
    polyphase.accelerate(model)
    assert list(model.state_dict()) == list(other.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(torch.ones(1, 8, 4, 4)), other(torch.ones(1, 8, 4, 4)))


def test_gradients_of_an_accelerated_model(device: torch.device) -> None:
    theirs = unet().to(device, torch.float64)
    ours = copy.deepcopy(theirs)
    polyphase.accelerate(ours)
    x = torch.randn(2, 8, 4, 4, device=device, dtype=torch.float64)
    for model in (theirs, ours):
        model(x).square().mean().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_method_of_no_module() -> None:
    """Its text was executed without a name for its globals."""
    names: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.up(x)", names)
    model = type("Model", (nn.Module,), names)()
    model.up = nn.ConvTranspose2d(2, 2, 2)
    assert function_calls(model) == []
