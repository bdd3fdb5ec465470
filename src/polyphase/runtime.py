"""From tensors on a GPU to a launched kernel. A warm call is one look-up, one allocation, one launch, mostly.

Arguments are valid already (`polyphase.torch_op.validate`): batched tensors of one real floating dtype on one CUDA
device, of any strides. Weights are ``(C_in, C_out / groups, *kernel_size)``. Outputs come in the memory format that
PyTorch would give.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from polyphase.errors import UnsupportedError
from polyphase.jit.launcher import Executable, compile_meanwhile, is_loaded, soonest
from polyphase.kept import KEPT, Kept, Packed, kept_of, state_of
from polyphase.plan.planner import Plan, plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import NONE, Epilogue, decoded
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import ALIGNMENT, Layouts, Strides, dense_strides
from polyphase.program.kept import KeptProgram, kept_program
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, GRAD, SRC, WEIGHT, WORKSPACE, X
from polyphase.torch_op.epilogue import Apart
from polyphase.torch_op.memory_format import output_channels_last
from polyphase.torch_op.operators import input_grad_shape
from polyphase.torch_op.tf32 import tf32_allowed

#: Fills every output with NaN before the launch, so that tests see what a kernel does not write.
POISON = False

# Prepared calls of each pass, by everything that decides how they run. Dropped as a whole when full: plans are cheap.
_MAX_CALLS = 8192
_forward_calls: dict[tuple[object, ...], Call] = {}
_input_grad_calls: dict[tuple[object, ...], Call] = {}
_weight_grad_calls: dict[tuple[object, ...], Call] = {}

# PyTorch's public ways to ask for these take microseconds; builds without CUDA have neither.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)


# Where a call's tensors stand among the addresses that a program is launched with. A pass has not all of them.
_ADDRESSES = {SRC: 0, X: 0, WEIGHT: 1, GRAD: 1, BIAS: 2, DST: 3}
_COUNT = 4
_BUFFER_ALIGNMENT = 256  # bytes; TMA asks for 128


class Call:
    """One pass of one problem, ready to run on tensors that lie as those it was made for: see `forward_call`.

    The program's buffers lie in ``scratch_bytes`` of memory at ``offsets``; their addresses come behind those of
    `_ADDRESSES` and of the epilogue's operands, ``of_epilogue``, of which ``residuals`` lie as the result does.
    """

    __slots__ = (
        "_arch", "_copies_weight", "_index", "_kept", "_launch", "_offsets", "_places", "_program", "_residuals",
        "_scratch_bytes", "_shape", "_strides",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        arch: str,
        index: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        copies_weight: bool,
        epilogue: Epilogue = NONE,
    ) -> None:
        self._index = index
        self._shape = shape
        self._strides = strides
        self._copies_weight = copies_weight
        self._offsets: list[int] = []
        self._scratch_bytes = 0
        operands = epilogue.named_operands
        self._residuals = tuple(list(operands).index(name) for name in epilogue.residuals)
        places = _ADDRESSES | {name: _COUNT + place for place, name in enumerate(operands)}
        for buffer in program.buffers:
            places[buffer.name] = _COUNT + len(operands) + len(self._offsets)
            self._offsets.append(self._scratch_bytes)
            self._scratch_bytes += round_up(buffer.bytes, _BUFFER_ALIGNMENT)
        self._launch = Executable(program, arch, index, places)
        self._program, self._arch, self._places = program, arch, places
        self._kept: _KeptLaunch | bool | None = None  # not known yet

    def __call__(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        bias: torch.Tensor | None = None,
        operands: Sequence[torch.Tensor] = (),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The pass of the two tensors that it reads. What is returned is no view: autograd may change it.

        ``operands``: those of the epilogue. ``out``: what it is written to, of the strides that the call was made for.
        """
        kept = kept_of(second) if KEPT else None
        if self._copies_weight:
            second = second.contiguous()
        if bias is not None:
            bias = bias.contiguous()
        result = first.new_empty_strided(self._shape, self._strides) if out is None else out
        addresses = [first.data_ptr(), second.data_ptr(), 0 if bias is None else bias.data_ptr(), result.data_ptr()]
        scratch = None
        if operands:
            operands = self._as_read(operands)
            addresses += [operand.data_ptr() for operand in operands]
        if self._scratch_bytes:
            scratch = first.new_empty_strided((-(-self._scratch_bytes // first.element_size()),), (1,))
            start = scratch.data_ptr()
            for offset in self._offsets:
                addresses.append(start + offset)
        if POISON:
            result.fill_(float("nan"))
            if scratch is not None:
                scratch.view(torch.uint8).fill_(0xFF)  # NaN in every type
        index = self._index
        launch = self._launch if kept is None else self._launch_of_kept(kept)
        if _current_device() == index:
            launch(_current_stream(index), addresses)
        else:
            with torch.cuda.device(index):
                launch(_current_stream(index), addresses)
        return result

    def _launch_of_kept(self, kept: Kept) -> Callable[[int, list[int]], None]:
        """What launches the pass with a weight that is kept packed; the ordinary launch where that cannot be."""
        if self._kept is None:
            parts = kept_program(self._program)
            self._kept = parts is not None and _KeptLaunch(parts, self._arch, self._index, self._places)
        weight = kept.weight()
        if not isinstance(self._kept, _KeptLaunch) or weight is None:
            return self._launch
        packed = self._kept.packed_of(kept, weight, _current_stream(self._index))
        return self._launch if packed is None else partial(self._kept, packed, state_of(weight))

    def _as_read(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The epilogue's operands without gaps, residuals with the result's strides."""
        read = [operand.contiguous() if i not in self._residuals else operand for i, operand in enumerate(operands)]
        for i in self._residuals:
            if read[i].stride() != self._strides:
                read[i] = read[i].new_empty_strided(self._shape, self._strides).copy_(read[i])
        return read


class _KeptLaunch:
    """Launches a program with a packed weight that is kept; packs it where it has changed."""

    def __init__(self, parts: KeptProgram, arch: str, index: int, places: Mapping[str, int]) -> None:
        self._pack = Executable(Program((parts.pack,)), arch, index, places)
        self._launch = Executable(parts.program, arch, index, places)
        self._header = parts.header_bytes
        self._place = places[WORKSPACE]
        (self._bytes,) = (buffer.bytes for buffer in parts.program.buffers if buffer.name == WORKSPACE)

    def packed_of(self, kept: Kept, weight: torch.Tensor, stream: int) -> Packed | None:
        """Where the weight is packed, or is to be, for launches on a stream.

        A graph takes what an earlier call has packed on any stream for its own: calls after its capture pack again, and
        share no counters with its replays. None where there is nothing to take: what is captured is not computed yet.
        """
        if torch.cuda.is_current_stream_capturing():
            state = state_of(weight)
            ready = (key for key, each in kept.packed.items() if key[0] is self and each.state == state)
            key = next((key for key in ready if not isinstance(key[1], str)), None)
            if key is None or state is None:
                return None
            taken = kept.packed.pop(key)
            kept.packed[self, f"graph {len(kept.packed)}"] = taken
            return taken
        packed = kept.packed.get((self, stream))
        if packed is None:
            with torch.inference_mode(False):  # it may be written in other modes, too
                workspace = torch.empty(self._bytes, dtype=torch.uint8, device=weight.device)
            packed = kept.packed[self, stream] = Packed(workspace)
        return packed

    def __call__(self, packed: Packed, state: tuple[int, int] | None, stream: int, addresses: list[int]) -> None:
        """``addresses`` are those of an ordinary launch, but for the workspace; ``state`` is the weight's."""
        addresses[self._place] = packed.workspace.data_ptr()
        if state is None or packed.state != state:
            self._pack(stream, addresses)
            packed.state = state
        if self._header:
            packed.workspace[: self._header].zero_()
        self._launch(stream, addresses)


def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *constants: Any) -> torch.Tensor:
    """The layer's output ``(N, C_out, *output_size)``; ``constants`` are those that `forward_call` takes."""
    return forward_call(input, weight, bias, *constants)(input, weight, bias)


def forward_call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *constants: Any) -> Call:
    """What computes the output; ``constants``: stride, padding, output_padding and dilation as tuples, and groups.

    It serves all tensors of the same shapes, strides, dtype and device whose input is as well aligned, while PyTorch's
    flags allow TF32 as they do now.
    """
    return epilogue_call(input, weight, bias, "", *constants)


def forward_with_epilogue(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    operands: tuple[torch.Tensor, ...],
    epilogue: str,
    *constants: Any,
) -> torch.Tensor:
    """The layer's output behind an epilogue, as `polyphase.problem.epilogue` encodes it."""
    call = epilogue_call(input, weight, bias, epilogue, *constants)
    return call(input, weight, bias, operands)


def epilogue_call(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str,
    *constants: Any,
    image_stride: int | None = None,
) -> Call:
    """What computes the output behind an epilogue, none where that is ""; it serves tensors as `forward_call`'s does.

    ``image_stride``: elements from one image to the next in what the output is written to; by default it has no gaps.
    """
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    key = (input.shape, input.stride(), weight.shape, weight.stride(), bias is None, input.dtype,
           input.get_device(), input.data_ptr() % ALIGNMENT, constants, tf32, epilogue, image_stride)  # fmt: skip
    call = _forward_calls.get(key)
    if call is None:
        problem = _problem(tuple(input.shape), weight, input, constants, bias is not None, tf32)
        problem = _with_format(problem, output_channels_last(input, weight))
        problem = replace(problem, epilogue=decoded(epilogue)) if epilogue else problem
        try:
            call = _prepare(Pass.FORWARD, problem, input, None, weight, image_stride)
        except UnsupportedError as error:
            if not problem.epilogue.normalizes:
                raise
            warnings.warn(f"PyTorch's functions compute the epilogue: {error}", stacklevel=2)
            layer = epilogue_call(input, weight, bias, "", *constants)
            call = cast(Call, Apart(layer, problem.epilogue))
        _remember(_forward_calls, key, call)
    return call


def input_grad(grad_output: torch.Tensor, weight: torch.Tensor, *constants: Any) -> torch.Tensor:
    """The gradient of the layer's input, ``(N, C_in, *input_size)``."""
    return input_grad_call(grad_output, weight, *constants)(grad_output, weight)


def input_grad_call(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Call:
    """What computes the gradient of the input; it serves tensors as `forward_call`'s does, both as well aligned."""
    constants = stride, padding, output_padding, dilation, groups
    tf32 = grad_output.dtype == torch.float32 and tf32_allowed()
    alignment = (grad_output.data_ptr() | weight.data_ptr()) % ALIGNMENT
    key = (grad_output.shape, grad_output.stride(), weight.shape, weight.stride(), grad_output.dtype,
           grad_output.get_device(), alignment, constants, tf32)  # fmt: skip
    call = _input_grad_calls.get(key)
    if call is None:
        problem = _problem(
            input_grad_shape(grad_output, weight, *constants), weight, grad_output, constants, False, tf32
        )
        problem = _with_format(problem, output_channels_last(grad_output, weight))
        call = _prepare(Pass.INPUT_GRAD, problem, None, grad_output, weight)
        _remember(_input_grad_calls, key, call)
    return call


def weight_grad(
    input: torch.Tensor, grad_output: torch.Tensor, kernel_size: tuple[int, ...], *constants: Any
) -> torch.Tensor:
    """The gradient of the layer's weight, ``(C_in, C_out / groups, *kernel_size)``.

    Blocks on different parts of the batch and the image leave partial sums, which are added in a fixed order (split-K).
    """
    return weight_grad_call(input, grad_output, kernel_size, *constants)(input, grad_output)


def weight_grad_call(
    input: torch.Tensor,
    grad_output: torch.Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Call:
    """What computes the gradient of the weight; it serves tensors as `forward_call`'s does, both as well aligned."""
    constants = stride, padding, output_padding, dilation, groups
    tf32 = input.dtype == torch.float32 and tf32_allowed()
    alignment = (input.data_ptr() | grad_output.data_ptr()) % ALIGNMENT
    key = (input.shape, input.stride(), grad_output.shape, grad_output.stride(), kernel_size,
           input.dtype, input.get_device(), alignment, constants, tf32)  # fmt: skip
    call = _weight_grad_calls.get(key)
    if call is None:
        problem = ConvTransposeProblem(
            input.shape[0], input.shape[1], grad_output.shape[1], tuple(input.shape[2:]), kernel_size,
            *constants, dtype=_name(input.dtype), tf32=tf32,
        )  # fmt: skip
        problem = _with_format(problem, output_channels_last(input, grad_output))
        call = _prepare(Pass.WEIGHT_GRAD, problem, input, grad_output, None)
        _remember(_weight_grad_calls, key, call)
    return call


def forget_prepared_calls() -> None:
    """Has every later call planned and prepared anew."""
    for calls in (_forward_calls, _input_grad_calls, _weight_grad_calls):
        calls.clear()


def _remember(calls: dict[tuple[object, ...], Call], key: tuple[object, ...], call: Call) -> None:
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call


def _prepare(
    pass_: Pass,
    problem: ConvTransposeProblem,
    input: torch.Tensor | None,
    output: torch.Tensor | None,
    weight: torch.Tensor | None,
    image_stride: int | None = None,
) -> Call:
    """Plans and compiles a call that was not seen before; a missing ``input`` or ``output`` is what it computes.

    ``image_stride``: that of the forward pass's output, where it has gaps between images.
    """
    tensor = input if input is not None else output
    assert tensor is not None
    device = DeviceInfo.of(tensor.device)
    layouts = _layouts(pass_, problem, input, output, weight)
    if image_stride is not None:
        layouts = replace(layouts, output=(image_stride, *layouts.output[1:]))
    chosen = plan(problem, pass_, device, layouts)
    index = torch.cuda.current_device() if tensor.device.index is None else tensor.device.index
    program = _first_to_run(chosen, device.arch, index)
    if pass_ is Pass.WEIGHT_GRAD:
        shape, strides5 = problem.weight_shape, dense_strides(problem.weight_shape, program.dst_channels_last)
    elif pass_ is Pass.FORWARD:
        shape, strides5 = problem.output_shape, layouts.output
    else:
        shape, strides5 = problem.input_shape, layouts.input
    strides = strides5[:2] + strides5[5 - problem.dims :]
    copies_weight = weight is not None and not layouts.weight_channels_last and not weight.is_contiguous()
    call = Call(program, device.arch, index, shape, strides, copies_weight, problem.epilogue)
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
    """How the tensors of a call lie; what it computes is dense. The forward pass packs its weight, aligned or not."""
    read = (input,) if pass_ is Pass.FORWARD else (input, output, weight)
    dense = Layouts.dense(problem)
    return Layouts(
        _strides(input) if input is not None else dense.input,
        _strides(output) if output is not None else dense.output,
        weight is not None and not weight.is_contiguous() and _is_dense_channels_last(weight),
        all(each.data_ptr() % ALIGNMENT == 0 for each in read if each is not None),
    )


def _first_to_run(chosen: Plan, arch: str, index: int) -> Program:
    """The program of a plan to run now: amid a graph's capture one whose kernels are loaded, for nothing is then."""
    programs = [soonest(each, arch, index) for each in chosen.programs]
    if len(programs) > 1 and torch.cuda.is_current_stream_capturing():
        there = (each for each in programs if all(is_loaded(source, arch, index) for source in each.sources))
        return next(there, programs[0])
    return programs[0]


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


_Constants = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _problem(
    input_shape: tuple[int, ...],
    weight: torch.Tensor,
    tensor: torch.Tensor,
    constants: _Constants,
    bias: bool,
    tf32: bool,
) -> ConvTransposeProblem:
    groups = constants[-1]
    return ConvTransposeProblem(
        input_shape[0], input_shape[1], weight.shape[1] * groups, input_shape[2:], tuple(weight.shape[2:]),
        *constants, bias=bias, dtype=_name(tensor.dtype), tf32=tf32,
    )  # fmt: skip


def _with_format(problem: ConvTransposeProblem, channels_last: bool) -> ConvTransposeProblem:
    return replace(problem, channels_last=channels_last) if channels_last else problem
