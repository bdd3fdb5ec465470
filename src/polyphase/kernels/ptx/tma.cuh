// TMA: bulk copies between global and shared memory, contiguous or boxes of a tensor, issued by one thread. What it
// loads completes an mbarrier, in bytes; what it stores is waited for in groups.

#pragma once

#include "core/shared_address.cuh"
#include "ptx/arch.cuh"
#include "ptx/mbarrier.cuh"

// A descriptor: a tensor of five dimensions, innermost first, and the box of it that is loaded at once (Boxes in
// program/tensor_map.py); encoded by the driver.
struct alignas(64) TensorMap {
  unsigned char encoded[128];
};

#if BULK_COPY
// Contiguous bytes, a multiple of 16; `barrier` is told of them, and completes when they have come.
__device__ __forceinline__ void tma_load_bytes(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  mbarrier_expect_tx(barrier, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same where every block of the cluster loads its part for all of them (multicast).
template <int BLOCKS>
__device__ __forceinline__ void tma_load_bytes_multicast(unsigned to, const void* from, unsigned bytes,
                                                         unsigned barrier) {
  const unsigned part = bytes / BLOCKS, offset = blockIdx.x % BLOCKS * part;
  mbarrier_expect_tx(barrier, bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to + offset),
      "l"((const char*)from + offset), "r"(part), "r"(barrier), "h"((unsigned short)((1 << BLOCKS) - 1))
      : "memory");
}

// The same for a box of `bytes`, whose first element is at the given place of the tensor, a multiple of 16 bytes along
// the innermost dimension; what lies beside the tensor is zero. (The tensor itself is named for those who have no TMA.)
template <class T>
__device__ __forceinline__ void tma_load_box(unsigned to, const TensorMap& map, const T*, const int (&place)[5],
                                             unsigned bytes, unsigned barrier) {
  mbarrier_expect_tx(barrier, bytes);
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(&map), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(place[4]), "r"(barrier)
      : "memory");
}
#endif

// `bytes`, a multiple of 16, from shared to global memory, while the thread goes on.
__device__ __forceinline__ void tma_store_bytes(void* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all that the thread has committed is read from shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
