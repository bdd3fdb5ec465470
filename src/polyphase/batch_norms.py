"""Batch and instance norms in training after a layer, with the activation after them, in their own kernels.

PyTorch's batch norm and activation read and write tensors of the layer's output size five times forward and eight
times backward; these kernels do so three and five times. Forward, one kernel computes the moments, and one the norm
with its activation; backward, one the sums, and one the gradient. Values between norm and activation are not in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from polyphase import fused
from polyphase.current import current_device, current_stream
from polyphase.module_steps import step_of_module
from polyphase.pending import Marked, Pending, Waiting
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import Operation
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import ALIGNMENT
from polyphase.program.batch_norm import BUFFERS, GRADIENTS, BatchNorm, programs_of
from polyphase.program.reduction import MOST_ELEMENTS
from polyphase.torch_op import epilogue
from polyphase.torch_op.operators import is_plain
from polyphase.torch_op.validate import FLOATING
from polyphase.versions import check_versions, versions_of

_BATCH = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_INSTANCE = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)
_PLACES = {name: place for place, name in enumerate(BUFFERS)}


def given_by(chain: Any, module: Any, x: Any) -> Tensor | None:
    """The result of a norm of a chain (`polyphase.chain.Chain`) in training: if an activation after it is computed with
    it, the object that this module passes on. None if the norm module computes itself.

    Every line is host time of every call: whatever depends only on types is in `_prepared`.
    """
    if torch.compiler.is_compiling() or "running_mean" not in module._buffers:
        return None
    if type(x) is not Tensor or x.is_neg():
        return None
    if torch._C._is_tracing() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if torch._C._len_torch_dispatch_stack():  # modes that follow or count the dispatcher's calls see no launches
        return None
    if x.dim() != len(chain.layer.stride) + 2:
        return None
    behind = _behind((*chain.modules, *chain.then), module)
    step = step_of_module(behind[0]) if behind else None
    if step is not None and step.kind not in GRADIENTS:
        step = None
    prepared = _prepared(module, x, step)
    if prepared is None or not chain.is_whole():
        return None
    records = step is not None and torch.is_grad_enabled()
    result, alone = _run(module, x, prepared, records)
    if step is None:
        return result
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    given: list[int] = []

    def computed(steps: Sequence[fused.Step | None], out: Tensor | None = None) -> Tensor:
        """The norm with its activation; without, if it is read before the activation is called."""
        if steps and not given:
            given.append(result._version)
            return result
        if steps and given[0] == result._version:  # the activation is called again
            return result.clone()
        check_versions(reads, (), versions)
        v = _normalized(prepared.norm, x, weight, bias)
        return _activated(prepared.norm, v) if steps else v

    reads = (x,) if weight is None else (x, weight, bias)
    versions = versions_of(reads)
    waiting = Waiting(computed, (), behind, lambda: tuple(x.shape), x.dtype, x.device, records, alone)
    if records:
        return Pending.of(waiting, [], [])
    # A reentrant checkpoint may get the norm's result, and needs a tensor.
    return Marked.of(result, waiting, (step,))


def _behind(parts: Sequence[Any], norm: Any) -> Sequence[Any]:
    """The module after a norm, or none."""
    for place, part in enumerate(parts):
        if part is norm:
            behind = parts[place + 1 : place + 2]
            return () if behind and type(behind[0]) is str else behind
    return ()


def _prepared(module: Any, x: Tensor, step: fused.Step | None) -> Prepared | None:
    """The `Prepared` of a norm with an activation, cached; None if no kernel computes it."""
    own = (*module._buffers.values(), *module._parameters.values())
    about = tuple([each is None or (type(each), each.dtype, each.numel(), each.is_contiguous(), each.get_device())
                   for each in own])  # fmt: skip
    aligned = x.data_ptr() % ALIGNMENT == 0
    key = (type(module), x.shape, x.dtype, x.get_device(), x.is_contiguous(), aligned, about, module.eps,
           module.momentum, module.track_running_stats, step)  # fmt: skip
    known: Prepared | None = _PREPARED.get(key, _UNKNOWN)  # another thread may empty it between two look-ups
    if known is not _UNKNOWN:
        return known
    if len(_PREPARED) >= _MOST_PREPARED:
        _PREPARED.clear()
    prepared, shape = None, _shape(module, x)
    if shape and is_on_gpu(x) and x.dtype in FLOATING and _fits(module, x):
        activation = None if step is None else Operation(step.kind, step.constants)
        wide = module.running_mean is not None and module.running_mean.dtype != x.dtype
        prepared = Prepared(BatchNorm(shape, module.eps, module.momentum or 0.0, activation, wide), x, aligned)
    _PREPARED[key] = prepared
    return prepared


def _shape(module: Any, x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor as a batch norm's, whose channels are normalised; empty if a module is not supported.

    A batch norm must average the statistics of batches with a fixed momentum. An instance norm must have neither
    statistics nor parameters: each channel of an image counts as a channel of a single image.
    """
    kind = type(module)._stands_for
    shape: tuple[int, ...] = ()
    averages = module.running_mean is not None and module.track_running_stats
    if kind in _BATCH and averages and module.momentum is not None:
        shape = tuple(x.shape)
    elif kind in _INSTANCE and module.running_mean is None and module.weight is None:
        shape = (1, x.shape[0] * x.shape[1], *x.shape[2:])
    # With one value per channel PyTorch raises an error.
    return shape if shape and shape[1] < x.numel() <= MOST_ELEMENTS else ()


def _fits(module: Any, x: Tensor) -> bool:
    """Whether a tensor is dense and has the norm's channels, and the norm's own tensors are of the same kind."""
    module._check_input_dim(x)
    if not {"weight", "bias"} <= module._parameters.keys():  # computed at every call by a parametrization
        return False
    if not x.is_contiguous() or x.shape[1] != module.num_features or (module.weight is None) != (module.bias is None):
        return False
    kind = x.dtype if module.running_mean is None else module.running_mean.dtype
    if kind != x.dtype and (kind != torch.float32 or x.dtype == torch.float64):
        return False
    own = [each for each in (module.running_mean, module.running_var, module.weight, module.bias) if each is not None]
    plain = all(type(each) in (Tensor, torch.nn.Parameter) and each.is_contiguous() for each in own)
    plain = plain and all(each.numel() == module.num_features for each in own)
    return plain and all(each.dtype == kind and each.device == x.device for each in own)


def is_on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU for which kernels can be compiled."""
    return x.is_cuda and torch.version.cuda is not None


def _run(module: Any, x: Tensor, prepared: Prepared, waits: bool) -> tuple[Tensor, Tensor | None]:
    """The two results of `_Function`, or its one and None; updates the running statistics, as the module does."""
    buffers, parameters = module._buffers, module._parameters
    if (count := buffers.get("num_batches_tracked")) is not None:
        count.add_(1)
    mean, variance = buffers.get("running_mean"), buffers.get("running_var")
    apply: Callable[..., Any] = _Function.apply
    found = apply(x, parameters["weight"], parameters["bias"], mean, variance, prepared, waits)
    return found if waits else (found, None)


class Prepared:
    """A norm for tensors of one layout: its programs, each compiled at its first call.

    The kernels' scratch memory is one tensor: means, factors and partial results.
    """

    def __init__(self, norm: BatchNorm, like: Tensor, aligned: bool) -> None:
        self.norm = norm
        self._index, self._aligned = like.get_device(), aligned
        self.programs = programs_of(norm, str(like.dtype).removeprefix("torch."), aligned)
        self._executables: list[Any] = [None, None]
        self._stats_bytes = round_up(2 * norm.shape[1] * (8 if like.dtype == torch.float64 else 4), ALIGNMENT)
        self._bytes = self._stats_bytes + self.programs[0].buffers[0].bytes

    def forward(self, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any) -> tuple[Tensor, Tensor]:
        """The result, and the scratch memory for `backward`."""
        result, scratch = torch.empty_like(x), torch.empty(self._bytes, dtype=torch.uint8, device=x.device)
        self._launch(0, (x, None, weight, bias, mean, variance), scratch, (None, None, result))
        return result, scratch

    def backward(self, x: Tensor, grad: Tensor, weight: Any, bias: Any, scratch: Tensor) -> tuple[Any, Any, Any]:
        """The gradients. Hooks of saved tensors may restore these with other strides and alignment."""
        x, grad = self._as_read(x), self._as_read(grad)
        if scratch.data_ptr() % ALIGNMENT:
            scratch = scratch.clone()
        result = torch.empty_like(x)
        of_weight, of_bias = (None, None) if weight is None else (torch.empty_like(weight), torch.empty_like(bias))
        self._launch(1, (x, grad, weight, bias, None, None), scratch, (of_weight, of_bias, result))
        return result, of_weight, of_bias

    def _as_read(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        return tensor.clone() if self._aligned and tensor.data_ptr() % ALIGNMENT else tensor

    def _launch(self, way: int, reads: Sequence[Any], scratch: Tensor, writes: Sequence[Any]) -> None:
        """Launches forward (0) or backward (1), with tensors in the order of `BUFFERS`."""
        if current_device() != self._index:
            with torch.cuda.device(self._index):
                return self._launch(way, reads, scratch, writes)
        executable = self._executables[way]
        if executable is None:
            from polyphase.jit.launcher import Executable

            arch = DeviceInfo.of(scratch.device).arch
            executable = self._executables[way] = Executable(self.programs[way], arch, self._index, _PLACES)
        stats = scratch.data_ptr()
        addresses = [0 if each is None else each.data_ptr() for each in reads]
        addresses += (stats + self._stats_bytes, stats)
        addresses += [0 if each is None else each.data_ptr() for each in writes]
        executable(current_stream(self._index), addresses)
        return None


_PREPARED: dict[Any, Prepared | None] = {}
_UNKNOWN: Any = object()
_MOST_PREPARED = 1024


class _Function(torch.autograd.Function):
    """The norm and its activation, differentiable any number of times."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, of: Prepared, waits: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Two launches; ``mean`` and ``variance`` change. ``waits``: returns also a tensor in place of the norm."""
        result, scratch = of.forward(x, weight, bias, mean, variance)
        if mean is not None:
            torch.autograd.graph.increment_version(mean)
            torch.autograd.graph.increment_version(variance)
        ctx.of = of
        ctx.save_for_backward(x, weight, bias, scratch)
        ctx.set_materialize_grads(False)
        return (result, result.detach()) if waits else result  # to compilers, with the strides of the norm's result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_norm: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Two launches; tensor operations if derivatives of the gradients or several gradients at once are needed.

        ``of_norm``: a further gradient of the norm's own result.
        """
        if grad is None and of_norm is None:
            return (None,) * 7
        x, weight, bias, scratch = ctx.saved_tensors
        if grad is None or of_norm is not None or torch.is_grad_enabled() or not is_plain(grad):
            return _differentiable(ctx.of.norm, (x, weight, bias), (grad, of_norm), ctx.needs_input_grad[:3])
        return (*ctx.of.backward(x, grad, weight, bias, scratch), None, None, None, None)


def _normalized(norm: BatchNorm, x: Tensor, weight: Any, bias: Any) -> Tensor:
    """The norm by PyTorch's function, without running statistics."""
    v = F.batch_norm(x.reshape(norm.shape), None, None, weight, bias, True, 0.0, norm.epsilon)
    return v.reshape(x.shape)


def _activated(norm: BatchNorm, v: Tensor) -> Tensor:
    """The activation after the norm by PyTorch's function, with the module's derivative at discontinuities."""
    if norm.activation is None:
        return v
    if norm.activation.kind == "clamp":
        least, most = norm.activation.constants
        return F.hardtanh(v, least, most)
    return epilogue.apply(norm.activation, 0, lambda place: v, {})


def _differentiable(
    norm: BatchNorm, tensors: Sequence[Tensor | None], grads: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients, which are differentiable; ``grads``: of the activation's and of the norm's result.

    They are taken with respect to views, so that hooks of the tensors are not called a second time here.
    """
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        x, weight, bias = tensors = [None if each is None else each.view_as(each) for each in tensors]
        for each, wanted in zip(tensors, needed):
            if wanted and each is not None and not each.requires_grad:  # it has been frozen since
                each.requires_grad_()
        assert x is not None
        v = _normalized(norm, x, weight, bias)
        results = [(each, grad) for each, grad in zip((_activated(norm, v), v), grads) if grad is not None]
    asked = [each for each, wanted in zip(tensors, needed) if wanted and each is not None]
    outputs, given = [each for each, _ in results], [grad for _, grad in results]
    found = iter(torch.autograd.grad(outputs, asked, given, create_graph=recorded))
    gradients = [next(found) if wanted and each is not None else None for each, wanted in zip(tensors, needed)]
    return (*gradients, None, None, None, None)
