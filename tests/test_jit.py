"""Compilation at run time: the cache on disk and whatever may happen to it, the compiler's errors, threads."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyphase import CompilationError, ConvTransposeProblem, UnsupportedError
from polyphase.jit import cache as cache_module
from polyphase.jit import compiler
from polyphase.jit.source import KernelSource
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.schedules.direct.general import DirectGeneral, GeneralConfig
from processes import environment, run_python

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, but no GPU")
ARCH = "sm_90a"


def small_source(kernel_size: int = 1) -> KernelSource:
    """A kernel that compiles in a twentieth of a second; another one for every ``kernel_size``."""
    problem = ConvTransposeProblem.make((1, 1, 4), 1, kernel_size)
    device = DeviceInfo.for_arch(ARCH)
    return DirectGeneral().program(problem, Pass.FORWARD, device, Layouts.dense(problem), GeneralConfig(1)).main.source


SOURCE = small_source()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder that does not exist yet."""
    monkeypatch.setenv("POLYPHASE_CACHE_DIR", str(tmp_path / "kernels"))
    yield tmp_path / "kernels"
    forget_caches()


def forget_caches() -> None:
    """What another process would not know."""
    compiler._caches.clear()


def compiled(source: KernelSource = SOURCE, arch: str = ARCH) -> tuple[bytes, int]:
    """The binary as a new process gets it, and how many compilations that took."""
    forget_caches()
    before = compiler.compilations
    return compiler.compile_kernel(source, arch), compiler.compilations - before


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "entries").rglob("*") if path.is_file())


# The cache


def test_a_kernel_is_compiled_once(directory: Path) -> None:
    binary, count = compiled()
    assert count == 1
    assert binary.startswith(b"\x7fELF")
    assert compiled() == (binary, 0)
    assert len(entries(directory)) == 1


def test_the_folder_is_private(directory: Path) -> None:
    old = os.umask(0o002)
    try:
        compiled()
    finally:
        os.umask(old)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert compiler.cache().problem is None


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POLYPHASE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_module.cache_directory() == tmp_path / "polyphase"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_module.cache_directory() == tmp_path / "home" / ".cache" / "polyphase"


@pytest.mark.parametrize(
    "change",
    [
        lambda: (replace(SOURCE, dtype="bfloat16"), ARCH),
        lambda: (SOURCE.with_constants(MIN_BLOCKS=SOURCE.min_blocks - 1), ARCH),
        lambda: (small_source(2), ARCH),
        lambda: (SOURCE, "sm_80"),
    ],
    ids=["dtype", "blocks", "layer", "architecture"],
)
def test_another_kernel_is_another_entry(directory: Path, change: Callable[[], tuple[KernelSource, str]]) -> None:
    binary, _ = compiled()
    other, count = compiled(*change())
    assert count == 1
    assert other != binary
    assert compiled() == (binary, 0)
    assert len(entries(directory)) == 2


def test_changed_kernel_files_are_other_entries(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyphase.jit import source

    compiled()
    read = source.read
    monkeypatch.setattr(source, "read", lambda name: read(name) + "\n// edited\n")
    edited = replace(SOURCE)  # the text of SOURCE itself is made already
    assert edited.text != SOURCE.text
    assert compiled(edited)[1] == 1


def test_another_compiler_is_another_entry(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    monkeypatch.setattr(compiler, "compiler_version", lambda: "nvrtc 99.9")
    assert compiled()[1] == 1


def flipped(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 0x10
    return bytes(changed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: flipped(data, 0),
        lambda data: flipped(data, len(data) // 2),
        lambda data: flipped(data, -1),
        lambda data: data[: len(data) // 2],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: pickle.dumps(data),
    ],
    ids=["first byte", "middle byte", "last byte", "half", "ten bytes", "empty", "longer", "pickle"],
)
def test_a_damaged_entry_is_compiled_anew(directory: Path, damage: Callable[[bytes], bytes]) -> None:
    binary, _ = compiled()
    (entry,) = entries(directory)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert compiled() == (binary, 1)
    assert entry.read_bytes() == whole
    assert compiled() == (binary, 0)


def test_the_entry_of_another_kernel_is_not_taken(directory: Path) -> None:
    """An entry is whole, but lies where it does not belong."""
    compiled()
    (first,) = entries(directory)
    other, _ = compiled(small_source(2))
    (second,) = set(entries(directory)) - {first}
    second.write_bytes(first.read_bytes())
    assert compiled(small_source(2)) == (other, 1)


def test_nothing_is_unpickled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("an entry was unpickled",)

    binary, _ = compiled()
    (entry,) = entries(directory)
    entry.write_bytes(pickle.dumps(Bomb()))

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("an entry was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert compiled() == (binary, 1)


def test_discarded_kernels_are_compiled_anew(directory: Path) -> None:
    binary, _ = compiled()
    compiler.discard_kernel(SOURCE, ARCH)
    assert entries(directory) == []
    compiler.discard_kernel(SOURCE, ARCH)  # is gone already
    assert compiled() == (binary, 1)


# The disk


@pytest.mark.parametrize("where", ["file", "file/kernels", "proc"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = Path("/proc/polyphase") if where == "proc" else tmp_path / where
    monkeypatch.setattr(compiler, "cache_directory", lambda: folder)
    binary, count = compiled()
    assert (binary[:4], count) == (b"\x7fELF", 1)
    problem = compiler.cache().problem
    assert problem is not None
    assert "cannot be used" in problem
    forget_caches()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes to read-only folders too")
def test_a_read_only_folder(directory: Path) -> None:
    binary, _ = compiled()
    for path in [*directory.rglob("*"), directory]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert compiled() == (binary, 0)
    assert compiled(small_source(2))[1] == 1
    assert compiled(small_source(2))[1] == 1
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o700)


@pytest.mark.parametrize("function", ["fsync", "replace", "mkstemp"])
@pytest.mark.parametrize("code", ["ENOSPC", "EROFS", "EDQUOT", "EACCES"])
def test_a_disk_that_takes_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: str) -> None:
    import errno

    def fail(*_: object, **__: object) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    with monkeypatch.context() as broken:
        broken.setattr(tempfile if function == "mkstemp" else os, function, fail)
        binary, count = compiled()
        assert count == 1
        problem = compiler.cache().problem
        assert problem is not None
        assert os.strerror(getattr(errno, code)) in problem
        assert compiled() == (binary, 1)
    assert compiled() == (binary, 1)  # there is room again
    assert compiled() == (binary, 0)
    assert list((directory / "tmp").iterdir()) == []


def test_entries_that_cannot_be_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, _ = compiled()
    (entry,) = entries(directory)
    entry.unlink()
    entry.mkdir()
    assert compiled() == (binary, 1)


def test_a_full_disk(directory: Path) -> None:
    """For real: the process may write no file beyond a kilobyte."""
    pytest.importorskip("resource", reason="needs a Unix")
    run_python(
        """
        import resource
        from test_jit import ARCH, SOURCE, compiled, compiler, small_source
        compiled()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        assert compiled()[1] == 0
        for _ in range(2):
            assert compiled(small_source(2))[1] == 1
            assert "cannot be written" in compiler.cache().problem
        """,
        directory,
    )
    assert len(entries(directory)) == 1
    assert list((directory / "tmp").iterdir()) == []


# Other users


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    assert compiled()[1] == 1
    problem = compiler.cache().problem
    assert problem is not None
    assert "can be written by others" in problem
    assert str(directory) in problem
    assert "chmod" in problem
    assert list(directory.iterdir()) == []
    assert compiled()[1] == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_a_folder_of_another_user_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    (entry,) = entries(directory)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    before = entry.stat()
    assert compiled()[1] == 1
    problem = compiler.cache().problem
    assert problem is not None
    assert f"belongs to another user (uid {owner})" in problem
    assert "POLYPHASE_CACHE_DIR" in problem
    assert (entry.stat().st_mtime_ns, entry.stat().st_atime_ns) == (before.st_mtime_ns, before.st_atime_ns)


# Other processes


def test_a_writer_that_is_killed_leaves_nothing_behind(directory: Path) -> None:
    """SIGKILL in the middle of a write: the entry is missing, not broken, and the next process writes it."""
    script = """
    import os, sys, time
    from test_jit import compiled
    def wait(*_):
        print("writing", flush=True)
        time.sleep(60)
    os.fsync = wait
    compiled()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment(directory),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert entries(directory) == []
    assert len(list((directory / "tmp").iterdir())) == 1  # is swept when it is an hour old
    binary, count = compiled()
    assert count == 1
    assert compiled() == (binary, 0)
    (left,) = (directory / "tmp").iterdir()
    os.utime(left, (0, 0))
    compiled()
    assert list((directory / "tmp").iterdir()) == []


@pytest.mark.parametrize("count", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_many_processes_at_once(count: int, directory: Path) -> None:
    """All begin with no cache folder, at the same moment, with the same kernel."""
    script = f"""
    import multiprocessing, os
    from polyphase.jit import compiler
    from test_jit import ARCH, SOURCE

    def work(barrier, results):
        compiler.cuda_core()
        barrier.wait()
        results.put(hash(compiler.compile_kernel(SOURCE, ARCH)))

    context = multiprocessing.get_context("fork")  # nothing of CUDA is imported yet
    barrier, results = context.Barrier({count}), context.Queue()
    children = [context.Process(target=work, args=(barrier, results)) for _ in range({count})]
    for child in children:
        child.start()
    found = {{results.get(timeout=100) for _ in children}}
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * {count}
    assert len(found) == 1
    """
    run_python(script, directory)
    assert len(entries(directory)) == 1
    assert list((directory / "tmp").iterdir()) == []
    assert compiled()[1] == 0


# Threads


def test_threads_compile_a_kernel_once(directory: Path) -> None:
    source = small_source(7)
    before = compiler.compilations
    with ThreadPoolExecutor(8) as pool:
        binaries = set(pool.map(lambda _: compiler.compile_kernel(source, ARCH), range(16)))
    assert len(binaries) == 1
    assert compiler.compilations == before + 1


def test_threads_of_a_cold_process(directory: Path) -> None:
    """Eight threads, as many kernels, and nothing of CUDA imported before."""
    run_python(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from polyphase.jit import compiler
        from test_jit import ARCH, small_source
        barrier = threading.Barrier(8)
        def work(size):
            barrier.wait()
            return compiler.compile_kernel(small_source(size), ARCH)
        with ThreadPoolExecutor(8) as pool:
            binaries = list(pool.map(work, range(1, 9)))
        assert len(set(binaries)) == 8, "two kernels have one binary"
        """,
        directory,
    )
    assert len(entries(directory)) == 8


# The compiler


def broken_source() -> KernelSource:
    return replace(SOURCE, constants=(*SOURCE.constants, ("THIS IS NO NAME", 1)))


def test_compile_failures_show_the_log_and_the_source(directory: Path) -> None:
    source = broken_source()
    with pytest.raises(CompilationError) as caught:
        compiler.compile_kernel(source, ARCH)
    failure = caught.value
    assert "error: expected a" in failure.log
    assert "THIS IS NO NAME" in failure.log
    assert failure.log in str(failure)
    assert "direct_general could not be compiled for sm_90a" in str(failure)
    assert failure.source_path is not None
    assert failure.source_path in str(failure)
    assert Path(failure.source_path).read_text(encoding="utf-8") == source.text
    assert Path(failure.source_path).is_relative_to(directory)
    with pytest.raises(CompilationError):  # it is not remembered
        compiler.compile_kernel(source, ARCH)


def test_compile_failures_without_a_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    directory.write_text("in the way")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with pytest.raises(CompilationError, match="could not be written to any disk") as caught:
        compiler.compile_kernel(broken_source(), ARCH)
    assert caught.value.source_path is None
    (tmp_path / "scratch").mkdir()
    with pytest.raises(CompilationError) as caught:
        compiler.compile_kernel(broken_source(), ARCH)
    assert caught.value.source_path is not None
    assert Path(caught.value.source_path).is_relative_to(tmp_path / "scratch")


def test_compile_failures_leave_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with pytest.raises(CompilationError):
        compiler.compile_kernel(broken_source(), ARCH)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_an_architecture_that_the_compiler_does_not_know(directory: Path) -> None:
    with pytest.raises(CompilationError, match="sm_1234"):
        compiler.compile_kernel(SOURCE, "sm_1234")


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "folder"), [("cuda.core", "usable"), ("cuda", "unusable")])
def test_cuda_core_may_be_missing(tmp_path: Path, missing: str, folder: str) -> None:
    """Importing polyphase works, the portable path works, and a kernel says what to install."""
    if folder == "unusable":
        (tmp_path / "kernels").write_text("in the way")
    run_python(
        f"""
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if (name + ".").startswith("{missing}."):
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Missing())

        import torch, polyphase
        from polyphase.jit.compiler import compile_kernel
        from polyphase.problem import ConvTransposeProblem, Pass
        from polyphase.plan.planner import kernel_sources
        from polyphase.problem.device import DeviceInfo
        x = torch.randn(1, 2, 3, 3)
        polyphase.conv_transpose2d(x, torch.randn(2, 2, 3, 3))
        problem = ConvTransposeProblem.make((1, 1, 4), 1, 1)
        (source, *_) = kernel_sources(problem, Pass.FORWARD, DeviceInfo.for_arch("{ARCH}"))
        try:
            compile_kernel(source, "{ARCH}")
        except polyphase.UnsupportedError as error:
            assert "pip install cuda-core" in str(error), error
        else:
            raise SystemExit("no error")
        """,
        tmp_path / "kernels",
    )


def test_a_forked_process_does_not_wait_for_its_parent_s_threads(tmp_path: Path) -> None:
    run_python(
        """
        import os
        from concurrent.futures import Future
        from polyphase.jit import launcher
        launcher._meanwhile["kernel", "sm_90a"] = Future()
        child = os.fork()
        if child == 0:
            os._exit(len(launcher._meanwhile))
        assert os.waitpid(child, 0)[1] == 0 and len(launcher._meanwhile) == 1
        """,
        tmp_path / "kernels",
    )


def test_nvrtc_may_be_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def fail() -> None:
        raise RuntimeError("no libnvrtc.so")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", fail)
    compiler._nvrtc_version.cache_clear()
    with pytest.raises(UnsupportedError, match=r"NVRTC, which cannot be loaded \(no libnvrtc\.so\); install it with"):
        compiler.compile_kernel(SOURCE, ARCH)
    compiler._nvrtc_version.cache_clear()


def test_importing_polyphase_touches_no_cuda(tmp_path: Path) -> None:
    run_python(
        """
        import sys
        import torch

        def cuda_modules():
            return {name for name in sys.modules if name == "cuda" or name.startswith("cuda.")}

        torch_imports = cuda_modules()  # some versions do
        import polyphase
        layer = polyphase.ConvTranspose2d(2, 3, 3)
        layer(torch.randn(1, 2, 4, 4)).sum().backward()
        polyphase.explain(layer, (1, 2, 4, 4), "sm_90a")
        if torch.version.cuda is None:
            assert cuda_modules() == torch_imports
            assert "cuda.core" not in sys.modules
            assert "polyphase.jit.launcher" not in sys.modules
        assert not torch.cuda.is_initialized()
        """,
        tmp_path / "kernels",
    )
    assert not (tmp_path / "kernels").exists()
