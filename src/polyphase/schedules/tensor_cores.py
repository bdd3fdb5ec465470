"""Shared by schedules on tensor cores: limits, stages, and TMA boxes of tensors whose channels are innermost."""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import dense_strides, five
from polyphase.program.step import WEIGHT, WORKSPACE, Step
from polyphase.program.tensor_map import TensorMap, tma_strides
from polyphase.program.transpose import Transposed, to_channels_last
from polyphase.schedules.cells import Side
from polyphase.schedules.tiles import Four

#: Bytes of k that one ``mma.sync`` or ``wgmma`` reads.
OPERATION_BYTES = 32

#: N of a ``wgmma``, at most.
MOST_COLUMNS = 256

#: Limits of a TMA box: elements that it spans along a dimension, and the distance of those that it copies.
MAX_BOX_SIDE, MAX_BOX_STEP = 256, 8

#: Stages of a pipeline that TMA fills, at least.
LEAST_PIPELINE = 3

_MOST_PIPELINE = 8
_DECLARED = 1024  # bytes of static shared memory, at most

#: Shared memory by which a warpgroup stores an input gradient in NCHW (kernels/epilogue/store_gradient.cuh).
STAGED_BYTES = 2 * 8 * (64 + 4) * 4


def lacks_cores(problem: ConvTransposeProblem, device: DeviceInfo) -> str | None:
    """Why the tensor cores cannot compute a layer on a device, or None if they can."""
    if problem.dtype not in ("float32", "float16", "bfloat16"):
        return f"does not use tensor cores for {problem.dtype}"
    if device.capability < 80:
        return f"{device.arch} lacks the tensor-core instructions that it uses"
    return None


def parts_of(problem: ConvTransposeProblem) -> int:
    """Parts into which an element is split: two keep the accuracy of float32."""
    return 2 if problem.dtype == "float32" and not problem.tf32 else 1


def pipeline_stages(stage_bytes: int, device: DeviceInfo, resident: int = 1, staged: int = 0) -> int:
    """Stages in the shared memory of each of ``resident`` blocks, beside ``staged`` bytes for results."""
    return min(_MOST_PIPELINE, (device.shared_bytes_of(resident) - _DECLARED - staged) // stage_bytes)


def wgmma_cycles(columns: int) -> float:
    """Cycles of a ``wgmma``, up to a factor: narrow ones take as long as shared memory is read for their rows."""
    return max(columns / 2, 16 + columns / 4)


def pixel_pitch(pixel: int) -> int:
    """Bytes of a copied pixel of ``pixel`` bytes, padded so that boxes of pixels span few cache lines."""
    return next((pitch for pitch in (16, 32, 64, 128) if pixel <= pitch), round_up(pixel, 64))


def counter_bytes(count: int) -> int:
    """Bytes of counters before a kernel's weights (kernels/core/counters.cuh)."""
    return round_up(4 * count, 128)


def steps_of(problem: ConvTransposeProblem) -> int:
    """Operations of ``mma.sync`` or wgmma along a group's input channels."""
    return math.ceil(problem.in_channels_per_group * DTYPE_BYTES[problem.dtype] / OPERATION_BYTES)


def pixel_strides(dtype: str, side: Side) -> tuple[int, ...] | None:
    """The strides of `pixel_map`; None if TMA cannot read the tensor."""
    size = DTYPE_BYTES[dtype]
    batch, channels, depth, height, width = side.shape
    image, channel, slab, row, column = (step * size for step in side.strides)
    if channel != size and channels > 1:
        return None
    return tma_strides(zip((width, height, depth, batch), (column, row, slab, image)))


def pixel_map(
    dtype: str, side: Side, box: Four, pitch: int, steps: tuple[int, ...] = (1, 1, 1), tensor: int = 0
) -> TensorMap:
    """The map of a tensor that TMA can read, whose boxes have ``pitch`` bytes of channels of each pixel.

    ``box``: pixels along n, d, h and w; along the last three they are ``steps`` apart.
    """
    strides = pixel_strides(dtype, side)
    assert strides is not None
    batch, channels, depth, height, width = side.shape
    apart = (step if count > 1 else 1 for step, count in zip(reversed(steps), box[:0:-1]))
    return TensorMap(
        dtype,
        (channels, width, height, depth, max(1, batch)),
        strides,
        (pitch // DTYPE_BYTES[dtype], *box[::-1]),
        pitch,
        True,
        tensor,
        (1, *apart, 1),
    )


def weight_map(problem: ConvTransposeProblem, pitch: int, columns: int) -> TensorMap:
    """The map of a weight with its output channels innermost, padded to whole pieces of 16 bytes.

    Its boxes are ``pitch`` bytes of output channels of ``columns`` input channels at a tap.
    """
    size, channels, taps = DTYPE_BYTES[problem.dtype], problem.out_channels_per_group, problem.taps
    pixel = round_up(channels * size, 16)
    strides = tma_strides([(problem.in_channels, taps * pixel), (taps, pixel), (1, 0), (1, 0)])
    assert strides is not None
    sizes, box = (channels, problem.in_channels, taps, 1, 1), (pitch // size, columns, 1, 1, 1)
    return TensorMap(problem.dtype, sizes, strides, box, pitch, True, 1)


def pack_for_boxes(problem: ConvTransposeProblem, channels_last: bool, padded: int) -> Step:
    """The step that writes the weight with its output channels innermost, ``padded`` with zeros to that number."""
    shape = five(problem.weight_shape)
    step = to_channels_last(problem.dtype, Transposed(shape, dense_strides(shape, channels_last), padded=padded))
    return replace(step, operands=(WEIGHT, WORKSPACE))
