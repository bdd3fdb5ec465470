"""Few output channels, many taps: a layer of one tap, and ``kernels/steps/col2im.cu``, which adds up its results.

The product of all positions with all columns (output channel, tap) is the forward pass of a layer of one tap, and the
schedules of such layers compute it: no padding and no wasted products, for any kernel, stride and dilation. It stays in
the accumulator's type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from polyphase.costs import costs
from polyphase.jit.source import KernelSource
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts, Strides, dense_strides, five
from polyphase.problem.problem import DTYPE_BYTES, accumulator_bytes
from polyphase.program.params import params_of
from polyphase.program.program import Buffer, Program
from polyphase.program.step import BIAS, DST, Step, plain_step
from polyphase.schedules.cells import Gather
from polyphase.schedules.cost import slower_of
from polyphase.schedules.implicit_gemm.config import GemmConfig
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.schedule import Cost, Schedule
from polyphase.schedules.tap_gemm.tma import TapGemmTma

PRODUCT = "product"
_THREADS = 256
_SPREAD_ROWS = 128  # most rows that a block of the step `spread` writes
_LINES = 4  # outputs of a thread, if a layer has more than one dimension
_RUN = 4  # neighbours along the width of each of these outputs, if they read neighbouring columns
MOST_BYTES = 1 << 30  # most bytes of the product
MOST_OUTPUTS = 1 << 30  # most outputs that the kernel counts
# Most output channels of a group: more fill the tiles of a phase; with few taps half as many do. There is no limit if
# the products of phases with positions outside the image take longer than writing and reading a product: 8 bytes at
# 4.2 TB/s take as long as 190 to 380 input channels at 200 to 400 TFLOP/s.
_MOST_CHANNELS, _FEW_TAPS, _SAVED_INPUTS = 64, 64, 256
_LEAST_INPUTS = 32  # input channels of a group; for fewer, writing and reading a product takes longer than multiplying


class _Col2im(Schedule):
    """Shared by the schedules: all but the schedule of the layer of one tap."""

    passes = (Pass.FORWARD,)
    on_tensor_cores = True
    kept = True
    _gemm: Schedule
    _last: bool  # whether the product's columns are innermost in both formats

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        if self._spreads(problem):
            return self._gemm.supports(self._of_one_tap(problem), pass_, device)
        if problem.taps == 1:
            return "needs several taps, or a stride"
        most = _MOST_CHANNELS if problem.taps >= _FEW_TAPS else _MOST_CHANNELS // 2
        channels, inputs = problem.out_channels_per_group, problem.in_channels_per_group
        if channels > most and inputs * _positions_beside(problem) < _SAVED_INPUTS:
            return f"{channels} output channels are many (here at most {most})"
        if inputs < _LEAST_INPUTS:
            return f"{inputs} input channels are few (here at least {_LEAST_INPUTS})"
        return self._gemm.supports(self._of_one_tap(problem), pass_, device)

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        return False

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        return self._gemm.nothing_fits(self._of_one_tap(problem), device)

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Any:
        """None also if the product takes too much memory, or the layer has more outputs than the kernel counts."""
        inner, lie = self._gemm_of(problem, layouts)
        if _product_bytes(inner) > MOST_BYTES or problem.elements[2] > MOST_OUTPUTS:
            return None
        return self._gemm.ranked_at(inner, pass_, lie)

    def configs(self, at: Any, pass_: Pass, device: DeviceInfo) -> Iterable[Any]:
        return self._gemm.configs(at, pass_, device)

    def seconds(self, at: Any, pass_: Pass, device: DeviceInfo, config: Any) -> float:
        return self._gemm.seconds(at, pass_, device, config)

    def search(
        self, at: Any, pass_: Pass, device: DeviceInfo, most: int | None = None, below: float = math.inf
    ) -> dict[Any, float]:
        return self._gemm.search(at, pass_, device, most, below)

    def others(self, at: Any) -> Sequence[Any]:
        return self._gemm.others(at)

    def score(self, at: Any, seconds: Sequence[float]) -> float:
        return self._gemm.score(at, seconds)

    def own(self, at: Any) -> Sequence[Any]:
        return self._gemm.own(at)

    def arranged(self, order: list[Any]) -> list[Any]:
        return self._gemm.arranged(order)

    def refined(self, at: Any, device: DeviceInfo, config: Any) -> Any:
        return self._gemm.refined(at, device, config)

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: Any
    ) -> Cost | None:
        """The cost of the layer of one tap, and of the step, which reads the product and writes the output."""
        inner, lie = self._gemm_of(problem, layouts)
        cost = self._gemm.cost(inner, pass_, device, lie, config)
        if cost is None:
            return None
        product, size = _product_bytes(inner), DTYPE_BYTES[problem.dtype]
        moved = product + inner.bytes - inner.elements[2] * size
        seconds, bound = slower_of(cost[0], moved / device.copy_bytes_per_second)
        terms, moved = costs("col2im", device), product + problem.elements[2] * size
        share = terms.spread_bandwidth if self._spreads(problem, layouts) else terms.bandwidth
        return seconds + terms.launch + moved / (share * device.copy_bytes_per_second), bound

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: Any
    ) -> Program:
        inner, lie = self._gemm_of(problem, layouts)
        gemm = self._gemm.program(inner, pass_, device, lie, config)
        steps = [
            replace(step, operands=tuple(PRODUCT if name == DST else name for name in step.operands))
            for step in gemm.steps
        ]
        product = Buffer(PRODUCT, "float32", gemm.splits * inner.elements[2])
        return replace(
            gemm,
            steps=(*steps, self._step(problem, layouts, inner, gemm.splits)),
            buffers=(*gemm.buffers, product),
            splits=1,
        )

    def _step(self, problem: ConvTransposeProblem, layouts: Layouts, inner: ConvTransposeProblem, splits: int) -> Step:
        lies = dense_strides((problem.batch, inner.out_channels, *problem.input_size), inner.channels_last)
        step = _spread_step if self._spreads(problem, layouts) else col2im_step
        return step(problem, layouts, inner.out_channels, lies, splits)

    def _spreads(self, problem: ConvTransposeProblem, layouts: Layouts | None = None) -> bool:
        """Whether the step is ``kernels/steps/spread.cu``, which reads products whose columns are outermost.

        Without layouts: for dense tensors. A layer for which it is so has no other limits (`limits`), and col2im.cu
        serves its tensors of other layouts.
        """
        return False

    def _of_one_tap(self, problem: ConvTransposeProblem) -> ConvTransposeProblem:
        """The layer whose output channels are the columns; each image is one row."""
        columns = problem.out_channels * problem.taps
        inner = with_kernel(problem, columns, (1, 1), (1, math.prod(problem.input_size)))
        return replace(inner, channels_last=problem.channels_last or self._last)

    def _gemm_of(self, problem: ConvTransposeProblem, layouts: Layouts) -> tuple[ConvTransposeProblem, Layouts]:
        """The layer of one tap, and its layouts; images keep their shape if their rows do not follow one another.

        The weight, in either format, is that layer's weight; only the order of columns differs.
        """
        inner = self._of_one_tap(problem)
        input = as_row(problem, layouts)
        if input is None:
            inner = with_kernel(inner, inner.out_channels, (1,) * problem.dims, problem.input_size)
            input = layouts.input
        output = dense_strides(inner.output_shape, inner.channels_last)
        return inner, Layouts(input, output, aligned=layouts.aligned, in_sums=True)


class Col2im(_Col2im):
    """The GEMM is ``implicit_gemm``, which reads the input in its own layout."""

    name = "col2im"
    _gemm = ImplicitGemm()
    _last = False
    compared = 16
    best = ImplicitGemm.best
    prunes = ImplicitGemm.prunes

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: GemmConfig
    ) -> Cost | None:
        """None also for configs with taps in rows: their results are narrowed."""
        return None if config.taps_in_rows else super().cost(problem, pass_, device, layouts, config)

    def _spreads(self, problem: ConvTransposeProblem, layouts: Layouts | None = None) -> bool:
        """Where an output meets one product at most, and some meet none; and where the output is contiguous."""
        alone = all(axis.kernel <= axis.tap_step for axis in problem.axes)
        gaps = problem.taps < math.prod(problem.stride)
        long = _vectors(problem) > 0
        lies = not problem.channels_last
        if layouts is not None:
            lies = layouts.aligned and layouts.output == dense_strides(problem.output_shape, False)
        return alone and gaps and long and lies


class Col2imTma(_Col2im):
    """The GEMM is ``tap_gemm_tma``; the product's columns are innermost."""

    name = "col2im_tma"
    _gemm = TapGemmTma()
    _last = True


def with_kernel(
    problem: ConvTransposeProblem, out_channels: int, kernel: tuple[int, ...], input_size: tuple[int, ...]
) -> ConvTransposeProblem:
    """A layer without bias, with another kernel, of stride 1 and without padding."""
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    return replace(
        problem,
        out_channels=out_channels,
        input_size=input_size,
        kernel_size=kernel,
        stride=ones,
        padding=zeros,
        output_padding=zeros,
        dilation=ones,
        bias=False,
    )


def as_row(problem: ConvTransposeProblem, layouts: Layouts) -> Strides | None:
    """The strides of the input restated with each image as one row; None if its rows do not follow one another."""
    _, _, depth, height, width = five(problem.input_shape)
    image, channel, slab, row, column = layouts.input
    if (height > 1 and row != width * column) or (depth > 1 and slab != height * width * column):
        return None
    whole = depth * height * width * column
    return image, channel, whole, whole, column


def _product_bytes(inner: ConvTransposeProblem) -> int:
    return inner.elements[2] * accumulator_bytes(inner.dtype)


def col2im_step(problem: ConvTransposeProblem, layouts: Layouts, columns: int, lies: Strides, splits: int) -> Step:
    """The step that adds up the products, which are in ``splits`` partial planes."""
    gather = Gather.of(problem, Pass.FORWARD, layouts)
    lines, run = _LINES if problem.dims > 1 else 1, _RUN if _in_runs(problem, gather, lies) else 1
    constants = dict(gather.constants(THREADS=_THREADS, LINES=lines, RUN=run, MIN_BLOCKS=1))
    del constants["SRC_CHANNELS"]  # the product has none
    source = KernelSource("col2im", problem.dtype, True, tuple(constants.items()), folder="steps")
    batch, _, *sizes = gather.src.shape
    depth, height, width = gather.dst.shape[2:]
    stride = problem.axes3[1].stride
    cells = -(-height // (stride * lines))
    along = depth, cells * stride if cells > 1 else min(stride, height), width // run
    threads = batch * problem.out_channels * math.prod(along)
    params = params_of(source).pack(
        dst=gather.dst,
        sizes=along,
        channels=problem.out_channels,
        threads=threads,
        product=lies,
        product_size=sizes,
        splits=splits,
        plane=batch * columns * math.prod(sizes),
    )
    return plain_step(source, -(-threads // _THREADS), _THREADS, params, (PRODUCT, BIAS, DST))


def _vectors(problem: ConvTransposeProblem) -> int:
    """Vectors of a thread of the step `spread`; 0 if a block would write too many rows."""
    of_threads = _THREADS * 16 // DTYPE_BYTES[problem.dtype]
    fitting = (n for n in (4, 2, 1) if n * of_threads <= (_SPREAD_ROWS - 2) * problem.output_size[-1])
    return next(fitting, 0)


def _spread_step(problem: ConvTransposeProblem, layouts: Layouts, columns: int, lies: Strides, splits: int) -> Step:
    """The step that writes the output from products of which an output meets one at most."""
    gather = Gather.of(problem, Pass.FORWARD, layouts)
    vectors, vector = _vectors(problem), 16 // DTYPE_BYTES[problem.dtype]
    constants = dict(gather.constants(THREADS=_THREADS, VECTORS=vectors, MOST_ROWS=_SPREAD_ROWS, MIN_BLOCKS=1))
    del constants["SRC_CHANNELS"], constants["DST_CHANNELS_LAST"]  # the product has no channels
    source = KernelSource("spread", problem.dtype, True, tuple(constants.items()), folder="steps")
    depth, height, width = gather.dst.shape[2:]
    params = params_of(source).pack(
        sample_stride=gather.dst.strides[0],
        channels=problem.out_channels,
        slabs=depth,
        rows=height,
        columns=width,
        outputs=problem.elements[2],
        product=lies,
        product_size=gather.src.shape[2:],
        splits=splits,
        plane=problem.batch * columns * math.prod(problem.input_size),
    )
    blocks = -(-problem.elements[2] // (vector * vectors * _THREADS))
    return plain_step(source, blocks, _THREADS, params, (PRODUCT, BIAS, DST))


def _in_runs(problem: ConvTransposeProblem, gather: Gather, lies: Strides) -> bool:
    """Whether runs of neighbours along the width are in one cell, and contiguous in the product and in the output."""
    axis, dst = problem.axes3[2], gather.dst
    side_by_side = lies[1] == 1 and dst.strides[4] == 1 and not gather.weight_channels_last
    whole = (axis.kernel, axis.stride, axis.padding, dst.shape[4], dst.apart(4))
    return side_by_side and axis.dilation == 1 and gather.dtype != "float64" and all(n % _RUN == 0 for n in whole)


def _positions_beside(problem: ConvTransposeProblem) -> float:
    """Positions outside the image that cells read at a tap, for each position of the image."""
    cells = math.prod(-(-size // stride) for size, stride in zip(problem.output_size, problem.stride))
    return cells / max(1, math.prod(problem.input_size)) - 1
