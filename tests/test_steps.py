"""Steps that move data, executed by the emulator against PyTorch's indexing; guards and gaps stay as they were."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import emulator
from kernel_harness import DTYPES, Buffer, Emulator, Executor, integers
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Strides, dense_strides
from polyphase.program import flatten
from polyphase.program.flatten import Flattened, flatten_positions
from polyphase.program.planes import Planes, write_planes
from polyphase.program.transpose import Transposed, to_channels_last

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")


def dense(shape: tuple[int, ...]) -> Strides:
    return dense_strides(shape, channels_last=False)


def planes_of(shape: tuple[int, int, int, int, int], channels: int, padded: tuple[int, int, int]) -> Planes:
    return Planes(shape, dense(shape), 1, channels, 1, padded, (1, 1, 1), (0, 0, 0), (1, 1), (1, 1), (1, 1))


PLANES = {
    "residues of groups of whole pieces": planes_of((2, 16, 7, 9, 11), 144, (3, 4, 12))._replace(
        step=(3, 3, 1), first=(-1, 0, -1), inner=(3, 3)
    ),
    "residues within a piece": planes_of((2, 10, 7, 9, 11), 24, (3, 4, 12))._replace(
        groups=2, step=(2, 2, 1), first=(-1, 0, -1), inner=(2, 2)
    ),
    "residues as planes": planes_of((1, 6, 5, 9, 7), 8, (3, 4, 8))._replace(
        groups=2, step=(2, 2, 2), first=(0, -1, 1), apart=(1, 2), residues=(2, 2)
    ),
    "one channel": planes_of((3, 1, 1, 40, 700), 2, (1, 12, 720))._replace(
        step=(1, 4, 1), first=(0, -3, -5), residues=(1, 4)
    ),
    "two channels and residues": planes_of((2, 2, 5, 9, 40), 4, (3, 9, 45))._replace(step=(2, 1, 1), inner=(2, 1)),
    "three channels": planes_of((5, 3, 1, 20, 31), 4, (1, 21, 34))._replace(first=(0, -1, -2)),
    "tiles of channels": planes_of((1, 200, 1, 3, 7), 400, (1, 2, 9))._replace(step=(1, 2, 1), inner=(1, 2)),
}


def assert_planes(how: Planes, dtype: str, executor: Executor) -> None:
    values = integers(how.shape, 3).to(DTYPES[dtype])
    src = Buffer(how.shape, how.strides, DTYPES[dtype], executor.device, values)
    flat = (1, how.elements)
    dst = Buffer(flat, dense(flat), DTYPES[dtype], executor.device)
    executor(write_planes(dtype, how), [src.tensor, dst.tensor])
    found, expected = dst.read().view(how.parts, -1), expected_planes(values, how)
    assert torch.equal(found[0], expected)
    assert not found[1:].any()  # what small integers lose as TF32


def expected_planes(values: Tensor, how: Planes) -> Tensor:
    batch, group = how.shape[0], how.shape[1] // how.groups
    found = torch.zeros(how.groups, *how.residues, batch, *how.padded, how.channels, dtype=values.dtype)
    for plane in itertools.product(*map(range, how.residues)):
        for at in itertools.product(*map(range, how.padded)):
            for number, inner in enumerate(itertools.product(*map(range, how.inner))):
                residues = [r + i for r, i in zip(plane, inner)] + [0]
                apart = (*how.apart, 0)
                place = [i * s + f + r * a for i, s, f, r, a in zip(at, how.step, how.first, residues, apart)]
                if all(0 <= i < size for i, size in zip(place, how.shape[2:])):
                    source, channels = (slice(None), slice(None), *place), slice(number * group, (number + 1) * group)
                    target = (slice(None), *plane, slice(None), *at, channels)
                    found[target] = values[source].view(batch, how.groups, group).transpose(0, 1)
    return found.flatten()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", PLANES)
def test_planes(name: str, dtype: str) -> None:
    for parts in (1, 2) if dtype == "float32" else (1,):
        assert_planes(PLANES[name]._replace(parts=parts), dtype, Emulator(3))


def assert_flattened(x: Flattened, grad: Flattened, dtype: str, executor: Executor, offset: int = 0) -> None:
    """Two tensors of the same values, which begin ``offset`` elements further."""
    values = integers(x.shape, 5).to(DTYPES[dtype])
    src = [Buffer(x.shape, x.strides, DTYPES[dtype], executor.device, values, offset) for _ in range(2)]
    found = [Buffer((1, how.elements), dense((1, how.elements)), DTYPES[dtype], executor.device) for how in (x, grad)]
    step = flatten_positions(dtype, 1 if dtype == "float32" else 2, x, grad)
    executor(step, [each.tensor for each in (*src, *found)])
    for how, buffer in zip((x, grad), found):
        read = buffer.tensor.cpu().view(how.planes[2], x.shape[1], how.pitch)[..., : how.positions]
        assert torch.equal(read, expected_positions(values, how))


def expected_positions(values: Tensor, how: Flattened) -> Tensor:
    batch, channels = how.shape[:2]
    found = torch.zeros(how.planes[2], channels, batch, *how.padded, dtype=values.dtype)
    for plane in range(how.planes[2]):
        for at in itertools.product(*map(range, how.padded)):
            apart: Sequence[int] = (0, 0, plane * how.apart[2])
            place = [i * s + f + a for i, s, f, a in zip(at, how.step, how.first, apart)]
            if all(0 <= i < size for i, size in zip(place, how.shape[2:])):
                source, target = (slice(None), slice(None), *place), (plane, slice(None), slice(None), *at)
                found[target] = values[source].T
    return found.flatten(2)


def flattened(shape: tuple[int, int, int, int, int], **more: Any) -> Flattened:
    how = Flattened(shape, dense(shape), shape[2:], (1, 1, 1), (0, 0, 0), (1, 1, 1), (1, 1, 1), 1, 0)
    how = how._replace(**more)
    return how._replace(pitch=round_up(how.positions, 64))


PIECES = {
    "shifted copies": flattened(
        (2, 5, 1, 6, 21), padded=(1, 8, 24), first=(0, -1, 0), apart=(0, 0, -1), planes=(1, 1, 3)
    ),
    "two residues": flattened((2, 7, 1, 9, 30), padded=(1, 5, 16), step=(1, 2, 2), first=(0, -1, -1), planes=(1, 1, 2)),
    "taps apart": flattened((1, 9, 3, 4, 37), padded=(3, 5, 24), step=(1, 1, 2), first=(-1, 0, -2), planes=(1, 1, 5)),
    "a dilated step of three": flattened(
        (2, 6, 1, 3, 50), padded=(1, 3, 16), step=(1, 1, 3), apart=(1, 1, 2), first=(0, 0, -2), planes=(1, 1, 3)
    ),
    "four residues": flattened((2, 3, 2, 3, 59), padded=(2, 3, 16), step=(1, 1, 4), first=(0, 0, -4), planes=(1, 1, 4)),
    "a few elements": flattened((1, 1, 1, 1, 3), padded=(1, 1, 8), first=(0, 0, -1)),
}


@pytest.mark.parametrize("name", PIECES)
def test_positions_in_pieces(name: str) -> None:
    """Of a tensor that begins anywhere, and whose rows do."""
    how = PIECES[name]
    assert flatten._way(how, 2) == flatten._PIECES
    for offset in range(9):
        assert_flattened(how, how, "float16", Emulator(3), offset)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_positions_of_many_channels(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one step and of two, of which a thread has some channels after the others."""
    shape = (2, 20, 3, 5, 7)
    x = flattened(shape, padded=(3, 6, 9), first=(0, -1, 0), apart=(0, 0, -2), planes=(1, 1, 2))
    grad = flattened(shape, padded=(3, 3, 4), step=(1, 2, 2), first=(0, 0, -1), planes=(1, 1, 2))
    assert {flatten._way(how, 1 if dtype == "float32" else 2) for how in (x, grad)} == {flatten._ROWS}
    for enough in (0, flatten._ENOUGH_BLOCKS):
        monkeypatch.setattr(flatten, "_ENOUGH_BLOCKS", enough)
        assert_flattened(x, grad, dtype, Emulator(3))


def assert_rows_are_transposed(dtype: str, executor: Executor) -> None:
    """A tensor that begins anywhere, and channels that are padded."""
    for shape, padded, offset in (((2, 45, 7, 9), 48, 3), ((1, 104, 67), 0, 5), ((2, 270, 67), 0, 1)):
        values = integers(shape, 3).to(DTYPES[dtype])
        src = Buffer(shape, dense(shape), DTYPES[dtype], executor.device, values, offset)
        written = (shape[0], padded or shape[1], *shape[2:])
        dst = Buffer(written, dense_strides(written, channels_last=True), DTYPES[dtype], executor.device)
        step = to_channels_last(dtype, Transposed(shape, dense(shape), padded=padded))
        assert dict(step.source.constants)["ROWS"] == (dtype == "float16")
        executor(step, [src.tensor, dst.tensor])
        found = dst.read()
        assert torch.equal(found[:, : shape[1]], values)
        assert not found[:, shape[1] :].any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_begin_anywhere(dtype: str) -> None:
    assert_rows_are_transposed(dtype, Emulator(3))
