"""Memory layout of the kernels' structs: bytes from named values."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class ParamOverflowError(OverflowError):
    """A number that does not fit a kernel's parameter."""


class Member(NamedTuple):
    """A member of a struct: ``offset`` in bytes, ``length`` of an array, or 0.

    ``kind``: the type of its elements, a character of Python's `struct` or a struct.
    """

    offset: int
    kind: str | Struct
    length: int


# The least and the largest number of each kind.
_RANGES = {
    "?": (0, 1),
    "B": (0, (1 << 8) - 1),
    "h": (-1 << 15, (1 << 15) - 1),
    "H": (0, (1 << 16) - 1),
    "i": (-1 << 31, (1 << 31) - 1),
    "I": (0, (1 << 32) - 1),
    "q": (-1 << 63, (1 << 63) - 1),
    "Q": (0, (1 << 64) - 1),
    "f": (float("-inf"), float("inf")),
    "d": (float("-inf"), float("inf")),
}
# Structs that are not given by members: a divisor is given as a number; the launcher writes a tensor map.
_DIVISOR, _TENSOR_MAP = "Divisor", "TensorMap"


@dataclass(frozen=True)
class Struct:
    """A struct: ``size`` in bytes, members by name in their order."""

    name: str
    size: int
    members: dict[str, Member]

    @cached_property
    def tensor_maps(self) -> tuple[int, ...]:
        """The offsets of the struct's tensor maps, in order."""
        return tuple(member.offset for member in self.members.values() if _is_tensor_map(member))

    @cached_property
    def given(self) -> dict[str, Member]:
        """The members that `pack` takes: all but tensor maps."""
        return {name: member for name, member in self.members.items() if not _is_tensor_map(member)}

    @cached_property
    def format(self) -> str:
        """The struct's numbers, and the bytes between them, in the format of Python's `struct`, without byte order."""
        text, end = "", 0
        for offset, kind, length in self.given.values():
            text += f"{offset - end}x" + (
                f"{length or 1}{kind}" if isinstance(kind, str) else kind.format * (length or 1)
            )
            end = struct.calcsize("<" + text)
        return text + f"{self.size - end}x"

    def pack(self, **values: Any) -> bytes:
        """The bytes of the struct whose members have these values; padding and tensor maps are zeros.

        An array takes a sequence, a ``Divisor`` a number, any other struct a mapping, or an object whose method
        ``params`` gives one.

        Raises:
            TypeError: a member is missing, or there is none of that name, or a value has the wrong type.
            ValueError: an array has another length.
            ParamOverflowError: a number does not fit its member.
        """
        return struct.pack("<" + self.format, *self._numbers(values))

    def _numbers(self, values: Mapping[str, Any]) -> list[Any]:
        """All numbers of the struct, in order."""
        if values.keys() != self.given.keys():
            missing = [f"{name} is missing" for name in self.given if name not in values]
            unknown = [f"{name} is not one" for name in values if name not in self.given]
            members = ", ".join(self.given)
            raise TypeError(f"{self.name} has the members {members}: {', '.join(missing + unknown)}")
        found: list[Any] = []
        for name, (_, kind, length) in self.given.items():
            elements = values[name] if length else (values[name],)
            if length and len(elements) != length:
                raise ValueError(f"{self.name}.{name} has {length} elements, given {len(elements)}: {elements!r}")
            if isinstance(kind, str):
                self._check(name, kind, elements)
                found += elements
            elif kind.name == _DIVISOR:
                self._check(name, "i", elements)
                for element in elements:
                    numbers = divisor(element)
                    found += [numbers[each] for each in kind.members]
            else:
                for element in elements:
                    found += kind._numbers(self._members_of(name, kind, element))
        return found

    def _check(self, name: str, kind: str, numbers: Any) -> None:
        """Raises if a member of this ``kind`` cannot hold one of the numbers."""
        wanted: Any = (int, float) if kind in "fd" else int
        least, most = _RANGES[kind]
        for number in numbers:
            if not isinstance(number, wanted):
                raise TypeError(
                    f"{self.name}.{name} takes {'floats' if kind in 'fd' else 'integers'}, given {number!r}"
                )
            if not least <= number <= most:
                raise ParamOverflowError(f"{self.name}.{name} holds {least} to {most}, given {number}")

    def _members_of(self, name: str, kind: Struct, value: Any) -> Mapping[str, Any]:
        """The values of a member's own members, from the ``value`` that was given for it."""
        found = value.params() if hasattr(value, "params") else value
        if not isinstance(found, Mapping):
            raise TypeError(f"{self.name}.{name} takes the members of a {kind.name}, given {value!r}")
        return found


def _is_tensor_map(member: Member) -> bool:
    return isinstance(member.kind, Struct) and member.kind.name == _TENSOR_MAP


def divisor(value: int) -> dict[str, int]:
    """The kernel's ``Divisor``: for 0 ≤ n < 2³¹, n · reciprocal / 2^shift rounds down to n // value.

    T. Granlund and P. Montgomery, Division by Invariant Integers using Multiplication, 1994. Nothing divides by zero:
    an empty batch has no tiles, and is not launched.
    """
    value = max(1, value)
    shift = 31 + (value - 1).bit_length()
    return {"value": value, "reciprocal": -(-(1 << shift) // value), "shift": shift}
