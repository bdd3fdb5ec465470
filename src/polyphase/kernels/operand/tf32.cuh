// float32 as the tensor cores read it: TF32 keeps 11 significant bits. PARTS = 1 rounds to nearest (the tensor cores
// would truncate); PARTS = 2 keeps what rounding lost in a second TF32, and three products give float32's accuracy.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"
#include "ptx/convert.cuh"

__device__ __forceinline__ float rounded(float value) { return round_tf32(value); }
template <class T>
__device__ __forceinline__ T rounded(T value) {
  return value;
}

// A word as tensor cores read it: one channel, or two neighbouring channels of 16 bits.
__device__ __forceinline__ unsigned word_of(float value, float) { return __float_as_uint(round_tf32(value)); }
template <class T>
__device__ __forceinline__ unsigned word_of(T value, T next) {
  return value.bits | (unsigned)next.bits << 16;
}

__device__ __forceinline__ void split_tf32(float value, float& high, float& low) {
  high = round_tf32(value);
  if (PARTS == 1) return;
  const float magnitude = value < 0 ? -value : value;
  if (magnitude < 3.4e38f)
    low = round_tf32(value - high);
  else if (magnitude <= 3.402823466e38f)
    high = value, low = 0;  // would round to Inf; the tensor cores truncate
  else
    high = 0, low = value;  // Inf meets the other operand's high part alone: the low one may be 0, or of another sign
}

// TF32, or the rounding error of TF32; other types have one part.
__device__ __forceinline__ float part_of(float value, int part) {
  float high = 0, low = 0;
  split_tf32(value, high, low);
  return part == 0 ? high : low;
}
template <class T>
__device__ __forceinline__ T part_of(T value, int) {
  return value;
}

// Writes element `i` of a chunk of weights, in all parts.
template <class T>
__device__ __forceinline__ void prepare(T value, T (&parts)[PARTS][8], int i) {
  parts[0][i] = value;
}
__device__ __forceinline__ void prepare(float value, float16 (&parts)[PARTS][8], int i) {
  const bool all = PARTS == 1 || fabsf(value) <= __uint_as_float(0x7f7fffffu);  // as in split_tf32
  narrow(all ? value : 0.f, parts[0][i]);
  if (PARTS == 2) narrow(value - widen(parts[0][i]), parts[PARTS - 1][i]);
}
__device__ __forceinline__ void prepare(float value, float (&parts)[PARTS][4], int i) {
  float low = 0;
  split_tf32(value, parts[0][i], low);
  if (PARTS == 2) parts[PARTS - 1][i] = low;
}
