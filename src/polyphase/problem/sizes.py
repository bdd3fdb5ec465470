"""The sizes at which choices are made, so that a layer keeps its kernels for all image sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.problem.integers import round_up
from polyphase.problem.problem import DTYPE_BYTES, ConvTransposeProblem, Pass

#: Most pixels of a tiny image: a kernel may process such images as a whole.
TINY = 64

#: Channels of a group with which images are large; the channels of a picture are fewer.
FEW_CHANNELS = range(4, 33)


def typical(problem: ConvTransposeProblem, sides: tuple[int, int, int] = (4096, 64, 32)) -> ConvTransposeProblem:
    """The layer at the size at which choices are made, so that it keeps its kernel for all image sizes.

    ``sides``: of images in one, two and three dimensions.
    """
    side = sides[problem.dims - 1]
    needed = (axis.input_size(side * axis.stride) for axis in problem.axes)
    # Layers that double images mostly pad their outputs to whole cells; 16-byte accesses need even rows. So do images
    # that had to be larger, unless they are tiny.
    sizes = tuple(max(side, round_up(size, 8) if size > side >= 32 else size) for size in needed)
    padding = tuple(-axis.output_size(1) % axis.stride if axis.stride % 2 == 0 else 0 for axis in problem.axes)
    return replace(problem, batch=1024, input_size=sizes, output_padding=padding)


def is_tiny(problem: ConvTransposeProblem) -> bool:
    """Whether images are tiny. Layers have other kernels for tiny images, except layers of one tap: no halo."""
    return math.prod(problem.input_size) <= TINY and problem.taps > 1


def standard(problem: ConvTransposeProblem) -> ConvTransposeProblem:
    """The layer at the `typical` size of its kind: with tiny images, or with larger ones."""
    return typical(problem, (16, 4, 2)) if is_tiny(problem) else typical(problem)


def with_large_images(problem: ConvTransposeProblem) -> ConvTransposeProblem:
    """The layer at the size of large images, which layers with few channels have, unless its own are tiny."""
    return standard(problem) if is_tiny(problem) else replace(typical(problem, (16384, 256, 64)), batch=64)


def has_odd_rows(problem: ConvTransposeProblem) -> bool:
    """Whether rows of the input are odd, so that cp.async cannot copy 4 bytes of 16-bit elements."""
    return DTYPE_BYTES[problem.dtype] == 2 and problem.input_size[-1] % 2 == 1 and not problem.channels_last


def compared(problem: ConvTransposeProblem, pass_: Pass) -> ConvTransposeProblem:
    """The layer at the size at which schedules are compared: `standard`, but wide images if there are few channels.

    For the forward pass in half precision, channels first, rows are odd if the layer's rows are odd: elements of odd
    rows are loaded one by one. If no tap reads beside its pixel, images can be operands in their own layout
    (`implicit_gemm`), unless their pixels are not whole 16-byte pieces; the returned layer's are not either then.
    """
    few = all(n in FEW_CHANNELS for n in (problem.in_channels_per_group, problem.out_channels_per_group))
    sized = with_large_images(problem) if few else standard(problem)
    if DTYPE_BYTES[problem.dtype] != 2:
        return sized
    *sides, width = sized.input_size
    could = not few and all(axis.shifts == (0, 0) for axis in problem.axes)
    if could and not is_tiny(problem) and math.prod(problem.input_size) % 8:
        sides, width = [(side - 1) | 1 for side in sides], width // 8 * 8 - 4
    if pass_ is Pass.FORWARD and has_odd_rows(problem):
        width = (width - 1) | 1
    return replace(sized, input_size=(*sides, width))
