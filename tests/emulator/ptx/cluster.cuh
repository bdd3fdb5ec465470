// A block of a cluster runs alone, and does what the others would do for it: each is a leader, with an index of its
// own.

#pragma once

#include "specialisation.cuh"
#include "core/shared_address.cuh"
#include "ptx/mbarrier.cuh"

inline bool leads_cluster() { return true; }
inline int leader_index() { return blockIdx.x % CLUSTER; }
inline void mbarrier_arrive_cluster(unsigned barrier, int) { mbarrier_arrive(barrier); }
inline void broadcast_word(int* to, int value, const unsigned long long* barrier) {
  *(volatile int*)to = value;
  mbarrier_arrive(shared_address(barrier));
}
inline void expect_word(const unsigned long long*) {}
inline void cluster_sync() {}
