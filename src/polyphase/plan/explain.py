"""A plan as text: the winner, the best loser of every schedule, and why the others cannot compute the pass."""

from __future__ import annotations

import math

from polyphase.plan.planner import (
    CLEARLY,
    CLEARLY_BY_OTHERS,
    LAUNCH,
    Plan,
    as_computed,
    at_rates_of,
    epilogue_refusal,
    may_adapt,
    plan,
)
from polyphase.plan.shortlist import candidates, why_none
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import about_rates, floor_ms
from polyphase.problem.device import Card, DeviceInfo
from polyphase.problem.sizes import compared
from polyphase.schedules import SCHEDULES


def explain(problem: ConvTransposeProblem, device: DeviceInfo | Card) -> str:
    """Winner, the best loser of each schedule, and reasons, for each pass, as text."""
    card = Card.of(device)
    lines = [f"{problem}", f"on {card}, {problem.flops / 1e9:.1f} GFLOP, {problem.bytes / 1e6:.1f} MB"]
    if card.device.is_cuda:
        lines.append(about_rates(card))
    for pass_ in Pass:
        chosen = plan(problem, pass_, card.device)
        lines += ["", f"{pass_.value}: {chosen.describe()}"]
        lines += [f"  {line}" for line in _about(chosen, card)]
    return "\n".join(lines)


def _about(chosen: Plan, card: Card) -> list[str]:
    """What is to be said of one pass."""
    problem, pass_, device = chosen.problem, chosen.pass_, card.device
    if chosen.candidate is None or chosen.program is None:
        return ["tensor operations of PyTorch; own kernels need an NVIDIA GPU"]
    lines = ["measured to be the fastest (`python -m polyphase tune`)"] if chosen.measured else []
    lines.append(_winner(chosen, card))
    for other in chosen.selected[1:]:
        lines.append(f"for other sizes a thread compiles, in the background, {other.candidate.describe()}")
    computed, layouts = as_computed(problem, pass_, None)
    if computed != problem.of_pass(pass_):
        lines.append(f"computed as {computed}")
    faster = False
    refused: dict[str, list[str]] = {}
    for schedule in SCHEDULES:
        reason = epilogue_refusal(schedule, problem, pass_) or schedule.supports(computed, pass_, device)
        offered = [] if reason else list(candidates(schedule, computed, pass_, device, layouts))
        if not offered:
            reason = reason or why_none(schedule, computed, pass_, device, layouts)
            refused.setdefault(reason, []).append(schedule.name)
        losers = [candidate for candidate in offered if candidate != chosen.candidate]
        if losers:
            best = min(losers, key=lambda candidate: candidate.seconds)
            others = f" and {len(losers) - 1} more" if len(losers) > 1 else ""
            told = at_rates_of(card, best, problem, pass_).seconds
            lines.append(f"loses: {told * 1e3:9.3f} ms  {best.describe()}{others}")
            faster |= best.seconds < chosen.candidate.seconds
    lines += [f"not {', '.join(names)}: {reason}" for reason, names in refused.items()]
    if not chosen.measured:
        lines.append(f"{'some that lose are predicted to be faster: ' if faster else ''}{_rule(chosen, computed)}")
    return lines


def _winner(chosen: Plan, card: Card) -> str:
    assert chosen.candidate is not None
    assert chosen.program is not None
    main, workspace = chosen.program.main, chosen.program.workspace_bytes
    told = at_rates_of(card, chosen.candidate, chosen.problem, chosen.pass_)
    return (
        f"predicted {told.seconds * 1e3:.3f} ms, bound by {told.bound}; floor "
        f"{floor_ms(chosen.problem, card.rates):.3f} ms; "
        f"{math.prod(main.grid)} blocks of {main.block} threads, {main.shared_bytes} bytes of shared memory"
        + (f", {workspace / 1e6:.2f} MB of workspace" if workspace else "")
    )


def _rule(chosen: Plan, computed: ConvTransposeProblem) -> str:
    """Why a faster one may lose: at what size the order was made, and how much faster it must be at this size.

    Of a schedule that does not adapt the first config is taken at every size.
    """
    sized, schedule = compared(computed, chosen.pass_), chosen.selected[0].schedule
    size = "×".join(map(str, (sized.batch, sized.in_channels, *sized.input_size)))
    config = f"; another config of {schedule.name} is taken below {CLEARLY:.0%}"
    if not may_adapt(schedule, chosen.pass_):
        config = (
            f"; configs of {schedule.name} are not chosen again by size: its first is kept, even if another is faster"
        )
    which = "best-ranked" if chosen.pass_ is Pass.FORWARD else "fastest"
    both = f" ({LAUNCH * 1e6:.0f} µs for the launch added to both)" if chosen.pass_ is Pass.FORWARD else ""
    return (
        f"kernels are ranked at a typical size ({size}), so that a layer has few, whatever the size of its images; at "
        f"this size another schedule is taken if its {which} config is predicted to take less than "
        f"{CLEARLY_BY_OTHERS[chosen.pass_]:.0%} of the first one's time{both}{config}"
    )
