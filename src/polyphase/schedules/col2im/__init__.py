"""The forward pass as GEMM + col2im: the products of all positions with all taps, added up by a step behind."""
