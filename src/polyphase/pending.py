"""Outputs of a layer after which calls of modules and functions are expected that the layer can compute too.

If `polyphase.fuse` has traced a model and found such calls after a layer, the layer does not return a plain tensor:

- if only modules follow, or derivatives are recorded, a `Marked`: a tensor that has been computed with the modules;
- if functions follow, and the output is large (`polyphase.chain`), a `Pending`, which is not computed yet. It records
  the calls that were found, in order, and after the last of them computes layer and calls as one.
  ``__torch_function__`` intercepts functions: no swapped module can replace ``F.relu(self.up(x))``;
- while PyTorch traces or compiles, a `Between`, which holds such a tensor as a `Marked` is.

An activation before such a layer returns one, too, from which the layer reads the activation's input.

Modules that are called in the order that was found pass it on, and the last one returns the tensor. Any other use
computes the calls made so far and continues with their result, or is an error: calls that were not made have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyphase import crops, fused, reduction_steps
from polyphase.between import REMEDY, Between, flat
from polyphase.elementwise import (
    CONCATENATIONS,
    COPIES,
    Reading,
    changes_other,
    concatenated,
    is_in_place,
    name_of,
    per,
    read,
    read_as,
    step_of,
    step_of_value,
)
from polyphase.module_steps import is_step_of, step_of_module
from polyphase.reductions import PLAIN, WIDER, Arranged, compute, following
from polyphase.torch_op.into import copy_to_slice, is_writable
from polyphase.torch_op.memory_format import is_channels_last, output_channels_last
from polyphase.versions import check_versions, versions_of

_CONSTANTS = (int, float, bool, str)
_READ: dict[Any, Reading | None] = {}  # cached readings of calls
_MOST_READ = 1024


class Waiting(NamedTuple):
    """A layer's computation that waits for expected calls.

    ``compute`` returns the tensor of the steps after the layer, in ``out`` if there is one, from ``reads`` and the
    steps' tensors, which must not change before; ``expected``: the kinds of the calls in order, or modules, which call
    ``pass_through``; ``size``, ``dtype`` and ``device``: the tensor's. ``records``: autograd records the computation,
    as it would have when the layer was called; ``graph``: then a tensor at the first output's position in the graph,
    with other values, for uses that do not need values, such as an `autograd.Function`; ``stride``: the layer's.
    """

    compute: Callable[..., Tensor]
    reads: Sequence[Tensor]
    expected: Sequence[Any]
    size: Callable[[], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    records: bool = False
    graph: Tensor | None = None
    stride: tuple[int, ...] = ()


#: The base of tensors without values: C++ code that reads them without the dispatcher finds no elements.
_NOTHING = torch.empty(0, device="meta")


class Pending(Tensor):
    """A layer's output that further calls are expected to read, not computed yet; intercepts PyTorch's functions."""

    _waiting: Waiting
    _steps: list[fused.Step]
    _versions: list[int]
    _place: int  # number of expected calls that were made
    _found: Arranged  # how the steps are computed
    _value: Tensor | None = None

    @classmethod
    def of(
        cls, waiting: Waiting, steps: list[fused.Step], versions: list[int], place: int = 0, found: Arranged = PLAIN
    ) -> Pending:
        """An output after the first ``place`` expected calls, whose ``steps`` are computed as ``found`` says."""
        pending = (_NOTHING if waiting.graph is None else waiting.graph).as_subclass(cls)
        pending._waiting, pending._steps, pending._versions = waiting, steps, versions
        pending._place, pending._found = place, found
        return pending

    def tensor(self) -> Tensor:
        """The result of the calls so far, computed once."""
        if self._value is None:
            self._value = self.compute()
        return self._value

    def compute(self, out: Tensor | None = None) -> Tensor:
        """The result of the calls so far, computed again, in ``out`` if there is one."""
        check_versions(self._waiting.reads, self._steps, self._versions)
        records = self._waiting.records
        if records == torch.is_grad_enabled():
            return compute(self._waiting, self._found, self._steps, out)
        with torch.inference_mode(not records and torch.is_inference_mode_enabled()), torch.set_grad_enabled(records):
            # with autograd's mode at the layer's call
            return compute(self._waiting, self._found, self._steps, out)

    def _size(self) -> tuple[int, ...]:
        """The shape of the result of the calls so far."""
        return self._waiting.size() if self._found is PLAIN else self._found.shape

    def pass_through(self, module: Any) -> Pending | Tensor | None:
        """The result of a module's call; None if another call is expected, or derivatives are no longer recorded."""
        if not self._expects(module) or (self._waiting.records and not torch.is_grad_enabled()):
            return None
        step, dims = step_of_module(module, len(self._size())), (len(self._size()), len(self._waiting.size()))
        found = self._follow(step) if is_step_of(module, step, *dims) else None
        return None if found is None else self._next(step, bool(vars(module).get("inplace")), found)

    def read_by(self, layer: Any) -> tuple[Tensor, list[fused.Step]] | None:
        """The input and steps for a layer that computes the steps itself, on its input; None if it cannot."""
        if not self._expects(layer) or torch.is_grad_enabled():
            return None
        check_versions(self._waiting.reads, self._steps, self._versions)
        return self._waiting.reads[0], self._steps

    def _expects(self, part: Any) -> bool:
        expected = self._waiting.expected
        if self._value is not None or self._place >= len(expected):
            return False
        return expected[self._place] is part or (type(part) is str and expected[self._place] == part)

    def _follow(self, step: fused.Step | None) -> Arranged | None:
        """How it is computed with a further step, if any; None if a kernel's result would differ."""
        if step is None or not step.kind or (self._found is PLAIN and not step.tensors and step.kind not in WIDER):
            return self._found
        return following(self._waiting, self._found, self._steps, step)

    def _next(self, step: fused.Step | None, in_place: bool, found: Arranged) -> Pending | Tensor:
        steps, versions = self._steps, self._versions
        if step is not None:
            steps, versions = [*steps, step], [*versions, *versions_of((), (step,))]
        if in_place:
            self._place, self._steps, self._versions, self._found = self._place + 1, steps, versions, found
        later = self if in_place else Pending.of(self._waiting, steps, versions, self._place + 1, found)
        return later if later._place < len(self._waiting.expected) else later.tensor()

    def _call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function's call with it: recorded if it is the next one expected, else computed with tensors."""
        name = (own := name_of(function)) or reduction_steps.name_of(function)
        if (part := self._sliced(function, args, kwargs)) is not None:
            return part
        copied = name in COPIES and self._value is None and not torch.is_grad_enabled()
        if copied and not self._waiting.records and self._read(name, args, kwargs) is not None:
            if name == "clone":
                return Pending.of(self._waiting, self._steps, self._versions, self._place, self._found)
            return self  # detach: in-place changes of one change the other
        if name and self._expects(name) and not changes_other(function, self, args, kwargs):
            reading = self._read(name, args, kwargs) if own else None
            other = None if reading else reduction_steps.read(function, self, args, kwargs, len(self._size()))
            step = self._step(reading) if reading else other
            if step is not None and (found := self._follow(step)) is not None:
                if name in reduction_steps.EXTREMES:
                    return self._with_indices(function, args, kwargs, self._next(step, False, found))
                return self._next(step if step.kind else None, is_in_place(function, kwargs), found)
        return function(*_computed(args), **_computed(kwargs))

    def _sliced(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pending | Tensor | None:
        """An expected slice, or a contiguous copy if it is contiguous already; None if it is computed otherwise."""
        waiting, plain = self._waiting, self._found is PLAIN and self._value is None
        name = crops.name_of(function)
        if not name or not plain or kwargs or waiting.records or torch.is_grad_enabled():
            return None
        if name == crops.CONTIGUOUS:
            apart = len(args) > 1 or output_channels_last(*waiting.reads[:2])
            return None if apart else Pending.of(waiting, self._steps, self._versions, self._place)
        whole = any(role == "residual" for step in self._steps for role, _ in step.tensors)
        ends = None if whole or not self._expects(name) else crops.ends_of(args[1], self._size(), waiting.stride)
        if ends is None:
            return None
        later = Pending.of(crops.cropped(waiting, ends), self._steps, self._versions, self._place + 1)
        return later if later._place < len(waiting.expected) else later.tensor()

    def _with_indices(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Tensor) -> Any:
        """The result of ``min`` or ``max``; indices, which nothing read in the trace, are computed only if read."""
        given = Pending.of(self._waiting, self._steps, self._versions, self._place, self._found)

        def indices(steps: Sequence[fused.Step | None], out: Tensor | None = None) -> Tensor:
            result: Tensor = function(given.tensor(), *args[1:], **kwargs)[1]
            return result if out is None else out.copy_(result)

        size = tuple(values.shape)
        waiting = self._waiting._replace(compute=indices, expected=(), size=lambda: size, dtype=torch.int64)
        kind = getattr(torch.return_types, function.__name__)
        return kind((values, Pending.of(waiting, [], versions_of(waiting.reads))))

    def _read(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reading | None:
        """`read`, cached if all arguments but the value are plain constants."""
        if not (args and args[0] is self):
            return read(name, self, args, kwargs)
        key = (name, *args[1:], *kwargs.items())
        for each in (*args[1:], *kwargs.values()):
            if type(each) not in _CONSTANTS:
                return read(name, self, args, kwargs)
            key = (*key, type(each))
        if key in _READ:
            return _READ[key]
        found = read(name, self, args, kwargs)
        if len(_READ) < _MOST_READ:
            _READ[key] = found
        return found

    def _step(self, reading: Reading) -> fused.Step | None:
        """The step of a call; None if its result has another dtype or shape, or derivatives."""
        other, waiting = reading.other, self._waiting
        if other is None:
            return fused.Step(reading.kind, reading.constants)
        if type(other) is Pending:
            if other._waiting is waiting and other._value is None and self._follows(other):
                return step_of_value(reading, len(other._steps)) if other._size() == self._size() else None
            other = other.tensor()
        if not isinstance(other, Tensor) or (other.requires_grad and torch.is_grad_enabled()):
            return None
        size = self._size()
        if len(size) != len(waiting.size()):  # operands are for the channels of a tensor with as many dimensions
            return None
        found = per(reading.kind, other.shape, size) if other.dtype == waiting.dtype else ""
        if not found or other.device != waiting.device:
            return None
        shape = read_as(found, size)
        return step_of(reading, other if shape is None else other.reshape(shape), found)

    def _follows(self, other: Pending) -> bool:
        """Whether it is the result of later calls on ``other``, of the same output."""
        return len(other._steps) <= len(self._steps) and all(map(is_, self._steps, other._steps))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Handles every call of a function of PyTorch with it."""
        kwargs = kwargs or {}
        first = args[0] if args and type(args[0]) is Pending else None
        if function in _KNOWN and first is not None and not kwargs:
            return _KNOWN[function](first, *args[1:])
        for each in (*args[1:], *kwargs.values()) if args else kwargs.values():
            if type(each) is Pending and (first is None or each._place > first._place):
                first = each  # the latest value, whose call may also read an earlier one
        if first is None:  # within a list, as for torch.cat
            joined = _joined(args, kwargs) if function in CONCATENATIONS else None
            return joined if joined is not None else function(*_computed(args), **_computed(kwargs))
        return first._call(function, args, kwargs)


def _property(name: str) -> Any:
    return getattr(Tensor, name).__get__


#: Functions that return the `SIZES` of a tensor without values.
_KNOWN: dict[Any, Callable[..., Any]] = {
    _property("shape"): lambda pending, *_: torch.Size(pending._size()),
    Tensor.size: lambda pending, *dim: torch.empty(pending._size(), device="meta").size(*dim),
    _property("dtype"): lambda pending, *_: pending._waiting.dtype,
}


class _Mark(NamedTuple):
    """The data of a `Marked`: its ``output`` as a plain tensor, and the steps, one for each expected module."""

    output: Tensor
    waiting: Waiting
    steps: Sequence[fused.Step | None]
    versions: list[int]


class Marked(Tensor):
    """A layer's output to which modules have been applied before they are called.

    It is a tensor, for code that looks for tensors to return gradients to, such as reentrant checkpointing. Any other
    use reads the result of the calls so far, which is computed then.
    """

    _mark: _Mark
    _place: int = 0  # number of modules that have been called
    _value: Tensor | None = None  # the result of the calls so far, if it was read
    _is_given: bool = False  # whether the output itself was returned, which its reader may have changed

    @classmethod
    def of(cls, output: Tensor, waiting: Waiting, steps: Sequence[fused.Step | None]) -> Marked:
        """An output of all modules that ``waiting`` expects, before the first of them is called.

        ``steps``: one for each of the modules.
        """
        marked = output.as_subclass(cls)
        marked._mark = _Mark(output, waiting, steps, versions_of(waiting.reads, steps))
        return marked

    def _is_recorded(self) -> bool:
        """Whether it has derivatives. (A checkpoint sets ``requires_grad`` of results that it computed without.)"""
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad

    def pass_through(self, module: Any) -> Tensor | None:
        """The result of a module's call; None if it is not the next, or needs derivatives that were not recorded."""
        mark, place = self._mark, self._place
        expected = mark.waiting.expected
        if self._value is not None or self._is_given or expected[place] is not module:
            return None
        recorded = torch.is_grad_enabled()
        if recorded and module._parameters and not self._is_recorded():
            parameters = (each for each in module._parameters.values() if each is not None)
            if any(each.requires_grad for each in parameters):
                return None
        in_place = vars(module).get("inplace")
        if place + 1 == len(expected):  # a view if a checkpoint gives it another position in the graph
            self._is_given = not (recorded or mark.output.requires_grad)
            last = mark.output if self._is_given else self.as_subclass(Tensor)
            self._value = last if in_place else None
            return last
        marked = self if in_place else self.as_subclass(Marked)
        marked._mark, marked._place = mark, place + 1
        return marked

    def tensor(self) -> Tensor:
        """The result of the calls so far, computed once."""
        if self._value is None:
            recorded = self._is_recorded()
            if recorded and not torch.is_grad_enabled():
                raise RuntimeError(
                    "the output of a fused layer, which has derivatives, is read within torch.no_grad() before the "
                    f"modules that the layer computes are called: {REMEDY}"
                )
            _, waiting, steps, versions = self._mark
            check_versions(waiting.reads, steps, versions)
            with torch._C.DisableTorchFunctionSubclass():
                through = recorded and not self.is_leaf
            with torch.set_grad_enabled(through):
                self._value = waiting.compute(steps[: self._place]).requires_grad_(recorded)
        return self._value

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Handles every call of a function of PyTorch with it."""
        self = next((each for each in flat(args) if type(each) is Marked), None)
        own = function in _THE_SAME or (function in _OF_CHECKPOINTS and not torch.is_grad_enabled())
        if own and self is not None and self._value is None:
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **(kwargs or {}))
            if function is Tensor.detach:
                result = result.as_subclass(Marked)
                result._mark, result._place = self._mark, self._place
            return result
        return function(*_computed(args), **_computed(kwargs or {}))


def _joined(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """A concatenation along channels for which layers wait: each writes its slice of the result. None for others."""
    given = args[0] if args else kwargs.get("tensors", ())
    waiting = next((each._waiting for each in given if _is_to_be_joined(each)), None)
    if waiting is None:
        return None
    size = waiting.size()
    if concatenated(args, kwargs, len(size)) is None:
        return None
    parts = [each if _is_to_be_joined(each) else _computed(each) for each in given]
    channels = [_channels(each, size, waiting) for each in parts]
    if None in channels:
        return None
    last = all(map(_is_channels_last, parts))  # PyTorch's rule
    if not last and _is_channels_last(waiting):
        return None
    format = (torch.channels_last if len(size) == 4 else torch.channels_last_3d) if last else torch.contiguous_format
    result = torch.empty(
        (size[0], sum(channels), *size[2:]), dtype=waiting.dtype, device=waiting.device, memory_format=format
    )
    slices = result.split(channels, 1)
    if not all(is_writable(out, last) for part, out in zip(parts, slices) if type(part) is Pending):
        return None  # kernels would write to another tensor first
    for part, out in zip(parts, slices):
        if type(part) is Pending:
            part.compute(out)
        else:
            copy_to_slice(part, out)
    return result


def _is_channels_last(part: Any) -> bool:
    """Whether a tensor of four or five dimensions, or a waiting layer's output, is channels_last."""
    if type(part) is Tensor:
        return part.dim() > 3 and is_channels_last(part)
    reads = (part._waiting if type(part) is Pending else part).reads
    return reads[0].dim() > 3 and output_channels_last(*reads[:2])


def _is_to_be_joined(part: Any) -> bool:
    """Whether a part waits for a concatenation as its next call, and the layer's own kernel computes it."""
    return type(part) is Pending and part._found is PLAIN and part._expects("cat")


def _channels(part: Any, size: tuple[int, ...], waiting: Waiting) -> Any:
    """The channels of a tensor or a waiting layer that otherwise equals the output of ``waiting``; None for others."""
    kind: Any
    if type(part) is Pending:
        kind = part._waiting
        found = size if kind is waiting else kind.size()
    elif type(part) is Tensor and not (part.requires_grad and torch.is_grad_enabled()):
        kind, found = part, tuple(part.shape)
    else:
        return None
    alike = kind.dtype == waiting.dtype and kind.device == waiting.device and len(found) == len(size)
    return found[1] if alike and found[:1] + found[2:] == size[:1] + size[2:] else None


#: Properties that a layer's output shares with the results of the modules after it.
_THE_SAME = {
    _property(name) for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "is_nested")
}
_THE_SAME |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.get_device, Tensor.is_floating_point}

#: Functions that reentrant checkpointing calls with its inputs and outputs while no derivatives are recorded.
_OF_CHECKPOINTS = {Tensor.detach, _property("grad"), torch.autograd.backward}
_OF_CHECKPOINTS |= {getattr(Tensor, "requires_grad").__set__}  # noqa: B009


def computed(value: Any) -> Any:
    """The tensor of a `Pending`, `Marked` or `Between`; other values unchanged."""
    return value.tensor() if type(value) in (Pending, Marked, Between) else value


def _computed(values: Any) -> Any:
    """`Pending` and `Marked` replaced by their tensors, in lists and dictionaries too."""
    if type(values) in (Pending, Marked):
        return values.tensor()
    if isinstance(values, Mapping):
        return {key: _computed(value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_computed(value) for value in values)
    return values
