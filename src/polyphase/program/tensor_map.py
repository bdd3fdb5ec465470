"""Tensor maps without addresses. `jit/encode_tensor_map.py` encodes them for the driver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Bytes of a tensor map, which is also aligned to half of that.
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor (``CUtensorMap``) without its base pointer.

    Dimensions are listed innermost first, ``strides`` in bytes, without the first dimension's. ``box``: elements copied
    per dimension. ``steps``: the driver's ``elementStrides``. Chunks of 16 bytes are swizzled within ``swizzle`` bytes.
    ``tf32``: TMA rounds float32 elements to TF32. ``tensor``: index in `Step.operands` of the tensor that it describes.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    tf32: bool
    tensor: int = 0
    steps: tuple[int, ...] = (1, 1, 1, 1, 1)

    @property
    def spans(self) -> tuple[int, ...]:
        """Elements of the tensor from a box's first to its last, along each dimension."""
        return tuple((count - 1) * step + 1 for count, step in zip(self.box, self.steps))

    @property
    def element(self) -> str:
        """The type of a box's elements: ``"tf32"``, or the dtype."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype


def tma_strides(dimensions: Iterable[tuple[int, int]]) -> tuple[int, ...] | None:
    """The ``strides`` of `TensorMap` for dimensions given as (elements, stride in bytes).

    None if TMA does not support them.
    """
    found = tuple(16 if count == 1 else step for count, step in dimensions)
    return found if all(0 < step < 2**40 and step % 16 == 0 for step in found) else None
