// wgmma, Hopper's matrix instruction for a warpgroup: descriptors of its operands in shared memory, and what surrounds
// it. The instruction itself, `wgmma(sums, a, b, add)`, is in wgmma_forms.cuh.

#pragma once

#include "specialisation.cuh"
#include "ptx/wgmma_forms.cuh"

// A matrix descriptor: start address, leading byte offset (LBO), stride byte offset (SBO) and swizzle mode.
//
// PITCH = 16: no swizzle. A row is 16 bytes of each of two chunks; rows are 16 bytes apart, the second chunk is LBO
// behind the first. PITCH = 32, 64, 128: all chunks of a row are neighbours, swizzled within PITCH bytes. Of a
// transposed matrix, as many of whose columns as are PITCH bytes lie in a row, the next columns are LBO behind. Eight
// rows are SBO behind the eight before.
template <int PITCH>
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned address, unsigned lbo,
                                                                unsigned sbo = 8 * PITCH) {
  constexpr unsigned long long swizzle = PITCH == 128 ? 1 : PITCH == 64 ? 2 : PITCH == 32 ? 3 : 0;
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(lbo >> 4) << 16 |
         (unsigned long long)(sbo >> 4) << 32 | swizzle << 62;
}
// The same for rows of `pitch` bytes, 32, 64 or 128. The descriptor of a matrix that begins so many bytes later is a
// sixteenth of them more.
__device__ __forceinline__ unsigned long long swizzled_descriptor(unsigned address, int pitch, unsigned lbo) {
  const unsigned long long swizzle = pitch == 128 ? 1 : pitch == 64 ? 2 : 3;
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(lbo >> 4) << 16 |
         (unsigned long long)(pitch / 2) << 32 | swizzle << 62;
}

#if WGMMA
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#else
__device__ __forceinline__ void wgmma_fence() {}
__device__ __forceinline__ void wgmma_commit() {}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {}
#endif

// Operands of running products stay where they are, and accumulators are not read before.
#if WGMMA
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void pin(unsigned& value) { asm volatile("" : "+r"(value)::"memory"); }
template <class T, int COUNT>
__device__ __forceinline__ void pin(T (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) pin(values[i]);
}
#else
template <class T>
__device__ __forceinline__ void pin(T&) {}
#endif
