"""What adds up a weight's gradient, ``kernels/add_planes.cu``."""

from __future__ import annotations

import math
import struct

from polyphase.algorithms.base import Launch, plain_launch
from polyphase.jit.source import KernelSource

_THREADS = 256
_TOGETHER = 4  # elements of a thread
_GROUPS = 8  # of threads that share the planes, where those are many and elements are not
_FEW_ELEMENTS = 1 << 17


def plane_sum(dtype: str, elements: int, planes: int) -> Launch:
    """The sum of so many planes of partial sums, in the tensors' type: from a kernel's tensor to the gradient."""
    groups = _GROUPS if planes >= _GROUPS and elements < _FEW_ELEMENTS else 1
    constants = (("THREADS", _THREADS), ("GROUPS", _GROUPS), ("MIN_BLOCKS", 1))
    source, blocks = KernelSource("add_planes", dtype, False, constants), elements * groups / (_TOGETHER * _THREADS)
    return plain_launch(source, math.ceil(blocks), _THREADS, struct.pack("<q2i", elements, planes, groups))
