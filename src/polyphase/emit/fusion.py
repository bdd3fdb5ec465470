"""The forward method of an emitted file in which layers compute what follows them in their own kernel.

The model is traced by `torch.fx`, and the chains are those that `polyphase.fuse` finds. A traced forward is the one of
this model alone: of its mode, of the numbers that its modules hold, of its own modules. So the method asks for all of
these before it is used, and the model's own forward comes after it.
"""

from __future__ import annotations

import ast
import builtins
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from polyphase import elementwise, fuse, fused
from polyphase.bench.model_file import copied
from polyphase.elementwise import COPIES, is_closed
from polyphase.fuse_graphs import InPlaceTracer
from polyphase.fuse_trace import Trace, call_name, is_of_pixels, shared_modules
from polyphase.module_steps import STEPS
from polyphase.problem import ConvTransposeProblem
from polyphase.problem.epilogue import OF_PIXELS, Epilogue
from polyphase.torch_op.steps import checked

_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_INDENT = " " * 8
_FREED = re.compile(r";  ((?:\w+ = )+)None$")


class NotFused(Exception):  # noqa: N818
    """Why a model's forward stays as it is."""


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
    """What becomes of a model: its chains, each of other kernels, its forward by mode, and what is told."""

    chains: tuple[Chain, ...] = ()
    forwards: dict[bool, _Forward] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def methods(self, first: int, called_as: Callable[[str], str]) -> str:
        """The text of the methods that use the chains; "" without chains.

        ``first``: the number that the first chain has; ``called_as``: what the functions are called that are used.
        """
        if not self.chains:
            return ""
        numbers = {chain.kernel: number for number, chain in enumerate(self.chains, first)}
        return _methods(self.forwards, numbers, called_as)


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
    for forward in traced.values():
        for part in forward.parts.values():
            chains.setdefault(part.chain.kernel, part.chain)
    evaluating, training = traced[False].blocks, traced[True].blocks
    remarks = tuple(evaluating)
    if evaluating != training:
        remarks = (
            *(f"in evaluation mode, {each}" for each in evaluating),
            *(f"in training mode, {each}" for each in training),
        )
    return Fusion(tuple(chains.values()), traced, remarks)


def _methods(
    traced: dict[bool, _Forward], numbers: dict[ConvTransposeProblem, int], called_as: Callable[[str], str]
) -> str:
    """``forward``, and a method for each mode in which there are chains; one for both where they are the same."""
    texts = {training: forward.text(numbers, called_as("run_chain")) for training, forward in traced.items()}
    evaluating, training = traced[False], traced[True]
    if texts[False] == texts[True] and evaluating.guards == training.guards:
        modes = {"_fused": (evaluating, "")}
    else:
        modes = {"_fused_evaluation": (evaluating, "not self.training"), "_fused_training": (training, "self.training")}
        modes = {name: each for name, each in modes.items() if each[0].parts}
    signature, arguments = evaluating.signature
    lines = [
        f"    def forward({signature}):",
        '        """What `Model` computes; without derivatives, layers compute what follows them, too."""',
        f"        inference = {called_as('runs_in_inference')}(self)",
    ]
    for name, (forward, mode) in modes.items():
        tests = ["inference", *filter(None, [mode]), *forward.guards]
        condition = " and ".join(tests)
        if len(condition) > 100:
            condition = "(\n            " + "\n            and ".join(tests) + "\n        )"
        lines += [f"        if {condition}:", f"            return self.{name}({arguments})"]
    lines.append(f"        return super().forward({arguments})")
    for name, (forward, _) in modes.items():
        lines += ["", f"    def {name}({signature}):", texts[forward.training]]
    return "\n".join(lines)


class _Part(NamedTuple):
    """A chain where it stands in a graph: its nodes, the layer first, and its operands as they are written."""

    chain: Chain
    nodes: list[Node]
    operands: list[str]


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
        self._lines = _lines_of(self.graph, called)
        _run_on_shapes(self._model, self.graph, inputs)
        for node in self.graph.nodes:
            changed = node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
            if changed and elementwise.is_in_place(node.target, {}) and not isinstance(node.meta["value"], Tensor):
                raise NotFused("its forward changes a number that has two names")  # which torch.fx writes as one
        self.parts: dict[Node, _Part] = {}  # by the last node of each
        self.blocks: list[str] = []
        self._find()
        self.guards = self._guards()

    @property
    def signature(self) -> tuple[str, str]:
        """The method's parameters, and how they are passed on."""
        given = [node for node in self.graph.nodes if node.op == "placeholder"]
        names = [str(node.target) for node in given]
        defaults = [f"={node.args[0]!r}" if node.args else "" for node in given]
        return ", ".join(["self", *map("".join, zip(names, defaults))]), ", ".join(names)

    def _traced(self) -> Graph:
        """The graph; what is not in it must not have happened."""
        before = _attributes(self._model)
        try:
            with _reading(self._reads):
                graph = InPlaceTracer().trace(self._model)
            again = InPlaceTracer().trace(self._model)
        except Exception as failure:  # whatever a model does with a proxy
            what = str(failure).strip().partition("\n")[0]
            raise NotFused(f"torch.fx does not trace its forward ({type(failure).__name__}: {what})") from None
        self._tensors = _tensors_of(self._model, graph)
        if _attributes(self._model) != before:
            raise NotFused("its forward changes attributes of its modules")
        if str(graph) != str(again):
            raise NotFused("its forward is not the same at every call")
        for node in graph.nodes:
            if node.op == "placeholder" and str(node.target).startswith("*"):
                raise NotFused("its forward takes any number of arguments")
            if node.op == "placeholder" and node.args and type(node.args[0]) not in _PLAIN[:-1]:
                raise NotFused(f"the default of {node.target} is no constant")
        return graph

    def _find(self) -> None:
        trace = Trace(self.graph, self._model, shared_modules(self._model))
        for layer in self.graph.nodes:
            if layer.op != "call_module" or str(layer.target) not in self._layers:
                continue
            nodes, reason = trace.chain_of(layer)
            if len(layer.args) != 1 or layer.kwargs:
                nodes, reason = [], "it is called with further arguments"
            names, why = self._joined(layer, nodes)
            before = trace.before(layer)  # which is emitted as PyTorch's call
            alone = "" if before is None else f"; {before.target} before it is not fused in emitted files"
            self.blocks.append(f"{fuse.Block(str(layer.target), tuple(names), why or reason)}{alone}")

    def _joined(self, layer: Node, nodes: list[Node]) -> tuple[list[str], str]:
        """Note as many nodes behind a layer as its kernel computes here: their names, and why there are no more."""
        steps: list[list[fused.Step]] = []  # none or one of each node
        operands: list[list[str]] = []
        numbers = {layer: 0}  # of operations before each value
        why, problem = "", self._layers[str(layer.target)]
        for node in nodes:
            why = self._why_not(node, layer, numbers)
            reads: dict[tuple[int, str], Any] = {}
            with _reading(reads):
                found = None if why else self._step_of(node, layer, numbers)
            before = [each for some in steps for each in some]
            if found is None or self._epilogue([*before, *found[0]], layer) is None:
                name = node.target if node.op == "call_module" else f"{call_name(node)}()"
                why = f"{name}: {why or 'its operands are not of the kinds that an epilogue reads'}"
                break
            self._reads.update(reads)
            steps, operands = [*steps, found[0]], [*operands, found[1]]
            numbers[node] = (
                numbers[node.all_input_nodes[0]] if call_name(node) in COPIES else len(before) + len(found[0])
            )
        while not is_closed([layer, *nodes[: len(steps)]]):
            steps.pop()
        taken, whole = nodes[: len(steps)], [each for some in steps for each in some]
        if not whole:
            return [], why
        epilogue = self._epilogue(whole, layer)
        assert epilogue is not None
        names = [f"{call_name(node)}()" if call_name(node) else str(node.target) for node in taken]
        chain = Chain(str(layer.target), tuple(names), replace(problem, epilogue=epilogue))
        written = [each for some in operands[: len(steps)] for each in some]
        self.parts[taken[-1]] = _Part(chain, [layer, *taken], written)
        return names, why

    def _why_not(self, node: Node, layer: Node, taken: Collection[Node]) -> str:
        """Why a node cannot be computed with the layer and what is between, or ""."""
        if call_name(node) == "cat":
            return "in emitted files PyTorch joins tensors"
        module = self._model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if call_name(node) in OF_PIXELS or is_of_pixels(module, layer.meta["value"].dim()):
            return "emitted files have no kernel of all channels of a pixel"
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
            return bool(getattr(self._model.get_submodule(str(node.target)), "inplace", False))
        return node.op in ("call_function", "call_method") and bool(elementwise.may_change(node))

    def _step_of(self, node: Node, layer: Node, numbers: dict[Node, int]) -> tuple[list[fused.Step], list[str]] | None:
        """What a node computes, none or one step, and its operands as they are written; None for what none computes."""
        output = layer.meta["value"]
        if node.op == "call_module":
            module: Any = self._model.get_submodule(str(node.target))
            step = STEPS[type(module)](module)
            names = [] if step is None else [self._tensors[id(tensor)] for _, tensor in step.tensors]
            return ([] if step is None else [step]), names
        read = elementwise.read_next(call_name(node), node, numbers)
        if read is None:
            return None
        reading, _ = read
        if reading.other is None:
            return ([fused.Step(reading.kind, reading.constants)] if reading.kind else []), []
        if reading.other in numbers:
            again = elementwise.step_of_value(reading, numbers[reading.other])
            return None if again is None else ([again], [])
        other: Any = reading.other.meta.get("value") if isinstance(reading.other, Node) else None
        if not isinstance(other, Tensor) or other.dtype != output.dtype:
            return None
        kind = elementwise.per(reading.kind, other.shape, output.shape)
        if not kind:
            return None
        shape = elementwise.read_as(kind, output.shape)
        step = elementwise.step_of(reading, other if shape is None else other.reshape(shape), kind)
        return [step], [reading.other.name]

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
        """What must be so of the model for the method to compute what it computes."""
        paths = {id(module): path for path, module in self._model.named_modules()}
        found = []
        for part in self.parts.values():
            for node in part.nodes[1:]:
                if node.op == "call_module":
                    kind = type(self._model.get_submodule(str(node.target)))
                    found.append(f"type({_attribute(str(node.target))}) is nn.{kind.__name__}")
        for (module, name), value in self._reads.items():
            text = _constant(value)
            if text is None:
                raise NotFused(f"its forward reads {name}, a {type(value).__name__}, which torch.fx makes a constant")
            found.append(f"{_attribute('.'.join(filter(None, (paths[module], name))))} == {text}")
        return list(dict.fromkeys(found))

    def text(self, numbers: dict[ConvTransposeProblem, int], run_chain: str) -> str:
        """The method's body; ``run_chain`` is the function that runs one. Values are freed behind their last use."""
        pieces = self._pieces(numbers, run_chain)
        last_use = {node: place for place, (_, used) in enumerate(pieces) for node in used}
        lines: list[str] = []
        for place, (written, used) in enumerate(pieces):
            lines += [f"{_INDENT}{line}" for line in written]
            freed = [node.name for node in used if last_use[node] == place]
            if freed and place + 1 < len(pieces):  # behind the last the method ends
                lines.append(f"{_INDENT}{' = '.join(freed)} = None")
        return "\n".join(lines)

    def _pieces(self, numbers: dict[ConvTransposeProblem, int], run_chain: str) -> list[tuple[list[str], list[Node]]]:
        """Lines that belong together, in order, and the values that they use up or only have for themselves."""
        inner = {node for part in self.parts.values() for node in part.nodes}
        pieces = []
        for node in self.graph.nodes:
            if node in self.parts:
                chain, nodes, operands = self.parts[node]
                used = dict.fromkeys(each for some in nodes for each in (some, *some.all_input_nodes) if each != node)
                layer, listed = _attribute(chain.layer), ", ".join(operands)
                called = f"{run_chain}({numbers[chain.kernel]}, {layer}, {nodes[0].args[0]}, [{listed}])"
                lines = [
                    f"{node.name} = {called}",
                    f"if {node.name} is None:  # tensors of other shapes or dtypes",
                    *(f"    {self._lines[each]}" for each in nodes),
                ]
                pieces.append((lines, list(used)))
            elif node not in inner and self._lines[node]:
                pieces.append(([self._lines[node]], list(node.all_input_nodes)))
        return pieces


@contextmanager
def _reading(found: dict[tuple[int, str], Any]) -> Iterator[None]:
    """Notes which plain attributes of modules are read: torch.fx takes them for constants."""

    def read(module: Any, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name not in _OF_MODULES and name in object.__getattribute__(module, "__dict__"):
            found[id(module), name] = value
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


def _attributes(model: nn.Module) -> list[dict[str, Any]]:
    """What modules hold, by identity, except for the constants that torch.fx makes of tensors."""
    held = (vars(module).items() for module in model.modules())
    return [{name: id(value) for name, value in each if not name.startswith("_tensor_constant")} for each in held]


def _constant(value: Any) -> str | None:
    """A value as text, or None for what has none."""
    if isinstance(value, tuple):
        items = [_constant(each) for each in value]
        return None if None in items else f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")' if value == value else None
    return repr(value) if type(value) in _PLAIN else None


def _attribute(path: str) -> str:
    """``self.path``, where a part of the path may be no identifier."""
    root = "self"
    for part in filter(None, path.split(".")):
        root = f"{root}.{part}" if part.isidentifier() else f'getattr({root}, "{part}")'
    return root


def _tensors_of(model: nn.Module, graph: Graph) -> dict[int, str]:
    """Parameters and buffers, by identity, as the method has them."""
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) not in named:
            raise NotFused("its forward makes a tensor of its own, which torch.fx takes for a constant")
    return {id(tensor): _attribute(name) for name, tensor in named.items()}


class _Shapes(Interpreter):
    """Leaves at each node the value that it has."""

    def run_node(self, n: Node) -> Any:
        """The value of a node."""
        n.meta["value"] = value = super().run_node(n)
        return value


def _run_on_shapes(model: nn.Module, graph: Graph, inputs: Sequence[Any]) -> None:
    try:
        with torch.no_grad():
            _Shapes(GraphModule(copied(model), graph)).run(*inputs)
    except Exception as failure:  # whatever the model does on shapes alone
        what = str(failure).strip().partition("\n")[0]
        raise NotFused(f"what torch.fx traced does not run ({type(failure).__name__}: {what})") from None


def _lines_of(graph: Graph, called: dict[str, Any]) -> dict[Node, str]:
    """The line of each node; the names in them are torch, builtins, and those of the model's file."""
    code = graph.python_code("self")
    body = code.src[code.src.index("def forward(") :].splitlines()[1:]
    lines = [line.strip() for line in body if line.strip()]
    found: dict[Node, str] = {}
    for node in graph.nodes:
        has_none = node.op == "placeholder" and node.name == str(node.target)
        found[node] = "" if has_none else _FREED.sub("", lines.pop(0))
    if lines:
        raise NotFused("torch.fx writes its forward in a way that is not known")
    names = {node.name for node in graph.nodes} | {str(node.target) for node in graph.nodes if node.op == "placeholder"}
    for line in found.values():
        for used in (each for each in ast.walk(ast.parse(line.removeprefix("return "))) if isinstance(each, ast.Name)):
            known = used.id in names or used.id in ("self", "torch") or hasattr(builtins, used.id)
            if not known and called.get(used.id) is not code.globals.get(used.id, called):
                raise NotFused(f"its forward calls {used.id}, which the file does not have under that name")
    return found
