"""DTensors, and FSDP2's sharded modules: in one process here, in two in `tests/test_distributed.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyphase

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("first", ["shard", "accelerate"])
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
