"""`benchmarks/models.py`: its models are built, run, and have the chains that they are there for."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyphase

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
models = pytest.importorskip("models")

# Layers, those that compute what follows them, and those that compute what is before.
CHAINS = {
    "DCGAN": (5, 5, 0), "SimpleBaseline head": (3, 3, 0), "Mask R-CNN branch": (1, 1, 1), "SAM upscaling": (2, 2, 0),
    "SAM 2 upscaling": (2, 2, 0), "HiFi-GAN": (4, 0, 0), "U-Net": (4, 4, 4), "pix2pix": (8, 8, 0),
    "CycleGAN": (2, 2, 0), "StyleGAN2 grouped": (12, 6, 0), "StyleGAN2 scaled": (12, 12, 0), "DAC decoder": (4, 0, 4),
    "FSRCNN": (1, 0, 1), "PointPillars neck": (3, 3, 0), "DPT": (2, 0, 0), "nnU-Net 3-D": (4, 4, 4),
    "UNETR": (10, 5, 0), "EnCodec decoder": (4, 4, 4), "Mimi decoder": (5, 5, 4), "Qwen code2wav": (6, 6, 4),
    "BigVGAN": (6, 0, 0),
}  # fmt: skip

# Sizes and inputs of small ones.
SMALL: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "DCGAN": ({"width": 4}, ((100, 1, 1),)),
    "SimpleBaseline head": ({"width": 8}, ((64, 2, 3),)),
    "Mask R-CNN branch": ({"width": 8}, ((25, 8, 3, 2),)),
    "SAM upscaling": ({"width": 32}, ((32, 3, 2),)),
    "SAM 2 upscaling": ({"width": 32}, ((32, 3, 2), (8, 6, 4), (4, 12, 8))),
    "HiFi-GAN": ({"width": 16}, ((80, 3),)),
    "U-Net": ({"widths": (4, 8, 8)}, ((3, 16, 8),)),
    "pix2pix": ({"width": 1}, ((3, 256, 256),)),
    "CycleGAN": ({"width": 2, "blocks": 1}, ((3, 20, 16),)),
    "StyleGAN2 grouped": ({"widths": (8, 6, 4), "latent": 8}, ((8,),)),
    "StyleGAN2 scaled": ({"widths": (8, 6, 4), "latent": 8}, ((8,),)),
    "DAC decoder": ({"width": 32, "given": 8}, ((8, 3),)),
    "FSRCNN": ({}, ((1, 6, 5),)),
    "PointPillars neck": ({"width": 4}, ((4, 8, 4), (8, 4, 2), (16, 2, 1))),
    "DPT": ({"hidden": 8, "widths": (8, 8, 8, 8), "width": 8}, ((8, 4, 2),) * 4),
    "nnU-Net 3-D": ({"widths": (4, 8, 8)}, ((1, 8, 8, 8),)),
    "UNETR": ({"size": 16, "features": 2, "hidden": 8, "layers": 4, "heads": 2}, ((1, 16, 16, 16),)),
    "EnCodec decoder": ({"width": 4, "given": 8}, ((8, 7),)),
    "Mimi decoder": ({"width": 4, "given": 16, "layers": 1}, ((16, 2),)),
    "Qwen code2wav": ({"width": 32, "given": 32, "layers": 1}, ((32, 3),)),
    "BigVGAN": ({"width": 8, "ratios": (4, 2)}, ((100, 3),)),
}


def small(name: str) -> tuple[Any, nn.Module, list[Tensor]]:
    """A small model, as it is built, in float64, with parameters that differ; and its inputs, of two samples."""
    sizes, inputs = SMALL[name]
    model = replace(models.MODELS[name], inputs=inputs)
    model = replace(model, build=partial(model.build, **sizes))
    module = models.built(model).double()
    with torch.no_grad():
        for each in module.parameters():
            each.add_(0.05 * torch.randn_like(each) if each.requires_grad else 0)
    return model, module, [torch.randn(shape, dtype=torch.float64) for shape in models.shapes(model, 2)]


def outcome(module: nn.Module, inputs: list[Tensor], training: bool) -> list[Tensor]:
    """What it gives; in training its gradients too."""
    module.train(training)
    if not training:
        with torch.inference_mode():
            return [module(*inputs)]
    leaves = [each.clone().requires_grad_() for each in inputs]
    leaves += [each for each in module.parameters() if each.requires_grad]
    output = module(*leaves[: len(inputs)])
    found = torch.autograd.grad(output.square().mean(), leaves, allow_unused=True)
    return [output.detach(), *(each for each in found if each is not None)]


@pytest.mark.parametrize("name", SMALL)
def test_small_models(name: str) -> None:
    """By float64's numbers layers that are swapped, and fused, are PyTorch's, in inference and in training."""
    model, module, inputs = small(name)
    swapped, fused = copy.deepcopy(module), copy.deepcopy(module)
    polyphase.accelerate(swapped)
    blocks = polyphase.accelerate(fused, fuse=True).blocks
    assert any(block.fused for block in blocks) == bool(CHAINS[name][1])
    assert any(block.before for block in blocks) == bool(CHAINS[name][2])
    for training in (False, True):
        wanted = outcome(copy.deepcopy(module), inputs, training)
        assert wanted[0].std() > 1e-4  # not a constant
        with polyphase.override("cpu") if model.calls else nullcontext():
            for each in (swapped, fused):
                found = outcome(copy.deepcopy(each), inputs, training)
                assert len(found) == len(wanted)
                for one, other in zip(found, wanted):
                    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_models_on_meta_tensors(name: str) -> None:
    model = models.MODELS[name]
    with torch.device("meta"):
        module = models.built(model)
    inputs = [torch.empty(shape, device="meta") for shape in models.shapes(model, 1)]
    with torch.no_grad():
        wanted = module(*inputs)
    blocks = polyphase.accelerate(module, fuse=True).blocks
    taken = sum(bool(block.fused) for block in blocks), sum(bool(block.before) for block in blocks)
    assert (len(blocks), *taken) == CHAINS[name]
    with torch.no_grad():
        assert module(*inputs).shape == wanted.shape
