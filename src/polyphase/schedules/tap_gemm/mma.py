"""Any pass of any layer by mma.sync: ``kernels/tap_gemm.cu`` and ``kernels/tap_gemm_wgrad.cu``.

The reduction runs over tap groups, some source channels at one tap, so that any number of taps and channels, any
stride, dilation and image size fits, in float32 as TF32 or in two parts. Operands have their channels innermost in
pieces of 16 bytes; other layouts are transposed and padded before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from polyphase.costs import costs
from polyphase.jit.source import KernelSource
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import parted
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import standard
from polyphase.program.params import params_of
from polyphase.program.program import Program, assemble, reading_channels_last
from polyphase.program.step import GRAD, SRC, Step, X, main_step
from polyphase.schedules.cost import slower_of, waves_of
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tap_gemm.product import (
    Product,
    as_read,
    common_limits,
    is_dense,
    kernels_change,
    pack_step,
    product_of,
    seconds_before,
)
from polyphase.schedules.tensor_cores import MAX_BOX_STEP
from polyphase.schedules.tiles import affordable_planes, constants_of

_WARPS = 8
_THREADS = 32 * _WARPS
_TABLES = 9 << 10  # bytes of shared memory beside the stages
_LONG = 4096  # terms from which the tensor cores' sums are promoted
_CHAIN = 2048  # terms that they add before each promotion
# Rows and columns of a warp in tiles of 16 and 8, and warps along the rows.
_SHAPES = (
    (4, 8, 2),
    (4, 4, 2),
    (4, 4, 4),
    (4, 4, 1),
    (2, 4, 4),
    (2, 4, 2),
    (2, 8, 1),
    (2, 4, 1),
    (2, 2, 4),
    (2, 2, 2),
    (1, 8, 1),
    (1, 4, 1),
    (1, 2, 1),
    (1, 1, 1),
    (2, 2, 8),
)


class TapConfig(NamedTuple):
    """The compile-time shape of a kernel; ``mainloop/tap_mma.cuh`` says what the names mean.

    ``mirrored``: a weight gradient whose rows are output channels.
    """

    row_tiles: int
    column_tiles: int
    row_warps: int
    stage_words: int
    min_blocks: int
    mirrored: bool = False

    @property
    def rows(self) -> int:
        """Channels of a block."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def columns(self) -> int:
        """Cells of a block, or pairs of channel and tap."""
        return 8 * self.column_tiles * (_WARPS // self.row_warps)


class _TapGemm(Schedule):
    """What the two kernels share."""

    on_tensor_cores = True
    kept = True

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        return common_limits(problem)

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> ConvTransposeProblem:
        return standard(problem)

    def source(
        self, product: Product, device: DeviceInfo, config: TapConfig, chunk: int, promote: int, **more: int
    ) -> KernelSource:
        """The kernel of a config."""
        of_kernel = product.gather.constants(
            WARPS=_WARPS,
            **dict(constants_of(config, "row_tiles column_tiles row_warps stage_words min_blocks")),
            CHUNK=chunk,
            PARTS=product.parts,
            PROMOTE=promote,
            STAGES=self.pipeline_stages(config, product.parts, device),
            **more,
        )
        unused = {"DST_CHANNELS_LAST"} if self.passes[0] is Pass.FORWARD else {"DST_CHANNELS_LAST", "HAS_BIAS"}
        constants = tuple((name, value) for name, value in of_kernel if name not in unused)
        return KernelSource(self.name, product.problem.dtype, True, constants)

    def stage_bytes(self, config: TapConfig, parts: int) -> int:
        """Shared memory of a stage."""
        raise NotImplementedError

    def pipeline_stages(self, config: TapConfig, parts: int, device: DeviceInfo) -> int:
        """Stages in shared memory: at most four, as many as leave room for the resident blocks."""
        return min(4, (device.shared_bytes_of(config.min_blocks) - _TABLES) // self.stage_bytes(config, parts))

    def pipeline_bytes(self, config: TapConfig, parts: int, device: DeviceInfo) -> int:
        """Shared memory of all stages."""
        return self.pipeline_stages(config, parts, device) * self.stage_bytes(config, parts)

    def shapes(
        self, product: Product, device: DeviceInfo, promoted: bool, words: tuple[int, ...]
    ) -> Iterator[TapConfig]:
        """Configs whose registers and shared memory suffice, and whose row blocks are full except for the last."""
        for row_tiles, column_tiles, row_warps in _SHAPES:
            tiles = row_tiles * column_tiles * (2 if promoted else 1)
            if tiles > 32:
                continue
            for stage_words in words:
                config = TapConfig(row_tiles, column_tiles, row_warps, stage_words, 1 if tiles >= 16 else 2)
                wide = tiles == 32 and stage_words > 16  # registers would spill
                full = config.rows <= 16 or config.rows < 2 * product.gather.dst_channels
                if full and not wide and self.pipeline_stages(config, product.parts, device) >= 2:
                    yield config


def _chain(product: Product, config: TapConfig) -> int:
    """Stages of `_CHAIN` terms."""
    return _CHAIN // (config.stage_words * product.word)


def _seconds(
    product: Product,
    config: TapConfig,
    device: DeviceInfo,
    blocks: int,
    stages: float,
    lines: int,
    fragments: int,
) -> float:
    """Predicted seconds of a kernel whose blocks have ``stages`` on average, each of ``rows`` and ``columns``.

    ``fragments``: operands of the instructions that a warp loads into registers in a step of k.
    """
    terms = costs("tap_gemm", device)
    warp_steps = _WARPS * config.stage_words / 8
    products = warp_steps * config.row_tiles * config.column_tiles * (3 if product.parts == 2 else 1)
    load = config.stage_words * lines / 4 / 32 * terms.piece
    cores = products * terms.operation + warp_steps * fragments * terms.fragment
    stage = max(load, cores) + terms.beside * min(load, cores) + terms.stage
    resident, waves = waves_of(blocks, config.min_blocks, device)
    alone = terms.latency * stages if resident == 1 else 0.0
    stored = config.rows * config.columns / 32 * terms.stored
    seconds: float = waves * (resident * (stages * stage + stored + terms.block) + alone) / device.clock_hz
    return seconds


class TapGemm(_TapGemm):
    """The forward pass and the input gradient: rows are destination channels, columns are cells of one phase."""

    name = "tap_gemm"
    passes = (Pass.FORWARD, Pass.INPUT_GRAD)

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if device.has_wgmma and product_of(problem, pass_, Layouts.dense(problem)).step <= MAX_BOX_STEP:
            return "superseded here by tap_gemm_tma (TMA and wgmma)"
        return super().limits(problem, pass_, device)

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return not kernels_change(problem, pass_, device)

    def stage_bytes(self, config: TapConfig, parts: int) -> int:
        return (parts * config.rows + config.columns) * (4 * config.stage_words + 16)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TapConfig]:
        product = product_of(at, pass_, Layouts.dense(at))
        terms = product.gather.src_channels * max(product.phase_taps)
        return list(self.shapes(product, device, terms > _LONG or product.parts == 2, (16, 32)))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TapConfig
    ) -> Cost:
        product, terms = product_of(problem, pass_, layouts), costs("tap_gemm", device)
        _, stages, row_blocks, tiles, splits = _cut(product, config, device)
        blocks = row_blocks * tiles * problem.groups * len(stages) * splits
        mean = sum(stages) / len(stages) / splits
        fragments = product.parts * (config.row_tiles + config.column_tiles)
        lines = product.parts * config.rows + config.columns
        work = _seconds(product, config, device, blocks, mean, lines, fragments)
        packed = row_blocks * config.rows * sum(stages) * config.stage_words * 4 * product.parts * problem.groups
        work += seconds_before(product, as_read(product, product.gather.src, layouts.aligned)[1], device)
        work += terms.pack + packed * terms.packed / device.copy_bytes_per_second
        if splits > 1:
            work += terms.reduce + 8 * splits * math.prod(product.gather.dst.shape) / device.copy_bytes_per_second
        return slower_of(work, problem.bytes / device.copy_bytes_per_second)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TapConfig
    ) -> Program:
        product = product_of(problem, pass_, layouts)
        gather = product.gather
        chunk, of_phases, row_blocks, tiles, splits = _cut(product, config, device)
        stages = max(of_phases)
        long = gather.src_channels * max(product.phase_taps) > _LONG
        promote = 1 if product.parts == 2 else _chain(product, config) if long else 0
        source = self.source(
            product, device, config, chunk, promote, PACKED_STAGES=stages, ONE_BIAS=problem.out_channels == 1
        )
        pack, packed_bytes = pack_step(product, source, config.rows, config.stage_words * product.word, stages, False)
        src, transposed = as_read(product, gather.src, layouts.aligned)
        params = params_of(source).pack(
            src=src,
            dst=gather.dst,
            columns=product.all_cells,
            tiles=tiles,
            cells=product.cells,
            splits=splits,
            plane=math.prod(gather.dst.shape),
            pairs=splits == 1 and layouts.aligned and gather.cell_axes[2].dst == 1 and gather.dst.in_pairs,
        )
        main = Step(
            source=source,
            grid=(row_blocks * len(product.phase_taps) * tiles * problem.groups, splits, 1),
            block=_THREADS,
            shared_bytes=max(self.pipeline_bytes(config, product.parts, device), 8 * config.columns),
            params=params,
        )
        program = assemble(problem, pass_, main, (pack,), packed_bytes, splits, may_split=True)
        return reading_channels_last(program, problem.dtype, {} if transposed is None else {SRC: transposed})


def _cut(product: Product, config: TapConfig, device: DeviceInfo) -> tuple[int, list[int], int, int, int]:
    """Channels of a tap group, stages of each phase, row blocks, tiles of cells, and splits of the stages.

    There are as many splits as fill one wave of blocks, with at least four stages each.
    """
    gather, depth = product.gather, config.stage_words * product.word
    chunk = product.chunk(depth)
    chunks = -(-gather.src_channels // chunk)
    stages = [-(-chunks * taps // (depth // chunk)) for taps in product.phase_taps]
    row_blocks, tiles = -(-gather.dst_channels // config.rows), -(-product.all_cells // config.columns)
    blocks = row_blocks * len(stages) * product.problem.groups * max(1, tiles)
    slots, planes = device.multiprocessors * config.min_blocks, affordable_planes(product.problem, gather.pass_)
    splits = max(1, min(slots // blocks, max(stages) // 4, planes, 64)) if is_dense(gather.dst) else 1
    return chunk, stages, row_blocks, tiles, splits


class TapGemmWgrad(_TapGemm):
    """The weight gradient: rows are channels of one side, columns are pairs of tap and channel of the other."""

    name = "tap_gemm_wgrad"
    passes = (Pass.WEIGHT_GRAD,)

    def stage_bytes(self, config: TapConfig, parts: int) -> int:
        return config.stage_words * (4 * (config.rows + config.columns) + 64)

    def configs(self, at: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> list[TapConfig]:
        found = []
        for mirrored in (False, True):
            product = product_of(at, pass_, Layouts.dense(at), mirrored)
            columns, exact = max(product.phase_taps) * product.gather.src_channels, product.parts == 2
            found += [
                config._replace(mirrored=mirrored)
                for config in self.shapes(product, device, exact, (16,) if exact else (16, 32))  # registers
                if (config.columns <= 64 or config.columns < 2 * columns)
                and config.stage_words * (config.columns + config.rows) <= 12288
            ]
        return found

    def _cut(self, product: Product, config: TapConfig, device: DeviceInfo) -> tuple[int, int, list[int], int, int]:
        """Channels of a tap group, row blocks, column blocks of each phase, stages of a part, and parts.

        There are as many parts as fill the machine, with at least eight stages each.
        """
        chunk = product.chunk(min(config.columns, 32))
        chunks = -(-product.gather.src_channels // chunk)
        column_blocks = [-(-chunks * taps // (config.columns // chunk)) for taps in product.phase_taps]
        row_blocks = -(-product.gather.dst_channels // config.rows)
        blocks = row_blocks * max(column_blocks) * len(column_blocks) * product.problem.groups
        stages = max(1, -(-product.all_cells // (config.stage_words * product.word)))
        filling = 2 * device.multiprocessors * config.min_blocks // blocks
        parts = max(1, min(filling, stages // 8, affordable_planes(product.problem)))
        return (chunk, row_blocks, column_blocks, *parted(stages, parts))

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TapConfig
    ) -> Cost:
        product, terms = product_of(problem, pass_, layouts, config.mirrored), costs("tap_gemm", device)
        _, row_blocks, column_blocks, stages, parts = self._cut(product, config, device)
        blocks = row_blocks * sum(column_blocks) * problem.groups * parts
        fragments = product.parts * (2 * config.row_tiles + config.column_tiles)
        work = _seconds(product, config, device, blocks, stages, config.rows + config.columns, fragments)
        transposed = (as_read(product, side, layouts.aligned)[1] for side in (product.gather.src, product.gather.dst))
        work += sum(seconds_before(product, how, device) for how in transposed)
        work += terms.reduce + 8 * parts * math.prod(problem.weight_shape) / device.copy_bytes_per_second
        return slower_of(work, problem.bytes / device.copy_bytes_per_second)

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: TapConfig
    ) -> Program:
        product = product_of(problem, pass_, layouts, config.mirrored)
        chunk, row_blocks, column_blocks, stages, parts = self._cut(product, config, device)
        blocks = row_blocks * max(column_blocks) * len(column_blocks) * problem.groups * parts
        exact = product.parts == 2
        flush = 0 if exact else _chain(product, config)
        source = self.source(product, device, config, chunk, int(exact), FLUSH=flush)
        src, src_transposed = as_read(product, product.gather.src, layouts.aligned)
        dst, dst_transposed = as_read(product, product.gather.dst, layouts.aligned)
        params = {
            "src": src,
            "dst": dst,
            "cells_of_all": product.all_cells,
            "cells_of_part": stages * config.stage_words * product.word,
            "cells": product.cells,
            "groups": problem.groups,
            "column_blocks": max(column_blocks),
            "plane": math.prod(problem.weight_shape),
        }
        shared_bytes = self.pipeline_bytes(config, product.parts, device)
        main = main_step(source, blocks, _THREADS, shared_bytes, params)
        of_x, of_grad = (src_transposed, dst_transposed) if config.mirrored else (dst_transposed, src_transposed)
        transposed = {name: how for name, how in ((X, of_x), (GRAD, of_grad)) if how is not None}
        return reading_channels_last(assemble(problem, pass_, main, splits=parts), problem.dtype, transposed)
