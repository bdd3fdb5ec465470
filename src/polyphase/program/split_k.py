"""The split-K reduction, ``kernels/steps/reduce_splits.cu``: adds up partial sums in a fixed order."""

from __future__ import annotations

import math

from polyphase.jit.source import KernelSource
from polyphase.problem.epilogue import NONE, Epilogue
from polyphase.problem.layouts import Strides
from polyphase.program.params import params_of
from polyphase.program.step import DST, PARTIALS, Step, plain_step

_THREADS = 256
_TOGETHER = 4  # elements of a thread
# Groups of threads that share the planes; the least planes and the most elements for that number.
_GROUPS = ((32, 64, 1 << 15), (8, 8, (1 << 17) - 1))


def reduction_source(dtype: str, epilogue: Epilogue = NONE) -> KernelSource:
    """The kernel, for any sizes; its result has ``dtype``."""
    constants = (("THREADS", _THREADS), ("MIN_BLOCKS", 1), *([("HAS_BIAS", False)] if epilogue else []))
    return KernelSource("reduce_splits", dtype, False, constants, folder="steps", epilogue=epilogue)


def reduce_splits(
    dtype: str,
    elements: int,
    splits: int,
    epilogue: Epilogue = NONE,
    channels: int = 1,
    strides: Strides = (1, 1, 1, 1, 1),
) -> Step:
    """Adds ``splits`` partial planes of ``elements``, in a fixed order.

    An ``epilogue`` on the sums needs the result's ``channels`` and ``strides``, which has no gaps.
    """
    groups = next((count for count, many, few in _GROUPS if splits >= many and elements <= few), 1)
    source = reduction_source(dtype, epilogue)
    params = params_of(source).pack(
        plane=elements,
        planes=splits,
        groups=groups,
        channels=channels,
        channel_stride=max(1, strides[1]),
        sample_stride=max(1, strides[0]),
    )
    blocks = math.ceil(elements * groups / (_TOGETHER * _THREADS))
    return plain_step(source, blocks, _THREADS, params, (PARTIALS, DST))
