"""Functions that all schedules on tensor cores share."""

from __future__ import annotations

import math

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up

#: Bytes of k that one ``mma.sync`` or ``wgmma`` reads.
OPERATION_BYTES = 32

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


def counter_bytes(count: int) -> int:
    """Bytes of counters before a kernel's weights (kernels/core/counters.cuh)."""
    return round_up(4 * count, 128)


def steps_of(problem: ConvTransposeProblem) -> int:
    """Operations of ``mma.sync`` or wgmma along a group's input channels."""
    return math.ceil(problem.in_channels_per_group * DTYPE_BYTES[problem.dtype] / OPERATION_BYTES)
