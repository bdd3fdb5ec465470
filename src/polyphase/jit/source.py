"""One specialised kernel as text: shared building blocks, the constants of a layer, the kernel file.

The text includes nothing, so that NVRTC needs no headers and one string is the whole identity of a kernel.
"""

from __future__ import annotations

import itertools
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
    "gather_tiled": ("copy_async", "operand"),
    "gather_channels": ("operand", "taps"),
    "gather_general": ("operand", "taps"),
    "implicit_gemm": (
        "tensor_float", "scaled_half", "row_blocks", "scales", "bands", "dependent", "copy_async", "wgmma", "async",
        "mma", "matrix", "divisor", "gemm_tile", "item_queue", "pixel_loader",
    ),
    "gather_gemm": (
        "tensor_float", "dependent", "divisor", "split", "copy_async", "async", "mma", "stages", "staged_rows",
        "phase_taps",
    ),
    "phase_gemm": ("split", "mma", "taps", "divisor"),
    "pixel_gemm": (
        "tensor_float", "scaled_half", "dependent", "copy_async", "wgmma", "async", "mma", "divisor",
    ),
    "scatter_gemm": ("tensor_float", "split", "copy_async", "mma", "wgmma"),
    "weight_grad": (),
    "weight_grad_channels": (),
    "weight_grad_windows": ("copy_async",),
    "input_grad_gemm": ("tensor_float", "copy_async", "mma", "stages", "window", "window_product"),
    "weight_grad_gemm": ("tensor_float", "copy_async", "mma", "stages", "window", "window_product"),
    "input_grad_wgmma": (
        "tensor_float", "copy_async", "wgmma", "async", "ring", "mma", "stages", "window_rows", "window",
        "window_wgmma",
    ),
    "weight_grad_wgmma": (
        "tensor_float", "copy_async", "wgmma", "async", "ring", "mma", "stages", "window_rows", "window",
        "window_wgmma", "run_loader",
    ),
    "input_grad_dots": (),
    "input_grad_boxes": ("tensor_float", "dependent", "copy_async", "wgmma", "async", "ring", "mma", "box_product"),
    "weight_grad_boxes": (
        "tensor_float", "copy_async", "wgmma", "async", "ring", "mma", "box_product", "tap_windows",
    ),
    "pack_channels": ("dependent",),
    "add_planes": (),
    "turn_channels": ("divisor",),
    "pack_weights": ("tensor_float", "scaled_half", "row_blocks", "scales", "bands", "dependent", "counters"),
    "pack_taps": ("tensor_float", "scaled_half", "row_blocks", "scales", "bands", "dependent", "counters"),
    "measure_scales": ("divisor", "scaled_half", "scales", "dependent"),
    "pack_columns": ("scaled_half", "dependent"),
    "copy_weights": ("dependent", "counters"),
}  # fmt: skip

# Those of them that are for kernels alone that multiply float32 as float16.
_WITH_SCALES = ("scales", "bands")

# Depth in elements and operand type of the tensor cores' instructions.
_OPERANDS = {"float32": (8, "tf32"), "float16": (16, "f16"), "bfloat16": (16, "bf16")}

#: Constants that the compiler settles, by whether registers spill.
SETTLED = ("MIN_BLOCKS", "STRAIGHT", "GIVEN_REGISTERS", "CHUNKS_AT_ONCE")

# Of implicit_gemm, in the order in which they are tried: GIVEN_REGISTERS, and CHUNKS_AT_ONCE. The last serves a kernel
# that NVRTC 13.0 lacks registers for on either side, whatever share the other one gives.
_SHARES = ((0, 2), (-8, 2), (16, 2), (24, 2), (16, 1))

# Constants that the preprocessor must know.
_MACROS = ("WGMMA", "CLUSTER", "BY_THREADS", "SCALED")

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

    @property
    def sparing(self) -> KernelSource | None:
        """The same kernel with fewer resident blocks, registers shared out in another way, or loops rolled up.

        None if that is tried already.
        """
        if self.min_blocks > 1:
            return self.with_constants(MIN_BLOCKS=self.min_blocks - 1)
        constants = dict(self.constants)
        if "GIVEN_REGISTERS" in constants and constants["WGMMA"]:
            left = _SHARES[_SHARES.index((constants["GIVEN_REGISTERS"], constants["CHUNKS_AT_ONCE"])) + 1 :]
            if left:
                return self.with_constants(GIVEN_REGISTERS=left[0][0], CHUNKS_AT_ONCE=left[0][1])
        return self.with_constants(STRAIGHT=False) if constants.get("STRAIGHT") else None

    def with_constants(self, **constants: Constant) -> KernelSource:
        """The same kernel with some of its constants changed."""
        return replace(self, constants=tuple({**dict(self.constants), **constants}.items()))

    @property
    def operand(self) -> str:
        """What the tensor cores are given."""
        return "float16" if dict(self.constants).get("SCALED") else self.dtype

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
        if "mma" in _BUILDING_BLOCKS[self.kernel]:
            depth, operand = _OPERANDS[self.operand]
            lines.append(f'#define MMA_SHAPE "m16n8k{depth}.row.col.f32.{operand}.{operand}.f32"')
        constants = dict(self.constants)
        if "SCALED" in constants:
            lines.append(f"#define SCALED {constants['SCALED']:d}  // float32 is multiplied as float16")
        if "WGMMA" in constants:
            lines += _matrix_instructions(self.operand, constants)
        return "\n".join(lines) + "\n"

    @property
    def files(self) -> tuple[str, ...]:
        """The files under `KERNELS` that follow the specialisation; `SHARED_FILES` stand before it."""
        blocks = ["geometry"] if "AXIS_W" in dict(self.constants) else []
        constants = dict(self.constants)
        beside = () if constants.get("SCALED") else _WITH_SCALES
        blocks += (name for name in _BUILDING_BLOCKS[self.kernel] if name not in beside)
        if self.kernel == "implicit_gemm":
            blocks.append("store_overlap" if dict(self.constants)["TAPS_IN_ROWS"] else "store_phases")
        return (*(f"common/{name}.cuh" for name in blocks), f"{self.kernel}.cu")

    @cached_property
    def text(self) -> str:
        """What the compiler gets."""
        return "\n".join([*map(read, SHARED_FILES), self.specialisation, *map(read, self.files)])


def _matrix_instructions(dtype: str, constants: Mapping[str, Constant]) -> list[str]:
    """What common/wgmma.cuh needs of the instruction set: C++ has no way to write an operand list of any length.

    The first operand comes from shared memory, in kernels with COLUMN_TILES from registers, too. In half precision both
    may be transposed, with TRANSPOSED, or the second alone.
    """
    wgmma, cluster = constants["WGMMA"], constants.get("CLUSTER", 1)
    lines = [
        f"#define WGMMA_INSTRUCTION {wgmma:d}",
        f"#define CLUSTER {cluster:d}  // thread blocks",
    ]
    if "BY_THREADS" in constants:
        lines.append(f"#define BY_THREADS {constants['BY_THREADS']:d}")
    if not wgmma:
        return lines
    from_registers = "COLUMN_TILES" in constants
    columns = constants["COLUMN_TILES" if from_registers else "COLUMNS" if "COLUMNS" in constants else "PIXELS"]
    assert isinstance(columns, int)
    columns *= 8 if from_registers else 1
    both = bool(constants.get("TRANSPOSED", False))
    second = both or bool(constants.get("BOXES", False) and not constants["SRC_CHANNELS_LAST"])
    forms = [_matrix_instruction(dtype, columns, form, both, second) for form in sorted({from_registers, False})]
    return [
        *lines,
        "// sums = (add ? sums : 0) + A · B; descriptors are of matrices in shared memory.",
        "#ifndef EMULATOR",
        *itertools.chain(*forms),
        "#endif",
    ]


def _matrix_instruction(dtype: str, columns: int, from_registers: bool, both: bool, second: bool) -> list[str]:
    """One form of the instruction; whether both operands are transposed, and whether the second is."""
    depth, operand = _OPERANDS[dtype]
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    registers = range(count, count + (4 if from_registers else 1))
    first = ", ".join(f"%{i}" for i in registers)
    b, add = registers[-1] + 1, registers[-1] + 2
    if from_registers:
        declared, first = "const unsigned (&a)[4]", f"{{{first}}}"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        declared, inputs = "unsigned long long a", '"l"(a)'
    flags = f"{second:d}" if from_registers else f"{both:d}, {second:d}"
    transposed = f", {flags}" if depth == 16 else ""
    return [
        f"__device__ __forceinline__ void wgmma(float (&sums)[{count}], {declared}, unsigned long long b, bool add) {{",
        "  asm volatile(",
        f'      "{{ .reg .pred add; setp.ne.b32 add, %{add}, 0;\\n"',
        f'      "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{operand}.{operand} "',
        f'      "{{{sums}}}, "',
        f'      "{first}, %{b}, add, 1, 1{transposed}; }}"',
        f"      : {outputs}",
        f'      : {inputs}, "l"(b), "r"((int)add));',
        "}",
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
