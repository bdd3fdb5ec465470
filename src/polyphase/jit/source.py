"""One specialised kernel as text: a kernel file, the files that it includes, and the constants of a layer.

The text includes nothing, so that NVRTC needs no headers and one string is the whole identity of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from polyphase.jit.epilogue import operations_text, prologue_text
from polyphase.jit.includes import resolve
from polyphase.problem import Axis
from polyphase.problem.epilogue import NONE, Epilogue

KERNELS = Path(__file__).parent.parent / "kernels"

#: Files under `KERNELS` that are generated for each kernel. The files on disk are examples, for editors.
SPECIALISATION = "specialisation.cuh"
WGMMA_FORMS = "ptx/wgmma_forms.cuh"
OPERATIONS = "epilogue/operations.cuh"
PROLOGUE = "operand/prologue.cuh"

# The tensors' type and the accumulator's, by the name of the dtype.
_TYPES = {
    "float64": ("double", "double"),
    "float32": ("float", "float"),
    "float16": ("float16", "float"),
    "bfloat16": ("bfloat16", "float"),
}

# Depth in elements and operand type of the tensor cores' instructions.
_OPERANDS = {"float32": (8, "tf32"), "float16": (16, "f16"), "bfloat16": (16, "bf16")}

#: Constants that the preprocessor must know: code or an include depends on them by ``#if``.
MACROS = (
    "WGMMA",
    "CLUSTER",
    "BY_THREADS",
    "SCALED",
    "COPIED",
    "SRC_WRITTEN",
    "GUARDED",
    "TAPS_IN_ROWS",
    "TENSORS",
    "SPLIT",
)

Constant = bool | int | Axis


@dataclass(frozen=True)
class WgmmaForm:
    """A form of wgmma that a kernel uses, of 64 rows by ``columns``.

    ``operands``: the dtype that is multiplied, float32 as TF32. Operand A is in shared memory or in registers; 16-bit
    elements may be transposed in shared memory.
    """

    columns: int
    operands: str
    a_in_registers: bool = False
    transpose_a: bool = False
    transpose_b: bool = False


@dataclass(frozen=True)
class KernelSource:
    """A kernel file and the constants that specialise it, in the order in which they are written.

    Attributes:
        kernel: the name of the function and of the file, which is in ``folder`` under `KERNELS`.
        dtype: the tensors' type.
        wide_offsets: whether offsets in bytes take 64 bits.
        constants: names and values; among them MIN_BLOCKS.
        wgmma: the forms of ``wgmma`` that the kernel uses.
        fallbacks: sets of constants that are changed, one set after the other, if registers would spill even with
            one block on a multiprocessor.
        epilogue: operations on an output after its sum and bias.
        prologue: operations on an element of the input.
    """

    kernel: str
    dtype: str
    wide_offsets: bool
    constants: tuple[tuple[str, Constant], ...]
    wgmma: tuple[WgmmaForm, ...] = ()
    fallbacks: tuple[tuple[tuple[str, Constant], ...], ...] = ()
    folder: str = ""
    epilogue: Epilogue = NONE
    prologue: Epilogue = NONE

    @property
    def min_blocks(self) -> int:
        """Blocks that should be resident on a multiprocessor, for which the compiler limits registers."""
        blocks = dict(self.constants)["MIN_BLOCKS"]
        assert isinstance(blocks, int)
        return blocks

    def attempts(self) -> Iterator[KernelSource]:
        """This kernel, and its replacements, to be compiled one after the other as long as registers spill.

        First with fewer resident blocks, then with its fallbacks.
        """
        tried = self
        yield tried
        for blocks in range(self.min_blocks - 1, 0, -1):
            tried = tried.with_constants(MIN_BLOCKS=blocks)
            yield tried
        for changes in self.fallbacks:
            other = tried.with_constants(**dict(changes))
            if other != tried:
                tried = other
                yield tried

    @property
    def settled_constants(self) -> set[str]:
        """Names of constants in which `attempts` differ."""
        return {"MIN_BLOCKS", *(name for changes in self.fallbacks for name, _ in changes)}

    @property
    def variant(self) -> tuple[object, ...]:
        """The key of the compiled code apart from sizes: types, switches, and which numbers are zero."""
        switches = tuple(
            (name, value if name in MACROS else bool(value))
            for name, value in self.constants
            if not isinstance(value, Axis)
        )
        forms = frozenset(replace(form, columns=0) for form in self.wgmma)
        return self.kernel, self.dtype, self.wide_offsets, switches, forms, self.epilogue, self.prologue

    def with_constants(self, **constants: Constant) -> KernelSource:
        """The same kernel with some of its constants changed."""
        return replace(self, constants=tuple({**dict(self.constants), **constants}.items()))

    @cached_property
    def specialisation(self) -> str:
        """The text of types and constants, in which kernels of the same file differ."""
        scalar, accumulator = _TYPES[self.dtype]
        lines = [
            f"// {self.kernel}, specialised by:",
            f"typedef {scalar} scalar_t;       // of the tensors",
            f"typedef {accumulator} accum_t;  // of every sum",
            f"typedef unsigned {'long long' if self.wide_offsets else 'int'} offset_t;  // of offsets in bytes",
            *(_declare(name, value) for name, value in self.constants),
        ]
        return "\n".join(lines) + "\n"

    @cached_property
    def generated(self) -> dict[str, str]:
        """The texts of the files that are generated for this kernel, by path."""
        return {
            SPECIALISATION: self.specialisation,
            WGMMA_FORMS: "".join(map(_wgmma, self.wgmma)),
            OPERATIONS: operations_text(self.epilogue),
            PROLOGUE: prologue_text(self.prologue),
        }

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The paths under `KERNELS` of all compiled files, in order, including generated files."""
        return tuple(path for path, _ in self._resolved({}))

    @cached_property
    def text(self) -> str:
        """The text for the compiler."""
        return self.text_with({})

    def text_with(self, replaced: Mapping[str, str]) -> str:
        """`text` with some files' texts replaced, by path under `KERNELS`."""
        generated = {path: text for path, text in self.generated.items() if path not in replaced}
        return "\n".join(generated.get(path, text) for path, text in self._resolved(replaced))

    def _resolved(self, replaced: Mapping[str, str]) -> list[tuple[str, str]]:
        """Paths and texts; generated files have the examples' texts."""
        known = {name: int(value) for name, value in self.constants if name in MACROS and isinstance(value, int)}
        known["EPILOGUE"], known["EPILOGUE_NORMALIZES"] = bool(self.epilogue), self.epilogue.normalizes
        known["PROLOGUE"] = bool(self.prologue)
        root = "/".join(filter(None, (self.folder, f"{self.kernel}.cu")))
        return resolve(root, lambda path: replaced[path] if path in replaced else read(path), known)


def _wgmma(form: WgmmaForm) -> str:
    """A form of the instruction as a function: C++ cannot express an operand list of variable length."""
    depth, operand = _OPERANDS[form.operands]
    count = form.columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    registers = range(count, count + (4 if form.a_in_registers else 1))
    first = ", ".join(f"%{i}" for i in registers)
    b, add = registers[-1] + 1, registers[-1] + 2
    if form.a_in_registers:
        declared, first = "const unsigned (&a)[4]", f"{{{first}}}"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        declared, inputs = "unsigned long long a", '"l"(a)'
    flags = f"{form.transpose_b:d}" if form.a_in_registers else f"{form.transpose_a:d}, {form.transpose_b:d}"
    transposed = f", {flags}" if depth == 16 else ""
    lines = [
        f"__device__ __forceinline__ void wgmma(float (&sums)[{count}], {declared}, unsigned long long b, bool add) {{",
        "  asm volatile(",
        f'      "{{ .reg .pred add; setp.ne.b32 add, %{add}, 0;\\n"',
        f'      "wgmma.mma_async.sync.aligned.m64n{form.columns}k{depth}.f32.{operand}.{operand} "',
        f'      "{{{sums}}}, "',
        f'      "{first}, %{b}, add, 1, 1{transposed}; }}"',
        f"      : {outputs}",
        f'      : {inputs}, "l"(b), "r"((int)add));',
        "}",
    ]
    return "\n".join(lines) + "\n"


def _declare(name: str, value: Constant) -> str:
    if isinstance(value, Axis):
        return f"constexpr Axis {name} = {{{value.kernel}, {value.stride}, {value.padding}, {value.dilation}}};"
    if name in MACROS:
        return f"#define {name} {value:d}"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    return f"constexpr int {name} = {value};"


@cache
def read(name: str) -> str:
    """The text of a file under `KERNELS`."""
    return (KERNELS / name).read_text(encoding="utf-8")
