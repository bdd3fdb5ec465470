"""One transposed convolution, described once: sizes, phases, taps, and the floor in bytes and flops.

Validation, planner, kernels, tests and benchmark all read this description. It needs neither torch nor a GPU.

The layer, per spatial dimension with input size ``n``, kernel ``k``, stride ``s``, padding ``p``, output padding ``op``
and dilation ``d``::

    output_size = (n - 1)·s - 2·p + d·(k - 1) + op + 1
    y[o] += x[i]·w[t]     wherever     o = i·s + t·d - p

Write ``o = q·s + u`` with ``0 ≤ u < s``. Tap ``t`` serves phase ``u = (t·d - p) mod s`` alone, and reaches back
``shift = (t·d - p) div s`` (rounded down) input positions::

    y[q·s + u] = Σ over the taps t of phase u of   x[q - shift_t]·w[t]

So the layer is ``s`` stride-1 correlations per dimension whose outputs interleave. Only ``s / gcd(s, d)`` phases own
taps (fewer if the kernel is short); outputs of the others are the bias. Phases are counted from the output, not from
the padded output, so that phase 0 of a tile starts on an aligned element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from polyphase.problem.epilogue import NONE, Epilogue, Operand, of_input

#: The largest stride, dilation or padding that is not huge.
LARGE = 2**15

#: The least stride of a layer whose outputs are frames.
LEAST_FRAME = 32

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def accumulator(dtype: str) -> str:
    """The type of an accumulator: half types are summed in float32."""
    return "float64" if dtype == "float64" else "float32"


def accumulator_bytes(dtype: str) -> int:
    """Bytes of an accumulator."""
    return DTYPE_BYTES[accumulator(dtype)]


class Pass(Enum):
    """The three linear maps of the layer. Each one's derivatives are the other two."""

    FORWARD = "forward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"


@dataclass(frozen=True)
class Axis:
    """The layer along one spatial dimension, without its size."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def output_size(self, input_size: int, output_padding: int = 0) -> int:
        """Elements of the output for ``input_size`` elements of the input; not positive if the layer is illegal."""
        reach = self.dilation * (self.kernel - 1)
        return (input_size - 1) * self.stride - 2 * self.padding + reach + output_padding + 1

    def input_size(self, output_size: int, output_padding: int = 0) -> int:
        """The inverse of `output_size`."""
        reach = self.dilation * (self.kernel - 1)
        return (output_size - 1 + 2 * self.padding - reach - output_padding) // self.stride + 1

    def phase(self, tap: int) -> int:
        """The phase ``u`` that tap ``tap`` serves."""
        return (tap * self.dilation - self.padding) % self.stride

    def shift(self, tap: int) -> int:
        """Input positions by which tap ``tap`` reaches back from cell ``q``; negative if it reaches ahead."""
        return (tap * self.dilation - self.padding) // self.stride

    @property
    def tap_step(self) -> int:
        """The distance of taps of the same residue modulo the stride, as in ``kernels/core/axis.cuh``."""
        return self.stride // math.gcd(self.stride, self.dilation)

    @property
    def element_step(self) -> int:
        """Cells from the element of such a tap to the element of the next."""
        return self.dilation // math.gcd(self.stride, self.dilation)

    @cached_property
    def taps_by_phase(self) -> dict[int, tuple[int, ...]]:
        """The taps of each phase that owns any, in ascending order of phases and of taps.

        (There are as many phases as the stride, which has up to 63 bits, so that nothing may list all phases.)
        """
        taps: dict[int, list[int]] = {}
        for tap in range(self.kernel):
            taps.setdefault(self.phase(tap), []).append(tap)
        return {phase: tuple(taps[phase]) for phase in sorted(taps)}

    @cached_property
    def shifts(self) -> tuple[int, int]:
        """The smallest and the largest shift of any tap."""
        return self.shift(0), self.shift(self.kernel - 1)


#: If TF32 is allowed, PyTorch's forward pass of one group stays exact with fewer input or output channels than this;
#: and for images or signals, with fewer input positions (over the batch), or fewer operations.
FEW_CHANNELS = 16
FEW_POSITIONS = 128
LITTLE_WORK = 3e8
#: PyTorch's weight gradient of one group and fewer than 12 output channels rounds if these have more taps in all.
FEW_COLUMNS = 128


@dataclass(frozen=True)
class ConvTransposeProblem:
    """One call of the layer: its constants and its sizes.

    Shapes: input ``(batch, in_channels, *input_size)``, weight ``(in_channels, out_channels / groups, *kernel_size)``,
    output ``(batch, out_channels, *output_size)``. ``dtype`` is the name of a real floating-point type. ``tf32``:
    float32 operands may be rounded to TF32, and in a problem of `of_pass` they are; False for any other dtype.
    ``tf32_as_pytorch``: the forward pass rounds them whenever PyTorch does, even if exact kernels are as fast.
    ``channels_last`` is the memory format of the tensors that a call reads. ``epilogue``: the forward pass's operations
    on every output after its bias; ``prologue``: its operations on every element of the input. The values are assumed
    to be valid: `polyphase.torch_op.validate` raises the errors.
    """

    batch: int
    in_channels: int
    out_channels: int
    input_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    bias: bool = False
    dtype: str = "float32"
    channels_last: bool = False
    tf32: bool = False
    tf32_as_pytorch: bool = False
    epilogue: Epilogue = NONE
    prologue: Epilogue = NONE

    def __post_init__(self) -> None:
        if not self.prologue.is_per_channel:
            raise ValueError(f"a prologue reads elements and their channels alone, not {self.prologue}")
        if self.tf32 and self.dtype != "float32":
            object.__setattr__(self, "tf32", False)
        if self.tf32_as_pytorch and not self.tf32:
            object.__setattr__(self, "tf32_as_pytorch", False)

    @classmethod
    def make(
        cls,
        input_shape: tuple[int, ...],
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: int | tuple[int, ...] = 1,
        dtype: str = "float32",
        channels_last: bool = False,
        tf32: bool = False,
    ) -> ConvTransposeProblem:
        """A problem from an input shape ``(N, C_in, *spatial)`` and the parameters of `torch.nn`."""
        dims = len(input_shape) - 2

        def per_dim(value: int | tuple[int, ...]) -> tuple[int, ...]:
            return (value,) * dims if isinstance(value, int) else tuple(value)

        return cls(
            batch=input_shape[0],
            in_channels=input_shape[1],
            out_channels=out_channels,
            input_size=tuple(input_shape[2:]),
            kernel_size=per_dim(kernel_size),
            stride=per_dim(stride),
            padding=per_dim(padding),
            output_padding=per_dim(output_padding),
            dilation=per_dim(dilation),
            groups=groups,
            bias=bias,
            dtype=dtype,
            channels_last=channels_last,
            tf32=tf32,
        )

    def uses_tf32(self, pass_: Pass) -> bool:
        """Whether rounding to TF32 is allowed, and PyTorch rounds in this pass of such layers.

        cuDNN's algorithms differ by pass and by size. It computes forward passes in full float32 if they have few
        channels, narrow groups or little work, or are volumes with large strides or paddings (few without a stride);
        fewer input gradients, and still fewer weight gradients. Measurements, and where these rules err:
        benchmarks/experiments/011-where-pytorch-rounds; for weight gradients, 020-gradients-that-lose.
        """
        if not self.tf32:
            return False
        few = min(self.in_channels_per_group, self.out_channels_per_group)
        if self.groups > 1:
            return self._rounds_in_groups(pass_, few)
        if pass_ is Pass.FORWARD:
            return self._rounds_in_3d(few) if self.dims == 3 else few >= FEW_CHANNELS and self._rounds_by_size()
        many = (self.taps > 8 and self.in_channels >= FEW_CHANNELS) if pass_ is Pass.INPUT_GRAD else self.taps > 1
        wide = pass_ is Pass.WEIGHT_GRAD and self.out_channels * self.taps > FEW_COLUMNS
        return (self.dims == 3 and many) or wide or self.out_channels >= 12

    def _rounds_in_3d(self, few: int) -> bool:
        """`uses_tf32` for a forward pass of volumes in one group."""
        if few < FEW_CHANNELS:
            return set(self.stride) == {1} and self.in_channels < FEW_CHANNELS <= self.out_channels
        padding = max((axis.padding for axis in self.axes if axis.stride > 1), default=0)
        if max(self.stride) > 3 or padding > 1:
            return False
        return math.prod(self.stride) <= 12 or (self.taps <= 27 and (padding == 1 or self.out_channels <= 64))

    def _rounds_in_groups(self, pass_: Pass, few: int) -> bool:
        """`uses_tf32` for layers of several groups."""
        volume, without_stride = self.dims == 3, set(self.stride) == {1}
        if pass_ is Pass.WEIGHT_GRAD:
            return few >= (2 if volume and self.taps > 1 else 8)
        if pass_ is Pass.FORWARD:
            longer = (self.taps >= 27 and few >= 12) or (self.taps >= 216 and few >= 4)
            return few >= 64 or (volume and without_stride and longer)
        if volume and without_stride:
            return few >= 8 and 1 < self.taps <= 27
        return few >= (64 if volume and self.taps > 8 else 8)

    def _rounds_by_size(self) -> bool:
        """`uses_tf32` for a forward pass of images or signals with many channels."""
        if self.epilogue.normalizes:  # such an epilogue needs all channels, and kernels with exact sums hold few
            return True
        return self.batch * math.prod(self.input_size) >= FEW_POSITIONS and self.flops >= LITTLE_WORK

    @property
    def dims(self) -> int:
        """Number of spatial dimensions."""
        return len(self.kernel_size)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The layer's constants, one `Axis` per spatial dimension."""
        return tuple(map(Axis, self.kernel_size, self.stride, self.padding, self.dilation))

    @cached_property
    def axes3(self) -> tuple[Axis, Axis, Axis]:
        """`axes` as depth, height and width; a missing dimension is a kernel of one tap."""
        depth, height, width = (Axis(1),) * (3 - self.dims) + self.axes
        return depth, height, width

    @cached_property
    def output_size(self) -> tuple[int, ...]:
        """The output's spatial size."""
        return tuple(
            axis.output_size(n, extra) for axis, n, extra in zip(self.axes, self.input_size, self.output_padding)
        )

    @property
    def in_channels_per_group(self) -> int:
        """Input channels of a group."""
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.groups

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """``(N, C_in, *spatial)``."""
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``(C_in, C_out / groups, *kernel_size)``."""
        return (self.in_channels, self.out_channels_per_group, *self.kernel_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """``(N, C_out, *spatial)``."""
        return (self.batch, self.out_channels, *self.output_size)

    def of_pass(self, pass_: Pass) -> ConvTransposeProblem:
        """The problem that schedules get: gradients have no bias, and double precision has no memory format.

        Whether the pass rounds to TF32 is decided here, by this problem's size; schedules only read ``tf32``.

        Plans only know whether an epilogue reads all channels of a pixel at once, and nothing of a prologue. Both are
        added to the chosen program (`polyphase.program.epilogue`, `polyphase.program.prologue`).

        (PyTorch's results in double precision are contiguous on a GPU, whatever the operands are.)
        """
        forward = pass_ is Pass.FORWARD
        bias, last = self.bias and forward, self.channels_last and self.dtype != "float64"
        epilogue = self.epilogue.planned if forward else NONE
        tf32 = self.uses_tf32(pass_)
        found = replace(self, bias=bias, channels_last=last, tf32=tf32, epilogue=epilogue, prologue=NONE)
        return self if found == self else found

    @property
    def largest_constant(self) -> int:
        """The largest stride, dilation or padding."""
        return max(*self.stride, *self.dilation, *self.padding)

    def without_idle_constants(self) -> ConvTransposeProblem:
        """The layer with 1 for a huge stride along a single input, and for a huge dilation of a single tap."""
        if self.largest_constant <= LARGE:
            return self
        stride = tuple(1 if n == 1 and s > LARGE else s for n, s in zip(self.input_size, self.stride))
        dilation = tuple(1 if k == 1 and d > LARGE else d for k, d in zip(self.kernel_size, self.dilation))
        return replace(self, stride=stride, dilation=dilation)

    def mirrored(self) -> ConvTransposeProblem | None:
        """The layer whose forward pass is the input gradient of this layer, or None; the stride must be 1.

        Its input is this layer's output gradient. Its weight is this layer's, with taps reversed and channels
        exchanged. Its output is cropped by this layer's output padding.
        """
        padding = tuple(d * (k - 1) - p for k, p, d in zip(self.kernel_size, self.padding, self.dilation))
        if set(self.stride) != {1} or min(padding) < 0:
            return None
        return replace(
            self,
            in_channels=self.out_channels,
            out_channels=self.in_channels,
            input_size=self.output_size,
            padding=padding,
            output_padding=tuple(-extra for extra in self.output_padding),  # the input has no element there
            bias=False,
        )

    def of_lone_pixels(self) -> ConvTransposeProblem | None:
        """An equivalent layer of one tap, if images are single pixels, as the first ones of a generator are.

        Taps do not overlap then: the batch becomes a row of pixels, and every output of an image a channel of its
        pixel. Dense tensors of either format equal in memory the channels_last tensors of the returned layer. None if
        images are larger, if outputs are cropped or without taps, with groups, and with a bias, which several of these
        channels would share.
        """
        whole = not any(self.padding) and not any(self.output_padding) and self.batch > 0
        gaps = any(d > 1 and k > 1 for d, k in zip(self.dilation, self.kernel_size))
        if math.prod(self.input_size) != 1 or not whole or gaps or self.bias or self.groups > 1:
            return None
        return replace(
            self,
            batch=1,
            out_channels=self.out_channels * self.taps,
            input_size=(1, self.batch),
            kernel_size=(1, 1),
            stride=(1, 1),
            padding=(0, 0),
            output_padding=(0, 0),
            dilation=(1, 1),
            channels_last=True,
        )

    def of_frames(self) -> ConvTransposeProblem | None:
        """An equivalent stride-1 layer, if the single output channel is a row of whole frames, each one stride long.

        Frames become pixels, and the outputs of a frame its channels: the same memory, also for a weight whose channels
        are innermost. Long kernels become short ones of many channels. None if outputs have a bias, which several of
        these channels would share, or if the kernel, the padding or the output are not whole frames.
        """
        stride, *others = self.stride
        whole = all(size % stride == 0 for size in (*self.kernel_size, *self.padding, *self.output_size))
        if others or self.out_channels > 1 or stride < LEAST_FRAME or max(self.dilation) > 1 or self.bias or not whole:
            return None
        return replace(
            self,
            out_channels=stride,
            kernel_size=(self.kernel_size[0] // stride,),
            stride=(1,),
            padding=(self.padding[0] // stride,),
            output_padding=(self.output_padding[0] // stride,),  # not 0 only if the output is cropped
            channels_last=True,
        )

    @cached_property
    def taps(self) -> int:
        """Taps of the whole kernel."""
        return math.prod(self.kernel_size)

    @property
    def flops(self) -> int:
        """Multiplications and additions, each counted as one; the same for all three passes."""
        return 2 * self.batch * self.in_channels * self.out_channels_per_group * self.taps * math.prod(self.input_size)

    @cached_property
    def elements(self) -> tuple[int, int, int]:
        """Elements of the input, the weight and the output."""
        return math.prod(self.input_shape), math.prod(self.weight_shape), math.prod(self.output_shape)

    @property
    def bytes(self) -> int:
        """The fewest bytes a pass can move: input, weight and output once each, the same for all three passes.

        With an epilogue, the bytes of the forward pass: its residuals are read once.
        """
        return sum(self.elements) * DTYPE_BYTES[self.dtype] + self.residual_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes of the tensors that the epilogue reads for every output."""
        count = len(self.epilogue.residuals) if self.epilogue else 0
        return count * self.elements[2] * DTYPE_BYTES[self.dtype]

    @property
    def named_operands(self) -> dict[str, Operand]:
        """The operands of prologue and epilogue, by their names in programs, in the order of a call's."""
        before = {of_input(name): operand for name, operand in self.prologue.named_operands.items()}
        return before | self.epilogue.named_operands

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """No pass runs faster than the larger of its bytes over the bandwidth and its flops over the rate."""
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)

    def __str__(self) -> str:
        parts = [f"{'×'.join(map(str, self.input_shape))} → {self.out_channels}", f"k={_short(self.kernel_size)}"]
        for name, values, default in (
            ("s", self.stride, 1),
            ("p", self.padding, 0),
            ("op", self.output_padding, 0),
            ("d", self.dilation, 1),
        ):
            if any(value != default for value in values):
                parts.append(f"{name}={_short(values)}")
        others = (
            (f"g={self.groups}", self.groups != 1),
            ("bias", self.bias),
            (self.dtype, True),
            ("tf32", self.tf32),
            ("channels_last", self.channels_last),
            (f"then {self.epilogue}", self.epilogue),
            (f"of {self.prologue}", self.prologue),
        )
        return ", ".join([*parts, *(text for text, given in others if given)])


def _short(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "(" + ", ".join(map(str, values)) + ")"
