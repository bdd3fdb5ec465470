"""Where a model calls ``conv_transpose1d/2d/3d`` as a function, which swapping modules does not reach."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType

import torch
from torch.nn import Module

#: The message for a model without a module to swap.
NO_MODULES = "no ConvTranspose1d/2d/3d module found"

_HERE = __name__.partition(".")[0]
_FUNCTIONS = {f"conv_transpose{dims}d" for dims in (1, 2, 3)}


def function_calls(model: Module) -> list[str]:
    """Methods of the model's own classes that call PyTorch's function by its name, such as "Net.forward calls ..."."""
    found: dict[str, None] = {}
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        methods = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
        for value in methods.values():
            if isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] not in ("torch", _HERE):
                found.update((f"{value.__qualname__} calls {function}", None) for function in sorted(_called(value)))
    return list(found)


def override_call() -> str:
    """The call of `polyphase.override` to recommend on this machine."""
    cuda = "polyphase.override()"
    return cuda if torch.cuda.is_available() else f'{cuda} (on a CPU: polyphase.override("cpu"))'


def _called(function: FunctionType) -> set[str]:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    here = sys.modules[_HERE]
    if any(each is here or getattr(each, "__module__", None) == f"{_HERE}.functional" for each in known):
        return set()  # it calls polyphase's
    return names & _FUNCTIONS


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of functions defined within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
