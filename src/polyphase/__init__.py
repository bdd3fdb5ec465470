"""Transposed convolutions for PyTorch with CUDA kernels of their own: the same layer, faster.

Three ways in: call `conv_transpose1d/2d/3d` instead of those of `torch.nn.functional`, build `ConvTranspose1d/2d/3d`
instead of those of `torch.nn`, or `accelerate` a model that is already built. Importing polyphase touches no CUDA.
"""

from polyphase.convert import Report, accelerate, restore
from polyphase.errors import CompilationError, PolyphaseError, UnsupportedError
from polyphase.explanation import explain
from polyphase.functional import conv_transpose1d, conv_transpose2d, conv_transpose3d
from polyphase.modules import (
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    LazyConvTranspose1d,
    LazyConvTranspose2d,
    LazyConvTranspose3d,
)
from polyphase.problem import ConvTransposeProblem

__version__ = "0.1.0"

__all__ = [
    "CompilationError",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "ConvTransposeProblem",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
    "PolyphaseError",
    "Report",
    "UnsupportedError",
    "accelerate",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "explain",
    "restore",
]
