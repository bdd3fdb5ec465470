"""What `emit` writes: its contents, that it compiles, and what cannot be emitted."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import nvrtc11
from emitted import (
    ARCHS,
    LAYERS,
    ON_ALL,
    ROOT,
    TWO_LAYERS,
    as_planned,
    compile_by_nvcc,
    emitted,
    emitted_file,
    load,
    names,
)
from kernel_harness import H200
from polyphase.__main__ import app
from polyphase.emit import rules
from polyphase.emit.file import _choose
from polyphase.emit.model import EmitError
from polyphase.jit.includes import without_includes
from polyphase.plan.shortlist import candidates
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts

make = ConvTransposeProblem.make

# What is in the file


@pytest.mark.slow
def test_it_is_python_3_8_and_imports_torch_and_the_standard_library_alone() -> None:
    for name, text in ((name, emitted(name)) for name in names()):
        tree = ast.parse(text, feature_version=(3, 8))
        imported = {
            module.split(".")[0]
            for node in ast.walk(tree)
            for module in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else ["." * node.level + (node.module or "")]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert imported - sys.stdlib_module_names <= {"torch"}, name
        assert "__future__" not in imported, "KernelBench puts lines before the file"


# What came to the standard library after Python 3.8: where it is called, and where an annotation is evaluated.
_NEWER = {"removeprefix", "removesuffix", "lcm", "pairwise", "cache", "batched", "nextafter"}
_GENERIC = {"tuple", "list", "dict", "set", "frozenset", "type"}


def test_it_uses_nothing_that_python_3_8_lacks() -> None:
    for name, text in ((name, emitted(name)) for name in names()):
        tree = ast.parse(text)
        skipped = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        skipped |= {  # Python does not evaluate the annotations of a function's variables
            id(inner)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.AnnAssign)
            for inner in ast.walk(node.annotation)
        }
        for node in ast.walk(tree):
            if id(node) in skipped:
                continue
            where = f"{name}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in _NEWER, where
            if isinstance(node, ast.ImportFrom):
                assert not _NEWER & {alias.name for alias in node.names}, where
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                assert node.value.id not in _GENERIC, where
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called != "math.gcd" or len(node.args) == 2, where
                assert called != "zip" or not node.keywords, where


def test_it_keeps_the_static_rules_of_kernelbench() -> None:
    for name, text in ((name, emitted(name)) for name in names()):
        assert not rules.broken(text), name


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("try:", "has try and except"),
        ('"""the forward pass"""', "has the word pass"),
        ("import threading", "has threads"),
        ("torch.cuda.Event = Mine", "has timing functions that are assigned to"),
        ("class Lazy(torch.Tensor):", "has subclasses of Tensor"),
    ],
)
def test_the_static_rules_are_those_of_kernelbench(line: str, rule: str) -> None:
    good = "load_inline(__global__)  # pass, try: and except are free in comments\n"
    assert not rules.broken(good)
    assert rules.broken(good + line) == [rule]
    assert rules.broken("") == ["lacks __global__", "lacks load_inline"]


def test_the_kernels_are_the_files_of_the_package() -> None:
    for text in map(emitted, names()):
        for name in re.findall(r'^FILES\["(.+)"\] =', text, re.MULTILINE):
            written = (ROOT / "src/polyphase/kernels" / name).read_text(encoding="utf-8")
            assert without_includes(name, written) in text


@pytest.mark.parametrize(
    ("layer", "schedule", "constant", "rounded", "exact"),
    [
        (["benchmarks/kernelbench/81_asymmetric_input_strided_dilated.py"], "direct_tiled", "ROUNDED", "true", "false"),
        (["--layer", "4x512x14x14 -> 256, k=7, p=3"], "tap_gemm_tma", "PARTS", "1", "2"),
    ],
    ids=["KernelBench 81", "tensor cores"],
)
def test_emitted_forward_passes_round_where_pytorch_does(
    layer: list[str],
    schedule: str,
    constant: str,
    rounded: str,
    exact: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KernelBench holds them to PyTorch's: KernelBench 81, whose fastest kernel would be exact, and tap groups."""
    monkeypatch.chdir(ROOT)
    as_planned(monkeypatch)
    for flags, expected in (([], rounded), (["--strict-fp32"], exact)):
        done = CliRunner().invoke(app, ["emit", *layer, "--arch", "sm_90a", *flags, "-o", str(tmp_path / "out.py")])
        assert done.exit_code == 0, done.output
        assert f"forward: {schedule}" in done.output
        text = (tmp_path / "out.py").read_text(encoding="utf-8")
        constants = re.findall(
            rf"INPUT_GRAD = (true|false);\n(?:constexpr .*\n)*?constexpr \w+ {constant} = (\w+);", text
        )
        assert {value for backward, value in constants if backward == "false"} == {expected}
        assert {value for backward, value in constants if backward == "true"} <= {"false", exact if flags else rounded}


@pytest.mark.parametrize("pass_", [Pass.INPUT_GRAD, Pass.WEIGHT_GRAD])
@pytest.mark.parametrize(
    "layer",
    [
        make((8, 64, 28, 28), 128, 1, 2),
        make((4, 64, 28, 28), 32, (1, 3), 2, (0, 1), dtype="bfloat16"),
        make((1, 16, 64, 64), 1, 1, 4),
        make((4, 513, 100), 1, 1024, 256),
        make((4, 64, 100), 1, 512, 128, 128),
    ],
    ids=str,
)
def test_layers_are_not_restated(layer: ConvTransposeProblem, pass_: Pass) -> None:
    """A file computes a layer as it is at every size: the chosen config is not one for an equivalent layer."""
    chosen, sources = _choose(layer, pass_, H200)
    layouts = Layouts.of_call(layer, pass_)
    offered = candidates(chosen.schedule, layer.of_pass(pass_), pass_, H200, layouts)
    assert chosen.candidate.config in [each.config for each in offered]
    assert sources


def test_what_emit_refuses(tmp_path: Path) -> None:
    """Its input as its output, a folder, a constructor that raises, channels that the layer does not have."""
    text = (ROOT / "examples" / "square_stride1.py").read_text(encoding="utf-8")
    model = tmp_path / "model.py"

    def refused(text: str, output: Path) -> str:
        model.write_text(text, encoding="utf-8")
        done = CliRunner().invoke(app, ["emit", str(model), "--arch", "sm_90a", "-o", str(output)])
        assert done.exit_code == 2
        assert model.read_text(encoding="utf-8") == text
        return " ".join(re.sub("[│╭╮╰╯─]", "", done.output).split())

    assert "model.py is the model's own file" in refused(text, model)
    assert "is a folder" in refused(text, tmp_path)
    for arguments, reason in (
        ("[64, 64]", "Model(*get_init_inputs()) raises TypeError"),
        ("[63, 64, 3]", "has in_channels=63, and get_inputs() gives it 64"),
    ):
        assert reason in refused(text.replace("return [64, 64, 3]", f"return {arguments}"), tmp_path / "out.py")


@pytest.mark.slow
def test_a_file_names_the_command_that_writes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, in another process, whose sets have another order."""
    pytest.importorskip("cuda.core", reason="how many blocks a kernel has is settled by NVRTC")
    monkeypatch.chdir(ROOT)
    output = tmp_path / "out.py"
    done = CliRunner().invoke(app, ["emit", "examples/grouped_strided.py", "--arch", "sm_80", "-o", str(output)])
    assert done.exit_code == 0, done.output
    text = output.read_text(encoding="utf-8")
    command = re.search(r"^#     python (-m polyphase emit .*(?:\n#         .*)*)$", text, re.MULTILINE)
    assert command is not None
    output.unlink()
    subprocess.run([sys.executable, *shlex.split(command[1].replace("\n#        ", ""))], check=True)
    assert output.read_text(encoding="utf-8") == text


# That it compiles


def kernels_of(module: Any, arch: str) -> str:
    """The CUDA source without the launcher, which needs nvcc's headers."""
    source: str = module.cuda_source(arch)
    return source.partition("#define POLYPHASE_KERNELS")[0]


@pytest.mark.sampled(16, 2)
@pytest.mark.parametrize("arch", ARCHS)
def test_its_kernels_compile_together(arch: str) -> None:
    """Their names do not meet. That each compiles, on every architecture, is for `compile` to find."""
    core = pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, but no GPU")
    for name in (*ON_ALL, *LAYERS) if arch == "sm_90a" else ON_ALL:
        module = load(emitted(name))
        if arch in module.KERNELS:
            options = core.ProgramOptions(arch=arch, std="c++17")
            core.Program(kernels_of(module, arch), "c++", options).compile("cubin")


@pytest.mark.parametrize("name", ["grouped_strided", "every_parameter", "square_stride1", LAYERS[3]])
def test_its_kernels_for_sm_80_compile_with_cuda_11(name: str) -> None:
    if not nvrtc11.available():
        pytest.skip(nvrtc11.MISSING)
    nvrtc11.compile_kernels(kernels_of(load(emitted(name)), "sm_80"), "sm_80")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*ON_ALL, *LAYERS])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_whole_source_compiles_with_nvcc(name: str, arch: str, tmp_path: Path) -> None:
    """Its pass for the host, too, which knows no architecture and looks every name up."""
    compile_by_nvcc(load(emitted(name)), arch, tmp_path)


# What cannot be emitted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("import torch\n", "import torch, numpy\n", 1), "imports numpy"),
        (lambda text: text + "\nclass ModelNew: ...\n", "defines ModelNew"),
        (lambda text: text + "\nKERNELS = 1\n", "defines KERNELS"),
        (lambda text: text + "\nreplace = 1\n", "defines replace"),
        (lambda text: text.replace("import torch\n", "import torch\nfrom math import prod as math\n", 1), "math is"),
        (lambda text: text.replace("nn.ConvTranspose2d(", "nn.Conv2d("), "no ConvTranspose1d/2d/3d module found"),
        (lambda text: text.replace("self.again(x).sum(1, keepdim=True)", "1"), "again is not called"),
        (
            lambda text: text.replace("return self.body(x)", "return self.body(x.numpy())"),
            "does not run on shapes alone",
        ),
    ],
)
def test_a_model_that_cannot_be_emitted(change: Callable[[str], str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(change(TWO_LAYERS))
    with pytest.raises(EmitError, match=message):
        emitted_file(path, "sm_80")


def test_it_runs_without_being_a_module() -> None:
    """KernelBench executes the text in an empty dictionary."""
    context: dict[str, Any] = {}
    exec(compile(emitted("grouped_strided"), "text", "exec", dont_inherit=True), context)
    torch.manual_seed(42)
    new = context["ModelNew"](*context["get_init_inputs"]())
    torch.manual_seed(42)
    assert torch.equal(
        new.conv_transpose2d.weight, context["Model"](*context["get_init_inputs"]()).conv_transpose2d.weight
    )


def test_it_runs_where_its_loader_lists_no_module(tmp_path: Path) -> None:
    path = tmp_path / "unlisted.py"
    path.write_text(emitted("grouped_strided"))
    spec = importlib.util.spec_from_file_location("unlisted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.ModelNew(*module.get_init_inputs()), torch.nn.Module)
    assert "unlisted" not in sys.modules


def test_names_of_the_model_come_first() -> None:
    module: Any = load(emitted("two layers"))
    assert isinstance(module.Side(3), nn.ConvTranspose2d)
    assert module.Gather.__annotations__["src"] == "cells_Side"
    assert module.Layer is nn.Module
    assert type(module.LAYERS[0]).__name__ == "support_Layer"
    assert "\n# A licence.\n# A model of several layers: its text" in emitted("two layers")
