"""The host's time for a warm call of eight small layers, in each of three situations, beside PyTorch's in the same run.

Between them the layers run every schedule, and programs with packing, transposes and split-K reductions. Their kernels
are so short, and rounds so few calls, that the host never waits for the GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import torch

from polyphase.bench import environment
from polyphase.bench.contestants import torch_function
from polyphase.bench.host import rounds_in_turn
from polyphase.bench.operands import Operands, make_operands
from polyphase.bench.records import write_rows
from polyphase.plan.planner import plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo

make = ConvTransposeProblem.make

#: By the schedule of their forward pass on Hopper.
LAYERS: dict[str, ConvTransposeProblem] = {
    "implicit_gemm": make((1, 64, 16, 16), 64, 4, 2, 1, bias=True),
    "implicit_gemm, transposed gradient": make((1, 512, 16, 16), 256, 3, 2, 1, bias=True),
    "overlap_gemm": make((1, 16, 8, 8), 16, 3, 2, 1, bias=True),
    "overlap_gemm, channels_last": make((1, 128, 16, 16), 3, 4, 2, 1, bias=True, channels_last=True),
    "tap_gemm, inverse STFT": make((1, 514, 50), 1, 1024, 256),
    "phase_gemm, kernel = stride": make((1, 64, 16, 16), 32, 2, 2, bias=True),
    "grouped_gemm": make((4, 64, 128, 128), 64, 4, 2, 1, groups=8, bias=True),
    "direct, depthwise": make((1, 64, 16, 16), 64, 4, 2, 1, groups=64, bias=True),
}

#: Of the forward pass without and with a gradient wanted, and of the backward pass of a graph that is kept.
SITUATIONS = ("no_grad", "grad", "backward")


@dataclass(frozen=True)
class HostRecord:
    """Microseconds of host time for a warm call: medians of rounds in turn, and their 10th percentiles.

    ``kernels`` are those that polyphase launches, in order; empty where the device has none.
    """

    layer: str
    problem: str
    situation: str
    kernels: str
    launches: int
    polyphase_us: float
    polyphase_p10: float
    torch_us: float
    torch_p10: float


def measure(device: torch.device, tell: Callable[[str], object]) -> list[HostRecord]:
    """Time all layers in all situations; ``tell`` is called with the name of each layer."""
    found = []
    for name, problem in LAYERS.items():
        tell(name)
        operands = make_operands(problem, device)
        found += [_record(name, problem, operands, situation, device) for situation in SITUATIONS]
    return found


def write_csv(path: Path, records: Iterable[HostRecord], device: torch.device) -> None:
    """Write ``records`` and what they were measured on to ``path``, making its folder if need be."""
    facts = environment.facts(device.type)
    machine = {name: facts[name] for name in ("gpu", "driver", "torch", "cudnn", "commit", "date", "command")}
    rows = ([f"{each:.2f}" if isinstance(each, float) else each for each in astuple(record)] for record in records)
    columns = [*(field.name for field in fields(HostRecord)), *machine]
    write_rows(path, columns, ([*row, *machine.values()] for row in rows))


def _record(
    name: str, problem: ConvTransposeProblem, operands: Operands, situation: str, device: torch.device
) -> HostRecord:
    import polyphase

    functions = (getattr(polyphase, f"conv_transpose{problem.dims}d"), torch_function(problem))
    wanted = situation != "no_grad"
    tensors = [
        None if each is None else each.detach().requires_grad_(wanted)
        for each in (operands.input, operands.weight, operands.bias)
    ]
    constants = (problem.stride, problem.padding, problem.output_padding, problem.groups, problem.dilation)
    calls = [_call(function, tensors, constants, operands.grad_output, situation) for function in functions]
    with torch.set_grad_enabled(wanted):
        ours, theirs = rounds_in_turn(calls, device)
    kernels = _kernels(problem, situation, device)
    return HostRecord(
        layer=name,
        problem=str(problem),
        situation=situation,
        kernels=" ".join(kernels),
        launches=len(kernels),
        polyphase_us=statistics.median(ours),
        polyphase_p10=_p10(ours),
        torch_us=statistics.median(theirs),
        torch_p10=_p10(theirs),
    )


def _call(
    function: Callable[..., torch.Tensor],
    tensors: list[torch.Tensor | None],
    constants: tuple[object, ...],
    grad_output: torch.Tensor,
    situation: str,
) -> Callable[[], object]:
    if situation != "backward":
        return lambda: function(*tensors, *constants)
    output = function(*tensors, *constants)
    leaves = [tensor for tensor in tensors if tensor is not None]
    return lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)


def _p10(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 10]


def _kernels(problem: ConvTransposeProblem, situation: str, device: torch.device) -> list[str]:
    """What the planner has polyphase launch, beside PyTorch's sum for a bias' gradient."""
    if device.type != "cuda":
        return []
    passes = (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD) if situation == "backward" else (Pass.FORWARD,)
    problem = replace(problem, tf32=torch.backends.cudnn.allow_tf32)
    programs = [plan(problem, pass_, DeviceInfo.of(device)).program for pass_ in passes]
    return [step.source.kernel for program in programs if program is not None for step in program.steps]
