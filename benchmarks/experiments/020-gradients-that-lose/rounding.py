"""PyTorch's error against float64 in both gradients of layers of few output channels, where TF32 is allowed.

``python rounding.py --csv FILE``; needs a GPU. About 3e-4 where it rounds its operands, below 2e-6 where it does not.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import replace
from pathlib import Path

import torch

from polyphase.bench.contestants import torch_call
from polyphase.bench.operands import make_operands
from polyphase.bench.oracle import sample
from polyphase.bench.random_layers import notation, random_layers
from polyphase.problem import Pass

FEW, MOST_FLOPS, DRAWN = 12, 2e10, 3000


def main() -> None:
    """Measure layers drawn at random, in PyTorch's default and benchmark modes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=49)
    parser.add_argument("--seconds", type=float, default=20, help="no layer is begun after so many")
    options = parser.parse_args()
    drawn = [each.problem for each in random_layers(DRAWN, options.seed, least_seconds=2e-6)]
    layers = [each for each in drawn if each.groups == 1 and each.dims < 3 and each.out_channels < FEW]
    layers = [replace(each, tf32=True, bias=False) for each in layers if each.flops < MOST_FLOPS and each.bytes < 1e9]
    torch.backends.cudnn.allow_tf32, start, device = True, time.monotonic(), torch.device("cuda", 0)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "problem", "pass", "mode", "torch_error"])
        for problem in layers:
            if time.monotonic() - start > options.seconds:
                break
            operands = make_operands(problem, device, 0)
            for pass_ in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
                checked = sample(problem, pass_, operands, 1e9)
                for mode in ("default", "benchmark"):
                    torch.backends.cudnn.benchmark = mode == "benchmark"
                    found = torch_call(problem, pass_, operands)()
                    error = checked.compare(found, found).error
                    row = torch.cuda.get_device_name(), notation(problem), pass_.value, mode, f"{error:.3g}"
                    writer.writerow(row)


if __name__ == "__main__":
    main()
