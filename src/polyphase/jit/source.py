"""One specialised kernel as text: shared building blocks, the constants of a layer, the kernel file.

The text includes nothing, so that NVRTC needs no headers and one string is the whole identity of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from polyphase.problem import Axis

KERNELS = Path(__file__).parent.parent / "kernels"

# The tensors' type and the accumulator's, by the name of the dtype.
_TYPES = {
    "float64": ("double", "double"),
    "float32": ("float", "float"),
    "float16": ("float16", "float"),
    "bfloat16": ("bfloat16", "float"),
}

Constant = bool | int | Axis


@dataclass(frozen=True)
class KernelSource:
    """A kernel file and the constants it is specialised by, in the order in which they are written."""

    kernel: str
    dtype: str
    wide_offsets: bool
    constants: tuple[tuple[str, Constant], ...]

    @property
    def min_blocks(self) -> int:
        """Blocks that should be resident on a multiprocessor, for which the compiler limits registers."""
        blocks = dict(self.constants)["MIN_BLOCKS"]
        assert isinstance(blocks, int)
        return blocks

    def with_min_blocks(self, blocks: int) -> KernelSource:
        """The same kernel with another limit."""
        return replace(self, constants=tuple({**dict(self.constants), "MIN_BLOCKS": blocks}.items()))

    @cached_property
    def text(self) -> str:
        """What the compiler gets."""
        scalar, accumulator = _TYPES[self.dtype]
        lines = [
            f"// {self.kernel}, specialised by:",
            f"typedef {scalar} scalar_t;       // of the tensors",
            f"typedef {accumulator} accum_t;  // of every sum",
            f"typedef unsigned {'long long' if self.wide_offsets else 'int'} offset_t;  // of offsets in bytes",
            *(f"constexpr {_declare(name, value)};" for name, value in self.constants),
        ]
        blocks = [_read("common/types.cuh"), _read("common/axis.cuh"), "\n".join(lines) + "\n"]
        blocks += [_read("common/geometry.cuh"), _read(f"{self.kernel}.cu")]
        return "\n".join(blocks)


def _declare(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    if isinstance(value, Axis):
        return f"Axis {name} = {{{value.kernel}, {value.stride}, {value.padding}, {value.dilation}}}"
    return f"int {name} = {value}"


@cache
def _read(name: str) -> str:
    return (KERNELS / name).read_text(encoding="utf-8")
