// Copies the weights unchanged, after counters: for kernels with a dynamic tile scheduler that need no packed weights.

#include "specialisation.cuh"
#include "core/counters.cuh"
#include "core/geometry.cuh"
#include "core/types.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int ELEMENTS = GROUPS * IN_CHANNELS * OUT_CHANNELS * TAPS;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    copy_weights(const scalar_t* __restrict__ weight, unsigned char* __restrict__ packed) {
  griddepcontrol_launch_dependents();
  scalar_t* const to = (scalar_t*)clear_counters(packed);
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < ELEMENTS) to[i] = weight[i];
}
