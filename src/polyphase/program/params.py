"""The bytes of kernels' parameters."""

from __future__ import annotations

import struct
from functools import lru_cache

from polyphase.problem.integers import round_up


def counter_bytes(count: int) -> int:
    """What so many counters take in front of a kernel's weights (kernels/core/counters.cuh)."""
    return round_up(4 * count, 128)


def padded(geometry: bytes, multiple: int = 8) -> bytes:
    """A kernel's parameter filled up to what its next member, or itself, is aligned to."""
    return geometry + bytes(-len(geometry) % multiple)


@lru_cache(maxsize=4096)
def packed_divisor(value: int) -> bytes:
    """The kernel's ``Divisor``: for 0 ≤ n < 2³¹, n · reciprocal / 2^shift rounds down to n // value.

    T. Granlund and P. Montgomery, Division by Invariant Integers using Multiplication, 1994. Nothing divides by zero:
    an empty batch has no tiles, and is not launched.
    """
    value = max(1, value)
    shift = 31 + (value - 1).bit_length()
    return struct.pack("<iIi", value, -(-(1 << shift) // value), shift)
