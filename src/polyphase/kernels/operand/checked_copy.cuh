// What kernels share that write checked copies of float32 in float16 (operand/half_copies.cuh).

#pragma once

#include "core/types.cuh"
#include "operand/half_copies.cuh"
#include "ptx/convert.cuh"

typedef Vector<float, 8> EightFloats;
typedef Vector<unsigned, 4> EightHalves;

__device__ __forceinline__ EightHalves halves_of(const EightFloats& values, float scale) {
  EightHalves halves;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    halves.value[i] = f16x2_of_floats(values.value[2 * i] * scale, values.value[2 * i + 1] * scale);
  return halves;
}

// What is found in eight channels: bits 0 and 16 on tell which have a large number, of at least 2^-13, four bits
// further which have any but zero. Several of these are combined by `|`. Sets `inexact` if a number is not finite.
__device__ __forceinline__ unsigned found_in(const EightFloats& values, const EightHalves& halves, bool& inexact) {
  unsigned found = 0, infinite = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Of two halves: sums that reach the sign bit if the magnitude is at least 2^-13, or is infinite.
    const unsigned magnitudes = halves.value[i] & 0x7fff7fffu;
    const unsigned first = __float_as_uint(values.value[2 * i]) << 1;
    const unsigned second = __float_as_uint(values.value[2 * i + 1]) << 1;
    found |= (magnitudes + 0x78007800u >> 15 & 0x00010001u) << i;
    found |= (min(first, 1u) | min(second, 1u) << 16) << i + 4;
    infinite |= magnitudes + 0x04000400u;
  }
  inexact |= (infinite & 0x80008000u) != 0;
  return found;
}
__device__ __forceinline__ unsigned large_in(unsigned found) { return found & 0x000f000fu; }
__device__ __forceinline__ unsigned nonzero_in(unsigned found) { return found >> 4 & 0x000f000fu; }
// Whether a channel has other numbers than zero, but no large one.
__device__ __forceinline__ bool lacks(unsigned found) { return (nonzero_in(found) & ~large_in(found)) != 0; }

// A tensor's power of two, from the parts of its samples; every warp finds it. `input`: of a forward pass.
__device__ __forceinline__ float find_scale(const HalfCopies& copies, int which, bool input) {
  static_assert(HalfCopies::PARTS_OF_TENSOR == 4 * 32, "four parts for each lane");
  const Vector<unsigned, 4> parts = *(const Vector<unsigned, 4>*)(copies.largest[which] + threadIdx.x % 32 * 4);
  unsigned largest = max(max(parts.value[0], parts.value[1]), max(parts.value[2], parts.value[3]));
#pragma unroll
  for (int by = 1; by < 32; by *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, by));
  return scale_of_samples(largest, input ? 7 : 11);
}

// Adds what all threads of a warp have measured to `of_all`.
__device__ __forceinline__ void add_measured(Measured measured, Measured& of_all) {
  measured.take_lanes();
  if (threadIdx.x % 32 > 0) return;
  if (measured.largest > of_all.largest) atomicMax(&of_all.largest, measured.largest);
  if (measured.smallest < of_all.smallest) atomicMin(&of_all.smallest, measured.smallest);
}
