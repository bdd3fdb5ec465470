"""A cache of calls that were made before, by what they were given and by what their tensors are like.

Tensors are compared by Dynamo's guard, one call into PyTorch: 0.3 µs for three, where a key made of the same in Python
takes 2 (`benchmarks/experiments/003-host-time`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from polyphase.problem.layouts import ALIGNMENT

Value = TypeVar("Value")

_TensorGuards: Any = torch._C._dynamo.guards.TensorGuards  # no module that `import` finds before PyTorch 2.5
_MOST_KEYS = 4096  # then all is forgotten
_MOST_OF_A_KEY = 8


class CallCache(Generic[Value]):
    """Values by a key that holds sizes and constants. Of one key there are several, for tensors of several kinds.

    Tensors are of one kind if their types, dispatch keys, dtypes, devices, sizes and strides are equal, and
    ``requires_grad``. Dispatch keys tell wrappers, sparse and lazily negated or conjugated tensors from plain ones, and
    some modes of the thread. No tensor is held.
    """

    def __init__(self) -> None:
        self._found: dict[Any, list[tuple[Callable[..., bool], tuple[int, int] | None, Value]]] = {}

    def find(self, key: Any, *tensors: Tensor) -> Value | None:
        """The value for tensors of that kind. Raises TypeError where the key cannot be one."""
        for guard, alignment, value in self._found.get(key, ()):
            if guard(*tensors) and (
                alignment is None or alignment == (tensors[0].data_ptr() % ALIGNMENT, tensors[1].data_ptr() % ALIGNMENT)
            ):
                return value
        return None

    def add(self, key: Any, value: Value, *tensors: Tensor, lie_so: bool) -> None:
        """Remember a value; ``lie_so``: only where the first two are each as far beyond an aligned address."""
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if len(self._found) >= _MOST_KEYS:
            self._found.clear()
        of_key = self._found.setdefault(key, [])
        if len(of_key) >= _MOST_OF_A_KEY:
            of_key.clear()
        alignment = (tensors[0].data_ptr() % ALIGNMENT, tensors[1].data_ptr() % ALIGNMENT) if lie_so else None
        of_key.append((guards.check, alignment, value))

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()
