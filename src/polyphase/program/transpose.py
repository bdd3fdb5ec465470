"""Layout transposes, ``kernels/steps/transpose.cu``: contiguous to channels_last, and back."""

from __future__ import annotations

import math

from polyphase.jit.source import KernelSource
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Strides, five
from polyphase.program.params import params_of
from polyphase.program.step import Step, plain_step

_THREADS = 256
_PIXELS, _CHANNELS = 64, 64  # of a block


def transpose_source(dtype: str) -> KernelSource:
    """The kernel, for all tensors of a dtype."""
    return KernelSource(
        "transpose", dtype, False, (("THREADS", _THREADS), ("PARTS", 2), ("MIN_BLOCKS", 1)), folder="steps"
    )


def missing(channels: int) -> float:
    """Channels that ``channels`` are short of whole blocks', for each of them."""
    return (round_up(channels, _CHANNELS) - channels) / max(1, channels)


def to_channels_last(
    dtype: str, shape: tuple[int, ...], strides: Strides, groups: int = 1, padded: int | None = None, parts: int = 1
) -> Step:
    """From a tensor ``(N, C, *spatial)`` of any strides to one without gaps whose channels are innermost.

    ``padded``: channels of each of the ``groups`` in the result, those that do not exist zero; as many as there are by
    default. ``parts``: two are TF32 and what that loses, channels of their own, a group's one behind the other's.
    """
    batch, channels, *sizes = five(shape)
    pixels, group = batch * math.prod(sizes), channels // groups
    each = group if padded is None else padded
    source = transpose_source(dtype)
    params = params_of(source).pack(
        stride=strides,
        channels=groups * parts * each,
        pixels=pixels,
        sizes=sizes,
        padded=each,
        group=group,
        parts=parts,
    )
    blocks = math.ceil(pixels / _PIXELS) * math.ceil(groups * parts * each / _CHANNELS)
    return plain_step(source, blocks, _THREADS, params)


def to_contiguous(dtype: str, shape: tuple[int, ...]) -> Step:
    """From a tensor ``(N, C, *spatial)`` without gaps whose channels are innermost to a contiguous one.

    To the kernel that is a tensor whose pixels are channels, and the other way round.
    """
    batch, channels, *sizes = shape
    pixels = math.prod(sizes)
    return to_channels_last(dtype, (batch, pixels, channels), (pixels * channels, channels, 0, 0, 1))
