"""A process that times its own first calls and prints them as JSON: ``python -m polyphase.bench.first_call cuda``."""

from __future__ import annotations

import json
import sys
import time

import torch

_STARTED = time.perf_counter()
import polyphase.runtime  # noqa: E402, F401
from polyphase.bench.contestants import polyphase_call, torch_call  # noqa: E402
from polyphase.bench.operands import make_operands  # noqa: E402
from polyphase.problem import ConvTransposeProblem, Pass  # noqa: E402

_IMPORTED = time.perf_counter()


def main(device_name: str) -> dict[str, float]:
    """Seconds for importing the package after torch, starting the device, first calls of two layers, and PyTorch's."""
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
    spans = {name: marks[i + 1] - marks[i] for i, name in enumerate(("device", "first", "second", "torch"))}
    return {"package": _IMPORTED - _STARTED, **spans}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
