"""The operations of an epilogue or a prologue with their tensors, and as data (`polyphase.problem.epilogue`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyphase.problem.epilogue import CHANNEL, ELEMENT, ONE, SAMPLE, Epilogue, Operand, Operation
from polyphase.torch_op.validate import FLOATING


class Step(NamedTuple):
    """One operation of an epilogue or a prologue and its tensors; made by the functions below."""

    kind: str
    constants: tuple[float, ...] = ()
    tensors: tuple[tuple[str, Tensor], ...] = ()
    of: int = 0


def checked(
    name: str, steps: Sequence[Step], input: Tensor, shape: tuple[int, ...], batched: bool, which: str = "epilogue"
) -> Epilogue:
    """The epilogue, or the prologue, as data; ``shape``: of the output, or of the input.

    Raises:
        TypeError, RuntimeError, ValueError: as `conv_transpose1d` says.
    """
    if input.dtype not in FLOATING:
        raise RuntimeError(f"{name}: {which}s take a real floating-point input, got {input.dtype}")
    operations = []
    for place, step in enumerate(steps):
        described = []
        for role, tensor in step.tensors:
            what = f"{name}: {role} of {which}[{place}]"
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{what} must be a Tensor, not {type(tensor).__name__}")
            if role == "residual" and not batched:
                tensor = tensor.unsqueeze(0)
            per = _per(what, role, tensor, shape)
            described.append(Operand(role, per, _is_wide(what, per, tensor, input)))
        operations.append(Operation(step.kind, step.constants, tuple(described), step.of))
    found = Epilogue(tuple(operations))
    if which == "prologue" and not found.is_per_channel:
        raise ValueError(f"{name}: a prologue reads elements and their channels alone, not {found}")
    return found


def _per(what: str, role: str, tensor: Tensor, shape: tuple[int, ...]) -> str:
    """The kind of an operand by its number of elements: `ONE`, `CHANNEL`, `SAMPLE` or `ELEMENT`."""
    size = tuple(tensor.shape)
    if role == "residual":
        if size != shape:
            raise RuntimeError(f"{what} must have the output's shape {shape}, got {size}")
        return ELEMENT
    ones = (1,) * (len(shape) - 2)
    if size in ((shape[1],), (1, shape[1]), (1, shape[1], *ones)):
        return CHANNEL
    if size in ((), (1,)) and role in ("scale", "shift", "less", "slope", "alpha", "beta"):
        return ONE
    if size in (shape[:2], (*shape[:2], *ones)) and role in ("scale", "shift", "less"):
        return SAMPLE
    raise RuntimeError(f"{what} must have shape ({shape[1]},), one element for each channel, got {size}")


def _is_wide(what: str, per: str, tensor: Tensor, input: Tensor) -> bool:
    """Whether an operand is float32 with an input of a half type."""
    if tensor.device != input.device:
        raise RuntimeError(f"{what} must be on {input.device} as the input is, got {tensor.device}")
    if tensor.dtype == input.dtype:
        return False
    half = input.dtype in (torch.float16, torch.bfloat16)
    if half and tensor.dtype == torch.float32 and per != ELEMENT:
        return True
    allowed = f"{input.dtype} as the input has" + (" or float32" if half and per != ELEMENT else "")
    raise RuntimeError(f"{what} must have {allowed}, got {tensor.dtype}")
