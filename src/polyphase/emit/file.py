"""The emitted file: a model, its plans, their kernels, and the host code they need, as one text.

Nothing of it is written here but the seams: CUDA comes from ``kernels/``, host code from the package by way of
`polyphase.emit.collect`, what runs it from `polyphase.emit.support`.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import polyphase
from polyphase.costs import table
from polyphase.emit import chains, support
from polyphase.emit.collect import (
    Found,
    Key,
    collect,
    distinct_names,
    docstring_of,
    modules_in_order,
    text_of,
    types_of,
)
from polyphase.emit.model import EmitError, Model
from polyphase.errors import UnsupportedError
from polyphase.jit.compiler import settled
from polyphase.jit.includes import without_includes
from polyphase.jit.source import KernelSource, read
from polyphase.plan.planner import Selection, plan
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import typical
from polyphase.program import params
from polyphase.program.epilogue import with_epilogue
from polyphase.program.program import Program
from polyphase.program.reduction import program_of

_HERE = Path(__file__).parent
_SUPPORT, _CHAINS = support.__name__, chains.__name__
# What runs an emitted file calls these by name, or PyTorch does.
_CALLED = {"program", "forward", "backward"}
_FILLED_IN = {"FILES", "KERNELS", "OPERATIONS", "TAILS", "BINDING", "LAUNCHER", "STRUCTS", "COSTS", "LAYERS", "CLASSES"}
_BEHIND = "behind the epilogue"  # in place of a pass, for tails
# The structs of kernels are read in their sources by the first, and looked up by the second in an emitted file.
_READ, _LOOKED_UP = (params.__name__, "params_of"), (_SUPPORT, "params_of")

# A loader may leave its module out of sys.modules, where dataclasses look it up.
_LISTED = """\
UNLISTED = __name__ not in sys.modules
if UNLISTED:
    sys.modules[__name__] = type(sys)(__name__)"""
_UNLISTED = """\
if UNLISTED:
    del sys.modules[__name__]"""


@dataclass(frozen=True)
class Emitted:
    """An emitted file, and what there is to say of it."""

    text: str
    plans: list[tuple[str, str, str, str]]  # layer, architecture, pass, plan
    remarks: list[str]


def emit(model: Model, devices: Sequence[DeviceInfo], title: str, command: str) -> Emitted:
    """The file for a model on some architectures.

    Args:
        model: see `polyphase.emit.model`.
        devices: one for each architecture.
        title: what was emitted, for the file's first lines.
        command: what emits it again.

    Raises:
        EmitError: the model's file defines a name that the emitted file needs.
        UnsupportedError: no schedule computes a pass there.
        CompilationError: a kernel does not compile.
    """
    layers, kernels, plans = _planned(model, devices)
    remarks: list[str] = list(model.fusion.remarks)
    settled_kernels = {arch: _settled(sources, arch, remarks) for arch, sources in kernels.items()}
    all_sources = [source for sources in settled_kernels.values() for source in sources]
    structs = {source.kernel: params.params_of(source) for source in all_sources}
    operations = {
        arch: {i: (each.epilogue, each.prologue) for i, each in enumerate(sources) if each.epilogue or each.prologue}
        for arch, sources in settled_kernels.items()
    }
    literals = _Literals()
    literals.of([layers, *model.fusion.tails, structs, operations])  # notes what it names
    found, names = _collected(model, literals.roots)
    host = _host(found, names)
    parts = [
        _header(model, title, command, plans),
        _imports(found, names),
        _LISTED,
        _section("The kernels, as they are in polyphase/kernels"),
        _files(all_sources),
        _section("What each of them is made from: its name, what is generated for it, its files in order"),
        _kernels(settled_kernels),
        _section("From Python to a launch, in C++"),
        _raw("LAUNCHER", (_HERE / "launcher.cuh").read_text(encoding="utf-8")),
        _raw("BINDING", (_HERE / "binding.cpp").read_text(encoding="utf-8")),
        *host,
        _section("What the kernels take as their last parameter, as read in their sources"),
        f"STRUCTS = {literals.of(structs, names)}",
        f"OPERATIONS = {literals.of(operations, names)}",
        _section("What predictions are made of: by them launches choose tiles and splits"),
        f"COSTS = {literals.of(_costs_of(host, devices))}",
        _section("What was emitted: layers, and what computes their passes"),
        f"LAYERS = {literals.of(layers, names)}",
        *([f"TAILS = {literals.of([*model.fusion.tails], names)}"] if model.fusion.tails else []),
        _classes(model, names),
        _UNLISTED,
        _section("The model"),
        model.source.strip("\n"),
        _model_new(model, names),
    ]
    return Emitted("\n\n".join(parts) + "\n", plans, remarks)


def _planned(
    model: Model, devices: Sequence[DeviceInfo]
) -> tuple[list[support.Layer], dict[str, list[KernelSource]], list[tuple[str, str, str, str]]]:
    """A model's layers with what computes them, the kernels of each architecture, and the plans."""
    plans: list[tuple[str, str, str, str]] = []
    layers: list[support.Layer] = []
    kernels: dict[str, list[KernelSource]] = {device.arch: [] for device in devices}
    wanted = [(name, problem, support.Layer, list(Pass)) for name, problem in model.layers.items()]
    for chain in model.fusion.chains:
        wanted.append((chain.title, chain.problem, chains.Chain, [Pass.FORWARD]))
    for name, problem, kind, passes in wanted:
        choices: dict[str, dict[Pass, support.Choice]] = {device.arch: {} for device in devices}
        for device, pass_ in itertools.product(devices, passes):
            chosen, sources = _choose(problem, pass_, device)
            rounds = problem.of_pass(pass_).tf32
            choices[device.arch][pass_] = support.Choice(chosen.schedule, chosen.candidate.config, rounds)
            kernels[device.arch] += [source for source in sources if source not in kernels[device.arch]]
            plans.append((name, device.arch, pass_.value, chosen.candidate.describe()))
        layers.append(kind(problem, choices))
    for (tail, name), (arch, listed) in itertools.product(model.fusion.tails.items(), kernels.items()):
        programs = [program_of(part, tail.dtype) for part in tail.parts]
        listed += [source for program in programs for source in program.sources if source not in listed]
        steps = [step.source.kernel for program in programs for step in program.steps]
        plans.append((name, arch, _BEHIND, ", ".join(steps)))
    return layers, kernels, plans


def _collected(model: Model, roots: set[Key]) -> tuple[Found, dict[Key, str]]:
    """The host code that ``roots``, and all that runs, use; and what has another name in the file."""
    modules = {(_SUPPORT, f"ConvTranspose{problem.dims}d") for problem in model.layers.values()}
    given = {_READ, *((module, name) for module in (_SUPPORT, _CHAINS, table.__name__) for name in _FILLED_IN)}
    fusion = model.fusion
    used = [*(["run_chain"] if fusion.chains else []), *(["run_tail"] if fusion.tails else [])]
    used += ["runs_in_inference"] if used else []
    found = collect(
        [*roots, *modules, (_SUPPORT, "use_kernels"), _LOOKED_UP, *((_CHAINS, name) for name in used)], _CALLED, given
    )
    found.imports["sys"] = "import sys"
    names = distinct_names(found, model.defined | set(model.imported))
    if _LOOKED_UP in names:
        names[_READ] = names[_LOOKED_UP]
    _check_names(model, found)
    return found, names


def _choose(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> tuple[Selection, list[KernelSource]]:
    """What the planner selects at a typical size, and its kernels at that and the layer's, with any output padding.

    Of a layer's two kernels it is the one that serves any size. What the lengths of rows of the output and the input
    are multiples of, up to eight elements, and how tensors are aligned, decides about some.
    """
    given, problem = problem, problem.of_pass(pass_)
    at_typical = replace(typical(problem), epilogue=given.epilogue) if pass_ is Pass.FORWARD else typical(problem)
    selected = plan(at_typical, pass_, device, by_prediction=True, as_given=True).selected
    chosen = next(each for each in selected if each.schedule.any_size(problem, pass_, device))

    def program(sized: ConvTransposeProblem, layouts: Layouts | None = None) -> Program:
        layouts = layouts or Layouts.of_call(sized, pass_)
        plain = chosen.schedule.program(sized, pass_, device, layouts, chosen.candidate.config)
        return with_epilogue(plain, replace(sized, epilogue=at_typical.epilogue), sized, layouts)

    programs = [chosen.program]
    if not chosen.program.main.tensor_maps:  # TMA's tensors are copied
        other = program(typical(problem), replace(Layouts.of_call(typical(problem), pass_), aligned=False))
        if other.main.source == chosen.program.main.source:  # and those of which another kernel reads unaligned ones
            programs.append(other)
    *others, width = typical(problem).input_size
    for wider in range(width + 1, width + 8):
        programs.append(program(replace(typical(problem), input_size=(*others, wider))))
    *others, last = problem.output_padding
    for padding in (last, last ^ 1, last ^ 2, last ^ 4):
        if padding >= max(problem.stride[-1], problem.dilation[-1]):
            continue
        padded = replace(problem, output_padding=(*others, padding))
        layouts = Layouts.of_call(padded, pass_)
        if padding == last or _takes(chosen, padded, pass_, device, layouts):
            programs.append(program(padded, layouts))
    sources = (source for program in programs for source in program.sources)
    return chosen, list(dict.fromkeys(sources))


def _takes(chosen: Selection, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts) -> bool:
    """Whether the chosen config computes a layer of another output padding."""
    schedule, config = chosen.schedule, chosen.candidate.config
    reason = refusal(schedule, problem, pass_, device, layouts)
    return reason is None and schedule.cost(problem, pass_, device, layouts, config) is not None


def _settled(sources: list[KernelSource], arch: str, remarks: list[str]) -> list[KernelSource]:
    """The kernels with as many resident blocks as leave no register spilled, as the package compiles them."""
    result = []
    for source in sources:
        try:
            result.append(settled(source, arch))
        except UnsupportedError as failure:
            remark = f"kernels were not compiled on the way: {failure}"
            remarks += [] if remark in remarks else [remark]
            result.append(source)
    return result


class _Literals:
    """Values as Python text, and the definitions that the text needs."""

    def __init__(self) -> None:
        self.roots: set[Key] = set()

    def of(self, value: Any, names: dict[Key, str] | None = None, indent: str = "") -> str:
        """``value``, over several lines where it does not fit one."""
        inner = indent + "    "
        if isinstance(value, Enum):
            return f"{self._name(type(value), names)}.{value.name}"
        if isinstance(value, dict):
            items = [f"{self.of(key, names, inner)}: {self.of(item, names, inner)}" for key, item in value.items()]
            return _bracketed("{", items, "}", indent)
        if isinstance(value, list):
            return _bracketed("[", [self.of(item, names, inner) for item in value], "]", indent)
        if is_dataclass(value) or hasattr(value, "_asdict"):
            members = (
                {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else value._asdict()
            )
            items = [f"{name}={self.of(member, names, inner)}" for name, member in members.items()]
            return _bracketed(self._name(type(value), names) + "(", items, ")", indent)
        if isinstance(value, str):
            return f'"{value}"'
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, tuple):
            items = [self.of(item, names, inner) for item in value]
            if any("\n" in item for item in items):
                return _bracketed("(", items, ")", indent)
            return "(" + ", ".join(items) + ",)"[len(value) != 1 :]
        if value is None or isinstance(value, (bool, int, float)):
            return repr(value)
        return self._name(type(value), names) + "()"  # a schedule, which has no state

    def _name(self, kind: type, names: dict[Key, str] | None) -> str:
        key = kind.__module__, kind.__name__
        self.roots.add(key)
        return (names or {}).get(key, kind.__name__)


def _bracketed(opening: str, items: list[str], closing: str, indent: str) -> str:
    line = opening + ", ".join(items) + closing
    if "\n" not in line and len(indent) + len(line) < 100:
        return line
    return opening + "".join(f"\n{indent}    {item}," for item in items) + f"\n{indent}{closing}"


def _check_names(model: Model, found: Found) -> None:
    """Definitions of the package give way to the model's; imports and what is filled in cannot."""
    ours = {name: _target(statement) for name, statement in found.imports.items()}
    for name in model.defined & (_FILLED_IN | {"UNLISTED"} | set(ours)):
        raise EmitError(f"the model's file defines {name}, and so does the emitted file; choose another name")
    for name, target in model.imported.items():
        if ours.get(name, target) != target or name in _FILLED_IN:
            raise EmitError(f"{name} is {target} in the model's file, and something else in the emitted file")


def _target(statement: str) -> str:
    words = statement.split()
    return words[1] if words[0] == "import" else f"{words[1]}.{words[3]}"


def _rounding(problem: ConvTransposeProblem) -> str:
    """Where float32 is rounded to TF32, in words."""
    if not any(problem.uses_tf32(pass_) for pass_ in Pass):
        reason = "PyTorch does not round this layer either" if problem.tf32 else "--strict-fp32"
        return f"float32 is not rounded to TF32: {reason}"
    forward = "rounds float32 to TF32 as PyTorch's own does by default, and"
    if not problem.uses_tf32(Pass.FORWARD):
        forward = "does not round float32 to TF32, nor does PyTorch's own, but"
    switches = "whatever PyTorch's switches say when this runs (--strict-fp32: nowhere)"
    return f"The forward pass {forward} gradients may, {switches}"


def _header(model: Model, title: str, command: str, plans: list[tuple[str, str, str, str]]) -> str:
    lines = [
        f"{title}, emitted by polyphase {polyphase.__version__}: a model whose transposed convolutions are computed by "
        "CUDA kernels of their own, in one file that needs PyTorch and what that builds extensions with: nvcc, a C++ "
        "compiler and ninja.",
        "",
        "ModelNew, at the end, has the constructor, parameters, state_dict and random numbers of Model. It takes "
        "inputs of any batch and image size and of any strides, in the dtype below, on GPUs of the architectures "
        "below, and gives first derivatives. The kernels are built when they are first needed, which takes about a "
        "minute; PyTorch keeps what it has built. Made for PyTorch 1.13 and newer on Python 3.8 and newer, and for "
        "nvcc 11.7 and newer; sm_90a takes nvcc 12 and PyTorch 2.2, newer architectures take versions that know them.",
        "",
    ]
    fused = {chain.title: chain.problem for chain in model.fusion.chains}
    for name, problem in (model.layers | fused).items():
        lines.append(f"Layer {name or 'Model itself'}: {replace(problem, tf32=False)}")
        lines += [f"    {arch}, {pass_}: {described}" for layer, arch, pass_, described in plans if layer == name]
        if problem.dtype == "float32":
            lines.append("    " + _rounding(problem))
        if problem.channels_last:
            lines.append("    channels_last: tensors of another memory format are copied")
    lines += [f"{name}: {described} {pass_}, {arch}" for name, arch, pass_, described in plans if pass_ == _BEHIND]
    lines += ["", "It was made, and is made again, by", "", f"    {command}", ""]
    lines += [
        "Apache License 2.0, as polyphase, except for the model's own source. Not to be edited: change the package."
    ]
    wrapped = [
        part
        for line in lines
        for part in (
            textwrap.wrap(
                line,
                117,
                subsequent_indent=" " * 8 if line.startswith(" ") else "",
                break_long_words=False,  # a path in the command stays whole
                break_on_hyphens=False,
            )
            or [""]
        )
    ]
    return "\n".join(f"# {line}".rstrip() for line in wrapped)


def _imports(found: Found, names: dict[Key, str]) -> str:
    plain = sorted({statement for statement in found.imports.values() if statement.startswith("import ")})
    grouped: dict[str, set[str]] = {}
    for statement in found.imports.values():
        if statement.startswith("from "):
            _, source, _, name = statement.split(maxsplit=3)
            grouped.setdefault(source, set()).add(name)
    grouped.setdefault("typing", set()).add("TYPE_CHECKING")
    from_imports = [f"from {source} import {', '.join(sorted(listed))}" for source, listed in sorted(grouped.items())]
    lines = [*plain, *from_imports]
    ours = [line for line in lines if line.split()[1].split(".")[0] == "torch"]
    standard = [line for line in lines if line not in ours]
    types = textwrap.indent(types_of(found, names), "    ")
    return "\n".join([*standard, "", *ours, "", "if TYPE_CHECKING:  # for annotations", types])


def _section(title: str, prose: str = "") -> str:
    lines = [f"# {line}".rstrip() for line in prose.splitlines()]
    return "\n".join([f"# {'=' * 117}", f"# {title}", f"# {'=' * 117}", *(["#", *lines] if lines else [])])


def _files(sources: list[KernelSource]) -> str:
    """The files that kernels share, without their includes: each kernel lists what it is made from."""
    names = dict.fromkeys(name for source in sources for name in source.files if name not in source.generated)
    files = "\n".join(f'FILES["{name}"] = {_quoted(without_includes(name, read(name)))}' for name in names)
    return f"FILES = {{}}\n{files}"


def _kernels(kernels: dict[str, list[KernelSource]]) -> str:
    lines = ["KERNELS = {}"]
    for arch, sources in kernels.items():
        lines.append(f'KERNELS["{arch}"] = [')
        for source in sources:
            files = ", ".join(f'"{file}"' for file in source.files)
            made = {file: text for file, text in source.generated.items() if text and file in source.files}
            generated = ", ".join(f'"{file}": {_quoted(text)}' for file, text in made.items())
            lines.append(f'    ("{source.kernel}", {{{generated}}}, ({files})),')
        lines.append("]")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """``text`` between newlines, as a raw string."""
    assert '"""' not in text
    assert not text.endswith(("\\", '"'))
    return f'r"""\n{text}"""'


def _raw(name: str, text: str) -> str:
    return f"{name} = {_quoted(text)}"


def _host(found: Found, names: dict[Key, str]) -> list[str]:
    parts = []
    for module in modules_in_order({module for module, _ in found.keys}):
        path = module.replace(".", "/") + ".py"
        title = "What this file does when it runs" if module == _SUPPORT else path
        parts += [_section(title, "" if module == _SUPPORT else docstring_of(module)), text_of(module, found, names)]
    return parts


def _costs_of(host: Sequence[str], devices: Sequence[DeviceInfo]) -> dict[str, dict[str, dict[str, float]]]:
    """The costs that the host code names, of the architectures and of what stands for those without a file."""
    text, wanted = "\n".join(host), {table.MEASURED, *(device.arch for device in devices)}
    return {
        arch: {section: terms for section, terms in found.items() if f'"{section}"' in text}
        for arch, found in table.COSTS.items()
        if arch in wanted
    }


def _classes(model: Model, names: dict[Key, str]) -> str:
    kinds = sorted({f"ConvTranspose{problem.dims}d" for problem in model.layers.values()})
    pairs = ", ".join(f"nn.{kind}: {names.get((_SUPPORT, kind), kind)}" for kind in kinds)
    return f"CLASSES = {{{pairs}}}"


def _model_new(model: Model, names: dict[Key, str]) -> str:
    """ModelNew, a class as Model is, or a function: then what it makes is of a class that is made for it."""
    use_kernels = names.get((_SUPPORT, "use_kernels"), "use_kernels")
    methods = model.fusion.methods(len(model.layers), lambda name: names.get((_CHAINS, name), name))
    if model.is_class:
        text = f'''
class ModelNew(Model):
    """`Model` with its transposed convolutions computed by the kernels above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # the same parameters, made of the same random numbers
        {use_kernels}(self)'''
        return text + (f"\n\n{methods}" if methods else "")
    text = f'''
def ModelNew(*args: Any, **kwargs: Any) -> nn.Module:
    """What `Model` makes, with its transposed convolutions computed by the kernels above."""
    model = Model(*args, **kwargs)  # the same parameters, made of the same random numbers
    {use_kernels}(model)'''
    if not methods:
        return f"{text}\n    return model"
    head = f'\nclass Fused:\n    """The forward of what ModelNew makes."""\n\n{methods}\n\n'
    return (
        f"{head}{text}\n    model.__class__ = type(type(model).__name__, (Fused, type(model)), {{}})\n    return model"
    )
