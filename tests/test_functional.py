"""The functions: values, dtypes, memory formats, autocast, and what surrounds a call."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import polyphase
from helpers import (
    OURS,
    TORCH,
    Operands,
    Results,
    amid_nan,
    assert_as_accurate_as_torch,
    constants,
    integer_tensor,
    magnitudes,
    make_operands,
    normal_tensor,
    random_problem,
    reference,
    results,
    rounding_eps,
)
from polyphase import ConvTransposeProblem, functional
from polyphase.torch_op import call_cache
from polyphase.torch_op.memory_format import is_channels_last

make = ConvTransposeProblem.make
REAL = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}

PROBLEMS = [
    make((2, 3, 11), 4, 5, stride=3, padding=2, output_padding=1, bias=True),
    make((2, 4, 5, 6), 6, (3, 2), stride=(2, 1), padding=1, output_padding=(1, 0), groups=2, bias=True),
    make((2, 4, 5, 6), 4, 4, stride=2, padding=1, groups=4),
    make((2, 3, 4, 5), 2, 2, stride=2, output_padding=(3, 2), dilation=(4, 3)),
    make((1, 17, 9, 7), 21, 3, padding=1),
    make((1, 2, 3, 4, 5), 3, (2, 3, 1), stride=(2, 1, 3), padding=(0, 1, 0), output_padding=(1, 0, 2), bias=True),
]


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_as_accurate_as_pytorch(problem: ConvTransposeProblem, dtype: torch.dtype, device: torch.device) -> None:
    operands = make_operands(problem, dtype, device, make=normal_tensor)
    expected, magnitude = reference(problem, operands), magnitudes(problem, operands)
    theirs = results(TORCH[problem.dims], problem, operands)
    for name, tensor in results(OURS[problem.dims], problem, operands).items():
        ref64 = getattr(expected, name)
        eps = rounding_eps(ref64, getattr(magnitude, name), dtype, device)
        assert_as_accurate_as_torch(tensor, getattr(theirs, name), ref64, eps)


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_exact_on_integers(problem: ConvTransposeProblem, dtype: torch.dtype, device: torch.device) -> None:
    operands = make_operands(problem, dtype, device)
    expected = reference(problem, operands)
    for name, tensor in results(OURS[problem.dims], problem, operands).items():
        assert tensor.dtype == dtype
        assert tensor.device.type == device.type
        assert torch.equal(tensor.cpu(), getattr(expected, name).to(dtype)), name


def test_integers_on_the_cpu() -> None:
    problem = PROBLEMS[1]
    operands = make_operands(problem, torch.int64)
    got = polyphase.conv_transpose2d(operands.input, operands.weight, operands.bias, **constants(problem))
    assert torch.equal(got.double(), reference(problem, operands).output)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_unbatched(problem: ConvTransposeProblem, device: torch.device) -> None:
    operands = make_operands(problem, device=device)
    call = OURS[problem.dims]
    arguments = (operands.weight, operands.bias)
    batched = call(operands.input[:1], *arguments, **constants(problem))
    unbatched = call(operands.input[0], *arguments, **constants(problem))
    assert unbatched.shape == batched.shape[1:]
    assert torch.equal(unbatched, batched[0])


NO_PIXELS = [make((0, 4, 0), 6, 3, bias=True), make((0, 4, 5, 0), 6, 3, stride=2), make((0, 4, 0, 0, 0), 6, 3)]


@pytest.mark.parametrize("problem", [*(replace(problem, batch=0) for problem in PROBLEMS), *NO_PIXELS], ids=str)
def test_no_images(problem: ConvTransposeProblem, device: torch.device) -> None:
    operands = make_operands(problem, torch.float32, device)
    got = results(OURS[problem.dims], problem, operands)
    assert got.output.shape == problem.output_shape
    assert got.input_grad.shape == problem.input_shape
    assert not got.weight_grad.any()
    assert got.bias_grad is None or not got.bias_grad.any()


def in_format(tensor: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return tensor.contiguous()
    if tensor.dim() == 3:
        return tensor.unsqueeze(2).contiguous(memory_format=torch.channels_last).squeeze(2)
    return tensor.contiguous(memory_format=FORMATS[tensor.dim() - 2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dims", "sizes"), [(1, (5,)), (1, (1,)), (2, (5, 6)), (2, (1, 1)), (2, (5, 1)), (3, (4, 5, 6)), (3, (1, 1, 1))]
)
@pytest.mark.parametrize(("in_channels", "out_channels", "groups"), [(4, 6, 1), (4, 4, 4), (1, 6, 1), (4, 1, 1)])
@pytest.mark.parametrize("kernel", [1, 2])
def test_memory_format_is_pytorchs(
    dims: int,
    sizes: tuple[int, ...],
    in_channels: int,
    out_channels: int,
    groups: int,
    kernel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Strides of the output equal PyTorch's for every mixture of formats, ambiguous sizes included.

    On the CPU PyTorch's own depend on the processor in one case: in three dimensions the result is channels_last where
    oneDNN computes it, and for bfloat16 that takes AVX-512. polyphase's do not: they are those of float32 there.
    """
    by_onednn = device.type == "cpu" and dims == 3 and dtype in (torch.float32, torch.bfloat16)
    if by_onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of PyTorch has no oneDNN, and no format of its own in three dimensions")
    same = not (by_onednn and dtype == torch.bfloat16) or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    theirs_in = dtype if same else torch.float32
    x = torch.randn(2, in_channels, *sizes).to(device, dtype)
    w = torch.randn(in_channels, out_channels // groups, *[kernel] * dims).to(device, dtype)
    for x_last, w_last in itertools.product((False, True), repeat=2):
        x = in_format(x, x_last)
        w = in_format(w, w_last)
        arguments: dict[str, Any] = {"stride": 2, "groups": groups}
        ours, theirs = OURS[dims](x, w, **arguments), TORCH[dims](x.to(theirs_in), w.to(theirs_in), **arguments)
        assert ours.stride() == theirs.stride(), (x.stride(), w.stride())


def test_memory_format_of_signals(device: torch.device) -> None:
    """Where the channels of a 1-D weight are innermost, those of the output and of both gradients are, as PyTorch's."""
    problem = make((2, 4, 5), 6, 3, stride=2, bias=True)
    operands = make_operands(problem, torch.float32, device)
    operands.weight, operands.grad_output = (in_format(t, True) for t in (operands.weight, operands.grad_output))
    ours, theirs = (results(functions[1], problem, operands) for functions in (OURS, TORCH))
    for name, expected in reference(problem, operands).items():
        assert torch.equal(getattr(ours, name).cpu().double(), expected), name
        assert getattr(ours, name).stride() == getattr(theirs, name).stride(), name
    assert ours.output.stride() == (66, 1, 6)


def test_memory_format_of_signals_of_one_element(device: torch.device) -> None:
    """They are contiguous however they lie, so PyTorch does not copy them, and takes the format of their strides."""
    x = torch.randn(3, 1, 4, device=device).transpose(1, 2)
    w = torch.randn(4, 6, 3, device=device)
    assert polyphase.conv_transpose1d(x, w).stride() == torch.conv_transpose1d(x, w).stride() == (18, 1, 6)


def test_is_channels_last_is_suggest_memory_format() -> None:
    """Against an operator of PyTorch that allocates its output by the C++ rule."""
    rng = random.Random(0)
    seen = set()
    for _ in range(400):
        sizes = [rng.choice((1, 1, 2, 3)) for _ in range(4)]
        order = rng.sample(range(4), 4)
        dense = torch.zeros([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
        strides = [rng.choice((stride, stride, stride, 7, 0)) for stride in dense.stride()]
        tensor = torch.zeros(2000).as_strided(sizes, strides)
        wider = torch.nn.functional.interpolate(tensor.expand(*sizes), scale_factor=2.0, mode="nearest")
        expected = wider.is_contiguous(memory_format=torch.channels_last) and not wider.is_contiguous()
        if wider.shape[1] == 1:  # both at once: the result does not tell
            continue
        assert is_channels_last(tensor) == expected, (sizes, strides)
        seen.add(expected)
    assert seen == {False, True}


@pytest.mark.parametrize("step", [1, 2, 3])
def test_reads_nothing_beside_its_operands(step: int, device: torch.device) -> None:
    for problem in PROBLEMS:
        operands = make_operands(problem, torch.float32, device)
        expected = reference(problem, operands)
        for name, tensor in results(OURS[problem.dims], problem, operands.map(lambda t: amid_nan(t, step))).items():
            assert torch.equal(tensor.cpu().double(), getattr(expected, name)), name


def test_expanded_operands(device: torch.device) -> None:
    problem = PROBLEMS[1]
    operands = make_operands(problem, torch.float32, device)
    operands.input = operands.input[:1, :, :1].expand(problem.input_shape)
    operands.grad_output = operands.grad_output[..., :1].expand(problem.output_shape)
    expected = reference(problem, operands)
    for name, tensor in results(OURS[2], problem, operands).items():
        assert torch.equal(tensor.cpu().double(), getattr(expected, name)), name


def test_conjugated_and_negated_views(device: torch.device) -> None:
    x = integer_tensor((1, 2, 4, 4), torch.Generator(), torch.complex64).to(device)
    w = integer_tensor((2, 3, 3, 3), torch.Generator(), torch.complex64).to(device)
    assert torch.equal(polyphase.conv_transpose2d(x.conj(), w.conj()), polyphase.conv_transpose2d(x, w).conj())
    imaginary = x.conj().imag
    assert imaginary.is_neg()
    assert torch.equal(polyphase.conv_transpose2d(imaginary, w.real), -polyphase.conv_transpose2d(x.imag, w.real))


def test_image_size_changes_from_call_to_call(device: torch.device) -> None:
    rng = random.Random(0)
    weight = integer_tensor((3, 2, 3, 5), torch.Generator(), torch.float32).to(device)
    for _ in range(30):
        shape = (rng.randint(0, 3), 3, rng.randint(1, 20), rng.randint(1, 20))
        x = integer_tensor(shape, torch.Generator(), torch.float32).to(device)
        arguments: dict[str, Any] = {"stride": (2, 3), "padding": (1, 2), "dilation": (2, 1)}
        expected = torch.nn.functional.conv_transpose2d(x.cpu().double(), weight.cpu().double(), **arguments)
        assert torch.equal(polyphase.conv_transpose2d(x, weight, **arguments).cpu().double(), expected)


def test_constants_in_every_form() -> None:
    x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 2, 3, 3)
    expected = polyphase.conv_transpose2d(x, w, None, 2, 1, 1, 2, 2)
    for two in (2, (2,), [2], (2, 2), [2, 2], torch.Size([2, 2]), numpy.int64(2), (numpy.int32(2), 2), torch.tensor(2)):
        got = polyphase.conv_transpose2d(x, w, stride=two, padding=1, output_padding=1, groups=2, dilation=two)
        assert torch.equal(got, expected)
    assert polyphase.conv_transpose2d(x, w, groups=numpy.int64(2)).shape == (1, 4, 7, 7)


def test_signature_is_pytorchs() -> None:
    """PyTorch's functions are built in and have no signature to compare; their parameters by position and by name."""
    x, w, b = torch.randn(1, 4, 5, 5), torch.randn(4, 2, 3, 3), torch.randn(4)
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    values = (x, w, b, 3, 1, 2, 2, 4)
    for call in (polyphase.conv_transpose2d, torch.nn.functional.conv_transpose2d):
        torch.testing.assert_close(call(*values), call(**dict(zip(names, values))))
    torch.testing.assert_close(polyphase.conv_transpose2d(*values), torch.nn.functional.conv_transpose2d(*values))


@pytest.mark.parametrize("illegal", [(2, 1.0), (2.0, 1)])
def test_a_legal_call_makes_no_other_legal_that_equals_it(illegal: tuple[float, float]) -> None:
    x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)
    polyphase.conv_transpose2d(x, w, stride=(2, 1))
    for call in (torch.nn.functional.conv_transpose2d, polyphase.conv_transpose2d):
        with pytest.raises(TypeError):
            call(x, w, stride=illegal)


def test_checked_calls_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "_checked_calls", call_cache.CallCache())
    monkeypatch.setattr(call_cache, "_MOST_KEYS", 10)
    weight = torch.randn(1, 1, 2)
    for size in range(1, 40):
        assert polyphase.conv_transpose1d(torch.randn(1, 1, size), weight).shape == (1, 1, size + 1)
        assert 0 < len(functional._checked_calls._found) <= 10


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_flops_are_counted(problem: ConvTransposeProblem, device: torch.device) -> None:
    operands = make_operands(problem, torch.float32, device)
    x, w = operands.input.requires_grad_(), operands.weight.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        output = OURS[problem.dims](x, w, operands.bias, **constants(problem))
        assert counter.get_total_flops() == problem.flops
        torch.autograd.grad(output, (x, w), operands.grad_output)
    assert counter.get_total_flops() == 3 * problem.flops


def test_derivatives_are_recorded_only_where_wanted() -> None:
    x, w = torch.randn(1, 2, 4), torch.randn(2, 2, 3, requires_grad=True)
    assert polyphase.conv_transpose1d(x, w).requires_grad
    assert not polyphase.conv_transpose1d(x, w.detach()).requires_grad
    with torch.no_grad():
        assert not polyphase.conv_transpose1d(x, w).requires_grad
    with torch.inference_mode():
        assert polyphase.conv_transpose1d(x, w).is_inference()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_inputs_spread_as_in_pytorch(value: float, device: torch.device) -> None:
    """Every output that reads the pixel, and no other; the weights are positive, so that no infinity cancels."""
    for problem in PROBLEMS:
        operands = make_operands(
            problem, torch.float32, device, make=lambda *arguments: integer_tensor(*arguments).abs() + 1
        )
        operands.input.view(-1)[operands.input.numel() // 2] = value
        got = OURS[problem.dims](operands.input, operands.weight, operands.bias, **constants(problem))
        expected = reference(problem, operands).output
        torch.testing.assert_close(got.cpu().double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    x, w, b = torch.randn(1, 4, 5, 5), torch.randn(4, 2, 3, 3), torch.randn(2)
    x, w, b = (tensor.to(device).requires_grad_() for tensor in (x, w, b))
    with torch.autocast(device.type, dtype):
        ours, theirs = polyphase.conv_transpose2d(x, w, b), torch.nn.functional.conv_transpose2d(x, w, b)
        assert ours.dtype == theirs.dtype == dtype
        assert polyphase.conv_transpose2d(x.to(dtype), w, b).dtype == dtype, "mixed types are what autocast is for"
        wide = polyphase.conv_transpose2d(x.double(), w.double(), b.double())
        assert wide.dtype == torch.float64, "float64 is left alone"
    assert torch.equal(ours, polyphase.conv_transpose2d(x.to(dtype), w.to(dtype), b.to(dtype))), (
        "one cast, and no other"
    )
    gradients = torch.autograd.grad(ours, (x, w, b), torch.ones_like(ours))
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3

    # Against float64: PyTorch's own may be rounded at every tap, which it is where oneDNN does not compute bfloat16.
    problem = make(x.shape, 2, 3, bias=True)
    cast = Operands(x, w, b, torch.ones_like(ours)).map(lambda tensor: tensor.detach().to(dtype))
    expected, magnitude = reference(problem, cast), magnitudes(problem, cast)
    for name, tensor in Results(ours, *gradients).items():
        ref64 = getattr(expected, name)
        eps = rounding_eps(ref64, getattr(magnitude, name), dtype, device)
        assert bool(((tensor.cpu().double() - ref64).abs() <= eps).all()), name


def test_autocast_of_another_device_changes_nothing() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        meta = polyphase.conv_transpose1d(torch.randn(1, 2, 4, device="meta"), torch.randn(2, 2, 3, device="meta"))
    assert meta.dtype == torch.float32


def test_meta_and_fake_tensors_give_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    rng = random.Random(5)
    for _ in range(40):
        problem = random_problem(rng)
        operands = make_operands(problem, torch.float32)
        real = OURS[problem.dims](operands.input, operands.weight, operands.bias, **constants(problem))
        meta = operands.map(lambda tensor: tensor.to("meta"))
        shaped = OURS[problem.dims](meta.input, meta.weight, meta.bias, **constants(problem))
        assert (shaped.shape, shaped.stride()) == (real.shape, real.stride())
        with FakeTensorMode() as mode:
            fake = operands.map(mode.from_tensor)
            shaped = OURS[problem.dims](fake.input, fake.weight, fake.bias, **constants(problem))
        assert (shaped.shape, shaped.stride(), shaped.device) == (real.shape, real.stride(), real.device)


def test_jit_trace(tmp_path: Any) -> None:
    module = polyphase.ConvTranspose2d(3, 4, 3, stride=2)
    x = torch.randn(2, 3, 5, 6)
    traced = torch.jit.trace(module, x)
    traced.save(str(tmp_path / "traced.pt"))
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "traced.pt"))(x), module(x))


class Tagged(Tensor):
    """A subclass that keeps its type through every function."""


def test_tensor_subclasses_and_modes() -> None:
    from torch.overrides import TorchFunctionMode

    x, w = torch.randn(1, 2, 4), torch.randn(2, 3, 3)
    tagged = polyphase.conv_transpose1d(x.as_subclass(Tagged), w)
    assert type(tagged) is Tagged
    torch.testing.assert_close(tagged.as_subclass(Tensor), polyphase.conv_transpose1d(x, w))

    seen: list[Any] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        polyphase.conv_transpose1d(x, w, stride=2)
    assert seen[0] is polyphase.conv_transpose1d


def test_the_same_bits_every_time(device: torch.device) -> None:
    for problem in PROBLEMS:
        operands = make_operands(problem, torch.float32, device, make=normal_tensor)
        first, second = (results(OURS[problem.dims], problem, operands) for _ in range(2))
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.items(), second.items()))


def test_importing_touches_no_cuda() -> None:
    script = """
import sys, torch
before = set(sys.modules)  # PyTorch imports cuda.bindings where it finds them
import polyphase
packages = {name.split(".")[0] for name in set(sys.modules) - before}
assert not packages & {"rich", "typer"}, packages
assert "cuda" not in packages
assert "cuda.core" not in sys.modules and "polyphase.runtime" not in sys.modules
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_version_is_that_of_the_project() -> None:
    from pathlib import Path

    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'version = { attr = "polyphase.__version__" }' in project
    assert polyphase.__version__ not in project


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    """Streams, graphs, several GPUs, and more elements than 32 bits count."""

    def test_other_stream(self) -> None:
        x, w = torch.ones(1, 8, 512, 512, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda")
        expected = polyphase.conv_transpose2d(x * 2, w)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # a launch on any other stream would read x before it is doubled
            x.mul_(2)
            got = polyphase.conv_transpose2d(x, w)
        stream.synchronize()
        assert torch.equal(got, expected)

    def test_cuda_graph(self) -> None:
        layer = polyphase.ConvTranspose2d(8, 8, 4, stride=2, padding=1, device="cuda")
        x = torch.randn(2, 8, 32, 32, device="cuda")
        layer(x)  # compiles
        graph = torch.cuda.CUDAGraph()
        from polyphase import prepared

        assert prepared.POISON, "a poisoned output that the graph does not fill shows"
        with torch.no_grad(), torch.cuda.graph(graph):
            output = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(output, layer(x))

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_second_gpu_while_the_first_is_current(self) -> None:
        problem = PROBLEMS[1]
        operands = make_operands(problem, torch.float32, "cuda:1")
        assert torch.cuda.current_device() == 0
        got = results(OURS[2], problem, operands)
        expected = reference(problem, operands)
        for name, tensor in got.items():
            assert tensor.device == torch.device("cuda:1")
            assert torch.equal(tensor.cpu().double(), getattr(expected, name))

    @pytest.mark.slow
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_more_than_two_to_the_31_elements(self, channels_last: bool) -> None:
        if torch.cuda.mem_get_info()[0] < 40 << 30:
            pytest.skip("needs 40 GiB of GPU memory")
        side = 23_171  # 2·(2·side)² elements of the output are 4.3e9
        shape = (1, 4, side, side)
        x = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        w = torch.arange(1, 9, dtype=torch.bfloat16, device="cuda").view(4, 2, 1, 1).expand(4, 2, 2, 2).contiguous()
        with torch.no_grad():
            y = polyphase.conv_transpose2d(x, w, stride=2)
        assert y.numel() > 2**31
        assert bool((y[:, 0] == 1 + 3 + 5 + 7).all())
        assert bool((y[:, 1] == 2 + 4 + 6 + 8).all())
        gx = torch.ops.polyphase.conv_transpose_input_grad(y, w, [2, 2], [0, 0], [0, 0], [1, 1], 1)
        expected = torch.tensor([4 * (16 * a + 20 * b) for a, b in ((1, 2), (3, 4), (5, 6), (7, 8))])
        assert bool((gx == expected.to(gx).view(1, 4, 1, 1)).all())


def test_constants_that_change_are_read_anew() -> None:
    x, weight, stride = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3), torch.tensor(2)
    for value in (2, 3):
        stride.fill_(value)
        assert polyphase.conv_transpose2d(x, weight, stride=stride).shape[-1] == 4 * value + 3
