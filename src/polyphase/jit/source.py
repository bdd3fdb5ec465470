"""One specialised kernel as text: shared building blocks, the constants of a layer, the kernel file.

The text includes nothing, so that NVRTC needs no headers and one string is the whole identity of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from polyphase.problem import Axis

KERNELS = Path(__file__).parent.parent / "kernels"

# The tensors' type and the accumulator's, by the name of the dtype.
_TYPES = {
    "float64": ("double", "double"),
    "float32": ("float", "float"),
    "float16": ("float16", "float"),
    "bfloat16": ("bfloat16", "float"),
}

#: Files that no constant changes, before everything else.
SHARED_FILES = ("common/types.cuh", "common/axis.cuh")

# Building blocks under kernels/common that a kernel needs behind those that all need.
_BUILDING_BLOCKS = {
    "gather_tiled": ("copy_async",),
    "implicit_gemm": (
        *("tensor_float", "row_blocks", "dependent", "copy_async", "async", "mma", "matrix", "gemm_tile"),
        "pixel_loader",
    ),
    "scatter_gemm": ("tensor_float", "copy_async", "mma", "stages"),
    "input_grad_gemm": ("tensor_float", "copy_async", "mma", "stages", "window_product"),
    "weight_grad_gemm": ("tensor_float", "copy_async", "mma", "stages", "window_product"),
    "pack_weights": ("tensor_float", "row_blocks", "dependent"),
    "pack_taps": ("tensor_float", "row_blocks", "dependent"),
}

# Depth in elements and operand type of the tensor cores' instructions.
_OPERANDS = {"float32": (8, "tf32"), "float16": (16, "f16"), "bfloat16": (16, "bf16")}

# Constants that the preprocessor must know.
_MACROS = ("WGMMA", "CLUSTER")

Constant = bool | int | Axis


@dataclass(frozen=True)
class KernelSource:
    """A kernel file and the constants it is specialised by, in the order in which they are written."""

    kernel: str
    dtype: str
    wide_offsets: bool
    constants: tuple[tuple[str, Constant], ...]

    @property
    def min_blocks(self) -> int:
        """Blocks that should be resident on a multiprocessor, for which the compiler limits registers."""
        blocks = dict(self.constants)["MIN_BLOCKS"]
        assert isinstance(blocks, int)
        return blocks

    def with_min_blocks(self, blocks: int) -> KernelSource:
        """The same kernel with another limit."""
        return replace(self, constants=tuple({**dict(self.constants), "MIN_BLOCKS": blocks}.items()))

    @cached_property
    def specialisation(self) -> str:
        """What this kernel's text has that others of the same file have not: types, constants, instructions."""
        scalar, accumulator = _TYPES[self.dtype]
        lines = [
            f"// {self.kernel}, specialised by:",
            f"typedef {scalar} scalar_t;       // of the tensors",
            f"typedef {accumulator} accum_t;  // of every sum",
            f"typedef unsigned {'long long' if self.wide_offsets else 'int'} offset_t;  // of offsets in bytes",
            *(f"constexpr {_declare(name, value)};" for name, value in self.constants if name not in _MACROS),
        ]
        if "mma" in _BUILDING_BLOCKS.get(self.kernel, ()):
            depth, operand = _OPERANDS[self.dtype]
            lines.append(f'#define MMA_SHAPE "m16n8k{depth}.row.col.f32.{operand}.{operand}.f32"')
        constants = dict(self.constants)
        if "WGMMA" in constants:
            lines += _matrix_instructions(self.dtype, constants)
        return "\n".join(lines) + "\n"

    @property
    def files(self) -> tuple[str, ...]:
        """The files under `KERNELS` that follow the specialisation; `SHARED_FILES` stand before it."""
        blocks = ["geometry", *_BUILDING_BLOCKS.get(self.kernel, ())]
        if self.kernel == "implicit_gemm":
            blocks.append("store_overlap" if dict(self.constants)["TAPS_IN_ROWS"] else "store_phases")
        return (*(f"common/{name}.cuh" for name in blocks), f"{self.kernel}.cu")

    @cached_property
    def text(self) -> str:
        """What the compiler gets."""
        return "\n".join([*map(read, SHARED_FILES), self.specialisation, *map(read, self.files)])


def _matrix_instructions(dtype: str, constants: Mapping[str, Constant]) -> list[str]:
    """What common/matrix.cuh needs of the instruction set: C++ has no way to write an operand list of any length."""
    columns = constants["PIXELS"]
    wgmma, cluster = (constants[name] for name in _MACROS)
    assert isinstance(columns, int)
    depth, operand = _OPERANDS[dtype]
    lines = [
        f"#define WGMMA_INSTRUCTION {wgmma:d}",
        f"#define CLUSTER {cluster:d}  // thread blocks",
    ]
    if not wgmma:
        return lines
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    transposed = ", 0, 0" if depth == 16 else ""
    return [
        *lines,
        "// sums = (add ? sums : 0) + A · B; A and B are descriptors of matrices in shared memory.",
        "#ifndef EMULATOR",
        f"__device__ __forceinline__ void wgmma(float (&sums)[{count}], unsigned long long a, unsigned long long b,",
        "                                      bool add) {",
        "  asm volatile(",
        f'      "{{ .reg .pred add; setp.ne.b32 add, %{count + 2}, 0;\\n"',
        f'      "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{operand}.{operand} "',
        f'      "{{{sums}}}, "',
        f'      "%{count}, %{count + 1}, add, 1, 1{transposed}; }}"',
        f"      : {outputs}",
        '      : "l"(a), "l"(b), "r"((int)add));',
        "}",
        "#endif",
    ]


def _declare(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    if isinstance(value, Axis):
        return f"Axis {name} = {{{value.kernel}, {value.stride}, {value.padding}, {value.dilation}}}"
    return f"int {name} = {value}"


@cache
def read(name: str) -> str:
    """The text of a file under `KERNELS`."""
    return (KERNELS / name).read_text(encoding="utf-8")
