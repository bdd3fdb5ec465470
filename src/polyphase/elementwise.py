"""PyTorch's elementwise functions, read as operations of an epilogue: ``torch.relu(y)``, ``y + skip``.

Functions, methods, in-place forms and operators of one kind go by one name, `name_of`. `read` says what a call computes
of its value: a `Reading` whose ``other`` is the tensor beside it, whatever stands for a tensor there: tensors
themselves, or the nodes of a graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NUMBER = (int, float)


class Reading(NamedTuple):
    """An operation of `polyphase.problem.epilogue`, or none where ``kind`` is "": a dropout in evaluation mode.

    ``other``: the residual of "add", the slope of "prelu".
    """

    kind: str
    constants: tuple[float, ...] = ()
    other: Any = None


# What a call may have beside its value, in order, with what it is by default.
_PARAMETERS: dict[str, dict[str, Any]] = {
    "relu": {"inplace": False},
    "relu6": {"inplace": False},
    "leaky_relu": {"negative_slope": 0.01, "inplace": False},
    "elu": {"alpha": 1.0, "inplace": False},
    "gelu": {"approximate": "none"},
    "silu": {"inplace": False},
    "tanh": {},
    "sigmoid": {},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0, "inplace": False},
    "clamp": {"min": None, "max": None},
    "hardswish": {"inplace": False},
    "softplus": {"beta": 1.0, "threshold": 20.0},
    "mish": {"inplace": False},
    "prelu": {"weight": None},
    "add": {"other": None, "alpha": 1},
    "sub": {"other": None, "alpha": 1},
    "mul": {"other": None},
    "dropout": {"p": 0.5, "training": True, "inplace": False},
}
_OPERATORS = {"__add__": "add", "__radd__": "add", "__iadd__": "add", "__sub__": "sub", "__isub__": "sub",
              "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul"}  # fmt: skip
_OTHER_NAMES = {"clip": "clamp", "dropout1d": "dropout", "dropout2d": "dropout", "dropout3d": "dropout"}


def _functions() -> dict[Any, str]:
    """PyTorch's functions and methods by what they are, so that others of the same name are not taken for them."""
    found: dict[Any, str] = {operator.add: "add", operator.iadd: "add", operator.sub: "sub", operator.isub: "sub",
                             operator.mul: "mul", operator.imul: "mul"}  # fmt: skip
    for name in _PARAMETERS | _OTHER_NAMES:
        for home in (torch.nn.functional, torch, Tensor):
            for spelled in (name, f"{name}_"):
                function = getattr(home, spelled, None)
                if callable(function) and not (name == "dropout" and home is torch):  # whose second is no `training`
                    found[function] = _OTHER_NAMES.get(name, name)
    found.update((getattr(Tensor, name), kind) for name, kind in _OPERATORS.items())
    return found


_FUNCTIONS = _functions()


def name_of(target: Any) -> str:
    """The kind of a function, or of a method by its name; "" if it is none of these."""
    if isinstance(target, str):
        kind = _OPERATORS.get(target) or target.removesuffix("_")
        kind = _OTHER_NAMES.get(kind, kind)
        return kind if kind in _PARAMETERS and hasattr(Tensor, target) else ""
    try:
        return _FUNCTIONS.get(target, "")
    except TypeError:  # not hashable
        return ""


def is_in_place(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument, as the names of PyTorch's functions and Python's operators tell."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator":  # operator.iadd is Tensor.__iadd__
        name = f"__{name}__"
    if name.startswith("__"):
        return name[2] == "i" and hasattr(Tensor, f"__{name[3:]}")
    return bool(kwargs.get("inplace")) or name.endswith("_")


def read(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reading | None:
    """What a call of the kind ``name`` computes of ``value``, which is among ``args`` or ``kwargs``.

    None where that is no operation of an epilogue.
    """
    args, named = list(args), dict(kwargs)
    if args and args[0] is value:
        args = args[1:]
    elif name in ("add", "mul") and len(args) > 1 and args[1] is value:  # skip + y
        if named.get("alpha", 1) != 1:
            return None
        args = [args[0], *args[2:]]
    else:
        named = {key: each for key, each in named.items() if not (key in ("input", "self") and each is value)}
        if len(named) == len(kwargs):
            return None
    parameters = _PARAMETERS[name]
    if len(args) > len(parameters) or not named.keys() <= parameters.keys() or named.get("out") is not None:
        return None
    given = {**parameters, **dict(zip(parameters, args)), **named}
    if any(each is value for each in given.values()):
        return None
    return _READERS.get(name, _plain)(name, given)


def _numbers(*values: Any) -> bool:
    return all(type(value) in _NUMBER and math.isfinite(value) for value in values)


def _plain(name: str, given: dict[str, Any]) -> Reading | None:
    """An activation whose constants are numbers."""
    constants = [each for key, each in given.items() if key != "inplace"]
    return Reading(name, tuple(map(float, constants))) if _numbers(*constants) else None


def _clamp(name: str, given: dict[str, Any]) -> Reading | None:
    if name == "relu6":
        return Reading("clamp", (0.0, 6.0))
    least, most = (given["min"], given["max"]) if name == "clamp" else (given["min_val"], given["max_val"])
    least, most = -math.inf if least is None else least, math.inf if most is None else most
    numbers = all(type(each) in _NUMBER and not math.isnan(each) for each in (least, most))
    return Reading("clamp", (float(least), float(most))) if numbers else None


def _gelu(name: str, given: dict[str, Any]) -> Reading | None:
    return {"none": Reading("gelu"), "tanh": Reading("gelu_tanh")}.get(given["approximate"])


def _add(name: str, given: dict[str, Any]) -> Reading | None:
    other, alpha = given["other"], given["alpha"]
    if not _numbers(alpha):
        return None
    sign = -1.0 if name == "sub" else 1.0
    if _numbers(other):
        return Reading("affine", (1.0, sign * alpha * other))
    is_number = isinstance(other, (bool, complex, *_NUMBER)) or other is None
    return None if is_number or name == "sub" or alpha != 1 else Reading("add", (), other)


def _mul(name: str, given: dict[str, Any]) -> Reading | None:
    return Reading("affine", (float(given["other"]), 0.0)) if _numbers(given["other"]) else None


def _prelu(name: str, given: dict[str, Any]) -> Reading | None:
    weight = given["weight"]
    return None if weight is None or isinstance(weight, _NUMBER) else Reading("prelu", (), weight)


def _dropout(name: str, given: dict[str, Any]) -> Reading | None:
    return Reading("") if given["training"] is False else None


_READERS: dict[str, Callable[[str, dict[str, Any]], Reading | None]] = {
    "relu6": _clamp, "hardtanh": _clamp, "clamp": _clamp, "gelu": _gelu, "add": _add, "sub": _add, "mul": _mul,
    "prelu": _prelu, "dropout": _dropout,
}  # fmt: skip
