// What a thread holds of a product on tensor cores. mma.sync and wgmma give it the same places: of 16 rows and eight
// columns number i of four lies in row `fragment_row()` + i / 2 · 8 and in column `fragment_column()` + i % 2; the next
// four are of the next eight columns.

#pragma once

__device__ __forceinline__ int fragment_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int fragment_column() { return threadIdx.x % 4 * 2; }

template <int TILES, int COUNT>
struct Accumulators {
  float of[TILES][COUNT];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < TILES * COUNT; ++i) of[i / COUNT][i % COUNT] = 0;
  }
  // Adds others, or begins with them.
  __device__ __forceinline__ void take(const Accumulators& others, bool begin) {
#pragma unroll
    for (int i = 0; i < TILES * COUNT; ++i)
      of[i / COUNT][i % COUNT] = others.of[i / COUNT][i % COUNT] + (begin ? 0 : of[i / COUNT][i % COUNT]);
  }
};
