"""The search for a section's terms: coordinate descent in the logarithms of terms, between bounds."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
from rows import Row

from polyphase.costs import trial

Values = dict[str, float]

# A prediction that is off by more counts by its logarithm, not by the square of that: a few records do not decide.
_FAR = 0.5
# What moving a term by a factor e costs: a term that the rows hardly tell of stays where it is.
_STAY = 0.002
_STEPS = 0.3, 0.15, 0.07, 0.03
_SWEEPS = 3  # at most, of each step
_AS_GOOD = 1e-7  # of the loss: a step is taken only where it is less by more

# What schedules remember of their terms: predictions, forgotten before every question; and tiles, which stay those of
# the first values during a search, as they take long to find.
_PREDICTIONS = {
    "tma_cost": ("weight_splits", "input_splits"),
    "..direct_wgrad.windows": ("_tiling",),
    "..tap_gemm.tma_cost": ("splits_of",),
    "..tap_gemm.wgrad_tma": ("_splits",),
}
_TILES = {"wgmma": ("tiling_of",)}
_ROOM = "polyphase.schedules.window_gemm"


def forget() -> None:
    """Forgets all that schedules and the planner remember."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("polyphase.schedules", "polyphase.plan")):
            for each in vars(module).values():
                if hasattr(each, "cache_clear"):
                    each.cache_clear()


def _forget_predictions() -> None:
    for name, functions in _PREDICTIONS.items():
        module = importlib.import_module(name if name.startswith("..") else f".{name}", _ROOM)
        for function in functions:
            getattr(module, function).cache_clear()


@contextmanager
def same_tiles() -> Iterator[None]:
    """Tiles are found once, whatever the terms."""
    with ExitStack() as stack:
        for name, functions in _TILES.items():
            module = importlib.import_module(f".{name}", _ROOM)
            for function in functions:
                found = getattr(module, function)
                setattr(module, function, cache(found))
                stack.callback(setattr, module, function, found)
        yield


def predictions(rows: Sequence[Row], section: str, values: Values) -> np.ndarray:
    """Predicted seconds of rows where a section has these values."""
    with trial(section, **values):
        _forget_predictions()
        return np.array([row.prediction() for row in rows])


def bounds(term: dict[str, Any]) -> tuple[float, float]:
    """Between which a term may be: a third and three times what it is; exponents 1 and 8, shares 0.3 and 1.1."""
    value, meaning = float(term["value"]), str(term["meaning"])
    if meaning.startswith("exponent of the norm"):
        return 1.0, 8.0
    if meaning.startswith("share of the bandwidth"):
        return 0.3, 1.1
    return value / 3, value * 3


def affected(rows: Sequence[Row], section: str, values: Values, term: str) -> np.ndarray:
    """Which rows a term has a part in, by their numbers."""
    if not rows:
        return np.empty(0, int)
    if not values[term]:
        before, after = predictions(rows, section, values), predictions(rows, section, {**values, term: 1.0})
        return np.flatnonzero(np.abs(after / before - 1) > 1e-9)
    less, more = (predictions(rows, section, {**values, term: values[term] * factor}) for factor in (0.9, 1.1))
    return np.flatnonzero(np.abs(more / less - 1) > 1e-9)


def losses(rows: Sequence[Row], seconds: np.ndarray, weights: np.ndarray, both_sides: bool) -> np.ndarray:
    """What predictions are off by, squared.

    Of rows that bytes bind only predictions that are too high count, unless ``both_sides``: else work would be fitted
    to what bytes take.
    """
    off = np.log(seconds / np.array([row.seconds for row in rows]))
    if not both_sides:
        off = np.where([row.bytes_bound for row in rows], np.maximum(off, 0), off)
    far = np.abs(off)
    return weights * np.where(far < _FAR, off * off, 2 * _FAR * far - _FAR * _FAR)


def fit(
    rows: Sequence[Row], section: str, values: Values, terms: dict[str, dict[str, Any]], weights: np.ndarray
) -> Values:
    """Values of less loss, of the terms that any row has a part in; tiles are those of the ``values`` given."""
    start, now = dict(values), dict(values)
    scale = float(weights.sum())
    with same_tiles():
        predictions(rows, section, now)
        parts = {term: affected(rows, section, now, term) for term in terms if now[term]}
        parts = {term: found for term, found in parts.items() if len(found)}
        shares = {term: terms[term]["meaning"].startswith("share of the bandwidth") for term in parts}
        for step in _STEPS:
            for _ in range(_SWEEPS):
                moved = False
                for term, places in parts.items():
                    asked = [rows[place] for place in places]
                    weighed, both = weights[places], shares[term]

                    def loss(value: float, term: str = term, asked: list[Row] = asked) -> float:
                        seconds = predictions(asked, section, {**now, term: value})
                        stay = _STAY * math.log(value / start[term]) ** 2
                        return float(losses(asked, seconds, weighed, both).sum()) / scale + stay  # noqa: B023

                    low, high = bounds(terms[term])
                    best, least = now[term], loss(now[term])
                    for factor in (math.exp(step), math.exp(-step)):
                        value = min(high, max(low, now[term] * factor))
                        if value != best and (found := loss(value)) < least - _AS_GOOD:
                            best, least = value, found
                    moved |= best != now[term]
                    now[term] = best
                if not moved:
                    break
    return {term: float(f"{value:.4g}") if value != start[term] else value for term, value in now.items()}
