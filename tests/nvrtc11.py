"""CUDA 11's run-time compiler, for what must compile with it: the wheel ``nvidia-cuda-nvrtc-cu11``, called as it is."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

MISSING = "needs NVRTC of CUDA 11, the folder of which NVRTC_11 names (.ci/run installs it)"


@functools.cache
def library() -> Any:
    """The library, or None where it is not installed."""
    folder = Path(os.environ.get("NVRTC_11", "none"))
    if not (folder / "libnvrtc.so.11.2").exists():
        return None
    for builtins in folder.glob("libnvrtc-builtins.so.11*"):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.11.2"))


def compile_kernels(text: str, arch: str) -> None:
    """Compiles to a binary; fails with the compiler's log."""
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"emitted.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(b"--std=c++17", f"--gpu-architecture={arch}".encode())
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()
