"""The forward pass as GEMM + col2im: the products of all positions with all taps, which a second step adds up."""
