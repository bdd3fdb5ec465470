// The activations of an epilogue or a prologue, as PyTorch defines them. NaN stays NaN.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "ptx/exponential.cuh"
#include "ptx/maximum.cuh"

// Half types skip the correction of the exponent, whose relative error is 2^-24.
__device__ __forceinline__ float exponential(float v) {
  return sizeof(scalar_t) == 2 ? exp2_approximate(v * 1.44269504f) : expf(v);
}
__device__ __forceinline__ double exponential(double v) { return exp(v); }
// e^v for v <= 0, as a term of a sum: the relative error of the exponent is 2^-24.
__device__ __forceinline__ float exponential_term(float v) { return exp2_approximate(v * 1.44269504f); }
__device__ __forceinline__ double exponential_term(double v) { return exp(v); }
__device__ __forceinline__ float exponential_minus_one(float v) { return expm1f(v); }
__device__ __forceinline__ double exponential_minus_one(double v) { return expm1(v); }
__device__ __forceinline__ float log_of_one_plus(float v) { return log1pf(v); }
__device__ __forceinline__ double log_of_one_plus(double v) { return log1p(v); }
__device__ __forceinline__ float logarithm(float v) { return logf(v); }
__device__ __forceinline__ double logarithm(double v) { return log(v); }
__device__ __forceinline__ float square_root(float v) { return sqrtf(v); }
// An error of two units in the last place, by a few instructions instead of dozens.
__device__ __forceinline__ float quotient(float dividend, float divisor) {
  return divide_approximate(dividend, divisor);
}
__device__ __forceinline__ double quotient(double dividend, double divisor) { return dividend / divisor; }
__device__ __forceinline__ double square_root(double v) { return sqrt(v); }
// (1 - e) / (1 + e) with e the exponential of -2·|v|; below 1/2, where the difference would cancel, |v| + |v|³·P(v²).
// tanhf branches there, so that values are computed one after the other. Relative errors are below 5e-7.
__device__ __forceinline__ float hyperbolic_tangent(float v) {
  const float magnitude = fabsf(v), square = v * v, e = exp2_approximate(-2.88539008f * magnitude);
  float factor = 0.017235378f;
  factor = fmaf(factor, square, -0.053042162f);
  factor = fmaf(factor, square, 0.13325821f);
  factor = fmaf(factor, square, -0.33333141f);
  const float small = fmaf(magnitude * square, factor, magnitude);
  return copysignf(magnitude < 0.5f ? small : quotient(1.f - e, 1.f + e), v);
}
__device__ __forceinline__ double hyperbolic_tangent(double v) { return tanh(v); }

__device__ __forceinline__ accum_t divide(accum_t v, accum_t divisor) { return v / divisor; }
__device__ __forceinline__ accum_t relu(accum_t v) { return larger(v, 0); }
__device__ __forceinline__ accum_t leaky_relu(accum_t v, accum_t slope) { return v > 0 ? v : v * slope; }
__device__ __forceinline__ accum_t elu(accum_t v, accum_t alpha) {
  return v > 0 ? v : alpha * exponential_minus_one(v);
}
// v·Φ(v), Φ being the normal distribution function. The tail beyond |v| is two to the power of a negative polynomial of
// |v| (weighted least squares, so that errors of the product are even; 0 beyond 6). That takes half the instructions of
// erff, and nothing cancels for negative v: errors are below 3e-7, with erff 1.2e-6. At minus infinity it is 0, where
// PyTorch has NaN.
__device__ __forceinline__ float gelu(float v) {
  const float magnitude = fminf(fabsf(v), 6.f);
  float power = 1.6243137e-06f;
  power = power * magnitude - 2.5464067e-05f;
  power = power * magnitude + 0.00012327744f;
  power = power * magnitude + 0.00027974907f;
  power = power * magnitude - 0.00723552f;
  power = power * magnitude + 0.05260275f;
  power = power * magnitude + 0.4591784f;
  power = power * magnitude + 1.1511079f;
  power = power * magnitude + 1.f;
  return (v < 0 ? 0.f : v) - magnitude * exp2_approximate(-power);
}
__device__ __forceinline__ double gelu(double v) { return v * 0.5 * (1 + erf(v * 0.70710678118654752440)); }
__device__ __forceinline__ accum_t gelu_tanh(accum_t v) {
  return v * (accum_t)0.5 *
         (1 + hyperbolic_tangent((accum_t)0.79788456080286535588 * (v + (accum_t)0.044715 * v * v * v)));
}
__device__ __forceinline__ accum_t sigmoid(accum_t v) { return quotient((accum_t)1, 1 + exponential(-v)); }
__device__ __forceinline__ accum_t silu(accum_t v) { return quotient(v, 1 + exponential(-v)); }
__device__ __forceinline__ accum_t at_least(accum_t v, accum_t least) { return larger(v, least); }
__device__ __forceinline__ accum_t at_most(accum_t v, accum_t most) { return smaller(v, most); }
__device__ __forceinline__ accum_t hardswish(accum_t v) {
  return v * at_most(at_least(v + 3, 0), 6) * (accum_t)(1.0 / 6);
}
__device__ __forceinline__ accum_t softplus(accum_t v, accum_t beta, accum_t threshold) {
  return v * beta > threshold ? v : log_of_one_plus(exponential(v * beta)) / beta;
}
// sin² has the period π. Whole periods are subtracted in two parts, with a relative error of 2^-24. The remainder r is
// at most π/2, and sin²(r) = r²·P(r²): errors are below 3e-7 for angles up to 2^17, and grow beyond. From 2^23 periods
// on the remainder may exceed π/2; it is clamped, so that results stay within 0 and 1.
__device__ __forceinline__ float sine_squared(float angle) {
  const float periods = fmaf(angle, 0.31830988618f, 12582912.f) - 12582912.f;  // to the nearest number
  const float left = fmaf(periods, 8.7422776573e-8f, fmaf(periods, -3.14159274101f, angle));
  const float square = left * left > 2.4674011f ? 2.4674011f : left * left;
  float factor = -3.5647410e-6f;
  factor = fmaf(factor, square, 1.3896076e-4f);
  factor = fmaf(factor, square, -3.1716113e-3f);
  factor = fmaf(factor, square, 4.4442538e-2f);
  factor = fmaf(factor, square, -0.3333329f);
  factor = fmaf(factor, square, 1.f);
  return square * factor;
}
__device__ __forceinline__ double sine_squared(double angle) { return sin(angle) * sin(angle); }
__device__ __forceinline__ accum_t snake(accum_t v, accum_t frequency, accum_t amplitude) {
  return v + sine_squared(v * frequency) * amplitude;
}
// v·tanh(log(1 + e)) with e the exponential of v: the hyperbolic tangent is (e² + 2·e) / (e² + 2·e + 2).
__device__ __forceinline__ accum_t mish(accum_t v) {
  const accum_t e = exponential(at_most(v, 20)), part = e * (e + 2);
  return v > 20 ? v : v * quotient(part, part + 2);
}
