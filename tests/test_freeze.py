"""`polyphase.freeze`: packed weights that are kept, noticed changes, graphs, memory."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyphase
from emulator import available
from kernel_harness import H200, Emulator, assert_exact
from polyphase import kept as kept_weights
from polyphase import prepared
from polyphase.plan.planner import plan, programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.layouts import Layouts
from polyphase.program.kept import KeptProgram, kept_program
from polyphase.program.step import WORKSPACE, Step

make = ConvTransposeProblem.make
LAYERS = {
    "implicit_gemm": make((2, 12, 5, 9), 10, 4, 2, 1, bias=True),
    "phase_gemm_pixels": make((3, 24, 6, 8), 20, 2, 2, bias=True, dtype="bfloat16"),
    "tap_gemm_tma": make((2, 12, 5, 9), 10, 4, 2, 1, channels_last=True),
}
PACKED = make((4, 64, 16, 16), 32, 4, 2, 1, bias=True)


class Twice(Emulator):
    """Runs a program that is followed by its kept one, and clears the header before that."""

    def __init__(self, kept: KeptProgram) -> None:
        super().__init__()
        self.kept = kept

    def __call__(self, step: Step, tensors: Sequence[Tensor | None]) -> None:
        if step is self.kept.program.main:
            workspace = tensors[step.operands.index(WORKSPACE)]
            assert workspace is not None
            workspace.view(-1)[: self.kept.header_bytes] = 0
        super().__call__(step, tensors)


@pytest.mark.skipif(not available(), reason="needs Linux and g++")
@pytest.mark.parametrize("schedule", LAYERS)
def test_a_second_launch_needs_no_packing(schedule: str) -> None:
    problem = LAYERS[schedule]
    for candidate, program in programs(problem, Pass.FORWARD, H200):
        kept = kept_program(program)
        if candidate.schedule != schedule or kept is None:
            continue
        assert [step.source for step in kept.program.steps] == [
            step.source for step in program.steps if step.source != kept.pack.source
        ]
        both = replace(program, steps=(*program.steps, *kept.program.steps))
        layouts = Layouts.of_call(problem, Pass.FORWARD)
        assert_exact(problem, Pass.FORWARD, candidate, both, layouts, Twice(kept))
        return
    pytest.fail(f"{schedule} packs nothing that could be kept")


def test_what_depends_on_pixels_is_not_kept() -> None:
    """Weights are packed by what pixels were measured to be; nothing is packed; counters are told of."""
    problem = replace(make((8, 64, 64, 64), 64, 4, 2, 1), tf32=True)
    packed = [(program, kept_program(program)) for _, program in programs(problem, Pass.FORWARD, H200)]
    for program, kept in packed:
        kernels = [step.source.kernel for step in program.steps]
        assert kept is None or "measure_scales" not in kernels
        if kept is not None:
            constants = dict(kept.pack.source.constants)
            assert kept.header_bytes == constants.get("COUNTER_BYTES", 0)
            assert not kept.program.main.overlaps
    kernels = {program.main.source.kernel for program, kept in packed if kept is None}
    assert "direct_tiled" in kernels


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The kernels of every launch, which are not launched."""
    launched: list[tuple[str, ...]] = []

    class Recorded:
        def __init__(self, program: Any, arch: str, index: int, places: dict[str, int]) -> None:
            self.kernels = tuple(step.source.kernel for step in program.steps)
            self.places = places

        def __call__(self, stream: int, addresses: list[int]) -> None:
            launched.append(self.kernels)

    monkeypatch.setattr(prepared, "Executable", Recorded)
    monkeypatch.setattr(prepared, "current_stream", lambda index: 0)  # builds for CUDA would ask the driver
    monkeypatch.setattr(prepared, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launched


def _call(problem: ConvTransposeProblem) -> prepared.Call:
    program = plan(problem, Pass.FORWARD, H200).program
    assert program is not None
    strides = torch.empty(problem.output_shape).stride()
    return prepared.Call(program, "sm_90a", 0, problem.output_shape, strides, False, prepared.empty_on_cpu)


def test_weights_are_packed_when_they_change(recorded: list[tuple[str, ...]]) -> None:
    layer = polyphase.ConvTranspose2d(64, 32, 4, 2, 1)
    call, x = _call(PACKED), torch.zeros(PACKED.input_shape)

    def launches() -> list[tuple[str, ...]]:
        recorded.clear()
        with torch.no_grad():
            call(x, layer.weight, layer.bias)
        return list(recorded)

    ordinary = launches()
    assert len(ordinary) == 1
    assert len(ordinary[0]) == 2
    pack, main = ordinary[0]
    report = polyphase.freeze(layer)
    assert report.layers == ("",)
    assert report.bytes == 0
    assert launches() == [(pack,), (main,)]
    assert report.bytes > 0
    assert "1 layer with 0." in repr(report)
    assert launches() == [(main,)]
    with torch.no_grad():
        layer.weight.mul_(2)
    assert launches() == [(pack,), (main,)]
    assert launches() == [(main,)]
    layer.load_state_dict(layer.state_dict())
    assert launches() == [(pack,), (main,)]
    layer.weight.data = layer.weight.data.clone()
    assert launches() == [(pack,), (main,)]
    with torch.inference_mode():
        assert launches() == [(main,)]
    polyphase.unfreeze(layer)
    assert launches() == ordinary
    polyphase.freeze(layer)
    layer.weight = nn.Parameter(layer.weight.detach().clone())  # another weight: nothing is known of it
    assert launches() == ordinary


def test_a_graph_has_a_copy_of_its_own(recorded: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = polyphase.ConvTranspose2d(64, 32, 4, 2, 1)
    call, x = _call(PACKED), torch.zeros(PACKED.input_shape)
    polyphase.freeze(layer)

    def launches(capturing: bool) -> list[int]:
        recorded.clear()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        with torch.no_grad():
            call(x, layer.weight, layer.bias)
        return [len(kernels) for kernels in recorded]

    assert launches(True) == [2]  # nothing was packed before
    assert launches(False) == [1, 1]
    assert launches(True) == [1]  # what was packed is the graph's
    assert launches(True) == [2]
    assert launches(False) == [1, 1]
    assert launches(False) == [1]
    with torch.no_grad():
        layer.weight.add_(1)
    assert launches(True) == [2]  # packed before the change
    kept = kept_weights.kept_of(layer.weight)
    assert kept is not None
    assert len(kept.packed) == 2


def test_what_is_skipped_and_forgotten() -> None:
    model = nn.Sequential(
        polyphase.ConvTranspose1d(3, 4, 2), nn.utils.parametrizations.weight_norm(polyphase.ConvTranspose1d(4, 4, 2)),
        nn.ConvTranspose1d(4, 4, 2), polyphase.LazyConvTranspose1d(4, 2),
    )  # fmt: skip
    report = polyphase.freeze(model)
    assert report.layers == ("0",)
    assert [name for name, _ in report.skipped] == ["1", "3"]
    assert "1: not kept, its weight is made at every call" in repr(report)
    assert kept_weights.kept_of(model[0].weight) is not None
    place = id(model[0].weight)
    del model, report
    gc.collect()
    assert place not in kept_weights.KEPT
    for function in (polyphase.freeze, polyphase.unfreeze):
        with pytest.raises(TypeError, match=rf"polyphase\.{function.__name__} takes a torch.nn.Module, not int"):
            function(3)  # type: ignore[arg-type]


def test_what_it_says_where_nothing_is_packed() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(3, 4, 2))
    words = r"It has no polyphase layer: call polyphase\.accelerate first"
    with pytest.warns(UserWarning, match=rf"nothing is kept of Sequential\. {words}") as caught:
        report = polyphase.freeze(model)
    assert caught[0].filename == __file__
    assert re.search(words, repr(report))
    polyphase.accelerate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert re.search("1 layer on the CPU, where nothing is packed", repr(polyphase.freeze(model)))
        lazy = polyphase.freeze(polyphase.LazyConvTranspose1d(4, 2))
    assert repr(lazy) == "polyphase.freeze: no weights are kept\n: not kept, its weight has no values yet"
