"""Kernels compiled at run time: source, compiler, on-disk cache, launch."""

from polyphase.jit.compiler import Resources, compile_report

__all__ = ["Resources", "compile_report"]
