"""What the wgmma kernels of both gradients can be specialised to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem, Pass
from polyphase.problem.integers import round_up
from polyphase.schedules.tensor_cores import OPERATION_BYTES
from polyphase.schedules.window_gemm.window import channel_pitch

GROUPS = 2  # consumer warpgroups; ``mainloop/window_wgmma.cuh`` fixes their registers for this number
LOADERS = 128  # threads of the producer warpgroup
_STAGES = (6, 5, 4, 3)  # pipeline depths, deepest first
_MOST_COLUMNS = 256  # N of a wgmma
_MOST_SUMS = 256  # N x m64 tiles per warpgroup: 128 fp32 accumulators per thread
# K accumulated in tensor cores before a flush; an input gradient with longer K keeps a second accumulator set, so its
# tile is at most half.
FLUSH = 8192


class WgmmaConfig(NamedTuple):
    """The compile-time shape of a kernel, as ``mainloop/window_wgmma.cuh`` has it.

    ``row_tiles``: m64 tiles of a warpgroup; ``columns``: N of a CTA, input channels; ``out_chunk``: output channels of
    a CTA (weight gradient) or of a K-tile (input gradient); ``positions`` of a tile; ``buffers``: stages of the
    pipeline.
    """

    row_tiles: int
    columns: int
    out_chunk: int
    positions: int
    buffers: int

    @property
    def rows(self) -> int:
        """M of a CTA: positions, or (output channel, tap) pairs."""
        return 64 * GROUPS * self.row_tiles


def is_long_sum(problem: ConvTransposeProblem) -> bool:
    """Whether an input gradient's K is longer than what tensor cores should accumulate."""
    return problem.out_channels_per_group * problem.taps > FLUSH


def legal_configs(problem: ConvTransposeProblem, pass_: Pass) -> Iterator[WgmmaConfig]:
    """Every config of a layer; whether its stages fit shared memory is for its tiles to say."""
    for shape, stages in itertools.product(_shapes(problem, pass_), _STAGES):
        yield shape._replace(buffers=stages)


def _shapes(problem: ConvTransposeProblem, pass_: Pass) -> Iterator[WgmmaConfig]:
    """Configs worth a thought, their pipeline depth left open."""
    out, taps, size = problem.out_channels_per_group, problem.taps, DTYPE_BYTES[problem.dtype]
    if problem.channels_last:  # C_out is folded into the taps along w
        out, taps = 1, out * taps
    operation = OPERATION_BYTES // size
    most = _MOST_SUMS // 2 if pass_ is Pass.INPUT_GRAD and is_long_sum(problem) else _MOST_SUMS
    n_granularity = channel_pitch(problem, problem.in_channels_per_group) // size if problem.channels_last else 8
    widths = {
        round_up(
            math.ceil(problem.in_channels_per_group / math.ceil(problem.in_channels_per_group / max_n)), n_granularity
        )
        for max_n in (_MOST_COLUMNS, 128, 64)
    }
    for columns, row_tiles in itertools.product(sorted(widths), (1, 2, 3, 4)):
        if columns * row_tiles > most:
            continue
        config = WgmmaConfig(row_tiles=row_tiles, columns=columns, out_chunk=1, positions=1, buffers=min(_STAGES))
        if pass_ is Pass.WEIGHT_GRAD:
            if taps > config.rows:
                continue
            chunk = math.ceil(out / math.ceil(out * taps / (config.rows // taps * taps)))
            for positions in (4 * operation, 8 * operation, 16 * operation):
                yield config._replace(out_chunk=chunk, positions=positions)
        else:
            for chunk in (1, 2, 4, 8, 16, 32, 64, 128):
                if chunk * taps % operation == 0 and 2 <= chunk * taps // operation <= 32 and chunk < 2 * out:
                    yield config._replace(out_chunk=chunk, positions=config.rows)
