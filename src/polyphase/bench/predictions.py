"""What the planner predicts for many layers beside their floors: where it knows of no fast way, without a GPU.

Floors are the card's (`polyphase.problem.ceilings`). A pass that is far above its floor, and others of its kind, is a
hole between the schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from polyphase.bench import pool
from polyphase.bench.layers import NamedLayer
from polyphase.bench.records import PASS_TITLES, geometric_mean, percentile
from polyphase.bench.report import factor, milliseconds, plain_table
from polyphase.errors import UnsupportedError
from polyphase.plan import planner as plan
from polyphase.plan.shortlist import candidates
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.ceilings import floor_ms
from polyphase.problem.device import Card, DeviceInfo
from polyphase.schedules import SCHEDULES

_FEW = 8  # channels of a group: as many as the tensor cores multiply at least
_LARGE_FLOPS = 1e9
_ALIGNMENT = 16  # bytes between the rows that TMA takes


@dataclass(frozen=True)
class Prediction:
    """The plan of one pass: ``seconds`` as predicted, infinite where no schedule computes it.

    ``lacks_tensor_cores``: it is large enough for them and has enough channels, and no schedule offers them.
    """

    layer: str
    problem: ConvTransposeProblem
    pass_: Pass
    schedule: str
    seconds: float
    floor_seconds: float
    lacks_tensor_cores: bool = False

    @property
    def over(self) -> float:
        """Times the floor."""
        return self.seconds / self.floor_seconds


def predictions(layers: Sequence[NamedLayer], device: DeviceInfo | Card, jobs: int) -> Iterator[list[Prediction]]:
    """Those of the three passes of each layer, in its own dtype and format, planned by ``jobs`` processes."""
    return pool.each(_predictions, [(layer, Card.of(device)) for layer in layers], jobs)


def _predictions(of: tuple[NamedLayer, Card]) -> list[Prediction]:
    layer, card = of
    return [_prediction(layer, pass_, card) for pass_ in Pass]


def _prediction(layer: NamedLayer, pass_: Pass, card: Card) -> Prediction:
    problem = layer.problem
    floor = 1e-3 * floor_ms(problem, card.rates)
    try:
        chosen = plan.plan(problem, pass_, card.device, by_prediction=True)
    except UnsupportedError:
        return Prediction(layer.name, problem, pass_, "none", math.inf, floor)
    assert chosen.candidate is not None
    candidate = plan.as_shown(card, chosen.candidate, problem, pass_)
    enough = min(problem.in_channels_per_group, problem.out_channels_per_group) >= _FEW
    wanted = enough and problem.flops >= _LARGE_FLOPS and not chosen.selected[0].schedule.on_tensor_cores
    lacking = wanted and not _on_tensor_cores(problem, pass_, card.device)
    return Prediction(layer.name, problem, pass_, chosen.schedule, candidate.seconds, floor, lacking)


def _on_tensor_cores(problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
    """Whether any schedule offers them."""
    problem, layouts = plan.as_computed(problem, pass_, None)
    offers = (
        candidates(schedule, problem, pass_, device, layouts)
        for schedule in SCHEDULES
        if schedule.on_tensor_cores and schedule.supports(problem, pass_, device) is None
    )
    return any(next(offered, None) is not None for offered in offers)


def kinds(problem: ConvTransposeProblem) -> list[str]:
    """What people would call the layer: several names, for holes are found by what layers in them have in common."""
    inputs, outputs = problem.in_channels_per_group, problem.out_channels_per_group
    fewer, uneven = min(inputs, outputs), bool(inputs % 8 or outputs % 8)
    row_bytes = [DTYPE_BYTES[problem.dtype] * size[-1] for size in (problem.input_size, problem.output_size)]
    pixels = math.prod(problem.input_size)
    named = {
        f"{problem.dims}-D": True,
        "one image": problem.batch == 1,
        "depthwise": inputs == 1 < problem.groups,
        f"groups of {_FEW * 2} or fewer": problem.groups > 1 and 1 < fewer <= 2 * _FEW,
        "wider groups": problem.groups > 1 and fewer > 2 * _FEW,
        f"fewer than {_FEW} inputs": problem.groups == 1 and inputs < _FEW,
        f"fewer than {_FEW} outputs": problem.groups == 1 and outputs < _FEW,
        "channels no multiple of 8": problem.groups == 1 and fewer > 8 and uneven,
        "rows that TMA cannot take": not problem.channels_last and any(size % _ALIGNMENT for size in row_bytes),
        "many taps": problem.taps >= 64,
        "long kernel": max(problem.kernel_size) >= 128,
        "stride 1": set(problem.stride) == {1},
        "kernel is stride": problem.kernel_size == problem.stride != (1,) * problem.dims,
        "stride of 5 or more": max(problem.stride) >= 5,
        "dilated": set(problem.dilation) != {1},
        "small images": pixels <= 256,
    }
    return [name for name, holds in named.items() if holds]


def group_tables(found: Sequence[Prediction], over: float) -> list[Table]:
    """How far passes are over their floors: by kind of layer, of which a layer may be several, by kernel, by layout."""
    return [
        _grouped("by kind of layer", "kind", found, lambda prediction: kinds(prediction.problem), over),
        _grouped("by what computes the pass", "kernel", found, lambda prediction: [prediction.schedule], over),
        _grouped("predictions over the floor", "layout", found, lambda prediction: [_layout(prediction)], over),
    ]


def worst_table(found: Iterable[Prediction], over: float, count: int) -> Table:
    """The passes that are predicted to take more than ``over`` times their floor, worst first."""
    worst = sorted((prediction for prediction in found if prediction.over > over), key=lambda each: -each.over)
    title = f"{len(worst)} passes of more than {over:g} × their floor" + (f", the {count} worst" * (len(worst) > count))
    names = ("layer", "pass", "dtype", "layout", "kernel")
    table = plain_table(title, names, ("ms", "floor", "× floor"))
    table.add_column("kind")
    for prediction in worst[:count]:
        table.add_row(
            prediction.layer,
            PASS_TITLES[prediction.pass_.value],
            prediction.problem.dtype,
            _layout(prediction),
            prediction.schedule,
            milliseconds(1e3 * prediction.seconds),
            milliseconds(1e3 * prediction.floor_seconds),
            factor(prediction.over),
            ", ".join(kinds(prediction.problem)),
        )
    return table


def _grouped(
    title: str, column: str, found: Iterable[Prediction], names: Callable[[Prediction], list[str]], over: float
) -> Table:
    """One line for each pass, dtype and name, those first that are most above their floors together."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for prediction in found:
        for name in names(prediction):
            key = PASS_TITLES[prediction.pass_.value], prediction.problem.dtype, name
            groups.setdefault(key, []).append(prediction.over)
    figures = ("passes", "× floor, mean", "95 % below", "highest", f"over {over:g}")
    table = plain_table(title, ("pass", "dtype", column), figures)
    for key, values in sorted(groups.items(), key=lambda group: -sum(map(math.log, group[1]))):
        table.add_row(
            *key,
            str(len(values)),
            factor(geometric_mean(values)),
            factor(percentile(values, 0.95)),
            factor(max(values)),
            str(sum(value > over for value in values)),
        )
    return table


def _layout(prediction: Prediction) -> str:
    return "channels_last" if prediction.problem.channels_last else "nchw"
