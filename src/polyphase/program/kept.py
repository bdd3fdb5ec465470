"""A program whose packed weights are kept between calls: the packing steps, and the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyphase.program.program import Program
from polyphase.program.step import WEIGHT, WORKSPACE, Step


@dataclass(frozen=True)
class KeptProgram:
    """``pack`` fills the workspace once; ``program`` reads it, its first ``header_bytes`` zeroed before every call.

    (They are counters of the tile scheduler, which packing sets to zero.)
    """

    pack: Step
    program: Program
    header_bytes: int


def kept_program(program: Program) -> KeptProgram | None:
    """The program in two parts; None if nothing is packed, or if packing depends on the pixels."""
    packing = [step for step in program.steps if WORKSPACE in step.operands and step is not program.main]
    if len(packing) != 1 or packing[0].operands != (WEIGHT, WORKSPACE):
        return None
    (pack,) = packing
    header = dict(pack.source.constants).get("COUNTER_BYTES", 0)
    assert isinstance(header, int)
    others = [step for step in program.steps if step is not pack]
    steps = tuple(replace(step, overlaps=False) for step in others)  # the steps that they would wait for are not there
    rest = replace(program, steps=steps, main_index=others.index(program.main))
    return KeptProgram(replace(pack, overlaps=False), rest, header)
