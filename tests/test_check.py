"""`check` on models of every kind: right ones pass, a wrong copy does not, and what was compared is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from polyphase import modules
from polyphase.bench import trial as trial_module
from polyphase.bench.check import check_model
from polyphase.bench.check_report import show
from polyphase.bench.model_file import Cut, ModelFile, ModelFileError, find_cut, trace
from polyphase.bench.report import make_console
from polyphase.bench.trial import CheckResult, Options

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
CPU = torch.device("cpu")


def model_file(
    make_model: Callable[..., nn.Module], *shapes: tuple[int, ...], arguments: Any = (), path: Path = Path("model.py")
) -> ModelFile:
    return ModelFile(path, make_model, lambda: [torch.rand(shape) for shape in shapes], lambda: list(arguments))


def run(file: ModelFile, **options: Any) -> CheckResult:
    return check_model(file, Options(CPU, **{"time": False, **options}))


def layer() -> nn.Module:
    return nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1)


class Generator(nn.Module):
    """Several layers, two inputs, an argument that is no tensor, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.second = nn.ConvTranspose2d(8, 3, 3, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float) -> dict[str, torch.Tensor]:
        hidden = self.first(x + y)
        return {"hidden": hidden, "image": self.second(hidden) * factor}


class _AlikeImages(TorchFunctionMode):
    """Large random batches are one image over and over.

    Not another `torch.rand`: PyTorch's device modes look their functions up once in a process, and would not know the
    real one ever after.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and math.prod(args) > 1 << 26:
            return func(1, *args[1:]).expand(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_agree_on_the_cpu(path: Path) -> None:
    """Of the largest batches, gigabytes of which one image is left to compare, the images are alike."""
    file = ModelFile.load(path)

    def fewer() -> Sequence[torch.Tensor]:
        with _AlikeImages():
            return file.get_inputs()

    result = run(replace(file, get_inputs=fewer))
    assert result.ok, result.problems
    assert result.cut.factor >= 4  # and printed
    assert len(result.swapped.swapped) == 1
    trials = {finding.trial for finding in result.findings}
    assert trials == ({1, 2, 3, 4, 5} if path.stem == "changing_sizes" else {1, 2})
    sizes = {finding.sizes for finding in result.findings}
    assert len(sizes) == (5 if path.stem == "changing_sizes" else 1)
    assert {"output", "∂ input 0", "∂ conv_transpose2d.weight"} <= {finding.what for finding in result.findings}
    assert [plan[2] for plan in result.plans] == ["forward", "input_grad", "weight_grad"]


def test_there_are_five_examples() -> None:
    assert [path.stem for path in EXAMPLES] == [
        "changing_sizes", "every_parameter", "grouped_strided", "square_stride1", "tuple_parameters"
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype(dtype: torch.dtype) -> None:
    result = run(model_file(layer, (2, 4, 5, 6)), dtype=dtype)
    assert result.ok, result.problems
    assert {finding.what for finding in result.findings} == {"output", "∂ input 0", "∂ weight", "∂ bias"}


def test_without_gradients_only_outputs_are_compared() -> None:
    result = run(model_file(layer, (2, 4, 5, 6)), grad=False)
    assert result.ok
    assert {finding.what for finding in result.findings} == {"output"}
    assert [plan[2] for plan in result.plans] == ["forward"]


def test_unbatched_input() -> None:
    result = run(model_file(layer, (4, 5, 6)), scale=1)
    assert result.ok, result.problems
    assert result.plans[0][1].startswith("1×4×5×6")


def test_a_model_with_other_layers_inputs_and_outputs() -> None:
    file = ModelFile(Path("model.py"), Generator, lambda: [torch.rand(3, 4, 8, 8), torch.rand(3, 4, 8, 8), 0.5], list)
    result = run(file)
    assert result.ok, result.problems
    assert {"output 0", "output 1", "∂ input 0", "∂ input 1", "∂ first.0.weight"} <= {f.what for f in result.findings}
    assert [plan[0] for plan in result.plans[::3]] == ["first.0", "second"]


def test_a_gradient_that_is_zero_is_told_as_zero() -> None:
    """Of a bias before a batch norm only rounding is left, and 1e8 times float64's is no error."""
    result = run(
        ModelFile(Path("model.py"), Generator, lambda: [torch.rand(3, 4, 8, 8), torch.rand(3, 4, 8, 8), 0.5], list)
    )
    assert result.ok
    assert {found.what for found in result.findings if found.comparison.vanishes} == {"∂ first.0.bias"}
    console = make_console()
    with console.capture() as shown:
        show(console, result)
    lines = shown.get().splitlines()
    (zero, *_) = [line for line in lines if "∂ first.0.bias" in line]
    assert zero.count("0 in float64") == 2
    assert any(line.startswith("0 in float64: zero except for rounding") for line in lines)
    assert "worst" not in shown.get()  # no tensor is judged by its elements
    with console.capture() as shown:
        show(console, run(model_file(layer, (2, 4, 5, 6))))
    assert "worst" in shown.get()
    assert "0 in float64" not in shown.get()


def test_both_are_timed() -> None:
    result = run(model_file(layer, (2, 4, 5, 6)), time=True)
    assert [race.what for race in result.races] == ["forward", "forward and backward"]
    assert all(race.ours.ms > 0 and race.torch.ms > 0 for race in result.races)


def test_a_model_written_with_polyphase_is_compared_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    file = model_file(lambda: modules.ConvTranspose2d(4, 6, 3), (2, 4, 5, 6))
    assert run(file).ok
    monkeypatch.setattr(modules, "conv_transpose2d", _wrong_by(1e-3))
    assert not run(file).ok


def _wrong_by(error: float) -> Callable[..., torch.Tensor]:
    right = modules.conv_transpose2d

    def wrong(*arguments: Any, **keywords: Any) -> torch.Tensor:
        output = right(*arguments, **keywords)
        nudge = torch.zeros_like(output)
        nudge.view(-1)[-1] = error
        return output + nudge

    return wrong


@pytest.mark.parametrize("grad", [True, False])
def test_one_wrong_element_of_the_output_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    monkeypatch.setattr(modules, "conv_transpose2d", _wrong_by(1e-3))
    result = run(model_file(layer, (2, 4, 5, 6)), grad=grad, trials=1)
    assert not result.ok
    assert result.problems == ["output on 2×4×5×6: 1 of 1440 elements are further from float64 than allowed"]
    assert [finding.what for finding in result.findings if not finding.ok] == ["output"]


def test_a_single_layer_is_judged_element_by_element_and_a_deep_model_in_the_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modules, "conv_transpose2d", _wrong_by(2e-5))  # too little for the norm of all elements
    single = run(model_file(layer, (8, 4, 40, 40)), grad=False)
    deep = run(model_file(lambda: nn.Sequential(layer(), nn.Tanh()), (8, 4, 40, 40)), grad=False)
    assert (single.ok, single.findings[0].elementwise) == (False, True)
    assert (deep.ok, deep.findings[0].elementwise) == (True, False)


def test_a_wrong_gradient_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    right = modules.conv_transpose2d

    def wrong(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(x, weight + 1e-3 * (weight - weight.detach()), *rest)

    monkeypatch.setattr(modules, "conv_transpose2d", wrong)
    result = run(model_file(layer, (2, 4, 5, 6)), trials=1)
    assert [finding.what for finding in result.findings if not finding.ok] == ["∂ weight"]


def test_a_wrong_result_in_a_deep_model_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "conv_transpose2d", _wrong_by(1.0))
    file = ModelFile(Path("model.py"), Generator, lambda: [torch.rand(3, 4, 8, 8), torch.rand(3, 4, 8, 8), 0.5], list)
    assert not run(file).ok


def test_another_shape_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    right = modules.conv_transpose2d
    monkeypatch.setattr(modules, "conv_transpose2d", lambda *arguments: right(*arguments)[..., :-1])
    result = run(model_file(layer, (2, 4, 5, 6)), trials=1, time=True)
    assert result.problems[0].startswith("2×4×5×6: polyphase does not run it: RuntimeError: Mismatch in shape")
    assert not result.races
    result = run(model_file(layer, (2, 4, 5, 6)), grad=False, trials=1)
    assert result.problems == [
        "output on 2×4×5×6: the result is (2, 6, 10, 11) torch.float32, PyTorch's is (2, 6, 10, 12) torch.float32"
    ]


def test_nothing_to_accelerate_is_no_success() -> None:
    result = run(model_file(lambda: nn.Conv2d(4, 4, 3), (1, 4, 8, 8)))
    assert not result.ok
    assert result.problems == ["nothing to check: no ConvTranspose1d/2d/3d module found"]


def test_a_model_whose_outputs_cannot_be_compared_is_no_success() -> None:
    class Classes(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).argmax(1)  # type: ignore[no-any-return]

    result = run(model_file(lambda: Classes(layer()), (1, 4, 5, 5)), grad=False)
    assert result.problems == ["nothing was compared: the outputs hold no floating-point or complex tensor"]


class Around(nn.Module):
    """A layer, and what a model does around it."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.other = layer(), layer()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.up, x)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda up, x: x * 2, "the model never called what was swapped (up, other): nothing was checked"),
        (lambda up, x: nn.functional.conv_transpose2d(x, up.weight), "the model never called what was swapped"),
        (lambda up, x: up(x) * float("nan"), "no output has a finite number in float64"),
        (lambda up, x: up(x[:0]), "no output has a finite number in float64"),
        (lambda up, x: torch.randn_like(up(x)) + 0 * up(x), "does the model draw random numbers?"),
    ],
    ids=["unused", "its weight alone", "NaN", "empty", "random"],
)
@pytest.mark.parametrize("grad", [False, True])
def test_what_cannot_be_checked_is_no_success(
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor], problem: str, grad: bool
) -> None:
    result = run(model_file(lambda: Around(call), (1, 4, 5, 5)), grad=grad)
    assert any(problem in each for each in result.problems), result.problems


def test_a_layer_that_is_never_called_is_named() -> None:
    result = run(model_file(lambda: Around(lambda up, x: up(x)), (1, 4, 5, 5)))
    assert result.ok
    assert "swapped, but never called: other" in result.remarks


class Both(nn.Module):
    """A layer, and a call of the function beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(F.conv_transpose2d(x, torch.ones(4, 4, 1, 1, dtype=x.dtype, device=x.device)))


def test_calls_of_the_function_are_told_of() -> None:
    told = "calls of transposed convolutions outside modules, which stay PyTorch's: 1"
    result = run(model_file(Both, (1, 4, 5, 5)))
    assert result.ok, result.problems
    assert told in result.remarks
    assert told not in run(model_file(layer, (1, 4, 5, 5))).remarks


@pytest.mark.parametrize("wrong", [False, True])
def test_models_that_change_their_input_in_place(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the copies is given the same, also where inputs are leaves of a graph, and where all is timed."""
    if wrong:
        monkeypatch.setattr(modules, "conv_transpose2d", _wrong_by(10.0))
    for grad in (False, True):
        result = run(
            model_file(lambda: Around(lambda up, x: up(x.mul_(2).relu_())), (1, 4, 5, 5)), grad=grad, time=True
        )
        assert result.ok is not wrong, result.problems
        assert len(result.races) == (0 if wrong else 1 + grad)


@pytest.mark.parametrize("wrong", [False, True])
def test_nan_that_pytorch_gives_too_is_no_mismatch(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Logarithm(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).log()  # type: ignore[no-any-return]

    if wrong:
        monkeypatch.setattr(modules, "conv_transpose2d", _wrong_by(10.0))
    result = run(model_file(lambda: Logarithm(layer()), (1, 4, 5, 5)), grad=False)
    assert result.ok is not wrong, result.problems


def test_a_large_batch_is_compared_on_some_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "FLOAT64_FLOPS", 1.0)
    result = run(model_file(layer, (6, 4, 5, 6)), trials=1)
    assert result.ok, result.problems
    assert any("float64 is compared on images 0, 5 only" in remark for remark in result.remarks)
    elements = {finding.what: finding.comparison.elements for finding in result.findings}
    assert elements == {"output": 2 * 6 * 10 * 12, "∂ input 0": 2 * 4 * 5 * 6, "∂ weight": 4 * 6 * 9, "∂ bias": 6}
    # Where images see each other, or nobody knows which dimension counts them, everything is compared.
    normalised = nn.Sequential(layer(), nn.BatchNorm2d(6))
    for make_model, shape in ((lambda: normalised, (6, 4, 5, 6)), (layer, (4, 5, 6))):
        result = run(model_file(make_model, shape), scale=1, trials=1)
        assert result.ok, result.problems
        assert not any("float64 is compared" in remark for remark in result.remarks)


def test_a_gradient_that_leaks_between_images_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "FLOAT64_FLOPS", 1.0)
    right = modules.conv_transpose2d

    def leaking(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(x + 1e-3 * (x.roll(1, 0) - x.roll(1, 0).detach()), *rest)

    monkeypatch.setattr(modules, "conv_transpose2d", leaking)
    result = run(model_file(layer, (6, 4, 5, 6)), trials=1)
    assert any("not zero for images" in problem for problem in result.problems)


# Cutting


def test_inputs_are_cut_until_they_are_cheap() -> None:
    model, inputs = layer(), [torch.rand(16, 4, 64, 48), torch.rand(16), 3]
    cheap = trace(model, [torch.rand(4, 4, 16, 12)]).flops
    cut = find_cut(model, inputs[:1], cheap)
    assert cut == Cut(4)
    assert str(cut) == "with batch and image sides cut to 1/4"
    assert [tuple(value.shape) for value in cut.apply(inputs)[:2]] == [(4, 4, 16, 12), (4,)]
    assert find_cut(model, inputs[:1], 1e18) == Cut()


def test_image_sides_are_left_alone_where_the_model_insists_on_them() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 2, 2), nn.Flatten(), nn.Linear(2 * 16 * 16, 4))
    inputs = [torch.rand(8, 2, 8, 8)]
    cut = find_cut(model, inputs, trace(model, [inputs[0][:2]]).flops)
    assert cut == Cut(4, sides=False)
    assert tuple(cut.apply(inputs)[0].shape) == (2, 2, 8, 8)


def test_a_model_that_needs_numbers_is_not_cut_and_still_checked() -> None:
    class Doubtful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() > -1e9 else x

    assert find_cut(Doubtful(), [torch.rand(2, 4, 5, 6)], 1.0) == Cut()
    result = run(model_file(Doubtful, (2, 4, 5, 6)))
    assert result.ok, result.problems
    assert any(remark.startswith("plans are not shown") for remark in result.remarks)


def test_output_size_counts_as_output_padding() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ConvTranspose2d(4, 6, 3, stride=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, output_size=(17, 16))

    found = trace(Sized(), [torch.rand(2, 4, 5, 5)])
    assert found.single
    name, problem = found.problems[0]
    assert (name, problem.output_padding, problem.output_size) == ("layer", (2, 1), (17, 16))


@pytest.mark.parametrize(("dims", "last"), [(1, False), (2, True), (3, True)])
def test_the_memory_format_of_a_layer_is_that_of_its_tensors(dims: int, last: bool) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    inputs = [torch.rand(2, *[5] * dims, 4).movedim(-1, 1)]
    (_, problem), *_ = trace(nn.Sequential(kind(4, 6, 3)), inputs).problems
    assert problem.channels_last == last
    result = run(ModelFile(Path("model.py"), lambda: nn.Sequential(kind(4, 6, 3)), lambda: inputs, list))
    assert result.ok, result.problems


# Model files


def test_the_three_forms_of_constructor_arguments() -> None:
    for arguments in ([4, 6, 3], [[4, 6], {"kernel_size": 3}], {"in_channels": 4, "out_channels": 6, "kernel_size": 3}):
        file = ModelFile(Path("model.py"), nn.ConvTranspose2d, list, lambda arguments=arguments: arguments)
        assert file.build(CPU, torch.float64, seed=0).weight.shape == (4, 6, 3, 3)
    first, second = (file.build(CPU, torch.float32, seed=3).weight for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Model = 1\n", "lacks get_inputs, get_init_inputs: a model file has a class Model"),
        ("import nowhere_to_be_found\n", "does not run: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("def f(:\n", "does not run: SyntaxError"),
        ("raise SystemExit(0)\n", "does not run: SystemExit"),
    ],
)
def test_a_file_that_is_no_model_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(text)
    with pytest.raises(ModelFileError, match=message):
        ModelFile.load(path)


CHAIN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1), nn.BatchNorm2d(4)
    def forward(self, x):
        return torch.relu(self.norm(self.up(x))) + 1

def get_inputs():
    return [torch.randn(2, 3, 5, 6)]

def get_init_inputs():
    return []
"""


def test_a_fused_copy_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.py"
    path.write_text(CHAIN)
    file = ModelFile.load(path)
    result = check_model(file, Options(CPU, time=True, trials=1))
    assert result.ok
    assert [str(found.what) for found in result.findings if "fused" in found.what] == ["output, fused"]
    assert [race.what for race in result.races][-1] == "forward, fused, in evaluation mode"
    assert [block.fused for block in result.blocks] == [("norm", "relu()", "add()")]
    assert not check_model(file, Options(CPU, time=False, trials=1, fuse=False)).blocks

    from polyphase.torch_op import epilogue

    monkeypatch.setitem(epilogue._ACTIVATIONS, "relu", torch.sigmoid)
    result = check_model(file, Options(CPU, time=False, trials=1))
    assert [problem.partition(":")[0] for problem in result.problems] == ["fused"]
