"""Formulas for PyTorch's `FlopCounterMode`, registered when somebody imports it.

From 2.14 on its module imports Triton, which takes longer than all of polyphase.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_COUNTER = "torch.utils.flop_counter"

Formula = TypeVar("Formula", bound=Callable[..., int])
_waiting: list[tuple[Any, Callable[..., int]]] = []


def flop_formula(operator: Any) -> Callable[[Formula], Formula]:
    """What an operator comes to, of shapes, as `torch.utils.flop_counter.register_flop_formula` takes it."""

    def keep(formula: Formula) -> Formula:
        if _COUNTER in sys.modules:
            _tell(sys.modules[_COUNTER], operator, formula)
        else:
            if not _waiting:
                sys.meta_path.insert(0, _Finder())
            _waiting.append((operator, formula))
        return formula

    return keep


def _tell(counter: Any, operator: Any, formula: Callable[..., int]) -> None:
    """By its table: `register_flop_formula` of PyTorch 2.4 keeps operators outside ATen where it does not find them."""
    counter.flop_registry[operator] = counter.shape_wrapper(formula)


class _Finder(MetaPathFinder):
    """Finds the counter as Python does, once, and has it told of the formulas when it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            for operator, formula in _waiting:
                _tell(module, operator, formula)

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec
