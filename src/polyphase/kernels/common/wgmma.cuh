// Hopper's matrix instruction: what surrounds it. The specialisation has the instruction itself.

#pragma once

#include "specialisation.cuh"
#include "common/wgmma_forms.cuh"

// Ordinary writes to shared memory are seen by the tensor cores and the copy engine after this.
#if __CUDA_ARCH__ >= 900 && !defined(EMULATOR)
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
__device__ __forceinline__ void publish_shared() {}
#endif

#if WGMMA && !defined(EMULATOR)
// A matrix whose rows are 16 bytes of each of two chunks: PITCH bytes apart, and the second chunk `chunk_bytes` behind
// the first; with more than 16 of PITCH all chunks of a row are neighbours, whose order the copy engine has changed.
// Of a transposed matrix, 64 of whose columns are the 128 bytes of PITCH, the next 64 are `chunk_bytes` behind. Eight
// rows are `eight_bytes` behind the eight before.
template <int PITCH>
__device__ __forceinline__ unsigned long long describe_matrix(unsigned address, unsigned chunk_bytes,
                                                              unsigned eight_bytes = 8 * PITCH) {
  constexpr unsigned long long swizzle = PITCH == 128 ? 1 : PITCH == 64 ? 2 : PITCH == 32 ? 3 : 0;
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(chunk_bytes >> 4) << 16 |
         (unsigned long long)(eight_bytes >> 4) << 32 | swizzle << 62;
}
// The same of rows of `pitch` bytes, 32, 64 or 128, whose chunks are all neighbours. One that begins so many bytes
// later is described by a sixteenth of them more.
__device__ __forceinline__ unsigned long long describe_rows(unsigned address, int pitch, unsigned chunk_bytes) {
  const unsigned long long swizzle = pitch == 128 ? 1 : pitch == 64 ? 2 : 3;
  return (unsigned long long)((address & 0x3ffff) >> 4) | (unsigned long long)(chunk_bytes >> 4) << 16 |
         (unsigned long long)(pitch / 2) << 32 | swizzle << 62;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#elif WGMMA
// The four warps of a group are one: when the products of one are done, so are those of all.
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_commit() { emulator::commit(emulator::Async::products); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  emulator::wait(emulator::Async::products, PENDING);
  emulator::threads_sync(16 + threadIdx.x / 128, 128);
}
#else
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_commit() {}
template <int PENDING>
__device__ __forceinline__ void products_wait() {}
#endif

// Operands of products that run stay where they are, and what comes of them is not read before.
#if WGMMA && !defined(EMULATOR)
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
