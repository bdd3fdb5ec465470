"""Times the layout transpose on tensors of many shapes: ``python transposes.py LABEL --csv FILE``; needs a GPU.

The package is the one that Python finds, so that two checkouts are compared by PYTHONPATH. ``--constant NAME=VALUE``
compiles the kernel with another constant.
"""

from __future__ import annotations

import argparse
import csv
import math
from dataclasses import replace
from pathlib import Path

import torch

from polyphase.bench.ceilings import measure
from polyphase.bench.timing import Timer
from polyphase.jit.launcher import Executable
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import dense_strides
from polyphase.program.program import Program
from polyphase.program.step import Step
from polyphase.program.transpose import Transposed, to_channels_last, to_contiguous

#: Activations of layers drawn at random, and weights (input channels, output channels, taps).
SHAPES = [
    (32, 128, 201, 201),
    (16, 150, 19241),
    (16, 75, 19241),
    (1, 512, 21423),
    (1, 512, 10711),
    (64, 256, 6, 24, 24),
    (1, 50, 209, 209),
    (8, 32, 48, 16, 40),
    (5, 128, 262, 262),
    (8, 512, 16, 16),
    (16, 16, 18, 36, 70),
    (512, 512, 3),
    (192, 384, 10, 10),
    (64, 32, 7, 7, 7),
    (1, 128, 71, 71, 95),
    (6, 512, 177, 177),
    (6, 256, 177, 357),
    (32, 96, 338, 338),
    (8, 520, 83, 353),
    (64, 512, 7, 7),
    (16, 48, 100, 100),
    (4, 96, 65, 129),
]


def main() -> None:
    """Measure all shapes, both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("label")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--constant", action="append", default=[])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    constants = {name: int(value) for name, value in (text.split("=") for text in options.constant)}

    device = torch.device("cuda", 0)
    timer = Timer(device)
    copy = measure(timer, ()).bytes_per_second
    new = not options.csv.exists()
    with options.csv.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(
                ["label", "gpu", "torch", "shape", "dtype", "way", "ms", "terabytes_per_second", "of_a_copy"]
            )
        shares = []
        for shape in SHAPES:
            for dtype in options.dtypes.split(","):
                ways = {
                    "to_channels_last": to_channels_last(dtype, Transposed(shape, _five(shape))),
                    "to_contiguous": to_contiguous(dtype, shape),
                }
                for way, step in ways.items():
                    ms = _measure(timer, step, shape, dtype, constants, way)
                    moved = 2 * math.prod(shape) * (4 if dtype == "float32" else 2)
                    shares.append(moved / (1e-3 * ms * copy))
                    row = [options.label, torch.cuda.get_device_name(), torch.__version__, "x".join(map(str, shape))]
                    writer.writerow([*row, dtype, way, f"{ms:.5f}", f"{moved / ms / 1e9:.3f}", f"{shares[-1]:.3f}"])
    mean = math.exp(sum(map(math.log, shares)) / len(shares))
    print(f"{options.label}: {mean:.3f} of the bandwidth of a copy ({copy / 1e12:.2f} TB/s), geometric mean")


def _five(shape: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    batch, channels, *sizes = shape
    return dense_strides((batch, channels, *[1] * (3 - len(sizes)), *sizes), channels_last=False)  # type: ignore[return-value]


def _measure(
    timer: Timer, step: Step, shape: tuple[int, ...], dtype: str, constants: dict[str, int], way: str
) -> float:
    """Milliseconds; the result is checked first."""
    source = step.source
    changed = tuple((name, constants.get(name, value)) for name, value in source.constants)
    step = replace(step, source=replace(source, constants=changed), operands=("src", "dst"))
    device = timer.device
    batch, channels, *sizes = shape
    pixels = math.prod(sizes)
    src = torch.randn(batch, channels, pixels, device=device, dtype=getattr(torch, dtype))
    if way == "to_contiguous":
        src = src.transpose(1, 2).contiguous()
    dst = torch.full_like(src, math.nan)
    program = Program((step,))
    call = Executable(program, DeviceInfo.of(device).arch, 0, {"src": 0, "dst": 1})
    addresses = (src.data_ptr(), dst.data_ptr())
    call(torch.cuda.current_stream().cuda_stream, addresses)
    expected = src.transpose(1, 2).contiguous()
    if not torch.equal(dst.flatten(), expected.flatten()):
        raise AssertionError(f"{shape}, {dtype}, {way}: wrong")
    return timer.measure(lambda: call(torch.cuda.current_stream().cuda_stream, addresses)).ms


if __name__ == "__main__":
    main()
