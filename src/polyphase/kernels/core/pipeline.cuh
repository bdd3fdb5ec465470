// A ring of BUFFERS stages in shared memory: a barrier tells that one is full, another that it is free again.

#pragma once

#include "specialisation.cuh"
#include "core/shared_address.cuh"
#include "ptx/mbarrier.cuh"

struct Ring {
  unsigned long long full[BUFFERS], empty[BUFFERS];

  // By one thread: arrivals that fill a stage, and those that free it.
  __device__ __forceinline__ void init(int fillers, int readers) {
    for (int i = 0; i < BUFFERS; ++i) {
      mbarrier_init(shared_address(full + i), fillers);
      mbarrier_init(shared_address(empty + i), readers);
    }
    fence_mbarrier_init();
  }
};

// A stage's buffer, and the parity of its barriers.
struct Turn {
  int index = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++index == BUFFERS) index = 0, parity ^= 1;
  }
};
