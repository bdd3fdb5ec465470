"""Small JSON files in the cache folder that processes leave for later ones, beside compiled kernels.

An entry repeats its subject (``about``), and its name is a digest of that. A missing or damaged entry, or one about
something else, reads as None.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from polyphase.jit.cache import cache_directory


def read(folder: str, about: str) -> Any:
    """The entry about ``about``, or None."""
    try:
        entry = json.loads(path_of(folder, about).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last for deeply nested JSON
        return None
    return entry.get("value") if isinstance(entry, dict) and entry.get("about") == about else None


def write(folder: str, about: str, value: object) -> None:
    """Writes an entry, replacing an older one about the same. Raises OSError."""
    path = path_of(folder, about)
    for parent in (cache_directory(), path.parent):  # each private: `parents=True` would use the umask for the first
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Written aside, then renamed: no process reads half an entry.
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"about": about, "value": value}, file)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def path_of(folder: str, about: str) -> Path:
    """The file of an entry."""
    return cache_directory() / folder / f"{hashlib.sha256(about.encode()).hexdigest()}.json"


def digest(files: list[Path]) -> str:
    """A digest of files, in the order of their names: entries are valid for the text that they were made from."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]
