"""A process that times its own first calls and prints them as JSON: ``python -m polyphase.bench.first_call cuda``."""

from __future__ import annotations

import json
import sys
import time

import torch

from polyphase.bench.contestants import polyphase_call, torch_call
from polyphase.bench.operands import make_operands
from polyphase.problem import ConvTransposeProblem, Pass


def main(device_name: str) -> dict[str, float]:
    """Seconds for starting the device, for the first calls of two layers, and for PyTorch's first call."""
    device = torch.device(device_name)
    marks = [time.perf_counter()]

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    problems = [
        ConvTransposeProblem.make((4, 32, 64, 64), 64, (3, 5), stride=(2, 3), padding=(1, 2), groups=4),
        ConvTransposeProblem.make((4, 48, 33, 31), 24, 4, stride=2, padding=1, bias=True),
    ]
    operands = [make_operands(problem, device) for problem in problems]
    mark()
    for problem, values in zip(problems, operands):
        polyphase_call(problem, Pass.FORWARD, values)()
        mark()
    torch_call(problems[0], Pass.FORWARD, operands[0])()
    mark()
    return {name: marks[i + 1] - marks[i] for i, name in enumerate(("device", "first", "second", "torch"))}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
