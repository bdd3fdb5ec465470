"""``polyphase::conv_transpose_into``: a layer with prologue and epilogue that writes its output to an existing tensor.

Inductor's generated code calls it (`polyphase.inductor`), if a layer writes its slice of a concatenation. It is for no
other use: it has no derivatives, and checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyphase.problem.epilogue import decoded
from polyphase.torch_op import epilogue, into
from polyphase.torch_op.operators import CONSTANTS, LIBRARY, conv_transpose
from polyphase.torch_op.validate import FLOATING, Layer

#: The operator's name. An overload of a layer's operator would count for PyTorch as its variant with ``out=``.
NAME = "conv_transpose_into"


def arguments_of(operator: Callable[..., Tensor], given: Sequence[Any]) -> list[Any]:
    """The operator's arguments except ``out``, from those of ``conv_transpose`` or ``conv_transpose_epilogue``."""
    return [*given[:3], [], "", *given[3:]] if operator is conv_transpose else [*given]


def _portably(*arguments: Any, out: Tensor) -> None:
    into.copy_to_slice(epilogue.conv_transpose_epilogue(*arguments), out)


def _on_cuda(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    text: str,
    *constants: Any,
    out: Tensor,
) -> None:
    """The operator for CUDA tensors: by kernels that write to ``out`` themselves, if they can."""
    if input.numel() == 0 or input.dtype not in FLOATING:
        _portably(input, weight, bias, operands, text, *constants, out=out)
        return
    if decoded(text)[1]:
        input = epilogue.separate(input)
    constants = tuple(tuple(each) if isinstance(each, list) else each for each in constants)
    layer = Layer(tuple(weight.shape[2:]), *constants)
    free = into.is_free(out, (input, weight, bias, *operands))
    call = into.call_for(out, (input, weight, bias), text, layer) if free else None
    if call is None:
        _portably(input, weight, bias, operands, text, *constants, out=out)
    else:
        call(input, weight, bias, operands, out)


LIBRARY.define(
    f"{NAME}(Tensor input, Tensor weight, Tensor? bias, Tensor[] operands, str epilogue, {CONSTANTS}, *, "
    "Tensor(a!) out) -> ()"
)
LIBRARY.impl(NAME, _portably, "CompositeExplicitAutograd")
if torch.version.cuda is not None:
    LIBRARY.impl(NAME, _on_cuda, "CUDA")
