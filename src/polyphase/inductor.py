"""What Inductor makes of polyphase's operators while `polyphase.enable_compile_fusion` is in force.

Layouts that it leaves, and concatenations. Inductor has no kernel for a ``torch.cat``: it allocates the result, and has
what computes a part write to its slice of it. It does so for its own kernels, and for PyTorch's products by their
``out=``. Of a custom operator it knows no such form, and copies the output. Here a layer that only a concatenation
along channels reads becomes ``polyphase::conv_transpose_into``, which Inductor gives its slice as it does to a product.
What computes another part writes its slice, too.

One operator for the whole concatenation would be simpler, and would copy every other part, as the eager fusion has to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, cast

import torch
from torch.fx import Graph, Node

from polyphase.elementwise import joined_once
from polyphase.graph_steps import around
from polyphase.problem.epilogue import ELEMENT, decoded
from polyphase.problem.layouts import ALIGNMENT
from polyphase.torch_op import into_operator
from polyphase.torch_op.epilogue import conv_transpose_epilogue
from polyphase.torch_op.into import slice_strides
from polyphase.torch_op.operators import conv_transpose
from polyphase.torch_op.validate import FLOATING

#: The forward pass without and with prologue and epilogue.
LAYERS = (conv_transpose, conv_transpose_epilogue)


class Told(Protocol):
    """The receiver of descriptions of fused chains, and of reasons why something was not fused."""

    chains: list[str]
    reasons: list[str]


_changes = ExitStack()  # of Inductor; closing it restores what was there before


def change(told: Told) -> None:
    """Makes Inductor keep layouts, and layers write slices of concatenations."""
    restore()
    _keep_layouts()
    _write_slices(told)
    _give_slices()


def restore() -> None:
    """Restores Inductor's own behaviour for both."""
    _changes.close()


def _replace(cls: type, name: str, function: Callable[..., Any]) -> None:
    """Replaces a static or class method of Inductor's."""
    _changes.callback(setattr, cls, name, vars(cls)[name])
    setattr(cls, name, staticmethod(function))


def _keep_layouts() -> None:
    """Makes Inductor keep the layouts of a graph with polyphase's layers whose only convolutions are 1x1.

    It would make them channels_last by a copy of the layers' outputs, which takes longer than the convolutions gain.
    """
    from torch._inductor.graph import GraphLowering

    decides = getattr(GraphLowering, "decide_layout_opt", None)
    if decides is None:
        return

    def decide(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return False if _has_only_pointwise(gm.graph) else decides(gm, *args, **kwargs)

    _replace(GraphLowering, "decide_layout_opt", decide)


def _has_only_pointwise(graph: Graph) -> bool:
    """Whether a graph of ATen's operators has layers of polyphase, and PyTorch's convolutions in it are all 1x1."""
    layers = any(node.target in LAYERS for node in graph.nodes)
    convolutions = [node for node in graph.nodes if node.target is torch.ops.aten.convolution.default]
    if not layers or not convolutions:
        return False
    weights = [node.args[1].meta["val"] for node in convolutions]
    return all(set(weight.shape[2:]) == {1} and not node.args[6] for node, weight in zip(convolutions, weights))


def _write_slices(told: Told) -> None:
    from torch._inductor import lowering

    for operator in LAYERS:
        before = lowering.lowerings.get(operator)
        if before is None:
            _changes.callback(lowering.lowerings.pop, operator, None)
        else:
            _changes.callback(lowering.lowerings.__setitem__, operator, before)
        lowering.add_needs_realized_inputs(operator)
        lowering.lowerings[operator] = functools.partial(_lowered, told, operator, before)


def _give_slices() -> None:
    """Makes Inductor's concatenations give a layer its slice, if kernels can write to it."""
    from torch._inductor.ir import ConcatKernel

    names = ("realize_into", "can_realize_into_without_copy")
    realize, can_realize = (getattr(ConcatKernel, name, None) for name in names)
    if realize is None or can_realize is None:
        return

    def realize_into(src: Any, dst: Any) -> Any:
        if (layer := _layer_of(src)) is not None:
            layer.meets(dst)
        return realize(src, dst)

    def can_realize_into(src: Any, *dst: Any) -> Any:
        layer = _layer_of(src)
        return can_realize(src, *dst) if layer is None else not layer.reason

    _replace(ConcatKernel, names[0], realize_into)
    _replace(ConcatKernel, names[1], can_realize_into)


def _layer_of(value: Any) -> Any:
    """Inductor's node of a layer that writes to a given output; None for anything else."""
    from torch._inductor import ir

    while isinstance(value, (ir.TensorBox, ir.StorageBox)):
        value = value.data
    return value if isinstance(value, _kernel_class()) else None


def _lowered(told: Told, operator: Any, before: Any, *args: Any, **kwargs: Any) -> Any:
    """Lowers a layer for Inductor: as a kernel that writes to a given output, or as any custom operator."""
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    reason = None if kwargs else why_not_joined(V.graph.current_node)
    if reason == "" and V.graph.cpp_wrapper:
        reason = "Inductor's wrapper is in C++"
    if reason == "":
        try:
            return _into(told, operator, args)
        except (AttributeError, ImportError, TypeError) as error:  # these interfaces are Inductor's own
            reason = f"Inductor of PyTorch {torch.__version__} is not known: {error}"
    if reason:
        told.reasons.append(f"cat(): {reason}")
    return (before or fallback_handler(operator, add_to_fallback_set=False))(*args, **kwargs)


def why_not_joined(layer: Node) -> str | None:
    """Why a layer cannot write its slice of a concatenation that reads it; "" if it can, None if none reads it.

    ``layer``: a node in a graph of ATen's operators, with values in ``meta["val"]``.
    """
    cat = next((each for each in layer.users if each.target is torch.ops.aten.cat.default), None)
    if cat is None:
        return None
    output, result = layer.meta["val"], cat.meta["val"]
    if joined_once(layer, cat.args, cat.kwargs, output.dim()) is None:
        return "it does not join a layer's output once along channels"
    if len(layer.users) > 1:
        return f"{len(layer.users)} operations read a layer's output"
    if output.dtype not in FLOATING or result.dtype != output.dtype:
        return f"a layer's output is {output.dtype}, and the result {result.dtype}"
    epilogue, _ = decoded(around(layer)[1])
    residual = any(each.per == ELEMENT for each in epilogue.named_operands.values())
    return "a residual would have to lie as the slice does" if residual else ""


def _into(told: Told, operator: Any, args: Sequence[Any]) -> Any:
    """The layer as a kernel that writes to an output given by Inductor."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    with V.graph.fake_mode:
        example, tensors, constants, unflatten, *_ = ir.FallbackKernel.process_kernel(operator, *args)
    return ir.TensorBox.create(_kernel_class()(told, operator, example, tensors, constants, unflatten))


class _Reference:
    """The name of a tensor in the generated code."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@functools.cache
def _kernel_class() -> Any:
    """Inductor's node class for such a layer; importing Inductor takes a second."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class Into(ir.ExternKernelOut):
        """``polyphase::conv_transpose_into`` of the arguments of an operator of `LAYERS`.

        ``reason``: why it has no slice; "" if it has one, or may still get one.
        """

        def __init__(
            self,
            told: Told,
            operator: Any,
            example: torch.Tensor,
            tensors: Sequence[Any],
            constants: Sequence[Any],
            unflatten: Callable[..., Any],
        ) -> None:
            name = f"torch.ops.polyphase.{into_operator.NAME}.default"
            layout: Any = ir.FallbackKernel.tensor_to_layout(example)  # as it would be without a concatenation
            super().__init__(layout, list(tensors), tuple(constants), python_kernel_name=name)
            self._told, self._operator, self._unflatten = told, operator, unflatten
            self._own, self._last, self.reason = layout, not example.is_contiguous(), ""

        def meets(self, slice: Any) -> None:
            """Notes whether kernels can write to a slice."""
            layout, equal = slice.get_layout(), V.graph.sizevars.statically_known_equals
            size = layout.dtype.itemsize
            if slice_strides(layout.size, layout.stride, self._last, size, equal) is None:
                self.reason = "the result does not lie as a layer's output does"
            elif not V.graph.sizevars.statically_known_multiple_of(layout.offset * size, ALIGNMENT):
                self.reason = "a layer's slice starts at no multiple of 32 bytes that is known"

        def codegen_args(self) -> list[str]:
            tensors = [_Reference(each.codegen_reference()) for each in cast(Any, self.inputs)]
            given, _ = self._unflatten(tensors, self.constant_args)
            arguments = into_operator.arguments_of(self._operator, given)
            return [V.graph.wrapper_code.val_to_arg_str(each) for each in arguments]

        def codegen(self, wrapper: Any) -> None:
            if self.layout is not self._own:
                self._told.chains.append("conv_transpose → cat")
            else:
                self._told.reasons.append(f"cat(): {self.reason or 'Inductor computes it with what reads it'}")
            super().codegen(wrapper)

    return Into
