"""Gradients of layers with one tap along a dimension with a stride: they read every s-th output, and no others."""

from __future__ import annotations

import pytest

import emulator
from kernel_harness import H200, Emulator, assert_exact
from polyphase.plan.planner import as_computed, programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts

make = ConvTransposeProblem.make

LAYERS = (
    make((2, 24, 5, 6), 16, 1, 3, output_padding=2, dtype="bfloat16"),
    make((2, 18, 7, 9), 20, (3, 1), 2, (1, 0), 1, tf32=True),
    make((3, 16, 9), 24, 1, 2, channels_last=True, dtype="float16"),
    make((2, 8, 3, 4, 5), 6, (1, 2, 1), (2, 2, 3), groups=2),
    make((2, 33, 6, 5), 17, 1, (2, 4), output_padding=(1, 3), tf32=True, channels_last=True),
    make((5, 16, 1, 3), 8, 1, 2, output_padding=1, tf32=True),
)


def test_a_stride_without_padding_is_a_view() -> None:
    layer = make((2, 8, 5, 6), 4, (1, 3), (3, 2), (0, 1), (2, 1))
    for pass_ in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        computed, layouts = as_computed(layer, pass_, None)
        assert computed.stride == (1, 2)
        assert computed.output_size == (5, layer.output_size[1])
        whole = Layouts.of_call(layer, pass_)
        assert layouts.output == (*whole.output[:3], 3 * whole.output[3], whole.output[4])
        assert layouts.input == whole.input
    assert as_computed(layer, Pass.FORWARD, None)[0] == layer
    for other in (make((2, 24, 5), 16, 1, 2, output_padding=-1), make((2, 8, 5, 6), 4, (1, 3), (3, 2), 1)):
        assert as_computed(other, Pass.INPUT_GRAD, None) == (other, Layouts.of_call(other, Pass.INPUT_GRAD))


@pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("pass_", [Pass.INPUT_GRAD, Pass.WEIGHT_GRAD])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_schedule(layer: ConvTransposeProblem, pass_: Pass) -> None:
    tried = set()
    for candidate, program in programs(layer, pass_, H200):
        if candidate.schedule not in tried:
            assert_exact(layer, pass_, candidate, program, executor=Emulator(len(tried)))
            tried.add(candidate.schedule)
    assert len(tried) > 2
