"""The public names, imported from where they are made. Importing this module imports torch and registers operators."""

from polyphase import fused, tools  # noqa: F401
from polyphase.compile_fusion import CompileFusion, enable_compile_fusion
from polyphase.convert import Report, accelerate, restore
from polyphase.errors import CompilationError, PolyphaseError, UnsupportedError
from polyphase.explanation import explain
from polyphase.export import to_aten
from polyphase.frozen import Frozen, freeze, unfreeze
from polyphase.functional import conv_transpose1d, conv_transpose2d, conv_transpose3d
from polyphase.functional_override import override
from polyphase.modules import (
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    LazyConvTranspose1d,
    LazyConvTranspose2d,
    LazyConvTranspose3d,
)
from polyphase.problem import ConvTransposeProblem

__all__ = [
    "CompilationError",
    "CompileFusion",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "ConvTransposeProblem",
    "Frozen",
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
    "enable_compile_fusion",
    "explain",
    "freeze",
    "fused",
    "override",
    "restore",
    "to_aten",
    "unfreeze",
]
