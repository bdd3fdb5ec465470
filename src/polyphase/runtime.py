"""From tensors on a GPU to a launched kernel. A warm call is one look-up, one allocation, one launch, mostly.

Arguments are valid already (`polyphase.torch_op.validate`): batched tensors of one real floating dtype on one CUDA
device, of any strides. Weights are ``(C_in, C_out / groups, *kernel_size)``. Outputs come in the memory format that
PyTorch would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from polyphase.jit.compiler import preload
from polyphase.jit.launcher import Executable, compile_meanwhile, is_loaded, soonest
from polyphase.plan.planner import plan
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass, accumulator_bytes
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import ALIGNMENT, Layouts, Strides, dense_strides
from polyphase.program.split_k import plane_sum
from polyphase.program.transpose import turning, turning_back
from polyphase.torch_op.memory_format import output_channels_last
from polyphase.torch_op.tf32 import tf32_allowed

#: Fills every output with NaN before the launch, so that tests see what a kernel does not write.
POISON = False

# Calls seen in each pass, by everything that decides how they run. Dropped as a whole when full: plans are cheap.
_MAX_CALLS = 8192
_forward_calls: dict[tuple[object, ...], _Call] = {}
_input_grad_calls: dict[tuple[object, ...], _Call] = {}
_weight_grad_calls: dict[tuple[object, ...], _Call] = {}

# PyTorch's public ways to ask for these take microseconds; builds without CUDA have neither.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)


preload()


class _Call:
    """One pass of one problem, ready to launch: the output to allocate, the kernel, what adds up its planes.

    ``turns`` bring as many of its first tensors to channels_last before, each of so many elements, and ``turn_back``
    what has been computed to where it belongs.
    """

    __slots__ = ("copies_weight", "executable", "shape", "strides", "sum", "turn_back", "turns")

    def __init__(
        self,
        executable: Executable,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        copies_weight: bool,
        sum: Executable | None,
        turns: list[tuple[Executable, int]],
        turn_back: Executable | None,
    ) -> None:
        self.executable = executable
        self.shape = shape
        self.strides = strides
        self.copies_weight = copies_weight
        self.sum = sum
        self.turns = turns
        self.turn_back = turn_back


def forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """The layer's output ``(N, C_out, *output_size)``."""
    parameters = (tuple(stride), tuple(padding), tuple(output_padding), tuple(dilation), groups)
    address = input.data_ptr()
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    key = (input.shape, input.stride(), weight.shape, weight.stride(), bias is None, input.dtype,
           input.get_device(), address % ALIGNMENT, parameters, tf32)  # fmt: skip
    call = _forward_calls.get(key)
    if call is None:
        problem = _problem(tuple(input.shape), weight, input, parameters, bias is not None, tf32)
        problem = _with_format(problem, output_channels_last(input, weight))
        call = _prepare(Pass.FORWARD, problem, input, None, weight)
        _remember(_forward_calls, key, call)
    bias_address = 0
    if bias is not None:
        bias = bias.contiguous()
        bias_address = bias.data_ptr()
    return _run(call, input, weight, bias_address)


def input_grad(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """The gradient of the layer's input, ``(N, C_in, *input_size)``."""
    parameters = (tuple(stride), tuple(padding), tuple(output_padding), tuple(dilation), groups)
    tf32 = grad_output.dtype == torch.float32 and tf32_allowed()
    alignment = (grad_output.data_ptr() | weight.data_ptr()) % ALIGNMENT
    key = (grad_output.shape, grad_output.stride(), weight.shape, weight.stride(), grad_output.dtype,
           grad_output.get_device(), alignment, parameters, tf32)  # fmt: skip
    call = _input_grad_calls.get(key)
    if call is None:
        problem = _problem(_input_shape(grad_output, weight, parameters), weight, grad_output, parameters, False, tf32)
        problem = _with_format(problem, output_channels_last(grad_output, weight))
        call = _prepare(Pass.INPUT_GRAD, problem, None, grad_output, weight)
        _remember(_input_grad_calls, key, call)
    return _run(call, grad_output, weight, 0)


def weight_grad(
    input: torch.Tensor,
    grad_output: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """The gradient of the layer's weight, ``(C_in, C_out / groups, *kernel_size)``.

    Blocks on different parts of the batch and the image leave partial sums, which are added in a fixed order.
    """
    parameters = (tuple(stride), tuple(padding), tuple(output_padding), tuple(dilation), groups)
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    alignment = (input.data_ptr() | grad_output.data_ptr()) % ALIGNMENT
    key = (input.shape, input.stride(), grad_output.shape, grad_output.stride(), tuple(kernel_size),
           input.dtype, input.get_device(), alignment, parameters, tf32)  # fmt: skip
    call = _weight_grad_calls.get(key)
    if call is None:
        problem = ConvTransposeProblem(
            input.shape[0], input.shape[1], grad_output.shape[1], tuple(input.shape[2:]), tuple(kernel_size),
            *parameters, dtype=_name(input.dtype), tf32=tf32,
        )  # fmt: skip
        problem = _with_format(problem, output_channels_last(input, grad_output))
        call = _prepare(Pass.WEIGHT_GRAD, problem, input, grad_output, None)
        _remember(_weight_grad_calls, key, call)
    # What is returned is no view: autograd would not let it be changed in place.
    found, added, partial = _room(call, input)
    read = [input, grad_output]
    for i, turn in enumerate(call.turns):
        read[i] = _turned(read[i], *turn)
    _launch(call.executable, read[0].data_ptr(), read[1].data_ptr(), partial.data_ptr())
    return _finished(call, partial, added, found)


def forget_calls() -> None:
    """Has every later call planned anew."""
    for calls in (_forward_calls, _input_grad_calls, _weight_grad_calls):
        calls.clear()


def _run(call: _Call, source: torch.Tensor, weight: torch.Tensor, bias_address: int) -> torch.Tensor:
    """A forward pass or an input gradient of ``source``; the weights are packed first where the kernel has them so."""
    if call.copies_weight:
        weight = weight.contiguous()
    found, added, partial = _room(call, source)
    executable = call.executable
    for turn in call.turns:
        source = _turned(source, *turn)
    weight_address = weight.data_ptr()
    if executable.prologue is not None:
        workspace = source.new_empty(executable.workspace_bytes, dtype=torch.uint8)
        workspace_address = workspace.data_ptr()
        if executable.prologue.prologue is not None:
            _launch(executable.prologue.prologue, weight_address, workspace_address, source.data_ptr())
        _launch(executable.prologue, weight_address, workspace_address)
        weight_address = workspace_address
    _launch(executable, source.data_ptr(), weight_address, bias_address, partial.data_ptr())
    return _finished(call, partial, added, found)


def _room(call: _Call, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For the result, for that before it is turned back, and for its partial sums; the same where there is no step."""
    found = like.new_empty_strided(call.shape, call.strides)
    added = found if call.turn_back is None else like.new_empty(found.numel())
    partial = added
    if call.sum is not None:
        accumulator = torch.float64 if like.dtype == torch.float64 else torch.float32
        partial = like.new_empty((call.executable.planes, found.numel()), dtype=accumulator)
    if POISON:
        for each in (partial, added, found):
            each.fill_(float("nan"))
    return found, added, partial


def _finished(call: _Call, partial: torch.Tensor, added: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The result, once the partial sums are computed."""
    if call.sum is not None:
        _launch(call.sum, partial.data_ptr(), added.data_ptr())
    if call.turn_back is not None:
        _launch(call.turn_back, added.data_ptr(), found.data_ptr())
    return found


def _turned(tensor: torch.Tensor, turn: Executable, elements: int) -> torch.Tensor:
    """The same elements, channels innermost."""
    turned = tensor.new_empty(elements)
    _launch(turn, tensor.data_ptr(), turned.data_ptr())
    return turned


def _launch(executable: Executable, *pointers: int) -> None:
    index = executable.device_index
    if _current_device() == index:
        executable(_current_stream(index), *pointers)
    else:
        with torch.cuda.device(index):
            executable(_current_stream(index), *pointers)


def _remember(calls: dict[tuple[object, ...], _Call], key: tuple[object, ...], call: _Call) -> None:
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call


def _prepare(
    pass_: Pass,
    problem: ConvTransposeProblem,
    input: torch.Tensor | None,
    output: torch.Tensor | None,
    weight: torch.Tensor | None,
) -> _Call:
    """Plans and compiles a call that was not seen before; a missing ``input`` or ``output`` is what it computes."""
    tensor = input if input is not None else output
    assert tensor is not None
    read = (input,) if pass_ is Pass.FORWARD else (input, output, weight)  # as it is: the forward pass packs weights
    device = DeviceInfo.of(tensor.device)
    dense = Layouts.dense(problem)
    weight_last = weight is not None and not weight.is_contiguous() and _is_dense_channels_last(weight)
    layouts = Layouts(
        _strides(input) if input is not None else dense.input,
        _strides(output) if output is not None else dense.output,
        weight_last,
        all(each.data_ptr() % ALIGNMENT == 0 for each in read if each is not None),
    )
    chosen = plan(problem, pass_, device, layouts)
    assert chosen.launch is not None
    index = torch.cuda.current_device() if tensor.device.index is None else tensor.device.index
    launches = [soonest(each, device.arch, index) for each in chosen.launches]
    launch = launches[0]
    if len(launches) > 1 and torch.cuda.is_current_stream_capturing():
        # A graph is captured with a kernel that is there: nothing is compiled or loaded amid the capture.
        there = (each for each in launches if all(is_loaded(source, device.arch, index) for source in each.sources))
        launch = next(there, launch)
    executable = Executable(launch, device.arch, index, 3 if pass_ is Pass.WEIGHT_GRAD else 4)
    adds_up = None
    if pass_ is Pass.WEIGHT_GRAD or launch.in_parts:
        # Loaded in any case: another size of the layer may need it, amid a capture.
        elements = problem.elements[0 if pass_ is Pass.INPUT_GRAD else 1]
        loaded = Executable(plane_sum(problem.dtype, elements, launch.planes), device.arch, index, 2)
        in_their_type = launch.narrowed or accumulator_bytes(problem.dtype) == DTYPE_BYTES[problem.dtype]
        alone = launch.planes == 1 and (in_their_type or pass_ is Pass.INPUT_GRAD)
        adds_up = None if alone else loaded
    for source in (source for each in chosen.launches for source in each.sources):
        compile_meanwhile(source, device.arch, index)
    if pass_ is Pass.WEIGHT_GRAD:
        last = launch.planes_channels_last and not launch.turned
        shape, strides5 = problem.weight_shape, dense_strides(problem.weight_shape, last)
    elif pass_ is Pass.FORWARD:
        shape, strides5 = problem.output_shape, layouts.output
    else:
        shape, strides5 = problem.input_shape, layouts.input
    strides = strides5[:2] + strides5[5 - problem.dims :]
    copies_weight = weight is not None and not weight_last and not weight.is_contiguous()
    turns, turn_back = [], None
    if launch.turned:
        sides = [(problem.input_shape, layouts.input), (problem.output_shape, layouts.output)]
        for side in sides[-launch.turned :]:
            turn = Executable(turning(problem.dtype, *side), device.arch, index, 2)
            turns.append((turn, math.prod(side[0])))
        if pass_ is Pass.INPUT_GRAD or launch.planes_channels_last:
            turn_back = Executable(turning_back(problem.dtype, shape), device.arch, index, 2)
    return _Call(executable, shape, strides, copies_weight, adds_up, turns, turn_back)


def _is_dense_channels_last(weight: torch.Tensor) -> bool:
    if weight.dim() == 3:
        weight = weight.unsqueeze(2)
    return weight.is_contiguous(memory_format=torch.channels_last if weight.dim() == 4 else torch.channels_last_3d)


def _strides(tensor: torch.Tensor) -> Strides:
    batch, channel, *spatial = tensor.stride()
    depth, height, width = [0] * (3 - len(spatial)) + spatial
    return batch, channel, depth, height, width


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_Parameters = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _problem(
    input_shape: tuple[int, ...],
    weight: torch.Tensor,
    tensor: torch.Tensor,
    parameters: _Parameters,
    bias: bool,
    tf32: bool,
) -> ConvTransposeProblem:
    groups = parameters[-1]
    return ConvTransposeProblem(
        input_shape[0], input_shape[1], weight.shape[1] * groups, input_shape[2:], tuple(weight.shape[2:]),
        *parameters, bias=bias, dtype=_name(tensor.dtype), tf32=tf32,
    )  # fmt: skip


def _input_shape(grad_output: torch.Tensor, weight: torch.Tensor, parameters: _Parameters) -> tuple[int, ...]:
    stride, padding, output_padding, dilation, _ = parameters
    axes = ConvTransposeProblem(
        1, 1, 1, (1,) * len(stride), tuple(weight.shape[2:]), stride, padding, output_padding, dilation
    ).axes
    sizes = (axis.input_size(n, extra) for axis, n, extra in zip(axes, grad_output.shape[2:], output_padding))
    return (grad_output.shape[0], weight.shape[0], *sizes)


def _with_format(problem: ConvTransposeProblem, channels_last: bool) -> ConvTransposeProblem:
    return replace(problem, channels_last=channels_last) if channels_last else problem
