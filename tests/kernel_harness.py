"""Runs one kernel config exactly as the planner launches it, through the emulator or on a GPU.

Operands and outputs lie amid guards, all of it NaN until it is written, so that reading beside an operand shows, and so
does an element of the output that is left out or written beside it.
"""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from emulator import EmulatedKernel, text_of
from helpers import TORCH, constants
from polyphase.plan.shortlist import candidates
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import ELEMENT
from polyphase.problem.layouts import ALIGNMENT, Layouts, Strides, dense_strides, extent
from polyphase.program.params import params_of
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, GRAD, SRC, WEIGHT, Step, X
from polyphase.program.struct_layout import Struct
from polyphase.program.tensor_map import TENSOR_MAP_BYTES, TensorMap
from polyphase.schedules.schedule import Candidate, Schedule

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}

#: Bytes before and behind every tensor; a multiple of every alignment.
GUARD = 256


class Executor(Protocol):
    """Where a step runs: its operands lie on ``device``, None is a null pointer."""

    device: torch.device

    def __call__(self, step: Step, tensors: Sequence[Tensor | None]) -> None: ...


class Emulator:
    """The CPU; threads and blocks run in ``order``, or in several that must agree (``order=None``)."""

    device = torch.device("cpu")

    def __init__(self, order: str | int | None = "forward") -> None:
        self.order = order

    def __call__(self, step: Step, tensors: Sequence[Tensor | None]) -> None:
        if 0 in step.grid:
            return
        kernel = EmulatedKernel(text_of(step.source), step.source.kernel)
        geometry = (ctypes.c_ubyte * len(step.params)).from_buffer_copy(step.params)
        for described, place in zip(step.tensor_maps, params_of(step.source).tensor_maps):
            geometry[place : place + TENSOR_MAP_BYTES] = tensor_map(described)
        parameters = [*tensors, geometry] if step.params else tensors
        arguments = (step.grid, step.block, step.shared_bytes, parameters)
        if self.order is None:
            kernel.launch_in_every_order(*arguments)
        else:
            kernel.launch(*arguments, order=self.order)


def tensor_map(boxes: TensorMap) -> bytes:
    """The emulator's ``TensorMap`` (tests/emulator/cuda_shim.h)."""
    assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in boxes.strides)
    assert all(0 < side <= 256 for side in boxes.spans)
    assert all(0 < step <= 8 for step in boxes.steps)
    assert boxes.steps[0] == 1
    inner = boxes.box[0] * DTYPE_BYTES[boxes.dtype]
    assert inner % 16 == 0
    assert boxes.swizzle in (16, inner)
    settings = boxes.swizzle, boxes.tf32, *boxes.steps
    return struct.pack("<4q17i", *boxes.strides, *boxes.sizes, *boxes.box, *settings).ljust(TENSOR_MAP_BYTES, b"\0")


class Gpu:
    """A CUDA device, its current stream."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.arch = DeviceInfo.of(self.device).arch

    def __call__(self, step: Step, tensors: Sequence[Tensor | None]) -> None:
        from polyphase.jit.launcher import Executable

        places = {name: place for place, name in enumerate(step.operands)}
        executable = Executable(Program((step,)), self.arch, self.device.index, places)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        executable(stream, [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class Buffer:
    """A tensor amid guards. It is made on the host and copied to the device, and back, as a whole."""

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: Strides,
        dtype: torch.dtype,
        device: torch.device,
        values: Tensor | None = None,
        offset: int = 0,
        guard: int = GUARD,
    ) -> None:
        """``values`` are what it holds, NaN without; it starts ``offset`` elements behind an aligned address."""
        self._shape, self._strides = shape, strides[:2] + strides[5 - (len(shape) - 2) :]
        self._dtype = dtype
        self._start = guard // dtype.itemsize + offset
        self._end = self._start + extent(shape, strides)
        # The host's allocator aligns less than a GPU's: start where the address is a multiple of ALIGNMENT.
        spare = torch.empty(self._end * dtype.itemsize + guard + ALIGNMENT, dtype=torch.uint8)
        skip = -spare.data_ptr() % ALIGNMENT
        flat = spare[skip : skip + self._end * dtype.itemsize + guard].fill_(0xFF)
        if values is not None:
            self._view(flat).copy_(values)
        self._flat = flat.to(device)
        self.tensor = self._view(self._flat)

    def _view(self, flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        elements = flat[: self._end * self._dtype.itemsize].view(dtype or self._dtype)
        return elements[self._start :].as_strided(self._shape, self._strides, elements.storage_offset() + self._start)

    def read(self) -> Tensor:
        """What it holds now, on the host; raises AssertionError where a guard, or a gap, was written to."""
        flat = self._flat.cpu()
        head, tail = flat[: self._start * self._dtype.itemsize], flat[self._end * self._dtype.itemsize :]
        assert bool((head == 0xFF).all()), "an element before the output was written"
        assert bool((tail == 0xFF).all()), "an element behind the output was written"
        found, between = self._view(flat), flat.clone()
        self._view(between, _BITS[self._dtype.itemsize]).fill_(-1)
        assert bool((between == 0xFF).all()), "an element between those of the output was written"
        return found


def run(
    problem: ConvTransposeProblem,
    pass_: Pass,
    program: Program,
    layouts: Layouts,
    operands: tuple[Tensor, Tensor],
    bias: Tensor | None = None,
    executor: Executor | None = None,
    guard: int = GUARD,
    operands_of: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The pass computed by a program, on the host; ``operands`` as the pass takes them, in their shapes.

    ``operands_of``: what epilogue and prologue of ``problem`` read, by the names in ``problem.named_operands``.
    """
    executor = executor or Emulator()
    dtype = DTYPES[problem.dtype]

    def place(values: Tensor, strides: Strides) -> Buffer:
        offset = 0 if layouts.aligned else 1
        return Buffer(tuple(values.shape), strides, dtype, executor.device, values, offset, guard)

    def flat(elements: int, dtype: torch.dtype) -> Buffer:
        return Buffer((1, elements), (elements, 1, 0, 0, 0), dtype, executor.device, None, 0, guard)

    first, second = operands
    buffers: dict[str, Any] = {BIAS: None if bias is None else place(bias.reshape(1, -1), (0, 1, 0, 0, 0))}
    if pass_ is Pass.WEIGHT_GRAD:
        buffers |= {X: place(first, layouts.input), GRAD: place(second, layouts.output)}
        buffers[DST] = dst = flat(problem.elements[1], dtype)
    else:
        forward = pass_ is Pass.FORWARD
        read, written = (layouts.input, layouts.output) if forward else (layouts.output, layouts.input)
        weight = second.movedim(1, -1) if layouts.weight_channels_last else second
        buffers |= {SRC: place(first, read), WEIGHT: place(weight.reshape(1, -1), (0, 1, 0, 0, 0))}
        shape = problem.output_shape if forward else problem.input_shape
        buffers[DST] = dst = Buffer(shape, written, dtype, executor.device, None, 0, guard)
    for name, values in (operands_of or {}).items():
        role = problem.named_operands[name]
        if role.per == ELEMENT:
            buffers[name] = Buffer(problem.output_shape, layouts.output, dtype, executor.device, values, 0, guard)
        else:
            kind = torch.float32 if role.wide and dtype != torch.float64 else dtype
            row = values.reshape(1, -1)
            buffers[name] = Buffer(row.shape, (0, 1, 0, 0, 0), kind, executor.device, row, 0, guard)
    for each in program.buffers:
        buffers[each.name] = flat(each.elements, torch.uint8 if each.dtype == "uint8" else DTYPES[each.dtype])
    for step in program.steps:
        given = [buffers[name] for name in step.operands]
        executor(step, [None if buffer is None else buffer.tensor for buffer in given])
    for each in program.buffers:
        buffers[each.name].read()  # its guards
    found = dst.read()
    if pass_ is not Pass.WEIGHT_GRAD:
        return found
    inputs, outputs, *kernel = problem.weight_shape
    if program.dst_channels_last:
        return found.view(inputs, *kernel, outputs).movedim(-1, 1)
    return found.view(problem.weight_shape)


def params(program: Program) -> dict[str, Any]:
    """What the last parameter of a program's main kernel holds, by the names that the kernel has for it."""
    return read(params_of(program.main.source), program.main.params)


def read(layout: Struct, packed: bytes) -> dict[str, Any]:
    """The values by which `Struct.pack` gives these bytes."""
    return _values(layout, iter(struct.unpack("<" + layout.format, packed)))


def _values(layout: Struct, numbers: Iterator[Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, (_, kind, length) in layout.given.items():
        found = [next(numbers) if isinstance(kind, str) else _values(kind, numbers) for _ in range(length or 1)]
        if isinstance(kind, Struct) and kind.name == "Divisor":
            found = [each["value"] for each in found]
        values[name] = found if length else found[0]
    return values


def operand_shapes(problem: ConvTransposeProblem, pass_: Pass) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a pass's two operands."""
    return {
        Pass.FORWARD: (problem.input_shape, problem.weight_shape),
        Pass.INPUT_GRAD: (problem.output_shape, problem.weight_shape),
        Pass.WEIGHT_GRAD: (problem.input_shape, problem.output_shape),
    }[pass_]


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Small integers in float64: every sum of their products is exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, dtype=torch.float64)


def reference(
    problem: ConvTransposeProblem, pass_: Pass, operands: tuple[Tensor, Tensor], bias: Tensor | None = None
) -> Tensor:
    """The pass in float64 by PyTorch."""
    function = TORCH[problem.dims]
    options = constants(problem)
    first, second = operands
    if pass_ is Pass.FORWARD:
        return function(first, second, bias, **options)
    if pass_ is Pass.INPUT_GRAD:
        x = torch.zeros(problem.input_shape, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(function(x, second, **options), x, first)[0]
    weight = torch.zeros(problem.weight_shape, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(function(first, weight, **options), weight, second)[0]


@lru_cache(maxsize=64)
def _case(problem: ConvTransposeProblem, pass_: Pass) -> tuple[tuple[Tensor, Tensor], Tensor | None, Tensor]:
    """Operands, bias and result of a pass; ``problem`` in any dtype and memory format, for all of them."""
    seed = zlib.crc32(f"{problem} {pass_}".encode())
    first, second = operand_shapes(problem, pass_)
    operands = integers(first, seed), integers(second, seed + 1)
    bias = integers((problem.out_channels,), seed + 2) if problem.bias and pass_ is Pass.FORWARD else None
    return operands, bias, reference(problem, pass_, operands, bias)


def assert_exact(
    problem: ConvTransposeProblem,
    pass_: Pass,
    candidate: Candidate,
    program: Program,
    layouts: Layouts | None = None,
    executor: Executor | None = None,
    guard: int = GUARD,
) -> None:
    """The config's result is that of float64, rounded once, bit for bit."""
    operands, bias, wide = _case(replace(problem, dtype="float64", channels_last=False), pass_)
    out = run(problem, pass_, program, layouts or Layouts.dense(problem), operands, bias, executor, guard)
    expected = wide.to(DTYPES[problem.dtype])
    wrong = ~(out == expected)
    if wrong.any():
        index = tuple(int(i) for i in wrong.nonzero()[0])
        pytest.fail(
            f"{candidate.describe()} in the {pass_.value} of {problem}: {int(wrong.sum())} of {wrong.numel()} elements "
            f"are wrong, the first at {index}: {out[index].item()} instead of {expected[index].item()}"
        )


def formats(problem: ConvTransposeProblem) -> list[ConvTransposeProblem]:
    """The problem in every memory format that PyTorch has for its dimensions."""
    return [problem] if problem.dims == 1 else [problem, replace(problem, channels_last=True)]


def in_formats(
    layers: Mapping[str, ConvTransposeProblem], devices: Sequence[DeviceInfo]
) -> Iterator[tuple[str, ConvTransposeProblem, DeviceInfo, int, str]]:
    """Layers in all memory formats, without ``devices`` on an H200 and by turns on an A100.

    Each with its name, the device, its number, and a name of all that.
    """
    number = 0
    for layer, problem in layers.items():
        for formatted in formats(problem):
            number += 1
            for device in devices or ((H200, A100) if number % 3 == 0 else (H200,)):
                order = "last" if formatted.channels_last else "first"
                yield layer, formatted, device, number, f"{layer}-{order}-{device.arch}"


def strange_layouts(problem: ConvTransposeProblem) -> Iterator[Layouts]:
    """The problem's tensors dense, with the weight's other order, unaligned, rows of wider tensors, columns apart."""
    dense = Layouts.dense(problem)
    yield dense
    yield replace(dense, weight_channels_last=not dense.weight_channels_last)
    yield replace(dense, aligned=False)

    def wider(shape: tuple[int, ...], width: int) -> Strides:
        return dense_strides((*shape[:-1], width), problem.channels_last)

    shapes = problem.input_shape, problem.output_shape
    input, output = (wider(shape, shape[-1] + 3) for shape in shapes)
    yield replace(dense, input=input, output=output)
    input, output = ((*strides[:4], 2 * strides[4]) for strides in (wider(shape, 2 * shape[-1]) for shape in shapes))
    yield replace(dense, input=input, output=output)


#: The device that single schedules are tested for.
H200, A100 = DeviceInfo.for_arch("sm_90a"), DeviceInfo.for_arch("sm_80")


def unguarded(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps that replace the result of inexact copies, as steps that always run."""
    return tuple(
        replace(step, source=step.source.with_constants(GUARDED=False), operands=step.operands[:-1]) for step in steps
    )


def offers(
    schedule: Schedule,
    problem: ConvTransposeProblem,
    pass_: Pass = Pass.FORWARD,
    layouts: Layouts | None = None,
    device: DeviceInfo = H200,
) -> list[tuple[Candidate, Program]]:
    """What a schedule offers, and its launches."""
    layouts = layouts or Layouts.dense(problem)
    assert schedule.supports(problem, pass_, device) is None
    return [
        (candidate, schedule.program(problem, pass_, device, layouts, candidate.config))
        for candidate in candidates(schedule, problem, pass_, device, layouts)
    ]


def gradient_cases(
    layers: Mapping[str, ConvTransposeProblem], without_weight: Collection[str] = ()
) -> Iterator[ParameterSet]:
    """Layers in both gradients, but for those without a weight gradient."""
    for name, problem in layers.items():
        for pass_ in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
            if pass_ is Pass.INPUT_GRAD or name not in without_weight:
                yield pytest.param(problem, pass_, id=f"{name}-{pass_.value}")


def assert_one_config_exact(schedule: Schedule, problem: ConvTransposeProblem, pass_: Pass) -> None:
    """In the emulator, on dense tensors."""
    found = offers(schedule, problem, pass_)
    seed = zlib.crc32(f"{problem} {pass_}".encode())
    candidate, program = found[seed % len(found)]
    assert_exact(problem, pass_, candidate, program, executor=Emulator(seed % 1000))


def assert_kinds_exact(
    schedule: Schedule, problem: ConvTransposeProblem, pass_: Pass, kinds: Iterable[Layouts] | None = None
) -> int:
    """In the emulator, on tensors of each kind, a config of each by turns; returns the kinds that have a config."""
    order, met = zlib.crc32(str(problem).encode()), 0
    for turn, layouts in enumerate(kinds or strange_layouts(problem)):
        if found := offers(schedule, problem, pass_, layouts):
            candidate, program = found[(order + turn) % len(found)]
            assert_exact(problem, pass_, candidate, program, layouts, Emulator(order % 1000))
            met += 1
    return met


def assert_no_races(schedule: Schedule, problem: ConvTransposeProblem, pass_: Pass) -> Candidate:
    """The first config, on dense tensors, in several orders of threads and blocks that must agree."""
    candidate, program = offers(schedule, problem, pass_)[0]
    assert_exact(problem, pass_, candidate, program, executor=Emulator(order=None))
    return candidate


def assert_float32_exact(program: Program, problem: ConvTransposeProblem, pass_: Pass, most: float) -> None:
    """The error, relative to the result's norm, is that of sums in short chains of float32."""
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randn(shape, generator=generator) for shape in operand_shapes(problem, pass_))
    found = run(problem, pass_, program, Layouts.dense(problem), (first, second)).double()
    exact = reference(problem, pass_, (first.double(), second.double()))
    assert (found - exact).norm() / exact.norm() < most


def assert_carries_inf_and_nan(
    problem: ConvTransposeProblem, pass_: Pass, programs: Iterable[Program], executor: Executor
) -> None:
    """What is not finite reaches the results that it should, and no others, whatever tensor cores make of it.

    A 2-D layer of at least 10 input channels; parts of an infinite value are none, nor is what it is times a zero.
    """
    kind, generator = DTYPES[problem.dtype], torch.Generator().manual_seed(3)
    first, second = (torch.randn(shape, generator=generator).to(kind) for shape in operand_shapes(problem, pass_))
    bias = torch.randn(problem.out_channels, generator=generator).to(kind) if problem.bias else None
    second.clamp_(-1, 1)  # so that no product overflows
    for place, value in enumerate((math.inf, -math.inf, math.nan, torch.finfo(kind).max)):
        first[place % 2, place, 2 * place, 2 * place] = value
    if kind is torch.float32:
        first.view(torch.int32)[0, 4, 8, 0] = 0x7FFFFFFF  # NaN as GPUs make it
    if pass_ is Pass.FORWARD:  # the reference's input gradient meets zeros beside the tensor
        second[7, 1, 2, 2], second[9, 2, 0, 0] = math.inf, math.nan
    wide = None if bias is None else bias.double()
    exact = reference(problem, pass_, (first.double(), second.double()), wide).to(kind)
    assert exact.isnan().any()
    assert exact.isinf().any()
    assert exact.isfinite().any()
    for program in programs:
        found = run(problem, pass_, program, Layouts.dense(problem), (first, second), bias, executor)
        torch.testing.assert_close(found, exact, equal_nan=True, rtol=2e-2 if kind.itemsize == 2 else 1e-5, atol=1e-2)


def lists_of_sizes(schedule: Schedule, layer: ConvTransposeProblem, pass_: Pass) -> set[tuple[Any, ...]]:
    """The configs that a 2-D layer has at several sizes: one list where they do not depend on the size."""
    lists = set()
    for batch, size in ((1, (8, 16)), (7, (33, 40)), (300, (16, 16)), (2, (128, 256))):
        sized = replace(layer, batch=batch, input_size=size)
        lists.add(tuple(each.config for each in candidates(schedule, sized, pass_, H200, Layouts.dense(sized))))
    return lists


def assert_rounds_to_nearest(problem: ConvTransposeProblem, pass_: Pass, program: Program) -> None:
    """The cores truncate: operands that were not rounded would be off by up to twice as much, all in one direction."""
    generator = torch.Generator().manual_seed(5)
    first, second = (
        1 + torch.rand(shape, generator=generator, dtype=torch.float64) for shape in operand_shapes(problem, pass_)
    )
    operands = first.float().double(), second.float().double()
    found = run(problem, pass_, program, Layouts.dense(problem), operands).double()
    exact = reference(problem, pass_, operands)
    error = (found - exact) / exact
    assert error.abs().max() < 2**-11
    assert error.mean().abs() < 2**-15, program.main.source.kernel


def choices(schedule: Schedule, problem: ConvTransposeProblem) -> Iterator[tuple[Layouts, Candidate, Program]]:
    """A config on tensors of one kind, every third of them dense; on a GPU it is all configs and kinds."""
    all_layouts, number = list(strange_layouts(problem)), zlib.crc32(str(problem).encode())
    layouts = all_layouts[max(0, number % 6 - 1)]
    found = offers(schedule, problem, layouts=layouts)
    yield (layouts, *found[number // 6 % len(found)])


def cases(layers: Mapping[str, ConvTransposeProblem]) -> Iterator[ParameterSet]:
    """Layers in float32 and bfloat16; where there are two memory formats, one in each, by turns."""
    for number, (name, problem) in enumerate(layers.items(), start=1):
        for turn, dtype in enumerate(("float32", "bfloat16"), start=number):
            both = formats(replace(problem, dtype=dtype))
            formatted = both[turn % len(both)]
            order = "last" if formatted.channels_last else "first"
            yield pytest.param(formatted, id=f"{name}-{dtype}-{order}")
