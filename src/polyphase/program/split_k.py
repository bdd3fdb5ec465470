"""What adds up the partial sums of a gradient, ``kernels/add_planes.cu``."""

from __future__ import annotations

import math

from polyphase.jit.source import KernelSource
from polyphase.program.params import params_of
from polyphase.program.program import Launch, plain_launch

_THREADS = 256
_TOGETHER = 4  # elements of a thread
# Groups of threads that share the planes, where there are so many of these, and at most so many elements.
_GROUPS = ((32, 64, 1 << 15), (8, 8, (1 << 17) - 1))


def plane_sum(dtype: str, elements: int, planes: int) -> Launch:
    """The sum of so many planes of partial sums, in the tensors' type: from a kernel's tensor to the gradient."""
    groups = next((count for count, many, few in _GROUPS if planes >= many and elements <= few), 1)
    constants = (("THREADS", _THREADS), ("MIN_BLOCKS", 1))
    source, blocks = KernelSource("add_planes", dtype, False, constants), elements * groups / (_TOGETHER * _THREADS)
    geometry = params_of(source).pack(plane=elements, planes=planes, groups=groups)
    return plain_launch(source, math.ceil(blocks), _THREADS, geometry)
