"""Batch norms in training behind a layer, with the activation behind them, by kernels of their own.

A batch norm and an activation of PyTorch's read and write the layer's output in passes of their own, five forward and
eight backward. Here it is three and five: of the layer's output the moments, then norm and activation at once; of the
gradient the sums, then that of the layer's output. What lies between norm and activation is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from polyphase import fused
from polyphase.module_steps import step_of_module
from polyphase.pending import Marked, Waiting
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import Operation
from polyphase.problem.layouts import ALIGNMENT
from polyphase.problem.problem import accumulator_bytes
from polyphase.program.batch_norm import BUFFERS, GRADIENTS, BatchNorm, programs_of
from polyphase.program.reduction import MOST_ELEMENTS
from polyphase.program.step import PARTIALS
from polyphase.torch_op import epilogue
from polyphase.torch_op.validate import FLOATING

_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_PLACES = {name: place for place, name in enumerate(BUFFERS)}


def given_by(chain: Any, module: Any, x: Any) -> Tensor | None:
    """What a batch norm of a chain (`polyphase.fuse.Chain`) gives in training: where an activation is behind it that
    is computed with it, what this module passes on. None where the norm computes for itself.
    """
    if torch.compiler.is_compiling() or not _is_norm(module) or not _has_kernels(module, x) or not chain.is_whole():
        return None
    module._check_input_dim(x)
    place = next((place for place, each in enumerate(chain.modules) if each is module), len(chain.modules))
    behind = chain.modules[place + 1 : place + 2]
    step = step_of_module(behind[0]) if behind else None
    if step is None or step.kind not in GRADIENTS:
        return _run(module, x, None)
    weight, bias, epsilon = module.weight, module.bias, module.eps

    def alone(steps: Sequence[fused.Step | None], out: Tensor | None = None) -> Tensor:
        """The norm, whose statistics have been counted already."""
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, epsilon)

    reads = [each for each in (x, weight, bias) if each is not None]
    waiting = Waiting(alone, reads, behind, lambda: tuple(x.shape), x.dtype, x.device)
    return Marked.of(_run(module, x, step), waiting, (step,))


def _is_norm(module: Any) -> bool:
    """Whether a module is a batch norm in training that averages the statistics of batches, with a fixed share."""
    kind = type(module)
    own = getattr(kind, "_stands_for", kind) in _NORMS
    return own and bool(module.training) and module.running_mean is not None and module.momentum is not None


def _has_kernels(module: Any, x: Any) -> bool:
    """Whether kernels compute a norm of a tensor: of one that is dense, with channels, on a GPU."""
    if type(x) is not Tensor or not is_on_gpu(x) or x.dtype not in FLOATING:
        return False
    if torch._C._is_tracing() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if not x.is_contiguous() or x.dim() < 2 or x.shape[1] != module.num_features:
        return False
    if not x.shape[1] < x.numel() <= MOST_ELEMENTS:  # one value a channel is PyTorch's error
        return False
    kind, device = module.running_mean.dtype, x.device
    own = [module.running_mean, module.running_var, *(each for each in _affine(module) if each is not None)]
    alike = all(type(each) in (Tensor, torch.nn.Parameter) and each.is_contiguous() for each in own)
    alike &= all(each.dtype == kind and each.device == device for each in own)
    return alike and (kind == x.dtype or (kind == torch.float32 and accumulator_bytes(_name(x)) == 4))


def is_on_gpu(x: Tensor) -> bool:
    """Whether it is on a GPU for which kernels can be compiled."""
    return x.is_cuda and torch.version.cuda is not None


def _run(module: Any, x: Tensor, step: fused.Step | None) -> Tensor:
    """What a norm and the activation behind it give; moves the running statistics, as the module does."""
    activation = None if step is None else Operation(step.kind, step.constants)
    wide = module.running_mean.dtype != x.dtype
    norm = BatchNorm(tuple(x.shape), module.eps, module.momentum, activation, wide)
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    apply: Callable[..., Tensor] = _Function.apply
    return apply(x, *_affine(module), module.running_mean, module.running_var, norm)


def _affine(module: Any) -> tuple[Tensor | None, Tensor | None]:
    return module.weight, module.bias


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


class _Function(torch.autograd.Function):
    """The norm and its activation, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, norm: BatchNorm) -> Tensor:
        """Two launches; ``mean`` and ``variance`` are changed."""
        result = torch.empty_like(x)
        stats = x.new_empty(2 * x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        given = {"x": x, "weight": weight, "bias": bias, "running_mean": mean, "running_variance": variance}
        compute(0, norm, {**given, "stats": stats, "dst": result})
        for each in (mean, variance):
            torch.autograd.graph.increment_version(each)
        ctx.norm = norm
        ctx.save_for_backward(x, weight, bias, stats)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Two launches; tensor operations where derivatives of it are asked for."""
        x, weight, bias, stats = ctx.saved_tensors
        norm: BatchNorm = ctx.norm
        if torch.is_grad_enabled():
            return _differentiable(norm, (x, weight, bias), grad, ctx.needs_input_grad[:3])
        result = torch.empty_like(x)
        of_weight, of_bias = (None if each is None else torch.empty_like(each) for each in (weight, bias))
        given = {"x": x, "grad": grad.contiguous(), "weight": weight, "bias": bias, "stats": stats}
        compute(1, norm, {**given, "of_weight": of_weight, "of_bias": of_bias, "dst": result})
        return result, of_weight, of_bias, None, None, None


def _differentiable(
    norm: BatchNorm, tensors: Sequence[Tensor | None], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients, with derivatives of their own."""
    x, weight, bias = tensors
    assert x is not None
    v = F.batch_norm(x, None, None, weight, bias, True, 0.0, norm.epsilon)
    y = v if norm.activation is None else epilogue.apply(norm.activation, 0, lambda place: v, {})
    asked = [each for each, wanted in zip(tensors, needed) if wanted and each is not None]
    found = iter(torch.autograd.grad(y, asked, grad, create_graph=True))
    gradients = [next(found) if wanted and each is not None else None for each, wanted in zip(tensors, needed)]
    return (*gradients, None, None, None)


_EXECUTABLES: dict[Any, tuple[Any, int]] = {}
_MOST_EXECUTABLES = 1024


def compute(way: int, norm: BatchNorm, of: dict[str, Tensor | None]) -> None:
    """Forward (0) or backward (1), of tensors by the names of `BUFFERS`."""
    x, grad = of["x"], of.get("grad")
    assert x is not None
    index = x.get_device()
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return compute(way, norm, of)
    aligned = x.data_ptr() % ALIGNMENT == 0 and (grad is None or grad.data_ptr() % ALIGNMENT == 0)
    key = (way, norm, x.dtype, index, aligned)
    found = _EXECUTABLES.get(key)
    if found is None:
        from polyphase.jit.launcher import Executable

        if len(_EXECUTABLES) >= _MOST_EXECUTABLES:
            _EXECUTABLES.clear()
        program = programs_of(norm, _name(x), aligned)[way]
        executable = Executable(program, DeviceInfo.of(x.device).arch, index, _PLACES)
        found = _EXECUTABLES[key] = executable, program.buffers[0].bytes
    executable, size = found
    of[PARTIALS] = torch.empty(size, dtype=torch.uint8, device=x.device)
    addresses = [0 if (each := of.get(name)) is None else each.data_ptr() for name in BUFFERS]
    executable(torch.cuda.current_stream(index).cuda_stream, addresses)
    return None
