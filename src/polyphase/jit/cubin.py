"""A digest of a kernel's machine code, read from the ELF file that the compiler writes (a cubin).

Equal digests mean equal instructions, so equal speed. The digest does not depend on a kernel's name, its comments and
the compiler's report.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

# Instructions, and their constant banks: bank 2 holds the literals of the code, bank 3 the source's __constant__
# variables. Bank 0 is for the parameters of a launch. Bank 4 holds addresses of all constants of the source; their
# values are in .nv.global.init, read or not: instructions contain these values themselves.
_CODE = ".text."
_DATA = (".nv.constant2", ".nv.constant3")

_NO_CONTENTS = 8  # SHT_NOBITS: a section without contents in the file


def code_digest(cubin: bytes) -> str:
    """The SHA-256 of the machine code in a cubin, as 64 hexadecimal digits. Raises `ValueError` for another file."""
    sections = [(name, hashlib.sha256(contents).digest()) for name, contents in _sections(cubin)]
    code = sorted(digest for name, digest in sections if name.startswith(_CODE))
    data = sorted(digest for name, digest in sections if name.startswith(_DATA))
    if not code:
        raise ValueError("the binary has no machine code")
    return hashlib.sha256(b"".join([b"code", *code, b"data", *data])).hexdigest()


def _sections(file: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and contents of each section of a 64-bit little-endian ELF file."""
    if file[:6] != b"\x7fELF\x02\x01":
        raise ValueError("the binary is not a 64-bit little-endian ELF file")
    try:
        (table,) = struct.unpack_from("<Q", file, 0x28)
        entry, count, names = struct.unpack_from("<3H", file, 0x3A)
        if count == 0:  # too many for 16 bits: the first header's size is the count
            (count,) = struct.unpack_from("<Q", file, table + 0x20)
        headers = [struct.unpack_from("<2I4Q", file, table + entry * index) for index in range(count)]
        start, size = headers[names][4:6]
    except (struct.error, IndexError):
        raise ValueError("the binary's table of sections is damaged") from None
    strings = file[start : start + size]
    for name, kind, _, _, offset, length in headers:
        text = strings[name : strings.find(b"\0", name)].decode("ascii", "replace")
        yield text, b"" if kind == _NO_CONTENTS else file[offset : offset + length]
