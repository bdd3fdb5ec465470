"""Two processes: gradients of halves of a batch that DistributedDataParallel averages, and layers of DTensors."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import polyphase
from helpers import forbid_tf32

WORLD = 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3, groups=2))
    polyphase.accelerate(model)
    return model


def batch() -> Tensor:
    return torch.randn(2 * WORLD, 3, 5, 5, generator=torch.Generator().manual_seed(1))


def work(rank: int, backend: str, store: str) -> None:
    forbid_tf32()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        model = DistributedDataParallel(build().to(device), device_ids=[rank] if backend == "nccl" else None)
        part = batch().chunk(WORLD)[rank].to(device)
        for _ in range(2):  # the second step runs on the buckets that the first one arranged
            model.zero_grad()
            model(part).square().mean().backward()
        whole = copy.deepcopy(build())
        whole(batch()).square().mean().backward()
        for got, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert got.grad is not None
            torch.testing.assert_close(got.grad.cpu(), expected.grad)
    finally:
        dist.destroy_process_group()


def work_on_shards(rank: int, store: str) -> None:
    from test_dtensor import check_distributed_module, check_sharded_layers

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        mesh = dist.init_device_mesh("cpu", (WORLD,))
        check_sharded_layers(mesh)
        check_distributed_module(mesh)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_shards_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor.experimental")
    mp.spawn(work_on_shards, (str(tmp_path / "store"),), nprocs=WORLD)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(work, ("gloo", str(tmp_path / "store")), nprocs=WORLD)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    mp.spawn(work, ("nccl", str(tmp_path / "store")), nprocs=WORLD)
