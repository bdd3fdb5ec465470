// wgmma, Hopper's matrix instruction for a warpgroup: matrix descriptors, fence, commit and wait. The instruction
// itself, `wgmma(sums, a, b, add)`, is in wgmma_forms.cuh.

#pragma once

#include "specialisation.cuh"
#include "ptx/wgmma_forms.cuh"

// A matrix descriptor: start address, leading byte offset (LBO), stride byte offset (SBO) and swizzle mode.
//
// PITCH = 16: no swizzle. A row is 16 bytes of each of two chunks; rows are 16 bytes apart, and LBO is the distance
// from the first chunk to the second. PITCH = 32, 64, 128: the chunks of a row are contiguous, swizzled within PITCH
// bytes. A row of a transposed matrix holds PITCH bytes of columns, and LBO is the distance to the next columns. SBO is
// the distance from eight rows to the next eight.
template <int PITCH>
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned address, unsigned lbo,
                                                                unsigned sbo = 8 * PITCH) {
  constexpr unsigned long long swizzle = PITCH == 128 ? 1 : PITCH == 64 ? 2 : PITCH == 32 ? 3 : 0;
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(lbo >> 4) << 16 |
         (unsigned long long)(sbo >> 4) << 32 | swizzle << 62;
}
// The same for rows of `pitch` bytes, 32, 64 or 128. The descriptor of a matrix that begins n bytes later is n / 16
// more.
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

// Keeps the compiler from moving registers of running wgmmas, or reading accumulators early.
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
