"""The layer and operations around it as one call: ``polyphase.fused.conv_transpose2d(x, w, b, ..., epilogue=[...])``.

An epilogue is a list of elementwise operations on the output, in order, each made by a function of this module or named
as an activation. On a GPU the layer's own kernel computes them, on values that are not rounded before the last one:

    y = fused.conv_transpose2d(x, w, b, 2, 1, epilogue=[fused.batch_norm(mean, var, gamma, beta), "relu"])
    y = fused.conv_transpose2d(x, w, b, 2, epilogue=[fused.add(skip), fused.activation("leaky_relu", 0.2)])

A prologue is a list of the same operations on the input, with operands for its channels:

    y = fused.conv_transpose1d(x, w, b, 8, 4, prologue=[fused.snake(alpha)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from polyphase import fused_calls
from polyphase.problem.epilogue import ACTIVATIONS, Operation
from polyphase.torch_op.steps import Step as Step

_DEFAULTS: dict[str, tuple[float, ...]] = {"leaky_relu": (0.01,), "elu": (1.0,), "softplus": (1.0, 20.0)}


def activation(name: str, *constants: float) -> Step:
    """An activation by its name in `torch.nn.functional`, with its constants in order.

    ``relu``, ``leaky_relu`` (negative_slope), ``elu`` (alpha), ``gelu``, ``gelu_tanh``, ``silu``, ``tanh``,
    ``sigmoid``, ``clamp`` (min, max), ``hardswish``, ``softplus`` (beta, threshold), ``mish``, ``divide`` (divisor).

    Raises:
        ValueError: there is no such activation, or it has other constants.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation {name!r}; there are {', '.join(ACTIVATIONS)}")
    if not constants:
        constants = _DEFAULTS.get(name, ())
    return Step(name, tuple(map(float, Operation(name, constants).constants)))


def scale_shift(scale: Tensor | float | None = None, shift: Tensor | float | None = None) -> Step:
    """``v·scale + shift``: numbers, or tensors of shape ``(C,)`` or ``(N, C)``, also with trailing sizes of 1.

    Raises:
        TypeError: one is a number and the other a tensor, or both are missing.
    """
    tensors = tuple((role, each) for role, each in (("scale", scale), ("shift", shift)) if isinstance(each, Tensor))
    numbers = [each for each in (scale, shift) if each is not None and not isinstance(each, Tensor)]
    if tensors and not numbers:
        return Step("scale_shift", (), tensors)
    if numbers and not tensors:
        factor, added = 1.0 if scale is None else scale, 0.0 if shift is None else shift
        return Step("affine", (float(factor), float(added)))
    raise TypeError("scale_shift takes numbers or tensors, not one of each; scale, or shift, or both")


def subtract(less: Tensor) -> Step:
    """``v - less``, of shape ``(C,)`` or ``(N, C)``, also with trailing sizes of 1, or of one element."""
    return Step("scale_shift", (), (("less", less),))


def batch_norm(
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Step:
    """A batch norm in evaluation mode: ``(v - running_mean) / sqrt(running_var + eps)·weight + bias``, all ``(C,)``."""
    given = (("mean", running_mean), ("variance", running_var), ("weight", weight), ("offset", bias))
    return Step("normalize", (float(eps),), tuple((role, each) for role, each in given if each is not None))


def layer_norm(weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Step:
    """A layer norm over the channels of each pixel, as SAM's and ConvNeXt's; once in an epilogue.

    ``(v - mean) / sqrt(variance + eps)·weight + bias``, with mean and variance over the pixel's channels; weight and
    bias ``(C,)``. One kernel computes it for up to 128 channels of one group, if tensor cores compute the layer.
    Otherwise PyTorch's functions compute the epilogue.
    """
    given = (("weight", weight), ("offset", bias))
    return Step("layer_norm", (float(eps),), tuple((role, each) for role, each in given if each is not None))


def softmax() -> Step:
    """A softmax over the channels of each pixel, for the same layers as `layer_norm`; one of both in an epilogue."""
    return Step("softmax")


def prelu(weight: Tensor) -> Step:
    """`torch.nn.functional.prelu`: ``weight`` has one element, or one for each channel."""
    return Step("prelu", (), (("slope", weight),))


def snake(alpha: Tensor, beta: Tensor | None = None, eps: float = 1e-9, logarithmic: bool = False) -> Step:
    """``v + sin²(v·alpha) / (beta + eps)``, as in vocoders; ``beta`` is ``alpha`` by default.

    Both have one element for each channel, or one. ``logarithmic``: their exponentials are used.
    """
    given = (("alpha", alpha),) if beta is None else (("alpha", alpha), ("beta", beta))
    return Step("snake", (float(eps), float(logarithmic)), given)


def add(residual: Tensor) -> Step:
    """``v + residual``, of the output's shape and dtype."""
    return Step("add", (), (("residual", residual),))


def crop(*ends: tuple[int, int]) -> Step:
    """The output without these numbers of elements at the ends of each spatial dimension; before other operations."""
    return Step("crop", tuple(each for pair in ends for each in pair))


def add_value(of: int = 0) -> Step:
    """``v + u``: ``u`` is the value that operation ``of`` reads, 0 for the layer's own output."""
    return Step("add_value", of=of)


def multiply_value(of: int = 0) -> Step:
    """``v·u``: ``u`` is the value that operation ``of`` reads, 0 for the layer's own output."""
    return Step("multiply_value", of=of)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    epilogue: Sequence[Step | str] = (),
    out: Tensor | None = None,
    prologue: Sequence[Step | str] = (),
) -> Tensor:
    """`polyphase.conv_transpose1d` and, in the same kernel, the operations of ``epilogue`` on its output, in order.

    Differentiable in all tensors any number of times; works under `torch.compile` and autocast. Operands of an
    epilogue have the input's dtype; for half types also float32, except for a residual. ``out`` is the tensor to write
    the output to, see `polyphase.conv_transpose1d`.

    ``prologue``: operations on every element of the input, not on padding, before the layer reads it. Values are
    rounded to the input's dtype once, after the last. Operands have one element, or one for each input channel.

    Returns:
        ``(N, C_out, L_out)``, or ``(C_out, L_out)`` for an unbatched input.

    Raises:
        TypeError, RuntimeError: as `polyphase.conv_transpose1d` does; or for an operand of another shape, dtype or
            device than an operation takes.
        ValueError: there is no such operation.
        UnsupportedError: the dtype, the device or the GPU cannot be served.
    """
    constants = (stride, padding, output_padding, groups, dilation)
    return _run(conv_transpose1d, 1, (input, weight, bias), constants, epilogue, out, prologue)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    epilogue: Sequence[Step | str] = (),
    out: Tensor | None = None,
    prologue: Sequence[Step | str] = (),
) -> Tensor:
    """`conv_transpose1d` for ``(N, C_in, H, W)`` or ``(C_in, H, W)``; raises the same errors."""
    constants = (stride, padding, output_padding, groups, dilation)
    return _run(conv_transpose2d, 2, (input, weight, bias), constants, epilogue, out, prologue)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    epilogue: Sequence[Step | str] = (),
    out: Tensor | None = None,
    prologue: Sequence[Step | str] = (),
) -> Tensor:
    """`conv_transpose1d` for ``(N, C_in, D, H, W)`` or ``(C_in, D, H, W)``; raises the same errors."""
    constants = (stride, padding, output_padding, groups, dilation)
    return _run(conv_transpose3d, 3, (input, weight, bias), constants, epilogue, out, prologue)


def _run(
    function: Callable[..., Tensor],
    dims: int,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    constants: tuple[Any, ...],
    epilogue: Sequence[Step | str],
    out: Tensor | None,
    prologue: Sequence[Step | str],
) -> Tensor:
    name = function.__name__
    steps, before = _made(f"{name}: epilogue", epilogue), _made(f"{name}: prologue", prologue)
    return fused_calls.run(function, dims, tensors, constants, steps, before, out)


def _made(what: str, given: Sequence[Any]) -> list[Step]:
    """The steps that a user gave, activations' names replaced."""
    steps = []
    for place, step in enumerate(given):
        if isinstance(step, str):
            step = activation(step)
        elif not isinstance(step, Step):
            raise TypeError(f"{what}[{place}] must be made by polyphase.fused, not {type(step).__name__}")
        steps.append(step)
    return steps
