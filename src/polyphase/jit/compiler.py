"""NVRTC through cuda.core: kernel text to binary, and the resources that the binary needs."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from polyphase.errors import CompilationError, UnsupportedError
from polyphase.jit.cache import KernelCache, cache_directory
from polyphase.jit.cubin import code_digest
from polyphase.jit.source import KernelSource

_locks: dict[tuple[KernelSource, str], threading.Lock] = {}
_locks_guard = threading.Lock()
_import_guard = threading.Lock()
_caches: dict[Path, KernelCache] = {}

#: Number of compilations of this process, without cache hits; tests read it.
compilations = 0


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel, as the assembler reports them, in bytes unless said otherwise.

    ``digest``: of the kernel's machine code (`polyphase.jit.cubin`).
    """

    registers: int
    shared: int
    stack: int
    spills: int
    warnings: tuple[str, ...]
    seconds: float
    source: KernelSource = field(repr=False)
    digest: str = field(default="", repr=False)

    @property
    def clean(self) -> bool:
        """No spill, no stack frame, no warning."""
        return not (self.stack or self.spills or self.warnings)


def cache() -> KernelCache:
    """The cache in the folder that the environment names now."""
    directory = cache_directory()
    with _locks_guard:
        if directory not in _caches:
            _caches[directory] = KernelCache(directory)
        return _caches[directory]


def compile_kernel(source: KernelSource, arch: str) -> bytes:
    """The binary of a kernel for ``arch``, from the cache if it has one.

    Raises `CompilationError` with the compiler's log, and `UnsupportedError` if cuda.core or NVRTC is missing.
    """
    with _locks_guard:
        lock = _locks.setdefault((source, arch), threading.Lock())
    with lock:
        store, key = cache(), _key(source, arch)
        binary = store.get(key)
        if binary is None:
            _, binary, _ = _compile_without_spills(source, arch)
            store.put(key, binary)
        return binary


def is_cached(source: KernelSource, arch: str) -> bool:
    """Whether the cache has a kernel's binary. Raises `UnsupportedError` if cuda.core or NVRTC is missing."""
    return cache().get(_key(source, arch)) is not None


def discard_kernel(source: KernelSource, arch: str) -> None:
    """Discards a binary that does not load, so that the next call compiles it."""
    cache().discard(_key(source, arch))


def _key(source: KernelSource, arch: str) -> bytes:
    return hashlib.sha256("\0".join((source.text, arch, compiler_version())).encode()).digest()


def resources_of(source: KernelSource, arch: str) -> Resources:
    """Compiles one kernel, without the cache, and reads the assembler's report."""
    started = time.perf_counter()
    source, binary, log = _compile_without_spills(source, arch)
    seconds = time.perf_counter() - started
    warnings = [line.strip() for line in log.splitlines() if re.search(r"warning|\bC75\d\d\b", line, re.IGNORECASE)]
    return Resources(
        registers=_number(log, r"Used (\d+) registers"),
        shared=_number(log, r"(\d+) bytes smem"),
        stack=_number(log, r"(\d+) bytes stack frame"),
        spills=_number(log, r"(\d+) bytes spill (?:stores|loads)"),
        warnings=tuple(warnings),
        seconds=seconds,
        source=source,
        digest=code_digest(binary),
    )


@lru_cache(maxsize=256)
def settled(source: KernelSource, arch: str) -> KernelSource:
    """The kernel as it is compiled: the attempt that does not spill. Raises as `compile_kernel` does."""
    if len(list(source.attempts())) == 1:
        return source
    return _compile_without_spills(source, arch)[0]


def _number(log: str, pattern: str) -> int:
    return sum(int(match) for match in re.findall(pattern, log))


def _compile_without_spills(source: KernelSource, arch: str) -> tuple[KernelSource, bytes, str]:
    """Compiles a kernel's attempts, the planner's choice first, until one has no spills and no stack frame.

    Returns the compiled source, its binary and the assembler's report: of this attempt, or if there is none, of the
    last among those that spill least.
    """
    tried = []
    for attempt in source.attempts():
        compiled = (attempt, *_compile(attempt, arch))
        found = [_number(compiled[2], rf"(\d+) bytes {what}") for what in ("spill stores", "stack frame")]
        if not any(found):
            return compiled
        tried.append((found, compiled))
    return min(reversed(tried), key=lambda each: each[0])[1]


def _compile(source: KernelSource, arch: str) -> tuple[bytes, str]:
    global compilations
    core = cuda_core()
    log = io.StringIO()
    # Since 12.9 NVRTC caches binaries too; a cached one has no report, from which spills are read.
    no_cache = True if _nvrtc_version() >= (12, 9) else None
    try:
        options = core.ProgramOptions(arch=arch, std="c++17", ptxas_options="-v", no_cache=no_cache)
        binary = core.Program(source.text, "c++", options).compile("cubin", logs=log)
    except Exception as error:
        path = _keep(source)
        where = "could not be written to any disk" if path is None else f"lies in {path}"
        raise CompilationError(
            f"{source.kernel} could not be compiled for {arch}; the source {where}\n{error}\n{log.getvalue()}",
            log=f"{error}\n{log.getvalue()}",
            source_path=None if path is None else str(path),
        ) from error
    with _locks_guard:
        compilations += 1
    return bytes(binary.code), log.getvalue().replace("\0", "")


def cuda_core() -> Any:
    """The package cuda.core. Two threads must not import it at once: one would see it half initialised."""
    with _import_guard:
        try:
            import cuda.core
        except ImportError as error:
            raise UnsupportedError(
                "polyphase's CUDA kernels are compiled at run time with cuda-core and cuda-bindings, which cannot be "
                f"imported ({error}); torch-polyphase requires them on Linux and Windows, so install it again, or them "
                "alone with: pip install cuda-core cuda-bindings"
            ) from error
        return cuda.core


def _keep(source: KernelSource) -> Path | None:
    """Writes a source that does not compile to a file for the user; None if no disk stores it."""
    name = f"{source.kernel}-{hashlib.sha256(source.text.encode()).hexdigest()[:12]}.cu"
    for scratch in (False, True):
        try:
            folder = Path(tempfile.mkdtemp(prefix="polyphase-")) if scratch else cache_directory() / "failed"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(source.text, encoding="utf-8")
            return folder / name
        except OSError:
            continue
    return None


def compiler_version() -> str:
    """NVRTC's version, for people and for the cache. Raises `UnsupportedError` if cuda.core or NVRTC is missing."""
    cuda_core()  # first, and alone: see there
    return "nvrtc {}.{}".format(*_nvrtc_version())


@lru_cache(maxsize=1)
def _nvrtc_version() -> tuple[int, int]:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the first call looks for the library
        raise UnsupportedError(
            f"polyphase's CUDA kernels are compiled at run time by NVRTC, which cannot be loaded ({error}); "
            f"install it with: {install_nvrtc()}"
        ) from error
    return major, minor


def install_nvrtc() -> str:
    """The pip line for NVRTC of the major version of CUDA that PyTorch was built for, which its builds install."""
    version = getattr(sys.modules.get("torch"), "version", None)
    cuda = getattr(version, "cuda", None) or ""
    major = "12" if cuda.startswith("12") else "13"
    return f'pip install "torch-polyphase[cu{major}]"' + (f" (PyTorch is built for CUDA {cuda})" if cuda else "")
