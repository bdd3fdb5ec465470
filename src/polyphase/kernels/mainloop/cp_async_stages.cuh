// A multistage pipeline of cp.async in which all threads of a block load and multiply.

#pragma once

#include "specialisation.cuh"
#include "ptx/cp_async.cuh"

// `k_tiles` K-tiles through STAGES stages of `bytes` each: load(k_tile, memory) starts the copies that compute(k_tile,
// memory) needs. Copies run STAGES - 1 K-tiles ahead, each into the stage that the previous barrier has freed.
template <int STAGES, class Load, class Compute>
__device__ __forceinline__ void run_stages(int k_tiles, char* stage_memory, int bytes, const Load& load,
                                           const Compute& compute) {
#pragma unroll 1
  for (int k_tile = 1 - STAGES; k_tile < k_tiles; ++k_tile) {
    if (k_tile >= 0) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
    }
    const int ahead = k_tile + STAGES - 1;
    if (ahead < k_tiles) load(ahead, stage_memory + ahead % STAGES * bytes);
    cp_async_commit();
    if (k_tile >= 0) compute(k_tile, stage_memory + k_tile % STAGES * bytes);
  }
}
