"""``polyphase.fused``: the layer and its epilogue in PyTorch's terms, with derivatives, errors, compiled and under
autocast. What the kernels compute is `test_epilogue.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyphase
from polyphase import fused, fused_calls
from polyphase.problem.epilogue import ACTIVATIONS

SHAPES = {1: (2, 4, 7), 2: (2, 4, 3, 4), 3: (1, 4, 2, 3, 2)}
FUSED = {1: fused.conv_transpose1d, 2: fused.conv_transpose2d, 3: fused.conv_transpose3d}
PLAIN = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
CHANNELS = 6

#: Epilogues by name: their steps from a generator of tensors, and the same by PyTorch's functions.
EPILOGUES: dict[str, tuple[Callable[..., list[fused.Step | str]], Callable[..., Tensor], tuple[str, ...]]] = {
    "scale and shift": (
        lambda a, b: [fused.scale_shift(a, b)],
        lambda v, a, b: v * _per(a, v) + _per(b, v),
        ("C", "C"),
    ),
    "scale per sample": (lambda a: [fused.scale_shift(a)], lambda v, a: v * _per(a, v), ("N C",)),
    "less": (lambda a, b: [fused.subtract(a), fused.subtract(b)], lambda v, a, b: v - _per(a, v) - b, ("C", "1")),
    "numbers": (lambda: [fused.scale_shift(2.0, -0.5)], lambda v: v * 2.0 - 0.5, ()),
    "batch norm, relu": (
        lambda m, s, w, b: [fused.batch_norm(m, s, w, b), "relu"],
        lambda v, m, s, w, b: F.relu(_normalized(v, m, s, 1e-5) * _per(w, v) + _per(b, v)),
        ("C", "positive", "C", "C"),
    ),
    "batch norm without weight": (
        lambda m, s: [fused.batch_norm(m, s, eps=0.1)],
        lambda v, m, s: _normalized(v, m, s, 0.1),
        ("C", "positive"),
    ),
    "softmax": (lambda: ["silu", fused.softmax()], lambda v: torch.softmax(F.silu(v), 1), ()),
    "prelu": (lambda a: [fused.prelu(a)], lambda v, a: F.prelu(v, a), ("C",)),
    "prelu, one slope": (lambda a: [fused.prelu(a)], lambda v, a: F.prelu(v, a), ("1",)),
    "residual, gelu": (lambda r: [fused.add(r), "gelu"], lambda v, r: F.gelu(v + r), ("output",)),
    "silu, residual": (lambda r: ["silu", fused.add(r)], lambda v, r: F.silu(v) + r, ("output",)),
    "KernelBench 20": (
        lambda b: [fused.scale_shift(shift=b), fused.add_value(), fused.multiply_value(), fused.add_value()],
        lambda v, b: ((v + _per(b, v)) + v) * v + v,
        ("C",),
    ),
    "KernelBench 26": (
        lambda r: [fused.add(r), "hardswish", fused.multiply_value(1)],
        lambda v, r: (v + r) * F.hardswish(v + r),
        ("output",),
    ),
}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda v: F.leaky_relu(v, 0.3),
    "elu": lambda v: F.elu(v, 0.7),
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "clamp": lambda v: v.clamp(-0.5, 0.75),
    "softplus": lambda v: F.softplus(v, 1.5, 20.0),
    "divide": lambda v: v / 3.0,
}
_CONSTANTS = {"leaky_relu": (0.3,), "elu": (0.7,), "clamp": (-0.5, 0.75), "softplus": (1.5, 20.0), "divide": (3.0,)}
for _name in ACTIVATIONS:
    EPILOGUES[_name] = (
        lambda name=_name: [fused.activation(name, *_CONSTANTS.get(name, ()))],
        _FUNCTIONS.get(_name) or getattr(F, _name, None) or getattr(torch, _name),
        (),
    )


def _per(tensor: Tensor, v: Tensor) -> Tensor:
    """An operand against an output."""
    shape = (1, -1) if tensor.dim() == 1 else tuple(tensor.shape)
    return tensor.view(*shape, *[1] * (v.dim() - 2))


def _normalized(v: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """A batch norm that has derivatives in the statistics, as PyTorch's has not."""
    return (v - _per(mean, v)) / (_per(variance, v) + eps).sqrt()


def _case(name: str, dims: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """Input, weight and bias, and the epilogue's tensors."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    layer = [rand(*SHAPES[dims]), rand(4, CHANNELS // 2, *[3] * dims), rand(CHANNELS)]
    output = _layer(PLAIN[dims], *layer)
    shapes = {"C": (CHANNELS,), "N C": tuple(output.shape[:2]), "1": (1,), "output": tuple(output.shape)}
    tensors = [rand(CHANNELS).abs() + 0.5 if kind == "positive" else rand(*shapes[kind]) for kind in EPILOGUES[name][2]]
    return layer, tensors


def _layer(function: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None, **more: object) -> Tensor:
    return function(x, w, b, 2, 1, 1, 2, **more)


def _ours(name: str, dims: int) -> Callable[..., Tensor]:
    return lambda x, w, b, *of: _layer(FUSED[dims], x, w, b, epilogue=EPILOGUES[name][0](*of))


def _theirs(name: str, dims: int) -> Callable[..., Tensor]:
    return lambda x, w, b, *of: EPILOGUES[name][1](_layer(PLAIN[dims], x, w, b), *of)


@pytest.mark.parametrize("name", EPILOGUES)
def test_values_and_gradients_are_pytorchs(name: str) -> None:
    for dims in (1, 2, 3):
        layer, tensors = _case(name, dims)
        leaves = [each.requires_grad_() for each in (*layer, *tensors)]
        ours, theirs = _ours(name, dims)(*leaves), _theirs(name, dims)(*leaves)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
        g = torch.randn_like(theirs)
        found, wanted = torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g)
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("name", EPILOGUES)
def test_derivatives_of_second_order(name: str) -> None:
    layer, tensors = _case(name, 1)
    leaves = [each.requires_grad_() for each in (layer[0][:1, :, :3].clone(), *layer[1:])]
    output = _layer(PLAIN[1], *leaves)
    kinds = EPILOGUES[name][2]
    cut = [
        each[:1, ..., : output.shape[-1]] if kind in ("output", "N C") else each for kind, each in zip(kinds, tensors)
    ]
    cut = [each.detach().clone().requires_grad_() for each in cut]
    assert torch.autograd.gradcheck(_ours(name, 1), [*leaves, *cut])
    assert torch.autograd.gradgradcheck(_ours(name, 1), [*leaves, *cut])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    layer, tensors = _case("batch norm, relu", 2, dtype)
    wide = [each.double() for each in (*layer, *tensors)]
    expected = _theirs("batch norm, relu", 2)(*wide)
    for given in (tensors, [each.float() for each in tensors]):
        found = _ours("batch norm, relu", 2)(*layer, *given)
        assert found.dtype == dtype
        assert float((found.double() - expected).abs().max()) <= 0.51 * torch.finfo(dtype).eps * float(expected.max())


def test_unbatched_and_channels_last() -> None:
    layer, (residual,) = _case("residual, gelu", 2)
    x, w, b = layer
    found = _layer(fused.conv_transpose2d, x[0], w, b, epilogue=[fused.add(residual[0]), "gelu"])
    torch.testing.assert_close(found, _theirs("residual, gelu", 2)(x, w, b, residual)[0])
    x = x.float().to(memory_format=torch.channels_last)
    found = _layer(fused.conv_transpose2d, x, w.float(), b.float(), epilogue=[fused.add(residual.float())])
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_call_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    original = fused_calls.check
    monkeypatch.setattr(fused_calls, "check", lambda *arguments: checked.append(arguments[0]) or original(*arguments))
    layer, tensors = _case("batch norm, relu", 2)
    polyphase.functional.forget_calls()
    ours, theirs = _ours("batch norm, relu", 2), _theirs("batch norm, relu", 2)
    for factor in (1, 2):  # other values
        given = [factor * each for each in (*layer, *tensors)]
        torch.testing.assert_close(ours(*given), theirs(*given))
    assert len(checked) == 1
    ours(*layer, *(each.clone().requires_grad_() for each in tensors))
    _layer(fused.conv_transpose2d, *layer, epilogue=["relu"])
    _layer(fused.conv_transpose2d, *layer, epilogue=["gelu"])
    assert len(checked) == 4
    with pytest.raises(RuntimeError, match="must have shape"):
        _layer(fused.conv_transpose2d, *layer, epilogue=[fused.prelu(torch.ones(4, dtype=torch.float64))])


def test_nothing_to_fuse_is_the_layer() -> None:
    x, w, b = _case("relu", 2)[0]
    assert torch.equal(_layer(fused.conv_transpose2d, x, w, b), _layer(polyphase.conv_transpose2d, x, w, b))


@pytest.mark.parametrize("name", ["batch norm, relu", "residual, gelu", "KernelBench 20"])
def test_compiled(name: str) -> None:
    layer, tensors = _case(name, 2)
    leaves = [each.requires_grad_() for each in (*layer, *tensors)]
    compiled = torch.compile(_ours(name, 2), fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*leaves), _theirs(name, 2)(*leaves)
    torch.testing.assert_close(found, wanted)
    g = torch.randn_like(wanted)
    for one, other in zip(torch.autograd.grad(found, leaves, g), torch.autograd.grad(wanted, leaves, g)):
        torch.testing.assert_close(one, other)


def test_transforms_and_forward_mode() -> None:
    layer, tensors = _case("batch norm, relu", 1)
    ours, theirs = _ours("batch norm, relu", 1), _theirs("batch norm, relu", 1)
    arguments = (*layer, *tensors)
    tangents = tuple(map(torch.ones_like, arguments))
    for one, other in zip(torch.func.jvp(ours, arguments, tangents), torch.func.jvp(theirs, arguments, tangents)):
        torch.testing.assert_close(one, other)
    stacked = torch.stack([layer[0], 2 * layer[0]])
    mapped = torch.vmap(lambda x: ours(x, *arguments[1:]))(stacked)
    torch.testing.assert_close(mapped[1], theirs(stacked[1], *arguments[1:]))


def test_autocast() -> None:
    layer, tensors = _case("batch norm, relu", 2, torch.float32)
    (residual,) = _case("residual, gelu", 2, torch.float32)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert _ours("batch norm, relu", 2)(*layer, *tensors).dtype == torch.bfloat16
        assert _ours("residual, gelu", 2)(*layer, residual).dtype == torch.bfloat16


def test_operator_passes_opcheck() -> None:
    layer, tensors = _case("batch norm, relu", 2)
    from polyphase.problem.epilogue import CHANNEL, Epilogue, Operand, Operation, encoded

    roles = ("mean", "variance", "weight", "offset")
    norm = Operation("normalize", (1e-5,), tuple(Operand(role, CHANNEL) for role in roles))
    text = encoded(Epilogue((norm, Operation("relu"))))
    leaves = [each.requires_grad_() for each in layer]
    arguments = (*leaves, tensors, text, [2, 2], [1, 1], [1, 1], [1, 1], 2)
    torch.library.opcheck(torch.ops.polyphase.conv_transpose_epilogue.default, arguments)


ERRORS: dict[str, tuple[list[object], type[Exception], str]] = {
    "no activation": (["rely"], ValueError, "no activation 'rely'"),
    "a function": ([torch.relu], TypeError, r"epilogue\[0\] must be made by polyphase.fused"),
    "a shape": ([fused.scale_shift(torch.ones(5))], RuntimeError, r"must have shape \(6,\)"),
    "a dtype": ([fused.scale_shift(torch.ones(6))], RuntimeError, "must have torch.float64 as the input has, got"),
    "a residual's shape": ([fused.add(torch.ones(1, 6, 1, 1))], RuntimeError, "must have the output's shape"),
    "a later value": ([fused.add_value(1)], ValueError, "cannot read value 1"),
    "no tensor": ([fused.add(3.0)], TypeError, "residual of epilogue"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    steps, kind, message = ERRORS[name]
    x, w, b = _case("relu", 2)[0]
    with pytest.raises(kind, match=message):
        _layer(fused.conv_transpose2d, x, w, b, epilogue=steps)


def test_errors_of_makers() -> None:
    with pytest.raises(TypeError, match="numbers or tensors"):
        fused.scale_shift(2.0, torch.ones(6))
    with pytest.raises(ValueError, match="clamp takes 2 constants"):
        fused.activation("clamp")


def test_a_call_passes_operands_behind_its_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their names; a residual that lies otherwise is copied to lie as the output does."""
    from dataclasses import replace

    from polyphase import prepared
    from polyphase.plan.planner import plan
    from polyphase.problem import ConvTransposeProblem, Pass
    from polyphase.problem.device import DeviceInfo
    from polyphase.problem.epilogue import CHANNEL, ELEMENT, Epilogue, Operand, Operation

    launched: list[tuple[dict[str, int], list[int]]] = []

    class Recorded:
        def __init__(self, program: object, arch: str, index: int, places: dict[str, int]) -> None:
            self.places = places

        def __call__(self, stream: int, addresses: list[int]) -> None:
            launched.append((self.places, list(addresses)))

    monkeypatch.setattr(prepared, "Executable", Recorded)
    monkeypatch.setattr(prepared, "current_stream", lambda index: 0)  # builds for CUDA would ask the driver
    monkeypatch.setattr(prepared, "current_device", lambda: 0)
    norm = Operation("scale_shift", (), (Operand("scale", CHANNEL), Operand("shift", CHANNEL)))
    epilogue = Epilogue((norm, Operation("add", (), (Operand("residual", ELEMENT),))))
    problem = replace(ConvTransposeProblem.make((2, 16, 5, 6), 8, 4, 2, 1), epilogue=epilogue)
    program = plan(problem, Pass.FORWARD, DeviceInfo.for_arch("sm_90a")).program
    assert program is not None
    dense = torch.empty(problem.output_shape)
    call = prepared.Call(
        program, "sm_90a", 0, problem.output_shape, dense.stride(), False, prepared.empty_on_cpu, problem.named_operands
    )
    x, w = torch.ones(problem.input_shape), torch.ones(problem.weight_shape)
    scale, shift, residual = torch.ones(8), torch.ones(16)[::2], torch.ones(problem.output_shape)
    for each in (residual, residual.to(memory_format=torch.channels_last)):
        result = call(x, w, None, (scale, shift, each))
        places, addresses = launched.pop()
        assert set(places) >= {name for step in program.steps for name in step.operands}
        assert addresses[places["scale_0"]] == scale.data_ptr()
        assert addresses[places["shift_0"]] != shift.data_ptr()
        assert (addresses[places["residual_1"]] == residual.data_ptr()) == (each is residual)
        assert addresses[places["dst"]] == result.data_ptr()
