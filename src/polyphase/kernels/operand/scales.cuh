#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "operand/measured.cuh"
#include "operand/scaled_half.cuh"

// float32 as float16 (operand/scaled_half.cuh) for sums over many pixels: all pixels share one power of two, that of
// the tensor's largest magnitude; the weights of each output channel share another.
//
// Some pixels may be far smaller than the largest, and outputs near them would lose accuracy. So there are bands of
// magnitudes (operand/bands.cuh): a product is computed band by band, each with its own power of two; an element is in
// one band and zero in the others. Usually one band suffices: the smallest of the pixels' largest magnitudes gives the
// number of bands. (Sums are kept relative to the largest: pixels 2^-130 below it lose bits.)
//
// Before the packed weights are stored: the power of two of the first band and the number of bands; the measured
// magnitudes, from which packing computes these; and the factor of each row of a sum.
struct Scales {
  static constexpr int CHANNELS = GROUPS * DST_CHANNELS;
  static constexpr int WORDS = 32 + 2 * PIXEL_PARTS + WEIGHT_PARTS * CHANNELS;  // without the rows' factors

  float* const words;
  __device__ __forceinline__ Scales(unsigned char* memory) : words((float*)memory) {}
  __device__ __forceinline__ Band& first_band() const { return *(Band*)words; }
  __device__ __forceinline__ Measured* pixels() const { return (Measured*)(words + 32); }
  __device__ __forceinline__ unsigned* channels() const { return (unsigned*)(pixels() + PIXEL_PARTS); }
  __device__ __forceinline__ float* rows() const { return words + WORDS; }

  // The largest weight of an output channel, counted over all groups.
  __device__ __forceinline__ float largest_weight(int channel) const {
    unsigned largest = 0;
#pragma unroll 4
    for (int part = 0; part < WEIGHT_PARTS; ++part) largest = max(largest, channels()[part * CHANNELS + channel]);
    return __uint_as_float(largest);
  }
};

// Bits of a magnitude, zero if it is not finite. Bits of finite magnitudes are in the order of the magnitudes.
__device__ __forceinline__ unsigned finite_magnitude(float value) {
  const unsigned bits = __float_as_uint(value) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}
