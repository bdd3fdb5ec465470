"""Tables in plain text, so that printing a report needs nothing but Python."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_GAP = "  "
_WIDTH = 160


def text_table(title: str, rows: Sequence[Sequence[str]], note: str) -> str:
    """A title, rows of which the first is the head, and a note below, all wrapped to 160 columns.

    The columns that are longer than an even share of the width give way to the others.
    """
    widths = _widths([max(map(len, column)) for column in zip(*rows)], _WIDTH - 2 - len(_GAP) * (len(rows[0]) - 1))
    lines = [title]
    for number, row in enumerate(rows):
        cells = [textwrap.wrap(cell, wide) or [""] for cell, wide in zip(row, widths)]
        for index in range(max(map(len, cells))):
            parts = [(cell[index] if index < len(cell) else "").ljust(wide) for cell, wide in zip(cells, widths)]
            lines.append(f"  {_GAP.join(parts)}".rstrip())
        if number == 0:
            lines.append(f"  {_GAP.join('─' * wide for wide in widths)}")
    for line in note.splitlines():
        lines += textwrap.wrap(line, _WIDTH)
    return "\n".join(lines)


def _widths(wanted: list[int], room: int) -> list[int]:
    """What each column gets of ``room``: what it wants, or an equal share of what the narrower ones leave."""
    given = [0] * len(wanted)
    for left, index in zip(range(len(wanted), 0, -1), sorted(range(len(wanted)), key=wanted.__getitem__)):
        given[index] = min(wanted[index], max(1, room // left))
        room -= given[index]
    return given
