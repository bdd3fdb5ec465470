"""Many layers in all passes: what a graph holds, checks before times, failures that cost one layer, files and sums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from polyphase.bench import contestants, graphs, pool, sweep
from polyphase.bench.apart import OtherProcess
from polyphase.bench.graphs import GraphTimer, Rotation
from polyphase.bench.layers import NamedLayer
from polyphase.bench.operands import make_operands
from polyphase.bench.plans import problems
from polyphase.bench.records import FAILED, OK, SKIPPED, STEP, WRONG, Record, percentile, read_csv
from polyphase.bench.sweep_report import summary_table, worst_tables
from polyphase.commands import bench_graphs as command
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import H200, Ceilings
from polyphase.problem.device import DeviceInfo

make = ConvTransposeProblem.make
CPU = torch.device("cpu")
H200_INFO = DeviceInfo.for_arch("sm_90a")
SMALL = NamedLayer("small", make((2, 8, 7, 5), 12, 3, stride=2, padding=1, groups=4, bias=True))
OTHER = NamedLayer("other", make((2, 8, 9), 4, 4))
SETUP = sweep.Setup(CPU, False, Ceilings(1e10, {"float32": 1e10, "bfloat16": 1e10}))


# Graphs


def _on_a_gpu_with_l2(size: int, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=size))
    return torch.device("cuda")


def test_a_graph_takes_long_enough_and_its_operands_do_not_stay_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _on_a_gpu_with_l2(64 << 20, monkeypatch)
    large = make((16, 64, 512, 512), 64, 4, stride=2, padding=1)
    assert Rotation.of(large, 2.0, gpu) == Rotation(1, 1)
    medium = make((1, 64, 256, 256), 64, 4, stride=2, padding=1)  # 84 MB
    assert Rotation.of(medium, 0.02, gpu) == Rotation(15, 3)
    tiny = make((1, 16, 8, 8), 16, 3)
    assert Rotation.of(tiny, 1e-4, gpu) == Rotation(graphs.MOST_CALLS, graphs.MOST_CALLS)
    for problem in (medium, tiny):
        rotation = Rotation.of(problem, 0.02, gpu)
        assert rotation.sets == rotation.calls or (rotation.sets - 1) * problem.bytes >= 2 * (64 << 20)
    assert Rotation.of(tiny, 1e-4, CPU) == Rotation(1, 1)


def test_each_set_of_operands_has_values_of_its_own() -> None:
    first, second = Rotation(4, 2).operands(SMALL.problem, CPU)
    assert not torch.equal(first.input, second.input)


class _Graph:
    """A stand-in for a CUDA graph, which calls again what was called while it was captured."""

    def __init__(self) -> None:
        self.captured: list[Any] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def reset(self) -> None:
        self.captured.clear()


def test_a_graph_holds_the_calls_in_turn_and_its_time_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[_Graph] = []
    calls: list[int] = []

    def new_graph() -> _Graph:
        made.append(_Graph())
        return made[-1]

    @contextmanager
    def capture(graph: _Graph, **_: object) -> Iterator[None]:
        before = len(calls)
        yield
        graph.captured = calls[before:]
        held.append(tuple(graph.captured))

    @contextmanager
    def stream(_: object) -> Iterator[None]:
        yield

    held: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    timer = GraphTimer(CPU)
    timer._stream = object()  # type: ignore[assignment]
    timing = timer.measure([lambda index=index: calls.append(index) for index in range(3)], 7)
    assert held == [(0, 1, 2, 0, 1, 2, 0)]
    assert set(calls[:4]) == {0, 1, 2}  # each before the capture: it may compile
    assert timing.repetitions == 7
    assert made[0].replays == 1 + 1 + 7
    monkeypatch.setattr(graphs.Timer, "clock", lambda self, call: 1.0)
    timer.measure([lambda: calls.append(9)], 7)
    assert held[-1] == (9,)  # a second each: one is enough


def test_a_step_is_the_forward_pass_and_both_gradients() -> None:
    operands = make_operands(SMALL.problem, CPU)
    ours, rival = (step(SMALL.problem, operands)() for step in (contestants.polyphase_step, contestants.torch_step))
    expected = [contestants.torch_call(SMALL.problem, pass_, operands)() for pass_ in Pass]
    for one, other, wanted in zip(ours, rival, expected, strict=True):
        torch.testing.assert_close(other, wanted)
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


# A layer


def _records(layer: NamedLayer = SMALL) -> dict[str, Record]:
    return sweep._measured(SETUP, layer, sweep._blank(SETUP, layer))


def test_all_passes_and_the_step_are_checked_and_timed() -> None:
    records = _records()
    assert list(records) == ["forward", "input_grad", "weight_grad", STEP]
    for record in records.values():
        assert (record.status, record.reason) == (OK, "")
        assert record.ms
        assert record.torch_default_ms
        assert record.speedup == pytest.approx(record.torch_default_ms / record.ms)
        assert record.times_floor == pytest.approx(record.ms / (record.floor_ms or 0.0))
        assert record.gpu
        assert record.ceilings
    assert records[STEP].floor_ms == pytest.approx(3 * (records["forward"].floor_ms or 0.0))
    assert all(record.error is not None for name, record in records.items() if name != STEP)
    times = sweep._benchmark_mode(SETUP, SMALL, ["forward", STEP])
    assert all(not isinstance(time, str) and time.ms > 0 for time in times.values())


def test_what_is_wrong_is_not_timed_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    right = contestants.polyphase_call

    def wrong(problem: ConvTransposeProblem, pass_: Pass, operands: Any) -> Any:
        call = right(problem, pass_, operands)
        return (lambda: call() + 1) if pass_ is Pass.INPUT_GRAD else call

    monkeypatch.setattr("polyphase.bench.runner.polyphase_call", wrong)
    records = _records()
    assert (records["input_grad"].status, records["input_grad"].ms) == (WRONG, None)
    assert (records[STEP].status, records[STEP].reason) == (FAILED, "input_grad is wrong")
    assert records["forward"].ms
    assert records["weight_grad"].ms


def test_pytorch_s_failure_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise NotImplementedError("not for this dtype")

    monkeypatch.setattr(sweep, "torch_call", broken)
    record = _records()["forward"]
    assert (record.status, record.torch_default_ms) == (OK, None)
    assert record.reason == "PyTorch default: NotImplementedError: not for this dtype"
    times = sweep._benchmark_mode(SETUP, SMALL, ["forward"])
    assert times == {"forward": "NotImplementedError: not for this dtype"}


# The processes


def _die() -> None:
    os._exit(3)


def _sleep() -> None:
    import time

    time.sleep(60)


def _pid() -> int:
    return os.getpid()


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_replaced() -> None:
    other = OtherProcess()
    try:
        first = other.call(_pid)
        assert first != os.getpid()
        assert other.call(_pid, seconds=60) == first
        with pytest.raises(RuntimeError, match="ended with exit code 3"):
            other.call(_die)
        second = other.call(_pid)
        with pytest.raises(RuntimeError, match="has not answered after 0 s"):
            other.call(_sleep, seconds=0.2)
        assert len({first, second, other.call(_pid)}) == 3
    finally:
        other.close()


class _Here:
    """A process that is this one, and fails where it is told to."""

    def __init__(self) -> None:
        self.failing: set[Any] = set()

    def call(self, function: Any, *arguments: Any, seconds: float | None = None) -> Any:
        if function in self.failing:
            raise RuntimeError("its process ended with exit code -9")
        return function(*arguments)

    def close(self) -> None:
        pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[_Here]:
    made: list[_Here] = []

    def new() -> _Here:
        made.append(_Here())
        return made[-1]

    monkeypatch.setattr(sweep, "OtherProcess", new)
    monkeypatch.setattr(sweep, "_ceilings", lambda *_: SETUP.ceilings)
    return made


def test_a_layer_that_ends_its_process_is_failed_and_the_next_is_measured(here: list[_Here]) -> None:
    found = sweep.Sweep(CPU, ["float32"])
    ours, rival = here
    ours.failing.add(sweep._measured)
    records = found.run(SMALL, seed=7)
    assert {(record.status, record.seed) for record in records} == {(FAILED, 7)}
    assert records[0].reason == "RuntimeError: its process ended with exit code -9"
    assert records[0].problem == str(SMALL.problem)
    ours.failing.clear()
    rival.failing.add(sweep._benchmark_mode)
    records = found.run(SMALL)
    assert {record.status for record in records} == {OK}
    assert {record.reason for record in records} == {
        "PyTorch benchmark: RuntimeError: its process ended with exit code -9"
    }
    rival.failing.clear()
    assert all(record.best_speedup and record.torch_benchmark_ms for record in found.run(OTHER))
    lacking = NamedLayer("audio", make((1, 4, 9), 4, 3, channels_last=True))
    assert {record.status for record in found.run(lacking)} == {SKIPPED}


def test_layers_come_in_every_form_one_after_the_other() -> None:
    found = [*problems([SMALL, OTHER], ["float32", "bfloat16"], [False, True], strict_fp32=False)]
    forms = [(each.name, each.problem.dtype, each.problem.channels_last, each.problem.tf32) for each in found]
    assert forms == [
        ("small", "float32", False, True),
        ("small", "float32", True, True),
        ("small", "bfloat16", False, False),
        ("small", "bfloat16", True, False),
        ("other", "float32", False, True),
        ("other", "bfloat16", False, False),
    ]
    (strict,) = problems([OTHER], ["float32"], [False], strict_fp32=True)
    assert not strict.problem.tf32


def test_kernels_that_calls_launch_are_known_beforehand() -> None:
    from polyphase.plan import planner as plan

    problem = make((2, 64, 32, 32), 32, 4, stride=2, padding=1, tf32=True)
    (found,) = sweep.sources([NamedLayer("layer", problem)], H200_INFO, jobs=1)
    for pass_ in Pass:
        program = plan.plan(problem, pass_, H200_INFO).program
        assert program is not None
        assert (program.main.one_way or program.main.source) in found
        assert {source for source in program.sources if source != program.main.source} <= set(found)


def test_rankings_are_left_alone_unless_they_are_asked_for() -> None:
    before = os.environ.get("POLYPHASE_TUNING")
    assert list(pool.each(lambda _: os.environ.get("POLYPHASE_TUNING"), [0], 1)) == ["0"]
    assert list(pool.each(lambda _: os.environ.get("POLYPHASE_TUNING"), [0], 1, rankings=True)) == [before]


# The command


def _sweep(csv: Path, *layers: NamedLayer, seconds: float | None = None, resume: bool = False) -> list[Record]:
    console = Console(quiet=True)
    return command.sweep(
        console, CPU, layers, ["float32"], [False], False, seed=3, seconds=seconds, csv=csv, resume=resume
    )


def test_rows_are_written_as_they_come_and_kept_by_the_next_run(
    here: list[_Here], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    csv = tmp_path / "rows.csv"
    run = sweep.Sweep.run

    def interrupted(self: sweep.Sweep, layer: NamedLayer, seed: int | None = None) -> list[Record]:
        if layer.name == "other":
            raise KeyboardInterrupt
        return run(self, layer, seed)

    with monkeypatch.context() as patch:
        patch.setattr(sweep.Sweep, "run", interrupted)
        records = _sweep(csv, SMALL, OTHER)
    assert [record.layer for record in records] == ["small"] * 4
    kept = read_csv(csv)
    assert [(record.layer, record.pass_name, record.seed) for record in kept] == [
        ("small", name, 3) for name in sweep.TIMED
    ]
    with monkeypatch.context() as patch:
        patch.setattr(sweep.Sweep, "run", run)
        assert {record.layer for record in _sweep(csv, SMALL, OTHER, seconds=0.0, resume=True)} == {"small"}
        records = _sweep(csv, SMALL, OTHER, resume=True)
    assert [record.layer for record in records] == ["small"] * 4 + ["other"] * 4
    assert records[0].ms == kept[0].ms
    assert len(read_csv(csv)) == 8


def test_a_layer_is_measured_when_its_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[NamedLayer] = []
    monkeypatch.setattr(command, "_TOGETHER", 2)
    monkeypatch.setattr(command, "_compile", lambda layers, place: compiled.extend(layers))
    layers = [NamedLayer(str(index), SMALL.problem) for index in range(5)]
    assert [layer for layer in command._compiled(layers, torch.device("cuda")) if layer in compiled] == layers
    assert compiled == layers
    compiled.clear()
    some = command._compiled(layers, torch.device("cuda"))
    next(some)
    some.close()
    assert len(compiled) <= 4  # a run that stops early has not compiled all


def _row(layer: str, ms: float, default: float, benchmark: float | None, **changes: Any) -> Record:
    record = Record(layer, layer, "forward", "float32", "nchw", ms=ms, torch_default_ms=default)
    record.torch_benchmark_ms, record.speedup, record.times_floor = benchmark, default / ms, ms
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def _text(*tables: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def test_a_summary_goes_by_the_faster_of_pytorch_s_modes() -> None:
    rows = [
        _row("a", 1.0, 8.0, 2.0, predicted_ms=0.5),
        _row("b", 2.0, 1.0, 4.0),
        _row("c", 4.0, 4.0, None),
        Record("d", "d", "forward", "float32", "nchw", status=FAILED),
    ]
    assert [record.best_speedup for record in rows] == [2.0, 0.5, 1.0, None]
    line = next(line for line in _text(summary_table(rows)).splitlines() if line.startswith("forward"))
    assert line.split()[2:] == [
        *("nchw", "3", "1", "1.00", "1.59", "2.00", "33.3%", "33.3%", "0.50", "2.00", "4.00", "4.00", "2.00")
    ]


def test_the_worst_layers_are_named_first() -> None:
    rows = [_row("good", 1.0, 2.0, 2.0), _row("bad", 2.0, 1.0, 4.0), _row("none", 9.0, 9.0, None, pass_name=STEP)]
    slow, far = (_text(table) for table in worst_tables(rows, 2))
    assert slow.index("bad") < slow.index("good")
    assert far.index("bad") < far.index("good")
    assert "none" not in slow + far
    assert "bad" in _text(*worst_tables(rows, 1))
    assert "good" not in _text(*worst_tables(rows, 1))


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([2.0, 1.0], 0.5) == 1.0


def test_an_h200_s_ceilings_are_those_of_its_records() -> None:
    """To five per cent: each run measures its own."""
    import re

    record = read_csv(Path(__file__).parent.parent / "benchmarks/results/h200.csv")[0]
    copied = re.search(r"copy ([\d.]+) TB/s", record.ceilings)
    assert copied
    assert float(copied[1]) * 1e12 == pytest.approx(H200.bytes_per_second, rel=0.05)
    for kind, rate in re.findall(r"(tf32|float32|bfloat16) ([\d.]+)", record.ceilings):
        assert float(rate) * 1e12 == pytest.approx(H200.flops_per_second[kind], rel=0.05)
