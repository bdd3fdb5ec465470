"""What a command is about: a model file, a function that returns a model and its inputs, or a library's own class."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyphase.bench.model_file import ModelFile, ModelFileError, on_the_path, run_file

_RETURNS = "it has to return the model and a list of its inputs, as in `return model, [x]`"


@contextmanager
def opened(text: str, shapes: Sequence[str] = (), config: str = "") -> Iterator[ModelFile]:
    """`load_target`, with the folder of the file on the path, or this one for a module, until the block ends."""
    path = path_of(text)
    with on_the_path(Path() if path is None else path.parent):
        yield load_target(text, shapes, config)


def path_of(text: str) -> Path | None:
    """The file that a target names, which need not be there; None for ``module:name``."""
    where = text.rpartition(":")[0]
    if not where or Path(text).is_file():
        return Path(text)
    return Path(where) if where.endswith(".py") else None


def load_target(text: str, shapes: Sequence[str] = (), config: str = "") -> ModelFile:
    """A model file, or what ``module:name`` or ``file.py:name`` is: a function or a model's class.

    A function returns a model and a list of its inputs. A class is built from ``config``, keywords in JSON or the name
    of a file that holds them, and is called on random tensors of ``shapes``. Raises `ModelFileError`.
    """
    (where, _, name), path, found = text.rpartition(":"), path_of(text), None
    if path is not None and not path.is_file():
        no_module = "" if path.suffix == ".py" else ", nor module:function"
        raise ModelFileError(f"{path} is not a file{no_module}")
    if path != Path(text):
        found = getattr(_module(where), name, None)
        if not callable(found):
            raise ModelFileError(f"{where} has no function {name}")
    if isinstance(found, type) and issubclass(found, nn.Module):
        return _of_class(text, found, [_shape(each) for each in shapes], _keywords(config))
    if shapes or config:
        raise ModelFileError(f"--input and --config are for a model's class, as in module:Class, and {text} is none")
    return ModelFile.load(Path(text)) if found is None else _of_function(text, _file(found, where), found)


def _module(where: str) -> Any:
    if where.endswith(".py"):
        return run_file(Path(where), "polyphase_report")
    try:
        return importlib.import_module(where)
    except ImportError as failure:
        raise ModelFileError(f"{where} cannot be imported: {failure}") from failure


def _file(found: Any, where: str) -> Path:
    """The file whose lines are named where it raises."""
    try:
        return Path(inspect.getfile(found))
    except TypeError:  # of an object that can be called, or C++
        return Path(where)


def _of_function(text: str, path: Path, function: Callable[[], Any]) -> ModelFile:
    inputs: list[Any] = []

    def make_model() -> nn.Module:
        made = function()
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
            raise ModelFileError(f"{text} returns something of type {type(made).__name__}; {_RETURNS}")
        if not isinstance(made[1], (list, tuple)):
            raise ModelFileError(f"{text} returns inputs of type {type(made[1]).__name__}; {_RETURNS}")
        inputs[:] = made[1]
        return made[0]

    making = f"{text.rpartition(':')[2]}(), called without arguments,"
    return ModelFile(path, make_model, lambda: list(inputs), list, making)


def _of_class(text: str, kind: type[nn.Module], shapes: list[list[int]], keywords: dict[str, Any]) -> ModelFile:
    """Keywords are those of the constructor, or of the config that it takes: transformers' classes name theirs."""
    if not shapes:
        raise ModelFileError(
            f"{text} is a class, for `report`: --input gives the shape of a tensor that its forward takes, as in "
            "--input 1x3x64x64 (again for the next one), and --config what its constructor takes, as JSON"
        )
    of_config = getattr(kind, "config_class", None)

    def make_model() -> nn.Module:
        return kind(of_config(**keywords)) if of_config is not None else kind(**keywords)

    given = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
    making = f"{kind.__name__}({given})"
    return ModelFile(_file(kind, text), make_model, lambda: [torch.rand(shape) for shape in shapes], list, making)


def _shape(text: str) -> list[int]:
    if not re.fullmatch(r"\d+([x×,]\d+)*", text):
        raise ModelFileError(f"--input takes a shape such as 1x3x64x64, not {text!r}")
    return [int(size) for size in re.split("[x×,]", text)]


def _keywords(config: str) -> dict[str, Any]:
    if not config:
        return {}
    try:
        keywords = json.loads(Path(config).read_text(encoding="utf-8") if config.endswith(".json") else config)
    except (OSError, ValueError) as failure:
        raise ModelFileError(f"--config takes JSON, or a file NAME.json: {failure}") from None
    if not isinstance(keywords, dict):
        raise ModelFileError(f'--config takes keywords, such as {{"channels": 64}}, not {config}')
    return keywords
