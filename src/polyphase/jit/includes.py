"""Resolves `#include "..."` lines to one text: NVRTC gets one string, which is a kernel's whole identity.

Paths are relative to one folder. Each file appears once, after the files that it includes. Includes precede all code of
their file, unconditional or under a condition of the given constants: ``#if NAME``, ``#if !NAME``, and ``#else``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

_DIRECTIVE = re.compile(r"\s*#\s*(include|if|ifdef|ifndef|elif|else|endif|pragma once)\b\s*(.*?)\s*(?://.*)?$")
_PATH = re.compile(r'"([^"<>]+)"')
_CONDITION = re.compile(r"(!?)\s*([A-Za-z_]\w*)")


class IncludeError(ValueError):
    """An include that cannot be resolved."""


class _Include(NamedTuple):
    path: str
    conditions: tuple[str, ...]  # all must hold


def resolve(root: str, read: Callable[[str], str], constants: Mapping[str, int]) -> list[tuple[str, str]]:
    """``root`` and all that it includes, as pairs of a path and a text without includes, in the order of compilation.

    Args:
        root: the path of the file that nothing includes.
        read: the text of a path.
        constants: the names that conditions around an include may test.

    Raises:
        IncludeError: an include comes after code or under another condition, or files include one another.
    """
    found: dict[str, str] = {}
    open_files: list[str] = []

    def visit(path: str) -> None:
        if path in found:
            return
        if path in open_files:
            raise IncludeError(f"{' includes '.join([*open_files, path])}")
        open_files.append(path)
        includes, text = _split(path, read(path))
        for include in includes:
            if all(_holds(condition, constants, path) for condition in include.conditions):
                visit(include.path)
        open_files.pop()
        found[path] = text

    visit(root)
    return list(found.items())


def without_includes(path: str, text: str) -> str:
    """A file's text as `resolve` gives it."""
    return _split(path, text)[1]


@lru_cache(maxsize=512)
def _split(path: str, text: str) -> tuple[tuple[_Include, ...], str]:
    """The includes of a file, and its text without them and their conditions."""
    includes: list[_Include] = []
    conditions: list[str] = []
    kept: list[str] = []
    code = False
    for line in text.splitlines():
        match = _DIRECTIVE.match(line)
        if match is None:
            code = code or not (line.lstrip().startswith("//") or line.strip() in ("", "\\"))
            kept.append(line)
            continue
        name, argument = match.groups()
        if name == "include":
            quoted = _PATH.fullmatch(argument)
            if code or quoted is None:
                raise IncludeError(f'{path}: includes are of "paths" and stand before any code, not as {line.strip()}')
            includes.append(_Include(quoted[1], tuple(conditions)))
            continue
        if name == "pragma once":
            continue
        if name.startswith("if"):
            conditions.append(argument if name == "if" else f"{name} {argument}")
        elif name == "else":
            conditions[-1] = f"!{conditions[-1]}"
        elif name == "elif":
            conditions[-1] = f"elif {argument}"
        else:
            conditions.pop()
        kept.append(line)
    return tuple(includes), re.sub(r"\n{3,}", "\n\n", "\n".join(kept).strip("\n") + "\n")


def _holds(condition: str, constants: Mapping[str, int], path: str) -> bool:
    match = _CONDITION.fullmatch(condition)
    if match is None or match[2] not in constants:
        known = ", ".join(constants) or "none"
        raise IncludeError(f"{path}: no constant decides about an include under '#if {condition}' (known: {known})")
    return bool(constants[match[2]]) != bool(match[1])
