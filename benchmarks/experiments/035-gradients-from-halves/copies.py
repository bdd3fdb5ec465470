"""Times checked copies in float16, and PyTorch's copy: ``python copies.py --csv FILE``. Needs a GPU.

Each kernel alone, in microseconds by events, after 256 MB were written: the samples of a tensor, a copy that is
checked by channels, the same for taps of a stride of two, one that is checked by pixels; then all of them for a tensor
in channels_last. Copies are compared with PyTorch's conversion first.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import replace

import torch

from polyphase.jit.launcher import Executable
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import dense_strides
from polyphase.program.program import Program
from polyphase.program.step import Step
from polyphase.program.transpose import HALF_COPIES_BYTES, Transposed, sample_magnitudes, to_halves

SHAPES = (
    *((8, 64, 1024, 1024), (8, 64, 1026, 1026), (8, 48, 64, 64, 64), (8, 64, 256, 256), (16, 512, 256)),
    *((512, 256, 28, 28), (128, 128, 32, 32), (4, 1024, 117, 117), (128, 1024, 4, 4), (16, 512, 64, 64)),
    (8, 24, 200, 200),
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


def times(shape: tuple[int, ...], last: bool, device: DeviceInfo, flushed: torch.Tensor) -> dict[str, float]:
    """The times of a shape, by kernel; ``last``: in channels_last."""
    x = torch.randn((shape[0], *shape[2:], shape[1]) if last else shape, device="cuda")
    x = x.movedim(-1, 1) if last else x
    half = torch.empty((shape[0], *shape[2:], shape[1]), dtype=torch.float16, device="cuda")
    copies = torch.zeros(HALF_COPIES_BYTES, dtype=torch.uint8, device="cuda")
    places = {"x": 0, "half": 1, "half_copies": 2}
    addresses = [x.data_ptr(), half.data_ptr(), copies.data_ptr()]
    stream, strides = torch.cuda.current_stream().cuda_stream, dense_strides(shape, last)

    def run(step: Step, *operands: str) -> Callable[[], None]:
        executable = Executable(Program((replace(step, operands=operands),)), device.arch, 0, places)
        executable(stream, addresses)
        return lambda: executable(stream, addresses)

    found = {"samples": microseconds(run(sample_magnitudes((shape, strides)), "x", "half_copies"), flushed)}
    for way, by_channels in (("by channels", (1, 1, 1)), ("by taps", (2, 2, 2)), ("by pixels", None)):
        half.fill_(float("nan"))
        call = run(to_halves(Transposed(shape, strides), 0, by_channels), "x", "half_copies", "half")
        scale = copies.view(torch.float32)[1]
        assert torch.equal(half, (x * scale).half().movedim(1, -1)), (shape, way)
        assert copies.view(torch.int32)[0] == 0
        found[way] = microseconds(call, flushed)
    like = torch.empty_like(x, dtype=torch.float16)
    found["torch"] = microseconds(lambda: like.copy_(x), flushed)
    return found


def main() -> None:
    """Prints and writes the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    path = parser.parse_args().csv
    device = DeviceInfo.of(torch.device("cuda", 0))
    flushed = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    rows = []
    for shape in SHAPES:
        found = times(shape, False, device, flushed)
        found |= {f"{way}, channels_last": each for way, each in times(shape, True, device, flushed).items()}
        print(shape, *(f"{way} {each:.1f}" for way, each in found.items()), flush=True)
        rows += [(shape, way, each) for way, each in found.items()]
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("gpu", "torch", "shape", "kernel", "us"))
        for shape, way, found in rows:
            gpu = torch.cuda.get_device_name(), torch.__version__
            out.writerow((*gpu, "x".join(map(str, shape)), way, f"{found:.1f}"))


if __name__ == "__main__":
    main()
