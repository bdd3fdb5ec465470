"""Accelerated models in other hands: ONNX by both exporters, PyTorch's operators, and AOTInductor's packages."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyphase
from helpers import OUR_MODULES, TORCH, constants, make_operands, normal_tensor, random_problem
from polyphase import ConvTransposeProblem, fused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TOLERANCE = 1e-4


class Layers(nn.Module):
    """Layers side by side, each of an input of its own."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(self.layers, inputs))


class UNet(nn.Module):
    """Two levels, the upper one by a layer that is told its size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.deeper = nn.Conv2d(8, 16, 3, 2, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.ConvTranspose2d(16, 2, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x).relu()
        up = self.up(self.deeper(fine).relu())
        return self.last(torch.cat([fine, up], 1), output_size=list(x.shape[-2:]))


class Blurred(nn.Module):
    """Calls the function, each channel on its own, and an unbatched image."""

    def forward(self, x: Tensor) -> Tensor:
        spread = polyphase.conv_transpose2d(x, x.new_full((4, 1, 3, 3), 1 / 9), padding=1, stride=2, groups=4)
        return spread + polyphase.conv_transpose2d(x[0], x.new_ones(4, 4, 1, 1), stride=2)


def dcgan() -> nn.Module:
    return nn.Sequential(
        *(nn.ConvTranspose2d(12, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Tanh()),
    )


def vocoder() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        *(norm(nn.ConvTranspose1d(10, 6, 16, 8, 4)), nn.LeakyReLU(0.1), nn.Conv1d(6, 6, 3, padding=1)),
        *(norm(nn.ConvTranspose1d(6, 3, 5, 3, 1, 1)), nn.LeakyReLU(0.1)),
    )


def volumes() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose3d(3, 4, 2, 2), nn.ReLU(), nn.ConvTranspose3d(4, 2, 3, (1, 2, 2), 1, groups=2))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "U-Net": (UNet, (2, 3, 16, 20)),
    "DCGAN": (dcgan, (2, 12, 1, 1)),
    "vocoder": (vocoder, (2, 10, 9)),
    "volumes": (volumes, (1, 3, 4, 5, 6)),
    "functions": (Blurred, (2, 4, 5, 6)),
}


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().eval()
    if name != "functions":
        assert polyphase.accelerate(model).swapped
    return model, torch.randn(shape)


def random_layers(count: int) -> tuple[Layers, list[Tensor]]:
    rng = random.Random(50)
    layers, inputs = [], []
    while len(layers) < count:
        problem = random_problem(rng)
        kept = all(extra < s for extra, s in zip(problem.output_padding, problem.stride))
        if problem.batch and problem.dims == len(layers) % 3 + 1 and kept:  # ONNX's output padding is below the stride
            layers.append(layer_of(problem))
            inputs.append(make_operands(problem, torch.float32, "cpu", make=normal_tensor).input)
    return Layers(layers).eval(), inputs


def layer_of(problem: ConvTransposeProblem) -> nn.Module:
    layer = OUR_MODULES[problem.dims](
        problem.in_channels, problem.out_channels, problem.kernel_size, bias=problem.bias, **constants(problem)
    )
    assert layer.weight.shape == problem.weight_shape
    return layer


def by_onnxruntime(model: Any, inputs: list[Tensor], dynamo: bool) -> tuple[list[str], list[np.ndarray]]:
    """The types of the nodes of the exported graph, and what it computes."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    if dynamo:
        pytest.importorskip("onnxscript")
        if torch.__version__ < (2, 9):
            pytest.skip("before 2.9 the exporter does not say that it is at work: export polyphase.to_aten(program)")
    file = io.BytesIO()
    torch.onnx.export(model, tuple(inputs), file, dynamo=dynamo, **({"verbose": False} if dynamo else {}))
    graph = onnx.load_from_string(file.getvalue()).graph
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    given = {node.name: x.numpy() for node, x in zip(session.get_inputs(), inputs, strict=True)}
    return [node.op_type for node in graph.node], session.run(None, given)


@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_of_random_layers(dynamo: bool) -> None:
    """60 of them, 1-D to 3-D."""
    model, inputs = random_layers(60)
    nodes, found = by_onnxruntime(model, inputs, dynamo)
    assert nodes.count("ConvTranspose") == 60
    with torch.no_grad():
        for got, expected in zip(found, model(*inputs), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_onnx_of_models(name: str, dynamo: bool) -> None:
    model, x = built(name)
    nodes, (found,) = by_onnxruntime(model, [x], dynamo)
    assert nodes.count("ConvTranspose") == 2 + (name == "DCGAN")
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=TOLERANCE, atol=TOLERANCE)


def test_onnx_with_a_dynamic_batch(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if torch.__version__ < (2, 5):
        pytest.skip("before 2.5 there is no exporter by torch.export")
    model, x = built("DCGAN")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    file = tmp_path / "model.onnx"
    torch.onnx.export(polyphase.to_aten(program), (), str(file), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    more = torch.randn(5, 12, 1, 1)
    (found,) = session.run(None, {session.get_inputs()[0].name: more.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(more), rtol=TOLERANCE, atol=TOLERANCE)


def test_onnx_leaves_models_as_they_are() -> None:
    pytest.importorskip("onnxscript")
    model, x = built("volumes")
    by_onnxruntime(model, [x], True)
    assert operators(torch.export.export(model, (x,))) == {"polyphase.conv_transpose.default"}


def operators(program: Any) -> set[str]:
    """Those of transposed convolutions."""
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    return {name for name in names if "conv" in name and "conv1d" not in name and "conv2d" not in name}


@pytest.mark.parametrize("name", MODELS)
def test_to_aten(name: str, device: torch.device) -> None:
    model, x = built(name)
    model, x = model.to(device), x.to(device)
    program = torch.export.export(model, (x,))
    assert operators(program) == {"polyphase.conv_transpose.default"}
    translated = polyphase.to_aten(program)
    assert operators(translated) == {"aten.convolution.default"}
    with torch.no_grad():
        torch.testing.assert_close(translated.module()(x), model(x), rtol=TOLERANCE, atol=TOLERANCE)
    assert operators(program) == {"polyphase.conv_transpose.default"}, "the program given is left as it is"


def test_to_aten_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"takes what torch\.export\.export returns, not ConvTranspose1d: write"):
        polyphase.to_aten(polyphase.ConvTranspose1d(2, 2, 2))  # type: ignore[arg-type]


def test_to_aten_of_random_layers() -> None:
    model, inputs = random_layers(30)
    translated = polyphase.to_aten(torch.export.export(model, tuple(inputs)))
    with torch.no_grad():
        for got, expected in zip(translated.module()(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


class Fused(nn.Module):
    """A layer with an epilogue."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose2d(3, 4, 3, 2)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        norm = fused.batch_norm(self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias)
        epilogue = [norm, fused.activation("leaky_relu", 0.2), fused.add(skip), "tanh"]
        return fused.conv_transpose2d(x, self.layer.weight, self.layer.bias, 2, epilogue=epilogue)


def test_epilogues() -> None:
    """Nodes and operators of their own, behind the layer's."""
    torch.manual_seed(0)
    model, x, skip = Fused().eval(), torch.randn(2, 3, 4, 5), torch.randn(2, 4, 9, 11)
    with torch.no_grad():
        expected = model(x, skip)
        program = torch.export.export(model, (x, skip))
        assert operators(program) == {"polyphase.conv_transpose_epilogue.default"}
        translated = polyphase.to_aten(program)
        assert operators(translated) == {"aten.convolution.default"}
        torch.testing.assert_close(translated.module()(x, skip), expected, rtol=TOLERANCE, atol=TOLERANCE)
    for dynamo in (False, True):
        nodes, (found,) = by_onnxruntime(model, [x, skip], dynamo)
        assert nodes.count("ConvTranspose") == 1
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=TOLERANCE, atol=TOLERANCE)


class Gradients(nn.Module):
    """The two other passes, as operators."""

    def forward(self, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        rest = [2, 3], [1, 0], [1, 2], [1, 2], 2
        return (
            torch.ops.polyphase.conv_transpose_input_grad(g, w, *rest),
            torch.ops.polyphase.conv_transpose_weight_grad(x, g, list(w.shape[2:]), *rest),
        )


def test_to_aten_of_gradients() -> None:
    x, w = torch.randn(2, 4, 5, 6, requires_grad=True), torch.randn(4, 3, 3, 2, requires_grad=True)
    y = TORCH[2](x, w, None, (2, 3), (1, 0), (1, 2), 2, (1, 2))
    g = torch.randn_like(y)
    given = (x.detach(), w.detach(), g)
    translated = polyphase.to_aten(torch.export.export(Gradients(), given))
    assert operators(translated) == {"aten.convolution_backward.default"}
    torch.testing.assert_close(translated.module()(*given), torch.autograd.grad(y, (x, w), g), rtol=1e-4, atol=1e-4)


def packaged(program: torch.export.ExportedProgram, path: Path, device: torch.device) -> str:
    """AOTInductor's package of a program; skips the test where it cannot package a model of PyTorch's alone."""
    try:
        return torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except Exception:
        alone = torch.export.export(nn.Linear(2, 3).to(device), (torch.randn(4, 2, device=device),))
        try:
            torch._inductor.aoti_compile_and_package(alone, package_path=str(path))
        except Exception as failure:
            pytest.skip(f"AOTInductor packages nothing here: {failure}")
        raise


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._inductor, "aoti_load_package"), reason="PyTorch 2.6 has it")
def test_aot_inductor_package(device: torch.device, tmp_path: Path) -> None:
    """It calls polyphase's operator, in any process that has imported polyphase."""
    model, x = built("DCGAN")
    model, x = model.to(device), x.to(device)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=8)},))
    path = packaged(program, tmp_path / "model.pt2", device)
    loaded = torch._inductor.aoti_load_package(path)
    other = torch.randn(5, 12, 1, 1, device=device)
    with torch.no_grad():
        torch.testing.assert_close(loaded(other), model(other), rtol=TOLERANCE, atol=TOLERANCE)
