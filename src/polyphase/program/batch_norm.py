"""Batch norm in training and an activation after it (``kernels/steps/batch_norm.cu``): two launches each way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyphase.jit.source import KernelSource
from polyphase.problem.epilogue import Epilogue, Operation
from polyphase.problem.integers import parted, round_up
from polyphase.problem.problem import DTYPE_BYTES, accumulator
from polyphase.program.params import params_of
from polyphase.program.program import Buffer, Program
from polyphase.program.reduction import OVER
from polyphase.program.step import DST, GRAD, MANY_BLOCKS, PARTIALS, Step, X, plain_step

#: The kernel's operands, in order. ``stats``: means, then factors, in the accumulator's type.
BUFFERS = (X, GRAD, "weight", "bias", "running_mean", "running_variance", PARTIALS, "stats", "of_weight", "of_bias",
           DST)  # fmt: skip

#: Activations with a derivative, numbered as in the kernel.
GRADIENTS = ("", "relu", "leaky_relu", "elu", "clamp", "gelu", "silu", "tanh", "sigmoid", "hardswish")

_THREADS = 256
_RESIDENT = 4  # resident blocks of a multiprocessor
_BLOCKS = 4 * MANY_BLOCKS  # blocks of all channels together
_MOMENTS = 3


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm of a contiguous tensor in training.

    Attributes:
        shape: the tensor's, ``(N, C, *spatial)``.
        activation: after the norm, one of `GRADIENTS`.
        wide: parameters and running statistics are float32 beside a half type.
        momentum: the share of a batch in the running statistics.
    """

    shape: tuple[int, ...]
    epsilon: float
    momentum: float
    activation: Operation | None = None
    wide: bool = False


def programs_of(norm: BatchNorm, dtype: str, aligned: bool = True) -> tuple[Program, Program]:
    """The programs of the forward and the backward pass."""
    images, channels, *spatial = norm.shape
    run = math.prod(spatial)
    vector = 16 // DTYPE_BYTES[dtype] if aligned else 1
    while run % vector:
        vector //= 2
    unroll = max(1, 16 // vector)
    length = images * run // vector
    splits = min(-(-length // (_THREADS * unroll)), -(-_BLOCKS // channels))
    span = round_up(parted(length, splits)[0], _THREADS)
    splits = -(-length // span)
    kind, given = ("", ()) if norm.activation is None else (norm.activation.kind, norm.activation.constants)
    first, second = (*given, 0.0, 0.0)[:2]

    def step(stage: int, over: str, epilogue: Epilogue) -> Step:
        constants = (
            ("THREADS", _THREADS),
            ("TEAM", _THREADS),
            ("ROWS", True),
            ("VECTOR", vector),
            ("UNROLL", unroll),
            ("OVER", OVER.index(over)),
            ("STAGE", stage),
            ("GRADIENT", GRADIENTS.index(kind)),
            ("WIDE", norm.wide),
            ("HAS_BIAS", False),
            ("MIN_BLOCKS", _RESIDENT),
        )
        source = KernelSource("batch_norm", dtype, False, constants, folder="steps", epilogue=epilogue)
        params = params_of(source).pack(
            channels=channels,
            splits=splits,
            span=span,
            length=length,
            run=run // vector,
            epsilon=norm.epsilon,
            momentum=norm.momentum,
            first=first,
            second=second,
        )
        return plain_step(source, channels * splits, _THREADS, params, BUFFERS)

    partials = Buffer(PARTIALS, accumulator(dtype), _MOMENTS * channels * splits)
    behind = Epilogue() if norm.activation is None else Epilogue((norm.activation,), channels)
    forward = (step(0, "norm", Epilogue()), step(1, "norm", behind))
    backward = (step(2, "sum", Epilogue()), step(3, "sum", Epilogue()))
    return Program(forward, buffers=(partials,)), Program(backward, buffers=(partials,))
