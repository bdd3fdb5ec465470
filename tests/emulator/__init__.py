"""Executes CUDA C++ kernels on the CPU: the very source, its barriers included, where there is no GPU.

A kernel's source (one string, no headers) is compiled by g++ behind ``cuda_shim.h`` and run by ``runtime.cpp``, which
makes every thread of a block a fiber. What wraps PTX (``kernels/ptx``) gives way to the files of the same names in
``ptx``: `text_of` and `assembled` see to it. Found, and reported as `EmulationError` with block, thread and line:
accesses outside of a buffer or of shared memory, misaligned vectors, indices outside of an array, signed overflow,
deadlocks, endless loops. A race shows as a result that depends on the order of threads. Shared memory and local
variables are poisoned, so what is read before it is written shows too. Asynchronous copies and products are done when
the thread waits for them, not before. Matrix instructions find their operands by the descriptors that hardware gets.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyphase.jit.includes import resolve
from polyphase.jit.source import KERNELS, KernelSource

ORDERS: tuple[str | int, ...] = ("forward", "reversed", 1, 2)
MAX_THREADS, MAX_SHARED_BYTES, MAX_GRID = 1024, 227 * 1024, (2**31 - 1, 65535, 65535)

_HERE = Path(__file__).parent
_CACHE = _HERE.parent.parent / "build/emulator"
_WGMMA_FORMS = "ptx/wgmma_forms.cuh"
_FORM = re.compile(
    r"void wgmma\(float \(&sums\)\[(?P<count>\d+)\], (?P<a>const unsigned \(&a\)\[4\]|unsigned long long a),"
    r".*?wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.f32\.(?P<operand>\w+)\.(?P=operand) "
    r".*?, add, 1, 1(?P<transposed>(?:, \d)*); }",
    re.DOTALL,
)
_OPERANDS = {"tf32": "float", "f16": "float16", "bf16": "bfloat16"}
_ALIGN = r"(?:(?:__align__|alignas)\s*\([^;]*\)\s*)?"
_DYNAMIC_SHARED = re.compile(rf"extern\s+{_ALIGN}__shared__\s+{_ALIGN}([\w\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;")
_COMMON = ("-std=c++20", "-fPIC", "-U_FORTIFY_SOURCE", f"-I{_HERE}")  # fortified jumps refuse to change stacks
_SOURCES, _RUNTIME = ("runtime.cpp", "tensor_cores.cpp"), ("-O3", "-march=native", f"-I{KERNELS}")
_KERNEL = (
    *("-Og", "-w", "-march=native", "-ftrivial-auto-var-init=pattern", "-fno-strict-aliasing"),
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero,signed-integer-overflow",
    "-fno-sanitize-recover=all",
)
# A fault only traps, and the library knows no lines, which saves a quarter of g++'s time. A launch that fails is
# repeated with a library that names the fault and its line.
_QUICK, _EXPLAINING = ("-fsanitize-undefined-trap-on-error",), ("-gdwarf-4", "-g1")
# Checks of overflow are a third of the time that g++ takes. Indices are the same in half precision, where they are left
# out: what is emulated there is in float32, too.
_HALF = ("typedef float16 scalar_t;", "typedef bfloat16 scalar_t;")
_UNCHECKED = "-fno-sanitize=signed-integer-overflow"
_ARGUMENT_ALIGNMENT = 128
_KINDS = {"p": "pointer", "f": "float", "i": "integer", "u": "unsigned", "s": "struct"}
# What a Python number converts to, by the kind and size of the kernel's parameter.
_SCALARS = dict(zip(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"), "bhiqBHIQfd"))


class EmulationError(RuntimeError):
    """The kernel does not compile, or did what a kernel must not do."""


class _Parameter(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_char), ("size", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("run", ctypes.c_void_p), ("touch", ctypes.c_void_p), ("parameters", ctypes.POINTER(_Parameter)))


class _Argument(ctypes.Structure):
    _fields_ = (("value", ctypes.c_void_p), ("bytes", ctypes.c_int64))


def text_of(source: KernelSource) -> str:
    """A kernel's text with the host's twins of PTX."""
    return source.text_with(_twins(source.generated.get(_WGMMA_FORMS, "")))


def assembled(files: Sequence[str], texts: Mapping[str, str]) -> str:
    """The same of an emitted kernel, whose files are known by path and have no includes any more."""
    twins, done = _twins(texts.get(_WGMMA_FORMS, "")), dict[str, str]()

    def read(path: str) -> str:
        return twins.get(path) or texts.get(path) or (KERNELS / path).read_text(encoding="utf-8")

    for file in files:
        for path, text in resolve(file, lambda path: "" if path in done else read(path), {}):
            done.setdefault(path, text)
    return "\n".join(done.values())


def _twins(forms: str) -> dict[str, str]:
    """Texts in place of files of the kernels, by path; ``forms``: those of the matrix instruction that a kernel has."""
    paths = {f"ptx/{path.name}": path for path in (_HERE / "ptx").glob("*.cuh")}
    paths["emulator/tensor_cores.cuh"] = _HERE / "tensor_cores.cuh"
    twins = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    return twins | {_WGMMA_FORMS: twins[_WGMMA_FORMS] + "".join(map(_twin_of_form, _FORM.finditer(forms)))}


def _twin_of_form(form: re.Match[str]) -> str:
    kind, flags = _OPERANDS[form["operand"]], re.findall(r"\d", form["transposed"]) or ["0", "0"]
    in_registers = form["a"].startswith("const")
    rows = "RowsInRegisters(a)" if in_registers else f"RowsInMemory<{kind}, {flags[0]}>{{a}}"
    return (
        f"inline void wgmma(float (&sums)[{form['count']}], {form['a']}, unsigned long long b, bool add) {{\n"
        f"  wgmma_later<{kind}, {flags[-1]}>(sums, {rows}, b, add);\n}}\n"
    )


def available() -> bool:
    """Whether this machine can emulate: Linux with g++ (12 or later)."""
    return platform.system() == "Linux" and shutil.which("g++") is not None


def _gcc(*arguments: str | Path) -> None:
    _tool("g++", *arguments)


def _tool(name: str, *arguments: str | Path) -> str:
    done = subprocess.run([name, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(f"{name} refused the kernel:\n{done.stderr}")
    return done.stdout


@functools.cache
def _libgcc() -> str:
    return _tool("g++", "-print-libgcc-file-name").strip()


@functools.cache
def _runtime() -> tuple[Path, Any]:
    """The folder of all that is compiled here, and the compiled runtime, which every kernel's library refers to.

    The folder has the header of all kernels, too, compiled ahead. It is found before the header itself.
    """
    folder = _CACHE / _machine()
    _forget_old(folder)

    def make(made: Path) -> None:
        _gcc(*_COMMON, *_RUNTIME, "-shared", *(_HERE / name for name in _SOURCES), "-o", made / "runtime.so")
        _gcc(*_COMMON, *_KERNEL, *_QUICK, "-x", "c++-header", _HERE / "cuda_shim.h", "-o", made / "cuda_shim.h.gch")

    path = _made_once(folder / "runtime", make)
    launch = ctypes.PyDLL(
        str(path / "runtime.so"), ctypes.RTLD_GLOBAL
    ).emulator_launch  # keeps the GIL: a grid at a time
    launch.restype = ctypes.c_char_p
    return folder, launch


@functools.cache
def _compile(source: str, name: str, build: tuple[str, ...] = _QUICK) -> Path:
    folder, _ = _runtime()

    def make(made: Path) -> None:
        (made / f"{name}.cu").write_text(
            _DYNAMIC_SHARED.sub(r"\1* const& \2 = reinterpret_cast<\1* const&>(emulator::dynamic_shared);", source),
            encoding="utf-8",
        )
        (made / "emulated.cpp").write_text(  # the namespace keeps the source's names from clashing with the headers'
            f'#include "cuda_shim.h"\nnamespace {{\n#include "{name}.cu"\n}}\n'
            f'extern "C" const emulator::Program emulated = emulator::Emulated<&{name}>::program;\n'
        )
        flags = (*_KERNEL, *build, *([_UNCHECKED] if any(line in source for line in _HALF) else []))
        _gcc(f"-I{folder / 'runtime'}", *_COMMON, *flags, "-c", made / "emulated.cpp", "-o", made / "kernel.o")
        # Not by g++, which takes several times as long: what a kernel calls is in the process already, and the runtime
        # answers for the sanitizer's library.
        _tool("ld", "-shared", "-Bsymbolic", made / "kernel.o", _libgcc(), "-o", made / "kernel.so")
        (made / "kernel.o").unlink()

    digest = hashlib.sha256("\0".join((source, *build)).encode()).hexdigest()[:16]
    return _made_once(folder / f"{name}-{digest}", make) / "kernel.so"


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder that ``make`` fills, whole, once for all processes and sessions; meanwhile other processes wait."""
    import fcntl  # which Linux has

    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as made:
                whole = Path(made) / folder.name
                whole.mkdir()
                make(whole)
                whole.rename(folder)
        os.utime(folder)
    return folder


def _machine() -> str:
    """What else decides what g++ makes: its version, the processor (-march=native), options, the emulator's files."""
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    flags = re.search(r"^flags.*$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    parts = [version, flags[0] if flags else "", *_COMMON, *_KERNEL, *_QUICK]
    files = [_HERE / name for name in ("__init__.py", "cuda_shim.h", *_SOURCES)] + [KERNELS / "core/swizzle.cuh"]
    parts += [file.read_text(encoding="utf-8") for file in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _forget_old(current: Path) -> None:
    """Removes what no test has asked for in a week."""
    for folder in (*_CACHE.glob("*"), *current.glob("*-*")):
        with contextlib.suppress(OSError):
            if folder != current and time.time() - folder.stat().st_mtime > 7 * 86400:
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


class EmulatedKernel:
    """The kernel ``name`` of a CUDA C++ ``source``, compiled for the CPU (once; it is kept in build/emulator)."""

    def __init__(self, source: str, name: str) -> None:
        self.name, self._source = name, source
        self._program = _program(_compile(source, name))
        parameters = itertools.takewhile(lambda parameter: parameter.kind != b"\0", self._program.parameters)
        self._parameters = [(parameter.kind.decode(), parameter.size) for parameter in parameters]

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared_bytes: int,
        args: Sequence[Any],
        order: str | int = "forward",
        timeout: int = 60,
    ) -> None:
        """Runs the grid. Tensors are changed in place, and only if the launch succeeds.

        ``args``: CPU tensors of any strides (passed as a pointer whose alignment, up to 32 bytes, is ``data_ptr()``'s;
        the memory that the tensor spans is copied to guarded memory and back), None (a null pointer), Python, numpy and
        ctypes scalars, and ctypes structures. Blocks, and threads between two barriers, run in ``order``: "forward",
        "reversed", or shuffled by a seed. ``timeout`` is in seconds of processor time.

        Raises `EmulationError` for what the kernel does wrong; TypeError and ValueError for arguments and launch sizes.
        """
        grid, block = _three("grid", grid, MAX_GRID), _three("block", block, (MAX_THREADS, MAX_THREADS, 64))
        if np.prod(block) > MAX_THREADS:
            raise ValueError(f"block={block} has {np.prod(block)} threads; at most {MAX_THREADS} are allowed")
        if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
            raise ValueError(f"shared_bytes={shared_bytes} is not within 0..{MAX_SHARED_BYTES}")
        if len(args) != len(self._parameters):
            raise TypeError(f"{self.name} takes {len(self._parameters)} arguments, given {len(args)}")
        packed = (_Argument * len(args))()
        alive: list[Any] = []  # what packed points to
        spans: list[tuple[int, int]] = []
        for i, (arg, (kind, size)) in enumerate(zip(args, self._parameters)):
            try:
                if isinstance(arg, torch.Tensor) and kind == "p":
                    packed[i] = _Argument(arg.data_ptr(), _span_bytes(arg))
                    spans.append((arg.data_ptr(), arg.data_ptr() + packed[i].bytes))
                else:
                    alive.append(ctypes.create_string_buffer(size + _ARGUMENT_ALIGNMENT))
                    address = ctypes.addressof(alive[-1])
                    address += -address % _ARGUMENT_ALIGNMENT
                    ctypes.memmove(address, _value(arg, kind, size), size)
                    packed[i] = _Argument(address, -1)
            except (TypeError, struct.error) as error:
                raise TypeError(f"argument {i} of {self.name} ({_KINDS[kind]}, {size} bytes): {error}") from None
        spans.sort()
        if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
            raise ValueError("two tensors share memory; each is copied on its own, so pass separate ones")
        number = {"forward": -1, "reversed": -2}[order] if isinstance(order, str) else order
        three = ctypes.c_uint * 3
        launch = (three(*grid), three(*block), shared_bytes, number, packed, len(args), ctypes.c_long(timeout))
        _, run = _runtime()
        message = run(ctypes.byref(self._program), *launch)
        if message:  # so the tensors are as they were, and the same launch meets the same
            path = _compile(self._source, self.name, _EXPLAINING)
            message = run(ctypes.byref(_program(path)), *launch) or message
            line = functools.partial(self._line, path)
            raise EmulationError(f"{self.name}, " + re.sub(r"@(0x[0-9a-f]+)", line, message.decode()))

    def launch_in_every_order(
        self, grid: int | Sequence[int], block: int | Sequence[int], shared_bytes: int, args: Sequence[Any]
    ) -> None:
        """Launches in each of `ORDERS`, from the same tensors; raises `EmulationError` if results differ in a bit."""
        tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        before = {i: tensor.clone() for i, tensor in tensors.items()}
        results: dict[int, bytes] = {}
        for order in ORDERS:
            for i, tensor in tensors.items():
                tensor.copy_(before[i])
            self.launch(grid, block, shared_bytes, args, order)
            for i, tensor in tensors.items():
                result = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                if results.setdefault(i, result) != result:
                    raise EmulationError(f"{self.name} races: argument {i} depends on the order of threads ({order!r})")

    def _line(self, library: Path, address: re.Match[str]) -> str:
        """The kernel's line at an address in its library, and the lines of the calls that were inlined around it."""
        found = subprocess.run(["addr2line", "-i", "-e", library, address[1]], capture_output=True, text=True)
        line, *calls = re.findall(rf"\b{self.name}\.cu:(\d+)", found.stdout) or ["(line unknown)"]
        return f"{self.name}.cu:{line}" + (f" (called in {', '.join(calls)})" if calls else "")


def _program(library: Path) -> _Program:
    return _Program.in_dll(ctypes.PyDLL(str(library)), "emulated")


def _three(what: str, size: int | Sequence[int], limits: Sequence[int]) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    sizes += (1,) * (3 - len(sizes))
    if len(sizes) != 3 or not all(1 <= n <= limit for n, limit in zip(sizes, limits)):
        raise ValueError(f"{what}={size} must be one to three sizes, each from 1 to {tuple(limits)}")
    return sizes


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu":
        raise TypeError(f"given a tensor on {tensor.device}; the emulator takes CPU tensors")
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))) * tensor.element_size()


def _value(arg: Any, kind: str, size: int) -> bytes:
    """The bytes of an argument that is passed by value; the kernel's parameter must have the same kind and size."""
    if arg is None and kind == "p":
        return bytes(size)
    if isinstance(arg, np.generic):
        value, given = arg.tobytes(), {"b": "u", "V": "s"}.get(arg.dtype.kind, arg.dtype.kind)
        matches = given == kind or {given, kind} == {"i", "u"}
    elif isinstance(arg, (int, float)):
        value, matches = struct.pack(_SCALARS.get(f"{kind}{size}", ""), arg), f"{kind}{size}" in _SCALARS
    else:
        value, matches = bytes(arg), isinstance(arg, (ctypes._SimpleCData, ctypes.Structure, ctypes.Array))
    if not matches or len(value) != size:
        raise TypeError(f"given {type(arg).__name__}, {len(value)} bytes")
    return value
