"""The programs that plans run: kernel launches over named buffers, their typed parameters and tensor maps."""
