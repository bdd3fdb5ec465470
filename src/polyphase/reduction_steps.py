"""PyTorch's poolings, reductions, norms of groups and views after a layer, read as steps that no epilogue computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyphase import fused
from polyphase.elementwise import without_defaults
from polyphase.problem.reduction import REDUCTIONS

#: Steps that no epilogue computes. Constants of pools: the window; of reductions: first and last dimension, and whether
#: these are kept; of softmaxes: first and last dimension; of norms: groups, or first dimension and sizes, and epsilon;
#: of views: sizes, 0 for an unchanged one.
KINDS = frozenset(("max_pool", "avg_pool", *REDUCTIONS, "softmax_over", "group_norm", "position_norm", "view"))

_PARAMETERS: dict[str, dict[str, Any]] = {
    "max_pool": {"kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False,
                 "return_indices": False},
    "avg_pool": {"kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True,
                 "divisor_override": None},
    "adaptive_avg_pool": {"output_size": None},
    "mean": {"dim": None, "keepdim": False, "dtype": None},
    "sum": {"dim": None, "keepdim": False, "dtype": None},
    "amax": {"dim": (), "keepdim": False},
    "amin": {"dim": (), "keepdim": False},
    "max": {"dim": None, "keepdim": False},
    "min": {"dim": None, "keepdim": False},
    "logsumexp": {"dim": None, "keepdim": False},
    "softmax": {"dim": None},
    "group_norm": {"num_groups": None, "weight": None, "bias": None, "eps": 1e-5},
    "layer_norm": {"normalized_shape": None, "weight": None, "bias": None, "eps": 1e-5},
}  # fmt: skip
#: Functions that return values and indices, and the functions that return the same values.
EXTREMES = {"max": "amax", "min": "amin"}
MOST_IN_WINDOW = 512
_VIEWS = ("flatten", "view", "reshape")
_OF_DIMS = ("max_pool", "avg_pool", "adaptive_avg_pool")


def _functions() -> dict[Any, tuple[str, int]]:
    found: dict[Any, tuple[str, int]] = {}
    for name in _PARAMETERS:
        for dims in (1, 2, 3) if name in _OF_DIMS else (0,):
            for home in (F, torch, Tensor):
                function = getattr(home, f"{name}{dims}d" if dims else name, None)
                if callable(function) and not (home is torch and name.endswith("_norm")):  # of other arguments
                    found[function] = name, dims
    views = (getattr(home, name, None) for name in _VIEWS for home in (torch, Tensor))
    return found | {function: ("view", 0) for function in views if function is not None}


_FUNCTIONS = _functions()


def name_of(target: Any) -> str:
    """The kind of a function, or of a method by its name; "" if it is unknown here."""
    if isinstance(target, str):
        return "view" if target in _VIEWS else target if target in _PARAMETERS and hasattr(Tensor, target) else ""
    try:
        return _FUNCTIONS.get(target, ("",))[0]
    except TypeError:  # not hashable
        return ""


def read(target: Any, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> fused.Step | None:
    """The step of a call on ``value``, its first argument, with ``dims``; None if it is not one of these steps.

    Tensors may be nodes of a graph.
    """
    name, of = (name_of(target), 0) if isinstance(target, str) else _FUNCTIONS.get(target, ("", 0))
    if not name or not args or args[0] is not value or (of and of != dims - 2):
        return None
    if name == "view":
        return _view(getattr(target, "__name__", target), args[1:], kwargs, dims)
    known, named = _PARAMETERS[name], without_defaults(kwargs)
    if len(args) - 1 > len(known) or not named.keys() <= known.keys():
        return None
    given = {**known, **dict(zip(known, args[1:])), **named}
    if any(each is value for each in given.values()) or given.get("dtype") is not None:
        return None
    return _READERS[name](given, dims)


def _pool(kind: str, given: Mapping[str, Any], dims: int) -> fused.Step | None:
    """A pooling with adjacent windows; None for others."""
    size, stride, padding, dilation = (
        per_dim(given.get(name, one), dims - 2)
        for name, one in (("kernel_size", None), ("stride", None), ("padding", 0), ("dilation", 1))
    )
    given_stride = given.get("stride")
    if size is None or min(size) < 1 or (given_stride not in (None, ()) and stride != size):
        return None
    plain = padding == (0,) * (dims - 2) and dilation == (1,) * (dims - 2) and math.prod(size) <= MOST_IN_WINDOW
    plain &= given.get("divisor_override") is None
    if not plain or given.get("ceil_mode") or given.get("return_indices"):
        return None
    return fused.Step(kind, tuple(map(float, size)))


def _view(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> fused.Step | None:
    """A view with another number of spatial dimensions; sizes that are nodes of a graph are not known."""
    if name == "flatten":
        given = {"start_dim": 0, "end_dim": -1, **dict(zip(("start_dim", "end_dim"), args)), **kwargs}
        kept = given["start_dim"] == 2 and given["end_dim"] in (-1, dims - 1) and len(given) == 2
        return fused.Step("view", (0.0, 0.0, -1.0)) if kept else None
    sizes: Any = args[0] if len(args) == 1 else args
    if kwargs or not isinstance(sizes, (tuple, list, torch.fx.Node)):
        return None
    constants = _sizes(sizes)
    return None if constants is None else fused.Step("view", constants)


def _sizes(given: Any) -> tuple[float, ...] | None:
    """Sizes as constants, empty if nodes of a graph are among them; None if they are something else."""
    if isinstance(given, torch.fx.Node) or any(isinstance(each, torch.fx.Node) for each in given):
        return ()
    return tuple(map(float, given)) if all(type(each) is int for each in given) else None


def per_dim(value: Any, count: int) -> tuple[int, ...] | None:
    """A constant, an integer or several, as ``count`` integers; None for others, such as nodes of a graph."""
    if type(value) is int:
        return (value,) * count
    values = tuple(value) if isinstance(value, (tuple, list)) else ()
    values = values * count if len(values) == 1 else values
    return values if len(values) == count and all(type(each) is int for each in values) else None


def _adaptive(given: Mapping[str, Any], dims: int) -> fused.Step | None:
    size = given["output_size"]
    ones = per_dim(size, dims - 2) if not isinstance(size, (tuple, list)) or len(size) == dims - 2 else None
    return None if ones is None or set(ones) != {1} else fused.Step("mean", (2.0, dims - 1.0, 1.0))


def _reduction(kind: str, given: Mapping[str, Any], dims: int) -> fused.Step | None:
    """A reduction over adjacent dimensions, without the first; None for others."""
    keep, dim = given["keepdim"], given["dim"]
    dim = (dim,) if type(dim) is int else dim
    if type(keep) is not bool or not isinstance(dim, (tuple, list)) or not all(type(each) is int for each in dim):
        return None
    found = sorted(each % dims for each in dim if -dims <= each < dims)
    if not found or len(found) < len(dim) or found != list(range(found[0], found[-1] + 1)) or found[0] < 1:
        return None
    return fused.Step(kind, (float(found[0]), float(found[-1]), float(keep)))


def _extreme(kind: str, given: Mapping[str, Any], dims: int) -> fused.Step | None:
    """A minimum or maximum over one dimension: without one there are no indices."""
    return _reduction(kind, given, dims) if type(given["dim"]) is int else None


def _softmax(given: Mapping[str, Any], dims: int) -> fused.Step | None:
    """A softmax, not over channels: that is an operation of an epilogue."""
    dim = given["dim"]
    if type(dim) is not int or not -dims <= dim < dims or dim % dims < 2:
        return None
    return fused.Step("softmax_over", (float(dim % dims),) * 2)


def _norm(kind: str, first: Any, given: Mapping[str, Any]) -> fused.Step | None:
    if type(first) is not int or type(given["eps"]) is not float:
        return None
    tensors = tuple((role, given[name]) for role, name in (("weight", "weight"), ("offset", "bias"))
                    if given[name] is not None)  # fmt: skip
    return fused.Step(kind, (float(first), given["eps"]), tensors)


def _layer_norm(given: Mapping[str, Any], dims: int) -> fused.Step | None:
    shape = given["normalized_shape"]
    shape = (shape,) if type(shape) is int else shape
    if not isinstance(shape, (tuple, list, torch.Size)) or not 0 < len(shape) < dims:
        return None
    step, sizes = _norm("position_norm", dims - len(shape), given), _sizes(shape)
    if step is None or sizes is None:
        return None
    return step._replace(constants=(step.constants[0], *sizes, step.constants[1]))


_READERS: dict[str, Callable[[Mapping[str, Any], int], fused.Step | None]] = {
    **{name: partial(_pool, name) for name in ("max_pool", "avg_pool")},
    **{name: partial(_reduction, name) for name in REDUCTIONS},
    **{name: partial(_extreme, kind) for name, kind in EXTREMES.items()},
    "adaptive_avg_pool": _adaptive,
    "softmax": _softmax,
    "group_norm": lambda given, dims: _norm("group_norm", given["num_groups"], given),
    "layer_norm": _layer_norm,
}


def _of_module(name: str, of: int, module: Any, dims: int) -> fused.Step | None:
    """The step of a module that calls one function, and has attributes named like the function's arguments.

    ``of``: the module's number of spatial dimensions, 0 for any.
    """
    if of and of != dims - 2:  # the tensor has no batch
        return None
    given = {attribute: getattr(module, attribute, default) for attribute, default in _PARAMETERS[name].items()}
    return _READERS[name](given, dims)


def _instance_norm(of: int, module: Any, dims: int) -> fused.Step | None:
    """An instance norm without running statistics, as a group norm of single channels."""
    if of != dims - 2 or module.running_mean is not None:
        return None
    given = {"weight": module.weight, "bias": module.bias, "eps": module.eps}
    return _norm("group_norm", module.num_features, given)


_MODULES: dict[Any, Callable[[Any, int], fused.Step | None]] = {
    nn.GroupNorm: partial(_of_module, "group_norm", 0),
    nn.LayerNorm: partial(_of_module, "layer_norm", 0),
}
for _dims in (1, 2, 3):
    _MODULES[getattr(nn, f"InstanceNorm{_dims}d")] = partial(_instance_norm, _dims)
    for _title, _name in (("MaxPool", "max_pool"), ("AvgPool", "avg_pool"), ("AdaptiveAvgPool", "adaptive_avg_pool")):
        _MODULES[getattr(nn, f"{_title}{_dims}d")] = partial(_of_module, _name, _dims)


def is_module(module: Any) -> bool:
    """Whether a module's class, or the class that it replaces, may be one of these steps."""
    return getattr(type(module), "_stands_for", type(module)) in _MODULES


def module_step(module: Any, dims: int) -> fused.Step | None:
    """The step of a module on a tensor with ``dims``; None if it is not one of these steps."""
    step = _MODULES.get(getattr(type(module), "_stands_for", type(module)))
    return None if step is None else step(module, dims)
