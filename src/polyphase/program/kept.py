"""A program whose packed weights are kept from one call to the next: what packs, and what is left of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyphase.program.program import Program
from polyphase.program.step import WEIGHT, WORKSPACE, Step


@dataclass(frozen=True)
class KeptProgram:
    """``pack`` fills the workspace once; ``program`` reads it, where its first ``header_bytes`` are zero at every call.

    (They are counters of the tile scheduler, which packing sets to zero.)
    """

    pack: Step
    program: Program
    header_bytes: int


def kept_program(program: Program) -> KeptProgram | None:
    """The program in two parts; None where nothing is packed, or where how it is packed depends on the pixels."""
    packing = [step for step in program.steps if WORKSPACE in step.operands and step is not program.main]
    if len(packing) != 1 or packing[0].operands != (WEIGHT, WORKSPACE):
        return None
    (pack,) = packing
    header = dict(pack.source.constants).get("COUNTER_BYTES", 0)
    assert isinstance(header, int)
    others = [step for step in program.steps if step is not pack]
    steps = tuple(replace(step, overlaps=False) for step in others)  # what they would wait for is not there
    rest = replace(program, steps=steps, main_index=others.index(program.main))
    return KeptProgram(replace(pack, overlaps=False), rest, header)
