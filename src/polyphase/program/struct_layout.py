"""Structs of the kernels' as they lie in memory: bytes from named values, and named values from bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class ParamOverflowError(OverflowError):
    """A number that a kernel's parameter has no room for."""


class Member(NamedTuple):
    """A member of a struct: ``offset`` in bytes, ``length`` that of an array, or 0.

    ``kind``: of its elements, a character of Python's `struct` or a struct.
    """

    offset: int
    kind: str | Struct
    length: int


# The least and the most that integers hold, by their character.
_RANGES = {
    character: (-(1 << bits - 1), (1 << bits - 1) - 1) if character.islower() else (0, (1 << bits) - 1)
    for character, bits in zip("bBhHiIqQ", (8, 8, 16, 16, 32, 32, 64, 64))
}
# Structs that are not given by their members: one by a number; the other is left to the launcher.
_DIVISOR, _TENSOR_MAP = "Divisor", "TensorMap"


@dataclass(frozen=True)
class Struct:
    """A struct: ``size`` in bytes, members by name in their order."""

    name: str
    size: int
    members: dict[str, Member]

    @cached_property
    def tensor_maps(self) -> tuple[int, ...]:
        """The offsets of its tensor maps, in their order."""
        return tuple(member.offset for member in self.members.values() if _is_tensor_map(member))

    @cached_property
    def given(self) -> dict[str, Member]:
        """The members that `pack` is given: all but tensor maps."""
        return {name: member for name, member in self.members.items() if not _is_tensor_map(member)}

    def pack(self, **values: Any) -> bytes:
        """The bytes of the struct whose members have these values; padding and tensor maps are zeros.

        An array takes a sequence, a ``Divisor`` a number, any other struct a mapping, or an object whose method
        ``params`` gives one.

        Raises:
            TypeError: a member is missing, or there is none of that name, or a value has the wrong type.
            ValueError: an array has another length.
            ParamOverflowError: a member has no room for a number.
        """
        buffer = bytearray(self.size)
        self._fill(buffer, 0, values)
        return bytes(buffer)

    def read(self, packed: bytes, start: int = 0) -> dict[str, Any]:
        """The values by which `pack` gives these bytes, from byte ``start`` on."""
        values: dict[str, Any] = {}
        for name, (offset, kind, length) in self.given.items():
            at = start + offset
            if isinstance(kind, str):
                found: list[Any] = [*struct.unpack_from(f"<{length or 1}{kind}", packed, at)]
            else:
                found = [kind.read(packed, at + number * kind.size) for number in range(length or 1)]
                if kind.name == _DIVISOR:
                    found = [each["value"] for each in found]
            values[name] = found if length else found[0]
        return values

    def _fill(self, buffer: bytearray, start: int, values: Mapping[str, Any]) -> None:
        if values.keys() != self.given.keys():
            missing = [f"{name} is missing" for name in self.given if name not in values]
            unknown = [f"{name} is not one" for name in values if name not in self.given]
            members = ", ".join(self.given)
            raise TypeError(f"{self.name} has the members {members}: {', '.join(missing + unknown)}")
        for name, (offset, kind, length) in self.given.items():
            elements = values[name] if length else (values[name],)
            if length and len(elements) != length:
                raise ValueError(f"{self.name}.{name} has {length} elements, given {len(elements)}: {elements!r}")
            if isinstance(kind, str):
                for number in elements:
                    self._check(name, kind, number)
                struct.pack_into(f"<{length or 1}{kind}", buffer, start + offset, *elements)
            else:
                for index, element in enumerate(elements):
                    kind._fill(buffer, start + offset + index * kind.size, self._members_of(name, kind, element))

    def _check(self, name: str, kind: str, number: Any) -> None:
        """Raises where a member of that kind cannot hold a number."""
        if kind not in _RANGES:
            if not isinstance(number, (int, float)):
                raise TypeError(f"{self.name}.{name} is a number, given {number!r}")
            return
        least, most = _RANGES[kind]
        if not isinstance(number, int):
            raise TypeError(f"{self.name}.{name} is an integer, given {number!r}")
        if not least <= number <= most:
            raise ParamOverflowError(f"{self.name}.{name} holds {least} to {most}, given {number}")

    def _members_of(self, name: str, kind: Struct, value: Any) -> Mapping[str, Any]:
        """The values of the members of a member, from what it is given as."""
        if kind.name == _DIVISOR:
            if not isinstance(value, int):
                raise TypeError(f"{self.name}.{name} takes a number to divide by, given {value!r}")
            return divisor(value)
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
