"""What `explain` says of a plan, and the rates of the card that it is told for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from helpers import refusals
from polyphase.bench import predictions
from polyphase.bench.layers import NamedLayer
from polyphase.plan import planner
from polyphase.plan.explain import explain
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.ceilings import H200, floor_ms
from polyphase.problem.device import CARDS, Card, DeviceInfo
from polyphase.schedules.schedule import Candidate

make = ConvTransposeProblem.make
HOPPER = DeviceInfo.for_arch("sm_90a")


def test_explanations_name_winner_losers_and_reasons() -> None:
    problem = make((4, 8, 16, 16), 12, 4, 2, 1)
    text = explain(problem, HOPPER)
    assert f"{problem}\non sm_90a" in text
    for pass_ in Pass:
        chosen = planner.plan(problem, pass_, HOPPER)
        paragraph = text[text.index(f"\n{pass_.value}: ") :].split("\n\n")[0]
        assert chosen.describe() in paragraph.splitlines()[1]
        assert chosen.candidate is not None
        assert f"bound by {chosen.candidate.bound}" in paragraph
        assert "kernels are ranked at a typical size (64×8×256×256), so that a layer needs few kernels" in paragraph
        forward = pass_ is Pass.FORWARD
        enough = "6 µs below" if forward else f"below {planner.CLEARLY_BY_OTHERS[pass_]:.0%} of"
        assert f"{enough} the first-ranked one's time" in paragraph
        losers: dict[str, list[Candidate]] = {}
        for candidate, _ in planner.programs(problem, pass_, HOPPER):
            if candidate != chosen.candidate:
                losers.setdefault(candidate.schedule, []).append(candidate)
        for found in losers.values():
            best = min(found, key=lambda candidate: candidate.seconds)
            seconds = max(best.seconds, planner.LEAST)
            time = f"{seconds * 1e3:.3f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} µs"
            (line,) = [line for line in paragraph.splitlines() if _settings(best) in line and time in line]
            own = best.schedule == chosen.schedule
            start = f"  other config of {best.schedule}: {time} (" if own else f"  loses: {time:>8}  {best.schedule}("
            assert line.startswith(start)
            assert line.endswith(f" ({len(found) - 1} more)") is (len(found) > 1)
        assert paragraph.count("  loses: ") == len(losers.keys() - {chosen.schedule})
        beaten = any(each.seconds < chosen.candidate.seconds for found in losers.values() for each in found)
        assert ("a faster prediction above does not win, because:" in paragraph) is beaten
    assert ("direct_wgrad_gemm", "computes the weight gradient only") in refusals(text)
    assert ("direct_tiled", "computes the forward pass and the input gradient only") in refusals(text)


def _settings(candidate: Candidate) -> str:
    return candidate.describe().removeprefix(candidate.schedule)


def test_small_layers_have_units_that_show_digits() -> None:
    """Predictions of what takes no time but its launch are shown as what the shortest call takes."""
    small = replace(make((2, 4, 8, 8), 4, 4), dtype="bfloat16", channels_last=True)
    ampere = DeviceInfo.for_arch("sm_80")
    chosen = planner.plan(small, Pass.FORWARD, ampere).candidate
    assert chosen is not None
    assert chosen.seconds < 1e-7
    assert planner.as_shown(Card.of(ampere), chosen, small, Pass.FORWARD).seconds == planner.LEAST
    text = explain(small, ampere)
    assert "65.5 kFLOP, 3.5 kB" in text
    assert "predicted 7.0 µs" in text
    assert "floor 0.002 µs" in text
    assert "0.000" not in text
    large = explain(make((8, 64, 128, 128), 64, 4, 2, 1), HOPPER)
    assert "17.2 GFLOP, 168.0 MB" in large


def test_a_card_has_its_own_bandwidth() -> None:
    """An H100 copies at 3.01 TB/s, an H200 at 4.25; both multiply at the same rates, and have the same plans."""
    moving = replace(make((8, 64, 128, 128), 64, 2, 2), tf32=True)
    multiplying = make((8, 512, 64, 64), 512, 3, 1, 1)
    h100, h200 = Card.of("h100"), Card.of("H200")
    assert h100.device == h200.device == h200.rates == HOPPER
    assert floor_ms(moving, h100.rates) == pytest.approx(1e3 * moving.bytes / 3.01e12)
    assert floor_ms(moving, h200.rates) == H200.floor_ms(moving, strict_fp32=False)
    assert floor_ms(multiplying, h100.rates) == floor_ms(multiplying, h200.rates)
    for pass_ in Pass:
        chosen = planner.plan(moving, pass_, HOPPER).candidate
        assert chosen is not None
        assert planner.as_shown(h200, chosen, moving, pass_) is chosen
        slower = planner.as_shown(h100, chosen, moving, pass_)
        assert slower.config == chosen.config
        assert chosen.seconds < slower.seconds <= chosen.seconds * 4.28 / 3.01 * 1.001
    (at_h100,), (at_h200,) = (
        list(predictions.predictions([NamedLayer("up", moving)], card, 1)) for card in (h100, h200)
    )
    for slower_, faster in zip(at_h100, at_h200):
        assert slower_.schedule == faster.schedule
        assert slower_.seconds > faster.seconds
        assert slower_.floor_seconds > faster.floor_seconds


def test_explanations_say_whose_rates_they_are_of() -> None:
    problem = replace(make((8, 64, 128, 128), 64, 2, 2), tf32=True)
    h100, h200, arch = (explain(problem, Card.of(each)) for each in ("h100", "h200", "sm_90"))
    assert h200 == arch.replace("on sm_90a", "on h200 (sm_90a)")
    assert "on h100 (sm_90a)" in h100
    assert "assume h100's copy bandwidth, 3.01 TB/s" in h100
    assert "predicted for an H200-class GPU (4.28 TB/s copy bandwidth)" in h200
    assert f"floor {1e3 * floor_ms(problem, Card.of('h100').rates):.1f} µs" in h100
    assert "predicted at the rates of sm_80 (1.7 TB/s copy bandwidth); floors count bytes only" in explain(
        problem, Card.of("a100")
    )
    for name, found in ((name, Card.of(name)) for name in CARDS):
        assert found.device == DeviceInfo.for_arch(CARDS[name])
        assert found.rates.copy_bytes_per_second <= found.device.copy_bytes_per_second


def test_a_faster_config_of_the_same_schedule_is_explained() -> None:
    """`implicit_gemm` does not choose again at each size in gradients; `window_dgrad_wgmma` does."""
    problem = replace(make((4, 64, 100, 100), 64, 3, 1, 1), tf32=True)
    assert planner.plan(problem, Pass.INPUT_GRAD, HOPPER).schedule == "implicit_gemm"
    (paragraph,) = (each for each in explain(problem, HOPPER).split("\n\n") if each.startswith("input_grad"))
    assert "a faster prediction above does not win" in paragraph
    assert "of implicit_gemm the config that is ranked first is used at every size" in paragraph
    text = explain(replace(make((8, 64, 64, 64), 64, 4, 2, 1), tf32=True), HOPPER)
    assert "another config of window_dgrad_wgmma wins only if it is predicted below 97%" in text
    assert "is used at every size" not in text


def test_counts_of_one_are_no_plurals_and_other_kernels_are_named() -> None:
    problem = replace(make((8, 64, 64, 64), 64, 1), tf32=True)
    text = explain(problem, HOPPER)
    assert not re.search(r"\b1 (elements|taps|channels|phases)", text)
    assert {"col2im_cells", "dot_dgrad", "direct_wgrad_long"} <= {name for name, _ in refusals(text)}
    others = [other for pass_ in Pass for other in planner.plan(problem, pass_, HOPPER).selected[1:]]
    assert others
    for other in others:
        assert f"compiled in the background, for other sizes: {other.candidate.describe()}" in text
