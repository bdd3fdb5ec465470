"""The nodes of a traced model that a transposed convolution can compute, and why not more (`polyphase.fuse`)."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized

from polyphase import crops, reduction_steps
from polyphase.between import SIZES
from polyphase.elementwise import (
    CONCATENATIONS,
    COPIES,
    MAKE_NEW,
    change_between,
    changes_other,
    changes_what_is_read,
    is_closed,
    is_in_place,
    joined_once,
    name_of,
    next_reader,
    read_next,
    step_of_value,
)
from polyphase.module_steps import (
    has_hooks,
    has_no_state,
    layer_norm,
    norm,
    reader_before,
    reader_of,
    sees_input,
)
from polyphase.modules import LAYERS
from polyphase.problem.epilogue import ACTIVATIONS, MOST_CHANNELS, OF_PIXELS
from polyphase.reduction_steps import EXTREMES

_WAITING = (torch.nn.Softplus, torch.nn.Softmax, torch.nn.Softmax2d)


def shared_modules(model: Module) -> set[int]:
    """Modules with several names, by id."""
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {module for module, count in names.items() if count > 1}


def is_waited_for(part: Any) -> bool:
    """Whether a layer waits for a part: a call, given by its name, or one of certain modules."""
    return isinstance(part, (str, *_WAITING)) or reduction_steps.is_module(part)


def before_waiting(nodes: Sequence[torch.fx.Node], parts: Sequence[Any], shared: Sequence[Module]) -> int:
    """The number of parts right after a layer, of ``nodes``, that are modules it computes with derivatives too.

    They end at a value that is read twice, and at modules for which it waits as for calls: shared modules, and modules
    that may have to compute themselves under autocast, or whose result differs for an input without a batch.
    """
    waits = [place for place, part in enumerate(parts) if is_waited_for(part) or part in shared]
    again = [place for place, value in enumerate(nodes[:-1]) if len(value.users) > 1]
    return min([len(parts), *waits, *again])


def is_layer(module: Any) -> bool:
    """Whether a module is one of polyphase's layers, not of a subclass."""
    return any(type(module) is cls for cls in LAYERS)


def why_missing(name: str, layer: Module, traced: Sequence[str]) -> str:
    """Why none of the searched graphs contains a layer."""
    if is_parametrized(layer):
        return (
            "its weight is computed at every call by a parametrization: call "
            "torch.nn.utils.parametrize.remove_parametrizations before"
        )
    if not is_layer(layer):
        return f"{type(layer).__name__} is a subclass, and may compute something else"
    if any(name.startswith(prefix) for prefix in traced):
        return "forward does not call it"
    return "torch.fx cannot trace what calls it" if name else "nothing follows it"


def call_name(node: torch.fx.Node) -> str:
    """The kind of a call; "" if no layer can compute it."""
    if node.op == "call_function" and node.target in CONCATENATIONS:
        return "cat"
    if node.op not in ("call_function", "call_method"):
        return ""
    return name_of(node.target) or reduction_steps.name_of(node.target) or crops.name_of(node.target)


def is_copy(node: torch.fx.Node) -> bool:
    """Whether a node's value equals its argument."""
    return call_name(node) in (*COPIES, crops.CONTIGUOUS)


def _forget_sizes(graph: torch.fx.Graph) -> None:
    """Removes reads of a tensor's size or type, which are known before, from a graph that is never run."""
    for node in graph.nodes:
        of_attribute = node.op == "call_function" and node.target is getattr and node.args[1] in SIZES
        if of_attribute or (node.op == "call_method" and node.target in SIZES):
            node.args = node.args[1:]


def _without_indices(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Calls of ``min`` and ``max`` of which only values are read; they replace these, in a graph that is never run."""
    found = set()
    for node in list(graph.nodes):
        users = list(node.users)
        if call_name(node) in EXTREMES and users and all(_is_first(each) for each in users):
            for user in users:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
            found.add(node)
    return found


def _is_first(node: torch.fx.Node) -> bool:
    """Whether a node reads the values of ``min`` or ``max``, or nothing reads the node, as in ``values, _ = ...``."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return False
    return node.args[1:] in ((0,), ("values",)) or not node.users


class Trace:
    """The graph of a module's calls, and the nodes that layers already compute.

    ``name``: the module's name in the model; "" is the model itself. ``reduces``: pooling, reductions and norms after a
    layer's own epilogue count as computed by the layer (`polyphase.reductions`).
    """

    def __init__(
        self, graph: torch.fx.Graph, root: Module, shared: set[int], name: str = "", reduces: bool = False
    ) -> None:
        self._reduces = reduces
        self._extremes: set[torch.fx.Node] = set()
        if reduces:
            _forget_sizes(graph)
            self._extremes = _without_indices(graph)
        self._root = root
        self._name = name
        self._shared = shared
        self._nodes = list(graph.nodes)
        self._order = {node: place for place, node in enumerate(self._nodes)}
        self._calls = [node.target for node in self._nodes if node.op == "call_module"]
        self._taken: set[torch.fx.Node] = set()

    def _module(self, node: torch.fx.Node) -> Module:
        return self._module_at(node.target)

    def _module_at(self, target: Any) -> Module:
        return self._root.get_submodule(str(target))

    def _module_of(self, node: torch.fx.Node) -> Module | None:
        return self._module(node) if node.op == "call_module" else None

    def is_shared(self, node: torch.fx.Node) -> bool:
        """Whether other nodes call a node's module too, or it has several names."""
        called = node.op == "call_module"
        return called and (self._calls.count(node.target) > 1 or id(self._module(node)) in self._shared)

    def _parents(self, node: torch.fx.Node) -> list[Module]:
        """The parents, within the root, of a node's module."""
        path = str(node.target).split(".")
        return [self._module_at(".".join(path[:depth])) for depth in range(1, len(path))]

    def chain_of(self, layer: torch.fx.Node) -> tuple[list[torch.fx.Node], str]:
        """The nodes after a layer's that it can compute, and why not more."""
        found: list[torch.fx.Node] = []
        if self.is_shared(layer):
            return found, "it is called more than once"
        if self._module(layer)._forward_hooks:
            return found, "it has forward hooks, which see its own output"
        numbers, reason = {layer: 0}, ""
        while not reason:
            reader = next_reader(numbers, self._order)
            reason = self._why_no_reader(numbers, reader)
            if not reason:
                name = call_name(reader)
                numbers[reader] = max(numbers.values()) + 1
                if is_copy(reader):
                    numbers[reader] = numbers[reader.all_input_nodes[0]]
                reason = "cat() joins its output with other tensors" if name == "cat" else ""
        chain = list(numbers)
        while not is_closed(chain) or is_copy(chain[-1]) or call_name(chain[-1]) == "view":
            chain.pop()
        if len(chain[-1].users) > 1:
            reason = f"{len(chain[-1].users)} operations read its output"
        found = chain[1:]
        self._taken.update(found)
        return found, reason

    def before(self, layer: torch.fx.Node) -> torch.fx.Node | None:
        """The node of an activation that only the layer reads, and can compute on its input; None if there is none."""
        given = layer.args[0] if layer.args else None
        if not isinstance(given, torch.fx.Node) or given.op != "call_module" or given in self._taken:
            return None
        module = self._module(given)
        if reader_before(module) is None or list(given.users) != [layer]:
            return None
        if self.is_shared(given) or self.is_shared(layer):
            return None
        if len(given.args) != 1 or given.kwargs or "forward" in vars(module) or has_hooks(module):
            return None
        if getattr(module, "inplace", False) and not self._is_read_once(given.args[0]):
            return None
        if self._is_seen(given, layer):
            return None
        between = self._nodes[self._order[given] + 1 : self._order[layer]]
        return given if change_between(between, (), self._module_of) is None else None

    def function_before(self, layer: torch.fx.Node) -> str:
        """The kind of a call whose result only the layer reads, and which it could compute as a module; or ""."""
        given = layer.args[0] if layer.args else None
        if not isinstance(given, torch.fx.Node) or given.op == "call_module" or given in self._taken:
            return ""
        return name if (name := call_name(given)) in ACTIVATIONS and list(given.users) == [layer] else ""

    def _is_seen(self, given: torch.fx.Node, layer: torch.fx.Node) -> bool:
        """Whether a hook sees the result of a module that a layer reads."""
        if any(each._forward_hooks for each in self._parents(given)):
            return True
        return any(each._forward_pre_hooks for each in self._parents(layer)) or sees_input(self._module(layer))

    def _is_read_once(self, value: Any) -> bool:
        """Whether a node makes a new tensor that one node reads: no other reader sees in-place changes."""
        if not isinstance(value, torch.fx.Node) or len(value.users) != 1:
            return False
        module = self._module_of(value)
        return value.target in CONCATENATIONS if module is None else isinstance(module, MAKE_NEW)

    def _why_no_reader(self, numbers: dict[torch.fx.Node, int], reader: torch.fx.Node | None) -> str:
        """Why the next node that reads a value of a chain cannot be a part of the chain, or "".

        ``numbers``: the numbers of its nodes' values, as in `read_next`.
        """
        layer, value = next(iter(numbers)), next(reversed(numbers))
        if reader is None:
            return "nothing else reads its output"
        if reader.op == "output":
            whose = f"{self._name}'s output, and torch.fx traces no further" if self._name else "the model's output"
            return f"the next thing is {whose}"
        if reader.op == "call_module":
            if value not in reader.args:
                return f"{reader.target} reads an earlier value first"
            module, dims = self._module(reader), _dims(self._module(layer))
            in_place = bool(getattr(module, "inplace", False))
            reduced = self._is_reduced(reader, numbers)
            again = self.is_shared(reader) and not (self._reduces and has_no_state(module) and not reduced)
            reason = _why_not(module, dims, reader, again, reduced)
            reason = reason and f"{reader.target} {reason}"
            if not reason and reduced:
                reason = self._why_not_reduced(numbers, reader)
            elif not reason and is_of_pixels(module, dims):
                reason = self._why_not_of_pixels(numbers, is_waited_for(module))
            if not reason and self._waits([*numbers, reader]):
                reason = self._why_not_later(numbers, reader, str(reader.target))
        else:
            in_place = is_in_place(reader.target, reader.kwargs)
            sliced = self._reduces and call_name(reader) in (crops.NAME, crops.CONTIGUOUS)
            reason = self._why_not_sliced(numbers, reader) if sliced else self._why_no_call(numbers, reader)
        if not reason and changes_what_is_read(reader, numbers, in_place):
            return "the next operation changes in place a value that is read again"
        return reason

    def _is_reduced(self, node: torch.fx.Node, chain: Iterable[torch.fx.Node]) -> bool:
        """Whether a node after a layer, the first of ``chain``, is a pooling, a reduction or a norm."""
        layer, *_ = chain
        dims, module = _dims(self._module(layer)), self._module_of(node)
        if not self._reduces or node is layer:
            return False
        if module is not None:
            return reduction_steps.module_step(module, dims) is not None
        if node.op not in ("call_function", "call_method") or not node.args:
            return False
        if call_name(node) in EXTREMES and node not in self._extremes:  # its indices are also read
            return False
        return reduction_steps.read(node.target, node.args[0], node.args, node.kwargs, dims) is not None

    def _reduced_before(self, chain: Iterable[torch.fx.Node]) -> bool:
        """Whether a node of a chain `_is_reduced`."""
        chain = list(chain)
        return any(self._is_reduced(node, chain) for node in chain)

    def _why_not_reduced(self, chain: Iterable[torch.fx.Node], node: torch.fx.Node) -> str:
        """Why a reduction cannot be a part of a chain, or ""."""
        *_, value = chain
        again = any(reader is not node and reader not in chain for each in chain for reader in each.users)
        return f"{node} is not the only reader of its output" if again or node.args[0] is not value else ""

    def _waits(self, chain: Iterable[torch.fx.Node]) -> bool:
        """Whether a layer waits for one of the nodes after it."""
        _, *behind = chain
        return any(self.is_shared(node) or is_waited_for(call_name(node) or self._module_of(node)) for node in behind)

    def _why_no_call(self, numbers: dict[torch.fx.Node, int], call: torch.fx.Node) -> str:
        """Why the layer cannot compute a call on the last value of a chain, or ""."""
        layer, value, name = next(iter(numbers)), next(reversed(numbers)), call_name(call)
        reduced = self._is_reduced(call, numbers)
        if not reduced and name != "cat" and not name_of(call.target):
            return _why_unknown(call.target)
        if name == "cat":
            parts = joined_once(value, call.args, call.kwargs, _dims(self._module(layer)))
            if parts is None or self._reduced_before(numbers):
                return "cat() does not join it once along channels"
            return self._why_not_later(numbers, call, name)
        if call in self._taken:
            return f"{name}() is fused with another layer"
        if reduced:
            return self._why_not_reduced(numbers, call) or self._why_not_later(numbers, call, name)
        found = read_next(name, call, numbers)
        if changes_other(call.target, value if found is None else found[1], call.args, call.kwargs):
            return f"{name}() changes another tensor in place"
        again = found is not None and found[0].other in numbers
        if found is None or (again and step_of_value(found[0], 0) is None):
            return f"{name}() has arguments with which it is not fused"
        if found[0].kind in OF_PIXELS and (reason := self._why_not_of_pixels(numbers, True)):
            return reason
        return self._why_not_later(numbers, call, name)

    def _why_not_sliced(self, chain: Iterable[torch.fx.Node], call: torch.fx.Node) -> str:
        """Why the layer cannot compute a slice, or a contiguous copy, of the last value of a chain, or ""."""
        layer, *nodes = chain
        if call_name(call) == crops.CONTIGUOUS:
            wrong = len(call.args) > 1 or bool(call.kwargs)
        else:
            again = any(reader is not call and reader not in nodes for each in (layer, *nodes) for reader in each.users)
            of: Any = self._module(layer)
            wrong = again or not crops.may_be_crop(call.args[1], of.stride)
            wrong |= any(len(node.all_input_nodes) > 1 for node in nodes)
        if wrong or self._reduced_before([layer, *nodes]):
            return f"{call_name(call)}() reads its output, in a way that is not fused"
        return self._why_not_later([layer, *nodes], call, call_name(call))

    def _why_not_of_pixels(self, chain: Iterable[torch.fx.Node], softmax: bool) -> str:
        """Why no kernel has all channels of a pixel at once after a chain, for a softmax or a layer norm; or ""."""
        layer, *nodes = chain
        module: Any = self._module(layer)
        if self._reduced_before([layer, *nodes]):  # its own kernel computes it
            return ""
        if any(call_name(node) in OF_PIXELS or is_of_pixels(self._module_of(node), _dims(module)) for node in nodes):
            return "only one softmax or layer norm is fused with a layer"
        if softmax and self._reduces:
            return ""
        if module.groups > 1:
            return "the layer has groups, and no kernel has all channels of a pixel at once"
        if module.out_channels > MOST_CHANNELS:
            return f"no kernel has more than {MOST_CHANNELS} channels of a pixel at once"
        return ""

    def _why_not_later(self, chain: Iterable[torch.fx.Node], call: torch.fx.Node, name: str) -> str:
        """Why the layer's computation cannot wait until a call, or ""."""
        layer, taken = next(iter(chain)), self._taken.union(chain)
        if any(parent._forward_hooks for parent in self._parents(layer)):
            return f"a hook would see its output before {name}()"
        between = self._nodes[self._order[layer] + 1 : self._order[call]]
        changing = change_between(between, taken, self._module_of)
        return "" if changing is None else f"{changing} changes a tensor in place before {name}() is called"


def _why_unknown(function: Any) -> str:
    """Why a function's call is not part of a chain."""
    name = getattr(function, "__name__", str(function))
    if reduction_steps.name_of(function):
        return f"{name}() reads its output, in a way that is not fused"
    return f"{name}() reads its output, and is not fused"


def _dims(layer: Any) -> int:
    """Dimensions of a layer's output."""
    return len(layer.stride) + 2


def is_of_pixels(module: Any, dims: int) -> bool:
    """Whether a module computes one of `OF_PIXELS`."""
    if module is None:
        return False
    return isinstance(module, (torch.nn.Softmax, torch.nn.Softmax2d)) or reader_of(module, dims) is layer_norm


def _why_not(module: Any, dims: int, node: torch.fx.Node, again: bool, reduced: bool) -> str:
    """Why a module cannot be computed by the layer before it, whose output has ``dims``, or "".

    ``again``: it is also called elsewhere, and no layer can wait for it.
    """
    reader = reader_of(module, dims)
    if reader is None and hasattr(type(module), "_reader"):
        return "is fused with another layer"
    if reader is None and not reduced:
        how = "with settings that are not fused" if reduction_steps.is_module(module) else "which is not fused"
        name = type(module).__name__
        return f"is {'an' if name[0] in 'AEIO' else 'a'} {name}, {how}"
    if again:
        return "is called more than once"
    if len(node.args) != 1 or node.kwargs:
        return "takes further arguments"
    if "forward" in vars(module):
        return "has a forward of its own on the instance"
    if has_hooks(module):
        return "has hooks"
    if reader is norm and module.running_mean is None:
        return "has no running statistics"
    return ""
