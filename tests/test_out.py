"""``out=``: outputs that are written to a tensor that is there, of functions with and without an epilogue."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyphase
from emulator import available
from kernel_harness import H200, assert_exact
from polyphase import functional, fused, fused_calls
from polyphase.plan.planner import programs
from polyphase.problem import Pass
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts, dense_strides
from polyphase.torch_op.into import is_free, is_writable, slice_strides
from test_epilogue import LAYERS


def _operands(dims: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    size = (5, 4, 3)[:dims]
    return torch.randn(2, 6, *size), torch.randn(6, 4, *[3] * dims), torch.randn(4)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_slice_of_channels(dims: int) -> None:
    x, w, b = _operands(dims)
    function: Callable[..., Tensor] = getattr(polyphase, f"conv_transpose{dims}d")
    of_fused: Callable[..., Tensor] = getattr(fused, f"conv_transpose{dims}d")
    expected = function(x, w, b, 2, 1)
    larger = torch.full((2, 9, *expected.shape[2:]), 7.0)
    out = larger[:, 3:7]
    version = larger._version
    assert function(x, w, b, 2, 1, out=out) is out
    assert larger._version > version
    assert torch.equal(out, expected)
    assert of_fused(x, w, b, 2, 1, epilogue=["relu"], out=out) is out
    assert torch.equal(out, expected.relu())
    assert torch.equal(of_fused(x, w, b, 2, 1, out=out), expected)
    assert bool((larger[:, :3] == 7).all())
    assert bool((larger[:, 7:] == 7).all())
    # Of one image: PyTorch's products of other sizes may add up in another order.
    torch.testing.assert_close(function(x[0], w, b, 2, 1, out=out[0]), expected[0])


def test_compiled_and_under_autocast() -> None:
    x, w, b = _operands()
    larger = torch.zeros(2, 9, 9, 7)

    def write(larger: Tensor) -> Tensor:
        fused.conv_transpose2d(x, w, b, 2, 1, epilogue=["relu"], out=larger[:, :4])
        return larger

    expected = polyphase.conv_transpose2d(x, w, b, 2, 1).relu()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(write, fullgraph=True, backend="aot_eager")(larger)[:, :4], expected)
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.zeros(2, 4, 9, 7, dtype=torch.bfloat16)
        polyphase.conv_transpose2d(x, w, b, 2, 1, out=half)
        assert torch.equal(half, polyphase.conv_transpose2d(x, w, b, 2, 1))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a shape": (torch.zeros(2, 4, 9, 8), RuntimeError, "the output's shape"),
    "a dtype": (torch.zeros(2, 4, 9, 7, dtype=torch.float64), RuntimeError, "torch.float32 on cpu as the output has"),
    "a device": (torch.zeros(2, 4, 9, 7, device="meta"), RuntimeError, "got torch.float32 on meta"),
    "no tensor": ([1.0], TypeError, "must be a Tensor, not list"),
    "derivatives": (torch.zeros(2, 4, 9, 7).requires_grad_(), RuntimeError, "support automatic differentiation"),
    "elements that are one": (torch.zeros(1, 4, 9, 7).expand(2, -1, -1, -1), RuntimeError, "single memory location"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("epilogue", [False, True])
def test_what_cannot_be_written_to(name: str, epilogue: bool) -> None:
    out, kind, message = WRONG[name]
    x, w, b = _operands()
    with pytest.raises(kind, match=message):
        fused.conv_transpose2d(x, w, b, 2, 1, epilogue=["relu"] * epilogue, out=out)
    with pytest.raises(RuntimeError, match="support automatic differentiation"):
        polyphase.conv_transpose2d(x, w.clone().requires_grad_(), b, 2, 1, out=torch.zeros(2, 4, 9, 7))


def _strides(out: Tensor, last: bool = False) -> tuple[int, ...] | None:
    return slice_strides(out.shape, out.stride(), last, out.dtype.itemsize)


def test_what_kernels_write_to() -> None:
    larger = torch.zeros(2, 16, 8, 8)
    assert _strides(larger) == _strides(larger[:, 4:8]) == (16 * 64, 64, 64, 8, 1)
    assert _strides(larger[:1, 4:8]) == (4 * 64, 64, 64, 8, 1)
    assert _strides(larger[:, :, :, :7]) is None
    odd = torch.zeros(2, 16, 7, 7)
    x, w = torch.zeros(2, 6, 5, 4), torch.zeros(6, 4, 3, 3)
    assert not is_free(odd[:, 1:5], (x, w))  # 196 bytes behind what is aligned
    assert is_free(odd[:, 8:12], (x, w, None))
    assert not is_free(odd[:, 8:12], (x, odd[0]))
    assert is_writable(odd[:, 8:12], False)
    assert not is_writable(odd[:, 1:5], False)


def test_what_kernels_write_to_in_channels_last() -> None:
    """Pixels may have gaps that leave vectors of channels aligned."""
    larger = torch.zeros(2, 16, 8, 6).to(memory_format=torch.channels_last)
    assert _strides(larger) is None
    assert _strides(larger, True) == _strides(larger[:, 8:12], True) == (48 * 16, 1, 48 * 16, 6 * 16, 16)
    assert _strides(larger[:1, 8:12], True) == (48 * 16, 1, 48 * 16, 6 * 16, 16)
    assert _strides(larger[:, 8:12, :, :5], True) is None  # lines with gaps
    assert _strides(larger[:, 8:12, :, ::2], True) == (48 * 16, 1, 48 * 16, 6 * 16, 32)
    assert _strides(larger.contiguous(), True) is None
    assert is_writable(larger[:, 8:], True)
    assert not is_writable(larger[:, 4:], True)
    assert is_writable(larger[:, 8:12], True)
    odd = torch.zeros(2, 9, 8, 6).to(memory_format=torch.channels_last)
    assert _strides(odd[:, :3], True) == (48 * 9, 1, 48 * 9, 6 * 9, 9)  # single channels, or three
    assert _strides(odd[:, :4], True) is None
    assert _strides(odd[:, :8, :1, :1], True) == (48 * 9, 1, 8, 8, 8)
    assert _strides(torch.zeros(86).as_strided((2, 4, 1, 1), (43, 1, 4, 4)), True) is None  # gaps between images


@pytest.mark.skipif(not available(), reason="needs Linux and g++")
@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_schedule_leaves_what_lies_between_images(name: str, dtype: str) -> None:
    """Gaps of whole and of uneven numbers of elements; what is in them is not written to."""
    problem = replace(LAYERS[name], dtype=dtype, batch=max(2, LAYERS[name].batch))
    dense = Layouts.dense(problem)
    seed = zlib.crc32(f"{name} {dtype}".encode())
    images = (problem.out_channels + (16, 3)[seed % 2]) * dense.output[1]
    layouts = replace(dense, output=(images, *dense.output[1:]))
    found = programs(problem, Pass.FORWARD, H200, layouts)
    kinds = sorted({program.main.source.kernel for _, program in found})
    offered = [each for each in found if each[1].main.source.kernel == kinds[seed // 2 % len(kinds)]]
    candidate, program = offered[seed // 2 % len(offered)]
    assert_exact(problem, Pass.FORWARD, candidate, program, layouts)


@pytest.mark.skipif(not available(), reason="needs Linux and g++")
@pytest.mark.sampled(24, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, problem in LAYERS.items() if problem.dims > 1])
def test_a_schedule_leaves_what_lies_between_pixels(name: str, dtype: str) -> None:
    """Slices of channels in channels_last, by a config of every kernel."""
    problem = replace(LAYERS[name], dtype=dtype, batch=max(2, LAYERS[name].batch), channels_last=True)
    pixel = round_up(problem.out_channels + 1, {"float32": 8, "bfloat16": 16}[dtype])
    shape = (problem.batch, pixel, *problem.output_size)
    layouts = replace(Layouts.dense(problem), output=dense_strides(shape, True))
    found = programs(problem, Pass.FORWARD, H200, layouts)
    kernels = {program.main.source.kernel: (candidate, program) for candidate, program in found}
    for candidate, program in kernels.values():
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts)


def test_what_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the prepared call: made for the gaps of ``out``, and given it; else a new output is copied."""
    from polyphase import runtime

    made: list[Any] = []

    def call(
        x: Tensor, w: Tensor, b: Tensor | None, *constants: Any, epilogue: str, out_strides: tuple[int, ...] | None
    ) -> Callable[..., Tensor]:
        def compute(
            x: Tensor, w: Tensor, b: Tensor | None, operands: tuple[Tensor, ...], out: Tensor | None = None
        ) -> Tensor:
            made.append((out_strides and out_strides[0], out is not None, epilogue, constants))
            stride, padding, output_padding, dilation, groups = constants
            result = polyphase.conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation)
            return result if out is None else out.data.copy_(result)  # kernels change no version

        return compute

    monkeypatch.setattr(fused_calls, "_by_kernels", lambda input: True)
    monkeypatch.setattr(runtime, "forward_call", call)
    x, w, b = torch.randn(2, 6, 4, 4), torch.randn(6, 4, 2, 2), torch.randn(4)
    expected = polyphase.conv_transpose2d(x, w, b, 2)
    larger, read = torch.zeros(2, 16, 8, 8), torch.zeros(6, 4, 8, 8)
    read[:, :, :2, :2] = w
    odd = torch.zeros(2, 4, 8, 9)[:, :, :, :8]
    functional.forget_calls()
    try:
        for out, w_read, gaps in (
            (larger[:, 4:8], w, (16 * 64,)),
            (torch.zeros(2, 4, 8, 8), w, (None,)),
            (larger[:1, 4:8], w, (None,)),
            (larger[:, 4:8], w, (16 * 64,)),  # a call that was made before
            (odd, w, ()),
            (read[:2], read[:, :, :2, :2], ()),  # it shares memory with what is read
        ):
            images, versions = x[: out.shape[0]], out._version
            assert polyphase.conv_transpose2d(images, w_read, b, 2, out=out) is out
            assert out._version == versions + 1
            assert torch.equal(out, expected[: out.shape[0]])
            assert made == [(each, True, "", ((2, 2), (0, 0), (0, 0), (1, 1), 1)) for each in gaps]
            made.clear()
    finally:
        functional.forget_calls()  # what was prepared with the stand-in


@pytest.mark.parametrize("function", [polyphase.conv_transpose2d, fused.conv_transpose2d])
def test_out_has_a_batch_where_the_input_has_one(function: Any) -> None:
    input, weight = torch.randn(1, 2, 3, 3), torch.randn(2, 4, 2, 2)
    for given, shape in ((input, (4, 4, 4)), (input[0], (1, 4, 4, 4))):
        with pytest.raises(RuntimeError, match="out must have the output's shape"):
            function(given, weight, out=torch.empty(shape))
    for given, shape in ((input, (1, 4, 4, 4)), (input[0], (4, 4, 4))):
        out = torch.empty(shape)
        assert torch.equal(function(given, weight, out=out), function(given, weight))
