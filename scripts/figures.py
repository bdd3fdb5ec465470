"""Draws the figures of the docs, as SVG.

python scripts/figures.py            # docs/figures/*.svg
python scripts/figures.py --check    # exit status 1 where a figure is not what this script draws
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
PHASES = ("#2f6fbb", "#d9822b", "#3a9a5b", "#b3466b")
PALE = ("#dbe8f6", "#fbe7d1", "#dcf0e2", "#f4dde5")
INK, GREY = "#222222", "#8a8a8a"


class Drawing:
    """Shapes of an SVG on white, so that it is read on dark pages too; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            'font-family="system-ui, sans-serif">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none", line: str = GREY, **more: str
    ) -> None:
        """A rectangle from its upper left corner."""
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}"{extra}/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, color: str = GREY, width: float = 1.5) -> None:
        """A straight line."""
        self._shapes.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{color}" stroke-width="{width:g}"/>'
        )

    def text(self, x: float, y: float, words: str, color: str = INK, size: int = 14, anchor: str = "middle") -> None:
        """Words on a line of text."""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{words}</text>'
        )

    def __str__(self) -> str:
        return "\n".join([*self._shapes, "</svg>", ""])


def phases() -> Drawing:
    """Which taps and inputs make each output of a 1-D layer with kernel 4, stride 2, padding 1."""
    drawing = Drawing(760, 292, "Phases of a transposed convolution with kernel 4, stride 2, padding 1")
    inputs, cell, left = 5, 44, 150
    step = 2 * cell
    drawing.text(20, 52, "input x", anchor="start")
    drawing.text(20, 202, "output y", anchor="start")
    for i in range(inputs):
        drawing.box(left + i * step + cell / 2, 28, cell, 38, "#f2f2f2")
        drawing.text(left + i * step + cell, 52, f"x{i}")
    for o in range(2 * inputs):
        phase, x = o % 2, left + o * cell
        for tap in range(4):
            i, rest = divmod(o + 1 - tap, 2)
            if rest or not 0 <= i < inputs:
                continue
            top = left + i * step + cell
            drawing.line(top, 66, x + cell / 2, 178, PHASES[phase])
            to, near = x + cell / 2, 0.4
            beside = 7 if to > top else -7
            drawing.text(top + near * (to - top) + beside, 66 + near * 112, str(tap), PHASES[phase], 12)
        drawing.box(x + 1, 178, cell - 2, 38, PALE[phase], PHASES[phase])
        drawing.text(x + cell / 2, 202, f"y{o}")
    for phase, words in enumerate(("even outputs: taps 1 and 3", "odd outputs: taps 0 and 2")):
        x = left + 295 * phase
        drawing.box(x, 238, 16, 16, PALE[phase], PHASES[phase])
        drawing.text(x + 24, 251, f"phase {phase}, {words}", PHASES[phase], anchor="start")
    drawing.text(left, 280, "Each phase is a correlation of stride 1 with its own taps.", GREY, 13, "start")
    return drawing


def tile() -> Drawing:
    """A thread block's tile of a 2-D layer with kernel 4, stride 2, padding 1: one window of x, four phases of y."""
    drawing = Drawing(760, 330, "The tile of a thread block: one window of the input, four phases of the output")
    side, rows, columns = 26, 6, 8
    left, top = 30, 60
    drawing.text(left, 34, "window of x in shared memory", anchor="start")
    for row in range(rows):
        for column in range(columns):
            drawing.box(left + column * side, top + row * side, side, side, "#f7f7f7", "#c8c8c8")
    inner = ((rows - 2) * side, (columns - 2) * side)
    for (row, column), phase in (((0, 0), 0), ((1, 1), 3)):  # one tap of each
        drawing.box(
            left + column * side + phase, top + row * side + 1, inner[1], inner[0], line=PHASES[phase], stroke_width="3"
        )
    drawing.text(left, top + rows * side + 24, "A tap is a shifted start address in the window:", GREY, 13, "start")
    drawing.text(left, top + rows * side + 42, "nothing is unfolded (no im2col).", GREY, 13, "start")
    drawing.text(left, top + rows * side + 66, "one tap of phase (0, 0)", PHASES[0], 13, "start")
    drawing.text(left, top + rows * side + 84, "one tap of phase (1, 1)", PHASES[3], 13, "start")

    middle = left + columns * side + 20
    drawing.text(middle + 62, top + 50, "for each phase", size=13)
    drawing.text(middle + 62, top + 70, "and tap: wgmma", size=13)
    drawing.line(middle, top + 84, middle + 118, top + 84, INK)
    drawing.line(middle + 110, top + 78, middle + 118, top + 84, INK)
    drawing.line(middle + 110, top + 90, middle + 118, top + 84, INK)

    small, right = 15, middle + 150
    drawing.text(right, 34, "tile of y, written once, in whole lines", anchor="start")
    for row in range(2 * (rows - 2)):
        for column in range(2 * (columns - 2)):
            phase = 2 * (row % 2) + column % 2
            drawing.box(right + column * 1.6 * small, top + row * 1.6 * small, 1.6 * small, 1.6 * small, PALE[phase],
                        PHASES[phase])  # fmt: skip
    for phase in range(4):
        x, y = right + 150 * (phase % 2), top + 16 * 0.8 * small + 28 + 24 * (phase // 2)
        drawing.box(x, y - 12, 14, 14, PALE[phase], PHASES[phase])
        drawing.text(x + 22, y, f"phase ({phase // 2}, {phase % 2})", PHASES[phase], 13, "start")
    return drawing


if __name__ == "__main__":
    sys.exit(
        write_or_check(
            "the figures of the docs", {FOLDER / f"{draw.__name__}.svg": str(draw()) for draw in (phases, tile)}
        )
    )
