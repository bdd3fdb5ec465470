"""Strides, dilations and paddings of any size: planned and computed in time that does not grow with them."""

from __future__ import annotations

import time

import pytest
import torch

import emulator
from helpers import OURS, TORCH, make_operands, results
from kernel_harness import Emulator, assert_exact
from polyphase import ConvTransposeProblem, UnsupportedError
from polyphase.plan.planner import plan, programs
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo

make = ConvTransposeProblem.make
H200 = DeviceInfo.for_arch("sm_90a")


def small_outputs(huge: int) -> list[ConvTransposeProblem]:
    """Layers of huge constants whose outputs are small: of one pixel, or cropped to what is about the middle one."""
    return [
        make((1, 5, 1), 3, 2, stride=huge),
        make((2, 3, 5, 1), 4, (2, 3), stride=(2, huge), bias=True),
        make((2, 8, 3), 8, 4, stride=huge, padding=huge - 1, bias=True),
        make((2, 3, 3, 4), 4, (4, 3), stride=(huge, 2), padding=(huge - 2, 1)),
        make((2, 6, 9), 6, 3, dilation=huge, padding=huge - 2, groups=2),
        make((2, 6, 5, 4), 6, 1, stride=2, dilation=huge),
        make((2, 4, 3), 4, 3, stride=huge, dilation=huge, padding=2 * huge - 1),
        make((2, 4, 3), 4, 3, stride=huge, dilation=huge + 1, padding=2 * huge - 1),
    ]


@pytest.mark.parametrize("huge", [10**4, 10**9, 2**31, 2**61 - 1])
def test_portable(huge: int) -> None:
    for problem in small_outputs(huge):
        operands = make_operands(problem, torch.float64, "cpu")
        start = time.process_time()
        found = results(OURS[problem.dims], problem, operands)
        assert time.process_time() - start < 2, problem
        wanted = results(TORCH[problem.dims], problem, operands) if huge < 10**5 else by_hand(problem, operands)
        assert torch.equal(found.output, wanted.output), problem
        assert torch.equal(found.input_grad, wanted.input_grad), problem
        assert torch.equal(found.weight_grad, wanted.weight_grad), problem


def by_hand(problem: ConvTransposeProblem, operands: object) -> object:
    """The same by PyTorch for a layer of smaller constants with the same terms."""
    smaller = next(each for each, at in zip(small_outputs(97), small_outputs(_huge(problem))) if at == problem)
    assert smaller.output_size == problem.output_size
    return results(TORCH[problem.dims], smaller, operands)


def _huge(problem: ConvTransposeProblem) -> int:
    return next(huge for huge in (10**4, 10**9, 2**31, 2**61 - 1) if problem in small_outputs(huge))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    """As far as its kernels count."""
    for huge in (2**20 + 1, 2**29 - 3):
        for problem, smaller in zip(small_outputs(huge), small_outputs(97)):
            operands = make_operands(problem, torch.float32, "cuda")
            found, wanted = (
                results(OURS[problem.dims], problem, operands),
                results(TORCH[problem.dims], smaller, operands),
            )
            for name, expected in wanted.items():
                assert torch.equal(getattr(found, name), expected), (problem, name)
    operands = make_operands(small_outputs(2**31)[2], torch.float32, "cuda")
    with pytest.raises(UnsupportedError, match="the kernels count to 2147483647"):
        results(OURS[1], small_outputs(2**31)[2], operands)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_plans(arch: str) -> None:
    """Of kernels that count so far; or an error that names the limit."""
    device = DeviceInfo.for_arch(arch)
    for huge in (10**5, 10**9, 2**31, 2**62):
        for problem in small_outputs(huge):
            furthest = max(size + 2 * p for size, p in zip(problem.output_size, problem.padding))
            for pass_ in Pass:
                start = time.process_time()
                if furthest >= 2**31:
                    with pytest.raises(UnsupportedError, match=r"with its padding .* the kernels count to 2147483647"):
                        plan(problem, pass_, device, by_prediction=True)
                else:
                    chosen = plan(problem, pass_, device, by_prediction=True)
                    known = problem.without_idle_constants()
                    assert known.largest_constant <= 2**15 or chosen.schedule in ("direct_general", "direct_wgrad_gemm")
                assert time.process_time() - start < 2, (problem, pass_)


@pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
@pytest.mark.parametrize("pass_", Pass, ids=lambda pass_: pass_.value)
def test_kernels_are_exact(pass_: Pass) -> None:
    """Those that are planned for huge constants, at about the largest that they count to."""
    for huge in (2**29 - 3, 2**29 - 4):
        for problem in small_outputs(huge):
            if problem.without_idle_constants().largest_constant > 2**15:
                candidate, program = programs(problem, pass_, H200)[0]
                assert candidate.schedule in ("direct_general", "direct_wgrad_gemm")
                assert_exact(problem, pass_, candidate, program, executor=Emulator(1))
