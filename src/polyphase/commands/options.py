"""Options that several commands have, and how their text becomes values."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    import torch

    from polyphase.bench.layers import NamedLayer
    from polyphase.problem.device import DeviceInfo

Choice = TypeVar("Choice", bound=Enum)

NOTATION = (
    "A layer: the input's shape N x C_in x image, an arrow, output channels, then k (kernel) and the arguments that "
    "differ from PyTorch's defaults: s (stride), p (padding), op (output padding), d (dilation), each one number or "
    'one per dimension, g (groups), bias. Example: "16x32x128x256 -> 64, k=(3, 5), s=(2, 3), p=1, g=4, bias".'
)
"""The notation of the option ``--layer``."""

LayerTexts = Annotated[
    list[str] | None,
    typer.Option(help=f"{NOTATION} May be given again.", show_default=False),
]
"""The option ``--layer``."""

SUITES = (
    "reference (five models), kernelbench, all (the 22 layers of the record), models (64 layers of further ones), "
    "volumes (3-D), batch1 (20 layers at batch size 1), holes (21 layers that were far from their floor)"
)
"""The values of ``--suite``, several of which may be given, separated by commas."""

Suites = Annotated[str | None, typer.Option(help=f"Suites: {SUITES}.", show_default=False)]
"""The option ``--suite`` where there is no default."""

ModelTargets = Annotated[
    list[str],
    typer.Argument(
        help="Model files in KernelBench's form, or FILE.py:FUNCTION or MODULE:FUNCTION of a function that returns a "
        "model and a list of its inputs.",
        metavar="FILE",
        show_default=False,
    ),
]
"""Models on the command line."""

Seed = Annotated[int, typer.Option(help="Seed of the random layers.")]
Least = Annotated[float, typer.Option(help="Skip random layers whose H200 float32 floor is below this many µs.")]
"""Options that go with ``--random``."""


class Dtype(str, Enum):
    """A real floating-point dtype."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class Layout(str, Enum):
    """A memory format: channels before the image, in any number of dimensions, or after it."""

    NCHW = "nchw"
    CHANNELS_LAST = "channels_last"


def choices(text: str, kind: type[Choice], option: str) -> list[Choice]:
    """The members of ``kind`` that a comma-separated text names, in its order. Raises `typer.BadParameter`."""
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            found.append(kind(word))
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise typer.BadParameter(f"{word!r} is not one of {known}", param_hint=option) from None
    if not found:
        raise typer.BadParameter("no value is given", param_hint=option)
    return list(dict.fromkeys(found))


def forms(dtypes: str, layouts: str) -> tuple[list[str], list[bool]]:
    """What ``--dtypes`` names, and of what ``--layouts`` names whether it is channels_last."""
    return (
        [dtype.value for dtype in choices(dtypes, Dtype, "--dtypes")],
        [layout is Layout.CHANNELS_LAST for layout in choices(layouts, Layout, "--layouts")],
    )


def device_of(text: str | None) -> torch.device:
    """The device that is named; without a name the GPU where there is one. Raises `typer.BadParameter`."""
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        allowed = "allowed are cpu, cuda, cuda:0 and so on, and PyTorch's other devices"
        raise typer.BadParameter(f"unknown device {text!r}; {allowed}", param_hint="--device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch finds no CUDA device here", param_hint="--device")
    try:
        has_no_numbers = torch.empty(1, device=device).is_meta
    except Exception:  # a page of the dispatcher's, or what a backend says
        raise typer.BadParameter(f"PyTorch has no device {text} here", param_hint="--device") from None
    if has_no_numbers:
        raise typer.BadParameter("tensors on the meta device have no values", param_hint="--device")
    return device


def architectures(text: str) -> list[DeviceInfo]:
    """A typical device of each architecture that a comma-separated text names. Raises `typer.BadParameter`."""
    from polyphase.errors import UnsupportedError
    from polyphase.problem.device import ARCHITECTURES, DeviceInfo

    try:
        devices = [DeviceInfo.for_arch(word.strip()) for word in text.split(",")]
    except UnsupportedError as failure:
        raise typer.BadParameter(str(failure), param_hint="--arch") from None
    if not all(device.is_cuda for device in devices):
        known = ", ".join(ARCHITECTURES)
        raise typer.BadParameter(f"{text!r}: kernels are for NVIDIA GPUs, {known}", param_hint="--arch")
    return list(dict.fromkeys(devices))


def named_layers(
    texts: list[str] | None, suites: str | None = None, models: list[str] | None = None
) -> list[NamedLayer]:
    """What ``--layer``, ``--suite`` and model files name, in this order. Raises `typer.BadParameter`."""
    from polyphase.bench.layers import Suite, suite

    layers = _layers_of(texts or [])
    for name in choices(suites, Suite, "--suite") if suites else []:
        layers += suite(name)
    for target in known_targets(models or []):
        layers += _layers_of_model(target)
    return layers


def drawn_layers(count: int, seed: int, least: float) -> list[NamedLayer]:
    """What ``--random`` draws: layers whose floor on an H200 in float32 is ``least`` µs or more."""
    from polyphase.bench.random_layers import random_layers

    return random_layers(count, seed, least_seconds=1e-6 * least)


def some_layers(texts: list[str] | None, suites: str | None, models: list[str] | None) -> list[NamedLayer]:
    """`named_layers`, of which there must be one."""
    layers = named_layers(texts, suites, models)
    if not layers:
        raise typer.BadParameter("give a model file, a --layer or a --suite", param_hint="FILE")
    return layers


def _layers_of(texts: list[str]) -> list[NamedLayer]:
    """Layers in the notation of `polyphase.bench.layers`. Raises `typer.BadParameter`."""
    from polyphase.bench.layers import LayerSyntaxError, NamedLayer, parse_layer

    try:
        return [NamedLayer(text, parse_layer(text)) for text in texts]
    except LayerSyntaxError as failure:
        raise typer.BadParameter(str(failure), param_hint="--layer") from None


def model_files(paths: list[Path], option: str = "FILE") -> list[Path]:
    """The paths, if each is a file. Raises `typer.BadParameter`."""
    for path in paths:
        if not path.is_file():
            raise typer.BadParameter(f"{path} is not a file", param_hint=option)
    return paths


def known_targets(targets: list[str]) -> list[str]:
    """The targets, if what each names a file is one. Raises `typer.BadParameter`."""
    from polyphase.bench.target import path_of

    model_files([path for path in map(path_of, targets) if path is not None])
    return targets


def _layers_of_model(target: str) -> list[NamedLayer]:
    """The transposed convolutions that a model's inputs meet, in float32. Raises `typer.BadParameter`."""
    import torch

    from polyphase.bench.layers import NamedLayer
    from polyphase.bench.model_file import ModelFileError, on_shapes, unlike
    from polyphase.bench.target import opened

    try:
        with opened(target) as file:
            model, _, run = on_shapes(file, torch.float32)
    except ModelFileError as failure:
        raise typer.BadParameter(str(failure), param_hint="FILE") from None
    modules, found = dict(model.named_modules()), []
    for name, problem in run.problems:
        shown = f"{target}: {name or 'the model itself'}"
        if reason := unlike(shown, modules[name], problem):
            raise typer.BadParameter(reason, param_hint="FILE")
        assert problem is not None
        found.append(NamedLayer(shown, problem))
    if not found:
        message = (
            f"{target} calls no ConvTranspose1d/2d/3d module. For calls of torch.nn.functional's functions, give the "
            "sizes with --layer"
        )
        raise typer.BadParameter(message, param_hint="FILE")
    return found
