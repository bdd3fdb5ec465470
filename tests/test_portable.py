"""The portable path against the definition of the layer, and the other tests' float64 reference against it too."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import (
    OURS,
    TORCH,
    constants,
    integer_tensor,
    make_operands,
    random_problem,
    reference,
    results,
    scattered,
)
from polyphase import ConvTransposeProblem
from polyphase.torch_op import operators, portable
from polyphase.torch_op.memory_format import is_channels_last

make = ConvTransposeProblem.make

SMALL = [
    make((2, 2, 4), 3, 3, stride=2, padding=1, output_padding=1),
    make((1, 4, 3, 4), 6, (2, 3), stride=(2, 1), padding=(0, 2), groups=2, bias=True),
    make((2, 3, 3, 2), 3, 2, stride=3, groups=3, bias=True),
    make((1, 2, 4, 3), 2, 3, stride=2, padding=4, dilation=2),
    make((1, 1, 3, 3), 2, 2, stride=2, output_padding=(3, 2), dilation=(4, 3), bias=True),
    make((1, 2, 2, 3, 2), 2, (2, 1, 3), stride=(1, 2, 2), padding=(1, 0, 1)),
]


def contributions(problem: ConvTransposeProblem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The definition of the layer: every (input position, tap, output position) with ``o = i·s + t·d - p``."""
    for position in itertools.product(*map(range, problem.input_size)):
        for tap in itertools.product(*map(range, problem.kernel_size)):
            output = tuple(
                i * s + t * d - p
                for i, t, s, d, p in zip(position, tap, problem.stride, problem.dilation, problem.padding)
            )
            if all(0 <= o < size for o, size in zip(output, problem.output_size)):
                yield position, tap, output


def by_definition(problem: ConvTransposeProblem, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> list[Tensor]:
    """Output, input gradient and weight gradient, one term at a time."""
    y = torch.zeros(problem.output_shape, dtype=x.dtype)
    if b is not None:
        y += b.view(-1, *[1] * problem.dims)
    gx, gw = torch.zeros_like(x), torch.zeros_like(w)
    ins, outs = problem.in_channels_per_group, problem.out_channels_per_group
    for position, tap, output in contributions(problem):
        for group in range(problem.groups):
            c, k = slice(group * ins, (group + 1) * ins), slice(group * outs, (group + 1) * outs)
            here, there = (slice(None), c, *position), (slice(None), k, *output)
            matrix = w[(c, slice(None), *tap)]
            y[there] += x[here] @ matrix
            gx[here] += g[there] @ matrix.T
            gw[(c, slice(None), *tap)] += x[here].T @ g[there]
    return [y, gx, gw]


def by_portable(problem: ConvTransposeProblem, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> list[Tensor]:
    rest = (problem.stride, problem.padding, problem.output_padding, problem.dilation, problem.groups)
    return [
        portable.forward(x, w, b, *rest),
        portable.input_grad(g, w, *rest),
        portable.weight_grad(x, g, problem.kernel_size, *rest),
    ]


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_is_the_definition(problem: ConvTransposeProblem) -> None:
    operands = make_operands(problem)
    arguments = (operands.input, operands.weight, operands.bias, operands.grad_output)
    expected = by_definition(problem, *arguments)
    for got, wanted in zip(by_portable(problem, *arguments), expected):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_the_reference_is_the_definition(problem: ConvTransposeProblem) -> None:
    operands = make_operands(problem)
    expected = by_definition(problem, operands.input, operands.weight, operands.bias, operands.grad_output)
    ref = reference(problem, operands)
    for got, wanted in zip((ref.output, ref.input_grad, ref.weight_grad), expected):
        assert torch.equal(got, wanted)


def test_phases_partition_outputs_and_terms() -> None:
    """Each output belongs to one phase, and each term of the definition to one tap of that phase."""
    rng = random.Random(1)
    for _ in range(200):
        problem = random_problem(rng)
        if math.prod(problem.input_size) * problem.taps > 3000:
            continue
        outputs: Counter[tuple[int, ...]] = Counter()
        terms = []
        for phase in portable.phases(problem.axes, problem.input_size, problem.output_size):
            ranges = [range(size)[part] for size, part in zip(problem.output_size, phase.outputs)]
            assert tuple(map(len, ranges)) == phase.cells
            outputs.update(itertools.product(*ranges))
            for tap in phase.taps:
                inputs = itertools.product(*(range(n)[part] for n, part in zip(problem.input_size, tap.inputs)))
                cells = itertools.product(*(r[part] for r, part in zip(ranges, tap.cells)))
                terms += [(i, tap.index, o) for i, o in zip(inputs, cells, strict=True)]
        reached = [
            [q for q in range(size) if q % axis.stride in axis.taps_by_phase]
            for axis, size in zip(problem.axes, problem.output_size)
        ]
        assert outputs == Counter(itertools.product(*reached))  # the others are bias alone
        assert sorted(terms) == sorted(contributions(problem))


@pytest.mark.parametrize("bias", [False, True])
def test_large_strides_cost_no_more_than_their_taps(bias: bool) -> None:
    """Outputs that no tap reaches are bias; their phases are not gone through one by one."""
    problem = ConvTransposeProblem.make((2, 3, 4, 5), 4, 3, 512, bias=bias, dtype="float64")
    assert len(portable.phases(problem.axes, problem.input_size, problem.output_size)) == 9
    operands = make_operands(problem, torch.float64, "cpu")
    found = results(OURS[2], problem, operands)
    for name, wanted in reference(problem, operands).items():
        assert torch.equal(getattr(found, name), wanted), name


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.complex32,
    torch.int64,
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_every_dtype(problem: ConvTransposeProblem, dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    operands = make_operands(problem, wide)
    expected = by_portable(problem, operands.input, operands.weight, operands.bias, operands.grad_output)
    narrow = operands.map(lambda tensor: tensor.to(dtype))
    got = by_portable(problem, narrow.input, narrow.weight, narrow.bias, narrow.grad_output)
    for tensor, wanted in zip(got, expected):
        assert tensor.dtype == dtype
        assert torch.equal(tensor.to(wide), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("over", ["channels", "taps, images"])
def test_half_types_accumulate_in_float32(dtype: torch.dtype, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 ones: a sum kept in float16 or bfloat16 stops growing at 2,048 or 256."""
    monkeypatch.setattr(portable, "ELEMENTS_AT_A_TIME", 1)
    rest = ((1,), (0,), (0,), (1,), 1)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    if over == "channels":
        assert portable.forward(ones(1, 4000, 1), ones(4000, 1, 1), None, *rest).item() == 4000
        assert portable.input_grad(ones(1, 4000, 1), ones(1, 4000, 1), *rest).item() == 4000
        assert portable.weight_grad(ones(1, 1, 4000), ones(1, 1, 4000), (1,), *rest).item() == 4000
    else:
        row = (1, 1, 4000)
        assert portable.forward(ones(*row), ones(*row), None, *rest)[0, 0, 3999].item() == 4000
        assert portable.input_grad(ones(1, 1, 7999), ones(*row), *rest)[0, 0, 0].item() == 4000
        assert portable.weight_grad(ones(4000, 1, 1), ones(4000, 1, 1), (1,), *rest).item() == 4000


def test_a_run_of_images_or_a_block_of_taps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    problems = [random_problem(rng) for _ in range(30)]
    operands = [make_operands(problem) for problem in problems]

    def everything() -> list[Tensor]:
        return [
            tensor
            for problem, o in zip(problems, operands)
            for tensor in by_portable(problem, o.input, o.weight, o.bias, o.grad_output)
        ]

    whole = everything()
    monkeypatch.setattr(portable, "ELEMENTS_AT_A_TIME", 1)
    assert all(torch.equal(a, b) for a, b in zip(everything(), whole))


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest new storage."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "bmm" in func.__name__
        return func(*args, **(kwargs or {}))


def test_taps_are_multiplied_together() -> None:
    """Each product may be shared out among threads: one for each of 960 taps took seconds where others are at work."""
    problem = make((1, 3, 40, 40), 2, (32, 30))
    operands = make_operands(problem, torch.float32)
    with Products() as products:
        by_portable(problem, operands.input, operands.weight, operands.bias, operands.grad_output)
    assert products.count <= 12


@pytest.mark.parametrize(
    "problem",
    [
        make((2, 64, 64, 64), 64, 3),
        make((2, 16, 64, 64), 1, 9, stride=4),
        make((2, 32, 64, 64), 32, 4, stride=2, padding=1, groups=32),
        make((2, 4, 500), 4, 64, stride=16),
    ],
    ids=str,
)
def test_memory_stays_near_that_of_the_operands(problem: ConvTransposeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    """No im2col of all taps: at most a few times the largest operand, here without the cap on runs of images."""
    monkeypatch.setattr(portable, "ELEMENTS_AT_A_TIME", 1 << 40)
    operands = make_operands(problem, torch.float32)
    with LargestTensor() as largest:
        by_portable(problem, operands.input, operands.weight, operands.bias, operands.grad_output)
    assert largest.bytes <= 8 * max(tensor.nbytes for tensor in (operands.input, operands.weight, operands.grad_output))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_nonfinite_values_spread_as_in_pytorch(problem: ConvTransposeProblem, where: str, value: float) -> None:
    operands = make_operands(problem, make=lambda *arguments: integer_tensor(*arguments).abs() + 1)
    tensor = getattr(operands, where)
    tensor.view(-1)[tensor.numel() // 2] = value
    ref = reference(problem, operands)
    got = by_portable(problem, operands.input, operands.weight, operands.bias, operands.grad_output)
    for ours, theirs in zip(got, (ref.output, ref.input_grad, ref.weight_grad)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_what_surrounds_the_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementations for CUDA, complex layers as real ones, with the portable path in the place of the kernels."""

    def weight_grad(*arguments: Any) -> Tensor:
        assert not any(isinstance(argument, Tensor) and argument.is_complex() for argument in arguments)
        return portable.weight_grad(*arguments)

    kernels = SimpleNamespace(forward=portable.forward, input_grad=portable.input_grad, weight_grad=weight_grad)
    monkeypatch.setattr(operators, "_runtime", lambda: kernels)
    rng = random.Random(3)
    formats = set()
    for seed in range(80):
        problem = random_problem(rng)
        operands = make_operands(problem, dtype, seed=seed)
        x, w, g = (scattered(tensor, rng) for tensor in (operands.input, operands.weight, operands.grad_output))
        b = operands.bias
        rest = (problem.stride, problem.padding, problem.output_padding, problem.dilation, problem.groups)
        expected = by_portable(problem, x, w, b, g)
        got = [
            operators._on_cuda("forward")(x, w, b, *rest),
            operators._on_cuda("input_grad")(g, w, *rest),
            operators._on_cuda("weight_grad")(x, g, problem.kernel_size, *rest),
        ]
        for tensor, wanted in zip(got, expected):
            assert torch.equal(tensor, wanted)
            assert tensor.stride() == wanted.stride() or tensor.numel() == 0
            formats.add(is_channels_last(tensor))
    assert formats == {False, True}


def test_agrees_with_pytorch_on_any_device(device: torch.device) -> None:
    """It is plain tensor operations, which run on a GPU too, where other kernels usually take its place."""
    for problem in SMALL:
        operands = make_operands(problem, device=device)
        expected = TORCH[problem.dims](operands.input, operands.weight, operands.bias, **constants(problem))
        got = by_portable(problem, operands.input, operands.weight, operands.bias, operands.grad_output)[0]
        assert torch.equal(got, expected)
