"""Complex layers as real ones of twice the channels, for devices whose kernels support only real numbers.

Each group's channels become real parts, then imaginary parts. With ``w = wr + i·wi`` the real weight of a group is::

                      real out   imaginary out
    real in        [     wr           wi      ]
    imaginary in   [    -wi           wr      ]

These are the passes as the operators define them, without conjugation: `polyphase.torch_op.derivatives` conjugates
if a derivative needs it. ``real_pass`` is the same pass of the real layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyphase.torch_op.memory_format import empty_output

RealPass = Callable[..., Tensor]


def forward(real_pass: RealPass, input: Tensor, weight: Tensor, bias: Tensor | None, *constants: Any) -> Tensor:
    """The complex forward pass."""
    groups = constants[-1]
    real_bias = None if bias is None else _parts(bias[None], groups).flatten()
    output = real_pass(_as_channels(input, groups), _real_weight(weight, groups), real_bias, *constants)
    return _from_channels(output, groups, input, weight)


def input_grad(real_pass: RealPass, grad_output: Tensor, weight: Tensor, *constants: Any) -> Tensor:
    """The complex input gradient. The real pass transposes the matrix above, so it gets the matrix of conj(w)."""
    groups = constants[-1]
    result = real_pass(_as_channels(grad_output, groups), _real_weight(weight.conj(), groups), *constants)
    return _from_channels(result, groups, grad_output, weight)


def weight_grad(
    real_pass: RealPass, input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *constants: Any
) -> Tensor:
    """The complex weight gradient, from the products of real and imaginary parts with one another."""
    groups = constants[-1]
    products = real_pass(_as_channels(input, groups), _as_channels(grad_output, groups), kernel_size, *constants)
    of_real, of_imaginary = products.unflatten(1, (2, -1)).unflatten(0, (groups, 2, -1)).unbind(1)
    result = empty_output((input.shape[1], grad_output.shape[1] // groups, *kernel_size), input, grad_output)
    by_group = torch.view_as_real(result).unflatten(0, (groups, -1))
    torch.sub(of_real.select(2, 0), of_imaginary.select(2, 1), out=by_group.select(-1, 0))
    torch.add(of_real.select(2, 1), of_imaginary.select(2, 0), out=by_group.select(-1, 1))
    return result


def _parts(tensor: Tensor, groups: int) -> Tensor:
    """``(N, C, *spatial)`` complex as ``(N, groups, 2, C/groups, *spatial)`` real, a view."""
    parts: Tensor = torch.view_as_real(tensor).unflatten(1, (groups, -1)).movedim(-1, 2)
    return parts


def _as_channels(tensor: Tensor, groups: int) -> Tensor:
    """``(N, C, *spatial)`` complex to ``(N, 2·C, *spatial)`` real, in the same memory format."""
    parts = _parts(tensor.resolve_conj(), groups)
    result = empty_output((tensor.shape[0], 2 * tensor.shape[1], *tensor.shape[2:]), parts[:, 0, 0], parts[:, 0, 0])
    result.unflatten(1, (groups, 2, -1)).copy_(parts)
    return result


def _from_channels(real: Tensor, groups: int, first: Tensor, second: Tensor) -> Tensor:
    """``(N, 2·C, *spatial)`` real to ``(N, C, *spatial)`` complex, in the memory format of the operands' result."""
    result = empty_output((real.shape[0], real.shape[1] // 2, *real.shape[2:]), first, second)
    _parts(result, groups).copy_(real.unflatten(1, (groups, 2, -1)))
    return result


def _real_weight(weight: Tensor, groups: int) -> Tensor:
    """``(C_in, C_out/groups, *kernel)`` complex to ``(2·C_in, 2·C_out/groups, *kernel)`` real."""
    real, imaginary = torch.view_as_real(weight.resolve_conj()).unflatten(0, (groups, -1)).unbind(-1)
    from_real = torch.cat([real, imaginary], 2)
    from_imaginary = torch.cat([-imaginary, real], 2)
    return torch.cat([from_real, from_imaginary], 1).flatten(0, 1)
