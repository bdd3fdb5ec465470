// cp.async: copies 4, 8 or 16 bytes from global to shared memory without registers, from sm_80 on. Each thread waits
// for its own copies, in the groups that it has committed.

#pragma once

#include "core/shared_address.cuh"
#include "core/types.cuh"

// Copies the first `bytes` of BYTES; the others become zero.
template <int BYTES>
__device__ __forceinline__ void cp_async_part(unsigned to, const void* from, int bytes) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes)
                 : "memory");
}
// Copies 16 bytes through L1; zeros if `exists` is false.
__device__ __forceinline__ void cp_async_through_l1(unsigned to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// Copies BYTES; zeros if `exists` is false.
template <int BYTES>
__device__ __forceinline__ void cp_async(unsigned to, const void* from, bool exists) {
  cp_async_part<BYTES>(to, from, exists ? BYTES : 0);
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups are pending.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
