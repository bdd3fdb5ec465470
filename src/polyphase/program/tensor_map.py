"""Tensor maps: what TMA needs to know of a tensor, but for its address."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Bytes of a tensor map, which is also aligned to half of that.
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor (``CUtensorMap``) without its base pointer: the boxes that TMA copies of a kernel's tensor.

    Dimensions are listed innermost first, ``strides`` in bytes, without the first dimension's. ``box`` are the elements
    that are copied, of every ``steps``-th of the tensor. Chunks of 16 bytes are swizzled within ``swizzle`` bytes.
    ``tf32``: float32 elements are rounded to TF32 on their way. ``tensor`` counts the kernel's tensors.
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
        """What boxes are made of: ``"tf32"``, or the dtype."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype


def tma_strides(dimensions: Iterable[tuple[int, int]]) -> tuple[int, ...] | None:
    """The ``strides`` of `TensorMap` for dimensions of so many elements, so many bytes apart.

    None where TMA does not take them.
    """
    found = tuple(16 if count == 1 else step for count, step in dimensions)
    return found if all(0 < step < 2**40 and step % 16 == 0 for step in found) else None
