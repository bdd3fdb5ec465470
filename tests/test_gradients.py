"""Derivatives of every order, in reverse and forward mode, under vmap, and through the operators alone."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import polyphase
from helpers import OURS, TORCH, constants, make_operands, normal_tensor
from polyphase import ConvTransposeProblem
from polyphase.torch_op import derivatives
from polyphase.torch_op.validate import Layer

make = ConvTransposeProblem.make

TINY = [
    make((2, 2, 3), 4, 3, stride=2, padding=1, output_padding=1, groups=2, bias=True),
    make((1, 2, 2, 3), 2, (2, 3), stride=(2, 1), padding=(0, 2), bias=True),
    make((2, 2, 2, 2), 2, 2, stride=3, groups=2),
    make((1, 1, 2, 2), 2, 2, stride=2, output_padding=(2, 1), dilation=(3, 2), bias=True),
    make((1, 2, 1, 2, 2), 1, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 0)),
]


def leaves(
    problem: ConvTransposeProblem, device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function of input, weight and bias alone, and its arguments."""
    operands = make_operands(problem, dtype, device, make=normal_tensor)
    tensors = [t.requires_grad_() for t in (operands.input, operands.weight, operands.bias) if t is not None]
    return partial(_call, OURS[problem.dims], problem), tensors


def _call(function: Callable[..., Tensor], problem: ConvTransposeProblem, *tensors: Tensor) -> Tensor:
    return function(*tensors, **constants(problem))


@pytest.mark.parametrize("problem", TINY, ids=str)
def test_gradcheck(problem: ConvTransposeProblem, device: torch.device) -> None:
    function, tensors = leaves(problem, device)
    assert gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)


@pytest.mark.parametrize("problem", TINY, ids=str)
def test_gradgradcheck(problem: ConvTransposeProblem, device: torch.device) -> None:
    function, tensors = leaves(problem, device)
    assert gradgradcheck(function, tensors, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.slow
@pytest.mark.parametrize("problem", TINY[:3], ids=str)
def test_complex_gradcheck(problem: ConvTransposeProblem, device: torch.device) -> None:
    function, tensors = leaves(problem, device, torch.complex128)
    assert gradcheck(function, tensors, check_forward_ad=True)
    assert gradgradcheck(function, tensors)


@pytest.mark.parametrize("problem", [problem for problem in TINY if not any(problem.output_padding)], ids=str)
def test_third_derivative_is_pytorchs(problem: ConvTransposeProblem, device: torch.device) -> None:
    """PyTorch's own has no third derivative with output padding."""
    results = []
    for call in (OURS, TORCH):
        _, tensors = leaves(problem, device)
        x, w, *_ = tensors
        value = _call(call[problem.dims], problem, *tensors).pow(3).sum()
        for _ in range(2):
            gx, gw = torch.autograd.grad(value, (x, w), create_graph=True)
            value = gx.pow(2).sum() + gw.pow(2).sum()
        results.append(torch.autograd.grad(value, tensors))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3)))
def test_only_what_is_asked_for_is_computed(wanted: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination of operands that need a gradient: the right gradients, and no operator called in vain."""
    problem = TINY[1]
    _, tensors = leaves(problem, torch.device("cpu"))
    for tensor, want in zip(tensors, wanted):
        tensor.requires_grad_(want)
    output = _call(OURS[2], problem, *tensors)
    assert output.requires_grad == any(wanted)
    if not any(wanted):
        return
    called = []
    original = derivatives._open
    monkeypatch.setattr(
        derivatives, "_open", lambda operands, *rest: called.append(operands) or original(operands, *rest)
    )
    output.sum().backward()
    assert len(called) == wanted[0] + wanted[1]
    expected = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    _call(TORCH[2], problem, *expected).sum().backward()
    for ours, theirs in zip(tensors, expected):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_keeps_alive_only_what_a_gradient_needs(frozen: str) -> None:
    x, w = torch.randn(1, 2, 5), torch.randn(2, 2, 3)
    (w if frozen == "weight" else x).requires_grad_(False)
    kept, dropped = (w, x) if frozen == "weight" else (x, w)
    leaf = dropped.requires_grad_()
    intermediate = leaf * 2
    reference = weakref.ref(intermediate)
    pair = (intermediate, kept) if dropped is x else (kept, intermediate)
    output = polyphase.conv_transpose1d(*pair)
    del intermediate, pair
    assert reference() is None
    output.sum().backward()
    assert leaf.grad is not None


def test_hessian_and_jacobians(device: torch.device) -> None:
    problem = TINY[0]
    _, (x, w, b) = leaves(problem, device)
    for transform in (torch.func.hessian, torch.func.jacfwd, torch.func.jacrev):
        ours, theirs = (
            transform(lambda w, call=call: _call(call[1], problem, x, w, b).pow(3).sum())(w) for call in (OURS, TORCH)
        )
        torch.testing.assert_close(ours, theirs)


def test_forward_mode_without_grad_mode(device: torch.device) -> None:
    problem = TINY[1]
    _, tensors = leaves(problem, device)
    tangents = [torch.randn_like(tensor) for tensor in tensors]
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(tensor, tangent) for tensor, tangent in zip(tensors, tangents)]
        ours = forward_ad.unpack_dual(_call(OURS[2], problem, *duals)).tangent
        theirs = forward_ad.unpack_dual(_call(TORCH[2], problem, *duals)).tangent
        torch.testing.assert_close(ours, theirs)
        only_bias = _call(OURS[2], problem, *tensors[:2], duals[2])
        expected = tangents[2].view(-1, 1, 1).expand(only_bias.shape)
        torch.testing.assert_close(forward_ad.unpack_dual(only_bias).tangent, expected)


def passes(problem: ConvTransposeProblem) -> dict[str, tuple[Layer, tuple[tuple[int, ...] | None, ...]]]:
    """For each pass the layer's constants and the shapes of input, weight, output gradient and bias, None if absent."""
    x, w, y = problem.input_shape, problem.weight_shape, problem.output_shape
    layer = Layer(
        problem.kernel_size,
        problem.stride,
        problem.padding,
        problem.output_padding,
        problem.dilation,
        problem.groups,
    )
    return {
        "forward": (layer, (x, w, None, None)),
        "forward with bias": (layer, (x, w, None, (problem.out_channels,))),
        "input_grad": (layer, (None, w, y, None)),
        "weight_grad": (layer, (x, None, y, None)),
    }


@pytest.mark.parametrize("run", [derivatives.run, derivatives.run_operator], ids=["Function", "operator"])
@pytest.mark.parametrize("name", list(passes(TINY[0])))
@pytest.mark.parametrize("problem", TINY[:2], ids=str)
def test_vmap_over_every_mixture(
    problem: ConvTransposeProblem, name: str, run: Callable[..., Tensor], device: torch.device
) -> None:
    """Each operand batched in its first or its last dimension, or shared: as the calls one by one."""
    if run is derivatives.run_operator and not hasattr(torch.library, "register_vmap"):
        pytest.skip("operators take vmap rules from PyTorch 2.5 on")
    layer, shapes = passes(problem)[name]
    slots = [slot for slot, shape in enumerate(shapes) if shape is not None]

    def call(*tensors: Tensor) -> Tensor:
        arguments: list[Tensor | None] = [None] * 4
        for slot, tensor in zip(slots, tensors):
            arguments[slot] = tensor
        return run(tuple(arguments[:3]), arguments[3], layer)

    for dims in itertools.product((None, 0, -1), repeat=len(slots)):
        if all(dim is None for dim in dims):
            continue
        tensors = []
        for slot, dim in zip(slots, dims):
            shape = list(shapes[slot] or ())
            if dim is not None:
                shape.insert(0 if dim == 0 else len(shape), 3)
            tensors.append(torch.randint(-3, 4, shape, device=device).double())
        got = torch.func.vmap(call, in_dims=dims)(*tensors)
        one_by_one = [
            call(*(t if dim is None else t.select(dim, index) for t, dim in zip(tensors, dims))) for index in range(3)
        ]
        assert torch.equal(got, torch.stack(one_by_one)), dims


def test_per_sample_gradients(device: torch.device) -> None:
    problem = TINY[1]
    _, (x, w, b) = leaves(problem, device)
    images = torch.randn(4, *x.shape[1:], dtype=torch.float64, device=device)

    def loss(call: Callable[..., Tensor], w: Tensor, b: Tensor, image: Tensor) -> Tensor:
        return _call(call, problem, image[None], w, b).square().sum()

    ours, theirs = (
        torch.func.vmap(torch.func.grad(partial(loss, call[2]), (0, 1)), (None, None, 0))(w, b, images)
        for call in (OURS, TORCH)
    )
    for got, expected in zip(ours, theirs):
        torch.testing.assert_close(got, expected)


def test_ensembles_of_modules() -> None:
    """`torch.func.functional_call` over stacked parameters, as in PyTorch's tutorial on ensembles."""
    models = [polyphase.ConvTranspose2d(2, 3, 3, stride=2) for _ in range(4)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    x = torch.randn(5, 2, 4, 4)

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))  # type: ignore[no-any-return]

    got = torch.func.vmap(call, (0, 0, None))(parameters, buffers, x)
    torch.testing.assert_close(got, torch.stack([model(x) for model in models]))


OPERATORS = {
    "forward": torch.ops.polyphase.conv_transpose.default,
    "forward with bias": torch.ops.polyphase.conv_transpose.default,
    "input_grad": torch.ops.polyphase.conv_transpose_input_grad.default,
    "weight_grad": torch.ops.polyphase.conv_transpose_weight_grad.default,
}


@pytest.mark.sampled(32, 4)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("problem", [*TINY, make((0, 2, 2, 3), 2, 3)], ids=str)
def test_opcheck(problem: ConvTransposeProblem, name: str, channels_last: bool, device: torch.device) -> None:
    layer, shapes = passes(problem)[name]
    tensors = [
        None if shape is None else normal_tensor(shape, torch.Generator().manual_seed(0), torch.float64).to(device)
        for shape in shapes
    ]
    if channels_last:
        tensors = [t if t is None or t.dim() < 3 else t.movedim(1, -1).contiguous().movedim(-1, 1) for t in tensors]
    x, w, g, b = (None if tensor is None else tensor.requires_grad_() for tensor in tensors)
    arguments = {
        "input_grad": (g, w, *layer[1:]),
        "weight_grad": (x, g, *layer),
    }.get(name, (x, w, b, *layer[1:]))
    torch.library.opcheck(OPERATORS[name], arguments)


def test_operators_have_second_derivatives_of_their_own(device: torch.device) -> None:
    """Without the functions: what AOTAutograd and direct callers get."""
    for problem in TINY[:2]:
        for name, (layer, shapes) in passes(problem).items():
            present = [slot for slot, shape in enumerate(shapes) if shape is not None]
            tensors = [
                torch.randn(shapes[slot], dtype=torch.float64, device=device, requires_grad=True)  # type: ignore[arg-type]
                for slot in present
            ]

            def call(*tensors: Tensor, present: list[int] = present, layer: Layer = layer) -> Tensor:
                slots: list[Tensor | None] = [None] * 4
                for slot, tensor in zip(present, tensors):
                    slots[slot] = tensor
                return derivatives.run_operator(tuple(slots[:3]), slots[3], layer)  # type: ignore[arg-type]

            assert gradcheck(call, tensors), name
            assert gradgradcheck(call, tensors), name


def test_tensors_that_outlive_a_transform(device: torch.device) -> None:
    """What a transform of `torch.func` wrapped is, once that is over, the tensor within, as it is to PyTorch."""
    kept = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.sum()

    inside = torch.randn(1, 3, 4, 4, device=device)
    torch.func.grad(keep)(inside)
    weight = torch.randn(3, 2, 3, 3, device=device, requires_grad=True)
    assert kept[0].requires_grad
    for function in (torch.nn.functional.conv_transpose2d, polyphase.conv_transpose2d):
        output = function(kept[0], weight)
        assert output.grad_fn.next_functions[0][0] is None
        (gradient,) = torch.autograd.grad(output.sum(), weight)
        torch.testing.assert_close(gradient, torch.autograd.grad(function(inside, weight).sum(), weight)[0])


def test_checkpointing_and_accumulation(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = polyphase.ConvTranspose2d(2, 3, 3, stride=2, device=device)
    x = torch.randn(2, 2, 4, 4, device=device, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [p.grad.clone() for p in (layer.weight, layer.bias)]  # type: ignore[union-attr]
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    for parameter, once in zip((layer.weight, layer.bias), expected):
        torch.testing.assert_close(parameter.grad, 2 * once)  # type: ignore[union-attr]
