"""Kernels' parameters: what the host reads in a kernel's source is what a compiler lays out."""

from __future__ import annotations

import random
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import emulator
from kernel_harness import read
from polyphase.bench.layers import parse_layer
from polyphase.jit.source import KERNELS, KernelSource
from polyphase.plan.planner import kernel_sources
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import Epilogue, Operation
from polyphase.problem.reduction import Reduction
from polyphase.program.batch_norm import BatchNorm, programs_of
from polyphase.program.params import params_of, parse
from polyphase.program.reduction import program_of
from polyphase.program.struct_layout import ParamOverflowError, Struct, divisor

# Layers that meet every kernel, each in more than one specialisation where there are.
LAYERS = (
    "2x64x14x14 -> 64, k=2, s=2, bfloat16",
    "2x64x9x9 -> 32, k=3, s=2, p=1, op=1, tf32, channels_last",
    "1x16x8x8 -> 4, k=16, s=4",
    "2x64x8x8 -> 64, k=4, s=2, p=1",
    "2x128x64x64 -> 128, k=4, s=2, p=1",
    "2x8x16x16 -> 8, k=4, s=2, g=4, channels_last",
    "1x64x8x8 -> 32, k=16, s=16",
    "2x40x8x9 -> 8, k=2, s=4, bfloat16",
    "8x8x53 -> 8, k=256, s=64, g=2, bfloat16",
    "16x32x128x256 -> 64, k=3x5, s=2x3, p=1x2, d=2x1, g=4, tf32",
)
NAMES = sorted(path.stem for path in KERNELS.rglob("*.cu"))
WITHOUT = {"copy_weights", "pack_columns", "pack_runs", "pack_tap_groups", "pack_taps", "pack_weights"}

SOURCE = """
struct Divisor { int value; unsigned reciprocal; int shift; operator int() const { return value; } };
struct Inner { /* eight; bytes */ long long far[2]; short near; };
struct alignas(32) Outer {  // of all kinds { }
  bool first;
  TensorMap map, other;
  float factor, bound;
  Inner pair[2], one;
  explicit Outer(int number) : first(number) { if (number) { first = false; } }
  int count, length[3]; Divisor by[2];
  alignas(16) unsigned char last;
};
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    kernel(const float* __restrict__ from, const __grid_constant__ Outer g) { }
"""
VALUES: dict[str, Any] = {
    "first": True,
    "factor": 0.5,
    "bound": -1.0,
    "pair": [{"far": [-1, 1 << 40], "near": -3}, {"far": [3, 4], "near": 5}],
    "one": {"far": [6, 7], "near": 8},
    "count": -9,
    "length": [10, 11, 12],
    "by": [3, 7],
    "last": 255,
}


@cache
def sources() -> dict[str, list[KernelSource]]:
    """Kernels by name."""
    device = DeviceInfo.for_arch("sm_90a")
    found: dict[str, list[KernelSource]] = {}
    behind = replace(parse_layer(LAYERS[0]), prologue=Epilogue((Operation("sigmoid"),)))
    for problem in (*map(parse_layer, LAYERS), behind):
        for pass_ in Pass:
            for source in kernel_sources(problem, pass_, device):
                found.setdefault(source.kernel, []).append(source)
    groups = Reduction((2, 4, 3, 5), over="norm", last=3)
    norm, _ = programs_of(BatchNorm((2, 4, 3, 5), 1e-5, 0.1), "float32")
    return found | {"reduce_groups": [*program_of(groups, "float32").sources], "batch_norm": [*norm.sources]}


def structs_in(struct_: Struct) -> Iterator[Struct]:
    yield struct_
    for member in struct_.members.values():
        if isinstance(member.kind, Struct):
            yield from structs_in(member.kind)


def expectations(struct_: Struct) -> Iterator[str]:
    """What a compiler should find, as C++: sizes, offsets and types."""
    types = {
        "?": "bool",
        "h": "short",
        "B": "unsigned char",
        "i": "int",
        "I": "unsigned",
        "q": "long long",
        "f": "float",
        "d": "double",
    }
    for each in {found.name: found for found in structs_in(struct_)}.values():
        yield f"sizeof({each.name}) == {each.size}"
        for name, (offset, kind, length) in each.members.items():
            declared = (types[kind] if isinstance(kind, str) else kind.name) + (f"[{length}]" if length else "")
            yield f"offsetof({each.name}, {name}) == {offset}"
            yield f"std::is_same_v<decltype({each.name}::{name}), {declared}>"


def compiles(source: str, struct_: Struct, folder: Path) -> None:
    """Raises AssertionError where g++ lays out the struct in another way."""
    source = re.sub(r"extern (__shared__[^;]*)\[\];", r"\1[1];", source)
    asserted = "".join(f"static_assert({each});\n" for each in expectations(struct_))
    file = folder / "layout.cpp"
    file.write_text(f'#include "cuda_shim.h"\n#include <type_traits>\nnamespace {{\n{source}\n{asserted}}}\n')
    done = subprocess.run(
        ["g++", "-std=c++20", "-w", "-fsyntax-only", f"-I{Path(emulator.__file__).parent}", file],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kernel", NAMES)
def test_layouts_are_the_compilers(kernel: str, tmp_path: Path) -> None:
    """Of every kernel, which has one struct however it is specialised."""
    first, *others = sources()[kernel]
    found = params_of(first)
    assert (not found.members) == (kernel in WITHOUT)
    for other in others:
        assert parse(other.text, kernel) == found
    if found.members and emulator.available():
        compiles(emulator.text_of(first), found, tmp_path)


@pytest.mark.parametrize("kernel", sorted(set(NAMES) - WITHOUT))
def test_what_is_written_is_read(kernel: str) -> None:
    """Random values in every member; all else is zeros."""
    rng, found = random.Random(kernel), params_of(sources()[kernel][0])

    def value_of(kind: str | Struct) -> Any:
        if kind == "d":
            return rng.random()
        if isinstance(kind, str):
            return (
                rng.randint(0, 1) if kind == "?" else rng.randint(-(1 << 31 if kind == "i" else 1 << 63), (1 << 31) - 1)
            )
        if kind.name == "Divisor":
            return rng.randint(1, 1 << 30)
        return values_of(kind)

    def values_of(struct_: Struct) -> dict[str, Any]:
        return {
            name: [value_of(kind) for _ in range(length)] if length else value_of(kind)
            for name, (_, kind, length) in struct_.members.items()
            if isinstance(kind, str) or kind.name != "TensorMap"
        }

    values = values_of(found)
    packed = found.pack(**values)
    assert len(packed) == found.size
    assert read(found, packed) == values
    for offset in found.tensor_maps:
        assert packed[offset : offset + 128] == bytes(128)


def test_all_that_a_struct_may_have(tmp_path: Path) -> None:
    """Comments, functions, arrays, structs, alignments, several members in one declaration."""
    found = parse(SOURCE, "kernel")
    assert found.tensor_maps == (64, 192)
    maps = "struct alignas(64) TensorMap { char encoded[128]; };\n#define THREADS 32\n#define __grid_constant__\n"
    if emulator.available():
        compiles(maps + SOURCE, found, tmp_path)
    packed = found.pack(**VALUES)
    assert read(found, packed) == VALUES
    assert found.pack(**read(found, packed)) == packed
    expected = bytearray(found.size)
    at = {name: member.offset for name, member in found.members.items()}
    expected[0] = 1
    struct.pack_into("<2f", expected, at["factor"], 0.5, -1)
    struct.pack_into("<2qh6x2qh6x", expected, at["pair"], -1, 1 << 40, -3, 3, 4, 5)
    struct.pack_into("<2qh", expected, at["one"], 6, 7, 8)
    struct.pack_into("<4i", expected, at["count"], -9, 10, 11, 12)
    struct.pack_into("<iIiiIi", expected, at["by"], *divisor(3).values(), *divisor(7).values())
    expected[at["last"]] = 255
    assert packed == bytes(expected)


def test_a_member_may_be_an_object_that_gives_its_members() -> None:
    found = parse(SOURCE, "kernel")
    one = SimpleNamespace(params=lambda: {"far": (6, 7), "near": 8})
    assert found.pack(**{**VALUES, "one": one}) == found.pack(**VALUES)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"width": 3}, TypeError, "width is not one"),
        ({"map": bytes(128)}, TypeError, "map is not one"),
        ({"length": [1, 2]}, ValueError, r"length has 3 elements, given 2"),
        ({"pair": []}, ValueError, r"pair has 2 elements, given 0"),
        ({"one": {"far": [1, 2]}}, TypeError, "near is missing"),
        ({"one": {"far": [1, 2, 3], "near": 1}}, ValueError, "far has 2 elements, given 3"),
        ({"one": 3}, TypeError, "one takes the members of a Inner"),
        ({"by": [1, 2.0]}, TypeError, "by takes integers, given 2.0"),
        ({"count": 1.0}, TypeError, "count takes integers, given 1.0"),
        ({"factor": "1"}, TypeError, "factor takes floats, given '1'"),
        ({"count": 1 << 31}, ParamOverflowError, "count holds -2147483648 to 2147483647, given 2147483648"),
        ({"length": [0, 0, -(1 << 31) - 1]}, ParamOverflowError, "length holds"),
        ({"last": -1}, ParamOverflowError, "last holds 0 to 255, given -1"),
        ({"by": [1, 1 << 31]}, ParamOverflowError, "by holds"),
        ({"one": {"far": [1, 1 << 63], "near": 1}}, ParamOverflowError, "far holds"),
    ],
)
def test_wrong_values_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(SOURCE, "kernel").pack(**{**VALUES, **changed})


def test_missing_values_are_named() -> None:
    with pytest.raises(TypeError, match=r"Outer has the members first, .*: factor is missing, count is missing"):
        parse(SOURCE, "kernel").pack(**{name: VALUES[name] for name in VALUES if name not in ("factor", "count")})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SOURCE.replace("kernel(", "other("), "no kernel kernel in its source"),
        (SOURCE.replace("int count,", "int* count,"), "Outer has a member that is not understood: int\\* count"),
        (SOURCE.replace("int count,", "int (*count)(int), other,"), "not understood: int \\(\\*count\\)"),
        (SOURCE.replace("length[3]", "length[THREE]"), "Outer has a member that is not understood: int count, length"),
        (SOURCE.replace("bool first;", "bool first = true;"), "not understood: bool first = true;"),
        (SOURCE.replace("bool first;", "bool first{};"), "not understood: bool first@"),
        (
            SOURCE.replace("bool first;", "\n#if SCALED\nbool first;\n#endif\n"),
            "not understood: #if SCALED bool first;",
        ),
        (SOURCE.replace("float factor", "double_t factor"), "struct double_t is defined 0 times"),
        (SOURCE + "\nstruct Inner { int twice; };", "struct Inner is defined 2 times"),
    ],
)
def test_structs_that_are_not_understood(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text, "kernel")
