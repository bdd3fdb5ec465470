"""``emit``: a model with its kernels as one file that needs only PyTorch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyphase.commands.options import NOTATION, Dtype, architectures, model_files

if TYPE_CHECKING:
    from polyphase.emit.model import Model
    from polyphase.problem.device import DeviceInfo


def emit(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", metavar="OUT.py")],
    file: Annotated[
        Path | None,
        typer.Argument(help="A model file in KernelBench's form.", metavar="FILE", show_default=False),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(help=f"Instead of a file. {NOTATION}", show_default=False),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="Architectures, comma-separated, such as sm_80,sm_90a. Default: this machine's GPU, or sm_90a.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of weights and inputs. Default: float32, or the layer's.")
    ] = None,
    strict_fp32: Annotated[
        bool,
        typer.Option("--strict-fp32", help="No TF32. Default: forward passes round where PyTorch does by default."),
    ] = False,
    fuse: Annotated[
        bool,
        typer.Option("--fuse/--no-fuse", help="Fuse what follows each layer into its kernel (used without gradients)."),
    ] = True,
) -> None:
    """Write a model with its kernels as one file. It needs only PyTorch, which builds it with nvcc when it runs.

    The file holds the CUDA source of the kernels that the planner chooses for each transposed convolution of the model
    (forward, and both gradients), the host code that launches them for inputs of any size, and a class ModelNew with
    the constructor, weights and random numbers of Model. Needs no GPU.
    """
    from polyphase.bench.model_file import ModelFileError
    from polyphase.bench.report import make_console
    from polyphase.emit import file as emitter
    from polyphase.emit.model import EmitError
    from polyphase.emit.rules import broken
    from polyphase.errors import CompilationError, UnsupportedError

    if output.is_dir() or (file is not None and output.resolve() == file.resolve()):
        what = "a folder" if output.is_dir() else "the model's own file"
        raise typer.BadParameter(f"{output} is {what}", param_hint="--output")
    devices = _devices(arch)
    words = ["python", "-m", "polyphase", "emit", *(["--layer", layer] if layer else [str(file)])]
    words += ["--arch", ",".join(device.arch for device in devices)]
    words += ["--dtype", dtype.value] if dtype else []
    words += ["--strict-fp32"] if strict_fp32 else []
    words += [] if fuse else ["--no-fuse"]
    try:
        model = _model(file, layer, dtype, not strict_fp32, fuse)
        emitted = emitter.emit(
            model, devices, str(file or f"A layer ({layer})"), shlex.join([*words, "-o", str(output)])
        )
    except (EmitError, ModelFileError) as failure:
        raise typer.BadParameter(str(failure), param_hint="--layer" if layer else "FILE") from None
    except (UnsupportedError, CompilationError) as failure:
        make_console(stderr=True).print(str(failure), style="bold red", markup=False)
        raise typer.Exit(1) from None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(emitted.text, encoding="utf-8")
    except OSError as failure:
        raise typer.BadParameter(str(failure), param_hint="--output") from None

    console = make_console()
    for name, where, pass_, described in emitted.plans:
        console.print(f"{name or 'the model itself'}, {where}, {pass_}: {described}", markup=False, soft_wrap=True)
    for remark in emitted.remarks:
        console.print(remark, markup=False)
    for rule in broken(emitted.text):
        console.print(f"KernelBench's static check will refuse the file, because it {rule}: see the model's source")
    console.print(f"written to {output}: {len(emitted.text.splitlines())} lines", markup=False)


def _model(file: Path | None, layer: str | None, dtype: Dtype | None, tf32: bool, fuse: bool) -> Model:
    from polyphase.emit.model import model_of_file, model_of_layer

    if (file is None) == (layer is None):
        raise typer.BadParameter("give a model file or a --layer, and not both", param_hint="FILE")
    if layer is not None:
        return model_of_layer(layer, None if dtype is None else dtype.value, tf32)
    assert file is not None
    model_files([file])
    return model_of_file(file, (dtype or Dtype.FLOAT32).value, tf32, fuse)


def _devices(arch: str | None) -> list[DeviceInfo]:
    """A typical device of each architecture, so that the same command writes the same file anywhere."""
    from polyphase.problem.device import DeviceInfo

    if arch is None:
        import torch

        arch = DeviceInfo.of(torch.device("cuda")).arch if torch.cuda.is_available() else "sm_90a"
    return architectures(arch)
