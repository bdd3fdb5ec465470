"""What an emitted file does when it runs: it builds its kernels, launches them, and takes over its model's layers.

`polyphase.emit.file` copies this module into every file that it writes, with what it uses of the package. So it keeps
to Python 3.8 and PyTorch 1.13, catches nothing, and its functions import nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

from polyphase.errors import UnsupportedError
from polyphase.jit.source import SPECIALISATION, KernelSource
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import NONE, Epilogue
from polyphase.problem.layouts import ALIGNMENT, Layouts
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, GRAD, SRC, WEIGHT, Step, X
from polyphase.program.struct_layout import Struct
from polyphase.program.tensor_map import TensorMap
from polyphase.schedules.schedule import Schedule


@dataclass(frozen=True)
class Choice:
    """What computes a pass: a schedule, its config, and whether it rounds to TF32."""

    schedule: Schedule
    config: Any
    tf32: bool


@dataclass(frozen=True)
class Layer:
    """A layer as it was emitted: at the size of the model's inputs, with a choice by architecture and pass."""

    problem: ConvTransposeProblem
    choices: dict[str, dict[Pass, Choice]]

    def sized(
        self, input_shape: tuple[int, ...], output_padding: tuple[int, ...], pass_: Pass, arch: str
    ) -> ConvTransposeProblem:
        """A pass at another size, which rounds to TF32 where it does at the size of the model's inputs."""
        problem = replace(
            self.problem, batch=input_shape[0], input_size=tuple(input_shape[2:]), output_padding=output_padding
        )
        tf32 = self.choices[arch][pass_].tf32
        return replace(problem.of_pass(pass_), tf32=tf32, tf32_as_pytorch=tf32 and problem.tf32_as_pytorch)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, arch: str, device: DeviceInfo, layouts: Layouts
    ) -> Program:
        """What computes a pass of the layer at the size of ``problem``."""
        choice = self.choices[arch][pass_]
        program: Program = choice.schedule.program(problem, pass_, device, layouts, choice.config)
        return program


# Filled in when a file is emitted.
FILES: dict[str, str] = {}  # CUDA, by path
# By architecture: each kernel's name, the files that are generated for it, and the paths of all its files in order.
KERNELS: dict[str, list[tuple[str, dict[str, str], tuple[str, ...]]]] = {}
BINDING = LAUNCHER = ""
# By architecture, epilogue and prologue of the kernels that have any, by their number.
OPERATIONS: dict[str, dict[int, tuple[Epilogue, Epilogue]]] = {}
STRUCTS: dict[str, Struct] = {}  # the kernels' last parameters, by the kernel's name
LAYERS: list[Layer] = []
CLASSES: dict[type, type] = {}  # PyTorch's modules, to those that take their place


# The kernels: built once for each architecture, by nvcc.


def cuda_source(arch: str) -> str:
    """The kernels for one architecture as one CUDA file, each in a namespace of its own."""
    parts = ["namespace polyphase {"]
    entries = []
    for number, (name, generated, files) in enumerate(KERNELS[arch]):
        text = "\n".join(generated.get(file, FILES.get(file, "")) for file in files)
        text = text.replace('extern "C" __global__', "__global__")  # a C name has no namespace
        macros = dict.fromkeys(re.findall(r"^#define (\w+)", text, re.MULTILINE))
        parts += [f"namespace kernel_{number} {{", text, "}", *(f"#undef {macro}" for macro in macros)]
        entries.append(f"entry(polyphase::kernel_{number}::{name})")
    return "\n".join([*parts, "}", "#define POLYPHASE_KERNELS " + ", ".join(entries), LAUNCHER])


@lru_cache(maxsize=8)
def build(arch: str) -> Any:
    """The extension module for one architecture. Takes a minute the first time; PyTorch keeps what it has built."""
    source = cuda_source(arch)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    standard = ["-std=c++17"] if version < (2, 1) else []  # the default later on
    # Only by this variable will every PyTorch build for one architecture and no other, which could not have its
    # instructions.
    before = os.environ.get("TORCH_CUDA_ARCH_LIST")
    major, minor = re.fullmatch(r"sm_(\d+)(\d[af]?)", arch).groups()  # type: ignore[union-attr]
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    extension = load_inline(
        name="polyphase_" + hashlib.sha256((arch + BINDING + source).encode()).hexdigest()[:16],
        cpp_sources=[BINDING],
        cuda_sources=[source.encode("ascii", "replace").decode()],  # written in the locale's encoding, whatever it is
        functions=["launch"],
        extra_cflags=[*standard],
        extra_cuda_cflags=[*standard],
    )
    del os.environ["TORCH_CUDA_ARCH_LIST"]
    os.environ.update({} if before is None else {"TORCH_CUDA_ARCH_LIST": before})
    return extension


def arch_of(device: torch.device) -> str:
    """The architecture of a GPU. Raises `UnsupportedError` where this file has no kernels for it."""
    major, minor = torch.cuda.get_device_capability(device)
    for arch in KERNELS:
        if arch.rstrip("af") == f"sm_{major}{minor}":
            return arch
    raise UnsupportedError(
        f"this file has kernels for {', '.join(KERNELS)}, and {device} is sm_{major}{minor}: emit it again with --arch"
    )


def kernel_number(arch: str, source: KernelSource) -> int:
    """Which kernel of the file ``source`` is. Raises `UnsupportedError` if there is none."""
    number = find_kernel(arch, source)
    if number is None:
        raise UnsupportedError(
            f"this file has no {source.kernel} for tensors of this size"
            + (", whose offsets take more than 32 bits" if source.wide_offsets else "")
            + ": emit it again for inputs as large"
        )
    return number


def find_kernel(arch: str, source: KernelSource) -> int | None:
    """Which kernel of the file ``source`` is, except for constants that the compiler settled; None if there is none."""
    settled = source.settled_constants

    def significant(text: str) -> list[str]:
        return [line for line in text.splitlines() if line and not any(f" {name} =" in line for name in settled)]

    wanted = significant(source.specialisation)
    for number, (name, generated, _) in enumerate(KERNELS[arch]):
        operations = OPERATIONS[arch].get(number, (NONE, NONE))
        same = name == source.kernel and operations == (source.epilogue, source.prologue)
        if same and significant(generated[SPECIALISATION]) == wanted:
            return number
    return None


def params_of(source: KernelSource) -> Struct:
    """What a kernel takes as its last parameter. Raises `UnsupportedError` for one that is not in this file."""
    if source.kernel not in STRUCTS:
        raise UnsupportedError(f"this file has no {source.kernel}, which tensors of this size need: emit it for them")
    return STRUCTS[source.kernel]


# Calls: what is launched depends on the sizes of a call, and is remembered.


@dataclass(frozen=True)
class Call:
    """A prepared call: the steps of a program, each as what the extension's ``launch`` takes before the tensors, and
    the names of the buffers that are its tensors.

    ``copies``: the tensors are copied, so that they are aligned. ``shape`` is the result's as it lies in memory.
    """

    extension: Any
    copies: bool
    steps: list[tuple[tuple[Any, ...], tuple[str, ...]]]
    buffers: list[tuple[str, int, torch.dtype]]
    shape: tuple[int, ...]
    memory_format: torch.memory_format
    channels_last: bool


_calls: dict[tuple[Any, ...], Call] = {}
MOST_CALLS = 4096


def prepare(
    pass_: Pass,
    layer: Layer,
    input_shape: tuple[int, ...],
    output_padding: tuple[int, ...],
    device: torch.device,
    aligned: bool,
) -> Call:
    """What a call of these sizes launches, as the package itself decides it."""
    arch = arch_of(device)
    problem = layer.sized(input_shape, output_padding, pass_, arch)

    def program_on(aligned: bool) -> Program:
        layouts = replace(Layouts.of_call(problem, pass_), aligned=aligned)
        return layer.program(problem, pass_, arch, DeviceInfo.of(device), layouts)

    program = program_on(aligned=True)
    copies = not aligned and bool(program.main.tensor_maps)  # whose tensors must be aligned
    if not aligned and not copies:
        other = program_on(aligned=False)
        copies = other.main.source != program.main.source  # the kernel for others is not in this file
        program = program if copies else other
    shape = {
        Pass.FORWARD: problem.output_shape,
        Pass.INPUT_GRAD: problem.input_shape,
        Pass.WEIGHT_GRAD: problem.weight_shape,
    }[pass_]
    if program.dst_channels_last:
        shape = (shape[0], *shape[2:], shape[1])
    dense = torch.contiguous_format if pass_ is Pass.WEIGHT_GRAD else memory_format(problem)
    return replace(call_of(arch, program, shape, dense), copies=copies)


def call_of(arch: str, program: Program, shape: tuple[int, ...], dense: torch.memory_format) -> Call:
    """The call that runs a program, which gives a result of that ``shape``."""
    return Call(
        extension=build(arch),
        copies=False,
        steps=[(arguments(arch, step), step.operands) for step in program.steps],
        buffers=[(each.name, each.elements, getattr(torch, each.dtype)) for each in program.buffers],
        shape=shape,
        memory_format=dense,
        channels_last=program.dst_channels_last,
    )


def arguments(arch: str, step: Step) -> tuple[Any, ...]:
    """What the extension's ``launch`` takes before the tensors."""
    number, places = kernel_number(arch, step.source), params_of(step.source).tensor_maps
    tensor_maps = b"".join(packed_tensor_map(each, places[i]) for i, each in enumerate(step.tensor_maps))
    return (number, step.params, tensor_maps, *step.grid, step.block, step.shared_bytes)


# How the driver numbers what it makes tensor maps of, and the bytes within which chunks change places.
_DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "tf32": 11}
_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}


def packed_tensor_map(tensor_map: TensorMap, place: int) -> bytes:
    """``TensorMap`` of binding.cpp, whose tensor map lies ``place`` bytes into the kernel's last parameter."""
    kind = _DATA_TYPES[tensor_map.element], _SWIZZLES[tensor_map.swizzle]
    numbers = *tensor_map.sizes, *tensor_map.strides, *tensor_map.spans, *tensor_map.steps
    return struct.pack("<9Q14I", *numbers, *kind, tensor_map.tensor, place)


def memory_format(problem: ConvTransposeProblem) -> torch.memory_format:
    """The format of the tensors that the layer's kernels take and give."""
    if not problem.of_pass(Pass.FORWARD).channels_last:
        return torch.contiguous_format
    return torch.channels_last if problem.dims == 2 else torch.channels_last_3d


def run(
    pass_: Pass,
    number: int,
    input_shape: tuple[int, ...],
    output_padding: tuple[int, ...],
    first: torch.Tensor,
    second: torch.Tensor,
    bias: torch.Tensor | None = None,
    operands: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """One computation of layer ``number`` from two of input, weight and gradient of the output.

    ``operands``: what its epilogue reads, by name, residuals as the result lies. Gradients may come as partial sums, of
    the weight of parts of the input, which are added in a fixed order.
    """
    read = first.data_ptr() if pass_ is Pass.FORWARD else first.data_ptr() | second.data_ptr()  # as it is
    aligned = read % ALIGNMENT == 0
    key = (pass_, number, input_shape, output_padding, first.device, aligned)
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        call = _calls[key] = prepare(pass_, LAYERS[number], input_shape, output_padding, first.device, aligned)
    if call.copies:
        first, second = first.clone(), second.clone()
    tensors = {SRC: first, X: first, WEIGHT: second, GRAD: second, BIAS: bias, **(operands or {})}
    result = execute(call, tensors, first)
    return result.movedim(-1, 1) if call.channels_last else result


def execute(call: Call, given: dict[str, torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """The result of a call on tensors by name, of the dtype and on the device of ``like``."""
    result = torch.empty(call.shape, dtype=like.dtype, device=like.device, memory_format=call.memory_format)
    tensors = {**given, DST: result}
    for name, elements, dtype in call.buffers:
        tensors[name] = torch.empty(elements, dtype=dtype, device=like.device)
    for arguments, read_and_written in call.steps:
        if 0 not in arguments[3:6]:  # a grid without blocks
            call.extension.launch(*arguments, [tensors[name] for name in read_and_written])
    return result


# PyTorch's side: derivatives, and modules.


class KernelFunction(torch.autograd.Function):
    """The layer and its first derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        number: int,
        output_padding: tuple[int, ...],
    ) -> torch.Tensor:
        """The output, ``(N, C_out, *spatial)``."""
        dense = memory_format(LAYERS[number].problem)
        input, weight = input.contiguous(memory_format=dense), weight.contiguous(memory_format=dense)
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(input, weight)
        ctx.number, ctx.output_padding = number, output_padding
        return run(Pass.FORWARD, number, tuple(input.shape), output_padding, input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The gradients of input, weight and bias, those that are needed."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the kernels of this file give only first derivatives, and create_graph=True needs more"
            )
        input, weight = ctx.saved_tensors
        constants = (ctx.number, tuple(input.shape), ctx.output_padding)
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad = grad.contiguous(memory_format=memory_format(LAYERS[ctx.number].problem))
        return (
            run(Pass.INPUT_GRAD, *constants, grad, weight) if for_input else None,
            run(Pass.WEIGHT_GRAD, *constants, input, grad) if for_weight else None,
            grad.sum([0, *range(2, grad.dim())]) if for_bias else None,
            None,
            None,
        )


def check(module: Any, input: torch.Tensor, problem: ConvTransposeProblem) -> None:
    """Raises `UnsupportedError` for a device or dtype that has no kernels here, RuntimeError for shapes."""
    wanted = getattr(torch, problem.dtype)
    for role, tensor in (("input", input), ("weight", module.weight), ("bias", module.bias)):
        if tensor is None:
            continue
        if tensor.device.type != "cuda":
            raise UnsupportedError(
                f"the {role} is on {tensor.device}: the kernels of this file run only on CUDA devices; "
                "move model and inputs to one, as with .cuda()"
            )
        if tensor.device != input.device:
            raise RuntimeError(f"input and {role} must be on one device, got {input.device} and {tensor.device}")
        if tensor.dtype != wanted:
            raise UnsupportedError(
                f"the {role} is {tensor.dtype}: the kernels of this file take {wanted}; convert model and inputs, as "
                f"with .to({wanted}), or emit the file again with --dtype"
            )
    shape = tuple(input.shape)
    if input.dim() != problem.dims + 2 or shape[1] != problem.in_channels or 0 in shape[2:]:
        raise RuntimeError(
            f"expected an input (N, {problem.in_channels}, *spatial) with {problem.dims} spatial sizes of at least 1, "
            f"or one without N; got shape {shape}"
        )


def forward_of(module: Any, input: torch.Tensor, output_size: Any) -> torch.Tensor:
    """The forward method of the modules below."""
    problem = LAYERS[module.emitted_layer].problem
    batch = input if input.dim() != problem.dims + 1 else input.unsqueeze(0)
    check(module, batch, problem)
    extra = module.output_padding
    if output_size is not None:
        extra = module._output_padding(
            input, list(output_size), module.stride, module.padding, module.kernel_size, problem.dims, module.dilation
        )
    size = [axis.output_size(n, more) for axis, n, more in zip(problem.axes, batch.shape[2:], extra)]
    if min(size) < 1:
        raise RuntimeError(f"the output would have size {tuple(size)}, and every size must be at least 1")
    apply: Any = KernelFunction.apply
    output: torch.Tensor = apply(batch, module.weight, module.bias, module.emitted_layer, tuple(extra))
    return output if batch is input else output.squeeze(0)


class ConvTranspose1d(nn.ConvTranspose1d):
    """PyTorch's module on the kernels of this file."""

    def forward(self, input: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        """``(N, C_in, L)`` or ``(C_in, L)`` to ``(N, C_out, L_out)`` or ``(C_out, L_out)``."""
        return forward_of(self, input, output_size)


class ConvTranspose2d(nn.ConvTranspose2d):
    """PyTorch's module on the kernels of this file."""

    def forward(self, input: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        """``(N, C_in, H, W)`` or ``(C_in, H, W)`` to ``(N, C_out, H_out, W_out)`` or without ``N``."""
        return forward_of(self, input, output_size)


class ConvTranspose3d(nn.ConvTranspose3d):
    """PyTorch's module on the kernels of this file."""

    def forward(self, input: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        """``(N, C_in, D, H, W)`` or ``(C_in, D, H, W)`` to ``(N, C_out, D_out, H_out, W_out)`` or without ``N``."""
        return forward_of(self, input, output_size)


def constants(layer: Any) -> tuple[Any, ...]:
    """What a layer's kernels are made for; of a module, or of a problem."""
    return (
        *(layer.in_channels, layer.out_channels, tuple(layer.kernel_size), tuple(layer.stride), tuple(layer.padding)),
        *(tuple(layer.dilation), layer.groups, layer.bias is not None and layer.bias is not False),
    )


def use_kernels(model: nn.Module) -> None:
    """Changes the class of the model's transposed convolutions, in place: parameters and all else stay what they are.

    Raises `UnsupportedError` for a layer that this file was not emitted for.
    """
    emitted = {constants(each.problem): number for number, each in enumerate(LAYERS) if not each.problem.epilogue}
    for name, module in model.named_modules():
        if type(module) not in CLASSES:
            continue
        number = emitted.get(constants(module))
        if number is None:
            raise UnsupportedError(
                f"this file has no kernels for {name or 'the model itself'}, {module}: it has them for "
                + "; ".join(str(layer.problem) for layer in LAYERS if not layer.problem.epilogue)
            )
        module.emitted_layer = number
        module.__class__ = CLASSES[type(module)]
