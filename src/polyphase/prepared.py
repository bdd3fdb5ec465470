"""A pass of a layer, or both its gradients, ready to run: a warm call is a few allocations and a launch for each step.

`polyphase.runtime` prepares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from polyphase.current import current_device, current_stream
from polyphase.jit.launcher import Executable
from polyphase.kept import KEPT, Kept, Packed, kept_of, state_of
from polyphase.problem.epilogue import ELEMENT, Operand
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import ALIGNMENT
from polyphase.program.both import with_shared_copies
from polyphase.program.kept import KeptProgram, kept_program
from polyphase.program.program import Buffer, Program
from polyphase.program.step import BIAS, DST, GRAD, SRC, WEIGHT, WORKSPACE, X

Empty = Callable[["tuple[int, ...]", "tuple[int, ...]", torch.dtype], torch.Tensor]

#: Fills every output with NaN before the launch, so that tests see what a kernel does not write.
POISON = False

# An uninitialised tensor of a shape, strides and dtype on the current device, without the dispatcher: Inductor's code
# allocates by this. Tests use CPU tensors instead.
empty_on_cuda: Empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
empty_on_cpu: Empty = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]

# Indices of a call's tensors among the addresses of a launch. No pass has all of them.
_ADDRESSES = {SRC: 0, X: 0, WEIGHT: 1, GRAD: 1, BIAS: 2, DST: 3}
_COUNT = 4
# Indices for both gradients: input, weight, gradient of the output, no bias, and the results.
_OF_INPUT_GRAD = {WEIGHT: 1, SRC: 2, BIAS: 3, DST: 4}
_OF_WEIGHT_GRAD = {X: 0, GRAD: 2, DST: 5}
_COUNT_FOR_BOTH = 6
_BUFFER_ALIGNMENT = 256  # bytes; TMA asks for 128


def _buffers(buffers: Iterable[Buffer], place: int, total: int = 0) -> tuple[dict[str, int], list[int], int]:
    """Buffers in one piece of memory, behind ``total`` bytes that others have: their indices among the addresses, from
    ``place`` on, the offset of each in bytes, and the bytes of all."""
    places: dict[str, int] = {}
    offsets: list[int] = []
    for buffer in buffers:
        places[buffer.name] = place + len(offsets)
        offsets.append(total)
        total += round_up(buffer.bytes, _BUFFER_ALIGNMENT)
    return places, offsets, total


class Call:
    """One pass of one problem, ready to run on tensors of the layouts it was made for: see `runtime.forward_call`.

    The addresses of the program's buffers follow those of `_ADDRESSES` and those of ``operands``, of prologue and
    epilogue; residuals have the result's layout. ``final_strides``: the strides of the returned tensor, if it is a copy
    of the result.
    """

    __slots__ = (
        "_kept", "_launch", "_offsets", "_places", "_residuals", "_scratch_bytes", "arch", "copies_weight",
        "empty", "final_strides", "index", "program", "shape", "strides",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        arch: str,
        index: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        copies_weight: bool,
        empty: Empty,
        operands: Mapping[str, Operand] = MappingProxyType({}),
        final_strides: tuple[int, ...] | None = None,
    ) -> None:
        self.index = index
        self.empty = empty
        self.shape = shape
        self.strides = strides
        self.final_strides = final_strides
        self.copies_weight = copies_weight
        self._residuals = tuple(place for place, each in enumerate(operands.values()) if each.per == ELEMENT)
        places = _ADDRESSES | {name: _COUNT + place for place, name in enumerate(operands)}
        buffers, self._offsets, self._scratch_bytes = _buffers(program.buffers, _COUNT + len(operands))
        places |= buffers
        self._launch = Executable(program, arch, index, places)
        self.program, self.arch, self._places = program, arch, places
        self._kept: _KeptLaunch | bool | None = None  # not known yet

    def __call__(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        bias: torch.Tensor | None = None,
        operands: Sequence[torch.Tensor] = (),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the pass on the two tensors that it reads. The result is not a view: autograd may change it.

        ``operands``: of prologue and epilogue. ``out``: the tensor to write the result to, with the strides that the
        call was made for.
        """
        if current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(first, second, bias, operands, out)
        kept = kept_of(second) if KEPT else None
        if self.copies_weight:
            second = second.contiguous()
        if bias is not None:
            bias = bias.contiguous()
        result = self.empty(self.shape, self.strides, first.dtype) if out is None else out
        addresses = [first.data_ptr(), second.data_ptr(), 0 if bias is None else bias.data_ptr(), result.data_ptr()]
        scratch = None
        if operands:
            operands = self._as_read(operands)
            addresses += [operand.data_ptr() for operand in operands]
        if self._scratch_bytes:
            scratch = self.empty((self._scratch_bytes,), (1,), torch.uint8)
            start = scratch.data_ptr()
            for offset in self._offsets:
                addresses.append(start + offset)
        if POISON:
            _poison(result, scratch)
        launch = self._launch if kept is None else self._launch_of_kept(kept)
        launch(current_stream(self.index), addresses)
        return result if self.final_strides is None else _with_strides(result, self.final_strides)

    def _launch_of_kept(self, kept: Kept) -> Callable[[int, list[int]], None]:
        """The launch of the pass with a weight that is kept packed; the ordinary launch if that is not possible."""
        if self._kept is None:
            parts = kept_program(self.program)
            self._kept = parts is not None and _KeptLaunch(parts, self.arch, self.index, self._places)
        weight = kept.weight()
        if not isinstance(self._kept, _KeptLaunch) or weight is None:
            return self._launch
        packed = self._kept.packed_of(kept, weight, current_stream(self.index))
        return self._launch if packed is None else partial(self._kept, packed, state_of(weight))

    def _as_read(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The epilogue's operands without gaps, residuals with the result's strides, and aligned."""
        read = [operand.contiguous() if i not in self._residuals else operand for i, operand in enumerate(operands)]
        for i in self._residuals:
            if read[i].stride() != self.strides or read[i].data_ptr() % ALIGNMENT:
                read[i] = _with_strides(read[i], self.strides)
        return read


def _poison(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.fill_(0xFF if tensor.dtype == torch.uint8 else float("nan"))  # NaN in every type


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy of the tensor with these strides."""
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


class _KeptLaunch:
    """Launches a program with a packed weight that is kept; packs the weight if it has changed."""

    def __init__(self, parts: KeptProgram, arch: str, index: int, places: Mapping[str, int]) -> None:
        self._pack = Executable(Program((parts.pack,)), arch, index, places)
        self._launch = Executable(parts.program, arch, index, places)
        self._header = parts.header_bytes
        self._place = places[WORKSPACE]
        (self._bytes,) = (buffer.bytes for buffer in parts.program.buffers if buffer.name == WORKSPACE)

    def packed_of(self, kept: Kept, weight: torch.Tensor, stream: int) -> Packed | None:
        """The memory of the packed weight for launches on a stream.

        A graph takes over memory that an earlier call has packed on any stream: calls after its capture pack again, and
        share no counters with its replays. None if there is none to take: captured work is not computed yet.
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
            with torch.inference_mode(False):  # it may be written in other modes as well
                workspace = torch.empty(self._bytes, dtype=torch.uint8, device=weight.device)
            packed = kept.packed[self, stream] = Packed(workspace)
        return packed

    def __call__(self, packed: Packed, state: tuple[int, int] | None, stream: int, addresses: list[int]) -> None:
        """``addresses``: of an ordinary launch, except the workspace's; ``state``: the weight's."""
        addresses[self._place] = packed.workspace.data_ptr()
        if state is None or packed.state != state:
            self._pack(stream, addresses)
            packed.state = state
        if self._header:
            packed.workspace[: self._header].zero_()
        self._launch(stream, addresses)


class BothGradients:
    """The gradients of a layer's input and weight, made from a call for each: all steps are launched in a row, and all
    buffers share one piece of memory. Copies that both read are made once."""

    __slots__ = ("_launch", "_of_input", "_of_weight", "_offsets", "_scratch_bytes")

    def __init__(self, of_input: Call, of_weight: Call) -> None:
        self._of_input, self._of_weight = of_input, of_weight
        program, shared = with_shared_copies(of_input.program, of_weight.program)
        own = [buffer for buffer in of_input.program.buffers if buffer.name not in shared.values()]
        copies = [buffer for buffer in of_input.program.buffers if buffer not in own]
        others = [buffer for buffer in program.buffers if buffer.name not in shared]
        kept, offsets, begin = _buffers(copies, _COUNT_FOR_BOTH)
        # Other buffers of both begin at the same address: no step of the second starts before the first has ended.
        first, more, first_bytes = _buffers(own, _COUNT_FOR_BOTH + len(offsets), begin)
        offsets += more
        second, more, second_bytes = _buffers(others, _COUNT_FOR_BOTH + len(offsets), begin)
        offsets += more
        second |= {name: kept[of_first] for name, of_first in shared.items()}
        self._offsets, self._scratch_bytes = offsets, max(first_bytes, second_bytes)
        arch, index = of_input.arch, of_input.index
        launches = Executable(of_input.program, arch, index, _OF_INPUT_GRAD | kept | first)
        self._launch = launches.then(Executable(program, arch, index, _OF_WEIGHT_GRAD | second))

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both gradients. They are not views: autograd may change them."""
        of_input, of_weight = self._of_input, self._of_weight
        if current_device() != of_input.index or (KEPT and kept_of(weight) is not None):
            return of_input(grad_output, weight), of_weight(input, grad_output)
        if of_input.copies_weight:
            weight = weight.contiguous()
        empty, dtype = of_input.empty, grad_output.dtype
        input_grad = empty(of_input.shape, of_input.strides, dtype)
        weight_grad = empty(of_weight.shape, of_weight.strides, dtype)
        addresses = [
            input.data_ptr(), weight.data_ptr(), grad_output.data_ptr(), 0,
            input_grad.data_ptr(), weight_grad.data_ptr(),
        ]  # fmt: skip
        scratch = None
        if self._scratch_bytes:
            scratch = empty((self._scratch_bytes,), (1,), torch.uint8)
            start = scratch.data_ptr()
            for offset in self._offsets:
                addresses.append(start + offset)
        if POISON:
            _poison(input_grad, weight_grad, scratch)
        self._launch(current_stream(of_input.index), addresses)
        if of_weight.final_strides is not None:
            weight_grad = _with_strides(weight_grad, of_weight.final_strides)
        return input_grad, weight_grad
