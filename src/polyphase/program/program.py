"""The program that a plan runs: kernel launches in order, over named buffers.

The runtime, emitted files and the tests' harness all run a `Program` in the same way: they allocate its buffers, and
launch its steps in order, each on the buffers that it names::

    forward, input gradient    src, weight, bias -> dst
    weight gradient            x, grad           -> dst

    transposes -> measure -> pack -> main -> split-K reduction -> transpose back
                  (workspace)        (partials)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polyphase.problem.layouts import dense_strides
from polyphase.problem.problem import DTYPE_BYTES, ConvTransposeProblem, Pass, accumulator
from polyphase.program.split_k import reduce_splits, reduction_source
from polyphase.program.step import BIAS, DST, GRAD, HALF_COPIES, MANY_BLOCKS, PARTIALS, SRC, WEIGHT, WORKSPACE, Step, X
from polyphase.program.transpose import (
    HALF_COPIES_BYTES,
    Transposed,
    sample_magnitudes,
    to_channels_last,
    to_contiguous,
    to_halves,
    transpose_blocks,
    transpose_source,
    transpose_sources,
)

if TYPE_CHECKING:
    from polyphase.jit.source import KernelSource
    from polyphase.problem.layouts import Layouts


#: The buffer of a result in channels_last that is converted at the end.
DST_LAST = f"{DST}_channels_last"


@dataclass(frozen=True)
class Buffer:
    """Memory that a program needs for its own use: ``elements`` of ``dtype``, without gaps."""

    name: str
    dtype: str
    elements: int

    @property
    def bytes(self) -> int:
        """The buffer's size."""
        return self.elements * (1 if self.dtype == "uint8" else DTYPE_BYTES[self.dtype])


@dataclass(frozen=True)
class Program:
    """One pass at one size: ``steps`` in order, and the ``buffers`` they need beside the tensors of the call.

    ``main_index``: the step that multiplies. ``splits``: its split-K count; several are partial planes, one is the
    result in ``DST``. ``dst_channels_last``: a weight gradient's memory order is
    ``(C_in, *kernel_size, C_out / groups)``. ``spares``: further kernels that other sizes of the layer need.
    """

    steps: tuple[Step, ...]
    main_index: int = 0
    buffers: tuple[Buffer, ...] = ()
    splits: int = 1
    dst_channels_last: bool = False
    spares: tuple[KernelSource, ...] = ()

    @property
    def main(self) -> Step:
        """The step that multiplies."""
        return self.steps[self.main_index]

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        """All kernels to compile, the main one first, each once."""
        return tuple(dict.fromkeys((self.main.source, *(step.source for step in self.steps), *self.spares)))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(buffer.bytes for buffer in self.buffers if buffer.name == WORKSPACE)

    def with_main(self, main: Step) -> Program:
        """The same program with another main step."""
        return replace(self, steps=(*self.steps[: self.main_index], main, *self.steps[self.main_index + 1 :]))


def assemble(
    problem: ConvTransposeProblem,
    pass_: Pass,
    main: Step,
    packs: tuple[Step, ...] = (),
    workspace_bytes: int = 0,
    splits: int = 1,
    may_split: bool = False,
    narrowed: bool = False,
    dst_channels_last: bool = False,
) -> Program:
    """The program of a pass that one kernel computes, with the steps before and after it.

    Args:
        problem: the layer.
        pass_: the pass.
        main: the kernel's launch. Its operands follow from the other arguments, and are set here.
        packs: steps that write ``WORKSPACE`` from ``WEIGHT`` and ``SRC``; the kernel reads its weights there.
        workspace_bytes: its size.
        splits: split-K count. Several write partial planes, and a reduction follows.
        may_split: whether other sizes of the layer have several splits, so that the reduction is always loaded.
        narrowed: whether a single split is stored in the tensors' type, not in the accumulator's.
        dst_channels_last: see `Program`.
    """
    elements = problem.elements[{Pass.FORWARD: 2, Pass.INPUT_GRAD: 0, Pass.WEIGHT_GRAD: 1}[pass_]]
    sums, buffers, behind = accumulator(problem.dtype), [], []
    in_sums = pass_ is Pass.WEIGHT_GRAD and not narrowed and sums != problem.dtype
    reduces = splits > 1 or in_sums
    if workspace_bytes:
        buffers.append(Buffer(WORKSPACE, "uint8", workspace_bytes))
    if reduces:
        buffers.append(Buffer(PARTIALS, sums, splits * elements))
        behind.append(replace(reduce_splits(problem.dtype, elements, splits), overlaps=True))
    written = PARTIALS if reduces else DST
    weight = WORKSPACE if packs else WEIGHT
    operands = (X, GRAD, written) if pass_ is Pass.WEIGHT_GRAD else (SRC, weight, BIAS, written)
    # A step after a packing kernel may start before that has ended: it waits by itself.
    before = [replace(step, overlaps=i > 0) for i, step in enumerate(packs)]
    return Program(
        steps=(*before, replace(main, operands=operands, overlaps=bool(packs)), *behind),
        main_index=len(before),
        buffers=tuple(buffers),
        splits=splits,
        dst_channels_last=dst_channels_last,
        spares=(reduction_source(problem.dtype),) if may_split or pass_ is Pass.WEIGHT_GRAD else (),
    )


def prepared(inner: Program, before: tuple[Step, ...], read: dict[str, Buffer]) -> Program:
    """A program that reads some tensors from buffers that steps before it write, complete with their operands.

    A step that packs the weight in place may start before these have ended: it does not read their results, and
    ends after them.
    """
    names, waits = {name: buffer.name for name, buffer in read.items()}, WEIGHT in read or not before
    steps = [
        replace(
            step,
            operands=tuple(names.get(name, name) for name in step.operands),
            overlaps=step.overlaps or (not waits and step.operands == (WEIGHT, WORKSPACE)),
        )
        for step in inner.steps
    ]
    return replace(
        inner,
        steps=(*before, *steps),
        main_index=len(before) + inner.main_index,
        buffers=(*inner.buffers, *read.values()),
    )


def reading_channels_last(inner: Program, dtype: str, read: dict[str, Transposed]) -> Program:
    """A program that reads some tensors in channels_last, for other layouts: they are transposed before."""
    steps = {name: transposing(dtype, name, how) for name, how in read.items()}
    before = tuple(replace(step, overlaps=i > 0) for i, (step, _) in enumerate(steps.values()))
    buffers = {name: buffer for name, (_, buffer) in steps.items()}
    return _with_spares(prepared(inner, before, buffers), transpose_sources(dtype) if read else ())


def reading_source_channels_last(inner: Program, dtype: str, how: Transposed) -> Program:
    """The same of the source alone, for a main step that waits before it reads the copy."""
    program = writing_source(inner, *transposing(dtype, SRC, how), waits=True)
    return _with_spares(program, transpose_sources(dtype))


def reading_source_halves(inner: Program, how: Transposed, grouped: bool, forward: bool) -> Program:
    """A program whose main step reads a copy in float16 of the float32 source, and may read the source.

    It is written after the packing of the weights. The main step waits before it reads. ``grouped``: for
    `to_halves`. ``forward``: whether the source is the input of a forward pass.
    """
    buffer, scales = Buffer(f"{SRC}_halves", "float16", how.elements), Buffer(HALF_COPIES, "uint8", HALF_COPIES_BYTES)
    sample = replace(sample_magnitudes((how.shape, how.strides)), operands=(SRC, HALF_COPIES), overlaps=True)
    step = to_halves(how, measures=forward, grouped=grouped)
    step = replace(step, operands=(SRC, HALF_COPIES, buffer.name), overlaps=True)
    main = replace(inner.main, operands=(SRC, buffer.name, HALF_COPIES, *inner.main.operands[1:]))
    before, behind = inner.steps[: inner.main_index], inner.steps[inner.main_index + 1 :]
    return replace(
        inner,
        steps=(*before, sample, step, main, *behind),
        main_index=inner.main_index + 2,
        buffers=(*inner.buffers, buffer, scales),
    )


def reading_halves(
    inner: Program, read: dict[str, Transposed], problem: ConvTransposeProblem, layouts: Layouts
) -> Program:
    """A gradient's program that reads copies in float16, channels innermost, of float32 tensors in any layouts.

    An input gradient also copies the weight, when it packs it. Steps for copies that are inexact follow by
    `unless_exact`.
    """
    sampled, units = {name: (how.shape, how.strides) for name, how in read.items()}, {}
    if X in read:
        depth, height, width = problem.axes3
        units = {X: (1, 1, 1), GRAD: (depth.stride, height.stride, width.stride)}
    else:
        weight = problem.weight_shape
        sampled[WEIGHT] = weight, dense_strides(weight, layouts.weight_channels_last)
    before, buffers = [replace(sample_magnitudes(*sampled.values()), operands=(*sampled, HALF_COPIES))], {}
    for which, (name, how) in enumerate(read.items()):
        buffers[name] = buffer = Buffer(f"{name}_halves", "float16", how.elements)
        step = to_halves(how, which, units.get(name), grouped=problem.groups > 1)
        before.append(replace(step, operands=(name, HALF_COPIES, buffer.name), overlaps=True))
    program = prepared(inner, tuple(before), buffers)
    scales = Buffer(HALF_COPIES, "uint8", HALF_COPIES_BYTES)
    return replace(program, buffers=(*program.buffers, scales))


def unless_exact(program: Program, plain: Program) -> Program:
    """A program followed by the steps of one that reads the tensors themselves: they run if copies are inexact."""
    steps = tuple(
        replace(step, source=_guarded(step.source), operands=(*step.operands, HALF_COPIES), overlaps=False)
        for step in plain.steps
    )
    program = _with_spares(program, tuple(map(_guarded, plain.spares)))
    buffers = {buffer.name: buffer for buffer in program.buffers}
    for buffer in plain.buffers:
        buffers[buffer.name] = max(buffer, buffers.get(buffer.name, buffer), key=lambda each: each.bytes)
    return replace(program, steps=(*program.steps, *steps), buffers=tuple(buffers.values()))


def _guarded(source: KernelSource) -> KernelSource:
    return source.with_constants(GUARDED=True)


def writing_source(inner: Program, step: Step, buffer: Buffer, waits: bool = False) -> Program:
    """A program whose source is the ``buffer`` that ``step`` writes, complete with its operands.

    The step comes before the first that reads the source: after the packing of weights, beside which it runs, unless
    that measures pixels. Unless the reader ``waits`` by itself, it is launched after both.
    """
    place = next(i for i, each in enumerate(inner.steps) if SRC in each.operands)
    written = prepared(inner, (), {SRC: buffer})
    reader = replace(written.steps[place], overlaps=waits)
    steps = (*written.steps[:place], replace(step, overlaps=place > 0), reader, *written.steps[place + 1 :])
    return replace(written, steps=steps, main_index=inner.main_index + (place <= inner.main_index))


def transposing(dtype: str, name: str, how: Transposed) -> tuple[Step, Buffer]:
    """The step that transposes a tensor, and the buffer that it writes."""
    buffer = Buffer(f"{name}_channels_last", dtype, how.elements)
    return replace(to_channels_last(dtype, how), operands=(name, buffer.name)), buffer


def writing_channels_last(inner: Program, dtype: str, shape: tuple[int, ...]) -> Program:
    """A program that writes channels_last, for a contiguous result of ``shape``: it is transposed back."""
    program = _written_by(inner, dtype, math.prod(shape), to_contiguous(dtype, shape))
    return _with_spares(program, transpose_sources(dtype))


def _with_spares(program: Program, sources: tuple[KernelSource, ...]) -> Program:
    return replace(program, spares=tuple(dict.fromkeys((*program.spares, *sources))))


def writing_weight_channels_last(inner: Program, problem: ConvTransposeProblem) -> Program:
    """A weight gradient's program that writes channels_last, for the contiguous weight.

    Partial sums are added by the transpose itself, unless there are few elements: then more blocks read them than a
    transpose has.
    """
    shape, dtype = problem.weight_shape, problem.dtype
    inner = _with_spares(inner, (*transpose_sources(dtype), transpose_source(dtype, True)))
    *before, last = inner.steps
    if last.source.kernel != "reduce_splits" or not transpose_reduces(problem, inner.splits):
        return writing_channels_last(inner, dtype, shape)
    back = replace(to_contiguous(dtype, shape, inner.splits), operands=last.operands)
    return replace(inner, steps=(*before, back), dst_channels_last=False)


def writing_frames(inner: Program, frames: ConvTransposeProblem) -> Program:
    """A weight gradient's program for the layer whose `ConvTransposeProblem.of_frames` are ``frames``.

    The weight of ``of_frames`` has its channels innermost.
    """
    if inner.dst_channels_last:
        return replace(inner, dst_channels_last=False)
    shape, dtype = frames.weight_shape, frames.dtype
    back = to_channels_last(dtype, Transposed(shape, dense_strides(shape, False)))
    return _with_spares(_written_by(inner, dtype, frames.elements[1], back), transpose_sources(dtype))


def transpose_reduces(problem: ConvTransposeProblem, splits: int) -> bool:
    """Whether the transpose of a weight gradient also adds its partial sums."""
    pixels = problem.in_channels * problem.out_channels_per_group
    return splits == 1 or transpose_blocks(problem.dtype, problem.taps, pixels) >= MANY_BLOCKS


def _written_by(inner: Program, dtype: str, elements: int, back: Step) -> Program:
    """A program whose result, of ``elements``, is converted by the step ``back``."""
    steps = [
        replace(step, operands=tuple(DST_LAST if name == DST else name for name in step.operands))
        for step in inner.steps
    ]
    return replace(
        inner,
        steps=(*steps, replace(back, operands=(DST_LAST, DST))),
        buffers=(*inner.buffers, Buffer(DST_LAST, dtype, elements)),
        dst_channels_last=False,
    )


def between_transposes(
    inner: Program,
    problem: ConvTransposeProblem,
    pass_: Pass,
    layouts: Layouts,
    padded: ConvTransposeProblem,
    back: bool,
) -> Program:
    """A gradient's program for channels_last tensors, made a program for the call's tensors by transposes around it.

    ``layouts``: of the call's tensors. A weight is read in its own layout. ``padded``: the layer that the program
    computes. It may have more channels: those of each group are padded with zeros, and dropped from the result.
    ``back``: whether an input gradient's result must be transposed. If ``padded`` is in float16, so are the copies of
    tensors in float32 (`reading_halves`), also of tensors in channels_last. These keep their order.
    """
    sides = {
        X: (problem.input_shape, layouts.input, padded.in_channels),
        GRAD: (problem.output_shape, layouts.output, padded.out_channels),
    }
    read = {}
    for name, (shape, strides, channels) in sides.items():
        groups = 1 if channels == shape[1] else problem.groups
        read[name] = Transposed(shape, strides, groups, channels // groups)
    if pass_ is Pass.INPUT_GRAD:
        read = {SRC: read[GRAD]}
    if padded.dtype == problem.dtype:
        program = reading_channels_last(inner, problem.dtype, read)
    else:
        program = reading_halves(inner, read, problem, layouts)
    if pass_ is Pass.INPUT_GRAD:
        return writing_channels_last(program, problem.dtype, problem.input_shape) if back else program
    if padded.weight_shape != problem.weight_shape:
        unpadded = _written_by(program, problem.dtype, padded.elements[1], _without_padding(problem, padded))
        return replace(unpadded, dst_channels_last=problem.channels_last and inner.dst_channels_last)
    if problem.channels_last:
        return program
    return writing_weight_channels_last(program, problem) if inner.dst_channels_last else program


def _without_padding(problem: ConvTransposeProblem, padded: ConvTransposeProblem) -> Step:
    """The step from a weight with padded channels, the output's innermost, to the weight in the problem's layout."""
    groups, inputs, outputs = problem.groups, problem.in_channels_per_group, problem.out_channels_per_group
    of_tap = padded.out_channels_per_group
    of_input = problem.taps * of_tap
    strides = (padded.in_channels_per_group * of_input, of_tap, 0, of_input, 1)
    if problem.channels_last:
        shape, order = (groups, outputs, inputs, problem.taps), (strides[0], 1, 0, of_input, of_tap)
        return to_channels_last(problem.dtype, Transposed(shape, order))
    return to_channels_last(problem.dtype, Transposed((groups, problem.taps, inputs, outputs), strides))
