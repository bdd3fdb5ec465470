// Gradients of activations, by the argument. What is NaN keeps its gradient, as in PyTorch; where an activation is
// constant, a gradient is zero, whatever it was: that of a square root behind it may be infinite.

#pragma once

#include "specialisation.cuh"
#include "epilogue/activations.cuh"

// In the order of `GRADIENTS` in program/batch_norm.py.
enum Gradient { IDENTITY, RELU, LEAKY_RELU, ELU, CLAMP, GELU, SILU, TANH, SIGMOID, HARDSWISH };

__device__ __forceinline__ float error_function(float v) { return erff(v); }
__device__ __forceinline__ double error_function(double v) { return erf(v); }

// The gradient at the argument v of the activation GRADIENT, from that of its result, g. `first` and `second` are its
// constants.
__device__ __forceinline__ accum_t activation_gradient(accum_t g, accum_t v, accum_t first, accum_t second) {
  if (GRADIENT == RELU) return v <= 0 ? 0 : g;
  if (GRADIENT == LEAKY_RELU) return v > 0 ? g : g * first;
  if (GRADIENT == ELU) return v > 0 ? g : g * (first * exponential(v));
  if (GRADIENT == CLAMP) return v <= first || v >= second ? 0 : g;
  if (GRADIENT == GELU) {
    const accum_t below = (accum_t)0.5 * (1 + error_function(v * (accum_t)0.70710678118654752440));
    return g * (below + v * (accum_t)0.39894228040143267794 * exponential(v * v * (accum_t)-0.5));
  }
  if (GRADIENT == SILU) {
    const accum_t share = sigmoid(v);
    return g * (share * (1 + v * (1 - share)));
  }
  if (GRADIENT == TANH) {
    const accum_t y = hyperbolic_tangent(v);
    return g * (1 - y * y);
  }
  if (GRADIENT == SIGMOID) {
    const accum_t y = sigmoid(v);
    return g * (y * (1 - y));
  }
  if (GRADIENT == HARDSWISH) return v <= -3 ? 0 : v >= 3 ? g : g * (v * (accum_t)(1.0 / 3) + (accum_t)0.5);
  return g;
}
