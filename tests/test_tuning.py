"""Measured choices: kept on disk, preferred by the planner, and never more than a preference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from polyphase import prepared, runtime
from polyphase.__main__ import app
from polyphase.bench import runner
from polyphase.bench.operands import make_operands
from polyphase.bench.records import FAILED, WRONG, Record, read_csv, write_csv
from polyphase.bench.runner import Case
from polyphase.bench.tuner import accuracy, sources, tune, worth_measuring
from polyphase.commands import tune as command
from polyphase.jit import ahead
from polyphase.jit.source import KernelSource
from polyphase.plan import measured as tuning
from polyphase.plan import planner as plan
from polyphase.plan.explain import explain
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo

H200 = DeviceInfo.for_arch("sm_90a")
LAYER = ConvTransposeProblem.make((4, 64, 32, 40), 48, 4, 2, 1, bias=True)
CASE = Case("a layer", LAYER, Pass.FORWARD)


@pytest.fixture(autouse=True)
def _own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("POLYPHASE_TUNING", raising=False)
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()


def chosen(problem: ConvTransposeProblem = LAYER, pass_: Pass = Pass.FORWARD, device: DeviceInfo = H200) -> plan.Plan:
    plan.plan.cache_clear()
    return plan.plan(problem, pass_, device)


def candidates(pass_: Pass = Pass.FORWARD) -> list[str]:
    """Those that are measured; there are others."""
    names = [candidate.describe() for candidate, _ in worth_measuring(replace(CASE, pass_=pass_), H200)]
    assert 2 < len(names) < len(plan.programs(LAYER, pass_, H200)) or pass_ is Pass.WEIGHT_GRAD
    return names


def measuring(milliseconds: Callable[[str], float | str]) -> Callable[[Case], Record]:
    """A runner's `run` that knows how long each candidate takes; a text is the status of one that is not timed."""

    def run(case: Case) -> Record:
        name = plan.plan(case.problem, case.pass_, H200).describe()
        record = Record("a layer", "", case.pass_.value, case.problem.dtype, "nchw", config=name)
        result = milliseconds(name)
        if isinstance(result, str):
            record.status = result
        else:
            record.ms = result
        return record

    return run


@pytest.mark.parametrize("pass_", list(Pass))
def test_the_fastest_is_taken_at_any_size(pass_: Pass) -> None:
    predicted = chosen(pass_=pass_)
    assert not predicted.measured
    best = candidates(pass_)[-1]
    assert best != predicted.describe()
    result = tune(replace(CASE, pass_=pass_), measuring(lambda name: 1.0 if name == best else 2.0), H200)
    assert result.fastest is not None
    assert result.fastest.config == best
    assert result.planned.config == predicted.describe()
    assert {record.config for record in result.records} == set(candidates(pass_))
    for problem in (LAYER, replace(LAYER, batch=7, input_size=(50, 64))):
        assert chosen(problem, pass_).measured
        assert chosen(problem, pass_).describe() == best
    assert "measured to be the fastest" in explain(LAYER, H200)


def test_the_own_choice_is_measured_whatever_its_prediction() -> None:
    """Its schedule is chosen at another size, and may do badly here."""
    layer = ConvTransposeProblem.make((8, 21, 32, 32), 21, 4, 2)
    case = Case("a small layer", layer, Pass.FORWARD)
    own = chosen(layer)
    found = {candidate.describe(): candidate.seconds for candidate, _ in worth_measuring(case, H200, within=1.0)}
    assert found[own.describe()] > min(found.values())
    assert len(found) < len(worth_measuring(case, H200))
    result = tune(case, measuring(lambda name: 1.0 if name == own.describe() else 2.0), H200, within=1.0)
    assert result.planned.config == own.describe()


def test_double_precision_is_never_channels_last() -> None:
    doubles = replace(LAYER, dtype="float64")
    last = [candidate.describe() for candidate, _ in plan.programs(doubles, Pass.FORWARD, H200)][-1]
    tuning.remember(replace(doubles, channels_last=True), Pass.FORWARD, H200, last)
    assert chosen(doubles).describe() == last


def test_predictions_can_be_asked_for() -> None:
    predicted = chosen().describe()
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[-1])
    assert chosen().measured
    assert plan.plan(LAYER, Pass.FORWARD, H200, by_prediction=True).describe() == predicted


def test_choices_belong_to_the_kernels_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[-1])
    monkeypatch.setattr(tuning, "_kernels", lambda: "others")
    assert not chosen().measured


def test_gradients_know_no_bias() -> None:
    for pass_ in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
        tuning.remember(LAYER, pass_, H200, candidates(pass_)[-1])
        assert chosen(replace(LAYER, bias=False), pass_).measured
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[-1])
    assert not chosen(replace(LAYER, bias=False)).measured


def test_other_layers_passes_and_devices_are_left_alone() -> None:
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[-1])
    assert chosen().measured
    others = [
        replace(LAYER, stride=(2, 1)),
        replace(LAYER, dtype="float16"),
        replace(LAYER, tf32=True),
        replace(LAYER, channels_last=True),
        replace(LAYER, out_channels=49),
    ]
    assert not any(chosen(other).measured for other in others)
    assert not chosen(pass_=Pass.INPUT_GRAD).measured
    assert not chosen(device=replace(H200, multiprocessors=78)).measured


def test_what_is_wrong_or_fails_is_never_chosen() -> None:
    names = candidates()
    statuses = {names[-1]: WRONG, names[-2]: FAILED}
    result = tune(CASE, measuring(lambda name: statuses.get(name, 1.0 + names.index(name))), H200)
    assert {record.config for record in result.faults} == set(statuses)
    assert chosen().describe() == names[0]

    none = tune(CASE, measuring(lambda name: WRONG), H200)
    assert none.fastest is None
    assert not chosen().measured  # the earlier choice is gone, too


@pytest.mark.parametrize("pass_", list(Pass))
def test_records_tell_what_was_predicted(pass_: Pass) -> None:
    own = chosen(pass_=pass_)
    result = tune(replace(CASE, pass_=pass_), measuring(lambda name: WRONG if name == own.describe() else 2.0), H200)
    seconds = {candidate.describe(): candidate.seconds for candidate, _ in worth_measuring(result.case, H200)}
    assert {record.config: record.predicted_ms for record in result.records} == {
        name: pytest.approx(1e3 * predicted) for name, predicted in seconds.items()
    }
    assert [record for record in result.records if record.planned] == [result.planned]
    assert result.planned.config == own.describe()


class PlannedError(Exception):
    """Ends a call before its launch."""


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_kernels_known_ahead_are_those_that_run(
    dtype: str, channels_last: bool, pass_: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls on the CPU that take it for a GPU, up to the launch."""
    launched: list[plan.Program] = []

    def executable(program: plan.Program, *_: object) -> None:
        launched.append(program)
        raise PlannedError

    def last(first: torch.Tensor, second: torch.Tensor) -> bool:
        return channels_last and dtype != "float64"  # as `layout.output_channels_last` on a GPU

    monkeypatch.setattr(prepared, "Executable", executable)
    monkeypatch.setattr(runtime, "soonest", lambda program, *_: program)  # as of kernels that are compiled
    monkeypatch.setattr(runtime, "output_channels_last", last)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(DeviceInfo, "of", staticmethod(lambda device: H200))
    case = Case("a layer", replace(LAYER, dtype=dtype, channels_last=channels_last), pass_)
    operands = make_operands(case.problem, torch.device("cpu"))
    x, weight, grad = operands.input, operands.weight, operands.grad_output
    constants = LAYER.stride, LAYER.padding, LAYER.output_padding, LAYER.dilation, LAYER.groups

    calls = {
        Pass.FORWARD: lambda: runtime.forward(x, weight, operands.bias, *constants),
        Pass.INPUT_GRAD: lambda: runtime.input_grad(grad, weight, *constants),
        Pass.WEIGHT_GRAD: lambda: runtime.weight_grad(x, grad, LAYER.kernel_size, *constants),
    }

    def run(case: Case) -> Record:
        with pytest.raises(PlannedError):
            calls[pass_]()
        return Record("a layer", "", pass_.value, dtype, "", ms=1.0)

    result = tune(case, run, H200)
    assert len(result.records) == len(launched)
    assert {source for program in launched for source in program.sources} == set(sources([case], H200))


def test_the_planner_s_accuracy_is_that_of_the_csv(tmp_path: Path) -> None:
    def records(layer: str, planned: float | str, *others: float | str) -> list[Record]:
        found = []
        for result in (planned, *others):
            record = Record(layer, "", "forward", "float32", "nchw", planned=not found)
            if isinstance(result, str):
                record.status = result
            else:
                record.ms = result
            found.append(record)
        return found

    close = [*records("best", 1.0, 2.0, WRONG), *records("close", 1.05, 1.0), *records("far", 4.0, 3.0, 2.0)]
    found = accuracy(close)
    assert (found.cases, found.close, found.over_fastest) == (3, 2, pytest.approx(2.1 ** (1 / 3)))
    assert str(found) == (
        "of 3 cases, the planner's own choice is within 10% of the fastest candidate in 2; "
        "planned / fastest 1.28 by geometric mean"
    )
    write_csv(tmp_path / "all.csv", close)
    assert accuracy(read_csv(tmp_path / "all.csv")) == found

    faulty = accuracy([*close, *records("wrong", WRONG, 1.0), *records("none", FAILED, WRONG)])
    assert (faulty.cases, faulty.close, faulty.over_fastest) == (5, 2, found.over_fastest)
    assert accuracy(records("none", FAILED)).over_fastest is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"value": 3}', '{"about": "another", "value": "x"}'])
def test_damaged_choices_count_for_nothing(text: str) -> None:
    predicted = chosen().describe()
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[-1])
    (path,) = tuning.directory().glob("*.json")
    path.write_text(text)
    assert chosen().describe() == predicted


def test_a_candidate_that_is_no_longer_offered_counts_for_nothing() -> None:
    predicted = chosen().describe()
    tuning.remember(LAYER, Pass.FORWARD, H200, "direct_tiled(lanes=7)")
    assert chosen().describe() == predicted
    assert not chosen().measured


def test_choices_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[-1])
    monkeypatch.setenv("POLYPHASE_TUNING", "0")
    assert not chosen().measured


def test_choices_are_private_and_whole() -> None:
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[0])
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[-1])
    (path,) = tuning.directory().iterdir()
    assert json.loads(path.read_text())["value"] == candidates()[-1]
    assert tuning.directory().stat().st_mode & 0o077 == 0
    assert tuning.directory().parent.stat().st_mode & 0o077 == 0


def test_a_trial_ends() -> None:
    names = candidates()
    with tuning.trial(names[-1]):
        assert chosen().describe() == names[-1]
    assert not chosen().measured


def test_forgetting() -> None:
    tuning.remember(LAYER, Pass.FORWARD, H200, candidates()[-1])
    result = CliRunner().invoke(app, ["tune", "--forget"])
    assert result.exit_code == 0
    assert "1 choices removed" in " ".join(result.output.split())
    assert not chosen().measured


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "give a model file"), (["--layer", "2x4x9x8 -> 6, k=3", "--device", "cpu"], "run on NVIDIA GPUs only")],
)
def test_bad_command_lines(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("status", ["ok", WRONG])
def test_the_command_measures_and_tells(status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU, with a runner that knows the times."""
    best = candidates()[-1]

    def milliseconds(name: str) -> float | str:
        return status if status == WRONG else 1 + (name != best)

    class Runner:
        def __init__(self, *arguments: object) -> None:
            self.run = measuring(milliseconds)

    monkeypatch.setattr(runner, "Runner", Runner)
    monkeypatch.setattr(command, "device_of", lambda text: torch.device("cuda"))
    monkeypatch.setattr(DeviceInfo, "of", staticmethod(lambda device: H200))
    compiled: list[KernelSource] = []
    monkeypatch.setattr(ahead, "compile_ahead", lambda kernels, arch, tell: compiled.extend(kernels) or tell(1, 2))
    layer = "4x64x32x40 -> 48, k=4, s=2, p=1, bias"
    written = tmp_path / "all.csv"
    result = CliRunner().invoke(app, ["tune", "--layer", layer, "--strict-fp32", "--csv", str(written)])
    words = " ".join(result.output.split())
    assert result.exit_code == (1 if status == WRONG else 0), words
    assert {record.config for record in read_csv(written)} == set(candidates())
    assert set(compiled) == {s for _, program in worth_measuring(CASE, H200) for s in program.sources}
    if status == WRONG:
        assert "no candidate is right" in words
        assert "of 1 cases, the planner's own choice is within 10% of the fastest candidate in 0" in words
        assert not chosen().measured
    else:
        assert "2.00" in words  # the gain
        assert "in 0; planned / fastest 2.00 by geometric mean" in words
        assert chosen().describe() == best
