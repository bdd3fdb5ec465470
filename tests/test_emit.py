"""Emitted files: what they may contain, that they compile, and that they compute what the package does, with no GPU."""

from __future__ import annotations

import ast
import io
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner, Result

import emulator
import nvrtc11
from emitted import binding_on_the_cpu, load, on_the_emulator
from polyphase.__main__ import app
from polyphase.algorithms.base import Launch
from polyphase.bench.check import Options
from polyphase.bench.check_emitted import check_emitted, load_emitted
from polyphase.bench.check_report import show_emitted
from polyphase.bench.model_file import ModelFile
from polyphase.device import DeviceInfo
from polyphase.emit import rules
from polyphase.emit.file import emit
from polyphase.emit.model import EmitError, model_of_file, model_of_layer
from polyphase.emit.support import layouts_of, of_pass
from polyphase.plan import plan
from polyphase.problem import ConvTransposeProblem, Pass

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EMITTED = sorted((ROOT / "examples" / "emitted").glob("*.py"))
ARCHS = ("sm_80", "sm_90a", "sm_100a")
WHOLE = ("grouped_strided", "square_stride1")  # for all three

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")

#: Layers that meet every algorithm, dimension and memory format.
LAYERS = (
    "2x16x9x8 -> 16, k=3, s=2, p=1, bias",
    "3x8x40 -> 6, k=5, s=3, d=2, g=2",
    "1x4x5x4x6 -> 5, k=2x3x2, s=2x1x2, op=1x0x1, bias",
    "2x16x7x9 -> 32, k=3, bfloat16, bias",
    "2x12x8x8 -> 16, k=4, s=2, p=1, channels_last, float16",
    "2x3x6x5 -> 2, k=3, float64",
    "1x1x30 -> 1, k=2000, s=500",
)

TWO_LAYERS = '''
from __future__ import annotations
import torch
import torch.nn as nn
import torch.nn.functional as F

def Side(channels: int) -> nn.Module:
    """The helper has a name of the package's, and a word that KernelBench's check forbids: pass."""
    return nn.ConvTranspose2d(channels, 4, 2, stride=2)

class Model(nn.Module):
    def __init__(self, channels: int | None = 3) -> None:
        super(Model, self).__init__()
        last = nn.ConvTranspose2d(4, 5, (3, 1), padding=(1, 0), bias=False)
        self.body = nn.Sequential(Side(channels), nn.ReLU(), last)
        self.again = Side(channels)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.again(x).sum(1, keepdim=True)

def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(2, 3, 6, 7)]

def get_init_inputs() -> list[int]:
    return []
'''


def devices(*archs: str) -> list[DeviceInfo]:
    return [DeviceInfo.for_arch(arch) for arch in archs]


def emitted_layer(layer: str, *archs: str) -> str:
    return emit(model_of_layer(layer, None, True), devices(*archs), "A layer", "this test").text


def emitted_file(path: Path, *archs: str) -> str:
    return emit(model_of_file(path, "float32", True), devices(*archs), path.name, "this test").text


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "two_layers.py"
    path.write_text(TWO_LAYERS)
    return path


@pytest.fixture(scope="module")
def texts(two_layers: Path) -> dict[str, str]:
    """One emitted file for each layer, example and model above."""
    found = {layer: emitted_layer(layer, *ARCHS[:2]) for layer in LAYERS}
    found |= {path.stem: emitted_file(path, *(ARCHS if path.stem in WHOLE else ARCHS[:2])) for path in EXAMPLES}
    return found | {"two layers": emitted_file(two_layers, "sm_80", "sm_90a")}


# What is in the file


def test_it_is_python_3_8_and_imports_torch_and_the_standard_library_alone(texts: dict[str, str]) -> None:
    for name, text in texts.items():
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


def test_it_uses_nothing_that_python_3_8_lacks(texts: dict[str, str]) -> None:
    for name, text in texts.items():
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


def test_it_keeps_the_static_rules_of_kernelbench(texts: dict[str, str]) -> None:
    for name, text in texts.items():
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


def test_the_kernels_are_the_files_of_the_package(texts: dict[str, str]) -> None:
    for text in texts.values():
        for name in re.findall(r'^FILES\["(.+)"\] =', text, re.MULTILINE):
            assert (ROOT / "src/polyphase/kernels" / name).read_text(encoding="utf-8") in text


@pytest.mark.skipif(not EMITTED, reason="nothing is emitted")
@pytest.mark.parametrize("path", EMITTED, ids=lambda path: path.stem)
def test_emitted_examples_are_what_is_emitted_today(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core", reason="how many blocks a kernel has is settled by NVRTC")
    text = path.read_text(encoding="utf-8")
    command = re.search(r"^#     (python -m polyphase emit .*(?:\n#         .*)*)$", text, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[1].replace("\n#        ", ""))
    monkeypatch.chdir(ROOT)
    shutil.copy(path, tmp_path)
    try:
        assert invoke(*words[3:]).exit_code == 0
        assert path.read_text(encoding="utf-8") == text, f"emit it again: {shlex.join(words)}"
    finally:
        shutil.copy(tmp_path / path.name, path)


# That it compiles


def kernels_of(module: Any, arch: str) -> str:
    """The CUDA source without the launcher, which needs nvcc's headers."""
    source: str = module.cuda_source(arch)
    return source.partition("#define POLYPHASE_KERNELS")[0]


@pytest.mark.parametrize("arch", ARCHS)
def test_its_kernels_compile_together(texts: dict[str, str], arch: str) -> None:
    core = pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, but no GPU")
    for name in (*WHOLE, *LAYERS):
        module = load(texts[name])
        if arch in module.KERNELS:
            options = core.ProgramOptions(arch=arch, std="c++17")
            core.Program(kernels_of(module, arch), "c++", options).compile("cubin")


@pytest.mark.parametrize("name", ["grouped_strided", "every_parameter", "square_stride1", LAYERS[3]])
def test_its_kernels_for_sm_80_compile_with_cuda_11(texts: dict[str, str], name: str) -> None:
    if nvrtc11.library() is None:
        pytest.skip(nvrtc11.MISSING)
    nvrtc11.compile_kernels(kernels_of(load(texts[name]), "sm_80"), "sm_80")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_whole_source_compiles_with_nvcc(texts: dict[str, str], arch: str, tmp_path: Path) -> None:
    source = tmp_path / "emitted.cu"
    source.write_text(load(texts["square_stride1"]).cuda_source(arch), encoding="utf-8")
    flags = ["-std=c++17", f"-gencode=arch=compute_{arch[3:]},code={arch}", "-c", "-o", str(tmp_path / "emitted.o")]
    done = subprocess.run(["nvcc", *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


# That it launches what the package launches


def random_sizes(problem: ConvTransposeProblem, seed: int) -> list[ConvTransposeProblem]:
    """The layer on other images, from a single pixel to large ones."""
    generator = random.Random(seed)
    found = [problem]
    while len(found) < 9:
        batch, most = generator.choice([0, 1, 2, 7, 40]), generator.choice([1, 5, 40, 300])
        sizes = tuple(generator.randint(1, most) for _ in range(problem.dims))
        extra = tuple(generator.randrange(max(s, d)) for s, d in zip(problem.stride, problem.dilation))
        other = replace(problem, batch=batch, input_size=sizes, output_padding=extra)
        if min(other.output_size) > 0:
            found.append(other)
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_launches_what_the_package_launches_at_any_size(texts: dict[str, str], arch: str) -> None:
    """Grid, block, shared memory, geometry, workspace and constants, as the package's own planner has them."""
    compared = 0
    for seed, (name, text) in enumerate(texts.items()):
        module: Any = load(text)
        on_the_emulator(module, arch)
        problem = model_problem(module)
        for other in random_sizes(problem, seed):
            for pass_ in Pass:
                for aligned in (True, False):
                    expected = plan(
                        of_pass(other, pass_), pass_, DeviceInfo.for_arch(arch), layouts_of(other, pass_, aligned)
                    ).launch
                    assert expected is not None
                    call = module.prepare(
                        module.Pass[pass_.name],
                        module.LAYERS[0],
                        other.input_shape,
                        other.output_padding,
                        torch.device("cpu"),
                        aligned,
                    )
                    assert (call.planes, call.workspace_bytes) == (expected.planes, expected.workspace_bytes), name
                    compare(module, arch, call.launch, expected)
                    assert (call.prologue is None) == (expected.prologue is None)
                    if expected.prologue is not None:
                        compare(module, arch, call.prologue, expected.prologue)
                    compared += 1
    assert compared > 500


def model_problem(module: Any) -> ConvTransposeProblem:
    return ConvTransposeProblem(**vars(module.LAYERS[0].problem) | {})


def compare(module: Any, arch: str, given: tuple[Any, ...], expected: Launch) -> None:
    number, geometry, *grid, block, shared_bytes = given
    assert (tuple(grid), block, shared_bytes) == (expected.grid, expected.block, expected.shared_bytes)
    assert geometry == expected.geometry
    name, specialisation, files = module.KERNELS[arch][number]
    assert (name, files) == (expected.source.kernel, expected.source.files)
    lines = zip(specialisation.strip().splitlines(), expected.source.specialisation.strip().splitlines(), strict=True)
    assert all(ours == theirs or "MIN_BLOCKS" in ours for ours, theirs in lines)


def test_a_size_without_a_kernel_is_an_error() -> None:
    module: Any = load(emitted_layer("1x4x8x8 -> 4, k=3, s=2", "sm_80"))
    on_the_emulator(module, "sm_80")
    shape = (1, 4, 40000, 40000)
    with pytest.raises(NotImplementedError, match="more than 32 bits: emit it again for inputs as large"):
        module.prepare(module.Pass.FORWARD, module.LAYERS[0], shape, (0, 0), torch.device("cpu"), True)


def test_a_layer_of_such_a_size_has_both_kernels() -> None:
    layer = "1x4x40000x40000 -> 4, k=3, s=2"
    module: Any = load(emitted_layer(layer, "sm_80"))
    on_the_emulator(module, "sm_80")
    for shape in ((1, 4, 40000, 40000), (1, 4, 8, 8)):
        module.prepare(module.Pass.FORWARD, module.LAYERS[0], shape, (0, 0), torch.device("cpu"), True)


# That it computes what the original computes


def both(module: Any) -> tuple[nn.Module, nn.Module]:
    models = []
    for cls in (module.Model, module.ModelNew):
        torch.manual_seed(3)
        models.append(cls(*module.get_init_inputs()))
    return models[0], models[1]


@needs_emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("layer", LAYERS[:6])
def test_it_computes_the_layer_and_its_gradients(texts: dict[str, str], layer: str, arch: str) -> None:
    """Small integers, whose sums are exact in any order and any of the dtypes."""
    module: Any = load(texts[layer])
    on_the_emulator(module, arch)
    problem = module.LAYERS[0].problem
    dtype = getattr(torch, problem.dtype)
    model, new = both(module)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), new.parameters(), strict=True):
            assert torch.equal(parameter, other)
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
            other.copy_(parameter)
    new.to(dtype)
    model.double()
    for shape in (problem.input_shape, (1, problem.in_channels, *(5, 4, 3)[: problem.dims])):
        x = torch.randint(-3, 4, shape).to(dtype)
        results = []
        for each, source in ((model, x.double()), (new, x.transpose(0, 1).contiguous().transpose(0, 1))):
            leaf = source.detach().requires_grad_()
            output = each(leaf)
            torch.manual_seed(5)
            gradient = torch.randint(-3, 4, output.shape).to(output.dtype)
            each.zero_grad()
            output.backward(gradient)
            results.append([output.detach(), leaf.grad, *(parameter.grad for parameter in each.parameters())])
        for exact, ours in zip(*results, strict=True):
            assert torch.equal(exact.to(dtype), ours)


@needs_emulator
def test_a_model_of_several_layers(texts: dict[str, str]) -> None:
    module: Any = load(texts["two layers"])
    extension = on_the_emulator(module, "sm_80")
    model, new = both(module)
    assert [type(layer).__module__ for layer in new.modules() if "Transpose" in type(layer).__name__] == [
        module.__name__
    ] * 3
    assert list(model.state_dict()) == list(new.state_dict())
    x = module.get_inputs()[0]
    torch.testing.assert_close(new(x), model(x))
    torch.testing.assert_close(new.again(x[0]), model.again(x[0]))
    torch.testing.assert_close(new.again(x, output_size=[13, 15]), model.again(x, output_size=[13, 15]))
    assert len(module.LAYERS) == 2
    assert extension.launches


@needs_emulator
@pytest.mark.slow
def test_the_binding_passes_on_what_it_is_given(small: Any, tmp_path: Path) -> None:
    """The C++ between Python and a launch, built for the CPU: pointers, a missing tensor, bytes, sizes, errors."""
    binding = binding_on_the_cpu(small.BINDING, tmp_path)
    first, second = torch.rand(3), torch.rand(4)
    binding.launch(3, struct.pack("<i", -5), 2**31 - 1, 5, 6, 256, 1024, [first, None, second])
    assert binding.launched() == [
        *(3, 2**31 - 1, 5, 6, 256, 1, 1, 1024, 7),
        *(first.data_ptr(), 0, second.data_ptr(), -5),
    ]
    with pytest.raises(RuntimeError, match="kernel 2 takes 2 tensors and 4 bytes, given 1 tensors and 3 bytes"):
        binding.launch(2, b"abc", 1, 1, 1, 32, 0, [first])
    with pytest.raises(RuntimeError, match="all tensors must be on one CUDA device, got cpu and meta"):
        binding.launch(2, b"abcd", 1, 1, 1, 32, 0, [first, torch.empty(3, device="meta")])
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        binding.launch(1, b"abcd", 1, 1, 1, 32, 13, [first])


# What it refuses


@pytest.fixture(scope="module")
def small() -> Any:
    return load(emitted_layer("2x4x6x6 -> 4, k=3", "sm_80", "sm_90a"))


def test_cpu_tensors_are_refused(small: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"the input is on cpu: .* CUDA devices alone"):
        small.ModelNew()(torch.rand(2, 4, 6, 6))


class Pretended:
    """A tensor that says it is elsewhere, or of another kind."""

    def __init__(self, tensor: torch.Tensor, device: str = "cuda:0") -> None:
        self.tensor, self.device = tensor, torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@pytest.mark.parametrize(
    ("input", "weight", "error", "message"),
    [
        (torch.rand(2, 4, 6, 6).half(), torch.rand(4, 4, 3, 3), NotImplementedError, "input is torch.float16.*--dtype"),
        (torch.rand(2, 4, 6, 6), torch.rand(4, 4, 3, 3).double(), NotImplementedError, "weight is torch.float64"),
        (
            torch.rand(2, 5, 6, 6),
            torch.rand(4, 4, 3, 3),
            RuntimeError,
            r"\(N, 4, \*spatial\).*got shape \(2, 5, 6, 6\)",
        ),
        (torch.rand(2, 4, 6), torch.rand(4, 4, 3, 3), RuntimeError, "2 spatial sizes"),
        (torch.rand(2, 4, 0, 6), torch.rand(4, 4, 3, 3), RuntimeError, "at least 1"),
    ],
)
def test_wrong_tensors_are_refused(
    small: Any, input: torch.Tensor, weight: torch.Tensor, error: type[Exception], message: str
) -> None:
    class Layer:
        bias = None

    Layer.weight = Pretended(weight)  # type: ignore[attr-defined]
    with pytest.raises(error, match=message):
        small.check(Layer, Pretended(input), small.LAYERS[0].problem)
    with pytest.raises(RuntimeError, match="on one device, got cuda:1 and cuda:0"):
        small.check(Layer, Pretended(torch.rand(2, 4, 6, 6), "cuda:1"), small.LAYERS[0].problem)


def test_other_architectures_are_refused(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for capability, arch in (((8, 0), "sm_80"), ((9, 0), "sm_90a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert small.arch_of(device) == arch
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(NotImplementedError, match=r"kernels for sm_80, sm_90a, and cuda:0 is sm_86: .* --arch"):
        small.arch_of(device)


def test_other_layers_are_refused(texts: dict[str, str]) -> None:
    module: Any = load(texts["two layers"])
    with pytest.raises(NotImplementedError, match=r"no kernels for body.0, ConvTranspose2d\(5, 4"):
        module.ModelNew(5)


def test_it_is_built_for_its_architecture_alone(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(small, "load_inline", lambda **options: asked.append(options))
    for arch in ("sm_80", "sm_90a", "sm_80"):
        small.build(arch)
    assert [options["extra_cuda_cflags"][-1] for options in asked] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert len({options["name"] for options in asked}) == 2
    small.build.cache_clear()


@needs_emulator
def test_it_has_first_derivatives_only(small: Any) -> None:
    module: Any = load(emitted_layer("2x4x6x6 -> 4, k=3", "sm_80"))
    on_the_emulator(module, "sm_80")
    x = torch.rand(1, 4, 3, 3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        torch.autograd.grad(module.ModelNew()(x).sum(), x, create_graph=True)


# What cannot be emitted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("import torch\n", "import torch, numpy\n", 1), "imports numpy"),
        (lambda text: text + "\nclass ModelNew: ...\n", "defines ModelNew"),
        (lambda text: text + "\nKERNELS = 1\n", "defines KERNELS"),
        (lambda text: text + "\nreplace = 1\n", "defines replace"),
        (lambda text: text.replace("import torch\n", "import torch\nfrom math import prod as math\n", 1), "math is"),
        (lambda text: text.replace("nn.ConvTranspose2d(", "nn.Conv2d("), "has no module ConvTranspose"),
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


def test_it_runs_without_being_a_module(texts: dict[str, str]) -> None:
    """KernelBench executes the text in an empty dictionary."""
    context: dict[str, Any] = {}
    exec(compile(texts["grouped_strided"], "text", "exec", dont_inherit=True), context)
    torch.manual_seed(42)
    new = context["ModelNew"](*context["get_init_inputs"]())
    torch.manual_seed(42)
    assert torch.equal(
        new.conv_transpose2d.weight, context["Model"](*context["get_init_inputs"]()).conv_transpose2d.weight
    )


def test_names_of_the_model_come_first(texts: dict[str, str]) -> None:
    module: Any = load(texts["two layers"])
    assert isinstance(module.Side(3), nn.ConvTranspose2d)
    assert module.Gather.__annotations__["src"] == "gather_Side"


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


# The command line


def test_emit_on_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "new" / "out.py"
    result = invoke("emit", ROOT / "examples" / "grouped_strided.py", "--arch", "sm_80,sm_90", "-o", output)
    assert result.exit_code == 0, result.output
    assert "sm_90a, weight_grad: weight_grad(" in told(result)
    text = output.read_text(encoding="utf-8")
    assert "--arch sm_80,sm_90a" in text
    assert "float32 may be rounded to TF32" in text
    assert list(load(text).KERNELS) == ["sm_80", "sm_90a"]

    result = invoke("emit", "--layer", "2x64x8x8 -> 64, k=3, bias", "--strict-fp32", "-o", output)
    assert result.exit_code == 0, result.output
    text = output.read_text(encoding="utf-8")
    assert "float32 is not rounded to TF32" in text
    assert "parts=2" in text
    assert load(text).Model().layer.bias is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a model file or a --layer"),
        (["nothing.py"], "nothing.py is not a file"),
        (["--layer", "2x4 -> 4"], "does not start with an input shape"),
        (["--layer", "2x4x4x4 -> 4, k=3", "--arch", "sm_12"], "unknown architecture 'sm_12'"),
        (["--layer", "2x4x4x4 -> 4, k=3", "--arch", "cpu"], "kernels are emitted for NVIDIA GPUs"),
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
    assert "an emitted file runs on a GPU alone, and the device is cpu" in told(result)
    result = invoke("check", "--emitted", output, example, example)
    assert "compared with one model, got 2" in told(result)
    result = invoke("check", "--emitted", tmp_path / "none.py", example)
    assert "none.py is not a file" in told(result)
