"""CUDA text of an epilogue's and of a prologue's operations, for one kernel: the files ``epilogue/operations.cuh`` and
``operand/prologue.cuh``."""

from __future__ import annotations

import math

from polyphase.problem.epilogue import (
    ACTIVATIONS,
    CHANNEL,
    ELEMENT,
    OF_PIXELS,
    ONE,
    SAMPLE,
    Epilogue,
    Operand,
    Operation,
    of_input,
)

_NONE = """\
#define EPILOGUE 0
#define EPILOGUE_NORMALIZES 0                                                // over the channels of a pixel
#define EPILOGUE_PARAMETERS                                                  // of a kernel, behind its bias
#define EPILOGUE_OPERANDS(bias, dst, sample_stride) ((const scalar_t*)bias)  // what `channel_terms` takes
#define EPILOGUE_READS_PLACES 0  // whether operations ask where an output lies
#define EPILOGUE_RESIDUALS 0     // tensors of the output's shape that they read
"""

_NO_PROLOGUE = """\
#define PROLOGUE 0
#define PROLOGUE_PARAMETERS  // of a kernel, behind those of its epilogue
#define PROLOGUE_OPERANDS (PrologueOperands{})
struct PrologueOperands {};
"""

# Values computed once per channel from an operation's operands: a factor and a summand, or the snake's two factors.
_DERIVED = {"normalize": ("factor", "added"), "snake": ("frequency", "amplitude")}


def prologue_text(prologue: Epilogue) -> str:
    """The text that kernels include as ``operand/prologue.cuh``."""
    if not prologue:
        return _NO_PROLOGUE
    pointers = _pointers(prologue)
    given = ", ".join(map(of_input, pointers))
    declared = "".join(f", {kind} __restrict__ {of_input(name)}" for name, kind in pointers.items())
    lines = [
        f"// The prologue: {prologue}",
        "#define PROLOGUE 1",
        f"#define PROLOGUE_PARAMETERS {declared}",
        f"#define PROLOGUE_OPERANDS PrologueOperands{{{given}}}",
        *_structs(prologue, "Prologue"),
        *_terms(prologue, "prologue_terms", "Prologue"),
        "__device__ __forceinline__ accum_t prologue(accum_t v0, const PrologueTerms& of) {",
        *_values(prologue, len(prologue.operations)),
    ]
    return "\n".join(lines) + "\n"


def operations_text(epilogue: Epilogue) -> str:
    """The text that kernels include as ``epilogue/operations.cuh``."""
    if not epilogue:
        return _NONE
    pointers = _pointers(epilogue)
    given = ", ".join(pointers)
    lines = [
        f"// The epilogue: {epilogue}",
        "#define EPILOGUE 1",
        "#define EPILOGUE_PARAMETERS " + "".join(f", {kind} __restrict__ {name}" for name, kind in pointers.items()),
        "#define EPILOGUE_OPERANDS(bias, dst, sample_stride) "
        f"EpilogueOperands{{bias, 0, dst, sample_stride, OperationOperands{{{given}}}}}",
        f"#define EPILOGUE_CHANNELS {epilogue.channels}",
        f"#define EPILOGUE_CHANNEL(of_kernel) {_channel(epilogue)}",
        f"#define EPILOGUE_READS_PLACES {bool(_read_later(epilogue)):d}",
        f"#define EPILOGUE_RESIDUALS {len(epilogue.residuals)}",
        f"#define EPILOGUE_PER_SAMPLE {epilogue.per_sample:d}",
        f"#define EPILOGUE_NORMALIZES {epilogue.normalizes:d}",
        *_structs(epilogue, "Operation"),
        *_terms(epilogue, "operation_terms", "Operation"),
        *_prefetch(epilogue),
        *_normalized_value(epilogue),
        *_operations(epilogue),
    ]
    return "\n".join(lines) + "\n"


def _pointers(epilogue: Epilogue) -> dict[str, str]:
    """The pointer types of all operands, by name."""
    return {name: f"const {_type(operand)}*" for name, operand in epilogue.named_operands.items()}


def _read_later(epilogue: Epilogue) -> list[str]:
    """The operands that differ between outputs of a channel."""
    return [name for name, operand in epilogue.named_operands.items() if operand.per in (SAMPLE, ELEMENT)]


def _kept(epilogue: Epilogue) -> list[str]:
    """The operands that a channel's terms hold unchanged."""
    return [
        f"{operand.role}_{i}"
        for i, operation in enumerate(epilogue.operations)
        for operand in operation.operands
        if operand.per in (ONE, CHANNEL) and operation.kind not in _DERIVED
    ]


def _structs(epilogue: Epilogue, name: str) -> list[str]:
    """The structs of the addresses of all operands, and of a channel's terms."""
    pointers = _pointers(epilogue)
    derived = [(i, _DERIVED[each.kind]) for i, each in enumerate(epilogue.operations) if each.kind in _DERIVED]
    return [
        f"struct {name}Operands {{",
        *(f"  {kind} {operand};" for operand, kind in pointers.items()),
        "};",
        f"struct {name}Terms {{",
        *(f"  accum_t {operand};" for operand in _kept(epilogue)),
        *(f"  accum_t {first}_{i}, {second}_{i};" for i, (first, second) in derived),
        *(f"  {pointers[operand]} {operand};" for operand in _read_later(epilogue)),
        "};",
    ]


def _channel(epilogue: Epilogue) -> str:
    """The layer's channel of a kernel's channel."""
    if epilogue.channel_parts == 1:
        return "(of_kernel)"
    if epilogue.channels_inner:
        return f"(of_kernel) % {epilogue.channels}"
    return f"(of_kernel) / {epilogue.channel_parts}"


def _type(operand: Operand) -> str:
    return "accum_t" if operand.wide else "scalar_t"


def _terms(epilogue: Epilogue, function: str, name: str) -> list[str]:
    """The function that reads a channel's terms."""
    operands = epilogue.named_operands
    lines = [
        f"__device__ __forceinline__ {name}Terms {function}(const {name}Operands& of, int channel, bool exists) {{",
        f"  {name}Terms terms = {{}};",
    ]
    for operand in _kept(epilogue):
        lines.append(f"  if (exists) terms.{operand} = {_of_channel(operands[operand], operand)};")
    for i, operation in enumerate(epilogue.operations):
        if operation.kind in _DERIVED:
            lines += _normalized(i, operation) if operation.kind == "normalize" else _snake(i, operation)
    lines += [f"  terms.{operand} = of.{operand};" for operand in _read_later(epilogue)]
    return [*lines, "  return terms;", "}"]


def _of_channel(operand: Operand, name: str) -> str:
    """The value of an operand that all outputs of a channel share."""
    return f"widen(read(of.{name} + {'0' if operand.per == ONE else 'channel'}))"


def _snake(i: int, operation: Operation) -> list[str]:
    """The terms of a snake: the factors of its sine's angle and of its square."""
    epsilon, logarithmic = operation.constants
    read = {operand.role: _of_channel(operand, f"{operand.role}_{i}") for operand in operation.operands}
    alpha, beta = (f"exponential({each})" if logarithmic else each for each in (read["alpha"], read.get("beta", "")))
    beta = beta if "beta" in read else f"terms.frequency_{i}"
    return [
        "  if (exists) {",
        f"    terms.frequency_{i} = {alpha};",
        f"    terms.amplitude_{i} = quotient((accum_t)1, {beta} + {_number(epsilon)});",
        "  }",
    ]


def _normalized(i: int, operation: Operation) -> list[str]:
    """The terms of a normalisation: a factor and a summand."""
    roles = {operand.role for operand in operation.operands}
    weight = f"widen(read(of.weight_{i} + channel))" if "weight" in roles else "(accum_t)1"
    offset = f"widen(read(of.offset_{i} + channel))" if "offset" in roles else "(accum_t)0"
    epsilon = _number(operation.constants[0])
    return [
        "  if (exists) {",
        f"    const accum_t variance = widen(read(of.variance_{i} + channel));",
        f"    terms.factor_{i} = {weight} / square_root(variance + {epsilon});",
        f"    terms.added_{i} = {offset} - widen(read(of.mean_{i} + channel)) * terms.factor_{i};",
        "  }",
    ]


def _prefetch(epilogue: Epilogue) -> list[str]:
    """The functions that prefetch an output's residuals to L2, and that give the first residual."""
    return [
        "__device__ __forceinline__ void prefetch_residuals(const OperationTerms& of, long long place) {",
        *(f"  prefetch_l2(of.{name} + place);" for name in epilogue.residuals),
        "}",
        "// The first of the residuals, which a kernel may read before it has the value.",
        "__device__ __forceinline__ const scalar_t* first_residual(const OperationTerms& of) {",
        f"  return {f'of.{epilogue.residuals[0]}' if epilogue.residuals else 'nullptr'};",
        "}",
    ]


def _normalized_value(epilogue: Epilogue) -> list[str]:
    """If an operation normalises over channels: the value that it normalises, and its constant."""
    for i, operation in enumerate(epilogue.operations):
        if operation.kind in OF_PIXELS:
            softmax = operation.kind == "softmax"
            return [
                f"#define EPILOGUE_SOFTMAX {softmax:d}",
                f"#define EPILOGUE_EPSILON {_number(0.0 if softmax else operation.constants[0])}",
                "__device__ __forceinline__ accum_t normalized_value(accum_t v0, const OperationTerms& of,",
                "                                                    int channel, long long sample, long long place,",
                "                                                    bool exists, const accum_t* residual) {",
                *_values(epilogue, i),
            ]
    return []


def _operations(epilogue: Epilogue) -> list[str]:
    """The function that applies all operations to a value."""
    return [
        "__device__ __forceinline__ accum_t operations(accum_t v0, const OperationTerms& of, int channel,",
        "                                              long long sample, long long place, bool exists,",
        "                                              const accum_t* residual, accum_t center, accum_t factor) {",
        *_values(epilogue, len(epilogue.operations)),
    ]


def _values(epilogue: Epilogue, last: int) -> list[str]:
    """The values before operation ``last``; the last of them is returned."""
    steps = list(enumerate(epilogue.operations))[:last]
    first = (epilogue.residuals or ("",))[0]
    return [*(f"  const accum_t v{i + 1} = {_next(i, each, first)};" for i, each in steps), f"  return v{last};", "}"]


def _next(i: int, operation: Operation, first_residual: str) -> str:
    """The value after operation ``i``, from the value before it."""
    value, kind = f"v{i}", operation.kind
    read = {operand.role: _read(i, operand, first_residual) for operand in operation.operands}
    if kind == "clamp":
        least, most = operation.constants
        value = value if least == -math.inf else f"at_least({value}, {_number(least)})"
        return value if most == math.inf else f"at_most({value}, {_number(most)})"
    if kind in ACTIVATIONS:
        return f"{kind}({', '.join([value, *map(_number, operation.constants)])})"
    if kind == "affine":
        factor, added = operation.constants
        return " + ".join(
            [f"{value} * {_number(factor)}" if factor != 1 else value, *([_number(added)] if added else [])]
        )
    if kind == "scale_shift":
        scaled = f"{value} * {read['scale']}" if "scale" in read else value
        shifted = f"{scaled} + {read['shift']}" if "shift" in read else scaled
        return f"{shifted} - {read['less']}" if "less" in read else shifted
    if kind == "normalize":
        return f"{value} * of.factor_{i} + of.added_{i}"
    if kind in OF_PIXELS:
        return _normalized_over_pixels(kind, value, read)
    if kind == "prelu":
        return f"leaky_relu({value}, {read['slope']})"
    if kind == "snake":
        return f"snake({value}, of.frequency_{i}, of.amplitude_{i})"
    if kind == "add":
        return f"{value} + {read['residual']}"
    return f"{value} {'+' if kind == 'add_value' else '*'} v{operation.of}"


def _normalized_over_pixels(kind: str, value: str, read: dict[str, str]) -> str:
    """The value normalised by a pixel's center and factor."""
    if kind == "softmax":
        return f"exponential({value} - center) * factor"
    scaled = f"({value} - center) * factor" + (f" * {read['weight']}" if "weight" in read else "")
    return f"{scaled} + {read['offset']}" if "offset" in read else scaled


def _read(i: int, operand: Operand, first_residual: str) -> str:
    name = f"of.{operand.role}_{i}"
    if operand.per in (ONE, CHANNEL):
        return name
    at = "place" if operand.per == ELEMENT else "sample * EPILOGUE_CHANNELS + channel"
    value = f"read_if(exists, {name} + {at})"
    return f"(residual ? *residual : {value})" if f"{operand.role}_{i}" == first_residual else value


def _number(value: float) -> str:
    infinite = f"{'-' * (value < 0)}__int_as_float(0x7f800000)"
    return f"(accum_t){infinite if math.isinf(value) else repr(float(value))}"
