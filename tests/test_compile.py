"""torch.compile without graph breaks and without a recompile per size, and torch.export."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import polyphase
from helpers import OUR_MODULES, TORCH_MODULES


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


@pytest.mark.parametrize("dims", OUR_MODULES)
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_module_forward_and_backward(dims: int, dynamic: bool | None, device: torch.device) -> None:
    module = OUR_MODULES[dims](4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, device=device)
    compiled, counter = counted(module, dynamic=dynamic)
    x = torch.randn(2, 4, *(5, 6, 7)[:dims], device=device)
    gradients = []
    for call in (module, compiled):
        x.requires_grad_().grad = None
        module.zero_grad()
        output = call(x)
        output.square().sum().backward()
        gradients.append([output.detach(), x.grad, *(p.grad for p in module.parameters())])
    for eager, traced in zip(*gradients, strict=True):
        torch.testing.assert_close(eager, traced)
    assert counter.frame_count == 1


@pytest.mark.parametrize("training", [True, False])
def test_no_recompile_per_size(training: bool, device: torch.device) -> None:
    """At most one compilation for the first size, and one for all others."""
    module = OUR_MODULES[2](3, 2, (3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), device=device)
    compiled, counter = counted(module)
    for batch, height, width in [(2, 5, 6), (3, 7, 9), (4, 8, 12), (5, 31, 17), (2, 64, 3), (7, 5, 6)]:
        x = torch.randn(batch, 3, height, width, device=device, requires_grad=training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(x), module(x))
            if training:
                compiled(x).sum().backward()
    assert counter.frame_count <= 2


def test_dynamic_from_the_start(device: torch.device) -> None:
    module = OUR_MODULES[2](3, 2, 4, stride=2, padding=1, device=device)
    compiled, counter = counted(module, dynamic=True)
    for batch, height, width in [(2, 5, 6), (3, 7, 9), (4, 8, 12)]:
        x = torch.randn(batch, 3, height, width, device=device)
        torch.testing.assert_close(compiled(x), module(x))
    assert counter.frame_count == 1


def test_output_size_of_another_tensor(device: torch.device) -> None:
    """The U-Net idiom ``up(x, output_size=skip.shape[-2:])``, with images of odd and even size."""

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = polyphase.ConvTranspose2d(3, 2, 2, stride=2)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.up(x, output_size=skip.shape[-2:]) + skip

    module = Up().to(device)
    compiled, counter = counted(module, dynamic=True)
    for height, width in [(10, 12), (11, 14), (13, 17), (20, 23), (31, 40)]:
        x = torch.randn(1, 3, height // 2, width // 2, device=device)
        skip = torch.randn(1, 2, height, width, device=device)
        torch.testing.assert_close(compiled(x, skip), module(x, skip))
    assert counter.frame_count <= 2


def test_functional_unbatched_and_lists(device: torch.device) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return polyphase.conv_transpose2d(x, w, stride=[2, 1], padding=(1,), groups=2).relu()

    x, w = torch.randn(4, 5, 6, device=device), torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    compiled, _ = counted(call)
    torch.testing.assert_close(compiled(x, w), call(x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    module = OUR_MODULES[2](3, 2, 3, device=device)

    def inside(x: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype):
            return module(x)  # type: ignore[no-any-return]

    x = torch.randn(1, 3, 4, 4, device=device)
    compiled, _ = counted(inside)
    output = compiled(x)
    assert output.dtype == dtype
    torch.testing.assert_close(output, inside(x))
    output.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    compiled, _ = counted(module)
    with torch.autocast(device.type, dtype):
        assert compiled(x).dtype == dtype


def test_channels_last_and_strides(device: torch.device) -> None:
    """A wrong stride of the fake is an error when the graph runs on."""
    module = OUR_MODULES[2](4, 6, 3, stride=2, device=device).to(memory_format=torch.channels_last)

    def call(x: Tensor) -> Tensor:
        return module(x).permute(0, 2, 3, 1).reshape(-1).cumsum(0)

    compiled, _ = counted(call)
    x = torch.randn(2, 4, 5, 6, device=device).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(x), call(x))
    assert module(x).stride() == torch.compile(module, backend="aot_eager")(x).stride()


def test_bad_input_raises_in_a_compiled_module() -> None:
    module = torch.compile(polyphase.ConvTranspose2d(3, 2, 3), backend="aot_eager")
    with pytest.raises(RuntimeError, match="takes 3 input channels"):
        module(torch.randn(1, 4, 5, 5))


@pytest.mark.skipif(not hasattr(torch.library, "register_vmap"), reason="operators take vmap rules from PyTorch 2.5 on")
def test_vmap_inside_a_compiled_function() -> None:
    """(Not `torch.func.grad`: inside a compiled function PyTorch does not support it for any custom operator.)"""

    def ensemble(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.vmap(polyphase.conv_transpose1d, (None, 0))(x, w)

    x, w = torch.randn(4, 2, 5), torch.randn(3, 2, 3, 3)
    compiled, _ = counted(ensemble)
    torch.testing.assert_close(compiled(x, w), ensemble(x, w))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(device: torch.device) -> None:
    model = nn.Sequential(polyphase.ConvTranspose2d(3, 4, 4, 2, 1), nn.ReLU(), polyphase.ConvTranspose2d(4, 2, 3))
    model.to(device)
    compiled = torch.compile(model, fullgraph=True)
    for size in (5, 9, 12):
        x = torch.randn(2, 3, size, size, device=device)
        compiled(x).square().mean().backward()
        got = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        model(x).square().mean().backward()
        for ours, eager in zip(got, model.parameters()):
            torch.testing.assert_close(ours, eager.grad)
        model.zero_grad()


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    module = nn.Sequential(polyphase.ConvTranspose2d(3, 4, 4, 2, 1), nn.ReLU()).eval()
    batch, height = torch.export.Dim("batch", max=64), torch.export.Dim("height", max=512)
    program = torch.export.export(
        module, (torch.randn(2, 3, 8, 9),), dynamic_shapes=({0: batch, 2: height},), strict=strict
    )
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.polyphase.conv_transpose.default in called
    assert not any("convolution" in str(target) for target in called)
    for shape in ((2, 3, 8, 9), (5, 3, 17, 9), (1, 3, 100, 9)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), module(x))


def test_accelerated_model_compiles() -> None:
    theirs = nn.Sequential(TORCH_MODULES[1](2, 3, 8, 4), nn.Tanh(), TORCH_MODULES[1](3, 1, 8, 4))
    x = torch.randn(2, 2, 10)
    expected = theirs(x)
    polyphase.accelerate(theirs)
    compiled, counter = counted(theirs)
    torch.testing.assert_close(compiled(x), expected)
    assert counter.frame_count == 1
    polyphase.restore(theirs)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="not seen with older ones")
def test_accelerate_after_compile() -> None:
    """Dynamo guards the classes of modules; what was exported stays as it is."""
    model, x = nn.Sequential(nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.ReLU()).eval(), torch.randn(2, 4, 5, 6)
    program = torch.export.export(model, (x,))
    compiled, counter = counted(model)
    expected = compiled(x)
    polyphase.accelerate(model)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2
    called = {str(node.target) for graph in counter.graphs[-1:] for node in graph.graph.nodes}
    assert "polyphase.conv_transpose.default" in called
    assert not any("polyphase" in str(node.target) for node in program.graph.nodes)
