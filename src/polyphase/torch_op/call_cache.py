"""A cache of earlier calls, by their arguments and the properties of their tensors.

Dynamo's guard compares tensors in one call into PyTorch: 0.3 µs for three, while an equal key made in Python takes 2
(`benchmarks/experiments/003-host-time`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from polyphase.problem.layouts import ALIGNMENT

Value = TypeVar("Value")

_TensorGuards: Any = torch._C._dynamo.guards.TensorGuards  # before PyTorch 2.5 `import` does not find this module
_MOST_KEYS = 4096  # most keys, then the cache is emptied
_MOST_OF_A_KEY = 8


class CallCache(Generic[Value]):
    """Values by a key of sizes and constants. A key has several values, for tensors of several kinds.

    Tensors are of one kind if their types, dispatch keys, dtypes, devices, sizes, strides and ``requires_grad`` are
    equal. Dispatch keys distinguish wrappers, sparse and lazily negated or conjugated tensors from plain ones, and some
    modes of the thread. The cache keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._found: dict[Any, list[tuple[Callable[..., bool], tuple[int, int] | None, Value]]] = {}

    def find(self, key: Any, *tensors: Tensor) -> Value | None:
        """The value for tensors of this kind. Raises TypeError if the key is not hashable."""
        for guard, alignment, value in self._found.get(key, ()):
            if guard(*tensors) and (
                alignment is None or alignment == (tensors[0].data_ptr() % ALIGNMENT, tensors[1].data_ptr() % ALIGNMENT)
            ):
                return value
        return None

    def add(self, key: Any, value: Value, *tensors: Tensor, lie_so: bool) -> None:
        """Adds a value; ``lie_so``: only for tensors of which the first two have the same alignment."""
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
        """Empties the cache."""
        self._found.clear()
