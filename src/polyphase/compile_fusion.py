"""Chains around a layer in the graphs that `torch.compile` makes: ``polyphase.enable_compile_fusion()``.

Inductor fuses nothing into an operator that is not its own. So this pass changes the graph first: if batch norms in
evaluation mode, layer norms over channels, activations, factors and sums follow polyphase's operator, and nothing else
reads the values between, all of them become one call of ``polyphase::conv_transpose_epilogue``; so does an activation
or a snake that only the operator reads. Poolings, reductions and norms behind these become calls of
``polyphase::reduce_groups``. A slice of the output becomes padding of the layer. Graphs are changed at
Inductor's hook before derivatives (`torch._inductor.config.pre_grad_custom_pass`), where norms and activations are
still whole. Concatenations are handled later, when Inductor decides which kernel writes which tensor
(`polyphase.inductor`).
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from polyphase import crops, functional_override, inductor, reductions
from polyphase.elementwise import (
    change_between,
    changes_what_is_read,
    is_closed,
    is_in_place,
    may_change,
    next_reader,
)
from polyphase.functional_override import replace_functions
from polyphase.graph_steps import GraphStep, around, is_only_for, step_after, step_apart, step_before, value_of
from polyphase.inductor import LAYERS
from polyphase.problem import reduction
from polyphase.problem.epilogue import NONE, OF_PIXELS, decoded, encoded
from polyphase.program.reduction import reads_once
from polyphase.torch_op.epilogue import conv_transpose_epilogue
from polyphase.torch_op.reduction import has_kernels, reduce_groups
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
        return None if None in others else (_digest(), self._enabled > 0, functional_override.devices(), *others)

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
    channels if a kernel computes them, activations, snakes, sums with tensors of the output's shape, factors and sums
    per channel, and sums and products with an earlier value (``y·sigmoid(y)``), if nothing else reads the values
    between and dtypes are the output's; and an activation or a snake whose result only a layer reads. Of an output that
    is sliced, ``y[..., a:b]``, only the slice is computed. Poolings, reductions and norms behind a chain are computed
    by polyphase's kernels on a GPU, except for norms that are reduced again, and float32 norms that read a group twice.
    Graphs that record derivatives do not change, except for concatenations along channels: layers write their slices in
    any graph. Calls of PyTorch's functions are layers too, while `override` is active. A sliced output is whole in
    memory, where PyTorch's is a view.

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


@functools.cache
def _digest() -> str:
    """Of the whole package: what a graph becomes depends on many of its modules."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()


_MODES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


def _fuse(graph: Graph) -> list[str]:
    """Fuses every chain of a graph, and returns their descriptions."""
    found: dict[Node, str] = {}
    if any(getattr(node.target, "__name__", "").endswith("_increment_nesting") for node in graph.nodes):
        return []  # transforms of torch.func, which have no rules for all operators
    replace_functions(graph, value_of)
    nodes = list(graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    taken: set[Node] = set()
    for layer in filter(_is_layer, nodes):
        steps = _chain(layer, nodes, order, taken)
        if steps:
            taken.update(node for step in steps for node in step.nodes)
            found[_replace(graph, layer, steps)] = " → ".join(["conv_transpose", *(step.name for step in steps)])
    nodes = list(graph.nodes)
    for layer in filter(_is_layer, nodes):
        if (step := _before(layer, nodes)) is not None:
            told = found.pop(layer, "conv_transpose")
            found[_replace_input(graph, layer, step)] = f"{step.name} → {told}"
    if found:
        graph.lint()
    return list(found.values())


def _is_layer(node: Node) -> bool:
    value = value_of(node)
    return node.target in LAYERS and not node.kwargs and isinstance(value, Tensor) and not value.requires_grad


def _chain(layer: Node, nodes: list[Node], order: dict[Node, int], taken: set[Node]) -> list[GraphStep]:
    """The operations after a layer that it can compute."""
    steps: list[GraphStep] = []
    chain, numbers = [layer], {layer: 0}
    while (step := _next(chain, numbers, order, steps)) is not None:
        further = {*chain, *step.nodes}
        if any(each in taken or each not in order for each in step.nodes):
            break  # the last test: the call that replaced another layer's chain
        first = min(order.get(each, 0) for each in (layer, *step.helpers))
        if not _may_move(nodes[first : order[step.nodes[-1]]], further | taken | {*step.helpers}):
            break
        steps.append(step)
        chain += step.nodes
        if step.ends is not None:  # the values before it have another size
            numbers.clear()
        numbers[chain[-1]] = step.number
    _close(chain, steps)
    if not _pays(layer, steps):
        del chain[1 + sum(len(step.nodes) for step in _own(steps)) :], steps[len(_own(steps)) :]
        _close(chain, steps)
    return steps


def _close(chain: list[Node], steps: list[GraphStep]) -> None:
    """Removes last steps until only the chain reads its values and its last step computes something."""
    while steps and not (steps[-1].computes and is_closed(chain)):
        del chain[-len(steps.pop().nodes) :]


def _pays(layer: Node, steps: Sequence[GraphStep]) -> bool:
    """Whether polyphase's kernels compute the steps behind the layer's faster than Inductor's do.

    Inductor's compute elementwise operations together with what is before, do not store norms that are reduced again,
    and are as fast for float32 norms whose groups are read twice.
    """
    if not (steps and steps[-1].apart):
        return True
    found, dtype = _arranged(layer, steps), value_of(layer).dtype
    assert found is not None
    stores_norm = any(part.over in reduction.NORMS for part in found.parts[:-1])
    kept = dtype.itemsize == 2 or all(reads_once(part, str(dtype).removeprefix("torch.")) for part in found.parts)
    return kept and not stores_norm and all(part.over or part.pool for part in found.parts)


def _before(layer: Node, nodes: list[Node]) -> GraphStep | None:
    """The operation that a layer can compute on its input; the first operand is the layer's new input."""
    value, *others = layer.args
    if not isinstance(value, Node) or list(value.users) != [layer] or value in _nodes_of(others):
        return None  # a residual may be the same tensor
    if decoded(around(layer)[1])[1]:
        return None  # it has a prologue
    step = step_before(value)
    if step is None or step.step is None:
        return None
    input = value_of(step.operands[0][0])
    if input.dtype != value_of(value).dtype or value_of(value).requires_grad:
        return None
    try:
        checked("conv_transpose", [step.step], input, tuple(input.shape), True, "prologue")
    except (TypeError, RuntimeError, ValueError):
        return None
    source, _ = step.operands[0]
    first = source if is_only_for(source, value) else step.nodes[0]
    return step if _may_move(nodes[nodes.index(first) : nodes.index(layer)], {*step.nodes}) else None


def _may_move(nodes: Sequence[Node], taken: set[Node]) -> bool:
    """Whether calls ``taken`` from a row of nodes have the same result at its end."""
    if change_between(nodes, taken, lambda each: None) is not None:
        return False
    others = [node for node in nodes if node not in taken]
    if any(each in taken for node in others for each in may_change(node)):
        return False
    # In another mode the layer would be recorded for derivatives.
    return not any(getattr(node.target, "__name__", "") in _MODES for node in others)


def _nodes_of(arguments: Sequence[Any]) -> list[Node]:
    found: list[Node] = []
    map_arg(tuple(arguments), found.append)
    return found


def _replace_input(graph: Graph, layer: Node, step: GraphStep) -> Node:
    """Replaces a layer's call by one that computes ``step`` on its input."""
    _, weight, bias, *_ = layer.args
    operands, text = around(layer)
    shown = value_of(step.operands[0][0])
    assert step.step is not None
    prologue = checked("conv_transpose", [step.step], shown, tuple(shown.shape), True, "prologue")
    with graph.inserting_before(layer):
        input, *before = _operands(graph, step)
        text = f"{encoded(NONE, prologue)}{text}"
        arguments = (input, weight, bias, [*before, *operands], text, *layer.args[-5:])
        call = graph.call_function(conv_transpose_epilogue, arguments)
    call.meta = {**layer.meta}
    layer.replace_all_uses_with(call)
    graph.erase_node(layer)
    for node in reversed(step.nodes):
        if not node.users:
            graph.erase_node(node)
    return call


def _next(
    chain: list[Node], numbers: dict[Node, int], order: dict[Node, int], steps: Sequence[GraphStep]
) -> GraphStep | None:
    """The operation of the next readers of a chain; None if an epilogue cannot have it after ``steps``.

    ``numbers``: the numbers of the chain's values, as in `read_next`.
    """
    layer, reader = chain[0], next_reader(chain, order)
    if reader is not None:
        calls = reader.op in ("call_function", "call_method")
        if not calls or changes_what_is_read(reader, chain, is_in_place(reader.target, reader.kwargs)):
            reader = None
    step = step_after(reader, layer, chain[-1], numbers) or step_apart(reader, numbers)
    if step is None:
        return None
    apart = step.apart or any(each.apart for each in steps)
    if not apart and not _is_behind(step, layer, chain[-1]) and _is_valid(layer, [*steps, step]):
        return step
    if not apart and (step.step is None or step.step.kind not in OF_PIXELS):
        return None
    step = step._replace(apart=True)
    return None if _arranged(layer, [*steps, step]) is None else step


def _is_behind(step: GraphStep, layer: Node, last: Node) -> bool:
    """Whether a step that an epilogue has is faster behind the layer's kernel."""
    input, weight, *_ = map(value_of, layer.args)
    softmax = step.step is not None and step.step.kind == "softmax"
    return softmax and reductions.is_apart(value_of(last).shape, input, weight)


def _arranged(layer: Node, steps: Sequence[GraphStep]) -> reductions.Arranged | None:
    """How the steps behind the layer's kernel are computed; None if kernels do not compute them."""
    own = _own(steps)
    value = value_of(own[-1].nodes[-1] if own else layer)
    fixed = all(type(each) is int for each in value.shape)
    if not (fixed and has_kernels(value)) or any(step.ends is not None for step in steps[len(own) :]):
        return None
    behind = [each.step for each in steps[len(own) :] if each.step is not None]
    number = max((each.number for each in own), default=0)  # a copy of an earlier value has that value's
    return reductions.arranged(tuple(value.shape), number, behind, value)


def _own(steps: Sequence[GraphStep]) -> Sequence[GraphStep]:
    """The steps that the layer's epilogue computes."""
    return steps[: next((place for place, step in enumerate(steps) if step.apart), len(steps))]


def _text(layer: Node, steps: Sequence[GraphStep]) -> str:
    """The layer's own epilogue followed by these steps, as text. Raises as `polyphase.fused` for wrong operands."""
    input, size = value_of(layer.args[0]), value_of(steps[-1].nodes[-1]).shape
    found = checked("conv_transpose", [each.step for each in steps if each.step], input, size, True)
    epilogue, prologue = decoded(around(layer)[1])
    return encoded(epilogue.then(found), prologue)


def _is_valid(layer: Node, steps: Sequence[GraphStep]) -> bool:
    try:
        epilogue, _ = decoded(_text(layer, steps))
    except (TypeError, RuntimeError, ValueError):
        return False
    input, weight, bias, *_ = layer.args
    if not epilogue.normalizes or not value_of(input).is_cuda:
        return True
    from polyphase import runtime  # the CUDA path

    return runtime.has_kernel(value_of(input), value_of(weight), bias is not None, epilogue, *_constants(layer, steps))


def _constants(layer: Node, steps: Sequence[GraphStep]) -> tuple[Any, ...]:
    """Stride, padding, output padding, dilation and groups of the layer that computes what slices leave."""
    stride, padding, extra, *rest = layer.args[-5:]
    for step in steps:
        if step.ends is not None:
            padding, extra = crops.constants_of(padding, extra, step.ends)  # type: ignore[arg-type]
    return (stride, padding, extra, *rest)


def _replace(graph: Graph, layer: Node, steps: list[GraphStep]) -> Node:
    """Replaces the nodes of a chain by calls; returns the layer's."""
    own, chain = _own(steps), [node for step in steps for node in step.nodes]
    with graph.inserting_before(chain[-1]):
        call = _with_epilogue(graph, layer, own) if any(step.computes for step in own) else layer
        last = call if len(own) == len(steps) else _reduced(graph, layer, call, steps)
    if last is not call:
        last.meta = {**chain[-1].meta}
    chain[-1].replace_all_uses_with(last)
    for node in (*reversed(chain), *([] if call is layer else [layer])):
        graph.erase_node(node)
    return call


def _with_epilogue(graph: Graph, layer: Node, steps: Sequence[GraphStep]) -> Node:
    input, weight, bias, *_ = layer.args
    operands = [*around(layer)[0], *(node for step in steps for node in _operands(graph, step))]
    arguments = (input, weight, bias, operands, _text(layer, steps), *_constants(layer, steps))
    call, last = graph.call_function(conv_transpose_epilogue, arguments), steps[-1].nodes[-1]
    call.meta = {**last.meta}
    if any(step.ends is not None for step in steps):  # whole in memory, as every output of a layer
        call.meta["example_value"] = value_of(last).clone()
    return call


def _operands(graph: Graph, step: GraphStep) -> list[Node]:
    """A step's operands in the shapes in which it reads them."""
    return [node if shape is None else graph.call_method("reshape", (node, shape)) for node, shape in step.operands]


def _reduced(graph: Graph, layer: Node, call: Node, steps: Sequence[GraphStep]) -> Node:
    """The calls of the steps behind a layer's kernel; ``call``: the layer's."""
    found = _arranged(layer, steps)
    assert found is not None
    own = _own(steps)
    computed = [step for step in steps[len(own) :] if step.step is not None]
    read = {found.own + place: dict(zip(dict(step.step.tensors), _operands(graph, step)))  # type: ignore[union-attr]
            for place, step in enumerate(computed)}  # fmt: skip
    value, shape = call, tuple(value_of(own[-1].nodes[-1] if own else layer).shape)
    for part, reads in zip(found.parts, found.reads):
        if shape != part.shape:
            value = graph.call_method("reshape", (value, part.shape))
        operands = [read[place][role] for place, role in reads]
        value = graph.call_function(reduce_groups, (value, operands, reduction.encoded(part)))
        shape = part.output_shape
    return value if shape == found.shape else graph.call_method("reshape", (value, found.shape))
