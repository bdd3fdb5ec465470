"""Processes that measure beside the benchmark's own, such as PyTorch's benchmark mode, which needs one.

PyTorch looks for a convolution's plan among those it has used, whichever mode chose them, and searches only where it
finds none. After a call by heuristics, benchmark mode would take their plan, as if it had searched for nothing; after a
call in benchmark mode, heuristics would look as good. So one process calls PyTorch by heuristics, the benchmark's own,
and this one in benchmark mode, from the first call of each layer.

One process serves a whole benchmark, for a new one costs seconds. It makes the operands itself, and gives their memory
back before it answers. Only one of the two works at a time: the benchmark waits for the answer. After an error that
CUDA does not recover from, or where no answer comes, the process is ended, and the next call starts another.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import torch

from polyphase.bench.contestants import TorchVariant, torch_call, torch_flags
from polyphase.bench.operands import make_operands
from polyphase.bench.timing import Timer
from polyphase.problem import ConvTransposeProblem, Pass

Result = TypeVar("Result")


class OtherProcess:
    """Calls functions in a process that the first `call` starts."""

    def __init__(self) -> None:
        self._worker: tuple[SpawnProcess, Connection[Any, Any]] | None = None

    def call(self, function: Callable[..., Result], *arguments: object, seconds: float | None = None) -> Result:
        """The result of a module's function, called in the process with arguments that can be pickled.

        Raises what the function raised, and RuntimeError if the process died or has not answered after ``seconds``.
        """
        process, connection = self._worker = self._worker or _start()
        try:
            connection.send((function, *arguments))
            if seconds is not None and not connection.poll(seconds):
                raise RuntimeError(f"its process has not answered after {seconds:.0f} s")
            answer, usable = connection.recv()
        except (EOFError, OSError):
            process.join()
            self.close()
            raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
        except BaseException:  # or the next call would take this one's answer for its own
            self.close()
            raise
        if not usable:
            self.close()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._worker is not None:
            process, connection = self._worker
            self._worker = None
            process.kill()
            process.join()
            connection.close()


class BenchmarkProcess(OtherProcess):
    """Times PyTorch in benchmark mode as ``timer`` would."""

    def __init__(self, timer: Timer, strict_fp32: bool) -> None:
        super().__init__()
        self._settings = timer.device, timer.repetitions, timer.budget_seconds, strict_fp32

    def measure(self, problem: ConvTransposeProblem, pass_: Pass) -> float:
        """Milliseconds of one pass, in the layout of ``problem``. Raises as `call` does."""
        torch.cuda.empty_cache()  # the search takes what memory is free
        return self.call(benchmark_mode_ms, problem, pass_, *self._settings)


def benchmark_mode_ms(
    problem: ConvTransposeProblem,
    pass_: Pass,
    device: torch.device,
    repetitions: int,
    budget_seconds: float,
    strict_fp32: bool,
) -> float:
    """Milliseconds of one pass by PyTorch in benchmark mode, if it has not been called in another in this process."""
    timer = Timer(device, repetitions, budget_seconds)
    operands = make_operands(problem, device)
    with torch_flags(TorchVariant.BENCHMARK, strict_fp32):
        return timer.measure(torch_call(problem, pass_, operands)).ms


def _start() -> tuple[SpawnProcess, Connection[Any, Any]]:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    connection, others = context.Pipe()
    process = context.Process(target=_serve, args=(others,), daemon=True)
    process.start()
    others.close()  # so that the death of the process is the end of the pipe, on either side
    return process, connection


def _serve(connection: Connection[Any, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's, which then ends this process
    while True:
        try:
            function, *arguments = connection.recv()
        except EOFError:
            return  # the benchmark is no more
        answer: object
        try:
            answer = function(*arguments)
            torch.cuda.empty_cache()
        except Exception as failure:  # raised again where the other process waits
            answer = failure.with_traceback(None)  # its frames hold the operands
        connection.send((answer, _usable()))


def _usable() -> bool:
    """Whether this process can still work on its GPU: after some errors every call of CUDA's fails."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return False
    return True
