"""Runs what `polyphase.emit` writes: the text as a module, its kernels in the emulator instead of by nvcc."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths

from emulator import EmulatedKernel, assembled
from kernel_harness import tensor_map
from polyphase.emit import file as emit_file
from polyphase.emit.model import Model, model_of_file, model_of_layer
from polyphase.problem.device import DeviceInfo
from polyphase.program.tensor_map import TENSOR_MAP_BYTES, TensorMap

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
ARCHS = ("sm_80", "sm_90a", "sm_100a")
ON_ALL = ("grouped_strided", "square_stride1")


#: A layer whose pixels come in boxes on sm_90a.
BY_BOXES = "3x32x9x11 -> 16, k=4, s=2, p=1, channels_last, bfloat16, bias"

#: Layers whose passes read float16 copies on sm_90a, with kernels that replace inexact ones.
FROM_HALVES = (
    "3x256x9x11 -> 128, k=4, s=2, p=1, tf32",
    "3x256x9x11 -> 128, k=4, s=2, p=1, tf32, channels_last",
)

#: Layers that meet every schedule, dimension and memory format.
LAYERS = (
    "2x16x9x8 -> 16, k=3, s=2, p=1, bias",
    "3x8x40 -> 6, k=5, s=3, d=2, g=2",
    "1x4x5x4x6 -> 5, k=2x3x2, s=2x1x2, op=1x0x1, bias",
    "2x16x7x9 -> 32, k=3, bfloat16, bias",
    "2x12x8x8 -> 16, k=4, s=2, p=1, channels_last, float16",
    "2x3x6x5 -> 2, k=3, float64",
    "1x1x30 -> 1, k=2000, s=500",
    BY_BOXES,
    *FROM_HALVES,
)

TWO_LAYERS = '''
# A licence.
"""A model of several layers: its text takes names of the package's, and a word that KernelBench forbids: pass."""
from __future__ import annotations
import torch
import torch.nn as nn
from torch.nn import Module as Layer

def Side(channels: int) -> Layer:
    """The transposed convolution that makes the first step, and the last: try: except it."""
    return params_of(nn.ConvTranspose2d(channels, 4, 2, stride=2))

def params_of(layer: Layer) -> Layer:
    return layer

class Model(nn.Module):
    def __init__(self, channels: int | None = 3) -> None:
        super(Model, self).__init__()
        last = nn.ConvTranspose2d(4, 5, (3, 1), padding=(1, 0), bias=False)
        self.body = nn.Sequential(Side(channels), nn.ReLU(), last)
        self.again = Side(channels)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.again(x).sum(1, keepdim=True)

def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(2, 3, 6, 7)]

def get_init_inputs() -> list[int]:
    return []
'''


@functools.cache
def emitted(name: str) -> str:
    """What is emitted for one of `LAYERS` or `EXAMPLES`, or for `TWO_LAYERS`, on `ARCHS` or the first two of them."""
    if name in LAYERS:
        return emitted_layer(name, *ARCHS[:2])
    if name in EXAMPLES:
        return emitted_file(EXAMPLES[name], *(ARCHS if name in ON_ALL else ARCHS[:2]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "two_layers.py"
        path.write_text(TWO_LAYERS)
        return emitted_file(path, *ARCHS[:2])


def emitted_layer(layer: str, *archs: str) -> str:
    return _text(model_of_layer(layer, None, True), archs, "A layer")


def emitted_file(path: Path, *archs: str) -> str:
    return _text(model_of_file(path, "float32", True), archs, path.name)


def as_planned(patch: pytest.MonkeyPatch) -> None:
    """Kernels are emitted for as many resident blocks as the planner hopes for.

    How many leave no register spilled takes the compiler half of the time. Some of the command line's tests ask it.
    """
    patch.setattr(emit_file, "settled", lambda source, arch: source)


def _text(model: Model, archs: Sequence[str], title: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        as_planned(patch)
        return emit_file.emit(model, [DeviceInfo.for_arch(arch) for arch in archs], title, "this test").text


def names() -> list[str]:
    """All that `emitted` takes."""
    return [*LAYERS, *EXAMPLES, "two layers"]


def load(text: str, name: str = "emitted_file") -> ModuleType:
    """The text as a module. KernelBench executes it behind lines of its own, so this does too."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile("import os\n" + text, f"{name}.py", "exec", dont_inherit=True), module.__dict__)
    return module


def compile_by_nvcc(module: Any, arch: str, folder: Path) -> None:
    """The whole CUDA source, in nvcc's passes for the device and for the host, without a warning."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    source = folder / "emitted.cu"
    source.write_text(module.cuda_source(arch), encoding="utf-8")
    flags = ["-std=c++17", f"-gencode=arch=compute_{arch[3:]},code={arch}", "-c", "-o", str(folder / "emitted.o")]
    done = subprocess.run(["nvcc", *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr


class Extension:
    """What `build` would return, for tensors on the CPU."""

    def __init__(self, module: Any, arch: str) -> None:
        self.kernels = module.KERNELS[arch]
        self.files = module.FILES
        self.launches: list[str] = []
        self.boxes: list[TensorMap] = []

    def launch(
        self,
        number: int,
        geometry: bytes,
        boxes: bytes,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        block: int,
        shared_bytes: int,
        tensors: Sequence[Tensor | None],
    ) -> None:
        name, generated, files = self.kernels[number]
        self.launches.append(name)
        kernel = EmulatedKernel(assembled(files, {**self.files, **generated}), name)
        for *packed, place in struct.iter_unpack(BOXES, boxes):
            self.boxes.append(unpacked_tensor_map(packed))
            tensor = tensors[self.boxes[-1].tensor]
            assert tensor is not None
            assert tensor.data_ptr() % 16 == 0
            geometry = geometry[:place] + tensor_map(self.boxes[-1]) + geometry[place + TENSOR_MAP_BYTES :]
        sizes = (ctypes.c_ubyte * len(geometry)).from_buffer_copy(geometry)
        apart = _apart(tensors)
        parameters = [*apart, sizes] if geometry else apart
        kernel.launch((grid_x, grid_y, grid_z), block, shared_bytes, parameters)


def _apart(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same, but a tensor that is read in two places is a copy in the latter: the emulator takes each on its own."""
    seen: set[int] = set()
    found: list[Tensor | None] = []
    for tensor in tensors:
        again = tensor is not None and tensor.numel() > 0 and tensor.data_ptr() in seen
        found.append(tensor.clone() if again and tensor is not None else tensor)
        if tensor is not None:
            seen.add(tensor.data_ptr())
    return found


BOXES = "<9Q14I"


def unpacked_tensor_map(numbers: Sequence[int]) -> TensorMap:
    """What binding.cpp is told of boxes, but for the place of their tensor map."""
    *dimensions, kind, swizzle, tensor = numbers
    sizes, strides, spans, steps = dimensions[:5], dimensions[5:9], dimensions[9:14], dimensions[14:]
    dtype = {6: "float16", 7: "float32", 9: "bfloat16", 11: "float32"}[kind]
    box = ((span - 1) // step + 1 for span, step in zip(spans, steps))
    return TensorMap(dtype, *map(tuple, (sizes, strides, box)), 16 << swizzle, kind == 11, tensor, tuple(steps))


def on_the_emulator(module: Any, arch: str) -> Extension:
    """Makes the module take the CPU for a GPU of ``arch``."""
    extension = Extension(module, arch)
    module.build = lambda _: extension
    module.arch_of = lambda _: arch
    module.check = lambda *_: None
    module.DeviceInfo.of = staticmethod(lambda _: DeviceInfo.for_arch(arch))
    module.torch = _Torch()
    return extension


# What binding.cpp takes from CUDA and PyTorch's CUDA part, for tensors on the CPU. CUDA 11 knows no tensor maps.
_STUBS = {
    "cuda_runtime.h": """
#pragma once
typedef int cudaError_t;
typedef void* cudaStream_t;
struct dim3 { unsigned x, y, z; dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
enum { cudaEnableDefault };
inline int devices_set = 0;
inline cudaError_t cudaSetDevice(int) { return ++devices_set, 0; }
extern void* cuTensorMapEncodeTiled;
#if CUDART_VERSION >= 13000
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long) {
  *found = name == std::string("cuTensorMapEncodeTiled") ? cuTensorMapEncodeTiled : nullptr;
  return 0;
}
#else
inline cudaError_t cudaGetDriverEntryPoint(const char*, void**, unsigned long long) { return 500; }
#endif
""",
    "c10/cuda/CUDAException.h": '#define C10_CUDA_CHECK(status) TORCH_CHECK((status) == 0, "CUDA error ", (status))\n',
    "c10/cuda/CUDAGuard.h": "namespace c10::cuda { struct CUDAGuard { CUDAGuard(c10::Device) {} }; }\n",
    "c10/cuda/CUDAStream.h": "namespace c10::cuda { inline void* getCurrentCUDAStream() { return (void*)7; } }\n",
}
_MAIN = """
// Of torch/extension.h all that it needs, in a third of the time.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#define is_cuda is_cpu
#include "binding.cpp"
// Kernel 1 has room for a tensor map.
std::size_t pointers_of(std::size_t number) { return number; }
std::size_t geometry_bytes_of(std::size_t number) { return number == 1 ? 196 : 4; }
std::vector<int64_t> launched, encoded;
std::string geometry;
cudaError_t launch_kernel(std::size_t number, dim3 grid, dim3 block, std::size_t shared_bytes, void** arguments,
                          cudaStream_t stream) {
  launched = {(int64_t)number, grid.x, grid.y, grid.z, block.x, block.y, block.z};
  launched.insert(launched.end(), {(int64_t)shared_bytes, (int64_t)stream});
  for (std::size_t i = 0; i < number; ++i) launched.push_back(*(int64_t*)arguments[i]);
  geometry.assign((char*)arguments[number], geometry_bytes_of(number));
  return shared_bytes == 13 ? 1 : 0;
}
// The driver's; it refuses a swizzle of 4.
int encode_tiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                 const unsigned* box, const unsigned* steps, int interleave, int swizzle, int promotion, int fill) {
  encoded = {devices_set, (int64_t)map % 64, type, rank, (int64_t)address};
  encoded.insert(encoded.end(), sizes, sizes + rank);
  encoded.insert(encoded.end(), strides, strides + rank - 1);
  encoded.insert(encoded.end(), box, box + rank);
  encoded.insert(encoded.end(), steps, steps + rank);
  encoded.insert(encoded.end(), {interleave, swizzle, promotion, fill});
  memset(map, 'm', 128);
  return swizzle == 4;
}
void* cuTensorMapEncodeTiled = (void*)encode_tiled;
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("launch", torch::wrap_pybind_function(launch), "launch");
  m.def("launched", [] { return launched; });
  m.def("encoded", [] { return encoded; });
  m.def("params", [] { return py::bytes(geometry); });
}
"""


def binding_on_the_cpu(text: str, folder: Path, cuda: int) -> Any:
    """binding.cpp as PyTorch builds it, on a driver that notes what it is asked for; ``cuda`` is CUDART_VERSION."""
    for name, stub in {**_STUBS, "binding.cpp": text, "main.cpp": _MAIN}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(stub, encoding="utf-8")
    paths = [folder, *include_paths(), sysconfig.get_path("include")]
    name = f"emitted_binding_{cuda}"
    library = folder / f"{name}.so"
    command = ["g++", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={name}", f"-DCUDART_VERSION={cuda}"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{path}" for path in paths)]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    subprocess.run([*command, str(folder / "main.cpp"), *libraries, "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location(name, library)
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
