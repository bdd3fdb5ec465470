"""Calls of `polyphase.fused`: checked once, then by one look-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from polyphase import crops, functional
from polyphase.export import is_for_onnx
from polyphase.problem.epilogue import NONE, Epilogue, encoded
from polyphase.torch_op import epilogue as operator
from polyphase.torch_op import into, operators
from polyphase.torch_op.call_cache import CallCache
from polyphase.torch_op.steps import Step, checked
from polyphase.torch_op.tf32 import tf32_allowed
from polyphase.torch_op.validate import FLOATING, Layer, check, check_sizes, output_size

_DYNAMO_HAS_SYMBOLS = torch.__version__ >= "2.5"  # for numbers of modules


def run(
    function: Callable[..., Tensor],
    dims: int,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    constants: tuple[Any, ...],
    steps: list[Step],
    before: list[Step],
    out: Tensor | None,
) -> Tensor:
    """Casts for autocast, checks, and runs. Every line here is host time of every call.

    ``function``: the public function that was called, of `polyphase.fused` or, with ``out``, of `functional`.
    """
    name, (input, weight, bias) = function.__name__, tensors
    given = [tensor for step in (*before, *steps) for _, tensor in step.tensors]
    tracing = torch.compiler.is_compiling() or torch._C._is_tracing()
    if not tracing and has_torch_function((input, weight, bias, out, *given)):
        return _overridden(function, tensors, constants, _named(steps, before, out), given)
    if not steps and not before and out is None:
        plain: Callable[..., Tensor] = getattr(functional, name)
        return plain(input, weight, bias, *constants)
    if torch._C._is_any_autocast_enabled():
        (input, weight, bias), before, steps = _cast(name, dims, tensors, before, steps)
        given = [tensor for step in (*before, *steps) for _, tensor in step.tensors]
    if before and not tracing:
        input = operator.separate(input)
    known = _known_of((name, dims, input, weight, bias, *constants), (before, steps), given, out, tracing)
    batch, operands = (input, given) if input.dim() == dims + 2 else _with_batch(input, (*before, *steps))
    if out is None:
        output = _run(known, operands, batch, weight, bias, tracing)
        return output if batch is input else output.squeeze(0)
    if tracing or torch.is_grad_enabled():
        into.check(name, out, (input, weight, bias, *given), known.layer, batch is input)
    if (call := _writer(known, out, (input, weight, bias, *given))) is not None:
        return into.written(call, out, (batch, weight, bias), operands)
    with torch.no_grad():
        return out.copy_(function(input, weight, bias, *constants, **_named(steps, before, None)))


def _cast(
    name: str, dims: int, tensors: tuple[Tensor, Tensor, Tensor | None], before: list[Step], steps: list[Step]
) -> tuple[tuple[Tensor, Tensor, Tensor | None], list[Step], list[Step]]:
    """A call under autocast. If autocast casts the input, the prologue is computed before, and its result cast."""
    input, weight, bias = tensors
    if before and functional.autocast_dtype(input) not in (None, input.dtype):
        batch = input if input.dim() == dims + 2 else input.unsqueeze(0)
        prologue = checked(name, before, batch, tuple(batch.shape), True, "prologue")
        with torch.autocast(input.device.type, enabled=False):
            read = operator.behind_prologue(prologue, [each for step in before for _, each in step.tensors], batch)
        input, before = read if batch is input else read.squeeze(0), []
    bias = None if bias is None else functional.autocast(bias)
    # A residual is cast like the input; operands for each channel keep their dtype.
    cast = [
        step._replace(
            tensors=tuple(
                (role, functional.autocast(each) if role == "residual" else each) for role, each in step.tensors
            )
        )
        for step in steps
    ]
    return (functional.autocast(input), functional.autocast(weight), bias), before, cast


def _overridden(
    function: Callable[..., Tensor],
    tensors: tuple[Tensor, Tensor, Tensor | None],
    constants: tuple[Any, ...],
    named: dict[str, Any],
    given: list[Tensor],
) -> Tensor:
    """The result of the call by ``__torch_function__`` of one of the tensors."""
    relevant = (*tensors, named.get("out"), *given)
    result: Tensor = handle_torch_function(function, relevant, *tensors, *constants, **named)
    return result


def _writer(known: _Known, out: Tensor, read: tuple[Tensor | None, ...]) -> Callable[..., Tensor] | None:
    """The call that writes to ``out`` itself; None if kernels may not."""
    if known.call is None or forward_ad._current_level >= 0:
        return None
    if out.is_inference() and not torch.is_inference_mode_enabled():
        return None  # PyTorch's copy raises the error
    return known.call if into.is_free(out, read) else None


def _named(steps: list[Step], before: list[Step], out: Tensor | None) -> dict[str, Any]:
    """The keyword arguments, without defaults: the plain functions have no epilogue."""
    named: dict[str, Any] = {"epilogue": tuple(steps)} if steps else {}
    named |= {"prologue": tuple(before)} if before else {}
    return named if out is None else named | {"out": out}


def _with_batch(input: Tensor, steps: Sequence[Step]) -> tuple[Tensor, list[Tensor]]:
    """Adds a batch dimension to an input without one, and to the operands of its steps."""
    operands = [each.unsqueeze(0) if role == "residual" else each for step in steps for role, each in step.tensors]
    return input.unsqueeze(0), operands


class _Known(NamedTuple):
    """A checked call: its layer, epilogue and prologue, both also as text, and the call without the dispatcher.

    ``constants``: as they were checked. If there is an ``out``, ``call`` writes to it.
    """

    layer: Layer
    epilogue: Epilogue
    prologue: Epilogue
    text: str
    constants: tuple[Any, ...] = ()
    call: Callable[..., Tensor] | None = None
    whole: Layer | None = None  # if the output is cropped, the layer without that


# Earlier calls; a warm call is one look-up here.
_known: CallCache[_Known] = CallCache()
operators.FURTHER_CALLS.append(_known)


def _known_of(
    arguments: tuple[Any, ...],
    around: tuple[Sequence[Step], Sequence[Step]],
    given: Sequence[Tensor],
    out: Tensor | None,
    tracing: bool,
) -> _Known:
    """The checked call, cached if an equal one was made before.

    ``around``: the steps of prologue and epilogue; ``given``: their tensors.
    """
    if tracing:
        return functional.while_traced(_known_call, arguments, *around)
    _, dims, input, weight, bias, *rest = arguments
    constants = tuple(rest)
    tensors = [each for each in (input, weight, bias, out, *given) if each is not None]
    heard = operators.is_heard()
    key: tuple[Any, ...] | None
    try:
        signature = [tuple([(step.kind, step.constants, step.of, *dict(step.tensors)) if step.tensors else step
                            for step in steps]) for steps in around]  # fmt: skip
        key = (dims, input.shape, weight.shape, bias is None, out is None, constants, *signature, heard, tf32_allowed())
        known = _known.find(key, *tensors)
    except (TypeError, AttributeError, RuntimeError):  # lists or symbolic sizes; not a tensor; a nested tensor
        key, known = None, None
    # 2, 2.0 and True are one key: constants must be the checked objects, or at least have their types.
    if known is not None and (all(map(is_, constants, known.constants)) or functional.are_integers(constants)):
        return known
    known = _known_call(arguments, *around)
    batch = input if input.dim() == dims + 2 else input.unsqueeze(0)
    if out is not None:
        into.check(arguments[0], out, (input, weight, bias, *given), known.layer, batch is input)
    if not heard and _by_kernels(input) and all(map(operators.is_plain, tensors)):
        from polyphase import runtime

        call: Callable[..., Tensor] | None
        if out is None:
            call = runtime.forward_call(batch, weight, bias, *known.layer[1:], epilogue=known.text)
        else:
            target = out if batch is input else out.unsqueeze(0)
            call = into.call_for(target, (batch, weight, bias), known.text, known.layer)
        known = known._replace(call=call)
    if key is not None and functional.are_integers(constants):
        known = known._replace(constants=constants)
        _known.add(key, known, *tensors, lie_so=known.call is not None)
    return known


def _by_kernels(input: Tensor) -> bool:
    """Whether kernels compute the output for this input."""
    return input.is_cuda and torch.version.cuda is not None and input.numel() > 0 and input.dtype in FLOATING


def _known_call(arguments: tuple[Any, ...], before: Sequence[Step], steps: Sequence[Step]) -> _Known:
    """Checks a call."""
    name, dims, input, weight, *_ = arguments
    whole = layer = check(*arguments)
    batched = input.dim() == dims + 2
    if any(step.kind == "crop" for step in steps):
        layer, steps = crops.split(name, layer, steps)
        check_sizes(name, input.shape[-dims:], layer)
    shape = (input.shape[0] if batched else 1, weight.shape[1] * layer.groups, *output_size(input.shape[-dims:], layer))
    epilogue = checked(name, steps, input, shape, batched) if steps else NONE
    prologue = NONE
    if before:
        prologue = checked(name, before, input, tuple(input.shape) if batched else (1, *input.shape), True, "prologue")
    text = encoded(epilogue, prologue, _DYNAMO_HAS_SYMBOLS) if steps or before else ""
    return _Known(layer, epilogue, prologue, text, whole=None if whole is layer else whole)


def _run(
    known: _Known, operands: list[Tensor], input: Tensor, weight: Tensor, bias: Tensor | None, tracing: bool
) -> Tensor:
    """Runs a call: by the operator, by the call without the dispatcher, or as separate operations."""
    layer, epilogue, prologue, text, _, call, whole = known
    if tracing:
        by_operations = not torch.compiler.is_dynamo_compiling() and is_for_onnx()  # ONNX has a node for each operation
    else:  # transforms use the rules of the operations
        by_operations = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if not by_operations and (call is not None or whole is not None):
        tensors = (input, weight, *operands) if bias is None else (input, weight, bias, *operands)
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        if call is not None and not recorded:
            return call(input, weight, bias, operands)
        by_operations = whole is not None and (recorded or tracing)
    if by_operations:
        of = layer if whole is None else whole
        of_dims = getattr(functional, f"conv_transpose{len(of.stride)}d")
        before, behind = operator.split(prologue, operands)
        read = operator.behind_prologue(prologue, before, input)
        sums = of_dims(read, weight, bias, *of[1:4], of.groups, of.dilation)
        sums = sums if whole is None else sums[crops.index_of(whole, layer)]
        return operator.by_tensor_operations(epilogue, behind, sums).to(input.dtype)
    _, *constants = layer  # not by a slice: see `polyphase.torch_op.derivatives`
    return operator.conv_transpose_epilogue(input, weight, bias, operands, text, *constants)
