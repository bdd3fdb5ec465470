"""Kernels compiled ahead, in processes of their own: what compiles is in the cache, and no failure is fatal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from polyphase import UnsupportedError
from polyphase.errors import CompilationError
from polyphase.jit import ahead, compiler
from test_jit import ARCH, broken_source, small_source

SOURCES = [small_source(size) for size in range(1, 9)]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder that does not exist yet, and two processors."""
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(ahead, "_processors", lambda: 2)
    compiler._caches.clear()
    yield tmp_path / "kernels"
    compiler._caches.clear()


class Pool:
    """In the place of processes; ``started`` counts them."""

    started = 0

    def __init__(self, count: int, **options: object) -> None:
        Pool.started += count

    map = staticmethod(map)

    def shutdown(self, cancel_futures: bool) -> None:
        assert cancel_futures


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type[Pool]:
    monkeypatch.setattr(Pool, "started", 0)
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Pool)
    return Pool


@pytest.mark.slow
def test_processes_fill_the_cache(directory: Path) -> None:
    """For real. One kernel does not compile, one is there already."""
    compiler.compile_kernel(SOURCES[0], ARCH)
    before, told = compiler.compilations, []
    ahead.compile_ahead([broken_source(), *SOURCES, *SOURCES], ARCH, lambda *counts: told.append(counts))
    assert told == [(done, len(SOURCES)) for done in range(len(SOURCES) + 1)]
    assert all(compiler.is_cached(source, ARCH) for source in SOURCES)
    for source in SOURCES:
        compiler.compile_kernel(source, ARCH)
    assert compiler.compilations == before
    with pytest.raises(CompilationError):  # as if nothing had been
        compiler.compile_kernel(broken_source(), ARCH)


def test_few_kernels_are_worth_no_process(pool: type[Pool]) -> None:
    ahead.compile_ahead(SOURCES[:7], ARCH)
    assert pool.started == 0
    ahead.compile_ahead(SOURCES, ARCH)
    assert pool.started == 2
    ahead.compile_ahead(SOURCES, ARCH)  # which are there
    assert pool.started == 2


@pytest.mark.usefixtures("pool")
def test_a_disk_that_takes_nothing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    told: list[tuple[int, int]] = []
    before = compiler.compilations
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fail)
        ahead.compile_ahead(SOURCES, ARCH, lambda *counts: told.append(counts))
    assert told == [(0, len(SOURCES))]
    assert compiler.compilations == before + 1


def test_without_a_cache_no_kernel_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "file"))

    def sources() -> Iterator[Any]:
        pytest.fail("a kernel was planned in vain")
        yield

    ahead.compile_ahead(sources(), ARCH)


def test_without_a_compiler_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("no cuda.core")

    monkeypatch.setattr(compiler, "cuda_core", missing)
    ahead.compile_ahead(SOURCES, ARCH)


@pytest.mark.usefixtures("pool")
def test_a_process_that_dies_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(Pool, "map", die)
    ahead.compile_ahead(SOURCES, ARCH)
