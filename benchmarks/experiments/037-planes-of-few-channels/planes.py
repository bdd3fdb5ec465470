"""Times the step that writes planes of padded rows: ``python planes.py --csv FILE``. Needs a GPU.

For input gradients of layers of few output channels, in microseconds by events, after 256 MB were written.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from functools import partial

import torch

from polyphase.bench.layers import parse_layer
from polyphase.jit.launcher import Executable
from polyphase.problem import DTYPE_BYTES, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.planes import SRC_PLANES, Planes, write_planes
from polyphase.program.program import Program
from polyphase.schedules.tap_gemm.product import product_of
from polyphase.schedules.tap_gemm.runs import runs_of

LAYERS = (
    "8x56x270x480 -> 1, k=9, s=4, p=4, op=3",
    "8x56x270x480 -> 1, k=8, s=4, p=2",
    "8x56x270x480 -> 2, k=9, s=4, p=4",
    "8x56x270x480 -> 4, k=7, s=3, p=2",
    "8x64x256x256 -> 3, k=4, s=2, p=1",
    "128x128x32x32 -> 3, k=4, s=2, p=1",
    "64x384x34x138 -> 2, k=4, p=2",
    "64x768x7x7x7 -> 4, k=5, p=2",
    "4x768x46x46x46 -> 3, k=4, s=2, p=1",
    "32x512x7596 -> 1, k=4, s=2, p=1",
    "16x192x199x199 -> 12, k=3, s=3",
    "32x256x160x160 -> 24, k=5, s=2, p=2, op=1",
    "16x64x60x60 -> 48, k=4, s=2, p=1",
)
REPETITIONS = 12


def microseconds(call: Callable[[], object], flushed: torch.Tensor) -> float:
    """The median."""
    found = []
    for _ in range(REPETITIONS):
        flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return sorted(found)[REPETITIONS // 2]


def planes_of(text: str, dtype: str) -> Planes:
    """The planes of a layer's input gradient, for tap groups of 64 bytes."""
    problem = parse_layer(f"{text}, {dtype}, tf32")
    product = product_of(problem, Pass.INPUT_GRAD, Layouts.dense(problem))
    runs = runs_of(product, 64 // DTYPE_BYTES[dtype])
    assert runs is not None
    return runs.planes


def main() -> None:
    """Prints and writes the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    path = parser.parse_args().csv
    device = DeviceInfo.of(torch.device("cuda", 0))
    flushed = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    rows = []
    for text in LAYERS:
        for dtype in ("float32", "bfloat16"):
            how, kind = planes_of(text, dtype), getattr(torch, dtype)
            src = torch.randn(how.shape, device="cuda").to(kind)
            dst = torch.empty(how.elements, dtype=kind, device="cuda")
            program = Program((write_planes(dtype, how),))
            executable = Executable(program, device.arch, 0, {"src": 0, SRC_PLANES: 1})
            stream, addresses = torch.cuda.current_stream().cuda_stream, [src.data_ptr(), dst.data_ptr()]

            call = partial(executable, stream, addresses)
            call()
            moved = (src.numel() + dst.numel()) * src.element_size()
            found = microseconds(call, flushed)
            rows.append((torch.cuda.get_device_name(), torch.__version__, text, dtype, how.channels, how.positions))
            rows[-1] += (f"{moved / 1e6:.1f}", f"{found:.1f}")
            print(*rows[-1][2:], f"{moved / found / 1e6:.2f} TB/s", flush=True)
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("gpu", "torch", "layer", "dtype", "channels", "positions", "megabytes", "us"))
        out.writerows(rows)


if __name__ == "__main__":
    main()
