"""The terms of the schedules' cost models, fitted to measured times.

`<arch>.json` beside this file lists them with unit, meaning, records and error; ``benchmarks/fit/fit.py`` writes it. An
architecture without a file uses the terms of `MEASURED`, scaled by its own rates (`polyphase.problem.device`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyphase.problem.device import DeviceInfo

#: The architecture whose terms architectures without a file use.
MEASURED = "sm_90a"


def read_values(path: Path) -> dict[str, dict[str, float]]:
    """The values of a file, by section and term."""
    sections = json.loads(path.read_text(encoding="utf-8"))["sections"]
    return {name: {term: each["value"] for term, each in found["terms"].items()} for name, found in sections.items()}


#: Values by architecture, section and term. An emitted file contains them as numbers.
COSTS = {path.stem: read_values(path) for path in sorted(Path(__file__).parent.glob("*.json"))}


class UnknownTermError(LookupError, AttributeError):
    """A section or a term that no file has."""


class Costs:
    """The terms of one section, each an attribute; ``costs["name"]`` is the same. None can be changed."""

    def __init__(self, section: str, arch: str, terms: dict[str, float]) -> None:
        self.__dict__.update(terms)
        self.__dict__["_about"] = f"section {section!r} of the costs of {arch}"

    def __getattr__(self, term: str) -> float:  # Python calls it only for missing terms
        raise UnknownTermError(f"{self.__dict__['_about']} has no term {term!r}")

    def __getitem__(self, term: str) -> float:
        value: float = getattr(self, term)
        return value

    def __setattr__(self, term: str, value: float) -> None:
        raise TypeError(f"{self.__dict__['_about']} cannot be changed; `trial` takes other values for a while")


def costs(section: str, device: DeviceInfo) -> Costs:
    """The terms of a section, on a device. Raises `UnknownTermError` if there is no such section."""
    return _costs(section, device.arch)


@lru_cache(maxsize=256)
def _costs(section: str, arch: str) -> Costs:
    table = COSTS.get(arch, COSTS[MEASURED])
    if section not in table:
        raise UnknownTermError(f"the costs of {arch} have no section {section!r}; there are {', '.join(sorted(table))}")
    return Costs(section, arch, table[section])


@contextmanager
def trial(section: str, **terms: float) -> Iterator[None]:
    """Some terms of a section have other values for a while, on every architecture; for tests and fits.

    Caches of schedules and of the planner keep results of other values: clear them, or ask for uncached ones.
    """
    before = {arch: table[section] for arch, table in COSTS.items()}
    for table in COSTS.values():
        if unknown := sorted(set(terms) - set(table[section])):
            raise UnknownTermError(f"section {section!r} has no term {', '.join(unknown)}")
        table[section] = {**table[section], **terms}
    _costs.cache_clear()
    try:
        yield
    finally:
        for arch, values in before.items():
            COSTS[arch][section] = values
        _costs.cache_clear()
