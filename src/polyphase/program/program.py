"""What a plan runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyphase.program.tensor_map import Boxes

if TYPE_CHECKING:
    from polyphase.jit.source import KernelSource


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete but for the pointers. ``planes`` > 1: partial sums that the caller adds up.

    ``in_parts``: whether an input's gradient comes in planes at some sizes of the layer, which lie as it does.
    ``planes_channels_last``: a weight's gradient comes in the order ``(C_in, *kernel_size, C_out / groups)``;
    ``narrowed``: the one plane comes in the tensors' type, not in the accumulator's.
    ``geometry`` is the kernel's last parameter (`polyphase.program.params`); there is none where it is empty. Its
    tensor maps, in their order those of ``boxes``, are left to be filled in.
    A ``prologue`` runs before it and writes ``workspace_bytes`` from the weight, which the kernel reads instead. One
    of its own runs before that, and reads the kernel's source, too.
    ``turned``: as many of the kernel's first tensors the caller brings to channels_last before, and its result back
    after, by the kernel ``turn`` (`turning`).
    ``one_way``: the same kernel for tensors that lie as these do alone, which takes less time to compile.
    """

    source: KernelSource
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    geometry: bytes
    planes: int = 1
    in_parts: bool = False
    planes_channels_last: bool = False
    narrowed: bool = False
    prologue: Launch | None = None
    workspace_bytes: int = 0
    turned: int = 0
    turn: KernelSource | None = None
    boxes: tuple[Boxes, ...] = ()
    one_way: KernelSource | None = None

    @property
    def prologues(self) -> tuple[Launch, ...]:
        """All that run before it, in order."""
        return () if self.prologue is None else (*self.prologue.prologues, self.prologue)

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        """The kernels to compile: its own, the prologue's, and what turns its tensors."""
        prologue = () if self.prologue is None else self.prologue.sources
        return (self.source, *prologue, *(() if self.turn is None else (self.turn,)))


def plain_launch(source: KernelSource, blocks: int, threads: int, geometry: bytes = b"") -> Launch:
    """The launch of a kernel that has a row of blocks, and no shared memory but its own."""
    return Launch(source=source, grid=(blocks, 1, 1), block=threads, shared_bytes=0, geometry=geometry)
