"""What NVRTC spends its time on, and whether one of its flags saves some: kernels of layers drawn at random.

python compile_time.py --csv compile_time.csv

A row for each kernel and flag: seconds of a core, the least of three; the compiler's own table of its phases, in
milliseconds of a wall clock; whether the machine code is that of no flag.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from pathlib import Path

from cuda.bindings import nvrtc

from polyphase.bench.plans import variants
from polyphase.bench.random_layers import random_layers
from polyphase.jit.compiler import cuda_core
from polyphase.jit.cubin import code_digest
from polyphase.jit.source import KernelSource
from polyphase.plan.planner import plan
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo

ARCH = "sm_90a"
FLAGS = ("", "-minimal", "--split-compile=0", "-pch")
LAYERS, SEED = 12, 7


def compiled(text: str, flag: str) -> tuple[float, dict[str, float], str]:
    with tempfile.TemporaryDirectory() as folder:
        phases = Path(folder) / "phases.csv"
        options = [f"-arch={ARCH}", "-std=c++17", "--no-cache", "--ptxas-options=-v", f"--time={phases}", flag]
        given = [option.encode() for option in options if option]
        started = time.process_time()
        _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        seconds = time.process_time() - started
        if status:
            raise RuntimeError(f"{flag}: {status!r}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        binary = b" " * size
        nvrtc.nvrtcGetCUBIN(program, binary)
        rows = [line.split(",") for line in phases.read_text(encoding="utf-8").splitlines()[1:]]
        return seconds, {row[1].strip(): float(row[2]) for row in rows}, code_digest(binary)


def sources() -> dict[str, KernelSource]:
    """A kernel of each name, as a first call of a layer compiles it."""
    device, found = DeviceInfo.for_arch(ARCH), {}
    for index, layer in enumerate(random_layers(LAYERS, SEED)):
        combinations = variants(layer.problem, ["float32", "bfloat16"], [False, True])
        problem = combinations[index % len(combinations)]
        for pass_ in Pass:
            program = plan(problem, pass_, device, by_prediction=True).program
            assert program is not None
            for step in program.steps:
                found.setdefault(step.source.kernel, step.one_way or step.source)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", type=Path, required=True)
    cuda_core()
    compiled('extern "C" __global__ void nothing() {}', "")  # the library is loaded by the first
    rows = []
    for kernel, source in sorted(sources().items()):
        for flag in FLAGS:
            seconds, phases, digest = min((compiled(source.text, flag) for _ in range(3)), key=lambda each: each[0])
            if not flag:
                plain = digest
            front, optimizer, assembler = phases.values()
            rows.append(
                (kernel, len(source.text), flag, round(seconds, 3), front, optimizer, assembler, digest == plain)
            )
            print(*rows[-1], flush=True)
    with parser.parse_args().csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("kernel", "characters", "flag", "core_s", "front_end_ms", "optimizer_ms", "assembler_ms", "equal")
        )
        writer.writerows(rows)


if __name__ == "__main__":
    main()
