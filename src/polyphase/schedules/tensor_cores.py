"""What all schedules on tensor cores go by."""

from __future__ import annotations

import math

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up

#: Bytes of a row of an operand that one instruction of the tensor cores reads, ``mma.sync`` or ``wgmma``.
OPERATION_BYTES = 32


def lacks_cores(problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
    """Why the tensor cores cannot compute a layer on a device, or None where they can."""
    if problem.dtype not in ("float32", "float16", "bfloat16"):
        return f"does not use tensor cores for {problem.dtype}"
    if device.capability < 80:
        return f"{device.arch} lacks the tensor-core instructions that it uses"
    return None


def parts_of(problem: ConvTransposeProblem) -> int:
    """Parts in which the tensor cores are given an element: two keep the accuracy of float32."""
    return 2 if problem.dtype == "float32" and not problem.tf32 else 1


def counter_bytes(count: int) -> int:
    """What so many counters take in front of a kernel's weights (kernels/core/counters.cuh)."""
    return round_up(4 * count, 128)


def steps_of(problem: ConvTransposeProblem) -> int:
    """Operations of ``mma.sync``, or of wgmma, that a group's input channels take."""
    return math.ceil(problem.in_channels_per_group * DTYPE_BYTES[problem.dtype] / OPERATION_BYTES)
