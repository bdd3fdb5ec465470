"""What adds up a weight's gradient, ``kernels/add_planes.cu``."""

from __future__ import annotations

import math
import struct

from polyphase.algorithms.base import Launch, padded
from polyphase.jit.source import KernelSource

_THREADS = 256
_BLOCK_ELEMENTS = 128  # 8 groups of threads, four elements each


def plane_sum(dtype: str, elements: int, planes: int) -> Launch:
    """The sum of so many planes of partial sums, in the tensors' type: from a kernel's tensor to the gradient."""
    constants = (("THREADS", _THREADS), ("MIN_BLOCKS", 1))
    return Launch(
        source=KernelSource("add_planes", dtype, False, constants),
        grid=(math.ceil(elements / _BLOCK_ELEMENTS), 1, 1),
        block=_THREADS,
        shared_bytes=0,
        geometry=padded(struct.pack("<qi", elements, planes)),
    )
