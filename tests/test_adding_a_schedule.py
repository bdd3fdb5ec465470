"""The worked example of docs/adding_a_schedule.md: its two blocks, taken from the page and held to what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import emulator
from kernel_harness import H200, Emulator, assert_exact, cases, choices, formats, offers, strange_layouts
from polyphase.jit import source
from polyphase.plan import explain, planner, shortlist
from polyphase.plan.shortlist import refusal
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.program import params
from polyphase.schedules import SCHEDULES
from polyphase.schedules.schedule import Schedule

make = ConvTransposeProblem.make
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adding_a_schedule.md"

LAYERS = {
    "odd sizes": make((2, 5, 3, 7), 7, 1, bias=True),
    "groups": make((3, 6, 5, 3), 15, 1, groups=3, bias=True),
    "depthwise, no bias": make((1, 4, 5, 9), 4, 1, groups=4),
    "dilated": make((1, 3, 4, 5), 18, 1, dilation=3),
    "1-D": make((2, 9, 37), 5, 1),
    "3-D": make((1, 4, 3, 2, 5), 17, 1, bias=True),
    "empty batch": make((0, 3, 4, 4), 2, 1),
}


def block(language: str) -> tuple[str, int]:
    """The page's only block of a language, and the number of lines before it."""
    text = PAGE.read_text(encoding="utf-8")
    (found,) = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return found[1], text.count("\n", 0, found.start(1))


def forget() -> None:
    """What was planned with other schedules."""
    planner.plan.cache_clear()
    planner._ranked.cache_clear()
    shortlist.forget()


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """The example, registered: its kernel can be read, and the planner and `explain` find it."""
    kernel, read = block("cuda")[0], source.read
    monkeypatch.setattr(source, "read", lambda path: kernel if path == "pointwise.cu" else read(path))
    code, before = block("python")
    names: dict[str, Any] = {"__name__": "polyphase.schedules.pointwise.schedule"}
    exec(compile("\n" * before + code, str(PAGE), "exec"), names)
    pointwise = names["Pointwise"]()
    for module in (planner, explain):
        monkeypatch.setattr(module, "SCHEDULES", (*SCHEDULES, pointwise))
    forget()
    yield pointwise
    params._known.pop("pointwise", None)
    forget()


def test_the_names_are_free() -> None:
    assert not (source.KERNELS / "pointwise.cu").exists()
    assert "pointwise" not in {each.name for each in SCHEDULES}


@pytest.mark.parametrize(
    ("language", "tool", "options"),
    [
        ("cuda", "clang-format", ["--assume-filename=src/polyphase/kernels/pointwise.cu"]),
        ("python", "ruff", ["format", "-"]),
    ],
    ids=["cuda", "python"],
)
def test_it_is_formatted_as_the_package_is(language: str, tool: str, options: list[str]) -> None:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(tool, path=places)
    if found is None:
        pytest.skip(f"needs {tool}")
    text, _ = block(language)
    done = subprocess.run([found, *options], input=text, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == text


@needs_emulator
@pytest.mark.parametrize("problem", list(cases(LAYERS)))
def test_layers(schedule: Schedule, problem: ConvTransposeProblem) -> None:
    """As the page says that a schedule is tested."""
    for layouts, candidate, program in choices(schedule, problem):
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts)


@needs_emulator
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["odd sizes", "groups"])
def test_every_configuration_in_both_formats(schedule: Schedule, name: str, dtype: str) -> None:
    for problem in formats(replace(LAYERS[name], dtype=dtype)):
        for candidate, program in offers(schedule, problem):
            assert_exact(problem, Pass.FORWARD, candidate, program, executor=Emulator(7))


@needs_emulator
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes(schedule: Schedule, dtype: str) -> None:
    problem = replace(LAYERS["odd sizes"], dtype=dtype)
    candidate, program = offers(schedule, problem)[0]
    assert_exact(problem, Pass.FORWARD, candidate, program)


@needs_emulator
@pytest.mark.parametrize("last", [False, True])
def test_any_strides(schedule: Schedule, last: bool) -> None:
    problem = replace(LAYERS["groups"], channels_last=last)
    for layouts in strange_layouts(problem):
        candidate, program = offers(schedule, problem, layouts=layouts)[0]
        assert_exact(problem, Pass.FORWARD, candidate, program, layouts)


def test_the_layers_reach_every_configuration(schedule: Schedule) -> None:
    found = {candidate.config for problem in LAYERS.values() for candidate, _ in offers(schedule, problem)}
    assert {config.dst_per_thread for config in found} == {1, 4, 8}


def test_batch_and_image_size_compile_nothing(schedule: Schedule) -> None:
    layer = make((1, 32, 7, 7), 24, 1)
    sources = [
        [program.main.source for _, program in offers(schedule, replace(layer, batch=batch, input_size=(side, side)))]
        for batch, side in ((1, 7), (64, 8), (3, 400))
    ]
    assert sources[0] == sources[1] == sources[2]


@pytest.mark.parametrize(
    ("problem", "pass_", "reason"),
    [
        (make((2, 8, 5, 5), 8, 1), Pass.INPUT_GRAD, "computes the forward pass only"),
        (make((2, 8, 5, 5), 8, 1), Pass.WEIGHT_GRAD, "computes the forward pass only"),
        (make((2, 8, 5, 5), 8, (1, 3)), Pass.FORWARD, "3 taps are more than one"),
        (make((2, 8, 5, 5), 8, 1, (2, 1)), Pass.FORWARD, "takes stride 1 without padding only"),
        (make((2, 8, 5, 5), 8, 1, 1, (0, 1)), Pass.FORWARD, "takes stride 1 without padding only"),
        (make((2, 8, 5, 5), 8, 1, 1, 0, 1, dilation=2), Pass.FORWARD, "takes stride 1 without padding only"),
    ],
    ids=str,
)
def test_refusals(schedule: Schedule, problem: ConvTransposeProblem, pass_: Pass, reason: str) -> None:
    assert refusal(schedule, problem, pass_, H200) == reason
    text = explain.explain(problem, H200).split(f"\n{pass_.value}: ")[1].split("\n\n")[0]
    (line,) = (line for line in text.splitlines() if re.match(r"  not .*\bpointwise\b", line))
    assert line.endswith(f": {reason}")


@pytest.mark.parametrize("last", [False, True])
def test_the_planner_offers_it_and_explain_lists_it(schedule: Schedule, last: bool) -> None:
    problem = make((8, 64, 56, 56), 256, 1, bias=True, channels_last=last)
    offered = [candidate for candidate, _ in planner.programs(problem, Pass.FORWARD, H200)]
    assert sum(candidate.schedule == "pointwise" for candidate in offered) == 3
    forward = explain.explain(problem, H200).split("\n\n")[1]
    assert len(re.findall(r"pointwise\(dst_per_thread=\d+\)", forward)) == 1
    assert planner.plan(problem, Pass.FORWARD, H200).schedule != "pointwise"  # as the page says


@needs_emulator
def test_the_planner_takes_it_where_there_is_no_other(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "SCHEDULES", (schedule,))
    problem = LAYERS["odd sizes"]
    chosen = planner.plan(problem, Pass.FORWARD, H200)
    assert chosen.schedule == "pointwise"
    assert chosen.candidate is not None
    assert chosen.program is not None
    assert_exact(problem, Pass.FORWARD, chosen.candidate, chosen.program)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_compiles_without_a_spill(
    schedule: Schedule, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, but no GPU")
    from polyphase.jit.compiler import resources_of

    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path))
    layer = make((8, 40, 56, 56), 50, 1, groups=2, bias=True)
    for problem in formats(layer):
        for dtype in ("float32", "bfloat16", "float64"):
            for candidate, program in offers(schedule, replace(problem, dtype=dtype)):
                found = resources_of(program.main.source, arch)
                assert found.clean, (candidate, found)
                assert found.source == program.main.source, "compiled for fewer resident blocks"
