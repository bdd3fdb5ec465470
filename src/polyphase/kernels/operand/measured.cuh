#pragma once

// Magnitudes of pixels: bits of the largest of all, and of the least nonzero largest of a pixel.
struct Measured {
  unsigned largest = 0, smallest = ~0u;

  __device__ __forceinline__ void take(const Measured& other) {
    largest = max(largest, other.largest), smallest = min(smallest, other.smallest);
  }
  // Combines all lanes of a warp.
  __device__ __forceinline__ void take_lanes() {
#pragma unroll
    for (int by = 1; by < 32; by *= 2)
      take(Measured{__shfl_xor_sync(~0u, largest, by), __shfl_xor_sync(~0u, smallest, by)});
  }
};
