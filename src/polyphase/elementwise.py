"""PyTorch's elementwise functions, read as operations of an epilogue: ``torch.relu(y)``, ``y + skip``.

Functions, methods, in-place forms and operators of one kind have one name, `name_of`. `read` returns the operation of a
call on its value: a `Reading` whose ``other`` is the call's second tensor. Tensors may be tensors themselves, or nodes
of a graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyphase import fused
from polyphase.problem.epilogue import CHANNEL, ELEMENT, ONE, SAMPLE

_NUMBER = (int, float)


class Reading(NamedTuple):
    """An operation of `polyphase.problem.epilogue`, or none if ``kind`` is "": a copy, a dropout in evaluation.

    ``other``: the tensor of "add", "subtract" and "multiply", and the slope of "prelu".
    """

    kind: str
    constants: tuple[float, ...] = ()
    other: Any = None


# The arguments of a call after its value, in order, with their defaults.
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
    "clamp_min": {"min": None},
    "clamp_max": {"max": None},
    "hardswish": {"inplace": False},
    "softplus": {"beta": 1.0, "threshold": 20.0},
    "mish": {"inplace": False},
    "prelu": {"weight": None},
    "add": {"other": None, "alpha": 1},
    "sub": {"other": None, "alpha": 1},
    "mul": {"other": None},
    "div": {"other": None, "rounding_mode": None},
    "dropout": {"p": 0.5, "training": True, "inplace": False},
    "softmax": {"dim": None},
    "clone": {},
    "detach": {},
}
_OPERATORS = {"__add__": "add", "__radd__": "add", "__iadd__": "add", "__sub__": "sub", "__isub__": "sub",
              "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul", "__truediv__": "div",
              "__itruediv__": "div"}  # fmt: skip
_OTHER_NAMES = {
    "clip": "clamp",
    "multiply": "mul",
    "true_divide": "div",
    "dropout1d": "dropout",
    "dropout2d": "dropout",
    "dropout3d": "dropout",
}


def _functions() -> dict[Any, str]:
    """The kinds of PyTorch's functions and methods, by identity: others of the same name do not match."""
    found: dict[Any, str] = {}
    for name in _PARAMETERS | _OTHER_NAMES:
        for home in (torch.nn.functional, torch, Tensor):
            for spelled in (name, f"{name}_"):
                function = getattr(home, spelled, None)
                if callable(function) and not (name == "dropout" and home is torch):  # it has other arguments
                    found[function] = _OTHER_NAMES.get(name, name)
    found[torch.special.expit] = "sigmoid"
    for name, kind in _OPERATORS.items():
        found.update((getattr(home, name), kind) for home in (operator, Tensor) if hasattr(home, name))
    return found


_FUNCTIONS = _functions()


#: Functions into whose result a layer may write its output, as a slice of channels.
CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat.default)


#: Functions whose result equals their argument: without derivatives there is nothing to compute.
COPIES = ("clone", "detach")


def concatenated(args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> Sequence[Any] | None:
    """The tensors, with ``dims``, that a call of `CONCATENATIONS` joins along channels; None if it does not."""
    given = {**dict(zip(("tensors", "dim"), args)), **kwargs}
    parts, dim = given.pop("tensors", None), given.pop("dim", None)
    dim = given.pop("axis", None) if dim is None else dim
    joins = not given and type(dim) is int and dim in (1, 1 - dims) and isinstance(parts, (list, tuple))
    return parts if joins and len(args) < 3 else None


def joined_once(value: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> Sequence[Any] | None:
    """The tensors that a call of `CONCATENATIONS` joins along channels, if ``value`` is exactly one; else None."""
    parts = concatenated(args, kwargs, dims)
    return parts if parts is not None and sum(each is value for each in parts) == 1 else None


def name_of(target: Any) -> str:
    """The kind of a function, or of a method by its name; "" if it is unknown here."""
    if isinstance(target, str):
        kind = _OPERATORS.get(target) or target.removesuffix("_")
        kind = _OTHER_NAMES.get(kind, kind)
        return kind if kind in _PARAMETERS and hasattr(Tensor, target) else ""
    try:
        return _FUNCTIONS.get(target, "")
    except TypeError:  # not hashable
        return ""


def is_in_place(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument, by the names of PyTorch's functions and Python's operators."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator":  # operator.iadd is Tensor.__iadd__
        name = f"__{name}__"
    if name.startswith("__"):
        return name[2] == "i" and hasattr(Tensor, f"__{name[3:]}")
    return bool(kwargs.get("inplace")) or name.endswith("_")


def change_between(
    nodes: Sequence[Any], taken: Collection[Any], module_of: Callable[[Any], torch.nn.Module | None]
) -> Any:
    """The first of the ``nodes`` after a layer's that may change in place a tensor that the layer reads; or None.

    ``taken``: nodes that the layer computes, itself among them; they may change each other's values. ``module_of``: the
    module that a node calls. Tensors that the ``nodes`` create did not exist when the layer was called, and may change
    until a taken call reads them.
    """
    made: set[Any] = set()
    for node in nodes:
        module = module_of(node)
        if node.meta.get(OPAQUE):
            changed, new = node.all_input_nodes, False
        elif module is not None:
            changed = node.args[:1] if getattr(module, "inplace", False) else ()
            new = isinstance(module, MAKE_NEW)
        else:
            call = node.op in ("call_function", "call_method")
            changed = may_change(node) if call else ()
            new = makes_new(node)
        if not (made.union(taken) if node in taken else made).issuperset(changed):
            return node
        if node in taken and len(node.all_input_nodes) > 1:  # its other inputs are read later
            made.clear()
        if new or changed or node in taken:
            made.add(node)
    return None


def may_change(node: Any) -> Sequence[Any]:
    """The arguments that a call may change."""
    target, kwargs = node.target, node.kwargs
    if isinstance(target, torch._ops.OpOverload):
        mutable = target._schema.is_mutable
    elif isinstance(target, torch._ops.OpOverloadPacket):
        mutable = any(getattr(target, each)._schema.is_mutable for each in target.overloads())
    else:
        mutable = isinstance(target, torch._ops.HigherOrderOperator)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if mutable or "out" in kwargs or "setitem" in name or name.startswith("_foreach"):
        return node.all_input_nodes  # type: ignore[no-any-return]
    # F.relu(x, True): a flag by its position
    flag = getattr(target, "__module__", "") == "torch.nn.functional" and any(each is True for each in node.args)
    return node.all_input_nodes[:1] if flag or is_in_place(target, kwargs) else ()


def next_reader(chain: Collection[Any], order: Mapping[Any, int]) -> Any:
    """The first node outside a chain, a layer's node and the nodes after it, that reads one of the chain; or None.

    ``order``: of the graph's nodes. A node without an order is first.
    """
    readers = {reader for node in chain for reader in node.users}.difference(chain)
    return min(readers, key=lambda each: order.get(each, -1), default=None)


def is_closed(chain: Sequence[Any]) -> bool:
    """Whether only the chain itself reads its values, except the last."""
    return all(reader in chain for node in chain[:-1] for reader in node.users)


def changes_what_is_read(call: Any, chain: Collection[Any], in_place: bool) -> bool:
    """Whether an in-place call on the last value of a chain is not the only further reader of the chain's values."""
    return in_place and any(reader is not call and reader not in chain for node in chain for reader in node.users)


def changes_other(target: Any, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes in place another tensor than ``value``: ``skip += y``."""
    return bool(args) and args[0] is not value and is_in_place(target, kwargs)


#: The key in a node's ``meta`` of a module that was not traced: it may change its arguments.
OPAQUE = "polyphase_opaque"

#: Modules whose result is not a view of their input.
MAKE_NEW = (torch.nn.modules.conv._ConvNd, torch.nn.modules.batchnorm._NormBase, torch.nn.Linear)
_NEW_OF_FUNCTIONS = {f"conv{what}{dims}d" for what in ("", "_transpose") for dims in (1, 2, 3)}
_NEW_OF_FUNCTIONS |= {"batch_norm", "linear", "conv_transpose", "conv_transpose_epilogue"}


def makes_new(node: Any) -> bool:
    """Whether a call's result is not a view of its arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = getattr(node.target, "__name__", "").partition(".")[0]
    return name in _NEW_OF_FUNCTIONS or node.target in CONCATENATIONS


def without_defaults(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those that PyTorch's functions add, and without a dtype of None."""
    return {
        name: each for name, each in kwargs.items() if name != "_stacklevel" and (name != "dtype" or each is not None)
    }


def read(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reading | None:
    """The operation of a call of kind ``name`` on ``value``, which is among ``args`` or ``kwargs``.

    None if no epilogue has that operation.
    """
    args, named = list(args), without_defaults(kwargs)
    if args and args[0] is value:
        args = args[1:]
    elif name in ("add", "mul") and len(args) > 1 and args[1] is value:  # skip + y
        if named.get("alpha", 1) != 1:
            return None
        args = [args[0], *args[2:]]
    else:
        named = {key: each for key, each in named.items() if not (key in ("input", "self") and each is value)}
        if len(named) == len(without_defaults(kwargs)):
            return None
    parameters = _PARAMETERS[name]
    if len(args) > len(parameters) or not named.keys() <= parameters.keys():
        return None
    given = {**parameters, **dict(zip(parameters, args)), **named}
    if any(each is value for each in given.values()):
        return None
    return _READERS.get(name, _plain)(name, given)


def read_next(name: str, call: Any, numbers: Mapping[Any, int]) -> tuple[Reading, Any] | None:
    """The operation of a call in a graph on a chain's last value (a copy: on any), and the value's node.

    ``numbers``: for each node of the chain, the number of operations before its value. None if no epilogue has that
    operation.
    """
    last = max(numbers.values())
    for value in call.all_input_nodes:
        if value in numbers and (numbers[value] == last or name in COPIES):
            reading = read(name, value, call.args, call.kwargs)
            if reading is not None:
                return reading, value
    return None


def _numbers(*values: Any) -> bool:
    return all(type(value) in _NUMBER and math.isfinite(value) for value in values)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (bool, complex, *_NUMBER))


def _plain(name: str, given: dict[str, Any]) -> Reading | None:
    """An activation whose constants are numbers."""
    constants = [each for key, each in given.items() if key != "inplace"]
    return Reading(name, tuple(map(float, constants))) if _numbers(*constants) else None


def _clamp(name: str, given: dict[str, Any]) -> Reading | None:
    if name == "relu6":
        return Reading("clamp", (0.0, 6.0))
    if name in ("clamp_min", "clamp_max") and None in given.values():
        return None
    least, most = (given["min_val"], given["max_val"]) if name == "hardtanh" else (given.get("min"), given.get("max"))
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
    if _is_number(other) or alpha != 1:
        return None
    return Reading("subtract" if name == "sub" else "add", (), other)


def _mul(name: str, given: dict[str, Any]) -> Reading | None:
    other = given["other"]
    if name == "div":  # by a power of two it is a product
        if not _numbers(other) or other == 0 or given["rounding_mode"] is not None:
            return None
        mantissa, exponent = math.frexp(other)
        exact = abs(mantissa) == 0.5 and abs(exponent) < 126  # the inverse is a normal number, also in float32
        return Reading("affine", (1.0 / other, 0.0)) if exact else Reading("divide", (float(other),))
    if _numbers(other):
        return Reading("affine", (float(other), 0.0))
    return None if _is_number(other) else Reading("multiply", (), other)


def _prelu(name: str, given: dict[str, Any]) -> Reading | None:
    weight = given["weight"]
    return None if weight is None or isinstance(weight, _NUMBER) else Reading("prelu", (), weight)


def _dropout(name: str, given: dict[str, Any]) -> Reading | None:
    return Reading("") if given["training"] is False else None


def _softmax(name: str, given: dict[str, Any]) -> Reading | None:
    """A softmax over channels; None for others."""
    return Reading("softmax") if type(given["dim"]) is int and given["dim"] == 1 else None


def _copy(name: str, given: dict[str, Any]) -> Reading:
    return Reading("")


_READERS: dict[str, Callable[[str, dict[str, Any]], Reading | None]] = {
    "relu6": _clamp, "hardtanh": _clamp, "clamp": _clamp, "clamp_min": _clamp,
    "clamp_max": _clamp, "gelu": _gelu, "add": _add, "sub": _add, "mul": _mul,
    "div": _mul, "prelu": _prelu, "dropout": _dropout, "softmax": _softmax, "clone": _copy, "detach": _copy,
}  # fmt: skip


def per(kind: str, other: Sequence[Any], size: Sequence[Any], equal: Callable[[Any, Any], bool] = operator.eq) -> str:
    """The kind of operand of a tensor of shape ``other`` for an output of ``size``; "" if no epilogue has it.

    `ONE`, `CHANNEL`, `SAMPLE` or `ELEMENT` (`polyphase.problem.epilogue`); `SAMPLE` only for outputs of one position:
    kernels read such an operand again for each output. ``equal`` compares sizes, maybe symbolic.
    """
    if kind == "prelu":
        counted = len(other) < 2 and (len(other) == 0 or equal(other[0], 1) or equal(other[0], size[1]))
        return CHANNEL if counted else ""
    if kind == "add" and len(other) == len(size) and all(map(equal, other, size)):
        return ELEMENT
    if len(size) < 2 or len(other) > len(size):  # reduced over channels, too
        return ""
    of_samples, of_channels, *rest = [1] * (len(size) - len(other)) + list(other)
    if not all(equal(each, 1) for each in rest):
        return ""
    if equal(of_channels, size[1]):
        if equal(of_samples, 1):
            return CHANNEL
        return SAMPLE if equal(of_samples, size[0]) and all(equal(each, 1) for each in size[2:]) else ""
    return ONE if equal(of_channels, 1) and equal(of_samples, 1) else ""


def read_as(per_what: str, size: Sequence[Any]) -> tuple[int, ...] | None:
    """The shape in which `polyphase.fused` reads a tensor of the kind ``per_what``; None for its own."""
    ones = (1,) * (len(size) - 2)
    return {ONE: (), CHANNEL: (-1,), SAMPLE: (-1, int(size[1]), *ones)}.get(per_what)


def step_of(reading: Reading, tensor: Tensor, per_what: str) -> fused.Step:
    """A reading with a second tensor as a step of an epilogue; ``tensor`` is ``other`` in the shape of `read_as`."""
    if reading.kind == "prelu":
        return fused.prelu(tensor)
    if reading.kind == "multiply":
        return fused.scale_shift(tensor)
    if reading.kind == "subtract":
        return fused.subtract(tensor)
    return fused.add(tensor) if per_what == ELEMENT else fused.scale_shift(shift=tensor)


def step_of_value(reading: Reading, number: int) -> fused.Step | None:
    """A reading whose ``other`` is an earlier value of the chain, the one before operation ``number``; or None."""
    of = {"add": fused.add_value, "multiply": fused.multiply_value}.get(reading.kind)
    return None if of is None else of(number)


def known_equal(one: Any, other: Any) -> bool:
    """Whether two sizes, maybe symbolic, are known to be equal."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one == other)
