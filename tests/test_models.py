"""`benchmarks/models.py`: its models are built, run, and have the chains that they are there for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import polyphase

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
models = pytest.importorskip("models")

# Layers, and those that compute what follows them.
CHAINS = {
    "DCGAN": (5, 5), "SimpleBaseline head": (3, 3), "Mask R-CNN branch": (1, 1), "SAM upscaling": (2, 2),
    "HiFi-GAN": (4, 0), "U-Net": (4, 4), "pix2pix": (8, 8), "DAC decoder": (4, 0), "FSRCNN": (1, 0),
    "PointPillars neck": (3, 3), "nnU-Net 3-D": (4, 4),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_models_on_meta_tensors(name: str) -> None:
    model = models.MODELS[name]
    module = models.built(model).to("meta")
    inputs = [torch.empty(shape, device="meta") for shape in models.shapes(model, 1)]
    wanted = module(*inputs)
    blocks = polyphase.accelerate(module, fuse=True).blocks
    assert (len(blocks), sum(bool(block.fused) for block in blocks)) == CHAINS[name]
    with torch.no_grad():
        assert module(*inputs).shape == wanted.shape
