"""Epilogue and prologue in PyTorch's terms: as an operator of the dispatcher, as tensor operations, and derivatives.

``polyphase::conv_transpose_epilogue`` is the layer with its prologue and epilogue. Their operations are a string
(`polyphase.problem.epilogue.encoded`), their operands a list, the prologue's first. Derivatives follow the chain rule,
one operation after the other, in tensor operations that have derivatives themselves. The last operation's derivative is
computed from the output if that suffices. Values before it are computed again, and only if a derivative needs them. So
are the prologue's values: only the input is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyphase.problem.epilogue import CHANNEL, ELEMENT, NONE, ONE, Epilogue, Operand, Operation, decoded
from polyphase.torch_op import derivatives, operators, portable
from polyphase.torch_op.memory_format import empty_output
from polyphase.torch_op.operators import LIBRARY
from polyphase.torch_op.portable import compute_dtype
from polyphase.torch_op.validate import FLOATING, Layer

_aten: Any = torch.ops.aten


def named(epilogue: Epilogue, operands: Sequence[Tensor]) -> dict[str, Tensor]:
    """The operands by their names in the epilogue."""
    return dict(zip(epilogue.named_operands, operands))


def shaped(operand: Operand, tensor: Tensor, like: Tensor) -> Tensor:
    """An operand that broadcasts against an output ``like`` ``(N, C, *spatial)``."""
    if operand.per == ELEMENT:
        return tensor
    ones = [1] * (like.dim() - 2)
    if operand.per == ONE:
        return tensor.reshape(1, 1, *ones)
    return tensor.reshape(*([1] if operand.per == CHANNEL else [like.shape[0]]), like.shape[1], *ones)


def shaped_operands(operation: Operation, place: int, of: dict[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """The operands of operation ``place`` by their roles, each `shaped`."""
    return {each.role: shaped(each, of[f"{each.role}_{place}"], like) for each in operation.operands}


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "elu": torch.nn.functional.elu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "clamp": lambda v, least, most: v.clamp(least, most),
    "hardswish": torch.nn.functional.hardswish,
    "softplus": torch.nn.functional.softplus,
    "mish": torch.nn.functional.mish,
    "divide": torch.div,
}


def apply(operation: Operation, place: int, values: Callable[[int], Tensor], of: dict[str, Tensor]) -> Tensor:
    """The value after operation ``place``, by tensor operations."""
    v, kind, constants = values(place), operation.kind, operation.constants
    read = shaped_operands(operation, place, of, v)
    if kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind](v, *constants)
    if kind == "affine":
        return v * constants[0] + constants[1]
    if kind == "scale_shift":
        v = v * read["scale"] if "scale" in read else v
        v = v + read["shift"] if "shift" in read else v
        return v - read["less"] if "less" in read else v
    if kind == "normalize":
        v = (v - read["mean"]) * (read["variance"] + constants[0]).rsqrt()
        v = v * read["weight"] if "weight" in read else v
        return v + read["offset"] if "offset" in read else v
    if kind == "layer_norm":
        weight, offset = (of.get(f"{role}_{place}") for role in ("weight", "offset"))
        last = v.movedim(1, -1)
        weight, offset = (None if each is None else each.reshape(-1).to(v.dtype) for each in (weight, offset))
        return torch.nn.functional.layer_norm(last, last.shape[-1:], weight, offset, constants[0]).movedim(-1, 1)
    if kind == "softmax":
        return torch.softmax(v, 1)
    if kind == "prelu":
        return torch.where(v > 0, v, v * read["slope"])
    if kind == "snake":
        frequency, amplitude = _snake(operation, read, v)
        return v + torch.sin(v * frequency).square() * amplitude
    other = read["residual"] if kind == "add" else values(operation.of)
    return v * other if kind == "multiply_value" else v + other


def _snake(operation: Operation, read: dict[str, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the sine's angle and of its square."""
    frequency, beta = (read[role].to(v.dtype) for role in ("alpha", "beta" if "beta" in read else "alpha"))
    if operation.constants[1]:
        frequency, beta = frequency.exp(), beta.exp()
    return frequency, (beta + operation.constants[0]).reciprocal()


class Values:
    """The values before each operation and after the last, computed lazily.

    ``start`` computes the first; ``output`` is the last, or None if it is not known.
    """

    def __init__(
        self, epilogue: Epilogue, operands: Sequence[Tensor], start: Callable[[], Tensor], output: Tensor | None = None
    ) -> None:
        self._operations = epilogue.operations
        self._of = named(epilogue, operands)
        self._start = start
        self._known: dict[int, Tensor] = {} if output is None else {len(self._operations): output}

    def __call__(self, place: int) -> Tensor:
        """The value before operation ``place``; 0: the sums."""
        found = self._known.get(place)
        if found is None:
            found = self._start() if place == 0 else apply(self._operations[place - 1], place - 1, self, self._of)
            self._known[place] = found
        return found

    def knows(self, place: int) -> bool:
        """Whether a value is already computed."""
        return place in self._known


def by_tensor_operations(epilogue: Epilogue, operands: Sequence[Tensor], sums: Tensor) -> Tensor:
    """The epilogue on sums that include their bias."""
    return Values(epilogue, operands, lambda: sums)(len(epilogue.operations))


def split(prologue: Epilogue, operands: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The operands of a prologue, and the operands of an epilogue."""
    count = len(prologue.named_operands)
    return operands[:count], operands[count:]


def behind_prologue(prologue: Epilogue, operands: Sequence[Tensor], input: Tensor) -> Tensor:
    """The input as the layer reads it; half types are computed in float32, and rounded once."""
    if not prologue:
        return input
    return by_tensor_operations(prologue, operands, input.to(compute_dtype(input.dtype))).to(input.dtype)


def separate(input: Tensor) -> Tensor:
    """The input, or a copy if several elements may share memory: a prologue has a value for each."""
    if input.is_contiguous():
        return input
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(input.stride(), input.shape) if size > 1):
        if stride <= reach:
            return input.contiguous()
        reach += (size - 1) * stride
    return input


class Apart:
    """A layer whose epilogue no kernel supports: tensor operations compute it after the layer's call."""

    def __init__(self, layer: Callable[..., Tensor], epilogue: Epilogue, prologue: Epilogue = NONE) -> None:
        self._layer, self._epilogue, self._prologue = layer, epilogue, prologue

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        operands: Sequence[Tensor] = (),
        out: Tensor | None = None,
    ) -> Tensor:
        """The output, as `polyphase.prepared.Call` returns it."""
        before, operands = split(self._prologue, operands)
        sums = self._layer(input, weight, bias, before)
        with torch.autocast(input.device.type, enabled=False):
            result = by_tensor_operations(self._epilogue, operands, sums)
        return (torch.empty_like(sums) if out is None else out).copy_(result)


def _activated(operation: Operation, place: int, values: Values, g: Tensor) -> Tensor:
    """The gradient of an activation's argument: from its result if that is known, else from the argument."""
    kind, constants = operation.kind, operation.constants
    of_result = kind in ("tanh", "sigmoid")
    if values.knows(place + 1):
        of_result |= kind in ("relu", "clamp")
        of_result |= kind in ("leaky_relu", "elu") and constants[0] >= 0  # else the result's sign is not the argument's
    backward: Callable[..., Tensor] = _BACKWARD[kind]
    return backward(g, values(place + of_result), of_result, *constants)


#: Operations whose derivative is computed from their result, if that is the output.
_OF_RESULT = ("relu", "leaky_relu", "elu", "tanh", "sigmoid", "clamp", "softmax")

# Functions of: the result's gradient, the result or the argument, whether it is the result, and the constants.
_BACKWARD: dict[str, Callable[..., Tensor]] = {
    "relu": lambda g, v, _: _aten.threshold_backward(g, v, 0),
    "leaky_relu": lambda g, v, of_result, slope: _aten.leaky_relu_backward(g, v, slope, of_result),
    "elu": lambda g, v, of_result, alpha: _aten.elu_backward(g, alpha, 1, 1, of_result, v),
    "gelu": lambda g, v, _: _aten.gelu_backward(g, v, approximate="none"),
    "gelu_tanh": lambda g, v, _: _aten.gelu_backward(g, v, approximate="tanh"),
    "silu": lambda g, v, _: _silu_backward(g, v),
    "tanh": lambda g, y, _: _aten.tanh_backward(g, y),
    "sigmoid": lambda g, y, _: _aten.sigmoid_backward(g, y),
    "clamp": lambda g, v, _, least, most: _aten.hardtanh_backward(g, v, least, most),
    "hardswish": lambda g, v, _: _aten.hardswish_backward(g, v),
    "softplus": lambda g, v, _, beta, threshold: _aten.softplus_backward(g, v, beta, threshold),
    "mish": lambda g, v, _: _mish_backward(g, v),
    "divide": lambda g, v, _, divisor: g / divisor,
}


def _silu_backward(g: Tensor, v: Tensor) -> Tensor:
    """SiLU's backward; PyTorch's own has no derivative."""
    if not torch.is_grad_enabled():
        return _aten.silu_backward(g, v)  # type: ignore[no-any-return]
    sigmoid = v.sigmoid()
    return g * sigmoid * (1 + v * (1 - sigmoid))


def _mish_backward(g: Tensor, v: Tensor) -> Tensor:
    """Mish's backward; PyTorch's own has no derivative."""
    if not torch.is_grad_enabled():
        return _aten.mish_backward(g, v)  # type: ignore[no-any-return]
    tanh = torch.nn.functional.softplus(v).tanh()
    return g * (tanh + v * v.sigmoid() * (1 - tanh * tanh))


def _normal(operation: Operation, v: Tensor) -> tuple[Tensor, Tensor]:
    """A layer norm's result before its weight, and one over the standard deviation of each pixel."""
    variance, mean = torch.var_mean(v, 1, correction=0, keepdim=True)
    factor = (variance + operation.constants[0]).rsqrt()
    return (v - mean) * factor, factor


def _of_shape(gradient: Tensor, operand: Operand, tensor: Tensor) -> Tensor:
    """A gradient of the output's shape summed up for an operand, in its shape and dtype."""
    if operand.per != ELEMENT:
        dims = list(range(2, gradient.dim())) + ({ONE: [0, 1], CHANNEL: [0]}.get(operand.per, []))
        gradient = gradient.sum(dims) if dims else gradient
    return gradient.reshape(tensor.shape).to(tensor.dtype)


def _of_operands(
    operation: Operation, place: int, values: Values, g: Tensor, of: dict[str, Tensor], needed: dict[str, bool]
) -> dict[str, Tensor]:
    """The needed gradients of an operation's operands, in the output's shape."""
    found: dict[str, Tensor] = {}
    kind = operation.kind
    wanted = {each.role for each in operation.operands if needed[f"{each.role}_{place}"]}
    if not wanted:
        return found
    if kind == "normalize":
        v, read = values(place), shaped_operands(operation, place, of, g)
        factor = (read["variance"] + operation.constants[0]).rsqrt()
        scaled = g * read["weight"] if "weight" in read else g
        found["mean"] = -scaled * factor
        found["variance"] = scaled * (v - read["mean"]) * -0.5 * factor**3
        found["weight"], found["offset"] = g * (v - read["mean"]) * factor, g
    elif kind == "layer_norm":
        found["weight"], found["offset"] = g * _normal(operation, values(place))[0], g
    elif kind == "prelu":
        v = values(place)
        found["slope"] = torch.where(v > 0, torch.zeros_like(v), v) * g
    elif kind == "snake":
        found = _of_snake(operation, shaped_operands(operation, place, of, g), values(place), g)
    else:
        found["shift"] = found["residual"] = g
        if "less" in wanted:
            found["less"] = -g
        if "scale" in wanted:
            found["scale"] = g * values(place)
    return {role: gradient for role, gradient in found.items() if role in wanted}


def _of_snake(operation: Operation, read: dict[str, Tensor], v: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The gradients of a snake's operands, in the output's shape."""
    frequency, amplitude = _snake(operation, read, v)
    angle = v * frequency
    of_alpha = g * amplitude * v * torch.sin(2 * angle)
    of_beta = -g * (torch.sin(angle) * amplitude).square()
    if operation.constants[1]:
        of_alpha = of_alpha * frequency
        of_beta = of_beta * (read["beta"].to(v.dtype).exp() if "beta" in read else frequency)
    return {"alpha": of_alpha, "beta": of_beta} if "beta" in read else {"alpha": of_alpha + of_beta}


def _before(operation: Operation, place: int, values: Values, g: Tensor, of: dict[str, Tensor]) -> Tensor:
    """The gradient of an operation's value, without that of the earlier value of `add_value` and `multiply_value`."""
    kind = operation.kind
    if kind in _ACTIVATIONS:
        return _activated(operation, place, values, g)
    read = shaped_operands(operation, place, of, g)
    if kind == "affine":
        return g * operation.constants[0]
    if kind == "scale_shift":
        return g * read["scale"] if "scale" in read else g
    if kind == "normalize":
        factor = (read["variance"] + operation.constants[0]).rsqrt()
        return g * (factor * read["weight"] if "weight" in read else factor)
    if kind == "layer_norm":
        normal, factor = _normal(operation, values(place))
        g = g * read["weight"] if "weight" in read else g
        return factor * (g - g.mean(1, keepdim=True) - normal * (g * normal).mean(1, keepdim=True))
    if kind == "softmax":
        y = values(place + 1)
        return y * (g - (g * y).sum(1, keepdim=True))
    if kind == "prelu":
        return torch.where(values(place) > 0, g, g * read["slope"])
    if kind == "snake":
        v = values(place)
        frequency, amplitude = _snake(operation, read, v)
        return g + g * frequency * amplitude * torch.sin(2 * v * frequency)
    return g * values(operation.of) if kind == "multiply_value" else g


def pulled_back(
    epilogue: Epilogue, operands: Sequence[Tensor], values: Values, cotangent: Tensor, needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of the sums, and of the operands that are ``needed``, from the output's gradient."""
    of, names = named(epilogue, operands), list(epilogue.named_operands)
    wanted = dict(zip(names, needed))
    gradients: dict[int, Tensor] = {len(epilogue.operations): cotangent}
    of_operands: dict[str, Tensor] = {}

    def add(place: int, gradient: Tensor) -> None:
        gradients[place] = gradients[place] + gradient if place in gradients else gradient

    for place in range(len(epilogue.operations) - 1, -1, -1):
        operation, g = epilogue.operations[place], gradients[place + 1]
        for role, gradient in _of_operands(operation, place, values, g, of, wanted).items():
            name = f"{role}_{place}"
            of_operands[name] = _of_shape(gradient, epilogue.named_operands[name], of[name])
        add(place, _before(operation, place, values, g, of))
        if operation.kind == "add_value":
            add(operation.of, g)
        elif operation.kind == "multiply_value":
            add(operation.of, g * values(place))
    return gradients[0], [of_operands.get(name) for name in names]


def _portably(
    input: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor], text: str, *constants: Any
) -> Tensor:
    """The operator for tensors of any device; half types are computed in float32, and rounded once."""
    wide, (epilogue, prologue) = compute_dtype(input.dtype), decoded(text)
    before, behind = split(prologue, [each.to(wide) for each in operands])
    with torch.autocast(input.device.type, enabled=False):
        read = behind_prologue(prologue, before, input).to(wide)
        sums = portable.forward(read, weight.to(wide), None if bias is None else bias.to(wide), *constants)
        result = by_tensor_operations(epilogue, behind, sums)
    return empty_output(result.shape, input, weight).copy_(result)


def _on_cuda(
    input: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor], text: str, *constants: Any
) -> Tensor:
    """The operator for CUDA tensors."""
    if input.numel() == 0 or input.dtype not in FLOATING:
        return _portably(input, weight, bias, operands, text, *constants)
    constants = tuple(tuple(each) if isinstance(each, list) else each for each in constants)
    from polyphase import runtime  # the CUDA path; PyTorch without CUDA never needs it

    if decoded(text)[1]:
        input = separate(input)
    return runtime.forward_call(input, weight, bias, *constants, epilogue=text)(input, weight, bias, operands)


def _fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor], text: str, *constants: Any
) -> Tensor:
    return operators.forward_fake(input, weight, bias, *constants)


LIBRARY.define(
    "conv_transpose_epilogue(Tensor input, Tensor weight, Tensor? bias, Tensor[] operands, str epilogue, "
    f"{operators.CONSTANTS}) -> Tensor",
    tags=operators.TAGS,
)
LIBRARY.impl("conv_transpose_epilogue", _portably, "CompositeExplicitAutograd")
if torch.version.cuda is not None:
    LIBRARY.impl("conv_transpose_epilogue", _on_cuda, "CUDA")
    operators.pass_autograd(LIBRARY, "conv_transpose_epilogue", _on_cuda, "CUDA")
torch.library.register_fake("polyphase::conv_transpose_epilogue", _fake, lib=LIBRARY)
conv_transpose_epilogue: Callable[..., Tensor] = torch.ops.polyphase.conv_transpose_epilogue.default


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, operands, ctx.text, *constants = inputs
    ctx.layer = Layer(tuple(weight.shape[2:]), *constants)
    ctx.biased = bias is not None
    epilogue, _ = decoded(ctx.text)
    # In-place changes of the output change the saved tensor: like PyTorch's, most norms and sums save none.
    ctx.of_output = bool(epilogue) and epilogue.operations[-1].kind in _OF_RESULT
    kept = (output,) if ctx.of_output else ()
    ctx.save_for_backward(input, weight, *(() if bias is None else (bias,)), *operands, *kept)


def _backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    input, weight, *rest = ctx.saved_tensors
    output = rest.pop() if ctx.of_output else None
    bias, operands = (rest[0], rest[1:]) if ctx.biased else (None, rest)
    layer, (epilogue, prologue) = ctx.layer, decoded(ctx.text)
    before, behind = split(prologue, operands)
    needed = ctx.needs_input_grad
    of_operands = needed[3] if isinstance(needed[3], (list, tuple)) else [needed[3]] * len(operands)

    of_input = Values(prologue, before, lambda: input.to(compute_dtype(input.dtype)))
    read = of_input(len(prologue.operations)).to(input.dtype) if prologue else input

    def start() -> Tensor:
        return derivatives.run_operator((read, weight, None), bias, layer)

    values = Values(epilogue, behind, start, output)
    gradient, found = pulled_back(epilogue, behind, values, cotangent, of_operands[len(before) :])
    of_before = of_operands[: len(before)]
    wanted = [needed[0] or any(of_before), needed[1], False, ctx.biased and needed[2]]
    x, w, _, b = derivatives.gradients(
        derivatives.run_operator, (read, weight, None), gradient.to(input.dtype), layer, wanted
    )
    if prologue:
        found_before: list[Tensor | None] = [None] * len(before)
        if x is not None:
            x, found_before = pulled_back(prologue, before, of_input, x.to(compute_dtype(input.dtype)), of_before)
            x = x.to(input.dtype) if needed[0] else None
        found = [*found_before, *found]
    b = None if b is None or bias is None else b.to(bias.dtype)
    return x, w, b, found, *[None] * 6


torch.library.register_autograd(
    "polyphase::conv_transpose_epilogue", _backward, setup_context=_setup_context, lib=LIBRARY
)
