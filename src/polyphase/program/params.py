"""A kernel's parameters. The struct in its source is their one description, and is read here.

``params_of(source).pack(src=gather.src, batch=problem.batch, ...)`` gives the bytes of the kernel's last parameter, by
the names that the members have in CUDA.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyphase.problem.integers import round_up
from polyphase.program.struct_layout import Member, Struct
from polyphase.program.tensor_map import TENSOR_MAP_BYTES

if TYPE_CHECKING:
    from polyphase.jit.source import KernelSource

# Types of CUDA's, as Python's `struct` names them.
_SCALARS = {
    "bool": "?",
    "unsigned char": "B",
    "short": "h",
    "unsigned short": "H",
    "int": "i",
    "unsigned": "I",
    "unsigned int": "I",
    "long long": "q",
    "unsigned long long": "Q",
    "float": "f",
    "double": "d",
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ALIGNED = r"(?:alignas\s*\(\s*(\d+)\s*\)\s*)?"
_DECLARATION = re.compile(rf"\s*{_ALIGNED}((?:\w+\s+)+)([\w\s,\[\]]+);")
_DECLARATOR = re.compile(r"\s*(\w+)\s*(?:\[\s*(\d+)\s*\])?\s*")

_known: dict[str, Struct] = {}


def params_of(source: KernelSource) -> Struct:
    """The struct of a kernel's last parameter, the same for all specialisations; an empty struct for none.

    Raises ValueError if its source cannot be parsed here.
    """
    found = _known.get(source.kernel)
    if found is None:
        found = _known[source.kernel] = parse(source.text, source.kernel)
    return found


def parse(text: str, kernel: str) -> Struct:
    """The struct of the last parameter of the kernel whose source is ``text``."""
    code = "\n" + _COMMENT.sub(" ", text)
    declared = re.search(rf"__global__[^;{{}}]*?\b{kernel}\s*\(([^)]*)\)", code)
    if declared is None:
        raise ValueError(f"no kernel {kernel} in its source")
    last = declared[1].rsplit(",", 1)[-1]
    if "*" in last or not last.strip():
        return Struct("", 0, {})
    kind, _ = re.sub(r"\bconst\b|\b__grid_constant__\b", " ", last).split()
    return _struct(code, kind)[0]


def _struct(code: str, name: str) -> tuple[Struct, int]:
    """A struct and its alignment, by the rules of C++."""
    if name == "TensorMap":  # the driver's, which knows the members
        return Struct(name, TENSOR_MAP_BYTES, {}), TENSOR_MAP_BYTES // 2
    found = list(re.finditer(rf"\nstruct\s+{_ALIGNED}{name}\s*{{", code))
    if len(found) != 1:
        raise ValueError(f"struct {name} is defined {len(found)} times in the kernel's source")
    alignment, size, members = int(found[0][1] or 1), 0, {}
    of_kind: str | Struct
    for kind, member, length, least in _declarations(name, code, found[0].end()):
        if kind in _SCALARS:
            of_kind = _SCALARS[kind]
            width = aligned = struct.calcsize("=" + of_kind)
        else:
            of_kind, aligned = _struct(code, kind)
            width = of_kind.size
        aligned = max(aligned, least)
        offset = round_up(size, aligned)
        members[member] = Member(offset, of_kind, length)
        size, alignment = offset + width * max(1, length), max(alignment, aligned)
    return Struct(name, round_up(size, alignment), members), alignment


def _declarations(name: str, code: str, start: int) -> Iterator[tuple[str, str, int, int]]:
    """The members of a struct whose body begins at ``start``: type, name, length of an array, ``alignas``."""
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(code[end], 0)
        end += 1
    body, before = code[start : end - 1], ""
    while body != before:  # replaces braces and their contents by a sign, the innermost first
        body, before = re.sub(r"{[^{}]*}", "@", body), body
    for statement in re.findall(r"[^;@]*[;@]", body):
        declared = _DECLARATION.fullmatch(statement)
        if declared is None and re.search(r"\).*@$", statement, re.DOTALL) and "#" not in statement:
            continue  # a function with its body
        for each in [""] if declared is None else declared[3].split(","):
            found = _DECLARATOR.fullmatch(each)
            if declared is None or found is None:
                raise ValueError(f"struct {name} has a member that is not understood: {' '.join(statement.split())}")
            yield " ".join(declared[2].split()), found[1], int(found[2] or 0), int(declared[1] or 1)
