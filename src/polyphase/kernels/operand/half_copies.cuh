// Copies of float32 tensors in float16, for kernels that multiply these instead of TF32: both keep 11 significant
// bits, and tensor cores multiply float16 twice as fast, but float16 has a smaller exponent range. So a tensor is
// multiplied by a power of two, which is exact. It follows from the largest magnitude among samples
// (steps/sample_magnitudes.cu), which becomes at least 2^11 and less than 2^12, or 2^7 and 2^8 for the input of a
// forward pass: activations have outliers, gradients have regions of small numbers.
//
// The step that writes a copy also checks it, by units of numbers that one sum has: of 32 neighbouring pixels of a
// channel (channels innermost: 60) those that one tap meets, if they are several, or a group's channels of a pixel (128
// of them or fewer). A copy is inexact if a number is not finite in float16, or if a unit that is not all zeros has no
// number of at least 2^-13. In an exact copy numbers of 2^-14 and more keep their 11 bits, and the error of smaller
// ones is at most 2^-25: 2^-12 of the largest of their unit, which TF32 rounds by as much. (TF32 is more accurate where
// only numbers below 2^-22 of these are left: if the other operand is zero at the largest numbers of all units, or a
// tap does not meet them, near a border.)
//
// If a copy is inexact, producers of implicit_gemm gather the tensor itself in forward passes (COPIED). Gradients are
// followed by steps that multiply TF32 and overwrite the result; if copies are exact, these return at once (GUARDED).

#pragma once

#include "specialisation.cuh"
#include "core/power_of_two.cuh"
#include "operand/measured.cuh"

struct HalfCopies {
  static constexpr int PARTS_OF_TENSOR = 128;

  unsigned inexact;   // whether a copy is
  float scale[2];     // of each tensor
  Measured measured;  // if a copy measures pixels
  // Bits of the largest magnitude among a part of each tensor's samples.
  alignas(16) unsigned largest[2][PARTS_OF_TENSOR];
};

// The power of two of a tensor whose largest sample has these bits, and becomes at least 2^`exponent`. If there is none
// but zero, others are inexact.
__device__ __forceinline__ float scale_of_samples(unsigned largest, int exponent) {
  return power_of_two(254 + exponent - max((int)(largest >> 23), 26));
}

// What a sum of products of both copies is multiplied by: two normal numbers whose product may be none.
struct Unscaling {
  float factor[2];

  __device__ __forceinline__ Unscaling(const HalfCopies& copies) {
    const int exponent = 254 - exponent_bits(copies.scale[0]) - exponent_bits(copies.scale[1]), half = exponent / 2;
    factor[0] = power_of_two(127 + half), factor[1] = power_of_two(127 + exponent - half);
  }
  __device__ __forceinline__ float of(float sum) const { return sum * factor[0] * factor[1]; }
};

#if GUARDED
#define GUARD_PARAMETER , const HalfCopies* __restrict__ copies
#define RETURN_IF_EXACT \
  if (!copies->inexact) return
#else
#define GUARD_PARAMETER
#define RETURN_IF_EXACT
#endif
