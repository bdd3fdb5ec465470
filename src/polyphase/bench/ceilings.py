"""What the machine can do at best, measured in the same run as the layers: copy bandwidth and matrix product rates.

The floor of a pass is the larger of its bytes over the bandwidth and its flops over the rate of its dtype. Both are
measured with PyTorch (a large copy, cuBLAS on 8192³), so a floor is what the best code on the same machine reaches, not
what a data sheet promises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from polyphase.bench.timing import Timer
from polyphase.problem import ConvTransposeProblem

TF32 = "tf32"


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a copy (read and written bytes both counted), and flops per second by kind of product.

    The kinds are the dtypes' names, and ``tf32`` for float32 operands that the tensor cores round.
    """

    bytes_per_second: float
    flops_per_second: dict[str, float]

    def rate(self, dtype: str, strict_fp32: bool = False) -> float:
        """The rate of a product with operands of ``dtype``; float32 counts as TF32 unless ``strict_fp32``."""
        if dtype == "float32" and not strict_fp32:
            return self.flops_per_second.get(TF32, self.flops_per_second["float32"])
        return self.flops_per_second[dtype]

    def floor_ms(self, problem: ConvTransposeProblem, strict_fp32: bool = False) -> float:
        """The milliseconds below which no pass of ``problem`` can fall."""
        return 1e3 * problem.floor_seconds(self.bytes_per_second, self.rate(problem.dtype, strict_fp32))

    def __str__(self) -> str:
        rates = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in self.flops_per_second.items())
        return f"copy {self.bytes_per_second / 1e12:.3g} TB/s (read + write); products {rates} TFLOP/s"


#: Of an H200, as its records in benchmarks/results have them (float64 as it is sold), for floors without a GPU.
H200 = Ceilings(
    4.25e12,
    {TF32: 420e12, "float32": 51e12, "bfloat16": 800e12, "float16": 800e12, "float64": 67e12},
)


def measure(timer: Timer, dtypes: Iterable[str]) -> Ceilings:
    """Measure the ceilings of ``timer``'s device for operands of ``dtypes``."""
    rates = {}
    for dtype in dict.fromkeys(dtypes):
        if dtype == "float32" and timer.device.type == "cuda":
            rates[TF32] = _product_rate(timer, dtype, allow_tf32=True)
        rates[dtype] = _product_rate(timer, dtype, allow_tf32=False)
    return Ceilings(_copy_rate(timer), rates)


def _copy_rate(timer: Timer) -> float:
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
