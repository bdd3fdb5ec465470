"""One pass of a layer as a call to be checked and timed: polyphase's, and PyTorch's beside it.

This is the one file of the package that calls a convolution of PyTorch's, and it does so to compare with it: the
results and times of the `torch_*` functions are printed next to polyphase's and never returned in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F

from polyphase.bench.operands import MEMORY_FORMATS, Operands
from polyphase.problem import ConvTransposeProblem, Pass

Call = Callable[[], torch.Tensor]
Step = Callable[[], tuple[torch.Tensor, ...]]


class TorchVariant(str, Enum):
    """The ways to run PyTorch's layer that polyphase is compared with.

    As it comes, by cuDNN's heuristics; with cuDNN's search, which wants a process of its own
    (`polyphase.bench.apart`); by heuristics in the other memory format; compiled.
    """

    DEFAULT = "default"
    BENCHMARK = "benchmark"
    CHANNELS_LAST = "channels_last"
    COMPILE = "compile"


def polyphase_call(problem: ConvTransposeProblem, pass_: Pass, operands: Operands) -> Call:
    """One pass of ``problem`` by polyphase: the public function, or the operator that its backward pass calls."""
    import polyphase
    import polyphase.torch_op.operators  # registers torch.ops.polyphase

    x, weight, bias, grad = operands.input, operands.weight, operands.bias, operands.grad_output
    sizes = [*map(list, (problem.stride, problem.padding, problem.output_padding, problem.dilation)), problem.groups]
    match pass_:
        case Pass.FORWARD:
            function = getattr(polyphase, f"conv_transpose{problem.dims}d")
            return _without_grad(lambda: function(x, weight, bias, **parameters_of(problem)))
        case Pass.INPUT_GRAD:
            return lambda: torch.ops.polyphase.conv_transpose_input_grad(grad, weight, *sizes)
        case Pass.WEIGHT_GRAD:
            kernel_size = list(problem.kernel_size)
            return lambda: torch.ops.polyphase.conv_transpose_weight_grad(x, grad, kernel_size, *sizes)


def torch_call(problem: ConvTransposeProblem, pass_: Pass, operands: Operands) -> Call:
    """The same pass by PyTorch: its function, or the operator that its backward pass calls."""
    x, weight, bias, grad = operands.input, operands.weight, operands.bias, operands.grad_output
    match pass_:
        case Pass.FORWARD:
            function = torch_function(problem)
            return _without_grad(lambda: function(x, weight, bias, **parameters_of(problem)))
        case Pass.INPUT_GRAD:
            return lambda: _torch_backward(problem, grad, x, weight, [True, False, False])[0]
        case Pass.WEIGHT_GRAD:
            return lambda: _torch_backward(problem, grad, x, weight, [False, True, False])[1]


def polyphase_step(problem: ConvTransposeProblem, operands: Operands) -> Step:
    """Forward pass and both gradients by polyphase, as a training step has them; the bias's gradient is left out."""
    calls = [polyphase_call(problem, pass_, operands) for pass_ in Pass]
    return lambda: tuple(call() for call in calls)


def torch_step(problem: ConvTransposeProblem, operands: Operands) -> Step:
    """The same by PyTorch: its function, and the operator that its backward pass calls, for both gradients at once."""
    forward = torch_call(problem, Pass.FORWARD, operands)
    x, weight, grad = operands.input, operands.weight, operands.grad_output
    return lambda: (forward(), *_torch_backward(problem, grad, x, weight, [True, True, False])[:2])


def torch_function(problem: ConvTransposeProblem) -> Callable[..., torch.Tensor]:
    """PyTorch's function for the number of dimensions of ``problem``."""
    function: Callable[..., torch.Tensor] = getattr(F, f"conv_transpose{problem.dims}d")
    return function


def parameters_of(problem: ConvTransposeProblem) -> dict[str, Any]:
    """The constants of a layer, by the names of PyTorch's parameters."""
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    return {name: getattr(problem, name) for name in names}


def torch_variant_call(
    variant: TorchVariant, problem: ConvTransposeProblem, pass_: Pass, operands: Operands
) -> Call | None:
    """A pass by PyTorch in one of its variants, to be called within `torch_flags`; None where there is no such one."""
    if variant is TorchVariant.CHANNELS_LAST:
        if problem.channels_last or operands.input.dim() not in MEMORY_FORMATS:
            return None
        operands = operands.channels_last()
    call = torch_call(problem, pass_, operands)
    return torch.compile(call) if variant is TorchVariant.COMPILE else call


@contextmanager
def torch_flags(variant: TorchVariant, strict_fp32: bool) -> Iterator[None]:
    """PyTorch's switches as ``variant`` wants them, TF32 allowed unless ``strict_fp32``; all put back at the end.

    polyphase goes by the same switch.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark = variant is TorchVariant.BENCHMARK
    cudnn.allow_tf32 = not strict_fp32
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before


def _without_grad(call: Call) -> Call:
    def run() -> torch.Tensor:
        with torch.no_grad():
            return call()

    return run


def _torch_backward(
    problem: ConvTransposeProblem, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[Any, ...]:
    sizes = [list(values) for values in (problem.stride, problem.padding, problem.dilation)]
    padding = list(problem.output_padding)
    gradients: tuple[Any, ...] = torch.ops.aten.convolution_backward(
        grad, x, weight, None, *sizes, True, padding, problem.groups, mask
    )
    return gradients
