"""A program with an epilogue: the operations go into the step that narrows, and their operands to it.

That is the step that adds the bias, or the split-K reduction if there are splits, so that they are computed once.
If that step writes channels_last for a result that is transposed after it, a residual is transposed before.
"""

from __future__ import annotations

from dataclasses import replace

from polyphase.problem.epilogue import Epilogue
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.problem.problem import ConvTransposeProblem
from polyphase.program.program import DST_LAST, Program, transposing
from polyphase.program.split_k import reduce_splits, reduction_source
from polyphase.program.step import BIAS, Step
from polyphase.program.transpose import Transposed


def with_epilogue(
    program: Program, problem: ConvTransposeProblem, computed: ConvTransposeProblem, layouts: Layouts
) -> Program:
    """Adds the epilogue of ``problem`` to a forward program of ``computed``, the same layer without it.

    ``layouts``: of ``problem``'s tensors.
    """
    if not problem.epilogue:
        return program
    names = {name: name for name in problem.epilogue.named_operands}
    last = any(buffer.name == DST_LAST for buffer in program.buffers)
    steps, main_index, buffers = list(program.steps), program.main_index, list(program.buffers)
    of_kernel = _of_kernel(problem, computed)
    reduced = replace(of_kernel, channel_parts=1)  # for a reduction, whose channels are the layer's
    if program.splits > 1:
        behind = next(i for i in range(main_index + 1, len(steps)) if steps[i].source.kernel == "reduce_splits")
        strides = dense_strides(problem.output_shape, True) if last else layouts.output
        elements = problem.elements[2]
        reduction = reduce_splits(problem.dtype, elements, program.splits, reduced, problem.out_channels, strides)
        steps[behind] = replace(reduction, operands=steps[behind].operands, overlaps=steps[behind].overlaps)
        epilogue, place = reduced, len(steps[behind].operands) - 1  # before the result
    else:
        behind = max(i for i, step in enumerate(steps) if BIAS in step.operands)
        epilogue, place = of_kernel, steps[behind].operands.index(BIAS) + 1
    before: list[Step] = []
    if last:
        for name in problem.epilogue.residuals:
            step, buffer = transposing(problem.dtype, name, Transposed(problem.output_shape, layouts.output))
            names[name] = buffer.name
            before.append(step)
            buffers.append(buffer)
    steps[behind] = steps[behind].computing(names.values(), place, epilogue=epilogue)
    spares = (  # at another size sums may be split: then their reduction computes the epilogue
        reduction_source(problem.dtype, reduced) if spare.kernel == "reduce_splits" else spare
        for spare in program.spares
    )
    return replace(
        program,
        steps=(*before, *steps),
        main_index=len(before) + main_index,
        buffers=tuple(buffers),
        spares=tuple(spares),
    )


def _of_kernel(problem: ConvTransposeProblem, computed: ConvTransposeProblem) -> Epilogue:
    """The epilogue, and the mapping of a kernel's channels to the layer's."""
    parts = computed.out_channels // problem.out_channels
    inner = parts > 1 and problem.channels_last
    channels = problem.out_channels if inner or problem.epilogue.per_sample else 0
    return replace(problem.epilogue, channels=channels, channel_parts=parts, channels_inner=inner)
