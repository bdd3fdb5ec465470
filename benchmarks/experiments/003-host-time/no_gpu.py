"""polyphase's CUDA path on the host's memory and a driver that does nothing (`driver.c`): the host's work of a call.

Tensors are on a device of their own (`threaded_device.cpp`), so that backward runs in a thread of PyTorch's engine.

Import this before polyphase, in a process that `restart_with_driver` has started.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_HERE = Path(__file__).parent


def restart_with_driver() -> None:
    """Starts this process again with the driver in its library path; returns in the process that has it."""
    if "POLYPHASE_NO_GPU" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="polyphase-driver-")
    library = f"{folder}/libcuda.so.1"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-w", _HERE / "driver.c", "-o", library], check=True)
    environment = {**os.environ, "POLYPHASE_NO_GPU": library, "LD_LIBRARY_PATH": folder}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


class _CpuForCuda(importlib.abc.MetaPathFinder):
    """Modules of polyphase whose text asks for CUDA tensors: for any but CPU's instead, a look-up as cheap."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith("polyphase."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name: str) -> Any:
        text = Path(self.path).read_text(encoding="utf-8")
        for tensor in ("first", "second", "input"):
            text = text.replace(f"{tensor}.is_cuda", f"(not {tensor}.is_cpu)")
        return compile(text, self.path, "exec")


def _threaded_device() -> Any:
    """The module of `threaded_device.cpp`, which makes the device known."""
    home, folder = Path(torch.__file__).parent, Path(os.environ["POLYPHASE_NO_GPU"]).parent
    library = folder / "threaded_device.so"
    if not library.exists():
        command = ["c++", "-O2", "-std=c++20", "-shared", "-fPIC", "-w", _HERE / "threaded_device.cpp", "-o", library]
        includes = [f"{home}/include", f"{home}/include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        libraries = [f"-L{home}/lib", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        subprocess.run([*command, *(f"-I{each}" for each in includes), *libraries], check=True)
    sys.path.append(str(folder))
    device = ModuleType("torch.threaded")
    device.__dict__.update(_is_in_bad_fork=bool, _lazy_init=bool, is_available=(1).__bool__, current_device=(0).__int__)
    module = importlib.import_module("threaded_device")
    torch._register_device_module("threaded", device)
    return module


def pretend() -> ctypes.CDLL:
    """Has polyphase take tensors on "threaded" to be on an H100's kind; the driver that counts launches."""
    threaded = _threaded_device()
    sys.meta_path.insert(0, _CpuForCuda())
    torch.version.cuda = "13.0"
    # Built-in functions, as PyTorch's are: the device is 0, and so is the stream.
    torch._C._cuda_getDevice = (0).__int__
    torch._C._cuda_getCurrentRawStream = (0).__mul__
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False

    from polyphase import runtime
    from polyphase.jit import launcher
    from polyphase.problem.device import DeviceInfo

    device = DeviceInfo.for_arch("sm_90a")
    runtime.empty_on_cpu = threaded.empty_strided  # type: ignore[attr-defined]
    runtime.DeviceInfo = SimpleNamespace(of=lambda _: device)  # type: ignore[assignment,misc]
    runtime.compile_meanwhile = lambda *_: None  # type: ignore[assignment]
    launcher._load = lambda *_: SimpleNamespace(handle=1)  # type: ignore[assignment]
    launcher._compile_in_thread = lambda *_: None  # type: ignore[assignment]
    launcher.cuda_core = lambda: SimpleNamespace(  # type: ignore[assignment]
        Device=lambda index: SimpleNamespace(set_current=lambda: None)
    )
    return ctypes.CDLL(os.environ["POLYPHASE_NO_GPU"])
