"""Chains around a layer in the graphs that `torch.compile` makes: ``polyphase.enable_compile_fusion()``.

Inductor fuses nothing into an operator that is not its own. So this pass changes the graph first: if batch norms in
evaluation mode, layer norms over channels, activations, factors and sums follow polyphase's operator, and nothing else
reads the values between, all of them become one call of ``polyphase::conv_transpose_epilogue``; so does an activation
or a snake that only the operator reads. A slice of its output becomes a layer with more padding. Graphs are changed at Inductor's hook before derivatives
(`torch._inductor.config.pre_grad_custom_pass`), where norms and activations are still whole. Concatenations are handled
later, when Inductor decides which kernel writes which tensor (`polyphase.inductor`).
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from polyphase import crops, elementwise, fused, inductor, layer_norms, snakes
from polyphase.elementwise import (
    change_between,
    changes_other,
    changes_what_is_read,
    is_closed,
    is_in_place,
    makes_new,
    name_of,
    next_reader,
    per,
    read,
    read_as,
    read_next,
    step_of,
    step_of_value,
)
from polyphase.inductor import LAYERS
from polyphase.layer_norms import layer_norm_of
from polyphase.problem.epilogue import ACTIVATIONS, NONE, decoded, encoded
from polyphase.snakes import snake_at
from polyphase.torch_op.epilogue import conv_transpose_epilogue
from polyphase.torch_op.operators import conv_transpose
from polyphase.torch_op.steps import checked


class CompileFusion:
    """The pass, while it is enabled. A context: at its end it is disabled.

    ``chains``: the chains fused in each graph compiled since, such as "conv_transpose → batch_norm → relu", and
    "conv_transpose → cat" for each layer that writes its slice of a concatenation; ``reasons``: why a layer that a
    concatenation reads does not. A fused graph that Inductor finds in its cache on disk adds nothing to these.
    """

    def __init__(self, before: Any) -> None:
        self.chains: list[str] = []
        self.reasons: list[str] = []
        self._before = before if isinstance(before, (list, tuple)) else [] if before is None else [before]
        self._found = before
        self._enabled = 1  # number of calls of `enable_compile_fusion` whose ``with`` has not ended

    def __call__(self, graph: Graph) -> None:
        """Changes a graph of PyTorch's functions. Called by Inductor."""
        for each in self._before:
            each(graph)
        if self._enabled:
            with enable_python_dispatcher():  # without it PyTorch 2.8 reshapes no tensor of symbolic size
                self.chains += _fuse(graph)

    def uuid(self) -> Any:
        """The pass's identity, for the key of compiled graphs on disk. None prevents caching, as for other passes."""
        others = [each.uuid() if hasattr(each, "uuid") else None for each in self._before]
        return None if None in others else (_digest(), self._enabled > 0, *others)

    def __reduce__(self) -> tuple[Any, ...]:
        """The pass's identity, as `uuid`: PyTorch before 2.13 pickles Inductor's settings for such a key."""
        key = self.uuid()
        if key is None:
            raise pickle.PicklingError("a pass that Inductor had before has no uuid")
        return _nothing, (key,)

    def disable(self) -> None:
        """Leaves graphs that are compiled from now on unchanged."""
        from torch._inductor import config

        self._enabled = 0
        if config.pre_grad_custom_pass is self:
            config.pre_grad_custom_pass = self._found
        inductor.restore()

    def __enter__(self) -> CompileFusion:
        return self

    def __exit__(self, *raised: object) -> None:
        self._enabled -= 1
        if self._enabled <= 0:  # the outermost one
            self.disable()


def enable_compile_fusion() -> CompileFusion:
    """Makes `torch.compile` fuse polyphase's layers and the operations after them into one kernel, in inference.

    It applies to graphs that Inductor compiles from now on, in the whole process, until ``disable()``, or to the end of
    a ``with``: a model is compiled at its first call. Fused are batch norms in evaluation mode, layer norms over
    channels if a kernel computes them, activations, sums with tensors of the output's shape, factors and sums per
    channel, and sums and products with an earlier value (``y·sigmoid(y)``), if nothing else reads the values between
    and dtypes are the output's; and an activation or a snake whose result only a layer reads. Slices of the output,
    ``y[..., a:b]``, are computed alone if they are the first of these. Graphs that record
    derivatives do not change, except for concatenations along channels: layers write their slices in any graph.

    Returns:
        The pass: a context, with ``disable()``, the ``chains`` that it has found, and the ``reasons`` why a
        concatenation is not among these.
    """
    from torch._inductor import config

    found = config.pre_grad_custom_pass
    if isinstance(found, CompileFusion) and found._enabled:
        found._enabled += 1
        return found
    fusion = _pass_class()(found)
    config.pre_grad_custom_pass = fusion
    inductor.change(fusion)
    return fusion


def _nothing(key: Any) -> None:
    """The unpickled pass, None: a pass is enabled in a process, not in a file."""


@functools.cache
def _pass_class() -> type[CompileFusion]:
    """The class in Inductor's form for passes whose graphs it caches on disk; importing Inductor takes a second."""
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:  # PyTorch before 2.6
        return CompileFusion
    return type("CompileFusion", (CompileFusion, CustomGraphPass), {"__doc__": CompileFusion.__doc__})


def _digest() -> str:
    files = (__file__, crops.__file__, elementwise.__file__, inductor.__file__, layer_norms.__file__, snakes.__file__)
    return hashlib.sha256(b"".join(Path(each).read_bytes() for each in files)).hexdigest()


_MODES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


def _fuse(graph: Graph) -> list[str]:
    """Fuses every chain of a graph, and returns their descriptions."""
    found: dict[Node, str] = {}
    for layer in filter(_is_layer, list(graph.nodes)):
        if (call := _cropped(graph, layer)) is not None:
            found[call] = f"conv_transpose → {crops.NAME}"
    nodes = list(graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    taken: set[Node] = set()
    for layer in filter(_is_layer, nodes):
        steps = _chain(layer, nodes, order, taken)
        if steps:
            taken.update(node for step in steps for node in step.nodes)
            told = found.pop(layer, "conv_transpose")
            found[_replace(graph, layer, steps)] = " → ".join([told, *(step.name for step in steps)])
    nodes = list(graph.nodes)
    for layer in filter(_is_layer, nodes):
        if (step := _before(layer, nodes)) is not None:
            told = found.pop(layer, "conv_transpose")
            found[_replace_input(graph, layer, step)] = f"{step.name} → {told}"
    if found:
        graph.lint()
    return list(found.values())


def _is_layer(node: Node) -> bool:
    value = _value(node)
    return node.target in LAYERS and not node.kwargs and isinstance(value, Tensor) and not value.requires_grad


def _value(node: Any) -> Any:
    """A node's value as a fake tensor or number."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def _cropped(graph: Graph, layer: Node) -> Node | None:
    """Replaces a layer and the slice that alone reads it by one call, which computes the slice; None for others."""
    reader, *others = layer.users
    if layer.target is not conv_transpose or others or crops.name_of(reader.target) != crops.NAME:
        return None
    size, kept = _value(layer).shape, _value(reader)
    ends = crops.ends_of(map_arg(reader.args[1], _value), size)
    input, weight, bias, stride, padding, extra, *rest = layer.args
    if ends is None or not all(type(each) is int for each in (*padding, *extra)):  # type: ignore[misc]
        return None
    if not all(_known_equal(count - sum(pair), left) for count, pair, left in zip(size[2:], ends, kept.shape[2:])):
        return None
    padding, extra = crops.constants_of(padding, extra, ends)  # type: ignore[arg-type]
    with graph.inserting_before(layer):
        call = graph.call_function(conv_transpose, (input, weight, bias, stride, padding, extra, *rest))
    call.meta = {**reader.meta, "example_value": kept.clone()}  # whole in memory, as every output of a layer
    reader.replace_all_uses_with(call)
    graph.erase_node(reader)
    graph.erase_node(layer)
    copy = next(iter(call.users), None)
    if copy is not None and crops.name_of(copy.target) == crops.CONTIGUOUS and _value(call).is_contiguous():
        if len(call.users) == 1 and len(copy.args) == 1 and not copy.kwargs:
            copy.replace_all_uses_with(call)
            graph.erase_node(copy)
    return call


class _Step(NamedTuple):
    """An operation in a graph: its step on fake tensors, if any, and the nodes of it and of its operands."""

    name: str
    number: int  # number of operations before its result
    nodes: Sequence[Node]  # the last is its result
    step: fused.Step | None
    operands: Sequence[tuple[Node, tuple[int, ...] | None]] = ()  # with the shape to read each in, if it differs


def _chain(layer: Node, nodes: list[Node], order: dict[Node, int], taken: set[Node]) -> list[_Step]:
    """The operations after a layer that it can compute."""
    steps: list[_Step] = []
    chain, numbers = [layer], {layer: 0}
    while (step := _next(chain, numbers, order, steps)) is not None:
        further = {*chain, *step.nodes}
        if any(each in taken or each not in order for each in step.nodes):
            break  # the last test: the call that replaced another layer's chain
        between = nodes[order[layer] + 1 : order[step.nodes[-1]]]
        if change_between(between, further | taken, lambda each: None) is not None:
            break
        if any(getattr(each.target, "__name__", "") in _MODES for each in between):
            break  # the layer would be computed in another mode, and be recorded for derivatives
        steps.append(step)
        chain += step.nodes
        numbers[chain[-1]] = step.number
    # A dropout at the end needs no computation.
    while steps and (steps[-1].step is None or not is_closed(chain)):
        del chain[-len(steps.pop().nodes) :]
    return steps


def _before(layer: Node, nodes: list[Node]) -> _Step | None:
    """The operation that a layer can compute on its input; the first operand is the layer's new input."""
    value = layer.args[0]
    if not isinstance(value, Node) or list(value.users) != [layer]:
        return None
    step = _activation(value) or _snake(value)
    if step is None or step.step is None:
        return None
    input = _value(step.operands[0][0])
    if input.dtype != _value(value).dtype or _value(value).requires_grad:
        return None
    try:
        checked("conv_transpose", [step.step], input, tuple(input.shape), True, "prologue")
    except (TypeError, RuntimeError, ValueError):
        return None
    source, _ = step.operands[0]
    first = source if _is_only_for(source, value) else step.nodes[0]
    between = nodes[nodes.index(first) : nodes.index(layer)]
    changing = change_between(between, step.nodes, lambda each: None)
    modes = any(getattr(each.target, "__name__", "") in _MODES for each in between)
    return None if changing is not None or modes else step


def _activation(value: Node) -> _Step | None:
    """The step of a call of an activation; None for others."""
    name = name_of(value.target) if value.op in ("call_function", "call_method") else ""
    if not name or not value.args or not isinstance(value.args[0], Node):
        return None
    input = value.args[0]
    if is_in_place(value.target, value.kwargs) and not _is_only_for(input, value):
        return None  # other readers of the input would see that it is not changed
    reading = read(name, input, value.args, value.kwargs)
    if reading is None or not (reading.kind in ACTIVATIONS or reading.kind == "prelu"):
        return None
    if reading.other is None:
        return _Step(name, 0, (value,), fused.Step(reading.kind, reading.constants), [(input, None)])
    other = _value(reading.other)
    if not isinstance(reading.other, Node) or not isinstance(other, Tensor):
        return None
    return _Step(name, 0, (value,), fused.prelu(other.reshape(-1)), [(input, None), (reading.other, (-1,))])


def _is_only_for(value: Node, reader: Node) -> bool:
    """Whether only ``reader`` has a tensor, so that nothing else sees in-place changes."""
    return makes_new(value) and list(value.users) == [reader]


def _snake(value: Node) -> _Step | None:
    found = snake_at(value, _value)
    if found is None:
        return None
    vectors = [_value(node).reshape(-1) for node in found.operands]
    step = fused.snake(vectors[0], vectors[1] if len(vectors) > 1 else None, found.snake.eps, found.snake.logarithmic)
    return _Step("snake", 0, found.nodes, step, [(found.input, None), *((node, (-1,)) for node in found.operands)])


def _replace_input(graph: Graph, layer: Node, step: _Step) -> Node:
    """Replaces a layer's call by one that computes ``step`` on its input."""
    _, weight, bias, *rest = layer.args
    operands: Any = []
    text: Any = ""
    if layer.target is conv_transpose_epilogue:
        operands, text, *rest = rest
    (input, _), *vectors = step.operands
    shown = _value(input)
    assert step.step is not None
    prologue = checked("conv_transpose", [step.step], shown, tuple(shown.shape), True, "prologue")
    with graph.inserting_before(layer):
        before = [node if shape is None else graph.call_method("reshape", (node, shape)) for node, shape in vectors]
        arguments = (input, weight, bias, [*before, *operands], f"{encoded(NONE, prologue)}{text}", *rest)
        call = graph.call_function(conv_transpose_epilogue, arguments)
    call.meta = {**layer.meta}
    layer.replace_all_uses_with(call)
    graph.erase_node(layer)
    for node in reversed(step.nodes):
        if not node.users:
            graph.erase_node(node)
    return call


def _next(chain: list[Node], numbers: dict[Node, int], order: dict[Node, int], steps: Sequence[_Step]) -> _Step | None:
    """The operation of the next readers of a chain; None if an epilogue cannot have it after ``steps``.

    ``numbers``: the numbers of the chain's values, as in `read_next`.
    """
    layer, reader, step = chain[0], next_reader(chain, order), None
    if reader is not None and reader.op in ("call_function", "call_method"):
        again = changes_what_is_read(reader, chain, is_in_place(reader.target, reader.kwargs))
        step = None if again else _step_of(reader, layer, numbers)
    step = step or _layer_norm(chain[-1], layer, numbers)
    return step if step is not None and _is_valid(layer, [*steps, step]) else None


def _layer_norm(value: Node, layer: Node, numbers: dict[Node, int]) -> _Step | None:
    if numbers[value] != max(numbers.values()):
        return None
    norm = layer_norm_of(value, _value(layer).shape[1], _value)
    if norm is None or any(getattr(_value(node), "requires_grad", False) for node in norm.nodes):
        return None
    vectors = {role: _value(node) for role, node in norm.operands}
    step = fused.layer_norm(vectors.get("weight"), vectors.get("offset"), norm.eps)
    number = numbers[value] + 1
    return _Step("layer_norm", number, norm.nodes, step, [(node, None) for _, node in norm.operands])


def _step_of(call: Node, layer: Node, numbers: dict[Node, int]) -> _Step | None:
    """The operation of a call on the values with these ``numbers``; None if no epilogue computes it."""
    size, output = _value(layer).shape, _value(layer)
    result = _value(call)
    if not isinstance(result, Tensor) or result.dtype != output.dtype or result.requires_grad:
        return None
    number, name = max(numbers.values()) + 1, name_of(call.target)
    if call.target is torch.nn.functional.batch_norm:
        return _norm(call, numbers)
    found = read_next(name, call, numbers) if name else None
    if found is None or changes_other(call.target, found[1], call.args, call.kwargs):
        return None
    reading, value = found
    if not reading.kind:
        return _Step(name, numbers[value], (call,), None)
    if reading.other is None:
        return _Step(name, number, (call,), fused.Step(reading.kind, reading.constants))
    if reading.other in numbers:
        again = step_of_value(reading, numbers[reading.other])
        return None if again is None else _Step(name, number, (call,), again)
    other = _value(reading.other)
    if not isinstance(reading.other, Node) or not isinstance(other, Tensor) or other.dtype != output.dtype:
        return None
    kind = per(reading.kind, other.shape, size, _known_equal)
    if not kind:
        return None
    shape = read_as(kind, size)
    step = step_of(reading, other if shape is None else other.reshape(shape), kind)
    return _Step(name, number, (call,), step, [(reading.other, shape)])


def _norm(call: Node, numbers: dict[Node, int]) -> _Step | None:
    """The step of a batch norm in evaluation mode; None for others."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {"weight": None, "bias": None, "training": False, "eps": 1e-5, **dict(zip(names, call.args)), **call.kwargs}
    tensors = [given.get(name) for name in ("running_mean", "running_var", "weight", "bias")]
    number = numbers.get(given["input"], -1)  # type: ignore[arg-type]
    if given["training"] is not False or number != max(numbers.values()) or type(given["eps"]) is not float:
        return None
    if any(each is not None and not isinstance(_value(each), Tensor) for each in tensors) or None in tensors[:2]:
        return None
    mean, variance, weight, bias = map(_value, tensors)
    step = fused.batch_norm(mean, variance, weight, bias, given["eps"])
    return _Step("batch_norm", number + 1, (call,), step, [(each, None) for each in tensors if isinstance(each, Node)])


def _known_equal(one: Any, other: Any) -> bool:
    """Whether two sizes, maybe symbolic, are known to be equal."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one == other)


def _text(layer: Node, steps: Sequence[_Step]) -> str:
    """The layer's own epilogue followed by these steps, as text. Raises as `polyphase.fused` for wrong operands."""
    input, size = _value(layer.args[0]), _value(layer).shape
    found = checked("conv_transpose", [each.step for each in steps if each.step], input, size, True)
    if layer.target is not conv_transpose_epilogue:
        return encoded(found)
    epilogue, prologue = decoded(layer.args[4])  # type: ignore[arg-type]
    return encoded(epilogue.then(found), prologue)


def _is_valid(layer: Node, steps: Sequence[_Step]) -> bool:
    try:
        epilogue, _ = decoded(_text(layer, steps))
    except (TypeError, RuntimeError, ValueError):
        return False
    input, weight, bias, *rest = layer.args
    if not epilogue.normalizes or not _value(input).is_cuda:
        return True
    from polyphase import runtime  # the CUDA path

    constants = rest[2:] if layer.target is conv_transpose_epilogue else rest
    return runtime.has_kernel(_value(input), _value(weight), bias is not None, epilogue, *constants)


def _replace(graph: Graph, layer: Node, steps: list[_Step]) -> Node:
    """Replaces the last node of a chain by one call."""
    chain = [node for step in steps for node in step.nodes]
    input, weight, bias, *rest = layer.args
    operands: list[Any] = []
    if layer.target is conv_transpose_epilogue:
        operands, _, *rest = rest  # type: ignore[assignment]
    with graph.inserting_before(chain[-1]):
        further: list[Any] = []
        for step in steps:
            for node, shape in step.operands:
                further.append(node if shape is None else graph.call_method("reshape", (node, shape)))
        arguments = (input, weight, bias, [*operands, *further], _text(layer, steps), *rest)
        call = graph.call_function(conv_transpose_epilogue, arguments)
    call.meta = {**chain[-1].meta}
    chain[-1].replace_all_uses_with(call)
    for node in (*reversed(chain), layer):
        graph.erase_node(node)
    return call
