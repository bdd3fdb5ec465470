"""The forward method of an emitted file in which layers compute what follows them in their own kernel.

The model is traced by `torch.fx`, and the chains are those that `polyphase.fuse` finds. A traced forward is the one of
this model alone: of its mode, of the numbers that its modules hold, of its own modules. So the method asks for all of
these before it is used, and the model's own forward comes after it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx import Graph, Node

from polyphase import elementwise, fuse, fused, reductions
from polyphase.bench.model_file import copied
from polyphase.elementwise import COPIES, is_closed
from polyphase.emit.chains import Tail, structure_of
from polyphase.emit.operations import Operation, name_of, operation_of, parted, with_values
from polyphase.emit.traced import (
    PLAIN,
    NotFused,
    attribute,
    attributes,
    constant,
    lines_of,
    reading,
    run_on_shapes,
    tensors_of,
)
from polyphase.fuse_graphs import InPlaceTracer
from polyphase.fuse_trace import Trace, call_name, shared_modules
from polyphase.problem import ConvTransposeProblem
from polyphase.problem.epilogue import Epilogue
from polyphase.torch_op.steps import checked

_INDENT = " " * 8


@dataclass(frozen=True)
class Chain:
    """A layer and what its kernel computes behind it; ``names`` are those of the operations as the model has them."""

    layer: str
    names: tuple[str, ...]
    problem: ConvTransposeProblem

    @property
    def title(self) -> str:
        """All names."""
        return " → ".join((self.layer, *self.names))

    @property
    def kernel(self) -> ConvTransposeProblem:
        """The problem without what its kernels do not depend on: chains that have it in common share these."""
        dims = self.problem.dims
        return replace(self.problem, batch=1, input_size=(1,) * dims, output_padding=(0,) * dims)


@dataclass(frozen=True)
class Fusion:
    """What becomes of a model: its chains, each of other kernels, the tails of its layers, by what they compute, its
    forward by mode, and what is told.
    """

    chains: tuple[Chain, ...] = ()
    tails: dict[Tail, str] = field(default_factory=dict)
    forwards: dict[bool, _Forward] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def fuses(self) -> bool:
        """Whether there is anything to fuse."""
        return bool(self.chains or self.tails)

    def methods(self, first: int, called_as: Callable[[str], str]) -> str:
        """The text of the methods that use the chains and tails; "" without any.

        ``first``: the number that the first chain has; ``called_as``: what the functions are called that are used.
        """
        if not self.fuses:
            return ""
        chains = {chain.kernel: number for number, chain in enumerate(self.chains, first)}
        tails = {tail: number for number, tail in enumerate(self.tails)}

        def called(computed: Chain | Tail) -> str:
            if isinstance(computed, Tail):
                return f"{called_as('run_tail')}({tails[computed]}"
            return f"{called_as('run_chain')}({chains[computed.kernel]}"

        return _methods(self.forwards, called, called_as("runs_in_inference"))


def fusion_of(
    model: nn.Module, inputs: Sequence[Any], layers: dict[str, ConvTransposeProblem], called: dict[str, Any]
) -> Fusion:
    """The chains of a model on shapes alone, and its forward with them.

    Args:
        model: on the meta device.
        inputs: what it is called with, there.
        layers: the problems of its layers that have kernels, by the qualified name.
        called: what the model's file has under the names that its forward may use.
    """
    try:
        traced = {training: _Forward(model, inputs, layers, called, training) for training in (False, True)}
    except NotFused as reason:
        return Fusion(remarks=(f"emitted without fusion: {reason}",))
    chains: dict[ConvTransposeProblem, Chain] = {}
    tails: dict[Tail, str] = {}
    for forward in traced.values():
        for part in forward.parts.values():
            if isinstance(part.computed, Tail):
                tails.setdefault(part.computed, part.title)
            else:
                chains.setdefault(part.computed.kernel, part.computed)
    evaluating, training = traced[False].blocks, traced[True].blocks
    remarks = tuple(evaluating)
    if evaluating != training:
        remarks = (
            *(f"in evaluation mode, {each}" for each in evaluating),
            *(f"in training mode, {each}" for each in training),
        )
    return Fusion(tuple(chains.values()), tails, traced, remarks)


def _methods(traced: dict[bool, _Forward], called: Callable[[Chain | Tail], str], inference: str) -> str:
    """``forward``, and a method for each mode in which there are chains; one for both where they are the same."""
    texts = {training: forward.text(called) for training, forward in traced.items()}
    evaluating, training = traced[False], traced[True]
    if texts[False] == texts[True] and evaluating.guards == training.guards:
        modes = {"fused": (evaluating, "")}
    else:
        modes = {"fused_evaluation": (evaluating, "not self.training"), "fused_training": (training, "self.training")}
        modes = {name: each for name, each in modes.items() if each[0].parts}
    modes = {evaluating.unused(f"_{name}"): each for name, each in modes.items()}
    signature, arguments = evaluating.signature
    lines = [
        f"    def forward({signature}):",
        '        """What `Model` computes; without derivatives, layers compute what follows them, too."""',
    ]
    for name, (forward, mode) in modes.items():
        tests = [*filter(None, [mode]), f'{inference}(self, "{evaluating.structure}")', *forward.guards]
        condition = " and ".join(tests)
        if len(condition) > 100:
            condition = "(\n            " + "\n            and ".join(tests) + "\n        )"
        lines += [f"        if {condition}:", f"            return self.{name}({arguments})"]
    lines.append(f"        return super().forward({arguments})")
    for name, (forward, _) in modes.items():
        lines += ["", f"    def {name}({signature}):", texts[forward.training]]
    return "\n".join(lines)


class _Part(NamedTuple):
    """Nodes that one call computes: a layer's with its chain, or those of its tail.

    ``read``: the tensors that the call takes, as they are written, the operands last; ``title``: all names.
    """

    computed: Chain | Tail
    nodes: list[Node]
    read: str
    title: str


class _Forward:
    """The forward method of a model in one mode, with what its layers can compute."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        layers: dict[str, ConvTransposeProblem],
        called: dict[str, Any],
        training: bool,
    ) -> None:
        self.training = training
        self._model = copied(model).train(training)
        self._layers = layers
        self._reads: dict[tuple[int, str], Any] = {}
        self._tensors: dict[int, str] = {}  # as the method has them, by identity
        self.graph = self._traced()
        self._lines = lines_of(self.graph, called)
        run_on_shapes(self._model, self.graph, inputs)
        for node in self.graph.nodes:
            changed = node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
            if changed and elementwise.is_in_place(node.target, {}) and not isinstance(node.meta["value"], Tensor):
                raise NotFused("its forward changes a number that has two names")  # which torch.fx writes as one
        self.parts: dict[Node, _Part] = {}  # by the last node of each
        self.blocks: list[str] = []
        self._find()
        self.guards = self._guards()
        self.structure = structure_of(self._model)

    def unused(self, name: str) -> str:
        """A name like this one that the model does not have."""
        while hasattr(self._model, name):
            name += "_"
        return name

    @property
    def signature(self) -> tuple[str, str]:
        """The method's parameters, and how they are passed on."""
        given = [node for node in self.graph.nodes if node.op == "placeholder"]
        names = [str(node.target) for node in given]
        defaults = [f"={node.args[0]!r}" if node.args else "" for node in given]
        return ", ".join(["self", *map("".join, zip(names, defaults))]), ", ".join(names)

    def _traced(self) -> Graph:
        """The graph; what is not in it must not have happened."""
        before = attributes(self._model)
        try:
            with reading(self._reads):
                graph = InPlaceTracer().trace(self._model)
            again = InPlaceTracer().trace(self._model)
        except Exception as failure:  # whatever a model does with a proxy
            what = str(failure).strip().partition("\n")[0]
            raise NotFused(f"torch.fx does not trace its forward ({type(failure).__name__}: {what})") from None
        self._tensors = tensors_of(self._model, graph)
        if attributes(self._model) != before:
            raise NotFused("its forward changes attributes of its modules")
        parameters = inspect.signature(self._model.forward).parameters.values()
        if any(each.kind is each.KEYWORD_ONLY for each in parameters):
            raise NotFused("its forward has keyword-only arguments")
        if str(graph) != str(again):
            raise NotFused("its forward is not the same at every call")
        for node in graph.nodes:
            if node.op == "placeholder" and str(node.target).startswith("*"):
                raise NotFused("its forward takes any number of arguments")
            if node.op == "placeholder" and node.args and type(node.args[0]) not in PLAIN[:-1]:
                raise NotFused(f"the default of {node.target} is no constant")
        return graph

    def _find(self) -> None:
        """Finds what kernels compute behind each layer, in a copy of the graph, which is changed by this."""
        searched = copy.deepcopy(self.graph)
        originals = dict(zip(searched.nodes, self.graph.nodes))
        trace = Trace(searched, self._model, shared_modules(self._model), reduces=True)
        for node in list(searched.nodes):
            if node.op != "call_module" or str(node.target) not in self._layers:
                continue
            nodes, reason = trace.chain_of(node)
            layer = originals[node]
            if len(layer.args) != 1 or layer.kwargs:
                nodes, reason = [], "it is called with further arguments"
            names, why = self._joined(layer, [with_values(originals[each]) for each in nodes])
            before = trace.before(node)  # which is emitted as PyTorch's call
            alone = "" if before is None else f"; {before.target} before it is not fused in emitted files"
            self.blocks.append(f"{fuse.Block(str(layer.target), tuple(names), why or reason)}{alone}")

    def _joined(self, layer: Node, behind: list[list[Node]]) -> tuple[list[str], str]:
        """Notes as many operations behind a layer as kernels compute: their names, and why there are no more.

        ``behind``: the nodes of each, the last with its result.
        """
        calls: list[Operation] = []
        numbers = {layer: 0}  # of operations before each value
        why = ""
        for nodes in behind:
            value = calls[-1].nodes[-1] if calls else layer
            reads: dict[tuple[int, str], Any] = {}
            with reading(reads):
                why = self._why_not(nodes[0], layer, numbers)
                found = None if why else operation_of(nodes, value, numbers, self._model, self._tensors)
            if found is None or self._computed([*calls, found], layer) is None:
                why = f"{name_of(nodes[0])}: {why or 'its operands are not of the kinds that kernels read'}"
                break
            self._reads.update(reads)
            calls.append(found)
            source = nodes[0].all_input_nodes[0]
            copied = call_name(nodes[0]) in COPIES
            numbers[nodes[-1]] = numbers[source] if copied else sum(len(call.steps) for call in calls)
        while calls and not self._is_whole(calls, layer):
            calls.pop()
        computed = self._computed(calls, layer) if calls else None
        if computed is not None:
            self._note(layer, calls, *computed)
        return [name_of(call.nodes[0]) for call in calls], why

    def _computed(self, calls: list[Operation], layer: Node) -> tuple[Epilogue, reductions.Arranged] | None:
        """The operations as data: the layer's epilogue and what its tail computes; None where that is not possible."""
        own, tail = parted(calls)
        steps = [each for call in own for each in call.steps]
        epilogue, output = self._epilogue(steps, layer), layer.meta["value"]
        if epilogue is None or not tail:
            return None if epilogue is None else (epilogue, reductions.PLAIN)
        behind = [each for call in tail for each in call.steps]
        found = reductions.arranged(tuple(output.shape), len(steps), behind, output) if output.is_contiguous() else None
        return None if found is None else (epilogue, found)

    def _is_whole(self, calls: list[Operation], layer: Node) -> bool:
        """Whether nothing else reads values between, and each kernel computes something."""
        own, tail = parted(calls)
        nodes = [layer, *(node for call in own for node in call.nodes)]
        behind = [node for call in tail for node in call.nodes]
        last = (tail or own)[-1]
        computed = self._computed(calls, layer)
        assert computed is not None
        whole = not tail or (computed[1].parts and last.steps and last.steps[0].kind != "view")
        return is_closed(nodes) and is_closed(behind) and bool(whole) and any(call.steps for call in calls)

    def _note(self, layer: Node, calls: list[Operation], epilogue: Epilogue, found: reductions.Arranged) -> None:
        """Notes what one or two calls compute."""
        own, tail = parted(calls)
        if epilogue:
            nodes = [layer, *(node for call in own for node in call.nodes)]
            problem = replace(self._layers[str(layer.target)], epilogue=epilogue)
            chain = Chain(str(layer.target), tuple(name_of(call.nodes[0]) for call in own), problem)
            listed = ", ".join(name for call in own for name, _ in call.operands)
            read = f"{attribute(chain.layer)}, {layer.args[0]}, [{listed}]"
            self.parts[nodes[-1]] = _Part(chain, nodes, read, chain.title)
        if tail:
            title = " → ".join((str(layer.target), *(name_of(call.nodes[0]) for call in calls)))
            self._note_tail(own[-1].nodes[-1] if own else layer, tail, found, title)

    def _note_tail(self, value: Node, tail: list[Operation], found: reductions.Arranged, title: str) -> None:
        computing = [call for call in tail if call.steps]
        named = {
            (place, role): operand
            for place, call in enumerate(computing, found.own)
            for (role, _), operand in zip(call.steps[0].tensors, call.operands)
        }
        read = [named[each] for reads in found.reads for each in reads]
        source, dtype = value.meta["value"].shape, str(value.meta["value"].dtype).removeprefix("torch.")
        computed = Tail(
            dtype,
            tuple(source),
            found.parts,
            tuple(shape for _, shape in read),
            found.shape,
            all(call.any_batch for call in tail),
        )
        nodes = [node for call in tail for node in call.nodes]
        self.parts[nodes[-1]] = _Part(computed, nodes, f"{value}, [{', '.join(name for name, _ in read)}]", title)

    def _why_not(self, node: Node, layer: Node, taken: Collection[Node]) -> str:
        """Why a node cannot be computed with the layer and what is between, or ""."""
        if call_name(node) == "cat":
            return "in emitted files PyTorch joins tensors"
        module = self._model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if module is not None and not type(module).__module__.startswith("torch.nn."):
            return "it is no module of PyTorch's"
        drops = isinstance(module, nn.modules.dropout._DropoutNd)
        if self.training and module is not None and (drops or isinstance(module, nn.modules.batchnorm._NormBase)):
            return "its result is another in training mode"
        order = list(self.graph.nodes)
        for other in order[order.index(layer) + 1 : order.index(node)]:
            if other not in taken and self._changes(other):
                return f"{other.name} may change a tensor before it"
        return ""

    def _changes(self, node: Node) -> bool:
        """Whether a node may change a tensor in place."""
        if node.op == "call_module":
            module = self._model.get_submodule(str(node.target))
            counts = self.training and isinstance(module, nn.modules.batchnorm._NormBase)  # its statistics
            return counts or bool(getattr(module, "inplace", False))
        return node.op in ("call_function", "call_method") and bool(elementwise.may_change(node))

    def _epilogue(self, steps: list[fused.Step], layer: Node) -> Epilogue | None:
        """The steps as data; None where they cannot be an epilogue of this layer."""
        value, output = layer.args[0].meta["value"], layer.meta["value"]  # type: ignore[union-attr]
        if output.dim() != len(self._layers[str(layer.target)].input_size) + 2:  # a single image
            return None
        try:
            return checked("", steps, value, tuple(output.shape), True)
        except (TypeError, RuntimeError, ValueError):
            return None

    def _guards(self) -> list[str]:
        """What must be so of the model and its inputs for the method to compute what it computes."""
        paths = {id(module): path for path, module in self._model.named_modules()}
        found = [_kind_of_input(node) for node in self.graph.nodes if node.op == "placeholder"]
        for part in self.parts.values():
            for node in part.nodes[isinstance(part.computed, Chain) :]:
                if node.op == "call_module":
                    kind = type(self._model.get_submodule(str(node.target)))
                    found.append(f"type({attribute(str(node.target))}) is nn.{kind.__name__}")
        for (module, name), value in self._reads.items():
            text = constant(value)
            if text is None:
                raise NotFused(f"its forward reads {name}, a {type(value).__name__}, which torch.fx makes a constant")
            found.append(f"{attribute('.'.join(filter(None, (paths[module], name))))} == {text}")
        return list(dict.fromkeys(filter(None, found)))

    def text(self, called: Callable[[Chain | Tail], str]) -> str:
        """The method's body; ``called`` begins the call of a chain or tail. Values are freed behind their last use."""
        pieces = self._pieces(called)
        last_use = {node: place for place, (_, used) in enumerate(pieces) for node in used}
        lines: list[str] = []
        for place, (written, used) in enumerate(pieces):
            lines += [f"{_INDENT}{line}" for line in written]
            freed = [node.name for node in used if last_use[node] == place]
            if freed and place + 1 < len(pieces):  # behind the last the method ends
                lines.append(f"{_INDENT}{' = '.join(freed)} = None")
        return "\n".join(lines)

    def _pieces(self, called: Callable[[Chain | Tail], str]) -> list[tuple[list[str], list[Node]]]:
        """Lines that belong together, in order, and the values that they use up or only have for themselves."""
        inner = {node for part in self.parts.values() for node in part.nodes}
        pieces = []
        for node in self.graph.nodes:
            if (part := self.parts.get(node)) is not None:
                used = dict.fromkeys(each for own in part.nodes for each in (own, *own.all_input_nodes) if each != node)
                lines = [
                    f"{node.name} = {called(part.computed)}, {part.read})",
                    f"if {node.name} is None:  # tensors of other shapes or dtypes",
                    *(f"    {self._lines[each]}" for each in part.nodes),
                ]
                pieces.append((lines, list(used)))
            elif node not in inner and self._lines[node]:
                pieces.append(([self._lines[node]], list(node.all_input_nodes)))
        return pieces


def _kind_of_input(node: Node) -> str:
    """What an input must be like, as that with which the model was traced; "" for kinds that no number tells."""
    name, value = str(node.target), node.meta["value"]
    if isinstance(value, Tensor):
        return f"isinstance({name}, torch.Tensor)"
    text = constant(value)
    return "" if text is None else f"type({name}) is type({text}) and {name} == {text}"
