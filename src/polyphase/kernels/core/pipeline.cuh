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
  // By all lanes of a consumer warp: the stage may be filled again.
  __device__ __forceinline__ void release(int index) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(empty + index));
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

// The consumers' mainloop by wgmma: `add(stage of the pipeline, whether others came before)` issues the products of
// each of `count` stages, and leaves them in flight; a stage is released when the next one's are issued. `finish`
// waits.
template <int STAGES, class Add, class Finish>
__device__ __forceinline__ void consume_stages(int count, PipelineBarriers<STAGES>& ring, PipelineState<STAGES>& state,
                                               Add add, Finish finish) {
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    mbarrier_wait(shared_address(ring.full + state.index), state.parity);
    add(state.index, i > 0);
    if (i > 0) ring.release(before);
    before = state.index;
    state.next();
  }
  finish();
  if (count > 0) ring.release(before);
}
