"""Times candidates for layers of few positions and large weights, as 010-long-kernels does for its layers.

python benchmarks/experiments/012-few-positions/few.py --csv few.csv
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "010-long-kernels"))
long = importlib.import_module("long")  # the script of that folder
long.LAYERS = {
    "1x384x2x2x2 -> 192, k=8, s=4, p=2": "w",
    "1x512x4x4 -> 256, k=16, s=8, p=4": "w",
    "1x256x3x3x3 -> 128, k=7, s=3, p=2": "w",
    "1x1024x4x4 -> 512, k=4, s=2, p=1": "w",
    "1x2048x8x6 -> 256, k=4, s=2, p=1": "w",
    "2x192x4x4x4 -> 96, k=6, s=3": "w",
}
long.SHOWN = {"direct_wgrad_gemm": 4}

if __name__ == "__main__":
    long.main()
