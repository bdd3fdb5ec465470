// Bands of magnitudes (operand/scales.cuh): the pixels of a stage in the power of two of their band.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"
#include "operand/scaled_half.cuh"

#if SCALED
// A band ends where a number split into PARTS would lose bits: at the least normal float16, or 2^11 above it.
constexpr int LEAST = PARTS == 2 ? -3 : -14, BAND = 15 - LEAST;

// The band of a stage, one of `bands`; the band of the smallest magnitudes comes first.
struct PixelBand {
  float scale;
  bool alone, first, last;  // whether it is the only one, that of the smallest, that of the largest

  __device__ __forceinline__ PixelBand(float scale, int bands, int band)
      : scale(power_of_two(exponent_bits(scale) + BAND * (bands - 1 - band))),
        alone(bands == 1),
        first(band == 0),
        last(band == bands - 1) {}

  // The scaled number; zero if it is in another band. The band of the largest magnitudes has infinities and NaN.
  __device__ __forceinline__ float of(float value) const {
    const float multiplied = value * scale, magnitude = fabsf(multiplied);
    if (alone) return multiplied;
    const bool smaller = !first && magnitude < power_of_two(127 + LEAST), larger = !last && !(magnitude < 32768.f);
    return smaller || larger ? 0.f : multiplied;
  }
};
#else
struct PixelBand {};
#endif
