"""The split-K reduction, ``kernels/steps/reduce_splits.cu``: adds up partial sums in a fixed order."""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.jit.source import KernelSource
from polyphase.problem.epilogue import Epilogue
from polyphase.problem.layouts import Strides
from polyphase.program.params import params_of
from polyphase.program.step import Step, plain_step

_THREADS = 256
_TOGETHER = 4  # elements of a thread
# Groups of threads that share the planes; the least planes and the most elements for that number.
_GROUPS = ((32, 64, 1 << 15), (8, 8, (1 << 17) - 1))


def reduce_splits(dtype: str, elements: int, splits: int) -> Step:
    """Adds ``splits`` partial planes of ``elements``, in a fixed order; the result has ``dtype``."""
    groups = next((count for count, many, few in _GROUPS if splits >= many and elements <= few), 1)
    constants = (("THREADS", _THREADS), ("MIN_BLOCKS", 1))
    source = KernelSource("reduce_splits", dtype, False, constants, folder="steps")
    blocks = math.ceil(elements * groups / (_TOGETHER * _THREADS))
    params = params_of(source).pack(
        plane=elements, planes=splits, groups=groups, channels=1, channel_stride=1, sample_stride=1
    )
    return plain_step(source, blocks, _THREADS, params)


def finish_splits(dtype: str, elements: int, splits: int, epilogue: Epilogue, channels: int, strides: Strides) -> Step:
    """`reduce_splits` with an epilogue on the sums; the result has ``channels`` and ``strides``, and no gaps."""
    step = reduce_splits(dtype, elements, splits)
    source = replace(step.source, constants=(*step.source.constants, ("HAS_BIAS", False)), epilogue=epilogue)
    values = params_of(source).read(step.params)
    values |= {"channels": channels, "channel_stride": max(1, strides[1]), "sample_stride": max(1, strides[0])}
    return replace(step, source=source, params=params_of(source).pack(**values))
