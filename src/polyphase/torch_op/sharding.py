"""Sharding strategies for DTensors in each pass, one mesh dimension at a time.

Images are independent; so are output channels if there is one group. The sum over input channels, or over images for
the gradient of the weight, may be split over processes (``Partial``). Groups are not sharded: a process would have to
know its number of groups.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

#: Dimensions of operands and results as letters: images (n), input channels (i), output channels (o).
_TENSORS = {"x": "ni", "w": "io", "b": "o", "g": "no"}


@functools.cache
def give_strategies() -> None:
    """Registers the operators with `torch.distributed.tensor`, which it imports."""
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # PyTorch before 2.6
        return
    for name, result, operands in (
        ("conv_transpose", "g", "xwb"),
        ("conv_transpose_input_grad", "x", "gw"),
        ("conv_transpose_weight_grad", "w", "xg"),
    ):
        operator = getattr(torch.ops.polyphase, name).default
        register_sharding(operator)(_strategy(result, operands))
        # All constants decide the shape of the result. By default PyTorch assumes that lists of them do not.
        known = RuntimeSchemaInfo(len(operands), needs_pytree=True)
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[operator] = known


#: Whether PyTorch's DTensors have a public name; in 2.4 they do not, and Dynamo may fail at the function marked below.
DTENSORS = torch.__version__ >= "2.5"


def know_dtensors() -> bool:
    """Registers the strategies if DTensors are in use; Dynamo calls it at trace time, without tracing it."""
    if "torch.distributed.tensor" in sys.modules:
        give_strategies()
    return True


# As `torch.compiler.assume_constant_result` does, without importing Dynamo.
know_dtensors._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _strategy(result: str, operands: str) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """The placements of a pass's operands, each with that of its result, in the form of ``register_sharding``."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def strategy(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        has_bias = operands == "xwb" and arguments[2] is not None
        names = operands if has_bias or operands != "xwb" else "xw"
        constants = [None] * (len(arguments) - len(names))
        found: list[tuple[list[Any], list[Any]]] = [([Replicate()], [Replicate()] * len(names) + constants)]
        for letter in "nio" if arguments[-1] == 1 else "n":
            summed = letter not in _TENSORS[result]
            if summed and has_bias:  # each process would add it
                continue
            placements = [Partial() if summed else Shard(_TENSORS[result].index(letter))]
            needed = [
                Shard(_TENSORS[name].index(letter)) if letter in _TENSORS[name] else Replicate() for name in names
            ]
            found.append((placements, needed + constants))
        return found

    return strategy
