"""A few small layers in all passes and memory formats, for compute-sanitizer::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitizer_sample.py

There are no guards here: every tensor is an allocation of its own, so that memcheck knows where it ends. Nothing but
copies from and to the host touches tensors beside our kernels, so that initcheck knows what is initialised.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from kernel_harness import Gpu, assert_exact, formats
from polyphase.plan.planner import programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.schedule import Candidate

make = ConvTransposeProblem.make
SAMPLE = (
    make((2, 5, 9, 11), 7, 3, bias=True),
    make((2, 8, 6, 16), 12, 4, 2, 1),
    make((1, 8, 5, 9), 12, (3, 5), (2, 3), (1, 2), (1, 1), 4, True, (2, 1), dtype="bfloat16"),
    make((1, 4, 4, 12), 4, 3, 5, 1, dilation=2),
    make((2, 6, 6, 8), 6, 4, 2, 1, groups=6),
    make((1, 3, 6, 20), 1, 9, 4, 4, 3, bias=True, dtype="float16"),
    make((2, 20, 5, 9), 1, 3, 1, 1),
    make((1, 9, 3, 5), 10, 2, 2, bias=True, dtype="float64"),
    make((1, 2, 4, 5), 3, 2, 2, 1, (2, 3), dilation=(4, 5)),
    make((2, 6, 40), 5, 16, 8, 4, bias=True),
    make((1, 4, 3, 4, 8), 4, 2, 2, bias=True),
    make((5, 20, 1, 1), 9, 4, dtype="bfloat16"),
    make((2, 12, 21), 2, 41, 16, 3, 5, bias=True),
    make((3, 40, 7, 6), 70, 2, 2, bias=True, tf32=True),
    make((2, 24, 5, 9), 16, 3, 2, 1, tf32=True),
    make((3, 32, 4, 4), 20, 4, 2, 1, tf32=True),
    make((2, 40, 5, 9), 16, 3, 2, 1),
    make((2, 130, 5, 7), 24, 2, 2, bias=True, dtype="bfloat16"),
)


def runs(device: DeviceInfo) -> Iterator[tuple[ConvTransposeProblem, Pass, Candidate, Program, Layouts]]:
    """The best config of every schedule, the best that sums source channels in slices, that multiplies halves."""
    for problem in SAMPLE:
        for formatted in formats(problem):
            for pass_ in Pass:
                dense = Layouts.dense(formatted)
                for layouts in (dense, replace(dense, aligned=False)):
                    seen = set()
                    for candidate, program in programs(formatted, pass_, device, layouts):
                        sliced, scaled = (getattr(candidate.config, name, 0) for name in ("src_slices", "scaled"))
                        kind = candidate.schedule, sliced > 1, scaled
                        if kind not in seen and (layouts.aligned or candidate.schedule == "direct_tiled"):
                            yield formatted, pass_, candidate, program, layouts
                        seen.add(kind)


def main() -> int:
    executor = Gpu(0)
    count = 0
    for problem, pass_, candidate, program, layouts in runs(DeviceInfo.of(executor.device)):
        assert_exact(problem, pass_, candidate, program, layouts, executor, guard=0)
        count += 1
    print(f"{count} launches are exact")
    return 0


if __name__ == "__main__":
    sys.exit(main())
