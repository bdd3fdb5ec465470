"""The command line: every command runs without a GPU, says what it found, and ends with the status it should."""

from __future__ import annotations

import csv
import multiprocessing
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import polyphase
from polyphase import modules
from polyphase.__main__ import app
from polyphase.bench import host, host_layers, kernels
from polyphase.bench.layers import NamedLayer, parse_layer
from polyphase.bench.records import read_csv
from polyphase.errors import CompilationError
from polyphase.jit.compiler import Resources
from polyphase.plan.planner import plan
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo

EXAMPLES = Path(__file__).parent.parent / "examples"
LAYER = "2x4x9x8 -> 6, k=3x2, s=2, bias"

SMALL_MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layer = torch.nn.{layer}(channels, 6, 3)
    def forward(self, x):
        return self.layer(x)
def get_inputs():
    return [torch.rand(2, 4, 9, 8)]
def get_init_inputs():
    return [4]
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(result: Result) -> str:
    """Everything printed, with the borders and line breaks of boxes taken out."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(SMALL_MODEL.format(layer="ConvTranspose2d"))
    return path


@pytest.mark.parametrize(
    "command", ["report", "check", "bench", "explain", "plans", "tune", "emit", "env", "compile", "diff"]
)
def test_every_command_explains_itself(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert result.output == invoke(command, "-h").output
    assert "Usage" in result.output
    if "--layer" in result.output:
        assert "op (output padding)" in told(result)


def test_it_runs_as_a_module_and_reading_arguments_imports_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "polyphase"]
    for arguments in (["--help"], ["check", "--help"], ["--version"]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "polyphase.commands.check" in imported
        assert not imported & {"torch", "polyphase.api"}
        wanted = f"polyphase {polyphase.__version__}" if arguments == ["--version"] else "Usage: python -m polyphase"
        assert wanted in done.stdout


def test_the_program_has_the_name_it_is_called_by(tmp_path: Path) -> None:
    program = tmp_path / "polyphase"
    program.write_text("import sys\nfrom polyphase.__main__ import main\nmain()\nassert 'torch' not in sys.modules\n")
    done = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, check=True)
    assert "Usage: polyphase [OPTIONS]" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_program_says_what_to_install(missing: str) -> None:
    code = (
        "import runpy, sys; sys.modules[sys.argv[1]] = None; "
        "sys.modules.pop('polyphase', None); runpy.run_module('polyphase', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, missing], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f'polyphase\'s command line needs {missing}, which is not installed: pip install "torch-polyphase[cli]"\n'
    )


@pytest.mark.slow
def test_as_a_program_the_package_still_has_all_its_names() -> None:
    code = "import sys; sys.argv[0] = 'polyphase'; import polyphase; print('torch' in sys.modules, polyphase.explain)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False <function explain")
    code = (
        "import inspect, sys; sys.argv[0] = 'polyphase'; import polyphase; from polyphase import api; "
        "print([name for name in api.__all__ if inspect.ismodule(getattr(polyphase, name))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['fused']\n", "a module of a name's own hides it"


# check


def test_check_passes_what_is_right(model: Path) -> None:
    result = invoke("check", model, EXAMPLES / "tuple_parameters.py", "--scale", 32, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "2 of 2 models agree with float64 and PyTorch" in told(result)
    assert "batch and image sides cut to 1/32" in told(result)
    for word in ("swapped", "portable", "weight_grad", "∂ layer.weight", "speed-up", "KernelBench's rule"):
        assert word in result.output


def test_check_ends_with_1_where_a_result_is_wrong(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = modules.conv_transpose2d
    monkeypatch.setattr(modules, "conv_transpose2d", lambda *arguments: right(*arguments) * 1.001)
    result = invoke("check", model, "--no-time", "--device", "cpu")
    assert result.exit_code == 1
    assert "1 of 1 models failed" in told(result)
    assert "✗" in result.output


def test_check_ends_with_1_where_nothing_is_accelerated(tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text(SMALL_MODEL.format(layer="Conv2d"))
    result = invoke("check", path, "--no-grad", "--device", "cpu")
    assert result.exit_code == 1
    assert "nothing to check" in told(result)


def test_check_goes_on_after_a_model_that_does_not_run(model: Path, tmp_path: Path) -> None:
    broken, raising = tmp_path / "broken.py", tmp_path / "raising.py"
    broken.write_text("Model = 1")
    raising.write_text(SMALL_MODEL.format(layer="ConvTranspose2d").replace("forward(self", "other(self"))
    result = invoke("check", broken, raising, model, "--no-time", "--device", "cpu")
    assert result.exit_code == 1
    assert "the same as PyTorch" in told(result)
    assert "NotImplementedError" in told(result)
    assert "2 of 3 models failed" in told(result)
    assert "Traceback" not in result.output


WEIGHT_NORM = """
import torch
def Model():
    return torch.nn.Sequential({norm}(torch.nn.ConvTranspose1d(4, 6, 3)), torch.nn.ReLU())
def get_inputs():
    return [torch.rand(2, 4, 9)]
def get_init_inputs():
    return []
"""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("command", ["report", "check", "explain", "emit"])
def test_weight_norm_of_either_kind(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older keeps the weight that it computed, of which PyTorch makes no copy; the newer is not emitted."""
    options = {"explain": ["--device", "sm_80"], "emit": ["-o", tmp_path / "out.py"]}
    for norm in ("torch.nn.utils.weight_norm", "torch.nn.utils.parametrizations.weight_norm"):
        (tmp_path / "model.py").write_text(WEIGHT_NORM.format(norm=norm))
        monkeypatch.chdir(tmp_path)
        result = invoke(command, tmp_path / "model.py", *options.get(command, []))
        if command == "emit" and "parametrizations" in norm:
            assert result.exit_code == 2
            assert "0 is a ParametrizedConvTranspose1d, and not torch.nn.ConvTranspose1d itself" in told(result)
            assert "parametrize.remove_parametrizations(layer, name)" in told(result)
        else:
            assert result.exit_code == 0, result.output


FAULTS = {
    "constructor": ("super().__init__()", "super().__init__()\n        assert channels == 5, 'not 5'",
                    "Model(*get_init_inputs()) raises AssertionError: not 5", "__init__ assert channels == 5"),
    "init_inputs": ("return [4]", "return 4", "get_init_inputs() returns something of type int", ""),
    "no_module": ("class Model(torch.nn.Module)", "def Model(channels): return 1\nclass Other(torch.nn.Module)",
                  "is no torch.nn.Module, but of type int", ""),
    "forward": ("return self.layer(x)", "return self.layer(x).mixed_up", "no attribute 'mixed_up'",
                "forward return self.layer(x).mixed_up"),
    "shape": ("return self.layer(x)", "return self.layer(x) @ torch.ones(3, 3)", "RuntimeError",
              "forward return self.layer(x) @ torch.ones(3, 3)"),
    "inputs": ("return [torch.rand(2, 4, 9, 8)]", "return [torch.rand(2, 4, 9, -8)]",
               "get_inputs() raises RuntimeError", "get_inputs return [torch.rand(2, 4, 9, -8)]"),
    "dict": ("return [torch.rand(2, 4, 9, 8)]", "return {'x': torch.rand(2, 4, 9, 8)}",
             "get_inputs() returns something of type dict; a model file's returns a list of what forward takes", ""),
    "tensor": ("return [torch.rand(2, 4, 9, 8)]", "return torch.rand(2, 4, 9, 8)",
               "get_inputs() returns something of type Tensor", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", ["report", "check", "explain"])
def test_a_model_s_own_fault_is_one_message_with_its_line(command: str, fault: str, tmp_path: Path) -> None:
    right, wrong, message, line = FAULTS[fault]
    text = SMALL_MODEL.format(layer="ConvTranspose2d")
    assert right in text
    path = tmp_path / "model.py"
    path.write_text(text.replace(right, wrong, 1))
    result = invoke(command, path, "--device", "cpu")
    assert result.exit_code == (1 if command == "check" else 2)
    assert message in told(result)
    assert len(result.output.splitlines()) < 20
    assert not any(word in result.output for word in ("Traceback", "_call_impl", "bench/"))
    if line:
        where, code = line.split(" ", 1)
        assert re.search(rf"line \d+, in {where} {re.escape(code)}", told(result))


def test_a_fault_of_polyphase_s_own_keeps_its_traceback(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyphase.bench import trial

    def fails(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(trial, "_images", fails)
    result = invoke("check", model, "--device", "cpu")
    assert result.exit_code == 1
    assert "Traceback" in result.output


def test_a_picture_that_cannot_be_drawn_is_an_error_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("bench", "--layer", LAYER, "--device", "cpu", "--quick", "--png", tmp_path / "results.png")
    assert result.exit_code == 2
    assert 'pip install "torch-polyphase[bench]"' in told(result)
    assert "floor" not in told(result)


def test_check_refuses_what_is_no_model_file(tmp_path: Path) -> None:
    assert invoke("check").exit_code == 2
    result = invoke("check", tmp_path / "missing.py")
    assert result.exit_code == 2
    assert "is not a file" in told(result)
    path = tmp_path / "empty.py"
    path.write_text("")
    result = invoke("check", path)
    assert result.exit_code == 1
    assert "lacks Model, get_inputs, get_init_inputs" in told(result)


# bench


@pytest.mark.slow
def test_bench_prints_writes_and_draws(tmp_path: Path) -> None:
    table, png = tmp_path / "out" / "results.csv", tmp_path / "out" / "results.png"
    result = invoke(
        "bench", "--layer", LAYER, "--layer", "2x4x9 -> 6, k=3", "--passes", "forward,weight_grad", "--dtypes",
        "float32,bfloat16", "--layouts", "nchw,channels_last", "--against", "default,benchmark,channels_last",
        "--quick", "--device", "cpu", "--csv", table, "--png", png,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = read_csv(table)
    assert len(records) == 2 * 2 * 2 * 2
    assert {record.status for record in records} == {"ok", "not applicable"}
    measured = [record for record in records if record.status == "ok"]
    assert all(record.ms and record.torch_default_ms and record.torch_benchmark_ms for record in measured)
    assert all((record.torch_channels_last_ms is None) == (record.layer != LAYER or record.layout != "nchw")
               for record in measured)  # fmt: skip
    assert measured[0].algorithm == "portable"
    assert measured[0].torch == torch.__version__
    assert "PyTorch has no channels_last for one spatial dimension" in told(result)
    assert "times as fast as PyTorch's benchmark mode, slower on" in told(result)
    assert png.stat().st_size > 5000

    again = tmp_path / "again.svg"
    result = invoke("bench", "--plot-from", table, "--png", again)
    assert result.exit_code == 0
    assert again.stat().st_size > 5000


@pytest.mark.slow
def test_bench_measures_random_layers_in_all_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyphase.bench import random_layers as drawn
    from polyphase.bench.layers import NamedLayer, parse_layer

    asked: list[tuple[int, int, float]] = []

    def few(count: int, seed: int, dims: int | None = None, least_seconds: float = 0.0) -> list[NamedLayer]:
        asked.append((count, seed, least_seconds))
        return [NamedLayer(LAYER, parse_layer(LAYER))][:count]

    monkeypatch.setattr(drawn, "random_layers", few)
    table = tmp_path / "random.csv"
    result = invoke(
        "bench", "--random", 5, "--seed", 3, "--least", 50, "--device", "cpu", "--csv", table, "--seconds", 600
    )
    assert result.exit_code == 0, result.output
    assert asked == [(5, 3, pytest.approx(50e-6))]
    records = read_csv(table)
    assert [(record.pass_name, record.dtype) for record in records] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("forward", "input_grad", "weight_grad", "step")
    ]
    assert all(record.ms and record.torch_default_ms and record.torch_benchmark_ms for record in records)
    assert {record.seed for record in records} == {3}
    for words in ("slowest beside PyTorch's best", "furthest from their floor", "training step bfloat16 nchw 1 0"):
        assert words in told(result)

    again = invoke("bench", "--summarise", table, "--summarise", table)
    assert again.exit_code == 0, again.output
    assert "training step bfloat16 nchw 2 0" in told(again)
    assert invoke("bench", "--summarise", tmp_path / "none.csv").exit_code == 2


def test_bench_ends_its_other_process_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyphase.bench import oracle

    before, found = set(multiprocessing.active_children()), []

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        found.append(set(multiprocessing.active_children()) - before)
        if len(found) == 2:
            raise KeyboardInterrupt
        return sample(*arguments, **keywords)

    sample = oracle.sample
    monkeypatch.setattr(oracle, "sample", interrupted)
    result = invoke("bench", "--layer", LAYER, "--passes", "forward,weight_grad", "--against", "benchmark", "--device",
                    "cpu")  # fmt: skip
    assert result.exit_code != 0
    assert [len(processes) for processes in found] == [0, 1]
    assert set(multiprocessing.active_children()) <= before


def test_bench_ends_with_1_where_a_result_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import polyphase

    right = polyphase.conv_transpose2d
    monkeypatch.setattr(polyphase, "conv_transpose2d", lambda *a, **k: right(*a, **k) * 1.001)
    result = invoke("bench", "--layer", LAYER, "--quick", "--device", "cpu", "--csv", tmp_path / "results.csv")
    assert result.exit_code == 1
    assert "wrong:" in told(result)
    assert [record.status for record in read_csv(tmp_path / "results.csv")] == ["wrong"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "2x4x9x8 -> 6"], "has no kernel size k"),
        (["--suite", "everything"], "'everything' is not one of reference, kernelbench, all"),
        (["--passes", "backward"], "'backward' is not one of forward, input_grad, weight_grad"),
        (["--dtypes", "int8"], "'int8' is not one of float32"),
        (["--dtypes", ","], "no value is given"),
        (["--against", "tensorrt"], "'tensorrt' is not one of default, benchmark, channels_last, compile"),
        (["--device", "quantum"], "unknown device 'quantum'; allowed are cpu, cuda"),
        (["--plot-from", "x.csv"], "file with --png"),
        (["--plot-from", "missing.csv", "--png", "x.png"], "missing.csv"),
    ],
)
def test_bench_refuses(arguments: list[str], message: str) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert message in told(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    result = invoke("bench", "--device", "cuda")
    assert result.exit_code == 2
    assert "PyTorch finds no CUDA device here" in told(result)


@pytest.mark.slow
def test_bench_measures_the_host_s_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host, "ROUNDS", 3)
    layers = {name: host_layers.LAYERS[name] for name in ("implicit_gemm", "overlap_gemm")}  # small ones
    monkeypatch.setattr(host_layers, "LAYERS", layers)
    result = invoke("bench", "--host", "--device", "cpu", "--csv", str(tmp_path / "host.csv"))
    assert result.exit_code == 0, result.output
    for words in ("function, no gradients", "module, with gradients", "forward and backward", "cold", "warm"):
        assert words in told(result)
    stages = [
        "warm calls: module, no gradients",
        f"warm calls: {next(iter(host_layers.LAYERS))}",
        "process: cold, again",
    ]
    assert all(stage in " ".join(result.stderr.split()) for stage in stages)
    with (tmp_path / "host.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["layer"], row["situation"]) for row in rows] == [
        (layer, situation) for layer in host_layers.LAYERS for situation in host_layers.SITUATIONS
    ]
    for row in rows:
        for name in ("polyphase", "torch"):
            assert 0 < float(row[f"{name}_p10"]) <= float(row[f"{name}_us"])


@pytest.mark.slow
def test_layers_of_the_host_s_time_cover_all_schedules() -> None:
    """On Hopper, with packing, transposes and split-K reductions among them."""
    schedules, kernels = set(), set()
    for problem in host_layers.LAYERS.values():
        for pass_ in Pass:
            chosen = plan(replace(problem, tf32=True), pass_, DeviceInfo.for_arch("sm_90a"))
            assert chosen.program is not None
            schedules.add(chosen.schedule)
            kernels |= {step.source.kernel for step in chosen.program.steps}
    names = {path.name for path in (Path(polyphase.__file__).parent / "schedules").iterdir() if path.is_dir()}
    names = names - {"window_gemm", "__pycache__"} | {"window_dgrad", "window_wgrad"}
    assert {name for name in names if any(each.startswith(name) for each in schedules)} == names
    assert {"pack_weights", "pack_columns", "transpose", "reduce_splits"} <= kernels


# explain and env


def test_explain_prints_the_plan_of_every_pass_without_a_gpu() -> None:
    result = invoke("explain", "--layer", LAYER, "--device", "sm_90a")
    assert result.exit_code == 0, result.output
    for word in ("sm_90a", "forward:", "input_grad:", "weight_grad:"):
        assert word in result.output
    assert result.output.startswith(f"{parse_layer(LAYER)}\non sm_90a"), "the notation is not repeated"


@pytest.mark.slow
def test_explain_predicts_random_layers_beside_their_floors() -> None:
    result = invoke("explain", "--random", 2, "--seed", 5, "--over", 0, "--device", "sm_90a", "--layouts", "nchw")
    assert result.exit_code == 0, result.output
    for words in (
        "12 passes of more than 0 × their floor", "by kind of layer", "by what computes the pass", "predictions over",
        "GFLOP have no schedule on tensor cores",
    ):  # fmt: skip
        assert words in told(result)
    result = invoke("explain", "--layer", LAYER, "--over", 1e9, "--dtypes", "float32", "--device", "sm_90a")
    assert "0 passes of more than 1e+09 × their floor" in told(result)
    result = invoke("explain", "--layer", LAYER, "--over", 3, "--device", "cpu")
    assert result.exit_code == 2
    assert "predictions are for NVIDIA GPUs" in told(result)


def test_explain_takes_model_files_and_suites() -> None:
    result = invoke("explain", EXAMPLES / "grouped_strided.py", "--suite", "reference", "--device", "sm_80")
    assert result.exit_code == 0, result.output
    assert "grouped_strided.py: conv_transpose2d" in result.output
    assert "16×32×128×256 → 64, k=(3, 5), s=(2, 3), p=(1, 2), d=(2, 1), g=4" in result.output
    assert "KernelBench 57" in result.output


@pytest.mark.parametrize(
    ("layer", "inputs", "message"),
    [
        ("ConvTranspose2d(4, 4, 3)", "rand(1, 5, 8, 8)", "has in_channels=4, and get_inputs() gives it 5"),
        ("ConvTranspose2d(4, 4, 3)", "ones(1, 4, 8, 8, dtype=torch.int64)", "has a dtype without kernels"),
        ("Conv2d(4, 4, 3)", "rand(1, 4, 8, 8)", "calls no ConvTranspose1d/2d/3d module"),
    ],
)
def test_explain_says_why_a_model_has_no_plan(layer: str, inputs: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        f"import torch\n\ndef Model():\n    return torch.nn.{layer}\n\n"
        f"def get_inputs():\n    return [torch.{inputs}]\n\ndef get_init_inputs():\n    return []\n"
    )
    result = invoke("explain", file, "--device", "sm_90a")
    assert result.exit_code == 2, result.output
    assert message in told(result)


def test_explain_refuses_nothing_and_unknown_devices() -> None:
    assert "give a model file, a --layer or a --suite" in told(invoke("explain"))
    for device in ("sm_1", "h1000"):
        result = invoke("explain", "--layer", LAYER, "--device", device)
        assert result.exit_code == 2
        assert device in told(result)
        assert "sm_90a" in told(result)
        assert "h200" in told(result)


def test_explain_takes_cards() -> None:
    by_name, by_arch = (invoke("explain", "--layer", LAYER, "--device", each).output for each in ("H100", "sm_90a"))
    assert "on H100 (sm_90a)" in by_name
    assert "on sm_90a" in by_arch
    problem = parse_layer(LAYER)
    by_name, by_arch = (polyphase.explain(problem, device=each) for each in ("a100", "sm_80"))
    assert by_name == by_arch.replace("on sm_80", "on a100 (sm_80)")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_says_that_there_is_no_gpu() -> None:
    remark = "Here polyphase uses its portable path"
    assert told(invoke("explain", "--layer", LAYER, "--layer", LAYER)).count(remark) == 1
    assert remark not in told(invoke("explain", "--layer", LAYER, "--device", "sm_90a"))


@pytest.mark.parametrize("missing", ["cuda.bindings", "libnvrtc"])
def test_env_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("Failure finding nvrtc")

    if missing == "libnvrtc":
        monkeypatch.setattr(pytest.importorskip("cuda.bindings.nvrtc"), "nvrtcVersion", fails)
    else:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert 'pip install "torch-polyphase[cu12]" (PyTorch is built for CUDA 12.8)' in told(invoke("env"))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert 'pip install "torch-polyphase[cu13]"' in told(invoke("env"))


@pytest.mark.parametrize(
    ("device", "message"), [("meta", "tensors on the meta device have no values"), ("xpu:9", "no device xpu:9")]
)
@pytest.mark.parametrize("command", ["report", "check", "bench"])
def test_a_device_that_is_not_there_is_one_line(command: str, device: str, message: str, model: Path) -> None:
    """And no page of PyTorch's dispatcher."""
    given = ["--layer", LAYER] if command == "bench" else [model]
    result = invoke(command, *given, "--device", device)
    assert result.exit_code == 2
    assert message in told(result)
    assert len(result.output.splitlines()) < 10


def test_env_is_a_bug_report() -> None:
    result = invoke("env")
    assert result.exit_code == 0
    for word in ("polyphase", "PyTorch", torch.__version__, "driver", "NVRTC", "kernel cache", "GPU"):
        assert word in result.output


# compile

CLEAN: dict[str, Any] = {"registers": 64, "shared": 0, "stack": 0, "spills": 0, "warnings": (), "seconds": 0.1}


def _compiler(**changes: object) -> Any:
    def resources_of(source: Any, arch: str) -> Resources:
        return Resources(**{**CLEAN, **changes}, source=source)

    return resources_of


def test_compile_compiles_every_kernel_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def resources_of(source: Any, arch: str) -> Resources:
        seen.append((source, arch))
        return Resources(**CLEAN, source=source)

    monkeypatch.setattr(kernels, "resources_of", resources_of)
    larger = LAYER.replace("2x4", "7x4")
    table = tmp_path / "kernels.csv"
    result = invoke(
        "compile", "--arch", "sm_80,sm_90a", "--layer", LAYER, "--layer", larger, "--dtypes", "float32", "--csv", table
    )
    assert result.exit_code == 0, result.output
    assert len(seen) == len(set(seen)) > 0
    assert {arch for _, arch in seen} == {"sm_80", "sm_90a"}
    assert f"{len(seen)} of {len(seen)} kernels are clean" in told(result)
    assert len(table.read_text().splitlines()) == len(seen) + 1
    every = {*seen}
    seen.clear()
    arguments = "--arch", "sm_80,sm_90a", "--layer", LAYER, "--layer", larger, "--dtypes", "float32", "--variants"
    assert invoke("compile", *arguments).exit_code == 0
    assert {*seen} < every


def test_compile_has_what_is_computed_beside_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []

    def resources_of(source: Any, arch: str) -> Resources:
        sources.append(source)
        return Resources(**CLEAN, source=source)

    monkeypatch.setattr(kernels, "resources_of", resources_of)
    every = ",".join(kernels.Functions)
    options = "--dtypes", "bfloat16", "--passes", "forward", "--functions", every
    result = invoke("compile", "--arch", "sm_90a", "--layer", LAYER, *options)
    assert result.exit_code == 0, result.output
    kinds = {operation.kind for source in sources for operation in source.epilogue.operations}
    assert kinds == {"add", "scale_shift", "silu", "leaky_relu", "layer_norm"}
    assert any(source.prologue for source in sources)
    assert any(not source.prologue and not source.epilogue for source in sources)


def test_compile_leaves_out_what_differs_in_sizes_alone() -> None:
    """Unless the planner takes it."""
    device, layers = DeviceInfo.for_arch("sm_90a"), ("8x64x64x64 -> 64, k=4, s=2, p=1", LAYER)
    named = [NamedLayer(layer, parse_layer(layer)) for layer in layers]
    every = kernels.wanted(named, list(Pass), ["float32", "bfloat16"], [False], [device])
    kept = kernels.one_of_each_variant(every)
    assert {kernel for kernel in every if kernel.chosen} <= {*kept} < {*every}
    assert {kernel.source.variant for kernel in kept} == {kernel.source.variant for kernel in every}
    others = [kernel.source.variant for kernel in kept if not kernel.chosen]
    assert len(others) == len({*others})
    for other in (kernel for kernel in every if kernel not in kept):
        like = next(kernel for kernel in kept if kernel.source.variant == other.source.variant)
        assert like.source.specialisation != other.source.specialisation
        assert [name for name, _ in like.source.constants] == [name for name, _ in other.source.constants]


@pytest.mark.parametrize(
    "fault",
    [
        {"stack": 8},
        {"spills": 4},
        {"warnings": ("ptxas info : (C7512) wgmma serialised",)},
    ],
)
@pytest.mark.parametrize("every", [[], ["--every"]])
def test_compile_ends_with_1_for_a_kernel_that_is_not_clean(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, object], every: list[str]
) -> None:
    monkeypatch.setattr(kernels, "resources_of", _compiler(**fault))
    result = invoke("compile", "--arch", "sm_90a", "--layer", LAYER, "--dtypes", "float32", *every)
    assert result.exit_code == 1
    assert "0 of" in told(result)
    assert ("C7512" in result.output) == ("warnings" in fault)


def test_compile_ends_with_1_for_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def resources_of(source: Any, arch: str) -> Resources:
        raise CompilationError("no such instruction", log="error: line 7 is wrong", source_path="/tmp/kernel.cu")

    monkeypatch.setattr(kernels, "resources_of", resources_of)
    result = invoke("compile", "--arch", "sm_90a", "--layer", LAYER, "--dtypes", "float32")
    assert result.exit_code == 1
    assert "line 7 is wrong" in result.output


@pytest.mark.slow
def test_compile_with_the_real_compiler(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    result = invoke(
        "compile", "--arch", "sm_80", "--layer", LAYER, "--dtypes", "float32", "--layouts", "nchw", "--passes",
        "weight_grad", "--every", "--csv", tmp_path / "kernels.csv",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = {line["kernel"]: line for line in csv.DictReader((tmp_path / "kernels.csv").open())}
    direct = {"direct_wgrad_gemm", "direct_wgrad_channels", "direct_wgrad_windows"}
    assert set(lines) == direct | {"tap_gemm_wgrad", "transpose", "reduce_splits"}
    assert int(lines["direct_wgrad_gemm"]["registers"]) > 16
    assert int(lines["direct_wgrad_channels"]["shared"]) > 0


def test_compile_without_a_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    result = invoke("compile", "--arch", "sm_80", "--layer", LAYER)
    assert result.exit_code == 1
    assert "pip install cuda-core" in told(result)


def test_compile_reads_its_options_before_it_asks_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    for option in ("--suite", "--dtypes", "--layouts", "--passes", "--arch", "--layer"):
        result = invoke("compile", option, "foo")
        assert result.exit_code == 2
        assert "foo" in told(result)
        assert option in told(result)


def test_compile_refuses_an_unknown_architecture() -> None:
    for unknown in ("sm_42", "cpu"):
        result = invoke("compile", "--arch", f"sm_90a,{unknown}")
        assert result.exit_code == 2
        assert unknown in told(result)
        assert "sm_75, sm_80" in told(result)


def test_a_report_of_a_kernel_counts_shared_memory_of_source_and_launch() -> None:
    device = DeviceInfo.for_arch("sm_90a")
    (kernel, *_) = kernels.wanted([NamedLayer("a", parse_layer(LAYER))], [Pass.FORWARD], ["float32"], [False], [device])
    kernel = replace(kernel, dynamic_shared=1000)
    assert kernels.Report(kernel, _compiler(shared=24)(kernel.source, kernel.arch)).shared == 1024
