"""What an emitted file has besides `polyphase.emit.support` where layers compute what follows them.

It keeps the rules of `polyphase.emit.support`: Python 3.8, PyTorch 1.13, nothing caught, no imports in functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyphase.emit.support import LAYERS, Layer, check, constants, memory_format, run
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, ELEMENT, ONE, Operand
from polyphase.problem.layouts import ALIGNMENT, Layouts
from polyphase.program.epilogue import with_epilogue
from polyphase.program.program import Program


class Chain(Layer):
    """A layer and the epilogue of its problem; it has a choice for the forward pass alone."""

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, arch: str, device: DeviceInfo, layouts: Layouts
    ) -> Program:
        """What computes a call of these sizes, the epilogue in the step that writes the output."""
        given = replace(problem, epilogue=self.problem.epilogue)
        return with_epilogue(super().program(problem, pass_, arch, device, layouts), given, problem, layouts)


def runs_in_inference(model: Any) -> bool:
    """Whether nothing records what a model computes, or sees what is computed within it, and it is in one mode."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled():
        return False
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    return not any(
        module._forward_hooks or module._forward_pre_hooks or module.training != model.training
        for module in model.modules()
    )


def run_chain(number: int, module: Any, input: torch.Tensor, operands: list[torch.Tensor]) -> torch.Tensor | None:
    """Layer ``number`` and its epilogue, of tensors that are read as the model's functions read them.

    None where the epilogue does not compute it of tensors like these (a single image, another shape or dtype), or of
    another layer.
    """
    problem = LAYERS[number].problem
    if input.dim() != problem.dims + 2 or constants(module) != constants(problem):
        return None
    check(module, input, problem)
    extra = tuple(module.output_padding)
    sizes = [axis.output_size(n, more) for axis, n, more in zip(problem.axes, input.shape[2:], extra)]
    size = (input.shape[0], problem.out_channels, *sizes)
    dense = memory_format(problem)
    tensors = {}
    for (name, operand), tensor in zip(problem.epilogue.named_operands.items(), operands):
        same = tensor.dtype == input.dtype and tensor.device == input.device
        if min(size[1:]) < 1 or not same or not reads_alike(operand, tuple(tensor.shape), size):
            return None
        tensor = tensor.contiguous(memory_format=dense) if operand.per == ELEMENT else tensor.contiguous()
        tensors[name] = tensor.clone() if operand.per == ELEMENT and tensor.data_ptr() % ALIGNMENT else tensor
    input, weight = input.contiguous(memory_format=dense), module.weight.contiguous(memory_format=dense)
    bias = None if module.bias is None else module.bias.contiguous()
    return run(Pass.FORWARD, number, tuple(input.shape), extra, input, weight, bias, tensors)


def reads_alike(operand: Operand, shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Whether PyTorch's operation on an output of ``size`` reads a tensor of ``shape`` as the epilogue does."""
    if operand.per == ELEMENT:
        return shape == size
    channels = 1 if operand.per == ONE else size[1]
    if operand.role not in ("scale", "shift"):  # of norms and prelu, which count channels from their first element
        return shape == (channels,) or (operand.per == ONE and shape == ())
    samples = 1 if operand.per in (ONE, CHANNEL) else size[0]
    return (1,) * (len(size) - len(shape)) + shape == (samples, channels) + (1,) * (len(size) - 2)
