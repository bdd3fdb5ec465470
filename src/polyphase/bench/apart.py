"""PyTorch's benchmark mode, timed in a process of its own.

PyTorch looks for a convolution's plan among those it has used, whichever mode chose them, and searches only where it
finds none. After a call by heuristics, benchmark mode would take their plan, as if it had searched for nothing; after a
call in benchmark mode, heuristics would look as good. So one process calls PyTorch by heuristics, the benchmark's own,
and this one in benchmark mode, from the first call of each layer.

One process serves a whole benchmark, for a new one costs seconds. It makes the operands itself, and gives their memory
back before it answers. Only one of the two works at a time: the benchmark waits for the answer.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from polyphase.bench.contestants import TorchVariant, torch_call, torch_flags
from polyphase.bench.operands import make_operands
from polyphase.bench.timing import Timer
from polyphase.problem import ConvTransposeProblem, Pass


class BenchmarkProcess:
    """Times PyTorch in benchmark mode as ``timer`` would. Its process is started by the first `measure`."""

    def __init__(self, timer: Timer, strict_fp32: bool) -> None:
        self._settings = timer.device, timer.repetitions, timer.budget_seconds, strict_fp32
        self._worker: tuple[SpawnProcess, Connection[Any, Any]] | None = None

    def measure(self, problem: ConvTransposeProblem, pass_: Pass) -> float:
        """Milliseconds of one pass, in the layout of ``problem``.

        Raises what the process raised, and RuntimeError where it died; the next call starts another.
        """
        torch.cuda.empty_cache()  # the search takes what memory is free
        process, connection = self._worker = self._worker or _start()
        try:
            connection.send((problem, pass_, *self._settings))
            answer: float | Exception = connection.recv()
        except (EOFError, OSError):
            process.join()
            self.close()
            raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
        except BaseException:  # or the next call would take this one's answer for its own
            self.close()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._worker is not None:
            process, connection = self._worker
            self._worker = None
            process.kill()
            process.join()
            connection.close()


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
            case = connection.recv()
        except EOFError:
            return  # the benchmark is no more
        try:
            answer: float | Exception = benchmark_mode_ms(*case)
            torch.cuda.empty_cache()
        except Exception as failure:  # raised again where the other process waits
            answer = failure.with_traceback(None)  # its frames hold the operands
        connection.send(answer)
