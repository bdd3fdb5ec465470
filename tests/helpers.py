"""Oracles: what a transposed convolution should be, and how close to it a result must come.

The reference is PyTorch's own function in float64 on the CPU. ``test_portable.py`` checks it in turn against the
definition of the layer, written as loops.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import polyphase
from polyphase import ConvTransposeProblem
from polyphase.problem import problem as problem_module

TORCH: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
OURS: dict[int, Callable[..., Tensor]] = {
    1: polyphase.conv_transpose1d,
    2: polyphase.conv_transpose2d,
    3: polyphase.conv_transpose3d,
}
TORCH_MODULES = {1: torch.nn.ConvTranspose1d, 2: torch.nn.ConvTranspose2d, 3: torch.nn.ConvTranspose3d}
OUR_MODULES = {1: polyphase.ConvTranspose1d, 2: polyphase.ConvTranspose2d, 3: polyphase.ConvTranspose3d}

#: Half the distance from 1 to the next number.
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}

#: Where PyTorch's forward passes stay exact. In tests small layers stand for large ones (conftest sets these to less).
EXACT_BELOW = {name: getattr(problem_module, name) for name in ("FEW_POSITIONS", "LITTLE_WORK")}


def forbid_tf32() -> None:
    """TF32 forbidden in convolutions, whichever of PyTorch's flags were set before."""
    if hasattr(torch._C, "_set_fp32_precision_setter"):
        torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """TF32 allowed in float32 convolutions, or forbidden, in polyphase and in PyTorch."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def rounded_to_tf32(tensor: Tensor) -> Tensor:
    """float32 rounded to the nearest of 11 significant bits."""
    return ((tensor.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@dataclass
class Operands:
    """The tensors of one call, the gradient of the output included."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    grad_output: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Operands:
        bias = None if self.bias is None else change(self.bias)
        return Operands(change(self.input), change(self.weight), bias, change(self.grad_output))


@dataclass
class Results:
    """What one call computes in all passes."""

    output: Tensor
    input_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None

    def items(self) -> list[tuple[str, Tensor]]:
        named = vars(self).items()
        return [(name, tensor) for name, tensor in named if tensor is not None]


def constants(problem: ConvTransposeProblem) -> dict[str, Any]:
    """The keyword arguments of a problem, as the functions take them."""
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    return {name: getattr(problem, name) for name in names}


def results(function: Callable[..., Tensor], problem: ConvTransposeProblem, operands: Operands) -> Results:
    """All passes through ``function`` and autograd."""
    x, w = (tensor.detach().requires_grad_() for tensor in (operands.input, operands.weight))
    b = None if operands.bias is None else operands.bias.detach().requires_grad_()
    output = function(x, w, b, **constants(problem))
    wanted = [x, w] if b is None else [x, w, b]
    grads = torch.autograd.grad(output, wanted, operands.grad_output)
    return Results(output.detach(), grads[0], grads[1], None if b is None else grads[2])


def reference(problem: ConvTransposeProblem, operands: Operands) -> Results:
    """All passes by PyTorch in float64 (complex128) on the CPU."""
    wide = torch.complex128 if operands.input.is_complex() else torch.float64
    return results(
        TORCH[problem.dims], problem, operands.map(lambda tensor: tensor.detach().cpu().to(wide).contiguous())
    )


def magnitudes(problem: ConvTransposeProblem, operands: Operands) -> Results:
    """The sums of the absolute values of all terms: what rounding errors are proportional to."""
    return reference(problem, operands.map(torch.abs))


def integer_tensor(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype, most: int = 3) -> Tensor:
    """Small integers, complex ones for complex types, whose products and sums are exact in any order.

    bfloat16 holds every integer up to 256, so results beyond that are rounded, but once and from an exact sum.
    """

    def draw() -> Tensor:
        return torch.randint(-most, most + 1, tuple(shape), generator=generator)

    if dtype.is_complex:
        return torch.complex(draw().double(), draw().double()).to(dtype)
    return draw().to(dtype)


def normal_tensor(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Normally distributed numbers."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), generator=generator, dtype=wide).to(dtype)


def make_operands(
    problem: ConvTransposeProblem,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
    make: Callable[..., Tensor] = integer_tensor,
) -> Operands:
    """Operands of a problem, contiguous."""
    generator = torch.Generator().manual_seed(seed)
    x, w, g = (
        make(shape, generator, dtype) for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    b = make((problem.out_channels,), generator, dtype) if problem.bias else None
    return Operands(x, w, b, g).map(lambda tensor: tensor.to(device))


def assert_as_accurate_as_torch(out: Tensor, torch_out: Tensor, ref64: Tensor, eps: Tensor | float) -> None:
    """Element by element ``|out - ref64| <= 2·|torch_out - ref64| + eps``; NaN never passes."""
    assert out.shape == ref64.shape == torch_out.shape
    error = (out.detach().cpu().to(ref64.dtype) - ref64).abs()
    allowed = 2 * (torch_out.detach().cpu().to(ref64.dtype) - ref64).abs() + eps
    wrong = ~(error <= allowed)
    if wrong.any():
        worst = torch.where(wrong, torch.nan_to_num(error - allowed, nan=math.inf), -math.inf).argmax()
        index = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are too far from the float64 reference; the worst is at "
            f"{index}: got {out[index].item()!r}, PyTorch has {torch_out[index].item()!r}, the reference is "
            f"{ref64[index].item()!r}, the allowed error {allowed[index].item():.3g}"
        )


def rounding_eps(ref64: Tensor, magnitude: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """What rounding alone may cost: the sum in at least float32, and the result once in its own dtype.

    Eight units of the sum of all products' magnitudes: of 300,000 sums of 576 products, made in one chain, the worst is
    off by six. Double precision is compared with a reference that is no better: its allowance covers both errors.
    On a GPU float32 may be two parts in TF32, of which each product loses up to twelve units (docs/numerics.md): eight
    more, since losses are of either sign.
    """
    dtype = dtype.to_real()
    if dtype == torch.float64:
        return 16 * UNIT_ROUNDOFF[dtype] * magnitude
    units = 16 if dtype == torch.float32 and device is not None and device.type == "cuda" else 8
    return units * UNIT_ROUNDOFF[torch.float32] * magnitude + UNIT_ROUNDOFF[dtype] * ref64.abs()


def tf32_eps(problem: ConvTransposeProblem, operands: Operands) -> Results:
    """What rounding both operands of every product to TF32 may cost, beyond `rounding_eps`.

    An operand errs by 2⁻¹¹ of itself at most, a product by 0.6·2⁻¹¹ (root mean square), and the errors of a sum are
    independent: 5·2⁻¹¹ times the root of the sum of squares is eight standard deviations. The bias is no product.
    """
    squared = operands.map(torch.square)
    squares = reference(problem, Operands(squared.input, squared.weight, None, squared.grad_output))
    scaled = [5 * 2.0**-11 * tensor.sqrt() for tensor in (squares.output, squares.input_grad, squares.weight_grad)]
    return Results(*scaled, None if operands.bias is None else torch.zeros_like(operands.bias, device="cpu").double())


def random_problem(rng: random.Random) -> ConvTransposeProblem:
    """A problem out of the whole parameter space, small enough to check in milliseconds."""
    while True:
        dims = rng.choice((1, 1, 2, 2, 2, 3))

        def each(*values: int, dims: int = dims) -> tuple[int, ...]:
            picked = rng.choice(values)
            return (picked,) * dims if rng.random() < 0.5 else tuple(rng.choice(values) for _ in range(dims))

        groups, per_group_in, per_group_out = rng.choice(
            (
                (1, rng.randint(1, 9), rng.randint(1, 9)),  # dense
                (1, rng.choice((16, 33)), rng.choice((1, 3, 20))),  # channels beyond a tile
                (rng.randint(2, 5), rng.randint(1, 4), rng.randint(1, 4)),  # grouped
                (rng.randint(2, 9), 1, rng.randint(1, 2)),  # depthwise
            )
        )
        stride, dilation = each(1, 1, 2, 3, 4, 5), each(1, 1, 1, 2, 3, 4)
        output_padding = tuple(
            rng.randint(0, max(s, d) - 1) if rng.random() < 0.4 else 0 for s, d in zip(stride, dilation)
        )
        largest = {1: 70, 2: 19, 3: 7}[dims]
        sizes = tuple(rng.choice((1, 2, 3, 5, rng.randint(1, largest), largest)) for _ in range(dims))
        problem = ConvTransposeProblem(
            batch=rng.choice((0, 1, 1, 2, 3)) if rng.random() < 0.9 else 5,
            in_channels=groups * per_group_in,
            out_channels=groups * per_group_out,
            input_size=sizes,
            kernel_size=each(1, 2, 3, 3, 4, 5, 7) if dims < 3 else each(1, 2, 3, 4),
            stride=stride,
            padding=each(0, 0, 1, 1, 2, 3, 5),
            output_padding=output_padding,
            dilation=dilation,
            groups=groups,
            bias=rng.random() < 0.5,
        )
        if min(problem.output_size) >= 1 and max(problem.elements) <= 40_000 and problem.flops <= 20_000_000:
            return problem


def scattered(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same values at other strides: contiguous, channels_last, permuted, or amid NaN with gaps and an offset."""
    kind = rng.choice(("contiguous", "channels_last", "permuted", "gaps"))
    if kind == "channels_last":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if kind == "permuted":
        order = rng.sample(range(tensor.dim()), tensor.dim())
        inverse = [order.index(dim) for dim in range(tensor.dim())]
        return tensor.permute(order).contiguous().permute(inverse)
    if kind == "gaps":
        return amid_nan(tensor, step=rng.choice((1, 2, 3)))
    return tensor.contiguous()


def amid_nan(tensor: Tensor, step: int = 2) -> Tensor:
    """A view of the same values inside a larger tensor of NaN: reading beside them shows."""
    buffer = tensor.new_full([size * step + 3 for size in tensor.shape], math.nan)
    window = buffer[tuple(slice(2, 2 + size * step, step) for size in tensor.shape)]
    return window.copy_(tensor)


def refusals(text: str) -> list[tuple[str, str]]:
    """The schedules that an explanation says do not compute a pass, and why."""
    lines = [line.removeprefix("  not ").split(": ", 1) for line in text.splitlines() if line.startswith("  not ")]
    return [(name, reason) for names, reason in lines for name in names.split(", ")]


class EmptiedMeanwhile(dict[Any, Any]):
    """A cache that another thread empties after it was asked whether it has a key."""

    def __contains__(self, key: Any) -> bool:
        found = super().__contains__(key)
        self.clear()
        return found
