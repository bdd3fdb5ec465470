"""Memory layouts of a call's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import mul

from polyphase.problem.problem import ConvTransposeProblem, Pass

#: Strides in elements in the order batch, channel, depth, height, width; 0 for a dimension the layer does not have.
Strides = tuple[int, int, int, int, int]

#: Values along depth, height and width.
Three = tuple[int, int, int]

#: Bytes that the widest vector access needs a tensor to be aligned to: four doubles.
ALIGNMENT = 32

#: Bytes of a sector, the unit of memory accesses.
SECTOR_BYTES = 32


@dataclass(frozen=True)
class Layouts:
    """The layouts of a call's tensors: of the input's side and the output's side of the layer, and of the weight.

    ``input``: strides of the input or its gradient, ``output``: strides of the output or its gradient.
    ``weight_channels_last``: the weight's memory order is ``(C_in, *kernel_size, C_out / groups)``, else as its shape.
    ``aligned``: the tensors that are read start at a multiple of `ALIGNMENT` bytes. ``in_sums``: the result stays in
    the accumulator's type, for another step of the same program.
    """

    input: Strides
    output: Strides
    weight_channels_last: bool = False
    aligned: bool = True
    in_sums: bool = False

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
        """Layouts of a call that reads dense tensors in the problem's memory format, and writes PyTorch's format.

        A weight's gradient is planned as contiguous, also if it gets another format in the end.
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
            return all(size == 1 or stride == want for size, stride, want in zip(five(shape), strides, wanted))

        return (
            self.weight_channels_last == dense.weight_channels_last
            and lies(problem.input_shape, self.input, dense.input)
            and lies(problem.output_shape, self.output, dense.output)
        )


def dense_strides(shape: tuple[int, ...], channels_last: bool) -> Strides:
    """The strides of a tensor ``(N, C, *spatial)`` without gaps."""
    _, channels, depth, height, width = five(shape)
    volume = depth * height * width
    if channels_last:
        return volume * channels, 1, height * width * channels, width * channels, channels
    return channels * volume, volume, height * width, width, 1


def extent(shape: tuple[int, ...], strides: Strides) -> int:
    """The largest element offset in a tensor ``(N, C, *spatial)``, plus one."""
    sizes = five(shape)
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides)) if all(sizes) else 0


def channels_innermost(channels: int, strides: Strides) -> bool:
    """Whether neighbouring channels are neighbours in memory, and neighbouring columns are not."""
    return channels > 1 and strides[1] == 1 and strides[4] != 1


def five(shape: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """A shape ``(N, C, *spatial)`` as ``(N, C, D, H, W)``."""
    batch, channels, *spatial = shape
    if len(spatial) == 2:  # by far the most frequent case
        return batch, channels, 1, spatial[0], spatial[1]
    depth, height, width = [1] * (3 - len(spatial)) + spatial
    return batch, channels, depth, height, width


def on_outputs_met(problem: ConvTransposeProblem, layouts: Layouts) -> tuple[ConvTransposeProblem, Layouts]:
    """A layer with the same gradients on a view of the output's gradient, of the outputs that taps meet; its layouts.

    Along a dimension of one tap, without padding, it has no stride, and its outputs are every s-th of the given ones.
    """
    constants = zip(problem.kernel_size, problem.padding, problem.output_padding)
    single = [kernel == 1 and padding == 0 and extra >= 0 for kernel, padding, extra in constants]
    apart = [stride if each else 1 for each, stride in zip(single, problem.stride)]
    if max(apart) == 1:
        return problem, layouts
    stride = tuple(1 if each else stride for each, stride in zip(single, problem.stride))
    extra = tuple(0 if each else extra for each, extra in zip(single, problem.output_padding))
    strides = map(mul, layouts.output, [1] * (5 - len(apart)) + apart)
    return replace(problem, stride=stride, output_padding=extra), replace(layouts, output=tuple(strides))
