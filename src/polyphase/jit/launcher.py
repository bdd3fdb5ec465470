"""A compiled kernel on one device, launched with the least host time: one driver call on a parameter block that only
needs its pointers filled in."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from polyphase.errors import CompilationError, PolyphaseError
from polyphase.jit.compiler import compile_kernel, cuda_core, discard_kernel, is_cached
from polyphase.jit.source import KernelSource
from polyphase.problem.device import capability_of
from polyphase.program.params import params_of
from polyphase.program.program import Program
from polyphase.program.step import Step
from polyphase.program.tensor_map import TENSOR_MAP_BYTES

_DEFAULT_SHARED_BYTES = 32 << 10  # of a launch, beside what is a kernel's own: 48 KiB in all
_MOST_MAPS = 256  # that a launch keeps of a tensor, one for each address


class Executable:
    """A step on the CUDA device ``index``: call it with a raw stream and the addresses of the step's operands.

    The parameter block belongs to a thread, since the driver reads it while other Python threads run. ``binary`` is
    what a thread compiles already.
    """

    def __init__(self, step: Step, arch: str, index: int, binary: Future[bytes] | None = None) -> None:
        self._kernel = _load(step.source, arch, index, step.shared_bytes, binary)
        self.name = step.source.kernel
        self.device_index = index
        self._dimensions = (*step.grid, step.block, 1, 1, step.shared_bytes)
        self._empty = 0 in step.grid
        self._params = step.params
        self._tensor_maps = step.tensor_maps
        self._places = params_of(step.source).tensor_maps if step.tensor_maps else ()
        self._maps: list[dict[int, bytes]] = [{} for _ in step.tensor_maps]
        self._pointers = len(step.operands)
        self._pack = struct.Struct(f"{self._pointers}Q").pack_into
        self._local = threading.local()
        self._driver = _driver()
        self._function = self._driver.CUfunction(int(self._kernel.handle))
        self._overlaps = step.overlaps and _may_overlap(arch)

    def __call__(self, stream: int, *pointers: int) -> None:
        """Launch on a raw stream; raises `PolyphaseError` where the driver refuses."""
        if self._empty:
            return
        try:
            block, address, config = self._local.block
        except AttributeError:
            block, address, config = self._parameters()
        self._pack(block, 0, *pointers)
        for i, boxes in enumerate(self._tensor_maps):
            if self._local.mapped[i] != pointers[boxes.tensor]:
                self._map(i, pointers[boxes.tensor])
        if config is None:
            (status,) = self._driver.cuLaunchKernel(self._function, *self._dimensions, stream, address, 0)
        else:
            config.hStream = stream
            (status,) = self._driver.cuLaunchKernelEx(config, self._function, address, 0)
        if status:
            raise PolyphaseError(
                f"launching {self.name} on CUDA device {self.device_index} failed: {status!r} "
                f"(grid {self._dimensions[:3]}, {self._dimensions[3]} threads, {self._dimensions[6]} bytes shared)"
            )

    def _parameters(self) -> tuple[Any, int, Any]:
        """This thread's block: the pointers, then the parameters, and the table of where each parameter lies.

        Beside it the launch's configuration, where it has one that says more than its dimensions.
        """
        cuda_core().Device(self.device_index).set_current()  # a thread of the user's may not have a context yet
        count = self._pointers
        block = (ctypes.c_uint64 * count)()
        params = ctypes.create_string_buffer(self._params, len(self._params))
        start = ctypes.addressof(block)
        table = (ctypes.c_uint64 * (count + 1))(*(start + 8 * i for i in range(count)), ctypes.addressof(params))
        self._local.keep = (params, table)
        self._local.mapped = [None] * len(self._tensor_maps)
        self._local.block = (block, ctypes.addressof(table), self._overlapping() if self._overlaps else None)
        return self._local.block  # type: ignore[no-any-return]

    def _map(self, index: int, address: int) -> None:
        """Has this thread's launches take the boxes of that index of the tensor at ``address``."""
        from polyphase.jit.tensor_map import encode

        maps = self._maps[index]
        encoded = maps.get(address)
        if encoded is None:
            if len(maps) >= _MOST_MAPS:
                maps.clear()
            encoded = maps[address] = encode(self._tensor_maps[index], address)
        params, _ = self._local.keep
        ctypes.memmove(ctypes.byref(params, self._places[index]), encoded, TENSOR_MAP_BYTES)
        self._local.mapped[index] = address

    def _overlapping(self) -> Any:
        """The configuration of a launch that may begin before the one ahead of it in its stream ends."""
        driver = _driver()
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._dimensions[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self._dimensions[3:6]
        config.sharedMemBytes = self._dimensions[6]
        config.attrs = [attribute]
        config.numAttrs = 1
        return config


def executables(program: Program, arch: str, index: int) -> list[Executable]:
    """A program's steps on the CUDA device ``index``; all of its kernels are loaded. Kernels are compiled at once."""
    main = program.main
    others = dict.fromkeys(source for source in program.sources if source != main.source)
    binaries = {source: _compile_in_thread(source, arch, index) for source in others}
    # The main kernel takes longest to compile: this thread does that meanwhile.
    loaded = Executable(main, arch, index)
    for source in program.spares:
        _load(source, arch, index, 0, binaries.get(source))
    return [
        loaded if step is main else Executable(step, arch, index, binaries.get(step.source)) for step in program.steps
    ]


@lru_cache(maxsize=1)
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@lru_cache(maxsize=8)
def _may_overlap(arch: str) -> bool:
    """Whether programmatic dependent launch is to be had, also where a graph is captured: CUDA 12.3 and Hopper."""
    status, version = _driver().cuDriverGetVersion()
    return not status and version >= 12030 and capability_of(arch) >= 90


@contextmanager
def _context_of(index: int) -> Iterator[None]:
    """Makes a device current, and afterwards the one that was: PyTorch would allocate on what is left here."""
    driver = _driver()
    _, before = driver.cuCtxGetCurrent()
    cuda_core().Device(index).set_current()
    try:
        yield
    finally:
        driver.cuCtxSetCurrent(before)


class _Loaded:
    """A kernel on one device, and the shared memory that its launches may ask for."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.shared_bytes = _DEFAULT_SHARED_BYTES


_loaded: dict[tuple[KernelSource, str, int], _Loaded] = {}
_guard = threading.Lock()

# What one thread compiles for later calls, in turn, until they take it.
_meanwhile: dict[tuple[KernelSource, str], Future[bytes]] = {}
_worker = ThreadPoolExecutor(1, "polyphase")

# A forked process has no such thread, and would wait for what this one's never brings.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_meanwhile.clear)

# Python waits for its threads when it ends: for the kernel that is being compiled, but not for those that wait.
getattr(threading, "_register_atexit", lambda call: None)(lambda: _worker.shutdown(wait=False, cancel_futures=True))


def is_loaded(source: KernelSource, arch: str, index: int) -> bool:
    """Whether a kernel can be launched at once."""
    return (source, arch, index) in _loaded


_quiet = 0  # how many ask that nothing be compiled meanwhile


@contextmanager
def quiet() -> Iterator[None]:
    """Within it no thread begins to compile what later calls may need, which would disturb what is timed."""
    global _quiet
    _quiet += 1
    try:
        yield
    finally:
        _quiet -= 1


def compile_meanwhile(source: KernelSource, arch: str, index: int) -> None:
    """Has a thread compile a kernel that a later call may need. Failures are that call's."""
    if _quiet or is_loaded(source, arch, index) or (source, arch) in _meanwhile:
        return
    with suppress(RuntimeError):  # the interpreter shuts down
        _meanwhile[source, arch] = _worker.submit(compile_kernel, source, arch)


def soonest(program: Program, arch: str, index: int) -> Program:
    """The program with the main kernel that can be there first.

    That is the one for tensors that lie as these do alone, unless the one for all is here, on its way or on the disk.
    """
    source, one_way = program.main.source, program.main.one_way
    if one_way is None or is_loaded(source, arch, index):
        return program
    if not is_loaded(one_way, arch, index) and ((source, arch) in _meanwhile or is_cached(source, arch)):
        return program
    return program.with_main(replace(program.main, source=one_way, one_way=None))


def _compiled(source: KernelSource, arch: str) -> bytes:
    """The binary of a kernel, from the thread if that has begun with it."""
    ahead = _meanwhile.pop((source, arch), None)
    if ahead is not None and not ahead.cancel() and ahead.exception() is None:
        return ahead.result()
    return compile_kernel(source, arch)


def _compile_in_thread(source: KernelSource, arch: str, index: int) -> Future[bytes] | None:
    """The binary of a kernel that is not loaded yet, compiled by a thread of its own: NVRTC leaves Python to others.

    None where there is no need for a thread, or none to be had: beyond a limit, or when the interpreter shuts down.
    """
    if is_loaded(source, arch, index):
        return None
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(compile_kernel, source, arch)
    except RuntimeError:
        return None
    finally:
        thread.shutdown(wait=False)


def _load(source: KernelSource, arch: str, index: int, shared_bytes: int, binary: Future[bytes] | None) -> Any:
    """The loaded kernel, which may use ``shared_bytes`` of shared memory. Of threads that come together, one loads."""
    key = source, arch, index
    # Compiled before the lock is taken: different kernels may be compiled at the same time.
    if key not in _loaded:
        code = _compiled(source, arch) if binary is None else binary.result()
    with _guard:
        loaded = _loaded.get(key)
        if loaded is None:
            loaded = _loaded[key] = _Loaded(_load_binary(source, arch, index, code))
        if shared_bytes > loaded.shared_bytes:  # every kernel may use some; more is to be asked for
            _allow_shared(loaded.kernel, source, index, shared_bytes)
            loaded.shared_bytes = shared_bytes
        return loaded.kernel


def _load_binary(source: KernelSource, arch: str, index: int, binary: bytes) -> Any:
    """A kernel from its binary. One from the cache that does not load is thrown away and compiled again, once."""
    code = cuda_core().ObjectCode
    try:
        with _context_of(index):
            return code.from_cubin(binary).get_kernel(source.kernel)
    except Exception:
        discard_kernel(source, arch)
    try:
        with _context_of(index):
            return code.from_cubin(compile_kernel(source, arch)).get_kernel(source.kernel)
    except Exception as error:
        raise CompilationError(
            f"{source.kernel} was compiled for {arch} but does not load on CUDA device {index}: {error}"
        ) from error


def _allow_shared(kernel: Any, source: KernelSource, index: int, shared_bytes: int) -> None:
    driver = _driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(
        attribute, shared_bytes, driver.CUkernel(int(kernel.handle)), driver.CUdevice(index)
    )
    if status:
        raise PolyphaseError(f"{source.kernel} cannot have {shared_bytes} bytes of shared memory: {status!r}")
