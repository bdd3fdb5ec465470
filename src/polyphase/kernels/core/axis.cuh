// One spatial dimension of the layer, and the integer arithmetic of compile-time constants.

#pragma once

struct Axis {
  int kernel, stride, padding, dilation;
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
