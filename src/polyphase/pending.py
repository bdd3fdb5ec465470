"""An output that is not computed yet, because functions that the layer can compute too are about to be called of it.

``F.relu(self.up(x))`` calls a function, which no swapped module can stand for. Where `polyphase.fuse` has traced a
model and found such a call behind a layer, the layer returns a `Pending` instead of a tensor. It records the calls
that were found, in order, and behind the last of them computes layer and calls as one. Any other use of it computes at
once what was recorded, and goes on with the tensor: whatever `forward` does then, the values are those it asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyphase import fused
from polyphase.elementwise import Reading, changes_other, is_in_place, name_of, per, read, read_as, step_of

_CONSTANTS = (int, float, bool, str)
_READ: dict[Any, Reading | None] = {}  # calls that were read before
_MOST_READ = 1024


class Waiting(NamedTuple):
    """What a layer is to compute, and when.

    ``compute`` gives the tensor of the steps behind the layer, from tensors that must not change before, ``reads``
    and those of the steps; ``expected``: the kinds of the calls in order, or
    modules, which tell by `Pending.pass_through` that they are called; what the tensor will be.
    """

    compute: Callable[[list[fused.Step]], Tensor]
    reads: Sequence[Tensor]
    expected: Sequence[Any]
    size: Callable[[], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device


class Pending:
    """A layer's output of which further calls are expected: PyTorch's functions and methods take it for a tensor."""

    __slots__ = ("_place", "_steps", "_value", "_versions", "_waiting")

    def __init__(
        self, waiting: Waiting, steps: list[fused.Step], place: int = 0, versions: list[int] | None = None
    ) -> None:
        self._waiting = waiting
        self._versions = _versions(waiting.reads, steps) if versions is None else versions
        self._steps = steps
        self._place = place  # how many of those expected have been called
        self._value: Tensor | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type[Tensor]:  # type: ignore[override]
        """What `isinstance` asks for: code that branches on it shall go the way it goes with tensors."""
        return Tensor

    def tensor(self) -> Tensor:
        """What it stands for so far, computed once."""
        if self._value is None:
            if self._versions != _versions(self._waiting.reads, self._steps):
                raise RuntimeError(
                    "a tensor that a fused layer reads (its input, a parameter, what is added) has changed in place "
                    "before the functions behind the layer were called"
                )
            if torch.is_grad_enabled():  # which it was not when the layer was called
                with torch.no_grad():
                    self._value = self._waiting.compute(self._steps)
            else:
                self._value = self._waiting.compute(self._steps)
        return self._value

    def pass_through(self, module: Any, step: fused.Step | None) -> Pending | Tensor | None:
        """What a module gives of it, whose step is ``step``; None if another call is expected."""
        if not self._expects(module) or (step is not None and (_is_wider(step.kind) or _is_recorded(step))):
            return None
        return self._next(step, False)

    def _expects(self, part: Any) -> bool:
        expected = self._waiting.expected
        if self._value is not None or self._place >= len(expected):
            return False
        return expected[self._place] is part or (type(part) is str and expected[self._place] == part)

    def _next(self, step: fused.Step | None, in_place: bool) -> Pending | Tensor:
        steps, versions = self._steps, self._versions
        if step is not None:
            steps, versions = [*steps, step], [*versions, *_versions((), (step,))]
        if in_place:
            self._place, self._steps, self._versions = self._place + 1, steps, versions
        later = self if in_place else Pending(self._waiting, steps, self._place + 1, versions)
        return later if later._place < len(self._waiting.expected) else later.tensor()

    def _call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function of it: recorded if it is the next one expected, else computed of tensors."""
        name = name_of(function)
        if name and self._expects(name) and not changes_other(function, self, args, kwargs):
            reading = self._read(name, args, kwargs)
            if reading is not None and type(reading.other) is Pending:
                reading = reading._replace(other=reading.other.tensor())
            step = None if reading is None else self._step(reading)
            if step is not None:
                return self._next(step if step.kind else None, is_in_place(function, kwargs))
        return function(*_computed(args), **_computed(kwargs))

    def _read(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reading | None:
        """`read`, from memory where all but the value are plain constants."""
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
        """The step of a call that gives what it gives of the tensor: of its dtype and shape, without derivatives."""
        other, waiting = reading.other, self._waiting
        if other is None:
            return None if _is_wider(reading.kind) else fused.Step(reading.kind, reading.constants)
        if not isinstance(other, Tensor) or (other.requires_grad and torch.is_grad_enabled()):
            return None
        size = waiting.size()
        found = per(reading.kind, other.shape, size) if other.dtype == waiting.dtype else ""
        if not found or other.device != waiting.device:
            return None
        shape = read_as(found, size)
        return step_of(reading, other if shape is None else other.reshape(shape), found)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What PyTorch's functions call for it."""
        kwargs = kwargs or {}
        if args and type(args[0]) is Pending:
            return args[0]._call(function, args, kwargs)
        first = next((each for each in (*args, *kwargs.values()) if type(each) is Pending), None)
        if first is None:  # within a list, as of torch.cat
            return function(*_computed(args), **_computed(kwargs))
        return first._call(function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """A tensor's attribute: a method that may be recorded, or the tensor's own."""
        if name_of(name):
            method = getattr(Tensor, name)
            return lambda *args, **kwargs: self._call(method, (self, *args), kwargs)
        return getattr(self.tensor(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Pending.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.tensor(), name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)


def _versions(reads: Sequence[Tensor], steps: Sequence[fused.Step]) -> list[int]:
    """How often each tensor has been changed in place; those of inference mode do not count it."""
    found = [0 if each.is_inference() else each._version for each in reads]
    for step in steps:
        found += [0 if each.is_inference() else each._version for _, each in step.tensors]
    return found


def _is_wider(kind: str) -> bool:
    """Whether the result would have another dtype: autocast makes this one float32 on a GPU."""
    return kind == "softplus" and torch._C._is_any_autocast_enabled()


def _is_recorded(step: fused.Step) -> bool:
    """Whether autograd would record the step of a value without derivatives."""
    return torch.is_grad_enabled() and any(each.requires_grad for _, each in step.tensors)


def _computed(values: Any) -> Any:
    """Tensors in the place of what is pending, in lists and dictionaries too."""
    if type(values) is Pending:
        return values.tensor()
    if isinstance(values, Mapping):
        return {key: _computed(value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_computed(value) for value in values)
    return values


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)
    if name_of(name):
        return lambda self, *args: self._call(method, (self, *args), {})
    return lambda self, *args: method(self.tensor(), *_computed(args))


# Python looks operators up in the class, past `__getattr__`.
_OWN = {"__class__", "__dict__", "__dir__", "__doc__", "__getattribute__", "__init__", "__init_subclass__", "__new__",
        "__module__", "__reduce__", "__subclasshook__", "__weakref__", "__sizeof__", "__delattr__"}  # fmt: skip
for _name in set(dir(Tensor)) - set(vars(Pending)) - _OWN:
    if _name.startswith("__") and _name.endswith("__") and callable(getattr(Tensor, _name)):
        setattr(Pending, _name, _operator(_name))
