// Copies of single elements or quads from global to shared memory that pass no registers (cp.async, from compute
// capability 8.0 on). Each thread waits for its own, in the groups it has committed.

#pragma once

#include "common/types.cuh"

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

#ifndef EMULATOR

// 16, 8 or 4 bytes from global to shared memory; zeros where `exists` is false.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool exists) {
  const int size = exists ? BYTES : 0;
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#else

template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool exists) {
  typedef Vector<unsigned, BYTES / 4> Bytes;
  emulator::copy_later((Bytes*)__cvta_shared_to_generic(to), exists ? *(const Bytes*)from : Bytes{});
}
__device__ __forceinline__ void copies_commit() { emulator::commit(emulator::Async::copies); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  emulator::wait(emulator::Async::copies, PENDING);
}

#endif
