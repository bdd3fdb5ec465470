"""Draws README's picture from a record: how many times as fast as PyTorch each layer is.

    python benchmarks/picture.py            # writes benchmarks/results/h200-speedup.svg
    python benchmarks/picture.py --check    # writes nothing: exit status 1 where the picture is another

All layers of the record are in it, the slowest too. Text is left to the reader's browser, so the file is small and the
same on every machine.
"""

from __future__ import annotations

import argparse
import html
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from polyphase.bench.records import Record, geometric_mean, read_csv

RESULTS = Path(__file__).parent / "results"
RECORD, PICTURE = RESULTS / "h200.csv", RESULTS / "h200-speedup.svg"

WIDTH, MARGIN, ROW, BAR = 880, 20, 21, 14
NAMES, BARS, TOP = 470, 480, 52  # where names end, where bars begin, where the first row lies
INK, SOFT, OURS, PYTORCH = "#1f2328", "#59636e", "#0969da", "#afb8c1"
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def text(x: float, y: float, words: str, size: int, fill: str = INK, anchor: str = "start", weight: int = 400) -> str:
    """One line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{html.escape(words)}</text>"
    )


def drawn(records: list[Record]) -> str:
    """The picture of forward passes in float32, the most accelerated first."""
    layers = [each for each in records if (each.pass_name, each.dtype, each.layout) == ("forward", "float32", "nchw")]
    layers.sort(key=lambda record: -(record.speedup or 0))
    speedups = [record.speedup or 0.0 for record in layers]
    mean = geometric_mean(speedups)
    slower = sum(speedup < 1 for speedup in speedups)
    height = TOP + ROW * len(layers) + MARGIN
    unit = (WIDTH - MARGIN - 44 - BARS) / max(speedups)
    card = layers[0].gpu.removeprefix("NVIDIA ")
    against = f"PyTorch {layers[0].torch.partition('+')[0]}, cuDNN {layers[0].cudnn.rpartition('.')[0]}"
    middle = TOP + ROW * len(layers) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" role="img" aria-label="polyphase is {mean:.1f} times as fast as PyTorch">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        text(MARGIN, middle - 50, f"{mean:.1f}×", 84, OURS, weight=700),
        text(MARGIN, middle - 12, "as fast as PyTorch", 21, weight=600),
        text(MARGIN, middle + 16, f"geometric mean of {len(layers)} layers,", 14, SOFT),
        text(MARGIN, middle + 36, f"{slower or 'none'} of them slower", 14, SOFT),
        text(MARGIN, middle + 66, f"forward, float32 (TF32 for both), {card}", 12, SOFT),
        text(MARGIN, middle + 84, against, 12, SOFT),
        f'<rect x="{BARS}" y="{TOP - 28}" width="12" height="12" fill="{PYTORCH}"/>',
        text(BARS + 18, TOP - 18, "PyTorch = 1", 12, SOFT),
        f'<rect x="{BARS + 108}" y="{TOP - 28}" width="12" height="12" fill="{OURS}"/>',
        text(BARS + 126, TOP - 18, "polyphase, times as fast", 12, SOFT),
    ]
    for index, (record, speedup) in enumerate(zip(layers, speedups)):
        y = TOP + ROW * index
        parts += [
            text(NAMES, y + BAR - 3, record.layer, 12, anchor="end"),
            f'<rect x="{BARS}" y="{y}" width="{speedup * unit:.1f}" height="{BAR}" rx="2" fill="{OURS}"/>',
            f'<rect x="{BARS}" y="{y}" width="{unit:.1f}" height="{BAR}" rx="2" fill="{PYTORCH}"/>',
            text(BARS + max(speedup, 1) * unit + 6, y + BAR - 3, f"{speedup:.1f}×", 12, weight=600),
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Writes the picture, or compares it."""
    parser = argparse.ArgumentParser(description="Draw README's picture.")
    parser.add_argument("--check", action="store_true", help="write nothing: exit status 1 where it differs")
    now = drawn(read_csv(RECORD))
    if parser.parse_args().check:
        same = PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == now
        print("the picture is that of the record" if same else f"{PICTURE.name} differs from the record")
        return not same
    PICTURE.write_text(now, encoding="utf-8")
    print(f"written to {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
