// A multistage pipeline in shared memory: full and empty mbarriers of each stage, and a thread's position in it.

#pragma once

#include "core/shared_address.cuh"
#include "ptx/mbarrier.cuh"

template <int STAGES>
struct PipelineBarriers {
  unsigned long long full[STAGES], empty[STAGES];

  // Called by one thread. `producers`, `consumers`: arrivals that fill a stage, and that free it.
  __device__ __forceinline__ void init(int producers, int consumers) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared_address(full + i), producers);
      mbarrier_init(shared_address(empty + i), consumers);
    }
    fence_mbarrier_init();
  }
  // Called by all lanes of a consumer warp: the stage may be filled again.
  __device__ __forceinline__ void release(int index) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(empty + index));
  }
};

// A stage, and the parity of its barriers. RESIDENT: every K-tile has a stage of its own, which is never refilled.
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

// The consumers' mainloop by wgmma: each of `count` stages has `products(stage of the pipeline)` products, and
// `add(stage of the pipeline, product, whether others came before)` issues one and leaves it in flight. A stage is
// released when the next one's first product is issued. `finish` waits.
template <int STAGES, class Products, class Add, class Finish>
__device__ __forceinline__ void consume_stages(int count, PipelineBarriers<STAGES>& ring, PipelineState<STAGES>& state,
                                               Products products, Add add, Finish finish) {
  int before = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    mbarrier_wait(shared_address(ring.full + state.index), state.parity);
    add(state.index, 0, i > 0);
    if (i > 0) ring.release(before);
    const int more = products(state.index);
#pragma unroll 1
    for (int product = 1; product < more; ++product) add(state.index, product, true);
    before = state.index;
    state.next();
  }
  finish();
  if (count > 0) ring.release(before);
}
// The same with one product for each stage.
template <int STAGES, class Add, class Finish>
__device__ __forceinline__ void consume_stages(int count, PipelineBarriers<STAGES>& ring, PipelineState<STAGES>& state,
                                               Add add, Finish finish) {
  consume_stages(
      count, ring, state, [](int) { return 1; }, [&](int stage, int, bool more) { add(stage, more); }, finish);
}
