"""The description of a layer, against counting on fingers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import EXACT_BELOW, TORCH, constants, random_problem
from polyphase.bench.layers import every_layer, parse_layer
from polyphase.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass
from polyphase.problem import problem as problem_module

AXES = [
    Axis(kernel, stride, padding, dilation)
    for kernel, stride, padding, dilation in itertools.product(
        (1, 2, 3, 5, 8), (1, 2, 3, 5, 8), (0, 1, 4), (1, 2, 3, 6)
    )
]
RANDOM = [random_problem(random.Random(seed)) for seed in range(60)]
make = ConvTransposeProblem.make


def written(axis: Axis, input_size: int) -> Counter[int]:
    """How often each position is written, by the definition: o = i·stride + tap·dilation - padding."""
    return Counter(
        i * axis.stride + tap * axis.dilation - axis.padding for i in range(input_size) for tap in range(axis.kernel)
    )


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_output_size_is_what_the_taps_reach(axis: Axis) -> None:
    for n in (1, 2, 7):
        # The padding crops as much at the end as at the beginning, where the first tap of the first input would write.
        assert axis.output_size(n) == max(written(axis, n)) - axis.padding + 1
        for extra in range(max(axis.stride, axis.dilation)):
            assert axis.output_size(n, extra) == axis.output_size(n) + extra
            assert axis.input_size(axis.output_size(n, extra), extra) == n


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_input_size_is_the_largest_that_fits(axis: Axis) -> None:
    for size in range(1, 40):
        n = axis.input_size(size)
        assert axis.output_size(n) <= size < axis.output_size(n + 1)


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_every_tap_serves_one_phase(axis: Axis) -> None:
    assert sorted(itertools.chain(*axis.taps_by_phase.values())) == list(range(axis.kernel))
    assert list(axis.taps_by_phase) == sorted(axis.taps_by_phase)
    assert set(axis.taps_by_phase) <= set(range(axis.stride))
    for phase, taps in axis.taps_by_phase.items():
        assert taps
        assert list(taps) == sorted(taps)
        assert all(axis.phase(tap) == phase for tap in taps)


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_phases_and_shifts_are_the_layer(axis: Axis) -> None:
    """y[q·s + u] sums x[q - shift]·w[tap] over the taps of phase u, and that is every product of the definition."""
    n = 6
    for q in range(-axis.kernel * axis.dilation, n + axis.kernel * axis.dilation):
        for u in range(axis.stride):
            taps = axis.taps_by_phase.get(u, ())
            met = {(q - axis.shift(tap), tap) for tap in taps if 0 <= q - axis.shift(tap) < n}
            assert met == {
                (i, tap)
                for i in range(n)
                for tap in range(axis.kernel)
                if i * axis.stride + tap * axis.dilation - axis.padding == q * axis.stride + u
            }
    shifts = [axis.shift(tap) for tap in range(axis.kernel)]
    assert axis.shifts == (min(shifts), max(shifts))


@pytest.mark.parametrize("problem", RANDOM, ids=str)
def test_shapes_are_pytorchs(problem: ConvTransposeProblem) -> None:
    x, w = torch.empty(problem.input_shape, device="meta"), torch.empty(problem.weight_shape, device="meta")
    out = TORCH[problem.dims](x, w, **constants(problem))
    assert problem.output_shape == out.shape
    assert problem.elements == (x.numel(), w.numel(), out.numel())


@pytest.mark.parametrize("problem", RANDOM[::4], ids=str)
def test_flops_are_the_products_and_sums(problem: ConvTransposeProblem) -> None:
    products = 0
    for _tap in itertools.product(*map(range, problem.kernel_size)):
        for _position in itertools.product(*map(range, problem.input_size)):
            products += problem.batch * problem.in_channels * problem.out_channels // problem.groups
    assert problem.flops == 2 * products


def test_floor_is_the_slower_of_bytes_and_flops() -> None:
    problem = make((2, 3, 10, 10), 4, 3, dtype="bfloat16")
    moved = 2 * (2 * 3 * 100 + 3 * 4 * 9 + 2 * 4 * 144)
    assert problem.bytes == moved
    assert problem.floor_seconds(moved, problem.flops / 3) == 3
    assert problem.floor_seconds(moved / 5, problem.flops / 3) == 5
    assert replace(problem, dtype="float64").bytes == 4 * moved


@pytest.mark.parametrize("problem", RANDOM, ids=str)
def test_three_axes_in_any_dimension(problem: ConvTransposeProblem) -> None:
    assert len(problem.axes3) == 3
    assert problem.axes3[3 - problem.dims :] == problem.axes
    assert all(axis == Axis(1) and axis.output_size(1) == 1 for axis in problem.axes3[: 3 - problem.dims])


def test_make_takes_one_number_or_one_for_each_dimension() -> None:
    assert make((2, 4, 5, 6), 8, 3, 2, 1, 1, 2, True, 1) == ConvTransposeProblem(
        2, 4, 8, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 2, True
    )
    assert make((2, 4, 5), 8, (3,)).kernel_size == (3,)


@pytest.mark.parametrize("problem", [*RANDOM, *(layer.problem for layer in every_layer())], ids=str)
def test_text_reads_back(problem: ConvTransposeProblem) -> None:
    """What a problem prints is what the command line takes."""
    problem = replace(problem, batch=max(problem.batch, 1))  # an empty batch is nothing to measure
    for dtype in DTYPE_BYTES:
        for channels_last in (False, True):
            for tf32 in (False, True):
                printed = replace(problem, dtype=dtype, channels_last=channels_last, tf32=tf32)
                assert parse_layer(str(printed)) == printed
    assert str(problem).isprintable()


def test_text_leaves_defaults_out() -> None:
    assert str(make((8, 64, 32, 32), 64, 3)) == "8×64×32×32 → 64, k=3, float32"
    assert str(make((8, 64, 32, 32), 64, 3, tf32=True)) == "8×64×32×32 → 64, k=3, float32, tf32"
    problem = make((1, 4, 9, 9), 8, (3, 5), (2, 3), 1, (0, 1), 4, True, 2, "float16", True)
    assert str(problem) == ("1×4×9×9 → 8, k=(3, 5), s=(2, 3), p=1, op=(0, 1), d=2, g=4, bias, float16, channels_last")


def test_problems_are_keys() -> None:
    first, second = make((1, 2, 3), 4, 5), make((1, 2, 3), 4, 5)
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, replace(first, bias=True)}) == 2
    assert len({first, second, replace(first, tf32=True)}) == 2


def test_tf32_is_float32_s_alone() -> None:
    assert make((1, 2, 3), 4, 5, tf32=True).tf32
    for dtype in DTYPE_BYTES.keys() - {"float32"}:
        strict = make((1, 2, 3), 4, 5, dtype=dtype)
        assert make((1, 2, 3), 4, 5, dtype=dtype, tf32=True) == strict
        assert replace(make((1, 2, 3), 4, 5, tf32=True), dtype=dtype) == strict


def test_rounding_as_pytorch_does_takes_tf32() -> None:
    layer = replace(make((8, 64, 32, 32), 64, 3, tf32=True), tf32_as_pytorch=True)
    assert layer.of_pass(Pass.FORWARD) == layer
    assert layer.of_pass(Pass.FORWARD).of_pass(Pass.FORWARD) == layer
    assert replace(layer, tf32=False) == make((8, 64, 32, 32), 64, 3)
    assert replace(layer, dtype="float16") == make((8, 64, 32, 32), 64, 3, dtype="float16")


def test_pytorch_computes_some_layers_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By passes, as cuDNN was measured: forward, input gradient, weight gradient."""
    for name, value in EXACT_BELOW.items():
        monkeypatch.setattr(problem_module, name, value)

    def rounds(*arguments: Any, **parameters: Any) -> tuple[bool, ...]:
        layer = make(*arguments, **parameters, tf32=True)
        assert not any(replace(layer, tf32=False).uses_tf32(pass_) for pass_ in Pass)
        return tuple(layer.uses_tf32(pass_) for pass_ in Pass)

    assert rounds((8, 16, 99999), 16, 3) == (True, True, True)
    assert rounds((8, 15, 99999), 15, 3) == (False, True, True)
    assert rounds((8, 16, 9), 12, 3) == (False, True, True)
    assert rounds((8, 16, 9), 11, 3) == (False, False, False)
    assert rounds((8, 3, 9, 9), 192, 3) == (False, True, True)
    assert rounds((8, 1, 9, 9), 192, 3) == (False, True, True)
    assert rounds((8, 320, 9, 9, 9), 1, 4) == (False, True, True)
    assert rounds((8, 320, 9, 9, 9), 1, 1) == (False, False, False)
    assert rounds((8, 64, 9), 64, 3, groups=2) == (False, True, True)
    assert rounds((8, 128, 9), 128, 3, groups=2) == (True, True, True)
    assert rounds((8, 32, 9), 32, 3, groups=4) == (False, True, True)
    assert rounds((8, 28, 9), 28, 3, groups=4) == (False, False, False)
    assert rounds((8, 64, 9, 9, 9), 12, 3, groups=4) == (False, False, True)
    assert rounds((8, 32, 9, 9, 9), 32, (1, 2, 2), groups=4) == (False, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 3, groups=64) == (False, False, False)
    assert rounds((128, 1024, 1, 1), 1024, 2) == (True, True, True)
    assert rounds((127, 1024, 1, 1), 1024, 2) == (False, True, True)  # 127 positions
    assert rounds((8, 64, 16, 16), 64, 4) == (False, True, True)  # 0.27 GFLOP
    assert rounds((8, 64, 9, 9, 9), 64, 5) == (True, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 4, 2) == (True, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 5, 2) == (True, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 5, 2, 1) == (True, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 5, 2, (0, 2, 0)) == (False, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 5, (1, 2, 2), (2, 1, 1)) == (True, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 5, (4, 1, 1)) == (False, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 5, (1, 3, 1)) == (True, True, True)
    assert rounds((8, 48, 9, 9, 9), 48, 3, groups=4) == (True, True, True)
    assert rounds((8, 32, 9, 9, 9), 32, 3, groups=4) == (False, True, True)
    assert rounds((8, 48, 9, 9, 9), 48, 4, groups=4) == (True, False, True)
    assert rounds((8, 16, 9, 9, 9), 16, 6, groups=4) == (True, False, True)
    assert rounds((8, 64, 9, 9, 9), 64, 1, groups=4) == (False, False, True)
    assert rounds((8, 48, 9, 9, 9), 48, 3, 2, groups=4) == (False, False, True)
    assert rounds((8, 64, 9, 9, 9), 64, 3, 3) == (True, True, True)
    assert rounds((8, 64, 9, 9, 9), 65, 3, 3) == (False, True, True)
    assert rounds((8, 3, 9, 9, 9), 64, 3, padding=1) == (True, True, True)
    assert rounds((8, 3, 9, 9, 9), 15, 3, padding=1) == (False, True, True)
    assert rounds((8, 3, 9, 9, 9), 64, 3, 2) == (False, True, True)
    assert rounds((8, 16, 9, 9, 9), 11, 3, 2) == (False, True, True)
    assert rounds((8, 15, 9, 9, 9), 11, 3, 2) == (False, False, True)
    assert rounds((8, 64, 9, 9, 9), 64, 3, 3, 1) == (True, True, True)
    assert rounds((8, 64, 9, 9, 9), 64, 4, 3, 1) == (False, True, True)
