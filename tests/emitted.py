"""Runs what `polyphase.emit` writes: the text as a module, its kernels in the emulator instead of by nvcc."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths

from emulator import EmulatedKernel
from polyphase.device import DeviceInfo


def load(text: str, name: str = "emitted_file") -> ModuleType:
    """The text as a module. KernelBench executes it behind lines of its own, so this does too."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile("import os\n" + text, f"{name}.py", "exec", dont_inherit=True), module.__dict__)
    return module


class Extension:
    """What `build` would return, for tensors on the CPU."""

    def __init__(self, module: Any, arch: str) -> None:
        self.kernels = module.KERNELS[arch]
        self.files = module.FILES
        self.shared = module.SHARED_FILES
        self.launches: list[str] = []

    def launch(
        self,
        number: int,
        geometry: bytes,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        block: int,
        shared_bytes: int,
        tensors: Sequence[Tensor | None],
    ) -> None:
        name, specialisation, files = self.kernels[number]
        self.launches.append(name)
        texts = [self.files[file] for file in self.shared], [self.files[file] for file in files]
        kernel = EmulatedKernel("\n".join([*texts[0], specialisation, *texts[1]]), name)
        value: Any = (ctypes.c_ubyte * len(geometry)).from_buffer_copy(geometry)
        if name == "pack_weights":  # its last parameter is a number
            value = int.from_bytes(geometry, "little", signed=True)
        kernel.launch((grid_x, grid_y, grid_z), block, shared_bytes, [*tensors, value])


def on_the_emulator(module: Any, arch: str) -> Extension:
    """Makes the module take the CPU for a GPU of ``arch``."""
    extension = Extension(module, arch)
    module.build = lambda _: extension
    module.arch_of = lambda _: arch
    module.check = lambda *_: None
    module.DeviceInfo.of = staticmethod(lambda _: DeviceInfo.for_arch(arch))
    module.torch = _Torch()
    return extension


# What binding.cpp takes from CUDA and PyTorch's CUDA part, for tensors on the CPU.
_STUBS = {
    "cuda_runtime.h": """
#pragma once
typedef int cudaError_t;
typedef void* cudaStream_t;
struct dim3 { unsigned x, y, z; dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
""",
    "c10/cuda/CUDAException.h": '#define C10_CUDA_CHECK(status) TORCH_CHECK((status) == 0, "CUDA error ", (status))\n',
    "c10/cuda/CUDAGuard.h": "namespace c10::cuda { struct CUDAGuard { CUDAGuard(c10::Device) {} }; }\n",
    "c10/cuda/CUDAStream.h": "namespace c10::cuda { inline void* getCurrentCUDAStream() { return (void*)7; } }\n",
}
_MAIN = """
#include <torch/extension.h>
#define is_cuda is_cpu
#include "binding.cpp"
std::size_t pointers_of(std::size_t number) { return number; }
std::size_t geometry_bytes_of(std::size_t number) { return 4; }
std::vector<int64_t> launched;
cudaError_t launch_kernel(std::size_t number, dim3 grid, dim3 block, std::size_t shared_bytes, void** arguments,
                          cudaStream_t stream) {
  launched = {(int64_t)number, grid.x, grid.y, grid.z, block.x, block.y, block.z};
  launched.insert(launched.end(), {(int64_t)shared_bytes, (int64_t)stream});
  for (std::size_t i = 0; i < number; ++i) launched.push_back(*(int64_t*)arguments[i]);
  launched.push_back(*(int*)arguments[number]);
  return shared_bytes == 13 ? 1 : 0;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("launch", torch::wrap_pybind_function(launch), "launch");
  m.def("launched", [] { return launched; });
}
"""


def binding_on_the_cpu(text: str, folder: Path) -> Any:
    """binding.cpp as PyTorch builds it, on a driver that notes what it is asked to launch."""
    for name, stub in {**_STUBS, "binding.cpp": text, "main.cpp": _MAIN}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(stub, encoding="utf-8")
    paths = [folder, *include_paths(), sysconfig.get_path("include")]
    library = folder / "emitted_binding.so"
    command = ["g++", "-std=c++20", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=emitted_binding"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{path}" for path in paths)]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    subprocess.run([*command, str(folder / "main.cpp"), *libraries, "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location("emitted_binding", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Torch:
    """torch, whose new tensors start at addresses as aligned as those of a GPU, and hold NaN."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(shape: Any, dtype: torch.dtype, device: Any, **options: Any) -> Tensor:
        plain = torch.empty(shape, dtype=dtype, **options)
        room = torch.full((plain.numel() * plain.element_size() + 64,), 0xFF, dtype=torch.uint8)
        skip = -room.data_ptr() % 32
        flat = room[skip : skip + plain.numel() * plain.element_size()].view(dtype)
        return flat.as_strided(plain.shape, plain.stride())
