// One spatial dimension of the layer, and the integer arithmetic of compile-time constants.

#pragma once

struct Axis {
  int kernel, stride, padding, dilation;
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
__host__ __device__ constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Taps tap_step() apart meet elements of the same residue of the stride, element_step() elements apart.
__host__ __device__ constexpr int tap_step(Axis axis) { return axis.stride / gcd(axis.stride, axis.dilation); }
__host__ __device__ constexpr int element_step(Axis axis) { return axis.dilation / gcd(axis.stride, axis.dilation); }
