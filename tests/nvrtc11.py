"""CUDA 11's run-time compiler, for what must compile with it: the wheel ``nvidia-cuda-nvrtc-cu11``, called as it is.

In a process of its own (``nvrtc11.py ARCH < SOURCE``): it changes the locale of the one it runs in.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

MISSING = "needs NVRTC of CUDA 11, the folder of which NVRTC_11 names (.ci/run installs it)"
LIBRARY = Path(os.environ.get("NVRTC_11", "none")) / "libnvrtc.so.11.2"


def available() -> bool:
    return LIBRARY.exists()


def compile_kernels(text: str, arch: str) -> None:
    """Compiles to a binary; fails with the compiler's log."""
    done = subprocess.run([sys.executable, __file__, arch], input=text.encode(), capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def main(arch: str) -> int:
    for builtins in LIBRARY.parent.glob("libnvrtc-builtins.so.11*"):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    nvrtc, program, size = ctypes.CDLL(str(LIBRARY)), ctypes.c_void_p(), ctypes.c_size_t()
    status: int = nvrtc.nvrtcCreateProgram(ctypes.byref(program), sys.stdin.buffer.read(), b"emitted.cu", 0, None, None)
    options = (ctypes.c_char_p * 2)(b"--std=c++17", f"--gpu-architecture={arch}".encode())
    status = status or nvrtc.nvrtcCompileProgram(program, len(options), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    sys.stdout.buffer.write(log.value)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
