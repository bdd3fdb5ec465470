"""Transposed convolutions for PyTorch with CUDA kernels of their own: the same layer, faster.

Three ways in: call `conv_transpose1d/2d/3d` instead of those of `torch.nn.functional`, build `ConvTranspose1d/2d/3d`
instead of those of `torch.nn`, or `accelerate` a model that is already built. Importing polyphase touches no CUDA.
"""

import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING

__version__ = "0.1.0"


def _is_program() -> bool:
    """Whether Python is starting the command line: ``polyphase``, or ``python -m polyphase``."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # Python is still looking for the module that it will run
        return any(word in ("polyphase", "-mpolyphase") for word in sys.orig_argv)
    return PurePath(program).stem == "polyphase"


if TYPE_CHECKING or not _is_program():
    from polyphase.api import *  # noqa: F403
    from polyphase.api import __all__  # noqa: F401
else:  # torch takes seconds to import, and --help does not need it: names come when they are asked for

    def __getattr__(name: str) -> object:
        names = {} if name.startswith("_") else vars(import_module("polyphase.api"))
        if name not in names.get("__all__", ()):  # of modules too, which Python then imports
            raise AttributeError(f"module 'polyphase' has no attribute {name!r}")
        found: object = names[name]
        return found
