"""The benchmark's parts: layers and their notation, the rule of accuracy, float64 samples, cases, CSV and picture."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyphase
import processes
from polyphase.bench import accuracy, apart, environment, oracle, plot, runner
from polyphase.bench.contestants import TorchVariant, polyphase_call, torch_call, torch_flags, torch_variant_call
from polyphase.bench.layers import LayerSyntaxError, NamedLayer, Suite, cut, every_layer, parse_layer, suite
from polyphase.bench.memory import workspace_megabytes
from polyphase.bench.operands import make_operands
from polyphase.bench.records import FAILED, OK, SKIPPED, WRONG, Record, read_csv, summaries, write_csv
from polyphase.bench.timing import Timer, Timing
from polyphase.problem import ConvTransposeProblem, Pass

make = ConvTransposeProblem.make
CPU = torch.device("cpu")
SMALL = make((3, 8, 7, 5), 12, (3, 5), stride=(2, 3), padding=(1, 2), groups=4, dilation=(2, 1))
DENSE = make((5, 16, 9), 16, 4, stride=2, padding=1, bias=True)


# Layers and their notation


@pytest.mark.parametrize("layer", every_layer(), ids=lambda layer: layer.name)
def test_the_notation_of_a_layer_is_what_the_layer_prints(layer: NamedLayer) -> None:
    assert parse_layer(str(layer.problem)) == layer.problem
    elsewhere = replace(layer.problem, dtype="bfloat16", channels_last=True, bias=not layer.problem.bias)
    assert parse_layer(str(elsewhere)) == elsewhere


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x64x1024x1024 -> 64, k=3", make((8, 64, 1024, 1024), 64, 3)),
        ("8×64×9→3,kernel_size=5,stride=2", make((8, 64, 9), 3, 5, 2)),
        ("1x2x3x4x5 -> 6, k=1x2x3, s=(1, 2,3), bias=no", make((1, 2, 3, 4, 5), 6, (1, 2, 3), (1, 2, 3))),
        ("2 x 4 x 3 x 3 -> 4, k=2, d=3, op=2, g=2, bias=yes, float16, channels_last",
         make((2, 4, 3, 3), 4, 2, 1, 0, 2, 2, True, 3, "float16", True)),
    ],
)  # fmt: skip
def test_what_the_notation_allows(text: str, expected: ConvTransposeProblem) -> None:
    assert parse_layer(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not start with an input shape"),
        ("8x64 -> 64, k=3", "does not start with an input shape"),
        ("8x64x32x32, k=3", "an arrow"),
        ("8x64x32x32 -> many, k=3", "'many' after the arrow is not a number of output channels"),
        ("8x64x32x32 -> 64", "has no kernel size k"),
        ("8x64x32x32 -> 64, k=3, k=4", "kernel_size is given twice"),
        ("8x64x32x32 -> 64, k=3, q=2", "'q=2' is not a parameter of a layer; known are k, s, p, op, d, g, bias"),
        ("8x64x32x32 -> 64, k=3, float8", "'float8' is not a parameter"),
        ("8x64x32x32 -> 64, k=3, s=two", "takes a number, or one per dimension"),
        ("8x64x32x32 -> 64, k=3, s=-1", "takes a number, or one per dimension"),
        ("8x64x32x32 -> 64, k=(3, 3, 3)", "has 3 values for a layer of 2 spatial dimensions"),
        ("8x64x32x32 -> 64, k=3, g=2x2", "groups takes one number"),
        ("8x64x32x32 -> 64, k=3, g=3", "groups=3 does not divide both in_channels=64 and out_channels=64"),
        ("8x64x32x32 -> 64, k=3, s=0", "must be at least 1"),
        ("8x64x32x32 -> 64, k=3, s=2, op=2", r"output_padding=2 must be smaller than the stride \(2\) or the dilation"),
        ("8x64x2x2 -> 64, k=3, p=9", "the output size would be"),
    ],
)
def test_what_the_notation_refuses(text: str, message: str) -> None:
    with pytest.raises(LayerSyntaxError, match=message):
        parse_layer(text)


def test_the_suites_are_what_they_are_said_to_be() -> None:
    all_layers = suite(Suite.ALL)
    assert len(all_layers) == 22
    assert len(suite(Suite.REFERENCE)) == 5
    assert {layer.problem.dims for layer in all_layers} == {1, 2, 3}
    sizes = {
        layer.name: (round(layer.problem.flops / 1e9, 1), round(layer.problem.bytes / 1e6)) for layer in all_layers
    }
    # The figures that stock PyTorch was first measured with.
    assert sizes["KernelBench 57"] == (618.5, 4304)
    assert sizes["KernelBench 75"] == (8.1, 873)
    assert sizes["75 ungrouped, every parameter"] == (32.2, 878)
    assert sizes["KernelBench 81"] == (4.8, 848)
    assert sizes["FSRCNN ×4"] == (9.4, 299)
    assert sizes["HiFi-GAN up 1"] == (17.2, 50)
    assert sizes["nnU-Net 3-D up"] == (10.7, 80)
    for layer in every_layer():
        assert min(layer.problem.output_size) > 0
    assert len(every_layer()) == len({layer.name for layer in every_layer()})
    assert {layer for which in Suite for layer in suite(which)} == set(every_layer())


def test_the_further_suites_are_what_they_are_said_to_be() -> None:
    lone = suite(Suite.BATCH_ONE)
    assert len(lone) == 20
    assert {layer.problem.batch for layer in lone} == {1}
    volumes = suite(Suite.VOLUMES)
    assert {layer.problem.dims for layer in volumes} == {3}
    assert {layer.name for layer in volumes if layer.name.startswith("KernelBench")} == {
        f"KernelBench {number}" for number in (58, 61, 68, 70, 72, 73, 77)
    }
    assert {(1, 2, 2), (3, 4, 4), (1, 4, 4)} <= {layer.problem.kernel_size for layer in volumes}
    assert all(layer.name.split()[-1].isdigit() for layer in suite(Suite.KERNELBENCH))  # none of another level
    assert len(suite(Suite.HOLES)) == 21


def test_a_cut_keeps_the_layer_and_small_sides() -> None:
    problem = make((16, 32, 128, 6, 3), 64, 3)
    assert cut(problem, 8).input_shape == (2, 32, 16, 4, 3)
    assert cut(problem, 8).weight_shape == problem.weight_shape
    assert runner.cutting_factor(problem, 1e18) == 1
    assert cut(problem, runner.cutting_factor(problem, 1e7)).flops <= 1e7
    assert runner.cut_for_cpu(NamedLayer("tiny", SMALL)).problem == SMALL
    assert runner.cut_for_cpu(NamedLayer("big", suite(Suite.ALL)[0].problem)).name == "big ÷16"


# The rule of accuracy


def _noisy(reference: torch.Tensor, relative: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (reference + relative * torch.randn(reference.shape, dtype=torch.float64, generator=generator)).float()


def test_float32_rounding_keeps_the_rule_and_tf32_rounding_breaks_it() -> None:
    reference = torch.randn(100, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded = reference.float()
    assert accuracy.compare(_noisy(reference, 3e-7), rounded, reference).ok
    coarse = accuracy.compare(_noisy(reference, 3e-4), rounded, reference)
    assert not coarse.ok
    assert not coarse.ok_in_norm
    assert coarse.error == pytest.approx(3e-4, rel=0.1)
    # A yardstick that is as coarse excuses it in the norm; not each element, for the two err in different places.
    other = (reference + 3e-4 * torch.randn(100, 100, dtype=torch.float64)).float()
    assert accuracy.compare(_noisy(reference, 3e-4), other, reference).ok_in_norm
    assert accuracy.compare(other, other, reference).ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_one_wrong_element_breaks_the_rule(value: float) -> None:
    reference = torch.ones(1000, dtype=torch.float64)
    out = torch.ones(1000)
    out[537] = value
    found = accuracy.compare(out, torch.ones(1000), reference)
    assert (found.broken, found.ok) == (1, False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_right_where_it_is_expected_and_excuses_nothing_else(value: float) -> None:
    reference = torch.ones(1000, dtype=torch.float64)
    reference[537] = value
    assert accuracy.compare(reference.float(), reference.float(), reference).ok
    missed = reference.float()
    missed[537] = 1.0
    assert accuracy.compare(missed, reference.float(), reference).broken == 1
    missed = reference.float()
    missed[3] = 2.0
    assert accuracy.compare(missed, reference.float(), reference).broken == 1


def test_other_shapes_and_dtypes_are_not_compared_at_all() -> None:
    ones = torch.ones(3, 4)
    with pytest.raises(ValueError, match="float16"):
        accuracy.compare(ones.half(), ones, ones.double())
    with pytest.raises(ValueError, match=r"\(4, 3\)"):
        accuracy.compare(ones.T, ones, ones.double())
    assert accuracy.compare(ones[:0], ones[:0], ones[:0].double()).ok


def test_kernelbench_s_own_rule() -> None:
    ones = torch.ones(4, 25)
    assert accuracy.kernelbench_rule(ones + 1.9e-4, ones) == 0
    assert accuracy.kernelbench_rule(torch.where(torch.arange(25) < 5, 1.01, 1.0).expand(4, 25), ones) == 0.2
    assert accuracy.kernelbench_rule((ones + 1e-2).half(), ones.half()) == 0
    assert accuracy.kernelbench_rule(torch.ones(0, 3), torch.ones(0, 3)) == 0


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (2, 1), (7, 2), (64, 12), (5, 5), (5, 9)])
def test_a_spread_has_both_ends(count: int, wanted: int) -> None:
    chosen = accuracy.spread(count, wanted)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] == count - 1
    assert len(chosen) == min(count, max(wanted, 2))


# Float64 samples


@pytest.mark.parametrize("problem", [SMALL, DENSE, replace(SMALL, groups=1)], ids=str)
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("share", [1.0, 0.4, 0.01])
def test_a_sample_is_a_part_of_the_whole(problem: ConvTransposeProblem, pass_: Pass, share: float) -> None:
    operands = make_operands(replace(problem, dtype="float64"), CPU)
    whole = torch_call(problem, pass_, operands)()
    found = oracle.sample(problem, pass_, operands, share * problem.flops)
    torch.testing.assert_close(found.of(whole), found.reference, rtol=1e-12, atol=1e-12)
    assert (found.compared == "all") == (share == 1.0)
    assert found.reference.numel() < whole.numel() or share == 1.0
    # An error in the last element of the whole is seen whatever the share.
    whole[(-1,) * whole.dim()] += 1.0
    assert found.compare(whole, found.reference.new_zeros(whole.shape) + whole).ok  # equal to the yardstick
    right = torch_call(problem, pass_, operands)()
    assert found.compare(whole, right).broken == 1


def test_a_long_batch_is_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = make_operands(DENSE, CPU)
    whole = oracle.sample(DENSE, Pass.WEIGHT_GRAD, operands)
    monkeypatch.setattr(oracle, "CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(oracle.sample(DENSE, Pass.WEIGHT_GRAD, operands).reference, whole.reference)


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_both_contestants_compute_the_same(pass_: Pass, dtype: str, channels_last: bool) -> None:
    problem = replace(SMALL, dtype=dtype, channels_last=channels_last)
    operands = make_operands(problem, CPU)
    ours, rival = polyphase_call(problem, pass_, operands)(), torch_call(problem, pass_, operands)()
    assert oracle.sample(problem, pass_, operands).compare(ours, rival).ok


def test_pytorch_s_variants_leave_its_switches_as_they_were() -> None:
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    for strict in (True, False):
        with torch_flags(TorchVariant.BENCHMARK, strict_fp32=strict):
            assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == (True, not strict)
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == before


def test_there_is_no_channels_last_variant_in_one_dimension_or_twice() -> None:
    def variant(problem: ConvTransposeProblem) -> object:
        return torch_variant_call(TorchVariant.CHANNELS_LAST, problem, Pass.FORWARD, make_operands(problem, CPU))

    assert variant(SMALL) is not None
    assert variant(replace(SMALL, channels_last=True)) is None
    assert variant(DENSE) is None


# Timing


def test_a_timing_is_median_and_spread() -> None:
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3.0, 3)
    timing = Timing.of([float(value) for value in range(101)])
    assert (timing.ms, timing.p10, timing.p90) == (50.0, 10.0, 90.0)


def test_a_call_is_repeated_as_often_as_the_budget_allows() -> None:
    calls = []
    timing = Timer(CPU, repetitions=12).measure(lambda: calls.append(1), warmups=3)
    assert timing.repetitions == 12
    assert len(calls) == 3 + 1 + 12
    assert Timer(CPU, repetitions=12, budget_seconds=0.0).measure(lambda: None).repetitions == 5


# Cases


@pytest.fixture(scope="module")
def cpu_runner() -> runner.Runner:
    return runner.Runner(CPU, ["float32", "bfloat16"], quick=True)


def test_cases_keep_the_passes_of_a_layer_together() -> None:
    cases = runner.make_cases([NamedLayer("a", SMALL), NamedLayer("b", DENSE)], list(Pass), ["float32"], [False, True])
    assert len(cases) == 12
    assert [case.name for case in cases[:6]] == ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_case_is_checked_and_timed(cpu_runner: runner.Runner, pass_: Pass, dtype: str) -> None:
    record = cpu_runner.run(runner.Case("small", replace(SMALL, dtype=dtype), pass_))
    assert (record.status, record.algorithm, record.compared) == (OK, "portable", "all")
    assert record.ms is not None
    assert record.torch_default_ms is not None
    assert record.speedup == pytest.approx(record.torch_default_ms / record.ms)
    assert record.error is not None
    assert record.error < 3e-6 if dtype == "float32" else record.error < 1e-2
    assert record.floor_ms == pytest.approx(cpu_runner.ceilings.floor_ms(replace(SMALL, dtype=dtype)))


def test_the_workspace_is_what_goes_again(cpu_runner: runner.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is held at once, all but the result; on a CPU nobody counts."""
    record = cpu_runner.run(runner.Case("small", SMALL, Pass.FORWARD))
    assert (record.workspace_megabytes, record.torch_workspace_megabytes) == (None, None)
    now, most = "requested_bytes.all.current", "requested_bytes.all.peak"
    held = {now: 5_000_000, most: 90_000_000}

    def call() -> torch.Tensor:
        held.update({now: 7_000_000, most: max(held[most], 10_500_000)})
        return torch.empty(0)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: held.update({most: held[now]}))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: held)
    assert workspace_megabytes(call, torch.device("cuda")) == 3.5


def test_a_wrong_result_is_reported_and_not_timed(cpu_runner: runner.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    right = polyphase.conv_transpose2d

    def wrong(*arguments: torch.Tensor, **keywords: object) -> torch.Tensor:
        output = right(*arguments, **keywords)
        output[-1, -1, -1, -1] += 1e-3
        return output

    monkeypatch.setattr(polyphase, "conv_transpose2d", wrong)
    record = cpu_runner.run(runner.Case("small", SMALL, Pass.FORWARD))
    assert (record.status, record.ms, record.torch_default_ms) == (WRONG, None, None)
    assert record.reason.startswith("1 of ")
    assert not record.good


def test_a_failure_is_a_record_with_its_reason(cpu_runner: runner.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise polyphase.UnsupportedError("this cannot be served\nfor a long reason")

    monkeypatch.setattr(polyphase, "conv_transpose2d", broken)
    record = cpu_runner.run(runner.Case("small", SMALL, Pass.FORWARD))
    assert (record.status, record.reason) == (FAILED, "UnsupportedError: this cannot be served")


def test_pytorch_s_failure_is_a_note(cpu_runner: runner.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError("not for this dtype")

    monkeypatch.setattr(runner, "torch_call", broken)
    monkeypatch.setattr(runner, "torch_variant_call", broken)
    record = cpu_runner.run(runner.Case("small", SMALL, Pass.FORWARD))
    assert record.status == OK
    assert record.reason == "PyTorch default: NotImplementedError: not for this dtype"
    assert record.ms is not None
    assert (record.speedup, record.torch_error) == (None, None)


def test_a_case_that_does_not_exist_is_not_a_failure(cpu_runner: runner.Runner) -> None:
    record = cpu_runner.run(runner.Case("audio", replace(DENSE, channels_last=True), Pass.FORWARD))
    assert (record.status, record.good) == (SKIPPED, True)


def test_a_fallback_on_a_gpu_is_never_timed(cpu_runner: runner.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyphase.problem.device import DeviceInfo

    monkeypatch.setattr(cpu_runner, "device", torch.device("cuda"))
    monkeypatch.setattr(DeviceInfo, "of", lambda device: DeviceInfo.for_arch("portable"))
    with pytest.raises(RuntimeError, match="portable path"):
        cpu_runner.plan(runner.Case("small", SMALL, Pass.FORWARD), _record())


# PyTorch's benchmark mode


@pytest.fixture(scope="module")
def both_modes() -> Iterator[runner.Runner]:
    found = runner.Runner(CPU, ["float32"], [TorchVariant.DEFAULT, TorchVariant.BENCHMARK], quick=True)
    yield found
    found.close()


def _worker(of: runner.Runner) -> Any:
    assert of._benchmark_mode._worker is not None
    return of._benchmark_mode._worker[0]


def test_benchmark_mode_is_timed_in_a_process_of_its_own(
    both_modes: runner.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch has been called by heuristics before, benchmark mode takes their plan; and the other way round."""
    modes = []
    function = torch.nn.functional.conv_transpose2d

    def recorded(*arguments: Any, **keywords: Any) -> torch.Tensor:
        modes.append(torch.backends.cudnn.benchmark)
        return function(*arguments, **keywords)

    monkeypatch.setattr(torch.nn.functional, "conv_transpose2d", recorded)
    pids = set()
    for layout in (False, True):
        record = both_modes.run(runner.Case("small", replace(SMALL, channels_last=layout), Pass.FORWARD))
        assert (record.status, record.reason) == (OK, "")
        assert record.torch_default_ms
        assert record.torch_benchmark_ms
        pids.add(_worker(both_modes).pid)
    assert modes
    assert not any(modes)
    assert len(pids) == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_benchmark_mode_is_on_from_the_first_call_in_the_case_s_layout(
    strict: bool, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn, calls = torch.backends.cudnn, []

    def fake(problem: ConvTransposeProblem, pass_: Pass, operands: Any) -> Any:
        layout = operands.input.is_contiguous(memory_format=torch.channels_last)
        return lambda: calls.append((pass_, layout, cudnn.benchmark, cudnn.allow_tf32))

    monkeypatch.setattr(apart, "torch_call", fake)
    problem = replace(SMALL, channels_last=channels_last)
    assert apart.benchmark_mode_ms(problem, Pass.INPUT_GRAD, CPU, 7, 1.0, strict) >= 0
    assert calls == [(Pass.INPUT_GRAD, channels_last, True, not strict)] * (2 + 1 + 7)


def test_a_failure_in_benchmark_mode_is_a_note(both_modes: runner.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    case = runner.Case("small", SMALL, Pass.FORWARD)
    assert both_modes.run(case).torch_benchmark_ms
    pid = _worker(both_modes).pid
    with monkeypatch.context() as patch:
        patch.setattr(both_modes._benchmark_mode, "_settings", (torch.device("vulkan"), 5, 0.1, False))
        record = both_modes.run(case)
    assert record.status == OK
    assert record.reason.startswith("PyTorch benchmark: ")
    assert record.ms
    assert record.torch_default_ms
    assert record.torch_benchmark_ms is None
    assert both_modes.run(case).torch_benchmark_ms
    assert _worker(both_modes).pid == pid


def test_the_death_of_the_other_process_is_a_note(both_modes: runner.Runner) -> None:
    case = runner.Case("small", SMALL, Pass.FORWARD)
    assert both_modes.run(case).torch_benchmark_ms
    os.kill(_worker(both_modes).pid, signal.SIGKILL)
    record = both_modes.run(case)
    assert (record.status, record.torch_benchmark_ms) == (OK, None)
    assert record.reason == f"PyTorch benchmark: RuntimeError: its process ended with exit code {-signal.SIGKILL}"
    assert both_modes.run(case).torch_benchmark_ms  # by another


def test_the_other_process_ends_with_the_benchmark(both_modes: runner.Runner) -> None:
    both_modes.run(runner.Case("small", SMALL, Pass.FORWARD))
    process = _worker(both_modes)
    assert process in multiprocessing.active_children()
    both_modes.close()
    assert process not in multiprocessing.active_children()
    both_modes.close()  # which is nothing


# CSV, means and picture


def _record(name: str = "a layer, with a comma", **changes: object) -> Record:
    record = Record(name, "1×2×3 → 4, k=5", "forward", "float32", "nchw", ms=2.0, p10=1.9, p90=2.25, repetitions=20)
    record = replace(record, floor_ms=1.0, times_floor=2.0, torch_default_ms=8.0, speedup=4.0, gpu="NVIDIA H200")
    return replace(record, **changes)


RECORDS = [
    _record(),
    _record("b", ms=0.5, times_floor=0.5, torch_default_ms=0.5, speedup=1.0, strict_fp32=True, planned=False),
    _record("c", status=FAILED, reason='why: "so", and\nso', ms=None, times_floor=None, speedup=None),
    _record("a layer, with a comma", pass_name="weight_grad", dtype="bfloat16", predicted_ms=1.5, planned=True),
]


def test_the_commit_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = environment.commit.__wrapped__  # which remembers nothing
    monkeypatch.delenv("POLYPHASE_COMMIT", raising=False)
    told = commit()
    monkeypatch.setenv("POLYPHASE_COMMIT", "0123456789")
    assert commit() == "0123456789" != told


def test_a_csv_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "results.csv"
    write_csv(path, RECORDS)
    assert read_csv(path) == RECORDS
    assert "pass" in path.read_text().splitlines()[0].split(",")


def test_a_csv_without_the_newer_columns_is_read() -> None:
    records = read_csv(processes.ROOT / "benchmarks" / "results" / "h200-models.csv")
    assert all(record.ms and record.predicted_ms is None and record.planned is None for record in records)
    assert all(record.config for record in records), "it is called variant there"


def test_tables_of_the_docs_are_those_of_the_records() -> None:
    command = [sys.executable, str(processes.ROOT / "benchmarks" / "tables.py"), "--check"]
    done = subprocess.run(command, env=processes.environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_csv_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("layer,ms\na,1\n")
    with pytest.raises(ValueError, match="no column algorithm"):
        read_csv(path)


def test_geometric_means_count_what_was_measured_and_say_what_was_not() -> None:
    first, second = summaries(RECORDS)
    assert (first.layers, first.unmeasured, first.slowest.layer) == (2, 1, "a layer, with a comma")
    assert (first.times_floor, first.torch_times_floor, first.speedup) == pytest.approx((1.0, 2.0, 2.0))
    assert (second.pass_name, second.dtype, second.layers) == ("weight_grad", "bfloat16", 1)
    assert summaries([RECORDS[2]]) == []


def test_the_means_against_benchmark_mode_stand_where_it_was_measured() -> None:
    records = [_record(torch_benchmark_ms=4.0), _record("b", torch_benchmark_ms=1.0), _record("c")]
    (found,) = summaries(records)
    assert (found.layers, found.benchmarked, found.slower, found.benchmark_speedup) == (3, 2, 1, pytest.approx(1.0))
    assert str(found).endswith("4.00 times as fast; 1.00 times as fast as PyTorch's benchmark mode, slower on 1 of 2")
    (found,) = summaries([_record()])
    assert (found.benchmarked, found.benchmark_speedup) == (0, None)
    assert "benchmark" not in str(found)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn_from_a_csv(tmp_path: Path, ending: str) -> None:
    write_csv(tmp_path / "results.csv", RECORDS)
    picture = tmp_path / "pictures" / f"results.{ending}"
    plot.draw(read_csv(tmp_path / "results.csv"), picture)
    assert picture.stat().st_size > 5000


def test_a_failed_layer_stays_in_the_picture(tmp_path: Path) -> None:
    picture = tmp_path / "results.svg"
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        plot.draw(RECORDS, picture)
    text = picture.read_text()
    assert "failed" in text
    assert "4.0×" in text


def test_the_picture_shows_benchmark_mode_where_it_was_measured(tmp_path: Path) -> None:
    import matplotlib as mpl

    texts = []
    for name, changes in (("without", {}), ("with", {"torch_benchmark_ms": 0.1})):
        with mpl.rc_context({"svg.fonttype": "none"}):
            plot.draw([_record(), _record("b", **changes)], tmp_path / f"{name}.svg")
        texts.append((tmp_path / f"{name}.svg").read_text())
    without, drawn = (text.count(plot._BENCHMARK.lower()) for text in texts)
    assert without == 0
    assert drawn >= 2  # a diamond of its own and the legend's
    assert "benchmark mode" not in texts[0]
    assert "PyTorch, benchmark mode" in texts[1]
    assert plot._limits([_record(torch_benchmark_ms=0.1)])[0] < 0.1  # within the scale


def test_the_picture_has_the_dates_of_all_records(tmp_path: Path) -> None:
    import matplotlib as mpl

    dated = [_record(name, date=f"{day}T08:00:00") for name, day in (("a", "2026-02-03"), ("b", "2026-01-02"))]
    with mpl.rc_context({"svg.fonttype": "none"}):
        plot.draw(dated, tmp_path / "dates.svg")
    assert "2026-01-02 · 2026-02-03" in (tmp_path / "dates.svg").read_text()


def test_nothing_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(plot.NothingToDrawError):
        plot.draw([], tmp_path / "nothing.png")


# The environment


def test_the_report_works_without_gpu_driver_and_cuda_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.core"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "cache"))
    rows = dict(environment.report())
    assert "cuda-bindings is not installed" in rows["NVRTC"]
    assert "does not exist yet; can be made" in rows["kernel cache"]
    assert rows["POLYPHASE_CACHE_DIR"] == str(tmp_path / "cache")
    assert rows["PyTorch"] == torch.__version__


def test_the_kernel_cache_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (folder / "entry").write_bytes(b"x" * 300_000)
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(folder))
    state = environment.cache_state()
    assert str(folder) in state
    assert "0.3 MB" in state
    folder.chmod(0o777)
    assert "can be written by others" in environment.cache_state()


def test_cudnn_s_number_reads_as_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for number, text in ((91900, "9.19.0"), (90100, "9.1.0"), (8902, "8.9.2")):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert environment.cudnn_version() == text


def test_a_part_of_a_result_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that cannot afford all images takes some out of both results, and compares those."""
    whole = oracle.sample
    monkeypatch.setattr(oracle, "sample", lambda *arguments: whole(*arguments, flop_budget=1.0))
    problem = ConvTransposeProblem.make((5, 2, 6, 6), 3, 3)
    for pass_ in (Pass.FORWARD, Pass.INPUT_GRAD):
        record = runner.Runner(CPU, ["float32"], quick=True).run(runner.Case("some images", problem, pass_))
        assert (record.status, record.compared) == ("ok", "2 of 5 images"), record.reason


def test_an_interrupted_wait_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next layer would get the time of this one."""

    class Interrupted:
        closed = False

        def send(self, _: object) -> None:
            pass

        def recv(self) -> float:
            raise KeyboardInterrupt

        def close(self) -> None:
            self.closed = True

    connection = Interrupted()
    process = SimpleNamespace(kill=lambda: None, join=lambda: None, exitcode=0)
    monkeypatch.setattr(apart, "_start", lambda: (process, connection))
    worker = apart.BenchmarkProcess(Timer(CPU), strict_fp32=False)
    with pytest.raises(KeyboardInterrupt):
        worker.measure(ConvTransposeProblem.make((1, 2, 4, 4), 2, 3), Pass.FORWARD)
    assert connection.closed
