// A thread's accumulators, the same for mma.sync and wgmma: of a tile of 16 rows by eight columns element i of four is
// at row `fragment_row()` + i / 2 · 8 and column `fragment_column()` + i % 2; the next four are those of the next eight
// columns.

#pragma once

__device__ __forceinline__ int fragment_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int fragment_column() { return threadIdx.x % 4 * 2; }

template <int TILES, int COUNT, class T = float>
struct Accumulators {
  T of[TILES][COUNT];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < TILES * COUNT; ++i) of[i / COUNT][i % COUNT] = 0;
  }
  // Adds others, or with `begin` is set to them.
  __device__ __forceinline__ void take(const Accumulators& others, bool begin) {
#pragma unroll
    for (int i = 0; i < TILES * COUNT; ++i)
      of[i / COUNT][i % COUNT] = others.of[i / COUNT][i % COUNT] + (begin ? 0 : of[i / COUNT][i % COUNT]);
  }
  // Multiplies all.
  template <class Factor>
  __device__ __forceinline__ void unscale(const Factor& by) {
#pragma unroll
    for (int i = 0; i < TILES * COUNT; ++i) of[i / COUNT][i % COUNT] = by.of(of[i / COUNT][i % COUNT]);
  }
};
