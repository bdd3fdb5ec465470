"""The model of an emitted file: its source, and the layers that it runs."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from polyphase.bench.layers import LayerSyntaxError, parse_layer
from polyphase.bench.model_file import ModelFile, ModelFileError, on_shapes, on_the_path, unlike
from polyphase.emit.fusion import Fusion, fusion_of
from polyphase.emit.rewrite import rewrite
from polyphase.emit.support import constants
from polyphase.functional_calls import NO_MODULES
from polyphase.problem import ConvTransposeProblem

_CLASSES = {getattr(torch.nn, f"ConvTranspose{dims}d") for dims in (1, 2, 3)}


class EmitError(ValueError):
    """A model or layer that cannot be emitted."""


@dataclass(frozen=True)
class Model:
    """A model as it is emitted: its text, and its layers by name, those of equal constants once.

    ``defined``: names in its text; ``imported``: others, and what they stand for. ``is_class``: whether Model is one,
    and not a function.
    """

    source: str
    layers: dict[str, ConvTransposeProblem]
    defined: frozenset[str]
    imported: dict[str, str]
    is_class: bool = True
    fusion: Fusion = field(default_factory=Fusion)


def model_of_file(path: Path, dtype: str, tf32: bool, fuse: bool = True) -> Model:
    """The model in a file of KernelBench's form.

    ``fuse``: whether layers compute what follows them in their own kernel, where no derivatives are asked for.

    Raises `EmitError`, and `ModelFileError` where the file does not load.
    """
    with on_the_path(path.parent):
        return _of_file(path, dtype, tf32, fuse)


def _of_file(path: Path, dtype: str, tf32: bool, fuse: bool) -> Model:
    file = ModelFile.load(path)
    try:
        model, inputs, run = on_shapes(file, getattr(torch, dtype))
    except ModelFileError as failure:
        raise EmitError(str(failure)) from failure
    except Exception as failure:  # whatever else the model raises
        raise EmitError(f"{path} does not run on shapes alone: {type(failure).__name__}: {failure}") from failure
    problems = _problems(str(path), model, dict(run.problems), tf32)
    layers: dict[str, ConvTransposeProblem] = {}
    for name, problem in problems.items():
        if constants(problem) not in map(constants, layers.values()):
            layers[name] = problem
    source, defined, imported = _read(str(path), path.read_text(encoding="utf-8"))
    called = getattr(file.get_inputs, "__globals__", {})
    fusion = fusion_of(model, inputs, problems, called) if fuse else Fusion()
    return Model(source, layers, defined, imported, isinstance(file.make_model, type), fusion)


def model_of_layer(text: str, dtype: str | None, tf32: bool) -> Model:
    """A model of one layer, in the notation of `polyphase.bench.layers`. Raises `EmitError`."""
    try:
        problem = parse_layer(text)
    except LayerSyntaxError as failure:
        raise EmitError(str(failure)) from None
    problem = replace(problem, dtype=dtype or problem.dtype)
    problem = replace(problem, tf32=tf32, tf32_as_pytorch=tf32)
    defined, imported = frozenset({"Model", "get_inputs", "get_init_inputs"}), {"torch": "torch", "nn": "torch.nn"}
    return Model(_source_of_layer(problem), {"layer": problem}, defined, imported)


def _source_of_layer(problem: ConvTransposeProblem) -> str:
    arguments = [f"{problem.in_channels}", f"{problem.out_channels}", f"{problem.kernel_size}"]
    defaults = ("stride", 1), ("padding", 0), ("output_padding", 0), ("groups", 1), ("dilation", 1)
    for name, default in defaults:
        value = getattr(problem, name)
        if any(size != default for size in (value if isinstance(value, tuple) else (value,))):
            arguments.append(f"{name}={value}")
    arguments.append(f"bias={problem.bias}")
    return f'''import torch
from torch import nn


class Model(nn.Module):
    """{problem}"""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose{problem.dims}d({", ".join(arguments)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def get_inputs() -> list:
    return [torch.rand({", ".join(map(str, problem.input_shape))})]


def get_init_inputs() -> list:
    return []
'''


def _problems(
    name: str, model: torch.nn.Module, traced: dict[str, ConvTransposeProblem | None], tf32: bool
) -> dict[str, ConvTransposeProblem]:
    """The problem of each layer, by its name. Raises `EmitError` for a layer that has no kernels in emitted files."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, _ConvTransposeNd)}
    if not modules:
        raise EmitError(f"{name}: {NO_MODULES}. Kernels are emitted for modules, not for calls of torch.nn.functional")
    found = {}
    for path, module in modules.items():
        shown = path or "the model itself"
        if not any(type(module) is cls for cls in _CLASSES):  # polyphase's own are equal to them
            raise EmitError(f"{name}: {shown} is a {_class_and_remedy(module)}")
        if module.padding_mode != "zeros":
            raise EmitError(f"{name}: {shown} has padding_mode={module.padding_mode!r}; only 'zeros' is supported")
        if path not in traced:
            raise EmitError(
                f"{name}: {shown} is not called with the inputs of get_inputs(), so its sizes are not known"
            )
        problem = traced[path]
        if reason := unlike(shown, module, problem):
            raise EmitError(f"{name}: {reason}")
        assert problem is not None
        found[path] = replace(problem, tf32=tf32, tf32_as_pytorch=tf32)
    return found


def _class_and_remedy(module: _ConvTransposeNd) -> str:
    own = f"torch.nn.ConvTranspose{len(module.kernel_size)}d"
    told = f"{type(module).__qualname__}, and not {own} itself: "
    if is_parametrized(module):
        parameters = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        return (
            f"{told}its {parameters} is parametrized. At the end of Model's constructor call "
            "torch.nn.utils.parametrize.remove_parametrizations(layer, name), and load a state_dict that was saved "
            "after that call"
        )
    return f"{told}build that in the model, as emitted files have kernels for no other class"


def _read(name: str, text: str) -> tuple[str, frozenset[str], dict[str, str]]:
    """The text without what an emitted file has elsewhere or cannot have; names in it, and what others stand for."""
    tree = ast.parse(text)
    defined, imported = set(), {}
    kept = text.splitlines()
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for local, target in _imports(name, statement):
                imported[local] = target
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                kept[statement.lineno - 1] = ""
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(statement.name)
        else:
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            defined |= {node.id for node in stored if isinstance(node.ctx, ast.Store)}
    if "ModelNew" in defined:
        raise EmitError(f"{name} defines ModelNew, which is what the emitted file will define")
    if isinstance(tree.body[0], ast.Expr) and ast.get_docstring(tree) is not None:
        comment = [f"# {line}".rstrip() for line in (ast.get_docstring(tree) or "").splitlines()]
        kept[tree.body[0].lineno - 1 : tree.body[0].end_lineno] = comment
    return rewrite("\n".join(kept)), frozenset(defined), imported


def _imports(name: str, statement: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """What an import binds, and to what. Raises `EmitError` for what an emitted file cannot count on."""
    if isinstance(statement, ast.ImportFrom):
        module = "." * statement.level + (statement.module or "")
        found = [(alias.asname or alias.name, f"{module}.{alias.name}") for alias in statement.names]
    else:
        found = [
            (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0], alias.name.split(".")[0])
            for alias in statement.names
        ]
    for _, target in found:
        package = target.split(".")[0]
        if package not in ("torch", "__future__") and package not in sys.stdlib_module_names:
            raise EmitError(
                f"{name} imports {target}: an emitted file carries the model's source, and imports only torch and "
                "the standard library"
            )
    return [] if any(target.startswith("__future__") for _, target in found) else found
