"""What a kernel that starts early reads: nothing that an earlier step writes counts as constant.

With programmatic dependent launch a kernel waits for the steps before it by an instruction. The assembler moves reads
of constants (``ld.global.nc``, what NVRTC makes of ``const __restrict__`` parameters) above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kernel_harness import H200
from polyphase.bench.layers import parse_layer
from polyphase.jit.source import KernelSource
from polyphase.plan import planner
from polyphase.problem import Pass
from polyphase.program.step import Step

LAYERS = (
    "2x64x20x20 -> 48, k=4, s=2, p=1, bias, tf32",
    "2x64x20x20 -> 48, k=3, p=1, tf32",
    "2x64x20x20 -> 48, k=2, s=2, tf32",
    "2x64x20x20 -> 48, k=4, s=2, p=1",
    "2x64x20x20 -> 48, k=3, p=1, g=4, bfloat16",
    "2x64x20x20 -> 48, k=3, p=1, g=16",
    "2x256x20x20 -> 128, k=4, s=2, p=1, tf32, channels_last",
    "2x64x20x20 -> 3, k=4, s=2, p=1, bfloat16",
    "2x64x400 -> 1, k=64, s=16, tf32",
    "16x32x128x256 -> 64, k=3x5, s=2x3, p=1x2, d=2x1, g=4, tf32",
)


def waiting() -> Iterator[tuple[Step, tuple[int, ...]]]:
    """Steps that start early, each kernel once, and which operands earlier steps write."""
    seen = set()
    for text in LAYERS:
        problem = parse_layer(text)
        for pass_ in Pass:
            for _, program in planner.programs(problem, pass_, H200):
                names = {buffer.name for buffer in program.buffers}
                for step in program.steps:
                    read = tuple(i for i, name in enumerate(step.operands) if name in names)
                    kind = step.source.kernel, read, step.source.variant
                    if step.overlaps and read and kind not in seen:
                        seen.add(kind)
                        yield step, read


def read_as_constants(ptx: str, kernel: str) -> set[int]:
    """The parameters from which ``ld.global.nc`` reads."""
    lines = [line.strip() for line in ptx.splitlines()]
    of: dict[str, set[int]] = {}
    for line in lines:
        if found := re.match(rf"ld\.param\.u64\s+(%rd\d+), \[{kernel}_param_(\d+)\];", line):
            of.setdefault(found[1], set()).add(int(found[2]))
    moves = [re.findall(r"%rd\d+", line) for line in lines if re.match(r"(cvta|mov|add|sub|mad|selp|max|min)\.", line)]
    changed = True
    while changed:
        changed = False
        for target, *sources in (each for each in moves if len(each) > 1):
            more = set().union(*(of.get(source, set()) for source in sources)) - of.get(target, set())
            if more:
                of.setdefault(target, set()).update(more)
                changed = True
    found = (re.search(r"\[(%rd\d+)", line) for line in lines if line.split(" ")[0].startswith("ld.global.nc"))
    return set().union(*(of.get(each[1], set()) for each in found if each))


@pytest.mark.slow
@pytest.mark.nvrtc
def test_what_an_earlier_step_writes_is_no_constant() -> None:
    kernels, copies = set(), False
    for step, read in waiting():
        kernels.add(step.source.kernel)
        copies = copies or bool(dict(step.source.constants).get("SRC_WRITTEN"))
        constant = read_as_constants(ptx_of(step.source), step.source.kernel)
        assert not constant & {*read}, (step.source.kernel, [step.operands[i] for i in read])
    assert kernels >= {"implicit_gemm", "window_dgrad_tma", "phase_gemm_pixels", "grouped_gemm", "reduce_splits"}
    assert copies  # of a source, which a step transposes


@pytest.mark.nvrtc
def test_a_constant_would_be_found() -> None:
    """Of a kernel whose parameter is declared so."""
    step, read = next(each for each in waiting() if each[0].source.kernel == "window_dgrad_tma" and 2 in each[1])
    text = ptx_of(step.source, ("const HalfCopies* scales", "const HalfCopies* __restrict__ scales"))
    assert read_as_constants(text, "window_dgrad_tma") & {*read} == {2}


def ptx_of(source: KernelSource, change: tuple[str, str] = ("", "")) -> str:
    from cuda.bindings import nvrtc

    text = source.text.replace(*change)
    assert change == ("", "") or text != source.text
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    options = [b"--gpu-architecture=compute_90a", b"--std=c++17"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(error) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.decode()
