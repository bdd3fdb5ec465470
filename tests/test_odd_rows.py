"""Rows of implicit_gemm's results that are no whole sectors of memory: sectors that pieces share count, and blocks
share their work tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernel_harness import params
from polyphase.plan.planner import programs
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import SECTOR_BYTES, Layouts
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import GemmConfig
from polyphase.schedules.implicit_gemm.cost import estimate, shared_ends
from polyphase.schedules.implicit_gemm.cuts import Tile

H200 = DeviceInfo.for_arch("sm_90a")
LAYER = ConvTransposeProblem.make((32, 3, 278, 278), 192, 3, 2, 1, tf32=True)
CONFIG = GemmConfig(64, 1, 1, 1, 1, 8, 1, "turns", True, 2, True)


def gather_of(layer: ConvTransposeProblem) -> Gather:
    return Gather.of(layer, Pass.FORWARD, Layouts.dense(layer))


def tile_of(rows: int, columns: int, pitch: int) -> Tile:
    tiles = 32, 1, -(-278 // rows), -(-278 // columns)
    return Tile(1, (1, rows, columns), (3 * pitch, 3 * pitch, pitch), 3 * pitch, 3 * pitch, 0, 4, tiles)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "columns", "pitch"), [(1, 56, 58), (2, 28, 30), (1, 32, 34), (1, 64, 66), (3, 20, 22)]
)
def test_ends_are_those_of_what_is_stored_at_once(rows: int, columns: int, pitch: int, dtype: str) -> None:
    gather = gather_of(replace(LAYER, dtype=dtype))
    piece, stored = CONFIG.piece(gather), set()
    for row in range(rows):
        stored |= {(row, (row * pitch + column) // piece) for column in range(columns)}
    pieces_of_row = len(stored) / rows * -(-278 // columns)
    in_sectors = sum(row * 555 * gather.dst_bytes % SECTOR_BYTES != 0 for row in range(64)) / 64  # of all beginnings
    assert shared_ends(gather, CONFIG, tile_of(rows, columns, pitch)) == pytest.approx(
        2 * 32 * 192 * 555 * pieces_of_row * in_sectors
    )


def test_rows_of_whole_sectors_share_none() -> None:
    tile, even = tile_of(1, 56, 58), replace(LAYER, output_padding=(0, 1))
    whole = ConvTransposeProblem.make((32, 3, 278, 280), 192, 3, 2, 1, (0, 1), tf32=True)
    for layer in (whole, replace(LAYER, channels_last=True)):
        assert shared_ends(gather_of(layer), CONFIG, tile) == 0
    assert shared_ends(gather_of(LAYER), CONFIG._replace(row_channels=16), tile) == 0
    # Rows of 556 elements are 69.5 sectors, so every other one begins at a sector; of 555 one in eight does.
    assert shared_ends(gather_of(even), CONFIG, tile) * 7 == shared_ends(gather_of(LAYER), CONFIG, tile) * 4
    seconds, bound = estimate(gather_of(LAYER), CONFIG, tile, H200, LAYER.bytes)
    assert bound == "bytes"
    assert seconds > 1.5 * LAYER.bytes / H200.copy_bytes_per_second


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_share_short_work_tiles_of_odd_rows(dtype: str) -> None:
    """Blocks that drift apart complete the sectors of neighbouring tiles too late (experiment 014)."""
    offered = programs(replace(LAYER, dtype=dtype), Pass.FORWARD, H200)
    found = [program for candidate, program in offered if candidate.schedule == "implicit_gemm"]
    assert found
    for program in found:
        assert program.main.source.kernel == "implicit_gemm"
        assert params(program)["own"] < 16
