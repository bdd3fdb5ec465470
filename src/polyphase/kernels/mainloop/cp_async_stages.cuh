// A multistage pipeline of cp.async in which all threads of a block load, and multiply.

#pragma once

#include "specialisation.cuh"
#include "ptx/cp_async.cuh"

// Stages through BUFFERS buffers of `bytes` each: load(stage, buffer) begins copies that compute(stage, buffer) needs.
// Copies run BUFFERS - 1 stages ahead, each into the buffer that the barrier of the stage before has freed.
template <class Load, class Compute>
__device__ __forceinline__ void run_stages(int stages, char* buffers, int bytes, const Load& load,
                                           const Compute& compute) {
#pragma unroll 1
  for (int stage = 1 - BUFFERS; stage < stages; ++stage) {
    if (stage >= 0) {
      cp_async_wait<BUFFERS - 2>();
      __syncthreads();
    }
    const int ahead = stage + BUFFERS - 1;
    if (ahead < stages) load(ahead, buffers + ahead % BUFFERS * bytes);
    cp_async_commit();
    if (stage >= 0) compute(stage, buffers + stage % BUFFERS * bytes);
  }
}
