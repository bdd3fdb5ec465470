// Thread block clusters of CLUSTER blocks: barriers and words in another block's shared memory.

#pragma once

#include "specialisation.cuh"
#include "core/shared_address.cuh"
#include "ptx/arch.cuh"
#include "ptx/mbarrier.cuh"

// Whether the block is the first of its cluster; leader_index(): 0, as there is one leader.
__device__ __forceinline__ bool leads_cluster() { return blockIdx.x % CLUSTER == 0; }
__device__ __forceinline__ int leader_index() { return 0; }

// Arrives at the same barrier of another block. (With cluster scope it would wait for all earlier stores.)
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier, int block) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(block)
      : "memory");
}

#if CLUSTER > 1 && BULK_COPY
// Stores a word to another block's shared memory, or to this one's; the barrier there counts its bytes.
__device__ __forceinline__ void st_async(unsigned to, int value, unsigned barrier, int block) {
  asm volatile(
      "{ .reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [barrier]; }" ::"r"(to),
      "r"(value), "r"(barrier), "r"(block)
      : "memory");
}
// Stores a word from the cluster's leader to the same place of all its blocks. Each block's barrier completes with it.
__device__ __forceinline__ void broadcast_word(int* to, int value, const unsigned long long* barrier) {
  if (leads_cluster())
    for (int block = 0; block < CLUSTER; ++block) st_async(shared_address(to), value, shared_address(barrier), block);
}
// The barrier's next phase completes when a word has arrived.
__device__ __forceinline__ void expect_word(const unsigned long long* barrier) {
  mbarrier_expect_tx(shared_address(barrier), sizeof(int));
  mbarrier_arrive(shared_address(barrier));
}
#else
// Without clusters.
__device__ __forceinline__ void broadcast_word(int* to, int value, const unsigned long long* barrier) {
  *(volatile int*)to = value;
  mbarrier_arrive(shared_address(barrier));
}
__device__ __forceinline__ void expect_word(const unsigned long long*) {}
#endif

// Barrier of all threads of the cluster's blocks that have not exited.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
