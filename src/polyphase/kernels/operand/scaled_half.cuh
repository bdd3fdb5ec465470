// float32 as float16 instead of TF32: both keep 11 significant bits, and the tensor cores multiply float16 twice as
// fast. What float16 lacks is exponents. So numbers that are added up, a pixel's channels or a column's weights, are
// first multiplied by a power of two, which is exact, so that the largest is 2^14 or more and less than 2^15 (a pixel's
// below 2^-98, or a column's below 2^-113, stays smaller). Those down to 2^-28 of that keep all 11 bits; what smaller
// ones lose is less than 2^-39 of the largest. Sums of a pixel's magnitudes must stay below 2^127.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

// Operands of the tensor cores.
template <class T, bool AS_HALVES>
struct OperandOf {
  typedef T type;
};
template <>
struct OperandOf<float, true> {
  typedef float16 type;
};
typedef OperandOf<scalar_t, SCALED>::type operand_t;

// 2^(bits - 127), of normal numbers.
__device__ __forceinline__ float power_of_two(int bits) { return __uint_as_float((unsigned)bits << 23); }
// The same bits of a number.
__device__ __forceinline__ int exponent_bits(float magnitude) { return (int)(__float_as_uint(magnitude) >> 23); }

// By what a pixel's channels, or a column's weights, are multiplied. What a product of both is divided by is taken from
// them in shares that are normal numbers: a column's is the power of two of its largest weight. Where it is not finite
// the rest does not matter.
__device__ __forceinline__ float scale_of_pixel(float largest) {
  return power_of_two(268 - max(exponent_bits(largest), 29));
}
__device__ __forceinline__ float unscale_pixel(float scale) { return power_of_two(240 - exponent_bits(scale)); }
__device__ __forceinline__ float scale_of_column(float largest) {
  return power_of_two(268 - max(exponent_bits(largest), 14));
}
__device__ __forceinline__ float unscale_column(float largest) {
  return power_of_two(min(max(exponent_bits(largest), 14), 254));
}

__device__ __forceinline__ float larger_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }

__device__ __forceinline__ void scaled(float value, float scale, float16& out) { narrow(value * scale, out); }
template <class T>
__device__ __forceinline__ void scaled(T value, float, T& out) {
  out = value;
}
