"""Calls back when another library is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_awaited: dict[str, list[Callable[[Any], None]]] = {}


def once_imported(name: str, tell: Callable[[Any], None]) -> None:
    """Calls ``tell`` with the module ``name``: now, or once it is imported."""
    if name in sys.modules:
        tell(sys.modules[name])
        return
    if not _awaited:
        sys.meta_path.insert(0, _Finder())
    _awaited.setdefault(name, []).append(tell)


class _Finder(MetaPathFinder):
    """Finds awaited modules by the finders after it, and calls back when a module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _awaited:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            for tell in _awaited.pop(fullname, ()):
                tell(module)

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec
