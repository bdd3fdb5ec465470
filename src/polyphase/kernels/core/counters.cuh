// Counters in front of the packed weights, by which blocks share their work (core/tile_scheduler.cuh). Packing sets
// them to zero.

#pragma once

#include "specialisation.cuh"

// Where the weights begin, for the kernel that packs them.
__device__ __forceinline__ unsigned char* clear_counters(unsigned char* packed) {
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i * (int)sizeof(unsigned) < COUNTER_BYTES; i += blockDim.x) ((unsigned*)packed)[i] = 0;
  return packed + COUNTER_BYTES;
}
