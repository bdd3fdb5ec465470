"""The steps of a `Reduction` (``kernels/steps/reduce_groups.cu``): pooling, a reduction or a norm after a layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from polyphase.jit.source import KernelSource
from polyphase.problem.epilogue import NONE
from polyphase.problem.integers import next_power_of_two, parted, round_up
from polyphase.problem.layouts import five
from polyphase.problem.problem import DTYPE_BYTES, accumulator
from polyphase.problem.reduction import NORMS, POOLS, REDUCTIONS, Reduction
from polyphase.program.params import params_of
from polyphase.program.program import Buffer, Program
from polyphase.program.step import DST, MANY_BLOCKS, PARTIALS, SRC, Step, plain_step

OVER = ("", "sum", "mean", "amax", "amin", "logsumexp", *NORMS)  # numbered as in kernels
_THREADS, _MOST_THREADS = 256, 1024  # threads of a block; the second if there are few groups
_VALUES = 16  # values of a thread at a time
_MOST_KEPT = 24  # most values that a thread keeps of a group
_READ, _MOST_LOADS = 32, 128  # elements that a thread reads: for its values of large windows; for a group's share
_RESIDENT = 4  # resident blocks of a multiprocessor
_MOMENTS = 3
_ROUNDS = 4  # least rounds of a share
#: Most elements with 32-bit indices, with room for a round of threads after the last.
MOST_ELEMENTS = 2**31 - 2**24


class _Threads(NamedTuple):
    """Threads of a block and of a group, a thread's vector and its vectors at a time, and the splits of a group."""

    threads: int
    team: int
    vector: int
    unroll: int
    splits: int
    span: int


def program_of(reduction: Reduction, dtype: str, aligned: bool = True) -> Program:
    """One step, or two if there are few groups; operands are those of ``after``, then those of ``before``."""
    threads = _threads(reduction, DTYPE_BYTES[dtype], aligned)
    if threads.splits == 1 or not reduction.over:
        return Program((_step(reduction, dtype, threads),))
    groups = reduction.sizes[0] * reduction.sizes[2]
    whole = threads._replace(team=32, vector=1, unroll=1) if reduction.over in REDUCTIONS else threads
    leaves = _step(replace(reduction, after=NONE), dtype, threads, 1)
    takes = _step(reduction, dtype, whole, 2)
    partials = Buffer(PARTIALS, accumulator(dtype), _MOMENTS * groups * threads.splits)
    return Program((leaves, takes), buffers=(partials,))


def reads_once(reduction: Reduction, dtype: str) -> bool:
    """Whether the kernel reads its source once: a norm's threads keep their group's values."""
    *_, last = program_of(reduction, dtype).steps
    return reduction.over not in NORMS or bool(dict(last.source.constants)["KEPT"])


def _threads(reduction: Reduction, size: int, aligned: bool) -> _Threads:
    outer, length, inner = reduction.sizes
    window = math.prod(reduction.window) if reduction.pool else 1
    few = max(1, min(_VALUES, _READ // next_power_of_two(window)))  # values of a thread, for large windows
    if inner > 1:  # a thread has values of one group, its neighbour has values of the next
        most, team, keeps = next_power_of_two(length), 1, reduction.over in NORMS
        while 32 * team < _THREADS:
            idle = outer * inner * team < MANY_BLOCKS * _THREADS and 8 * team < length
            if not idle and not (keeps and team * _VALUES < length):
                break
            team *= 2
        unroll = max(1, most // team)
        return _Threads(_THREADS, team, 1, unroll if unroll <= min(_VALUES, _MOST_LOADS // window) else few, 1, length)
    vector = 16 // size if aligned and not reduction.pool else 1
    while length % vector:
        vector //= 2
    unroll = max(1, few // vector)
    if not reduction.over:
        span = _THREADS * vector * unroll
        return _Threads(_THREADS, _THREADS, vector, unroll, -(-length // span), span)
    team = next_power_of_two(-(-length // (vector * unroll)))
    idle = outer < MANY_BLOCKS and team <= _MOST_THREADS and size < 8  # registers do not suffice for doubles
    team = team if idle else min(_THREADS, team)
    whole = -(-length // (team * vector))
    if reduction.over in NORMS and whole * vector <= min(_MOST_KEPT, _MOST_LOADS // window):  # threads keep all values
        unroll = max(unroll, whole)
    in_round = team * vector * unroll
    splits = 1
    if team == _THREADS:
        splits = min(-(-length // (_ROUNDS * in_round)), -(-_RESIDENT * MANY_BLOCKS // 2 // outer))
    span = round_up(parted(length, max(1, splits))[0], in_round)
    return _Threads(max(_THREADS, team), team, vector, unroll, -(-length // span), span)


def _step(reduction: Reduction, dtype: str, threads: _Threads, split: int = 0) -> Step:
    count, team, vector, unroll, splits, span = threads
    outer, length, inner = reduction.sizes
    reduces, groups = reduction.over in REDUCTIONS, outer * inner
    _, channels, *spatial = reduction.output_shape
    run, run_before = math.prod(spatial), math.prod(reduction.pooled[2:])
    # A value's place in a group of all channels is its channel, which a kernel then need not divide for.
    over_channels = (reduction.first, reduction.last, reduction.groups) == (1, 1, 1) and reduction.over in NORMS
    by_position = reduction.by_position or (over_channels and inner > 1)
    run, channels = (1, length) if by_position else (run, channels)
    kept = bool(reduction.over) and length <= team * vector * unroll and not split
    (_, _, *src), (_, _, *pooled) = five(reduction.shape), five(reduction.pooled)
    window = [1] * (3 - len(reduction.window)) + list(reduction.window)
    constants = (
        ("THREADS", count),
        ("TEAM", team),
        ("VECTOR", vector),
        ("UNROLL", unroll),
        ("ROWS", inner == 1),
        ("OVER", OVER.index(reduction.over)),
        ("POOL", ("", *POOLS).index(reduction.pool)),
        *((f"WINDOW_{axis}", each) for axis, each in zip("DHW", window)),
        ("KEPT", kept),
        ("ONE_CHANNEL", run % vector == 0),
        ("BY_POSITION", by_position),
        # Of pools a thread would load all windows at once, into registers that leave fewer resident blocks.
        ("WHOLE_ROUNDS", not reduction.pool and length % (team * vector * unroll) == 0),
        ("SPLIT", split),
        ("HAS_BIAS", False),
        ("MIN_BLOCKS", _RESIDENT * _THREADS // count),
    )
    after = replace(reduction.after, channels=channels) if reduction.after else NONE
    source = KernelSource(
        "reduce_groups", dtype, False, constants, folder="steps", epilogue=after, prologue=reduction.before
    )
    params = params_of(source).pack(
        groups=groups,
        length=length,
        splits=splits,
        span=span,
        inner=inner,
        run=run,
        channels=channels,
        run_before=run_before,
        channels_before=reduction.shape[1],
        **dict(zip(("depth", "height", "width"), pooled)),
        **{f"src_{name}": size for name, size in zip(("depth", "height", "width"), src)},
        sample_stride=max(1, math.prod(reduction.output_shape[1:])),
        epsilon=reduction.epsilon,
    )
    operands = (SRC, *replace(reduction, after=after).named_operands)
    partials = (PARTIALS,) if split else ()
    blocks = -(-groups * team // count) * (1 if split == 2 and reduces else splits)
    return plain_step(source, blocks, count, params, (*operands, *partials, DST))
