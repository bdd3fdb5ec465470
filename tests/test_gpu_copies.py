"""Gradients from checked copies in float16, on a GPU: the tests of test_window_transposed.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel_harness import Gpu
from polyphase.problem import Pass
from test_window_transposed import (
    HALVES,
    INEXACT,
    SCHEDULES,
    assert_exact_copies_round_like_tf32,
    assert_inexact_copies_are_not_used,
)

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("how", INEXACT)
@pytest.mark.parametrize("name", ["two-dimensional", "channels_last"])
@pytest.mark.parametrize("pass_", SCHEDULES)
def test_inexact_copies_are_not_used(pass_: Pass, name: str, how: str, second: bool) -> None:
    assert_inexact_copies_are_not_used(pass_, name, how, second, Gpu(0))


@pytest.mark.parametrize("size", [1, 24])
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("pass_", SCHEDULES)
def test_exact_copies_round_like_tf32(pass_: Pass, name: str, size: int) -> None:
    """Also images of many samples."""
    problem = HALVES[name]
    larger = replace(problem, input_size=(*problem.input_size[:-1], size * problem.input_size[-1]))
    assert_exact_copies_round_like_tf32(larger, pass_, (1.0, 3e-9), Gpu(0))
