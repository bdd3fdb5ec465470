"""A plan as text: the winner, the best config of every other schedule, and why the rest cannot compute the pass."""

from __future__ import annotations

import math

from polyphase.plan.planner import AHEAD, CLEARLY, CLEARLY_BY_OTHERS, Plan, Restated, as_shown, may_adapt, plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import about_rates, floor_ms
from polyphase.problem.device import Card, DeviceInfo
from polyphase.problem.sizes import compared
from polyphase.schedules import SCHEDULES
from polyphase.schedules.schedule import Candidate


def explain(problem: ConvTransposeProblem, device: DeviceInfo | Card) -> str:
    """Winner, the best loser of each schedule, and reasons, for each pass, as text."""
    card = Card.of(device)
    lines = [f"{problem}", f"on {card}: {_scaled(problem.flops, 'FLOP')}, {_scaled(problem.bytes, 'B')}"]
    if card.device.is_cuda:
        lines.append(about_rates(card))
    for pass_ in Pass:
        chosen = plan(problem, pass_, card.device)
        lines += ["", f"{pass_.value}: {chosen.describe()}"]
        lines += [f"  {line}" for line in _about(chosen, card)]
    return "\n".join(lines)


def _scaled(value: float, unit: str) -> str:
    """A count of flops or bytes."""
    size, prefix = next((each for each in ((1e9, "G"), (1e6, "M")) if value >= each[0]), (1e3, "k"))
    return f"{value / size:.1f} {prefix}{unit}"


def _time(seconds: float) -> str:
    if seconds >= 1e-4:
        return f"{seconds * 1e3:.3f} ms"
    microseconds = seconds * 1e6
    return f"{microseconds:.1f} µs" if microseconds >= 1 else f"{microseconds:.2g} µs"


def _about(chosen: Plan, card: Card) -> list[str]:
    """The lines about one pass."""
    problem, pass_, device = chosen.problem, chosen.pass_, card.device
    if chosen.candidate is None or chosen.program is None:
        return ["PyTorch's tensor operations; polyphase's kernels need an NVIDIA GPU"]
    lines = ["measured to be the fastest (`python -m polyphase tune`)"] if chosen.measured else []
    lines.append(_winner(chosen, card))
    for other in chosen.selected[1:]:
        lines.append(f"compiled in the background, for other sizes: {other.candidate.describe()}")
    call = Restated.of(problem, pass_, device)
    if call.computed != problem.of_pass(pass_):
        lines.append(f"computed as {call.computed}")
    faster = False
    losing: list[str] = []
    for schedule, offered in call.offers(SCHEDULES):
        losers = [candidate for candidate in offered if candidate != chosen.candidate]
        if losers:
            best = min(losers, key=lambda candidate: candidate.seconds)
            line = _loser(chosen, as_shown(card, best, problem, pass_), len(losers) - 1)
            losing.insert(0 if schedule.name == chosen.schedule else len(losing), line)
            faster |= best.seconds < chosen.candidate.seconds
    refused = call.refusals(SCHEDULES)
    lines += [*losing, *(f"not {', '.join(names)}: {reason}" for reason, names in refused.items())]
    if not chosen.measured:
        lines += ["a faster prediction above does not win, because:"] if faster else []
        lines += _rules(chosen, call.computed)
    return lines


def _loser(chosen: Plan, best: Candidate, more: int) -> str:
    """The line of a schedule's best config that is not chosen."""
    others = f" ({more} more)" if more else ""
    if best.schedule == chosen.schedule:
        settings = best.describe().removeprefix(best.schedule)
        return f"other config of {best.schedule}: {_time(best.seconds)} {settings}{others}"
    return f"loses: {_time(best.seconds):>8}  {best.describe()}{others}"


def _winner(chosen: Plan, card: Card) -> str:
    assert chosen.candidate is not None
    assert chosen.program is not None
    main, workspace = chosen.program.main, chosen.program.workspace_bytes
    shown = as_shown(card, chosen.candidate, chosen.problem, chosen.pass_)
    count = math.prod(main.grid)
    return (
        f"predicted {_time(shown.seconds)}, bound by {shown.bound}; floor "
        f"{_time(1e-3 * floor_ms(chosen.problem, card.rates))}; "
        f"{count} block{'' if count == 1 else 's'} of {main.block} threads, {main.shared_bytes} bytes of shared memory"
        + (f", {_scaled(workspace, 'B')} of workspace" if workspace else "")
    )


def _rules(chosen: Plan, computed: ConvTransposeProblem) -> list[str]:
    """Why a faster config may lose: the size of the ranking, and how much faster it must be at this size."""
    sized, schedule = compared(computed, chosen.pass_), chosen.selected[0].schedule
    forward = chosen.pass_ is Pass.FORWARD
    size = "×".join(map(str, (sized.batch, sized.in_channels, *sized.input_size)))
    enough = f"{AHEAD * 1e6:.0f} µs below" if forward else f"below {CLEARLY_BY_OTHERS[chosen.pass_]:.0%} of"
    own = f"another config of {schedule.name} wins only if it is predicted below {CLEARLY:.0%} of the first one's time"
    if not may_adapt(schedule, chosen.pass_):
        own = f"of {schedule.name} the config that is ranked first is used at every size, even if another is faster"
    return [
        f"kernels are ranked at a typical size ({size}), so that a layer needs few kernels",
        "at this size another schedule wins only if its fastest config is predicted "
        f"{enough} the first-ranked one's time",
        own,
    ]
