// TMA: bulk copies between global and shared memory, contiguous or boxes of a tensor, issued by one thread. Loads
// complete an mbarrier, which counts their bytes; stores are waited for in groups.

#pragma once

#include "core/shared_address.cuh"
#include "ptx/arch.cuh"
#include "ptx/mbarrier.cuh"

// A tensor map: a tensor of five dimensions, innermost first, and the box of one load (program/tensor_map.py); encoded
// by the driver (jit/encode_tensor_map.py).
struct alignas(64) TensorMap {
  unsigned char encoded[128];
};

#if BULK_COPY
// Loads contiguous bytes, a multiple of 16; `barrier` expects them, and completes when they have arrived.
__device__ __forceinline__ void tma_load_bytes(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  mbarrier_expect_tx(barrier, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same with multicast: every block of the cluster loads its part for all blocks.
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

// Loads a box of `bytes`, whose first element is at the given place of the tensor, a multiple of 16 bytes along the
// innermost dimension; elements outside the tensor are zero. (The tensor's address is for the twin on the host, which
// has no TMA.)
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

// Stores `bytes`, a multiple of 16, from shared to global memory, asynchronously.
__device__ __forceinline__ void tma_store_bytes(void* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all committed stores of the thread have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
