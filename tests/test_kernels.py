"""Every kernel variant, executed by the emulator from the source that the compiler gets, against float64.

Operands are small integers, so that every sum is exact in any order and a single misplaced element shows.
"""

from __future__ import annotations

import zlib

import emulator
import pytest
import torch
from kernel_harness import operand_shapes, reference, run

from polyphase.algorithms.base import Layouts
from polyphase.device import DeviceInfo
from polyphase.plan import launches
from polyphase.problem import ConvTransposeProblem, Pass

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
make = ConvTransposeProblem.make
H200 = DeviceInfo.for_arch("sm_90a")

PROBLEMS = {
    "stride 1": make((2, 5, 9, 11), 7, 3, bias=True),
    "stride 2": make((2, 4, 7, 6), 6, 4, 2, 1),
    "mixed, grouped, dilated": make((2, 8, 5, 9), 12, (3, 5), (2, 3), (1, 2), (1, 1), 4, True, (2, 1)),
    "stride 5, dilated": make((1, 3, 4, 6), 5, 3, 5, 1, dilation=2),
    "depthwise": make((3, 6, 6, 7), 6, 4, 2, 1, groups=6),
    "depth multiplier": make((1, 3, 5, 6), 9, 3, 2, 1, 1, 3, True),
    "one channel, long kernel": make((1, 3, 6, 10), 1, 9, 4, 4, 3, bias=True),
    "kernel = stride": make((2, 9, 3, 5), 10, 2, 2, bias=True),
    "kernel < stride": make((2, 2, 4, 5), 3, 2, (3, 4), 0, 1),
    "cropped": make((1, 3, 6, 7), 4, 5, 2, 6),
    "output padding ≥ stride": make((1, 2, 4, 5), 3, 2, 2, 1, (2, 3), dilation=(4, 5)),
    "1-D": make((2, 6, 19), 5, 16, 8, 4, bias=True),
    "1-D, stride 1": make((3, 17, 23), 4, 5, dilation=3),
    "3-D": make((1, 3, 4, 3, 5), 4, 2, 2, bias=True),
    "3-D, mixed": make((2, 4, 3, 4, 3), 6, (3, 1, 2), (1, 2, 3), (1, 0, 0), (0, 1, 0), 2),
    "one pixel": make((5, 20, 1, 1), 9, 4),
    "many source channels": make((1, 37, 3, 3), 2, 2, 2),
    "empty batch": make((0, 3, 4, 4), 2, 3),
}


def layouts_of(problem: ConvTransposeProblem) -> Layouts:
    return Layouts.dense(problem)


def variants() -> list[object]:
    """The planner's best variants of every algorithm for every problem, pass and memory format."""
    import dataclasses

    cases = []
    for name, problem in PROBLEMS.items():
        formats = [problem]
        if problem.dims > 1:
            formats.append(dataclasses.replace(problem, channels_last=True))
        for formatted in formats:
            for pass_ in Pass:
                seen = {}
                for candidate, launch in launches(formatted, pass_, H200):
                    seen.setdefault(candidate.algorithm, []).append((candidate, launch))
                for algorithm, found in seen.items():
                    for i, (candidate, launch) in enumerate(found[:: max(1, len(found) // 2)]):
                        label = f"{name}-{'last' if formatted.channels_last else 'first'}-{pass_.value}-{algorithm}-{i}"
                        cases.append(pytest.param(formatted, pass_, candidate, launch, id=label))
    return cases


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("problem", "pass_", "candidate", "launch"), variants())
def test_variant_is_exact(problem, pass_, candidate, launch):
    seed = zlib.crc32(f"{problem} {pass_} {candidate}".encode())
    first, second = operand_shapes(problem, pass_)
    operands = integers(first, seed), integers(second, seed + 1)
    bias = integers((problem.out_channels,), seed + 2) if problem.bias and pass_ is Pass.FORWARD else None
    out = run(problem, pass_, launch, Layouts.dense(problem), operands, bias, order=seed % 1000)
    expected = reference(problem, pass_, operands, bias)
    assert torch.equal(out.double(), expected), (
        f"{candidate.describe()} of {problem}: {int((out.double() != expected).sum())} of {expected.numel()} differ"
    )
