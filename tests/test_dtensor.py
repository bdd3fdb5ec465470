"""DTensors, and FSDP2's sharded modules: in one process here, in two in `tests/test_distributed.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyphase
from processes import run_python

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check_sharded_layers(mesh: Any) -> None:
    """Layers of sharded operands against those of whole ones: outputs and all gradients, in each placement."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole, images, channels = Replicate(), Shard(0), Shard(1)
    cases: list[tuple[Any, dict[str, Any], Any, Any, Any, Any]] = [
        # layer, its constants, placements of input, weight, bias, and those of the output that follow
        ((4, 6, 3), {"stride": 2}, whole, whole, whole, whole),
        ((4, 6, 3), {"stride": 3, "padding": 1}, images, whole, whole, images),
        ((4, 6, 3), {"groups": 2}, images, whole, whole, images),
        ((4, 6, 3), {"stride": 2, "groups": 2}, channels, Shard(0), whole, None),
        ((4, 6, 3), {"padding": 1}, whole, channels, Shard(0), channels),
        ((4, 6, (2, 3)), {"bias": False}, channels, Shard(0), None, None),
    ]
    for arguments, constants, of_input, of_weight, of_bias, expected in cases:
        torch.manual_seed(1)
        layer = polyphase.ConvTranspose2d(*arguments, **constants)
        x = torch.randn(4, 4, 5, 5, requires_grad=True)
        y = layer(x)
        g = torch.randn_like(y)
        parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
        wanted = [y, *torch.autograd.grad(y, [x, *parameters], g)]

        placed = [
            distribute_tensor(each.detach(), mesh, [placement]).requires_grad_()
            for each, placement in zip((x, *parameters), (of_input, of_weight, of_bias))
        ]
        output = polyphase.conv_transpose2d(
            *(*placed, None)[:3], layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        )
        if expected is not None:
            assert output.placements == (expected,)
        of_output = [whole if placement.is_partial() else placement for placement in output.placements]
        grads = torch.autograd.grad(output, placed, distribute_tensor(g, mesh, of_output))
        torch.testing.assert_close([each.full_tensor() for each in (output, *grads)], wanted)


def check_distributed_module(mesh: Any) -> None:
    """As reported: parameters are replicated, images are not."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    torch.manual_seed(0)
    theirs, x = nn.ConvTranspose2d(3, 2, 3), torch.randn(4, 3, 4, 4)
    ours = polyphase.ConvTranspose2d(3, 2, 3)
    ours.load_state_dict(theirs.state_dict())
    output = distribute_module(ours, mesh)(distribute_tensor(x, mesh, [Shard(0)]))
    assert output.placements == (Shard(0),)
    expected = theirs(x)
    torch.testing.assert_close(output.full_tensor(), expected)
    output.sum().backward()
    expected.sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


@pytest.mark.slow
def test_compiled_at_the_first_call() -> None:
    """In a process of its own, where polyphase was imported before DTensors were."""
    pytest.importorskip("torch.distributed.tensor.experimental")
    printed = run_python("""
        import torch, polyphase, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh, layer = dist.init_device_mesh("cpu", (1,)), polyphase.ConvTranspose2d(3, 2, 3)
        from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
        x = distribute_tensor(torch.randn(2, 3, 4, 4), mesh, [Shard(0)])
        compiled = torch.compile(distribute_module(layer, mesh), backend="aot_eager", fullgraph=True)
        y = compiled(x)
        y.sum().backward()
        torch.testing.assert_close(y.full_tensor(), layer(x).full_tensor())
        print(y.placements == (Shard(0),), layer.weight.grad.shape)
        dist.destroy_process_group()
    """)
    assert printed.splitlines()[-1] == "True torch.Size([3, 2, 3, 3])"  # some versions tell of gloo's ranks before


@pytest.mark.parametrize("check", [check_sharded_layers, check_distributed_module])
def test_dtensors(check: Callable[[Any], None]) -> None:
    pytest.importorskip("torch.distributed.tensor.experimental")
    check(dist.init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("first", ["shard", "accelerate", "shard again"])
def test_fully_shard(first: str) -> None:
    """`fully_shard` puts a class of its own before the layer's."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("PyTorch 2.6 has it")
    mesh = dist.init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3, stride=2))
    nn.utils.parametrizations.weight_norm(model[2])
    x = torch.randn(2, 3, 5, 5)
    expected = model(x)
    if first == "accelerate":
        assert len(polyphase.accelerate(model).swapped) == 2
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, mesh=mesh)
    assert isinstance(model[0], polyphase.ConvTranspose2d) == (first == "accelerate"), "derived from its own class"
    report = polyphase.accelerate(model)
    assert not report.left
    assert all(isinstance(layer, polyphase.ConvTranspose2d) for layer in (model[0], model[2]))
    assert isinstance(model[0], fsdp.FSDPModule)
    assert "polyphase.FSDPConvTranspose2d(3, 4" in str(model)
    got = model(x)
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert len(polyphase.restore(model).swapped) == 2
    assert isinstance(model[0], fsdp.FSDPModule)
    assert not isinstance(model[0], polyphase.ConvTranspose2d)
    torch.testing.assert_close(model(x), expected)
