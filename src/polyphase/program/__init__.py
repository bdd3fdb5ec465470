"""What a plan runs: kernel launches over named buffers, their typed parameters and tensor maps."""
