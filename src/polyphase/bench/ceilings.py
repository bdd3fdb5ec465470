"""What the machine can do at best, measured in the same run as the layers: copy bandwidth and matrix product rates.

The floor of a pass is the larger of its bytes over the bandwidth and its flops over the rate of its dtype. Both are
measured with PyTorch (a large copy, cuBLAS on 8192³), so a floor is what the best code on the same machine reaches, not
what a data sheet promises.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from polyphase.bench.timing import Timer
from polyphase.problem.ceilings import TF32, Ceilings


def measure(timer: Timer, dtypes: Iterable[str]) -> Ceilings:
    """Measure the ceilings of ``timer``'s device for operands of ``dtypes``."""
    rates = {}
    for dtype in dict.fromkeys(dtypes):
        if dtype == "float32" and timer.device.type == "cuda":
            rates[TF32] = _product_rate(timer, dtype, allow_tf32=True)
        rates[dtype] = _product_rate(timer, dtype, allow_tf32=False)
    return Ceilings(copy_rate(timer), rates)


def copy_rate(timer: Timer) -> float:
    """Bytes read and written in a second by a large copy."""
    size = (1 << 30) if timer.device.type == "cuda" else (1 << 26)
    source = torch.ones(size // 4, device=timer.device)
    timing = timer.measure(partial(torch.empty_like(source).copy_, source))
    return 2e3 * size / timing.ms


def _product_rate(timer: Timer, dtype: str, allow_tf32: bool) -> float:
    size = 512 if timer.device.type == "cpu" else 4096 if dtype == "float64" else 8192
    left = torch.randn(size, size, device=timer.device).to(getattr(torch, dtype))
    right, product = left.clone(), torch.empty_like(left)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    try:
        timing = timer.measure(partial(torch.mm, left, right, out=product))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return 2e3 * size**3 / timing.ms
