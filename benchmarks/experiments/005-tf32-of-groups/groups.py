"""Where PyTorch computes grouped float32 layers in TF32: its error against float64; ``python groups.py --csv FILE``.

Needs a GPU. TF32 is allowed, as PyTorch allows it to cuDNN by default.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path

import torch
import torch.nn.functional as F

_KINDS = {
    1: (F.conv_transpose1d, (2, 4096)),
    2: (F.conv_transpose2d, (4, 32, 32)),
    3: (F.conv_transpose3d, (2, 8, 16, 16)),
}
_COLUMNS = ["dims", "input", "groups", "in_per_group", "out_per_group", "kernel", "stride"]
_COLUMNS += ["pass", "mode", "error", "tf32", "gpu", "torch", "cudnn"]
_TF32_ERROR = 3e-5  # of the largest value; exact sums stay below, TF32 lies at 3e-4


def main() -> None:
    """Draw layers, compute all passes in both modes, write the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=150)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = True
    draw = random.Random(1127)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for _ in range(options.layers):
            for row in _layer(draw):
                writer.writerow([*row, torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version()])
            file.flush()


def _layer(draw: random.Random):  # type: ignore[no-untyped-def]
    dims = draw.choice([1, 2, 2, 3])
    function, (batch, *sizes) = _KINDS[dims]
    groups = draw.choice([1, 1, 2, 4, 8, 16, 32])
    each, out = draw.choice([4, 8, 16, 24, 32, 48, 64, 96, 128]), draw.choice([4, 8, 16, 24, 32, 48, 64, 96, 128])
    kernel, stride = draw.choice([2, 3, 4, 5, 7]), draw.choice([1, 2, 2, 3])
    if groups * max(each, out) > 1024:
        return
    batch = draw.choice([1, batch])
    x = torch.randn(batch, groups * each, *sizes, device="cuda")
    w = torch.randn(groups * each, out, *[kernel] * dims, device="cuda")
    wide = [t.double().requires_grad_() for t in (x, w)]
    y = function(*wide, stride=stride, groups=groups)
    grad = torch.randn_like(y, dtype=torch.float32)
    right = [y.detach(), *torch.autograd.grad(y, wide, grad.double())]
    for mode in ("default", "benchmark"):
        torch.backends.cudnn.benchmark = mode == "benchmark"
        narrow = [t.clone().requires_grad_() for t in (x, w)]
        y = function(*narrow, stride=stride, groups=groups)
        found = [y.detach(), *torch.autograd.grad(y, narrow, grad)]
        for pass_, a, b in zip(("forward", "input_grad", "weight_grad"), found, right):
            error = float((a.double() - b).norm() / b.norm())
            size = "x".join(map(str, x.shape))
            yield [dims, size, groups, each, out, kernel, stride, pass_, mode, f"{error:.3g}", error > _TF32_ERROR]


if __name__ == "__main__":
    main()
