"""The derivatives of the three passes, and their vmap rules: one table for eager autograd and for torch.compile.

With input x, weight w and gradient of the output g, the layer is one trilinear form ``T(x, w, g) = <g, layer(x, w)>``.
Each pass is T with one of its three slots left open::

    layer(x, w)       = T(x, w, ·)      the output slot is open
    input_grad(g, w)  = T(·, w, g)      the input slot is open
    weight_grad(x, g) = T(x, ·, g)      the weight slot is open

So the derivative of a pass with respect to one of its operands is T again: the cotangent fills the open slot, and the
operand's slot is opened. This holds for derivatives of any order. The other operands, if complex, are conjugated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from polyphase.torch_op import operators
from polyphase.torch_op.functionalized import functionalizes, give_rule
from polyphase.torch_op.validate import Layer

INPUT, WEIGHT, OUTPUT, BIAS = range(4)
Operands = tuple["Tensor | None", "Tensor | None", "Tensor | None"]  # input, weight, output; None is the open slot
Call = Callable[..., Tensor]
Run = Callable[[Operands, "Tensor | None", Layer], Tensor]


def _open(operands: Operands, bias: Tensor | None, layer: Layer) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The operator of the pass that these operands leave open, and its arguments."""
    x, w, g = operands
    kernel_size, *constants = layer  # PyTorch 2.8's Dynamo fails at slices of named tuples
    if g is None:
        return operators.conv_transpose, (x, w, bias, *constants)
    if x is None:
        return operators.conv_transpose_input_grad, (g, w, *constants)
    return operators.conv_transpose_weight_grad, (x, g, kernel_size, *constants)


def run_operator(operands: Operands, bias: Tensor | None, layer: Layer) -> Tensor:
    """The pass that these operands leave open, as one call of its operator."""
    operator, arguments = _open(operands, bias, layer)
    return operator(*arguments)


def run_below_autograd(operands: Operands, bias: Tensor | None, layer: Layer) -> Tensor:
    """`run_operator` without derivatives."""
    operator, arguments = _open(operands, bias, layer)
    return operators.call_below_autograd(operator, *arguments)


def run(operands: Operands, bias: Tensor | None, layer: Layer, call: Call | None = None) -> Tensor:
    """The pass in eager mode, differentiable in backward and forward mode, any number of times.

    ``call``: computes it without the dispatcher, or None.
    """
    if call is not None:
        return _apply(*operands, bias, layer, call)
    if torch.compiler.is_compiling():  # a backward pass that compiled autograd traces
        return run_operator(operands, bias, layer)
    if torch._C._are_functorch_transforms_active():
        if functionalizes():
            give_rule(TransformedContraction)
        result: Tensor = TransformedContraction.apply(*operands, bias, layer, None)  # type: ignore[no-untyped-call]
        return result
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _apply(*map(_unwrap, (*operands, bias)), layer, None)
    return run_below_autograd(operands, bias, layer)  # an ordinary backward pass


def gradients(
    run: Run, operands: Operands, cotangent: Tensor, layer: Layer, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight, output and bias, if ``needed``, from the gradient of the result.

    ``operands``: those that `_to_save` kept; the slots that it set to None are opened here.
    """
    x, w, g = [cotangent if operand is None else operand.conj() for operand in operands]
    return (
        run((None, w, g), None, layer) if needed[INPUT] else None,
        run((x, None, g), None, layer) if needed[WEIGHT] else None,
        run((x, w, None), None, layer) if needed[OUTPUT] else None,
        _bias_grad(cotangent, needed),
    )


_ALL_BUT_CHANNELS = {3: (0, 2), 4: (0, 2, 3), 5: (0, 2, 3, 4)}


def _bias_grad(cotangent: Tensor, needed: Sequence[bool]) -> Tensor | None:
    """The bias's gradient. PyTorch's sum reads the cotangent once and is deterministic: no kernel would be better."""
    return cotangent.sum(_ALL_BUT_CHANNELS[cotangent.dim()]) if needed[BIAS] else None


def _records() -> bool:
    """Whether a backward pass is itself traced or differentiated."""
    return torch.compiler.is_compiling() or torch.is_grad_enabled() or forward_ad._current_level >= 0


def _to_save(operands: Sequence[Tensor | None], needed: Sequence[bool]) -> Operands:
    """The operands that a gradient needs, the others None: a frozen weight keeps no input alive."""
    x, w, g = operands
    for_x, for_w, for_g = needed[:3]
    return x if for_w or for_g else None, w if for_x or for_g else None, g if for_x or for_w else None


def _replace(operands: Sequence[Tensor | None], slot: int, tensor: Tensor | None) -> Operands:
    x, w, g = operands
    return (tensor, w, g) if slot == INPUT else (x, tensor, g) if slot == WEIGHT else (x, w, tensor)


def _unwrap(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself, if it left a transform of `torch.func` that has ended."""
    return None if tensor is None else torch._C._functorch.unwrap_if_dead(tensor)


def _remember(ctx: Any, operands: Operands, layer: Layer, call: Call | None) -> None:
    """Saves what the backward pass needs."""
    ctx.layer = layer
    ctx.call = call
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*_to_save(operands, ctx.needs_input_grad))


def _remember_forward(ctx: Any, operands: Operands, output: Tensor) -> None:
    """Saves what forward mode needs in addition."""
    ctx.shape, ctx.dtype = output.shape, output.dtype
    ctx.save_for_forward(*operands)


class Contraction(torch.autograd.Function):
    """A pass in eager mode, from its operands, the bias, and the layer's constants."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        w: Tensor | None,
        g: Tensor | None,
        bias: Tensor | None,
        layer: Layer,
        call: Call | None,
    ) -> Tensor:
        """The pass itself."""
        output = run_below_autograd((x, w, g), bias, layer) if call is None else call(x, w, bias)
        _remember(ctx, (x, w, g), layer, call)
        if forward_ad._current_level >= 0:
            _remember_forward(ctx, (x, w, g), output)
        return output

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the operands that need one."""
        if cotangent is None:
            return (None,) * 6
        x, w, _ = operands = ctx.saved_tensors
        if not _records() and ctx.call is not None and x is not None and w is not None:
            both = operators.find_both_gradients(ctx.call, x, w, cotangent, ctx.layer)
            if both is not None:
                return *both(x, w, cotangent), None, _bias_grad(cotangent, ctx.needs_input_grad), None, None
        return *gradients(run, operands, cotangent, ctx.layer, ctx.needs_input_grad), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        """The derivative along tangents: the pass is linear in each of its operands, and in the bias."""
        operands = ctx.saved_tensors
        terms = [
            run(_replace(operands, slot, tangent), None, ctx.layer)
            for slot, tangent in enumerate(tangents[:BIAS])
            if tangent is not None
        ]
        bias = tangents[BIAS]
        if bias is not None:
            terms.append(bias.to(ctx.dtype).view(-1, *[1] * (len(ctx.shape) - 2)).expand(ctx.shape))
        return sum(terms[1:], terms[0]) if terms else None


# PyTorch's `apply` in C++: the Python version checks for transforms again.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, Contraction).apply


class TransformedContraction(Contraction):
    """`Contraction` in the form that `torch.func` requires. PyTorch takes 10 µs longer for calls of this form."""

    @staticmethod
    def forward(x: Any, w: Any, g: Any, bias: Any, layer: Any, call: None) -> Tensor:  # type: ignore[override]
        """The pass itself."""
        return run_below_autograd((x, w, g), bias, layer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Saves what derivatives need."""
        *operands, _, layer, _ = inputs
        _remember(ctx, (*operands,), layer, None)
        _remember_forward(ctx, (*operands,), output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """A batch of calls as one call."""
        *operands, bias, layer, _ = inputs
        return batched(run, info.batch_size, in_dims, (*operands,), bias, layer)


def batched(
    run: Run, size: int, in_dims: Sequence[int | None], operands: Operands, bias: Tensor | None, layer: Layer
) -> tuple[Tensor, int]:
    """``size`` calls as one: more images if they share a weight, else more groups. Result and its batch dimension.

    ``in_dims``: the batch dimensions of input, weight, output and bias; None if all calls share the tensor.
    """
    moved = [
        tensor if tensor is None or dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip((*operands, bias), in_dims)
    ]
    own_bias = in_dims[BIAS] is not None
    if operands[WEIGHT] is not None and in_dims[WEIGHT] is None:
        shared_bias = None if own_bias else bias
        if in_dims[INPUT] is None and in_dims[OUTPUT] is None:  # only the bias differs
            result = run(operands, shared_bias, layer).unsqueeze(0)
        else:
            slot = INPUT if operands[OUTPUT] is None else OUTPUT
            images = moved[slot]
            assert images is not None
            folded = run(_replace(operands, slot, images.flatten(0, 1)), shared_bias, layer)
            result = folded.unflatten(0, images.shape[:2])
        biases = moved[BIAS]
        if own_bias and biases is not None:
            result = result + biases.to(result.dtype).unflatten(1, (-1, *[1] * len(layer.stride))).unsqueeze(1)
        return result, 0

    *each, bias = (
        tensor if tensor is None or dim is not None else tensor.expand(size, *tensor.shape)
        for tensor, dim in zip(moved, in_dims)
    )
    x, w, g = each
    x = None if x is None else x.movedim(0, 1).flatten(1, 2)
    w = None if w is None else w.flatten(0, 1)
    g = None if g is None else g.movedim(0, 1).flatten(1, 2)
    bias = None if bias is None else bias.flatten()
    result = run((x, w, g), bias, layer._replace(groups=layer.groups * size))
    dim = 0 if w is None else 1
    return result.unflatten(dim, (size, -1)), dim


def _unpack_forward(input: Tensor, weight: Tensor, bias: Tensor | None, *constants: Any) -> Any:
    return (input, weight, None), bias, Layer(tuple(weight.shape[2:]), *constants)


def _unpack_input_grad(grad_output: Tensor, weight: Tensor, *constants: Any) -> Any:
    return (None, weight, grad_output), None, Layer(tuple(weight.shape[2:]), *constants)


def _unpack_weight_grad(input: Tensor, grad_output: Tensor, *constants: Any) -> Any:
    return (input, None, grad_output), None, Layer(*constants)


def _register(name: str, unpack: Callable[..., Any], slots: Sequence[int]) -> None:
    """Derivatives and vmap rule of an operator whose first arguments are the tensors of ``slots``."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        operands, _, ctx.layer = unpack(*inputs)
        ctx.arguments = len(inputs)
        ctx.needed = [slot in slots and ctx.needs_input_grad[slots.index(slot)] for slot in range(4)]
        ctx.save_for_backward(*_to_save(operands, ctx.needed))

    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        results = gradients(run_operator, ctx.saved_tensors, cotangent, ctx.layer, ctx.needed)
        return *(results[slot] for slot in slots), *[None] * (ctx.arguments - len(slots))

    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        dims: list[int | None] = [None] * 4
        for slot, dim in zip(slots, in_dims):
            dims[slot] = dim
        return batched(run_operator, info.batch_size, dims, *unpack(*arguments))

    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=operators.LIBRARY)
    if hasattr(torch.library, "register_vmap"):  # PyTorch 2.5
        torch.library.register_vmap(name, vmap, lib=operators.LIBRARY)


_register("polyphase::conv_transpose", _unpack_forward, (INPUT, WEIGHT, BIAS))
_register("polyphase::conv_transpose_input_grad", _unpack_input_grad, (OUTPUT, WEIGHT))
_register("polyphase::conv_transpose_weight_grad", _unpack_weight_grad, (INPUT, OUTPUT))
