"""What an algorithm tells the planner, and what a plan tells the launcher."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from polyphase.problem import DTYPE_BYTES, Pass, accumulator_bytes

if TYPE_CHECKING:
    from polyphase.device import DeviceInfo
    from polyphase.jit.source import Constant, KernelSource
    from polyphase.problem import ConvTransposeProblem

#: Strides in elements in the order batch, channel, depth, height, width; 0 for a dimension the layer does not have.
Strides = tuple[int, int, int, int, int]


#: Extents along n, d, h and w.
Four = tuple[int, int, int, int]

#: Bytes that the widest vector access needs a tensor to be aligned to: four doubles.
ALIGNMENT = 32

#: What memory is read and written in.
SECTOR_BYTES = 32

#: Pixels of an image up to which it is tiny: a kernel may take such images as a whole.
TINY = 64

#: Channels of a group, not so few as to be those of an image, with which images are large.
FEW_CHANNELS = range(4, 33)

# Planes of partial sums take at most this many bytes, or as much as the weight itself.
_MAX_PLANES_BYTES = 64 << 20

#: Bytes of a tensor map, which is also aligned to half of that.
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Layouts:
    """How the tensors of a call lie: the input's side and the output's side of the layer, and the weight.

    ``input`` are the strides of the input or its gradient, ``output`` those of the output or its gradient.
    ``weight_channels_last``: the weight's memory order is ``(C_in, *kernel_size, C_out / groups)``, else as its shape.
    ``aligned``: the tensors that are read start at a multiple of `ALIGNMENT` bytes.
    """

    input: Strides
    output: Strides
    weight_channels_last: bool = False
    aligned: bool = True

    @classmethod
    def dense(cls, problem: ConvTransposeProblem) -> Layouts:
        """Tensors without gaps, in the problem's memory format. A weight that has two formats at once is contiguous."""
        return cls(
            dense_strides(problem.input_shape, problem.channels_last),
            dense_strides(problem.output_shape, problem.channels_last),
            problem.channels_last and problem.out_channels_per_group > 1 and problem.taps > 1,
        )

    @classmethod
    def of_call(cls, problem: ConvTransposeProblem, pass_: Pass) -> Layouts:
        """Tensors of a call that reads dense ones in the problem's memory format, and writes what PyTorch would.

        A weight's gradient is planned as if it were contiguous, whatever format it is given in the end.
        """
        read, written = cls.dense(problem), cls.dense(problem.of_pass(pass_))
        if pass_ is Pass.FORWARD:
            return replace(read, output=written.output)
        if pass_ is Pass.INPUT_GRAD:
            return replace(read, input=written.input)
        return replace(read, weight_channels_last=False)

    def are_dense(self, problem: ConvTransposeProblem) -> bool:
        """Whether tensors have no gaps, in the problem's memory format."""
        dense = Layouts.dense(problem)

        def lies(shape: tuple[int, ...], strides: Strides, wanted: Strides) -> bool:
            sizes = (*shape[:2], *(1,) * (5 - len(shape)), *shape[2:])
            return all(size == 1 or stride == want for size, stride, want in zip(sizes, strides, wanted))

        return (
            self.weight_channels_last == dense.weight_channels_last
            and lies(problem.input_shape, self.input, dense.input)
            and lies(problem.output_shape, self.output, dense.output)
        )


def dense_strides(shape: tuple[int, ...], channels_last: bool) -> Strides:
    """The strides of a tensor ``(N, C, *spatial)`` without gaps."""
    _, channels, *spatial = shape
    depth, height, width = [1] * (3 - len(spatial)) + spatial
    volume = depth * height * width
    if channels_last:
        return volume * channels, 1, height * width * channels, width * channels, channels
    return channels * volume, volume, height * width, width, 1


def extent(shape: tuple[int, ...], strides: Strides) -> int:
    """The largest element offset in a tensor ``(N, C, *spatial)``, plus one."""
    sizes = (shape[0], shape[1], *(1,) * (5 - len(shape)), *shape[2:])
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides)) if all(sizes) else 0


def channels_innermost(channels: int, strides: Strides) -> bool:
    """Whether neighbouring channels are neighbours in memory, and neighbouring columns are not."""
    return channels > 1 and strides[1] == 1 and strides[4] != 1


@dataclass(frozen=True)
class Candidate:
    """One variant of an algorithm for a problem, with its predicted time and what bounds it."""

    algorithm: str
    variant: Any
    seconds: float
    bound: str

    def describe(self) -> str:
        """The variant in one line."""
        settings = (f"{name}={value}" for name, value in self.variant._asdict().items())
        return f"{self.algorithm}({', '.join(settings)})"


@dataclass(frozen=True)
class Boxes:
    """Boxes of a kernel's tensor, as Hopper's copy engine takes them: what a tensor map says but the address.

    Dimensions are listed innermost first, ``strides`` in bytes, without the first dimension's. ``box`` are the elements
    that are brought, of every ``steps``-th of the tensor. Chunks of 16 bytes change places within ``swizzle`` bytes.
    ``tf32``: float32 elements are rounded to TF32 on their way. ``tensor`` counts the kernel's tensors.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    tf32: bool
    tensor: int = 0
    steps: tuple[int, ...] = (1, 1, 1, 1, 1)

    @property
    def spans(self) -> tuple[int, ...]:
        """Elements of the tensor from a box's first to its last, along each dimension."""
        return tuple((count - 1) * step + 1 for count, step in zip(self.box, self.steps))

    @property
    def element(self) -> str:
        """What boxes are made of: ``"tf32"``, or the dtype."""
        return "tf32" if self.tf32 and self.dtype == "float32" else self.dtype


def engine_strides(dimensions: Iterable[tuple[int, int]]) -> tuple[int, ...] | None:
    """The ``strides`` of `Boxes` for dimensions of so many elements, so many bytes apart.

    None where the copy engine does not take them.
    """
    found = tuple(16 if count == 1 else step for count, step in dimensions)
    return found if all(0 < step < 2**40 and step % 16 == 0 for step in found) else None


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete but for the pointers. ``planes`` > 1: partial sums that the caller adds up.

    ``in_parts``: whether an input's gradient comes in planes at some sizes of the layer, which lie as it does.
    ``planes_channels_last``: a weight's gradient comes in the order ``(C_in, *kernel_size, C_out / groups)``;
    ``narrowed``: the one plane comes in the tensors' type, not in the accumulator's.
    ``geometry`` is the kernel's last parameter; there is none where it is empty.
    It begins with `TENSOR_MAP_BYTES` for the tensor map of each of ``boxes``, left to be filled in.
    A ``prologue`` runs before it and writes ``workspace_bytes`` from the weight, which the kernel reads instead. One
    of its own runs before that, and reads the kernel's source, too.
    ``turned``: as many of the kernel's first tensors the caller brings to channels_last before, and its result back
    after, by the kernel ``turn`` (`turning`).
    ``one_way``: the same kernel for tensors that lie as these do alone, which takes less time to compile.
    """

    source: KernelSource
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    geometry: bytes
    planes: int = 1
    in_parts: bool = False
    planes_channels_last: bool = False
    narrowed: bool = False
    prologue: Launch | None = None
    workspace_bytes: int = 0
    turned: int = 0
    turn: KernelSource | None = None
    boxes: tuple[Boxes, ...] = ()
    one_way: KernelSource | None = None

    @property
    def prologues(self) -> tuple[Launch, ...]:
        """All that run before it, in order."""
        return () if self.prologue is None else (*self.prologue.prologues, self.prologue)

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        """The kernels to compile: its own, the prologue's, and what turns its tensors."""
        prologue = () if self.prologue is None else self.prologue.sources
        return (self.source, *prologue, *(() if self.turn is None else (self.turn,)))


def plain_launch(source: KernelSource, blocks: int, threads: int, geometry: bytes = b"") -> Launch:
    """The launch of a kernel that has a row of blocks, and no shared memory but its own."""
    return Launch(source=source, grid=(blocks, 1, 1), block=threads, shared_bytes=0, geometry=geometry)


class Algorithm(Protocol):
    """One way to compute a pass. ``any_size``: a layer that it does not refuse it computes at every size.

    ``adapts``: gradients, too, take another of its candidates where that is clearly faster at the size at hand.
    """

    name: str
    any_size: bool
    adapts: bool

    def __hash__(self) -> int: ...

    def refusal(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        """Why the algorithm cannot compute the pass, or None where it can."""

    def candidates(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts
    ) -> Iterator[Candidate]:
        """Variants in rising order of predicted time, each predicted when it is asked for.

        Which variants these are, and their order, does not depend on batch and image size, but on whether images are
        tiny, are whole lines of memory, how even their rows are, and whether the cores take their pixels as they lie;
        so new sizes compile few kernels.
        """

    def launch(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, variant: Any
    ) -> Launch:
        """The launch of one variant."""


def typical(problem: ConvTransposeProblem, sides: tuple[int, int, int] = (4096, 64, 32)) -> ConvTransposeProblem:
    """The layer at the size that choices are made at, so that it keeps its kernel whatever images it meets.

    ``sides`` are those of images in one, two and three dimensions.
    """
    side = sides[problem.dims - 1]
    needed = (axis.input_size(side * axis.stride) for axis in problem.axes)
    # Layers that double images mostly pad their outputs to whole cells; odd rows could not be moved 16 bytes at once.
    # Nor those of images that had to be larger, where they are no tiny ones.
    sizes = tuple(max(side, round_up(size, 8) if size > side >= 32 else size) for size in needed)
    padding = tuple(-axis.output_size(1) % axis.stride if axis.stride % 2 == 0 else 0 for axis in problem.axes)
    return replace(problem, batch=1024, input_size=sizes, output_padding=padding)


def is_tiny(problem: ConvTransposeProblem) -> bool:
    """Whether images are tiny. Layers have other kernels for such images; not those of one tap, which have no halo."""
    return math.prod(problem.input_size) <= TINY and problem.taps > 1


def standard(problem: ConvTransposeProblem) -> ConvTransposeProblem:
    """The layer at the `typical` size of its kind: of tiny images, or of all others."""
    return typical(problem, (16, 4, 2)) if is_tiny(problem) else typical(problem)


def with_large_images(problem: ConvTransposeProblem) -> ConvTransposeProblem:
    """The layer at the size of large images, as layers with few channels have, unless its own are tiny."""
    return standard(problem) if is_tiny(problem) else replace(typical(problem, (16384, 256, 64)), batch=64)


def has_odd_rows(problem: ConvTransposeProblem) -> bool:
    """Whether rows of the input are too odd for asynchronous copies of 4 bytes."""
    return DTYPE_BYTES[problem.dtype] == 2 and problem.input_size[-1] % 2 == 1 and not problem.channels_last


def compared(problem: ConvTransposeProblem, pass_: Pass) -> ConvTransposeProblem:
    """The layer at the size at which algorithms are compared: `standard`, but wide images where channels are few.

    For the forward pass in half precision, channels first, rows are as odd as those of the layer's images: elements of
    odd ones are loaded one by one. And where no tap reads beside its pixel, images can be operands as they lie
    (`implicit_gemm`), unless their pixels are no whole pieces of 16 bytes; nor are those then that stand for them.
    """
    few = all(n in FEW_CHANNELS for n in (problem.in_channels_per_group, problem.out_channels_per_group))
    sized = with_large_images(problem) if few else standard(problem)
    if DTYPE_BYTES[problem.dtype] != 2:
        return sized
    *sides, width = sized.input_size
    could = not few and all(axis.shifts == (0, 0) for axis in problem.axes)
    if could and not is_tiny(problem) and math.prod(problem.input_size) % 8:
        sides, width = [(side - 1) | 1 for side in sides], width // 8 * 8 - 4
    if pass_ is Pass.FORWARD and has_odd_rows(problem):
        width = (width - 1) | 1
    return replace(sized, input_size=(*sides, width))


def two_dimensions(blocks: int) -> tuple[int, int]:
    """``blocks`` as a grid's y and z, which take 65535 each; the last row may be longer than needed."""
    rows = max(1, math.ceil(blocks / 65535))
    return math.ceil(blocks / rows), rows if blocks else 0


def first_candidates(
    name: str, variants: Iterable[Any], predict: Callable[[Any], tuple[float, str] | None], count: int
) -> Iterator[Candidate]:
    """The first ``count`` of ``variants`` that ``predict`` has a time and a bound for: None where no tile fits."""
    predicted = ((variant, predict(variant)) for variant in variants)
    candidates = (Candidate(name, variant, *found) for variant, found in predicted if found is not None)
    return itertools.islice(candidates, count)


def rounds_of(blocks: int, min_blocks: int, device: DeviceInfo) -> tuple[int, float]:
    """Blocks that are resident on a multiprocessor together, at most ``min_blocks``, and rounds of those.

    Rounds are whole where there are few.
    """
    resident = max(1, min(min_blocks, math.ceil(blocks / device.multiprocessors)))
    rounds = blocks / (device.multiprocessors * resident)
    return resident, math.ceil(rounds) if rounds < 4 else rounds + 0.5


def cost_seconds(problem: ConvTransposeProblem, device: DeviceInfo, multiprocessor_cycles: float) -> tuple[float, str]:
    """Predicted time from the cycles summed over all multiprocessors, and whether bytes or instructions bound it."""
    work = multiprocessor_cycles / (device.multiprocessors * device.clock_hz)
    return slower_of(work, problem.bytes / device.copy_bytes_per_second)


def slower_of(work: float, moving: float) -> tuple[float, str]:
    """Predicted time from the seconds that instructions and bytes take, and which of them bound it."""
    return max(work, moving), "bytes" if moving > work else "instructions"


class Sharing(NamedTuple):
    """When blocks share their work, so that each takes the next piece that none has instead of every n-th.

    A block would have so many pieces at least, of so many cycles, and these would take at most so many times what the
    layer's bytes take: bytes must be what blocks compete for.
    """

    rounds: int
    cycles: float
    most: float

    def pays(
        self, rounds: float, predict: Callable[[], tuple[float, str]], layer_bytes: int, device: DeviceInfo
    ) -> bool:
        """Whether it does for ``rounds`` of pieces; ``predict`` gives their seconds, and what bounds them."""
        if rounds < self.rounds:
            return False
        seconds, _ = predict()
        long_enough = seconds * device.clock_hz >= rounds * self.cycles
        return long_enough and seconds <= self.most * layer_bytes / device.copy_bytes_per_second


def counter_bytes(count: int) -> int:
    """What so many counters take in front of a kernel's weights (kernels/core/counters.cuh)."""
    return round_up(4 * count, 128)


def padded(geometry: bytes, multiple: int = 8) -> bytes:
    """A kernel's parameter filled up to what its next member, or itself, is aligned to."""
    return geometry + bytes(-len(geometry) % multiple)


def tiles_of(batch: int, sizes: Iterable[int], extent: Four) -> Four:
    """Tiles of ``extent`` along n, d, h and w that images of three ``sizes`` come to."""
    n, d, h, w = (math.ceil(size / side) for size, side in zip((batch, *sizes), extent))
    return n, d, h, w


def arranged(batch: int, sizes: tuple[int, int, int], threads: int) -> Four:
    """How so many threads extend along n, d, h and w: along w first, in tiles of about the same size."""
    extents = []
    for size in (*sizes[::-1], batch):
        extents.append(math.ceil(size / math.ceil(size / threads)) if size else 1)
        threads //= extents[-1]
    w, h, d, n = extents
    return n, d, h, w


def layer_constants(
    problem: ConvTransposeProblem, pass_: Pass, weight_channels_last: bool = False
) -> tuple[tuple[str, Constant], ...]:
    """What a kernel is specialised by that knows input and output, not source and destination."""
    out, taps = problem.out_channels_per_group, problem.taps
    return (
        ("AXIS_D", problem.axes3[0]),
        ("AXIS_H", problem.axes3[1]),
        ("AXIS_W", problem.axes3[2]),
        ("INPUT_GRAD", pass_ is Pass.INPUT_GRAD),
        ("IN_CHANNELS", problem.in_channels_per_group),
        ("OUT_CHANNELS", out),
        ("WEIGHT_STRIDE_IN", out * taps),
        ("WEIGHT_STRIDE_OUT", 1 if weight_channels_last else taps),
        ("WEIGHT_STRIDE_TAP", out if weight_channels_last else 1),
    )


def out_blocks(problem: ConvTransposeProblem, out_chunk: int) -> int:
    """Blocks that so many output channels each come to, of all groups."""
    return problem.groups * math.ceil(problem.out_channels_per_group / out_chunk)


@lru_cache(maxsize=4096)
def packed_divisor(value: int) -> bytes:
    """The kernel's ``Divisor``: for 0 ≤ n < 2³¹, n · reciprocal / 2^shift rounds down to n // value.

    T. Granlund and P. Montgomery, Division by Invariant Integers using Multiplication, 1994. Nothing divides by zero:
    an empty batch has no tiles, and is not launched.
    """
    value = max(1, value)
    shift = 31 + (value - 1).bit_length()
    return struct.pack("<iIi", value, -(-(1 << shift) // value), shift)


def affordable_planes(problem: ConvTransposeProblem, pass_: Pass = Pass.WEIGHT_GRAD) -> int:
    """Planes of partial sums of a gradient that memory may be spent on."""
    elements = problem.elements[1] if pass_ is Pass.WEIGHT_GRAD else problem.elements[0]
    return max(1, _MAX_PLANES_BYTES // (max(1, elements) * accumulator_bytes(problem.dtype)))


def parted(total: int, parts: int) -> tuple[int, int]:
    """The length of each of about so many parts of ``total``, and how many of that length there are."""
    length = max(1, math.ceil(total / parts))
    return length, max(1, math.ceil(total / length))


def equal_parts(count: int) -> list[int]:
    """What ``count`` comes to in equal parts, rounded up; the largest first."""
    return sorted({math.ceil(count / parts) for parts in range(1, count + 1)}, reverse=True)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (max(1, value) - 1).bit_length()
