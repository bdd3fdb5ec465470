"""``emit`` and ``check --emitted``: the command line, and the check with the emulator for a GPU."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import emulator
from emitted import ROOT, TWO_LAYERS, as_planned, emitted_file, load, on_the_emulator
from polyphase.__main__ import app
from polyphase.bench.check_emitted import check_emitted, load_emitted
from polyphase.bench.check_report import show_emitted
from polyphase.bench.model_file import ModelFile
from polyphase.bench.timing import Timer
from polyphase.bench.trial import Options

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


# The check of an emitted file, with the emulator for a GPU


@pytest.fixture
def checked(tmp_path: Path) -> tuple[Any, ModelFile]:
    """An emitted file as `check --emitted` loads it, and its original."""
    original, output = tmp_path / "two_layers.py", tmp_path / "out.py"
    original.write_text(TWO_LAYERS)
    output.write_text(emitted_file(original, "sm_80"), encoding="utf-8")
    file = load_emitted(output)
    on_the_emulator(sys.modules[file.make_model.__module__], "sm_80")
    return file, ModelFile.load(original)


@needs_emulator
def test_check_emitted_compares_and_times(checked: tuple[ModelFile, ModelFile]) -> None:
    result = check_emitted(*checked, Options(torch.device("cpu"), trials=2))
    assert result.ok, result.problems
    assert [(number, share) for number, _, share in result.trials] == [(1, 0.0), (2, 0.0)]
    assert {"output", "∂ input 0", "∂ body.0.weight", "∂ body.2.weight"} <= {found.what for found in result.findings}
    assert min(result.emitted_ms or 0, result.package_ms or 0, result.torch_ms or 0) > 0
    text = io.StringIO()
    show_emitted(Console(file=text, width=200), result)
    assert "trial 2, 2×3×6×7: passes KernelBench's rule" in text.getvalue()
    assert "agrees with its original" in text.getvalue()


@needs_emulator
def test_check_emitted_finds_what_is_wrong(
    checked: tuple[ModelFile, ModelFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted, original = checked
    module: Any = sys.modules[emitted.make_model.__module__]
    options = Options(torch.device("cpu"), trials=1)
    right = module.run

    def wrong_in(wanted: str) -> Callable[..., torch.Tensor]:
        def run(pass_: Any, *arguments: Any) -> torch.Tensor:
            result: torch.Tensor = right(pass_, *arguments)
            return result * 1.01 if pass_.name == wanted else result

        return run

    monkeypatch.setattr(module, "run", wrong_in("FORWARD"))
    assert "fail KernelBench's rule in trial 1" in check_emitted(emitted, original, options).problems[0]
    monkeypatch.setattr(module, "run", wrong_in("WEIGHT_GRAD"))
    problems = check_emitted(emitted, original, options).problems
    assert any("∂ again.weight" in problem and "further from float64 than allowed" in problem for problem in problems)
    monkeypatch.setattr(module, "run", right)

    class Other(emitted.make_model):  # type: ignore
        def __init__(self, *args: Any) -> None:
            torch.rand(1)
            super().__init__(*args)

    problems = check_emitted(replace(emitted, make_model=Other), original, options).problems
    assert problems == ["under one seed, the emitted model has other parameters than the original"]


def test_what_is_timed_are_the_largest_inputs(
    checked: tuple[ModelFile, ModelFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes may change from call to call; inputs without elements are inputs, too."""
    emitted, original = checked
    (usual,) = original.get_inputs()
    timed: list[int] = []

    def means(self: Timer, calls: Sequence[Callable[[], torch.Tensor]]) -> list[float]:
        timed.extend(len(call()) for call in calls)
        return [1.0] * len(calls)

    monkeypatch.setattr(Timer, "means", means)
    for batches in ((1, 3, 2), (0, 0)):
        sizes = iter(batches)
        changing = replace(original, get_inputs=lambda sizes=sizes: [usual[:1].repeat(next(sizes), 1, 1, 1)])
        check_emitted(emitted, changing, Options(torch.device("cpu"), trials=len(batches), grad=False))
    assert timed == [3, 3, 3, 0, 0, 0]


# The command line


@pytest.mark.slow
def test_emit_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "new" / "out.py"
    result = invoke("emit", ROOT / "examples" / "grouped_strided.py", "--arch", "sm_80,sm_90", "-o", output)
    assert result.exit_code == 0, result.output
    assert "sm_90a, weight_grad: window_wgrad_transposed(" in told(result)
    text = output.read_text(encoding="utf-8")
    assert "--arch sm_80,sm_90a" in text
    assert "The forward pass does not round float32 to TF32" in text  # nor does PyTorch's, in narrow groups
    assert list(load(text).KERNELS) == ["sm_80", "sm_90a"]

    as_planned(monkeypatch)
    result = invoke("emit", "--layer", "2x64x8x8 -> 64, k=3, bias", "-o", output)
    assert result.exit_code == 0, result.output
    text = output.read_text(encoding="utf-8")
    assert "The forward pass rounds float32 to TF32 as PyTorch" in text
    assert "parts=1" in text
    result = invoke("emit", "--layer", "2x64x8x8 -> 64, k=3, bias", "--strict-fp32", "-o", output)
    assert result.exit_code == 0, result.output
    text = output.read_text(encoding="utf-8")
    assert "float32 is not rounded to TF32: --strict-fp32" in text
    assert "parts=2" in text
    assert load(text).Model().layer.bias is not None
    result = invoke("emit", "--layer", "2x4x8x8 -> 4, k=4", "--arch", "sm_80", "-o", output)
    assert "is not rounded to TF32: PyTorch does not round this layer either" in output.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a model file or a --layer"),
        (["nothing.py"], "nothing.py is not a file"),
        (["--layer", "2x4 -> 4"], "does not start with an input shape"),
        (["--layer", "2x4x4x4 -> 4, k=3", "--arch", "sm_12"], "unknown architecture 'sm_12'"),
        (["--layer", "2x4x4x4 -> 4, k=3", "--arch", "cpu"], "kernels are for NVIDIA GPUs"),
    ],
)
def test_errors_on_the_command_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = invoke("emit", *arguments, "-o", tmp_path / "out.py")
    assert result.exit_code == 2
    assert message in told(result)


def test_check_emitted_needs_a_gpu_and_one_model(tmp_path: Path) -> None:
    example, output = ROOT / "examples" / "grouped_strided.py", tmp_path / "out.py"
    output.write_text("")
    result = invoke("check", "--emitted", output, example, "--device", "cpu")
    assert result.exit_code == 2
    assert "an emitted file runs on a GPU only, and the device is cpu" in told(result)
    result = invoke("check", "--emitted", output, example, example)
    assert "compared with one model, got 2" in told(result)
    result = invoke("check", "--emitted", tmp_path / "none.py", example)
    assert "is not a file" in told(result)
