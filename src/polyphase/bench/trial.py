"""Three copies of a model, run side by side: as it is, with polyphase, and in float64.

Outputs, and the gradients of a random projection of them with respect to inputs and parameters, are compared by the
rule of `polyphase.bench.accuracy`: element by element where a transposed convolution is all that the model computes; in
the norm where it has other layers, because a rounding that differs may then fall on another side of a kink (of a ReLU,
say) in any implementation. Both may compute float32 convolutions in TF32 where PyTorch's flags allow it, so float64 is
the judge and PyTorch the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd

import polyphase
from polyphase.bench.accuracy import TF32_ROUNDOFF, UNITS, Comparison, compare, kernelbench_rule, spread, tf32_rounding
from polyphase.bench.environment import first_line
from polyphase.bench.model_file import Cut, Run, copied, leaves, naming_the_line, place, sizes_of, trace
from polyphase.bench.runner import poisoned_outputs
from polyphase.bench.timing import Timer, Timing
from polyphase.plan import planner as plan
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo
from polyphase.torch_op.tf32 import tf32_allowed

if TYPE_CHECKING:
    from polyphase.fuse import Block

FLOAT64_FLOPS = 100e9
"""Flops of a float64 forward pass beyond which only some images of a batch are compared."""

# Error of PyTorch's outputs, relative to their norm, that no dtype explains.
_FAR = 0.3


@dataclass(frozen=True)
class Finding:
    """One tensor of one trial, held against float64."""

    trial: int
    sizes: str
    what: str
    comparison: Comparison
    ok: bool
    elementwise: bool  # whether every element is judged, or the whole


@dataclass(frozen=True)
class Race:
    """What was timed, and both times."""

    what: str
    ours: Timing
    torch: Timing


@dataclass
class CheckResult:
    """All that a check found out. ``problems`` names what is wrong; a model without any is as it should be.

    ``blocks``: what each layer of the fused copy computes, where that was asked for.
    """

    cut: Cut
    swapped: polyphase.Report
    plans: list[tuple[str, str, str, str]] = field(default_factory=list)
    blocks: tuple[Block, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the model was accelerated and everything compared keeps the rule."""
        return not self.problems


@dataclass(frozen=True)
class Options:
    """How a model is checked. ``scale`` of None cuts inputs on a CPU only, and as little as will do.

    ``fuse``: whether a fused copy is checked, too, in evaluation mode and without derivatives.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    scale: int | None = None
    trials: int = 5
    grad: bool = True
    time: bool = True
    seed: int = 42
    fuse: bool = True


def quiet_dropout(model: nn.Module) -> None:
    """Switch a model's dropout off: copies in two precisions cannot be given the same random mask."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()


class Trial:
    """The three copies of a model, run side by side."""

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        fast: nn.Module,
        options: Options,
        result: CheckResult,
        progress: Callable[[str], None],
    ) -> None:
        self.path = path
        self.model, self.fast, self.options, self.result, self.progress = model, fast, options, result, progress
        self.reference = copied(model).double()
        self.tf32 = options.dtype == torch.float32 and options.device.type == "cuda" and tf32_allowed()
        self.judged = False  # whether an output had numbers to be compared
        # Swapped layers that have not run yet, and their names.
        self.idle = {fast.get_submodule(entry.names[0]): entry.names[0] for entry in result.swapped.swapped}
        self.hooks = [module.register_forward_hook(self._ran) for module in self.idle]

    def _ran(self, module: nn.Module, *_: object) -> None:
        self.idle.pop(module, None)

    def conclude(self) -> None:
        """What is to be said after the last trial."""
        if not self.result.ok:
            return
        names = ", ".join(name or "the model itself" for name in self.idle.values())
        if self.idle and len(self.idle) == len(self.result.swapped.swapped):
            self.result.problems.append(f"the model never called what was swapped ({names}): nothing was checked")
        elif self.idle:
            self.remark(f"swapped, but never called: {names}")
        if not self.result.findings:
            self.result.problems.append("nothing was compared: the outputs hold no floating-point or complex tensor")
        elif not self.judged:
            self.result.problems.append("nothing was compared: no output has a finite number in float64")

    def run(self, number: int, inputs: list[Any]) -> None:
        """Compare outputs and gradients for one set of inputs."""
        sizes = sizes_of(inputs)
        run = self._trace(inputs)
        self._describe_plans(run)
        images = _images(self.model, inputs, run)

        self.progress(f"trial {number}: PyTorch on {sizes}")
        with naming_the_line(self.path, f"the model on {sizes}", only_modules=True):
            rival = _outcome(self.model, inputs, None, images, self.options)
        self.progress(f"trial {number}: polyphase on {sizes}")
        try:
            with poisoned_outputs(self.options.device):
                ours = _outcome(self.fast, inputs, rival.projections, images, self.options)
        except Exception as failure:  # PyTorch ran it, so whatever this is, it is a finding
            self.result.problems.append(f"{sizes}: polyphase does not run it: {first_line(failure)}")
            return
        self.progress(f"trial {number}: float64 on {sizes}")
        exact_inputs = [place(_pick(value, images), self.options.device, torch.float64) for value in inputs]
        projections = [_pick(value, images).double() for value in rival.projections]
        judge = f"the float64 reference of the model on {sizes}"
        with naming_the_line(self.path, judge, only_modules=True):
            exact = _outcome(self.reference, exact_inputs, projections, None, self.options)

        if images is not None:
            names = ", ".join(map(str, images))
            self.remark(f"{sizes}: float64 is compared on images {names} only, and gradients are those of these images")
        self._kernelbench(ours, rival)
        single = run is not None and run.single
        elementwise = single or (run is None and not self.tf32)
        rounding = self._tf32_rounding(exact, exact_inputs, single)
        for what, reference in exact.tensors.items():
            self._compare(number, sizes, what, ours, rival, reference, rounding.get(what), images, elementwise)

    def _tf32_rounding(self, exact: _Outcome, inputs: list[Any], single: bool) -> dict[str, torch.Tensor]:
        """What TF32 may cost each element, by name; nothing where it is not allowed.

        For a single convolution from the squares of its products. Otherwise as many of TF32's units in the norm as
        any dtype is granted of its own: a layer costs less than one, but a kink that is met elsewhere costs more.
        """
        if not self.tf32:
            return {}
        if not single:
            return {what: reference.abs() * (UNITS * 2 * TF32_ROUNDOFF) for what, reference in exact.tensors.items()}
        squared = copied(self.reference)
        for module in squared.modules():
            if isinstance(module, _ConvTransposeNd):
                module.weight.data.square_()
                if module.bias is not None:  # is no factor of a product
                    module.bias.requires_grad_(False).zero_()
        inputs = [value.square() if isinstance(value, torch.Tensor) else value for value in inputs]
        projections = [projection.square() for projection in exact.projections]
        outcome = _outcome(squared, inputs, projections, None, self.options)
        return {what: tf32_rounding(squares) for what, squares in outcome.tensors.items()}

    def _compare(
        self,
        number: int,
        sizes: str,
        what: str,
        ours: _Outcome,
        rival: _Outcome,
        reference: torch.Tensor,
        rounding: torch.Tensor | None,
        images: list[int] | None,
        elementwise: bool,
    ) -> None:
        problems = self.result.problems
        if what not in ours.tensors:
            problems.append(f"{what} on {sizes}: missing in polyphase's results")
            return
        out, torch_out = ours.tensors[what], rival.tensors[what]
        if images is not None and (not what.startswith("∂") or what.startswith("∂ input ")):
            rest = [index for index in range(len(out)) if index not in images]
            if what.startswith("∂") and out[rest].count_nonzero():
                problems.append(f"{what} on {sizes}: not zero for images that are not compared")
            out, torch_out = _pick(out, images), _pick(torch_out, images)
        try:
            found = compare(out, torch_out, reference, rounding)
        except ValueError as failure:
            problems.append(f"{what} on {sizes}: {failure}")
            return
        if not what.startswith("∂"):
            self.judged |= bool(reference.isfinite().any())
            if found.torch_error > _FAR:
                problems.append(
                    f"{what} on {sizes}: PyTorch's is {found.torch_error:.1g} of its norm away from float64, so "
                    "nothing can be compared; does the model draw random numbers?"
                )
                return
        ok = found.ok if elementwise else found.ok_in_norm
        self.result.findings.append(Finding(number, sizes, what, found, ok, elementwise))
        if not ok:
            which = f"{found.broken} of {found.elements} elements are" if elementwise else "as a whole it is"
            problems.append(f"{what} on {sizes}: {which} further from float64 than allowed")

    def race(self, inputs: list[Any]) -> None:
        """Time forward alone, and forward with backward, of both copies."""
        self.progress("timing")
        for hook in self.hooks:  # they would cost time
            hook.remove()
        on_gpu = self.options.device.type == "cuda"
        timer = Timer(self.options.device, repetitions=20 if on_gpu else 5)

        # Copies only for models that change their inputs: they cost time.
        versions = _versions(inputs)
        with torch.no_grad():
            self.fast(*inputs)
        given = _copies if _versions(inputs) != versions else list

        def forward(model: nn.Module) -> Callable[[], object]:
            def call() -> None:
                with torch.no_grad():
                    model(*given(inputs))

            return call

        def both(model: nn.Module) -> Callable[[], object]:
            wanted = _differentiable(model, inputs)
            leaf_tensors = [*wanted.tensors.values()]
            gradients = [torch.randn_like(out) for out in leaves(model(*given(wanted.inputs)))]

            def call() -> None:
                outputs = leaves(model(*given(wanted.inputs)))
                torch.autograd.grad(outputs, leaf_tensors, gradients, allow_unused=True)

            return call

        for what, make in (("forward", forward), ("forward and backward", both))[: 1 + self.options.grad]:
            self.result.races.append(Race(what, timer.measure(make(self.fast)), timer.measure(make(self.model))))

    def remark(self, text: str) -> None:
        """Say something once."""
        if text not in self.result.remarks:
            self.result.remarks.append(text)

    def _trace(self, inputs: list[Any]) -> Run | None:
        try:
            return trace(self.model, inputs)
        except Exception as failure:  # a model that needs numbers and not only shapes: its plans are not known
            self.remark(f"plans are not shown: the model does not run on shapes alone ({first_line(failure)})")
            return None

    def _describe_plans(self, run: Run | None) -> None:
        if run is None or self.result.plans:
            return
        if run.functional:
            self.remark(f"calls of transposed convolutions outside modules, which stay PyTorch's: {run.functional}")
        device = DeviceInfo.of(self.options.device)
        for name, traced in run.problems:
            problem = traced and replace(traced, tf32=self.tf32)
            for pass_ in Pass if self.options.grad else [Pass.FORWARD]:
                chosen = plan.plan(problem, pass_, device).describe() if problem else "no kernels for this dtype"
                self.result.plans.append((name or "the model itself", str(problem), pass_.value, chosen))

    def _kernelbench(self, ours: _Outcome, rival: _Outcome) -> None:
        for out, torch_out in zip(ours.outputs, rival.outputs):
            if out.shape == torch_out.shape and out.dtype == torch_out.dtype:
                share = kernelbench_rule(out, torch_out)
                verdict = f"fails on {share:.1%} of the elements" if share else "passes"
                self.remark(f"KernelBench's rule, which compares with PyTorch and not with float64: {verdict}")


@dataclass(frozen=True)
class _Outcome:
    """What a model gave: outputs, what they were projected on, and all tensors by name."""

    outputs: list[torch.Tensor]
    projections: list[torch.Tensor]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Wanted:
    """A model's inputs as leaves of a graph, and all tensors whose gradients are wanted, by name."""

    inputs: list[Any]
    tensors: dict[str, torch.Tensor]


def _differentiable(model: nn.Module, inputs: Sequence[Any]) -> _Wanted:
    fresh = [
        value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in inputs
    ]
    named = {
        f"∂ input {index}": value
        for index, value in enumerate(fresh)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    named |= {f"∂ {name}": value for name, value in model.named_parameters() if value.requires_grad}
    return _Wanted(fresh, named)


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """For a model that may change its inputs in place, as leaves of a graph must not be."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]


def _versions(inputs: Sequence[Any]) -> list[int]:
    return [value._version for value in inputs if isinstance(value, torch.Tensor)]


def _outcome(
    model: nn.Module,
    inputs: Sequence[Any],
    projections: list[torch.Tensor] | None,
    images: list[int] | None,
    options: Options,
) -> _Outcome:
    """Run a model, and go back from ``projections``, which are drawn if there are none and zero outside ``images``."""
    torch.manual_seed(options.seed)
    wanted = _differentiable(model, inputs)
    with torch.set_grad_enabled(options.grad):
        outputs = leaves(model(*_copies(wanted.inputs)))
    tensors = {f"output {index}" if len(outputs) > 1 else "output": out.detach() for index, out in enumerate(outputs)}
    if not options.grad:
        return _Outcome(outputs, [], tensors)
    if projections is None:
        projections = [torch.randn_like(out) for out in outputs]
        for projection in projections:
            if images is not None:
                projection[[index for index in range(len(projection)) if index not in images]] = 0
    found = torch.autograd.grad(outputs, [*wanted.tensors.values()], projections, allow_unused=True)
    tensors |= {name: grad for name, grad in zip(wanted.tensors, found) if grad is not None}
    return _Outcome([out.detach() for out in outputs], projections, tensors)


def _images(model: nn.Module, inputs: Sequence[Any], run: Run | None) -> list[int] | None:
    """The images that float64 is computed for; None for all of them.

    Some are enough only where images do not see each other, and where it is known which dimension counts them.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if run is None or run.flops <= FLOAT64_FLOPS or not tensors or tensors[0].dim() == 0:
        return None
    batch = tensors[0].shape[0]
    mixed = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    counted = all(problem is not None and problem.batch == batch for _, problem in run.problems)
    if mixed or not counted or any(value.dim() == 0 or value.shape[0] != batch for value in tensors):
        return None
    chosen = spread(batch, int(FLOAT64_FLOPS * batch / run.flops))
    return None if len(chosen) == batch else chosen


def _pick(value: Any, images: list[int] | None) -> Any:
    return value if images is None or not isinstance(value, torch.Tensor) else value[images]
