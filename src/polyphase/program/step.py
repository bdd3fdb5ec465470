"""One kernel launch, complete except for the addresses of its operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polyphase.program.params import params_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polyphase.jit.source import KernelSource
    from polyphase.program.tensor_map import TensorMap

#: The tensors that a forward pass or an input gradient reads, and its result.
SRC, WEIGHT, BIAS, DST = "src", "weight", "bias", "dst"

#: The tensors that a weight gradient reads: the layer's input, and the gradient of its output.
X, GRAD = "x", "grad"

#: Packed weights with their counters and scales; partial planes of split-K.
WORKSPACE, PARTIALS = "workspace", "partials"

#: Scales and checks of copies in float16 (``HalfCopies`` in kernels/operand/half_copies.cuh).
HALF_COPIES = "half_copies"

#: Blocks that saturate a GPU's memory: two for each multiprocessor of an H200.
MANY_BLOCKS = 264


@dataclass(frozen=True)
class Step:
    """One kernel launch.

    ``params`` is the kernel's last parameter (`polyphase.program.params`); empty for none. The k-th of ``tensor_maps``
    fills its k-th TensorMap member once the tensor's address is known. ``operands`` name the buffers whose addresses
    are the kernel's other parameters, in order. ``overlaps``: it may start before the previous step ends (programmatic
    dependent launch). ``one_way``: the same kernel for this layout of tensors only, which compiles faster.
    """

    source: KernelSource
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    params: bytes
    operands: tuple[str, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()
    overlaps: bool = False
    one_way: KernelSource | None = None

    def computing(self, names: Iterable[str], place: int, **operations: Any) -> Step:
        """The step with an ``epilogue`` or a ``prologue``, whose operands come at a place among the step's."""
        one_way = None if self.one_way is None else replace(self.one_way, **operations)
        operands = (*self.operands[:place], *names, *self.operands[place:])
        return replace(self, source=replace(self.source, **operations), operands=operands, one_way=one_way)


def plain_step(
    source: KernelSource,
    blocks: int,
    threads: int,
    params: bytes = b"",
    operands: tuple[str, ...] = (WEIGHT, WORKSPACE),
) -> Step:
    """The launch of a kernel with a 1-D grid and no dynamic shared memory; by default, one that packs."""
    return Step(source, (blocks, 1, 1), threads, 0, params, operands)


def main_step(
    source: KernelSource,
    grid: int | tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    params: dict[str, Any],
    tensor_maps: tuple[TensorMap, ...] = (),
) -> Step:
    """The launch of a kernel that multiplies; a number is a 1-D grid, ``params`` are by the names of its members."""
    blocks = (grid, 1, 1) if isinstance(grid, int) else grid
    return Step(source, blocks, threads, shared_bytes, params_of(source).pack(**params), tensor_maps=tensor_maps)
