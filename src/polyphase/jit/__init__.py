"""Kernels compiled at run time: source, compiler, on-disk cache, launch."""
