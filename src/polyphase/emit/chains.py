"""What an emitted file has besides `polyphase.emit.support` where layers compute what follows them.

It keeps the rules of `polyphase.emit.support`: Python 3.8, PyTorch 1.13, nothing caught, no imports in functions.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyphase.emit.support import (
    LAYERS,
    MOST_CALLS,
    Call,
    Layer,
    arch_of,
    call_of,
    check,
    constants,
    execute,
    find_kernel,
    memory_format,
    run,
)
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, ELEMENT, ONE, SAMPLE, Operand
from polyphase.problem.layouts import ALIGNMENT, Layouts
from polyphase.problem.reduction import Reduction
from polyphase.program.epilogue import with_epilogue
from polyphase.program.program import Program
from polyphase.program.reduction import MOST_ELEMENTS, program_of
from polyphase.program.step import SRC


class Chain(Layer):
    """A layer and the epilogue of its problem; it has a choice for the forward pass alone."""

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, arch: str, device: DeviceInfo, layouts: Layouts
    ) -> Program:
        """What computes a call of these sizes, the epilogue in the step that writes the output."""
        given = replace(problem, epilogue=self.problem.epilogue)
        return with_epilogue(super().program(problem, pass_, arch, device, layouts), given, problem, layouts)


@dataclass(frozen=True)
class Tail:
    """Poolings, reductions and norms behind a layer and its epilogue, each of ``parts`` a program of its own.

    ``source`` is the shape that the first reads, ``result`` that of the last one's result, ``operands`` those of what
    the parts read, in the order of `Reduction.named_operands`; all at the size of the model's inputs. ``any_batch``:
    whether it is the same for another number of samples.
    """

    dtype: str
    source: tuple[int, ...]
    parts: tuple[Reduction, ...]
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    any_batch: bool


TAILS: list[Tail] = []  # filled in when a file is emitted


def runs_in_inference(model: Any, structure: str) -> bool:
    """Whether nothing records what a model computes, or sees what is computed within it, and it is in one mode.

    Also whether it still has the ``structure`` with which it was traced.
    """
    if torch.is_grad_enabled() or torch.is_autocast_enabled():
        return False
    everywhere = torch.nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    seen = any(
        module._forward_hooks or module._forward_pre_hooks or module.training != model.training
        for module in model.modules()
    )
    return not seen and structure_of(model) == structure


def structure_of(model: Any) -> str:
    """A digest of the names and classes of a model's modules, and of which tensors these have."""
    lines = []
    for name, module in model.named_modules():
        tensors = (*module._parameters.items(), *module._buffers.items())
        there = ", ".join(key for key, tensor in tensors if tensor is not None)
        kind: Any = type(module).__base__ if hasattr(module, "emitted_layer") else type(module)
        lines.append(f"{name}: {kind.__name__ if name else ''} {there} {'forward' in module.__dict__}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def run_chain(number: int, module: Any, input: torch.Tensor, operands: list[torch.Tensor]) -> torch.Tensor | None:
    """Layer ``number`` and its epilogue, of tensors that are read as the model's functions read them.

    None where the epilogue does not compute it of tensors like these (a single image, another shape or dtype), or of
    another layer.
    """
    problem = LAYERS[number].problem
    if not (isinstance(input, torch.Tensor) and all(isinstance(each, torch.Tensor) for each in operands)):
        return None
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
        tensors[name] = as_read(operand, tensor, dense)
    input, weight = input.contiguous(memory_format=dense), module.weight.contiguous(memory_format=dense)
    bias = None if module.bias is None else module.bias.contiguous()
    return run(Pass.FORWARD, number, tuple(input.shape), extra, input, weight, bias, tensors)


def as_read(operand: Operand, tensor: torch.Tensor, dense: torch.memory_format) -> torch.Tensor:
    """The tensor of an operand as kernels read it: ``dense`` and aligned where it has an element for each result."""
    if operand.per != ELEMENT:
        return tensor.contiguous()
    tensor = tensor.contiguous(memory_format=dense)
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


_calls_of_tails: dict[tuple[Any, ...], list[Call]] = {}  # none where kernels are missing


def run_tail(number: int, value: torch.Tensor, operands: list[torch.Tensor]) -> torch.Tensor | None:
    """What follows a layer, of the ``value`` that its kernel computed.

    None where the file has no kernels for tensors like these: of another size than the model's inputs give (but for the
    batch, on which few kernels depend), dtype or memory format.
    """
    tail = TAILS[number]
    wanted = getattr(torch, tail.dtype), value.device
    if not all(isinstance(each, torch.Tensor) and (each.dtype, each.device) == wanted for each in (value, *operands)):
        return None
    batch = value.shape[0]
    if tuple(value.shape[1:]) != tail.source[1:] or not (tail.any_batch or batch == tail.source[0]):
        return None
    if not value.is_contiguous() or value.data_ptr() % ALIGNMENT:
        return None
    named = [each for part in tail.parts for each in part.named_operands.items()]
    for (_, operand), tensor, shape in zip(named, operands, tail.operands):
        if tuple(tensor.shape) != ((batch, *shape[1:]) if operand.per in (ELEMENT, SAMPLE) else shape):
            return None
    key = (number, batch, value.device)
    if key not in _calls_of_tails:
        if len(_calls_of_tails) >= MOST_CALLS:
            _calls_of_tails.clear()
        _calls_of_tails[key] = calls_of(tail, batch, arch_of(value.device))
    dense = torch.contiguous_format
    read = iter([(name, as_read(operand, each, dense)) for (name, operand), each in zip(named, operands)])
    for part, call in zip(tail.parts, _calls_of_tails[key]):
        value = execute(call, {SRC: value, **dict(itertools.islice(read, len(part.named_operands)))}, value)
    return value.view(batch, *tail.result[1:]) if _calls_of_tails[key] else None


def calls_of(tail: Tail, batch: int, arch: str) -> list[Call]:
    """What computes a layer's tail of ``batch`` samples; nothing if the file lacks a kernel of it."""
    parts = [replace(part, shape=(batch, *part.shape[1:])) for part in tail.parts]
    if not all(0 < math.prod(part.shape) <= MOST_ELEMENTS for part in parts):
        return []
    programs = [program_of(part, tail.dtype) for part in parts]
    if any(find_kernel(arch, step.source) is None for program in programs for step in program.steps):
        return []
    dense = torch.contiguous_format
    return [call_of(arch, program, part.output_shape, dense) for part, program in zip(parts, programs)]


def reads_alike(operand: Operand, shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Whether PyTorch's operation on an output of ``size`` reads a tensor of ``shape`` as the epilogue does."""
    if operand.per == ELEMENT:
        return shape == size
    channels = 1 if operand.per == ONE else size[1]
    if operand.role not in ("scale", "shift"):  # of norms and prelu, which count channels from their first element
        return shape == (channels,) or (operand.per == ONE and shape == ())
    samples = 1 if operand.per in (ONE, CHANNEL) else size[0]
    return (1,) * (len(size) - len(shape)) + shape == (samples, channels) + (1,) * (len(size) - 2)
