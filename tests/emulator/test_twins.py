"""PTX stands in one folder of the kernels, and what the host does in its place in a mirror of that folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyphase.jit.source import KERNELS

TWINS = sorted((Path(__file__).parent / "ptx").glob("*.cuh"))


def test_every_twin_has_an_original() -> None:
    originals = {path.name for path in (KERNELS / "ptx").glob("*.cuh")}
    assert {path.name for path in TWINS} <= originals


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cu*")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_kernels_know_nothing_of_the_emulator_and_leave_ptx_to_its_wrappers(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "emulat" not in text.lower()
    assert "asm" not in text.replace("assem", "") or path.parent.name == "ptx"
