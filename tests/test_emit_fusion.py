"""Whole models as one file: layers that compute what follows them in their own kernel, run by the emulator."""

from __future__ import annotations

import ast
import copy
import functools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emulator
from emitted import Extension, compile_by_nvcc, load, on_the_emulator
from polyphase.bench.check_emitted import check_emitted, load_emitted
from polyphase.bench.model_file import ModelFile
from polyphase.bench.trial import Options
from polyphase.emit import file as emit_file
from polyphase.emit import rules
from polyphase.emit.fusion import Fusion
from polyphase.emit.model import model_of_file
from polyphase.problem.device import DeviceInfo

LEVEL2 = Path(__file__).parent / "level2"
MODELS = sorted(path.stem for path in LEVEL2.glob("*.py"))
# What the layers' kernels compute, of each file in evaluation mode, and what kernels behind them do.
CHAINS = {
    "bias_clamp_scale": ["up → add() → clamp() → mul() → clamp() → div()"],
    "layer_norm_pool_gelu": ["up → add()"],
    "leaky_factor_pool": ["up → leaky_relu() → mul() → leaky"],
    "mean_logsumexp": [],
    "minimum_divided": ["up → clamp() → div()"],
    "mish_add_hardtanh": ["up → mish() → add() → hardtanh() → mul()"],
    "norm_tanh_pool": ["up → norm → tanh"],
    "relu_group_norm": ["up → relu"],
    "residual_twice": ["up → clone() → detach() → add() → add() → mul() → add()"],
    "second_input": ["up → add() → hardswish() → mul()"],
    "signal_chain": ["first.0 → first.1 → first.2", "second → add() → relu()"],
    "softmax_bias_sigmoid": [],
    "view_softmax_minimum": ["up → clamp()"],
}
TAILS = {
    "layer_norm_pool_gelu": ["up → add() → norm → pool → gelu()"],
    "leaky_factor_pool": ["up → leaky_relu() → mul() → leaky → pool"],
    "mean_logsumexp": ["up → mean() → add() → logsumexp() → sum() → mul()"],
    "norm_tanh_pool": ["up → norm → tanh → pool → groups"],
    "relu_group_norm": ["up → relu → norm"],
    "softmax_bias_sigmoid": ["up → softmax() → add() → mul() → sigmoid()"],
    "view_softmax_minimum": ["up → clamp() → view() → softmax() → view() → mul() → min() → tanh()"],
}
UNFUSED = {
    "shape_decides": "emitted without fusion: torch.fx does not trace its forward (TraceError: symbolically traced",
}
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")


@functools.cache
def emitted(name: str, arch: str = "sm_80", fuse: bool = True) -> emit_file.Emitted:
    """What is emitted for a file of `LEVEL2`, float32 being exact."""
    return emitted_file(LEVEL2 / f"{name}.py", arch, fuse)


def emitted_file(path: Path, arch: str = "sm_80", fuse: bool = True) -> emit_file.Emitted:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit_file, "settled", lambda source, arch: source)
        model = model_of_file(path, "float32", False, fuse)
        return emit_file.emit(model, [DeviceInfo.for_arch(arch)], path.name, "this test")


def emitted_text(text: str, folder: Path) -> emit_file.Emitted:
    path = folder / "model.py"
    path.write_text(text, encoding="utf-8")
    return emitted_file(path)


class Loaded:
    """An emitted file on the emulator, its model and the one it was made from."""

    def __init__(self, text: str, name: str = "emitted_file", arch: str = "sm_80") -> None:
        self.module: Any = load(text, name)
        self.extension: Extension = on_the_emulator(self.module, arch)
        kernels = [name for name, *_ in self.module.KERNELS[arch]]
        behind = {number for number, name in enumerate(kernels) if name == "reduce_groups"}
        operations = self.module.OPERATIONS[arch].items()
        self.fused = {number: each[0] for number, each in operations if each[0] and number not in behind}
        self.behind = behind
        self.numbers: list[int] = []
        launch = self.extension.launch

        def noted(number: int, *rest: Any) -> None:
            self.numbers.append(number)
            launch(number, *rest)

        self.extension.launch = noted  # type: ignore
        torch.manual_seed(3)
        self.model: nn.Module = self.module.Model(*self.module.get_init_inputs())
        torch.manual_seed(3)
        self.new: nn.Module = self.module.ModelNew(*self.module.get_init_inputs())

    def epilogues(self, *inputs: Tensor) -> list[str]:
        """The epilogues that a call launches; it gives what the original gives."""
        self.numbers.clear()
        before = [each.clone() for each in inputs]
        torch.manual_seed(5)
        ours = self.new(*inputs)
        assert all(map(torch.equal, before, inputs))
        torch.manual_seed(5)
        theirs = self.model(*before)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        return [str(self.fused[number]) for number in self.numbers if number in self.fused]

    @property
    def reductions(self) -> int:
        """The kernels behind layers that the last call launched."""
        return sum(number in self.behind for number in self.numbers)


@pytest.mark.slow
def test_the_chains_of_every_file() -> None:
    for path in sorted(LEVEL2.glob("*.py")):
        found = emitted(path.stem)
        if path.stem in CHAINS:
            computed = {(name, pass_) for name, _, pass_, _ in found.plans if " → " in name}
            assert {name for name, pass_ in computed if pass_ == "forward"} == {*CHAINS[path.stem]}, path.stem
            assert [name for name, pass_ in computed if pass_ != "forward"] == TAILS.get(path.stem, []), path.stem
        if path.stem in UNFUSED:
            assert any(remark.startswith(UNFUSED[path.stem]) for remark in found.remarks), found.remarks


def test_files_keep_the_rules() -> None:
    """KernelBench's static check, and Python 3.8."""
    for path in sorted(LEVEL2.glob("*.py")):
        text = emitted(path.stem).text
        assert not rules.broken(text), path.stem
        ast.parse(text, feature_version=(3, 8))
        assert "def removeprefix" not in text
        assert not re.search(r"\.remove(prefix|suffix)\(", text), path.stem


@needs_emulator
@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_model(name: str) -> None:
    """In both modes, without derivatives, of the file's inputs and of another batch."""
    loaded = Loaded(emitted(name).text)
    inputs = loaded.module.get_inputs()
    with torch.no_grad():
        for module in (*loaded.model.modules(), *loaded.new.modules()):
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean, module.running_var = torch.arange(4.0), torch.arange(4.0) + 0.5
        in_training = loaded.epilogues(*inputs)
        loaded.model.eval(), loaded.new.eval()
        evaluating = loaded.epilogues(*inputs)
        expected = sum(len(each) > 0 for each in CHAINS.get(name, []))
        assert len(evaluating) == expected or name not in CHAINS
        assert (loaded.reductions > 0) == (name in TAILS)
        assert len(in_training) == (0 if name == "norm_tanh_pool" else len(evaluating))
        assert len(loaded.epilogues(*(torch.cat([each, each]) for each in inputs))) == len(evaluating)
        assert (loaded.reductions > 0) == (name in TAILS)


@needs_emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_half_types_and_channels_last(arch: str, tmp_path: Path) -> None:
    text = (LEVEL2 / "second_input.py").read_text(encoding="utf-8").replace("hardswish(x)", "hardswish(x + 1)")
    text = text.replace("torch.randn(2, 4, 2, 3, 3), torch.randn(2, 6, 4, 6, 6)",
                        "torch.randn(2, 16, 5, 5), torch.randn(2, 16, 10, 10)")  # fmt: skip
    text = text.replace("Transpose3d", "Transpose2d").replace("[4, 6]", "[16, 16]")
    text = text.replace("__init__()", "__init__()\n        self.norm = nn.BatchNorm2d(out).eval()", 1)
    text = text.replace("skip\n", "skip.contiguous()\n")
    (tmp_path / "model.py").write_text(
        text.replace("self.up(x)", "self.up(x.contiguous(memory_format=torch.channels_last))")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit_file, "settled", lambda source, arch: source)
        model = model_of_file(tmp_path / "model.py", "bfloat16", True)
        found = emit_file.emit(model, [DeviceInfo.for_arch(arch)], "model.py", "this test")
    loaded = Loaded(found.text, arch=arch)
    assert loaded.module.LAYERS[0].problem.channels_last
    loaded.model.eval(), loaded.new.eval().bfloat16()
    x, skip = (each.bfloat16() for each in loaded.module.get_inputs())
    with torch.no_grad():
        ours, theirs = loaded.new(x, skip), loaded.model.bfloat16().double()(x.double(), skip.double())
    assert any(number in loaded.fused for number in loaded.numbers)
    torch.testing.assert_close(ours.double(), theirs, rtol=0.03, atol=0.03)


@needs_emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tails_of_half_types(arch: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit_file, "settled", lambda source, arch: source)
        model = model_of_file(LEVEL2 / "norm_tanh_pool.py", "bfloat16", True)
        found = emit_file.emit(model, [DeviceInfo.for_arch(arch)], "model.py", "this test")
    loaded = Loaded(found.text, arch=arch)
    loaded.model.eval(), loaded.new.eval().bfloat16()
    (x,) = (each.bfloat16() for each in loaded.module.get_inputs())
    with torch.no_grad():
        ours, theirs = loaded.new(x), loaded.model.bfloat16().double()(x.double())
    assert loaded.reductions > 0
    torch.testing.assert_close(ours.double(), theirs, rtol=0.03, atol=0.03)


@needs_emulator
def test_where_the_models_own_forward_runs() -> None:
    """With derivatives, hooks, other numbers, mixed modes, other modules, other operands; never another result."""
    loaded = Loaded(emitted("leaky_factor_pool").text)
    new: Any = loaded.new
    (x,) = loaded.module.get_inputs()
    whole = ["leaky_relu(0.2) → scale_shift(scale per channel) → leaky_relu(0.2)"]
    assert loaded.epilogues(x.requires_grad_()) == []
    with torch.no_grad():
        assert loaded.epilogues(x) == whole
        handle = new.leaky.register_forward_hook(lambda *_: None)
        assert loaded.epilogues(x) == []
        handle.remove()
        new.pool.eval()
        assert loaded.epilogues(x) == []
        new.pool.train()
        assert loaded.epilogues(x[0]) == []
        new.factor = loaded.model.factor = nn.Parameter(torch.randn(4, 4, 6, 4))
        assert loaded.epilogues(x) == []
        new.factor = loaded.model.factor = nn.Parameter(torch.randn(1, 4, 1, 1, 1))
        assert loaded.epilogues(x) == whole
        for each in (new, loaded.model):
            each.leaky.negative_slope = 0.5  # type: ignore
        assert loaded.epilogues(x) == []
        for each in (new, loaded.model):
            each.leaky = nn.ELU()
        assert loaded.epilogues(x) == []
        new.leaky = loaded.model.leaky = nn.LeakyReLU(0.2)
        assert loaded.epilogues(x) == whole
        assert torch.equal(copy.deepcopy(new)(x), new(x))


@needs_emulator
def test_where_pytorch_computes_a_tail() -> None:
    """Of images of another size, of another module's numbers, and of a model that computes in another memory format."""
    loaded = Loaded(emitted("relu_group_norm").text)
    new: Any = loaded.new
    (x,) = loaded.module.get_inputs()
    with torch.no_grad():
        assert loaded.epilogues(x) == ["relu"]
        assert loaded.reductions > 0
        assert loaded.epilogues(torch.randn(2, 4, 5, 6)) == ["relu"]
        assert loaded.reductions == 0
        original: Any = loaded.model
        new.norm.eps = original.norm.eps = 1e-3
        assert loaded.epilogues(x) == []
        assert loaded.reductions == 0


_SMALL = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self, deep=1, affine=True):
        super().__init__()
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.many = nn.ModuleList([nn.Sigmoid() for _ in range(deep)])
        self.norm = nn.GroupNorm(2, 4, affine=affine)
        self.softmax = nn.Softmax(1)
        self.each = nn.Parameter(torch.rand(2, 4, 1, 1))
        self.inference = nn.Parameter(torch.rand(4, 1, 1))

    def _fused(self, y):
        return torch.relu(y)

    def forward(self, x, skip=None):
        y = self.up(x)
        FORWARD

def get_inputs():
    return [torch.rand(2, 6, 5, 3)INPUTS]

def get_init_inputs():
    return []
"""


def small(forward: str, folder: Path, inputs: str = "") -> emit_file.Emitted:
    return emitted_text(_SMALL.replace("FORWARD", forward).replace("INPUTS", inputs), folder)


@pytest.mark.parametrize(
    "forward",
    [
        "return F.relu(y[:, :, :-1, :-1])",
        "return y.contiguous()",
        "return F.relu(y).contiguous() * 2",
        "return F.max_pool2d(y.amax(1), 2)",
        "return F.adaptive_avg_pool2d(y.mean(1), 1)",
        "return y.mean((1, 2, 3)).mean(-1)",
        "return F.max_pool2d(y, 2, return_indices=True)[0]",
        "return F.max_pool2d(y, 3, stride=1, padding=1)",
        "return y.view(x.shape[1], 2, -1).mean(2)",
    ],
)
@needs_emulator
def test_what_no_kernel_computes_is_left(forward: str, tmp_path: Path) -> None:
    """None of these is a reason not to emit a file."""
    _is_same(Loaded(small(forward, tmp_path).text), torch.rand(2, 6, 5, 3))


def _is_same(loaded: Loaded, *inputs: Any) -> None:
    """Whatever kernels a call launches, it gives what the original gives."""
    with torch.no_grad():
        ours, theirs = loaded.new(*inputs), loaded.model(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ours.shape == theirs.shape


@needs_emulator
def test_other_batches_of_views_and_operands(tmp_path: Path) -> None:
    x = torch.rand(4, 6, 5, 3)
    loaded = Loaded(small("return y.view(2, 4, -1).mean(2)", tmp_path).text)
    for some in (x[:2], x):
        _is_same(loaded, some)
    loaded = Loaded(small("return y.view(y.shape[0], y.size(1), -1).mean(2)", tmp_path).text)
    for some in (x[:2], x, x[:1]):
        _is_same(loaded, some)
        assert loaded.reductions > 0
        loaded.numbers.clear()
    loaded = Loaded(small("return y.mean((2, 3), keepdim=True) * self.each", tmp_path).text)
    for some in (x[:2], x[:1]):
        _is_same(loaded, some)


@needs_emulator
def test_a_model_of_another_structure_runs_its_own_forward(tmp_path: Path) -> None:
    """Also one with a method or parameter of a name that the file might use."""
    forward = "for part in self.many:\n            y = part(y)\n        return self.norm(y) * self.inference"
    loaded = Loaded(small(forward, tmp_path).text)
    x = torch.rand(2, 6, 5, 3)
    _is_same(loaded, x)
    assert loaded.reductions > 0
    for arguments in ((3,), (1, False)):
        for each in ("model", "new"):
            torch.manual_seed(7)
            cls = loaded.module.Model if each == "model" else loaded.module.ModelNew
            setattr(loaded, each, cls(*arguments))
        _is_same(loaded, x)
    loaded = Loaded(small("return self._fused(self.softmax(y))", tmp_path).text)
    _is_same(loaded, x)
    assert loaded.reductions > 0
    models: list[Any] = [loaded.model, loaded.new]
    for model in models:
        model.softmax.dim = 2
    _is_same(loaded, x)


@needs_emulator
def test_inputs_that_are_left_out(tmp_path: Path) -> None:
    forward = "if skip is None:\n            return y\n        return F.relu(y + skip).amax(1)"
    loaded = Loaded(small(forward, tmp_path, ", torch.rand(2, 4, 10, 6)").text)
    x, skip = loaded.module.get_inputs()
    _is_same(loaded, x, skip)
    assert loaded.reductions > 0
    _is_same(loaded, x)
    loaded = Loaded(small("return F.relu(y + skip).amax(1)", tmp_path, ", torch.rand(2, 4, 10, 6)").text)
    _is_same(loaded, x, 2.0)


@needs_emulator
def test_other_arguments_of_the_constructor() -> None:
    """Numbers that a file was not made for are computed by the model's own forward."""
    loaded = Loaded(emitted("bias_clamp_scale").text)
    (x,) = loaded.module.get_inputs()
    with torch.no_grad():
        assert len(loaded.epilogues(x)) == 1
        for each in ("model", "new"):
            torch.manual_seed(7)
            cls = loaded.module.Model if each == "model" else loaded.module.ModelNew
            setattr(loaded, each, cls(6, 4, 4.0))
        assert loaded.epilogues(x) == []


FUNCTION = """
import torch

def Model():
    return torch.nn.Sequential(torch.nn.ConvTranspose1d(4, 4, 2, stride=2), torch.nn.SiLU())

def get_inputs():
    return [torch.rand(2, 4, 5)]

def get_init_inputs():
    return []
"""


@needs_emulator
def test_a_function_may_make_the_model(tmp_path: Path) -> None:
    loaded = Loaded(emitted_text(FUNCTION, tmp_path).text)
    (x,) = loaded.module.get_inputs()
    assert list(loaded.new.state_dict()) == ["0.weight", "0.bias"]
    assert isinstance(loaded.new, nn.Sequential)
    with torch.no_grad():
        assert loaded.epilogues(x) == ["silu"]
    path = tmp_path / "model.py"
    unfused = Loaded(emitted_file(path, fuse=False).text, "unfused")
    with torch.no_grad():
        assert unfused.epilogues(x) == []
    assert "run_chain" not in emitted_file(path, fuse=False).text


@needs_emulator
def test_a_value_is_there_as_long_as_it_is_read(tmp_path: Path) -> None:
    """A layer computes behind its last function, and so reads its input behind what stands between."""
    text = (LEVEL2 / "relu_group_norm.py").read_text(encoding="utf-8")
    text = text.replace("return self.norm(self.relu(self.up(x)))",
                        "y = self.up(x)\n        z = F.pad(x, (1, 1, 1, 1)).repeat(1, 2, 1, 1)\n        x = None\n"
                        "        return torch.relu(y + z)")  # fmt: skip
    loaded = Loaded(emitted_text("import torch.nn.functional as F\n" + text, tmp_path).text)
    with torch.no_grad():
        assert loaded.epilogues(*loaded.module.get_inputs()) == ["add(residual) → relu"]


@needs_emulator
def test_what_an_operator_changes_in_place_has_other_names(tmp_path: Path) -> None:
    text = (LEVEL2 / "relu_group_norm.py").read_text(encoding="utf-8")
    forward = "y = z = torch.tanh(self.up(x))\n        z = z * 2\n        w = z\n        z += 1\n        return y + w"
    text = text.replace("return self.norm(self.relu(self.up(x)))", forward)
    loaded = Loaded(emitted_text(text, tmp_path).text)
    with torch.no_grad():
        assert loaded.epilogues(*loaded.module.get_inputs()) == ["tanh"]


def test_concatenations_are_left_to_pytorch(tmp_path: Path) -> None:
    text = (LEVEL2 / "relu_group_norm.py").read_text(encoding="utf-8")
    joined = "return torch.cat([torch.tanh(self.up(x)), nn.functional.pad(x, (1, 1, 1, 1))], 1)"
    found = emitted_text(text.replace("return self.norm(self.relu(self.up(x)))", joined), tmp_path)
    assert found.remarks == ["up: fused with tanh(); ends there: cat(): in emitted files PyTorch joins tensors"]


def test_activations_before_a_layer_are_left_to_pytorch(tmp_path: Path) -> None:
    text = (LEVEL2 / "relu_group_norm.py").read_text(encoding="utf-8")
    text = text.replace("return self.norm(self.relu(self.up(x)))", "return torch.tanh(self.up(self.relu(x)))")
    found = emitted_text(text.replace("inplace=True", ""), tmp_path)
    (remark,) = found.remarks
    assert remark.startswith("up: fused with tanh()")
    assert remark.endswith("; relu before it is not fused in emitted files")


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        ("self.calls += 1\n        return F.relu(self.up(x))", "its forward changes attributes of its modules"),
        ("return F.relu(self.up(x)) * random.random()", "its forward is not the same at every call"),
        ("return F.relu(self.up(x)) + torch.ones(1)", "its forward makes a tensor of its own"),
        ("return F.relu(self.up(x)) * self.numbers[0]", "its forward reads numbers, a list, which torch.fx"),
        ("return F.relu(self.up(x)) * self.inner(x.shape[0])", "torch.fx does not trace its forward"),
        ("y = self.up(x)\n        x -= 1\n        return F.relu(y)", "sub changes a tensor in place"),
        ("n = m = x.shape[2]\n        n += 1\n        return F.relu(self.up(x)) * m", "its forward changes a number"),
        ("y = self.up(x)\n        x.zero_()\n        return F.relu(y)", "zero_ changes a tensor in place"),
    ],
)
def test_what_cannot_be_fused_is_told(forward: str, reason: str, tmp_path: Path) -> None:
    text = "import random\nimport torch.nn.functional as F\n" + (LEVEL2 / "relu_group_norm.py").read_text("utf-8")
    text = text.replace("return self.norm(self.relu(self.up(x)))", forward).replace(
        "super().__init__()", "super().__init__()\n        self.calls, self.numbers = 0, [2]"
    )
    text = text.replace(
        "    def forward", "    def inner(self, n):\n        return 1 if n > 2 else 2\n\n    def forward"
    )
    found = emitted_text(text, tmp_path)
    assert "run_chain" not in found.text
    assert len(found.remarks) == 1
    assert reason in found.remarks[0]


def test_a_model_without_chains_has_no_more_text_than_before() -> None:
    found = emitted("shape_decides").text
    for absent in (
        "run_chain",
        "run_tail",
        "with_epilogue",
        "runs_in_inference",
        'def forward(self, x):\n        """What',
    ):
        assert absent not in found
    assert Fusion().methods(0, str) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bias_clamp_scale", "second_input"])
def test_kernels_with_epilogues_compile_together(name: str) -> None:
    core = pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, but no GPU")
    source = load(emitted(name, "sm_90a").text).cuda_source("sm_90a").partition("#define POLYPHASE_KERNELS")[0]
    assert "// The epilogue: " in source
    core.Program(source, "c++", core.ProgramOptions(arch="sm_90a", std="c++17")).compile("cubin")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_models_compile_with_nvcc(name: str, tmp_path: Path) -> None:
    compile_by_nvcc(load(emitted(name, "sm_90a").text), "sm_90a", tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_emitted_models_on_the_gpu(name: str, tmp_path: Path) -> None:
    """Built by nvcc: KernelBench's trials, gradients and evaluation mode against float64."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    device = DeviceInfo.of(torch.device("cuda"))
    (tmp_path / "out.py").write_text(emitted(name, device.arch).text, encoding="utf-8")
    options = Options(torch.device("cuda"), trials=2, time=False)
    result = check_emitted(load_emitted(tmp_path / "out.py"), ModelFile.load(LEVEL2 / f"{name}.py"), options)
    assert result.ok, result.problems
