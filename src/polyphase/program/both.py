"""Both gradients of a layer in a row: a copy of the output's gradient that both programs make is made once."""

from __future__ import annotations

from dataclasses import replace

from polyphase.program.program import Program
from polyphase.program.step import GRAD, SRC, Step


def with_shared_copies(of_input: Program, of_weight: Program) -> tuple[Program, dict[str, str]]:
    """The weight gradient's program without the copies that the input gradient's makes before.

    Also gives the names of these copies' buffers in the second program, with their names in the first.
    """
    made = {_copy(step): step.operands[1] for step in of_input.steps if _copies(step, SRC)}
    again = [step for step in of_weight.steps if _copies(step, GRAD) and _copy(step) in made]
    if not again:
        return of_weight, {}
    first, *others = (step for step in of_weight.steps if step not in again)
    # The first step of a program waits for the one before.
    steps = (replace(first, overlaps=False), *others)
    program = replace(of_weight, steps=steps, main_index=of_weight.main_index - len(again))
    return program, {step.operands[1]: made[_copy(step)] for step in again}


def _copies(step: Step, tensor: str) -> bool:
    """Whether a step writes a copy of ``tensor``, and reads nothing else."""
    return step.source.kernel == "transpose" and step.operands[:1] == (tensor,) and len(step.operands) == 2


def _copy(step: Step) -> Step:
    """A step without the names of its buffers and its place in the program."""
    return replace(step, operands=(), overlaps=False)
