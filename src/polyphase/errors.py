"""The exceptions of polyphase. Bad arguments raise PyTorch's own types instead (see `polyphase.torch_op.validate`)."""

from __future__ import annotations


class PolyphaseError(Exception):
    """Base of every exception that polyphase defines."""


class UnsupportedError(PolyphaseError, NotImplementedError):
    """The device, the dtype or the GPU cannot be served.

    Raised instead of a silent detour through another library.
    """


class CompilationError(PolyphaseError, RuntimeError):
    """A kernel did not compile, or its binary did not load.

    Attributes:
        log: what the compiler printed, in full.
        source_path: the file with the source that was compiled, or None if it could not be written.
    """

    def __init__(self, message: str, log: str = "", source_path: str | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.source_path = source_path
