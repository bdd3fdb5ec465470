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
from typing import Any, Protocol, cast

import torch
from torch.fx import Graph, Node

from polyphase.elementwise import joined_once
from polyphase.torch_op import into_operator
from polyphase.torch_op.epilogue import conv_transpose_epilogue
from polyphase.torch_op.into import starts_aligned
from polyphase.torch_op.operators import conv_transpose
from polyphase.torch_op.validate import FLOATING

#: The forward pass without and with what is fused.
LAYERS = (conv_transpose, conv_transpose_epilogue)


class Told(Protocol):
    """Who is told what was fused, and why something was not."""

    chains: list[str]
    reasons: list[str]


def change(told: Told) -> None:
    """Have Inductor keep layouts, and layers write slices of concatenations."""
    _keep_layouts()
    _write_slices(told)


def restore() -> None:
    """Leave both to Inductor again."""
    _restore_layouts()
    _restore_lowerings()


_DECIDES = "decide_layout_opt"


def _keep_layouts() -> None:
    """Have Inductor leave the layouts of a graph whose only convolutions are 1x1, behind polyphase's layers.

    It makes them channels_last, which is a copy of the layers' outputs, larger than all that the convolutions gain.
    """
    from torch._inductor.graph import GraphLowering

    decides = getattr(GraphLowering, _DECIDES, None)
    if decides is None or hasattr(decides, "__wrapped__"):
        return

    @functools.wraps(decides)
    def decide(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return False if _has_only_pointwise(gm.graph) else decides(gm, *args, **kwargs)

    setattr(GraphLowering, _DECIDES, staticmethod(decide))


def _restore_layouts() -> None:
    from torch._inductor.graph import GraphLowering

    original = getattr(getattr(GraphLowering, _DECIDES, None), "__wrapped__", None)
    if original is not None:
        setattr(GraphLowering, _DECIDES, staticmethod(original))


def _has_only_pointwise(graph: Graph) -> bool:
    """Whether PyTorch's convolutions in a graph of ATen's operators are all 1x1, beside layers of polyphase's."""
    layers = any(node.target in LAYERS for node in graph.nodes)
    convolutions = [node for node in graph.nodes if node.target is torch.ops.aten.convolution.default]
    if not layers or not convolutions:
        return False
    weights = [node.args[1].meta["val"] for node in convolutions]
    return all(set(weight.shape[2:]) == {1} and not node.args[6] for node, weight in zip(convolutions, weights))


_found: dict[Any, Any] = {}  # the lowerings that there were before, of those that are replaced


def _write_slices(told: Told) -> None:
    from torch._inductor import lowering

    for operator in LAYERS:
        if operator not in _found:
            _found[operator] = lowering.lowerings.get(operator)
        lowering.add_needs_realized_inputs(operator)
        lowering.lowerings[operator] = functools.partial(_lowered, told, operator, _found[operator])


def _restore_lowerings() -> None:
    from torch._inductor.lowering import lowerings

    while _found:
        operator, before = _found.popitem()
        if before is None:
            lowerings.pop(operator, None)
        else:
            lowerings[operator] = before


def _lowered(told: Told, operator: Any, before: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer in Inductor's terms: with its output where it is told, or as any custom operator."""
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    reason = None if kwargs else why_not_joined(V.graph.current_node)
    if reason == "" and V.graph.cpp_wrapper:
        reason = "Inductor's wrapper is in C++"
    if reason == "":
        try:
            found = _into(told, operator, args)
        except (AttributeError, ImportError, TypeError) as error:  # these interfaces are Inductor's own
            found = f"Inductor of PyTorch {torch.__version__} is not known: {error}"
        if not isinstance(found, str):
            return found
        reason = found
    if reason:
        told.reasons.append(f"cat(): {reason}")
    return (before or fallback_handler(operator, add_to_fallback_set=False))(*args, **kwargs)


def why_not_joined(layer: Node) -> str | None:
    """Why a layer cannot write its slice of a concatenation that reads it; "" if it can, None if none does.

    ``layer``: a node in a graph of ATen's operators, whose values are in ``meta["val"]``.
    """
    cat = next((each for each in layer.users if each.target is torch.ops.aten.cat.default), None)
    if cat is None:
        return None
    output, result = layer.meta["val"], cat.meta["val"]
    parts = joined_once(layer, cat.args, cat.kwargs, output.dim())
    sizes = [each.meta["val"].shape for each in parts or ()]
    if not parts or any(len(size) != output.dim() for size in sizes):
        return "it does not join a layer's output once along channels"
    if len(layer.users) > 1:
        return f"{len(layer.users)} operations read a layer's output"
    if output.dtype not in FLOATING or result.dtype != output.dtype:
        return f"a layer's output is {output.dtype}, and the result {result.dtype}"
    aligned = starts_aligned([size[1] for size in sizes[: parts.index(layer)]], output.shape, output.dtype)
    return "" if _is_known(aligned) else "a layer's slice starts at no multiple of 32 bytes that is known"


def _is_known(what: Any) -> bool:
    """Whether something is true whatever the sizes are."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(what)


def _into(told: Told, operator: Any, args: Sequence[Any]) -> Any:
    """The layer with an output that Inductor allocates, where a consumer wants it; or why not."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    with V.graph.fake_mode:
        example, tensors, constants, unflatten, *_ = ir.FallbackKernel.process_kernel(operator, *args)
    if not example.is_contiguous():
        return "a layer's output is channels_last"
    (cat,) = V.graph.current_node.users
    if any(_is_channels_last(V.graph.env[part]) for part in cat.all_input_nodes if part in V.graph.env):
        return "its result is channels_last"
    return ir.TensorBox.create(_kernel_class()(told, operator, example, tensors, constants, unflatten))


def _is_channels_last(value: Any) -> bool:
    """Whether a tensor of Inductor's is channels_last for good, as then a concatenation of it is."""
    from torch._inductor import ir

    if not ir.is_storage_and_layout(value) or not isinstance(value.get_layout(), ir.FixedLayout):
        return False
    return bool(value.get_stride()[1] == 1 and value.get_size()[1] != 1)


class _Reference:
    """What the generated code calls a tensor."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@functools.cache
def _kernel_class() -> Any:
    """The node of Inductor's that stands for such a layer; importing Inductor takes a second."""
    from torch._inductor import ir
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V

    class Dense(ir.FlexibleLayout):
        """A layout that is the consumer's to choose; where none does it has no gaps, which kernels would not leave."""

        def should_pad_strides(self) -> bool:
            return False

    class Into(ir.ExternKernelOut):
        """``polyphase::conv_transpose_into`` of the arguments of an operator of `LAYERS`."""

        def __init__(
            self,
            told: Told,
            operator: Any,
            example: torch.Tensor,
            tensors: Sequence[Any],
            constants: Sequence[Any],
            unflatten: Callable[..., Any],
        ) -> None:
            layout = Dense(example.device, example.dtype, convert_shape_to_inductor(example.shape))
            name = f"torch.ops.polyphase.{into_operator.NAME}.default"
            super().__init__(layout, list(tensors), tuple(constants), python_kernel_name=name)
            self._told, self._operator, self._unflatten = told, operator, unflatten

        def codegen_args(self) -> list[str]:
            tensors = [_Reference(each.codegen_reference()) for each in cast(Any, self.inputs)]
            given, _ = self._unflatten(tensors, self.constant_args)
            arguments = into_operator.arguments_of(self._operator, given)
            return [V.graph.wrapper_code.val_to_arg_str(each) for each in arguments]

        def codegen(self, wrapper: Any) -> None:
            if isinstance(self.layout, ir.NonOwningLayout):
                self._told.chains.append("conv_transpose → cat")
            else:
                self._told.reasons.append("cat(): Inductor computes it with what reads it")
            super().codegen(wrapper)

    return Into
