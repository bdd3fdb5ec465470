"""`accelerate` a built model, and `restore` it.

A module is swapped by changing the class of the instance itself. Parameters, buffers, hooks, training mode, and every
reference to it (shared submodules, the root, an optimizer's parameters) do not change, and nothing is copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from polyphase import modules
from polyphase.functional_calls import NO_MODULES, function_calls, override_call
from polyphase.fuse import Block, unfuse
from polyphase.fuse import fuse as fuse_modules
from polyphase.text_table import text_table

if TYPE_CHECKING:
    from rich.table import Table

_NAMES = [f"{lazy}ConvTranspose{dims}d" for lazy in ("", "Lazy") for dims in (1, 2, 3)]
_PAIRS = [(getattr(torch.nn, name), getattr(modules, name)) for name in _NAMES]
# By id, as the classes of a pair are equal (`polyphase.modules.StandIn`).
_TO_POLYPHASE: dict[int, type] = {id(theirs): ours for theirs, ours in _PAIRS}
_TO_TORCH: dict[int, type] = {id(ours): theirs for theirs, ours in _PAIRS}
_RESTORE = "polyphase.restore"


class Outcome(Enum):
    """The result for a module."""

    SWAPPED = "swapped"
    RESTORED = "restored"
    ALREADY = "already done"
    LEFT = "left alone"


@dataclass(frozen=True)
class Entry:
    """A transposed convolution of the model.

    Attributes:
        names: its qualified names, more than one if it is shared; "" is the model itself.
        module: the module's class and arguments.
        outcome: the result for it.
        reason: why, unless it was swapped or restored.
        device: the device of its parameters.
    """

    names: tuple[str, ...]
    module: str
    outcome: Outcome
    reason: str = ""
    device: torch.device | None = None


@dataclass(frozen=True, repr=False)
class Report:
    """The report of `accelerate` or `restore`. It prints as a table with the ``note`` below it.

    ``model`` is the given model, so that one line can build and accelerate it: ``accelerate(build()).model``.
    ``blocks``: the operations fused into each layer, with ``fuse=True``.
    """

    title: str
    entries: tuple[Entry, ...]
    note: str = ""
    model: Module | None = field(default=None, compare=False)
    blocks: tuple[Block, ...] = ()

    @property
    def swapped(self) -> tuple[Entry, ...]:
        """The modules that were swapped, or restored."""
        return self._of(Outcome.SWAPPED, Outcome.RESTORED)

    @property
    def already(self) -> tuple[Entry, ...]:
        """The modules that needed no change."""
        return self._of(Outcome.ALREADY)

    @property
    def left(self) -> tuple[Entry, ...]:
        """The modules that were left alone, each with a reason."""
        return self._of(Outcome.LEFT)

    def _of(self, *outcomes: Outcome) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.outcome in outcomes)

    def __rich__(self) -> Table | str:
        from rich.table import Table
        from rich.text import Text

        if not self.entries:
            return str(self)
        head, *rows = self._rows()
        table = Table(title=self._counts(), title_justify="left", caption=self.note, caption_justify="left")
        for column in head:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def _counts(self) -> str:
        done = Outcome.RESTORED.value if self.title == _RESTORE else Outcome.SWAPPED.value
        counts = f"{len(self.swapped)} {done}, {len(self.already)} already done, {len(self.left)} left alone"
        return f"{self.title}: {counts}"

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [("name", "module", "outcome")]
        for entry in self.entries:
            names = ", ".join(name or "(the model itself)" for name in entry.names)
            outcome = entry.outcome.value + (f": {entry.reason}" if entry.reason else "")
            rows.append((names, entry.module, outcome))
        return rows

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raises TypeError: the caller used the report as the model."""
        raise TypeError(f"{self._not_the_model()}. A report cannot be called")

    def __getattr__(self, name: str) -> NoReturn:
        """Raises AttributeError, for the same reason."""
        if name.startswith("__") or "title" not in vars(self):  # Python itself looks it up, for example for pickling
            raise AttributeError(name)
        raise AttributeError(f"{self._not_the_model()}; the report has no {name!r}")

    def _not_the_model(self) -> str:
        return (
            f"{self.title} changes the model itself, and returns this report: write {self.title}(model) without "
            f"assigning it, or model = {self.title}(model).model"
        )

    def __repr__(self) -> str:
        if not self.entries:
            return "\n".join(filter(None, (f"{self.title}: {NO_MODULES}", self.note)))
        return text_table(self._counts(), self._rows(), self.note)


def accelerate(model: Module, filter: Callable[[str, Module], bool] | None = None, fuse: bool = False) -> Report:
    """Swaps the transposed convolutions of ``model`` for polyphase's, in place.

    Args:
        model: any module; it may itself be a transposed convolution.
        filter: called for each transposed convolution, with its qualified name ("" for the model itself) and the
            module; if it returns False, the module is not swapped.
        fuse: also fuse into each layer the operations that are the only readers of its output: batch norms, layer
            norms over channels, activations, dropouts, sums, and concatenations, into which layers write directly. This
            holds in evaluation mode: for modules always, for functions where no gradients are recorded (see the guide
            "Inference"). In training, faster kernels compute the batch and instance norms behind layers, with their
            activations (the guide "Training"). `restore` undoes both.

    Returns:
        A `Report` of every transposed convolution: swapped, or why not. Subclasses of PyTorch's modules are left alone,
        as they may compute something else; so are quantized and scripted modules, and those whose ``forward`` was
        replaced on the instance. It says on which devices the portable path computes, such as a CPU, and which methods
        call PyTorch's function themselves, which `accelerate` does not reach. Its ``model`` is the one that was given,
        and its ``blocks`` say what was fused.

    Raises:
        TypeError: ``model`` is no module, or ``filter`` cannot be called.

    Warns:
        UserWarning: if the model has no transposed convolution that polyphase can take.
    """
    report = _convert("polyphase.accelerate", model, filter, _TO_POLYPHASE)
    functions = _about_functions(model)
    notes = (_about_devices((*report.swapped, *report.already)), functions)
    blocks = fuse_modules(model) if fuse else ()
    note = "\n".join(note for note in (*notes, *map(str, blocks)) if note)
    report = replace(report, note=note, blocks=blocks)
    if not report.swapped and not report.already:
        found = f"\n{report}" if report.entries else f". {functions}" if functions else ""
        warnings.warn(f"polyphase.accelerate: nothing was swapped in {model._get_name()}{found}", stacklevel=2)
    return report


def restore(model: Module) -> Report:
    """Makes every polyphase module of ``model`` PyTorch's again, in place: undoes `accelerate`.

    Returns:
        A `Report` of every transposed convolution. Modules that were built as polyphase's become PyTorch's as well.
    """
    if isinstance(model, Module):
        unfuse(model)
    return _convert(_RESTORE, model, None, _TO_TORCH)


def _convert(
    title: str, model: Module, filter: Callable[[str, Module], bool] | None, classes: Mapping[int, type]
) -> Report:
    if not isinstance(model, Module):
        raise TypeError(f"{title} takes a torch.nn.Module, not {type(model).__name__}")
    if filter is not None and not callable(filter):
        raise TypeError(f"{title} takes as filter a function of a name and a module, or None, not {filter!r}")
    names: dict[Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_transposed_convolution(module):
            names.setdefault(module, []).append(name)
    entries = []
    for module, paths in names.items():
        described = f"{module._get_name()}({module.extra_repr()})"
        outcome, reason = _outcome(module, paths[0], filter, classes)
        device = next((parameter.device for parameter in module.parameters()), None)
        entries.append(Entry(tuple(paths), described, outcome, reason, device))
    for module, entry in zip(names, entries):  # all or, where a filter raises, none
        if entry.outcome in (Outcome.SWAPPED, Outcome.RESTORED):
            module.__class__ = _rebased(module, type(module), classes)
    return Report(title, tuple(entries), model=model)


def _about_devices(entries: Iterable[Entry]) -> str:
    """The devices that use the portable path, in a sentence, or "". A model on meta has no device yet."""
    with_kernels = ("meta", "cuda") if torch.version.cuda is not None else ("meta",)
    places = {entry.device.type for entry in entries if entry.device is not None} - set(with_kernels)
    if not places:
        return ""
    on = " and ".join(sorted(places))
    return (
        f"On {on} polyphase uses its portable path: everything runs, and most layers are slower than PyTorch's. "
        "polyphase's kernels need an NVIDIA GPU."
    )


def _about_functions(model: Module) -> str:
    """The methods that call PyTorch's function, in a sentence, or ""."""
    calls = function_calls(model)
    if not calls:
        return ""
    more = f", and {len(calls) - 3} more do" if len(calls) > 3 else ""
    return (
        f"Modules are swapped, calls of functions are not: {', '.join(calls[:3])}{more}. Call polyphase's function of "
        f"that name there (its arguments are the same), or run the model within {override_call()}."
    )


def _is_transposed_convolution(module: Module) -> bool:
    """Whether a module's name is one's: the report also lists other libraries' modules, which do not change."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return bool(names.intersection(_NAMES)) or getattr(module, "original_name", None) in _NAMES


def _outcome(
    module: Module, name: str, filter: Callable[[str, Module], bool] | None, classes: Mapping[int, type]
) -> tuple[Outcome, str]:
    cls = _class_of(module)
    if any(cls is target for target in classes.values()):
        return Outcome.ALREADY, ""
    if id(cls) not in classes:
        return Outcome.LEFT, _why_not(module, cls, classes)
    if "forward" in vars(module):
        return Outcome.LEFT, "its forward was replaced on the instance, so its class does not decide what it computes"
    if filter is not None and not filter(name, module):
        return Outcome.LEFT, "the filter answered False"
    return (Outcome.RESTORED if classes is _TO_TORCH else Outcome.SWAPPED), ""


def _class_of(module: Module) -> type:
    """The module's class, without classes that PyTorch may have derived from it."""
    cls = type(module)
    while (base := _base_of_generated(module, cls)) is not None:
        cls = base
    return cls


def _base_of_generated(module: Module, cls: type) -> type | None:
    """The class from which PyTorch has generated ``cls``; None for any other class.

    ``ParametrizedX`` of `torch.nn.utils.parametrize` derives from X, ``FSDPX`` of ``fully_shard`` and others of
    `torch.distributed` from one of their own classes and X.
    """
    front, base = cls.__bases__[0], cls.__bases__[-1]
    if parametrize.is_parametrized(module) and cls.__name__ == f"Parametrized{base.__name__}":
        return base
    generated = all(each.__module__.startswith("torch.distributed.") for each in (front, cls))
    return base if generated and cls.__name__.endswith(base.__name__) else None


def _rebased(module: Module, cls: type, classes: Mapping[int, type]) -> type:
    """The class to swap for ``cls``: a class that PyTorch generated is generated again from another base.

    A new class, since copies of a module share theirs. ``remove_parametrizations`` finds the base in ``__bases__``.
    """
    base = _base_of_generated(module, cls)
    if base is None:
        return classes[id(cls)]
    left_out = ("__dict__", "__weakref__", "__abstractmethods__", "_abc_impl")
    namespace = {name: value for name, value in vars(cls).items() if name not in left_out}
    return type(cls.__name__, (*cls.__bases__[:-1], _rebased(module, base, classes)), namespace)


def _why_not(module: Module, cls: type, classes: Mapping[int, type]) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by TorchScript, which takes PyTorch's own layers only"
    if "quantized" in cls.__module__:
        return f"quantized ({cls.__module__})"
    for ancestor in cls.__mro__:
        if id(ancestor) in classes:
            return f"{cls.__qualname__} is a subclass of {ancestor.__name__} and may compute something else"
    return f"{cls.__module__}.{cls.__qualname__} is no subclass of PyTorch's module"
