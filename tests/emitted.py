"""Runs what `polyphase.emit` writes: the text as a module, its kernels in the emulator instead of by nvcc."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

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
