"""Random layers, all passes, on every device: half with an exact oracle, half with the rounding oracle.

Every case has a seed of its own, and a failure prints the command that repeats it. More of them:
``python -m pytest tests/test_fuzz.py --cases 2000``.
"""

from __future__ import annotations

import random

import pytest
import torch

from helpers import (
    OURS,
    TORCH,
    assert_as_accurate_as_torch,
    integer_tensor,
    magnitudes,
    make_operands,
    normal_tensor,
    random_problem,
    reference,
    results,
    rounding_eps,
    scattered,
)
from polyphase import ConvTransposeProblem

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = metafunc.config.getoption("--seed"), metafunc.config.getoption("--cases")
    metafunc.parametrize("seed", range(first, first + count))


def test_fuzz(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    dtype = rng.choice(DTYPES)
    exact = seed % 2 == 0 or dtype.is_complex
    try:
        check(problem, dtype, device, exact, seed, rng)
    except Exception as failure:
        command = f"python -m pytest tests/test_fuzz.py --seed {seed} --cases 1 -k {device.type}"
        raise AssertionError(
            f"{problem} in {dtype} on {device} failed.\nRepeat it with: {command}\n{failure}"
        ) from failure


def check(
    problem: ConvTransposeProblem, dtype: torch.dtype, device: torch.device, exact: bool, seed: int, rng: random.Random
) -> None:
    operands = make_operands(problem, dtype, device, seed, integer_tensor if exact else normal_tensor)
    expected = reference(problem, operands)
    bias = operands.bias
    scattered_operands = operands.map(lambda tensor: tensor if tensor is bias else scattered(tensor, rng))
    ours = results(OURS[problem.dims], problem, scattered_operands)
    if exact:
        for name, tensor in ours.items():
            wanted = getattr(expected, name).to(dtype)
            assert torch.equal(tensor.cpu(), wanted), f"{name} is not exact"
        return
    theirs = results(TORCH[problem.dims], problem, operands)
    magnitude = magnitudes(problem, operands)
    for name, tensor in ours.items():
        ref64 = getattr(expected, name)
        eps = rounding_eps(ref64, getattr(magnitude, name), dtype, device)
        try:
            assert_as_accurate_as_torch(tensor, getattr(theirs, name), ref64, eps)
        except AssertionError as failure:
            raise AssertionError(f"{name}: {failure}") from None
