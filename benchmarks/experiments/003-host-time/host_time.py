"""Where the host's time of a warm call goes, without a GPU; `--device cuda` times the same on one.

python host_time.py calls SRC... --csv calls.csv      each a checkout's src folder, in turn
python host_time.py ways --csv ways.csv [--device cuda]
python host_time.py stages SRC... --csv stages.csv [--device cuda]      of backward
python host_time.py compiling [--device cuda]      calls while a thread compiles
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# A round is shorter than the time that a busy machine lets a process run: the fastest of many met no other work.
CALLS, ROUNDS = 20, 400


def fastest(call: Callable[[], object], calls: int = CALLS, rounds: int = ROUNDS) -> float:
    """Microseconds of a call: the 2nd percentile of short rounds."""
    for _ in range(30):
        call()
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append(1e6 * (time.perf_counter() - start) / calls)
    return sorted(samples)[len(samples) // 50]


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """Frames of Python and calls of C functions that a call makes, in backward's thread too."""
    from polyphase.torch_op.derivatives import Contraction

    events, backward = {"call": 0, "c_call": 0}, Contraction.backward

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in events:
            events[event] += 1

    def counted_backward(*arguments: Any) -> Any:
        sys.setprofile(count)
        try:
            return backward(*arguments)
        finally:
            sys.setprofile(None)

    call()
    Contraction.backward = staticmethod(counted_backward)
    sys.setprofile(count)
    call()
    sys.setprofile(None)
    Contraction.backward = staticmethod(backward)
    return events["call"] - 1, events["c_call"] - 1  # but `call` itself, and the end of profiling


# Calls


def worker(what: str, device: str) -> None:
    """Times the layers that the environment names with the polyphase in the path, and prints rows."""
    driver = _pretend() if device == "cpu" else None
    import torch

    import polyphase

    torch.set_num_threads(1)
    for name, shape, out_channels, constants, bias, channels_last in json.loads(os.environ["LAYERS"]):
        problem = polyphase.ConvTransposeProblem.make(shape, out_channels, bias=bias, **constants)
        calls = _situations(torch, polyphase, problem, channels_last, "cuda" if driver is None else "threaded")
        if what == "stages":
            for row in _stages(torch, calls["backward"], device):
                print(json.dumps([name, *row]), flush=True)
            continue
        for situation, call in calls.items():
            frames, c_calls = counted(call)
            before = driver.counted_launches()
            call()
            launches = driver.counted_launches() - before
            print(json.dumps([name, situation, launches, frames, c_calls, fastest(call, rounds=200)]), flush=True)
    os._exit(0)  # past the end of the device's thread


def _pretend() -> Any:
    import no_gpu

    no_gpu.restart_with_driver()
    return no_gpu.pretend()


def _situations(
    torch: Any, polyphase: Any, problem: Any, channels_last: bool, device: str
) -> dict[str, Callable[[], object]]:
    tensors = [torch.randn(each) for each in (problem.input_shape, problem.weight_shape, problem.output_shape)]
    if channels_last:
        tensors = [each.contiguous(memory_format=torch.channels_last) for each in tensors]
    tensors += [torch.randn(problem.out_channels)] * problem.bias
    x, w, grad, *bias = [torch.empty_strided(each.shape, each.stride(), device=device) for each in tensors]
    tensors = [x, w, *bias]
    leaves = [torch.nn.Parameter(each) for each in tensors]
    function = getattr(polyphase, f"conv_transpose{problem.dims}d")
    rest = [None] * (not problem.bias) + [getattr(problem, each) for each in PARAMETERS]
    output = function(*leaves, *rest)
    return {
        "no_grad": lambda: function(*tensors, *rest),
        "grad": lambda: function(*leaves, *rest),
        "backward": lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True),
    }


def _stages(torch: Any, call: Callable[[], object], device: str) -> list[tuple[str, float]]:
    """What follows on what in a backward call: the medians of each stage's microseconds, of calls in a row."""
    from polyphase.torch_op import derivatives, operators

    stamps: list[tuple[str, float]] = []

    def stamped(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            stamps.append((before, time.perf_counter()))
            result = function(*arguments)
            stamps.append((after, time.perf_counter()))
            return result

        return run

    def find(*arguments: Any) -> Any:
        found = known(*arguments)
        return found and stamped(found, "checks and look-up", "both gradients")

    changed = [(derivatives.Contraction, "backward", derivatives.Contraction.backward)]
    if hasattr(operators, "find_both_gradients"):
        known = operators.find_both_gradients
        changed += [(operators, "find_both_gradients", known), (derivatives, "_bias_grad", derivatives._bias_grad)]
        operators.find_both_gradients = find
        derivatives._bias_grad = stamped(derivatives._bias_grad, "", "the bias' sum")
    backward = stamped(derivatives.Contraction.backward, "the engine, until the device's thread is in backward", "rest")
    derivatives.Contraction.backward = staticmethod(backward)
    taken: dict[str, list[float]] = {}
    for number in range(60 * CALLS):
        if device == "cuda" and number % CALLS == 0:
            torch.cuda.synchronize()
        stamps.clear()
        start = time.perf_counter()
        call()
        stamps.append(("the engine, until the caller has its gradients", time.perf_counter()))
        for stage, at in stamps:
            taken.setdefault(stage, []).append(1e6 * (at - start))
            start = at
    for home, name, value in changed:
        setattr(home, name, staticmethod(value) if isinstance(home, type) else value)
    return [(stage, sorted(times)[len(times) // 2]) for stage, times in taken.items() if stage]


def stages(sources: Sequence[str], device: str) -> list[dict[str, object]]:
    """The stages of backward with each of the checkouts: medians over the layers."""
    found: dict[tuple[str, str], list[float]] = {}
    for source in sources:
        for _, stage, microseconds in _rows_of(source, "stages", device):
            found.setdefault((commit(source), stage), []).append(microseconds)
    return [
        {"commit": of, "stage": stage, "us": round(sorted(times)[len(times) // 2], 2), "device": device}
        for (of, stage), times in found.items()
    ]


def compiling(device: str) -> list[dict[str, object]]:
    """A call without derivatives while a thread compiles, and afterwards: the quartiles of short rounds."""
    if device == "cpu":
        _pretend()
    import torch

    import polyphase
    from polyphase.bench.host_layers import LAYERS
    from polyphase.jit.compiler import resources_of
    from polyphase.plan.planner import plan
    from polyphase.problem import Pass
    from polyphase.problem.device import DeviceInfo

    problem = LAYERS["overlap_gemm"]
    call = _situations(torch, polyphase, problem, False, "threaded" if device == "cpu" else device)["no_grad"]
    wgrads = [plan(each, Pass.WEIGHT_GRAD, DeviceInfo.for_arch("sm_90a")).program for each in LAYERS.values()]
    found = []
    for what in ("alone", "while a thread compiles") * 2:
        thread = threading.Thread(target=lambda: [resources_of(each.main.source, "sm_90a") for each in wgrads])
        if what != "alone":
            thread.start()
        samples, end = [], time.perf_counter() + 2
        while thread.is_alive() or (what == "alone" and time.perf_counter() < end):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples.append(1e6 * (time.perf_counter() - start) / CALLS)
        samples.sort()
        quartiles = {f"p{100 * i // 4}": round(samples[len(samples) * i // 4], 2) for i in (1, 2, 3)}
        found.append({"calls": what, **quartiles, "device": device})
    return found


PARAMETERS = ("stride", "padding", "output_padding", "groups", "dilation")


def _rows_of(source: str, what: str, device: str) -> list[list[Any]]:
    """What a worker prints with a checkout."""
    sys.path.insert(0, source)
    from polyphase.bench.host_layers import LAYERS

    layers = [
        [name, each.input_shape, each.out_channels,
         {"kernel_size": each.kernel_size, **{key: getattr(each, key) for key in PARAMETERS}},
         each.bias, each.channels_last]
        for name, each in LAYERS.items()
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": source, "LAYERS": json.dumps(layers)}
    command = [sys.executable, __file__, "worker", what, "--device", device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def calls(sources: Sequence[str], rounds: int = 3) -> list[dict[str, object]]:
    """All situations with each of the checkouts, in turn: counts, and the fastest of the rounds' times."""
    found: dict[tuple[str, ...], dict[str, object]] = {}
    for _ in range(rounds):
        for source in sources:
            for name, situation, launches, frames, c_calls, microseconds in _rows_of(source, "calls", "cpu"):
                row = found.setdefault((name, situation, source), {"us": float("inf")})
                row |= {
                    "layer": name, "situation": situation, "commit": commit(source), "launches": launches,
                    "frames": frames, "c_calls": c_calls, "us": min(float(str(row["us"])), round(microseconds, 2)),
                }  # fmt: skip
    columns = ("layer", "situation", "commit", "launches", "frames", "c_calls", "us")
    return [{column: found[key][column] for column in columns} for key in sorted(found)]


def commit(source: str) -> str:
    """The checkout's; the folder's name where that is no checkout."""
    command = ["git", "-C", source, "rev-parse", "--short=10", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or Path(source).parent.name


# Ways considered


def ways(device: str) -> list[dict[str, object]]:
    """Each step of a call, in the ways in which it can be done."""
    if device == "cpu":
        import no_gpu

        no_gpu.restart_with_driver()
    import torch

    torch.set_num_threads(1)
    x = torch.randn(1, 64, 16, 16, device=device)
    w, b = (torch.nn.Parameter(torch.randn(*shape, device=device)) for shape in ((64, 64, 4, 4), (64,)))
    timed: dict[tuple[str, str], Callable[[], object]] = {}
    _know(timed, torch, x, w, b)
    _allocate(timed, torch, x)
    _launch(timed, device)
    _record(timed, torch, x, w, b)
    if device == "cuda":
        _graph(timed, torch, x)
    found = []
    for (step, way), call in timed.items():
        if device == "cuda":
            torch.cuda.synchronize()
        found.append({"step": step, "way": way, "us": round(fastest(call), 3), "device": device})
    return found


def _know(timed: dict[Any, Any], torch: Any, x: Any, w: Any, b: Any) -> None:
    from torch._C._dynamo.guards import TensorGuards

    constants = ((2, 2), (1, 1), (0, 0), 1, (1, 1))

    def key() -> tuple[Any, ...]:
        return (
            x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16, w.shape, w.stride(), w.dtype, w.device,
            b.shape, b.dtype, b.device, constants,
        )  # fmt: skip

    def plain() -> bool:
        return all(
            type(each) in (torch.Tensor, torch.nn.Parameter)
            and torch._C._has_storage(each)
            and not (each.is_neg() or each.is_conj() or each._is_zerotensor())
            for each in (x, w, b)
        )

    table = {key(): 1}
    short = {(x.shape, w.shape, constants): 1}
    tensors = (x, w, b)
    guard = TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(each.shape) for each in tensors],
        dynamic_dims_strides=[list(each.stride()) for each in tensors],
    ).check
    timed["know the call", "key of all that counts, made in Python"] = lambda: table[key()]
    timed["know the call", "the same, and whether tensors are plain"] = lambda: (table[key()], plain())
    timed["know the call", "key of sizes and constants, Dynamo's guard"] = lambda: (
        short[x.shape, w.shape, constants], guard(x, w, b), x.data_ptr() % 16
    )  # fmt: skip


def _allocate(timed: dict[Any, Any], torch: Any, x: Any) -> None:
    shape, strides = (1, 64, 32, 32), (65536, 1024, 32, 1)
    timed["allocate", "new_empty_strided"] = lambda: x.new_empty_strided(shape, strides)
    timed["allocate", "torch.empty_strided"] = lambda: torch.empty_strided(
        shape, strides, dtype=x.dtype, device=x.device
    )
    timed["allocate", "torch.empty"] = lambda: torch.empty(shape, dtype=x.dtype, device=x.device)
    guards = torch._C._dynamo.guards
    past = guards._empty_strided_cuda if x.is_cuda else guards._empty_strided_cpu
    timed["allocate", "past the dispatcher, as Inductor's code does"] = lambda: past(shape, strides, x.dtype)
    timed["allocate", "bytes past the dispatcher"] = lambda: past((262144,), (1,), torch.uint8)
    timed["allocate", "bytes: new_empty with a dtype"] = lambda: x.new_empty(262144, dtype=torch.uint8)
    timed["allocate", "bytes: new_empty_strided of the tensor's dtype"] = lambda: x.new_empty_strided((65536,), (1,))
    if x.is_cuda:
        take, give = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
        timed["allocate", "bytes: the allocator's raw memory, and back"] = lambda: give(take(262144, 0))


def _launch(timed: dict[Any, Any], device: str) -> None:
    import struct

    pack = struct.Struct("5Q").pack_into
    block = (ctypes.c_uint64 * 5)()
    addresses = [1, 2, 3, 4, 5]
    pick, pick_all = itemgetter(1, 4), itemgetter(0, 4, 2, 3)
    two, four = struct.Struct("2Q").pack_into, struct.Struct("4Q").pack_into
    timed["addresses of two steps", "picked and written for each step"] = lambda: (
        two(block, 0, *pick(addresses)), four(block, 0, *pick_all(addresses))
    )  # fmt: skip
    timed["addresses of two steps", "written once for all steps"] = lambda: pack(block, 0, *addresses)
    params = ctypes.create_string_buffer(512)
    encoded = bytes(128)
    view = memoryview(params)[64:192].cast("B")
    timed["another tensor map", "ctypes.memmove"] = lambda: ctypes.memmove(ctypes.byref(params, 64), encoded, 128)
    timed["another tensor map", "memoryview"] = lambda: view.__setitem__(slice(None), encoded)
    if device == "cuda":
        return  # there is no kernel at hand, and what a launch takes there is in `bench --host`
    from cuda.bindings import driver

    function, dimensions = driver.CUfunction(1), (8, 1, 1, 256, 1, 1, 1024)
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1
    prepared = (config, function, 4096, 0)
    bare = ctypes.CDLL(os.environ["POLYPHASE_NO_GPU"]).cuLaunchKernelEx
    given = (ctypes.c_void_p(config.getPtr()), ctypes.c_void_p(1), ctypes.c_void_p(4096), None)

    def with_stream() -> object:
        config.hStream = 0
        return driver.cuLaunchKernelEx(*prepared)[0]

    timed["launch", "cuLaunchKernel"] = lambda: driver.cuLaunchKernel(function, *dimensions, 0, 4096, 0)[0]
    timed["launch", "cuLaunchKernelEx, the stream set each time"] = with_stream
    timed["launch", "cuLaunchKernelEx, all made beforehand"] = lambda: driver.cuLaunchKernelEx(*prepared)[0]
    timed["launch", "cuLaunchKernelEx by ctypes, all made beforehand"] = lambda: bare(*given)


def _record(timed: dict[Any, Any], torch: Any, x: Any, w: Any, b: Any) -> None:
    x = x.detach().requires_grad_()
    shape, strides = (1, 64, 32, 32), (65536, 1024, 32, 1)

    class Least(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, b: Any) -> Any:
            ctx.save_for_backward(x, w)
            return x.new_empty_strided(shape, strides)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return tuple(torch.empty_like(each) for each in (x, w, b))

    class Ours(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, g: Any, b: Any, layer: Any, call: Any) -> Any:
            ctx.layer = layer
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, w, g)
            return x.new_empty_strided(shape, strides)

    least, ours = (super(torch.autograd.Function, each).apply for each in (Least, Ours))
    output, grad = least(x, w, b), torch.empty(shape, device=x.device)
    name = "record for backward, an allocation with it"
    timed[name, "the least Function, apply in Python"] = lambda: Least.apply(x, w, b)
    timed[name, "the least Function, apply in C++"] = lambda: least(x, w, b)
    timed[name, "six arguments, two of them no tensors"] = lambda: ours(x, w, None, b, 1, 2)
    timed["backward", "PyTorch's sum for the bias"] = lambda: grad.sum((0, 2, 3))
    timed["backward", "the least Function, three allocations"] = lambda: torch.autograd.grad(
        output, (x, w, b), grad, retain_graph=True
    )


def _graph(timed: dict[Any, Any], torch: Any, x: Any) -> None:
    """Two short kernels by one driver call, if nothing of them changes; to change addresses costs more."""
    one, two = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.fill_(1)
        two.fill_(2)
    timed["two kernels", "by two of PyTorch's calls"] = lambda: (one.fill_(1), two.fill_(2))
    timed["two kernels", "a graph of two, unchanged"] = graph.replay


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["calls", "ways", "stages", "compiling", "worker"])
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if arguments.what == "worker":
        worker(*arguments.sources, arguments.device)
        return
    sources = [str(Path(each).resolve()) for each in arguments.sources]
    rows = {
        "calls": lambda: calls(sources),
        "ways": lambda: ways(arguments.device),
        "stages": lambda: stages(sources, arguments.device),
        "compiling": lambda: compiling(arguments.device),
    }[arguments.what]()
    for row in rows:
        print(*row.values(), sep="  ")
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
