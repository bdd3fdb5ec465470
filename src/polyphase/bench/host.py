"""How long the host works for a call, and how long the first call of a layer takes.

Warm calls are timed on a layer so small that the GPU is done before the next call comes, so that what is measured is
Python, dispatch and launch. First calls are timed in fresh processes (`polyphase.bench.first_call`), with an empty
cache of kernels and rankings and with a filled one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from polyphase.bench.contestants import parameters_of, torch_function
from polyphase.bench.operands import make_operands
from polyphase.problem import ConvTransposeProblem

SMALL = ConvTransposeProblem.make((1, 16, 8, 8), 16, 3, stride=2, padding=1, bias=True)
# A round is so few calls that their launches fit the driver's queue (1024): the host never waits for the GPU.
CALLS, ROUNDS = 50, 41


@dataclass(frozen=True)
class HostTime:
    """Microseconds of host time for one warm call, polyphase's and PyTorch's."""

    what: str
    ours: float
    torch: float


def warm_calls(device: torch.device, progress: Callable[[str], None]) -> list[HostTime]:
    """Time functions and modules on `SMALL`, without and with gradients (of the forward call, then with its backward).

    ``progress`` is told what is timed next.
    """
    import polyphase

    operands, parameters = make_operands(SMALL, device), parameters_of(SMALL)
    functions = (polyphase.conv_transpose2d, torch_function(SMALL))
    kinds: tuple[Callable[..., nn.Module], ...] = (polyphase.ConvTranspose2d, nn.ConvTranspose2d)
    sizes = (SMALL.in_channels, SMALL.out_channels, SMALL.kernel_size)
    modules = [kind(*sizes, **parameters, device=device) for kind in kinds]
    x, weight, bias = operands.input, operands.weight, operands.bias
    found = []
    for grad in (False, True):
        leaves = [tensor.detach().requires_grad_(grad) for tensor in (x, weight, bias) if tensor is not None]
        calls = [_bind(function, *leaves, **parameters) for function in functions]
        module_calls = [_bind(module.requires_grad_(grad), leaves[0]) for module in modules]
        suffix = "with gradients" if grad else "no gradients"
        with torch.set_grad_enabled(grad):
            timed: dict[str, Sequence[Callable[[], object]]] = {
                f"function, {suffix}": calls,
                f"module, {suffix}": module_calls,
            }
            if grad:
                both = [_with_backward(call, leaves, operands.grad_output) for call in calls]
                timed["function, forward and backward"] = both
            for what, compared in timed.items():
                progress(what)
                found.append(HostTime(what, *map(statistics.median, rounds_in_turn(compared, device))))
    return found


def _bind(call: Callable[..., torch.Tensor], *arguments: object, **keywords: object) -> Callable[[], torch.Tensor]:
    return lambda: call(*arguments, **keywords)


def _with_backward(
    call: Callable[[], torch.Tensor], leaves: list[torch.Tensor], grad_output: torch.Tensor
) -> Callable[[], object]:
    return lambda: torch.autograd.grad(call(), leaves, grad_output)


def rounds_in_turn(calls: Sequence[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Microseconds of each call in each round; in turns, so that a slow moment of the machine strikes all."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, times in zip(calls, samples):
            times.append(_microseconds(call, device))
    return samples


def _microseconds(call: Callable[[], object], device: torch.device) -> float:
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(5):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - start
    synchronize()
    return 1e6 * elapsed / CALLS


@dataclass(frozen=True)
class FirstCall:
    """Seconds in a fresh process: importing the package, which torch was imported before, starting the device, then the
    first calls of two layers, one after the other.

    ``first`` holds what happens once in a process as well (loading the compiler, say); ``second`` is a layer's own.
    ``torch`` is PyTorch's first call of the first layer, in the same process, after polyphase's.
    """

    cache: str
    package: float
    device: float
    first: float
    second: float
    torch: float


# The process that `first_calls` starts; `python -m` would import the package before it is timed.
_FIRST_CALLS = """
import json, sys, time
import torch
start = time.perf_counter()
import polyphase
package = time.perf_counter() - start
from polyphase.bench.first_call import main
print(json.dumps({"package": package, **main(sys.argv[1])}))
"""


def first_calls(device: torch.device, progress: Callable[[str], None]) -> list[FirstCall]:
    """First calls with an empty kernel cache, with another empty one, then with the one that these have filled.

    The first of these processes may have to read PyTorch's and the compiler's libraries from a disk.
    ``progress`` is told which cache comes next. Raises RuntimeError with the output of a process that fails.
    """
    command = [sys.executable, "-c", _FIRST_CALLS, str(device)]
    found = []
    for caches in (("cold",), ("cold, again", "warm")):
        with tempfile.TemporaryDirectory(prefix="polyphase-cache-") as folder:
            environment = {**os.environ, "POLYPHASE_CACHE_DIR": folder}
            for cache in caches:
                progress(cache)
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"first calls with a {cache} cache failed:\n{done.stderr}")
                found.append(FirstCall(cache, **json.loads(done.stdout.splitlines()[-1])))
    return found
