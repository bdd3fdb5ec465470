"""Both gradients of a layer as one prepared call: the programs that it launches, executed by the emulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import polyphase
from emulator import available
from kernel_harness import H200, Emulator
from polyphase import prepared, runtime
from polyphase.prepared import BothGradients, Call
from polyphase.problem import ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.program.program import Program
from polyphase.torch_op import portable
from polyphase.torch_op.memory_format import empty_output

make = ConvTransposeProblem.make
pytestmark = pytest.mark.skipif(not available(), reason="needs Linux and g++")

#: By what is special about their programs.
LAYERS = {
    "steps around both, whose buffers share memory": make((2, 64, 8, 8), 64, 4, 2, 1),
    "a copy that both read": make((8, 64, 8, 8), 64, 5, 1, 1, dtype="float16"),
    "channels_last": make((2, 8, 5, 6), 3, 4, 2, 1, channels_last=True),
    "one dimension": make((2, 6, 20), 4, 5, 3, 1),
    "half precision, depthwise": make((2, 8, 6, 6), 8, 3, 2, 1, groups=8, dtype="float16"),
}


class Emulated:
    """Stands for an executable on a GPU, and for its allocator: addresses are those of CPU tensors that it knows."""

    tensors: dict[int, Tensor]
    launched: list[int]

    def __init__(self, program: Program, arch: str, index: int, places: dict[str, int]) -> None:
        sizes = {buffer.name: buffer.bytes for buffer in program.buffers}
        self.steps = [(step, [(places[name], sizes.get(name)) for name in step.operands]) for step in program.steps]

    def then(self, other: Emulated) -> Emulated:
        both = Emulated.__new__(Emulated)
        both.steps = self.steps + other.steps
        return both

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        self.launched.append(len(self.steps))
        for step, operands in self.steps:
            Emulator()(step, [self._at(addresses[place], size) for place, size in operands])

    def _at(self, address: int, size: int | None) -> Tensor | None:
        if not address:
            return None
        if size is None:
            return self.tensors[address]
        start, whole = max((start, each) for start, each in self.tensors.items() if start <= address)
        return whole[address - start :][:size]

    @classmethod
    def empty(cls, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        return cls.know(tensor.fill_(0xFF if dtype == torch.uint8 else float("nan")))

    @classmethod
    def know(cls, tensor: Tensor) -> Tensor:
        cls.tensors[tensor.data_ptr()] = tensor
        return tensor


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many steps each launch has had."""
    monkeypatch.setattr(Emulated, "tensors", {}, raising=False)
    monkeypatch.setattr(Emulated, "launched", [], raising=False)
    monkeypatch.setattr(prepared, "Executable", Emulated)
    monkeypatch.setattr(runtime, "empty_on_cpu", Emulated.empty)
    monkeypatch.setattr(runtime, "tf32_allowed", lambda: False)
    monkeypatch.setattr(runtime, "soonest", lambda program, *_: program)
    monkeypatch.setattr(runtime, "compile_meanwhile", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(DeviceInfo, "of", staticmethod(lambda device: H200))
    runtime.forget_prepared_calls()
    yield Emulated.launched
    runtime.forget_prepared_calls()


def operands_of(problem: ConvTransposeProblem) -> list[Tensor]:
    """Input, weight and gradient of the output: integers so small that every sum is exact."""
    rng = torch.Generator().manual_seed(1)
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    tensors = [torch.randint(-2, 3, shape, generator=rng).to(getattr(torch, problem.dtype)) for shape in shapes]
    if problem.channels_last:
        tensors = [each.contiguous(memory_format=torch.channels_last) for each in tensors]
    return [Emulated.know(each) for each in tensors]


def prepare(problem: ConvTransposeProblem, x: Tensor, w: Tensor, g: Tensor) -> tuple[Call, Call]:
    constants = (problem.stride, problem.padding, problem.output_padding, problem.dilation, problem.groups)
    return runtime.input_grad_call(g, w, *constants), runtime.weight_grad_call(x, g, problem.kernel_size, *constants)


def expected(problem: ConvTransposeProblem, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    constants = (problem.stride, problem.padding, problem.output_padding, problem.dilation, problem.groups)
    x, w, g = x.double(), w.double(), g.double()
    return portable.input_grad(g, w, *constants), portable.weight_grad(x, g, problem.kernel_size, *constants)


@pytest.mark.parametrize("name", LAYERS)
def test_both_are_what_each_is(name: str, emulated: list[int]) -> None:
    problem = LAYERS[name]
    tensors = operands_of(problem)
    calls = prepare(problem, *tensors)
    both = BothGradients(*calls)
    count = sum(len(call.program.steps) for call in calls) - (name == "a copy that both read")
    assert all(call.program.buffers for call in calls) or name != "steps around both, whose buffers share memory"
    assert (calls[1].final_strides is not None) == problem.channels_last
    for _ in range(2):
        emulated.clear()
        got = both(*tensors)
        assert emulated == [count], "one launch of all steps"
        assert got[1].stride() == empty_output(problem.weight_shape, tensors[0], tensors[2]).stride()
        for result, wanted, call in zip(got, expected(problem, *tensors), calls):
            assert torch.equal(result.double(), wanted)
            assert result.stride() == (call.final_strides or call.strides)
            assert result._base is None
    alone = calls[0](tensors[2], tensors[1]), calls[1](tensors[0], tensors[2])
    for result, other in zip(got, alone):
        assert torch.equal(result, other)
        assert result.stride() == other.stride()


def test_a_kept_weight_is_not_packed_again(emulated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The input's gradient then has a launch of its own, which knows of packed weights."""
    problem = LAYERS["steps around both, whose buffers share memory"]
    x, w, g = operands_of(problem)
    calls = prepare(problem, x, w, g)
    both = BothGradients(*calls)
    monkeypatch.setattr(Call, "_launch_of_kept", lambda call, kept: call._launch)
    layer = polyphase.ConvTranspose2d(64, 64, 4, 2, 1)
    layer.weight = torch.nn.Parameter(w)
    Emulated.know(layer.weight)
    polyphase.freeze(layer)
    for result, wanted in zip(both(x, layer.weight, g), expected(problem, x, w, g)):
        assert torch.equal(result.double(), wanted)
    assert emulated == [len(call.program.steps) for call in calls]
