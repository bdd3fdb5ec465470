"""Compiled kernels on disk, shared by all processes of one user.

The store is cuda.core's: every entry is written aside, then renamed, so a killed process leaves no half entry, and
processes that start together at worst write the same entry twice. This module adds a checksum before each binary (a
damaged entry is a miss and is written anew) and a folder that is private to the user. If the disk is full, or cannot be
written to, kernels are compiled again, without an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from typing import Any

_MAX_BYTES = 512 << 20
_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path:
    """``$POLYPHASE_CACHE_DIR``, else ``polyphase`` in the user's cache folder.

    For a user without a home, a folder among temporary files.
    """
    if chosen := os.environ.get("POLYPHASE_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA"):
        return Path(base, "polyphase")
    try:
        return Path.home() / ".cache" / "polyphase"
    except RuntimeError:
        return Path(os.environ.get("TMPDIR") or "/tmp", f"polyphase-{os.getuid()}")


class KernelCache:
    """Bytes by key, in ``directory``; every failure of the disk is a miss. ``problem``: what is wrong, or None."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problem: str | None = None
        self._store: Any = None
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.problem = _insecure(directory)
            if self.problem is None:
                from polyphase.jit.compiler import cuda_core

                cuda_core()
                from cuda.core.utils import FileStreamProgramCache

                self._store = FileStreamProgramCache(directory, max_size_bytes=_MAX_BYTES)
        except OSError as error:
            self.problem = f"{directory} cannot be used: {error}"

    def get(self, key: bytes) -> bytes | None:
        """The entry, or None if there is none, it cannot be read, or its checksum does not match."""
        if self._store is None:
            return None
        try:
            entry = self._store.get(key)
        except OSError:
            return None
        if entry is None:
            return None
        digest, binary = bytes(entry[:_DIGEST_BYTES]), bytes(entry[_DIGEST_BYTES:])
        return binary if hashlib.sha256(key + binary).digest() == digest else None

    def put(self, key: bytes, binary: bytes) -> None:
        """Stores an entry, or does nothing if the disk refuses."""
        if self._store is None:
            return
        try:
            self._store[key] = hashlib.sha256(key + binary).digest() + binary
        except OSError as error:
            self.problem = f"{self.directory} cannot be written: {error}"

    def discard(self, key: bytes) -> None:
        """Removes an entry, if there is one and the disk permits."""
        if self._store is not None:
            with contextlib.suppress(OSError, KeyError):
                del self._store[key]


def _insecure(directory: Path) -> str | None:
    """Why binaries from this folder must not be run: somebody else could have put them there."""
    if os.name == "nt":
        return None
    status = directory.stat()
    if status.st_uid != os.getuid():
        return (
            f"{directory} belongs to another user (uid {status.st_uid}); set POLYPHASE_CACHE_DIR to a folder of yours"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{directory} can be written by others (mode {stat.filemode(status.st_mode)}); chmod it to 700"
    return None
