"""A program's compiled kernels on one device, launched with little host time: the addresses of all steps are written
at once, and each step is one driver call whose arguments are prepared."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
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
from polyphase.program.tensor_map import TENSOR_MAP_BYTES, TensorMap

_DEFAULT_SHARED_BYTES = 32 << 10  # dynamic shared memory of a launch; with a kernel's static one 48 KiB in all
_MOST_MAPS = 256  # most encoded tensor maps that a launch keeps per tensor, one for each address


class Executable:
    """A program on the CUDA device ``index``: call it with a raw stream and the addresses of its buffers.

    ``places``: the index of each named buffer among the addresses. Each thread has its own arguments, since the driver
    reads them while other Python threads run.
    """

    def __init__(self, program: Program, arch: str, index: int, places: Mapping[str, int]) -> None:
        handles = _load_all(program, arch, index)
        self.device_index = index
        self._arch = arch
        self._steps: list[tuple[Step, int, list[int], list[dict[int, bytes]]]] = [
            (step, handle, [places[name] for name in step.operands], [{} for _ in step.tensor_maps])
            for step, handle in zip(program.steps, handles)
            if 0 not in step.grid
        ]
        self._driver_launch = _driver().cuLaunchKernelEx
        self._make_room(1 + max(places.values()))

    def _make_room(self, count: int) -> None:
        """Makes room for ``count`` addresses."""
        self._count = count
        self._pack = struct.Struct(f"{count}Q").pack_into
        self._local = threading.local()

    def then(self, other: Executable) -> Executable:
        """An executable of this program's steps, then the other's, all with the same addresses."""
        both = copy(self)
        both._steps = self._steps + other._steps
        both._make_room(max(self._count, other._count))
        return both

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launches all steps on a raw stream; raises `PolyphaseError` if the driver refuses one."""
        try:
            launches = self._local.launches
        except AttributeError:
            launches = self._local.launches = self._launches()
        self._pack(launches.block, 0, *addresses)
        if launches.stream != stream:
            launches.set_stream(stream)
        for step, arguments, maps in launches.steps:
            for each in maps:
                if each.address != addresses[each.place]:
                    each.move(addresses[each.place])
            status = self._driver_launch(*arguments)[0]
            if status:
                raise PolyphaseError(
                    f"launching {step.source.kernel} on CUDA device {self.device_index} failed: {status!r} "
                    f"(grid {step.grid}, {step.block} threads, {step.shared_bytes} bytes shared)"
                )

    def _launches(self) -> _Launches:
        cuda_core().Device(self.device_index).set_current()  # a user's thread may not have a context yet
        made = _Launches(self._count)
        for step, handle, operands, encoded in self._steps:
            made.add(step, handle, operands, encoded, step.overlaps and _may_overlap(self._arch))
        return made


class _Launches:
    """A program's steps as one thread launches them: only addresses change between calls.

    ``steps``: each with the arguments of the driver's call, and the tensor maps that depend on an address. Kernels read
    their operands' addresses from ``block``.
    """

    def __init__(self, count: int) -> None:
        self.block = (ctypes.c_uint64 * count)()
        self.stream: int | None = None
        self.steps: list[tuple[Step, tuple[Any, ...], list[_MovingMap]]] = []
        self.params: list[Any] = []
        self._tables: list[Any] = []

    def add(
        self, step: Step, handle: int, operands: list[int], encoded: list[dict[int, bytes]], overlaps: bool
    ) -> None:
        """Adds a step; ``operands``: their indices in the block; ``encoded``: its tensor maps by address."""
        params = ctypes.create_string_buffer(step.params, len(step.params))
        start = ctypes.addressof(self.block)
        # The address of each of the kernel's parameters.
        table = (ctypes.c_uint64 * (len(operands) + 1))(*(start + 8 * i for i in operands), ctypes.addressof(params))
        offsets = params_of(step.source).tensor_maps[: len(encoded)] if encoded else ()
        maps = [
            _MovingMap(tensor_map, operands[tensor_map.tensor], params, offset, known)
            for tensor_map, offset, known in zip(step.tensor_maps, offsets, encoded, strict=True)
        ]
        arguments = (_config(step, overlaps), _driver().CUfunction(handle), ctypes.addressof(table), 0)
        self.steps.append((step, arguments, maps))
        self.params.append(params)
        self._tables.append(table)

    def set_stream(self, stream: int) -> None:
        """Sets the raw stream of all steps."""
        for _, (config, *_), _ in self.steps:
            config.hStream = stream
        self.stream = stream


class _MovingMap:
    """A tensor map in a thread's parameters; the tensor's address is at index ``place``."""

    def __init__(self, tensor_map: TensorMap, place: int, params: Any, offset: int, known: dict[int, bytes]) -> None:
        self.place = place
        self.address: int | None = None
        self._tensor_map = tensor_map
        self._params = memoryview(params)[offset : offset + TENSOR_MAP_BYTES].cast("B")
        self._known = known

    def move(self, address: int) -> None:
        """Makes the next launch use the tensor at ``address``."""
        encoded = self._known.get(address)
        if encoded is None:
            from polyphase.jit.encode_tensor_map import encode

            if len(self._known) >= _MOST_MAPS:
                self._known.clear()
            encoded = self._known[address] = encode(self._tensor_map, address)
        self._params[:] = encoded
        self.address = address


def _config(step: Step, overlaps: bool) -> Any:
    """The launch configuration of a step; if it ``overlaps``, it may begin before the previous kernel has ended."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = step.block, 1, 1
    config.sharedMemBytes = step.shared_bytes
    if overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def _load_all(program: Program, arch: str, index: int) -> list[int]:
    """Loads all kernels of a program, compiling missing ones in parallel; returns the handles of the steps' kernels."""
    main = program.main
    others = dict.fromkeys(source for source in program.sources if source != main.source)
    binaries = {source: _compile_in_thread(source, arch, index) for source in others}
    # The main kernel takes longest to compile: this thread compiles it meanwhile.
    _load(main.source, arch, index, main.shared_bytes, None)
    for source in program.spares:
        _load(source, arch, index, 0, binaries.get(source))
    return [
        int(_load(step.source, arch, index, step.shared_bytes, binaries.get(step.source)).handle)
        for step in program.steps
    ]


@lru_cache(maxsize=1)
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@lru_cache(maxsize=8)
def _may_overlap(arch: str) -> bool:
    """Whether programmatic dependent launch is available, also in graph capture: CUDA 12.3 and Hopper."""
    status, version = _driver().cuDriverGetVersion()
    return not status and version >= 12030 and capability_of(arch) >= 90


@contextmanager
def _context_of(index: int) -> Iterator[None]:
    """Makes a device current, and restores the previous one: PyTorch allocates on the current device."""
    driver = _driver()
    _, before = driver.cuCtxGetCurrent()
    cuda_core().Device(index).set_current()
    try:
        yield
    finally:
        driver.cuCtxSetCurrent(before)


class _Loaded:
    """A kernel on one device, and the shared memory that its launches may use."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.shared_bytes = _DEFAULT_SHARED_BYTES


_loaded: dict[tuple[KernelSource, str, int], _Loaded] = {}
_guard = threading.Lock()

# Kernels that one thread compiles in turn for later calls, until these calls take them.
_meanwhile: dict[tuple[KernelSource, str], Future[bytes]] = {}
_worker = ThreadPoolExecutor(1, "polyphase")

# A forked process has no such thread, and would wait forever for its results.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_meanwhile.clear)

# Python waits for its threads when it ends: for the kernel in compilation, but not for queued ones.
getattr(threading, "_register_atexit", lambda call: None)(lambda: _worker.shutdown(wait=False, cancel_futures=True))


def is_loaded(source: KernelSource, arch: str, index: int) -> bool:
    """Whether a kernel can be launched at once."""
    return (source, arch, index) in _loaded


_quiet = 0  # number of `quiet` contexts


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which no thread begins to compile kernels for later calls, which would disturb timing."""
    global _quiet
    _quiet += 1
    try:
        yield
    finally:
        _quiet -= 1


def compile_meanwhile(source: KernelSource, arch: str, index: int) -> None:
    """Starts to compile a kernel in a thread for a later call. That call raises failures."""
    if _quiet or is_loaded(source, arch, index) or (source, arch) in _meanwhile:
        return
    with suppress(RuntimeError):  # the interpreter shuts down
        _meanwhile[source, arch] = _worker.submit(compile_kernel, source, arch)


def soonest(program: Program, arch: str, index: int) -> Program:
    """The program with the main kernel that is ready first.

    This is the kernel for these tensors' layout only, unless the kernel for all is loaded, in compilation or on disk.
    """
    source, one_way = program.main.source, program.main.one_way
    if one_way is None or is_loaded(source, arch, index):
        return program
    if not is_loaded(one_way, arch, index) and ((source, arch) in _meanwhile or is_cached(source, arch)):
        return program
    return program.with_main(replace(program.main, source=one_way, one_way=None))


def _compiled(source: KernelSource, arch: str) -> bytes:
    """The binary of a kernel, from the thread if it has begun to compile it."""
    ahead = _meanwhile.pop((source, arch), None)
    if ahead is not None and not ahead.cancel() and ahead.exception() is None:
        return ahead.result()
    return compile_kernel(source, arch)


def _compile_in_thread(source: KernelSource, arch: str, index: int) -> Future[bytes] | None:
    """The binary of a kernel that is not loaded yet, compiled in a new thread: NVRTC releases Python's lock.

    None if no thread is needed, or none can start: beyond a limit, or when the interpreter shuts down.
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
    """The loaded kernel, which may use ``shared_bytes`` of shared memory. Of concurrent threads one loads it."""
    key = source, arch, index
    # Compiled without the lock: different kernels may be compiled at the same time.
    if key not in _loaded:
        code = _compiled(source, arch) if binary is None else binary.result()
    with _guard:
        loaded = _loaded.get(key)
        if loaded is None:
            loaded = _loaded[key] = _Loaded(_load_binary(source, arch, index, code))
        if shared_bytes > loaded.shared_bytes:  # every kernel may use the default; more must be requested
            _allow_shared(loaded.kernel, source, index, shared_bytes)
            loaded.shared_bytes = shared_bytes
        return loaded.kernel


def _load_binary(source: KernelSource, arch: str, index: int, binary: bytes) -> Any:
    """A kernel from its binary. A binary that does not load is discarded and compiled again, once."""
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
