"""``ConvTranspose1d/2d/3d`` and their lazy forms: `torch.nn`'s modules with polyphase's forward pass.

They are subclasses of `torch.nn`'s with nothing added: the same constructor, random numbers, parameters, state_dict,
repr and ``output_size`` argument. `polyphase.accelerate` relies on that when it changes the class of a built module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyphase.functional import conv_transpose1d, conv_transpose2d, conv_transpose3d


def _forward(
    module: Any, function: Callable[..., Tensor], dims: int, input: Tensor, output_size: Sequence[int] | None
) -> Tensor:
    if module.padding_mode != "zeros":
        raise ValueError(
            f"{module._get_name()} supports the padding mode 'zeros' alone, got padding_mode={module.padding_mode!r}"
        )
    output_padding = module.output_padding
    if output_size is not None:
        output_padding = module._output_padding(
            input, list(output_size), module.stride, module.padding, module.kernel_size, dims, module.dilation
        )
    return function(
        input,
        module.weight,
        module.bias,
        module.stride,
        module.padding,
        output_padding,
        module.groups,
        module.dilation,
    )


class ConvTranspose1d(torch.nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` computed by `polyphase.conv_transpose1d`."""

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """``(N, C_in, L)`` or ``(C_in, L)`` to ``(N, C_out, L_out)`` or ``(C_out, L_out)``.

        ``output_size``, with or without batch and channels, chooses among the sizes that a stride can give.
        ValueError: it is none of them.
        """
        return _forward(self, conv_transpose1d, 1, input, output_size)


class ConvTranspose2d(torch.nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` computed by `polyphase.conv_transpose2d`."""

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """``(N, C_in, H, W)`` or ``(C_in, H, W)`` to ``(N, C_out, H_out, W_out)`` or ``(C_out, H_out, W_out)``.

        ``output_size``, with or without batch and channels, chooses among the sizes that a stride can give.
        ValueError: it is none of them.
        """
        return _forward(self, conv_transpose2d, 2, input, output_size)


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` computed by `polyphase.conv_transpose3d`."""

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """``(N, C_in, D, H, W)`` or ``(C_in, D, H, W)`` to ``(N, C_out, D_out, H_out, W_out)`` or without ``N``.

        ``output_size``, with or without batch and channels, chooses among the sizes that a stride can give.
        ValueError: it is none of them.
        """
        return _forward(self, conv_transpose3d, 3, input, output_size)


class LazyConvTranspose1d(torch.nn.LazyConvTranspose1d, ConvTranspose1d):  # type: ignore[misc]
    """A `ConvTranspose1d` that takes ``in_channels`` from its first input."""

    cls_to_become = ConvTranspose1d


class LazyConvTranspose2d(torch.nn.LazyConvTranspose2d, ConvTranspose2d):  # type: ignore[misc]
    """A `ConvTranspose2d` that takes ``in_channels`` from its first input."""

    cls_to_become = ConvTranspose2d


class LazyConvTranspose3d(torch.nn.LazyConvTranspose3d, ConvTranspose3d):  # type: ignore[misc]
    """A `ConvTranspose3d` that takes ``in_channels`` from its first input."""

    cls_to_become = ConvTranspose3d
