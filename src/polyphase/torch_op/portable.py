"""The three passes in plain tensor operations: any device, any dtype, and the executable definition of the schedule.

Along one spatial dimension with stride s, dilation d and padding p, tap ``t`` serves phase ``u = (t·d - p) mod s`` and
reaches back ``shift = (t·d - p) div s`` (see `polyphase.problem`)::

    forward          y[q·s + u]  =  Σ over the taps t of phase u of   x[q - shift_t] · w[t]
    input gradient   gx[i]       =  Σ over all taps t of              g[(i + shift_t)·s + u_t] · w[t]
    weight gradient  gw[t]       =  Σ over all positions i of         x[i] · g[(i + shift_t)·s + u_t]

The phases of several dimensions are the combinations of the phases of each. Every sum over channels, and that over
positions, is a matrix product: ``(N, C, *spatial)`` is viewed as ``(groups, C/groups, N, *spatial)``, so that a run of
images is one matrix of channels × pixels per group. Half types are computed in float32 and rounded once.

If ``q - shift_t`` is outside the input, the forward pass adds nothing: it multiplies no infinite weight by a padding
zero. The gradients read zeros outside ``g``, and do multiply by them. PyTorch does the same in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor, bmm  # by name: ptflops counts what is looked up as torch.bmm

from polyphase.problem import Axis
from polyphase.torch_op.memory_format import empty_output

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

# Images are computed in runs whose intermediate results have about this many elements. These stay in a CPU's cache (the
# depthwise layer of the benchmark runs 4 times faster than without), and memory does not grow with the batch.
ELEMENTS_AT_A_TIME = 1 << 20

# Taps are multiplied in blocks whose products have at least about this many elements, if there are as many. Threads may
# split every product, and on a busy machine threads that wait for one another take milliseconds.
ELEMENTS_OF_A_BLOCK = 1 << 20

_T = TypeVar("_T")
Box = tuple[slice, ...]
ALL = (slice(None),) * 3  # groups, channels, images


@dataclass(frozen=True)
class Tap:
    """One tap of the kernel: its index, the input positions that it reads, and their cells in its phase's plane."""

    index: tuple[int, ...]
    inputs: Box
    cells: Box


@dataclass(frozen=True)
class Phase:
    """A phase that has taps: its outputs ``q·s + u``, the number of cells ``q``, and the taps that reach any cell."""

    outputs: Box
    cells: tuple[int, ...]
    taps: tuple[Tap, ...]


def phases(axes: Sequence[Axis], input_size: Sequence[int], output_size: Sequence[int]) -> list[Phase]:
    """Every phase with taps and an output. With a large stride there are few; outputs of the others are the bias."""
    result = []
    served = ([u for u in axis.taps_by_phase if u < size] for axis, size in zip(axes, output_size))
    for phase in product(*served):
        # A step longer than the side would have the same result, but its product with a tensor's stride may overflow.
        steps = (min(axis.stride, size) for axis, size in zip(axes, output_size))
        outputs = tuple(slice(u, None, step) for u, step in zip(phase, steps))
        cells = tuple(len(range(size)[part]) for part, size in zip(outputs, output_size))
        indices = product(*(axis.taps_by_phase[u] for u, axis in zip(phase, axes)))
        taps = (_tap(index, axes, input_size, cells) for index in indices)
        result.append(Phase(outputs, cells, tuple(tap for tap in taps if tap is not None)))
    return result


def _tap(index: tuple[int, ...], axes: Sequence[Axis], input_size: Sequence[int], cells: Sequence[int]) -> Tap | None:
    """The tap at ``index``, or None if the padding has cropped all cells that it reaches."""
    shifts = [axis.shift(tap) for tap, axis in zip(index, axes)]
    starts = [max(0, -shift) for shift in shifts]
    stops = [min(size, count - shift) for size, count, shift in zip(input_size, cells, shifts)]
    if any(start >= stop for start, stop in zip(starts, stops)):
        return None
    inputs = tuple(slice(start, stop) for start, stop in zip(starts, stops))
    reached = tuple(slice(start + shift, stop + shift) for start, stop, shift in zip(starts, stops, shifts))
    return Tap(index, inputs, reached)


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The layer: ``(N, C_in, *spatial)`` and ``(C_in, C_out/groups, *kernel)`` to ``(N, C_out, *output)``."""
    axes = [Axis(*constants) for constants in zip(weight.shape[2:], stride, padding, dilation)]
    input_size = input.shape[2:]
    output_size = [axis.output_size(n, extra) for axis, n, extra in zip(axes, input_size, output_padding)]
    output = empty_output((input.shape[0], weight.shape[1] * groups, *output_size), input, weight)

    planes = phases(axes, input_size, output_size)
    matrices = _by_tap(_computable(weight), groups)
    start = matrices.new_zeros(output.shape[1]) if bias is None else bias.to(matrices.dtype)
    start = start.reshape(groups, -1, *[1] * (1 + len(axes)))
    some_are_bare = len(planes) < math.prod(min(axis.stride, size) for axis, size in zip(axes, output_size))
    for images, pixels in _runs(groups, matrices, output, input):
        if some_are_bare:
            images.copy_(start.expand(images.shape))
        terms = _terms(_computable(pixels), matrices, [tap for phase in planes for tap in phase.taps])
        for phase in planes:
            plane = start.expand(*images.shape[:3], *phase.cells).clone()
            for tap, term in zip(phase.taps, terms):  # in this order: zip takes no term when the taps have ended
                plane[ALL + tap.cells] += term[ALL + tap.inputs]
            images[ALL + phase.outputs] = plane
    return output


def input_grad(
    grad_output: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of the input, ``(N, C_in, *spatial)``, from that of the output, ``(N, C_out, *output)``."""
    axes = [Axis(*constants) for constants in zip(weight.shape[2:], stride, padding, dilation)]
    output_size = grad_output.shape[2:]
    input_size = [axis.input_size(size, extra) for axis, size, extra in zip(axes, output_size, output_padding)]
    result = empty_output((grad_output.shape[0], weight.shape[0], *input_size), grad_output, weight)

    planes = phases(axes, input_size, output_size)
    matrices = _by_tap(_computable(weight), groups)
    for images, gradients in _runs(groups, matrices, result, grad_output):
        total = images.new_zeros(images.shape, dtype=matrices.dtype).flatten(2)
        for taps, columns in _columns(_computable(gradients), planes, images.shape):
            total.baddbmm_(_stack(matrices, taps).mT, columns)
        images.copy_(total.view(images.shape))
    return result


def weight_grad(
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of the weight, ``(C_in, C_out/groups, *kernel)``, from the input and that of the output."""
    axes = [Axis(*constants) for constants in zip(kernel_size, stride, padding, dilation)]
    result = empty_output((input.shape[1], grad_output.shape[1] // groups, *kernel_size), input, grad_output)

    planes = phases(axes, input.shape[2:], grad_output.shape[2:])
    total = _by_tap(result.new_zeros(result.shape, dtype=compute_dtype(result.dtype)), groups)
    for images, gradients in _runs(groups, total, input, grad_output):
        pixels = _computable(images).flatten(2).mT
        for taps, columns in _columns(_computable(gradients), planes, images.shape):
            for tap, addend in zip(taps, bmm(columns, pixels).split(total.shape[-2], 1)):
                total[tap.index] += addend
    _by_tap(result, groups).copy_(total)
    return result


def _terms(pixels: Tensor, matrices: Tensor, taps: Sequence[Tap]) -> Iterator[Tensor]:
    """For each tap in turn its weight times every pixel: ``(groups, C_out/groups, images, *input_size)``."""
    out_channels, in_channels = matrices.shape[-2:]
    flat = pixels.flatten(2)
    for block in _blocks(taps, out_channels, in_channels, flat[:, 0].numel()):
        products = bmm(_stack(matrices, block), flat)
        yield from products.unflatten(2, pixels.shape[2:]).split(out_channels, 1)


def _columns(gradients: Tensor, planes: Sequence[Phase], shape: Sequence[int]) -> Iterator[tuple[list[Tap], Tensor]]:
    """Taps, a block at a time, with the gradients that each input position reads at them, zero outside the output.

    ``gradients`` is ``(groups, C_out/groups, images, *output_size)``, ``shape`` is ``(groups, C_in/groups, images,
    *input_size)``; the columns are ``(groups, taps·C_out/groups, images·Πinput_size)``.
    """
    groups, in_channels, images, *input_size = shape
    out_channels = gradients.shape[1]
    reaches = [(tap, gradients[ALL + phase.outputs][ALL + tap.cells]) for phase in planes for tap in phase.taps]
    for block in _blocks(reaches, out_channels, in_channels, groups * images * math.prod(input_size)):
        columns = gradients.new_zeros((groups, len(block), out_channels, images, *input_size))
        for (tap, reached), column in zip(block, columns.unbind(1)):
            column[ALL + tap.inputs] = reached
        yield [tap for tap, _ in block], columns.flatten(3).flatten(1, 2)


def _blocks(taps: Sequence[_T], rows_per_tap: int, rows: int, columns: int) -> Iterator[Sequence[_T]]:
    """The taps in blocks, one matrix product each; a row of it has ``columns`` elements, for all groups.

    One tap's product has as many rows as a group has output channels, often too few to be fast. A block has no more
    rows than a group has input channels, or 8, so that its result is about as large as the input, unless that is small.
    """
    count = max(1, max(8, rows) // rows_per_tap, ELEMENTS_OF_A_BLOCK // max(1, rows_per_tap * columns))
    return (taps[start : start + count] for start in range(0, len(taps), count))


def _stack(matrices: Tensor, taps: Sequence[Tap]) -> Tensor:
    """The matrices of the taps stacked along rows: ``(groups, taps·C_out/groups, C_in/groups)``."""
    return torch.cat([matrices[tap.index] for tap in taps], 1)


def _runs(groups: int, matrices: Tensor, first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs of images of two tensors ``(N, C, *spatial)``, as views ``(groups, C/groups, images, *spatial)``."""
    positions = min(math.prod(first.shape[2:]), math.prod(second.shape[2:]))
    images = max(1, ELEMENTS_AT_A_TIME // (groups * max(8, *matrices.shape[-2:]) * max(1, positions)))
    for run in zip(first.split(images), second.split(images)):
        yield run[0].unflatten(1, (groups, -1)).movedim(0, 2), run[1].unflatten(1, (groups, -1)).movedim(0, 2)


def _by_tap(weight: Tensor, groups: int) -> Tensor:
    """``(C_in, C_out/groups, *kernel)`` as a view ``(*kernel, groups, C_out/groups, C_in/groups)``."""
    matrices: Tensor = weight.unflatten(0, (groups, -1)).movedim((0, 2, 1), (-3, -2, -1))
    return matrices


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are computed."""
    return _WIDER.get(dtype, dtype)


def _computable(tensor: Tensor) -> Tensor:
    return tensor.to(compute_dtype(tensor.dtype))
