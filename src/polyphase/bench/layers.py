"""The layers that are measured, as data, and the notation for one more on the command line.

The notation is the one that `ConvTransposeProblem` prints: an input shape ``N x C_in x *spatial``, an arrow, the output
channels, and the parameters that are not PyTorch's defaults::

    8x64x1024x1024 -> 64, k=3
    16x32x128x256 -> 64, k=(3, 5), s=(2, 3), p=(1, 2), op=(1, 1), d=(2, 1), g=4, bias
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from polyphase.bench.further_layers import (
    ALSO_BATCH_ONE,
    ALSO_HOLES,
    BATCH_ONE,
    HOLES,
    KERNELBENCH_VOLUMES,
    VOLUMES,
)
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem

make = ConvTransposeProblem.make

# The 22 layers of the record.
_RECORD: dict[str, ConvTransposeProblem] = {
    "KernelBench 57": make((8, 64, 1024, 1024), 64, 3),
    "KernelBench 75": make((16, 32, 128, 256), 64, (3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=4),
    "KernelBench 69": make((64, 64, 128, 256), 128, (3, 5)),
    "75 ungrouped, every parameter": make(
        (16, 32, 128, 256), 64, (3, 5), stride=(2, 3), padding=(1, 2), output_padding=(1, 1), dilation=(2, 1), bias=True
    ),
    "KernelBench 65": make((8, 64, 512, 512), 64, (3, 7)),
    "KernelBench 78": make((8, 32, 512, 1024), 32, (3, 7), padding=(1, 3)),
    "KernelBench 81": make((16, 32, 64, 128), 64, 3, stride=5, padding=1, dilation=2),
    "DCGAN generator, 2nd": make((128, 1024, 4, 4), 512, 4, stride=2, padding=1),
    "DCGAN generator, 4th": make((128, 256, 16, 16), 128, 4, stride=2, padding=1),
    "DCGAN generator, last": make((128, 128, 32, 32), 3, 4, stride=2, padding=1),
    "U-Net, deepest up": make((16, 1024, 32, 32), 512, 2, stride=2, bias=True),
    "U-Net, last up": make((16, 128, 256, 256), 64, 2, stride=2, bias=True),
    "SimpleBaseline pose head, 3rd": make((64, 256, 32, 24), 256, 4, stride=2, padding=1),
    "SAM mask decoder, 1st": make((16, 256, 64, 64), 64, 2, stride=2, bias=True),
    "Mask R-CNN mask predictor": make((512, 256, 14, 14), 256, 2, stride=2, bias=True),
    "CycleGAN/pix2pix up 1": make((8, 256, 64, 64), 128, 3, stride=2, padding=1, output_padding=1, bias=True),
    "CycleGAN/pix2pix up 2": make((8, 128, 128, 128), 64, 3, stride=2, padding=1, output_padding=1, bias=True),
    "FSRCNN ×4": make((8, 56, 270, 480), 1, 9, stride=4, padding=4, output_padding=3, bias=True),
    "CenterNet DLA up, depthwise": make((32, 64, 128, 128), 64, 4, stride=2, padding=1, groups=64),
    "HiFi-GAN up 1": make((16, 512, 256), 256, 16, stride=8, padding=4, bias=True),
    "nnU-Net 3-D up": make((2, 320, 16, 16, 16), 256, 2, stride=2, bias=True),
    "KernelBench 61": make((8, 48, 64, 64, 64), 48, 3),
}

# Further layers of the reference models and of KernelBench.
_FURTHER: dict[str, ConvTransposeProblem] = {
    "75 at another size": make((5, 32, 97, 301), 64, (3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=4),
    "KernelBench 64": make((64, 128, 65536), 128, 3),
    "KernelBench 71": make((8, 32, 512, 1024), 32, 3),
    "KernelBench 74": make((32, 32, 131072), 64, 5, dilation=3),
    "KernelBench 79": make((16, 32, 131072), 64, 3, stride=2, padding=1, dilation=2),
}

# Layers of further models.
_MODELS: dict[str, ConvTransposeProblem] = {
    # Generators of images.
    "DCGAN generator, 1st": make((128, 100, 1, 1), 1024, 4),
    "DCGAN generator, 3rd": make((128, 512, 8, 8), 256, 4, stride=2, padding=1),
    "MNIST GAN, 1st": make((256, 128, 7, 7), 64, 4, stride=2, padding=1),
    "MNIST GAN, last": make((256, 64, 14, 14), 1, 4, stride=2, padding=1),
    "VAE, 2nd": make((64, 64, 16, 16), 32, 4, stride=2, padding=1, bias=True),
    "VAE, last": make((64, 32, 32, 32), 3, 4, stride=2, padding=1, bias=True),
    "StyleGAN2 up, 32": make((1, 4096, 32, 32), 4096, 3, stride=2, groups=8),
    "StyleGAN2 up, 256": make((1, 1024, 256, 256), 512, 3, stride=2, groups=8),
    "pix2pix, 3rd": make((16, 1024, 8, 8), 512, 4, stride=2, padding=1),
    "pix2pix, last": make((16, 128, 128, 128), 3, 4, stride=2, padding=1, bias=True),
    "3-D GAN, 1st": make((16, 512, 4, 4, 4), 256, 4, stride=2, padding=1),
    "3-D GAN, 3rd": make((16, 128, 16, 16, 16), 64, 4, stride=2, padding=1),
    "3-D GAN, last": make((16, 64, 32, 32, 32), 1, 4, stride=2, padding=1),
    # Super-resolution.
    "LapSRN, image": make((8, 1, 256, 256), 1, 4, stride=2, padding=1),
    "LapSRN, features": make((8, 64, 128, 128), 64, 4, stride=2, padding=1),
    "DBPN ×4": make((8, 64, 64, 64), 64, 8, stride=4, padding=2, bias=True),
    "DBPN ×8": make((8, 64, 32, 32), 64, 12, stride=8, padding=2, bias=True),
    # Segmentation, detection, pose, depth, flow.
    "U-Net, 2nd up": make((16, 512, 64, 64), 256, 2, stride=2, bias=True),
    "U-Net, 3rd up": make((16, 256, 128, 128), 128, 2, stride=2, bias=True),
    "SAM mask decoder, 2nd": make((16, 64, 128, 128), 32, 2, stride=2, bias=True),
    "FCN-8s, ×2": make((8, 21, 32, 32), 21, 4, stride=2),
    "FCN-8s, ×8": make((8, 21, 64, 64), 21, 16, stride=8, padding=4),
    "FCN-32s": make((8, 21, 16, 16), 21, 64, stride=32, padding=16),
    "ERFNet, 1st": make((8, 128, 64, 128), 64, 3, stride=2, padding=1, output_padding=1, bias=True),
    "ERFNet, 2nd": make((8, 64, 128, 256), 16, 3, stride=2, padding=1, output_padding=1, bias=True),
    "ERFNet, last": make((8, 16, 256, 512), 20, 2, stride=2, bias=True),
    "LinkNet": make((8, 32, 128, 128), 32, 3, stride=2, padding=1, output_padding=1, bias=True),
    "ViTDet pyramid, 1st": make((8, 768, 64, 64), 384, 2, stride=2, bias=True),
    "ViTDet pyramid, 2nd": make((8, 384, 128, 128), 192, 2, stride=2, bias=True),
    "DPT reassemble ×4": make((8, 256, 24, 24), 256, 4, stride=4, bias=True),
    "PointPillars ×2": make((4, 128, 124, 108), 128, 2, stride=2),
    "PointPillars ×4": make((4, 256, 62, 54), 128, 4, stride=4),
    "CenterNet ResNet, 1st": make((32, 512, 16, 16), 256, 4, stride=2, padding=1),
    "CenterNet DLA up ×4, depthwise": make((32, 64, 64, 64), 64, 8, stride=4, padding=2, groups=64),
    "SimpleBaseline pose head, 1st": make((64, 2048, 8, 6), 256, 4, stride=2, padding=1),
    "HigherHRNet": make((16, 49, 128, 128), 32, 4, stride=2, padding=1),
    "ViTPose, 1st": make((64, 768, 16, 12), 256, 4, stride=2, padding=1),
    "FlowNet features": make((8, 1026, 12, 16), 256, 4, stride=2, padding=1),
    "FlowNet flow": make((8, 2, 96, 128), 2, 4, stride=2, padding=1),
    "V-Net, 1st up": make((2, 256, 8, 8, 8), 128, 2, stride=2, bias=True),
    "nnU-Net 3-D up, deepest": make((2, 320, 8, 8, 8), 320, 2, stride=2),
    "nnU-Net 3-D up, 3rd": make((2, 128, 32, 32, 32), 64, 2, stride=2),
    "nnU-Net 3-D up, last": make((2, 64, 64, 64, 64), 32, 2, stride=2),
    "nnU-Net 3-D up, slices": make((2, 64, 16, 128, 128), 32, (1, 2, 2), stride=(1, 2, 2)),
    # Audio.
    "HiFi-GAN up 2": make((16, 256, 2048), 128, 16, stride=8, padding=4, bias=True),
    "HiFi-GAN up 3": make((16, 128, 16384), 64, 4, stride=2, padding=1, bias=True),
    "HiFi-GAN up 4": make((16, 64, 32768), 32, 4, stride=2, padding=1, bias=True),
    "EnCodec up 2": make((8, 256, 1200), 128, 10, stride=5, bias=True),
    "EnCodec up 4": make((8, 64, 24000), 32, 4, stride=2, bias=True),
    "DAC up 1": make((4, 1536, 86), 768, 16, stride=8, padding=4, bias=True),
    "Demucs, last": make((4, 64, 110250), 8, 8, stride=4, bias=True),
    "HTDemucs, frequencies": make((4, 96, 128, 336), 48, (8, 1), stride=(4, 1), bias=True),
    "Conv-TasNet decoder": make((8, 512, 4000), 1, 16, stride=8),
    "inverse STFT": make((8, 514, 800), 1, 512, stride=128),
    "WaveGAN, 2nd": make((32, 512, 64), 256, 25, stride=4, padding=11, output_padding=1, bias=True),
    "WaveGAN, last": make((32, 64, 4096), 1, 25, stride=4, padding=11, output_padding=1, bias=True),
    "SEGAN, middle": make((16, 256, 512), 64, 31, stride=2, padding=15, output_padding=1, bias=True),
    "Spleeter, 2nd": make((4, 512, 16, 32), 128, 5, stride=2, padding=2, output_padding=1, bias=True),
    "Spleeter, last": make((4, 32, 256, 512), 1, 5, stride=2, padding=2, output_padding=1, bias=True),
    "WaveNet vocoder": make((8, 1, 80, 200), 1, (3, 32), stride=(1, 16), padding=(1, 8)),
    # One image, or one second, at a time.
    "U-Net, last up, batch 1": make((1, 128, 256, 256), 64, 2, stride=2, bias=True),
    "SimpleBaseline pose head, 3rd, batch 1": make((1, 256, 32, 24), 256, 4, stride=2, padding=1),
    "HiFi-GAN up 1, batch 1": make((1, 512, 128), 256, 16, stride=8, padding=4, bias=True),
    "CycleGAN/pix2pix up 2, batch 1": make((1, 128, 128, 128), 64, 3, stride=2, padding=1, output_padding=1, bias=True),
}


# Those of the five reference models.
_REFERENCE = [
    "KernelBench 57",
    "KernelBench 75",
    "KernelBench 69",
    "75 ungrouped, every parameter",
    "75 at another size",
]


class Suite(str, Enum):
    """A named choice of layers."""

    REFERENCE = "reference"
    KERNELBENCH = "kernelbench"
    ALL = "all"
    MODELS = "models"
    VOLUMES = "volumes"
    BATCH_ONE = "batch1"
    HOLES = "holes"


@dataclass(frozen=True)
class NamedLayer:
    """A layer and what people call it."""

    name: str
    problem: ConvTransposeProblem


def suite(which: Suite) -> list[NamedLayer]:
    """The layers of a suite.

    ``reference``: the five reference models (the last is the second at another batch and image size). ``kernelbench``:
    KernelBench's level-1 problems with a transposed convolution. ``all``: the 22 layers of the record, from generators,
    U-Nets, pose, detection, super-resolution and audio. ``models``: layers of further models. ``volumes``: decoders of
    volumes and video. ``batch1``: one image, volume or second at a time. ``holes``: layers far from their floor.
    """
    layers = {layer.name: layer for layer in every_layer()}
    names = {
        Suite.REFERENCE: _REFERENCE,
        Suite.KERNELBENCH: [name for name in layers if re.match(r"KernelBench \d", name)],
        Suite.ALL: _RECORD,
        Suite.MODELS: _MODELS,
        Suite.VOLUMES: [*KERNELBENCH_VOLUMES, "KernelBench 61", *VOLUMES],
        Suite.BATCH_ONE: [*ALSO_BATCH_ONE, *BATCH_ONE],
        Suite.HOLES: [*HOLES, *ALSO_HOLES],
    }
    return [layers[name] for name in names[which]]


def every_layer() -> list[NamedLayer]:
    """Every layer of every suite, once."""
    further = KERNELBENCH_VOLUMES | VOLUMES | BATCH_ONE | HOLES
    return [NamedLayer(name, problem) for name, problem in (_RECORD | _FURTHER | _MODELS | further).items()]


class LayerSyntaxError(ValueError):
    """A layer on the command line that cannot be read, or that PyTorch would refuse."""


_SIZES = ("kernel_size", "stride", "padding", "output_padding", "dilation")
_KEYS = {"k": "kernel_size", "s": "stride", "p": "padding", "op": "output_padding", "d": "dilation", "g": "groups"}
_YES_NO = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_EXAMPLE = 'a layer reads like "8x64x1024x1024 -> 64, k=3, s=2, p=1, bias"'


def parse_layer(text: str) -> ConvTransposeProblem:
    """Read a layer in the notation of this module, which is also what ``str(problem)`` prints.

    Parameters are ``k, s, p, op, d, g`` (or PyTorch's own names), each one number or one per spatial dimension:
    ``k=3``, ``k=3x5``, ``k=(3, 5)``. ``bias``, ``channels_last``, a dtype and ``tf32`` (float32 may be rounded to it)
    stand alone. Raises `LayerSyntaxError`.
    """
    shape_text, arrow, rest = text.replace("→", "->").replace("×", "x").partition("->")
    shape_text = shape_text.strip()
    if not arrow or not re.fullmatch(r"\d+(\s*x\s*\d+){2,4}", shape_text):
        raise LayerSyntaxError(
            f"{text!r} does not start with an input shape N x C_in x 1 to 3 image sizes and an arrow; {_EXAMPLE}"
        )
    shape = tuple(int(size) for size in shape_text.split("x"))
    channels, *items = [item.strip() for item in re.split(r",(?![^(]*\))", rest)]
    if not channels.isdigit():
        raise LayerSyntaxError(f"{channels!r} after the arrow is not a number of output channels; {_EXAMPLE}")
    parameters: dict[str, Any] = {}
    for item in items:
        name, value = _parameter(item, dims=len(shape) - 2)
        if name in parameters:
            raise LayerSyntaxError(f"{name} is given twice in {text!r}")
        parameters[name] = value
    if "kernel_size" not in parameters:
        raise LayerSyntaxError(f"{text!r} has no kernel size k; {_EXAMPLE}")
    problem = make(shape, int(channels), **parameters)
    _require_legal(problem)
    return problem


def _parameter(item: str, dims: int) -> tuple[str, Any]:
    if item in ("bias", "channels_last", "tf32"):
        return item, True
    if item in DTYPE_BYTES:
        return "dtype", item
    key, equals, value = (part.strip() for part in item.partition("="))
    name = _KEYS.get(key, key)
    if equals and name in ("bias", "channels_last") and value.lower() in _YES_NO:
        return name, _YES_NO[value.lower()]
    if not equals or name not in (*_SIZES, "groups"):
        known = ", ".join([*_KEYS, "bias", "channels_last", *DTYPE_BYTES, "tf32"])
        raise LayerSyntaxError(f"{item!r} is not a parameter of a layer; known are {known}")
    sizes = re.split(r"\s*[,x]\s*", value.removeprefix("(").removesuffix(")").strip())
    if not all(size.isdigit() for size in sizes):
        raise LayerSyntaxError(f"{item!r}: {key} takes a number, or one per dimension such as 3x5")
    numbers = tuple(map(int, sizes))
    if name == "groups":
        if len(numbers) != 1:
            raise LayerSyntaxError(f"{item!r}: groups takes one number")
        return name, numbers[0]
    if len(numbers) not in (1, dims):
        raise LayerSyntaxError(f"{item!r} has {len(numbers)} values for a layer of {dims} spatial dimensions")
    return name, numbers[0] if len(numbers) == 1 else numbers


def _require_legal(problem: ConvTransposeProblem) -> None:
    sizes = (*problem.input_shape, problem.out_channels, problem.groups)
    if min(sizes + problem.kernel_size + problem.stride + problem.dilation) < 1:
        raise LayerSyntaxError(f"{problem}: sizes, channels, groups, kernel, stride and dilation must be at least 1")
    if problem.in_channels % problem.groups or problem.out_channels % problem.groups:
        raise LayerSyntaxError(
            f"groups={problem.groups} does not divide both in_channels={problem.in_channels} "
            f"and out_channels={problem.out_channels}"
        )
    for extra, stride, dilation in zip(problem.output_padding, problem.stride, problem.dilation):
        if extra >= max(stride, dilation):
            raise LayerSyntaxError(
                f"output_padding={extra} must be smaller than the stride ({stride}) or the dilation ({dilation})"
            )
    if min(problem.output_size) < 1:
        raise LayerSyntaxError(f"{problem}: the output size would be {problem.output_size}; it must be at least 1")


def cut(problem: ConvTransposeProblem, factor: int) -> ConvTransposeProblem:
    """The same layer on ``1 / factor`` of the batch and of each image side, rounded up, no side cut below 4."""
    return replace(
        problem,
        batch=math.ceil(problem.batch / factor),
        input_size=tuple(cut_side(size, factor) for size in problem.input_size),
    )


def cut_side(size: int, factor: int) -> int:
    """One image side cut by ``factor``, but not below 4."""
    return max(math.ceil(size / factor), min(size, 4))
