// What packing makes of the measured magnitudes (operand/scales.cuh), and pixels as pairs of halves.

#pragma once

#include "specialisation.cuh"
#include "core/axis.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"
#include "operand/bands.cuh"
#include "operand/scales.cuh"

constexpr int SCALES_BYTES = round_up((Scales::WORDS + SUM_ROWS) * (int)sizeof(float), 128);
// One band suffices if no pixel's largest magnitude is more than SPARED powers of two below the largest of all. Smaller
// channels of such a pixel then lose bits below 2^-19 of its largest, with two parts below 2^-27.
constexpr int SPARED = PARTS == 2 ? 12 : 20;
constexpr int LEAST_BITS = 27;  // smallest exponent bits that are distinguished

// The first band, and the number of bands, from the measured magnitudes.
__device__ __forceinline__ Band find_bands(Measured of) {
  const int largest = max((int)(of.largest >> 23), 29), smallest = max((int)(of.smallest >> 23), LEAST_BITS);
  return {scale_of_pixel(__uint_as_float(of.largest)), 1 + ceil_div(max(0, largest - smallest - SPARED), BAND)};
}

// Called by the first packing block: writes the first band, from the magnitudes that all blocks have measured. A copy
// has its own (operand/half_copies.cuh).
__device__ __forceinline__ void write_first_band(const Scales& scales) {
  if (COPIED || blockIdx.x > 0 || threadIdx.x >= 32) return;
  Measured all;
  for (int i = threadIdx.x; i < PIXEL_PARTS; i += 32) all.take(scales.pixels()[i]);
  all.take_lanes();
  if (threadIdx.x == 0) scales.first_band() = find_bands(all);
}

// Two numbers as pairs of halves: word `k` of all parts. With PARTS = 2 the second part is the rounding error of the
// first; infinities and NaN are in the second alone, since the other operand's second part may be zero.
__device__ __forceinline__ void split_halves(float first, float second, Vector<unsigned, 4> (&parts)[PARTS], int k) {
  if constexpr (PARTS == 1) {
    parts[0].value[k] = f16x2_of_floats(first, second);
  } else {
    const float largest = __uint_as_float(0x7f7fffffu);
    const bool finite[2] = {fabsf(first) <= largest, fabsf(second) <= largest};
    const unsigned high = f16x2_of_floats(finite[0] ? first : 0.f, finite[1] ? second : 0.f);
    parts[0].value[k] = high;
    parts[PARTS - 1].value[k] = f16x2_of_floats(first - widen(float16{(unsigned short)high}),
                                                second - widen(float16{(unsigned short)(high >> 16)}));
  }
}
