"""The rule by which a result is right: about as near to float64 as PyTorch's own result, element by element.

    |out - ref64|  ≤  2·|torch - ref64| + eps       for every element

where ``eps`` allows the rounding of the result to its dtype, and 40 units in the last place of the type it is
accumulated in, at the scale of the largest element. A float32 result is thus held to float32's own accuracy wherever
PyTorch is. Float64 results are allowed 256 units: float64 is no better than they are, and often it is PyTorch's very
result.

Where PyTorch's flags allow TF32 (its default on CUDA), ``eps`` also allows what rounding the operands costs: see
`tf32_rounding`. The two errors in the norm, which every comparison has, say which of both is nearer as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Single elements of large results decide it: where a sum is nearly zero, what tensor cores truncate on the way is not.
# 24 units were too few for PyTorch's own bfloat16: 1.45 times what they allow in one of 27.7 million elements, sums of
# 10240 products, where ours came to 1.07 with one seed and 0.40 with another (experiment 020).
UNITS, UNITS_OF_FLOAT64 = 40, 256
_VANISHING = 1e4  # far less than the ratio of float32's unit to float64's, 5e8, and more than cancellation leaves
TF32_ROUNDOFF = 2.0**-11
"""The largest relative error of a number that is rounded to the nearest of TF32's 11 significant bits."""


@dataclass(frozen=True)
class Comparison:
    """How far a result and PyTorch's lie from float64.

    ``error`` and ``torch_error`` are ``‖x - ref64‖ / ‖ref64‖``; ``worst`` is the largest error of an element as a
    multiple of what the rule allows it; ``broken`` elements of ``elements`` are beyond it. ``units`` is what the
    dtype, and TF32 where it is allowed, grant to the whole.
    """

    error: float
    torch_error: float
    worst: float
    broken: int
    elements: int
    units: float

    @property
    def ok(self) -> bool:
        """Whether every element keeps the rule."""
        return self.broken == 0

    @property
    def ok_in_norm(self) -> bool:
        """Whether the whole keeps the rule, ``error ≤ 2·torch_error + units``, whatever single elements do."""
        return self.error <= 2 * self.torch_error + self.units

    @property
    def vanishes(self) -> bool:
        """Whether there is nothing but rounding: float64's is smaller than PyTorch's as its rounding is finer."""
        return self.torch_error > _VANISHING and self.ok_in_norm


def tf32_rounding(squares: torch.Tensor) -> torch.Tensor:
    """What rounding both operands to TF32 may cost each element; ``squares`` are the sums of the squared products.

    A rounding errs by 2⁻¹¹ at most and by 0.43 of that on average (root mean square, significands spread as in data),
    so a product by 0.6·2⁻¹¹; the errors of a sum's products are independent, and add up as their squares do. Allowed is
    5·2⁻¹¹ times the root of that sum: eight standard deviations, and the worst case of sums of up to six products.
    """
    return squares.sqrt().mul_(5 * TF32_ROUNDOFF)


def compare(
    out: torch.Tensor, torch_out: torch.Tensor, reference: torch.Tensor, rounding: torch.Tensor | None = None
) -> Comparison:
    """Hold ``out`` against ``reference`` (float64), with ``torch_out`` as the yardstick; all of one shape.

    ``rounding`` is what TF32 may cost each element, None where it is not allowed. Raises ValueError where shape or
    dtype of ``out`` differ from PyTorch's.
    """
    if out.shape != torch_out.shape or out.dtype != torch_out.dtype:
        raise ValueError(
            f"the result is {tuple(out.shape)} {out.dtype}, PyTorch's is {tuple(torch_out.shape)} {torch_out.dtype}"
        )
    if out.is_complex():
        out, torch_out, reference = (torch.view_as_real(x.resolve_conj()) for x in (out, torch_out, reference))
    unit = torch.finfo(out.dtype).eps
    count = UNITS_OF_FLOAT64 if out.dtype == torch.float64 else UNITS
    if reference.numel() == 0:
        return Comparison(0.0, 0.0, 0.0, 0, 0, count * unit)
    accumulation_unit = min(unit, torch.finfo(torch.float32).eps)

    finite = reference.isfinite()
    scale = float(reference.abs().masked_fill_(~finite, 0.0).amax())
    norm = float(torch.linalg.vector_norm(reference.masked_fill(~finite, 0.0)))
    # NaN or an infinity is no error where float64 has it as well, or PyTorch in the same place.
    shared = _equal(out, torch_out) & ~torch_out.isfinite()
    error = (out.double() - reference).abs_().masked_fill_(_equal(out, reference) | shared, 0.0)
    allowed = (torch_out.double() - reference).abs_().masked_fill_(_equal(torch_out, reference) | shared, 0.0)
    error_norm, torch_norm = float(torch.linalg.vector_norm(error)), float(torch.linalg.vector_norm(allowed))

    eps = count * accumulation_unit * scale
    allowed.mul_(2.0).add_(reference.abs(), alpha=unit).add_(eps)
    units = count * unit
    if rounding is not None:
        allowed.add_(rounding)
        units += float(torch.linalg.vector_norm(rounding)) / (norm or 1.0)
    # NaN fails every comparison, so it is broken unless it is expected; so is an infinity.
    same = _equal(out, torch_out) | _equal(out, reference)
    broken = int((~((finite & (error <= allowed)) | same)).sum())
    ratio = (error / allowed).masked_fill_(same, 0.0)
    return Comparison(
        error=error_norm / norm if norm else error_norm,
        torch_error=torch_norm / norm if norm else torch_norm,
        worst=float(ratio.amax()),
        broken=broken,
        elements=reference.numel(),
        units=units,
    )


def spread(count: int, wanted: int) -> list[int]:
    """At most ``wanted`` of ``range(count)``, evenly spread, the first and the last among them (at least two)."""
    wanted = max(wanted, 2)
    if count <= wanted:
        return list(range(count))
    return [round(index * (count - 1) / (wanted - 1)) for index in range(wanted)]


def kernelbench_rule(out: torch.Tensor, torch_out: torch.Tensor) -> float:
    """KernelBench's own test, ``|out - torch| ≤ tolerance·(1 + |torch|)``: which share of the elements fails.

    The tolerance is 1e-4 for float32 and float64, 1e-2 for half types.
    """
    tolerance = 1e-2 if out.dtype in (torch.float16, torch.bfloat16) else 1e-4
    failing = 0
    for part, torch_part in zip(_parts(out), _parts(torch_out)):
        close = torch.isclose(part, torch_part, atol=tolerance, rtol=tolerance, equal_nan=True)
        failing += close.numel() - int(close.sum())
    return failing / max(out.numel(), 1)


def _equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left == right) | (left.isnan() & right.isnan())


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Slices of a large tensor, so that a comparison needs little memory beside it."""
    return tensor.split(1) if tensor.dim() and tensor.shape[0] else (tensor,)
