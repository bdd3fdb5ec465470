"""Functions that all schedules on tensor cores share."""

from __future__ import annotations

import math

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up

#: Bytes of k that one ``mma.sync`` or ``wgmma`` reads.
OPERATION_BYTES = 32

#: N of a ``wgmma``, at most.
MOST_COLUMNS = 256

#: A TMA box spans at most so many elements along a dimension, and at least every so many-th of them.
MAX_BOX_SIDE, MAX_BOX_STEP = 256, 8

#: Stages of a pipeline that TMA fills, at least.
LEAST_PIPELINE = 3

_MOST_PIPELINE = 8
_DECLARED = 1024  # bytes of static shared memory, at most

#: Shared memory by which a warpgroup stores an input gradient in NCHW (kernels/epilogue/store_gradient.cuh).
STAGED_BYTES = 2 * 8 * (64 + 4) * 4


def lacks_cores(problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
    """Why the tensor cores cannot compute a layer on a device, or None if they can."""
    if problem.dtype not in ("float32", "float16", "bfloat16"):
        return f"does not use tensor cores for {problem.dtype}"
    if device.capability < 80:
        return f"{device.arch} lacks the tensor-core instructions that it uses"
    return None


def parts_of(problem: ConvTransposeProblem) -> int:
    """Parts into which an element is split: two keep the accuracy of float32."""
    return 2 if problem.dtype == "float32" and not problem.tf32 else 1


def pipeline_stages(stage_bytes: int, device: DeviceInfo, resident: int = 1, staged: int = 0) -> int:
    """Stages in the shared memory of each of ``resident`` blocks, beside ``staged`` bytes for results."""
    return min(_MOST_PIPELINE, (device.shared_bytes_of(resident) - _DECLARED - staged) // stage_bytes)


def wgmma_cycles(columns: int) -> float:
    """Cycles of a ``wgmma``, up to a factor: narrow ones take as long as shared memory is read for their rows."""
    return max(columns / 2, 16 + columns / 4)


def counter_bytes(count: int) -> int:
    """Bytes of counters before a kernel's weights (kernels/core/counters.cuh)."""
    return round_up(4 * count, 128)


def steps_of(problem: ConvTransposeProblem) -> int:
    """Operations of ``mma.sync`` or wgmma along a group's input channels."""
    return math.ceil(problem.in_channels_per_group * DTYPE_BYTES[problem.dtype] / OPERATION_BYTES)
