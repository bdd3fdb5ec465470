// A multistage pipeline in shared memory: mbarriers that tell that a stage is full, or empty again, and where a thread
// is.

#pragma once

#include "core/shared_address.cuh"
#include "ptx/mbarrier.cuh"

template <int STAGES>
struct PipelineBarriers {
  unsigned long long full[STAGES], empty[STAGES];

  // By one thread: arrivals that fill a stage, and those that free it.
  __device__ __forceinline__ void init(int producers, int consumers) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared_address(full + i), producers);
      mbarrier_init(shared_address(empty + i), consumers);
    }
    fence_mbarrier_init();
  }
};

// A stage, and the parity of its barriers. RESIDENT: what comes stays, and has a stage of its own.
template <int STAGES, bool RESIDENT = false>
struct PipelineState {
  int index = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++index == STAGES) index = 0, parity ^= RESIDENT ? 0 : 1;
  }
  __device__ __forceinline__ void skip(int count) {
    const int sum = index + count;
    index = sum % STAGES, parity ^= sum / STAGES & 1;
  }
  __device__ __forceinline__ int before() const { return index == 0 ? STAGES - 1 : index - 1; }
};
