"""The weight gradient of few channels in a group in channels_last, in the emulator; test_gpu.py has them on a GPU."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import H200, Emulator, assert_exact, offers, reference, run, strange_layouts
from polyphase.algorithms import weight_grad_channels
from polyphase.algorithms.base import Candidate, Launch, Layouts
from polyphase.algorithms.weight_grad_channels import WeightGradChannels
from polyphase.problem import ConvTransposeProblem, Pass

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
WEIGHT_GRAD = Pass.WEIGHT_GRAD

LAYERS = {
    "depthwise": make((2, 64, 9, 11), 64, 4, 2, 1, groups=64, channels_last=True),
    "depthwise, stride 1": make((1, 96, 7, 13), 96, 5, 1, 2, groups=96, channels_last=True),
    "depthwise, dilated": make((2, 20, 5, 9), 20, (3, 5), (2, 3), (1, 2), (1, 1), 20, False, (2, 1), channels_last=True),
    "lanes that idle": make((2, 34, 5, 6), 34, 3, 2, 1, 1, groups=34, channels_last=True),
    "an odd number of channels": make((3, 37, 6, 5), 37, 3, 2, 1, groups=37, channels_last=True),
    "depth multiplier": make((2, 12, 7, 9), 24, 3, 2, 1, 1, groups=12, channels_last=True),
    "fewer outputs than inputs": make((2, 24, 7, 9), 12, 3, 2, 1, 1, groups=12, channels_last=True),
    "groups of two": make((2, 16, 7, 9), 16, 3, 1, 1, groups=8, channels_last=True),
    "groups of four": make((1, 32, 6, 10), 32, 3, 1, 1, groups=8, channels_last=True),
    "groups of eight": make((1, 32, 6, 10), 32, 3, 2, 1, 1, groups=4, channels_last=True),
    "groups of eight and sixteen": make(
        (2, 32, 6, 19), 64, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1), groups=4, channels_last=True
    ),
    "groups of three": make((2, 9, 6, 7), 12, 3, 2, 1, groups=3, channels_last=True),
    "groups of twelve": make((1, 60, 5, 7), 60, 3, 2, 1, groups=5, channels_last=True),
    "one group": make((2, 3, 9, 8), 4, 4, 2, 1, channels_last=True),
    "kernel < stride": make((2, 8, 4, 5), 8, 2, (3, 4), 0, 1, groups=8, channels_last=True),
    "kernel = stride": make((2, 24, 8, 9), 24, 2, 2, groups=24, channels_last=True),
    "cropped": make((1, 8, 6, 7), 8, 5, 2, 6, groups=8, channels_last=True),
    "longer outputs": make((1, 8, 6, 7), 8, 3, 3, 0, 2, groups=8, channels_last=True),
    "large kernel": make((1, 16, 9, 11), 16, 7, 1, 3, groups=16, channels_last=True),
    "long rows of taps": make((1, 8, 3, 9), 8, (2, 61), 1, (0, 30), groups=8, channels_last=True),
    "many rows of taps": make((1, 8, 9, 3), 8, (41, 2), 1, (20, 0), groups=8, channels_last=True),
    "wide": make((1, 64, 3, 150), 64, 3, 1, 1, groups=64, channels_last=True),
    "one column": make((2, 16, 9, 1), 16, 3, 1, 1, groups=16, channels_last=True),
    "many small images": make((37, 8, 2, 3), 8, 4, 2, 1, groups=8, channels_last=True),
    "3-D": make((2, 16, 3, 4, 5), 16, (3, 2, 3), (2, 1, 2), 1, groups=16, channels_last=True),
    "3-D, dilated": make((1, 8, 4, 3, 6), 8, 3, (1, 2, 1), 2, dilation=(2, 1, 2), groups=4, channels_last=True),
    "empty batch": make((0, 8, 4, 4), 8, 3, groups=8, channels_last=True),
}


def cases() -> Iterator[ParameterSet]:
    for name, problem in LAYERS.items():
        for dtype in ("float32", "bfloat16", "float64"):
            yield pytest.param(replace(problem, dtype=dtype), id=f"{name}-{dtype}")


def strange_offers(problem: ConvTransposeProblem) -> Iterator[tuple[Layouts, list[tuple[Candidate, Launch]]]]:
    """What is offered for tensors of each kind; of float64 for dense ones alone."""
    for layouts in strange_layouts(problem) if problem.dtype != "float64" else [Layouts.dense(problem)]:
        yield layouts, offers(WeightGradChannels(), problem, WEIGHT_GRAD, layouts)


@pytest.mark.parametrize("problem", list(cases()))
def test_layers(problem: ConvTransposeProblem) -> None:
    order = zlib.crc32(str(problem).encode())
    for turn, (layouts, found) in enumerate(strange_offers(problem)):
        candidate, launch = found[(order + turn) % len(found)]
        assert_exact(problem, WEIGHT_GRAD, candidate, launch, layouts, Emulator(order))
