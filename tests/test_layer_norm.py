"""Epilogues that normalise over the channels of each pixel: in every kind of config that can, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet

from emulator import available
from kernel_harness import H200, Emulator, formats, integers, reference, run
from polyphase.plan.planner import programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, SAMPLE, Epilogue, Operand, Operation
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.schedule import Candidate
from test_epilogue import RESIDUAL, both, check

make = ConvTransposeProblem.make
emulated = pytest.mark.skipif(not available(), reason="needs Linux and g++")
A100 = DeviceInfo.for_arch("sm_80")

TWO = Operand("weight", CHANNEL), Operand("offset", CHANNEL)
WIDE = Operand("weight", CHANNEL, True), Operand("offset", CHANNEL, True)

EPILOGUES = {
    "alone": Epilogue((Operation("layer_norm", (0.5,), TWO),)),
    "gelu": Epilogue((Operation("layer_norm", (1e-6,), WIDE), Operation("gelu"))),
    "plain, residual": Epilogue((Operation("layer_norm", (0.125,)), RESIDUAL, Operation("relu"))),
    "behind others": Epilogue(
        (RESIDUAL, Operation("leaky_relu", (0.5,)), Operation("layer_norm", (0.5,), TWO), Operation("add_value", of=1))
    ),
    "softmax": Epilogue((Operation("affine", (0.25, 1.0)), Operation("softmax"), Operation("affine", (2.0, 0.0)))),
    "softmax, residual": Epilogue((RESIDUAL, Operation("softmax"), Operation("multiply_value", of=1))),
    "per sample": Epilogue(
        (Operation("layer_norm", (0.5,), TWO[1:]), Operation("scale_shift", (), both(SAMPLE)), Operation("sigmoid"))
    ),
}

#: Layers of one row block and of several, with rows that are no channels, odd sizes and phases without taps.
LAYERS = {
    "kernel = stride": make((2, 40, 5, 9), 64, 2, 2, bias=True),
    "stride 2": make((2, 24, 5, 7), 33, 4, 2, 1, bias=True),
    "stride 1": make((1, 20, 9, 11), 70, 3, 1, 1),
    "few channels": make((2, 33, 4, 6), 9, 3, 2, 1, 1, bias=True),
    "many channels": make((1, 16, 3, 5), 120, 2, 2, bias=True),
    "phases without taps": make((2, 16, 4, 5), 12, 2, (3, 4), 0, 1, bias=True),
    "one pixel": make((3, 20, 1, 1), 24, 4, bias=True),
    "wide cells": make((2, 24, 13), 16, 8, 8, bias=True),
    "volume": make((1, 16, 2, 3, 4), 32, 2, 2, bias=True),
}


def kind(candidate: Candidate) -> tuple[object, ...]:
    """What decides how a config stores."""
    of = candidate.config
    return candidate.schedule, of.split, of.parts, of.scaled, of.tma_operands, of.wgmma, of.channel_blocks, of.lines


def cases() -> Iterator[ParameterSet]:
    number = 0
    for layer, bare in LAYERS.items():
        for formatted in formats(bare):
            for dtype, tf32 in (("bfloat16", False), ("float32", True), ("float32", False)):
                number += 1
                device = A100 if number % 5 == 0 else H200
                epilogue = list(EPILOGUES)[number % len(EPILOGUES)]
                problem = replace(formatted, dtype=dtype, tf32=tf32, epilogue=EPILOGUES[epilogue])
                order = "last" if formatted.channels_last else "first"
                name = f"{layer}-{order}-{dtype}{'-tf32' * tf32}-{epilogue}-{device.arch}"
                yield pytest.param(problem, device, number, id=name)


@emulated
@pytest.mark.sampled(48, 8)
@pytest.mark.parametrize(("problem", "device", "number"), list(cases()))
def test_every_kind_of_config(problem: ConvTransposeProblem, device: DeviceInfo, number: int) -> None:
    kinds: dict[tuple[object, ...], tuple[Candidate, Program]] = {}
    for candidate, program in programs(problem, Pass.FORWARD, device):
        assert candidate.schedule in ("implicit_gemm", "implicit_gemm_transposed")
        kinds.setdefault(kind(candidate), (candidate, program))
    if not kinds:  # two parts, and mma.sync, take registers of several row blocks, and memory of many taps
        assert device is A100 or not problem.tf32
        pytest.skip("no tile has all channels of a pixel")
    found = list(kinds.values())
    for candidate, program in [*found[:3], *found[3:][-1:]]:  # of both schedules
        check(problem, candidate, program, Emulator(number * 31 % 100))


@emulated
@pytest.mark.parametrize("layer", ["few channels", "stride 2"])
def test_softmaxes_of_infinities(layer: str) -> None:
    """As PyTorch's: minus infinities have no share, unless there is nothing else; with an infinity there are none."""
    problem = replace(LAYERS[layer], dtype="bfloat16", epilogue=Epilogue((RESIDUAL, Operation("softmax"))))
    residual = torch.zeros(problem.output_shape, dtype=torch.float64)
    residual[0, ::2, 1] = residual[0, 1::2, 2] = residual[0, :-1, 3] = residual[0, :, 4] = -torch.inf
    residual[0, 1, 5], residual[0, 2, 6] = torch.inf, torch.nan
    x, weight = integers(problem.input_shape, 1), integers(problem.weight_shape, 2) / 16
    sums = reference(problem, Pass.FORWARD, (x, weight), torch.zeros(problem.out_channels, dtype=torch.float64))
    expected = torch.softmax(sums + residual, 1)
    candidate, program = programs(problem, Pass.FORWARD, H200)[0]
    bias, layouts = torch.zeros(problem.out_channels), Layouts.of_call(problem, Pass.FORWARD)
    of = {"residual_0": residual}
    out = run(problem, Pass.FORWARD, program, layouts, (x, weight), bias, operands_of=of)
    torch.testing.assert_close(
        out.double(), expected, rtol=2.0**-8, atol=2.0**-8, equal_nan=True, msg=candidate.describe()
    )
