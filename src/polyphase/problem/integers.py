"""Integers: rounding, and division into parts."""

from __future__ import annotations

import math


def parted(total: int, parts: int) -> tuple[int, int]:
    """The length of each of about ``parts`` parts of ``total``, and the number of parts of this length."""
    length = max(1, math.ceil(total / parts))
    return length, max(1, math.ceil(total / length))


def equal_parts(count: int) -> list[int]:
    """The sizes of equal parts of ``count``, rounded up; the largest first."""
    return sorted({math.ceil(count / parts) for parts in range(1, count + 1)}, reverse=True)


def equal_part(count: int, most: int) -> int:
    """The size of equal parts of ``count``: as few as possible, none larger than ``most``."""
    return math.ceil(count / math.ceil(count / most))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (max(1, value) - 1).bit_length()
