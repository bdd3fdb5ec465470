"""The one place that decides how a pass is computed. Needs neither torch nor a GPU.

Every schedule says whether it can run, and offers configs with a predicted time. The order at a typical size decides
(`polyphase.problem.sizes`), unless another kernel is clearly faster at the actual size; so a layer has few kernels for
all sizes, and the fastest prediction may lose.

1. Schedules are ordered by their predictions at the typical size, `compared`. The first that can run is taken.
2. It offers a short list of configs, ordered at its own typical size, `Schedule.ranked_at`. The list depends on the
   layer and the kind of its images (tiny, or in a layout that TMA can copy, or neither), not on their size or the
   batch's. The first of the list is chosen; in the forward pass, and in gradients of schedules that adapt, another of
   the list if its prediction at the actual size is less than `CLEARLY` of the first's.
3. Another schedule's config, picked in the same way, is chosen if its prediction at the actual size is less than
   `CLEARLY_BY_OTHERS` of that.
4. A schedule comes after the schedules that it is `behind`, unless its prediction is less than `FAR_AHEAD` of theirs
   at the typical size, or less by `AHEAD` at the actual size.

Nothing is tried at run time; choices that `polyphase.plan.measured` has measured beforehand override predictions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from polyphase.errors import UnsupportedError
from polyphase.jit.source import KernelSource
from polyphase.plan import measured as tuning
from polyphase.plan.ranking_cache import kept
from polyphase.plan.shortlist import candidates, refusal
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.device import PORTABLE, Card, DeviceInfo
from polyphase.problem.layouts import Layouts, on_outputs_met
from polyphase.problem.sizes import compared
from polyphase.program.epilogue import with_epilogue
from polyphase.program.program import Program, writing_frames
from polyphase.program.prologue import in_a_step, is_transposed, within_kernels
from polyphase.program.struct_layout import ParamOverflowError
from polyphase.schedules import SCHEDULES
from polyphase.schedules.cost import prologue_seconds
from polyphase.schedules.schedule import Candidate, Schedule

#: Within a schedule, another config replaces the first if predicted below CLEARLY × its time. Then another schedule,
#: with the config that it would pick at this size, replaces that if below CLEARLY_BY_OTHERS × its time, in a forward
#: pass if AHEAD of it. benchmarks/experiments/024-narrow-groups-and-choices, 035-gradients-from-halves.
CLEARLY = 0.97
CLEARLY_BY_OTHERS = {Pass.INPUT_GRAD: 0.95, Pass.WEIGHT_GRAD: 0.9}
#: How far a schedule's prediction must be ahead of schedules that it is `Schedule.behind`, in seconds and as a share of
#: theirs. benchmarks/experiments/025-boxes-of-taps: no layer that is recorded 3 % slower is predicted that far ahead.
AHEAD = 6e-6
FAR_AHEAD = 0.75
FAR_BEHIND = 1.5  # times the first schedule's prediction beyond which no further config of another is predicted
#: The least seconds of a shown prediction. Some cost models leave out the launch, which `AHEAD` allows for when
#: schedules are compared; no call in benchmarks/results was measured to take less.
LEAST = 7e-6
_Offer = tuple[Schedule, Candidate]
_LONG = 2048  # taps above which frames are also faster in weight gradients; in forward passes col2im is faster


@dataclass(frozen=True)
class Selection:
    """One kernel of a layer, and its program at the actual size."""

    schedule: Schedule
    candidate: Candidate
    program: Program


@dataclass(frozen=True)
class Plan:
    """How one pass of one problem is computed on one device.

    ``selected``: first the kernel for this size, then the layer's kernel for most other sizes, if it is a different
    one; none on the portable path. ``measured``: chosen by measurement (`polyphase.plan.measured`).
    """

    problem: ConvTransposeProblem
    pass_: Pass
    selected: tuple[Selection, ...] = ()
    measured: bool = False

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self.selected[0].schedule.name if self.selected else PORTABLE.arch

    @property
    def candidate(self) -> Candidate | None:
        """The config, None on the portable path."""
        return self.selected[0].candidate if self.selected else None

    @property
    def program(self) -> Program | None:
        """The program that computes the pass, None on the portable path."""
        return self.selected[0].program if self.selected else None

    @property
    def programs(self) -> list[Program]:
        """The programs of the kernel for this size, and of that for most other sizes, if it is a different one."""
        return [selection.program for selection in self.selected]

    def describe(self) -> str:
        """The plan in one line."""
        return self.schedule if self.candidate is None else self.candidate.describe()


@lru_cache(maxsize=4096)
def plan(
    problem: ConvTransposeProblem,
    pass_: Pass,
    device: DeviceInfo,
    layouts: Layouts | None = None,
    by_prediction: bool = False,
    as_given: bool = False,
) -> Plan:
    """The plan of a pass: ``layouts`` are the tensors' strides, by default from `Layouts.of_call`.

    ``by_prediction``: ignores choices that were measured on this machine; ``as_given``: the layer is not restated, for
    programs that are made later, at other sizes, from the chosen schedule and config (emitted files).

    Raises `UnsupportedError` if no schedule can compute the pass.
    """
    if not device.is_cuda:
        return Plan(problem, pass_)
    _check_integers(problem.without_idle_constants())
    call = Restated.of(problem, pass_, device, layouts, as_given)
    computed = call.computed
    schedules = _ranked(compared(computed, pass_), pass_, device)
    choice = None if by_prediction else tuning.choice(computed, pass_, device)
    measured = None if choice is None else _measured(call.offers(schedules), choice)
    kernels = _predicted(call, schedules) if measured is None else [measured]
    if not any(each.any_size(computed, pass_, device) for each, _ in kernels):
        for_others = (each for each in schedules if each.any_size(computed, pass_, device))
        other, offered = next(call.offers(for_others))
        kernels.append((other, next(offered)))
    try:
        selected = tuple(Selection(each, *call.with_functions(each, candidate)) for each, candidate in kernels)
    except ParamOverflowError:  # numbers that do not fit a kernel's parameter
        raise UnsupportedError(f"{problem} has more positions than the kernels count: {2**31 - 1}") from None
    return Plan(problem, pass_, selected, measured is not None)


def _predicted(call: Restated, schedules: list[Schedule]) -> list[_Offer]:
    """The kernel for this size, and the kernel for most other sizes, if it is a different one."""
    offers, pass_ = call.offers(schedules), call.pass_
    found = next(offers, None)
    if found is None:
        refusals = call.refusals(each for each in SCHEDULES if pass_ in each.passes)
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in refusals.items())
        what = f"the {pass_.value} of {call.given} on {call.device.arch}"
        raise UnsupportedError(f"no schedule computes {what}: {reasons}")
    schedule, offered = found
    kernels = [(schedule, candidate) for candidate in _by_size(schedule, offered, pass_)]
    most = FAR_BEHIND * kernels[0][1].seconds
    others = [(each, _by_size(each, found, pass_, most)[0]) for each, found in offers]
    faster = _clearly_faster(kernels[0], others, pass_)
    return kernels if faster is None else [faster, kernels[-1]]


def epilogue_refusal(schedule: Schedule, problem: ConvTransposeProblem, pass_: Pass) -> str | None:
    """Why a schedule cannot compute the epilogue of ``problem``, or None if it can, or there is none."""
    return schedule.epilogue_limits(problem) if problem.epilogue and pass_ is Pass.FORWARD else None


def _that_take(problem: ConvTransposeProblem, pass_: Pass, schedules: Iterable[Schedule]) -> list[Schedule]:
    """The ``schedules`` that support the problem's epilogue."""
    return [schedule for schedule in schedules if epilogue_refusal(schedule, problem, pass_) is None]


@dataclass(frozen=True)
class Restated:
    """A pass of a ``given`` layer, and the layer as which it is ``computed`` (`as_computed`); the layouts of each."""

    given: ConvTransposeProblem
    given_layouts: Layouts
    computed: ConvTransposeProblem
    layouts: Layouts
    pass_: Pass
    device: DeviceInfo

    @classmethod
    def of(
        cls,
        given: ConvTransposeProblem,
        pass_: Pass,
        device: DeviceInfo,
        layouts: Layouts | None = None,
        as_given: bool = False,
    ) -> Restated:
        """The parameters are those of `plan`."""
        given_layouts = layouts or Layouts.of_call(given, pass_)
        if as_given:
            computed, layouts = given.of_pass(pass_).without_idle_constants(), given_layouts
        else:
            computed, layouts = as_computed(given, pass_, given_layouts)
        return cls(given, given_layouts, computed, layouts, pass_, device)

    def offers(self, schedules: Iterable[Schedule]) -> Iterator[tuple[Schedule, Iterator[Candidate]]]:
        """Those of the ``schedules`` that can compute the pass, and their candidates, evaluated lazily."""
        able = _that_take(self.given, self.pass_, schedules)
        return _offers(able, self.computed, self.pass_, self.device, self.layouts)

    def refusals(self, schedules: Iterable[Schedule]) -> dict[str, list[str]]:
        """The names of those of the ``schedules`` that offer nothing, by their reason."""
        found: dict[str, list[str]] = {}
        for schedule in schedules:
            reason = epilogue_refusal(schedule, self.given, self.pass_)
            reason = reason or refusal(schedule, self.computed, self.pass_, self.device, self.layouts)
            if reason is not None:
                found.setdefault(reason, []).append(schedule.name)
        return found

    def with_functions(self, schedule: Schedule, candidate: Candidate) -> tuple[Candidate, Program]:
        """A config and its program, with the epilogue and prologue of the given layer.

        Neither affects the choice, except by `Epilogue.planned`: all schedules read the same for an epilogue. For the
        chosen config this function decides whether its kernel or a step before it computes a prologue.
        """
        given, computed = self.given, self.computed
        program = schedule.program(computed, self.pass_, self.device, self.layouts, candidate.config)
        of_frames = computed.kernel_size != given.kernel_size and computed.taps > 1
        if self.pass_ is Pass.WEIGHT_GRAD and of_frames:
            program = writing_frames(program, computed)
        if self.pass_ is not Pass.FORWARD or not (given.epilogue or given.prologue):
            return candidate, program
        seconds = candidate.seconds + given.residual_bytes / self.device.copy_bytes_per_second
        if given.prologue:
            program, more = self._with_prologue(schedule, candidate, program)
            seconds += more
        program = with_epilogue(program, given, computed, self.given_layouts)
        return replace(candidate, seconds=seconds), program

    def _with_prologue(self, schedule: Schedule, candidate: Candidate, program: Program) -> tuple[Program, float]:
        """A program with the prologue, where it takes less time, and the seconds that it adds."""
        prologue, device = self.given.prologue, self.device
        apart = prologue_seconds(self.given.elements[0] * DTYPE_BYTES[self.given.dtype], device)
        within: float | None = 0.0
        if not is_transposed(program):
            within = schedule.prologue_seconds(self.computed, prologue, device, self.layouts, candidate.config)
        if within is not None and within < apart:
            return within_kernels(program, prologue), within
        return in_a_step(program, self.given, self.given_layouts), apart


def as_computed(
    problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts | None
) -> tuple[ConvTransposeProblem, Layouts]:
    """The layer as the pass sees it, restated if that is simpler, and its layouts: the tensors' memory is the same.

    The output's gradient may be a view, of the outputs that taps meet.
    """
    layouts = layouts or Layouts.of_call(problem, pass_)
    given, problem = problem, problem.of_pass(pass_).without_idle_constants()
    if pass_ is not Pass.FORWARD:
        problem, layouts = on_outputs_met(problem, layouts)
    # Single pixels have every memory format at once; for a weight's gradient nothing else tells the format.
    as_read = replace(problem, channels_last=False) if pass_ is Pass.WEIGHT_GRAD else problem
    differs = given.epilogue and (given.epilogue.per_sample or problem.epilogue.normalizes)  # for a batch as channels
    dense = layouts.are_dense(as_read)
    by_frames = pass_ is Pass.INPUT_GRAD or (pass_ is Pass.WEIGHT_GRAD and problem.taps > _LONG)
    if dense and by_frames and (frames := problem.of_frames()) is not None:
        last = pass_ is Pass.INPUT_GRAD
        return frames, replace(layouts, output=Layouts.dense(frames).output, weight_channels_last=last)
    simpler = None if differs else as_read.of_lone_pixels()
    # As an input gradient it would be one long sum for few outputs, which no schedule splits over blocks.
    if simpler is None or pass_ is Pass.INPUT_GRAD or not dense:
        return problem, layouts
    return simpler, replace(Layouts.dense(simpler), aligned=layouts.aligned)


def _offers(
    schedules: Iterable[Schedule], problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
) -> Iterator[tuple[Schedule, Iterator[Candidate]]]:
    """The ``schedules`` that can compute a pass, and their candidates, evaluated lazily."""
    for schedule in schedules:
        if schedule.supports(problem, pass_, device) is None:
            offered = candidates(schedule, problem, pass_, device, layouts)
            first = next(offered, None)
            if first is not None:
                yield schedule, itertools.chain([first], offered)


@lru_cache(maxsize=4096)
def _ranked(sized: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[Schedule]:
    """All schedules, in rising order of the prediction of the config that they would pick at the size of ``sized``."""
    layouts = Layouts.of_call(sized, pass_)

    def seconds(schedule: Schedule) -> float:
        offers = _offers([schedule], sized, pass_, device, layouts)
        return min((_by_size(schedule, found, pass_)[0].seconds for _, found in offers), default=math.inf)

    about = f"schedules for the {pass_.value} of {sized!r} on {device!r}"
    order = kept(about, lambda: SCHEDULES, lambda: _in_order({each: seconds(each) for each in SCHEDULES}))
    return [*order, *(schedule for schedule in SCHEDULES if schedule not in order)]  # whatever the disk says


def _in_order(seconds: dict[Schedule, float]) -> list[Schedule]:
    """In rising order, except that a schedule comes after those that it is `behind`, unless it is far ahead."""
    keys = {schedule: (own, 1) for schedule, own in seconds.items()}
    for (schedule, own), (before, its) in itertools.product(seconds.items(), repeat=2):
        if before.name in schedule.behind and own < its and not own < FAR_AHEAD * its < math.inf:
            keys[before] = (own, 0)
    return sorted(seconds, key=lambda schedule: keys[schedule])


def _clearly_faster(first: _Offer, others: list[_Offer], pass_: Pass) -> _Offer | None:
    """The fastest of ``others``, if it replaces the first at the typical size."""

    def is_behind(schedule: Schedule, seconds: float) -> bool:
        before = [each.seconds for other, each in (first, *others) if other.name in schedule.behind]
        return seconds + AHEAD > min(before, default=math.inf)

    others = [(schedule, each) for schedule, each in others if not is_behind(schedule, each.seconds)]
    other, taken = min(others, key=lambda each: each[1].seconds, default=first)
    enough = first[1].seconds
    if first[0].name not in other.behind:
        enough = enough - AHEAD if pass_ is Pass.FORWARD else CLEARLY_BY_OTHERS[pass_] * enough
    return (other, taken) if taken.seconds < enough else None


def _measured(offers: Iterator[tuple[Schedule, Iterator[Candidate]]], choice: str) -> _Offer | None:
    """The candidate of that description, where it is offered."""
    found = (
        (schedule, candidate) for schedule, offered in offers for candidate in offered if candidate.describe() == choice
    )
    return next(found, None)


def may_adapt(schedule: Schedule, pass_: Pass) -> bool:
    """Whether another config than the first of a schedule's list may be taken at some sizes."""
    return pass_ is Pass.FORWARD or schedule.adapts


def _by_size(schedule: Schedule, offered: Iterator[Candidate], pass_: Pass, most: float = math.inf) -> list[Candidate]:
    """The first config, which serves most sizes; before it the fastest at this size, if it is clearly faster.

    The first alone if it takes more than ``most`` seconds.
    """
    first = next(offered)
    if first.seconds > most or not may_adapt(schedule, pass_):
        return [first]
    fastest = min(offered, key=lambda each: each.seconds, default=first)
    return [fastest, first] if fastest.seconds < CLEARLY * first.seconds else [first]


def as_shown(card: Card, candidate: Candidate, problem: ConvTransposeProblem, pass_: Pass) -> Candidate:
    """A candidate that is offered for ``card.device``, predicted at the card's own rates, and never below `LEAST`."""
    if card.rates != card.device:
        computed, layouts = as_computed(problem, pass_, None)
        schedule = next(each for each in SCHEDULES if each.name == candidate.schedule)
        devices = (card.device, card.rates)
        planned, own = (schedule.cost(computed, pass_, each, layouts, candidate.config) for each in devices)
        assert planned is not None
        assert own is not None
        candidate = replace(candidate, seconds=candidate.seconds + own[0] - planned[0], bound=own[1])
    return candidate if candidate.seconds >= LEAST else replace(candidate, seconds=LEAST)


def programs(
    problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts | None = None
) -> list[tuple[Candidate, Program]]:
    """Every config of every schedule that can compute a pass, for tests and tuning."""
    call = Restated.of(problem, pass_, device, layouts)
    return [
        call.with_functions(schedule, candidate)
        for schedule, offered in call.offers(SCHEDULES)
        for candidate in offered
    ]


def kernel_sources(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[KernelSource]:
    """The kernels that predictions choose for a layer at its batch and image size, and at most other sizes.

    For other sizes these are each schedule's first. Includes the reductions of split gradients.
    """
    call = Restated.of(problem, pass_, device)
    firsts = [call.with_functions(schedule, next(offered))[1] for schedule, offered in call.offers(SCHEDULES)]
    both = plan(problem, pass_, device, by_prediction=True).programs
    one_way = [program.main.one_way for program in both if program.main.one_way is not None]
    return list(dict.fromkeys([*(source for program in (*firsts, *both) for source in program.sources), *one_way]))


def _check_integers(problem: ConvTransposeProblem) -> None:
    """Raises for counts above 32 bits: kernels count positions of a side and weights of a group in 32 bits."""
    weights = problem.in_channels_per_group * problem.out_channels_per_group * problem.taps
    counted = {
        "a side of the input": max(problem.input_size),
        "a side of the output": max(problem.output_size),
        "a side of the output with its padding": max(
            map(sum, zip(problem.output_size, problem.padding, problem.padding))
        ),
        "the batch": problem.batch,
        "weights of a group": weights,
    }
    for what, count in counted.items():
        if count >= 2**31:
            raise UnsupportedError(f"{what} of {problem} come to {count}; the kernels count to {2**31 - 1}")
