"""Export to other tools: `to_aten`, and the nodes that ONNX's exporters find in an accelerated model.

Both translate a layer in a graph to operators that other tools support, when the user exports it. They run nothing, and
polyphase itself computes no layer this way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyphase.problem.epilogue import decoded
from polyphase.torch_op.derivatives import Operands, run_operator
from polyphase.torch_op.epilogue import behind_prologue, by_tensor_operations, split
from polyphase.torch_op.operators import input_grad_shape, weight_grad_shape
from polyphase.torch_op.validate import Layer

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def to_aten(program: ExportedProgram) -> ExportedProgram:
    """The program with PyTorch's operators instead of polyphase's, for TensorRT and other tools without custom ones.

    Args:
        program: the result of `torch.export.export` for a model with polyphase's layers.

    Returns:
        A program of the same values, by ``run_decompositions``: ``polyphase.conv_transpose`` is ``aten.convolution``,
        its gradients are ``aten.convolution_backward``, an epilogue is separate operations. Tools that run it call
        PyTorch's convolution, or their own.

    Raises:
        TypeError: ``program`` is something else, such as a module that was not exported.
    """
    from torch.export import ExportedProgram  # which takes time to import

    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"polyphase.to_aten takes what torch.export.export returns, not {type(program).__name__}: write "
            "polyphase.to_aten(torch.export.export(model, inputs))"
        )
    operators = torch.ops.polyphase
    translated: ExportedProgram = program.run_decompositions(
        {
            operators.conv_transpose.default: _forward,
            operators.conv_transpose_epilogue.default: _with_epilogue,
            operators.conv_transpose_input_grad.default: _input_grad,
            operators.conv_transpose_weight_grad.default: _weight_grad,
        }
    )
    return translated


def is_for_onnx() -> bool:
    """Whether one of ONNX's exporters is running."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and onnx.is_in_onnx_export()


def run_traced(operands: Operands, bias: Tensor | None, layer: Layer) -> Tensor:
    """A traced forward pass: the operator, except for ONNX, which has its own node for it."""
    input, weight, _ = operands
    if not is_for_onnx():
        return run_operator(operands, bias, layer)
    if torch._C._is_tracing():
        _register_symbolic()
        return run_operator(operands, bias, layer)
    assert input is not None
    assert weight is not None
    return _forward(input, weight, bias, *layer[1:])


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, *constants: Any) -> Tensor:
    result: Tensor = torch.ops.aten.convolution.default(input, weight, bias, *_in_atens_order(*constants))
    return result


def _with_epilogue(
    input: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor], text: str, *constants: Any
) -> Tensor:
    epilogue, prologue = decoded(text)
    before, behind = split(prologue, operands)
    sums = _forward(behind_prologue(prologue, before, input), weight, bias, *constants)
    return by_tensor_operations(epilogue, behind, sums).to(input.dtype)


def _input_grad(grad_output: Tensor, weight: Tensor, *constants: Any) -> Tensor:
    input = grad_output.new_empty(input_grad_shape(grad_output, weight, *constants))
    return _backward(grad_output, input, weight, constants, 0)


def _weight_grad(input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *constants: Any) -> Tensor:
    weight = input.new_empty(weight_grad_shape(input, grad_output, kernel_size, *constants))
    return _backward(grad_output, input, weight, constants, 1)


def _backward(grad_output: Tensor, input: Tensor, weight: Tensor, constants: Any, place: int) -> Tensor:
    """One of the gradients, the input's or the weight's."""
    rest = (None, *_in_atens_order(*constants), [place == 0, place == 1, False])
    result: Tensor = torch.ops.aten.convolution_backward.default(grad_output, input, weight, *rest)[place]
    return result


def _in_atens_order(
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Any, ...]:
    return stride, padding, dilation, True, output_padding, groups


@functools.cache
def _register_symbolic() -> None:
    """Makes the exporter of TorchScript graphs write ConvTranspose nodes."""
    from torch import onnx
    from torch.onnx import symbolic_helper

    @symbolic_helper.parse_args("v", "v", "v", "is", "is", "is", "is", "i")
    def conv_transpose(
        graph: torch.Graph,  # a class: before Python 3.11 the exporter fails at `Any`
        input: Any,
        weight: Any,
        bias: Any,
        stride: Sequence[int],
        padding: Sequence[int],
        output_padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Any:
        tensors = (input, weight) if symbolic_helper._is_none(bias) else (input, weight, bias)
        return graph.op(  # type: ignore[attr-defined]
            "ConvTranspose",
            *tensors,
            strides_i=stride,
            pads_i=[*padding, *padding],
            output_padding_i=output_padding,
            dilations_i=dilation,
            group_i=groups,
        )

    onnx.register_custom_op_symbolic("polyphase::conv_transpose", conv_transpose, 11)  # type: ignore[attr-defined]
