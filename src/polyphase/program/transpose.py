"""What brings a tensor to channels_last, ``kernels/turn_channels.cu``."""

from __future__ import annotations

import math

from polyphase.jit.source import KernelSource
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Strides
from polyphase.program.params import params_of
from polyphase.program.program import Launch, plain_launch
from polyphase.schedules.cells import five

_THREADS = 256
_PIXELS, _CHANNELS = 64, 64  # of a block


def turn_source(dtype: str) -> KernelSource:
    """The kernel, for all tensors of a type."""
    return KernelSource("turn_channels", dtype, False, (("THREADS", _THREADS), ("MIN_BLOCKS", 1)))


def missing(channels: int) -> float:
    """Channels that ``channels`` are short of whole blocks', for each of them."""
    return (round_up(channels, _CHANNELS) - channels) / max(1, channels)


def turning(dtype: str, shape: tuple[int, ...], strides: Strides) -> Launch:
    """From a tensor ``(N, C, *spatial)`` of any strides to one without gaps whose channels are innermost."""
    batch, channels, *sizes = five(shape)
    pixels = batch * math.prod(sizes)
    source = turn_source(dtype)
    geometry = params_of(source).pack(stride=strides, channels=channels, pixels=pixels, sizes=sizes)
    blocks = math.ceil(pixels / _PIXELS) * math.ceil(channels / _CHANNELS)
    return plain_launch(source, blocks, _THREADS, geometry)


def turning_back(dtype: str, shape: tuple[int, ...]) -> Launch:
    """From a tensor ``(N, C, *spatial)`` without gaps whose channels are innermost to a contiguous one.

    To the kernel that is a tensor whose pixels are channels, and the other way round.
    """
    batch, channels, *sizes = shape
    pixels = math.prod(sizes)
    return turning(dtype, (batch, pixels, channels), (pixels * channels, channels, 0, 0, 1))
