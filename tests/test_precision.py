"""float32 under PyTorch's own flags: what they say, who reads them, and what results may then lack."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyphase
from helpers import (
    OUR_MODULES,
    OURS,
    TORCH,
    Operands,
    assert_as_accurate_as_torch,
    magnitudes,
    make_operands,
    normal_tensor,
    reference,
    results,
    rounded_to_tf32,
    rounding_eps,
    tf32,
    tf32_eps,
)
from polyphase import modules
from polyphase.bench import accuracy, kernels, oracle, runner
from polyphase.bench import check as check_module
from polyphase.bench import operands as bench_operands
from polyphase.bench.contestants import torch_call
from polyphase.bench.layers import NamedLayer
from polyphase.bench.model_file import ModelFile
from polyphase.plan import planner as plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.torch_op import tf32 as precision
from polyphase.torch_op.tf32 import tf32_allowed
from processes import run_python

make = ConvTransposeProblem.make
CPU = torch.device("cpu")
PER_OPERATOR = hasattr(torch._C, "_get_fp32_precision_getter")
needs_fp32_precision = pytest.mark.skipif(not PER_OPERATOR, reason="PyTorch has no fp32_precision")

EVERY_PARAMETER = make((3, 8, 13, 17), 12, (3, 5), (2, 3), (1, 2), (1, 1), 4, True, (2, 1))


# The flags


def test_pytorch_s_default_and_nvidia_s_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
        import torch
        from polyphase.torch_op.tf32 import tf32_allowed
        print(tf32_allowed() if tf32_allowed() == torch.backends.cudnn.allow_tf32 else "differs from PyTorch")
        assert not torch.cuda.is_initialized()
    """
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert run_python(script).strip() == "True"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert run_python(script).strip() == "differs from PyTorch"


def test_the_flag_is_followed() -> None:
    assert not tf32_allowed()
    for allowed in (True, False):
        torch.backends.cudnn.allow_tf32 = allowed
        assert tf32_allowed() is allowed
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=not allowed):
            assert tf32_allowed() is not allowed
        assert tf32_allowed() is allowed


def test_the_flag_of_older_versions_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_precision", None)
    found = precision._choose()
    assert found is precision._by_legacy_flag
    for allowed in (True, False):
        torch.backends.cudnn.allow_tf32 = allowed
        assert found() is allowed


def test_without_cudnn_nothing_is_rounded() -> None:
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=True):
        assert not precision._by_precision()
        assert not precision._by_legacy_flag()


@needs_fp32_precision
@pytest.mark.parametrize("levels", list(itertools.product(("none", "ieee", "tf32"), repeat=3)), ids="-".join)
def test_none_inherits_from_the_level_above(levels: tuple[str, str, str]) -> None:
    everything, cudnn, conv = levels
    torch.backends.fp32_precision = everything
    torch.backends.cudnn.fp32_precision = cudnn
    torch.backends.cudnn.conv.fp32_precision = conv
    said = [level for level in (conv, cudnn, everything) if level != "none"]
    assert tf32_allowed() is (said[:1] == ["tf32"])
    assert tf32_allowed() is (torch.backends.cudnn.conv.fp32_precision == "tf32")


@needs_fp32_precision
def test_the_last_word_counts_where_both_ways_are_used() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new"):
        _ = torch.backends.cudnn.allow_tf32
    assert tf32_allowed()
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert not tf32_allowed()
    torch.backends.cudnn.conv.fp32_precision = "none"
    torch.backends.fp32_precision = "bf16"  # which CUDA does not have
    assert not tf32_allowed()


@pytest.mark.parametrize("allowed", [False, True])
def test_the_precision_of_products_has_no_say(allowed: bool) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        with tf32(allowed):
            for setting in ("highest", "high", "medium"):
                torch.set_float32_matmul_precision(setting)
                assert tf32_allowed() is allowed
    finally:
        torch.set_float32_matmul_precision(before)


# Who reads them


class Prepared(Exception):  # noqa: N818
    """A call that was not seen before, with what it is remembered by."""

    def __init__(self, problem: ConvTransposeProblem, key: object) -> None:
        self.problem, self.key = problem, key


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pass, torch.dtype], Prepared]:
    """What `runtime` makes of a pass of a layer, without a GPU."""
    from polyphase import runtime

    problems = []

    def prepare(pass_: Pass, problem: ConvTransposeProblem, *tensors: object) -> object:
        problems.append(problem)
        return object()

    def remember(calls: object, key: object, call: object) -> None:
        raise Prepared(problems[-1], key)

    monkeypatch.setattr(runtime, "_prepare", prepare)
    monkeypatch.setattr(runtime, "_remember", remember)

    def call(pass_: Pass, dtype: torch.dtype) -> Prepared:
        problem = EVERY_PARAMETER
        constants = (problem.stride, problem.padding, problem.output_padding, problem.dilation, problem.groups)
        x, w, b, g = vars(make_operands(problem, dtype)).values()
        arguments = {
            Pass.FORWARD: (x, w, b),
            Pass.INPUT_GRAD: (g, w),
            Pass.WEIGHT_GRAD: (x, g, problem.kernel_size),
        }[pass_]
        # On the host addresses of small tensors may be aligned or not: of two calls only the flags must differ.
        monkeypatch.setattr(runtime, "ALIGNMENT", 1)
        with pytest.raises(Prepared) as caught:
            getattr(runtime, pass_.value)(*arguments, *constants)
        return caught.value

    return call


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_call_is_remembered_by_what_the_flags_say(
    pass_: Pass, dtype: torch.dtype, prepared: Callable[[Pass, torch.dtype], Prepared]
) -> None:
    strict, again = prepared(pass_, dtype), prepared(pass_, dtype)
    with tf32(True):
        allowed = prepared(pass_, dtype)
    assert strict.key == again.key
    assert (strict.key == allowed.key) is (dtype != torch.float32)
    assert not strict.problem.tf32
    assert allowed.problem.tf32 is (dtype == torch.float32)


def test_explain_goes_by_the_flags_now() -> None:
    layer = polyphase.ConvTranspose2d(4, 6, 3)
    assert ", tf32" not in polyphase.explain(layer, (1, 4, 8, 8), "sm_90a")
    with tf32(True):
        assert ", float32, tf32" in polyphase.explain(layer, (1, 4, 8, 8), "sm_90a")
        assert ", tf32" not in polyphase.explain(layer.half(), (1, 4, 8, 8), "sm_90a")


def test_the_command_explain_allows_what_the_flags_allow(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from polyphase.__main__ import app

    def told(*options: str) -> str:
        result = CliRunner().invoke(app, ["explain", "--layer", "1x4x8x8 -> 4, k=3", "--device", "sm_90a", *options])
        assert result.exit_code == 0, result.output
        return result.output

    with tf32(True):
        assert ", tf32" in told()
        assert ", tf32" not in told("--strict-fp32")
    assert ", tf32" not in told()


def test_compile_covers_both(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    sources = plan.kernel_sources

    def recorded(problem: ConvTransposeProblem, *others: Any) -> Any:
        seen.add((problem.dtype, problem.tf32))
        return sources(problem, *others)

    monkeypatch.setattr(plan, "kernel_sources", recorded)
    layer = NamedLayer("a", make((1, 4, 8, 8), 4, 3))
    found = kernels.wanted([layer], [Pass.FORWARD], ["float32", "bfloat16"], [False], [DeviceInfo.for_arch("sm_90a")])
    assert seen == {("float32", False), ("float32", True), ("bfloat16", False)}
    assert len({kernel.source for kernel in found}) == len(found)


def test_a_traced_call_stays_an_operator() -> None:
    """So the flags are read when it runs, not when it is compiled, and a change of them compiles nothing."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(polyphase.ConvTranspose1d(2, 3, 3), backend=counter, fullgraph=True)
    for allowed in (True, False):
        with tf32(allowed), torch.no_grad():
            compiled(torch.ones(1, 2, 5))
    assert counter.frame_count == 1
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert "polyphase.conv_transpose.default" in targets
    torch._dynamo.reset()


# What a result may lack

LAYERS = [make((2, 32, 9, 11), 16, 3, bias=True), replace(EVERY_PARAMETER, dtype="float32"), make((2, 3, 40), 5, 1, 3)]


def _in_tf32(problem: ConvTransposeProblem, pass_: Pass, operands: bench_operands.Operands) -> Tensor:
    """A pass on rounded operands; sums as good as exact."""
    x, w, g = (rounded_to_tf32(t).double() for t in (operands.input, operands.weight, operands.grad_output))
    bias = None if operands.bias is None else operands.bias.double()
    return torch_call(problem, pass_, bench_operands.Operands(x, w, bias, g))().float()


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_the_benchmark_s_rule_allows_tf32_where_the_problem_does(problem: ConvTransposeProblem, pass_: Pass) -> None:
    operands = bench_operands.make_operands(problem, CPU)
    out, rival = _in_tf32(problem, pass_, operands), torch_call(problem, pass_, operands)()
    strict, allowing = (oracle.sample(replace(problem, tf32=tf32), pass_, operands) for tf32 in (False, True))
    assert strict.rounding is None
    assert not strict.compare(out, rival).ok
    assert not strict.compare(out, rival).ok_in_norm
    found = allowing.compare(out, rival)
    assert found.ok
    assert found.ok_in_norm
    assert 1e-5 < found.error < 5e-4
    assert found.torch_error < 1e-6
    assert allowing.compare(rival, rival).ok


@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_allowance_is_of_the_same_part_as_the_sample(pass_: Pass, share: float) -> None:
    problem = replace(EVERY_PARAMETER, tf32=True)
    operands = bench_operands.make_operands(problem, CPU)
    found = oracle.sample(problem, pass_, operands, share * problem.flops)
    assert found.rounding is not None
    squared = bench_operands.Operands(
        operands.input.double().square(),
        operands.weight.double().square(),
        None,
        operands.grad_output.double().square(),
    )
    whole = torch_call(problem, pass_, squared)()
    torch.testing.assert_close(found.rounding, 5 * 2.0**-11 * found.of(whole).sqrt())


@pytest.mark.parametrize("pass_", Pass)
def test_the_benchmark_s_rule_allows_nothing_coarser_than_tf32(pass_: Pass) -> None:
    problem = replace(LAYERS[0], tf32=True)
    operands = bench_operands.make_operands(problem, CPU)
    expected, rival = oracle.sample(problem, pass_, operands), torch_call(problem, pass_, operands)()
    right = _in_tf32(problem, pass_, operands)
    one_wrong = right.clone()
    one_wrong.view(-1)[-1] += 0.05 * float(right.std())
    assert expected.compare(one_wrong, rival).broken == 1
    unwritten = right.clone()
    unwritten.view(-1)[7] = torch.nan
    assert expected.compare(unwritten, rival).broken == 1
    # Every product's last channel left out; and operands of bfloat16's 8 bits.
    part = bench_operands.Operands(
        torch.cat((operands.input[:, :-1], torch.zeros_like(operands.input[:, -1:])), 1),
        operands.weight,
        operands.bias,
        torch.cat((operands.grad_output[:, :-1], torch.zeros_like(operands.grad_output[:, -1:])), 1),
    )
    short = expected.compare(_in_tf32(problem, pass_, part), rival)
    assert not short.ok
    assert not short.ok_in_norm
    halves = [t.bfloat16().float() for t in (operands.input, operands.weight, operands.grad_output)]
    coarse = torch_call(problem, pass_, bench_operands.Operands(halves[0], halves[1], operands.bias, halves[2]))()
    assert not expected.compare(coarse, rival).ok


def test_tf32_in_the_benchmark_s_units() -> None:
    """The constant in `tf32_rounding` is what it is said to be."""
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    errors = (rounded_to_tf32(values).double() / values.double() - 1).abs() / accuracy.TF32_ROUNDOFF
    assert errors.max() <= 1
    assert errors.square().mean().sqrt() == pytest.approx(0.43, abs=0.01)


@pytest.mark.parametrize("strict", [False, True])
def test_both_contestants_run_under_the_benchmark_s_flags(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            seen.append(tf32_allowed())
            return call(*arguments, **keywords)

        return wrapped

    monkeypatch.setattr(polyphase, "conv_transpose2d", recorded(polyphase.conv_transpose2d))
    monkeypatch.setattr(torch.nn.functional, "conv_transpose2d", recorded(torch.nn.functional.conv_transpose2d))
    bench = runner.Runner(CPU, ["float32"], strict_fp32=strict, quick=True)
    assert bench.run(runner.Case("a", EVERY_PARAMETER, Pass.FORWARD)).good
    of_float64, *timed = seen[:1], *seen[1:]
    assert of_float64 == [tf32_allowed()]
    assert len(timed) > 10
    assert set(timed) == {not strict}


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_case_s_problem_says_what_the_run_allows(
    place: str, strict: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = runner.Runner(CPU, ["float32", "bfloat16"], strict_fp32=strict, quick=True)
    cases = []
    monkeypatch.setattr(bench, "device", torch.device(place))
    monkeypatch.setattr(bench, "_measure", lambda case, record: cases.append(case))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    record = bench.run(runner.Case("a", replace(EVERY_PARAMETER, dtype=dtype), Pass.FORWARD))
    assert cases[0].problem.tf32 is (place == "cuda" and not strict and dtype == "float32")
    assert (", tf32" in record.problem) is cases[0].problem.tf32


# check


class Stack(torch.nn.Module):
    """A model with more than one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.ConvTranspose2d(8, 8, 4, 2, 1), torch.nn.Tanh(),
                                          torch.nn.ConvTranspose2d(8, 4, 3))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.fixture(params=[lambda: torch.nn.ConvTranspose2d(8, 6, 3, 2, 1), Stack], ids=["layer", "stack"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Any]:
    """`check` on the CPU, told that TF32 is allowed or not."""
    file = ModelFile(Path("model.py"), request.param, lambda: [torch.rand(2, 8, 9, 7)], list)
    trial = check_module.Trial

    def check(allowed: bool) -> Any:
        class Told(trial):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                assert not self.tf32
                self.tf32 = allowed

        monkeypatch.setattr(check_module, "Trial", Told)
        return check_module.check_model(file, check_module.Options(CPU, time=False, trials=1))

    return check


def _through(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """polyphase's modules, on changed operands in the forward and in the backward pass."""
    right = modules.conv_transpose2d

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, forward: bool) -> Tensor:
            ctx.forward = forward
            return change(tensor) if forward else tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return grad if ctx.forward else change(grad), None

    def changed(input: Tensor, weight: Tensor, bias: Tensor | None, *others: Any, **keywords: Any) -> Tensor:
        products = right(Changed.apply(input, True), Changed.apply(weight, True), None, *others, **keywords)
        products = Changed.apply(products, False)
        return products if bias is None else products + bias.view(-1, 1, 1)

    monkeypatch.setattr(modules, "conv_transpose2d", changed)


def test_check_allows_tf32_where_the_flags_do(checked: Callable[[bool], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(True).ok
    _through(monkeypatch, rounded_to_tf32)
    result = checked(True)
    assert result.ok, result.problems
    assert all(", tf32" in text for _, text, _, _ in result.plans)
    assert not checked(False).ok


def test_check_still_sees_what_is_wrong(checked: Callable[[bool], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_last(tensor: Tensor) -> Tensor:
        last = torch.arange(tensor.shape[1]) == tensor.shape[1] - 1
        return rounded_to_tf32(tensor).masked_fill(last.view(-1, 1, 1), 0.0)

    _through(monkeypatch, without_the_last)
    result = checked(True)
    assert {finding.what for finding in result.findings if not finding.ok} >= {"output", "∂ input 0"}


def test_check_tells_tf32_from_less_where_a_layer_is_all_there_is(
    checked: Callable[[bool], Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "stack" in request.node.name:
        pytest.skip("other layers: compared in the norm")
    _through(monkeypatch, lambda tensor: tensor.bfloat16().float())
    result = checked(True)
    assert {finding.what for finding in result.findings if finding.ok} == {"∂ bias"}


# The oracle of the tests


def _assert_accurate(
    problem: ConvTransposeProblem, operands: Operands, ours: list[tuple[str, Tensor]], theirs: Any, allowed: bool
) -> None:
    expected, magnitude, rounding = (f(problem, operands) for f in (reference, magnitudes, tf32_eps))
    for name, tensor in ours:
        ref64 = getattr(expected, name)
        eps = rounding_eps(ref64, getattr(magnitude, name), tensor.dtype)
        if allowed:
            eps = eps + getattr(rounding, name)
        try:
            assert_as_accurate_as_torch(tensor, getattr(theirs, name), ref64, eps)
        except AssertionError as failure:
            raise AssertionError(f"{name} of {problem}: {failure}") from None


@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_the_oracle_tells_tf32_from_float32_and_from_less(problem: ConvTransposeProblem) -> None:
    operands = make_operands(problem, torch.float32, make=normal_tensor)
    theirs = results(TORCH[problem.dims], problem, operands)

    def on(change: Callable[[Tensor], Tensor]) -> list[tuple[str, Tensor]]:
        rounded = Operands(
            *(change(t) for t in (operands.input, operands.weight)), operands.bias, change(operands.grad_output)
        )
        items = results(TORCH[problem.dims], problem, rounded.map(torch.Tensor.double)).items()
        return [(name, tensor.float()) for name, tensor in items if name != "bias_grad"]

    _assert_accurate(problem, operands, on(rounded_to_tf32), theirs, allowed=True)
    for item in on(rounded_to_tf32):
        with pytest.raises(AssertionError, match="too far"):
            _assert_accurate(problem, operands, [item], theirs, allowed=False)
    for item in on(lambda tensor: tensor.bfloat16().float()):
        with pytest.raises(AssertionError, match="too far"):
            _assert_accurate(problem, operands, [item], theirs, allowed=True)
    if theirs.bias_grad is not None:  # a sum of no products
        wrong = [("bias_grad", theirs.bias_grad * (1 + 2.0**-11))]
        with pytest.raises(AssertionError, match="too far"):
            _assert_accurate(problem, operands, wrong, theirs, allowed=True)


# On a GPU

DEVICE = torch.device("cuda", 0)
STATES = {
    "legacy on": lambda: setattr(torch.backends.cudnn, "allow_tf32", True),
    "legacy off": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
}
if PER_OPERATOR:
    STATES |= {
        "conv on": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32"),
        "conv off": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
        "cuDNN on": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
        "all on": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
        "matmul on": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnGpu:
    PROBLEMS = (
        make((4, 64, 33, 35), 64, 3, bias=True),
        make((4, 128, 17, 19), 64, 4, 2, 1),
        make((2, 64, 24, 24), 32, 2, 2, bias=True),
        make((2, 64, 301), 128, 16, 8, 4, bias=True),
        make((2, 32, 5, 9, 10), 48, 3, 2, 1, 1),
        make((2, 64, 13, 17), 64, (3, 5), (2, 3), (1, 2), (1, 1), 2, True, (2, 1)),
        make((2, 24, 20, 23), 24, 3, groups=24),
        make((2, 37, 20, 23), 41, 3),
    )

    @pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="has no TF32")
    @pytest.mark.parametrize("state", STATES)
    def test_the_flags_are_those_that_pytorch_goes_by(self, state: str) -> None:
        problem = make((8, 256, 32, 32), 256, 3)
        operands = make_operands(problem, torch.float32, DEVICE, make=normal_tensor)
        before = torch.get_float32_matmul_precision()
        try:
            STATES[state]()
            out = TORCH[2](operands.input, operands.weight)
            allowed = tf32_allowed()
        finally:
            torch.set_float32_matmul_precision(before)
        exact = TORCH[2](operands.input.double(), operands.weight.double())
        error = float((out.double() - exact).norm() / exact.norm())
        assert (error > 2e-5) is allowed, f"PyTorch's error is {error:.1e}, and TF32 is taken to be allowed: {allowed}"

    @pytest.mark.parametrize("channels_last", [False, True])
    @pytest.mark.parametrize("allowed", [False, True])
    @pytest.mark.parametrize("problem", PROBLEMS, ids=str)
    def test_as_accurate_as_the_flags_ask(
        self, problem: ConvTransposeProblem, allowed: bool, channels_last: bool
    ) -> None:
        operands = make_operands(problem, torch.float32, DEVICE, make=normal_tensor)
        if channels_last:
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            if problem.dims + 2 not in formats:
                pytest.skip("PyTorch has no channels_last for one spatial dimension")
            operands = operands.map(lambda t: t.contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t)
        with tf32(allowed):
            ours = results(OURS[problem.dims], problem, operands)
            theirs = results(TORCH[problem.dims], problem, operands)
        _assert_accurate(problem, operands, ours.items(), theirs, allowed)

    @pytest.mark.parametrize("problem", PROBLEMS, ids=str)
    def test_integers_are_exact_in_tf32_too(self, problem: ConvTransposeProblem) -> None:
        operands = make_operands(problem, torch.float32, DEVICE)
        with tf32(True):
            ours = results(OURS[problem.dims], problem, operands)
        for name, wanted in reference(problem, operands).items():
            assert torch.equal(getattr(ours, name).cpu(), wanted.float()), f"{name} is not exact"

    @pytest.mark.parametrize("problem", PROBLEMS, ids=str)
    def test_a_change_of_the_flags_counts_at_once(self, problem: ConvTransposeProblem) -> None:
        """On the same tensors, there and back; forward and backward by what holds when they run."""
        operands = make_operands(problem, torch.float32, DEVICE, make=normal_tensor)
        found = []
        for allowed in (False, True, False, True):
            with tf32(allowed):
                found.append(results(OURS[problem.dims], problem, operands))
        theirs = results(TORCH[problem.dims], problem, operands)
        _assert_accurate(problem, operands, found[2].items(), theirs, allowed=False)
        for first, second in ((0, 2), (1, 3)):
            for (_, one), (_, other) in zip(found[first].items(), found[second].items(), strict=True):
                assert torch.equal(one, other)

    def test_compiled_layers_go_by_the_flags_when_they_run(self) -> None:
        torch._dynamo.reset()
        layer = OUR_MODULES[2](128, 64, 4, 2, 1, device=DEVICE).requires_grad_(False)
        x = torch.randn(4, 128, 17, 19, device=DEVICE)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for allowed in (True, False, True):
            with tf32(allowed):
                assert torch.equal(compiled(x), layer(x))
        torch._dynamo.reset()

    def test_complex_layers_follow_their_real_parts(self) -> None:
        problem = make((2, 32, 9, 11), 32, 3)
        operands = make_operands(problem, torch.complex64, DEVICE)
        for allowed in (False, True):
            with tf32(allowed):
                ours = results(OURS[2], problem, operands)
            for name, wanted in reference(problem, operands).items():
                assert torch.equal(getattr(ours, name).cpu(), wanted.to(torch.complex64)), f"{name} is not exact"
