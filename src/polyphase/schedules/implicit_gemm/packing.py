"""Steps before `implicit_gemm`: packing weights, after measuring them if float32 is multiplied as float16."""

from __future__ import annotations

import math

from polyphase.jit.source import Constant, KernelSource
from polyphase.problem.integers import round_up
from polyphase.program.params import params_of
from polyphase.program.step import SRC, WEIGHT, WORKSPACE, Step, plain_step
from polyphase.schedules.cells import Gather
from polyphase.schedules.implicit_gemm.config import CHUNK_BYTES, ROWS, Product, Taps
from polyphase.schedules.implicit_gemm.cuts import copy_sizes, pixels_join
from polyphase.schedules.tiles import constants_of

_PIXEL_PARTS = 264  # blocks that measure pixels: two for each multiprocessor of an H200
_MEASURING_THREADS = 256
_MEASURING_LANES = 16  # neighbouring threads, at least, each with neighbouring pixels
_MEASURED_CHANNELS = 8  # channels of a thread, at least
_PACKED_ROWS = 512  # rows that a block packs if taps are rows


def pack_weights(product: Product) -> tuple[Step, ...]:
    """The kernel that packs the weights, after the one that measures, if there is one."""
    measure = (_measure_scales(product),) if product.config.scaled else ()
    return (*measure, _packing_step(product))


def packing_constants(product: Product) -> tuple[tuple[str, Constant], ...]:
    """The constants that decide how weights are packed."""
    gather, config = product.gather, product.config
    names = "channel_blocks lines stacked width_parts k_steps parts taps_in_rows row_channels"
    return gather.constants(
        SCALED=config.scaled,
        COPIED=gather.original is not None,
        **(_measured(gather) | {"SUM_ROWS": _sum_rows(product)} if config.scaled else {}),
        **dict(constants_of(config, names)),
        OPERATIONS=product.operations,
        COUNTER_BYTES=product.counter_bytes,
        MIN_BLOCKS=1,
    )


def scales_bytes(product: Product) -> int:
    """Bytes between counters and weights: ``SCALES_BYTES`` in kernels/operand/measured_bands.cuh."""
    if not product.config.scaled:
        return 0
    gather = product.gather
    measured = 2 * _PIXEL_PARTS + _weight_parts(gather) * gather.groups * gather.dst_channels
    return round_up(4 * (32 + measured + _sum_rows(product)), 128)


def _packing_step(product: Product) -> Step:
    gather, config = product.gather, product.config
    constants = [each for each in packing_constants(product) if each[0] != "HAS_BIAS"]
    if config.taps_in_rows:
        rows = Taps.of(gather.axes).rows(config.row_channels, config.lines)
        sets = product.row_groups // (gather.groups * product.line_groups) * config.channel_blocks
        together = max(1, min(sets, _PACKED_ROWS // (2 if config.scaled else 1) // rows))
        blocks = gather.groups * product.line_groups * product.steps * math.ceil(sets / together)
        threads = min(256, round_up(together * rows, 32))
        constants += [("SLAB_SETS", together), ("SLAB_THREADS", threads)]
        source = KernelSource("pack_taps", gather.dtype, False, tuple(constants), folder="steps")
        return plain_step(source, blocks, threads)
    places = product.line_groups * product.operations // config.channel_blocks * (ROWS // config.line_rows)
    row_blocks = product.row_groups // product.line_groups * config.channel_blocks
    # A block packs up to 16 KB of 16-byte chunks, less if there would be few blocks. Runs of the innermost dimension in
    # memory, channels or taps, stay long. Weights that become float16 are staged as float32, twice as large.
    if gather.weight_channels_last:
        slabs = [(config.line_rows, taps) for taps in (16, 8, 4, 2, 1)]
    else:
        slabs = [(channels, min(places, 64 if config.scaled else 128)) for channels in (64, 32, 16)]
        slabs = [slab for slab in slabs if slab[0] <= config.line_rows]
    for channels, taps in slabs:
        blocks = 2 * product.steps * row_blocks * config.line_rows // channels * math.ceil(places / taps)
        if channels * taps <= 1024 and blocks >= 256:
            break
    threads = min(256, max(64, round_up(channels * taps, 32)))
    constants += [("SLAB_CHANNELS", channels), ("SLAB_TAPS", taps), ("SLAB_THREADS", threads)]
    source = KernelSource("pack_weights", gather.dtype, False, tuple(constants), folder="steps")
    return plain_step(source, blocks, threads)


def _measure_scales(product: Product) -> Step:
    """The kernel that measures weights, and pixels unless they are copied, for their scales as float16."""
    copied, gather = product.gather.original is not None, product.gather.original or product.gather
    shape, strides = gather.src.shape[2:], gather.src.strides
    one_row = pixels_join(gather)
    sizes = (1, 1, math.prod(shape)) if one_row else shape
    row = sizes[2] if one_row else math.gcd(shape[2], math.gcd(strides[2], strides[3]))
    vector = 4 if max(copy_sizes(gather, row)) == CHUNK_BYTES else 1
    pixels = math.prod(shape)
    lanes = 1
    most = max(_MEASURING_LANES, _MEASURING_THREADS * _MEASURED_CHANNELS // gather.src_channels)
    while 2 * lanes <= min(most, _MEASURING_THREADS) and lanes * vector < pixels:
        lanes *= 2
    runs = math.ceil(pixels / (lanes * vector))
    blocks = (0 if copied else _PIXEL_PARTS) + _weight_tiles(gather) * _weight_parts(gather)
    constants = gather.constants(
        SCALED=True,
        COPIED=copied,
        **_measured(gather),
        COUNTER_BYTES=product.counter_bytes,
        MIN_BLOCKS=1,
    )
    known = tuple(each for each in constants if each[0] not in ("HAS_BIAS", "DST_CHANNELS_LAST"))
    source = KernelSource("measure_scales", gather.dtype, False, known, folder="steps")
    params = params_of(source).pack(
        src=gather.src,
        sizes=(1, *sizes),
        runs=runs,
        all_runs=gather.src.shape[0] * gather.groups * runs,
        pixels=pixels,
        lanes=lanes,
        vector=vector,
    )
    operands = (WEIGHT, WORKSPACE) if copied else (WEIGHT, WORKSPACE, SRC)
    return plain_step(source, blocks, _MEASURING_THREADS, params, operands)


def _measured(gather: Gather) -> dict[str, Constant]:
    """The constants that give the layout of the measured magnitudes."""
    return {"GROUPS": gather.groups, "PIXEL_PARTS": _PIXEL_PARTS, "WEIGHT_PARTS": _weight_parts(gather)}


def _weight_tiles(gather: Gather) -> int:
    """Blocks that measure the output channels of all groups, in one part of the input channels."""
    return gather.groups * math.ceil(gather.dst_channels / max(1, _MEASURING_THREADS // gather.taps))


def _weight_parts(gather: Gather) -> int:
    """Parts of the input channels in which weights are measured, so that there are enough blocks."""
    return max(1, min(256 // _weight_tiles(gather), gather.src_channels // 16))


def _sum_rows(product: Product) -> int:
    return product.row_groups * product.row_blocks * ROWS
