"""A program with a prologue: the operations go into the steps that read the input, or into a step before them.

A step before serves every kernel: it writes a tensor of the input's strides, and costs a read and a write of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from polyphase.jit.source import KernelSource
from polyphase.problem import DTYPE_BYTES
from polyphase.problem.epilogue import Epilogue, of_input
from polyphase.problem.layouts import Layouts, extent, five
from polyphase.problem.problem import ConvTransposeProblem
from polyphase.program.params import params_of
from polyphase.program.program import Buffer, Program, writing_source
from polyphase.program.step import BIAS, SRC, Step, plain_step

_THREADS = 256
_AT_ONCE = {2: 2}  # vectors of a thread, by the bytes of an element; 1 for others
_BEHIND = f"{SRC}_behind_prologue"


def is_transposed(program: Program) -> bool:
    """Whether only transposes read the input: these compute a prologue as they write."""
    return {step.source.kernel for step in program.steps if SRC in step.operands} == {"transpose"}


def within_kernels(program: Program, prologue: Epilogue) -> Program:
    """The program whose kernels that read the input (multiply, measure, transpose) compute the prologue as they do."""
    steps = (_reading(step, prologue) if SRC in step.operands else step for step in program.steps)
    return replace(program, steps=tuple(steps))


def _reading(step: Step, prologue: Epilogue) -> Step:
    place = step.operands.index(BIAS if BIAS in step.operands else SRC) + 1
    step = step.computing(map(of_input, prologue.named_operands), place, prologue=prologue)
    maps = tuple(replace(each, tf32=False) for each in step.tensor_maps)  # rounded after the operations
    return replace(step, tensor_maps=maps)


def in_a_step(program: Program, problem: ConvTransposeProblem, layouts: Layouts) -> Program:
    """The program with a step that computes the prologue; ``layouts``: of ``problem``'s tensors."""
    names = map(of_input, problem.prologue.named_operands)
    step = replace(apply_step(problem, layouts), operands=(SRC, *names, _BEHIND))
    return writing_source(program, step, Buffer(_BEHIND, problem.dtype, extent(problem.input_shape, layouts.input)))


def apply_step(problem: ConvTransposeProblem, layouts: Layouts, at_once: int | None = None) -> Step:
    """The step that computes a prologue; ``at_once``: vectors of a thread, or None for the default."""
    shape, strides, size = five(problem.input_shape), layouts.input, DTYPE_BYTES[problem.dtype]
    at_once = at_once or _AT_ONCE.get(size, 1)
    order = sorted(range(5), key=lambda i: (shape[i] == 1, strides[i]))  # in memory order, innermost first
    elements, dense, run, count = math.prod(shape), True, 1, 1
    for i in order:
        dense = dense and (shape[i] == 1 or strides[i] == count)
        run = count if i == 1 else run
        count *= shape[i]
    vector = 16 // size if dense and layouts.aligned else 1
    vector = vector if elements % vector == 0 else 1
    constants = (
        ("THREADS", _THREADS),
        ("VECTOR", vector),
        ("AT_ONCE", at_once),
        ("DENSE", dense),
        ("ONE_CHANNEL", run % vector == 0),
        ("MIN_BLOCKS", 1),
    )
    tile = _THREADS * vector * at_once
    wide = elements + tile >= 2**31
    source = KernelSource("apply_prologue", problem.dtype, wide, constants, folder="steps", prologue=problem.prologue)
    params = params_of(source).pack(
        elements=elements,
        run=run if shape[1] > 1 else 1,
        channels=shape[1],
        stride=[strides[i] for i in order],
        size=[shape[i] for i in order],
    )
    return plain_step(source, math.ceil(elements / tile), _THREADS, params)
