"""The elementwise operations that a kernel applies to a sum after its bias, as data, in order.

The planner, the programs and the text of the kernels read this one description (docs/kernels/epilogue.md). Values are
in the accumulator's type from the sum on, and are rounded once, after the last operation. A prologue applies the same
operations to every element of the input (docs/kernels/prologue.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

#: The activations, and a division, with the constants of each, in order.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "relu": (),
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "gelu": (),
    "gelu_tanh": (),
    "silu": (),
    "tanh": (),
    "sigmoid": (),
    "clamp": ("min", "max"),
    "hardswish": (),
    "softplus": ("beta", "threshold"),
    "mish": (),
    "divide": ("divisor",),
}

#: An operand's elements: one, one for each channel, for each sample and channel, or for each output.
ONE, CHANNEL, SAMPLE, ELEMENT = "one", "channel", "sample", "element"

# The operands of operations, optional ones in brackets.
_OPERANDS = {
    "scale_shift": ("[scale]", "[shift]", "[less]"),
    "normalize": ("mean", "variance", "[weight]", "[offset]"),
    "layer_norm": ("[weight]", "[offset]"),
    "prelu": ("slope",),
    "snake": ("alpha", "[beta]"),
    "add": ("residual",),
}
_OF_VALUES = ("add_value", "multiply_value")
# The number of constants of every operation.
_CONSTANTS = {
    **{name: len(named) for name, named in ACTIVATIONS.items()},
    **{"affine": 2, "scale_shift": 0, "normalize": 1, "layer_norm": 1, "prelu": 0, "snake": 2, "add": 0, "softmax": 0},
    **dict.fromkeys(_OF_VALUES, 0),
}
# Operations that do not map zero to zero: a prologue with one must not be applied to padding.
_MOVE_ZERO = ("sigmoid", "softplus", "normalize", "layer_norm", "softmax", "add")

#: The operations that read all channels of a pixel, and the most channels of a kernel with one: two row blocks. (With
#: four, a thread's operands of its rows take too many registers.)
OF_PIXELS = ("layer_norm", "softmax")
MOST_CHANNELS = 128


class Operand(NamedTuple):
    """A tensor that an operation reads: ``per`` is one of `ONE`, `CHANNEL`, `SAMPLE` and `ELEMENT`.

    ``wide``: its elements have the accumulator's type, not the tensors'. An `ELEMENT` operand has the output's layout.
    """

    role: str
    per: str
    wide: bool = False


@dataclass(frozen=True)
class Operation:
    """One elementwise operation of an epilogue, from a value ``v`` to the next.

    ========================================  =====================================================================
    a name of `ACTIVATIONS`                   the activation as `torch.nn.functional` has it, of its ``constants``
    ``"affine"``                              ``v·constants[0] + constants[1]``
    ``"scale_shift"``                         ``v·scale + shift - less``, of operands, at least one of them
    ``"normalize"``                           ``(v - mean) / sqrt(variance + constants[0]) · weight + offset``
    ``"layer_norm"``                          the same, of the mean and variance of the channels of each pixel
    ``"softmax"``                             ``exp(v)`` over the sum of that of the channels of the pixel
    ``"prelu"``                               ``v`` where it is positive, else ``v·slope``
    ``"snake"``                               ``v + sin²(v·alpha) / (beta + constants[0])``; beta is alpha where it is
                                              missing; with ``constants[1]`` of 1 exponentials take the place of both
    ``"add"``                                 ``v + residual``
    ``"add_value"``, ``"multiply_value"``     ``v + u`` and ``v·u``; ``u`` is the value that operation ``of`` reads
    ========================================  =====================================================================
    """

    kind: str
    constants: tuple[float, ...] = ()
    operands: tuple[Operand, ...] = ()
    of: int = 0

    def __post_init__(self) -> None:
        wanted = _CONSTANTS.get(self.kind)
        if wanted is None:
            raise ValueError(f"an epilogue has no operation {self.kind!r}; it has {', '.join(_CONSTANTS)}")
        if len(self.constants) != wanted:
            raise ValueError(f"{self.kind} takes {wanted} constants, given {self.constants}")
        finite = all(-math.inf < constant < math.inf for constant in self.constants)  # Dynamo traces this
        if (not finite and self.kind != "clamp") or any(constant != constant for constant in self.constants):
            raise ValueError(f"{self.kind} takes finite constants, given {self.constants}")
        self._check_operands()

    def _check_operands(self) -> None:
        named = _OPERANDS.get(self.kind, ())
        roles = [operand.role for operand in self.operands]
        in_order = [role for role in (each.strip("[]") for each in named) if role in roles] == roles
        lacks = bool(roles) != bool(named) and self.kind != "layer_norm"
        if not in_order or not {role for role in named if "[" not in role} <= set(roles) or lacks:
            raise ValueError(f"{self.kind} takes the operands {', '.join(named)}, given {roles}")
        if any(operand.per == ELEMENT for operand in self.operands) != (self.kind == "add"):
            raise ValueError(f"{self.kind} cannot have operands {self.operands}")

    @property
    def keeps_zero(self) -> bool:
        """Whether zero stays zero, whatever finite operands there are."""
        if self.kind == "clamp":
            return self.constants[0] <= 0 <= self.constants[1]
        if self.kind == "affine":
            return self.constants[1] == 0
        return self.kind not in _MOVE_ZERO and all(each.role not in ("shift", "less") for each in self.operands)

    def __str__(self) -> str:
        operands = (f"{role} per {per}" if per != ELEMENT else role for role, per, _ in self.operands)
        values = [*map(str, self.constants), *operands]
        values += [str(self.of)] if self.kind in _OF_VALUES else []
        return f"{self.kind}({', '.join(values)})" if values else self.kind


@dataclass(frozen=True)
class Epilogue:
    """The operations on every output, in order; none by default.

    ``channels``: the layer's, a kernel's constant if operands are per sample. ``channel_parts``: number of a kernel's
    channels that are one channel of the layer, if the layer is computed as another one: neighbouring channels, or with
    ``channels_inner`` channels that are ``channels`` apart.
    """

    operations: tuple[Operation, ...] = ()
    channels: int = 0
    channel_parts: int = 1
    channels_inner: bool = False

    def __post_init__(self) -> None:
        for place, operation in enumerate(self.operations):
            if operation.kind in _OF_VALUES and not 0 <= operation.of <= place:
                raise ValueError(f"operation {place} cannot read value {operation.of}: there are {place + 1}")
        if len([None for operation in self.operations if operation.kind in OF_PIXELS]) > 1:
            raise ValueError(f"an epilogue has one of {', '.join(OF_PIXELS)} at most")

    def __bool__(self) -> bool:
        return bool(self.operations)

    def then(self, later: Epilogue) -> Epilogue:
        """The operations, then ``later``'s, whose values are counted from there on."""
        count = len(self.operations)
        moved = (replace(each, of=each.of + count) if each.kind in _OF_VALUES else each for each in later.operations)
        return replace(self, operations=(*self.operations, *moved))

    @property
    def named_operands(self) -> dict[str, Operand]:
        """All operands in order, by their names in programs and kernels."""
        return {
            f"{operand.role}_{place}": operand
            for place, operation in enumerate(self.operations)
            for operand in operation.operands
        }

    @property
    def per_sample(self) -> bool:
        """Whether an operand differs between samples."""
        return any(operand.per == SAMPLE for operand in self.named_operands.values())

    @property
    def normalizes(self) -> bool:
        """Whether an operation reads all channels of a pixel."""
        return any(operation.kind in OF_PIXELS for operation in self.operations)

    @property
    def is_per_channel(self) -> bool:
        """Whether it may be a prologue: its results depend on the value and its channel only."""
        per = {operand.per for operand in self.named_operands.values()}
        return not self.normalizes and per <= {ONE, CHANNEL}

    @property
    def keeps_zero(self) -> bool:
        """Whether zero stays zero."""
        return all(operation.keeps_zero for operation in self.operations)

    @property
    def planned(self) -> Epilogue:
        """The epilogue as plans know it: only whether it `normalizes`."""
        return NORMALIZING if self.normalizes else NONE

    @property
    def residuals(self) -> tuple[str, ...]:
        """The names of the operands that have an element for each output."""
        return tuple(name for name, operand in self.named_operands.items() if operand.per == ELEMENT)

    def __str__(self) -> str:
        return " → ".join(map(str, self.operations))


#: No operation: an output is its sum and its bias.
NONE = Epilogue()
#: Stands in plans for all epilogues that `Epilogue.normalizes`.
NORMALIZING = Epilogue((Operation("layer_norm", (0.0,)),))


def of_input(name: str) -> str:
    """The name, in programs and kernels, of a prologue's operand ``name``."""
    return f"input_{name}"


def encoded(epilogue: Epilogue, prologue: Epilogue = NONE, symbols: bool = False) -> str:
    """The operations as text for an operator of PyTorch, a prologue's first.

    Dynamo traces this function, with numbers that may be symbols.
    """
    behind = ";".join([_encoded(operation, symbols) for operation in epilogue.operations])
    before = ";".join([_encoded(operation, symbols) for operation in prologue.operations])
    return f"{before}|{behind}" if before else behind


def _encoded(operation: Operation, symbols: bool) -> str:
    # Only `__float__` makes a constant of a symbol of Dynamo.
    constants = ",".join([str(each.__float__() if symbols else each) for each in operation.constants])
    operands = ",".join([f"{role} {per} {'wide' if wide else ''}" for role, per, wide in operation.operands])
    return f"{operation.kind}:{constants}:{operands}:{operation.of}"


@lru_cache(maxsize=1024)
def decoded(text: str) -> tuple[Epilogue, Epilogue]:
    """The epilogue and the prologue of a text from `encoded`."""
    before, _, behind = text.rpartition("|")
    return _decoded(behind), _decoded(before)


def _decoded(text: str) -> Epilogue:
    operations = []
    for each in text.split(";") if text else ():
        kind, constants, operands, of = each.split(":")
        described = (operand.split(" ") for operand in operands.split(",") if operand)
        operations.append(
            Operation(
                kind,
                tuple(float(constant) for constant in constants.split(",") if constant),
                tuple(Operand(role, per, bool(wide)) for role, per, wide in described),
                int(of),
            )
        )
    return Epilogue(tuple(operations))
