"""From tensors on a GPU to a prepared call (`polyphase.prepared`), by one look-up if there was an equal call before.

Arguments are already validated (`polyphase.torch_op.validate`): batched tensors of one real floating dtype on one CUDA
device, of any strides. Weights are ``(C_in, C_out / groups, *kernel_size)``. Outputs have the memory format that
PyTorch would give them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from polyphase.errors import UnsupportedError
from polyphase.jit.launcher import compile_meanwhile, is_loaded, soonest
from polyphase.plan.planner import Plan, plan
from polyphase.prepared import Call, empty_on_cpu, empty_on_cuda
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import NONE, Epilogue, decoded, encoded
from polyphase.problem.layouts import ALIGNMENT, Layouts, Strides, dense_strides
from polyphase.problem.sizes import typical
from polyphase.program.program import Program
from polyphase.torch_op.epilogue import Apart
from polyphase.torch_op.memory_format import output_channels_last
from polyphase.torch_op.operators import input_grad_shape, weight_grad_shape
from polyphase.torch_op.tf32 import tf32_allowed

# Prepared calls of each pass, by everything that decides how they run. Dropped as a whole when full: plans are cheap.
_MAX_CALLS = 8192
_forward_calls: dict[tuple[object, ...], Call] = {}
_input_grad_calls: dict[tuple[object, ...], Call] = {}
_weight_grad_calls: dict[tuple[object, ...], Call] = {}


def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *constants: Any) -> torch.Tensor:
    """The layer's output ``(N, C_out, *output_size)``; ``constants``: as for `forward_call`."""
    return forward_call(input, weight, bias, *constants)(input, weight, bias)


def forward_call(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *constants: Any,
    epilogue: str = "",
    out_strides: Strides | None = None,
) -> Call:
    """The call that computes the output; ``constants``: stride, padding, output_padding, dilation (tuples), groups.

    It serves all tensors of the same shapes, strides, dtype, device and alignment of the input, while PyTorch's flags
    for TF32 stay the same.

    ``epilogue``: prologue and epilogue as text (`polyphase.problem.epilogue.encoded`). ``out_strides``: of the tensor
    that the output is written to (`polyphase.torch_op.into`); without gaps by default.
    """
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    key = (input.shape, input.stride(), weight.shape, weight.stride(), bias is None, input.dtype,
           input.get_device(), input.data_ptr() % ALIGNMENT, constants, tf32, epilogue, out_strides)  # fmt: skip
    call = _forward_calls.get(key)
    if call is None:
        behind, before = decoded(epilogue)
        problem = _problem(
            input.shape, weight.shape, input.dtype, constants, bias=bias is not None, tf32=tf32,
            channels_last=output_channels_last(input, weight), epilogue=behind, prologue=before,
        )  # fmt: skip
        try:
            call = _prepare(Pass.FORWARD, problem, input, None, weight, out_strides)
        except UnsupportedError as error:
            if not problem.epilogue.normalizes:
                raise
            warnings.warn(f"PyTorch's functions compute the epilogue: {error}", stacklevel=2)
            layer = forward_call(input, weight, bias, *constants, epilogue=encoded(NONE, problem.prologue))
            call = cast(Call, Apart(layer, problem.epilogue, problem.prologue))
        _remember(_forward_calls, key, call)
    return call


def input_grad(grad_output: torch.Tensor, weight: torch.Tensor, *constants: Any) -> torch.Tensor:
    """The gradient of the layer's input, ``(N, C_in, *input_size)``."""
    return input_grad_call(grad_output, weight, *constants)(grad_output, weight)


def input_grad_call(grad_output: torch.Tensor, weight: torch.Tensor, *constants: Any) -> Call:
    """The call that computes the input's gradient; it serves tensors like `forward_call`'s, both equally aligned."""
    tf32 = grad_output.dtype == torch.float32 and tf32_allowed()
    alignment = (grad_output.data_ptr() | weight.data_ptr()) % ALIGNMENT
    key = (grad_output.shape, grad_output.stride(), weight.shape, weight.stride(), grad_output.dtype,
           grad_output.get_device(), alignment, constants, tf32)  # fmt: skip
    call = _input_grad_calls.get(key)
    if call is None:
        problem = _problem(
            input_grad_shape(grad_output, weight, *constants), weight.shape, grad_output.dtype, constants, tf32=tf32,
            channels_last=output_channels_last(grad_output, weight),
        )  # fmt: skip
        call = _prepare(Pass.INPUT_GRAD, problem, None, grad_output, weight)
        _remember(_input_grad_calls, key, call)
    return call


def weight_grad(
    input: torch.Tensor, grad_output: torch.Tensor, kernel_size: tuple[int, ...], *constants: Any
) -> torch.Tensor:
    """The gradient of the layer's weight, ``(C_in, C_out / groups, *kernel_size)``.

    Blocks on different parts of the batch and the image write partial sums, which are added in a fixed order (split-K).
    """
    return weight_grad_call(input, grad_output, kernel_size, *constants)(input, grad_output)


def weight_grad_call(
    input: torch.Tensor, grad_output: torch.Tensor, kernel_size: tuple[int, ...], *constants: Any
) -> Call:
    """The call that computes the weight's gradient; it serves tensors like `forward_call`'s, both equally aligned."""
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    alignment = (input.data_ptr() | grad_output.data_ptr()) % ALIGNMENT
    key = (input.shape, input.stride(), grad_output.shape, grad_output.stride(), kernel_size,
           input.dtype, input.get_device(), alignment, constants, tf32)  # fmt: skip
    call = _weight_grad_calls.get(key)
    if call is None:
        problem = _problem(
            input.shape, weight_grad_shape(input, grad_output, kernel_size, *constants), input.dtype, constants,
            tf32=tf32, channels_last=output_channels_last(input, grad_output),
        )  # fmt: skip
        call = _prepare(Pass.WEIGHT_GRAD, problem, input, grad_output, None)
        _remember(_weight_grad_calls, key, call)
    return call


def forget_prepared_calls() -> None:
    """Makes every later call be planned and prepared again."""
    for calls in (_forward_calls, _input_grad_calls, _weight_grad_calls):
        calls.clear()


def _remember(calls: dict[tuple[object, ...], Call], key: tuple[object, ...], call: Call) -> None:
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call


def has_kernel(input: torch.Tensor, weight: torch.Tensor, bias: bool, epilogue: Epilogue, *constants: Any) -> bool:
    """Whether a kernel computes the layer with an epilogue, channels first, at its typical size.

    ``input``'s sizes may be symbolic.
    """
    some = (1, weight.shape[0], *[64] * (weight.dim() - 2))
    problem = _problem(some, weight.shape, input.dtype, constants, bias=bias, tf32=tf32_allowed())
    try:
        plan(replace(typical(problem), epilogue=epilogue), Pass.FORWARD, DeviceInfo.of(input.device))
    except UnsupportedError:
        return False
    return True


def _prepare(
    pass_: Pass,
    problem: ConvTransposeProblem,
    input: torch.Tensor | None,
    output: torch.Tensor | None,
    weight: torch.Tensor | None,
    out_strides: Strides | None = None,
) -> Call:
    """Plans and compiles a new call; a missing ``input`` or ``output`` is the one that it computes.

    ``out_strides``: of the forward pass's output, if it has gaps.
    """
    tensor = input if input is not None else output
    assert tensor is not None
    device = DeviceInfo.of(tensor.device)
    layouts = _layouts(pass_, problem, input, output, weight)
    if out_strides is not None:
        layouts = replace(layouts, output=out_strides)
    chosen = plan(problem, pass_, device, layouts)
    index = torch.cuda.current_device() if tensor.device.index is None else tensor.device.index
    program = _first_to_run(chosen, device.arch, index)
    if pass_ is Pass.WEIGHT_GRAD:
        shape, strides5 = problem.weight_shape, dense_strides(problem.weight_shape, program.dst_channels_last)
    elif pass_ is Pass.FORWARD:
        shape, strides5 = problem.output_shape, layouts.output
    else:
        shape, strides5 = problem.input_shape, layouts.input
    strides, final = _of_dims(problem, strides5), None
    if pass_ is Pass.WEIGHT_GRAD and problem.channels_last:  # it may be contiguous; PyTorch's is not
        wanted = _of_dims(problem, dense_strides(shape, channels_last=True))
        final = None if wanted == strides else wanted
    copies_weight = weight is not None and not layouts.weight_channels_last and not weight.is_contiguous()
    empty = empty_on_cuda if tensor.is_cuda else empty_on_cpu
    call = Call(program, device.arch, index, shape, strides, copies_weight, empty, problem.named_operands, final)
    for source in (source for each in chosen.programs for source in each.sources):
        compile_meanwhile(source, device.arch, index)
    return call


def _layouts(
    pass_: Pass,
    problem: ConvTransposeProblem,
    input: torch.Tensor | None,
    output: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> Layouts:
    """The layouts of a call's tensors; the result is dense. The forward pass packs its weight, aligned or not."""
    read = (input,) if pass_ is Pass.FORWARD else (input, output, weight)
    dense = Layouts.dense(problem)
    return Layouts(
        _strides(input) if input is not None else dense.input,
        _strides(output) if output is not None else dense.output,
        weight is not None and not weight.is_contiguous() and _is_dense_channels_last(weight),
        all(each.data_ptr() % ALIGNMENT == 0 for each in read if each is not None),
    )


def _first_to_run(chosen: Plan, arch: str, index: int) -> Program:
    """The program of a plan to run now: in graph capture one with loaded kernels, since none can be loaded then."""
    programs = [soonest(each, arch, index) for each in chosen.programs]
    if len(programs) > 1 and torch.cuda.is_current_stream_capturing():
        there = (each for each in programs if all(is_loaded(source, arch, index) for source in each.sources))
        return next(there, programs[0])
    return programs[0]


def _of_dims(problem: ConvTransposeProblem, strides: Strides) -> tuple[int, ...]:
    return strides[:2] + strides[5 - problem.dims :]


def _is_dense_channels_last(weight: torch.Tensor) -> bool:
    if weight.dim() == 3:
        weight = weight.unsqueeze(2)
    return weight.is_contiguous(memory_format=torch.channels_last if weight.dim() == 4 else torch.channels_last_3d)


def _strides(tensor: torch.Tensor) -> Strides:
    batch, channel, *spatial = tensor.stride()
    depth, height, width = [0] * (3 - len(spatial)) + spatial
    return batch, channel, depth, height, width


_Constants = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _problem(
    input_shape: Sequence[int], weight_shape: Sequence[int], dtype: torch.dtype, constants: _Constants, **more: Any
) -> ConvTransposeProblem:
    batch, in_channels, *input_size = input_shape
    _, group_channels, *kernel_size = weight_shape
    return ConvTransposeProblem(
        batch, in_channels, group_channels * constants[-1], tuple(input_size), tuple(kernel_size),
        *constants, dtype=str(dtype).removeprefix("torch."), **more,
    )  # fmt: skip
