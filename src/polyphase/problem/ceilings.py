"""The floor of a pass: the larger of its bytes over the copy bandwidth and its flops over the rate of its dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyphase.problem.device import Card, DeviceInfo
from polyphase.problem.problem import ConvTransposeProblem

TF32 = "tf32"

#: The GPUs whose rates `DeviceInfo.for_arch` has, if these were measured.
_MEASURED = {"sm_90a": "an H200-class GPU"}


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


#: Ceilings of an H200 from its records in benchmarks/results (float64: the vendor's), for floors without a GPU.
H200 = Ceilings(
    4.25e12,
    {TF32: 420e12, "float32": 51e12, "bfloat16": 800e12, "float16": 800e12, "float64": 67e12},
)


def floor_ms(problem: ConvTransposeProblem, rates: DeviceInfo) -> float:
    """The floor without a GPU; of bytes alone if the product rates are not known."""
    if not _knows_products(rates):
        return 1e3 * problem.bytes / rates.copy_bytes_per_second
    slower = min(H200.bytes_per_second, rates.copy_bytes_per_second)
    return replace(H200, bytes_per_second=slower).floor_ms(problem, strict_fp32=not problem.tf32)


def about_rates(card: Card) -> str:
    """The GPU that plans, predicted times and floors assume, in a sentence."""
    own, planned = (each.copy_bytes_per_second / 1e12 for each in (card.rates, card.device))
    arch = card.device.arch
    floors = "" if _knows_products(card.device) else "; floors count bytes only, no flops"
    typical = f"for {_MEASURED[arch]}" if arch in _MEASURED else f"at the rates of {arch}"
    if own == planned:
        return f"predicted {typical} ({own:.3g} TB/s copy bandwidth){floors}"
    return (
        f"predicted times and floors assume {card.name}'s copy bandwidth, {own:.3g} TB/s; kernels are chosen {typical} "
        f"({planned:.3g} TB/s), as for every {arch} GPU{floors}"
    )


def _knows_products(rates: DeviceInfo) -> bool:
    """Whether the device's product rates are `H200`'s: Hopper's cards multiply at the same rates."""
    return rates.arch == "sm_90a"
