"""What only a GPU can show: every config on real hardware, streams, graphs, threads, devices, strange tensors.

Sums are exact unless a test says otherwise, so results are compared bit for bit with float64 on the CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

import polyphase
import test_grouped_gemm as grouped_gemm
import test_implicit_gemm_transposed as transposed
import test_tap_gemm as taps
import test_window_fma as fma
import test_window_tma as boxes
from helpers import (
    OUR_MODULES,
    OURS,
    TORCH,
    Operands,
    amid_nan,
    constants,
    make_operands,
    normal_tensor,
    reference,
    results,
    tf32,
)
from kernel_harness import DTYPES, H200, Gpu, assert_carries_inf_and_nan, assert_exact, formats, strange_layouts
from polyphase import runtime
from polyphase.bench.memory import workspace_megabytes
from polyphase.jit import launcher
from polyphase.jit.ahead import compile_ahead
from polyphase.jit.source import KernelSource
from polyphase.plan import planner as plan
from polyphase.plan.planner import programs
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.program.program import Program
from polyphase.schedules.col2im.cells import Col2imCells
from polyphase.schedules.direct.channels import DirectChannels
from polyphase.schedules.direct_wgrad.channels import DirectWgradChannels
from polyphase.schedules.direct_wgrad.long import DirectWgradLong
from polyphase.schedules.direct_wgrad.windows import DirectWgradWindows
from polyphase.schedules.dot_dgrad.schedule import DotDgrad
from polyphase.schedules.grouped_gemm.schedule import GroupedGemm
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.overlap_gemm.schedule import OverlapGemm
from polyphase.schedules.phase_gemm.pixels import PhaseGemmPixels
from polyphase.schedules.schedule import Candidate
from polyphase.schedules.window_gemm.transposed import WindowDgradTransposed, WindowWgradTransposed
from processes import run_python
from test_col2im import CELLS
from test_direct_channels import LAYERS as CHANNELS_LAYERS
from test_direct_gradients import CHANNELS as CHANNELS_GRAD_LAYERS
from test_direct_gradients import DOTS as DOTS_LAYERS
from test_direct_gradients import LONG as LONG_GRAD_LAYERS
from test_direct_gradients import WINDOWS as WINDOWS_LAYERS
from test_implicit_gemm import RINGS, GemmCase, gemm_cases, ring_case, share_all_work_tiles
from test_implicit_gemm import work_tiles_to_take as work_tiles_to_take  # a fixture, of these tests as well
from test_kernels import PROBLEMS, WIDE_LAYERS, wide
from test_overlap_gemm import LAYERS as SCATTER_LAYERS
from test_overlap_gemm import check_inf_and_nan
from test_phase_gemm_pixels import LAYERS as PIXEL_LAYERS
from test_scales import LAYERS as SCALED_LAYERS
from test_scales import assert_near, both, of_many_sizes
from test_window_mma import LAYERS as GRADIENT_LAYERS
from test_window_mma import MIRRORED, SCHEDULES
from test_window_transposed import LAYERS as TURNED_LAYERS
from test_window_transposed import SCHEDULES as TURNED_SCHEDULES
from test_window_transposed import assert_turns
from test_window_wgmma import LAST as WGMMA_LAST
from test_window_wgmma import LAYERS as WGMMA_LAYERS
from test_window_wgmma import SCHEDULES as WGMMA_SCHEDULES

if not torch.cuda.is_available():  # its cases, thousands of them, take seconds to list
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
make = ConvTransposeProblem.make

#: A layer that uses every parameter.
LAYER = make((3, 8, 13, 17), 12, (3, 5), (2, 3), (1, 2), (1, 1), 4, True, (2, 1))


def parameters(problem: ConvTransposeProblem) -> tuple[object, ...]:
    return problem.stride, problem.padding, problem.output_padding, problem.dilation, problem.groups


def forward(problem: ConvTransposeProblem, operands: Operands) -> Tensor:
    x, w, b = operands.input, operands.weight, operands.bias
    return torch.ops.polyphase.conv_transpose(x, w, b, *parameters(problem))


def passes(problem: ConvTransposeProblem, operands: Operands) -> list[Tensor]:
    """The three passes, by the operators."""
    ops, fixed = torch.ops.polyphase, parameters(problem)
    x, w, g = operands.input, operands.weight, operands.grad_output
    return [
        forward(problem, operands),
        ops.conv_transpose_input_grad(g, w, *fixed),
        ops.conv_transpose_weight_grad(x, g, problem.kernel_size, *fixed),
    ]


def assert_right(problem: ConvTransposeProblem, operands: Operands, found: list[Tensor]) -> None:
    """The three passes are those of float64, rounded once."""
    wanted = reference(problem, operands)
    for name, result in zip(("output", "input_grad", "weight_grad"), found, strict=True):
        expected = getattr(wanted, name).to(result.dtype)
        actual = result.detach().cpu()
        assert actual.shape == expected.shape
        wrong = int((actual != expected).sum())
        assert wrong == 0, f"{name} of {problem}: {wrong} of {expected.numel()} elements are wrong"


# Every config


@dataclass(frozen=True)
class Case:
    """A pass of a problem, with some of the configs that the planner offers."""

    problem: ConvTransposeProblem
    pass_: Pass
    layouts: Layouts
    schedule: str | None = None  # the only one whose configs are wanted

    def offers(self, device: DeviceInfo) -> list[tuple[Candidate, Program]]:
        """All configs in float32; the first and the last of each schedule in other dtypes, which they share."""
        found = [
            (candidate, program)
            for candidate, program in programs(self.problem, self.pass_, device, self.layouts)
            if self.schedule in (None, candidate.schedule)
        ]
        if self.problem.dtype == "float32":
            return found
        names = [candidate.schedule for candidate, _ in found]
        ends = {names.index(name) for name in names} | {len(names) - 1 - names[::-1].index(name) for name in names}
        return [found[i] for i in sorted(ends)]


def cases() -> Iterator[ParameterSet]:
    def case(name: str, problem: ConvTransposeProblem, pass_: Pass, aligned: bool = True) -> ParameterSet:
        layout = ("last" if problem.channels_last else "first") + ("" if aligned else "-unaligned")
        layouts = replace(Layouts.dense(problem), aligned=aligned)
        return pytest.param(Case(problem, pass_, layouts), id=f"{name}-{layout}-{pass_.value}-{problem.dtype}")

    for name, problem in PROBLEMS.items():
        for formatted in formats(problem):
            for dtype in DTYPES:
                for pass_ in Pass:
                    yield case(name, replace(formatted, dtype=dtype), pass_)
    for name, layer in WIDE_LAYERS.items():
        for formatted in formats(layer):
            for dtype in DTYPES:
                for pass_ in Pass:
                    problem = replace(wide(formatted, pass_, 132), dtype=dtype, batch=2)
                    yield case(f"{name}, wide", problem, pass_)
                    if pass_ is not Pass.WEIGHT_GRAD:
                        yield case(f"{name}, wide", problem, pass_, aligned=False)


def strange_cases() -> Iterator[ParameterSet]:
    """The layers of tests of single schedules, their tensors dense and not."""
    dots, long_grad = (Pass.INPUT_GRAD, DotDgrad()), (Pass.WEIGHT_GRAD, DirectWgradLong())
    channels_grad = DirectWgradChannels()
    layers = [
        *((f"{name}, cores", layer, each) for name, layer in GRADIENT_LAYERS.items() for each in SCHEDULES.items()),
        *((f"{name}, wgmma", layer, each) for name, layer in WGMMA_LAYERS.items() for each in WGMMA_SCHEDULES.items()),
        *(
            (f"{name}, wgmma", layer, (Pass.WEIGHT_GRAD, WGMMA_SCHEDULES[Pass.WEIGHT_GRAD]))
            for name, layer in WGMMA_LAST.items()
        ),
        *(
            (f"{name}, windows", layer, (Pass.WEIGHT_GRAD, DirectWgradWindows()))
            for name, layer in WINDOWS_LAYERS.items()
        ),
        *(
            (f"{name}, {label}", layer, (pass_, schedule))
            for label, layers_of, schedules in (
                ("boxes", boxes.LAYERS, boxes.SCHEDULES.items()),
                ("taps", taps.LAYERS, (*taps.SCHEDULES.items(), *taps.BY_TMA.items())),
                ("turned", TURNED_LAYERS, TURNED_SCHEDULES.items()),
                ("fma", fma.LAYERS, ((fma.PASS, fma.FMA),)),
            )
            for name, layer in layers_of.items()
            for pass_, schedule in schedules
            if refusal(schedule, layer, pass_, H200) is None
        ),
        *(
            (f"{name}, channels", replace(layer, dtype=dtype), (pass_, DirectChannels()))
            for name, layer in CHANNELS_LAYERS.items()
            for dtype in ("float32", "float16", "bfloat16", "float64")
            for pass_ in (Pass.FORWARD, Pass.INPUT_GRAD)
            if refusal(DirectChannels(), replace(layer, dtype=dtype), pass_, H200) is None  # a long sum of float32
        ),
        *(
            (f"{name}, channels", replace(layer, dtype=dtype, channels_last=last), (Pass.WEIGHT_GRAD, channels_grad))
            for name, layer in CHANNELS_GRAD_LAYERS.items()
            for dtype, last in (("float32", True), ("float16", True), ("bfloat16", False), ("float64", False))
        ),
        *(
            (f"{name}, {label}", replace(layer, dtype=dtype), way)
            for label, layers, way in (("dots", DOTS_LAYERS, dots), ("long", LONG_GRAD_LAYERS, long_grad))
            for name, layer in layers.items()
            for dtype in ("float32", "float16", "bfloat16", "float64")
        ),
        *((f"{name}, mirrored", layer, (Pass.INPUT_GRAD, ImplicitGemm())) for name, layer in MIRRORED.items()),
        *((f"{name}, copied", problem, (pass_, transposed.SCHEDULE)) for name, problem, pass_ in transposed.cases()),
        *(
            (f"{name}, {label}", replace(layer, dtype=dtype), (Pass.FORWARD, schedule))
            for label, layers_of, schedule in (
                ("scattered", SCATTER_LAYERS, OverlapGemm()),
                ("grouped", grouped_gemm.LAYERS, GroupedGemm()),
                ("cells", CELLS, Col2imCells()),
                ("pixels", PIXEL_LAYERS, PhaseGemmPixels()),
            )
            for name, layer in layers_of.items()
            for dtype in ("float32", "float16", "bfloat16")
        ),
    ]
    one_format_each = (
        *(GroupedGemm, PhaseGemmPixels, DirectChannels, DirectWgradChannels, DotDgrad),
        *(fma.WindowDgradFma, WindowDgradTransposed, WindowWgradTransposed, type(transposed.SCHEDULE)),
    )
    for name, layer, (pass_, schedule) in layers:
        one_format = layer.channels_last or isinstance(schedule, one_format_each)
        for problem in [layer] if one_format else formats(layer):
            for number, layouts in enumerate(strange_layouts(problem)):
                order = "last" if problem.channels_last else "first"
                label = f"{name}-{order}-{number}-{pass_.value}-{problem.dtype}"
                yield pytest.param(Case(problem, pass_, layouts, schedule.name), id=label)


@pytest.fixture(scope="session")
def gpu_with_kernels(request: pytest.FixtureRequest) -> Gpu:
    """The GPU, with the kernels of all configs that this run asks for in the cache.

    Of several processes that share the run each compiles those of its own tests.
    """
    executor = Gpu(0)
    if hasattr(request.config, "workerinput"):
        return executor
    device = DeviceInfo.of(executor.device)
    asked = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    offers = [offer for case in asked if isinstance(case, (Case, GemmCase)) for offer in case.offers(device)]
    compile_ahead((source for _, program in offers for source in program.sources), device.arch)
    return executor


@pytest.mark.parametrize("case", [*cases(), *strange_cases()])
def test_every_config_is_exact(case: Case, gpu_with_kernels: Gpu) -> None:
    """On poisoned outputs, amid guards."""
    for candidate, program in case.offers(DeviceInfo.of(gpu_with_kernels.device)):
        assert_exact(case.problem, case.pass_, candidate, program, case.layouts, gpu_with_kernels)


@pytest.mark.parametrize("case", list(gemm_cases(20, DeviceInfo.of(DEVICE))) if torch.cuda.is_available() else [])
def test_products(case: GemmCase, gpu_with_kernels: Gpu) -> None:
    """Settings of implicit_gemm beyond what the planner likes best, blocks that take many tiles each."""
    for candidate, program in case.offers(DeviceInfo.of(gpu_with_kernels.device)):
        for _ in range(3):
            assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts, gpu_with_kernels)


@pytest.mark.parametrize("name", RINGS)
def test_work_tiles_around_the_ring(name: str, gpu_with_kernels: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """In clusters, too, whose blocks the emulator runs one by one."""
    share_all_work_tiles(monkeypatch)
    device = DeviceInfo.of(gpu_with_kernels.device)
    case = ring_case(name, device)
    for candidate, program in case.offers(device):
        for _ in range(3):
            assert_exact(case.problem, Pass.FORWARD, candidate, program, case.layouts, gpu_with_kernels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["grouped, every parameter", "rows without taps", "tiny images", "1-D", "more channels than a block"]
)
def test_tiles_are_shared(name: str, dtype: str, gpu_with_kernels: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of grouped_gemm, several of each block, by the blocks of each group and each chunk of output channels."""
    grouped_gemm.share_all_tiles(monkeypatch)
    device = replace(DeviceInfo.of(gpu_with_kernels.device), multiprocessors=16)
    problem = replace(grouped_gemm.LAYERS[name], batch=40 * grouped_gemm.LAYERS[name].batch, dtype=dtype)
    layouts = Layouts.dense(problem)
    for candidate in candidates(GroupedGemm(), problem, Pass.FORWARD, device, layouts):
        program = GroupedGemm().program(problem, Pass.FORWARD, device, layouts, candidate.config)
        assert len(program.steps) == 2
        if name == "more channels than a block":
            assert problem.out_channels_per_group > candidate.config.out_chunk
        for _ in range(3):
            assert_exact(problem, Pass.FORWARD, candidate, program, layouts, gpu_with_kernels)


# Layers that keep every multiprocessor busy: races show there, if anywhere.
BUSY_LAYERS = {
    "stride 1": make((5, 70, 45, 64), 130, 3, 1, 1),
    "stride 2": make((16, 64, 45, 67), 64, 4, 2, 1, bias=True),
    "small images": make((700, 64, 7, 7), 32, 3, 2, 1, 1, bias=True),
    "1-D": make((6, 96, 3001), 48, 16, 8, 4),
    "3-D": make((3, 48, 9, 20, 24), 40, (3, 2, 2), (1, 2, 2), (1, 0, 0)),
}
BUSY_CELLS = {
    "cells of two": make((30, 72, 45, 64), 40, 2, 2, bias=True),
    "cells of small images": make((900, 128, 7, 7), 96, 2, 2, bias=True),
    "cells of four, 1-D": make((6, 200, 7003), 24, 4, 4),
    "cells, 3-D": make((3, 100, 9, 30, 34), 70, 2, 2, bias=True),
}


def busy_cases() -> Iterator[ParameterSet]:
    for name, layer in BUSY_LAYERS.items():
        for formatted in formats(layer):
            for dtype, allowed in (("float32", False), ("float32", True), ("float16", False), ("bfloat16", False)):
                problem = replace(formatted, dtype=dtype, tf32=allowed)
                label = f"{name}-{'last' if formatted.channels_last else 'first'}-{dtype}{'-tf32' if allowed else ''}"
                yield pytest.param(Case(problem, Pass.FORWARD, Layouts.dense(problem), "implicit_gemm"), id=label)
    for name, layer in BUSY_CELLS.items():
        for dtype in ("float32", "float16", "bfloat16"):
            problem = replace(layer, dtype=dtype, tf32=True)
            yield pytest.param(
                Case(problem, Pass.FORWARD, Layouts.dense(problem), "phase_gemm_pixels"), id=f"{name}-{dtype}"
            )


@pytest.mark.parametrize("case", list(busy_cases()))
def test_products_of_busy_layers(case: Case, gpu_with_kernels: Gpu) -> None:
    for candidate, program in case.offers(DeviceInfo.of(gpu_with_kernels.device)):
        for _ in range(3):
            assert_exact(case.problem, case.pass_, candidate, program, case.layouts, gpu_with_kernels)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("name", SCALED_LAYERS)
def test_numbers_of_many_sizes_as_halves(name: str, tf32: bool, gpu_with_kernels: Gpu) -> None:
    """The cores cut sums off, what is lost would be whole numbers."""
    if not DeviceInfo.of(gpu_with_kernels.device).has_wgmma:
        pytest.skip("float32 is multiplied as float16 by Hopper's instruction alone")
    problem = replace(SCALED_LAYERS[name], tf32=tf32)
    programs = list(both(problem, 8))
    compile_ahead((source for program in programs for source in program.sources), gpu_with_kernels.arch)
    for program in programs:
        assert_near(problem, program, *of_many_sizes(problem), gpu_with_kernels, 2.0**-17)


# Streams, graphs, threads, devices


def test_streams() -> None:
    """A call runs on the current stream: its operands come late there, and are NaN for whoever does not wait."""
    operands = make_operands(LAYER, torch.float32, DEVICE)
    passes(LAYER, operands)  # compiles, which would outlast the sleep
    late = operands.map(lambda tensor: torch.full_like(tensor, torch.nan))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        for empty, full in zip(vars(late).values(), vars(operands).values()):
            empty.copy_(full)
        found = passes(LAYER, late)
        assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    assert_right(LAYER, operands, found)


def test_gradients_run_on_the_stream_of_the_call() -> None:
    operands = make_operands(LAYER, torch.float32, DEVICE)
    results(OURS[2], LAYER, operands)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = operands.map(torch.clone)
        found = results(OURS[2], LAYER, late)
    stream.synchronize()
    assert_right(LAYER, operands, [found.output, found.input_grad, found.weight_grad])


@pytest.mark.parametrize("channels_last", [False, True])
def test_graphs_replay_with_other_contents(channels_last: bool) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def operands_of(seed: int) -> Operands:
        operands = make_operands(LAYER, torch.float32, DEVICE, seed)
        return operands.map(lambda t: t.contiguous(memory_format=memory_format) if t.dim() == 4 else t)

    static = operands_of(0)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        passes(LAYER, static)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes(LAYER, static)
    for seed in (1, 2, 3):
        fresh = operands_of(seed)
        for old, new in zip(vars(static).values(), vars(fresh).values()):
            old.copy_(new)
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()
        assert_right(LAYER, fresh, captured)


@pytest.mark.parametrize("allowed", [True, False])
def test_graphs_measure_what_they_multiply(allowed: bool) -> None:
    """float32 as float16: a replay finds the powers of two, and how many bands there are, anew."""
    problem = make((64, 256, 8, 8), 256, 4, 2, 1, tf32=allowed)
    chosen = plan.plan(problem, Pass.FORWARD, DeviceInfo.of(DEVICE)).candidate
    if chosen is None or not getattr(chosen.config, "scaled", False):
        pytest.skip("float32 is multiplied as float16 by Hopper's instruction alone")
    with tf32(allowed):
        static = make_operands(problem, torch.float32, DEVICE)
        wanted = forward(problem, static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = forward(problem, static)
    x = static.input.clone()
    for power in (0, 60, -60):
        static.input.copy_(x * 2.0**power)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, wanted * 2.0**power)
    static.input[::2] *= 2.0**60  # now every other image is far larger than the others: several bands
    captured.fill_(torch.nan)
    graph.replay()
    captured[1::2] *= 2.0**60
    assert ((captured - wanted).abs() <= 1e-4 * wanted.abs().amax()).all()


def test_graphs_of_a_training_step() -> None:
    operands = make_operands(LAYER, torch.float32, DEVICE)
    layer = OUR_MODULES[2](8, 12, LAYER.kernel_size, **constants(LAYER), device=DEVICE)
    x = operands.input.clone().requires_grad_()
    wanted = [x, *layer.parameters()]
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(2):
            torch.autograd.grad(layer(x), wanted, operands.grad_output)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(x)
        gradients = torch.autograd.grad(output, wanted, operands.grad_output)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    graph.replay()
    torch.cuda.synchronize()
    again = layer(x)
    for replayed, eager in zip(
        (output, *gradients), (again, *torch.autograd.grad(again, wanted, operands.grad_output)), strict=True
    ):
        assert torch.equal(replayed, eager)


def test_threads_share_a_layer() -> None:
    """Four threads, a stream each, the same layer: none sees another's pointers."""
    layer = OUR_MODULES[2](8, 12, LAYER.kernel_size, **constants(LAYER), device=DEVICE).requires_grad_(False)
    inputs = [make_operands(LAYER, torch.float32, DEVICE, seed).input for seed in range(4)]
    wanted = [layer(x) for x in inputs]
    torch.cuda.synchronize()
    barrier = threading.Barrier(4)

    def work(index: int) -> int:
        wrong = 0
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            barrier.wait()
            for _ in range(200):
                wrong += not torch.equal(layer(inputs[index]), wanted[index])
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    """Layers run where their tensors lie, and leave the current device as it is."""
    problem = replace(LAYER, kernel_size=(4, 3))  # that no other test has loaded on either device

    def work(current: int) -> None:
        with torch.cuda.device(current):
            for index in (1, 0, 1):
                operands = make_operands(problem, torch.float32, torch.device("cuda", index), index)
                found = passes(problem, operands)
                assert torch.cuda.current_device() == current
                assert torch.empty(1, device="cuda").device.index == current
                assert {result.device.index for result in found} == {index}
                assert_right(problem, operands, found)
                tracked = results(OURS[2], problem, operands)
                assert_right(problem, operands, [tracked.output, tracked.input_grad, tracked.weight_grad])
                assert torch.cuda.current_device() == current

    for current in (0, 1):
        work(current)
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(work, 0).result()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_fresh_thread_begins_on_the_second_gpu() -> None:
    operands = make_operands(LAYER, torch.float32, torch.device("cuda", 1))

    def work() -> tuple[list[Tensor], int]:
        return passes(LAYER, operands), torch.cuda.current_device()

    with ThreadPoolExecutor(1) as fresh:
        found, current = fresh.submit(work).result()
    assert current == 0
    assert_right(LAYER, operands, found)


# Determinism


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "problem",
    [
        make((8, 24, 65, 67), 32, 3),
        make((16, 32, 33, 61), 32, 4, 2, 1, groups=32),
        make((4, 48, 17, 19), 20, (3, 5), (2, 3), (1, 2), dilation=(2, 1)),
        make((4, 40, 4001), 3, 9, 4, 2),
    ],
    ids=str,
)
def test_runs_repeat_bit_for_bit(problem: ConvTransposeProblem, dtype: str) -> None:
    for formatted in formats(problem):
        operands = make_operands(formatted, DTYPES[dtype], DEVICE, make=normal_tensor)
        if formatted.channels_last:
            operands = operands.map(lambda tensor: tensor.contiguous(memory_format=torch.channels_last))
        first = passes(formatted, operands)
        for _ in range(3):
            torch.empty(1 << 20, device=DEVICE).normal_()
            for one, another in zip(first, passes(formatted, operands)):
                assert bool(one.isfinite().all())
                assert torch.equal(one, another)


# Strange tensors


def inside(tensor: Tensor, *index: slice, shape: tuple[int, ...]) -> Tensor:
    """The values in a window of a larger tensor of NaN."""
    return torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)[(..., *index)].copy_(tensor)


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """The values so many elements behind an aligned address."""
    flat = torch.full((tensor.numel() + elements,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return flat[elements:].view(tensor.shape).copy_(tensor)


def reordered(tensor: Tensor, *order: int) -> Tensor:
    """The values with dimensions in another order in memory."""
    inverse = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(inverse)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "without the first column": lambda t: inside(t, slice(1, None), shape=(*t.shape[:-1], t.shape[-1] + 1)),
    "without the last four columns": lambda t: inside(t, slice(-4), shape=(*t.shape[:-1], t.shape[-1] + 4)),
    "every other column": lambda t: inside(t, slice(None, None, 2), shape=(*t.shape[:-1], 2 * t.shape[-1])),
    "some channels of more": lambda t: torch.full_like(t.repeat(1, 3, 1, 1), torch.nan)[
        :, t.shape[1] : 2 * t.shape[1]
    ].copy_(t),
    "one element further": lambda t: shifted(t, 1),
    "four elements further": lambda t: shifted(t, 4),
    "height and width exchanged": lambda t: reordered(t, 0, 1, 3, 2),
    "batch last": lambda t: reordered(t, 1, 2, 3, 0),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "channels last, one element further": lambda t: shifted(t.movedim(1, -1).contiguous(), 1).movedim(-1, 1),
    "channels last, one channel of more": lambda t: inside(
        t.movedim(1, -1), slice(1, None), shape=(t.shape[0], *t.shape[2:], t.shape[1] + 1)
    ).movedim(-1, 1),
    "amid NaN": amid_nan,
    "one value": lambda t: t[:1, :1, :1, :1].clone().expand(t.shape),
    "one image": lambda t: t[:1].clone().expand(t.shape),
    "one column": lambda t: t[..., :1].clone().expand(t.shape),
    "one pixel for each channel": lambda t: t[:, :, :1, :1].clone().expand(t.shape),
    "one channel": lambda t: t[:, :1].clone().expand(t.shape),
}
VIEWED = {
    "every parameter": LAYER,
    "quads": make((2, 8, 6, 16), 4, 4, 2, 1),
    "depthwise": make((3, 6, 9, 12), 6, 3, 1, 1, groups=6, bias=True),
}


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layer", VIEWED)
def test_views(layer: str, view: str, operand: str) -> None:
    problem = VIEWED[layer]
    for dtype in (torch.float32, torch.bfloat16):
        plain = make_operands(problem, dtype, DEVICE)
        operands = replace(plain, **{operand: VIEWS[view](getattr(plain, operand))})
        found = passes(problem, operands)
        assert_right(problem, operands, found)


def test_bias_of_any_strides() -> None:
    operands = make_operands(LAYER, torch.float32, DEVICE)
    assert operands.bias is not None
    for bias in (
        operands.bias.repeat_interleave(2)[::2],
        shifted(operands.bias, 1),
        operands.bias[:1].expand(LAYER.out_channels),
    ):
        changed = replace(operands, bias=bias)
        assert_right(LAYER, changed, passes(LAYER, changed))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_planes_are_added_up(dtype: str) -> None:
    for planes, elements in ((1, 200), (2, 513), (40, 4), (9, 70000), (131, 1153)):
        boxes.assert_planes_are_added_up(planes, elements, dtype, Gpu())


def test_gradients_of_sums() -> None:
    """The gradient that `sum` sends back is one number, expanded."""
    for problem in VIEWED.values():
        operands = make_operands(problem, torch.float32, DEVICE)
        x, w = (tensor.clone().requires_grad_() for tensor in (operands.input, operands.weight))
        output = OURS[2](x, w, operands.bias, **constants(problem))
        output.sum().backward()
        ones = replace(operands, grad_output=torch.ones_like(output))
        assert x.grad is not None
        assert w.grad is not None
        assert_right(problem, ones, [output, x.grad, w.grad])


def test_channels_last() -> None:
    """channels_last weights are enough, as in PyTorch; so is a channels_last input."""
    for problem in VIEWED.values():
        for dtype in (torch.float32, torch.float16):
            operands = make_operands(problem, dtype, DEVICE)
            for names in (("weight",), ("input", "grad_output"), ("input", "weight", "grad_output")):
                last = {n: getattr(operands, n).contiguous(memory_format=torch.channels_last) for n in names}
                changed = replace(operands, **last)
                found = passes(problem, changed)
                assert_right(problem, changed, found)
                if names == ("weight",) and operands.weight.shape[1] == 1:
                    continue  # of one channel, for PyTorch no other than a contiguous one
                assert found[0].is_contiguous(memory_format=torch.channels_last)
                assert found[1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_empty_batch(dims: int) -> None:
    layer = make((0, 4, *(5, 6, 7)[:dims]), 6, 3, 2, 1, 1, 2, True)
    cores = make((0, 32, *(8, 8, 8)[:dims]), 32, 4, 2, 1, dtype="bfloat16", bias=True)  # and tensor maps
    for problem in (*formats(layer), *formats(cores)):
        operands = make_operands(problem, getattr(torch, problem.dtype), DEVICE)
        found = results(OURS[dims], problem, operands)
        assert found.output.shape == problem.output_shape
        assert found.input_grad.shape == problem.input_shape
        assert torch.equal(found.weight_grad.float().cpu(), torch.zeros(problem.weight_shape))
        assert found.bias_grad is not None
        assert torch.equal(found.bias_grad.float().cpu(), torch.zeros(problem.out_channels))
    torch.cuda.synchronize()


def test_many_images() -> None:
    """More than a grid's y or z takes."""
    for problem in (make((100_000, 2, 3, 3), 2, 3), make((70_001, 1, 5), 3, 2, 2)):
        operands = make_operands(problem, torch.float32, DEVICE)
        assert_right(problem, operands, passes(problem, operands))


def test_many_groups() -> None:
    problem = make((2, 70_000, 3, 3), 70_000, 2, groups=70_000)
    operands = make_operands(problem, torch.float32, DEVICE)
    assert_right(problem, operands, passes(problem, operands))


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_more_than_2_31_elements() -> None:
    """An image beyond 2³¹ elements and 4 GiB, whose every output is one product."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(DEVICE)[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    problem = make((1, 1, 32768, 16385), 1, 2, 2, dtype="float16")
    assert problem.elements[2] > 2**31
    x = torch.randint(-1, 2, problem.input_shape, device=DEVICE, dtype=torch.int8).half()
    g = torch.randint(-1, 2, problem.output_shape, device=DEVICE, dtype=torch.int8).half()
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE, dtype=torch.float16)[None, None]
    output, input_grad, weight_grad = passes(problem, Operands(x, w, None, g))
    expected = torch.zeros_like(x)
    for i in range(2):
        for j in range(2):
            assert torch.equal(output[..., i::2, j::2], x * w[0, 0, i, j])
            met = g[..., i::2, j::2]
            expected += met * w[0, 0, i, j]
            # Rounded to half precision at the end, from a sum that float32 holds.
            total = (x * met).sum(dtype=torch.float64).half()
            assert torch.equal(weight_grad[0, 0, i, j], total)
    assert torch.equal(input_grad, expected)


# Compilation and host time


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("layer", VIEWED)
def test_new_sizes_compile_little(layer: str, channels_last: bool) -> None:
    """A pass has few kernels for all sizes, of which a size may want another than most."""

    def call(batch: int, height: int, width: int, all_passes: bool) -> None:
        problem = replace(VIEWED[layer], batch=batch, input_size=(height, width))
        operands = make_operands(problem, torch.float32, DEVICE)
        if channels_last:
            last = torch.channels_last
            operands = operands.map(lambda t: t.contiguous(memory_format=last) if t.dim() == 4 else t)
        if all_passes:
            assert_right(problem, operands, passes(problem, operands))
        else:
            forward(problem, operands)

    def kernels() -> set[KernelSource]:
        """Those that were loaded, or compiled for later calls."""
        return {source for source, *_ in (*launcher._loaded, *launcher._meanwhile)}

    for size in ((2, 8, 8), (2, 8, 9), (0, 9, 9)):  # tiny images, and others; an empty tensor has every format
        call(*size, all_passes=True)
    first = kernels()
    sizes = [(1, 8, 8), (3, 7, 9), (2, 2, 3), (1, 64, 64), (5, 33, 4), (2, 4, 130), (1, 5, 257), (17, 3, 5),
             (2, 40, 24), (300, 2, 2), (0, 5, 7)]  # fmt: skip
    for size in sizes:
        call(*size, all_passes=False)
    further = kernels()
    assert len(further - first) <= 3
    for size in sizes:
        call(*size, all_passes=True)
    assert len(kernels() - further) <= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_lie_anywhere(dtype: torch.dtype) -> None:
    """Kernels that do not pack the weight read it at any address."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4, 128, 32, 32, generator=generator).to(DEVICE, dtype)
    x = x.to(memory_format=torch.channels_last) if dtype == torch.float32 else x
    weight = torch.randn(128, 3, 4, 4, generator=generator).to(DEVICE, dtype)
    flat = torch.empty(weight.numel() + 1, dtype=dtype, device=DEVICE)
    moved = flat[1:].view(weight.shape).copy_(weight)
    wanted = polyphase.conv_transpose2d(x, weight, stride=2, padding=1)
    assert torch.equal(polyphase.conv_transpose2d(x, moved, stride=2, padding=1), wanted)


def test_a_call_allocates_its_workspace() -> None:
    """What `bench` counts is what the plan says."""
    problem = make((128, 256, 4, 4), 128, 4, 2, 1, tf32=True)
    planned = plan.plan(problem, Pass.FORWARD, DeviceInfo.of(DEVICE)).program.workspace_bytes
    operands = make_operands(problem, torch.float32, DEVICE)
    with tf32(True):
        forward(problem, operands)
        found = workspace_megabytes(lambda: forward(problem, operands), DEVICE)
    assert planned > 0
    assert found == pytest.approx(planned / 1e6)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("size", [1, 96])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_can_be_changed_in_place(dtype: torch.dtype, size: int, create_graph: bool) -> None:
    """Whether or not the weight's is a sum of parts."""
    x = torch.randn(2, 4, size, size, dtype=dtype, device=DEVICE, requires_grad=True)
    w, b = (torch.randn(*shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in ((4, 6, 3, 3), (6,)))
    output = OURS[2](x, w, b, 2).square().sum()
    for gradient, leaf in zip(torch.autograd.grad(output, (x, w, b), create_graph=create_graph), (x, w, b)):
        assert not gradient._is_view()
        gradient.mul_(2)
        gradient.add_(leaf)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(2, 72, 5, 13), (3, 9, 1, 1), (1, 133, 3, 4, 11), (5, 16, 70)])
def test_transposes(shape: tuple[int, ...], dtype: str) -> None:
    assert_turns(shape, dtype, Gpu(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "kernel", "stride"), [((32, 512, 5, 5), 5, 2), ((8, 64, 17, 5, 7), 3, 2), ((9, 64, 1, 1), 4, 1)]
)
def test_gradients_lie_as_their_tensors(shape: tuple[int, ...], kernel: int, stride: int, dtype: torch.dtype) -> None:
    """Where tensors are turned to channels_last and back, and where single pixels have every format at once."""
    dims = len(shape) - 2
    problem = make(shape, 64, kernel, stride, dtype=str(dtype).removeprefix("torch."), tf32=True)
    device = DeviceInfo.of(DEVICE)
    if device.has_wgmma and max(shape[2:]) > 1:
        chosen = [plan.plan(problem, pass_, device).schedule for pass_ in TURNED_SCHEDULES]
        assert any(name.endswith("transposed") for name in chosen)
    x, w = (
        torch.randint(-4, 5, size, device=DEVICE, dtype=dtype, requires_grad=True)
        for size in (shape, problem.weight_shape)
    )
    grad = torch.randint(-4, 5, problem.output_shape, device=DEVICE, dtype=dtype)
    found = torch.autograd.grad(OURS[dims](x, w, None, stride), (x, w), grad)
    wide = [each.detach().cpu().double().requires_grad_() for each in (x, w)]
    expected = torch.autograd.grad(TORCH[dims](*wide, None, stride), wide, grad.cpu().double())
    for gradient, leaf, exact in zip(found, (x, w), expected):
        assert gradient.stride() == leaf.stride()
        assert torch.equal(gradient.cpu(), exact.to(dtype))


@pytest.mark.parametrize("channels_last", [False, True])
def test_scattered_layers_carry_inf_and_nan(channels_last: bool) -> None:
    check_inf_and_nan(channels_last, Gpu(0))


@pytest.mark.parametrize(("dtype", "channels", "out_channels"), grouped_gemm.INF_AND_NAN)
def test_grouped_layers_carry_inf_and_nan(dtype: str, channels: int, out_channels: int) -> None:
    assert_carries_inf_and_nan(*grouped_gemm.inf_and_nan_case(dtype, channels, out_channels), Gpu(0))


@pytest.mark.parametrize("bits", [0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1], ids=hex)
@pytest.mark.parametrize("channels_last", [False, True])
def test_boxes_carry_inf_and_nan(channels_last: bool, bits: int) -> None:
    """TMA rounds to TF32: neither does an Inf become a NaN, nor a NaN anything else."""
    problem = make((2, 32, 12, 16), 32, 3, 1, 1, channels_last=channels_last, tf32=True)
    chosen = plan.plan(problem, Pass.FORWARD, DeviceInfo.of(DEVICE)).program
    if chosen is None or not chosen.main.tensor_maps:
        pytest.skip("the planner takes no boxes here")
    operands = make_operands(problem, torch.float32, DEVICE)
    if channels_last:
        operands = operands.map(lambda tensor: tensor.contiguous(memory_format=torch.channels_last))
    operands.input.view(torch.int32)[0, 3, 5, 7] = bits
    with tf32(True):
        found = passes(problem, operands)[0].cpu()
    wanted = reference(problem, operands).output.float()
    assert not bool(wanted.isfinite().all())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.alone
def test_warm_calls_take_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generous: what a call really takes is measured by `python -m polyphase bench`."""
    monkeypatch.setattr(runtime, "POISON", False)
    layer = OUR_MODULES[2](16, 16, 3, 2, 1, device=DEVICE)
    x = torch.randn(1, 16, 8, 8, device=DEVICE)
    rounds = []
    with torch.no_grad():
        for _ in range(40):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                layer(x)
            rounds.append((time.perf_counter() - start) / 100)
    assert min(rounds) < 40e-6, f"{1e6 * min(rounds):.1f} µs"


FIRST_CALL = """
    import time
    import torch, polyphase
    from polyphase.jit import compiler
    x = torch.randint(-3, 4, (2, 8, 17, 19)).float()
    w = torch.randint(-3, 4, (8, 5, 3, 3)).float()
    device_x, device_w = x.cuda(), w.cuda()
    torch.cuda.synchronize()
    start = time.perf_counter()
    y = polyphase.conv_transpose2d(device_x, device_w, stride=2)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert torch.equal(y.cpu(), torch.nn.functional.conv_transpose2d(x, w, stride=2))
    print(compiler.compilations, seconds)
"""


@pytest.mark.alone
def test_first_calls(tmp_path: Path) -> None:
    """A new process compiles into a cold cache, and finds a warm one."""
    cold, warm = (run_python(FIRST_CALL, tmp_path / "kernels").split() for _ in range(2))
    assert int(cold[0]) >= 1
    assert int(warm[0]) == 0
    assert float(cold[1]) < 10, "generous: a second or less is the aim"
    assert float(warm[1]) < 5


def test_first_calls_of_threads(tmp_path: Path) -> None:
    """Eight threads make the first calls of a process, of eight layers, in all passes."""
    run_python(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        import torch
        from helpers import OURS, make_operands, reference, results
        from polyphase import ConvTransposeProblem
        barrier = threading.Barrier(8)

        def work(size):
            problem = ConvTransposeProblem.make((2, size, 7, 9), 3, size, 2)
            operands = make_operands(problem, torch.float32, "cuda")
            barrier.wait()
            found = results(OURS[2], problem, operands)
            for name, wanted in reference(problem, operands).items():
                assert torch.equal(getattr(found, name).cpu(), wanted.float()), (problem, name)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(1, 9)))
        """,
        tmp_path / "kernels",
    )


def test_a_binary_that_does_not_load_is_compiled_again(tmp_path: Path) -> None:
    """An entry whose checksum is right, and which is no binary: somebody's driver may find one too new."""
    run_python(
        """
        import torch, polyphase
        from polyphase.jit import compiler
        sound = compiler._compile_without_spills
        calls = []
        def unsound(source, arch):
            calls.append(source)
            again = calls.count(source) > 1  # a thread may compile other kernels meanwhile
            source, binary, log = sound(source, arch)
            return source, binary if again else b"no binary", log
        compiler._compile_without_spills = unsound
        x, w = torch.ones(1, 1, 2, device="cuda"), torch.ones(1, 1, 1, device="cuda")
        assert polyphase.conv_transpose1d(x, w).tolist() == [[[1.0, 1.0]]]
        assert max(map(calls.count, calls)) == 2
        """,
        tmp_path / "kernels",
    )


def test_named_errors() -> None:
    x = torch.ones(1, 1, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="int32"):
        polyphase.conv_transpose1d(x, torch.ones(1, 1, 2, dtype=torch.int32, device=DEVICE))
