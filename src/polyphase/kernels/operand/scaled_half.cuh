// float32 as float16 instead of TF32: both keep 11 significant bits, and tensor cores multiply float16 twice as fast,
// but float16 has a smaller exponent range. So numbers that are added up (a pixel's channels, or a column's weights)
// are first multiplied by a power of two, which is exact, so that the largest is at least 2^14 and less than 2^15
// (below 2^-98 for a pixel, or 2^-113 for a column, it stays smaller). Numbers down to 2^-28 of the largest keep all 11
// bits; the errors of smaller ones are below 2^-39 of the largest. Sums of a pixel's magnitudes must stay below 2^127.

#pragma once

#include "specialisation.cuh"
#include "core/power_of_two.cuh"
#include "core/types.cuh"

// Operands of the tensor cores.
#if SCALED
typedef float16 operand_t;
#else
typedef scalar_t operand_t;
#endif

// The power of two of the band of largest magnitudes, and the number of bands (operand/bands.cuh).
struct Band {
  float scale;
  int bands;
};

// The scale of a pixel's channels, or of a column's weights. A product is unscaled by two factors that are normal
// numbers; a column's is the power of two of its largest weight. If the largest is not finite the scale does not
// matter.
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
