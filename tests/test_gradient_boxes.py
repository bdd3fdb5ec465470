"""Gradients in channels_last by boxes of the copy engine, executed by the emulator; test_gpu.py runs them on a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

import emulator
from kernel_harness import H200, Emulator, assert_exact, offers, reference, run, strange_layouts
from polyphase.algorithms import gradient_boxes
from polyphase.algorithms.base import Candidate, Layouts
from polyphase.algorithms.gradient_boxes import BoxVariant, InputGradBoxes, WeightGradBoxes
from polyphase.device import DeviceInfo
from polyphase.problem import ConvTransposeProblem, Pass

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
ALGORITHMS = {Pass.INPUT_GRAD: InputGradBoxes(), Pass.WEIGHT_GRAD: WeightGradBoxes()}


def make(*args, **kwargs) -> ConvTransposeProblem:
    return ConvTransposeProblem.make(*args, **kwargs, channels_last=True)


LAYERS = {
    "stride 2": make((3, 40, 8, 8), 24, 4, 2, 1, tf32=True),
    "stride 2, half": make((2, 24, 7, 9), 40, 4, 2, 1, dtype="bfloat16"),
    "kernel = stride": make((2, 40, 9, 5), 72, 2, 2, dtype="float16"),
    "stride 1": make((2, 20, 9, 12), 16, 3, 1, 1, tf32=True),
    "one tap": make((2, 24, 9, 12), 72, 1, dtype="bfloat16"),
    "odd strides": make((2, 24, 8, 6), 24, (3, 5), (2, 3), (1, 2), 1, dilation=(2, 1), dtype="bfloat16"),
    "grouped": make((2, 48, 8, 8), 64, 4, 2, 1, groups=2, dtype="float16"),
    "grouped, odd": make((2, 18, 5, 8), 48, 4, 2, 1, groups=3, dtype="bfloat16"),
    "kernel < stride": make((2, 18, 4, 8), 20, 2, (3, 4), 0, 2, tf32=True),
    "cropped": make((1, 16, 8, 8), 20, 5, 2, 6, 1, tf32=True),
    "output padding": make((2, 17, 8, 12), 24, 5, 2, 2, 1, dilation=2, tf32=True),
    "long rows": make((1, 16, 3, 150), 16, 3, 2, 1, 1, dtype="bfloat16"),
    "wide strides": make((1, 16, 5, 40), 16, 8, 8, dtype="bfloat16"),
    "tiny images": make((35, 40, 4, 4), 24, 4, 2, 1, dtype="bfloat16"),
    "single pixels": make((150, 16, 1, 1), 16, 4, dtype="bfloat16"),
    "many input channels": make((2, 264, 4, 16), 16, 4, 2, 1, dtype="bfloat16"),
    "three-dimensional": make((2, 16, 4, 6, 8), 24, (2, 3, 4), (1, 2, 2), (0, 1, 1), (0, 1, 0), tf32=True),
    "empty batch": make((0, 16, 4, 8), 16, 4, 2, 1, dtype="bfloat16"),
}


def cases() -> Iterator[ParameterSet]:
    for name, problem in LAYERS.items():
        for pass_, algorithm in ALGORITHMS.items():
            if algorithm.refusal(problem, pass_, H200) is None:
                yield pytest.param(problem, pass_, id=f"{name}-{pass_.value}")


@pytest.mark.parametrize(("problem", "pass_"), list(cases()))
def test_gradients(problem: ConvTransposeProblem, pass_: Pass) -> None:
    """One variant; on a GPU it is all of them."""
    found = offers(ALGORITHMS[pass_], problem, pass_)
    seed = zlib.crc32(f"{problem} {pass_}".encode())
    candidate, launch = found[seed % len(found)]
    assert_exact(problem, pass_, candidate, launch, executor=Emulator(seed % 1000))
