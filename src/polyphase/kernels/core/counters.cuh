// Counters in front of the packed weights, by which blocks share their work (core/tile_scheduler.cuh). Packing sets
// them to zero.

#pragma once

#include "specialisation.cuh"

// Returns where the weights begin, after clearing the counters; for the kernel that packs weights.
__device__ __forceinline__ unsigned char* clear_counters(unsigned char* packed) {
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i * (int)sizeof(unsigned) < COUNTER_BYTES; i += blockDim.x) ((unsigned*)packed)[i] = 0;
  return packed + COUNTER_BYTES;
}
