#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

// float32 as float16 (operand/scaled_half.cuh) where a sum is of many pixels: all share one power of two, that of the
// tensor's largest magnitude, and each output channel's weights one of theirs.
//
// Some pixels may be far smaller than the largest; what outputs near these want would be lost. So there are bands of
// magnitudes (operand/bands.cuh): a product is made band by band, each with a power of two of its own, and an element
// is in one of them and zero in the others. Mostly one band is enough: the smallest of the pixels' largest magnitudes
// says how many there are. (Sums are kept relative to the largest: pixels 2^-130 below it lose bits.)
//
// In front of the packed weights lie: the power of two of the first band, and how many there are; what was measured, by
// which packing finds these and what follows: by what each row of a sum is multiplied.
struct Band {
  float scale;
  int bands;
};
struct Measured {
  unsigned largest = 0, smallest = ~0u;  // bits of magnitudes: of all elements, and of the pixels' largest but zero

  __device__ __forceinline__ void take(const Measured& other) {
    largest = max(largest, other.largest), smallest = min(smallest, other.smallest);
  }
  // What all lanes of a warp have.
  __device__ __forceinline__ void take_lanes() {
#pragma unroll
    for (int by = 1; by < 32; by *= 2)
      take(Measured{__shfl_xor_sync(~0u, largest, by), __shfl_xor_sync(~0u, smallest, by)});
  }
};

struct Scales {
  static constexpr int CHANNELS = GROUPS * DST_CHANNELS;
  static constexpr int WORDS = 32 + 2 * PIXEL_PARTS + WEIGHT_PARTS * CHANNELS;  // but for the rows

  float* const words;
  __device__ __forceinline__ Scales(unsigned char* memory) : words((float*)memory) {}
  __device__ __forceinline__ Band& first_band() const { return *(Band*)words; }
  __device__ __forceinline__ Measured* pixels() const { return (Measured*)(words + 32); }
  __device__ __forceinline__ unsigned* channels() const { return (unsigned*)(pixels() + PIXEL_PARTS); }
  __device__ __forceinline__ float* rows() const { return words + WORDS; }

  // The largest weight of an output channel, of all groups.
  __device__ __forceinline__ float largest_weight(int channel) const {
    unsigned largest = 0;
#pragma unroll 4
    for (int part = 0; part < WEIGHT_PARTS; ++part) largest = max(largest, channels()[part * CHANNELS + channel]);
    return __uint_as_float(largest);
  }
};

// Bits of a magnitude, zero where it is not finite. Those of finite ones are in their order.
__device__ __forceinline__ unsigned finite_magnitude(float value) {
  const unsigned bits = __float_as_uint(value) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}
