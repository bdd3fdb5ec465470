"""The modules: PyTorch's in everything but the forward pass."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import polyphase
from helpers import OUR_MODULES, TORCH_MODULES

CONSTRUCTORS: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = [
    (1, (4, 6, 5), {}),
    (1, (4, 6, 5, 3, 1, 2, 2, False, 2), {}),
    (2, (4, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    (2, (3, 5, (3, 5), (2, 3), (1, 2)), {"dilation": (2, 1), "bias": False, "dtype": torch.float64}),
    (2, (4, 4, 2), {"groups": 4, "padding_mode": "zeros"}),
    (3, (2, 3, (1, 2, 3)), {"stride": (1, 2, 1), "output_padding": (0, 1, 0)}),
]
LAZY = {
    1: (nn.LazyConvTranspose1d, polyphase.LazyConvTranspose1d),
    2: (nn.LazyConvTranspose2d, polyphase.LazyConvTranspose2d),
    3: (nn.LazyConvTranspose3d, polyphase.LazyConvTranspose3d),
}


def images(module: nn.Module, dims: int, batch: bool = True) -> torch.Tensor:
    sizes = (4, 5, 6)[:dims]
    channels = (module.in_channels,)
    weight = next(module.parameters())
    return torch.randn(*((2,) if batch else ()), *channels, *sizes).to(weight)


@pytest.mark.parametrize(("dims", "arguments", "keywords"), CONSTRUCTORS)
def test_same_constructor_random_numbers_and_state(dims: int, arguments: Any, keywords: Any) -> None:
    made = []
    for cls in (TORCH_MODULES[dims], OUR_MODULES[dims]):
        torch.manual_seed(7)
        module = cls(*arguments, **keywords)
        made.append((module, torch.rand(1)))
    (theirs, after_theirs), (ours, after_ours) = made
    assert torch.equal(after_theirs, after_ours), "another number of random numbers was drawn"
    assert isinstance(ours, TORCH_MODULES[dims])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()))
    assert repr(ours) == f"polyphase.{theirs!r}"
    assert inspect.signature(type(ours)) == inspect.signature(type(theirs))
    ours.load_state_dict(theirs.state_dict())
    for batch in (True, False):
        x = images(ours, dims, batch)
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dims", OUR_MODULES)
def test_output_size(dims: int, device: torch.device) -> None:
    theirs = TORCH_MODULES[dims](3, 2, 3, stride=3, padding=1, device=device)
    ours = OUR_MODULES[dims](3, 2, 3, stride=3, padding=1, device=device)
    ours.load_state_dict(theirs.state_dict())
    for batch in ((2,), ()):
        x = torch.randn(*batch, 3, *(4, 5, 6)[:dims], device=device)
        smallest = theirs(x).shape
        for extra in range(3):
            sizes = [size + extra for size in smallest[-dims:]]
            for output_size in (sizes, torch.Size(sizes), [*batch, 2, *sizes]):
                torch.testing.assert_close(ours(x, output_size), theirs(x, list(output_size)))
                assert list(ours(x, output_size=output_size).shape[-dims:]) == sizes
        for wrong in ([size + 3 for size in smallest[-dims:]], [0] * dims, [1] * (dims + 3), []):
            with pytest.raises(ValueError, match="output") as theirs_raised:
                theirs(x, wrong)
            with pytest.raises(ValueError, match="output") as ours_raised:
                ours(x, wrong)
            assert str(ours_raised.value) == str(theirs_raised.value)


@pytest.mark.parametrize("dims", OUR_MODULES)
@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ((3, 4, 2), {"groups": 2}),
        ((4, 3, 2), {"groups": 2}),
        ((4, 4, 2), {"groups": 0}),
        ((4, 4, 2), {"padding_mode": "reflect"}),
        ((4, 4, 2), {"padding_mode": "nonsense"}),
    ],
)
def test_constructor_errors(dims: int, arguments: Any, keywords: Any) -> None:
    with pytest.raises(Exception, match=r".") as theirs:
        TORCH_MODULES[dims](*arguments, **keywords)
    with pytest.raises(type(theirs.value)) as ours:
        OUR_MODULES[dims](*arguments, **keywords)
    assert str(ours.value) == str(theirs.value)


def test_padding_mode_changed_afterwards() -> None:
    module = polyphase.ConvTranspose2d(2, 2, 3)
    module.padding_mode = "reflect"
    with pytest.raises(ValueError, match="reflect"):
        module(torch.randn(1, 2, 4, 4))


@pytest.mark.parametrize("dims", LAZY)
@pytest.mark.parametrize("bias", [True, False])
def test_lazy(dims: int, bias: bool) -> None:
    theirs_class, ours_class = LAZY[dims]
    x = torch.randn(2, 6, *(4, 5, 6)[:dims])
    made = []
    for cls in (theirs_class, ours_class):
        torch.manual_seed(3)
        module = cls(4, 3, stride=2, groups=2, bias=bias)
        assert module.has_uninitialized_params()
        made.append((repr(module), module, module(x)))
    (theirs_repr, theirs, expected), (ours_repr, ours, got) = made
    assert ours_repr == f"polyphase.{theirs_repr}"
    assert inspect.signature(ours_class) == inspect.signature(theirs_class)
    assert type(ours) is OUR_MODULES[dims]
    assert repr(ours) == f"polyphase.{theirs!r}"
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()))
    torch.testing.assert_close(got, expected)


def test_lazy_loads_a_state_dict_before_its_first_input() -> None:
    built = nn.ConvTranspose2d(6, 4, 3)
    lazy = polyphase.LazyConvTranspose2d(4, 3)
    lazy.load_state_dict(built.state_dict())
    x = torch.randn(1, 6, 5, 5)
    torch.testing.assert_close(lazy(x), built(x))


def test_lazy_rejects_an_input_of_the_wrong_rank() -> None:
    with pytest.raises(RuntimeError, match="3D"):
        polyphase.LazyConvTranspose2d(4, 3)(torch.randn(5, 5))


def test_copies_and_pickles() -> None:
    module = polyphase.ConvTranspose2d(2, 3, 3, stride=2)
    x = torch.randn(1, 2, 4, 4)
    for copied in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied) is polyphase.ConvTranspose2d
        assert torch.equal(copied(x), module(x))


def test_meta_device_and_skip_init() -> None:
    module = polyphase.ConvTranspose2d(2, 3, 3, device="meta")
    assert module(torch.randn(1, 2, 4, 4, device="meta")).shape == (1, 3, 6, 6)
    skipped = nn.utils.skip_init(polyphase.ConvTranspose2d, 2, 3, 3)
    assert skipped.weight.device.type == "cpu"


def test_training_step_and_hooks(device: torch.device) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 1, 3)).to(device)
    ours = nn.Sequential(polyphase.ConvTranspose2d(3, 4, 4, 2, 1), nn.ReLU(), polyphase.ConvTranspose2d(4, 1, 3))
    ours.to(device).load_state_dict(theirs.state_dict())
    called = []
    ours[0].register_forward_hook(lambda module, arguments, output: called.append(output.shape))
    ours[0].register_full_backward_hook(lambda module, given, got: called.append(got[0].shape))
    x = torch.randn(2, 3, 6, 6, device=device, requires_grad=True)
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b)
    assert called == [(2, 4, 12, 12), (2, 4, 12, 12)] * 3


def test_channels_last_model_keeps_its_format(device: torch.device) -> None:
    theirs = nn.ConvTranspose2d(8, 8, 4, 2, 1, device=device).to(memory_format=torch.channels_last)
    ours = polyphase.ConvTranspose2d(8, 8, 4, 2, 1, device=device).to(memory_format=torch.channels_last)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8, 6, 6, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
    got, expected = ours(x), theirs(x)
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    assert ours.weight.grad is not None
    assert ours.weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_weights_that_are_no_parameters_count() -> None:
    """What Python finds as ``weight`` is the weight: an attribute of the instance, or a property of the class."""

    class Scaled(polyphase.ConvTranspose2d):
        pass

    x, shadowed, scaled = torch.randn(1, 4, 3, 3), polyphase.ConvTranspose2d(4, 6, 3), Scaled(4, 6, 3)
    shadowed.__dict__["weight"] = torch.ones_like(shadowed.weight)
    Scaled.weight = property(lambda self: 2 * self._parameters["weight"])  # type: ignore[assignment]
    for layer in (shadowed, scaled):
        expected = torch.nn.functional.conv_transpose2d(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), expected)
